"""What a person does to messages that have not run: put them aside, and stop doing so.

Sending on what was put aside is a repair, and lives in the app above.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from deadletters.errors import HoldChanged, HoldEndInvalid, HoldInvalid, HoldNotActive, HoldNotFound, TooManyHolds
from deadletters.models import Hold, HoldState
from grants import audit
from grants.access import SYSTEM_CAPABILITY, Capability, authorise
from grants.actions import Action
from grants.errors import IdempotencyKeyReused
from grants.models import AuditEvent
from grants.operators import SYSTEM, Operator
from grants.resources import ANY
from grants.service import service
from grants.targets import authorise_target
from opsconsole.core.canonical_json import JsonValue
from opsconsole.core.database import database_now
from opsconsole.core.ids import new_id
from opsconsole.core.search import is_storable, is_text
from opsconsole.jobs.tokens import job_id_of, job_type_of

HOLD_PLACED = "holds.placed"
HOLD_EXTENDED = "holds.extended"
HOLD_ENDED = "holds.ended"
HOLD_EXPIRED = "holds.expired"
LONGEST_HOLD = timedelta(days=7)
MOST_HOLDS = 500
_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldTarget:
    """Which messages to put aside: those in which every named part is the same; "" names none.

    ``tenant`` and ``source`` are ``*`` for every one. ``task_id`` is also the id of a job of the ledger.
    ``payload_hash`` is what ``deadletters.holds.payload_hash_of`` says of a letter, and needs its ``job_type``.
    """

    tenant: str
    source: str = ANY
    job_type: str = ""
    queue: str = ""
    task_id: str = ""
    payload_hash: str = ""

    def checked(self) -> HoldTarget:
        """Return it as it is stored; raises ``HoldInvalid`` naming what makes no sense."""
        columns: Any = {field.name: field for field in Hold._meta.get_fields()}
        for name, value in asdict(self).items():
            if len(value) > columns[name].max_length or (value and not is_storable(value)):
                raise HoldInvalid(detail=f"{name} has at most {columns[name].max_length} characters, and no NUL.")
            if value == ANY and name not in ("tenant", "source"):
                raise HoldInvalid(detail=f"{name} names one, or is left out for every one.")
        if not self.tenant or not self.source:
            raise HoldInvalid(detail="tenant and source name one, or * for every one.")
        if not (self.job_type or self.queue or self.task_id):
            raise HoldInvalid(detail="Name a task, a queue or a task id.")
        if self.payload_hash and not (self.job_type and _HASH.fullmatch(self.payload_hash)):
            raise HoldInvalid(detail="A payload is named by the 64 digits of its hash, together with its task.")
        of_ledger = job_id_of(self.task_id)
        return HoldTarget(
            tenant=self.tenant,
            source=self.source,
            # As letters and messages of the ledger's jobs have them: by kind, and by the job for all its dispatches.
            job_type=job_type_of(self.job_type),
            queue=self.queue,
            task_id=str(of_ledger) if of_ledger is not None else self.task_id,
            payload_hash=self.payload_hash,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldMutation:
    """What a request did to a hold, or, as a replay, what the first one of its key did."""

    hold_id: UUID
    state: str
    ends_at: datetime
    letter_count: int
    event_id: UUID | None = None
    idempotent_replay: bool = False

    @classmethod
    def from_receipt(cls, receipt: AuditEvent) -> HoldMutation:
        stored = json.loads(receipt.outcome)
        return cls(
            hold_id=UUID(stored["hold"]),
            state=stored["state"],
            ends_at=datetime.fromisoformat(stored["endsAt"]),
            letter_count=stored["letters"],
            event_id=receipt.id,
            idempotent_replay=True,
        )


def place_hold(*, target: HoldTarget, reason: str, ends_at: datetime, by: Operator, key: str) -> HoldMutation:
    """Put matching messages aside before they run, until ``ends_at`` (aware, at most a week ahead).

    Workers learn of it within seconds. ``reason`` is 1 to 500 characters (B4). A target of every tenant needs a
    capability over every tenant. Raises ``AccessDenied``, ``HoldInvalid``, ``HoldEndInvalid``, ``ReasonInvalid``,
    ``TooManyHolds`` or ``IdempotencyKeyReused``.
    """
    try:
        return _place_hold(target=target, reason=reason, ends_at=ends_at, by=by, key=key)
    except IdempotencyKeyReused:
        # Two with one key at once: the row of the first is there by now, and tells whether it was the same request.
        return _place_hold(target=target, reason=reason, ends_at=ends_at, by=by, key=key)


@service
def _place_hold(*, target: HoldTarget, reason: str, ends_at: datetime, by: Operator, key: str) -> HoldMutation:
    target, why = target.checked(), _validate_reason(reason)
    hold = Hold(id=new_id(), **asdict(target), reason=why, placed_by=by.ref, placed_by_name=by.name, ends_at=ends_at)
    capability = authorise(by, Action.DEAD_LETTERS_HOLD, hold.resource)
    digest = audit.request_digest({**asdict(target), "reason": why, "ends_at": ends_at})
    receipt = audit.replayed_creation(key=key, action=HOLD_PLACED, operator=by, target_type="hold", digest=digest)
    if receipt is not None:
        return HoldMutation.from_receipt(receipt)
    now = database_now()
    _check_end(ends_at, now)
    if Hold.objects.filter(state=HoldState.ACTIVE).count() >= MOST_HOLDS:
        raise TooManyHolds(most=MOST_HOLDS)
    hold.placed_at = now
    hold.save(force_insert=True)
    return _record(hold, HOLD_PLACED, by=by, capability=capability, key=key, digest=digest, reason=why, at=now)


@service
def extend_hold(
    *, hold_id: UUID, ends_at: datetime, reason: str, by: Operator, key: str, version: int | None = None
) -> HoldMutation:
    """Move the end of a hold that is in force, forth or back; at most a week ahead of now.

    Locks the hold. Raises ``HoldNotFound``, ``AccessDenied``, ``HoldChanged``, ``HoldNotActive``, ``HoldEndInvalid``,
    ``ReasonInvalid`` or ``IdempotencyKeyReused``.
    """
    why = _validate_reason(reason)
    digest = audit.request_digest({"reason": why, "ends_at": ends_at})
    hold, capability, receipt = _begin(hold_id, HOLD_EXTENDED, by=by, key=key, digest=digest)
    if receipt is not None:
        return HoldMutation.from_receipt(receipt)
    check_hold_version(hold, version)
    _refuse_unless_active(hold)
    _check_end(ends_at, hold.locked_at)
    hold.extend(until=ends_at)
    return _record(
        hold, HOLD_EXTENDED, by=by, capability=capability, key=key, digest=digest, reason=why, at=hold.locked_at
    )


@service
def end_hold(*, hold_id: UUID, reason: str, by: Operator, key: str, version: int | None = None) -> HoldMutation:
    """Stop holding; what was put aside stays so until it is sent on.

    Workers learn of it within seconds. Locks the hold. Raises what ``extend_hold`` raises, but ``HoldEndInvalid``.
    """
    why = _validate_reason(reason)
    digest = audit.request_digest({"reason": why})
    hold, capability, receipt = _begin(hold_id, HOLD_ENDED, by=by, key=key, digest=digest)
    if receipt is not None:
        return HoldMutation.from_receipt(receipt)
    check_hold_version(hold, version)
    _refuse_unless_active(hold)
    hold.end(state=HoldState.ENDED, by=by.ref, name=by.name, at=hold.locked_at)
    return _record(
        hold, HOLD_ENDED, by=by, capability=capability, key=key, digest=digest, reason=why, at=hold.locked_at
    )


@service
def expire_hold(*, hold_id: UUID) -> bool:
    """Note that a hold's time is over, which its workers have seen by themselves; returns whether it was not noted yet.

    System work, by whoever sees it first; locks the hold.
    """
    return note_expired(hold_id)


def note_expired(hold_id: UUID) -> bool:
    """Do what ``expire_hold`` does, in the caller's transaction."""
    try:
        hold = Hold.objects.lock(hold_id)
    except Hold.DoesNotExist:
        return False
    if hold.state != HoldState.ACTIVE or hold.ends_at > hold.locked_at:
        return False
    hold.end(state=HoldState.EXPIRED, by=SYSTEM.ref, name=SYSTEM.name, at=hold.locked_at)
    _record(
        hold, HOLD_EXPIRED, by=SYSTEM, capability=SYSTEM_CAPABILITY, key=f"hold-expired:{hold.id}", digest="",
        reason="", at=hold.locked_at,
    )  # fmt: skip
    return True


