"""From a page of failed deliveries to rows: letters for most, and for jobs of the ledger what their ledger says.

A ledger job's delivery that ended badly is its letter only if nothing else becomes of the job. While it may be tried
again by itself the job is put back and the attempt kept; if the job has another lease by now, the delivery is late and
only kept (C12). A letter, its job and the record that the job works on change in one transaction (A3, A6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol
from uuid import UUID

from django.db import transaction

from deadletters.intake import Failure, HostClock, Intake
from deadletters.journal.events import Caught, Delivery, Ended, Failed
from deadletters.models import Attempt
from deadletters.recorder import Recorded, record_failures, without_repeats
from opsconsole.core.database import AnyOf, RowWriter
from opsconsole.core.ids import new_id
from opsconsole.jobs import ledger
from opsconsole.jobs.errors import Refused, qualified
from opsconsole.jobs.kind import Kind
from opsconsole.jobs.kinds import kind_named
from opsconsole.jobs.ledger import Death
from opsconsole.jobs.models import Job, JobState
from opsconsole.jobs.tokens import job_id_of

PLANS_AT_MOST = 5
REFUSED = qualified(Refused)
NOT_TAKEN = frozenset({Caught.UNKNOWN, Caught.REJECTED_MESSAGE, Caught.EXPIRED})
"""A worker has said that it cannot run this message: sent again, it would say so again."""


class Settlement(Protocol):
    """What the repairs app does with what the journal says of its deliveries; given to the drainer, never imported."""

    def letters_of(self, deliveries: Iterable[Delivery]) -> Mapping[str, UUID]: ...

    def letters_of_repairs(self, repair_ids: Iterable[UUID]) -> Mapping[UUID, UUID]: ...

    def is_settled_elsewhere(self, failed: Failed) -> bool: ...

    def failed(self, recorded: Iterable[Recorded], now: datetime) -> None: ...

    def ended(self, ended: Ended) -> None: ...


class JobMoved(Exception):
    """A job of the ledger changed between the look and the lock; look again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Died:
    """A failed delivery of a ledger job, and what it means."""

    failure: Failure
    job: Job
    kind: Kind
    death: Death


def record_page(
    page: list[Failed], *, intake_of: Callable[[Failed], tuple[Intake, str]], clock: HostClock, settlement: Settlement
) -> list[Recorded]:
    """Record failed deliveries and say what became of those that are letters; each exactly once.

    ``intake_of`` gives for each what it is to be prepared with, and the boot id of its host.
    """
    repairs = [failed.delivery for failed in page if failed.delivery.repair_id]
    letters = settlement.letters_of(repairs) if repairs else {}
    plain = [failed for failed in page if job_id_of(failed.delivery.task_id) is None]
    rows = []
    for failed in plain:
        intake, boot = intake_of(failed)
        rows.append(intake.failure(failed, clock=clock, boot_id=boot, letter_id=letters.get(failed.delivery.token)))
    recorded = _record(rows, {}, settlement if letters else None, clock.database_now)
    if len(plain) < len(page):
        of_ledger = [failed for failed in page if job_id_of(failed.delivery.task_id) is not None]
        recorded += _record_ledger_jobs(of_ledger, intake_of, clock, settlement)
    return recorded


def _record(
    rows: list[Failure], died: Mapping[str, _Died], settlement: Settlement | None, now: datetime
) -> list[Recorded]:
    """Record failures, and bury the jobs of the ledger among them (``died``, by token)."""
    recorded: list[Recorded] = []
    for part in without_repeats(rows):
        with transaction.atomic():
            of_part = record_failures(part, now=now)
            if settlement is not None:
                settlement.failed((item for item in of_part if item.is_new_occurrence), now)
            for failure in sorted(part, key=lambda failure: failure.job_id):
                if failure.task_id in died:
                    _bury(died[failure.task_id], now)
            recorded += of_part
    return recorded


def _bury(one: _Died, now: datetime) -> None:
    text = f"{one.failure.error_class}: {one.failure.error_text}"
    if not ledger.bury(one.job.id, one.kind, token=one.job.lease_token, text=text, now=now):
        raise JobMoved(str(one.job.id))


