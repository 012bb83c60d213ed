"""The OpenAPI document, and whether answers are as it says."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from django.contrib.staticfiles import finders
from drf_spectacular.drainage import GENERATOR_STATS
from jsonschema import Draft202012Validator

from opsconsole.api.views import build_schema
from tests.api.client import Api
from tests.api.test_permissions import FOURS, routes, send, the_scene
from tests.cast import Cast

__all__ = ["the_scene"]


CHANGES_OF_A_VERSION = "acknowledge|release|resolve|retry|close-as-done|discard|approve|start|pause|resume|extend|end"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """The document, built afresh."""
    build_schema.cache_clear()
    GENERATOR_STATS.reset()
    built: dict[str, Any] = build_schema()
    return built


def operations(document: dict[str, Any]) -> dict[str, tuple[str, str, dict[str, Any]]]:
    return {
        described["operationId"]: (path, method, described)
        for path, methods in document["paths"].items()
        for method, described in methods.items()
    }


def test_it_is_generated_without_a_warning(document: dict[str, Any]) -> None:
    assert not GENERATOR_STATS._warn_cache, GENERATOR_STATS._warn_cache
    assert not GENERATOR_STATS._error_cache, GENERATOR_STATS._error_cache


def test_it_describes_every_route_in_openapi_3_1(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    assert len(operations(document)) == len(routes())
    assert set(document["components"]["securitySchemes"]) == {"token", "session"}
    for path in document["paths"]:
        assert path.startswith("/api/v1/")


def test_every_operation_names_its_headers_and_its_problems(document: dict[str, Any]) -> None:
    for name, (path, method, described) in operations(document).items():
        headers = {each["name"]: each for each in described.get("parameters", []) if each["in"] == "header"}
        is_change = method == "post" and name != "explain_authorization"
        assert ("Idempotency-Key" in headers) == is_change, name
        if is_change:
            assert headers["Idempotency-Key"]["required"]
        if re.search(
            r"/(acknowledge|release|resolve|retry|close-as-done|discard|approve|start|pause|resume|extend|end)$", path
        ):
            assert "If-Match" in headers, name
        assert described["summary"]
        assert described["description"]
        for status in ("400", "401", "403", "406", "429", "500", "503", *(["413", "415"] if method == "post" else [])):
            assert list(described["responses"][status]["content"]) == ["application/problem+json"], (name, status)
            assert described["responses"][status]["description"].startswith("Codes: ")
        assert "Retry-After" in described["responses"]["429"]["headers"]
        assert "WWW-Authenticate" in described["responses"]["401"]["headers"]
        for answer in described["responses"].values():
            assert "X-Request-ID" in answer["headers"]


def test_every_list_can_be_paged(document: dict[str, Any]) -> None:
    lists = [each for name, each in operations(document).items() if name.startswith("list_") and name != "list_grants"]
    assert len(lists) == 13
    for _, _, described in lists:
        assert {"cursor", "limit"} <= {each["name"] for each in described["parameters"]}
        assert "Link" in described["responses"]["200"]["headers"]


@pytest.mark.parametrize("route", FOURS, ids=lambda route: "-".join(route))
def test_answers_are_as_described(
    route: tuple[str, str], document: dict[str, Any], the_scene: Any, cast: Cast, ada: Api, nobody: Api
) -> None:
    """Success and refusal alike, down to fields that nobody described."""
    for api in (nobody, ada):
        answer = send(api, route, FOURS[route], the_scene)
        described = next(
            each
            for path, method, each in operations(document).values()
            if method.upper() == route[0]
            and re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", path), answer.wsgi_request.path_info)
        )
        response = described["responses"][str(answer.status_code)]
        media_type = answer["Content-Type"]
        validator(document, response["content"][media_type]["schema"]).validate(answer.json())
        for header in ("ETag", "Location", "Link", "Idempotent-Replayed", "Retry-After", "WWW-Authenticate"):
            if answer.has_header(header):
                assert header in response["headers"], header


def validator(document: dict[str, Any], schema: dict[str, Any]) -> Draft202012Validator:
    closed = json.loads(json.dumps(document["components"]))
    for described in closed["schemas"].values():
        if described.get("type") == "object" and "properties" in described:
            described["additionalProperties"] = False
    return Draft202012Validator({**schema, "components": closed}, format_checker=jsonschema.FormatChecker(["uuid"]))


@pytest.mark.django_db
def test_the_document_is_served_to_everybody(stranger: Api) -> None:
    answer = stranger.get("/api/schema/")
    assert answer.status_code == 200
    assert answer["Content-Type"] == "application/vnd.oai.openapi+json"
    assert answer.json()["info"]["title"] == "opsconsole"


def test_the_documentation_loads_nothing_from_elsewhere(client: Any) -> None:
    answer = client.get("/api/docs/")
    assert answer.status_code == 200
    policy = answer["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    text = answer.content.decode()
    assert "http" not in text.replace("http-equiv", "")
    for address in re.findall(r'(?:src|href)="([^"]+)"', text):
        assert finders.find(address.removeprefix("/static/")), address
