"""The site itself: its policy, its line about the machinery, and the host project beside it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth import get_user_model
from django.db import connection
from django.test import Client, RequestFactory
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from deadletters.models import DeadLetter, WorkerNode
from grants.models import AuditEvent
from grants.operators import Operator
from incidents.models import Incident
from opsconsole.console import machinery
from opsconsole.console.site import POLICY, site
from opsconsole.core.database import database_now
from opsconsole.core.request_id import current_request_id
from tests.admin.conftest import SignIn
from tests.admin.tools import confirm, hidden_fields, text_of
from tests.cast import Cast
from tests.factories import dead_letter

OURS = {"opsconsole", "grants", "incidents", "deadletters", "repairs"}


def test_the_policy_is_the_strict_one() -> None:
    assert POLICY == (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    )


@pytest.mark.django_db
def test_every_answer_has_the_policy_and_is_kept_by_no_cache(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.ada)
    for path in (
        "", "login/", "nothing/", "incidents/?x=1", f"incidents/{letter.incident_id}/", "audit/", "logout/",
        f"dead-letters/{letter.id}/traceback/{letter.occurrences.get().id}/",
    ):  # fmt: skip
        answer = client.get(f"/ops/{path}")
        assert answer["Content-Security-Policy"] == POLICY, path
        assert "no-store" in answer["Cache-Control"], path
    anonymous = Client().get("/ops/incidents/")
    assert anonymous["Content-Security-Policy"] == POLICY


def test_nothing_of_ours_is_registered_on_the_default_site() -> None:
    """A host project's own admin stays as it is."""
    assert [model for model in admin.site._registry if model.__module__.split(".")[0] in OURS] == []
    assert {model.__module__.split(".")[0] for model in site._registry} <= {*OURS, "django_celery_beat"}
    assert "delete_selected" in dict(admin.site.actions)
    assert "delete_selected" not in dict(site.actions)


@pytest.mark.django_db
@pytest.mark.urls("tests.admin.host_urls")
def test_the_admin_of_a_host_project_is_left_alone(cast: Cast, sign_in: SignIn) -> None:
    get_user_model().objects.filter(pk=cast.ada.user_id).update(is_superuser=True)
    client = sign_in(cast.ada)
    host = client.get("/admin/")
    assert host.status_code == 200
    assert "Content-Security-Policy" not in host.headers
    assert "/ops/" not in host.content.decode()
    ours = client.get("/ops/")
    assert ours.status_code == 200
    assert 'href="/admin/' not in ours.content.decode()


