"""One append-only file per process: written at once, locked while its process lives, continued in numbered segments."""

from __future__ import annotations

import fcntl
import json
import os
import re
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from zlib import crc32

from deadletters.journal.frames import ENTRY, FRAME, MARK, Kind, make_frame
from opsconsole.core.clock import boot_now, wall_now

SEGMENT_BYTES: Final = 4 << 20
SYNC_SECONDS: Final = 0.25
"""How long after one ``sync`` the next ones are left to the drainer: in a burst each would cost more than the rest."""
_FILE_NAME: Final = re.compile(r"(?P<process>main|carry|child-\d+)\.(?P<segment>\d{6,})\.j")
_FLUSH_BYTES: Final = 64 << 10
_BACKLOG_BYTES: Final = 1 << 20

_open_files: weakref.WeakSet[JournalFile] = weakref.WeakSet()


def file_name(process: str, segment: int) -> str:
    """Return the name of a process's numbered segment."""
    return f"{process}.{segment:06d}.j"


def parse_file_name(name: str) -> tuple[str, int] | None:
    """Return process and segment number of a journal file's name, or None for any other file."""
    match = _FILE_NAME.fullmatch(name)
    return (match["process"], int(match["segment"])) if match else None


def is_locked(path: Path) -> bool:
    """Tell whether the process that writes this file still lives. A file that is gone is not locked."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Dropped again by closing: this descriptor is our own, so the writer's lock cannot be lost by it.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


class JournalFile:
    """The journal of one process. Safe for its threads and for signal handlers; a fork never writes its parent's file.

    ``append`` raises nothing: what cannot be written waits in memory up to a bound, is counted in ``dropped`` until it
    could be written after all, and is reported to ``trouble``.
    """

    def __init__(
        self,
        folder: Path,
        process: str,
        *,
        head: Mapping[str, Any],
        segment_bytes: int = SEGMENT_BYTES,
        trouble: Callable[[OSError], None],
    ) -> None:
        """Create the process's first segment, or its next one if a process with its id was here before."""
        self.folder = folder
        self.process = process
        self.dropped = 0
        self._head = dict(head)
        self._segment_bytes = segment_bytes
        self._trouble = trouble
        # A signal handler may append while its own thread is appending: Celery's cold shutdown does.
        self._lock = threading.RLock()
        self._buffer: list[bytes] = []
        self._buffered_bytes = 0
        self._backlog: list[bytes] = []
        self._backlog_bytes = 0
        self._lost = 0
        self._size = 0
        self._synced_at = float("-inf")
        self._segment = 1 + max(
            (found[1] for name in os.listdir(folder) if (found := parse_file_name(name)) and found[0] == process),
            default=0,
        )
        self._descriptor = self._open_segment()
        _open_files.add(self)

    @property
    def path(self) -> Path:
        """The segment being written."""
        return self.folder / file_name(self.process, self._segment)

    @property
    def is_open(self) -> bool:
        """False once closed, and in any fork of the process that opened it."""
        return self._descriptor >= 0

    @property
    def is_sync_due(self) -> bool:
        """Whether ``append`` with ``sync`` would wait for the disk now."""
        return boot_now() - self._synced_at >= SYNC_SECONDS

    def append(self, payload: bytes, *, buffered: bool = False, sync: bool = False) -> None:
        """Write one entry, together with the buffered ones before it.

        ``buffered`` keeps it until the next entry or ``flush``: only for what the broker still holds. ``sync`` returns
        when the disk has it, unless that was waited for within ``SYNC_SECONDS``: then the drainer, which comes as
        often, records it or syncs it (``WorkerFolder.sync``).
        """
        frame = FRAME.pack(MARK, len(payload), crc32(payload)) + payload
        with self._lock:
            if self._descriptor < 0:
                return
            sync = sync and self.is_sync_due
            if not (buffered or sync or self._buffer or self._backlog or self._lost):
                self._write_one(frame)
                return
            if buffered:
                self._buffer.append(frame)
                self._buffered_bytes += len(frame)
                if self._buffered_bytes < _FLUSH_BYTES:
                    return
                frame = b""
            self._write(frame, sync)

    def append_surely(self, payload: bytes) -> None:
        """Write one entry and wait until the disk has it; raises ``OSError``, and then nothing of it is kept.

        For what must not be done unless it is written down: an entry that waited in memory would tell later of
        something that has not happened.
        """
        frame = make_frame(payload)
        with self._lock:
            if self._descriptor < 0:
                raise OSError("the journal of this process is closed")
            if self._buffer or self._backlog or self._lost:
                self._write(b"", False)
                if self._backlog or self._lost:
                    raise OSError("entries before this one could not be written")
            self._write_all(frame)
            try:
                os.fsync(self._descriptor)
            except OSError:
                self._cut_off(len(frame))
                self._size -= len(frame)
                raise
            self._synced_at = boot_now()
            if self._size >= self._segment_bytes:
                self._rotate()

    def flush(self) -> None:
        """Write what is buffered, and what could not be written before."""
        with self._lock:
            if self._descriptor >= 0 and (self._buffer or self._backlog):
                self._write(b"", False)

    def close(self) -> None:
        """Write what is buffered and let go of the file, which frees its lock."""
        with self._lock:
            self.flush()
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)

    def abandon(self) -> None:
        """Forget the parent's file in a fork: its lock object may be held by a thread that does not exist here.

        The descriptor is closed, never unlocked: the lock belongs to the open file, which parent and child share.
        """
        self._lock = threading.RLock()
        descriptor, self._descriptor = self._descriptor, -1
        self._buffer, self._backlog = [], []
        if descriptor >= 0:
            os.close(descriptor)

    def _write_one(self, frame: bytes) -> None:
        """Do what ``_write`` does for the usual case: one entry, and nothing waits."""
        try:
            written = os.write(self._descriptor, frame)
        except OSError as exc:
            self._keep_back([frame], already_counted=0)
            self._trouble(exc)
            return
        if written < len(frame):
            # The disk is full: take back the half, and let the whole one wait.
            self._cut_off(written)
            self._write(frame, False)
            return
        self._size += written
        if self._size >= self._segment_bytes:
            self._rotate()

    def _write(self, frame: bytes, sync: bool) -> None:
        # Taken out before writing: a signal handler that appends in between must not write them a second time.
        buffered, self._buffer = self._buffer, []
        backlog, self._backlog = self._backlog, []
        self._buffered_bytes = 0
        frames = [*backlog, *buffered, frame] if frame else [*backlog, *buffered]
        lost = self._lost
        if lost:
            gap = ENTRY.pack(Kind.GAP, 0, boot_now(), wall_now()) + json.dumps({"lost": lost}).encode()
            frames.insert(0, make_frame(gap))
        data = frame if len(frames) == 1 and frame else b"".join(frames)
        try:
            self._write_all(data)
            if sync:
                os.fsync(self._descriptor)
                self._synced_at = boot_now()
        except OSError as exc:
            self._keep_back(frames[1:] if lost else frames, already_counted=len(backlog))
            self._trouble(exc)
            return
        self._lost -= lost
        self._backlog_bytes = 0
        self.dropped -= len(backlog)
        if self._size >= self._segment_bytes:
            self._rotate()

    def _write_all(self, data: bytes) -> None:
        descriptor = self._descriptor
        written = 0
        try:
            written = os.write(descriptor, data)
            while written < len(data):
                written += os.write(descriptor, data[written:])
        except OSError:
            if 0 < written < len(data):
                self._cut_off(written)
            raise
        self._size += written

    def _cut_off(self, written: int) -> None:
        """Remove half a frame from the end: it would hide the next ones until a reader finds its feet again."""
        os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)

    def _keep_back(self, frames: list[bytes], already_counted: int) -> None:
        self.dropped += len(frames) - already_counted
        self._backlog_bytes = 0
        for frame in frames:
            if self._backlog_bytes + len(frame) <= _BACKLOG_BYTES:
                self._backlog.append(frame)
                self._backlog_bytes += len(frame)
            else:
                self._lost += 1

    def _rotate(self) -> None:
        before = self._descriptor
        self._segment += 1
        try:
            self._descriptor = self._open_segment()
        except OSError as exc:
            # The old segment still works; it only grows longer than it should.
            self._segment -= 1
            self._trouble(exc)
            return
        # In this order some file of a living process is always locked.
        os.close(before)

    def _open_segment(self) -> int:
        # Under another name until it is locked: a reader removes files of ours that nobody holds.
        unfinished = self.path.with_name(f".{self.path.name}")
        unfinished.unlink(missing_ok=True)
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode=0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            head = json.dumps({**self._head, "process": self.process, "segment": self._segment}).encode()
            frame = make_frame(ENTRY.pack(Kind.HEAD, 0, boot_now(), wall_now()) + head)
            os.write(descriptor, frame)
            unfinished.rename(self.path)
        except OSError:
            os.close(descriptor)
            raise
        self._size = len(frame)
        return descriptor


def _abandon_inherited_files() -> None:
    for file in tuple(_open_files):
        file.abandon()
    _open_files.clear()


os.register_at_fork(after_in_child=_abandon_inherited_files)
