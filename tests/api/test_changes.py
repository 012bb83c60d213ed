"""Changes over REST: keys and replays, entity tags, what each answers, and what it leaves behind."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import pytest

from deadletters.models import DeadLetter
from grants.models import AuditEvent, ScopeUserGrant
from incidents.models import Incident
from repairs.models import RepairAction, RepairBatch
from tests.api.client import V1, Api, problem
from tests.api.situations import retrying, scene, worker_node
from tests.cast import Cast
from tests.factories import dead_letter, failure, record

RESOLUTION = {"code": "fixed_upstream", "summary": "The provider is back.", "unrepaired": 1}


def changes(letter: DeadLetter) -> dict[str, tuple[str, dict[str, Any], int]]:
    """Return path, body and status of each change that can be made to a letter that waits."""
    return {
        "acknowledge": (f"incidents/{letter.incident_id}/acknowledge", {}, 200),
        "release": (f"incidents/{letter.incident_id}/release", {}, 200),
        "resolve": (f"incidents/{letter.incident_id}/resolve", RESOLUTION, 200),
        "retry many": (f"incidents/{letter.incident_id}/retry", {"all": True, "expected_count": 1}, 202),
        "retry": (f"dead-letters/{letter.id}/retry", {}, 202),
        "close as done": (f"dead-letters/{letter.id}/close-as-done", {"reason": "It was in their log."}, 200),
        "discard": (f"dead-letters/{letter.id}/discard", {"reason": "Nobody needs it."}, 200),
    }


CHANGES = ("acknowledge", "release", "resolve", "retry many", "retry", "close as done", "discard")


@pytest.mark.parametrize("name", CHANGES)
def test_the_same_request_again_is_answered_as_the_first_time(ada: Api, name: str) -> None:
    """A9, C4: same body but for the flag, a header that says so, and nothing done twice."""
    letter = dead_letter()
    path, body, status = changes(letter)[name]
    first = ada.post(path, body, key="K1")
    assert first.status_code == status, first.content
    assert first.json()["idempotent_replay"] is False
    assert "Idempotent-Replayed" not in first
    events, repairs = AuditEvent.objects.count(), RepairAction.objects.count()
    # Also after the record has moved on, and with the key written as RFC 8941 has it.
    Incident.objects.filter(id=letter.incident_id).update(version=99)
    again = ada.post(path, body, key='"K1"')
    assert again.status_code == status
    assert again["Idempotent-Replayed"] == "true"
    assert again.json() == {**first.json(), "idempotent_replay": True}
    assert again.get("Location") == first.get("Location")
    assert again.get("ETag") == first.get("ETag")
    assert (AuditEvent.objects.count(), RepairAction.objects.count()) == (events, repairs)


@pytest.mark.parametrize("name", CHANGES)
def test_a_key_answers_for_its_own_target_and_body_only(ada: Api, name: str) -> None:
    """A9: 409 for another incident or body; the same key under another verb is another key."""
    letter, other = dead_letter(), dead_letter(task="shop.other")
    path, body, status = changes(letter)[name]
    assert ada.post(path, body, key="K1").status_code == status
    other_path, other_body, _ = changes(other)[name]
    problem(ada.post(other_path, other_body, key="K1"), 409, "idempotency_key_reused")
    changed = {
        "acknowledge": {"take_over": True},
        "release": None,  # it has no body
        "resolve": {**RESOLUTION, "summary": "Something else."},
        "retry many": {"all": True, "expected_count": 1, "reason": "again"},
        "retry": {"reason": "again"},
        "close as done": {"reason": "Something else."},
        "discard": {"reason": "Something else."},
    }[name]
    if changed is not None:
        problem(ada.post(path, changed, key="K1"), 409, "idempotency_key_reused")
    other_verb = next(verb for verb in CHANGES if verb != name and verb != "resolve")
    other_path, other_body, _ = changes(other)[other_verb]
    assert ada.post(other_path, other_body, key="K1").status_code < 300


@pytest.mark.parametrize("name", CHANGES)
def test_a_key_belongs_to_its_operator(ada: Api, olga: Api, name: str) -> None:
    """C4: another operator's request with the same key is a request of its own."""
    letter = dead_letter()
    path, body, status = changes(letter)[name]
    assert ada.post(path, body, key="K1").status_code == status
    answer = olga.post(path, body, key="K1")
    assert "Idempotent-Replayed" not in answer


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_what_has_moved_on_is_refused_with_what_is_there_now(ada: Api, name: str) -> None:
    letter = dead_letter()
    path, body, status = changes(letter)[name]
    target = letter.incident_id if path.startswith("incidents") else letter.id
    seen = ada.get("/".join(path.split("/")[:2]))["ETag"]
    Incident.objects.filter(id=letter.incident_id).update(version=50)
    answer = ada.post(path, body, If_Match=seen)
    document = problem(answer, 412, "incident_changed")
    assert document["current"] == {"state": "open", "version": 50}
    assert answer["ETag"] == f'"{target}:50"'
    letter.refresh_from_db()
    assert (letter.state, Incident.objects.get(id=letter.incident_id).state) == ("open", "open")
    assert ada.post(path, body, If_Match=answer["ETag"]).status_code == status


