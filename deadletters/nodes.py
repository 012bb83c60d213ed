"""What a worker says of itself every ten seconds: it is alive, what it serves, how far its journal is behind."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import celery
from celery import Celery
from django.db import Error, connections

from deadletters import conf
from deadletters.arguments import describe_signature
from deadletters.models import WorkerNode
from opsconsole.core.clock import boot_id
from opsconsole.core.database import database_now
from opsconsole.core.forking import GATE

logger = logging.getLogger(__name__)

REPORT_EVERY_SECONDS = 10.0
MISSED_AFTER = timedelta(seconds=30)
"""Two reports that could not be written: from then on nobody can be sure to have renewed a lease in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What only the worker knows at the moment of its report."""

    journal_bytes: int
    journal_oldest_seconds: float
    dropped: int
    trouble: str
    captured_at: datetime | None


class Reporter(threading.Thread):
    """Writes this worker's row every ten seconds; an outage costs rows, nothing else."""

    def __init__(
        self,
        app: Celery,
        *,
        node: str,
        source: str,
        pid: int,
        pool: str,
        concurrency: int,
        queues: Callable[[], list[str]],
        standing: Callable[[], Standing],
    ) -> None:
        super().__init__(name="opsconsole-reporter", daemon=True)
        self.app = app
        self.node = node
        self.source = source
        self.pid = pid
        self.pool = pool
        self.concurrency = concurrency
        self.queues = queues
        self.standing = standing
        self._stop_asked = threading.Event()
        self._started_at: datetime | None = None
        self._reported_at: datetime | None = None
        self._reporting_since: datetime | None = None

    def stop(self) -> None:
        self._stop_asked.set()

    def run(self) -> None:
        next_at = time.monotonic()
        while True:
            stopping = self._stop_asked.wait(max(next_at - time.monotonic(), 0.0))
            next_at = time.monotonic() + REPORT_EVERY_SECONDS
            try:
                with GATE:
                    self.report(stopping=stopping)
            except Error as error:
                logger.debug("worker node %s cannot report: %s", self.node, error)
            except Exception:
                logger.exception("worker node %s cannot report", self.node)
            finally:
                with GATE:
                    connections.close_all()
            if stopping:
                return

    def report(self, *, stopping: bool = False) -> None:
        """Write the row once."""
        now = database_now()
        self._started_at = self._started_at or now
        if self._reported_at is None or now - self._reported_at > MISSED_AFTER:
            self._reporting_since = now
        standing = self.standing()
        WorkerNode.objects.update_or_create(
            id=self.node[:200],
            defaults={
                "source": self.source,
                "host": socket.gethostname()[:255],
                "boot_id": boot_id()[:64],
                "pid": self.pid,
                "pool": self.pool[:40],
                "concurrency": self.concurrency,
                "release": conf.release(),
                "celery_version": str(celery.__version__)[:40],
                "settings_digest": conf.settings_digest(),
                "queues": json.dumps(sorted(self.queues())),
                "tasks": json.dumps(served_tasks(self.app), sort_keys=True),
                "journal_bytes": standing.journal_bytes,
                "journal_oldest_seconds": standing.journal_oldest_seconds,
                "dropped_count": standing.dropped,
                "trouble": standing.trouble,
                "captured_at": standing.captured_at,
                "started_at": self._started_at,
                "reporting_since": self._reporting_since,
                "seen_at": now,
                "stopped_at": now if stopping else None,
            },
        )
        self._reported_at = now


def served_tasks(app: Celery) -> dict[str, str]:
    """Return the signature of each task this worker has registered, by name; Celery's own are left out."""
    tasks: dict[str, Any] = dict(app.tasks)
    return {name: describe_signature(task) for name, task in tasks.items() if not name.startswith("celery.")}
