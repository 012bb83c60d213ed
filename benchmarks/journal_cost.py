"""What the journal costs per healthy job: CPU in the hooks, CPU in the reader, bytes on disk.

Runs the hooks of one delivery (received, acknowledged, started, ended) on real kombu and Celery objects in one process:
``python benchmarks/journal_cost.py [jobs]``.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from celery import Celery
from celery.app.task import Context
from celery.worker.request import Request
from kombu.message import Message

from deadletters.journal.folder import JournalRoot
from deadletters.journal.hooks import Hooks
from deadletters.journal.reader import FolderReader
from opsconsole.core.sealing import Sealer, derive_key


class Channel:
    """Takes every acknowledgement."""

    no_ack_consumers: frozenset[str] = frozenset()

    def basic_ack(self, *_: Any, **__: Any) -> None:
        return


def message(app: Celery, number: int) -> Message:
    task_id = str(uuid.uuid4())
    headers, properties, body, _ = app.amqp.as_task_v2(task_id, "bench.noop", (number,), {}, origin="gen1@host")
    properties.update(delivery_mode=2, priority=0, delivery_tag=str(uuid.uuid4()), body_encoding="base64")
    properties["reply_to"] = "2f3a6d50-7d0b-3a44-9d1e-1f5b2c3d4e5f"
    return Message(
        body=json.dumps(body).encode(),
        channel=Channel(),
        content_type="application/json",
        content_encoding="utf-8",
        headers=headers,
        properties=properties,
        delivery_info={"exchange": "", "routing_key": "celery"},
    )


def main(jobs: int) -> None:
    app = Celery("bench", broker="memory://", set_as_current=False)

    @app.task(name="bench.noop")
    def noop(number: int) -> None:
        return

    app.finalize()
    sealer = Sealer({"bench": derive_key("bench", "bench")}, "bench")
    with tempfile.TemporaryDirectory() as folder:
        hooks = Hooks(app, source="bench", sealer=sealer, root=JournalRoot(Path(folder)), segment_bytes=1 << 40)
        hooks._on_worker_init(sender=SimpleNamespace(hostname="bench@host"))
        task = app.tasks["bench.noop"]
        main_cpu = child_cpu = 0.0
        for number in range(jobs):
            request = Request(message(app, number), app=app, hostname="bench@host", task=task)
            begin = time.process_time()
            hooks._on_task_received(request=request)
            request.message.ack()
            main_cpu += time.process_time() - begin
            task.request_stack.push(Context(request.request_dict))
            begin = time.process_time()
            hooks._on_task_prerun(sender=task)
            hooks._on_task_postrun(sender=task, state="SUCCESS", retval=None)
            child_cpu += time.process_time() - begin
            task.request_stack.pop()
        hooks.flush()
        assert hooks.folder is not None
        size = hooks.folder.size()
        reader = FolderReader(hooks.folder, sealer, settle_seconds=0)
        begin = time.process_time()
        events = 0
        while True:
            batch = reader.read()
            events += len(batch.events)
            if batch.exhausted:
                break
        read_cpu = time.process_time() - begin
        assert events == jobs, (events, batch.damaged[:1])
        print(f"hooks  {1e3 * (main_cpu + child_cpu) / jobs:.4f} ms a job ({1e3 * main_cpu / jobs:.4f} in main)")
        print(f"reader {1e3 * read_cpu / jobs:.4f} ms a job")
        print(f"disk   {size / jobs:.0f} bytes a job")
        hooks.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
