"""A body that takes long keeps the lease of its job, and with it what its job works on (A14, C12)."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections

from opsconsole.core.database import database_now
from opsconsole.jobs import intake, ledger
from opsconsole.jobs.connections import using_connection
from opsconsole.jobs.errors import TryAgain
from opsconsole.jobs.kind import Work
from opsconsole.jobs.kinds import kind_named
from opsconsole.jobs.models import ConnectionLease, Job, JobState, WorkflowDispatch
from tests.jobs import records
from tests.jobs.records import NOW, columns
from tests.jobs.server import Handler, TestServer, status
from tests.jobs.steps import dispatch, new_job, run
from tests.repairs.reconciliation.rows import counts, sweep

pytestmark = pytest.mark.django_db

IN_FLIGHT = {
    "fetch_evidence": lambda **fields: records.evidence(state="fetching", **fields),
    "dispatch_workflow": lambda **fields: records.dispatch(state="leased", lease_expires_at=NOW, **fields),
    "deliver_action": lambda **fields: records.action(state="delivering", lease_expires_at=NOW, **fields),
    "deliver_notification": lambda **fields: records.notification(state="delivering", lease_expires_at=NOW, **fields),
    "deliver_email": lambda **fields: records.email(state="delivering", lease_expires_at=NOW, **fields),
    "apply_action_proposal": lambda **fields: records.proposal(state="applying", lease_expires_at=NOW, **fields),
}


@pytest.mark.parametrize("name", IN_FLIGHT)
def test_a_records_lease_is_renewed_with_its_jobs(name: str) -> None:
    """A14, C12."""
    record = IN_FLIGHT[name]()
    job, kind = records.job(name, record), kind_named(name)
    assert ledger.renew(job, kind)
    found, of_job = columns(record), Job.objects.get(id=job.id)
    assert of_job.lease_expires_at is not None
    assert of_job.lease_expires_at > database_now() + kind.lease - timedelta(seconds=10)
    assert found.get("lease_expires_at", of_job.lease_expires_at) == of_job.lease_expires_at
    assert found["updated_at"] == of_job.updated_at > NOW
    assert found["state"] == record.state


@pytest.mark.parametrize("name", IN_FLIGHT)
def test_a_lease_that_is_lost_renews_nothing(name: str) -> None:
    """C12: whoever has the job by now has its record, too."""
    record = IN_FLIGHT[name]()
    job = records.job(name, record)
    Job.objects.filter(id=job.id).update(lease_token="job:another")
    before = columns(record)
    assert not ledger.renew(job, kind_named(name))
    assert columns(record) == before


def test_a_record_that_was_finished_otherwise_is_not_touched() -> None:
    record = records.dispatch(state="delivered")
    before = columns(record)
    assert ledger.renew(records.job("dispatch_workflow", record), kind_named("dispatch_workflow"))
    assert columns(record) == before


@pytest.mark.django_db(transaction=True)
def test_a_body_that_outlasts_its_lease_keeps_job_and_record(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A14, C12: an endpoint that takes longer than the lease; the sweep that comes meanwhile finds nothing stale."""
    kind = kind_named("dispatch_workflow")
    monkeypatch.setattr(type(kind), "lease", timedelta(seconds=3))
    swept: list[tuple[int, int, int]] = []

    def slow(handler: Handler) -> None:
        time.sleep(4.5)
        thread = threading.Thread(target=sweep_once)
        thread.start()
        thread.join()
        status(202)(handler)

    def sweep_once() -> None:
        try:
            swept.append(counts(sweep("stale_leases")))
        finally:
            connections.close_all()

    report = records.report(tenant="default")
    intake.start_workflow(report=report, name="takedown", endpoint=server.on("/hook", slow))
    job = Job.objects.get(kind="dispatch_workflow")
    assert run(job, dispatch(job)) is None
    job.refresh_from_db()
    assert swept == [(0, 0, 0)]
    assert (job.state, job.attempts, job.dispatches) == (JobState.SUCCEEDED, 1, 1)
    assert WorkflowDispatch.objects.get().state == "delivered"
    assert len(server.asked) == 1


# -- connections -------------------------------------------------------------------------------------------------------


def holding(job: Job, connection: str = "bank") -> Any:
    work = Work(
        job_id=job.id, tenant=job.tenant, payload={}, record_id="", attempt=1, max_attempts=1, token=job.lease_token
    )
    return using_connection(work, connection)


def test_a_connection_is_used_by_one_job_at_a_time() -> None:
    """A14: what the leases on connections are for."""
    first, second = (records.job("test_plain") for _ in range(2))
    elsewhere = records.job("test_plain")
    Job.objects.filter(id=elsewhere.id).update(tenant="other")
    elsewhere.refresh_from_db()
    with holding(first), holding(first, "post"), holding(elsewhere):
        assert ConnectionLease.objects.count() == 3
        with pytest.raises(TryAgain) as caught, holding(second):
            pass
        assert caught.value.code == "connection_busy"
    with holding(second):
        assert ConnectionLease.objects.get().holder == second.lease_token
    assert not ConnectionLease.objects.exists()


def test_a_connection_is_free_again_when_its_body_has_failed() -> None:
    with pytest.raises(ValueError, match="no price"), holding(records.job("test_plain")):
        raise ValueError("no price")
    assert not ConnectionLease.objects.exists()


def test_a_connections_lease_is_renewed_with_the_jobs_that_uses_it() -> None:
    """A14, C12."""
    job, other = records.job("test_plain"), records.job("test_plain")
    with holding(job), holding(other, "post"):
        ConnectionLease.objects.update(expires_at=NOW)
        assert ledger.renew(job, kind_named("test_plain"))
        assert ConnectionLease.objects.get(connection="bank").expires_at > database_now() + timedelta(seconds=50)
        assert ConnectionLease.objects.get(connection="post").expires_at == NOW


def test_the_body_of_a_real_attempt_holds_it_under_the_attempts_own_lease() -> None:
    held: list[str] = []

    def body(work: Work) -> None:
        with using_connection(work, "bank"):
            held.append(ConnectionLease.objects.get().holder)

    job = new_job(body=body)
    token = dispatch(job)
    assert run(job, token) is None
    assert held == [token]
    assert not ConnectionLease.objects.exists()
