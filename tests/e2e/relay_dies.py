"""Included by a worker that is to be killed while it relays a repair; E2E_RELAY_DIES says on which side of the send."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from opsconsole.core.publishing import Published
from repairs import relay

publish = relay.Outbox.publish_many


def publish_and_die(self: relay.Outbox, messages: Sequence[relay.Outgoing], **options: Any) -> Published:
    if os.environ["E2E_RELAY_DIES"] == "after":
        publish(self, messages, **options)
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit


relay.Outbox.publish_many = publish_and_die  # type: ignore[method-assign]
# The real one is a minute, which is a long time for a test to wait.
relay.LEASE = timedelta(seconds=1)
