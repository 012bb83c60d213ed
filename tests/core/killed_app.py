"""A Celery app on the broker made of files, whose pool's processes are killed while they send a result.

JOBS_FOLDER names the folder in which everything lies.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from celery import Celery

folder = Path(os.environ["JOBS_FOLDER"])
for name in ("messages", "ran"):
    (folder / name).mkdir(exist_ok=True)

app = Celery("killed_app", set_as_current=False)
app.conf.update(
    broker_url="filesystem://localhost",
    broker_transport="opsconsole.core.filebroker:Transport",
    broker_transport_options={
        "data_folder_in": str(folder / "messages"),
        "data_folder_out": str(folder / "messages"),
        "control_folder": str(folder / "control"),
        "polling_interval": 0.05,
    },
    broker_connection_retry_on_startup=True,
    task_default_queue="jobs",
    task_ignore_result=True,
    worker_lost_wait=0.5,
)


@app.task
def leave_mark(name: str) -> None:
    (folder / "ran" / name).touch()


@app.task
def is_killed_while_sending(name: str) -> bytes:
    """Return more than a pipe takes, and be killed in the middle of it."""
    leave_mark(name)
    threading.Thread(target=_kill_when_sending, args=(threading.get_ident(),), daemon=True).start()
    return bytes(64_000_000)


def _kill_when_sending(thread: int) -> None:
    while not sys._current_frames()[thread].f_code.co_filename.endswith("billiard/connection.py"):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
