"""How much waits in the brokers, asked for in a way in which no broker can hang a page.

A request never talks to a broker: it reads what a thread of this process has last heard. The thread is started by a
request whose answer is old, there is at most one for each broker, and it has timeouts of its own, so that a broker that
hangs costs one waiting thread and the word "unknown". Workers could report the depths as well, but then a broker that
hangs would silence the very reports that say who is alive, and a queue that no worker serves any more would have nobody
to report it.

Queues are asked for passively: nothing is declared, taken or kept.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from celery import Celery
from django.conf import settings
from django.utils import timezone
from kombu.exceptions import ChannelError

from deadletters import conf
from opsconsole import attach
from opsconsole.console.machinery import Machinery

logger = logging.getLogger(__name__)

KEPT_SECONDS = 8.0
"""Less than the ten seconds between two looks of a live page, so that each finds news."""
PATIENCE_SECONDS = 0.3
"""What a page waits for the first answer of all, so that it need not say "unknown" of a broker that is well."""
TIMEOUT_SECONDS = 2.0
MOST_QUEUES = 50
SHOWN_QUEUES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """What a broker says of one queue; ``consumers`` is None for one that does not count them."""

    waiting: int
    consumers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What was last heard of one broker; ``silent_since`` is when it began not to answer, None while it does."""

    depths: dict[str, Depth] = field(default_factory=dict)
    silent_since: datetime | None = None
    is_asked: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRow:
    """One queue as the overview shows it; None is what nobody knows."""

    source: str
    name: str
    waiting: int | None
    consumers: int | None
    note: str = ""

    @property
    def is_stuck(self) -> bool:
        """Whether messages wait and nobody takes them."""
        return bool(self.waiting) and self.consumers == 0


class Asker:
    """Asks one broker, in a thread."""

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.heard = Heard(is_asked=False)
        self._lock = threading.Lock()
        self._answered = threading.Event()
        self._thread: threading.Thread | None = None
        self._asked_at = float("-inf")

    def ask(self, names: Iterable[str]) -> Heard:
        """Return what was last heard, and see to it that there is something newer the next time."""
        with self._lock:
            is_running = self._thread is not None and self._thread.is_alive()
            if is_running and self.heard.silent_since is None and time.monotonic() - self._asked_at > TIMEOUT_SECONDS:
                # It has hung since it was asked; what it said before that is no news any more.
                self.heard = Heard(silent_since=timezone.now())
            if not is_running and time.monotonic() - self._asked_at > KEPT_SECONDS:
                self._asked_at = time.monotonic()
                self._thread = threading.Thread(
                    target=self._run, args=(list(names),), name="opsconsole-queue-depths", daemon=True
                )
                try:
                    self._thread.start()
                except RuntimeError:  # the system has no more threads; then nobody knows
                    self.heard = Heard(silent_since=self.heard.silent_since or timezone.now())
        if not self.heard.is_asked:
            self._answered.wait(max(self._asked_at + PATIENCE_SECONDS - time.monotonic(), 0))
        return self.heard

    def _run(self, names: list[str]) -> None:
        try:
            # Here and not in the request: a project's own configuration of its queues may be wrong.
            wanted = sorted({*names, *self.app.amqp.queues})[:MOST_QUEUES]
            self.heard = Heard(depths=read_depths(self.app, wanted))
        except Exception as error:  # noqa: BLE001 - a transport raises what it likes, and the page says "unknown"
            logger.info("the broker of %s cannot be asked: %s", self.app.main, type(error).__name__)
            self.heard = Heard(silent_since=self.heard.silent_since or timezone.now())
        finally:
            self._answered.set()


def read_depths(app: Celery, names: Iterable[str]) -> dict[str, Depth]:
    """Ask a broker, over a connection of its own that is given up after seconds; a queue that is not there is left out.

    On brokers that are a store (Redis, files, memory) an empty queue is not there; it is a queue in which 0 wait.
    """
    options = {**(app.conf.broker_transport_options or {})}
    with app.connection_for_read(connect_timeout=TIMEOUT_SECONDS, heartbeat=0) as connection:
        transport = connection.transport
        is_amqp = transport.driver_type == "amqp"
        if is_amqp:
            options |= {"read_timeout": TIMEOUT_SECONDS, "write_timeout": TIMEOUT_SECONDS}
        elif transport.driver_type == "redis":
            options |= {"socket_timeout": TIMEOUT_SECONDS, "socket_connect_timeout": TIMEOUT_SECONDS}
        connection.transport_options = options
        connection.ensure_connection(max_retries=1, interval_start=0, timeout=int(TIMEOUT_SECONDS))
        found = {}
        channel: Any = None
        for name in names:
            if channel is None:
                channel = connection.channel()
            try:
                answer = channel.queue_declare(name, passive=True)
            except ChannelError:
                if is_amqp:
                    channel = None  # RabbitMQ closes the channel with this answer
                else:
                    found[name] = Depth(waiting=0)
            else:
                consumers = int(answer.consumer_count) if is_amqp else None
                found[name] = Depth(waiting=int(answer.message_count), consumers=consumers)
        return found


_askers: dict[int, Asker] = {}
_askers_lock = threading.Lock()


def askers() -> dict[str, Asker]:
    """Return who asks, by source: one for each Celery app that this process has attached."""
    if not attach.ATTACHED and settings.ROOT_URLCONF == "opsconsole.urls":
        # The own project's web imports no Celery app otherwise; a host project's must never get this one.
        importlib.import_module("opsconsole.celery")
    with _askers_lock:
        return {
            attached.source or conf.source(): _askers.setdefault(id(attached.app), Asker(attached.app))
            for attached in attach.ATTACHED
        }


def queue_rows(machinery: Machinery) -> list[QueueRow]:
    """Return the queues that workers or the attached apps name, stuck ones first, then by what waits.

    Consumers are those that RabbitMQ counts; of a broker that does not count them, the workers that report.
    """
    by_source = askers()
    reported = {(queue.source, queue.name): queue.consumers for queue in machinery.queues}
    rows = []
    heard = {source: asker.ask(name for of, name in reported if of == source) for source, asker in by_source.items()}
    for source, name in sorted(
        {*reported, *((source, name) for source, said in heard.items() for name in said.depths)}
    ):
        said = heard.get(source)
        depth = None if said is None else said.depths.get(name)
        consumers = reported.get((source, name), 0) if depth is None or depth.consumers is None else depth.consumers
        rows.append(
            QueueRow(
                source=source,
                name=name,
                waiting=None if depth is None else depth.waiting,
                consumers=consumers,
                note="" if depth is not None else _why_unknown(source, said),
            )
        )
    return sorted(rows, key=lambda row: (not row.is_stuck, row.waiting is None, -(row.waiting or 0), row.name))


def _why_unknown(source: str, heard: Heard | None) -> str:
    if heard is None:
        return f"This console has no Celery app of source {source} to ask."
    if heard.silent_since is not None:
        return f"The broker has not answered since {heard.silent_since:%H:%M} UTC."
    return "The broker shows no such queue." if heard.is_asked else "The broker has been asked; no answer yet."
