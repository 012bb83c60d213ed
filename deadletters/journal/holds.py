"""Which messages this worker puts aside: a few rules, which its main process writes and every process of it reads.

The main process asks the database every two seconds. Children that were forked from it read the rules in memory that
they share with it, others in a file; each looks at most once a second, so that without a hold a job costs a look at a
clock. The rules that were read last on this host lie beside the workers' folders, for a worker that starts while the
database cannot be asked.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol
from zlib import crc32

from kombu.utils.json import dumps as kombu_dumps

from opsconsole.core.clock import boot_id, boot_now, wall_now
from opsconsole.jobs.tokens import job_id_of, job_type_of

FILE_NAME: Final = "holds.json"
LOOK_SECONDS: Final = 1.0
"""How old what a process knows of the file may be."""
_ANY: Final = "*"
_BOARD_BYTES: Final = 1 << 20
_CLOCK_DIFFERS_US: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldRule:
    """One hold as a worker compares with it; "" as a part, and ``*`` as tenant, is every value.

    Its end stands on both clocks of the host: the wall clock's counts only after a restart of the host.
    """

    id: str
    tenant: str
    job_type: str
    queue: str
    task_id: str
    payload_hash: str
    ends_at: str  # on the database's clock, to tell one reading from another
    ends_boot: float
    ends_wall: float
    boot: str
    clock_us: int  # what the database's clock said when the host's boot clock was at zero, in microseconds

    def is_over(self, boot: str, boot_clock: float, wall: float) -> bool:
        """Whether its time is over."""
        return boot_clock >= self.ends_boot if boot == self.boot else wall >= self.ends_wall


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What a message is compared by; ``payload_hash`` is asked only by a rule that names one."""

    tenant: str
    task: str
    queue: str
    task_id: str
    payload_hash: Callable[[], str]


class HoldSource(Protocol):
    """Asks whatever knows them for the rules of a worker's source; see ``deadletters.hold_watch``."""

    def read(self) -> Sequence[HoldRule]:
        """Return the rules in force; may raise anything, and may take its time."""


class _Board:
    """Memory that a process shares with the children that it forks: they read there what it has written last."""

    _HEAD: Final = struct.Struct("=QII")  # which writing it is, its length, and its CRC-32

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _BOARD_BYTES)
        self._number = 0

    def write(self, data: bytes) -> bool:
        """Write, for every process to see; false if there is no room for it."""
        if len(data) > _BOARD_BYTES - self._HEAD.size:
            return False
        self._number += 1
        self._memory[self._HEAD.size : self._HEAD.size + len(data)] = data
        self._memory[: self._HEAD.size] = self._HEAD.pack(self._number, len(data), crc32(data))
        return True

    def read(self, seen: int) -> tuple[int, bytes] | None:
        """Return a writing's number and data; None if it is the one that was seen, or is being written just now."""
        number, length, checksum = self._HEAD.unpack_from(self._memory)
        if number == seen:
            return None
        data = self._memory[self._HEAD.size : self._HEAD.size + length]
        return (number, data) if crc32(data) == checksum else None