@pytest.mark.parametrize("name", CHANGES)
def test_an_honest_repetition_is_not_stopped_by_its_own_success(ada: Api, name: str) -> None:
    """The replay comes before If-Match (DESIGN 7)."""
    letter = dead_letter()
    path, body, status = changes(letter)[name]
    seen = ada.get("/".join(path.split("/")[:2]))["ETag"]
    assert ada.post(path, body, key="K1", If_Match=seen).status_code == status
    assert ada.post(path, body, key="K1", If_Match=seen)["Idempotent-Replayed"] == "true"


@pytest.mark.parametrize(
    "tag", ["", "x", '"open', "W/", '"a", "b"', "'a'", '"a"b', "**"], ids=lambda tag: tag or "empty"
)
def test_an_if_match_that_is_no_entity_tag_is_refused(ada: Api, tag: str) -> None:
    letter = dead_letter()
    problem(ada.post(f"incidents/{letter.incident_id}/acknowledge", If_Match=tag), 400, "if_match_invalid")


def test_a_weak_or_foreign_entity_tag_matches_nothing_and_a_star_matches_anything(ada: Api) -> None:
    letter = dead_letter()
    incident = Incident.objects.get(id=letter.incident_id)
    path = f"incidents/{incident.id}/acknowledge"
    other = "01970000-0000-7000-8000-000000000000"
    for tag in (f"W/{incident.etag}", '"anything"', f'"{other}:{incident.version}"', f'"{incident.id}:x"', '""'):
        problem(ada.post(path, If_Match=tag), 412, "incident_changed")
    assert ada.post(path, If_Match="*").status_code == 200


def test_what_has_not_changed_is_not_sent_again(ada: Api, cast: Cast) -> None:
    letter = dead_letter()
    for path in (f"incidents/{letter.incident_id}", f"dead-letters/{letter.id}"):
        first = ada.get(path)
        tag = first["ETag"]
        for header in (tag, f"W/{tag}", f'"other", {tag}', "*"):
            unchanged = ada.get(path, If_None_Match=header)
            assert (unchanged.status_code, unchanged.content) == (304, b"")
            assert unchanged["ETag"] == tag
        assert ada.get(path, If_None_Match='"other"').status_code == 200
    # A repair moves on without a change of the incident; its page must not be called unchanged.
    tags = {path: ada.get(path)["ETag"] for path in (f"incidents/{letter.incident_id}", f"dead-letters/{letter.id}")}
    action = RepairAction.objects.get(id=retry(ada, letter))
    tags = {path: ada.get(path)["ETag"] for path in tags}
    RepairAction.objects.filter(id=action.id).update(state="sent")
    for path, tag in tags.items():
        assert ada.get(path, If_None_Match=tag).status_code == 200


def retry(api: Api, letter: DeadLetter) -> str:
    answer = api.post(f"dead-letters/{letter.id}/retry")
    assert answer.status_code == 202
    repair_id: str = answer.json()["repair_id"]
    return repair_id


# --- what each does ---------------------------------------------------------------------------------------------------


