"""Included by a worker that is to be killed while it relays a repair; E2E_RELAY_DIES says on which side of the send."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

from celery import Celery

from repairs import relay

publish = relay.publish


def publish_and_die(app: Celery, outgoing: relay.Outgoing, **options: Any) -> None:
    if os.environ["E2E_RELAY_DIES"] == "after":
        publish(app, outgoing, **options)
    os.kill(os.getpid(), signal.SIGKILL)


relay.publish = publish_and_die
# The real one is a minute, which is a long time for a test to wait.
relay.LEASE = timedelta(seconds=3)
