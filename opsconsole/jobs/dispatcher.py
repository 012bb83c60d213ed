"""The dispatcher: one thread in each worker that has the ledger's tasks; it sends what is due.

It leases due jobs, oldest first, sends their messages a page at a time with the worker's own app, and leaves the rest
in the database while enough wait in the queue: the database is the queue, the broker the fast way from there to a
worker. Killed between leasing and sending, its jobs are sent again once their lease is over; an old message that turns
up after all is passed over.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from celery import Celery
from django.db import connections
from django.db.models import Q

from opsconsole.core.forking import GATE
from opsconsole.core.outbox import Outbox, Outgoing
from opsconsole.core.publishing import BROKER_WIDE
from opsconsole.jobs import ledger
from opsconsole.jobs.ledger import Dispatched
from opsconsole.jobs.tokens import REPAIRED_HEADER, SCOPE_HEADER, TASK_PREFIX

logger = logging.getLogger(__name__)

MOST_OUTSTANDING = 500
"""Enough to keep many workers busy between two looks, few enough that new urgent work does not wait behind them."""
FEW_OUTSTANDING = MOST_OUTSTANDING // 2
"""More are sent once there are only so many: for each one that is done, a page would be one job (measured)."""
IDLE_SECONDS = 1.0
BUSY_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 10.0
REFUSED_SECONDS = 30.0
"""How long a job waits whose own message was refused: due at once, it would head every page."""


class Dispatcher(threading.Thread):
    """Sends the due jobs of one source."""

    def __init__(
        self, app: Celery, *, source: str, owner: str, held: Callable[[str], Q | None] = lambda _source: None
    ) -> None:
        """``held`` says which jobs of a source are on hold; asked before each page."""
        super().__init__(name="opsconsole-dispatcher", daemon=True)
        self.app = app
        self.source = source
        self.owner = owner
        self.held = held
        self._stop_asked = threading.Event()
        self._outbox = Outbox(app)
        self._heads: dict[str, dict[str, Any]] = {}
        self._troubles = {"database": "", "broker": "", "job": ""}
        self._outstanding = 0
        self._is_moving = False  # more wait than is needed now, and workers take them
        self._refused_until = 0.0  # it is told until it has had the time to be tried again

    @staticmethod
    def is_wanted(app: Celery) -> bool:
        """Whether a worker of this app serves any kind of the ledger's."""
        return any(name.startswith(TASK_PREFIX) for name in app.tasks)

    @property
    def trouble(self) -> str:
        """What keeps jobs from being sent, in words; "" while nothing does."""
        return "; ".join(f"{what}: {text}" for what, text in self._troubles.items() if text)

    def stop(self) -> None:
        self._stop_asked.set()

    def run(self) -> None:
        pause = IDLE_SECONDS
        while not self._stop_asked.wait(pause):
            try:
                sent = self.send_due()
                self._note("database", "")
            except Exception as error:  # noqa: BLE001  (a dispatcher that dies leaves every job unsent)
                self._note("database", f"{type(error).__name__}: {error}")
                pause = min(max(pause, IDLE_SECONDS) * 2, LONGEST_PAUSE_SECONDS)
                with GATE:
                    # A kept connection would not follow a failover.
                    connections.close_all()
                continue
            pause = self._pause_after(sent, pause)
        self._outbox.close()
        with GATE:
            connections.close_all()

    def _pause_after(self, sent: int, pause: float) -> float:
        if self._troubles["broker"]:
            return min(max(pause, IDLE_SECONDS) * 2, LONGEST_PAUSE_SECONDS)
        if sent or self._is_moving:
            return BUSY_SECONDS
        return min(pause * 2, IDLE_SECONDS)

    def send_due(self) -> int:
        """Send due jobs until none is due or enough wait in the queue; returns how many were sent."""
        if time.monotonic() > self._refused_until:
            self._note("job", "")
        sent = 0
        while not self._stop_asked.is_set():
            with GATE:
                taken = self._take()
            if not taken:
                break
            sent += self._send(taken)
            if self._troubles["broker"]:
                break
        return sent

    def _take(self) -> list[Dispatched]:
        before, outstanding = self._outstanding, ledger.outstanding(source=self.source, most=MOST_OUTSTANDING)
        self._outstanding = outstanding
        self._is_moving = FEW_OUTSTANDING < outstanding < before
        if outstanding > FEW_OUTSTANDING:
            return []
        room = MOST_OUTSTANDING - outstanding
        return ledger.take_due(source=self.source, owner=self.owner, limit=room, held=self.held(self.source))

    def _send(self, taken: list[Dispatched]) -> int:
        """Send a page; what is not known to be with the broker is given back. Returns how many were sent."""
        published = self._outbox.publish_many([self._message(job) for job in taken])
        troubles = {"broker": "", "job": ""}
        due_again: list[str] = []
        refused: list[str] = []
        for job, delivery in zip(taken, published.deliveries, strict=True):
            if delivery.is_sent:
                continue
            is_wide = delivery.code in BROKER_WIDE
            (due_again if is_wide else refused).append(job.token)
            what = "broker" if is_wide else "job"
            troubles[what] = troubles[what] or delivery.in_words
        self._note("broker", troubles["broker"])
        if troubles["job"]:
            self._note("job", troubles["job"])
            self._refused_until = time.monotonic() + 2 * REFUSED_SECONDS
        with GATE:
            if due_again:
                ledger.give_back(due_again)
            if refused:
                ledger.give_back(refused, delay=timedelta(seconds=REFUSED_SECONDS))
        return published.sent

    def _message(self, job: Dispatched) -> Outgoing:
        """Return the message of a dispatch: the job's id, and in a header whose it is."""
        head = self._heads.get(job.kind)
        if head is None:
            made = self.app.amqp.as_task_v2("", f"{TASK_PREFIX}{job.kind}", args=(), kwargs={})
            head = self._heads[job.kind] = dict(made.headers)
        headers = {
            **head,
            "id": job.token,
            "root_id": job.token,
            "argsrepr": f"('{job.job_id}',)",
            SCOPE_HEADER: [job.tenant, job.actor_type, job.actor_id],
        }
        if job.repair_id is not None:
            headers[REPAIRED_HEADER] = str(job.repair_id)
        embedded = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
        return Outgoing(
            body=json.dumps([[str(job.job_id)], {}, embedded]).encode(),
            content_type="application/json",
            content_encoding="utf-8",
            headers=headers,
            properties={"correlation_id": job.token, "delivery_mode": 2},
            exchange="",
            routing_key=job.queue,
            queue=job.queue,
        )

    def _note(self, what: str, trouble: str) -> None:
        if trouble and trouble != self._troubles[what]:
            logger.error("dispatcher of %s: %s: %s; jobs wait in the ledger", self.source, what, trouble)
        self._troubles[what] = trouble
