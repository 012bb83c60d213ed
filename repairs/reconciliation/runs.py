"""The record of a sweep: it begins once, is written with every page, and finishes once (A13).

One run of a kind at a time is kept by a unique index, so that two beats, two loops or two people do the work once. A
run that was killed stands in the way of the next one only until its heartbeat is two minutes old; then that one closes
it as ``run_abandoned`` and begins. Were the old one alive after all, its next page would find its run closed, and be
undone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from django.db import IntegrityError, transaction
from django.db.models import F

from grants import audit
from grants.access import SYSTEM_CAPABILITY, Capability, authorise
from grants.actions import Action
from grants.operators import SYSTEM, Operator, OperatorKind
from grants.resources import ANY, Resource
from grants.service import service
from opsconsole.core.database import database_now, is_unique_violation, locked
from opsconsole.core.errors import InvalidInput
from repairs.errors import ReconciliationFinished, ReconciliationRunning
from repairs.models import ReconciliationRun, RunState
from repairs.reconciliation.kinds import kind_named

STARTED = "operations.reconciliation_started"
FINISHED = "operations.reconciliation_finished"
ABANDONED_AFTER = timedelta(minutes=2)
MOST_ROWS = 200
ABANDONED = "run_abandoned"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBegun:
    """The run that a request has begun, or, as a replay, the one that the first request of its key began."""

    run_id: UUID
    idempotent_replay: bool = False


class _Replay(Exception):
    def __init__(self, run_id: UUID) -> None:
        self.run_id = run_id


@service
def begin_run(*, kind: str, by: Operator, key: str | None = None, limit: int | None = None) -> RunBegun:
    """Begin a run of ``kind``; who runs it pages through its parts and finishes it.

    A person takes ``reconciliation.run`` for every tenant, for that is what a sweep touches; their request has a
    ``key`` and leaves a receipt. ``limit`` (1 to 200) is how many rows each part may look at; without one, time alone
    ends a run. Raises ``ReconciliationKindInvalid``, ``ReconciliationKindUnknown``, ``InvalidInput``, ``AccessDenied``,
    ``ReconciliationRunning`` or ``IdempotencyKeyReused``.
    """
    name = kind_named(kind).name
    if limit is not None and not 1 <= limit <= MOST_ROWS:
        raise InvalidInput(detail=f"The limit is 1 to {MOST_ROWS}.", field="limit")
    scope = Resource(tenant=ANY, target_type="reconciliation_run", target_id=name)
    capability = authorise(by, Action.RECONCILIATION_RUN, scope)
    digest = audit.request_digest({"kind": name, "limit": limit})
    now = database_now()
    close_abandoned(name, now)
    try:
        # The insert is the lock: whoever comes second waits here for the first, and then finds its receipt or its run.
        with transaction.atomic():
            run = _insert(name, by, limit, now)
            _refuse_replay(by, key, scope, digest)
    except _Replay as replay:
        return RunBegun(run_id=replay.run_id, idempotent_replay=True)
    except IntegrityError as error:
        if not is_unique_violation(error):
            raise
        try:
            _refuse_replay(by, key, scope, digest)
        except _Replay as replay:
            return RunBegun(run_id=replay.run_id, idempotent_replay=True)
        raise ReconciliationRunning(kind=name) from None
    if by.kind is not OperatorKind.SYSTEM:
        _record_start(run, by, capability, scope, key=key, digest=digest)
    return RunBegun(run_id=run.id)


def _insert(kind: str, by: Operator, limit: int | None, now: datetime) -> ReconciliationRun:
    run: ReconciliationRun = ReconciliationRun.objects.create(
        kind=kind,
        state=RunState.RUNNING,
        row_limit=limit,
        started_by=by.ref,
        started_by_name=by.name,
        started_at=now,
        heartbeat_at=now,
        cursor=_last_cursor(kind),
    )
    return run


def _last_cursor(kind: str) -> str:
    """Return where the newest run of this kind stopped looking."""
    newest = ReconciliationRun.objects.filter(kind=kind).newest_first().values_list("cursor", flat=True).first()
    return newest or ""


def _refuse_replay(by: Operator, key: str | None, scope: Resource, digest: str) -> None:
    if key is None:
        return
    receipt = audit.replayed(
        key=key, action=STARTED, operator=by, target_type=scope.target_type, target_id=scope.target_id, digest=digest
    )
    if receipt is not None:
        raise _Replay(UUID(json.loads(receipt.outcome)["run"]))


def _record_start(
    run: ReconciliationRun, by: Operator, capability: Capability, scope: Resource, *, key: str | None, digest: str
) -> None:
    audit.record(
        action=STARTED,
        operator=by,
        resource=scope,
        capability=capability,
        outcome={"kind": run.kind, "limit": run.row_limit, "run": str(run.id)},
        key=key,
        digest=digest,
        at=run.started_at,
    )


def close_abandoned(kind: str, now: datetime) -> int:
    """Close the run of ``kind`` that has given no sign of life for two minutes, and return how many that were."""
    dead = ReconciliationRun.objects.running().filter(kind=kind, heartbeat_at__lt=now - ABANDONED_AFTER)
    return dead.update(
        state=RunState.FAILED,
        finished_at=now,
        error_code=ABANDONED,
        error_text="It was killed, or has hung: for two minutes it gave no sign of life. What it had done stays done.",
    )


def note_page(
    run_id: UUID, *, scanned: int, repaired: int, skipped: int, incidents: int, cursor: str, now: datetime
) -> None:
    """Add a page's counts to its run, in the page's own transaction; raises ``ReconciliationFinished`` to undo it.

    ``incidents`` is the number so far.
    """
    still = ReconciliationRun.objects.running().filter(id=run_id)
    if not still.update(
        scanned_count=F("scanned_count") + scanned,
        repaired_count=F("repaired_count") + repaired,
        skipped_count=F("skipped_count") + skipped,
        incident_count=incidents,
        heartbeat_at=now,
        cursor=cursor,
    ):
        raise ReconciliationFinished


@service
def finish_run(*, run_id: UUID, error_code: str = "", error_text: str = "") -> ReconciliationRun:
    """Finish a running run, once: ``partial`` if there was an error and something had been repaired (A13).

    What it has changed, or that it has failed, stands in the audit trail. Raises ``ReconciliationFinished``.
    """
    run: ReconciliationRun | None = locked(ReconciliationRun.objects.running().filter(id=run_id)).first()
    if run is None:
        raise ReconciliationFinished
    if not error_code:
        run.state = RunState.SUCCEEDED
    else:
        run.state = RunState.PARTIAL if run.repaired_count else RunState.FAILED
    run.error_code, run.error_text = error_code[:64], error_text[:2_000]
    run.finished_at = run.heartbeat_at = database_now()
    run.save(update_fields=["state", "error_code", "error_text", "finished_at", "heartbeat_at"])
    if run.repaired_count or error_code:
        _record_end(run)
    return run


def _record_end(run: ReconciliationRun) -> None:
    entry = audit.AuditEntry(
        action=FINISHED,
        operator=SYSTEM,
        capability=SYSTEM_CAPABILITY,
        resource=run.resource,
        outcome={
            "errorCode": run.error_code,
            "incidents": run.incident_count,
            "kind": run.kind,
            "repaired": run.repaired_count,
            "scanned": run.scanned_count,
            "skipped": run.skipped_count,
            "state": str(run.state),
        },
        key=f"reconciliation:{run.id}",
    )
    audit.record_many([entry], at=run.finished_at)
