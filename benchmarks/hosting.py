"""Celery's own objects without a broker: what the journal's hooks see of a delivery, in one process."""

from __future__ import annotations

import json
import secrets
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from celery import Celery
from celery.app.task import Context
from celery.worker.request import Request
from kombu.message import Message

from deadletters.journal.folder import JournalRoot
from deadletters.journal.hooks import Hooks
from opsconsole.core.sealing import Sealer

QUEUE = f"opsconsole.bench.{secrets.token_hex(3)}"
"""Of this run alone: messages to it may be sent to a broker that others use."""


class Channel:
    """Takes every acknowledgement."""

    no_ack_consumers: frozenset[str] = frozenset()

    def basic_ack(self, *_: Any, **__: Any) -> None:
        return


class CardDeclined(Exception):
    """The error of the tasks that fail."""


@lru_cache(maxsize=1)
def make_app() -> Celery:
    """Return the app with a task that does nothing and one that fails."""
    app = Celery("benchmarks", broker="memory://", set_as_current=False)

    @app.task(name="bench.noop")
    def noop(number: int) -> None:
        return

    @app.task(name="bench.fail")
    def fail(number: int) -> None:
        raise CardDeclined(f"card declined for order {number}")

    app.finalize()
    return app


def make_message(app: Celery, task: str, number: int) -> Message:
    """Return what a worker takes from RabbitMQ for one plain job."""
    task_id = str(uuid.uuid4())
    headers, properties, body, _ = app.amqp.as_task_v2(task_id, task, (number,), {}, origin="gen1@host")
    properties.update(delivery_mode=2, priority=0, delivery_tag=str(uuid.uuid4()), body_encoding="base64")
    properties["reply_to"] = "2f3a6d50-7d0b-3a44-9d1e-1f5b2c3d4e5f"
    return Message(
        body=json.dumps(body).encode(),
        channel=Channel(),
        content_type="application/json",
        content_encoding="utf-8",
        headers=headers,
        properties=properties,
        delivery_info={"exchange": "", "routing_key": QUEUE},
    )


def make_request(app: Celery, task: str, number: int) -> Request:
    """Return the request that a worker makes of such a message."""
    return Request(make_message(app, task, number), app=app, hostname="bench@host", task=app.tasks[task])


@contextmanager
def running(request: Request) -> Iterator[Any]:
    """Let the task see its request, as it does in the process that runs it."""
    task = request.task
    task.request_stack.push(Context(request.request_dict))
    try:
        yield task
    finally:
        task.request_stack.pop()


def make_hooks(app: Celery, folder: Path, sealer: Sealer, source: str) -> Hooks:
    """Return hooks that have opened a journal below ``folder``, one segment however long it gets."""
    hooks = Hooks(app, source=source, sealer=sealer, root=JournalRoot(folder), segment_bytes=1 << 40)
    hooks._on_worker_init(sender=SimpleNamespace(hostname="bench@host"))
    return hooks
