"""Repairs that are not sent, and repairs that are not answered."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from enum import StrEnum
from uuid import UUID

from django.db.models import Q

from deadletters.locking import LetterMoved, lock_letter
from deadletters.models import JournalFolder, WorkerNode
from grants import audit
from grants.access import SYSTEM_CAPABILITY
from grants.operators import SYSTEM
from opsconsole.core.canonical_json import canonical_json
from opsconsole.core.database import AnyOf, locked
from opsconsole.core.ids import new_id
from repairs.guard import holder_of
from repairs.models import ActionState, ActionType, RepairAction, SweepActionType, SweepRepair
from repairs.reconciliation.sweeping import Sweeping
from repairs.settling import give_up_repair
from repairs.sql import beyond, record_repairs

SEND_WITHIN = timedelta(minutes=2)
"""A live relay takes a due repair within a second; while a broker refuses, it puts it off by half a minute at most."""
HOST_IS_GONE_AFTER = timedelta(minutes=5)
GIVEN_UP = "repairs.no_answer"
LOOKED_AT = 200
"""Started repairs that are read at once, before each that is given up has a transaction of its own."""


class Verdict(StrEnum):
    """What a sweep does about one repair."""

    RELEASE = "release"  # its sender is gone: whoever comes first sends it
    GIVE_UP = "give_up"  # nobody will answer for it any more
    WAIT = "wait"  # it is late, and shown as such


# Not sent


def decide_unsent(action: RepairAction, now: datetime) -> Verdict:
    """Say what is done about a planned repair that is overdue: an expired lease is taken from it. Pure."""
    held = action.lease_expires_at is not None
    return Verdict.RELEASE if held and action.lease_expires_at <= now else Verdict.WAIT  # type: ignore[operator]


def unsent(sweeping: Sweeping) -> None:
    """Free planned repairs whose sender died, so that the next relay takes them, and count the others that are overdue.

    One that is overdue without a lease waits for a worker of its source, which no sweep can start. What it can get
    wrong: a sender that hangs for longer than its lease sends after somebody else did; the start guard lets one begin.
    """
    last: tuple[datetime, UUID] | None = None
    while size := sweeping.size():
        with sweeping.page() as tally:
            late = Q(lease_expires_at__lte=tally.now) | Q(
                lease_expires_at__isnull=True, due_at__lte=tally.now - SEND_WITHIN
            )
            planned = RepairAction.objects.filter(
                late, state=ActionState.PLANNED, action_type=ActionType.RETRY_MESSAGE, due_at__lte=tally.now
            ).only("due_at", "tenant", "incident_id", "lease_owner", "lease_expires_at")
            found: list[RepairAction] = list(beyond(planned, ("due_at", "id"), last)[:size])
            sweeping.incidents.update(action.incident_id for action in found)
            stale = [action for action in found if decide_unsent(action, tally.now) is Verdict.RELEASE]
            tally.add(scanned=len(found), repaired=_release(stale, sweeping, tally.now))
        if len(found) < size:
            return
        last = (found[-1].due_at, found[-1].id)


def _release(stale: list[RepairAction], sweeping: Sweeping, now: datetime) -> int:
    if not stale:
        return 0
    held = RepairAction.objects.filter(
        AnyOf("id", [action.id for action in stale]), state=ActionState.PLANNED, lease_expires_at__lte=now
    )
    # Locked before they are recorded: a relay that takes one just now has it, and nothing was released.
    still = {action.id: action for action in locked(held, skip=True)}
    rows = [
        SweepRepair(
            id=new_id(),
            run_id=sweeping.run_id,
            tenant=action.tenant,
            action_type=SweepActionType.RELEASE_SEND_LEASE,
            entity_type="repair_action",
            entity_id=str(action.id),
            operation_key=f"unsent-repair:{action.id}:{action.lease_expires_at.isoformat()}",
            before=canonical_json({"leaseExpiresAt": action.lease_expires_at.isoformat(), "owner": action.lease_owner}),
            after=canonical_json({"leaseExpiresAt": None}),
            planned_by=sweeping.started_by,
            applied_at=now,
        )
        for action in still.values()
    ]
    new = record_repairs(rows)
    ids = [row.entity_id for row in rows if row.operation_key in new]
    return held.filter(AnyOf("id", [UUID(one) for one in ids])).update(lease_owner="", lease_expires_at=None)


# Not answered


def decide_unanswered(
    action: RepairAction, *, is_overdue: bool, holder_seen_at: datetime | None, is_recovering: bool, now: datetime
) -> Verdict:
    """Say what is done about a repair that was sent or has started and has not answered. Pure.

    One that has started is given up once its worker has been silent for five minutes (``holder_seen_at`` ``None``:
    nothing is known of it) and no other worker of its host is at the journal that it left (``is_recovering``). A
    message that has not started may still lie in its queue, and a worker that is alive may still be at it.
    """
    if action.state != ActionState.STARTED or is_recovering:
        return Verdict.WAIT
    if holder_seen_at is not None and holder_seen_at > now - HOST_IS_GONE_AFTER:
        return Verdict.WAIT
    started = action.started_at or action.planned_at
    return Verdict.GIVE_UP if is_overdue or started <= now - HOST_IS_GONE_AFTER else Verdict.WAIT


def unanswered(sweeping: Sweeping) -> None:
    """Give up started repairs whose worker never came back, and count those whose answer is only overdue.

    Each that is given up is a transaction of its own, with the locks in their order: incident, letter, repair. Its
    letter is open again and may already have happened. What it can get wrong: a worker that was cut off for five
    minutes and has succeeded; its journal says so once it is back, and closes the letter as overtaken.
    """
    for ids in _pages_of_waiting(sweeping):
        for repair_id in ids:
            with sweeping.page() as tally:
                tally.add(scanned=1, repaired=int(_give_up(repair_id, sweeping, tally.now)))
            if not sweeping.size():
                return


def _pages_of_waiting(sweeping: Sweeping) -> Iterator[list[UUID]]:
    """Yield ids of repairs to look at: first those that are overdue, then what else has started on a silent worker."""
    last: UUID | None = None
    while size := sweeping.size(LOOKED_AT):
        with sweeping.page() as tally:
            gone = _silent_holders(tally.now)
            if not sweeping.may_judge(HOST_IS_GONE_AFTER, tally.now):
                sweeping.has_waited |= bool(gone)
                gone = []
            late = Q(answer_due_at__lte=tally.now, state__in=(ActionState.SENT, ActionState.STARTED))
            left = Q(state=ActionState.STARTED) & _held_by(gone)
            waiting = RepairAction.objects.filter(late | left).only("id", "incident_id")
            found: list[RepairAction] = list(beyond(waiting, ("id",), None if last is None else (last,))[:size])
            sweeping.incidents.update(action.incident_id for action in found)
        if found:
            yield [action.id for action in found]
        if len(found) < size:
            return
        last = found[-1].id


def _silent_holders(now: datetime) -> list[str]:
    """Return the holders of started repairs whose worker is not known to be alive."""
    started = RepairAction.objects.filter(state=ActionState.STARTED).exclude(claim_holder="")
    nodes = {_node_of(holder) for holder in started.values_list("claim_holder", flat=True).distinct()}
    alive = set(
        WorkerNode.objects.filter(
            AnyOf("id", nodes), seen_at__gt=now - HOST_IS_GONE_AFTER, stopped_at__isnull=True
        ).values_list("id", flat=True)
    )
    return sorted(nodes - alive)


def _held_by(nodes: list[str]) -> Q:
    condition = Q(pk__in=())
    for node in nodes:
        condition |= Q(claim_holder__startswith=f"{node}/")
    return condition


def _node_of(claim_holder: str) -> str:
    return holder_of(claim_holder).partition("/")[0]


def _give_up(repair_id: UUID, sweeping: Sweeping, now: datetime) -> bool:
    """Look at one repair again under its locks, and give it up if it is to be; returns whether it was."""
    known = RepairAction.objects.filter(id=repair_id).only("letter_id", "claim_holder", "answer_due_at").first()
    if known is None or not sweeping.may_judge(HOST_IS_GONE_AFTER, now):
        return False
    try:
        incident, letter = lock_letter(known.letter_id)
    except LetterMoved:
        return False
    action = RepairAction.objects.lock(repair_id)
    node = _node_of(action.claim_holder)
    reported = WorkerNode.objects.filter(id=node).values_list("seen_at", "stopped_at").first()
    seen_at = None if reported is None or reported[1] is not None else reported[0]
    verdict = decide_unanswered(
        action,
        is_overdue=action.answer_due_at is not None and action.answer_due_at <= incident.locked_at,
        holder_seen_at=seen_at,
        is_recovering=_is_being_recovered(node, incident.locked_at),
        now=incident.locked_at,
    )
    if verdict is not Verdict.GIVE_UP:
        return False
    key = f"no-answer:{action.id}:{action.claim_retries}"
    row = SweepRepair(
        id=new_id(),
        run_id=sweeping.run_id,
        tenant=action.tenant,
        action_type=SweepActionType.GIVE_UP_REPAIR,
        entity_type="repair_action",
        entity_id=str(action.id),
        operation_key=key,
        before=canonical_json({"holder": action.claim_holder, "state": str(action.state)}),
        after=canonical_json({"code": "no_answer", "state": "failed"}),
        planned_by=sweeping.started_by,
        applied_at=incident.locked_at,
    )
    if not record_repairs([row]):
        return False
    give_up_repair(
        action, letter, incident, text="Its worker has not reported for five minutes, and nobody knows how it ended."
    )
    audit.record_many(
        [
            audit.AuditEntry(
                action=GIVEN_UP,
                operator=SYSTEM,
                capability=SYSTEM_CAPABILITY,
                resource=letter.resource,
                key=key,
                outcome={"holder": action.claim_holder, "repair": str(action.id), "run": str(sweeping.run_id)},
            )
        ],
        at=incident.locked_at,
    )
    return True


def _is_being_recovered(node: str, now: datetime) -> bool:
    """Say whether somebody reads the journal that a worker left: its offsets have moved within the five minutes."""
    return JournalFolder.objects.filter(
        name=node, closed_at__isnull=True, changed_at__gt=now - HOST_IS_GONE_AFTER
    ).exists()
