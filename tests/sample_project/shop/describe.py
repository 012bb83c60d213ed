"""What attaching must not change: the configuration of the Celery app, and the project's own tasks in it."""

from typing import Any

from celery import Celery
from celery.app.defaults import DEFAULTS

ATTRIBUTES = [
    "Request", "Strategy", "abstract", "acks_late", "acks_on_failure_or_timeout", "backend", "default_retry_delay",
    "expires", "ignore_result", "max_retries", "priority", "rate_limit", "reject_on_worker_lost", "send_events",
    "serializer", "soft_time_limit", "store_eager_result", "store_errors_even_if_ignored", "throws", "time_limit",
    "track_started", "trail", "typing",
]  # fmt: skip


OURS = ("opsconsole.", "repairs.")
"""The console's own tasks and the modules they stand in: they come beside the project's."""


def describe(app: Celery) -> dict[str, Any]:
    """Return every setting and every task's attributes and classes, as texts that compare."""
    app.loader.import_default_modules()
    app.finalize()
    tasks = {}
    for name, task in sorted(app.tasks.items()):
        if name.startswith(OURS):
            continue
        values = {attribute: _text(getattr(task, attribute, "(none)")) for attribute in ATTRIBUTES}
        values["classes"] = [f"{cls.__module__}.{cls.__qualname__}" for cls in type(task).__mro__]
        values["call"] = _text(type(task).__call__)
        tasks[name] = values
    # Celery makes this one of a set, in whose order it comes.
    app.conf.include = tuple(sorted(name for name in app.conf.include or () if not name.startswith(OURS)))
    return {
        "settings": {key: _text(app.conf.get(key)) for key in sorted(DEFAULTS)},
        "app": [f"{cls.__module__}.{cls.__qualname__}" for cls in type(app).__mro__],
        "consumer": _text(app.conf.worker_consumer),
        "tasks": tasks,
    }


def _text(value: Any) -> str:
    # Without the address in memory.
    return repr(value).partition(" at 0x")[0]
