"""Every route of the REST API; include it under ``api/``."""

from __future__ import annotations

from django.urls import path, re_path
from django.urls.resolvers import URLPattern, URLResolver

from deadletters.api.urls import urlpatterns as deadletters
from grants.api.urls import urlpatterns as grants
from incidents.api.urls import urlpatterns as incidents
from opsconsole.api import views
from opsconsole.core.rest import API_NAMESPACE
from opsconsole.middleware import named
from repairs.api.urls import urlpatterns as repairs

app_name = API_NAMESPACE
VERSION = "v1/"


def _under(prefix: str, patterns: list[URLPattern]) -> list[URLPattern]:
    """Return ``patterns`` with a prefix, without a further namespace or level, each request with an id."""
    return [path(f"{prefix}{pattern.pattern}", named(pattern.callback), name=pattern.name) for pattern in patterns]


urlpatterns: list[URLPattern | URLResolver] = [
    *_under(VERSION, [*incidents, *deadletters, *repairs, *grants]),
    path("schema/", views.schema, name="schema"),
    path("docs/", views.docs, name="docs"),
    re_path(r"^", named(views.UnknownRoute.as_view()), name="unknown"),
]
