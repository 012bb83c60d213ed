"""A client of the REST API, as one operator of the cast."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

from django.contrib.auth import get_user_model
from django.test import Client

from grants.operators import Operator

V1 = "/api/v1"


class Api:
    """Sends JSON in an operator's session, or with a token, or as nobody."""

    def __init__(self, operator: Operator | None = None, *, token: str = "", csrf: bool = False) -> None:
        self.client = Client(enforce_csrf_checks=csrf, raise_request_exception=True)
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        if operator is not None:
            self.client.force_login(get_user_model().objects.get(pk=operator.user_id))

    def get(self, path: str, query: Any = None, **headers: str) -> Any:
        """GET a path below v1."""
        return self.client.get(_full(path), query, headers=self._headers(headers))

    def post(self, path: str, body: Any = None, *, key: str | None = "new", **headers: str) -> Any:
        """POST JSON to a path below v1; ``key`` "new" makes one up, None sends none."""
        if key is not None:
            headers["Idempotency_Key"] = str(uuid4()) if key == "new" else key
        return self.client.post(
            _full(path),
            json.dumps({} if body is None else body),
            content_type="application/json",
            headers=self._headers(headers),
        )

    def rows(self, path: str, query: Any = None) -> list[dict[str, Any]]:
        """Return the rows of a list's page."""
        answer = self.get(path, query)
        assert answer.status_code == 200, answer.content
        rows: list[dict[str, Any]] = answer.json()["results"]
        return rows

    def _headers(self, headers: dict[str, str]) -> dict[str, str]:
        return {**self.headers, **{name.replace("_", "-"): value for name, value in headers.items()}}


def _full(path: str) -> str:
    return path if path.startswith("/api") else f"{V1}/{path}"


def problem(answer: Any, status: int, code: str) -> dict[str, Any]:
    """Check that an answer is a whole problem of this status and code, and return it."""
    assert answer.status_code == status, answer.content
    assert answer["Content-Type"] == "application/problem+json"
    document: dict[str, Any] = answer.json()
    assert document["code"] == code, document
    assert document["status"] == status
    assert {"type", "title", "detail", "instance", "errors", "request_id"} <= set(document)
    assert document["request_id"] == answer["X-Request-ID"]
    return document
