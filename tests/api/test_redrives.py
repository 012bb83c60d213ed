"""Redrives over REST: what is chosen and refused, what is answered, and what a redrive says of itself."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import pytest

from grants.actions import Action
from grants.models import AuditEvent
from repairs.models import Redrive, RedriveItem
from repairs.redrives import services
from repairs.redrives.requests import RedrivePace
from tests.api.client import Api, problem
from tests.api.situations import planned_redrive, worker_node
from tests.cast import Cast, give
from tests.factories import dead_letter, failure, record
from tests.repairs.redrives.work import step, worker

FILTER = {"tenant": "default", "source": "tests"}


@pytest.fixture(autouse=True)
def _mail_worker(db: None) -> None:
    worker_node(tasks=json.dumps({"shop.send_mail": json.dumps({"positional": ["to", "order"], "required": 1})}))


def created(answer: Any) -> Redrive:
    assert answer.status_code == 201, answer.content
    assert answer["Location"] == f"/api/v1/redrives/{answer.json()['redrive_id']}"
    return Redrive.objects.get(id=answer.json()["redrive_id"])


def test_a_set_is_chosen_by_letters_by_an_incident_and_by_a_filter(ada: Api) -> None:
    """C14."""
    first, second, third = dead_letter(), dead_letter(task="shop.other"), dead_letter(task="shop.third")
    by_letters = created(ada.post("redrives", {"letters": [str(first.id)]}))
    assert set(by_letters.items.values_list("letter_id", flat=True)) == {first.id}
    by_incident = created(ada.post("redrives", {"incident": str(second.incident_id), "expected_count": 1}))
    assert (by_incident.incident_id, by_incident.total_count) == (second.incident_id, 1)
    chosen = {**FILTER, "job_type": "shop.third", "error_class": "shop.errors.MailhubDown", "state": ["open"]}
    by_filter = created(ada.post("redrives", {"filter": chosen, "expected_count": 1}))
    assert set(by_filter.items.values_list("letter_id", flat=True)) == {third.id}
    assert json.loads(by_filter.selection)["filter"]["error_class"] == "shop.errors.MailhubDown"


def test_a_set_that_has_changed_is_refused_with_the_number_that_there_is(ada: Api) -> None:
    """API-03: drift is refused, and nothing is planned."""
    dead_letter()
    refused = problem(ada.post("redrives", {"filter": FILTER, "expected_count": 2}), 409, "selection_drifted")
    assert refused["fields"] == {"expected": 2, "found": 1}
    assert not Redrive.objects.exists()


@pytest.mark.parametrize(
    ("body", "pointers"),
    [
        ({}, {""}),
        ({"letters": [], "incident": str(UUID(int=1))}, {""}),
        ({"letters": [str(UUID(int=1))], "expected_count": 1}, {"/expected_count"}),
        ({"filter": FILTER}, {"/expected_count"}),
        ({"filter": {**FILTER, "stat": ["open"]}, "expected_count": 1}, {"/filter/stat"}),
        ({"filter": {**FILTER, "state": ["opne"]}, "expected_count": 1}, {"/filter/state/0"}),
        ({"filter": {"tenant": "default"}, "expected_count": 1}, {"/filter/source"}),
        ({"letters": ["1"], "pace": {"rate": 1}}, {"/letters/0", "/pace/rate"}),
        ({"letters": [str(UUID(int=1))], "pace": {"rate_per_second": "1"}}, {"/pace/rate_per_second"}),
        ({"letters": [str(UUID(int=1))], "changes": {"tasks": {"a": 1}}}, {"/changes/tasks/a"}),
        ({"letters": [str(UUID(int=1))], "dry_run": True}, {"/dry_run"}),
    ],
)
def test_a_body_of_the_wrong_shape_is_refused_by_name(ada: Api, body: dict[str, Any], pointers: set[str]) -> None:
    refused = problem(ada.post("redrives", body), 400, "invalid_input")
    assert {error.get("pointer", "") for error in refused["errors"]} == pointers


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"letters": []}, 400, "selection_invalid"),
        ({"letters": [str(UUID(int=1))]}, 404, "dead_letter_not_found"),
        ({"incident": str(UUID(int=1))}, 404, "operations_incident_not_found"),
        ({"failed_of": str(UUID(int=1))}, 404, "redrive_not_found"),
        ({"filter": {**FILTER, "tenant": "*"}, "expected_count": 1}, 400, "selection_invalid"),
        ({"filter": {**FILTER, "queue": "none"}, "expected_count": 0}, 409, "redrive_empty"),
        ({"filter": FILTER, "expected_count": 1, "pace": {"rate_per_second": 0}}, 400, "redrive_invalid"),
        ({"filter": FILTER, "expected_count": 1, "low_priority": True}, 400, "redrive_invalid"),
        ({"filter": FILTER, "expected_count": 1, "changes": {"remove": ["a", "a"]}}, 400, "redrive_invalid"),
        ({"filter": FILTER, "expected_count": 1, "reason": "x" * 501}, 400, "invalid_input"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused_with_its_code(
    ada: Api, body: dict[str, Any], status: int, code: str
) -> None:
    dead_letter()
    problem(ada.post("redrives", body), status, code)
    assert not Redrive.objects.exists()


def test_of_more_jobs_than_are_judged_at_once_the_answer_is_202(ada: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers make the dry run, and the redrive cannot be started before."""
    monkeypatch.setattr(services, "AT_ONCE", 1)
    record(failure(), failure())
    answer = ada.post("redrives", {"filter": FILTER, "expected_count": 2})
    assert (answer.status_code, answer.json()["state"]) == (202, "planning")
    refused = ada.post(f"redrives/{answer.json()['redrive_id']}/start")
    assert "planning" in problem(refused, 409, "redrive_standing")["detail"]


