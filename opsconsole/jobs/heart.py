"""The heart: one thread in each process that runs jobs, which renews the leases of those that take long (C12).

It opens no connection while every job ends within a third of its lease.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from copy import copy
from dataclasses import dataclass

from django.db import Error, connections

from opsconsole.core.forking import GATE
from opsconsole.jobs import ledger
from opsconsole.jobs.kind import Kind
from opsconsole.jobs.models import Job

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0


@dataclass(slots=True)
class _Held:
    job: Job
    kind: Kind
    renewed: float
    is_lost: bool = False


class Heart:
    """The leases that this process holds, by token."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._lock = threading.Lock()
        self._pid = 0
        self._thread: threading.Thread | None = None

    def watch(self, job: Job, kind: Kind) -> None:
        """Renew the lease of a job, and those of what it works on, until ``forget``."""
        # Its own row: the body's thread writes into the job while this one reads it.
        held = _Held(copy(job), kind, time.monotonic())
        with self._lock:
            if self._pid != os.getpid():
                # Threads do not survive a fork, and what the parent held is not this process's.
                self._pid, self._held, self._thread = os.getpid(), {}, None
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="opsconsole-heart", daemon=True)
                self._thread.start()
            self._held[job.lease_token] = held

    def forget(self, token: str) -> None:
        with self._lock:
            self._held.pop(token, None)

    def is_lost(self, token: str) -> bool:
        """Whether the lease was found to be somebody else's when it was to be renewed."""
        held = self._held.get(token)
        return held is not None and held.is_lost

    def beat(self, now: float) -> bool:
        """Renew what has used up a third of its lease; returns whether there was any, so the database was asked."""
        with self._lock:
            due = [
                (token, held)
                for token, held in self._held.items()
                if not held.is_lost and now - held.renewed > held.kind.lease.total_seconds() / 3
            ]
        if not due:
            return False
        try:
            with GATE:
                for token, held in due:
                    if ledger.renew(held.job, held.kind):
                        held.renewed = now
                    else:
                        held.is_lost = True
                        logger.warning("the lease of %s is lost; what its body does now counts for nothing", token)
        except Error as error:
            logger.error("leases cannot be renewed: %s: %s", type(error).__name__, error)
        return True

    def _run(self) -> None:
        pid = self._pid
        while os.getpid() == pid:
            time.sleep(BEAT_SECONDS)
            try:
                if self.beat(time.monotonic()):
                    with GATE:
                        connections.close_all()
            except Exception:
                logger.exception("the heart missed a beat")


HEART = Heart()
