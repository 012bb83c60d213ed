"""A real HTTP server on loopback that answers as a test has told it to, and remembers what it was asked."""

from __future__ import annotations

import json
import socket
import socketserver
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Behaviour = Callable[["Handler"], None]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as it came in."""

    method: str
    path: str
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)


@dataclass(slots=True)
class TestServer:
    __test__ = False

    port: int
    scheme: str = "http"
    asked: list[Asked] = field(default_factory=list)
    behaviours: dict[str, Behaviour] = field(default_factory=dict)
    is_over: threading.Event = field(default_factory=threading.Event)

    def url(self, path: str = "/hook", host: str = "127.0.0.1") -> str:
        return f"{self.scheme}://{host}:{self.port}{path}"

    def on(self, path: str, behaviour: Behaviour) -> str:
        """Have a path answered in some way, and return its URL."""
        self.behaviours[path] = behaviour
        return self.url(path)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 10
    owner: TestServer

    def handle_any(self) -> None:
        self.close_connection = True
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.owner.asked.append(Asked(self.command, self.path, headers, body))
        self.owner.behaviours.get(self.path, status(404))(self)

    do_GET = do_POST = handle_any

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def status(code: int, body: bytes = b"", **headers: str) -> Behaviour:
    def answer(handler: Handler) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def answers(document: Any, code: int = 200) -> Behaviour:
    return status(code, json.dumps(document).encode(), Content_Type="application/json")


def redirects(to: str, code: int = 302) -> Behaviour:
    return status(code, Location=to)


def hangs(handler: Handler) -> None:
    """Say nothing until the test is over."""
    handler.owner.is_over.wait(10)


def hangs_up(handler: Handler) -> None:
    """Close the connection without a word."""


def resets(handler: Handler) -> None:
    """Break the connection off, as a server does that dies."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


def drips(handler: Handler) -> None:
    """Send a byte of an answer now and then, for ever."""
    for byte in b"HTTP/1.1 200 OK\r\nX-Slow: " + b"." * 10_000:
        if handler.owner.is_over.wait(0.05):
            return
        handler.wfile.write(bytes([byte]))


def stops_short(handler: Handler) -> None:
    """Announce more of a body than comes."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nonly this")


def talks_nonsense(handler: Handler) -> None:
    handler.wfile.write(b"220 mail.example ESMTP\r\n")


def streams(size: int) -> Behaviour:
    """Send a chunked body that does not say how long it will be."""

    def answer(handler: Handler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        left = size
        while left > 0:
            piece = b"x" * min(left, 8192)
            handler.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            left -= len(piece)
        handler.wfile.write(b"0\r\n\r\n")

    return answer


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def server_bind(self) -> None:
        # The parent class asks the name service for this host's name.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that leave early are what some tests are about."""


@contextmanager
def serving(tls: ssl.SSLContext | None = None) -> Iterator[TestServer]:
    """Run a server until the block ends."""
    handler = type("OwnHandler", (Handler,), {})
    server = _Server(("127.0.0.1", 0), handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    owner = TestServer(port=server.server_address[1], scheme="https" if tls else "http")
    handler.owner = owner  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield owner
    finally:
        owner.is_over.set()
        server.shutdown()
        server.server_close()
        thread.join(5)


def closed_port() -> int:
    """Return a port of loopback on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
