"""Keeps recorded failures for a while, so that a database that came back without its last commits can be told again."""

from __future__ import annotations

import base64
import json
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from deadletters.journal.events import Caught, Delivery, ErrorReport, Failed, MessageState
from deadletters.journal.folder import KEPT_FOLDER, JournalRoot
from deadletters.journal.frames import encode_json, make_frame, read_frames
from opsconsole.core.clock import wall_now
from opsconsole.core.sealing import Sealer, SealError

KEPT_CONTEXT: Final = b"opsconsole kept failure"

_NAME: Final = re.compile(r"kept\.(?P<start>\d+)\.(?P<pid>\d+)\.j")
_FILES_PER_SPAN: Final = 24
# The sealed message is the one that JSON cannot hold as it is.
_FIELDS: Final = tuple(item.name for item in fields(Delivery) if item.name != "sealed")
_values_of: Final = attrgetter(*_FIELDS)
_AT_ONCE: Final = 50
"""Failures sealed together: what is damaged loses no more, and one seal for each would cost five times as much."""


class KeptFailures:
    """Append-only files of sealed failures under the journal's root, shared by all workers of the host.

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
        listed = list(failed)
        pages = (listed[start : start + _AT_ONCE] for start in range(0, len(listed), _AT_ONCE))
        data = b"".join(make_frame(self._sealer.seal(failures_to_json(page), KEPT_CONTEXT)) for page in pages)
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
                    failures = failures_from_json(self._sealer.open(payload, KEPT_CONTEXT))
                except (SealError, ValueError, KeyError, TypeError):
                    continue
                yield from failures

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


def failures_to_json(failures: Iterable[Failed]) -> bytes:
    """Return failures as JSON, for sealing: the names of a delivery's fields once, then a row of values for each."""
    rows = []
    for failed in failures:
        error = failed.error
        rows.append(
            (
                _values_of(failed.delivery),
                base64.b64encode(failed.delivery.sealed).decode("ascii"),
                failed.caught,
                failed.at_boot,
                failed.at_wall,
                (error.error_class, error.text, error.traceback, error.call_site, error.classes),
                failed.never_started,
            )
        )
    return encode_json({"fields": _FIELDS, "failures": rows}).encode("ascii")


def failures_from_json(data: bytes) -> list[Failed]:
    """Return the failures that ``failures_to_json`` wrote; raises ``ValueError`` and the like for anything else."""
    page = json.loads(data)
    return [_failed_of(page["fields"], row) for row in page["failures"]]


def _failed_of(names: list[str], row: list[Any]) -> Failed:
    values, sealed, caught, at_boot, at_wall, error, never_started = row
    # A field that a newer release added is left out by an older one that reads its files.
    known = {name: value for name, value in zip(names, values, strict=True) if name in _FIELDS}
    known["message_state"] = MessageState(known["message_state"])
    error_class, text, traceback, call_site, classes = error
    return Failed(
        delivery=Delivery(**known, sealed=base64.b64decode(sealed)),
        caught=Caught(caught),
        at_boot=at_boot,
        at_wall=at_wall,
        error=ErrorReport(
            error_class=error_class, text=text, traceback=traceback, call_site=call_site, classes=tuple(classes)
        ),
        never_started=never_started,
    )
