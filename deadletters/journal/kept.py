"""Keeps recorded failures for a while, so that a database that came back without its last commits can be told again."""

from __future__ import annotations

import json
import os
import re
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Final

from deadletters.journal.events import Caught, Delivery, Failed, MessageState
from deadletters.journal.folder import KEPT_FOLDER, JournalRoot
from deadletters.journal.frames import (
    ERROR_CONTEXT,
    encode_json,
    error_from_json,
    error_to_json,
    make_frame,
    read_frames,
)
from opsconsole.core.clock import wall_now
from opsconsole.core.sealing import Sealer, SealError

_NAME: Final = re.compile(r"kept\.(?P<start>\d+)\.(?P<pid>\d+)\.j")
_FILES_PER_SPAN: Final = 24
# The sealed message stands behind the others.
_FIELDS: Final = tuple(item.name for item in fields(Delivery) if item.name != "sealed")
_values_of: Final = attrgetter(*_FIELDS)
_HEAD: Final = struct.Struct(">II")
_UNREADABLE: Final = (SealError, ValueError, KeyError, TypeError, struct.error)


class KeptFailures:
    """Append-only files of failures under the journal's root, shared by all workers of the host.

    Each file covers a small part of the time and of the bytes that may be kept, so that expiring removes whole files.
    """

    def __init__(self, root: JournalRoot, max_bytes: int, max_age_seconds: float, *, sealer: Sealer) -> None:
        self.path = root.path / KEPT_FOLDER
        self.max_bytes = max_bytes
        self.max_age_seconds = max_age_seconds
        self._root = root
        self._sealer = sealer
        self._lock = threading.Lock()
        self._current: Path | None = None
        self._started = 0.0
        self._pid = 0

    def keep(self, failed: Iterable[Failed]) -> None:
        """Append failures; raises ``OSError`` if the disk does not take them."""
        data = b"".join(make_frame(pack_failure(item, self._sealer)) for item in failed)
        if not data:
            return
        with self._lock:
            path = self._file_for(len(data))
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, mode=0o600)
            try:
                written = 0
                while written < len(data):
                    written += os.write(descriptor, data[written:])
            finally:
                os.close(descriptor)

    def iter(self) -> Iterator[Failed]:
        """Yield every failure kept, oldest file first. What was damaged or sealed with a lost key is passed over."""
        for path in self._files():
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                continue
            for _, _, payload in read_frames(data, final=True)[0]:
                try:
                    yield unpack_failure(payload, self._sealer)
                except _UNREADABLE:
                    continue

    def expire(self) -> int:
        """Remove files past the age, then the oldest until the rest fits; return how many were removed."""
        removed = 0
        total = 0
        now = wall_now()
        for path in reversed(self._files()):
            try:
                found = path.stat()
            except FileNotFoundError:
                continue
            total += found.st_size
            if now - found.st_mtime > self.max_age_seconds or total > self.max_bytes:
                path.unlink(missing_ok=True)
                removed += 1
        return removed

    def usage(self) -> int:
        """Bytes kept."""
        return sum(path.stat().st_size for path in self._files())

    def _file_for(self, size: int) -> Path:
        now = time.monotonic()
        current = self._current
        if (
            current is None
            or self._pid != os.getpid()
            or now - self._started > self.max_age_seconds / _FILES_PER_SPAN
            or not current.exists()
            or current.stat().st_size + size > self.max_bytes / _FILES_PER_SPAN
        ):
            self._root.prepare()
            self.path.mkdir(mode=0o700, exist_ok=True)
            self._started, self._pid = now, os.getpid()
            # Wall time in the name puts files in order across restarts of the host.
            current = self._current = self.path / f"kept.{time.time_ns():020d}.{self._pid}.j"
        return current

    def _files(self) -> list[Path]:
        try:
            names = sorted(name for name in os.listdir(self.path) if _NAME.fullmatch(name))
        except FileNotFoundError:
            return []
        return [self.path / name for name in names]


def pack_failure(failed: Failed, sealer: Sealer) -> bytes:
    """Return one failure as bytes. Error and message stay sealed as the journal has them; the rest is no secret."""
    more = (failed.caught, failed.at_boot, failed.at_wall, failed.never_started)
    head = encode_json((_values_of(failed.delivery), more)).encode("ascii")
    error = failed.sealed_error or sealer.seal(error_to_json(failed.error), ERROR_CONTEXT)
    return b"".join((_HEAD.pack(len(head), len(error)), head, error, failed.delivery.sealed))


def unpack_failure(data: bytes, sealer: Sealer) -> Failed:
    """Return what ``pack_failure`` packed; raises ``SealError`` if its key is gone, ``ValueError`` and the like."""
    head, error = _HEAD.unpack_from(data)
    middle = _HEAD.size + head
    values, (caught, at_boot, at_wall, never_started) = json.loads(data[_HEAD.size : middle])
    # A field that a newer release added at the end is left out by an older one; a missing one has its default.
    known = dict(zip(_FIELDS, values, strict=False))
    known["message_state"] = MessageState(known["message_state"])
    sealed_error = data[middle : middle + error]
    return Failed(
        delivery=Delivery(**known, sealed=data[middle + error :]),
        caught=Caught(caught),
        at_boot=at_boot,
        at_wall=at_wall,
        error=error_from_json(sealer.open(sealed_error, ERROR_CONTEXT)),
        never_started=never_started,
        sealed_error=sealed_error,
    )
