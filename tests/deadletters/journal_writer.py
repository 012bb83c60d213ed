"""Writes journals entry by entry, for tests that need to say exactly what a worker's processes wrote and when."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deadletters.journal.events import ErrorReport, MessageState
from deadletters.journal.files import JournalFile
from deadletters.journal.folder import WorkerFolder
from deadletters.journal.frames import (
    ENTRY,
    ERROR_CONTEXT,
    MESSAGE_CONTEXT,
    End,
    Kind,
    error_to_json,
    message_part,
    report_part,
)
from deadletters.journal.message import pack_parts
from opsconsole.core.clock import boot_id, boot_now
from opsconsole.core.sealing import Sealer, derive_key

SEALER = Sealer({"test": derive_key("journal tests", "sealing")}, "test")
ERROR = ErrorReport(error_class="shop.Declined", text="no money", traceback="Traceback", call_site="shop:pay")


class Writer:
    """One worker's folder with a main file and children; ``at`` is seconds after its start."""

    def __init__(self, root: Path, *, segment_bytes: int = 1 << 30) -> None:
        root.mkdir(exist_ok=True)
        self.folder = WorkerFolder.create(root, "worker@host")
        self.segment_bytes = segment_bytes
        self.files: dict[str, JournalFile] = {}
        # Long past, and still after the host's own start, which may have been a minute ago.
        self.began = boot_now() - min(1000.0, boot_now() / 2)
        self.file("main")
        self.folder.publish()
        self.files["main"].folder = self.folder.path

    def file(self, process: str) -> JournalFile:
        if process not in self.files:
            self.files[process] = JournalFile(
                self.folder.path,
                process,
                head={"version": 1, "boot": boot_id()},
                segment_bytes=self.segment_bytes,
                trouble=self.trouble,
            )
        return self.files[process]

    def trouble(self, exc: OSError) -> None:
        raise exc

    def put(self, kind: Kind, number: int, at: float, body: bytes = b"", *, process: str = "main") -> None:
        self.file(process).append(ENTRY.pack(kind, number, self.began + at, 1e9 + at) + body)

    def identity(self, number: int, **more: Any) -> bytes:
        return json.dumps(
            [more.pop("id", f"id-{number}"), "shop.charge", "celery", more.pop("retries", 0), more]
        ).encode()

    def message(self, number: int, text: str = "body") -> bytes:
        packed, state, digest = pack_parts(
            body=text.encode(),
            content_type="application/json",
            content_encoding="utf-8",
            properties={},
            headers={"id": f"id-{number}", "task": "shop.charge", "retries": 0},
            delivery_info={"exchange": "", "routing_key": "celery"},
        )
        assert state is MessageState.FULL
        return message_part(SEALER.seal(packed, MESSAGE_CONTEXT), state, digest)

    def received(self, number: int, at: float, **more: Any) -> None:
        self.put(Kind.RECEIVED, number, at, self.identity(number, **more))

    def ack(self, number: int, at: float, *, kind: Kind = Kind.ACK) -> None:
        self.put(kind, number, at, self.message(number))

    def start(self, number: int, at: float, *, process: str = "child-7") -> None:
        self.put(Kind.START, number, at, process=process)

    def end(self, number: int, at: float, end: End = End.SUCCESS, *, process: str = "child-7") -> None:
        error = b"" if end in (End.SUCCESS, End.IGNORED) else SEALER.seal(error_to_json(ERROR), ERROR_CONTEXT)
        self.put(Kind.END, number, at, bytes((end,)) + error, process=process)

    def report(
        self, kind: Kind, number: int, at: float, *, process: str = "child-7", text: str | None = None, **more: Any
    ) -> None:
        sealed = SEALER.seal(error_to_json(ERROR), ERROR_CONTEXT)
        body = report_part(self.identity(number, **more), sealed, self.message(number, text) if text else b"")
        self.put(kind, number, at, body, process=process)

    def healthy(self, number: int, at: float, *, process: str = "child-7") -> None:
        self.received(number, at)
        self.ack(number, at + 0.1)
        self.start(number, at + 0.2, process=process)
        self.end(number, at + 0.3, process=process)

    def die(self) -> None:
        """Let go of every lock, as the kernel does for a killed process."""
        for file in self.files.values():
            file.close()
