"""The API's own pages: its OpenAPI document, the documentation made from it, and what answers for unknown routes."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_safe
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.settings import patched_settings
from rest_framework.request import Request

from grants.rest import OpsView
from opsconsole.api.openapi import SPECTACULAR
from opsconsole.core.problems import RouteNotFound
from opsconsole.core.rest import API_NAMESPACE

DOCS_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
"""Swagger UI writes style attributes into its icons; scripts come from our own files only."""


@lru_cache(maxsize=1)
def build_schema() -> dict[str, Any]:
    """Return the OpenAPI document; it depends on the code only, so it is built once per process."""
    with patched_settings(SPECTACULAR):
        generator: Any = SchemaGenerator
        schema: dict[str, Any] = generator().get_schema(request=None, public=True)
    return schema


@lru_cache(maxsize=1)
def _schema_text() -> bytes:
    return json.dumps(build_schema(), ensure_ascii=False).encode()


@require_safe
def schema(request: HttpRequest) -> HttpResponse:  # noqa: ARG001
    """The OpenAPI document, for everybody: it says what the code says, and nothing of what is stored."""
    return HttpResponse(_schema_text(), content_type="application/vnd.oai.openapi+json")


@require_safe
def docs(request: HttpRequest) -> HttpResponse:
    """The documentation as a page, with everything it loads coming from this server."""
    context = {"schema_url": reverse(f"{API_NAMESPACE}:schema"), "csrf_cookie": settings.CSRF_COOKIE_NAME}
    response = render(request, "ops/api_docs.html", context)
    response["Content-Security-Policy"] = DOCS_POLICY
    return response


class UnknownRoute(OpsView):
    """Answers 404 in the API's own form; knows nobody, since there is nothing to protect."""

    authentication_classes = ()
    permission_classes = ()
    throttle_classes = ()
    http_method_names = ["get", "head", "post", "put", "patch", "delete", "options"]

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Refuse."""
        raise RouteNotFound
