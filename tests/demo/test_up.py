"""``manage.py up``: the whole console in the foreground, as a newcomer meets it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.test import override_settings

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 90


class Console:
    """A started ``manage.py up`` and what it has written so far."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.log = folder / "terminal"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "manage.py", "up", "--port", "0", *options],
                cwd=ROOT,
                env=environment(folder),
                stdout=log,
                stderr=log,
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.text or self.process.poll() is not None, lambda: self.text)
        assert text in self.text

    @property
    def url(self) -> str:
        self.wait_for("Stop       Ctrl-C")
        found = re.search(r"^Console    (http://\S+/)ops/$", self.text, re.MULTILINE)
        assert found is not None
        return found[1]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)

    def query(self, sql: str) -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(f"file:{self.folder / 'var' / 'opsconsole.sqlite3'}?mode=ro", uri=True)) as rows:
            return rows.execute(sql).fetchall()


def environment(folder: Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OPSCONSOLE_")}
    ours = {"DJANGO_SETTINGS_MODULE": "opsconsole.settings.base", "OPSCONSOLE_VAR_DIR": str(folder / "var")}
    return clean | ours


@contextmanager
def console(folder: Path, *options: str) -> Iterator[Console]:
    running = Console(folder, *options)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.stop()


def manage(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "manage.py", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment(folder), capture_output=True, text=True, timeout=120)


def wait_until(is_so: Callable[[], bool], text: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            pytest.fail(f"it did not come about:\n{text()}", pytrace=False)
        time.sleep(0.2)


def processes_of(folder: Path) -> list[str]:
    """Return the command lines of all processes whose environment names this folder."""
    mark = f"OPSCONSOLE_VAR_DIR={folder / 'var'}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (path / "environ").read_bytes().split(b"\0"):
                found.append((path / "cmdline").read_text())
        except OSError:
            continue
    return found


def test_the_first_start_makes_an_operator_and_a_signal_stops_everything(tmp_path: Path) -> None:
    with console(tmp_path, "--no-demo") as first:
        with urllib.request.urlopen(f"{first.url}healthz", timeout=5) as answer:
            assert answer.status == 200
        found = re.search(r"as operator with the password (\S{20,})$", first.text, re.MULTILINE)
        assert found is not None
        password = found[1]
        names = first.query("SELECT username, is_staff, is_superuser FROM auth_user")
        assert names == [("operator", 1, 0)]
        assert first.query("SELECT count(*) FROM ops_grants_scopeusergrant") > [(10,)]
        others = ["services", "demo"]
        assert [line for line in first.text.splitlines() if line.split(" ")[0] in others] == []

        second = manage(tmp_path, "up", "--port", "0")
        assert second.returncode == 1
        assert f"process {first.process.pid}" in second.stderr
        assert "OPSCONSOLE_VAR_DIR" in second.stderr

        assert first.stop(signal.SIGINT) == 0
    assert "Stopped." in first.text
    assert processes_of(tmp_path) == []
    kept = [path for path in (tmp_path / "var").rglob("*") if path.is_file() and password.encode() in path.read_bytes()]
    assert kept == [], "the password is written nowhere"

    with console(tmp_path, "--no-demo") as third:
        assert third.url
        assert "as operator; the password was shown" in third.text
        assert "changepassword operator" in third.text
        assert "with the password" not in third.text
        worker = child_of(third, "celery")
        os.kill(worker, signal.SIGKILL)
        third.wait_for("worker was ended by SIGKILL, and is started again.")
        wait_until(lambda: " ready." in third.text.rpartition("started again.")[2], lambda: third.text)
        assert child_of(third, "celery") != worker
        assert third.stop() == 0
    assert processes_of(tmp_path) == []


def child_of(running: Console, word: str) -> int:
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
            command = (path / "cmdline").read_text()
        except OSError:
            continue
        if parent == str(running.process.pid) and word in command:
            return int(path.name)
    pytest.fail(f"no {word} runs", pytrace=False)


def test_a_newcomer_sees_failures_fold_and_an_incident_close_by_itself(tmp_path: Path) -> None:
    """C11: after the cause is repaired, one retry of all closes the incident, and nobody has to say so."""
    with console(tmp_path) as running:
        assert running.url
        receipts = "FROM ops_deadletters_deadletter WHERE job_type = 'demo.send_receipt' AND tenant = 'harbour'"
        wait_until(lambda: running.query(f"SELECT count(*) {receipts}") == [(40,)], lambda: running.text)
        log = tmp_path / "var" / "demo" / "failures.log"
        assert f"Their tracebacks are in {log}" in running.text
        assert "ConnectionRefusedError" not in running.text, "forty of them would push the password off the screen"
        assert log.read_text().count("Traceback") >= 40
        [(incident, number)] = running.query(f"SELECT DISTINCT incident_id, count(*) {receipts} GROUP BY incident_id")
        assert number == 40, "one cause, one incident"

        assert "incidents close by themselves" in manage(tmp_path, "demo", "heal").stdout
        running.wait_for("The services are well again")
        done = manage(tmp_path, "shell", "-v", "0", "-c", RETRY_ALL.format(incident=incident))
        assert done.stdout.strip() == "40 planned, 0 refused", done.stderr

        state = f"SELECT state, unresolved_count, resolved_by FROM ops_incidents_incident WHERE id = '{incident}'"
        wait_until(lambda: running.query(state) == [("resolved", 0, "system:system")], lambda: running.text)
        repaired = f"SELECT DISTINCT state, count(*) {receipts} GROUP BY state"
        assert running.query(repaired) == [("repaired", 40)]
        tenants = running.query("SELECT DISTINCT tenant FROM ops_incidents_incident ORDER BY tenant")
        assert ("meadow",) in tenants

        assert running.stop() == 0
    assert processes_of(tmp_path) == []


RETRY_ALL = """
from uuid import UUID
from grants.operators import Operator
from grants.principals import user_named
from repairs.services import retry_incident
by = Operator.cli(user_named("operator"))
done = retry_incident(incident_id=UUID("{incident}"), by=by, key="all", expected_count=40)
print(done.planned, "planned,", done.refused, "refused")
"""


def test_a_port_that_is_taken_is_said_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, override_settings(VAR_DIR=tmp_path):
        port = taken.getsockname()[1]
        with pytest.raises(CommandError, match=f"Port {port} of 127.0.0.1 cannot be used .* --port chooses another"):
            call_command("up", port=port)


def test_a_data_folder_that_cannot_be_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "var").write_text("a file where a folder should be")
    done = manage(tmp_path, "up")
    assert done.returncode == 1
    assert "OPSCONSOLE_VAR_DIR" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_database_that_cannot_be_used_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "var").mkdir()
    (tmp_path / "var" / "opsconsole.sqlite3").write_text("no database, certainly not one of SQLite's" * 50)
    done = manage(tmp_path, "up", "--port", "0")
    assert done.returncode == 1
    assert "cannot be prepared" in done.stderr
    assert "Traceback" not in done.stderr


def test_other_machines_are_let_in_only_with_a_secret_key(tmp_path: Path) -> None:
    with override_settings(VAR_DIR=tmp_path), pytest.raises(CommandError, match="set OPSCONSOLE_SECRET_KEY"):
        call_command("up", host="0.0.0.0")


@pytest.mark.parametrize(
    ("option", "value"), [("--port", "70000"), ("--port", "http"), ("--workers", "0"), ("--workers", "many")]
)
def test_an_option_that_makes_no_sense_is_refused(option: str, value: str) -> None:
    with pytest.raises(CommandError, match=f"{option}.*'{value}'"):
        call_command("up", option, value)


def test_a_lock_that_a_killed_console_left_hinders_nobody(tmp_path: Path) -> None:
    (tmp_path / "up.lock").write_text(json.dumps({"pid": 1, "url": "http://127.0.0.1:1/"}))
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        override_settings(VAR_DIR=tmp_path),
        pytest.raises(CommandError, match="cannot be used"),  # so it came past the lock
    ):
        call_command("up", port=taken.getsockname()[1])
