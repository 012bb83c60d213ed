"""The controller of redrives: one thread in each worker, beside the relay, which steps those of its source.

Of several workers one acts on a redrive, by lease; if it is killed, another goes on within seconds, at the place where
the last committed step has left it. It talks to no broker, so one that hangs keeps nobody from pausing or cancelling.
"""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta
from uuid import UUID

from django.db import DataError, Error, IntegrityError, connections
from django.db.models import Q

from opsconsole.core.database import database_now
from opsconsole.core.forking import GATE
from repairs.models import REDRIVE_ACTIVE, Redrive, RedriveState
from repairs.redrives.judging import judge_page
from repairs.redrives.probing import ask_providers
from repairs.redrives.stepping import PLANNED_AT_ONCE, pause_by_itself, step_redrive

logger = logging.getLogger(__name__)

IDLE_SECONDS = 2.0
BUSY_SECONDS = 0.25
LONGEST_BACKOFF_SECONDS = 10.0
AT_ONCE = 20
"""Redrives of one source that are looked at in one round; the next round looks at those after them."""
PLANNED_ON_SQLITE = 50
"""There is one writer at a time, which must not keep the drainer for long."""
DATABASE_TROUBLE = "database_trouble"
CONTROLLER_ERROR = "controller_error"
_TRANSIENT = ("40001", "40P01", "55P03")
"""SQL states of a transaction that only has to be tried again: nothing was wrong with the database."""


class Redriver(threading.Thread):
    """Steps the redrives of one source until it is told to stop; outlives every outage."""

    def __init__(self, *, source: str, owner: str) -> None:
        super().__init__(name="opsconsole-redriver", daemon=True)
        self.source = source
        self.owner = owner
        self.trouble = ""
        self._trouble_since: float | None = None
        self._planned_full = False
        self._after: UUID | None = None
        self._again_at: dict[UUID, float] = {}  # of those that failed
        self._stop_asked = threading.Event()

    def stop(self) -> None:
        self._stop_asked.set()

    def run(self) -> None:
        pause = IDLE_SECONDS
        while not self._stop_asked.wait(pause):
            try:
                if self._trouble_since is not None:
                    self._say_it_is_over()
                found = self.step()
                # What the rate lets go of and one step cannot plan is planned at once; SQLite's other writers wait.
                is_behind = self._planned_full and not GATE.is_needed
                pause = 0.0 if is_behind else BUSY_SECONDS if found else IDLE_SECONDS
                self.trouble = ""
            except Exception as error:  # noqa: BLE001  (a controller that dies leaves every redrive standing)
                self._note(error)
                pause = min(max(pause, 0.5) * 2, LONGEST_BACKOFF_SECONDS)
                with GATE:
                    # A kept connection would not follow a failover.
                    connections.close_all()
        with GATE:
            connections.close_all()

    def _note(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        if text != self.trouble:
            logger.error("redrives of %s: %s", self.source, text)
        self.trouble = text
        if is_outage(error) and self._trouble_since is None:
            self._trouble_since = time.monotonic()

    def _say_it_is_over(self) -> None:
        """The database is back: whatever ran meanwhile waits for a person, who sees what has become of it."""
        assert self._trouble_since is not None  # noqa: S101
        with GATE:
            began_at = database_now() - timedelta(seconds=time.monotonic() - self._trouble_since)
            running = Redrive.objects.to_do().filter(source=self.source, state__in=REDRIVE_ACTIVE)
            ids = list(running.values_list("id", flat=True))
            pause_by_itself(redrive_ids=ids, code=DATABASE_TROUBLE, text=self.trouble, began_at=began_at)
        self._trouble_since = None

    def step(self) -> bool:
        """Do one round: a step of each redrive that nobody else has. Returns whether to look again at once."""
        with GATE:
            found = self._to_do(self._after)
            if not found and self._after is not None:
                found = self._to_do(None)
        # By the page, so that many that wait for nothing but answers do not keep the ones after them from going on.
        self._after = found[-1][0] if len(found) == AT_ONCE else None
        self._planned_full = False
        for redrive_id, state in found:
            if self._stop_asked.is_set():
                break
            self._try(redrive_id, state)
        return bool(found)

    def _to_do(self, after: UUID | None) -> list[tuple[UUID, str]]:
        now = database_now()
        to_do = (
            Redrive.objects.to_do()
            .filter(source=self.source)
            .filter(Q(lease_expires_at__isnull=True) | Q(lease_expires_at__lt=now) | Q(lease_owner=self.owner))
            .order_by("id")
        )
        if after is not None:
            to_do = to_do.filter(id__gt=after)
        return list(to_do.values_list("id", "state")[:AT_ONCE])

    def _try(self, redrive_id: UUID, state: str) -> None:
        """Step one redrive; what is wrong with it alone must not stand in the way of the others, nor go on unseen."""
        if time.monotonic() < self._again_at.get(redrive_id, 0.0):
            return
        try:
            self._advance(redrive_id, state)
        except Exception as error:
            if isinstance(error, Error) and not isinstance(error, DataError | IntegrityError):
                raise  # about the database, and so about all of them
            logger.exception("the redrive %s", redrive_id)
            self._again_at[redrive_id] = time.monotonic() + LONGEST_BACKOFF_SECONDS
            with GATE:
                pause_by_itself(redrive_ids=[redrive_id], code=CONTROLLER_ERROR, text=type(error).__name__)

    def _advance(self, redrive_id: UUID, state: str) -> None:
        if state == RedriveState.PLANNING:
            with GATE:
                judge_page(redrive_id=redrive_id)
        else:
            self._step(redrive_id)

    def _step(self, redrive_id: UUID) -> None:
        with GATE:
            size = PLANNED_ON_SQLITE if GATE.is_needed else PLANNED_AT_ONCE
            stepped = step_redrive(redrive_id=redrive_id, owner=self.owner, size=size)
        self._planned_full |= stepped is not None and stepped.planned >= size
        if stepped is not None and stepped.probes:
            # A provider may take its time: nothing is locked meanwhile.
            ask_providers(redrive_id, stepped.probes)


def is_outage(error: Exception) -> bool:
    """Say whether an error means that the database could not be used, and not that a statement has to be repeated."""
    if not isinstance(error, Error) or isinstance(error, DataError | IntegrityError):
        return False
    if "database is locked" in str(error):
        return False
    return getattr(error.__cause__, "sqlstate", None) not in _TRANSIENT
