"""The ledger in the console: its tabs and filters, the page of a job, and its payload."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from deadletters.models import DeadLetter, Occurrence
from grants.models import AuditEvent
from incidents.admin import incident_name
from opsconsole.jobs import intake
from opsconsole.jobs.errors import Refused
from opsconsole.jobs.kind import Kind, RecordState
from opsconsole.jobs.kinds import kind_named
from opsconsole.jobs.models import Job
from repairs.models import RepairAction
from repairs.services import retry_letter
from tests.admin.conftest import SignIn
from tests.admin.tools import confirm, text_of
from tests.cast import Cast
from tests.factories import dead_letter
from tests.jobs import records
from tests.jobs.rows import job
from tests.jobs.server import closed_port
from tests.jobs.steps import dispatch, kill, run

pytestmark = pytest.mark.django_db
LIST = "/ops/jobs/"
SECRET = '{"to": "a@example.org", "password": "hunter2"}'


def ids(client: Client, query: str = "") -> list[str]:
    answer = client.get(f"{LIST}{query}")
    assert answer.status_code == 200, answer.content
    return [str(row.id) for row in answer.context["cl"].result_list]


def test_the_tabs_are_what_is_unfinished_what_has_failed_and_all(cast: Cast, sign_in: SignIn) -> None:
    made = {state: str(job(state).id) for state in ("pending", "retrying", "enqueued", "running", "dead", "succeeded")}
    client = sign_in(cast.olga)
    unfinished = [made[state] for state in ("running", "enqueued", "retrying", "pending")]
    assert ids(client) == ids(client, "?show=unfinished") == unfinished
    assert ids(client, "?show=dead") == [made["dead"]]
    assert ids(client, "?show=") == list(made.values())[::-1]
    shown = client.get(f"{LIST}?show=dead").context["tabs"]
    assert [(tab.label, tab.is_current) for tab in shown] == [
        ("Unfinished", False), ("Failed for good", True), ("All", False),
    ]  # fmt: skip


def test_jobs_are_filtered_by_kind_state_and_tenant(cast: Cast, sign_in: SignIn) -> None:
    wanted = str(job("running", kind="send_invoice", tenant="t-b").id)
    job("running")
    job("retrying", kind="send_invoice", tenant="t-b")
    client = sign_in(cast.ada)
    assert ids(client, "?state=running&kind=send_invoice") == [wanted]
    assert ids(client, "?state=in_flight&kind=send_invoice") == [wanted]
    assert len(ids(client, "?kind=route_report")) == 1
    assert ids(client, "?kind=nobody_knows") == []
    assert len(ids(sign_in(cast.bram))) == 2
    assert len(ids(sign_in(cast.olga))) == 1


@pytest.mark.parametrize("query", ["?state=gone", "?show=x", "?payload__contains=x", "?key=k", "?tenant__in=t-b"])
def test_nothing_else_can_be_asked(query: str, cast: Cast, sign_in: SignIn) -> None:
    """SEC-02."""
    assert sign_in(cast.ada).get(f"{LIST}{query}").status_code == 400


def test_a_page_of_the_list_is_followed_by_the_next(cast: Cast, sign_in: SignIn) -> None:
    made = [str(job().id) for _ in range(55)][::-1]
    client = sign_in(cast.olga)
    first = client.get(LIST)
    following = ids(client, first.context["cl"].next_page)
    assert [str(row.id) for row in first.context["cl"].result_list] + following == made


def test_a_list_says_what_a_job_works_on_and_why_it_failed(cast: Cast, sign_in: SignIn) -> None:
    job("retrying", record_type="report", record_id="R-1", attempts=2, max_attempts=5, last_error_code="refused")
    text = text_of(sign_in(cast.olga).get(LIST).content.decode())
    for said in ("report R-1", "route_report", "To be tried again", "refused", "2 of 5"):
        assert said in text, said


class Invoices(Kind):
    name = "send_invoice"

    def record(self, job: Job) -> RecordState:
        return RecordState(record_type="invoice", record_id="7", state="overdue", detail={"tries": 2})


def test_the_page_shows_the_record_the_redacted_payload_and_the_failed_job(cast: Cast, sign_in: SignIn) -> None:
    made = job("dead", kind="send_invoice", payload=SECRET, last_error_code="refused", last_error_text="no such card")
    letter = dead_letter()
    DeadLetter.objects.filter(id=letter.id).update(job_id=str(made.id))
    with mock.patch("repairs.jobs.kind_named", return_value=Invoices()):
        answer = sign_in(cast.olga).get(f"{LIST}{made.id}/")
    text = text_of(answer.content.decode())
    for said in (
        "Failed for good", "invoice 7", "overdue", "tries", "refused", "no such card", "a@example.org", str(made.id),
        "Needs a decision", incident_name(letter.incident), "payloads.read",
    ):  # fmt: skip
        assert said in text, said
    assert "hunter2" not in answer.content.decode()
    assert f"/ops/dead-letters/{letter.id}/" in answer.content.decode()
    assert "/payload/" not in answer.content.decode(), "olga may not reveal it"


@pytest.mark.parametrize("state", ["pending", "enqueued", "running", "retrying", "succeeded", "dead", "cancelled"])
def test_a_job_in_any_state_has_a_page(state: str, cast: Cast, sign_in: SignIn) -> None:
    made = job(state, kind="of_yesterday", payload="no json")
    assert sign_in(cast.ada).get(f"{LIST}{made.id}/").status_code == 200


def test_the_page_costs_the_same_however_many_jobs_there_are(cast: Cast, sign_in: SignIn) -> None:
    made = job()
    client = sign_in(cast.olga)

    def queries() -> int:
        with CaptureQueriesContext(connection) as found:
            client.get(f"{LIST}{made.id}/")
        return len(found)

    queries()
    before = queries()
    for _ in range(5):
        job()
    assert queries() == before <= 16


def test_a_payload_is_revealed_for_a_reason_that_is_audited(cast: Cast, sign_in: SignIn) -> None:
    """B3."""
    made = job(payload=SECRET)
    client = sign_in(cast.ada)
    url = f"{LIST}{made.id}/payload/"
    assert "hunter2" not in client.get(url).content.decode()
    refused: Any = confirm(client, url, {"reason": ""})
    assert (refused.status_code, AuditEvent.objects.filter(action="payloads.read").count()) == (400, 0)
    answer = confirm(client, url, {"reason": "a customer asks"})
    assert "hunter2" in answer.content.decode()
    row = AuditEvent.objects.get(action="payloads.read")
    assert (row.reason, row.target_type, row.target_id) == ("a customer asks", "job", str(made.id))
    assert sign_in(cast.olga).get(url).status_code == 403
    assert sign_in(cast.bram).get(url).status_code == 404


# -- what a retry does to the record -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("begin", "told"),
    [
        ("send_action", "decision_action_outbox failed → pending"),
        ("propose_action", "action_proposal failed → queued"),
    ],
)
def test_the_pages_show_the_records_state_before_and_after_a_retry(
    begin: str, told: str, cast: Cast, sign_in: SignIn
) -> None:
    """A12: in the words of the record's own kind, on the pages of the incident, of the job and of the repair."""
    report = records.report(tenant="default")
    getattr(intake, begin)(report=report, action="hide", endpoint=f"http://127.0.0.1:{closed_port()}/")
    made = Job.objects.get()
    Job.objects.update(max_attempts=1)
    made.refresh_from_db()
    assert run(made, dispatch(made)) is not None
    letter = DeadLetter.objects.get()
    client = sign_in(cast.ada)
    pages = [f"/ops/incidents/{letter.incident_id}/?show=all", f"/ops/dead-letters/{letter.id}/"]
    assert all(told not in text_of(client.get(path).content.decode()) for path in pages)
    done = retry_letter(letter_id=letter.id, by=cast.ada, key="k")
    for path in (*pages, f"/ops/repairs/{done.repair_id}/"):
        assert told in text_of(client.get(path).content.decode()), path
    assert f"put back to work, {told}" in text_of(client.get(f"{pages[0]}&job={letter.id}").content.decode())
    action = RepairAction.objects.get()
    record = kind_named(made.kind).record(made)
    assert record is not None
    assert json.loads(action.after)["record"] == record.state == told.rpartition(" ")[2]


def test_a_failed_job_of_the_ledger_says_how_often_it_was_sent_and_leads_to_its_row(
    cast: Cast, sign_in: SignIn
) -> None:
    """Each of its attempts is a message of its own, which alone would be its first attempt."""
    made = kill(error=Refused("no"))
    letter = DeadLetter.objects.get()
    client = sign_in(cast.ada)
    page = f"/ops/dead-letters/{letter.id}/"
    assert "sent once" in text_of(client.get(page).content.decode())
    again = f"job:{made.id}:5:752da519"
    DeadLetter.objects.update(task_id=again)
    Occurrence.objects.update(task_id=again)
    for path in (page, f"/ops/incidents/{letter.incident_id}/", "/ops/dead-letters/"):
        text = text_of(client.get(path).content.decode())
        assert "sent 5 times" in text, path
        assert "1 attempt" not in text, path
    answer = client.get(page)
    assert [row.attempt for row in answer.context["history"]] == [5]
    assert client.get(answer.context["ledger_url"]).context["job"].id == made.id
    DeadLetter.objects.update(task_id="job:nonsense")
    assert client.get(page).context["ledger_url"] == ""
