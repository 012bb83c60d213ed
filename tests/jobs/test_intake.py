"""How work begins: a record and its job are written together, or neither is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.db import transaction

from opsconsole.core.errors import InvalidInput
from opsconsole.jobs import intake
from opsconsole.jobs.kinds import kind_named
from opsconsole.jobs.models import (
    ActionDelivery,
    ActionProposal,
    EmailDelivery,
    EvidenceRequest,
    Job,
    NotificationDelivery,
    Report,
    WorkflowDispatch,
    WorkflowRun,
)
from tests.jobs import records
from tests.jobs.records import ENDPOINT, TENANT

pytestmark = pytest.mark.django_db


def the_job(kind: str) -> Job:
    """Return the only job; its payload fits its kind, and its record is found."""
    [job] = Job.objects.all()
    assert job.kind == kind
    kind_named(kind).check(json.loads(job.payload))
    assert kind_named(kind).record(job) is not None
    return job


def test_a_report_is_written_with_the_job_that_routes_it() -> None:
    report = intake.submit_report(tenant=TENANT, reference="R-1", category="spam", subject="Buy", body="now")
    job = the_job("route_report")
    assert (job.tenant, job.record_id, job.report_id) == (TENANT, str(report.id), report.id)
    stored = Report.objects.get()
    assert (stored.state, stored.routing_status, stored.category) == ("received", "pending", "spam")


def test_a_reference_is_unique_in_its_tenant() -> None:
    intake.submit_report(tenant=TENANT, reference="R-1")
    with pytest.raises(InvalidInput, match="R-1 already"):
        intake.submit_report(tenant=TENANT, reference="R-1")
    intake.submit_report(tenant="meadow", reference="R-1")
    assert (Report.objects.count(), Job.objects.count()) == (2, 2)


def test_evidence_is_asked_for() -> None:
    report = records.report()
    evidence = intake.request_evidence(report=report, url="https://example.org/photo?id=7")
    job = the_job("fetch_evidence")
    assert json.loads(job.payload) == {"request_id": str(evidence.id), "report_id": str(report.id)}
    assert EvidenceRequest.objects.get().state == "pending"


def test_a_workflow_is_started() -> None:
    run = intake.start_workflow(report=records.report(), name="takedown", endpoint=ENDPOINT, payload={"depth": 3})
    job = the_job("dispatch_workflow")
    dispatch = WorkflowDispatch.objects.get()
    assert json.loads(job.payload) == {"outbox_id": str(dispatch.id), "run_id": str(run.id)}
    assert (WorkflowRun.objects.get().state, dispatch.state, dispatch.payload) == (
        "dispatch_pending",
        "pending",
        '{"depth":3}',
    )


def test_an_action_is_sent() -> None:
    delivery = intake.send_action(report=records.report(), action="hide", endpoint=ENDPOINT, payload={"post": "p"})
    assert the_job("deliver_action").record_id == str(delivery.id)
    assert ActionDelivery.objects.get().state == "pending"


@pytest.mark.parametrize("body", ["We have looked at it.", ""])
def test_a_notice_is_sent_with_a_message_or_without(body: str) -> None:
    delivery = intake.send_notice(report=records.report(), body=body, endpoint=ENDPOINT)
    assert the_job("deliver_notification").record_id == str(delivery.id)
    message = NotificationDelivery.objects.get().notice.message
    assert (message.body if message else "") == body


def test_an_email_is_sent_with_a_subject_of_one_line() -> None:
    intake.send_email(
        report=records.report(), to_address="ada@example.org", subject="Your\r\nBcc: report", body="Hello"
    )
    the_job("deliver_email")
    assert EmailDelivery.objects.get().subject == "Your Bcc: report"


def test_an_action_is_proposed() -> None:
    run = records.workflow_run()
    proposal = intake.propose_action(report=records.report(), run=run, action="hide", endpoint=ENDPOINT)
    assert the_job("apply_action_proposal").record_id == str(proposal.id)
    assert ActionProposal.objects.get().state == "queued"


def test_a_run_of_another_tenant_proposes_nothing() -> None:
    foreign = records.workflow_run(tenant="meadow")
    with pytest.raises(InvalidInput, match="another tenant"):
        intake.propose_action(report=records.report(), run=foreign, action="hide", endpoint=ENDPOINT)


def test_record_and_job_go_with_the_callers_transaction() -> None:
    class Undone(Exception):
        pass

    def begin() -> None:
        with transaction.atomic():
            intake.submit_report(tenant=TENANT, reference="R-1")
            raise Undone

    with pytest.raises(Undone):
        begin()
    assert (Report.objects.count(), Job.objects.count()) == (0, 0)


def test_no_record_stays_without_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: Any) -> Any:
        raise RuntimeError("the ledger is full")

    monkeypatch.setattr(intake, "enqueue", broken)
    report = records.report()
    for begin in (
        lambda: intake.submit_report(tenant=TENANT, reference="R-1"),
        lambda: intake.request_evidence(report=report, url="https://example.org/"),
        lambda: intake.send_email(report=report, to_address="ada@example.org", subject="a", body="b"),
    ):
        with pytest.raises(RuntimeError):
            begin()
    assert (Report.objects.count(), EvidenceRequest.objects.count(), EmailDelivery.objects.count()) == (1, 0, 0)


def test_hostile_text_is_kept_marked_and_cut() -> None:
    report = intake.submit_report(
        tenant=TENANT, reference="R-1", subject="a\x00\u202e" * 100, body="\ud800" + "b" * 1_000_000
    )
    stored = Report.objects.get(id=report.id)
    assert len(stored.subject) <= 200
    assert "‹U+0000›" in stored.subject
    assert len(stored.body) <= intake.LONGEST_BODY
    assert "‹U+D800›" in stored.body


@pytest.mark.parametrize(
    "fields",
    [
        {"tenant": ""},
        {"tenant": "*"},
        {"tenant": "a" * 101},
        {"reference": ""},
        {"reference": "a\nb"},
        {"reference": "a\x00"},
        {"reference": "a" * 61},
        {"category": "\ud800"},
        {"category": "a" * 61},
    ],
)
def test_a_name_that_is_none_is_refused(fields: dict[str, str]) -> None:
    with pytest.raises(InvalidInput):
        intake.submit_report(**{"tenant": TENANT, "reference": "R-1", **fields})
    assert Job.objects.count() == 0


@pytest.mark.parametrize(
    "url", ["", "no url", "file:///etc/passwd", "https://ada:secret@example.org/", "https://example.org/" + "a" * 2_000]
)
def test_a_url_that_is_none_is_refused_when_it_is_given(url: str) -> None:
    report = records.report()
    with pytest.raises(InvalidInput, match=r"^url: "):
        intake.request_evidence(report=report, url=url)
    with pytest.raises(InvalidInput, match=r"^endpoint: "):
        intake.send_action(report=report, action="hide", endpoint=url)
    with pytest.raises(InvalidInput, match=r"^endpoint"):
        intake.send_notice(report=report, body="", endpoint="https://example.org/" + "a" * 500)
    assert Job.objects.count() == 0


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth):
        found = {"a": found}
    return found


@pytest.mark.parametrize(
    "payload", [{"a": 1.5}, {"a": float("nan")}, {"a": {1, 2}}, {"a": "\ud800"}, {"a": "x" * 300_000}, nested(100_000)]
)
def test_a_payload_that_cannot_be_kept_is_refused(payload: dict[str, Any]) -> None:
    report = records.report()
    with pytest.raises(InvalidInput, match=r"^payload"):
        intake.send_action(report=report, action="hide", endpoint=ENDPOINT, payload=payload)
    assert ActionDelivery.objects.count() == 0


@pytest.mark.parametrize("address", ["", "nobody", "a@b.example\nBcc: c@d.example", "a" * 300 + "@example.org"])
def test_an_address_that_is_none_is_refused_when_it_is_given(address: str) -> None:
    with pytest.raises(InvalidInput, match=r"^to_address"):
        intake.send_email(report=records.report(), to_address=address, subject="a", body="b")


@pytest.mark.parametrize("text", ["a\x00b", "\ud800"])
def test_a_nul_in_a_payload_never_reaches_the_database_as_one(text: str) -> None:
    report = records.report()
    try:
        delivery = intake.send_action(report=report, action="hide", endpoint=ENDPOINT, payload={"a": text})
    except InvalidInput:
        return
    assert json.loads(ActionDelivery.objects.get(id=delivery.id).payload) == {"a": text}
