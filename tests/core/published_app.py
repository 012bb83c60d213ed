"""A worker's app for tests of publishing: its task writes down how it was called, one line of JSON each."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from celery import Celery

app = Celery("published", broker=os.environ["PUBLISHED_BROKER"], set_as_current=False)
app.conf.update(
    task_default_queue=os.environ["PUBLISHED_QUEUE"],
    broker_transport_options=json.loads(os.environ.get("PUBLISHED_OPTIONS", "{}")),
    worker_hijack_root_logger=False,
)


@app.task(name="published.note", bind=True)
def note(self: Any, *args: Any, **kwargs: Any) -> None:
    request = self.request
    line = {
        "args": args,
        "kwargs": kwargs,
        "id": request.id,
        "correlation_id": request.correlation_id,
        "timelimit": request.timelimit,
        "group": request.group,
        "tenant": request.headers.get("tenant") if request.headers else None,
        "stamps": request.stamps,
        "priority": request.delivery_info["priority"],
    }
    with Path(os.environ["PUBLISHED_NOTES"]).open("a") as notes:
        notes.write(json.dumps(line) + "\n")
