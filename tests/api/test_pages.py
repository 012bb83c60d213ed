"""The pages that people decide on: an incident's, a letter's, its arguments; the trail and who one is."""

from __future__ import annotations

import json
import shutil
import subprocess
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
from django.db import DatabaseError

from deadletters.journal.events import MessageState
from deadletters.models import Attempt, DeadLetter, SealedMessage
from grants import audit
from grants.actions import Action
from grants.models import AuditEvent, ScopeUserGrant
from opsconsole.core.database import database_now
from repairs import selectors
from tests.api.client import Api, problem
from tests.api.situations import retrying
from tests.api.test_lists import letters, walk
from tests.cast import Cast, give, make_operator
from tests.factories import TIMED_OUT, dead_letter

BIG = (
    b"[[9007199254740993, -9007199254740992, 9007199254740991, 1.5],"
    b' {"doc_id": 9221939555730002819, "a/b": [12345678901234567890]}, {}]'
)


class TestIncident:
    def test_a_page_shows_what_a_person_decides_by(self, ada: Api, cast: Cast) -> None:
        """A8: the incident, its letters, its repair actions, newest first."""
        tried = retrying(cast.ada)
        waiting = dead_letter()
        page = ada.get(f"incidents/{waiting.incident_id}").json()
        assert page["id"] == str(waiting.incident_id)
        assert (page["severity"], page["state"], page["letter_count"], page["unresolved_count"]) == (
            "high", "acknowledged", 2, 2,
        )  # fmt: skip
        assert [letter["id"] for letter in page["letters"]] == [str(waiting.id), str(tried.id)]
        assert [action["dead_letter"] for action in page["repair_actions"]] == [str(tried.id)]
        assert page["waiting"] == {"safe": 1, "ambiguous": 0, "not_declared": 0, "is_capped": False}
        for link in page["links"].values():
            assert ada.get(link).json()["results"]

    def test_a_page_is_bounded_and_leads_to_the_rest(self, ada: Api, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(selectors, "SHOWN", 2)
        monkeypatch.setattr(selectors.letters_selectors, "COUNTED_LETTERS", 3)
        incident = letters(5)[0].incident
        page = ada.get(f"incidents/{incident.id}").json()
        assert len(page["letters"]) == 2
        assert page["waiting"] == {"safe": 3, "ambiguous": 0, "not_declared": 0, "is_capped": True}
        assert len(ada.get(page["links"]["letters"]).json()["results"]) == 5

    def test_a_page_says_whose_task_it_is_and_where_its_runbook_is(self, ada: Api, settings: Any) -> None:
        path = f"incidents/{dead_letter().incident_id}"
        assert [ada.get(path).json()[name] for name in ("team", "runbook")] == ["", ""]
        told = {"team": "Mail", "runbook": "https://runbooks.example/mail"}
        settings.OPSCONSOLE_TASK_POLICIES = [{"pattern": "shop.*", **told}]
        document = ada.get(path).json()
        assert {name: document[name] for name in told} == told

    def test_the_letters_of_an_incident_are_a_list_like_any_other(self, ada: Api) -> None:
        made = letters(5)
        dead_letter(task="shop.other")
        path = f"incidents/{made[0].incident_id}/letters"
        assert sorted(one for page in walk(ada, path, {"limit": 2}) for one in page) == sorted(
            str(letter.id) for letter in made
        )
        assert ada.rows(path, {"state": "resolved"}) == []

    def test_the_timeline_merges_events_failures_and_repairs(self, ada: Api, cast: Cast) -> None:
        """Each once, newest first, whatever the size of a page."""
        letter = retrying(cast.ada)
        dead_letter()
        ada.post(f"incidents/{letter.incident_id}/acknowledge", {"take_over": True})
        path = f"incidents/{letter.incident_id}/timeline"
        rows = ada.rows(path)
        assert [row["at"] for row in rows] == sorted((row["at"] for row in rows), reverse=True)
        kinds = [row["kind"] for row in rows]
        assert (kinds.count("occurrence"), kinds.count("repair")) == (2, 1)
        assert {row["what"] for row in rows if row["kind"] == "event"} >= {
            "operations.incident_opened", "operations.incident_acknowledged",
        }  # fmt: skip
        for limit in (1, 2, 3):
            assert [one for page in walk(ada, path, {"limit": limit}) for one in page] == [row["id"] for row in rows]

    def test_the_timeline_shows_no_refusals_and_nothing_of_other_incidents(self, ada: Api, vera: Api) -> None:
        letter, other = dead_letter(), dead_letter(task="shop.other")
        problem(vera.post(f"incidents/{letter.incident_id}/acknowledge"), 403, "access_denied")
        ada.post(f"incidents/{other.incident_id}/acknowledge")
        rows = ada.rows(f"incidents/{letter.incident_id}/timeline")
        assert {row["what"] for row in rows} == {"operations.incident_opened", letter.error_class}


class TestLetter:
    def test_a_page_shows_the_whole_history(self, ada: Api) -> None:
        letter = dead_letter(chord_id="")
        Attempt.objects.create(
            tenant=letter.tenant, source=letter.source, task_id=letter.task_id, retries=0, job_type=letter.job_type,
            happened_at=letter.first_seen_at - timedelta(minutes=1), error_class="OSError", outcome_class="safe",
        )  # fmt: skip
        page = ada.get(f"dead-letters/{letter.id}").json()
        assert page["incident"]["number"] == letter.incident.number
        assert len(page["occurrences"]) == page["occurrence_count"] == 1
        assert [attempt["error_class"] for attempt in page["retried_attempts"]] == ["OSError"]
        assert "shop/mail.py" in page["traceback"]
        assert page["payload_preview"] == '"a@example.org", order=7'
        assert page["retry"] == {"refusal": None, "warnings": ["no_worker_seen"]}

    def test_lists_shorten_what_a_page_shows_whole(self, ada: Api) -> None:
        letter = dead_letter()
        DeadLetter.objects.filter(id=letter.id).update(error_text="x" * 4_000)
        assert len(ada.rows("dead-letters")[0]["error_text"]) <= 300
        assert "payload_preview" not in ada.rows("dead-letters")[0]
        assert len(ada.get(f"dead-letters/{letter.id}").json()["error_text"]) == 4_000

    def test_a_secret_that_is_redacted_is_found_by_nothing(self, ada: Api) -> None:
        """SEC-02."""
        letter = dead_letter(body=b'[[], {"password": "hunter2"}, {}]')
        for answer in (ada.get(f"dead-letters/{letter.id}"), ada.get("dead-letters")):
            assert "hunter2" not in answer.content.decode()


class TestPayload:
    def test_numbers_arrive_exactly_where_a_double_would_round_them(self, ada: Api) -> None:
        """API-05."""
        letter = dead_letter(body=BIG)
        answer = ada.get(f"dead-letters/{letter.id}/payload")
        document = answer.json()
        assert document["args"] == ["9007199254740993", "-9007199254740992", 9007199254740991, 1.5]
        assert document["kwargs"] == {"doc_id": "9221939555730002819", "a/b": ["12345678901234567890"]}
        assert document["as_text"] == ["/args/0", "/args/1", "/kwargs/doc_id", "/kwargs/a~1b/0"]
        assert document["text"] == BIG.decode()
        assert json.loads(document["kwargs_json"])["doc_id"] == 9221939555730002819
        assert answer["Cache-Control"] == "no-store"

    @pytest.mark.skipif(shutil.which("node") is None, reason="node is not on the PATH")
    def test_a_javascript_client_reads_the_same_digits(self, ada: Api) -> None:
        """API-05: read with Node, as the case says."""
        letter = dead_letter(body=BIG)
        program = "const d=JSON.parse(require('fs').readFileSync(0));console.log(d.kwargs.doc_id+' '+d.letter_id)"
        answer = ada.get(f"dead-letters/{letter.id}/payload").content
        done = subprocess.run(["node", "-e", program], input=answer, capture_output=True, check=True, timeout=30)
        assert done.stdout.decode().split() == ["9221939555730002819", str(letter.id)]

    @pytest.mark.parametrize(
        "body",
        [b"[[NaN, Infinity, -Infinity, 1e999], {}, {}]", b'[["\\ud800", "\\u0000"], {"\\udfff": 1}, {}]'],
        ids=["no numbers", "surrogates"],
    )
    def test_hostile_values_break_no_answer(self, ada: Api, body: bytes) -> None:
        letter = dead_letter(body=body)
        document = ada.get(f"dead-letters/{letter.id}/payload").json()
        assert document["text"] == body.decode()
        assert len(document["args"]) in (2, 4)
        if b"NaN" in body:
            assert document["args"] == ["nan", "inf", "-inf", "inf"]

    def test_what_is_no_json_comes_as_it_is_and_is_never_decoded(self, ada: Api) -> None:
        letter = dead_letter(body=b"\x80\x04N.")
        document = ada.get(f"dead-letters/{letter.id}/payload").json()
        assert (document["text"], document["base64"], document["decode_error"]) == (None, "gAROLg==", "undecodable")

    def test_each_reading_is_audited_before_it_is_answered(self, ada: Api) -> None:
        """B3: and the row keeps that it was read, not what."""
        letter = dead_letter()
        assert ada.get(f"dead-letters/{letter.id}/payload").status_code == 200
        assert ada.get(f"dead-letters/{letter.id}/payload").status_code == 200
        rows = AuditEvent.objects.filter(action="payloads.read")
        assert [(row.verdict, row.target_id) for row in rows] == [("allowed", str(letter.id))] * 2
        assert "payloads.read on tenant=*" in rows[0].capability
        assert "example.org" not in rows[0].outcome

    def test_without_its_audit_row_nothing_is_shown(self, ada: Api) -> None:
        """B3: if the row cannot be written the answer is an error without data."""
        letter = dead_letter()
        ada.client.raise_request_exception = False
        with mock.patch.object(audit, "record", side_effect=DatabaseError("disk full")):
            answer = ada.get(f"dead-letters/{letter.id}/payload")
        problem(answer, 500, "internal_error")
        assert "example.org" not in answer.content.decode()

    def test_a_message_that_is_not_here_is_said_to_be_missing(self, ada: Api) -> None:
        letter = dead_letter()
        SealedMessage.objects.filter(letter_id=letter.id).delete()
        problem(ada.get(f"dead-letters/{letter.id}/payload"), 409, "message_not_captured")
        DeadLetter.objects.filter(id=letter.id).update(message_state=MessageState.TOO_DEEP)
        problem(ada.get(f"dead-letters/{letter.id}/payload"), 409, "message_too_deep")
        assert AuditEvent.objects.filter(action="payloads.read").count() == 0


class TestAudit:
    def test_the_trail_shows_who_did_what_newest_first(self, ada: Api) -> None:
        """B16."""
        letter = dead_letter()
        ada.post(f"dead-letters/{letter.id}/discard", {"reason": "Nobody needs it."})
        row = ada.rows("audit", {"action": "dead-letters.discard"})[0]
        expected = {
            "operator_kind": "person", "operator_name": "ada", "tenant": "default", "target_type": "dead_letter",
            "target_id": str(letter.id), "reason": "Nobody needs it.", "verdict": "allowed",
        }  # fmt: skip
        assert {name: row[name] for name in expected} == expected
        assert row["outcome"]["job"] == "shop.send_mail"
        assert row["capability"].startswith("user-grant:")
        assert row["request_id"]
        rows = ada.rows("audit")
        assert [each["at"] for each in rows] == sorted((each["at"] for each in rows), reverse=True)
        assert [one for page in walk(ada, "audit", {"limit": 2}) for one in page] == [each["id"] for each in rows]

    def test_a_tenant_that_is_named_is_authorised_first_and_a_star_needs_every_tenant(
        self, cast: Cast, ada: Api, nobody: Api
    ) -> None:
        """B2, B16."""
        dead_letter(tenant="t-a")
        dead_letter(tenant="t-b")
        give(cast.nobody, Action.AUDIT_READ, tenant="t-a")
        assert {row["tenant"] for row in nobody.rows("audit")} == {"t-a"}
        assert {row["tenant"] for row in nobody.rows("audit", {"tenant": "t-a"})} == {"t-a"}
        problem(nobody.get("audit", {"tenant": "t-b"}), 403, "access_denied")
        problem(nobody.get("audit", {"tenant": "*"}), 403, "access_denied")
        assert {row["tenant"] for row in ada.rows("audit", {"tenant": "*"})} >= {"t-a", "t-b"}
        denied = ada.rows("audit", {"verdict": "denied", "operator": cast.nobody.ref})
        assert {(row["action"], row["tenant"], row["outcome"]) for row in denied} == {
            ("audit.read", "t-b", "denied"), ("audit.read", "*", "denied"),
        }  # fmt: skip

    def test_rows_are_found_by_target_and_time(self, ada: Api) -> None:
        letter = dead_letter()
        target = {"target_type": "incident", "target_id": str(letter.incident_id)}
        assert [row["action"] for row in ada.rows("audit", target)] == ["operations.incident_opened"]
        soon = (database_now() + timedelta(hours=1)).isoformat()
        assert ada.rows("audit", {**target, "since": soon}) == []
        assert len(ada.rows("audit", {**target, "before": soon})) == 1


class TestWhoOneIs:
    def test_me_says_what_one_may_do_to_something(self, cast: Cast, vera: Api, nobody: Api) -> None:
        document = vera.get("me").json()
        assert document == {
            "id": cast.vera.ref, "kind": "person", "name": "vera", "actions": ["inspect"], "token_tenant": None,
        }  # fmt: skip
        assert nobody.get("me").json()["actions"] == []

    def test_a_decision_is_explained_without_being_audited(self, olga: Api) -> None:
        """C15."""
        yes = olga.post("authorize", {"action": "inspect", "tenant": "default"}).json()
        assert (yes["allowed"], yes["capability"].split(":")[0]) == (True, "user-grant")
        no = olga.post("authorize", {"action": "dead-letters.retry", "tenant": "t-b", "actor_type": "order"}).json()
        assert (no["allowed"], no["capability"]) == (False, None)
        assert "tenant is default, not t-b" in no["reason"]
        assert AuditEvent.objects.filter(verdict="denied").count() == 0

    def test_a_decision_about_somebody_else_needs_the_grants_there(self, ada: Api, olga: Api) -> None:
        """C15."""
        asked = {"action": "dead-letters.retry", "tenant": "default", "username": "vera"}
        problem(olga.post("authorize", asked), 403, "access_denied")
        problem(olga.post("authorize", {**asked, "username": "no-such"}), 403, "access_denied")
        assert ada.post("authorize", asked).json()["allowed"] is False
        problem(ada.post("authorize", {**asked, "username": "no-such"}), 404, "principal_not_found")

    def test_permissions_are_given_listed_and_taken_back(self, cast: Cast, ada: Api, nobody: Api) -> None:
        """C15."""
        given = {
            "user": "nobody", "action": "inspect", "tenant": "default", "reason": "on call",
            "expires_at": "2100-01-01T00:00:00Z",
        }  # fmt: skip
        first = ada.post("grants", given, key="K1")
        assert first.status_code == 201
        assert ada.post("grants", given, key="K1")["Idempotent-Replayed"] == "true"
        grant_id = first.json()["grant_id"]
        listed = nobody.get("grants").json()["results"]
        assert [(row["id"], row["holder"], row["reason"]) for row in listed] == [(grant_id, "nobody", "on call")]
        assert nobody.get("me").json()["actions"] == ["inspect"]
        assert ada.get("grants", {"user": "nobody"}).json()["results"] == listed
        problem(ada.post("grants", {**given, "user": "ada"}), 403, "grant_to_oneself")
        problem(ada.post("grants", {**given, "expires_at": "2020-01-01T00:00:00Z"}), 400, "grant_end_invalid")
        problem(ada.post("grants", {**given, "group": "x"}), 400, "invalid_input")
        assert ada.post(f"grants/{grant_id}/revoke", {"reason": "off call"}, key="K2").status_code == 200
        assert ada.post(f"grants/{grant_id}/revoke", {"reason": "off call"}, key="K2")["Idempotent-Replayed"] == "true"
        assert not ScopeUserGrant.objects.filter(user_id=cast.nobody.user_id).exists()
        problem(ada.post(f"grants/{grant_id}/revoke", {"reason": "off call"}), 404, "grant_not_found")
        problem(ada.post("grants/nonsense/revoke", {"reason": "off call"}), 404, "grant_not_found")

    def test_who_exists_is_told_to_nobody_who_could_give_them_nothing(self, olga: Api, ada: Api) -> None:
        given = {
            "action": "inspect", "tenant": "default", "reason": "on call", "expires_at": "2100-01-01T00:00:00Z",
        }  # fmt: skip
        for name in ("vera", "no-such"):
            problem(olga.get("grants", {"user": name}), 403, "access_denied")
            problem(olga.post("grants", {**given, "user": name}), 403, "access_denied")
        problem(ada.get("grants", {"group": "no-such"}), 404, "principal_not_found")
        problem(ada.post("grants", {**given, "user": "no-such"}), 404, "principal_not_found")


def test_a_page_of_a_letter_that_may_have_happened_says_so(ada: Api) -> None:
    """B6: the field's name is B's."""
    letter = dead_letter(TIMED_OUT)
    assert ada.get(f"dead-letters/{letter.id}").json()["ambiguous"] is True
    assert ada.rows("dead-letters")[0]["ambiguous"] is True


def test_an_operator_who_leaves_is_refused_at_once(cast: Cast) -> None:
    operator = make_operator("leaver")
    give(operator, Action.INSPECT)
    api = Api(operator)
    letter = dead_letter()
    assert api.get(f"dead-letters/{letter.id}").status_code == 200
    ScopeUserGrant.objects.filter(user_id=operator.user_id).delete()
    problem(api.get(f"dead-letters/{letter.id}"), 404, "dead_letter_not_found")