def test_taking_an_incident_answers_who_has_it_and_its_new_version(ada: Api, olga: Api) -> None:
    """A10: the first acknowledgement stays; another operator's changes nothing unless they take it over."""
    letter = dead_letter()
    path = f"incidents/{letter.incident_id}/acknowledge"
    answer = olga.post(path, {"further": 20})
    document = answer.json()
    assert (document["state"], document["changed"], document["holder"]) == ("acknowledged", True, "olga")
    assert answer["ETag"] == f'"{letter.incident_id}:{document["version"]}"'
    assert AuditEvent.objects.get(id=document["event_id"]).action == "operations.incident_acknowledged"
    assert ada.post(path).json()["changed"] is False
    assert ada.post(path, {"take_over": True}).json()["holder"] == "ada"
    row = ada.get(f"incidents/{letter.incident_id}").json()
    assert (row["acknowledged_by_name"], row["since_acknowledged"], row["acknowledged_until"]) == ("ada", 0, None)
    problem(olga.post(path, {"further": 0}), 400, "acknowledgement_limit_invalid")


def test_closing_an_incident_needs_a_reason_and_the_number_that_stays_unrepaired(ada: Api, olga: Api) -> None:
    """A11, C7."""
    letter = dead_letter()
    path = f"incidents/{letter.incident_id}/resolve"
    for wrong in ({"code": "Fixed"}, {"code": "f"}, {"summary": "ab"}, {"summary": "   x   "}):
        problem(ada.post(path, {**RESOLUTION, **wrong}), 400, "incident_resolution_invalid")
    problem(ada.post(path, {"code": "fixed"}), 400, "invalid_input")
    problem(olga.post(path, RESOLUTION), 403, "access_denied")
    document = problem(ada.post(path, {**RESOLUTION, "unrepaired": 2}), 409, "incident_has_unresolved_letters")
    assert document["fields"] == {"unresolved": 1}
    assert ada.post(path, RESOLUTION).json()["state"] == "resolved"
    assert ada.post(path, RESOLUTION).json()["changed"] is False
    problem(ada.post(path, {**RESOLUTION, "code": "other"}), 409, "operations_incident_resolved")
    problem(ada.post(f"incidents/{letter.incident_id}/acknowledge"), 409, "operations_incident_resolved")
    page = ada.get(f"incidents/{letter.incident_id}").json()
    assert page["resolution_summary"] == "[fixed_upstream] The provider is back."
    assert [episode["unrepaired_count"] for episode in page["episodes"]] == [1]
    assert page["waiting"] == {"safe": 0, "ambiguous": 0, "not_declared": 0, "is_capped": False}


def test_a_retry_is_planned_takes_the_incident_and_can_be_watched(olga: Api) -> None:
    """A12, B5, C11, C17: 202, and where to look; a second one is refused."""
    letter = dead_letter()
    answer = olga.post(f"dead-letters/{letter.id}/retry", {"reason": "the hub is back", "reference": "INC-7"})
    document = answer.json()
    assert answer.status_code == 202
    assert (document["state"], document["incident_state"]) == ("retrying", "acknowledged")
    assert answer["Location"] == f"{V1}/repair-actions/{document['repair_id']}"
    repair = olga.get(answer["Location"]).json()
    assert (repair["state"], repair["dead_letter"], repair["new_task_id"]) == (
        "planned", str(letter.id), document["new_task_id"],
    )  # fmt: skip
    assert (repair["reason"], repair["reference"], repair["planned_by_name"]) == ("the hub is back", "INC-7", "olga")
    problem(olga.post(f"dead-letters/{letter.id}/retry"), 409, "operations_job_overtaken")
    page = olga.get(f"dead-letters/{letter.id}").json()
    assert page["state"] == "retrying"
    assert page["retry"]["refusal"]["code"] == "operations_job_overtaken"
    assert [action["id"] for action in page["repair_actions"]] == [document["repair_id"]]


def test_what_may_have_happened_is_run_again_only_on_a_persons_word(olga: Api) -> None:
    """B6, C19."""
    letter = dead_letter(ambiguous=True)
    page = olga.get(f"dead-letters/{letter.id}").json()
    assert (page["ambiguous"], page["outcome_class"]) == (True, "ambiguous")
    assert page["retry"]["refusal"]["code"] == "provider_outcome_unknown"
    problem(olga.post(f"dead-letters/{letter.id}/retry"), 409, "provider_outcome_unknown")
    assert olga.post(f"dead-letters/{letter.id}/retry", {"provider_checked": True}).status_code == 202


