"""``apply_action_proposal``."""

from __future__ import annotations

from datetime import timedelta

import pytest

from opsconsole.jobs.kinds.apply_action_proposal import KIND
from tests.jobs import records
from tests.jobs.records import EXHAUSTED, NOW, columns, job, proposal, workflow_run
from tests.jobs.server import TestServer, status

pytestmark = pytest.mark.django_db
LATE = NOW + timedelta(hours=1)


@pytest.mark.parametrize("state", ["queued", "applying", "retrying", "failed"])
def test_the_proposal_of_a_dead_job_has_failed_for_good(state: str) -> None:
    """A6.8."""
    made = proposal(state=state, lease_expires_at=NOW, last_error_code="http_503")
    KIND.mark_dead(job("apply_action_proposal", made), EXHAUSTED, LATE)
    found = columns(made)
    assert (found["state"], found["last_error_code"], found["lease_expires_at"]) == ("failed", EXHAUSTED, None)


def test_an_applied_proposal_does_not_fail() -> None:
    """A6.8."""
    made = proposal(state="applied")
    before = columns(made)
    KIND.mark_dead(job("apply_action_proposal", made), EXHAUSTED, LATE)
    assert columns(made) == before


def test_an_applied_proposal_is_not_put_back() -> None:
    """A12: a proposal only if not applied."""
    made = proposal(state="applied")
    before = columns(made)
    KIND.requeue(job("apply_action_proposal", made), LATE)
    assert columns(made) == before


def test_a_proposal_is_applied_through_the_application(server: TestServer) -> None:
    run = workflow_run()
    made = proposal(run=run, action="hide", endpoint=server.on("/hook", status(200)), payload='{"post": "p-7"}')
    of = job("apply_action_proposal", made)
    result = records.run(of)
    [asked] = server.asked
    assert asked.document == {
        "type": "apply_action_proposal",
        "data": {
            "proposal": str(made.id),
            "run": str(run.id),
            "action": "hide",
            "report": made.report.reference,
            "payload": {"post": "p-7"},
        },
    }
    assert asked.headers["webhook-signature"].startswith("v1,")
    KIND.complete(of, result, LATE)
    found = columns(made)
    assert (found["state"], found["applied_at"]) == ("applied", LATE)


def test_applying_twice_keeps_the_first_time() -> None:
    made = proposal(state="applied")
    KIND.complete(job("apply_action_proposal", made), None, LATE)
    assert columns(made)["applied_at"] == NOW
