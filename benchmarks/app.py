"""The Celery app of the workers that are measured; BENCH_SIDE says what records their failures.

``none``: nothing. ``opsconsole``: the console, attached as any project attaches it; ``ledger``: with the tasks of the
job ledger. ``results``: django-celery-results as its documentation has it. All else is Celery's default on each side.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import Any

from billiard.process import current_process
from celery import Celery, signals

from opsconsole.attach import install

SIDE = os.environ["BENCH_SIDE"]
FOLDER = Path(os.environ["BENCH_FOLDER"])

app = Celery("benchmarks", broker=os.environ["BENCH_BROKER"])
app.conf.update(broker_connection_retry_on_startup=True)
if SIDE == "results":
    app.conf.update(result_backend="django-db")
if SIDE == "ledger":
    app.autodiscover_tasks(["opsconsole.jobs"])
if SIDE in ("opsconsole", "ledger"):
    install(app, source=os.environ["OPSCONSOLE_SOURCE"])

with (FOLDER / "done").open("r+b") as _file:
    _counters = memoryview(mmap.mmap(_file.fileno(), 0)).cast("Q")
_slot = 0


@signals.worker_process_init.connect(weak=False)
def choose_slot(**_: Any) -> None:
    """Give each child a counter of its own: two that raise one would lose counts."""
    global _slot
    _slot = 1 + current_process().index % (len(_counters) - 1)


@signals.worker_ready.connect(weak=False)
def say_ready(**_: Any) -> None:
    (FOLDER / "ready").touch()


class CardDeclined(Exception):
    """The error of the tasks that fail."""


def count() -> None:
    """Count one body that has run."""
    _counters[_slot] += 1


@app.task(name="bench.noop")
def noop(number: int) -> None:
    count()


@app.task(name="bench.short")
def short(number: int) -> None:
    time.sleep(0.02)
    _counters[_slot] += 1


@app.task(name="bench.fail")
def fail(number: int) -> None:
    _counters[_slot] += 1
    raise CardDeclined(f"card declined for order {number}")
