"""Keeps a worker's rules what the database says of holds: asked before the first message, and every two seconds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from uuid import UUID

from django.db import Error, connections

from deadletters.holds import rules_of
from deadletters.journal.holds import HoldBook, HoldRule
from deadletters.services import expire_hold
from opsconsole.core.forking import GATE

logger = logging.getLogger(__name__)

EVERY_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 10.0


class DatabaseHolds:
    """What the hooks ask before their worker takes its first message."""

    def __init__(self, source: str) -> None:
        self.source = source

    def read(self) -> Sequence[HoldRule]:
        """Return the rules in force; called in a thread of its own, which leaves no connection behind."""
        try:
            return rules_of(self.source)[0]
        finally:
            connections.close_all()


class HoldWatch(threading.Thread):
    """Replaces the rules when they change, and notes that the time of a hold is over.

    While the database cannot be asked, what was known last holds on, each hold until its own end.
    """

    def __init__(self, *, source: str, book: Callable[[], HoldBook]) -> None:
        super().__init__(name="opsconsole-holds", daemon=True)
        self.source = source
        self.book = book
        self.trouble = ""
        self._stop_asked = threading.Event()

    def stop(self) -> None:
        self._stop_asked.set()

    def run(self) -> None:
        pause = EVERY_SECONDS
        while not self._stop_asked.wait(pause):
            try:
                self.look()
            except Exception as error:  # noqa: BLE001  (without this thread no hold would be obeyed, nor ended)
                self._note(f"holds cannot be read: {type(error).__name__}: {error}")
                pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
                with GATE:
                    # A kept connection would not follow a failover.
                    connections.close_all()
            else:
                self._note("")
                pause = EVERY_SECONDS
        with GATE:
            connections.close_all()

    def look(self) -> None:
        """Ask once; raises what the database or the disk raises."""
        with GATE:
            rules, overdue = rules_of(self.source)
        self.book().put(rules)
        for hold_id in overdue:
            self._expire(hold_id)

    def _expire(self, hold_id: UUID) -> None:
        try:
            with GATE:
                expire_hold(hold_id=hold_id)
        except Error as error:
            # Another worker, or the next look, will; no worker obeys it any more in any case.
            logger.info("hold %s cannot be expired yet: %s", hold_id, error)

    def _note(self, trouble: str) -> None:
        if trouble and trouble != self.trouble:
            logger.error("%s; what was known last of them goes on", trouble)
        self.trouble = trouble
