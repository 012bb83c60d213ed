"""The one line that a project adds: ``install(app, source="shop-production")``.

It connects Celery signals and changes no Celery setting, class or behaviour, except that a message carrying our repair
header is checked before it starts. Nothing is imported from Django before a worker starts, because the line stands in a
module that settings may still be importing.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from celery import Celery, signals

if TYPE_CHECKING:
    from opsconsole.runtime import WorkerRuntime

logger = logging.getLogger(__name__)

MODES = ("capture",)
ATTACHED: list[Attachment] = []
"""What this process has attached, in order: how a web process knows which brokers there are to ask."""
_UID = "opsconsole.attach"


class Attachment:
    """What is attached to one Celery app: it comes to life in a worker's main process."""

    def __init__(self, app: Celery, *, source: str | None) -> None:
        self.app = app
        self.source = source
        self.runtime: WorkerRuntime | None = None

    def connect(self) -> None:
        # celeryd_init is the last signal before worker_init by which Celery's Django fixup has set Django up.
        uid = f"{_UID}.{id(self.app)}"
        signals.celeryd_init.connect(self._prepare, weak=False, dispatch_uid=f"{uid}.prepare")
        signals.worker_ready.connect(self._start, weak=False, dispatch_uid=f"{uid}.start")
        signals.worker_shutdown.connect(self._stop, weak=False, dispatch_uid=f"{uid}.stop")

    def _prepare(self, instance: Any = None, **_: Any) -> None:
        # A process may hold several apps; the worker belongs to one of them.
        if getattr(instance, "app", self.app) is not self.app:
            return
        try:
            from opsconsole.runtime import WorkerRuntime

            self.runtime = WorkerRuntime.connect(self.app, source=self.source)
        except Exception:
            # A worker that does not start is worse than one that is not watched; the log says so loudly.
            logger.exception("opsconsole captures nothing in this worker")

    def _start(self, sender: Any = None, **_: Any) -> None:
        if self.runtime is None:
            return
        try:
            self.runtime.start(sender)
        except Exception:
            logger.exception("opsconsole records nothing from this worker; its journal keeps what fails")

    def _stop(self, **_: Any) -> None:
        if self.runtime is not None and self.runtime.pid == os.getpid():
            self.runtime.stop()


def install(app: Celery, *, source: str | None = None, mode: str = "capture") -> Attachment:
    """Attach the console to ``app``: every job its workers receive that ends badly becomes a dead letter.

    ``source`` names environment, service and broker, such as ``shop-production`` (default: ``OPSCONSOLE_SOURCE``).
    ``OPSCONSOLE_CAPTURE=off`` in the environment switches everything off. Raises ``ValueError`` for an unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"mode is one of {', '.join(MODES)}, not {mode!r}")
    if source is not None and not 1 <= len(source) <= 100:
        raise ValueError("source has 1 to 100 characters")
    attachment = Attachment(app, source=source)
    attachment.connect()
    ATTACHED.append(attachment)
    return attachment
