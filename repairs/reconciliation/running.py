"""Running a sweep: begin, part after part, finish; for beat, the loop, the API and the button alike."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

from django.db import Error

from grants.operators import SYSTEM, Operator
from opsconsole.core.database import database_now
from opsconsole.core.errors import OpsError
from opsconsole.core.safe_text import safe_text
from repairs.errors import ReconciliationFinished, ReconciliationRunning
from repairs.models import ReconciliationRun
from repairs.reconciliation.grace import read_reachable
from repairs.reconciliation.runs import MOST_ROWS, begin_run, finish_run
from repairs.reconciliation.sweeping import Sweeping
from repairs.reconciliation.sweeps import PARTS

logger = logging.getLogger(__name__)

SCHEDULED_SECONDS = 300.0
"""A run by schedule ends after this long; whatever is left is the next one's, which begins where it ended."""
ASKED_SECONDS = 20.0
"""A run that somebody waits for."""
FAILED = "sweep_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMutation:
    """A run that was asked for, as it is now; as a replay, the one that the first request of its key began."""

    run: ReconciliationRun
    idempotent_replay: bool = False


def run_now(*, kind: str, by: Operator, key: str, limit: int | None = None) -> RunMutation:
    """Run a sweep for somebody who waits for it: each part looks at ``limit`` rows at most (1 to 200, usually 200).

    Raises what ``begin_run`` raises.
    """
    begun = begin_run(kind=kind, by=by, key=key, limit=MOST_ROWS if limit is None else limit)
    if not begun.idempotent_replay:
        _sweep(begun.run_id, most_seconds=ASKED_SECONDS)
    return RunMutation(run=ReconciliationRun.objects.get(id=begun.run_id), idempotent_replay=begun.idempotent_replay)


def run_scheduled(
    kind: str, *, limit: int | None = None, is_stopping: Callable[[], bool] = lambda: False
) -> ReconciliationRun | None:
    """Run a sweep as the system: ``None`` if one of this kind is running, which with two beats is as it should be."""
    try:
        begun = begin_run(kind=kind, by=SYSTEM, limit=limit)
    except ReconciliationRunning as refusal:
        logger.debug("%s", refusal.detail)
        return None
    _sweep(begun.run_id, most_seconds=SCHEDULED_SECONDS, is_stopping=is_stopping)
    run: ReconciliationRun = ReconciliationRun.objects.get(id=begun.run_id)
    return run


def _sweep(run_id: UUID, *, most_seconds: float, is_stopping: Callable[[], bool] = lambda: False) -> None:
    """Run every part of a begun run and finish it; an error in one part leaves the others their turn."""
    run = ReconciliationRun.objects.get(id=run_id)
    sweeping = Sweeping(
        run,
        reachable=read_reachable(database_now()),
        most_seconds=most_seconds,
        is_stopping=is_stopping,
    )
    code = text = ""
    for part in PARTS[run.kind]:
        sweeping.begin_part()
        try:
            part(sweeping)
        except ReconciliationFinished:
            # It was taken for dead and closed; what it had not committed is undone.
            logger.warning("the sweep %s of %s was closed while it ran", run.id, run.kind)
            return
        except Exception as error:
            logger.exception("a part of the sweep %s of %s failed", run.id, run.kind)
            if not code:
                code, text = _told(error)
    if sweeping.has_waited:
        ReconciliationRun.objects.filter(id=run.id).update(waited_since=sweeping.reachable.since)
    try:
        finish_run(run_id=run.id, error_code=code, error_text=text)
    except ReconciliationFinished:
        logger.warning("the sweep %s of %s was closed before it could finish", run.id, run.kind)


def _told(error: Exception) -> tuple[str, str]:
    """Return the code and the sentence that a run keeps of what ended a part of it."""
    if isinstance(error, OpsError):
        return error.code, safe_text(error.detail, 2_000)
    return "database_error" if isinstance(error, Error) else FAILED, safe_text(
        f"{type(error).__name__}: {error}", 2_000
    )