def _record_ledger_jobs(
    page: list[Failed], intake_of: Callable[[Failed], tuple[Intake, str]], clock: HostClock, settlement: Settlement
) -> list[Recorded]:
    for attempt in range(PLANS_AT_MOST):
        try:
            return _record_as_planned(page, intake_of, clock, settlement)
        except JobMoved:
            if attempt == PLANS_AT_MOST - 1:
                raise
    return []


def _record_as_planned(
    page: list[Failed], intake_of: Callable[[Failed], tuple[Intake, str]], clock: HostClock, settlement: Settlement
) -> list[Recorded]:
    now = clock.database_now
    jobs = _jobs_of(page)
    repaired = settlement.letters_of_repairs({job.repair_id for job in jobs.values() if job.repair_id is not None})
    letters: list[Failure] = []
    died: dict[str, _Died] = {}
    for failed in page:
        intake, boot = intake_of(failed)
        job = jobs.get(failed.delivery.task_id)
        if job is None:
            # Its row was lost or has been deleted: a letter like any other's, so that somebody learns of it.
            letters.append(intake.failure(failed, clock=clock, boot_id=boot))
            continue
        letter_id = repaired.get(job.repair_id) if job.repair_id is not None else None
        failure = intake.failure(failed, clock=clock, boot_id=boot, letter_id=letter_id, job=job)
        one = _decide(failed, failure, job)
        if one.death is Death.FINAL:
            letters.append(failure)
            died[failure.task_id] = one
        elif job.state == JobState.DEAD and job.lease_token == failure.task_id:
            # Recorded before, and the answer was lost on its way: the recorder finds its occurrence.
            letters.append(failure)
        else:
            _put_back(one)
    return _record(letters, died, settlement, now)


def _jobs_of(page: list[Failed]) -> dict[str, Job]:
    """Return the ledger's row of each of these deliveries that has one, by the delivery's task id."""
    ids = {failed.delivery.task_id: job_id_of(failed.delivery.task_id) for failed in page}
    rows = {job.id: job for job in Job.objects.filter(AnyOf("id", {job_id for job_id in ids.values() if job_id}))}
    return {task_id: rows[job_id] for task_id, job_id in ids.items() if job_id in rows}


def _decide(failed: Failed, failure: Failure, job: Job) -> _Died:
    kind = kind_named(job.kind)
    death = ledger.decide_death(
        job,
        kind,
        token=failure.task_id,
        outcome=failure.judgement.outcome,
        refused=failed.caught in NOT_TAKEN or REFUSED in failed.error.classes,
        never_started=failed.never_started,
    )
    return _Died(failure=failure, job=job, kind=kind, death=death)


def _put_back(one: _Died) -> None:
    """Keep a failed attempt that is no letter, and put its job back unless another lease has it."""
    failure = one.failure
    with transaction.atomic():
        ATTEMPTS.insert([_attempt_row(failure)])
        if one.death is Death.AGAIN and not ledger.release(
            one.job.id,
            one.kind,
            token=failure.task_id,
            code=failure.caught.value,
            outcome=failure.judgement.outcome,
            reason=failure.judgement.reason,
            never_started=failure.never_started,
        ):
            raise JobMoved(str(one.job.id))


def _attempt_row(failure: Failure) -> tuple[Any, ...]:
    return (
        new_id(), failure.tenant, failure.source, failure.task_id, failure.retries, failure.job_type,
        failure.happened_at, None, failure.error_class, failure.error_text, failure.judgement.outcome.value,
        failure.judgement.reason[:300], failure.worker, failure.release,
    )  # fmt: skip


ATTEMPTS = RowWriter(
    Attempt,
    (
        "id", "tenant", "source", "task_id", "retries", "job_type", "happened_at", "duration_ms", "error_class",
        "error_text", "outcome_class", "outcome_reason", "worker", "release",
    ),
    suffix="ON CONFLICT (tenant, source, task_id, retries) DO NOTHING",
)  # fmt: skip
