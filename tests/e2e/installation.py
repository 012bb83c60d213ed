"""One installation of the product for one test: its settings, its workers, and the operator's desk."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 60.0


def wait_until(is_so: Callable[[], Any], what: str | Callable[[], str], seconds: float = PATIENCE_SECONDS) -> Any:
    """Wait until something true comes back, and return it; ``what`` is asked, if it can be, once that is in vain."""
    deadline = time.monotonic() + seconds
    while not (found := is_so()):
        if time.monotonic() > deadline:
            missing = what if isinstance(what, str) else what()
            pytest.fail(f"not within {seconds:.0f} s: {missing}", pytrace=False)
        time.sleep(0.2)
    return found


class Worker:
    """A worker in a session of its own, so that it can be killed as a whole and nothing else is."""

    def __init__(self, installation: Installation, pool: str, include: tuple[str, ...], queue: str) -> None:
        name = f"e2e-{uuid4().hex[:8]}"
        self.log = installation.folder / f"{name}.log"
        command = [
            sys.executable, "-m", "celery", "-A", "opsconsole", "worker", "--pool", pool, "--concurrency", "4",
            "--queues", queue, "--hostname", f"{name}@%h", "--loglevel", "INFO",
            "--include", ",".join(("tests.e2e.jobs", *include)),
            "--without-gossip", "--without-mingle", "--without-heartbeat",
        ]  # fmt: skip
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=installation.environment, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def wait_until_ready(self) -> None:
        wait_until(lambda: re.search(r"e2e-\S+ ready\.$", self.text, re.MULTILINE) or not self.is_running, "worker")
        assert self.is_running, self.text

    def kill(self) -> None:
        """Kill the main process and its children at once, as a host that loses power does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def kill_main(self) -> None:
        """Kill the main process only; its children notice."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.is_running:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        self.kill()


class Process:
    """Another part of the installation, in a session of its own like a worker."""

    def __init__(self, installation: Installation, name: str, *command: str) -> None:
        self.log = installation.folder / f"{name}-{uuid4().hex[:8]}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT, env=installation.environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def kill(self) -> None:
        """Kill it with all its children at once, as a host that loses power does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Desk:
    """The process of ``tests.e2e.desk``."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.desk"],
                cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        self.log = log
        self._answer()

    def ask(self, what: str, **values: Any) -> Any:
        """Call one of its functions."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": what, **values}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["answer"]

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        self.process.wait(20)


class Installation:
    """Settings by environment, as in production, and what runs under them until the test ends."""

    def __init__(self, folder: Path, *, queue: str, broker_url: str, database_url: str, **more: str) -> None:
        self.folder = folder
        self.queue = queue
        folder.mkdir(exist_ok=True)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("OPSCONSOLE_")}
        self.environment = {
            **clean,
            "DJANGO_SETTINGS_MODULE": "opsconsole.settings.base",
            "OPSCONSOLE_VAR_DIR": str(folder / "var"),
            "OPSCONSOLE_SOURCE": queue,
            "OPSCONSOLE_QUEUE": queue,
            "OPSCONSOLE_BROKER_URL": broker_url,
            "OPSCONSOLE_DATABASE_URL": database_url,
            "PYTHONUNBUFFERED": "1",
            "E2E_FOLDER": str(folder),
            **more,
        }
        self.workers: list[Worker] = []
        self.processes: list[Process] = []
        self._desk: Desk | None = None

    @property
    def database(self) -> Path:
        """The SQLite file, where that is the database."""
        return self.folder / "var" / "opsconsole.sqlite3"

    @property
    def desk(self) -> Desk:
        if self._desk is None:
            self._desk = Desk(self.environment, self.folder / "desk.log")
        return self._desk

    def ask(self, what: str, **values: Any) -> Any:
        return self.desk.ask(what, **values)

    def migrate(self) -> None:
        command = [sys.executable, "manage.py", "migrate", "--verbosity", "0"]
        subprocess.run(command, cwd=ROOT, env=self.environment, check=True, timeout=180)

    def start_worker(
        self, pool: str = "prefork", *, include: tuple[str, ...] = (), queue: str = "", wait: bool = True
    ) -> Worker:
        worker = Worker(self, pool, include, queue or self.queue)
        self.workers.append(worker)
        if wait:
            worker.wait_until_ready()
        return worker

    def start(self, name: str, *command: str) -> Process:
        """Start a part that is no worker."""
        started = Process(self, name, *command)
        self.processes.append(started)
        return started

    def heal(self) -> None:
        """From now on every job succeeds."""
        (self.folder / "well").touch()

    def runs(self) -> Counter[str]:
        """Return how often the body of each task id has run."""
        try:
            lines = (self.folder / "ran").read_text().splitlines()
        except FileNotFoundError:
            return Counter()
        return Counter(line.split()[1] for line in lines)

    def wait_for_letters(self, count: int, seconds: float = PATIENCE_SECONDS) -> list[dict[str, Any]]:
        """Wait until so many letters are there, and give a surplus the time to turn up too."""
        wait_until(lambda: self.ask("count_letters") >= count, f"{count} letters; {self.logs()}", seconds)
        time.sleep(1.0)
        letters: list[dict[str, Any]] = self.ask("letters")
        return letters

    def wait_for_repairs(self, count: int, seconds: float = PATIENCE_SECONDS) -> list[dict[str, Any]]:
        """Wait until so many repairs have ended."""

        def ended() -> list[dict[str, Any]]:
            found = self.ask("repairs")
            done = [repair for repair in found if repair["state"] in ("succeeded", "failed", "cancelled")]
            return found if len(done) >= count else []

        found: list[dict[str, Any]] = wait_until(ended, f"{count} repairs; {self.logs()}", seconds)
        return found

    def logs(self) -> str:
        return "\n".join(f"{worker.log}: {worker.text[-3_000:]}" for worker in self.workers)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for worker in self.workers:
            worker.kill()  # a warm shutdown takes seconds, and what they are for is over
        if self._desk is not None:
            self._desk.close()
