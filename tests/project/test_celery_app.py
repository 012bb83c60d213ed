"""The Celery application of the console's own project."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 10


def environment(tmp_path: Path, **variables: str) -> dict[str, str]:
    ours = {"DJANGO_SETTINGS_MODULE": "opsconsole.settings.base", "OPSCONSOLE_VAR_DIR": str(tmp_path / "var")}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OPSCONSOLE_")}
    return clean | ours | variables


def test_a_worker_runs_a_job_from_the_embedded_broker_and_logs_in_our_form(tmp_path: Path) -> None:
    variables = environment(tmp_path, OPSCONSOLE_LOG_FORMAT="json")
    options = "--pool threads --concurrency 1 --without-gossip --without-mingle --without-heartbeat --loglevel INFO"
    with (tmp_path / "log").open("w") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "opsconsole", "worker", *options.split()],
            cwd=ROOT,
            env=variables,
            stdout=log,
            stderr=log,
        )
    try:
        code = "from opsconsole.celery import app; print(app.send_task('celery.accumulate', (1, 2)).id)"
        sent = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=60
        )
        task_id = sent.stdout.strip()
        assert task_id, sent.stderr
        line = wait_for_line(tmp_path / "log", f"Task celery.accumulate[{task_id}] succeeded", worker)
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait(30)
    assert json.loads(line)["task_id"] == task_id
    assert worker.returncode == 0


def wait_for_line(path: Path, text: str, worker: subprocess.Popen[bytes]) -> str:
    for _ in range(300):
        for line in path.read_text().splitlines():
            if text in line:
                return line
        assert worker.poll() is None, path.read_text()
        time.sleep(0.1)
    pytest.fail(f"{text!r} did not appear in {path.read_text()}", pytrace=False)


class Relay:
    """Stands between a client and a server, and falls silent when told to, as a hung server does."""

    def __init__(self, host: str, port: int) -> None:
        self.server = (host, port)
        self.silent = threading.Event()
        self.sockets: list[socket.socket] = [socket.create_server(("127.0.0.1", 0))]
        self.port: int = self.sockets[0].getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self.sockets[0].accept()
                server = socket.create_connection(self.server)
                self.sockets += [client, server]
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=self.pass_on, args=(source, target), daemon=True).start()

    def pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if not self.silent.is_set():
                    target.sendall(data)

    def close(self) -> None:
        for opened in self.sockets:
            with suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)
            opened.close()


PUBLISH_TWICE = """
import sys
from kombu.exceptions import OperationalError
from opsconsole.celery import app
app.send_task("nobody.serves.this", queue=sys.argv[1])
print("sent", flush=True)
sys.stdin.readline()
try:
    app.send_task("nobody.serves.this", queue=sys.argv[1])
except OperationalError:
    print("refused", flush=True)
"""


@pytest.fixture(params=["redis_url", "rabbitmq_url"])
def broker_url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(request.param)
    return url


@pytest.fixture
def relay(broker_url: str) -> Iterator[Relay]:
    parts = urlsplit(broker_url)
    assert parts.hostname
    assert parts.port
    relay = Relay(parts.hostname, parts.port)
    yield relay
    relay.close()


@pytest.mark.broker
def test_a_publisher_gives_up_on_a_broker_that_falls_silent(
    broker_url: str, relay: Relay, queue_name: str, tmp_path: Path
) -> None:
    """Without our timeouts a publisher hangs for 45 s on Redis, and for ever on RabbitMQ (measured)."""
    parts = urlsplit(broker_url)
    through_relay = urlunsplit(parts._replace(netloc=parts.netloc.replace(f":{parts.port}", f":{relay.port}")))
    variables = environment(tmp_path, OPSCONSOLE_BROKER_URL=through_relay)
    publisher = subprocess.Popen(
        [sys.executable, "-c", PUBLISH_TWICE, queue_name],
        cwd=ROOT,
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert publisher.stdin
    assert publisher.stdout
    with publisher:
        try:
            assert publisher.stdout.readline() == "sent\n"
            relay.silent.set()
            out, _ = publisher.communicate("\n", timeout=PATIENCE_SECONDS)
        finally:
            publisher.kill()
    assert out == "refused\n"
