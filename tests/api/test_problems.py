"""Everything that goes wrong is answered in one shape (RFC 9457)."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
from django.contrib.auth import get_user_model
from django.db import DatabaseError, OperationalError, connection
from django.test import override_settings

from grants.actions import Action
from grants.models import AuditEvent
from grants.services import create_token
from incidents.models import Incident
from opsconsole.core.database import database_now
from opsconsole.core.problems import as_refusal
from opsconsole.core.request_id import current_request_id
from tests.api.client import V1, Api, problem
from tests.factories import dead_letter

MISSING = "01970000-0000-7000-8000-000000000000"


@pytest.mark.parametrize("method", ["get", "post", "put", "patch", "delete", "options"])
@pytest.mark.parametrize(
    "path", ["/api/v1/nothing", "/api/", "/api/v2/incidents", "/api/v1/incidents/", "/api/v1/me/x"]
)
def test_an_unknown_route_is_a_problem_whoever_asks(stranger: Api, method: str, path: str) -> None:
    problem(getattr(stranger.client, method)(path), 404, "not_found")


def test_a_malformed_id_names_nothing(ada: Api) -> None:
    problem(ada.get("incidents/12"), 404, "not_found")


@pytest.mark.parametrize("method", ["put", "patch", "delete", "options", "trace"])
def test_a_method_that_a_route_lacks_is_a_problem_that_names_those_it_has(ada: Api, method: str) -> None:
    answer = getattr(ada.client, method)(f"{V1}/incidents")
    problem(answer, 405, "method_not_allowed")
    assert answer["Allow"] == "GET, HEAD"


def test_an_answer_that_is_no_json_is_not_on_offer(ada: Api) -> None:
    problem(ada.get("me", Accept="text/html"), 406, "not_acceptable")
    assert ada.get("me", Accept="application/problem+json, application/json;q=0.5").status_code == 200


def test_a_format_in_the_query_is_a_parameter_that_does_not_exist(ada: Api) -> None:
    document = problem(ada.get("me", {"format": "api"}), 400, "invalid_input")
    assert document["errors"][0]["parameter"] == "format"


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_a_body_that_is_no_json_by_its_type_is_refused(ada: Api, content_type: str) -> None:
    answer = ada.client.post(
        f"{V1}/authorize", "action=inspect", content_type=content_type, headers={"Idempotency-Key": "k"}
    )
    problem(answer, 415, "unsupported_media_type")


@pytest.mark.parametrize(
    "body",
    [
        "{",
        "",
        '{"a": NaN}',
        '{"action": "inspect", "action": "export"}',
        b"\xff\xfe",
        b'"\xed\xa0\x80"',
        "[" * 100_000,
        '{"a":' * 50_000 + "1" + "}" * 50_000,
        "1" * 5_000,
    ],
    ids=["cut", "empty", "NaN", "twice", "no UTF-8", "surrogate", "deep list", "deep object", "huge number"],
)
def test_a_body_that_cannot_be_read_is_refused(ada: Api, body: Any) -> None:
    answer = ada.client.post(f"{V1}/authorize", body, content_type="application/json")
    document = problem(answer, 400, "invalid_input" if body == "" else "malformed_body")
    assert document["detail"]


@pytest.mark.parametrize("body", [[], "text", 3, None, True], ids=str)
def test_a_body_is_an_object(ada: Api, body: Any) -> None:
    answer = ada.client.post(f"{V1}/authorize", json.dumps(body), content_type="application/json")
    problem(answer, 400, "invalid_input")


def test_a_body_over_a_megabyte_is_refused_before_it_is_read(ada: Api) -> None:
    answer = ada.client.post(f"{V1}/authorize", b" " * 1_000_001, content_type="application/json")
    problem(answer, 413, "body_too_large")
    answer = ada.client.post(f"{V1}/authorize", b" " * 3_000_000, content_type="multipart/form-data; boundary=x")
    problem(answer, 413, "body_too_large")


def test_each_wrong_field_is_named_by_a_pointer(ada: Api) -> None:
    answer = ada.post("authorize", {"action": "fly", "tenant": 5, "actor/type": "x", "a~b": 1})
    document = problem(answer, 400, "invalid_input")
    assert {error["pointer"] for error in document["errors"]} == {"/actor~1type", "/a~0b"}
    document = problem(ada.post("authorize", {"action": "fly", "tenant": 5}), 400, "invalid_input")
    assert {error["pointer"] for error in document["errors"]} == {"/action", "/tenant"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("take_over", "true"), ("take_over", 1), ("take_over", None), ("further", "5"), ("further", 5.0),
        ("further", True), ("further", []), ("force", True),
    ],
)  # fmt: skip
def test_a_value_of_another_json_type_is_not_bent_into_shape(ada: Api, field: str, value: Any) -> None:
    answer = ada.post(f"incidents/{MISSING}/acknowledge", {field: value})
    document = problem(answer, 400, "invalid_input")
    assert [error["pointer"] for error in document["errors"]] == [f"/{field}"]


@pytest.mark.parametrize("text", ["a\x00b", "a\ud800b"], ids=["NUL", "surrogate"])
def test_text_that_a_database_refuses_is_the_senders_mistake(ada: Api, text: str) -> None:
    letter = dead_letter()
    answer = ada.post(f"dead-letters/{letter.id}/discard", {"reason": text})
    problem(answer, 400, "invalid_input")


@pytest.mark.parametrize("key", [None, "", "   "])
def test_a_change_needs_its_key(ada: Api, key: str | None) -> None:
    problem(ada.post(f"incidents/{MISSING}/acknowledge", key=key), 400, "idempotency_key_missing")


@pytest.mark.parametrize("key", ["x" * 256, '"open', '"a\\n"', '""'])
def test_a_key_that_is_none_is_refused(ada: Api, key: str) -> None:
    problem(ada.post(f"incidents/{MISSING}/acknowledge", key=key), 400, "idempotency_key_invalid")


def test_a_bug_is_a_problem_and_is_reported_like_an_uncaught_error(ada: Api, caplog: pytest.LogCaptureFixture) -> None:
    ada.client.raise_request_exception = False
    with mock.patch("grants.api.views.held_actions", side_effect=RuntimeError("a secret")):
        answer = ada.get("me")
    document = problem(answer, 500, "internal_error")
    assert "a secret" not in json.dumps(document)
    assert "a secret" in caplog.text
    ada.client.raise_request_exception = True
    with (
        mock.patch("grants.api.views.held_actions", side_effect=RuntimeError("a secret")),
        pytest.raises(RuntimeError),  # the signal that error reporters listen to was sent
    ):
        ada.get("me")


def test_a_database_that_is_away_is_said_to_be_away(ada: Api) -> None:
    ada.client.raise_request_exception = False
    with mock.patch("grants.api.views.held_actions", side_effect=OperationalError("no route to 10.0.0.1")):
        answer = ada.get("me")
    document = problem(answer, 503, "database_unavailable")
    assert "10.0.0.1" not in json.dumps(document)
    assert answer["Retry-After"] == "5"


def test_too_many_requests_are_told_when_to_come_back(ada: Api, vera: Api) -> None:
    with override_settings(OPSCONSOLE_API_REQUESTS_PER_MINUTE=2):
        assert [ada.get("me").status_code for _ in range(3)] == [200, 200, 429]
        answer = ada.get("me")
        document = problem(answer, 429, "throttled")
        assert document["type"] == "https://iana.org/assignments/http-problem-types#quota-exceeded"
        assert 1 <= int(answer["Retry-After"]) <= 60
        assert vera.get("me").status_code == 200, "each operator has an allowance of their own"


def test_a_refusals_own_values_come_with_it(ada: Api) -> None:
    letter = dead_letter(ambiguous=True)
    document = problem(ada.post(f"dead-letters/{letter.id}/retry"), 409, "provider_outcome_unknown")
    assert document["fields"]["job_id"] == letter.job_id
    assert document["instance"] == f"{V1}/dead-letters/{letter.id}/retry"
    assert document["type"] == "urn:opsconsole:provider_outcome_unknown"


def test_a_request_keeps_the_id_that_its_sender_gave_it(ada: Api) -> None:
    answer = ada.get("nothing", X_Request_ID=MISSING)
    assert problem(answer, 404, "not_found")["request_id"] == MISSING


def test_a_request_has_an_id_without_any_middleware_of_ours(ada: Api, nobody: Api, settings: Any) -> None:
    """As in a project that attaches: in answers, problems and the audit trail, and nowhere once it is answered."""
    settings.MIDDLEWARE = [one for one in settings.MIDDLEWARE if not one.startswith("opsconsole.")]
    letter = dead_letter()
    given = problem(nobody.get(f"dead-letters/{letter.id}", X_Request_ID=MISSING), 404, "dead_letter_not_found")
    assert given["request_id"] == MISSING
    assert AuditEvent.objects.get(verdict="denied").request_id == MISSING
    assert ada.get(f"dead-letters/{letter.id}", X_Request_ID=MISSING)["X-Request-ID"] == MISSING
    assert len(problem(ada.get("nothing"), 404, "not_found")["request_id"]) == 36
    assert len(problem(Api().post("me"), 401, "not_authenticated")["request_id"]) == 36
    assert current_request_id() == ""


class TestWhoAsks:
    def test_a_token_acts_with_its_owners_grants(self, cast: Any, olga_token: str) -> None:
        letter = dead_letter()
        by_token = Api(token=olga_token)
        assert by_token.get("me").json()["kind"] == "token"
        assert by_token.get(f"dead-letters/{letter.id}").status_code == 200
        problem(by_token.post(f"dead-letters/{letter.id}/discard", {"reason": "why not"}), 403, "access_denied")

    def test_a_bad_token_never_falls_back_to_the_session(self, ada: Api) -> None:
        ada.headers = {"Authorization": "Bearer ops_nonsense"}
        answer = ada.get("me")
        problem(answer, 401, "not_authenticated")
        assert answer["WWW-Authenticate"] == 'Bearer realm="opsconsole"'

    @pytest.mark.parametrize("header", ["Bearer", "Bearer a b", "bearer \xff"])
    def test_a_broken_header_is_a_bad_token(self, ada: Api, header: str) -> None:
        ada.headers = {"Authorization": header}
        problem(ada.get("me"), 401, "not_authenticated")

    @pytest.mark.parametrize("change", [{"is_staff": False}, {"is_active": False}], ids=str)
    def test_a_session_of_somebody_who_is_no_operator_is_none(
        self, cast: Any, ada: Api, change: dict[str, bool]
    ) -> None:
        get_user_model().objects.filter(pk=cast.ada.user_id).update(**change)
        problem(ada.get("me"), 401, "not_authenticated")
        problem(ada.post("authorize"), 401, "not_authenticated")

    def test_a_change_by_session_needs_a_csrf_token(self, cast: Any) -> None:
        letter = dead_letter()
        api = Api(cast.ada, csrf=True)
        path = f"incidents/{letter.incident_id}/acknowledge"
        problem(api.post(path), 403, "csrf_failed")
        assert Incident.objects.get(id=letter.incident_id).state == "open"
        api.client.cookies["opsconsole_csrf"] = "c" * 32
        assert api.post(path, X_CSRFToken="c" * 32).status_code == 200
        assert api.get("me").status_code == 200

    def test_a_session_of_no_operator_is_told_so_before_anything_about_csrf(self, cast: Any) -> None:
        api = Api(cast.ada, csrf=True)
        get_user_model().objects.filter(pk=cast.ada.user_id).update(is_staff=False)
        problem(api.post("authorize"), 401, "not_authenticated")

    def test_a_change_by_token_needs_none(self, cast: Any, olga_token: str) -> None:
        letter = dead_letter()
        api = Api(token=olga_token, csrf=True)
        assert api.post(f"dead-letters/{letter.id}/retry").status_code == 202


@pytest.fixture
def olga_token(cast: Any) -> str:
    """A token of olga's that may look and retry."""
    made = create_token(
        by=cast.olga,
        name="script",
        actions={Action.INSPECT, Action.DEAD_LETTERS_RETRY},
        tenant="default",
        expires_at=database_now() + timedelta(days=1),
        key="token",
    )
    assert made.plain is not None
    return made.plain


def test_what_is_answered_is_not_kept_by_caches_in_between(ada: Api) -> None:
    assert ada.get("me")["Cache-Control"] == "private, no-cache"


@pytest.mark.django_db
def test_a_statement_that_can_not_be_run_is_a_bug_and_not_a_database_that_is_away() -> None:
    """A missing migration would otherwise be waited for as an outage: SQLite has one error for both."""
    with pytest.raises(DatabaseError) as raised, connection.cursor() as cursor:
        cursor.execute("SELECT nothing FROM ops_incidents_incident")
    assert as_refusal(raised.value).status == 500
    assert as_refusal(OperationalError("gone")).status == 503
