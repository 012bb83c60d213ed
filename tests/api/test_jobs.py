"""GET jobs, one of them, and its payload."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from deadletters.models import DeadLetter
from grants.actions import Action
from grants.models import AuditEvent
from opsconsole.jobs.kind import Kind, RecordState
from opsconsole.jobs.models import Job
from tests.api.client import Api, problem
from tests.api.test_lists import walk
from tests.cast import Cast, give
from tests.factories import dead_letter
from tests.jobs.rows import job

pytestmark = pytest.mark.django_db

SECRET = '{"to": "a@example.org", "password": "hunter2", "order": 9007199254740993}'


@pytest.mark.parametrize(
    "query",
    ["state=gone", "state=", "limit=0", "limit=101", "limit=x", "kind=", "cursor=abc", "payload__contains=x", "key=k",
     "ordering=id", "lease_token=t"],
)  # fmt: skip
def test_a_query_that_is_not_understood_is_refused_by_name(ada: Api, query: str) -> None:
    """API-03, SEC-02."""
    document = problem(ada.client.get(f"/api/v1/jobs?{query}"), 400, "invalid_input")
    assert [error["parameter"] for error in document["errors"]] == [query.partition("=")[0]]


def test_jobs_come_newest_first_each_once(ada: Api) -> None:
    made = [str(job(tenant="t-a" if number % 2 else "default").id) for number in range(7)]
    for limit in (1, 3, 7):
        assert [one for page in walk(ada, "jobs", {"limit": limit}) for one in page] == made[::-1]


def test_jobs_are_found_by_each_of_their_columns(ada: Api) -> None:
    wanted = job("retrying", tenant="t-a", source="other", kind="send_invoice", record_type="invoice", record_id="7")
    job("succeeded")
    job("dead")
    for query in (
        {"tenant": "t-a"}, {"source": "other"}, {"kind": "send_invoice"}, {"state": "retrying"},
        {"state": "unfinished"}, {"state": "running,unfinished"}, {"record_type": "invoice", "record_id": "7"},
    ):  # fmt: skip
        assert [row["id"] for row in ada.rows("jobs", query)] == [str(wanted.id)], query
    assert len(ada.rows("jobs", {"state": "unfinished,dead"})) == 2
    assert ada.rows("jobs", {"state": "running"}) == []


def test_the_list_shows_ones_own_tenant_and_no_payload(olga: Api, bram: Api, ada: Api) -> None:
    """GRA-01."""
    job(payload=SECRET)
    job(tenant="t-b", payload=SECRET)
    assert {row["tenant"] for row in olga.rows("jobs")} == {"default"}
    assert {row["tenant"] for row in bram.rows("jobs")} == {"t-b"}
    assert len(ada.rows("jobs", {"tenant": "*"})) == 2
    assert "example" not in ada.get("jobs").content.decode()
    for tenant in ("t-b", "*"):
        problem(olga.get("jobs", {"tenant": tenant}), 403, "access_denied")


def test_a_grant_for_one_actor_shows_that_actors_jobs(cast: Cast, nobody: Api) -> None:
    """B1."""
    own = job(actor_type="order", actor_id="42")
    other = job(actor_type="order", actor_id="43")
    give(cast.nobody, Action.INSPECT, tenant="default", actor_type="order", actor_id="42")
    assert [row["id"] for row in nobody.rows("jobs")] == [str(own.id)]
    assert nobody.get(f"jobs/{own.id}").status_code == 200
    problem(nobody.get(f"jobs/{other.id}"), 404, "job_not_found")


class Invoices(Kind):
    name = "send_invoice"

    def record(self, job: Job) -> RecordState:
        return RecordState(record_type="invoice", record_id=job.record_id, state="sent", detail={"tries": 2})


def with_kind(kind: Kind) -> Any:
    return mock.patch("repairs.jobs.kind_named", return_value=kind)


def test_a_job_comes_with_its_record_and_its_letter(ada: Api) -> None:
    made = job("dead", kind="send_invoice", record_id="7", payload=SECRET, attempts=3, max_attempts=3)
    letter = dead_letter()
    DeadLetter.objects.filter(id=letter.id).update(job_id=str(made.id))
    with with_kind(Invoices()):
        document = ada.get(f"jobs/{made.id}").json()
    assert document["record"] == {"record_type": "invoice", "record_id": "7", "state": "sent", "detail": {"tries": 2}}
    assert document["dead_letter"] == {
        "id": str(letter.id), "state": "open", "incident_id": str(letter.incident_id), "incident_state": "open",
    }  # fmt: skip
    assert (document["job"]["attempts"], document["job"]["max_attempts"]) == (3, 3)
    assert "hunter2" not in str(document)
    assert "a@example.org" in document["payload_preview"]


def test_a_letter_of_another_tenant_is_not_its_letter(ada: Api) -> None:
    made = job("dead")
    letter = dead_letter(tenant="t-b")
    DeadLetter.objects.filter(id=letter.id).update(job_id=str(made.id))
    assert ada.get(f"jobs/{made.id}").json()["dead_letter"] is None


@pytest.mark.parametrize("payload", ["{}", "[1, 2]", "7", "no json", '{"a": {"token": "t-1"}}'])
def test_a_job_of_a_kind_that_nobody_knows_is_shown_all_the_same(ada: Api, payload: str) -> None:
    made = job(kind="of_yesterday", payload=payload)
    answer = ada.get(f"jobs/{made.id}")
    assert answer.status_code == 200
    assert answer.json()["record"] is None
    assert "t-1" not in answer.content.decode()


def test_its_entity_tag_lasts_until_it_changes(ada: Api) -> None:
    made = job()
    tag = ada.get(f"jobs/{made.id}")["ETag"]
    assert ada.get(f"jobs/{made.id}", If_None_Match=tag).status_code == 304
    Job.objects.filter(id=made.id).update(attempts=1)
    assert ada.get(f"jobs/{made.id}", If_None_Match=tag).status_code == 200


def test_its_payload_is_for_who_may_read_it_and_each_reading_is_audited(ada: Api, olga: Api, bram: Api) -> None:
    """B3: and a number beyond a double is told as its digits."""
    made = job(payload=SECRET)
    problem(olga.get(f"jobs/{made.id}/payload"), 403, "access_denied")
    problem(bram.get(f"jobs/{made.id}/payload"), 404, "job_not_found")
    answer = ada.get(f"jobs/{made.id}/payload")
    assert answer["Cache-Control"] == "no-store"
    document = answer.json()
    assert document["text"] == SECRET
    assert document["payload"]["password"] == "hunter2"
    assert (document["payload"]["order"], document["as_text"]) == ("9007199254740993", ["/payload/order"])
    row = AuditEvent.objects.get(action="payloads.read", verdict="allowed")
    assert (row.target_type, row.target_id, row.operator_name) == ("job", str(made.id), "ada")
    assert "hunter2" not in row.outcome
