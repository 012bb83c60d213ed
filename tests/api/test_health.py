"""What a load balancer asks."""

from __future__ import annotations

from unittest import mock

import pytest
from django.db import OperationalError, connection
from django.test import Client
from django.urls import resolve

from tests.project.test_settings import PRODUCTION, settings_with


def test_alive_is_said_without_looking_at_the_database(client: Client) -> None:
    """Without the fixture ``db`` any query is an error."""
    answer = client.get("/healthz")
    assert (answer.status_code, answer.content) == (200, b"ok\n")


@pytest.mark.django_db
def test_ready_is_said_while_the_database_answers(client: Client) -> None:
    assert client.get("/readyz").status_code == 200
    with mock.patch.object(connection, "cursor", side_effect=OperationalError("gone")):
        answer = client.get("/readyz")
    assert (answer.status_code, answer["Cache-Control"]) == (
        503,
        "max-age=0, no-cache, no-store, must-revalidate, private",
    )


def test_what_production_answers_over_plain_http_is_there() -> None:
    [exempt] = settings_with(PRODUCTION, "SECURE_REDIRECT_EXEMPT")
    assert isinstance(exempt, list)
    assert {resolve(f"/{pattern.strip('^$')}").url_name for pattern in exempt} == {"healthz", "readyz"}


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_it_is_asked_and_never_told(client: Client, path: str) -> None:
    assert client.post(path).status_code == 405
