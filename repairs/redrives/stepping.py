"""One step of a redrive: learn how what was sent has ended, judge whether to go on, and plan what may go out next.

A step is one transaction that holds the redrive's row, so that the counts are true at every moment, a kill at any place
leaves either all of a step or nothing of it, and whoever pauses or cancels waits for one step at most. Locks are taken
in the one order: redrive, incidents, letters, repairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from uuid import UUID

from django.db.models import Exists, OuterRef

from grants import audit
from grants.access import SYSTEM_CAPABILITY
from grants.audit import AuditEntry
from grants.operators import SYSTEM
from grants.service import service
from opsconsole.core.canonical_json import JsonValue
from opsconsole.core.database import AnyOf, database_now
from opsconsole.core.safe_text import safe_text
from repairs.models import (
    REDRIVE_ACTIVE,
    ActionState,
    ItemState,
    Redrive,
    RedriveClass,
    RedriveItem,
    RedriveState,
)
from repairs.redrives.planning import ItemResult, plan_items
from repairs.redrives.requests import LONGEST_REASON, AnswerKind, RedriveAnswer, unpack_answers
from repairs.redrives.sql import first_waiting, write_results

LEASE = timedelta(seconds=15)
"""How long a controller that was killed keeps the others from a redrive."""
SETTLED_AT_ONCE = 2_000
PLANNED_AT_ONCE = 500
LEAST_JUDGED = 10
"""Answers before which the stop ratio says nothing."""
CANARY_FAILED = "canary_failed"
TOO_MANY_FAILED = "too_many_failed"
EARLIER_FAILED = "earlier_job_failed"
FINISHED = "redrive.finished"
PAUSED = "redrive.paused"
SAVED = (
    "state", "waiting_count", "outstanding_count", "succeeded_count", "failed_count", "skipped_count",
    "cancelled_count", "is_prepared", "canary_passed_at", "pause_code", "pause_text", "paused_by_name", "paused_at",
    "ended_at", "run_settled", "next_due_at", "lease_owner", "lease_expires_at",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """What one step has done. ``probes`` are items whose provider is to be asked before they are planned."""

    settled: int = 0
    planned: int = 0
    state: str = ""
    probes: tuple[int, ...] = field(default=())


@service
def step_redrive(*, redrive_id: UUID, owner: str, size: int = PLANNED_AT_ONCE) -> Stepped | None:
    """Do one step of a redrive, or return ``None`` if another controller has it."""
    redrive = Redrive.objects.lock(redrive_id)
    now = database_now()
    is_held = redrive.lease_expires_at is not None and redrive.lease_expires_at > now
    if is_held and redrive.lease_owner != owner:
        return None
    redrive.lease_owner, redrive.lease_expires_at = owner, now + LEASE
    settled = _settle(redrive, now)
    planned = 0
    probes: tuple[int, ...] = ()
    if redrive.state in REDRIVE_ACTIVE:
        if not redrive.is_prepared:
            _prepare(redrive, now)
        _judge(redrive, now)
    if redrive.state in REDRIVE_ACTIVE and (count := _allowance(redrive, now, size)):
        outcome = plan_items(redrive, count, now)
        planned, probes = outcome.planned, outcome.probes
        _spend(redrive, planned, now)
        note_results(redrive, outcome.results, now)
        if outcome.pause_code:
            pause(redrive, outcome.pause_code, outcome.pause_text, now)
    is_open = redrive.state in REDRIVE_ACTIVE or redrive.state == RedriveState.PAUSED
    if is_open and not redrive.waiting_count and not redrive.outstanding_count:
        _finish(redrive, now)
    redrive.save(update_fields=SAVED)
    return Stepped(settled=settled, planned=planned, state=str(redrive.state), probes=probes)


@service
def pause_by_itself(*, redrive_ids: Iterable[UUID], code: str, text: str, began_at: datetime | None = None) -> int:
    """Pause those of these redrives that run, because something is wrong; only a person lets them go on.

    ``began_at`` is when it began to be wrong: what a person has let go on since then is left alone. Returns how many.
    """
    count = 0
    for redrive_id in sorted(set(redrive_ids)):
        redrive = Redrive.objects.lock(redrive_id)
        is_later = began_at is not None and redrive.run_since is not None and redrive.run_since > began_at
        if redrive.state not in REDRIVE_ACTIVE or is_later:
            continue
        pause(redrive, code, text, database_now())
        redrive.save(update_fields=SAVED)
        count += 1
    return count


def pause(redrive: Redrive, code: str, text: str, now: datetime) -> None:
    """Pause a locked redrive by itself, with its audit row; the caller saves it."""
    redrive.state, redrive.pause_code, redrive.pause_text = RedriveState.PAUSED, code, safe_text(text, LONGEST_REASON)
    redrive.paused_by_name, redrive.paused_at = "", now  # its code says why; a name is a person's
    outcome: dict[str, JsonValue] = {"code": code, "jobs": redrive.total_count, "state": str(redrive.state)}
    _tell(redrive, PAUSED, f"redrive-paused:{redrive.id}:{now.isoformat()}", outcome, now)


def _finish(redrive: Redrive, now: datetime) -> None:
    redrive.state, redrive.ended_at = RedriveState.FINISHED, now
    redrive.pause_code = redrive.pause_text = ""
    outcome: dict[str, JsonValue] = {
        "cancelled": redrive.cancelled_count,
        "failed": redrive.failed_count,
        "jobs": redrive.total_count,
        "skipped": redrive.skipped_count,
        "state": str(redrive.state),
        "succeeded": redrive.succeeded_count,
    }
    _tell(redrive, FINISHED, f"redrive-finished:{redrive.id}", outcome, now)


def _tell(redrive: Redrive, action: str, key: str, outcome: Mapping[str, JsonValue], now: datetime) -> None:
    entry = AuditEntry(
        action=action,
        operator=SYSTEM,
        capability=SYSTEM_CAPABILITY,
        resource=redrive.resource,
        key=key,
        outcome=outcome,
    )
    audit.record_many([entry], at=now)


# -- before the first job goes out -------------------------------------------------------------------------------------


def _prepare(redrive: Redrive, now: datetime) -> None:
    """Leave out what no answer lets run, and mark those that wait for an earlier one of their actor.

    Set by set, however many items there are: there are about as many sets as classes.
    """
    answers = unpack_answers(redrive.answers)
    waiting = RedriveItem.objects.filter(redrive=redrive, state=ItemState.WAITING)
    for item_class, concerns in list(waiting.order_by().values_list("item_class", "concerns").distinct()):
        code = left_out_as(item_class, concerns, answers)
        if not code:
            continue
        alike = waiting.filter(item_class=item_class, concerns=concerns)
        count = alike.update(state=ItemState.SKIPPED, code=code, settled_at=now)
        redrive.waiting_count -= count
        redrive.skipped_count += count
    earlier = RedriveItem.objects.filter(
        redrive_id=OuterRef("redrive_id"),
        actor_type=OuterRef("actor_type"),
        actor_id=OuterRef("actor_id"),
        state=ItemState.WAITING,
        position__lt=OuterRef("position"),
    ).exclude(actor_id="")
    waiting.exclude(actor_id="").filter(Exists(earlier)).update(is_behind=True)
    redrive.is_prepared = True


def left_out_as(item_class: str, concerns: str, answers: dict[str, RedriveAnswer]) -> str:
    """Return the code under which jobs of such a class are left out; "" if they run, or are closed as done."""
    if not concerns:
        return "" if item_class == RedriveClass.SAFE else item_class
    named = concerns.split(",")
    if any(answers[name].kind is AnswerKind.ALREADY_HAPPENED for name in named if name in answers):
        # It does not run, so nothing else has to be answered.
        return ""
    return next((name for name in named if name not in answers), "")


# -- what was sent -----------------------------------------------------------------------------------------------------


_ENDED = {
    ActionState.SUCCEEDED: ItemState.SUCCEEDED,
    ActionState.FAILED: ItemState.FAILED,
    ActionState.CANCELLED: ItemState.CANCELLED,
}


def _settle(redrive: Redrive, now: datetime) -> int:
    """Give the items of repairs that have ended their results; returns how many."""
    if not redrive.outstanding_count:
        return 0
    rows = (
        RedriveItem.objects.filter(redrive=redrive, state=ItemState.PLANNED, repair__state__in=tuple(_ENDED))
        .order_by("position")
        .values_list("id", "actor_type", "actor_id", "repair__state", "repair__error_code", "repair__error_text")
    )
    results = []
    for item_id, actor_type, actor_id, repair_state, error_code, error_text in rows[:SETTLED_AT_ONCE]:
        state = _ENDED[ActionState(repair_state)]
        code = {ItemState.FAILED: error_code or "failed", ItemState.CANCELLED: "repair_cancelled"}.get(state, "")
        results.append(
            ItemResult(
                item_id=item_id,
                actor=(actor_type, actor_id),
                state=state,
                code=code,
                detail=error_text[:300] if state is ItemState.FAILED else "",
            )
        )
    redrive.outstanding_count -= len(results)
    redrive.waiting_count += len(results)
    note_results(redrive, results, now)
    return len(results)


def note_results(redrive: Redrive, results: Sequence[ItemResult], now: datetime) -> None:
    """Write results of items that are counted as waiting, and let go or leave out those behind them."""
    if not results:
        return
    write_results([(one.item_id, one.state.value, one.code, one.detail, one.repair_id) for one in results], now)
    redrive.waiting_count -= len(results)
    for one in results:
        name = f"{one.state.value}_count"
        setattr(redrive, name, getattr(redrive, name) + 1)
        if one.state is ItemState.SUCCEEDED and one.repair_id is not None:
            # Closed as done without a run: it says nothing of how the others will fare, neither as a canary.
            redrive.run_settled += 1
    failed = {one.actor for one in results if one.state is ItemState.FAILED and one.actor[1]}
    for actor_type, actor_id in sorted(failed):
        # What comes after it may build on it: in order means that it does not run.
        behind = RedriveItem.objects.filter(
            redrive=redrive, state=ItemState.WAITING, actor_type=actor_type, actor_id=actor_id
        )
        count = behind.update(state=ItemState.SKIPPED, code=EARLIER_FAILED, settled_at=now, is_behind=False)
        redrive.waiting_count -= count
        redrive.skipped_count += count
    others = {one.actor for one in results if one.actor[1]} - failed
    let_go = first_waiting(redrive.id, sorted(others))
    if let_go:
        RedriveItem.objects.filter(AnyOf("id", let_go), state=ItemState.WAITING).update(is_behind=False)


# -- going on ----------------------------------------------------------------------------------------------------------


def _judge(redrive: Redrive, now: datetime) -> None:
    """Pause where too much has failed, and let the rest go once the canary has succeeded."""
    failed = redrive.failed_count - redrive.run_failed
    answered = redrive.settled_count - redrive.run_settled
    if redrive.state == RedriveState.CANARY:
        if failed:
            pause(redrive, CANARY_FAILED, f"{failed} of the first {redrive.canary_size} failed.", now)
            return
        is_sent = not _canary_left(redrive) or not redrive.waiting_count
        if is_sent and not redrive.outstanding_count:
            redrive.state, redrive.canary_passed_at = RedriveState.RUNNING, now
    stop = redrive.stop_percent
    if stop is not None and answered >= LEAST_JUDGED and failed * 100 > stop * answered:
        pause(redrive, TOO_MANY_FAILED, f"{failed} of {answered} failed, which is more than {stop} %.", now)


def _canary_left(redrive: Redrive) -> int:
    """Return how many are still to be sent before the rest may follow; until then every one sent is of the canary."""
    answered = redrive.settled_count - redrive.run_settled
    return max(redrive.canary_size - redrive.outstanding_count - answered, 0)


def _allowance(redrive: Redrive, now: datetime, size: int) -> int:
    """Return how many may be planned now, by the rate, by what is outstanding, and as long as it is a canary."""
    free = redrive.max_outstanding - redrive.outstanding_count
    if redrive.state == RedriveState.CANARY:
        free = min(free, _canary_left(redrive))
    due = redrive.next_due_at or now
    # What was not used is not saved up for longer than a second: a pause must not end in a burst.
    saved = min((now - due).total_seconds(), _longest_saved(redrive))
    by_rate = int(saved * redrive.rate_per_second + 1e-6)
    return max(min(free, by_rate, size, redrive.waiting_count), 0)


def _longest_saved(redrive: Redrive) -> float:
    return max(1.0, 1.0 / redrive.rate_per_second)


def _spend(redrive: Redrive, planned: int, now: datetime) -> None:
    """Move the moment from which the rate counts by what has been planned."""
    earliest = now - timedelta(seconds=_longest_saved(redrive))
    begin = max(redrive.next_due_at or now, earliest)
    redrive.next_due_at = begin + timedelta(seconds=planned / redrive.rate_per_second)
