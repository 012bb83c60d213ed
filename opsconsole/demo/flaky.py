"""Three small services on this host that break on command, so that the jobs of the demo have something to fail on.

While broken, the mail service refuses connections, the payment service takes each request, writes it down and never
answers, and the desk, the application that reports are about, says that it cannot serve: the difference between a job
that certainly did nothing and one that may have done its work. All are plain HTTP on loopback. Run as
``python -m opsconsole.demo.flaky FOLDER``; ``manage.py up`` does.
"""

from __future__ import annotations

import json
import select
import signal
import socket
import socketserver
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opsconsole.demo.folder import DemoFolder

HOST = "127.0.0.1"
LOOK_EVERY_SECONDS = 0.2
LONGEST_BODY = 64 << 10


class Handler(BaseHTTPRequestHandler):
    """What both services share: bodies are JSON and answers are short."""

    timeout = 60  # of a client that connects and says nothing
    door: Door

    def do_GET(self) -> None:
        self.answer(200, {"state": "well"})

    def do_POST(self) -> None:
        self.read_body()
        self.answer(202, {"state": "accepted"})

    def read_body(self) -> dict[str, Any]:
        length = min(int(self.headers.get("Content-Length") or 0), LONGEST_BODY)
        body: dict[str, Any] = json.loads(self.rfile.read(length) or b"{}")
        return body

    def keep_waiting(self) -> None:
        """Hold the connection without a word until the client has had enough or the service stops."""
        self.close_connection = True
        while not self.door.is_stopping.is_set():
            if select.select([self.connection], [], [], LOOK_EVERY_SECONDS)[0] and not self.connection.recv(1024):
                return

    def answer(self, status: int, document: dict[str, Any]) -> None:
        text = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Say nothing: the terminal belongs to what happens to jobs."""


class PaymentHandler(Handler):
    """Takes payments; while broken it never answers anything."""

    def do_GET(self) -> None:
        if self.door.folder.condition().is_broken:
            self.keep_waiting()
        else:
            self.answer(200, {"state": "well"})

    def do_POST(self) -> None:
        reference = str(self.read_body().get("reference", ""))
        is_broken = self.door.folder.condition().is_broken
        self.door.folder.note_request(reference, is_answered=not is_broken)
        if is_broken:
            self.keep_waiting()
        else:
            self.answer(201, {"state": "paid", "reference": reference})


class DeskHandler(Handler):
    """The application that reports are about; it remembers the keys of what it has done, and can be asked (C13)."""

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        if not self.path.startswith("/photos/"):
            known = self.door.folder.has_call(name)
            self.answer(200 if known else 404, {"status": "done" if known else "unknown"})
        elif self.door.folder.condition().is_broken:
            self.answer(503, {"state": "down"})
        elif name.endswith("0"):
            self.answer(404, {"state": "there is no such photo"})
        else:
            self.answer(200, {"photo": name})

    def do_POST(self) -> None:
        body = self.read_body()
        is_broken = self.door.folder.condition().is_broken
        if is_broken and self.path == "/proposals":
            # Done and written down, but nobody hears of it.
            self.remember()
            self.keep_waiting()
        elif is_broken:
            self.answer(503, {"state": "down"})
        elif self.path == "/reviews":
            subject = str(body.get("data", {}).get("subject", ""))
            self.answer(200, {"decision": "remove" if "offer" in subject else None, "explanation": "Read by a demo."})
        else:
            self.remember()
            self.answer(202, {"state": "accepted"})

    def remember(self) -> None:
        self.door.folder.note_call(str(self.headers.get("webhook-id", "")))


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def server_bind(self) -> None:
        # The parent class asks the name service for this host's name, which can take many seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed in the middle of its request is what the demo is about."""


class Door:
    """A port that is ours for good, and either answers or refuses: bound but not listening, it refuses."""

    def __init__(self, handler: type[Handler], folder: DemoFolder, port: int = 0) -> None:
        self.folder = folder
        self.handler = type(handler.__name__, (handler,), {"door": self})
        self.is_stopping = threading.Event()
        self.is_open = False
        self.server = self._bind(port)
        self.port: int = self.server.server_address[1]

    def open(self) -> None:
        if not self.is_open:
            self.server.server_activate()
            threading.Thread(target=self.server.serve_forever, args=(0.1,), daemon=True).start()
            self.is_open = True

    def shut(self) -> None:
        if self.is_open:
            self.server.shutdown()
            self.server.server_close()
            self.server = self._bind(self.port)
            self.is_open = False

    def stop(self) -> None:
        self.is_stopping.set()
        if self.is_open:
            self.server.shutdown()
        self.server.server_close()

    def _bind(self, port: int) -> Server:
        server = Server((HOST, port), self.handler, bind_and_activate=False)
        server.allow_reuse_address = True
        server.server_bind()
        return server


class Services:
    """The mail service, the payment service, and the desk."""

    def __init__(self, folder: DemoFolder) -> None:
        self.folder = folder
        folder.drop_old_requests()
        self.mail = Door(Handler, folder)
        self.payments = Door(PaymentHandler, folder)
        self.payments.open()
        self.desk = Door(DeskHandler, folder, folder.desk_port() or 0)
        self.desk.open()
        folder.set_desk_port(self.desk.port)
        self.look()
        folder.set_ports({"mail": self.mail.port, "payments": self.payments.port, "desk": self.desk.port})

    def look(self) -> None:
        """Open or shut the mail service as the folder says; the payment service looks at each request."""
        if self.folder.condition().is_broken:
            self.mail.shut()
        else:
            self.mail.open()

    def stop(self) -> None:
        self.folder.forget_ports()
        self.mail.stop()
        self.payments.stop()
        self.desk.stop()


def keep_desk_port(folder: DemoFolder) -> int:
    """Choose the desk's port before anything of the demo starts, the same as last time unless somebody has it now."""
    for port in (folder.desk_port() or 0, 0):
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind((HOST, port))
            except OSError:
                continue
            chosen: int = tried.getsockname()[1]
            folder.set_desk_port(chosen)
            return chosen
    raise OSError("no port of this host is free")


def answers(port: int) -> bool:
    """Say whether something accepts connections on a port of this host."""
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True


def main(path: str) -> None:
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    folder = DemoFolder(path)
    folder.begin()
    services = Services(folder)
    while not stopping.wait(LOOK_EVERY_SECONDS):
        services.look()
    services.stop()


if __name__ == "__main__":
    main(sys.argv[1])