def test_a_job_that_no_live_worker_serves_is_not_sent(olga: Api) -> None:
    """B7."""
    worker_node(tasks='{"shop.other": ""}')
    letter = dead_letter()
    problem(olga.post(f"dead-letters/{letter.id}/retry"), 503, "job_not_served")
    letter.refresh_from_db()
    assert letter.state == "open"


@pytest.mark.parametrize("verb", ["close-as-done", "discard"])
@pytest.mark.parametrize("reason", ["", "   ", "x" * 501])
def test_a_decision_needs_a_reason(ada: Api, verb: str, reason: str) -> None:
    """B4."""
    letter = dead_letter()
    problem(ada.post(f"dead-letters/{letter.id}/{verb}", {"reason": reason}), 400, "reason_invalid")


def test_the_last_decision_closes_the_incident(ada: Api) -> None:
    """B8, C11: what is discarded is gone, its letter stays, and its audit row has no payload."""
    letter = dead_letter()
    document = ada.post(f"dead-letters/{letter.id}/discard", {"reason": "Nobody needs it."}).json()
    assert (document["state"], document["incident_state"]) == ("discarded", "resolved")
    problem(ada.get(f"dead-letters/{letter.id}/payload"), 409, "message_not_captured")
    page = ada.get(f"dead-letters/{letter.id}").json()
    assert (page["state"], page["payload_preview"], page["message_state"]) == ("discarded", "", "missing")
    event = AuditEvent.objects.get(id=document["event_id"])
    assert "a@example.org" not in event.outcome


def test_a_repair_can_be_withdrawn_until_it_has_started(ada: Api, cast: Cast) -> None:
    letter = retrying(cast.ada)
    repair = RepairAction.objects.get(letter=letter)
    document = ada.post(f"repair-actions/{repair.id}/cancel", key="K1").json()
    assert (document["letter_id"], document["state"]) == (str(letter.id), "open")
    assert ada.post(f"repair-actions/{repair.id}/cancel", key="K1")["Idempotent-Replayed"] == "true"
    problem(ada.post(f"repair-actions/{repair.id}/cancel"), 409, "repair_not_cancellable")
    problem(ada.post(f"repair-actions/{repair.id}/cancel", {"reason": "x"}), 400, "invalid_input")


class TestManyAtOnce:
    def test_each_letter_is_planned_or_refused_by_itself(self, ada: Api) -> None:
        ids = [recorded.letter_id for recorded in record(*(failure() for _ in range(5)))]
        incident_id = DeadLetter.objects.get(id=ids[0]).incident_id
        retry(ada, DeadLetter.objects.get(id=ids[0]))
        answer = ada.post(f"incidents/{incident_id}/retry", {"letters": [str(one) for one in ids]})
        document = answer.json()
        assert (answer.status_code, document["planned"], document["refused"]) == (202, 4, 1)
        refused = next(result for result in document["results"] if result["status"] == "refused")
        assert (refused["dead_letter"], refused["code"]) == (str(ids[0]), "operations_job_overtaken")
        assert answer["Location"] == f"{V1}/repair-batches/{document['batch_id']}"
        batch = ada.get(answer["Location"]).json()
        assert (batch["chosen"], batch["planned"], batch["refused"], batch["state"]) == (5, 4, 1, "planned")
        assert batch["results"] == document["results"]
        assert len(ada.rows("repair-actions", {"batch": document["batch_id"]})) == 4

    def test_all_needs_the_number_that_is_there(self, ada: Api) -> None:
        ids = [recorded.letter_id for recorded in record(*(failure() for _ in range(3)))]
        path = f"incidents/{DeadLetter.objects.get(id=ids[0]).incident_id}/retry"
        document = problem(ada.post(path, {"all": True, "expected_count": 2}), 409, "selection_drifted")
        assert document["fields"] == {"expected": 2, "found": 3}
        assert RepairBatch.objects.count() == 0
        assert ada.post(path, {"all": True, "expected_count": 3}).json()["planned"] == 3

    def test_a_letter_of_another_incident_is_not_found(self, ada: Api) -> None:
        letter, other = dead_letter(), dead_letter(task="shop.other")
        answer = ada.post(f"incidents/{letter.incident_id}/retry", {"letters": [str(letter.id), str(other.id)]})
        problem(answer, 404, "dead_letter_not_found")
        assert RepairAction.objects.count() == 0

    def test_a_resolved_incident_is_not_retried(self, ada: Api) -> None:
        letter = dead_letter()
        ada.post(f"incidents/{letter.incident_id}/resolve", RESOLUTION)
        answer = ada.post(f"incidents/{letter.incident_id}/retry", {"letters": [str(letter.id)]})
        problem(answer, 409, "operations_incident_resolved")


