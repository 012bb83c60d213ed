"""The database connection that a process which runs jobs keeps for the ledger's own statements.

Celery closes Django's connections before and after each task, unless the project has set ``CELERY_DB_REUSE_MAX``; to
open one again costs more than all statements of a job (measured). The settings of a project are its own, so the ledger
keeps a connection that Celery does not know of, for the statements that are a transaction of their own.
"""

from __future__ import annotations

import os
import threading
import time

from django.db import DEFAULT_DB_ALIAS, connections
from django.db.backends.base.base import BaseDatabaseWrapper

KEPT_FOR_SECONDS = 60.0
"""Idle for longer than this, it is opened again: what stands between here and the database may have forgotten it."""


class Kept:
    """The kept connection of a process, on PostgreSQL; on SQLite opening one costs little.

    It is the main thread's alone, which is the one that runs the jobs of a pool child. Threads and greenlets that run
    jobs come and go, and one for each would be too many.
    """

    def __init__(self) -> None:
        self._own: BaseDatabaseWrapper | None = None
        self._parents: BaseDatabaseWrapper | None = None
        self._pid = 0
        self._used = 0.0

    def connection(self) -> BaseDatabaseWrapper:
        """Return a connection to the ledger's database: Django's own while that is open, else the kept one.

        A caller that is in a transaction is so on Django's own, which is open then.
        """
        usual = connections[DEFAULT_DB_ALIAS]
        if usual.connection is not None or usual.vendor != "postgresql":
            return usual
        if not _is_main_thread():
            return usual
        if self._own is None or self._pid != os.getpid():
            # A parent's connection is not let go of: some drivers would then end it for both.
            self._parents, self._own, self._pid = self._own, usual.copy(), os.getpid()
        now = time.monotonic()
        if now - self._used > KEPT_FOR_SECONDS:
            self._own.close()
        self._used = now
        return self._own

    def close(self) -> None:
        """Let go of it: the next statement opens another."""
        if self._own is not None and self._pid == os.getpid() and _is_main_thread():
            self._own.close()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


KEPT = Kept()
