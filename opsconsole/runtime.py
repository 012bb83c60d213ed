"""What runs beside the jobs in a worker's main process: hooks, drainer, relay, redriver and the rest, wired here."""

from __future__ import annotations

import os
import time
from typing import Any

from celery import Celery
from django.db import connection

from deadletters import conf
from deadletters.drainer import Drainer
from deadletters.hold_watch import DatabaseHolds, HoldWatch
from deadletters.holds import ledger_jobs_on_hold
from deadletters.journal import hooks as journal_hooks
from deadletters.journal.hooks import Hooks
from deadletters.nodes import Reporter, Standing
from opsconsole.core.forking import GATE
from opsconsole.jobs import conf as jobs_conf
from opsconsole.jobs.dispatcher import Dispatcher
from repairs.guard import DatabaseGuard
from repairs.redrives.redriver import Redriver
from repairs.relay import Relay
from repairs.settlement import DatabaseSettlement

JOIN_SECONDS = 5.0


class WorkerRuntime:
    """The console's part of one worker."""

    def __init__(self, app: Celery, hooks: Hooks, source: str) -> None:
        self.app = app
        self.hooks = hooks
        self.source = source
        self.pid = os.getpid()
        self.settlement = DatabaseSettlement()
        self.drainer: Drainer | None = None
        self.relay: Relay | None = None
        self.redriver: Redriver | None = None
        self.dispatcher: Dispatcher | None = None
        self.holds: HoldWatch | None = None
        self.reporter: Reporter | None = None

    @classmethod
    def connect(cls, app: Celery, *, source: str | None) -> WorkerRuntime | None:
        """Connect the hooks before the worker begins; ``None`` if the kill switch is set."""
        chosen = conf.journal_root()
        name = source or conf.source()
        hooks = journal_hooks.connect(
            app,
            source=name,
            sealer=conf.sealer(),
            root=chosen.root,
            identity=conf.identity(),
            guard=DatabaseGuard(),
            holds=DatabaseHolds(name),
        )
        return None if journal_hooks.is_switched_off() else cls(app, hooks, name)

    def start(self, consumer: Any) -> None:
        """Start the threads; called once the worker is ready, after its first children were forked."""
        GATE.is_needed = connection.vendor == "sqlite"
        folder = self.hooks.folder
        if folder is not None:
            self.drainer = Drainer(
                folder=folder,
                root=self.hooks.root,
                source=self.source,
                worker=self.hooks.node,
                settlement=self.settlement,
                flush=self.hooks.flush,
            )
            self.drainer.start()
        owner = folder.name if folder is not None else f"{self.hooks.node}.{self.pid}"
        self.holds = HoldWatch(source=self.source, book=lambda: self.hooks.holds)
        self.holds.start()
        self.relay = Relay(self.app, source=self.source, owner=owner)
        self.relay.start()
        self.redriver = Redriver(source=self.source, owner=owner)
        self.redriver.start()
        if Dispatcher.is_wanted(self.app):
            self.dispatcher = Dispatcher(self.app, source=jobs_conf.source(), owner=owner, held=ledger_jobs_on_hold)
            self.dispatcher.start()
        pool = getattr(consumer, "pool", None)
        controller = getattr(consumer, "controller", None)
        self.reporter = Reporter(
            self.app,
            node=owner,
            source=self.source,
            pid=self.pid,
            pool=type(pool).__module__.rpartition(".")[2] if pool is not None else "",
            concurrency=int(getattr(controller, "concurrency", 0) or 0),
            queues=lambda: list(self.app.amqp.queues.consume_from),
            standing=self._standing,
        )
        self.reporter.start()

    def stop(self) -> None:
        """Let the threads finish what they have; what they cannot finish stays in the journal."""
        deadline = time.monotonic() + JOIN_SECONDS
        threads = (self.redriver, self.relay, self.dispatcher, self.drainer, self.holds, self.reporter)
        for thread in threads:
            if thread is not None:
                thread.stop()
        for thread in threads:
            if thread is not None:
                thread.join(max(deadline - time.monotonic(), 0.1))
        # A journal that is let go of may be recovered by a sibling, which must not happen while it is being counted.
        if self.drainer is None or not self.drainer.is_alive():
            self.hooks.close()

    def _standing(self) -> Standing:
        drainer = self.drainer
        threads = (drainer, self.relay, self.redriver, self.dispatcher, self.holds)
        troubles = [thread.trouble for thread in threads if thread is not None and thread.trouble]
        behind = drainer.behind_since if drainer is not None else None
        return Standing(
            journal_bytes=self.hooks.folder.size() if self.hooks.folder is not None else 0,
            journal_oldest_seconds=time.monotonic() - behind if behind is not None else 0.0,
            dropped=self.hooks.dropped,
            trouble="; ".join(troubles),
            captured_at=drainer.captured_at if drainer is not None else None,
        )
