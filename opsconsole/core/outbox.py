"""Sending messages to the broker: one connection for a page of them, whatever they are.

No transaction may be open while anything here is called: a broker that hangs would hold it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from celery import Celery
from kombu import Queue


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A message, ready to be published."""

    body: bytes
    content_type: str | None
    content_encoding: str | None
    headers: dict[str, Any]
    properties: dict[str, Any]
    exchange: str
    routing_key: str
    queue: str


class Outbox:
    """One connection to the broker with the worker's own app, for a page of messages.

    Every method raises whatever the broker's client raises; what was not sent is sent again with a new connection.
    """

    def __init__(self, app: Celery, *, timeout_seconds: int = 5) -> None:
        self.app = app
        self.timeout_seconds = timeout_seconds
        self._connection: Any = None
        self._producer: Any = None

    def publish(self, outgoing: Outgoing) -> None:
        """Send one message.

        Its queue is declared as the app knows it: a virtual transport silently drops what no binding routes (measured).
        """
        if self._producer is None:
            self._connection = self.app.connection_for_write()
            self._connection.connect_timeout = self.timeout_seconds
            self._connection.ensure_connection(max_retries=1, interval_start=0, timeout=self.timeout_seconds)
            self._producer = self._connection.Producer(auto_declare=False)
        declare: list[Queue] = [self.app.amqp.queues[outgoing.queue]] if outgoing.queue else []
        self._producer.publish(
            outgoing.body,
            exchange=outgoing.exchange,
            routing_key=outgoing.routing_key or outgoing.queue,
            content_type=outgoing.content_type,
            content_encoding=outgoing.content_encoding,
            headers=outgoing.headers,
            declare=declare,
            retry=False,
            **outgoing.properties,
        )

    def close(self) -> None:
        """Let go of the connection, whatever state it is in."""
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.release()
