"""The relay: the only sender of repair messages, one thread in each worker.

It claims planned repairs of its source by lease, sends them with the worker's own app, and marks them sent. Killed
between sending and marking, its lease expires and the message is sent again under the same task id; the start guard
lets one of them begin.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from celery import Celery
from django.db import connections, transaction
from django.db.models import F, Q
from kombu import Queue

from deadletters.journal.hooks import REPAIR_HEADER
from deadletters.journal.message import RawMessage
from opsconsole.core.database import database_now, locked
from opsconsole.core.errors import OpsError
from opsconsole.core.forking import GATE
from repairs.models import ActionState, ActionType, RepairAction
from repairs.refusals import open_letter_message

logger = logging.getLogger(__name__)

LEASE = timedelta(seconds=60)
"""Longer than a hung broker can hold one page of sends (facts: 45 s for a hung Redis without socket timeouts)."""
ANSWER_WITHIN = timedelta(hours=1)
PAGE = 20
IDLE_SECONDS = 1.0
LONGEST_BACKOFF_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A repair's message, ready to be published: the original's but for ids, times and the repair header."""

    body: bytes
    content_type: str | None
    content_encoding: str | None
    headers: dict[str, Any]
    properties: dict[str, Any]
    exchange: str
    routing_key: str
    queue: str


def repair_message(action: RepairAction, raw: RawMessage) -> Outgoing:
    """Return what is sent: same body, queue, priority, headers and stamps; new id, attempt 0, no eta, no expiry.

    The old id stays readable as the message's parent. Group and chord ids are dropped: a second answer of one member
    could make a chord's counter run over.
    """
    letter = action.letter
    headers = {name: value for name, value in raw.headers.items() if name not in ("group", "group_index")}
    headers.update(
        {
            "id": action.new_task_id,
            "root_id": action.new_task_id,
            "parent_id": letter.task_id or None,
            "retries": 0,
            "eta": None,
            "expires": None,
            "group": None,
            REPAIR_HEADER: str(action.id),
        }
    )
    properties = {
        name: value
        for name, value in raw.properties.items()
        if name in ("priority", "reply_to", "delivery_mode", "message_id", "type", "app_id") and value is not None
    }
    properties["correlation_id"] = action.new_task_id
    return Outgoing(
        body=raw.body,
        content_type=raw.content_type,
        content_encoding=raw.content_encoding,
        headers=headers,
        properties=properties,
        exchange=letter.exchange,
        routing_key=letter.routing_key,
        queue=letter.queue,
    )


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


class Relay(threading.Thread):
    """Sends the planned repairs of one source until it is told to stop; outlives every outage."""

    def __init__(self, app: Celery, *, source: str, owner: str) -> None:
        super().__init__(name="opsconsole-relay", daemon=True)
        self.app = app
        self.source = source
        self.owner = owner
        self._troubles = {"database": "", "broker": ""}
        self._stop_asked = threading.Event()

    @property
    def trouble(self) -> str:
        """What keeps repairs from being sent, in words; "" while nothing does."""
        return "; ".join(f"{what}: {text}" for what, text in self._troubles.items() if text)

    def stop(self) -> None:
        self._stop_asked.set()

    def run(self) -> None:
        pause = IDLE_SECONDS
        while not self._stop_asked.wait(pause):
            try:
                sent = self.send_due()
                self._note("database", "")
                pause = 0.0 if sent == PAGE else IDLE_SECONDS
            except Exception as error:  # noqa: BLE001  (a relay that dies leaves every repair unsent)
                self._note("database", f"{type(error).__name__}: {error}")
                pause = min(max(pause, IDLE_SECONDS) * 2, LONGEST_BACKOFF_SECONDS / 3)
                with GATE:
                    # A kept connection would not follow a failover.
                    connections.close_all()
        with GATE:
            connections.close_all()

    def _note(self, what: str, trouble: str) -> None:
        if trouble and trouble != self._troubles[what]:
            logger.error("relay of %s: %s: %s", self.source, what, trouble)
        self._troubles[what] = trouble

    def send_due(self) -> int:
        """Send one page of due repairs and return how many were taken on; for the thread and for tests."""
        with GATE:
            claimed = self._claim()
        outbox = Outbox(self.app)
        try:
            for number, action in enumerate(claimed):
                if self._stop_asked.is_set():
                    self._release(claimed[number:], delay=timedelta(0))
                    break
                if not self._send(action, outbox):
                    # A broker that refuses one refuses the next as well, and may take long to say so.
                    self._release(claimed[number + 1 :], delay=timedelta(seconds=1))
                    break
        finally:
            outbox.close()
        return len(claimed)

    def _claim(self) -> list[RepairAction]:
        now = database_now()
        due = RepairAction.objects.filter(
            Q(lease_expires_at__isnull=True) | Q(lease_expires_at__lt=now),
            source=self.source,
            state=ActionState.PLANNED,
            action_type=ActionType.RETRY_MESSAGE,
            due_at__lte=now,
        ).order_by("due_at", "id")
        if not due.exists():
            return []
        with transaction.atomic():
            ids = [row.id for row in locked(due, skip=True)[:PAGE]]
            RepairAction.objects.filter(id__in=ids, state=ActionState.PLANNED).update(
                lease_owner=self.owner, lease_expires_at=now + LEASE
            )
        return list(RepairAction.objects.filter(id__in=ids).select_related("letter").order_by("due_at", "id"))

    def _send(self, action: RepairAction, outbox: Outbox) -> bool:
        """Send one claimed repair and mark it; returns whether the broker can be used."""
        try:
            with GATE:
                message = repair_message(action, open_letter_message(action.letter))
        except OpsError as refusal:
            # The key or the message went away after planning; it may come back, and the letter shows why it waits.
            self._release([action], error=refusal.detail, delay=timedelta(seconds=LONGEST_BACKOFF_SECONDS))
            return True
        try:
            outbox.publish(message)
        except Exception as error:  # noqa: BLE001  (each transport has its own errors; all mean "not known to be sent")
            delay = min(2.0 ** min(action.send_count + 1, 5), LONGEST_BACKOFF_SECONDS)
            self._release([action], error=f"{type(error).__name__}: {error}", delay=timedelta(seconds=delay))
            self._note("broker", f"{type(error).__name__}: {error}")
            return False
        self._note("broker", "")
        with GATE:
            self._mark_sent(action)
        return True

    def _mark_sent(self, action: RepairAction) -> None:
        now = database_now()
        RepairAction.objects.filter(id=action.id, state=ActionState.PLANNED).update(
            state=ActionState.SENT, sent_at=now, send_error=""
        )
        RepairAction.objects.filter(id=action.id).update(
            send_count=F("send_count") + 1,
            lease_owner="",
            lease_expires_at=None,
            answer_due_at=now + ANSWER_WITHIN,
        )

    def _release(self, actions: list[RepairAction], *, delay: timedelta, error: str = "") -> None:
        ids = [action.id for action in actions]
        with GATE:
            now: datetime = database_now()
            RepairAction.objects.filter(id__in=ids, state=ActionState.PLANNED, lease_owner=self.owner).update(
                lease_owner="",
                lease_expires_at=None,
                due_at=now + delay,
                send_error=error[:300],
                send_count=F("send_count") + (1 if error else 0),
            )
