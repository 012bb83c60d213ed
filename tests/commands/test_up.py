"""How ``manage.py up`` learns that its web server answers; the whole of it is started in ``tests/demo``."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from opsconsole.management.commands import up


class _Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def web() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), _Healthy) as server:
        server.asked = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class _Running:
    """A supervisor all of whose children run."""

    is_stopping = False

    def ended(self) -> None:
        return None


def test_a_proxy_in_the_environment_is_not_asked_for_our_own_address(
    web: HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()[1]
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{nobody}")
    monkeypatch.setattr(up, "READY_WITHIN_SECONDS", 0.0)
    supervisor: Any = _Running()
    up._wait_until_ready(supervisor, f"http://127.0.0.1:{web.server_port}/")
    assert web.asked == ["/healthz"]  # type: ignore[attr-defined]
