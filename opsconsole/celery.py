"""The Celery application of the console's own project: ``celery -A opsconsole worker``."""

from __future__ import annotations

import logging.config
import os
from typing import Any

from celery import Celery
from celery.signals import setup_logging
from django.conf import settings

from opsconsole.attach import install

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "opsconsole.settings.base")

app = Celery("opsconsole")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()

install(app)


@setup_logging.connect(weak=False, dispatch_uid="opsconsole.celery.keep_our_log_lines")
def keep_our_log_lines(**_: Any) -> None:
    """Give workers and beat the same log lines as the web: connected, this keeps Celery from setting up its own."""
    logging.config.dictConfig(settings.LOGGING)
