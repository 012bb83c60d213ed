"""Running one attempt at a ledger job: claim, body, settle. A task never writes ``dead``: it raises instead."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from copy import copy
from typing import Any
from uuid import UUID

from celery.exceptions import Ignore, Retry
from django.db import Error, InterfaceError, OperationalError, connection

from opsconsole.core.database import is_about_the_statement
from opsconsole.core.effects import Effects, OutcomeClass
from opsconsole.jobs import ledger
from opsconsole.jobs.errors import JobError, LeaseLost, NotClaimed, Refused, TryAgain, Unanswered
from opsconsole.jobs.heart import HEART
from opsconsole.jobs.kept import KEPT
from opsconsole.jobs.kind import Kind, Work
from opsconsole.jobs.ledger import Death, decide_death
from opsconsole.jobs.models import Job

logger = logging.getLogger(__name__)

SETTLE_FOR_SECONDS = 60.0
"""A body that is done waits so long for a database that is away before its outcome is left to the recorder."""
HARMLESS = (Effects.NONE, Effects.IDEMPOTENT)


def run_job(*, job_id: UUID, token: str, owner: str, kind: Kind) -> None:
    """Run one attempt of the job whose message this process has.

    Raises ``Ignore`` for an old message, ``Retry`` when the ledger has put the job off (Celery publishes nothing; the
    attempt is recorded with its error), and the body's own error when there is no further attempt: that one becomes the
    dead letter.
    """
    job = _patiently(lambda: ledger.claim(job_id=job_id, token=token, owner=owner, kind=kind))
    if job is None:
        logger.info("passed over an old message of job %s", job_id)
        raise Ignore(NotClaimed(f"job {job_id} has another lease, or has ended"))
    HEART.watch(job, kind)
    try:
        try:
            result = kind.run(_work(job, token, kind))
        except LeaseLost as lost:
            raise Retry(exc=lost) from lost
        except Exception as error:
            _put_off(job, kind, error)
            raise
        _succeed(job, kind, result)
    finally:
        HEART.forget(token)


def _work(job: Job, token: str, kind: Kind) -> Work:
    def heartbeat() -> None:
        if HEART.is_lost(token) or not ledger.renew(copy(job), kind):
            raise LeaseLost(f"job {job.id} has another lease by now")

    return Work(
        job_id=job.id,
        tenant=job.tenant,
        payload=json.loads(job.payload),
        record_id=job.record_id,
        attempt=job.attempts,
        max_attempts=job.max_attempts,
        heartbeat=heartbeat,
        token=token,
    )


def _succeed(job: Job, kind: Kind, result: Any) -> None:
    try:
        _patiently(lambda: ledger.succeed(job, kind, result))
    except LeaseLost as lost:
        # Too late: refused, and kept as an attempt with this error (C12).
        raise Retry(exc=lost) from lost


def judge(kind: Kind, error: BaseException) -> tuple[OutcomeClass, str]:
    """Return whether an attempt that ended with ``error`` may have taken effect, and why."""
    name = type(error).__name__
    if isinstance(error, TryAgain | Refused):
        return OutcomeClass.SAFE, f"{name} is declared safe: nothing has happened when it is raised."
    if kind.effects in HARMLESS:
        return OutcomeClass.SAFE, "Running it again does no harm."
    if isinstance(error, Unanswered):
        return OutcomeClass.AMBIGUOUS, "The request was sent and no answer came."
    return OutcomeClass.AMBIGUOUS, f"The job has effects outside, and {name} is not declared safe."


def code_of(error: BaseException) -> str:
    """Return the stable code under which the ledger keeps an attempt's error."""
    return error.code if isinstance(error, JobError) else "unexpected_error"


def _put_off(job: Job, kind: Kind, error: Exception) -> None:
    """Put the job off and raise ``Retry``, or return if there is no further attempt."""
    outcome, reason = judge(kind, error)
    death = decide_death(
        job, kind, token=job.lease_token, outcome=outcome, refused=isinstance(error, Refused), never_started=False
    )
    if death is not Death.AGAIN:
        return
    try:
        delay = _patiently(
            lambda: ledger.put_off(
                job,
                kind,
                code=code_of(error),
                text=f"{type(error).__name__}: {error}",
                outcome=outcome,
                reason=reason,
                after=error.after if isinstance(error, TryAgain) else None,
            )
        )
    except LeaseLost as lost:
        raise Retry(exc=lost) from error
    raise Retry(exc=error, when=delay.total_seconds()) from error


def _patiently(write: Callable[[], Any]) -> Any:
    """Do one guarded write, again while the database is away.

    A write whose answer was lost is not done twice: it is guarded by token and state, and the second one finds its own
    work done. That reads as a lost lease, which is why an attempt may be kept as late although it was not.
    """
    until = time.monotonic() + SETTLE_FOR_SECONDS
    pause = 0.5
    while True:
        try:
            return write()
        except (OperationalError, InterfaceError) as error:
            if is_about_the_statement(error) or time.monotonic() + pause > until:
                raise
            logger.error("the ledger cannot be written: %s: %s", type(error).__name__, error)
            _let_go()
            time.sleep(pause)
            pause = min(pause * 2, 5.0)


def _let_go() -> None:
    for close in (connection.close, KEPT.close):
        try:
            close()
        except Error as error:
            logger.warning("the connection cannot be closed: %s", error)
