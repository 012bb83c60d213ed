"""Included by a worker that is to be killed while it relays a repair; E2E_RELAY_DIES says on which side of the send."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

from repairs import relay

publish = relay.Outbox.publish


def publish_and_die(self: relay.Outbox, outgoing: relay.Outgoing) -> None:
    if os.environ["E2E_RELAY_DIES"] == "after":
        publish(self, outgoing)
    os.kill(os.getpid(), signal.SIGKILL)


relay.Outbox.publish = publish_and_die  # type: ignore[method-assign]
# The real one is a minute, which is a long time for a test to wait.
relay.LEASE = timedelta(seconds=1)