@pytest.mark.django_db(transaction=True)
def test_a_project_with_atomic_requests_works(cast: Cast, sign_in: SignIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Services are durable: inside a request's transaction each would raise."""
    letter = dead_letter()
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    client = sign_in(cast.ada)
    path = f"/ops/incidents/{letter.incident_id}/"
    fields = hidden_fields(client.get(path).content.decode(), f"{path}take/")
    assert client.post(f"{path}take/", fields).status_code == 302
    assert Incident.objects.get().state == "acknowledged"
    assert confirm(client, f"{path}retry-one/").status_code == 302
    # A refusal writes its denial in a transaction of its own.
    assert sign_in(cast.bram).get(path).status_code == 404


@pytest.mark.django_db
def test_a_post_without_a_csrf_token_is_refused(letter: DeadLetter, cast: Cast) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(get_user_model().objects.get(pk=cast.ada.user_id))
    path = f"/ops/incidents/{letter.incident_id}/take/"
    values = {"idempotency_key": "k", "version": "1", "standing": "open:1:"}
    assert client.post(path, values).status_code == 403
    assert Incident.objects.get().state == "open"


@pytest.mark.django_db
@pytest.mark.parametrize("middleware", [True, False], ids=["with the project's check", "in a project without one"])
def test_what_comes_from_an_old_page_is_told_so_on_a_page_of_ours(
    letter: DeadLetter, cast: Cast, settings: Any, middleware: bool
) -> None:
    """Two tabs: signing in again in one of them makes every form in the other one worthless."""
    if not middleware:
        settings.MIDDLEWARE = [one for one in settings.MIDDLEWARE if "Csrf" not in one]
    client = Client(enforce_csrf_checks=True)
    user = get_user_model().objects.get(pk=cast.ada.user_id)
    client.force_login(user)
    take = f"/ops/incidents/{letter.incident_id}/take/"
    page = client.get(f"/ops/incidents/{letter.incident_id}/").content.decode()
    (token,) = set(re.findall(r'csrfmiddlewaretoken" value="([^"]+)"', page))
    fields = {**hidden_fields(page, take), "csrfmiddlewaretoken": token}
    client.cookies["opsconsole_csrf"] = "n" * 32
    answer = client.post(take, fields)
    text = text_of(answer.content.decode())
    assert answer.status_code == 403
    assert answer["Content-Security-Policy"] == POLICY
    assert "This page is out of date" in text
    assert "Nothing was changed." in text
    assert f'href="{take}">Load it again' in answer.content.decode()
    assert Incident.objects.get().state == "open"
    client.get(f"/ops/incidents/{letter.incident_id}/")
    fields["csrfmiddlewaretoken"] = client.cookies["opsconsole_csrf"].value
    assert client.post(take, fields).status_code == 302
    assert Incident.objects.get().state == "acknowledged"


@pytest.mark.django_db
def test_no_page_takes_anything_without_a_csrf_token(letter: DeadLetter, cast: Cast) -> None:
    """The project's own check leaves them to the console's, so that one must be on all of them."""
    seen = 0
    for pattern in _views(site.get_urls()):
        request = RequestFactory(enforce_csrf_checks=True).post("/ops/")
        request.user = get_user_model().objects.get(pk=cast.ada.user_id)
        request._dont_enforce_csrf_checks = False
        arguments = dict.fromkeys(pattern.pattern.converters, letter.id)
        answer = pattern.callback(request, **arguments)
        assert answer.status_code == 403, pattern
        assert "out of date" in answer.content.decode(), pattern
        seen += 1
    assert seen > 30


def _views(patterns: Iterable[Any]) -> Iterator[Any]:
    for one in patterns:
        if hasattr(one, "url_patterns"):
            yield from _views(one.url_patterns)
        else:
            yield one


@pytest.mark.django_db
def test_the_environment_is_in_the_header_and_in_every_confirmation(
    letter: DeadLetter, cast: Cast, sign_in: SignIn, settings: Any
) -> None:
    settings.OPSCONSOLE_ENVIRONMENT = "production-eu"
    client = sign_in(cast.ada)
    assert text_of(client.get("/ops/").content.decode()).count("production-eu") >= 2
    text = text_of(client.get(f"/ops/incidents/{letter.incident_id}/close/").content.decode())
    assert "in production-eu" in text


@pytest.mark.django_db
def test_the_line_about_the_machinery_is_on_every_page_and_costs_one_query_in_five_seconds(
    letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    client = sign_in(cast.vera)
    text = text_of(client.get("/ops/").content.decode())
    assert "No worker reports" in text
    machinery.forget()
    now = database_now()
    for name, age in (("a", 3), ("b", 300)):
        WorkerNode.objects.create(
            id=name, source="tests", host=f"host-{name}", pid=1, started_at=now, seen_at=now - timedelta(seconds=age),
            captured_at=now - timedelta(seconds=age), journal_bytes=1_234, journal_oldest_seconds=7,
        )  # fmt: skip
    WorkerNode.objects.create(
        id="old", source="tests", host="x", pid=1, started_at=now, seen_at=now - timedelta(days=3)
    )
    WorkerNode.objects.create(id="gone", source="tests", host="y", pid=1, started_at=now, seen_at=now, stopped_at=now)
    with CaptureQueriesContext(connection) as found:
        for path in ("/ops/", "/ops/repairs/", "/ops/nothing/"):
            text = text_of(client.get(path).content.decode())
            assert "1 of 2 workers reporting (silent: host-b)" in text, path
            assert "oldest 7 s" in text
            assert f"Last capture {timezone.now():%d %b %Y}" in text
    assert len([one for one in found.captured_queries if "ops_deadletters_workernode" in one["sql"]]) == 1


@pytest.mark.django_db
def test_who_may_read_nothing_is_told_no_host(cast: Cast, sign_in: SignIn) -> None:
    """GRA-02: that capture has trouble is for everybody, where it runs is not."""
    now = database_now()
    WorkerNode.objects.create(
        id="a", source="tests", host="host-a", pid=1, started_at=now, seen_at=now - timedelta(minutes=5)
    )
    shown = {name: sign_in(operator).get("/ops/").content.decode() for name, operator in vars_of(cast).items()}
    assert "0 of 1 workers reporting" in text_of(shown["nobody"])
    assert {name for name, page in shown.items() if "host-a" in page} == {"ada", "olga", "bram", "vera"}
    assert 'href="/ops/workers/"' not in shown["nobody"]


def vars_of(cast: Cast) -> dict[str, Operator]:
    return {name: getattr(cast, name) for name in ("ada", "olga", "bram", "vera", "nobody")}


@pytest.mark.django_db
def test_a_request_has_an_id_without_any_middleware_of_ours(
    letter: DeadLetter, cast: Cast, sign_in: SignIn, settings: Any
) -> None:
    """As in a project that attaches: in the answer, in the audit trail, and nowhere once it is answered."""
    settings.MIDDLEWARE = [one for one in settings.MIDDLEWARE if not one.startswith("opsconsole.")]
    given = "7c9e6679-7425-40de-944b-e07fc1f90ae7"
    answer = sign_in(cast.bram).get(f"/ops/incidents/{letter.incident_id}/", headers={"X-Request-ID": given})
    assert (answer.status_code, answer["X-Request-ID"]) == (404, given)
    assert AuditEvent.objects.get(operator_name="bram", verdict="denied").request_id == given
    other = sign_in(cast.olga).get(f"/ops/incidents/{letter.incident_id}/")
    assert (other.status_code, len(other["X-Request-ID"])) == (200, 36)
    assert current_request_id() == ""


@pytest.mark.django_db
def test_the_page_for_what_is_not_there_tells_how_to_ask(cast: Cast, sign_in: SignIn) -> None:
    answer = sign_in(cast.nobody).get("/ops/incidents/01890000-0000-7000-8000-000000000000/")
    text = text_of(answer.content.decode())
    assert answer.status_code == 404
    assert "nobody asks for access in opsconsole development" in text
    assert "needs inspect, incidents.acknowledge, dead-letters.retry" in text


@pytest.mark.django_db
def test_the_page_after_logging_out_shows_nothing_of_the_console(cast: Cast, sign_in: SignIn) -> None:
    """Neither the menu nor the line about capture: who reads it is nobody any more."""
    now = database_now()
    WorkerNode.objects.create(id="a", source="tests", host="host-a", pid=1, started_at=now, seen_at=now)
    client = sign_in(cast.ada)
    before = client.get("/ops/logout/").content.decode()
    assert "ops-menu" in before
    assert "ops-machinery" in before
    after = client.post("/ops/logout/")
    assert after.status_code == 200
    html = after.content.decode()
    for word in ("ops-menu", "ops-phone", "ops-machinery", "host-a", "reporting", "Log out", "ada"):
        assert word not in html, word
    assert (after.context["menu"], after.context["machinery"], after.context["has_permission"]) == ([], None, False)


@pytest.mark.django_db
def test_signing_in_and_out(cast: Cast) -> None:
    client = Client()
    answer = client.post("/ops/login/", {"username": "ada", "password": "pw", "next": "/ops/incidents/"})
    assert (answer.status_code, answer["Location"]) == (302, "/ops/incidents/")
    assert client.get("/ops/logout/").status_code == 200
    assert client.get("/ops/incidents/").status_code == 200
    assert "logged out" in text_of(client.post("/ops/logout/").content.decode())
    assert client.get("/ops/incidents/").status_code == 302
    wrong = client.post("/ops/login/", {"username": "ada", "password": "no"})
    assert "correct username and password" in text_of(wrong.content.decode())
    outside = client.post("/ops/login/", {"username": "ada", "password": "pw", "next": "https://example.org/"})
    assert outside["Location"].startswith("/")


@pytest.mark.django_db
def test_a_password_is_changed_here(cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.ada)
    new = "a-long-new-passphrase"
    values = {"old_password": "pw", "new_password1": new, "new_password2": new}
    assert client.post("/ops/password_change/", values)["Location"] == "/ops/password_change/done/"
    assert client.get("/ops/password_change/done/").status_code == 200
    assert client.post("/ops/password_change/", values).status_code == 200


@pytest.mark.django_db
@pytest.mark.parametrize("wanted", ["https://elsewhere.example/", "//elsewhere.example", "javascript:alert(1)", ""])
def test_after_an_address_that_is_not_ours_one_is_led_to_the_overview(wanted: str, cast: Cast) -> None:
    """Not to an address of the host project."""
    client = Client()
    page = client.get("/ops/login/", {"next": wanted})
    assert 'name="next" value="/ops/"' in page.content.decode()
    sent = {"username": "ada", "password": "pw", "next": wanted}
    assert client.post("/ops/login/", sent)["Location"] == "/ops/"


@pytest.mark.django_db
def test_after_signing_in_one_is_led_to_what_one_wanted(cast: Cast) -> None:
    sent = {"username": "ada", "password": "pw", "next": "/ops/incidents/?state=mine"}
    assert Client().post("/ops/login/", sent)["Location"] == "/ops/incidents/?state=mine"
