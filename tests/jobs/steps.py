"""What happens to a job of the ledger, one step at a time, as worker and drainer would do it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from celery.exceptions import Ignore, Retry
from django.conf import settings

from deadletters import conf
from deadletters.drainer import policies
from deadletters.intake import Intake
from deadletters.journal.events import Caught, ErrorReport, Failed
from deadletters.journal.reports import report_error
from deadletters.models import DeadLetter
from deadletters.recorder import Recorded
from deadletters.recording import record_page
from opsconsole.core.clock import boot_id
from opsconsole.jobs import ledger
from opsconsole.jobs.kind import Work
from opsconsole.jobs.kinds import kind_named
from opsconsole.jobs.models import Job
from opsconsole.jobs.runner import run_job
from opsconsole.jobs.services import enqueue
from repairs.settlement import DatabaseSettlement
from tests import factories
from tests.jobs.kinds_of_tests import BODIES

LOST = ErrorReport(error_class="billiard.exceptions.WorkerLostError", text="the worker died")


def new_job(kind: str = "test_plain", *, body: Callable[[Work], Any] | None = None, **fields: Any) -> Job:
    """Write a job; ``body`` is what jobs of its kind do from now on."""
    if body is not None:
        BODIES[kind] = body
    return enqueue(**{"kind": kind, "tenant": "default", "payload": {"order": 7}, **fields})


def dispatch(job: Job) -> str:
    """Lease what is due, as a dispatcher does, and return the job's token."""
    taken = ledger.take_due(source=settings.OPSCONSOLE_SOURCE, owner="dispatcher", limit=100)
    return next(one.token for one in taken if one.job_id == job.id)


def run(job: Job, token: str) -> Exception | None:
    """Run the job's message and return what the task raised; a final error is recorded, as the drainer does it."""
    try:
        run_job(job_id=job.id, token=token, owner="celery@tests", kind=kind_named(job.kind))
    except (Ignore, Retry) as said:
        return said
    except Exception as error:
        record(died(job, token, report_error(error, task_module="tests")))
        return error
    return None


def died(job: Job, token: str, error: ErrorReport = LOST, *, caught: Caught = Caught.FAILURE, **fields: Any) -> Failed:
    """Return what the journal says of a delivery that ended badly."""
    return factories.failed(error, caught=caught, task_id=token, task=job.kind, queue=job.queue, **fields)


def record(*page: Failed) -> list[Recorded]:
    """Record failed deliveries as the drainer does."""
    intake = Intake(
        source=settings.OPSCONSOLE_SOURCE,
        worker="celery@tests",
        release="",
        sealer=conf.sealer(),
        redactor=conf.redactor(),
        policies=policies().book(),
        mode=conf.grouping_mode(),
    )
    return record_page(
        list(page),
        intake_of=lambda _failed: (intake, boot_id()),
        clock=factories.host_clock(),
        settlement=DatabaseSettlement(),
    )


def make_due(job: Job) -> None:
    """Let the pause before the next attempt be over."""
    Job.objects.filter(id=job.id).update(available_at=job.created_at - timedelta(seconds=1))


def letter_of(job: Job) -> DeadLetter:
    return DeadLetter.objects.select_related("incident").get(job_id=str(job.id))


def kill(kind: str = "test_plain", error: Exception | None = None, **fields: Any) -> Job:
    """Return a job that has died of ``error`` at its last attempt."""

    def body(_work: Work) -> None:
        raise error or ValueError("no price")

    job = new_job(kind, body=body, max_attempts=1, **fields)
    run(job, dispatch(job))
    job.refresh_from_db()
    return job
