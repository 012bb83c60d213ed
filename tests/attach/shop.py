"""The sample project as tests use it: as a program of its own, with the console attached or without."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "tests" / "sample_project"
PATIENCE_SECONDS = 60.0


def wait_until(is_so: Callable[[], Any], what: Callable[[], str]) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := is_so()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {PATIENCE_SECONDS:.0f} s: {what()}", pytrace=False)
        time.sleep(0.2)
    return found


class Shop:
    """One folder with the shop's database, results and journal; its processes get their settings from here."""

    def __init__(self, folder: Path, *, is_attached: bool, **more: str) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        (folder / "results").mkdir(exist_ok=True)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("OPSCONSOLE_")}
        self.environment = {
            **clean,
            "DJANGO_SETTINGS_MODULE": "shop.settings",
            "PYTHONPATH": os.pathsep.join([str(PROJECT), str(ROOT)]),
            "SHOP_FOLDER": str(folder),
            "SHOP_ATTACHED": "1" if is_attached else "0",
            **more,
        }
        self.log = folder / "worker.log"
        self._worker: subprocess.Popen[bytes] | None = None

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run ``manage.py``."""
        done = subprocess.run(
            [sys.executable, "manage.py", *arguments],
            cwd=PROJECT, env=self.environment, capture_output=True, text=True, timeout=180,
        )  # fmt: skip
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def evaluate(self, code: str, **values: Any) -> Any:
        """Run code in the project; what it puts into ``answer`` comes back."""
        head = f"import json\nvalues = json.loads({json.dumps(values)!r})\n"
        done = self.run("shell", "-v", "0", "-c", f"{head}{code}\nprint('ANSWER' + json.dumps(answer, default=str))")
        return json.loads(done.stdout.rpartition("ANSWER")[2])

    def start_worker(self) -> None:
        with self.log.open("w") as log:
            self._worker = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "shop", "worker", "--concurrency", "2", "--loglevel", "INFO",
                 "--without-gossip", "--without-mingle", "--without-heartbeat", "--hostname", f"shop-{os.getpid()}@%h"],
                cwd=PROJECT, env=self.environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        worker = self._worker
        wait_until(lambda: " ready." in self.text or worker.poll() is not None, lambda: self.text)
        assert worker.poll() is None, self.text

    @property
    def text(self) -> str:
        """What the worker has said."""
        return self.log.read_text()

    def stop_worker(self) -> int:
        worker, self._worker = self._worker, None
        if worker is None:
            return 0
        worker.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        return worker.wait()

    def heal(self) -> None:
        (self.folder / "well").touch()

    def notes(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return sorted((self.folder / "notes").read_text().splitlines())
        return []

    @property
    def database(self) -> Path:
        return Path(self.environment.get("SHOP_DATABASE", self.folder / "shop.sqlite3"))

    def query(self, sql: str) -> list[dict[str, Any]]:
        """Ask the database directly, which takes no second as a process of its own would."""
        with closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True)) as connection:
            connection.row_factory = sqlite3.Row
            return [dict(row) for row in connection.execute(sql)]

    def letters(self) -> list[dict[str, Any]]:
        found = self.query("SELECT * FROM ops_deadletters_deadletter ORDER BY id")
        return [{**row, "id": str(UUID(row["id"])), "incident_id": str(UUID(row["incident_id"]))} for row in found]

    def standing(self) -> list[tuple[Any, ...]]:
        """Return the incidents as state, letters, letters not repaired, and who closed each."""
        found = self.query("SELECT state, letter_count, unresolved_count, resolved_by FROM ops_incidents_incident")
        return [tuple(row.values()) for row in found]
