"""Settings of the benchmarks: the defaults, and the peer's app beside ours so that both find their tables."""

from __future__ import annotations

from importlib.util import find_spec

from opsconsole.settings.base import *  # noqa: F403
from opsconsole.settings.base import INSTALLED_APPS

if find_spec("django_celery_results") is not None:
    INSTALLED_APPS = [*INSTALLED_APPS, "django_celery_results"]
