"""A plain Celery app whose jobs end in every way there is; started as a real worker by the hook tests.

Everything comes from the environment: JOURNAL_APP_BROKER (a URL, or a folder for the filesystem broker),
JOURNAL_APP_JOURNAL (the journal's root), JOURNAL_APP_QUEUE, JOURNAL_APP_LATE ("1" acknowledges late), and
JOURNAL_APP_GUARD (a folder in which claims are made; without it there is no guard).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from celery import Celery, Task, signals
from celery.exceptions import Ignore, Reject

from deadletters.journal.folder import JournalRoot
from deadletters.journal.hooks import StartRefused, connect
from opsconsole.core.sealing import Sealer, derive_key

SEALER = Sealer({"test": derive_key("journal tests", "sealing")}, "test")


def make_app(environment: Mapping[str, str]) -> Celery:
    broker = environment.get("JOURNAL_APP_BROKER", "memory://")
    app = Celery("journal_app", set_as_current=False)
    queue = environment.get("JOURNAL_APP_QUEUE", "journal_app")
    options: dict[str, Any] = {}
    transport = None
    if "://" not in broker:
        folder = Path(broker)
        for name in ("in", "control"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        options = {
            "data_folder_in": str(folder / "in"),
            "data_folder_out": str(folder / "in"),
            "control_folder": str(folder / "control"),
            "polling_interval": 0.02,
        }
        # Our own file broker: kombu's lets a worker take a message that is half written, and die of it.
        broker, transport = "filesystem://localhost", "opsconsole.core.filebroker:Transport"
    elif broker.startswith("redis"):
        # What a killed worker held must not turn up at another test's worker later.
        options = {
            "visibility_timeout": 3600,
            "unacked_key": f"{queue}.unacked",
            "unacked_index_key": f"{queue}.unacked-index",
            "unacked_mutex_key": f"{queue}.unacked-mutex",
        }
    app.conf.update(
        broker_url=broker,
        broker_transport=transport,
        broker_transport_options=options,
        broker_connection_retry_on_startup=True,
        task_default_queue=queue,
        task_acks_late=environment.get("JOURNAL_APP_LATE") == "1",
        task_ignore_result=True,
        accept_content=["json"],
        worker_prefetch_multiplier=8,
        worker_redirect_stdouts=False,
        worker_cancel_long_running_tasks_on_connection_loss=True,
        worker_lost_wait=0.5,
        enable_utc=True,
    )
    return app


app = make_app(os.environ)


class FileGuard:
    """Claims by creating a file; a repair named ``no-...`` is refused, one named ``broken-...`` breaks the guard."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def claim(self, *, repair_id: str, task_id: str, retries: int, holder: str) -> bool:
        if repair_id.startswith("copied-"):
            return False
        if repair_id.startswith("no-"):
            raise StartRefused("this repair was cancelled")
        if repair_id.startswith("later-"):
            raise StartRefused("the database is read-only", retriable=True)
        if repair_id.startswith("broken-"):
            raise ConnectionError("no database")
        try:
            with (self.folder / f"{repair_id}.{retries}").open("x") as file:
                file.write(f"{task_id} {holder}")
        except FileExistsError:
            raise StartRefused("this attempt was started before") from None
        return True


class Declined(Exception):
    """A failure of the job's own."""


class Unpicklable(Exception):
    """Cannot be rebuilt from its arguments."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__()
        self.code = code
        self.reason = reason
        self.lock = open(os.devnull)  # noqa: SIM115  something no pickle takes

    def __str__(self) -> str:
        return f"{self.code}: {self.reason}"


def note(name: str) -> None:
    """Leave a mark on disk that a body ran."""
    with (Path(os.environ["JOURNAL_APP_MARKS"]) / "marks").open("a") as file:
        file.write(name + "\n")


@app.task
def ok(*_args: Any, **_kwargs: Any) -> str:
    return "fine"


def _decline(amount: int) -> None:
    raise Declined(f"card declined for {amount}")


@app.task
def plain(amount: int) -> None:
    try:
        {}["missing"]
    except KeyError as exc:
        raise Declined(f"card declined for {amount}") from exc


@app.task
def through_library(amount: int) -> None:
    import json

    json.loads("{")


@app.task(autoretry_for=(Declined,), max_retries=2, default_retry_delay=0, retry_backoff=False, retry_jitter=False)
def again(amount: int) -> None:
    _decline(amount)


@app.task(soft_time_limit=1)
def soft() -> None:
    time.sleep(30)


@app.task(time_limit=1)
def hard() -> None:
    time.sleep(30)


@app.task
def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(retry_on_worker_lost=True, max_retries=1, default_retry_delay=0)
def killed_again() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class ForgetsItself(Task):
    def on_failure(self, *_args: Any) -> None:
        raise RuntimeError("on_failure broke")


@app.task(base=ForgetsItself)
def fails_twice() -> None:
    raise Declined("the first error")


@app.task
def ignored() -> None:
    raise Ignore()


@app.task
def rejected(requeue: bool) -> None:
    marks = Path(os.environ["JOURNAL_APP_MARKS"]) / f"rejected-{requeue}"
    if not marks.exists():
        marks.touch()
        raise Reject("not for me", requeue=requeue)


@app.task
def unpicklable() -> None:
    raise Unpicklable(7, reason="has a lock")


@app.task
def exits() -> None:
    raise SystemExit(3)


@app.task
def slow(name: str = "", seconds: float = 30.0) -> None:
    note(f"slow {name}")
    time.sleep(seconds)


class RefusesToStart(Task):
    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        raise Declined("not today")


@app.task(base=RefusesToStart)
def never_begins() -> None:
    note("never_begins")


class Parent(Task):
    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        super().before_start(task_id, args, kwargs)


class Child(Parent):
    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        super().before_start(task_id, args, kwargs)


@app.task(base=Child)
def repaired(name: str) -> None:
    note(f"repaired {name}")


@app.task(base=Parent, autoretry_for=(Declined,), max_retries=1, default_retry_delay=0, retry_jitter=False)
def repaired_again(name: str) -> None:
    note(f"repaired_again {name}")
    raise Declined(name)


@app.task
def inner_eager() -> None:
    try:
        plain.apply(args=(1,), throw=True)
    except Declined:
        note("inner_eager")


@app.task
def scripted_dead_end() -> None:
    raise AssertionError("revoked, expired or refused before this runs")


if "JOURNAL_APP_JOURNAL" in os.environ:
    guard_folder = os.environ.get("JOURNAL_APP_GUARD")
    hooks = connect(
        app,
        source="tests",
        sealer=SEALER,
        root=JournalRoot(os.environ["JOURNAL_APP_JOURNAL"]),
        identity=(
            (lambda task, args, kwargs, headers: (headers.get("tenant", "default"), "", ""))
            if os.environ.get("JOURNAL_APP_IDENTITY")
            else None
        ),
        guard=FileGuard(Path(guard_folder)) if guard_folder else None,
    )

    @signals.worker_ready.connect(weak=False)
    def tick(**_: Any) -> None:
        """Flush as a drainer does."""

        def run() -> None:
            while True:
                time.sleep(0.1)
                hooks.flush()

        threading.Thread(target=run, daemon=True).start()