class TestNotYours:
    def test_what_is_hidden_and_what_is_missing_are_told_apart_by_nothing(self, cast: Cast, olga: Api) -> None:
        """GRA-02: same status and body whichever the route, nothing changed, refusal audited."""
        theirs = scene(cast.ada, tenant="t-b")
        missing = "01970000-0000-7000-8000-000000000000"
        ids = {"incidents": theirs.incident.id, "dead-letters": theirs.letter.id, "repair-actions": theirs.repair_id}
        paths = [
            ("get", "incidents/{}", {}),
            ("get", "incidents/{}/letters", {}),
            ("get", "incidents/{}/timeline", {}),
            ("post", "incidents/{}/acknowledge", {}),
            ("post", "incidents/{}/resolve", RESOLUTION),
            ("post", "incidents/{}/retry", {"all": True, "expected_count": 1}),
            ("get", "dead-letters/{}", {}),
            ("get", "dead-letters/{}/payload", {}),
            ("post", "dead-letters/{}/retry", {}),
            ("post", "dead-letters/{}/close-as-done", {"reason": "x"}),
            ("post", "dead-letters/{}/discard", {"reason": "x"}),
            ("get", "repair-actions/{}", {}),
            ("post", "repair-actions/{}/cancel", {}),
            ("get", "repair-batches/{}", {}),
        ]
        before = snapshot()
        for method, path, body in paths:
            hidden_id: UUID = ids.get(path.split("/")[0], theirs.batch_id)
            bodies = [
                plain(getattr(olga, method)(path.format(one), *([body] if method == "post" else [])), one)
                for one in (str(hidden_id), missing)
            ]
            assert bodies[0] == bodies[1], path
            assert bodies[0]["status"] == 404
        assert snapshot() == before
        denied = AuditEvent.objects.filter(operator_name="olga", verdict="denied")
        assert {row.tenant for row in denied} == {"t-b", "(none)"}
        assert {row.target_id for row in denied} >= {str(one) for one in ids.values()}

    def test_a_change_that_is_yours_to_see_but_not_to_make_is_forbidden(self, vera: Api) -> None:
        """DESIGN 7: 403, audited, whatever the verb."""
        letter = dead_letter()
        before = snapshot()
        for path, body, _ in changes(letter).values():
            problem(vera.post(path, body), 403, "access_denied")
        problem(vera.get(f"dead-letters/{letter.id}/payload"), 403, "access_denied")
        assert snapshot() == before
        assert AuditEvent.objects.filter(operator_name="vera", verdict="denied").count() == 6

    def test_a_grant_that_was_taken_away_reads_no_receipt(self, cast: Cast, olga: Api) -> None:
        """C4: authorised before a replay is read."""
        letter = dead_letter()
        path = f"incidents/{letter.incident_id}/acknowledge"
        assert olga.post(path, key="K1").status_code == 200
        ScopeUserGrant.objects.filter(user_id=cast.olga.user_id).delete()
        problem(olga.post(path, key="K1"), 404, "operations_incident_not_found")


def plain(answer: Any, own_id: str) -> dict[str, Any]:
    """Return a problem without what differs between any two requests."""
    text = answer.content.decode().replace(own_id, "ID")
    document: dict[str, Any] = json.loads(text)
    document.pop("request_id")
    return document


def snapshot() -> list[Any]:
    """Return everything that a refused request must leave alone."""
    return [
        sorted(Incident.objects.values_list("id", "state", "version")),
        sorted(DeadLetter.objects.values_list("id", "state")),
        sorted(RepairAction.objects.values_list("id", "state")),
        sorted(RepairBatch.objects.values_list("id", "state")),
        AuditEvent.objects.filter(verdict="allowed").count(),
    ]
