"""A mail server on loopback that takes messages, or breaks off or refuses where a test has told it to."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

HANG_UP = "hang up"
HANG = "hang"


@dataclass(slots=True)
class MailServer:
    """``replies`` has what is said to a verb instead of its usual reply; ``END`` is the dot at a message's end."""

    port: int = 0
    replies: Mapping[str, str] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)


USUAL = {
    "GREETING": "220 tests ready", "EHLO": "250 tests", "HELO": "250 tests", "MAIL": "250 fine", "RCPT": "250 fine",
    "DATA": "354 go on", "END": "250 taken", "RSET": "250 fine", "QUIT": "221 bye", "NOOP": "250 fine",
}  # fmt: skip


class _Session(socketserver.StreamRequestHandler):
    timeout = 10
    owner: MailServer

    def handle(self) -> None:
        if not self.say("GREETING"):
            return
        while line := self.rfile.readline(2_000):
            verb = line.decode("utf-8", "replace").strip().partition(" ")[0].upper()
            if not self.say(verb):
                return
            if verb == "DATA" and self.reply("DATA").startswith("354"):
                lines = []
                while (part := self.rfile.readline(100_000)) not in (b".\r\n", b""):
                    lines.append(part.decode("utf-8", "replace"))
                if self.reply("END").startswith("250"):
                    self.owner.taken.append("".join(lines))
                if not self.say("END"):
                    return
            if verb == "QUIT":
                return

    def reply(self, verb: str) -> str:
        return self.owner.replies.get(verb, USUAL.get(verb, "502 no"))

    def say(self, verb: str) -> bool:
        reply = self.reply(verb)
        if reply == HANG:
            self.owner.is_over.wait(10)
        if reply in (HANG, HANG_UP):
            return False
        self.wfile.write(f"{reply}\r\n".encode())
        return True


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True


@contextmanager
def taking_mail() -> Iterator[MailServer]:
    """Run a mail server until the block ends."""
    owner = MailServer()
    session = type("OwnSession", (_Session,), {"owner": owner})
    with _Server(("127.0.0.1", 0), session) as server:
        owner.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield owner
        owner.is_over.set()
        server.shutdown()
        thread.join(5)
