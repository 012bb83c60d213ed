"""Keeps a process from forking while one of its threads is inside SQLite.

SQLite's allocator and file layer have locks of their own, which a fork copies as they are: held by a thread that does
not exist in the child, whose first query then waits for ever. Seen with pool children that were replaced while failures
were being recorded. Other databases' clients hold no such locks, so the gate is open for them.
"""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType

LONGEST_WAIT_SECONDS = 5.0
"""A fork goes ahead after this long: a child that may hang is better than a pool that stands still."""


class ForkGate:
    """``with gate:`` around database work in a thread; a fork waits until nobody is inside. Threads take turns."""

    def __init__(self) -> None:
        self.is_needed = False
        self._lock = threading.Lock()
        self._is_wanted = False
        self._is_held = False

    def __enter__(self) -> None:
        if not self.is_needed:
            return
        while self._is_wanted:
            # Otherwise a busy thread takes the lock again before the one that wants to fork wakes up.
            time.sleep(0.001)
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.is_needed:
            self._lock.release()

    def before_fork(self) -> None:
        """Wait for the thread that is inside, and keep the others out."""
        if self.is_needed:
            self._is_wanted = True
            self._is_held = self._lock.acquire(timeout=LONGEST_WAIT_SECONDS)

    def after_in_parent(self) -> None:
        """Let the threads go on."""
        if self._is_held:
            self._lock.release()
        self._is_held = self._is_wanted = False

    def after_in_child(self) -> None:
        """Forget everything: the threads that used it are not here."""
        self.is_needed = self._is_held = self._is_wanted = False
        self._lock = threading.Lock()


GATE = ForkGate()
os.register_at_fork(
    before=lambda: GATE.before_fork(),
    after_in_parent=lambda: GATE.after_in_parent(),
    after_in_child=lambda: GATE.after_in_child(),
)