def test_the_same_request_again_is_answered_as_the_first_time(ada: Api, olga: Api) -> None:
    """A9, C4: of creation and of each decision; another body with the same key is refused."""
    letter = dead_letter()
    body = {"letters": [str(letter.id)]}
    first, again = ada.post("redrives", body, key="K"), ada.post("redrives", body, key="K")
    assert again["Idempotent-Replayed"] == "true"
    assert (again.status_code, again.json()) == (201, {**first.json(), "idempotent_replay": True})
    problem(ada.post("redrives", {**body, "reason": "x"}, key="K"), 409, "idempotency_key_reused")
    path = f"redrives/{first.json()['redrive_id']}"
    for name, status in (("start", 202), ("pause", 200), ("resume", 202), ("cancel", 200)):
        done = ada.post(f"{path}/{name}", key="K")
        assert (done.status_code, done.json()["idempotent_replay"]) == (status, False), name
        repeated = ada.post(f"{path}/{name}", key="K")
        assert (repeated.status_code, repeated.json()["idempotent_replay"]) == (status, True), name
        problem(ada.post(f"{path}/{name}", {"reason": "x"}, key="K"), 409, "idempotency_key_reused")
        problem(olga.post(f"{path}/{name}", key="K"), 403, "access_denied")
    assert AuditEvent.objects.filter(target_id=first.json()["redrive_id"], verdict="allowed").count() == 5


def test_a_redrive_tells_its_classes_their_answers_and_how_far_it_is(ada: Api, cast: Cast) -> None:
    """C13, C19."""
    safe, doubtful = dead_letter(), dead_letter(ambiguous=True)
    path = f"redrives/{planned_redrive(cast.ada, safe, doubtful)}"
    shown = ada.get(path).json()
    assert [(each["class"], each["count"], bool(each["answers"])) for each in shown["classes"]] == [
        ("safe", 1, False), ("ambiguous", 1, True),
    ]  # fmt: skip
    assert shown["progress"] == {"done": 0, "percent": 0, "seconds_left": None}
    assert shown["counts"] == {
        "total": 2, "waiting": 2, "outstanding": 0, "succeeded": 0, "failed": 0, "skipped": 0, "cancelled": 0,
    }  # fmt: skip
    assert (shown["samples"], shown["links"]) == ([], {"items": f"/api/v1/{path}/items"})
    wrong = ada.post(f"{path}/start", {"answers": {"safe": {"answer": "did_not_happen", "reference": "T-1"}}})
    problem(wrong, 400, "redrive_answer_invalid")
    problem(ada.post(f"{path}/start", {"answers": {"ambiguous": {"answer": "maybe"}}}), 400, "invalid_input")
    answers = {"ambiguous": {"answer": "did_not_happen", "reference": "T-1"}}
    assert ada.post(f"{path}/start", {"answers": answers}).json()["state"] == "canary"
    told = {each["class"]: each["answer"] for each in ada.get(path).json()["classes"]}
    assert told == {"safe": None, "ambiguous": answers["ambiguous"]}


