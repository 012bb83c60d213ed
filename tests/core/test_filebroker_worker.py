"""A worker on the broker made of files: it goes on working, whichever of its processes is killed when."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MODULE = "tests.core.killed_app"
TIMEOUT = 30.0


class Worker:
    def __init__(self, folder: Path, pool: str) -> None:
        self.folder = folder
        self.environment = {**os.environ, "JOBS_FOLDER": str(folder)}
        command = [sys.executable, "-m", "celery", "-A", MODULE, "worker", "-P", pool, "-c", "2", "-l", "WARNING"]
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--without-gossip", "--without-mingle"],
                env=self.environment,
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def send(self, name: str, *marks: str) -> None:
        code = (
            "import sys; from tests.core.killed_app import app\n"
            "for mark in sys.argv[2:]: app.send_task(sys.argv[1], args=[mark])"
        )
        command = [sys.executable, "-c", code, f"{MODULE}.{name}", *marks]
        subprocess.run(command, env=self.environment, cwd=ROOT, check=True, timeout=TIMEOUT)

    def wait_for(self, *marks: str) -> None:
        deadline = time.monotonic() + TIMEOUT
        while missing := set(marks) - {path.name for path in (self.folder / "ran").glob("*")}:
            if time.monotonic() > deadline or self.process.poll() is not None:
                pytest.fail(f"did not run: {sorted(missing)}\n{(self.folder / 'log').read_text()[-3000:]}")
            time.sleep(0.05)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(TIMEOUT)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(TIMEOUT)


@pytest.fixture
def worker(tmp_path: Path, request: Any) -> Iterator[Worker]:
    worker = Worker(tmp_path, request.param)
    try:
        yield worker
    finally:
        worker.close()


@pytest.mark.parametrize("worker", ["prefork"], indirect=True)
def test_a_process_that_is_killed_while_it_sends_its_result_keeps_no_other_from_working(worker: Worker) -> None:
    """Where processes share one pipe for their results, it takes the pipe's lock with it, and nothing runs any more."""
    worker.send("is_killed_while_sending", "first", "second")
    worker.wait_for("first", "second")
    after = [f"after-{number}" for number in range(12)]
    worker.send("leave_mark", *after)
    worker.wait_for(*after)
    assert worker.stop() == 0


@pytest.mark.parametrize("worker", ["prefork", "threads", "solo"], indirect=True)
def test_jobs_run_in_every_pool(worker: Worker) -> None:
    marks = [f"job-{number}" for number in range(30)]
    worker.send("leave_mark", *marks)
    worker.wait_for(*marks)
    assert worker.stop() == 0
    assert list(worker.folder.rglob("*.msg")) == []
