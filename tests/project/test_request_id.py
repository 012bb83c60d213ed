"""The id of a request, from its header to log lines and audit rows."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import pytest
from django.http import HttpRequest, HttpResponse
from django.test import Client, override_settings
from django.urls import path

from opsconsole.core.request_id import current_request_id

GIVEN = "7c9e6679-7425-40de-944b-e07fc1f90ae7"


def seen(request: HttpRequest) -> HttpResponse:
    return HttpResponse(current_request_id())


def broken(request: HttpRequest) -> HttpResponse:
    raise RuntimeError(current_request_id())


urlpatterns = [path("seen", seen), path("broken", broken)]


@pytest.fixture(autouse=True)
def _urls() -> Iterator[None]:
    with override_settings(ROOT_URLCONF=__name__):
        yield


def test_the_given_id_is_seen_by_the_core_and_sent_back() -> None:
    response = Client().get("/seen", headers={"X-Request-ID": GIVEN})
    assert response.content.decode() == GIVEN
    assert response["X-Request-ID"] == GIVEN


def test_a_request_without_an_id_gets_one() -> None:
    response = Client().get("/seen")
    assert str(UUID(response["X-Request-ID"])) == response["X-Request-ID"] == response.content.decode()


@pytest.mark.parametrize(
    "given", ["x", "4111-1111", f"{GIVEN}\r\nSet-Cookie: a=b", "a" * 5000, "-" * 3000 + GIVEN, "\N{SNOWMAN}"]
)
def test_what_is_no_id_is_replaced(given: str) -> None:
    response = Client().get("/seen", headers={"X-Request-ID": given})
    assert str(UUID(response["X-Request-ID"])) == response["X-Request-ID"] == response.content.decode()
    assert response["X-Request-ID"] != GIVEN


@pytest.mark.parametrize("given", [GIVEN.upper(), GIVEN.replace("-", ""), f"{{{GIVEN}}}", f"urn:uuid:{{{GIVEN}}}"])
def test_an_id_in_another_form_is_brought_into_the_one_form(given: str) -> None:
    response = Client().get("/seen", headers={"X-Request-ID": given})
    assert response["X-Request-ID"] == response.content.decode() == GIVEN


@pytest.mark.parametrize("url", ["/seen", "/broken", "/nowhere"])
def test_the_id_ends_with_its_request(url: str) -> None:
    Client(raise_request_exception=False).get(url, headers={"X-Request-ID": GIVEN})
    assert current_request_id() == ""
