"""Sending messages to the broker: one connection for a page of them, whatever they are.

No transaction may be open while anything here is called: a broker that hangs would hold it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from celery import Celery
from kombu import Queue

from opsconsole.core.publishing import (
    STEP_SECONDS,
    Outcome,
    Outgoing,
    Published,
    Sender,
    in_words,
    not_sent,
    sender_for,
)

__all__ = ["Outbox", "Outgoing"]

WITHIN_SECONDS = 20.0


class Outbox:
    """One connection to the broker with the worker's own app, for a page of messages."""

    def __init__(self, app: Celery, *, timeout_seconds: int = 5) -> None:
        self.app = app
        self.timeout_seconds = timeout_seconds
        self._connection: Any = None
        self._producer: Any = None
        self._sender: Sender | None = None

    def publish(self, outgoing: Outgoing) -> None:
        """Send one message; raises whatever the broker's client raises, and sends again with a new connection.

        Its queue is declared as the app knows it: a virtual transport silently drops what no binding routes (measured).
        """
        self._connect()
        if self._producer is None:
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

    def publish_many(self, messages: Sequence[Outgoing], *, within_seconds: float = WITHIN_SECONDS) -> Published:
        """Send messages in their order, as fast as the broker allows, and return what is known of each.

        Raises nothing for what a broker does. What is not begun within the time is not sent; a broker that hangs can
        make it two steps of ``STEP_SECONDS`` longer. See ``opsconsole.core.publishing`` for how to read the answer.
        """
        if not messages:
            return Published(())
        ends_at = time.monotonic() + within_seconds
        try:
            self._connect()
            if self._sender is None:
                self._sender = sender_for(self.app, self._connection)
        except Exception as error:  # noqa: BLE001  (each transport has its own; nothing was sent yet)
            self.close(politely=False)
            return Published((not_sent("broker_unreachable", in_words(error)),) * len(messages))
        published = self._sender.send(messages, ends_at=ends_at)
        if self._sender.gone or any(it.outcome is Outcome.UNKNOWN for it in published.deliveries):
            self.close(politely=False)
        return published

    def _connect(self) -> None:
        if self._connection is not None:
            return
        connection: Any = self.app.connection_for_write()
        connection.connect_timeout = self.timeout_seconds
        if connection.transport.driver_type == "redis":
            # kombu's client waits for ever unless it is told not to.
            options = connection.transport_options
            for name, most in (("socket_connect_timeout", self.timeout_seconds), ("socket_timeout", STEP_SECONDS)):
                options[name] = min(options.get(name) or most, most)
        connection.ensure_connection(max_retries=1, interval_start=0, timeout=self.timeout_seconds)
        self._connection = connection

    def close(self, *, politely: bool = True) -> None:
        """Let go of the connection, whatever state it is in; without waiting for the broker if not politely."""
        connection, self._connection, self._producer, self._sender = self._connection, None, None, None
        if connection is not None:
            with contextlib.suppress(Exception):
                if politely:
                    connection.release()
                else:
                    connection.collect(socket_timeout=1)
