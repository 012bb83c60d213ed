"""Jobs of the ledger whose lease has run out while they ran (A14, C12).

Each process that runs jobs renews their leases itself, so a lease that ran out says that its process is gone, hangs, or
cannot reach the database. Such a job is first taken over: its token is changed, in a guarded statement that repeats the
expiry, so that a holder which is alive after all finds its lease lost and writes nothing more. Then it is recorded as
what it is, a delivery that was lost with its worker, by the same rule as one that a journal reports: run again by
itself where that does no harm, and else a dead letter that may already have happened.

Taking over and recording are two transactions: whoever records locks the incident before the job. A sweep that is
killed between them leaves a running job with an expired lease, which the next one finds.

A job that runs is one process of a worker: there are never many, so each has a transaction of its own. Jobs that only
wait in a queue can be many, and are given back by the page (``leases.UNDELIVERED``); one whose message was lost so
often that something has to be wrong with it, or with its queue, is recorded like a job that was lost with its worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from enum import StrEnum
from uuid import UUID

from django.db.models import Case, F, Q, Value, When
from django.db.models.functions import Concat

from deadletters import conf
from deadletters.drainer import policies
from deadletters.intake import HostClock, Intake
from deadletters.journal.events import Caught, Delivery, ErrorReport, Failed
from deadletters.recording import JobMoved, record_page
from opsconsole.core.canonical_json import canonical_json
from opsconsole.core.clock import boot_id, boot_now, wall_now
from opsconsole.core.database import AnyOf
from opsconsole.core.ids import new_id
from opsconsole.jobs.kinds import kinds
from opsconsole.jobs.ledger import MOST_LOST_DISPATCHES
from opsconsole.jobs.models import Job, JobState
from repairs.models import SweepActionType, SweepRepair
from repairs.reconciliation.sweeping import Sweeping
from repairs.settlement import DatabaseSettlement
from repairs.sql import beyond, record_repairs

logger = logging.getLogger(__name__)

PAGE = 200
TAKEN = ":lost"
"""The end of a token that a sweep has taken over."""
LOST = ErrorReport(
    error_class="billiard.exceptions.WorkerLostError",
    text="the lease of this job ran out while it ran: its worker is gone",
    classes=("billiard.exceptions.WorkerLostError", "Exception", "BaseException"),
)


NEVER_CLAIMED = ErrorReport(
    error_class="opsconsole.jobs.errors.NeverClaimed",
    text="its message was sent again and again and no worker has claimed it",
    classes=("opsconsole.jobs.errors.NeverClaimed", "Exception", "BaseException"),
)


class Verdict(StrEnum):
    """What a sweep does about a running job whose lease has run out."""

    TAKE = "take"
    LEAVE = "leave"


def decide_job(job: Job, *, could_renew: bool, is_known: bool, now: datetime) -> Verdict:
    """Say what is done about one job. Pure.

    ``could_renew`` says that its holder could have renewed the lease. A job whose kind this installation does not know
    (``is_known``) is left to a sweep of one that does: nobody here can say what running it twice would do.
    """
    is_over = job.lease_expires_at is not None and job.lease_expires_at <= now
    return Verdict.TAKE if job.state == JobState.RUNNING and is_over and could_renew and is_known else Verdict.LEAVE


def stale_jobs(sweeping: Sweeping) -> None:
    """Take running jobs from holders that are gone, oldest first, and record what became of each."""
    _take_all(sweeping, Q(state=JobState.RUNNING), _decide)


def never_claimed_jobs(sweeping: Sweeping) -> None:
    """Record jobs whose message was lost more often than is waited for: each is a failed job that is safe to retry."""
    is_lost = Q(state=JobState.ENQUEUED, dispatches__gt=F("attempts") + MOST_LOST_DISPATCHES)
    _take_all(sweeping, is_lost, lambda job, _sweeping, _now: Verdict.TAKE if job.kind in kinds() else Verdict.LEAVE)


def _take_all(sweeping: Sweeping, which: Q, decide: Callable[[Job, Sweeping, datetime], Verdict]) -> None:
    last: tuple[datetime, UUID] | None = None
    while size := sweeping.size(PAGE):
        with sweeping.page() as tally:
            expired = Job.objects.filter(which, lease_expires_at__lte=tally.now).defer("payload")
            found: list[Job] = list(beyond(expired, ("lease_expires_at", "id"), last)[:size])
            stale = [job for job in found if decide(job, sweeping, tally.now) is Verdict.TAKE]
            taken = _take_over(stale, which, tally.now)
            tally.scanned += len(found)
            tally.skipped += len(found) - len(taken)
        for job in taken:
            with sweeping.page() as tally:
                is_done = _record_lost(job, sweeping, tally.now)
                tally.repaired += is_done
                tally.skipped += not is_done
        if len(found) < size:
            return
        assert found[-1].lease_expires_at is not None  # noqa: S101  (filtered above)
        last = (found[-1].lease_expires_at, found[-1].id)


def _decide(job: Job, sweeping: Sweeping, now: datetime) -> Verdict:
    kind = kinds().get(job.kind)
    could_renew = kind is not None and sweeping.may_judge(kind.lease, now)
    sweeping.has_waited |= kind is not None and not could_renew
    return decide_job(job, could_renew=could_renew, is_known=kind is not None, now=now)


def _take_over(stale: list[Job], which: Q, now: datetime) -> list[Job]:
    """Change the tokens of jobs that still are stale, and return those."""
    if not stale:
        return []
    tokens = {job.id: job.lease_token for job in stale}
    held = Job.objects.filter(
        which, AnyOf("id", tokens), AnyOf("lease_token", tokens.values()), lease_expires_at__lte=now
    )
    taken_before = When(lease_token__endswith=TAKEN, then=F("lease_token"))
    held.update(lease_token=Case(taken_before, default=Concat(F("lease_token"), Value(TAKEN))), updated_at=now)
    named = [f"{token.removesuffix(TAKEN)}{TAKEN}" for token in tokens.values()]
    return list(Job.objects.filter(which, AnyOf("lease_token", named)).order_by("id"))


def _record_lost(job: Job, sweeping: Sweeping, now: datetime) -> bool:
    """Record that a job taken over was lost, with its worker or its message; returns whether anything became of it."""
    try:
        recorded = record_page(
            [_lost_delivery(job)],
            intake_of=lambda _failed: (_intake(job), boot_id()),
            clock=HostClock(database_now=now, boot_now=boot_now(), wall_now=wall_now(), boot_id=boot_id()),
            settlement=DatabaseSettlement(),
        )
    except JobMoved:
        logger.info("the job %s has moved on", job.id)
        return False
    became = Job.objects.values_list("state", "last_error_code").get(id=job.id)
    if became[0] == job.state:
        return False
    sweeping.incidents.update(one.incident_id for one in recorded if one.incident_id is not None)
    token = job.lease_token.removesuffix(TAKEN)
    row = SweepRepair(
        id=new_id(),
        run_id=sweeping.run_id,
        tenant=job.tenant,
        action_type=SweepActionType.RECORD_LOST_JOB if recorded else SweepActionType.RELEASE_STALE_LEASE,
        entity_type="job",
        entity_id=str(job.id),
        operation_key=f"{'stale-job' if job.state == JobState.RUNNING else 'never-claimed'}:{token}",
        before=canonical_json(
            {
                "leaseExpiresAt": job.lease_expires_at.isoformat() if job.lease_expires_at else None,
                "owner": job.lease_owner,
                "state": str(job.state),
            }
        ),
        after=canonical_json({"code": became[1], "state": became[0]}),
        planned_by=sweeping.started_by,
        applied_at=now,
    )
    return bool(record_repairs([row]))


def _lost_delivery(job: Job) -> Failed:
    """Return what a journal would say of it: started, never ended, and the worker is gone; or sent and never seen."""
    had_started = job.state == JobState.RUNNING
    delivery = Delivery(
        token=job.lease_token,
        task_id=job.lease_token,
        task=job.kind,
        tenant=job.tenant,
        actor_type=job.actor_type,
        actor_id=job.actor_id,
        queue=job.queue,
        acked=True,
        started_boot=boot_now() if had_started else 0.0,
        holder=job.lease_owner,
        source=job.source,
        worker=job.lease_owner,
    )
    return Failed(
        delivery=delivery,
        caught=Caught.WORKER_LOST,
        at_boot=boot_now(),
        at_wall=wall_now(),
        error=LOST if had_started else NEVER_CLAIMED,
        never_started=not had_started,
    )


def _intake(job: Job) -> Intake:
    return Intake(
        source=job.source,
        worker=job.lease_owner,
        release="",
        sealer=conf.sealer(),
        redactor=conf.redactor(),
        policies=policies().book(),
        mode=conf.grouping_mode(),
    )
