"""The embedded settings with the demo's jobs: what ``manage.py up`` gives to the processes that it starts."""

from __future__ import annotations

from opsconsole.demo.flaky import HOST
from opsconsole.demo.folder import DemoFolder
from opsconsole.demo.policies import POLICIES
from opsconsole.settings import base
from opsconsole.settings.base import *  # noqa: F403
from opsconsole.settings.environment import env

OPSCONSOLE_SOURCE = env.text("OPSCONSOLE_SOURCE", "demo")
OPSCONSOLE_IDENTITY = "opsconsole.demo.identity.identity"
OPSCONSOLE_TASK_POLICIES = [*base.OPSCONSOLE_TASK_POLICIES, *POLICIES]

# The desk is at home, and remembers what it was told.
OPSCONSOLE_EVIDENCE_ALLOW = [*base.OPSCONSOLE_EVIDENCE_ALLOW, HOST]
_DESK = DemoFolder(base.VAR_DIR / "demo").desk_port()
OPSCONSOLE_WEBHOOK_PROBES = [*base.OPSCONSOLE_WEBHOOK_PROBES, *([f"http://{HOST}:{_DESK}/"] if _DESK else [])]
EMAIL_BACKEND = "opsconsole.demo.mail.Backend"

CELERY_IMPORTS = ["opsconsole.demo.tasks"]
CELERY_TASK_ROUTES = {"demo.*": {"queue": "demo"}}

# In the terminal the demo's failures, a hundred in the first minute, would push away the password that is shown once.
_FAILURES = {"level": "WARNING", "handlers": ["failures"], "propagate": False}
LOGGING = {
    **base.LOGGING,
    "handlers": {
        **base.LOGGING["handlers"],
        "failures": {
            **base.LOGGING["handlers"]["stderr"],
            "class": "logging.FileHandler",
            "filename": str(DemoFolder(base.VAR_DIR / "demo").log),
            "encoding": "utf-8",
            "delay": True,
        },
    },
    "loggers": {
        **base.LOGGING["loggers"],
        "celery.app.trace": _FAILURES,
        "celery.worker.request": _FAILURES,
        "celery.worker.consumer.consumer": _FAILURES,
        "celery.worker.strategy": {"level": "WARNING"},
        "kombu.connection": {"level": "ERROR"},  # warns at each connection that files have no host name
    },
}
