"""Every route of the console's own project."""

from __future__ import annotations

from django.urls import include, path
from django.urls.resolvers import URLPattern, URLResolver
from django.views.generic import RedirectView

from opsconsole.api.health import healthz, readyz
from opsconsole.api.metrics import MetricsView
from opsconsole.console.site import site
from opsconsole.middleware import named

urlpatterns: list[URLPattern | URLResolver] = [
    path("", RedirectView.as_view(pattern_name="opsconsole:index")),
    path("healthz", healthz, name="healthz"),
    path("readyz", readyz, name="readyz"),
    path("metrics", named(MetricsView.as_view()), name="metrics"),
    path("api/", include("opsconsole.api.urls")),
    path("ops/", site.urls),
]