def _begin(
    hold_id: UUID, action: str, *, by: Operator, key: str, digest: str
) -> tuple[Hold, Capability, AuditEvent | None]:
    """Authorise, lock, and look whether this very request was made before."""
    capability = authorise_target(by, Action.DEAD_LETTERS_HOLD, Hold.objects.scope(hold_id), HoldNotFound())
    try:
        hold = Hold.objects.lock(hold_id)
    except Hold.DoesNotExist:
        raise HoldNotFound from None
    receipt = audit.replayed(
        key=key, action=action, operator=by, target_type="hold", target_id=str(hold_id), digest=digest
    )
    return hold, capability, receipt


def check_hold_version(hold: Hold, version: int | None) -> None:
    """Refuse if the caller looked at an older version; raises ``HoldChanged`` with the current one."""
    if version is not None and version != hold.version:
        raise HoldChanged(current={"state": str(hold.state), "version": hold.version})


def _refuse_unless_active(hold: Hold) -> None:
    if hold.state != HoldState.ACTIVE:
        raise HoldNotActive(state=str(hold.state))
    if hold.ends_at <= hold.locked_at:
        raise HoldNotActive(state=str(HoldState.EXPIRED))


def _check_end(ends_at: datetime, now: datetime) -> None:
    if ends_at.tzinfo is None or not now < ends_at <= now + LONGEST_HOLD:
        raise HoldEndInvalid(days=LONGEST_HOLD.days)


def _validate_reason(reason: str) -> str:
    why = audit.validate_reason(reason)
    if not is_text(why):
        raise HoldInvalid(detail="The reason holds a character that cannot be stored.")
    return why


def _record(
    hold: Hold, what: str, *, by: Operator, capability: Capability, key: str, digest: str, reason: str, at: datetime
) -> HoldMutation:
    outcome: dict[str, JsonValue] = {
        "hold": str(hold.id),
        "state": str(hold.state),
        "endsAt": hold.ends_at.isoformat(),
        "letters": hold.letter_count,
        "tenant": hold.tenant,
        "source": hold.source,
        "jobType": hold.job_type,
        "queue": hold.queue,
        "taskId": hold.task_id,
        "payloadHash": hold.payload_hash,
    }
    event = audit.record(
        action=what, operator=by, resource=hold.resource, capability=capability, outcome=outcome, reason=reason,
        key=key, digest=digest, at=at,
    )  # fmt: skip
    return HoldMutation(
        hold_id=hold.id,
        state=str(hold.state),
        ends_at=hold.ends_at,
        letter_count=hold.letter_count,
        event_id=event.id,
    )
