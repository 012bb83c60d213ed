"""What each part of a sweep works with: pages that commit by themselves, and when to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from django.db import transaction

from opsconsole.core.database import database_now
from repairs.models import ReconciliationRun
from repairs.reconciliation.grace import Reachable
from repairs.reconciliation.runs import note_page

PAGE = 1_000
"""Rows of a page: more make a sweep no faster, and hold their locks longer (measured)."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """One page's counts: what was looked at, what the database says was changed, what was left alone (C9)."""

    now: datetime
    scanned: int = 0
    repaired: int = 0
    skipped: int = 0

    def add(self, *, scanned: int, repaired: int) -> None:
        """Count rows of which ``repaired`` were changed, and the others left alone."""
        self.scanned += scanned
        self.repaired += repaired
        self.skipped += scanned - repaired


class Sweeping:
    """A run under way.

    ``limit`` bounds the rows that each part looks at; a run without one ends when its time is over, and the next goes
    on. ``reachable`` says which leases may be judged. ``incidents`` are those concerned: causes, of
    which there are few, so that they can be remembered for a true count.
    """

    def __init__(
        self,
        run: ReconciliationRun,
        *,
        reachable: Reachable | None = None,
        most_seconds: float = 300.0,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.run_id = run.id
        self.cursor = run.cursor
        self.started_by = run.started_by
        self.incidents: set[UUID] = set()
        self.reachable = reachable or Reachable()
        self.has_waited = False
        self._limit = run.row_limit
        self._left = run.row_limit
        self._ends_at = time.monotonic() + most_seconds
        self._is_stopping = is_stopping

    def begin_part(self) -> None:
        """Give the next part its whole allowance."""
        self._left = self._limit

    def size(self, most: int = PAGE) -> int:
        """Return how many rows the next page may have; 0 ends the part."""
        if self._is_stopping() or time.monotonic() >= self._ends_at:
            return 0
        return most if self._left is None else min(most, self._left)

    def may_judge(self, lease: timedelta, now: datetime) -> bool:
        """Say whether whoever holds a lease of this length could have renewed it.

        A part that leaves something alone for that sets ``has_waited``.
        """
        return self.reachable.may_judge(lease, now)

    @contextmanager
    def page(self) -> Iterator[Tally]:
        """A transaction for one page; its counts and the run's sign of life are written at its end.

        Raises ``ReconciliationFinished``, with the page undone, if the run was closed meanwhile.
        """
        with transaction.atomic(durable=True):
            tally = Tally(now=database_now())
            yield tally
            note_page(
                self.run_id,
                scanned=tally.scanned,
                repaired=tally.repaired,
                skipped=tally.skipped,
                incidents=len(self.incidents),
                cursor=self.cursor,
                now=database_now(),
            )
        if self._left is not None:
            self._left = max(self._left - tally.scanned, 0)


Part = Callable[[Sweeping], None]
