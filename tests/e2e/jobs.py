"""Jobs that fail for real until the folder of their test has a file "well", and write down each run of theirs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from celery import current_task, shared_task


def folder() -> Path:
    return Path(os.environ["E2E_FOLDER"])


def note() -> bool:
    """Write down that a body runs, in one write that no other can part, and say whether things are well."""
    request = current_task.request
    line = f"{request.task} {request.id} {request.retries}\n".encode()
    descriptor = os.open(folder() / "ran", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)
    return (folder() / "well").exists()


@shared_task(name="e2e.well")
def well(*, number: int) -> None:
    note()


@shared_task(name="e2e.refused")
def refused(*, number: int) -> None:
    if not note():
        raise ConnectionRefusedError(111, "Connection refused")


@shared_task(name="e2e.raises")
def raises(*, number: int) -> None:
    if not note():
        raise ValueError(f"job {number} has no price")


@shared_task(name="e2e.retries", bind=True, max_retries=2)
def retries(self: Any, *, number: int) -> None:
    if not note():
        raise self.retry(exc=KeyError("stock"), countdown=0.1)


@shared_task(name="e2e.again", bind=True, max_retries=2)
def again(self: Any, *, number: int) -> None:
    """A job that asks for another attempt and has no error to tell."""
    if not note():
        self.retry(countdown=0.1)


@shared_task(name="e2e.autoretries", autoretry_for=(KeyError,), max_retries=2, retry_kwargs={"countdown": 0.1})
def autoretries(*, number: int) -> None:
    if not note():
        raise KeyError("stock")


@shared_task(name="e2e.overruns", time_limit=1)
def overruns(*, number: int) -> None:
    if not note():
        time.sleep(60)


@shared_task(name="e2e.dies")
def dies(*, number: int) -> None:
    if not note():
        os.kill(os.getpid(), signal.SIGKILL)


@shared_task(name="e2e.steady")
def steady(*, number: int) -> None:
    """A job that takes long enough for many of them to wait for their turn."""
    note()
    time.sleep(0.3)


@shared_task(name="e2e.steady_late", acks_late=True)
def steady_late(*, number: int) -> None:
    """The same, acknowledged only when it has run."""
    note()
    time.sleep(0.3)


@shared_task(name="e2e.retries_on", bind=True, max_retries=5)
def retries_on(self: Any, *, number: int) -> None:
    """A job of whose attempts each asks for another one."""
    note()
    raise self.retry(exc=KeyError("stock"), countdown=1.5)


@shared_task(name="e2e.slow")
def slow(*, number: int) -> None:
    """A job long enough to be running when somebody pulls the plug; it fails at its end."""
    is_well = note()
    time.sleep(0.2)
    if not is_well:
        raise ConnectionRefusedError(111, "Connection refused")
