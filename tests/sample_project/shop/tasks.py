"""The shop's jobs, written in each way in which Celery lets people write them."""

import os
from pathlib import Path
from typing import Any

import celery
from celery import shared_task
from django.conf import settings

from shop.celery import app
from shop.models import Order


def note(text: str) -> None:
    """Leave a trace that a job has done something, in one write."""
    descriptor = os.open(Path(settings.FOLDER) / "notes", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, f"{text}\n".encode())
    finally:
        os.close(descriptor)


def is_well() -> bool:
    return (Path(settings.FOLDER) / "well").exists()


@shared_task
def add(left: int, right: int) -> int:
    return left + right


@shared_task
def bill(*, shop: str, order: int) -> str:
    """Fails until the shop is well."""
    note(f"bill {order}")
    if not is_well():
        raise ConnectionRefusedError(111, "Connection refused")
    return f"billed {order}"


@shared_task(bind=True, max_retries=2)
def restock(self: Any, shelf: str) -> str:
    """Succeeds at its third attempt."""
    note(f"restock {shelf} {self.request.retries}")
    if self.request.retries < 2:
        raise self.retry(countdown=0.1)
    return f"{shelf} after {self.request.retries}"


@shared_task(autoretry_for=(KeyError,), max_retries=1, retry_backoff=False, default_retry_delay=0.1)
def look_up(name: str) -> None:
    """Fails for good after one automatic retry."""
    note(f"look_up {name}")
    raise KeyError(name)


@shared_task
def count_orders() -> int:
    return Order.objects.count()


@shared_task(ignore_result=True)
def silent() -> int:
    note("silent")
    return 1


class Audited(celery.Task):
    """A base class of the shop's own with hooks of its own."""

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        note(f"before {self.name}")

    def on_failure(self, exc: Exception, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        note(f"on_failure {type(exc).__name__}")

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        note(f"on_success {retval}")


@app.task(base=Audited)
def audited(number: int) -> int:
    if number < 0:
        raise ValueError("negative")
    return number


@app.task(base=celery.Task, bind=True)
def plain_base(self: Any) -> str:
    return type(self).__mro__[1].__name__


class Report(celery.Task):
    """A job that is a class, as people wrote them for Celery 3."""

    name = "shop.tasks.Report"

    def run(self, day: str) -> str:
        return f"report of {day}"


app.register_task(Report())


@shared_task
def describe_worker() -> dict[str, Any]:
    """Return the configuration and the tasks as they are inside a worker."""
    from shop.describe import describe

    return describe(app)
