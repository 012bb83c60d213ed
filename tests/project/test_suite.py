"""The suite's own tools: a check that cannot fail would be worse than none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest
from django.core.management import call_command
from django.db import connection
from django.utils import timezone

from grants import sql
from grants.models import AuditEvent
from tests import services
from tests.__main__ import run_side_by_side
from tests.browser import open_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parents[2]


@pytest.mark.django_db(transaction=True)
def test_a_flush_empties_the_audit_trail_and_leaves_it_append_only() -> None:
    AuditEvent.objects.create(
        at=timezone.now(),
        tenant="t",
        operator_kind="system",
        action="a",
        verdict="denied",
        outcome="{}",
        leaf_version=1,
    )
    call_command("flush", interactive=False, verbosity=0)
    assert AuditEvent.objects.count() == 0
    assert sql.missing_triggers(connection) == []


def test_a_missing_service_skips_a_test_but_fails_it_where_all_is_said_to_be_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(services, "REDIS_URL", "redis://127.0.0.1:1/0")
    monkeypatch.delenv("OPSCONSOLE_REQUIRE_SERVICES", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no Redis answers"):
        services.find_redis()
    monkeypatch.setenv("OPSCONSOLE_REQUIRE_SERVICES", "1")
    with pytest.raises(pytest.fail.Exception, match="no Redis answers"):
        services.find_redis()
    monkeypatch.setattr(services, "RABBITMQ_URL", "amqp://guest:p4ss@127.0.0.1:1//")
    with pytest.raises(pytest.fail.Exception, match="no RabbitMQ answers") as failure:
        services.find_rabbitmq()
    assert "p4ss" not in str(failure.value)
    monkeypatch.setenv("OPSCONSOLE_TEST_CHROMIUM", "no-such-browser")
    with pytest.raises(pytest.fail.Exception, match="on the PATH"):
        services.find_chromium()


def test_a_run_that_fails_stops_no_other_and_every_output_is_whole(capfd: pytest.CaptureFixture[str]) -> None:
    fails = "print('it broke', flush=True); raise SystemExit(3)"
    goes_on = "import time; print('first', flush=True); time.sleep(0.5); print('last')"
    codes = run_side_by_side(
        {
            "one": [sys.executable, "-c", fails],
            "two": [sys.executable, "-c", goes_on],
            "three": [sys.executable, "-c", ""],
        }
    )
    assert codes == {"one": 3, "two": 0, "three": 0}
    lines = [line for line in capfd.readouterr().out.splitlines() if line]
    assert lines == ["it broke", "== two, which runs meanwhile", "first", "last", "== three, which runs meanwhile"]


def test_the_parts_of_the_suite_are_the_whole_and_share_nothing() -> None:
    def collected(part: str) -> set[str]:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "--collect-only", "-q", "--part", part, "tests/grants/test_record.py"],
            cwd=ROOT, capture_output=True, text=True, timeout=180,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return {line for line in done.stdout.splitlines() if "::" in line}

    database, rest = collected("database"), collected("rest")
    assert database
    assert rest
    assert not database & rest
    assert database | rest == collected("all")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whoever_ends_the_runs_lets_each_clean_up(tmp_path: Path, number: signal.Signals) -> None:
    waits = (
        "import pathlib, sys, time\ntry:\n  pathlib.Path(sys.argv[1]).touch(); time.sleep(60)\n"
        "except KeyboardInterrupt:\n  print('clean'); sys.exit(2)"
    )
    marks = [tmp_path / "one", tmp_path / "two"]
    commands = {mark.name: [sys.executable, "-c", waits, str(mark)] for mark in marks}
    both = f"from tests.__main__ import run_side_by_side; print(run_side_by_side({commands!r}))"
    with subprocess.Popen(
        [sys.executable, "-c", both], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 30
        while not all(mark.exists() for mark in marks):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(process.pid, number)
        assert process.stdout is not None
        output = process.stdout.read()
    assert process.returncode == 0
    assert output.count("clean") == 2
    assert "{'one': 2, 'two': 2}" in output


class Pages(BaseHTTPRequestHandler):
    """Serves the pages of the tests below."""

    bodies: ClassVar[dict[str, str]] = {
        "/good": "<h1>Good</h1><script src='/script.js'></script>",
        "/script.js": "console.log('hello'); console.warn('well');",
        "/console": "<script>console.error('it broke')</script>",
        "/uncaught": "<script>undefinedFunction()</script>",
        "/late": "<script>Promise.reject(new Error('too late'))</script>",
        "/policy": "<p style='color: red'>styled</p>",
        "/foreign": "<img src='http://127.0.0.1:1/pixel.png'>",
        "/lacking": "<img src='/nowhere.png'>",
    }

    def do_GET(self) -> None:
        body = self.bodies.get(self.path)
        self.send_response(200 if body else 404)
        self.send_header("Content-Type", "text/javascript" if self.path.endswith(".js") else "text/html")
        if self.path == "/policy":
            self.send_header("Content-Security-Policy", "default-src 'self'")
        self.end_headers()
        icon = "" if self.path.endswith(".js") else "<link rel='icon' href='data:,'>"  # else each page asks for one
        self.wfile.write((icon + (body or "nothing here")).encode())

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture(scope="module")
def pages() -> Iterator[str]:
    """The address of a web server with good and bad pages."""
    with HTTPServer(("127.0.0.1", 0), Pages) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("path", "trouble"),
    [
        ("/console", "console error: it broke"),
        ("/uncaught", "uncaught error: "),
        ("/late", "uncaught error: "),
        ("/policy", "policy violation: style-src"),
        ("/foreign", "request to another host: http://127.0.0.1:1/pixel.png"),
        ("/lacking", "console error: Failed to load resource"),
    ],
)
def test_a_page_in_trouble_is_noticed(browser: Browser, pages: str, path: str, trouble: str) -> None:
    with open_page(browser, pages) as (page, troubles):
        page.goto(path)
        page.wait_for_timeout(200)
    assert any(line.startswith(trouble) for line in troubles), troubles


@pytest.mark.parametrize("path", ["/good", "/nowhere"])
def test_a_page_without_trouble_passes_and_so_does_its_own_status(browser: Browser, pages: str, path: str) -> None:
    with open_page(browser, pages) as (page, troubles):
        page.goto(path)
        page.wait_for_timeout(200)
    assert troubles == []


def test_the_page_of_a_test_is_on_the_live_server(page: Page) -> None:
    page.route("**/favicon.ico", lambda route: route.fulfill(status=204))  # Django's plain page names no icon
    response = page.goto("/no-such-page")
    assert response is not None
    assert response.status == 404
    assert response.headers["x-request-id"]
