"""``dispatch_workflow``."""

from __future__ import annotations

from datetime import timedelta

import pytest

from opsconsole.jobs.kinds.dispatch_workflow import KIND
from opsconsole.jobs.models import RunState
from tests.jobs import records
from tests.jobs.records import EXHAUSTED, NOW, columns, dispatch, job, workflow_run
from tests.jobs.server import TestServer, status

pytestmark = pytest.mark.django_db
LATE = NOW + timedelta(hours=1)
NOT_STARTED = ["created", "dispatch_pending", "queued"]
STARTED = sorted({*RunState.values} - {*NOT_STARTED})


@pytest.mark.parametrize("state", ["pending", "leased", "failed", "dead_letter"])
def test_the_dispatch_of_a_dead_job_is_a_dead_letter_without_a_lease(state: str) -> None:
    """A6.4."""
    made = dispatch(state=state, lease_expires_at=NOW)
    KIND.mark_dead(job("dispatch_workflow", made), EXHAUSTED, LATE)
    found = columns(made)
    assert (found["state"], found["last_error_code"], found["lease_expires_at"]) == ("dead_letter", EXHAUSTED, None)


@pytest.mark.parametrize("state", NOT_STARTED)
def test_its_run_waits_for_a_repair_if_it_has_not_begun(state: str) -> None:
    """A6.4."""
    run = workflow_run(state=state, revision=4)
    KIND.mark_dead(job("dispatch_workflow", dispatch(run)), EXHAUSTED, LATE)
    found = columns(run)
    assert (found["state"], found["revision"]) == ("repair_required", 5)
    assert found["error_code"] == "workflow_dispatch_queue_retries_exhausted"
    assert found["error_summary"]
    assert found["updated_at"] == LATE


@pytest.mark.parametrize("state", STARTED)
def test_a_run_that_has_begun_or_ended_is_left_alone(state: str) -> None:
    """A6.4."""
    run = workflow_run(state=state, revision=4)
    before = columns(run)
    KIND.mark_dead(job("dispatch_workflow", dispatch(run)), EXHAUSTED, LATE)
    assert columns(run) == before


def test_a_dispatch_that_was_delivered_is_left_alone_with_its_run() -> None:
    """A6.4: finished work is never touched."""
    run = workflow_run(state="queued")
    made = dispatch(run, state="delivered")
    before = columns(made), columns(run)
    KIND.mark_dead(job("dispatch_workflow", made), EXHAUSTED, LATE)
    assert (columns(made), columns(run)) == before


def test_a_retried_dispatch_takes_its_run_along() -> None:
    """A12."""
    run = workflow_run(state="repair_required", revision=5, error_code="x", error_summary="y")
    KIND.requeue(job("dispatch_workflow", dispatch(run, state="dead_letter")), LATE)
    found = columns(run)
    assert (found["state"], found["revision"], found["error_code"], found["error_summary"]) == (
        "dispatch_pending",
        6,
        "",
        "",
    )


@pytest.mark.parametrize("state", ["running", "succeeded", "failed"])
def test_a_retry_leaves_a_run_alone_that_went_on_otherwise(state: str) -> None:
    """A12, C5."""
    run = workflow_run(state=state)
    before = columns(run)
    KIND.requeue(job("dispatch_workflow", dispatch(run, state="dead_letter")), LATE)
    assert columns(run) == before


def test_the_engine_is_told_and_has_the_run(server: TestServer) -> None:
    run = workflow_run(state="dispatch_pending", revision=2)
    made = dispatch(run, endpoint=server.on("/hook", status(202)), payload='{"depth": 3}')
    of = job("dispatch_workflow", made)
    result = records.run(of)
    [asked] = server.asked
    assert asked.document["data"] == {"run": str(run.id), "workflow": "takedown", "payload": {"depth": 3}}
    assert asked.headers["webhook-id"] == str(of.id)
    KIND.complete(of, result, LATE)
    assert columns(made)["state"] == "delivered"
    assert (columns(run)["state"], columns(run)["revision"]) == ("queued", 3)


def test_a_run_that_the_engine_has_started_already_does_not_go_back_to_queued() -> None:
    run = workflow_run(state="running", revision=3)
    before = columns(run)
    KIND.complete(job("dispatch_workflow", dispatch(run, state="leased")), None, LATE)
    assert columns(run) == before


def test_a_run_whose_dispatch_was_withdrawn_has_failed() -> None:
    run = workflow_run(state="dispatch_pending", revision=1)
    KIND.cancel(job("dispatch_workflow", dispatch(run)), LATE)
    found = columns(run)
    assert (found["state"], found["revision"], found["error_code"]) == ("failed", 2, "workflow_dispatch_cancelled")