class HoldBook:
    """The rules as one worker's processes know them. ``put`` is for its main process alone."""

    def __init__(self, path: Path | None, last_known: Path) -> None:
        """``path`` is the worker's own file, None if it has no folder; ``last_known`` is this source's on this host."""
        self.path = path
        self.last_known = last_known
        self._pid = os.getpid()
        self._rules: tuple[HoldRule, ...] = ()
        self._board: _Board | None = _Board()
        self._seen_number = 0
        self._seen: tuple[int, int, int] | None = None
        self._look_at = 0.0
        self._kept: tuple[HoldRule, ...] | None = None
        self._clock: int | None = None

    @classmethod
    def of_child(cls, path: Path, last_known: Path) -> HoldBook:
        """Return the book of a process that did not inherit its parent's memory."""
        book = cls(path, last_known)
        book._pid, book._board = 0, None
        return book

    def in_force(self) -> tuple[HoldRule, ...]:
        """Return the rules; called before every job, so that it costs nearly nothing while there are none."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look(now)
        return self._rules

    def matching(self, message: Message) -> HoldRule | None:
        """Return the oldest rule that puts this message aside."""
        rules = self.in_force()
        return first_match(rules, message) if rules else None

    def put(self, rules: Iterable[HoldRule]) -> None:
        """Replace the rules, in this process at once and in the others within a second; raises ``OSError``.

        What could not be written is written by the next call.
        """
        listed = self._by_one_clock(rules)
        if self._kept is not None and _told(listed) == _told(self._kept):
            return
        data = self._show(listed)
        if self.path is not None:
            _replace(self.path, data)
        if listed or self.last_known.exists():
            # A host on which nothing was ever held has no such file.
            self.last_known.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _replace(self.last_known, data)
        self._kept = listed

    def _by_one_clock(self, rules: Iterable[HoldRule]) -> tuple[HoldRule, ...]:
        """Return the rules with the reading of the database's clock that this host has used before.

        Each reading is off by as long as its query took; by one and the same, all that the host's workers have
        received falls into the order in which it came.
        """
        listed = tuple(rules)
        if not listed:
            return listed
        if self._clock is None:
            known = _read(self.last_known) or ()
            self._clock = next((rule.clock_us for rule in known if rule.boot == boot_id()), listed[0].clock_us)
        if abs(listed[0].clock_us - self._clock) > _CLOCK_DIFFERS_US:
            self._clock = listed[0].clock_us
        return tuple(replace(rule, clock_us=self._clock) for rule in listed)

    def recall(self) -> None:
        """Take the rules that were last known on this host, for want of better ones."""
        data = self._show(_read(self.last_known) or ())
        if self.path is not None:
            _replace(self.path, data)

    def _show(self, rules: tuple[HoldRule, ...]) -> bytes:
        """Take rules, let the children see them, and return them as they are written; needs no disk."""
        self._rules = rules
        data = json.dumps([asdict(rule) for rule in rules]).encode()
        if self._board is not None and not self._board.write(data):
            # Too many for it: from here on everybody looks into the file.
            self._board.write(b"")
        return data

    def _look(self, now: float) -> None:
        self._look_at = now + LOOK_SECONDS
        if os.getpid() == self._pid:
            return
        if self._board is not None:
            found = self._board.read(self._seen_number)
            if found is not None and found[1]:
                self._rules, self._seen_number = _rules_in(found[1]) or (), found[0]
            if found is None or found[1]:
                return
        self._look_into_file()

    def _look_into_file(self) -> None:
        path = self.path or self.last_known
        try:
            found = path.stat()
            seen = found.st_mtime_ns, found.st_ino, found.st_size
            if seen == self._seen:
                return
            rules = _read(path)
        except OSError:
            # Kept as they are known: a folder that went says nothing about holds.
            return
        if rules is not None:
            self._rules, self._seen = rules, seen


def first_match(rules: Sequence[HoldRule], message: Message) -> HoldRule | None:
    """Return the first of some rules, oldest first, that puts a message aside."""
    job_id = job_id_of(message.task_id)
    names = (message.task_id, str(job_id)) if job_id is not None else (message.task_id,)
    job_type = job_type_of(message.task)
    boot, boot_clock, wall = boot_id(), boot_now(), wall_now()
    for rule in rules:
        if (
            rule.tenant in (_ANY, message.tenant)
            and rule.job_type in ("", job_type)
            and rule.queue in ("", message.queue)
            and (not rule.task_id or rule.task_id in names)
            and not rule.is_over(boot, boot_clock, wall)
            and (not rule.payload_hash or rule.payload_hash == message.payload_hash())
        ):
            return rule
    return None


def last_known_path(root: Path, source: str) -> Path:
    """Return where the last known rules of a source lie on this host."""
    return root / "holds" / f"{hashlib.sha256(source.encode()).hexdigest()[:32]}.json"


def payload_hash(args: Any, kwargs: Any) -> str:
    """Return the hash by which a payload is named: of the canonical JSON of ``[args, kwargs]`` as a message has them.

    Raises ``ValueError`` or ``TypeError`` for arguments that JSON cannot hold. Numbers are written as Python does:
    they never leave it.
    """
    # Through kombu's own encoder, so that a date that a worker has decoded reads as in the message.
    value = json.loads(kombu_dumps([args if args is not None else [], kwargs if kwargs is not None else {}]))
    return payload_hash_of_json(value)


def payload_hash_of_json(value: Any) -> str:
    """Return the hash of ``[args, kwargs]`` that were decoded as JSON and nothing more."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _told(rules: Sequence[HoldRule]) -> list[tuple[str, str]]:
    return [(rule.id, rule.ends_at) for rule in rules]


def _read(path: Path) -> tuple[HoldRule, ...] | None:
    """Return the rules in a file; None if it cannot be read, or is nothing that we wrote."""
    try:
        return _rules_in(path.read_bytes())
    except OSError:
        return None


def _rules_in(data: bytes) -> tuple[HoldRule, ...] | None:
    try:
        told: Sequence[Mapping[str, Any]] = json.loads(data)
        return tuple(HoldRule(**rule) for rule in told)
    except (ValueError, TypeError):
        return None


def _replace(path: Path, data: bytes) -> None:
    """Write a file so that a reader has the old one or the new one, also after a crash of the host."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode=0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
