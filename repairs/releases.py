"""Sending on what a hold has put aside: a redrive of its messages, oldest first, like any other."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Exists, OuterRef

from deadletters.errors import HoldNotFound
from deadletters.holds import held_letters
from deadletters.models import Hold, LetterState
from deadletters.querysets import DeadLetterQuerySet
from deadletters.services import check_hold_version
from grants import audit
from grants.access import authorise
from grants.actions import Action
from grants.models import AuditEvent
from grants.operators import Operator
from grants.resources import Resource
from grants.service import service
from grants.targets import authorise_target
from opsconsole.core.errors import InvalidInput
from repairs.errors import RedriveEmpty, SelectionDrifted
from repairs.models import ItemState, Redrive, RedriveItem
from repairs.redrives.judging import judge_page
from repairs.redrives.requests import LONGEST_REASON, RedrivePace
from repairs.redrives.services import AT_ONCE, RedriveMutation, freeze_redrive

HOLD_RELEASED = "holds.released"
MOST_PLACES = 50
"""Tenants and sources of one hold that one request sends on; the next request sends on the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldRelease:
    """What a request to send on has made: one redrive for each tenant and source of what the hold had put aside."""

    hold_id: UUID
    redrives: tuple[RedriveMutation, ...]
    event_id: UUID | None = None
    idempotent_replay: bool = False

    @property
    def total(self) -> int:
        """Messages in all of them."""
        return sum(one.total for one in self.redrives)


def release_hold(
    *,
    hold_id: UUID,
    by: Operator,
    key: str,
    expected_count: int | None = None,
    pace: RedrivePace | None = None,
    reason: str = "",
    version: int | None = None,
) -> HoldRelease:
    """Freeze what a hold has put aside as a redrive, with its dry run; nothing is sent before that is started (C14).

    The hold goes on as it is: end it first if new messages are to run at once. Needs ``dead-letters.hold`` on the hold
    and on the tenants of what it has put aside, which is also what it takes to start it. ``expected_count`` is how many
    messages the operator was shown. Raises ``HoldNotFound``, ``AccessDenied``, ``HoldChanged``, ``SelectionDrifted``,
    ``RedriveEmpty``, ``RedriveExists``, ``RedriveInvalid`` or ``IdempotencyKeyReused``.
    """
    made = _release(
        hold_id=hold_id, by=by, key=key, expected_count=expected_count, pace=pace or RedrivePace(), reason=reason,
        version=version,
    )  # fmt: skip
    if made.idempotent_replay:
        return made
    for one in made.redrives:
        while one.total <= AT_ONCE and judge_page(redrive_id=one.redrive_id):
            pass
    return replace(made, redrives=_as_they_are(made.redrives))


@service
def _release(
    *,
    hold_id: UUID,
    by: Operator,
    key: str,
    expected_count: int | None,
    pace: RedrivePace,
    reason: str,
    version: int | None,
) -> HoldRelease:
    pace.check()
    if len(reason) > LONGEST_REASON or "\x00" in reason:
        raise InvalidInput(detail=f"The reason has at most {LONGEST_REASON} characters.", field="reason")
    capability = authorise_target(by, Action.DEAD_LETTERS_HOLD, Hold.objects.scope(hold_id), HoldNotFound())
    digest = audit.request_digest({"expected_count": expected_count, "pace": asdict(pace), "reason": reason})
    replay = _replayed(hold_id, by=by, key=key, digest=digest)
    if replay is not None:
        return replay
    held = held_letters(Hold.objects.get(id=hold_id))
    found = held.count()
    if expected_count is not None and found != expected_count:
        raise SelectionDrifted(expected=expected_count, found=found)
    made = []
    places = _places(held)
    for tenant, source in places:
        resource = Resource(tenant=tenant)
        made.append(
            freeze_redrive(
                held.filter(tenant=tenant, source=source), by=by, key=f"{key}:{tenant}:{source}", digest=digest,
                capability=authorise(by, Action.DEAD_LETTERS_HOLD, resource), resource=resource, source=source,
                selection={"hold": str(hold_id)}, pace=pace, reason=reason, letter_state=str(LetterState.HELD),
                action=Action.DEAD_LETTERS_HOLD,
            )
        )  # fmt: skip
    total = sum(one.total for one in made)
    if expected_count is not None and total > expected_count:
        raise SelectionDrifted(expected=expected_count, found=total)  # put aside while they were frozen
    # After the letters that the items point to: whoever puts messages aside locks those before the hold.
    hold = Hold.objects.lock(hold_id)
    # Of two with one key at once, the second has waited for the redrive of the first.
    replay = _replayed(hold_id, by=by, key=key, digest=digest)
    if replay is not None:
        # It may have found other places than the first, which sent on those of the request.
        transaction.set_rollback(True)
        return replay
    check_hold_version(hold, version)
    hold.release(redrive_id=made[0].redrive_id, at=hold.locked_at)
    outcome: dict[str, Any] = {
        "hold": str(hold_id),
        "letters": total,
        "redrives": [str(one.redrive_id) for one in made],
        "state": str(hold.state),
    }
    event = audit.record(
        action=HOLD_RELEASED, operator=by, resource=hold.resource, capability=capability, outcome=outcome,
        reason=reason, key=key, digest=digest, at=hold.locked_at,
    )  # fmt: skip
    return HoldRelease(hold_id=hold_id, redrives=tuple(made), event_id=event.id)


def _places(held: DeadLetterQuerySet) -> list[tuple[str, str]]:
    """Return the tenants and sources of which a hold has put aside what nobody sends on yet.

    If there are none, one is returned all the same whose redrive says so. Raises ``RedriveEmpty``.
    """
    sent_on = RedriveItem.objects.filter(letter=OuterRef("pk"), state__in=(ItemState.WAITING, ItemState.PLANNED))
    for letters in (held.filter(~Exists(sent_on)), held):
        rows = letters.order_by("tenant", "source").values_list("tenant", "source").distinct()
        if places := list(rows[:MOST_PLACES]):
            return places
    raise RedriveEmpty


def _replayed(hold_id: UUID, *, by: Operator, key: str, digest: str) -> HoldRelease | None:
    receipt: AuditEvent | None = audit.replayed(
        key=key, action=HOLD_RELEASED, operator=by, target_type="hold", target_id=str(hold_id), digest=digest
    )
    if receipt is None:
        return None
    ids = [UUID(text) for text in json.loads(receipt.outcome)["redrives"]]
    made = tuple(RedriveMutation(redrive_id=one, state="", total=0) for one in ids)
    return HoldRelease(hold_id=hold_id, redrives=_as_they_are(made), event_id=receipt.id, idempotent_replay=True)


def _as_they_are(made: tuple[RedriveMutation, ...]) -> tuple[RedriveMutation, ...]:
    """Return the redrives with their state by now; one that retention has removed is left out."""
    rows = Redrive.objects.filter(id__in=[one.redrive_id for one in made]).values_list("id", "state", "total_count")
    found = {row_id: (str(state), total) for row_id, state, total in rows}
    return tuple(
        replace(one, state=found[one.redrive_id][0], total=found[one.redrive_id][1])
        for one in made
        if one.redrive_id in found
    )
