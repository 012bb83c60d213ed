"""The embedded settings with the demo's jobs: what ``manage.py up`` gives to the processes that it starts."""

from __future__ import annotations

from opsconsole.demo.policies import POLICIES
from opsconsole.settings import base
from opsconsole.settings.base import *  # noqa: F403
from opsconsole.settings.environment import env

OPSCONSOLE_SOURCE = env.text("OPSCONSOLE_SOURCE", "demo")
OPSCONSOLE_IDENTITY = "opsconsole.demo.identity.identity"
OPSCONSOLE_TASK_POLICIES = [*base.OPSCONSOLE_TASK_POLICIES, *POLICIES]

CELERY_IMPORTS = ["opsconsole.demo.tasks"]
CELERY_TASK_ROUTES = {"demo.*": {"queue": "demo"}}

# The console keeps each traceback. In the terminal forty of them would hide everything else, so there it is one line.
_ONE_LINE = {"level": "WARNING", "filters": ["one_line"]}
LOGGING = {
    **base.LOGGING,
    "filters": {**base.LOGGING["filters"], "one_line": {"()": "opsconsole.demo.logs.OneLine"}},
    "loggers": {
        **base.LOGGING["loggers"],
        "celery.app.trace": _ONE_LINE,
        "celery.worker.request": _ONE_LINE,
        "celery.worker.consumer.consumer": _ONE_LINE,
        "celery.worker.strategy": {"level": "WARNING"},
        "kombu.connection": {"level": "ERROR"},  # warns at each connection that files have no host name
    },
}