def test_each_job_has_its_class_and_its_result(ada: Api, cast: Cast) -> None:
    safe, doubtful = dead_letter(ago=9.0), dead_letter(ambiguous=True)
    path = f"redrives/{planned_redrive(cast.ada, safe, doubtful)}/items"
    rows = ada.rows(path)
    assert [(row["position"], row["dead_letter"], row["class"], row["concerns"]) for row in rows] == [
        (2, str(doubtful.id), "ambiguous", ["ambiguous"]), (1, str(safe.id), "safe", []),
    ]  # fmt: skip
    assert [row["position"] for row in ada.rows(path, {"class": "safe"})] == [1]
    RedriveItem.objects.filter(position=1).update(state="failed", code="task_failed", detail="it has failed again")
    assert [(row["code"], row["state"]) for row in ada.rows(path, {"state": "failed"})] == [("task_failed", "failed")]
    first = ada.get(path, {"limit": 1})
    assert [row["position"] for row in ada.get(first.json()["next"]).json()["results"]] == [1]
    problem(ada.get(path, {"class": "unsafe"}), 400, "invalid_input")
    problem(ada.get(path, {"state": "lost"}), 400, "invalid_input")


def test_the_items_tell_which_jobs_were_the_canary(ada: Api, cast: Cast) -> None:
    worker()
    jobs = [dead_letter(ago=9.0 - number) for number in range(2)]
    pace = RedrivePace(canary_size=1)
    redrive_id = planned_redrive(cast.ada, *jobs, pace=pace)
    services.start_redrive(redrive_id=redrive_id, by=cast.ada, key="s")
    step(Redrive.objects.get(id=redrive_id))
    rows = ada.rows(f"redrives/{redrive_id}/items")
    assert [(row["position"], row["is_canary"]) for row in rows] == [(2, False), (1, True)]


def test_its_list_is_narrowed_by_state_tenant_source_and_incident(ada: Api, cast: Cast) -> None:
    letter, other = dead_letter(), dead_letter(tenant="t-b", source="other")
    redrive_id = str(planned_redrive(cast.ada, letter))
    other_id = str(planned_redrive(cast.ada, other))
    Redrive.objects.filter(id=redrive_id).update(incident=letter.incident_id)
    for query, found in (
        ({}, [other_id, redrive_id]),
        ({"tenant": "t-b"}, [other_id]),
        ({"source": "tests"}, [redrive_id]),
        ({"incident": str(letter.incident_id)}, [redrive_id]),
        ({"state": "ready,paused"}, [other_id, redrive_id]),
        ({"state": "unfinished", "limit": 1}, [other_id]),
        ({"state": "finished"}, []),
    ):
        assert [row["id"] for row in ada.rows("redrives", query)] == found, query


def test_nothing_has_changed_is_answered_without_a_body(ada: Api, cast: Cast) -> None:
    path = f"redrives/{planned_redrive(cast.ada, dead_letter())}"
    tag = ada.get(path)["ETag"]
    assert ada.get(path, If_None_Match=tag).status_code == 304
    ada.post(f"{path}/start")
    changed = ada.get(path, If_None_Match=tag)
    assert (changed.status_code, changed["ETag"] != tag) == (200, True)


