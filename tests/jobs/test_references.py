"""What a failed job of the ledger says of its report and its outbox (A4, A5)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from grants.models import AuditEvent
from opsconsole.jobs import intake
from opsconsole.jobs.models import Job
from tests.jobs import records
from tests.jobs.server import closed_port
from tests.jobs.steps import dispatch, kill, letter_of, run

pytestmark = pytest.mark.django_db

ENDPOINT = f"http://127.0.0.1:{closed_port()}/hook"
BEGUN: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "route_report": (lambda _report: intake.submit_report(tenant="default", reference="R-9"), False),
    "fetch_evidence": (lambda report: intake.request_evidence(report=report, url=ENDPOINT), False),
    "dispatch_workflow": (
        lambda report: intake.start_workflow(report=report, name="takedown", endpoint=ENDPOINT), True,
    ),
    "deliver_action": (lambda report: intake.send_action(report=report, action="hide", endpoint=ENDPOINT), True),
    "deliver_notification": (lambda report: intake.send_notice(report=report, body="Seen.", endpoint=ENDPOINT), True),
    "apply_action_proposal": (
        lambda report: intake.propose_action(report=report, action="hide", endpoint=ENDPOINT), False,
    ),
}  # fmt: skip


def die(kind: str) -> Job:
    begin, _ = BEGUN[kind]
    begin(records.report(tenant="default"))
    Job.objects.filter(kind=kind).update(max_attempts=1)
    job = Job.objects.get(kind=kind)
    assert run(job, dispatch(job)) is not None
    return job


@pytest.mark.parametrize("kind", BEGUN)
def test_a_failed_job_says_whether_it_has_a_report_and_an_outbox(kind: str) -> None:
    """A5: the letter and its audit event; never the payload, nor which report."""
    job = die(kind)
    letter = letter_of(job)
    assert (letter.has_report, letter.has_outbox) == (True, BEGUN[kind][1])
    outcome = json.loads(AuditEvent.objects.get(action="queue.dead_lettered").outcome)
    assert outcome == {
        "errorCode": "queue_retries_exhausted",
        "hasOutboxReference": BEGUN[kind][1],
        "hasReportReference": True,
        "incident": str(letter.incident_id),
        "jobType": kind,
        "version": 1,
    }


@pytest.mark.parametrize("kind", BEGUN)
def test_an_incident_of_one_job_names_its_report_and_its_outbox(kind: str, settings: Any) -> None:
    """A4: with one incident per job."""
    settings.INCIDENT_GROUPING = "job"
    job = die(kind)
    incident = letter_of(job).incident
    assert (incident.entity_type, incident.entity_id) == ("queue_job", str(job.id))
    assert json.loads(incident.metadata) == {
        "jobType": kind,
        "outboxId": job.record_id if BEGUN[kind][1] else None,
        "reportId": str(job.report_id),
        "sourceQueue": job.queue,
    }
    assert job.report_id is not None


def test_a_job_without_either_says_so_and_an_incident_of_a_cause_names_neither() -> None:
    """A4, A5."""
    letter = letter_of(kill(payload={"outbox_id": None}))
    assert (letter.has_report, letter.has_outbox) == (False, False)
    assert set(json.loads(letter.incident.metadata)) == {"jobType", "sourceQueue"}


def test_a_hostile_reference_is_kept_as_text_that_can_be_read(settings: Any) -> None:
    settings.INCIDENT_GROUPING = "job"
    letter = letter_of(kill(payload={"outbox_id": "a\x00b" + "x" * 400}))
    named = json.loads(letter.incident.metadata)["outboxId"]
    assert len(named) <= 200
    assert "\x00" not in named
