"""The embedded settings with the demo's jobs: what ``manage.py up`` gives to the processes that it starts."""

from __future__ import annotations

from opsconsole.demo.policies import POLICIES
from opsconsole.settings.base import *  # noqa: F403
from opsconsole.settings.base import LOGGING, OPSCONSOLE_TASK_POLICIES

OPSCONSOLE_IDENTITY = "opsconsole.demo.identity.identity"
OPSCONSOLE_TASK_POLICIES = [*OPSCONSOLE_TASK_POLICIES, *POLICIES]

CELERY_IMPORTS = ["opsconsole.demo.tasks"]
CELERY_TASK_ROUTES = {"demo.*": {"queue": "demo"}}

# The console keeps each traceback. In the terminal forty of them would hide everything else, so there it is one line.
LOGGING["filters"]["one_line"] = {"()": "opsconsole.demo.logs.OneLine"}
for _name in ("celery.app.trace", "celery.worker.request", "celery.worker.consumer.consumer"):
    LOGGING["loggers"][_name] = {"level": "WARNING", "filters": ["one_line"]}
LOGGING["loggers"]["celery.worker.strategy"] = {"level": "WARNING"}
LOGGING["loggers"]["kombu.connection"] = {"level": "ERROR"}  # warns at each connection that files have no host name