def test_changes_need_their_own_capability_and_are_shown_without_their_values(ada: Api, olga: Api, cast: Cast) -> None:
    """B3: a patch is payload, so what it sets is never told, but for a redacted sample."""
    letter = dead_letter()
    give(cast.olga, Action.REDRIVE_RUN, tenant="default")
    body = {
        "letters": [str(letter.id)],
        "changes": {"tasks": {"shop.send_mail": "shop.post"}, "set": {"order": 8, "password": "hunter2"}},
    }
    problem(olga.post("redrives", body), 403, "access_denied")
    path = f"redrives/{created(ada.post('redrives', body)).id}"
    answer = ada.get(path)
    assert answer.json()["changes"] == {
        "remove": [], "rename": {}, "set": ["order", "password"], "tasks": {"shop.send_mail": "shop.post"},
    }  # fmt: skip
    (sample,) = answer.json()["samples"]
    assert (sample["task_before"], sample["task_after"]) == ("shop.send_mail", "shop.post")
    assert ("7" in sample["arguments_before"], "8" in sample["arguments_after"]) == (True, True)
    assert "hunter2" not in answer.content.decode()
    assert "hunter2" not in "".join(AuditEvent.objects.values_list("outcome", flat=True))


def test_a_large_one_is_approved_by_somebody_else(ada: Api, olga: Api, cast: Cast, settings: Any) -> None:
    settings.OPSCONSOLE_REDRIVE_APPROVAL_ABOVE = 1
    give(cast.olga, Action.REDRIVE_RUN, tenant="default")
    path = f"redrives/{planned_redrive(cast.ada, dead_letter(), dead_letter())}"
    assert ada.get(path).json()["needs_approval"] is True
    problem(ada.post(f"{path}/start"), 409, "redrive_not_approved")
    problem(ada.post(f"{path}/approve"), 409, "redrive_own_approval")
    assert olga.post(f"{path}/approve", {"reason": "I have looked"}).status_code == 200
    problem(olga.post(f"{path}/approve"), 409, "redrive_standing")
    assert ada.post(f"{path}/start").status_code == 202
    assert ada.get(path).json()["approved_by_name"] == "olga"


def test_a_pace_is_given_whole_when_it_changes(ada: Api, cast: Cast) -> None:
    redrive_id = planned_redrive(cast.ada, dead_letter())
    path = f"redrives/{redrive_id}"
    for name in ("start", "pause"):
        assert ada.post(f"{path}/{name}").status_code < 300
    problem(ada.post(f"{path}/resume", {"pace": {"rate_per_second": 3}}), 400, "invalid_input")
    pace = {"rate_per_second": 3, "max_outstanding": 4, "canary_size": 2, "stop_percent": None}
    problem(ada.post(f"{path}/resume", {"pace": {**pace, "max_outstanding": 0}}), 400, "redrive_invalid")
    assert ada.post(f"{path}/resume", {"pace": pace}).status_code == 202
    assert ada.get(path).json()["pace"] == pace


def test_what_has_failed_is_planned_again_as_a_redrive_of_its_own(ada: Api, cast: Cast) -> None:
    redrive_id = planned_redrive(cast.ada, dead_letter(), target_queue="slow")
    RedriveItem.objects.update(state="failed")
    Redrive.objects.update(state="finished", ended_at="2020-01-01T00:00:00Z", waiting_count=0, failed_count=1)
    path = f"redrives/{redrive_id}/retry-failed"
    problem(ada.post(path, {"expected_count": 2}), 409, "selection_drifted")
    again = created(ada.post(path, {"expected_count": 1, "pace": {"canary_size": 0}}))
    assert (again.retry_of_id, again.target_queue, again.canary_size) == (redrive_id, "slow", 0)
    problem(ada.post(path), 409, "redrive_exists")


def test_a_decision_about_what_has_moved_on_is_refused_with_what_is_there_now(ada: Api, cast: Cast) -> None:
    """The answers of a start are for what was looked at; the replay comes before the comparison (DESIGN 7)."""
    redrive_id = planned_redrive(cast.ada, dead_letter())
    path = f"redrives/{redrive_id}"
    seen = ada.get(path)["ETag"]
    assert ada.post(f"{path}/start", If_Match=seen, key="K").status_code == 202
    assert ada.post(f"{path}/start", If_Match=seen, key="K")["Idempotent-Replayed"] == "true"
    refused = ada.post(f"{path}/cancel", If_Match=seen)
    current = problem(refused, 412, "redrive_changed")["current"]
    assert current["state"] == "canary"
    assert refused["ETag"] == f'"{redrive_id}:{current["version"]}"'
    assert Redrive.objects.get().state == "canary"
    assert ada.post(f"{path}/cancel", If_Match=refused["ETag"]).status_code == 200
