"""Puts a worker's entries together into events: what was received, how each delivery ended, and what was lost.

The files of one worker are read as one sequence in the order of its host's clock. What is open is always rebuilt from
the files' start: entries before the given offsets only build that state, entries after them bring events. So reading on
after a crash brings exactly the events whose offsets had not been stored.
"""

from __future__ import annotations

import json
import os
import struct
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any, Final
from zlib import crc32

from deadletters.journal.events import (
    Batch,
    Caught,
    Delivery,
    Ended,
    EndState,
    ErrorReport,
    Event,
    Failed,
)
from deadletters.journal.files import file_name, is_locked, parse_file_name
from deadletters.journal.folder import WorkerFolder
from deadletters.journal.frames import (
    ENTRY,
    ERROR_CONTEXT,
    IDENTITY_NAMES,
    MESSAGE_CONTEXT,
    End,
    Kind,
    encode_json,
    error_from_json,
    make_frame,
    read_frames,
    split_message_part,
    split_report_part,
)
from deadletters.journal.message import unpack_message
from opsconsole.core.clock import boot_id, boot_now
from opsconsole.core.sealing import Sealer, SealError
from opsconsole.jobs.tokens import job_id_of, job_type_of

SETTLE_SECONDS: Final = 0.25
"""How far reading stays behind a living worker, so that what belongs together is read together."""
MESSAGE_SECONDS: Final = 2.0
"""How long a failure waits for the main process to write the message it belongs to."""
FINISHED: Final = "*finished*"
"""Key in the offsets of a dead folder's last batch."""

_CARRY: Final = "carry"
_LOST_CLASS: Final = "billiard.exceptions.WorkerLostError"
_LOST_CLASSES: Final = (_LOST_CLASS, "Exception", "BaseException")
_CAUGHT: Final = {
    Kind.FAIL: Caught.FAILURE,
    Kind.INTERNAL: Caught.INTERNAL,
    Kind.EXPIRED: Caught.EXPIRED,
    Kind.UNKNOWN: Caught.UNKNOWN,
    Kind.REJECTED: Caught.REJECTED_MESSAGE,
}
# Celery acknowledges or rejects these itself, for good.
_DISPOSED: Final = frozenset((Kind.UNKNOWN, Kind.REJECTED, Kind.EXPIRED, Kind.REVOKED))
_REPORTS: Final = frozenset((*_CAUGHT, Kind.RETRY, Kind.REVOKED, Kind.HELD))
_MESSAGES: Final = frozenset((Kind.ACK, Kind.REJECT))
_SETTLING: Final = frozenset((Kind.ACK, Kind.REJECT, Kind.REQUEUE))
_NEEDS_MESSAGE: Final = frozenset((Kind.FAIL, Kind.INTERNAL, Kind.EXPIRED))
_FAILED_ENDS: Final = frozenset((End.REJECTED, End.REQUEUED_LATE))
_FAILED_END_BYTES: Final = frozenset(bytes((end,)) for end in _FAILED_ENDS)
_MAY_WAIT: Final = frozenset((*_NEEDS_MESSAGE, Kind.END))
# Only an entry without a number is known by its task's id, and it follows the one that it repeats at once.
_REMEMBERED_IDS: Final = 5000
_CARRIED_IDS: Final = 1000
_MOST_DAMAGE: Final = 20
_KNOWN_TAILS: Final = 1024
_LONGEST_KNOWN_TAIL: Final = 1024
# As plain numbers: asking the enumeration for each of four entries a job costs more than what is done with most.
_RECEIVED: Final = int(Kind.RECEIVED)
_START: Final = int(Kind.START)
_END: Final = int(Kind.END)
_SUCCESS: Final = int(End.SUCCESS)
_ABOUT_FILES: Final = frozenset((Kind.HEAD, Kind.CLOSED, Kind.GAP))
_BAD_FRAME: Final = (ValueError, KeyError, IndexError, TypeError, struct.error, SealError, RecursionError)

_Values = tuple[int, int, float, float]  # kind, number, boot clock, wall clock
# (order, file, end offset, payload, start offset, values): order is the boot clock, never running backwards in a file.
_Entry = tuple[float, str, int, bytes, int, _Values]


class _Numbers:
    """A set of delivery numbers, as ranges: what has ended is nearly all of what there was, however long that is."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def __contains__(self, number: int) -> bool:
        index = bisect_right(self._firsts, number) - 1
        return index >= 0 and number <= self._lasts[index]

    def add(self, number: int) -> None:
        firsts, lasts = self._firsts, self._lasts
        index = bisect_right(firsts, number)
        if index and number <= lasts[index - 1]:
            return
        follows = index > 0 and lasts[index - 1] == number - 1
        precedes = index < len(firsts) and firsts[index] == number + 1
        if follows and precedes:
            lasts[index - 1] = lasts.pop(index)
            del firsts[index]
        elif follows:
            lasts[index - 1] = number
        elif precedes:
            firsts[index] = number
        else:
            firsts.insert(index, number)
            lasts.insert(index, number)

    def ranges(self) -> list[tuple[int, int]]:
        """Return first and last number of each range, in order."""
        return list(zip(self._firsts, self._lasts, strict=True))

    def add_ranges(self, ranges: Iterable[Sequence[int]]) -> None:
        """Add what ``ranges`` of another set gave to this one, which is empty."""
        for first, last in ranges:
            self._firsts.append(first)
            self._lasts.append(last)


@dataclass(slots=True)
class _Open:
    """A delivery that has not ended, and where its entries lie."""

    delivery: Delivery
    known: bool = False  # its identity was read
    synthetic: bool = False  # its message was put together by the child
    last_boot: float = 0.0
    last_wall: float = 0.0
    early_end: tuple[EndState, float, float, ErrorReport | None] | None = None  # it ended before its identity was read
    held_at: tuple[float, float] | None = None  # a hold has put it aside, on both clocks
    places: list[tuple[str, int, int]] = field(default_factory=list)


class FolderReader:
    """Reads one worker's folder. Not for use by two threads at once.

    If storing a batch fails for good, make a new reader with the offsets stored last: this one has moved on.
    """

    def __init__(
        self,
        folder: WorkerFolder | Path,
        sealer: Sealer,
        offsets: dict[str, int] | None = None,
        *,
        settle_seconds: float = SETTLE_SECONDS,
    ) -> None:
        self.folder = folder if isinstance(folder, WorkerFolder) else WorkerFolder(Path(folder))
        self._sealer = sealer
        self._stored = dict(offsets or {})
        self._settle = settle_seconds
        self._offsets = dict(self._stored)
        self._parsed: dict[str, int] = {}
        self._order: dict[str, float] = {}
        self._pending: list[_Entry] = []
        self._open: dict[int, _Open] = {}
        self._closed = _Numbers()
        self._closed_ids: dict[int, str] = {}
        self._gaps = False
        self._behind: list[float] = []
        self._holders: dict[str, str] = {}
        self._rebuilt = False
        self._boot_id = ""
        self._head: dict[str, object] = {}
        self._events: list[Event] = []
        self._received: list[Delivery] = []
        self._damaged: list[str] = []

    @property
    def offsets(self) -> dict[str, int]:
        """How far each file has been read: what the last batch said."""
        return dict(self._offsets)

    @property
    def head(self) -> dict[str, object]:
        """What the worker's files say of it (source, node, boot), as far as they have been read."""
        return dict(self._head)

    @property
    def open_deliveries(self) -> list[Delivery]:
        """Deliveries received and not ended so far."""
        self._rebuild()
        return [item.delivery for item in self._open.values() if item.known]

    def read(self, limit_bytes: int = 1 << 20, *, to_the_end: bool = False) -> Batch:
        """Return what is new, from at most about ``limit_bytes`` of each process.

        Reading stays a moment behind a living worker; ``to_the_end`` does not, for a worker whose pool has stopped.
        """
        self._rebuild()
        all_read = self._load(limit_bytes, final=False)
        now = boot_now()
        compares = self.folder.is_of_this_boot and not to_the_end
        until = now - self._settle if compares else float("inf")
        if not all_read:
            until = min(until, *self._behind)
        self._consume(until, waits_until=now - MESSAGE_SECONDS if compares and self._settle else None)
        return self._batch(exhausted=all_read)

    def finish(self) -> Batch:
        """Return the rest of a dead worker's folder, and how everything open ended: lost, or back with the broker.

        Read until exhausted before, else this is one large batch. A second call brings nothing, nor does one in a
        reader made with the offsets of the first one's batch.
        """
        self._rebuild()
        if self._offsets.get(FINISHED):
            return self._batch(exhausted=True)
        while not self._load(1 << 24, final=True):
            pass
        self._consume(float("inf"), waits_until=None)
        for number, item in sorted(self._open.items()):
            self._settle_open(number, item)
        self._open.clear()
        self._offsets[FINISHED] = 1
        return self._batch(exhausted=True)

    def prune(self, offsets: Mapping[str, int] | None = None) -> tuple[str, ...]:
        """Delete segments that are read to their end and will not grow; return their names.

        ``offsets`` are the ones that are safely stored (default: those of the last batch). Nothing is deleted while
        the reader is ahead of them. Entries of open deliveries are carried over first, so that a job outlives the
        segment it was received in.
        """
        self._rebuild()
        if offsets is not None and any(offsets.get(name, 0) < end for name, end in self._offsets.items()):
            return ()
        doomed = self._finished_segments()
        if not doomed:
            return ()
        self._carry(doomed)
        for name in doomed:
            (self.folder.path / name).unlink(missing_ok=True)
            for known in (self._offsets, self._parsed, self._order, self._stored):
                known.pop(name, None)
        return tuple(sorted(doomed))

    # Reading files

    def _rebuild(self) -> None:
        """Build the state that the entries before the stored offsets describe, without telling any of it again."""
        if self._rebuilt:
            return
        self._rebuilt = True
        carries = sorted(
            (path for path in self.folder.files() if path.name.startswith(_CARRY + ".")), key=lambda path: path.name
        )
        entries: list[_Entry] = []
        if carries:
            # Each carry file holds all that the ones before it still meant.
            entries += self._parse(carries[-1].name, carries[-1].read_bytes(), at=0, final=True)
        for path in self.folder.files():
            stored = self._stored.get(path.name, 0)
            if path.name.startswith(_CARRY + ".") or not stored:
                continue
            with path.open("rb") as file:
                data = file.read(stored)
            entries += self._parse(path.name, data, at=0, final=True)
            self._parsed[path.name] = stored
            self._offsets[path.name] = stored
        entries.sort(key=itemgetter(0))
        for entry in entries:
            self._apply(entry)
        # Whatever of this is an event was told before, and damage was reported.
        self._events, self._received, self._damaged = [], [], []

    def _load(self, limit_bytes: int, *, final: bool) -> bool:
        """Parse new bytes, up to the limit of each process; return whether everything was read."""
        fresh = False
        left: dict[str, int] = {}
        self._behind = []
        for path in self.folder.files():
            name = path.name
            process = name.partition(".")[0]
            budget = left.get(process, limit_bytes)
            if process == _CARRY or budget <= 0:
                continue
            at = self._parsed.get(name, 0)
            try:
                size = path.stat().st_size
                if size <= at:
                    continue
                entries, whole = self._parse_some(path, at, size, budget, final=final)
            except FileNotFoundError:
                continue
            left[process] = budget - (self._parsed[name] - at) if whole else 0
            if left[process] <= 0:
                # Nothing of a later time may be told before the rest of this process is read.
                self._behind.append(self._order[name])
            if entries:
                self._pending += entries
                fresh = True
        if fresh:
            self._pending.sort(key=itemgetter(0))
        return not self._behind

    def _parse_some(self, path: Path, at: int, size: int, budget: int, *, final: bool) -> tuple[list[_Entry], bool]:
        while True:
            with path.open("rb") as file:
                file.seek(at)
                data = file.read(budget)
            whole = at + len(data) >= size
            entries = self._parse(path.name, data, at=at, final=final and whole)
            if entries or whole:
                return entries, whole
            # Less than one entry: it is larger than the budget.
            budget *= 4

    def _parse(self, name: str, data: bytes, *, at: int, final: bool) -> list[_Entry]:
        entries: list[_Entry] = []
        order = self._order.get(name, 0.0)
        unpack = ENTRY.unpack_from
        least = ENTRY.size
        frames, damaged, end_of_all = read_frames(data, at=at, final=final)
        self._damaged += [f"{name}: {what}" for what in damaged]
        for start, end, payload in frames:
            if len(payload) < least:
                self._damaged.append(f"{name}: the entry at byte {start} is too short")
                continue
            values = unpack(payload)
            # A head says when its segment was begun, which orders nothing: buffered entries behind it may be older.
            if values[2] > order and values[0] != Kind.HEAD:
                order = values[2]
            entries.append((order, name, end, payload, start, values))
        self._parsed[name] = end_of_all
        self._order[name] = order
        return entries

    def _consume(self, until: float, *, waits_until: float | None) -> None:
        taken = 0
        offsets = self._offsets
        apply = self._apply
        for entry in self._pending:
            order, name, end, payload, _, _ = entry
            if order > until:
                break
            if waits_until is not None and payload[0] in _MAY_WAIT and self._lacks_message(entry, taken, waits_until):
                break
            taken += 1
            apply(entry, taken)
            offsets[name] = end
        del self._pending[:taken]

    def _lacks_message(self, entry: _Entry, position: int, waits_until: float) -> bool:
        """Tell whether a failure should wait a moment for the message, which the main process writes."""
        payload = entry[3]
        fails = payload[0] in _NEEDS_MESSAGE or (
            payload[0] == Kind.END and payload[ENTRY.size : ENTRY.size + 1] in _FAILED_END_BYTES
        )
        if not fails or entry[0] < waits_until:
            return False
        number = entry[5][1]
        item = self._open.get(number)
        if item is None or not item.known or (item.delivery.sealed and not item.synthetic):
            return False
        return self._ahead(number, position) is None

    def _ahead(self, number: int, position: int) -> bytes | None:
        """Return the entry that settled this delivery's message, read already but not yet its turn."""
        for index in range(position, len(self._pending)):
            _, _, _, payload, _, values = self._pending[index]
            if values[1] == number and values[0] in _SETTLING:
                return payload
        return None

    # Entries

    def _apply(self, entry: _Entry, position: int | None = None) -> None:
        _, name, end, payload, start, values = entry
        try:
            if values[0] == Kind.CARRIED:
                length = payload[ENTRY.size]
                process = payload[ENTRY.size + 1 : ENTRY.size + 1 + length].decode()
                payload = payload[ENTRY.size + 1 + length :]
                values = ENTRY.unpack_from(payload)
            else:
                process = ""
            self._apply_payload(values, payload, process, (name, start, end), position)
        except _BAD_FRAME as exc:
            self._damaged.append(f"{name}: the entry at byte {start} makes no sense: {type(exc).__name__}: {exc}")

    def _apply_payload(
        self, values: _Values, payload: bytes, process: str, place: tuple[str, int, int], position: int | None
    ) -> None:
        kind, number, boot, wall = values
        body = payload[ENTRY.size :]
        if kind in _REPORTS:
            self._apply_report(Kind(kind), number, boot, wall, body, place, position)
            return
        if kind in _ABOUT_FILES:
            self._apply_about_file(kind, place[0], json.loads(body))
            return
        item = self._open_or_new(number)
        if item is None:
            return
        item.places.append(place)
        delivery = item.delivery
        if kind == _RECEIVED:
            self._apply_received(number, item, boot, wall, body)
            return
        item.last_boot, item.last_wall = boot, wall
        if kind in _MESSAGES:
            delivery.acked = True
            delivery.sealed, delivery.message_state, delivery.message_digest = split_message_part(body)
            item.synthetic = False
            if item.held_at is not None:
                self._put_aside(number, item)
            elif kind == Kind.REJECT and delivery.started_boot is None:
                self._fail(
                    number,
                    item,
                    Caught.REJECTED_MESSAGE,
                    boot,
                    wall,
                    ErrorReport(
                        error_class="celery.exceptions.Reject", text="the worker refused the message before running it"
                    ),
                    never_started=True,
                )
        elif kind == _START:
            delivery.started_boot = boot
            delivery.holder = self._holder(process or place[0])
        elif kind == _END:
            self._apply_end(number, item, boot, wall, body, position)
        elif kind == Kind.CLAIMED:
            if not item.known:
                _identify(delivery, body)
                item.known = True
                delivery.received_boot, delivery.received_wall = boot, wall
                self._received.append(delivery)
            delivery.claimed = True
            delivery.holder = self._holder(process or place[0])
        elif kind == Kind.REQUEUE or (kind == Kind.CANCELLED and body == b"\1" and not delivery.acked):
            self._give_back(number, item, boot, wall)
        elif kind not in (Kind.ABORT, Kind.CANCELLED):
            raise ValueError(f"unknown kind {kind}")

    def _apply_about_file(self, kind: int, name: str, told: Any) -> None:
        if kind == Kind.HEAD:
            self._boot_id = told.get("boot", "") or self._boot_id
            self._head.update(told)
        elif kind == Kind.CLOSED:
            self._closed.add_ranges(told["ranges"])
            self._closed_ids.update(told["ids"])
        else:
            self._gaps = True
            self._damaged.append(f"{name}: {told.get('lost')} entries could not be written")

    def _open_or_new(self, number: int) -> _Open | None:
        """Return an open delivery, begun here if this is the first that is heard of it; None if it has ended."""
        item = self._open.get(number)
        if item is None and number not in self._closed:
            item = self._open[number] = _Open(Delivery(token=self._token(number), task_id="", task=""))
        return item

    def _apply_received(self, number: int, item: _Open, boot: float, wall: float, body: bytes) -> None:
        if item.known:
            return
        delivery = item.delivery
        _identify(delivery, body)
        if delivery.redelivered:
            self._return_earlier(delivery, boot, wall)
        item.known = True
        delivery.received_boot, delivery.received_wall = boot, wall
        if not item.last_boot:
            item.last_boot, item.last_wall = boot, wall
        self._received.append(delivery)
        if item.early_end is not None:
            state, at_boot, at_wall, error = item.early_end
            self._end(number, item, state, at_boot, at_wall, error)

    def _return_earlier(self, delivery: Delivery, boot: float, wall: float) -> None:
        """End what the worker had received before and forgot: it drops waiting jobs when its connection breaks."""
        for number, item in tuple(self._open.items()):
            earlier = item.delivery
            if (
                item.known
                and earlier.task_id == delivery.task_id
                and earlier.retries == delivery.retries
                and earlier.started_boot is None
                and not earlier.acked
            ):
                self._end(number, item, EndState.RETURNED, boot, wall)

    def _apply_end(self, number: int, item: _Open, boot: float, wall: float, body: bytes, position: int | None) -> None:
        end = body[0]
        if end == _SUCCESS:
            self._end(number, item, EndState.SUCCESS, boot, wall)
        elif end == End.IGNORED:
            self._end(number, item, EndState.IGNORED, boot, wall)
        elif end == End.REFUSED:
            self._end(number, item, EndState.REFUSED, boot, wall, self._open_error(body[1:]))
        elif end == End.HELD_BACK:
            self._end(number, item, EndState.HELD_BACK, boot, wall)
        elif end in _FAILED_ENDS:
            caught = Caught.FAILURE if end == End.REJECTED else Caught.REQUEUED_AFTER_ACK
            self._look_ahead(number, item, position)
            self._fail(number, item, caught, boot, wall, self._open_error(body[1:]), sealed_error=body[1:])

    def _apply_report(
        self,
        kind: Kind,
        number: int,
        boot: float,
        wall: float,
        body: bytes,
        place: tuple[str, int, int],
        position: int | None,
    ) -> None:
        _, identity, sealed_error, message = split_report_part(body)
        if number == 0:
            found = self._newest_of(json.loads(identity)[0], place)
            if found is None:
                return
            number = found
        item = self._open_or_new(number)
        if item is None:
            return
        item.places.append(place)
        delivery = item.delivery
        if not item.known:
            _identify(delivery, identity)
            item.known = True
            delivery.received_boot, delivery.received_wall = boot, wall
            self._received.append(delivery)
        if kind in _DISPOSED:
            delivery.acked = True
        if kind != Kind.HELD:
            # What is put aside waits for its acknowledgement's own turn: told before it, it would be told again by
            # whoever reads on from between the two.
            self._look_ahead(number, item, position)
        if message and not delivery.sealed:
            delivery.sealed, delivery.message_state, delivery.message_digest = split_message_part(message)
            item.synthetic = True
        if kind == Kind.HELD:
            self._apply_held(number, item, boot, wall, identity)
            return
        error = self._open_error(sealed_error) if sealed_error else None
        if kind == Kind.RETRY:
            self._end(number, item, EndState.RETRY, boot, wall, error)
        elif kind == Kind.REVOKED:
            self._end(number, item, EndState.REVOKED, boot, wall)
        else:
            certain = kind in (Kind.EXPIRED, Kind.UNKNOWN, Kind.REJECTED) or self._never_started(delivery)
            self._fail(
                number,
                item,
                _CAUGHT[kind],
                boot,
                wall,
                error or ErrorReport(error_class="", text=""),
                never_started=certain,
                sealed_error=sealed_error,
            )

    def _apply_held(self, number: int, item: _Open, boot: float, wall: float, identity: bytes) -> None:
        """Note that a message was put aside: it is ours once it is acknowledged, and until then the broker's.

        Told at once, it would be a letter and a message: killed before the acknowledgement, the worker leaves it with
        the broker, which sends it again, perhaps when nothing holds it any more.
        """
        delivery = item.delivery
        told = Delivery(token=delivery.token, task_id="", task="")
        _identify(told, identity)
        delivery.hold_id, delivery.timed, delivery.clock_us = told.hold_id, told.timed, told.clock_us
        item.held_at = item.last_boot, item.last_wall = boot, wall
        if delivery.acked:
            self._put_aside(number, item)

    def _put_aside(self, number: int, item: _Open) -> None:
        boot, wall = item.held_at or (item.last_boot, item.last_wall)
        nothing = ErrorReport(error_class="", text="")
        self._fail(number, item, Caught.HELD, boot, wall, nothing, never_started=True)

    def _look_ahead(self, number: int, item: _Open, position: int | None) -> None:
        """Take the message from an entry that follows: main writes it a moment after the child's failure."""
        delivery = item.delivery
        if position is None or (delivery.sealed and not item.synthetic):
            return
        payload = self._ahead(number, position)
        if payload is not None and payload[0] in _MESSAGES:
            delivery.acked = True
            delivery.sealed, delivery.message_state, delivery.message_digest = split_message_part(payload[ENTRY.size :])
            item.synthetic = False

    def _newest_of(self, task_id: str, place: tuple[str, int, int]) -> int | None:
        """Return the delivery that an entry without a number means: the newest open one, or a new one if none is known.

        None if a delivery with this id has ended here: then the entry repeats what was told.
        """
        for number in sorted(self._open, reverse=True):
            if self._open[number].delivery.task_id == task_id:
                return number
        if task_id in self._closed_ids.values():
            return None
        # Numbers count up from one; this one is as unique, and the same when the entry is read again.
        return (1 << 62) + (crc32(place[0].encode()) << 28) + place[1] % (1 << 28)

    # Events

    def _end(
        self, number: int, item: _Open, state: EndState, boot: float, wall: float, error: ErrorReport | None = None
    ) -> None:
        if not item.known:
            item.early_end = state, boot, wall, error
            return
        self._events.append(Ended(delivery=item.delivery, state=state, at_boot=boot, at_wall=wall, error=error))
        self._close(number, item)

    def _fail(
        self,
        number: int,
        item: _Open,
        caught: Caught,
        boot: float,
        wall: float,
        error: ErrorReport,
        *,
        never_started: bool = False,
        sealed_error: bytes = b"",
    ) -> None:
        if not item.known and not self._identify_from_message(item):
            self._damaged.append(f"a delivery failed ({caught}), but nothing says what it was")
            self._close(number, item)
            return
        self._events.append(
            Failed(
                delivery=item.delivery,
                caught=caught,
                at_boot=boot,
                at_wall=wall,
                error=error,
                never_started=never_started,
                sealed_error=sealed_error,
            )
        )
        self._close(number, item)

    def _close(self, number: int, item: _Open) -> None:
        self._open.pop(number, None)
        self._closed.add(number)
        self._closed_ids[number] = item.delivery.task_id
        if len(self._closed_ids) > _REMEMBERED_IDS:
            del self._closed_ids[next(iter(self._closed_ids))]

    def _settle_open(self, number: int, item: _Open) -> None:
        delivery = item.delivery
        boot, wall = item.last_boot, item.last_wall
        if item.early_end is not None:
            # It ended, and what it was is only in an entry that was never written: nothing was lost.
            return
        if item.held_at is not None and (delivery.acked or not self.folder.is_of_this_boot):
            # After a crash of the host the acknowledgement's entry may be missing though the broker had it.
            self._put_aside(number, item)
            return
        if not delivery.acked:
            if item.known:
                self._give_back(number, item, boot, wall)
            return
        if not item.known and not self._gaps:
            # An acknowledgement that follows a delivery which ended in a segment that is gone.
            return
        self._lose(number, item, boot, wall)

    def _give_back(self, number: int, item: _Open, boot: float, wall: float) -> None:
        """End a delivery that the broker still has. For what has been claimed its promise is worth nothing.

        No second delivery of a repair or of a job of the ledger begins, so what it had done by then is all it will do.
        """
        delivery = item.delivery
        of_ledger = delivery.started_boot is not None and job_id_of(delivery.task_id) is not None
        if of_ledger or (delivery.repair_id and delivery.claimed):
            self._lose(number, item, boot, wall)
        else:
            self._end(number, item, EndState.RETURNED, boot, wall)

    def _lose(self, number: int, item: _Open, boot: float, wall: float) -> None:
        delivery = item.delivery
        never_started = self._never_started(delivery)
        what = "before it started" if never_started else "while it ran"
        self._fail(
            number,
            item,
            Caught.WORKER_LOST,
            boot,
            wall,
            ErrorReport(error_class=_LOST_CLASS, text=f"the worker died {what} this job", classes=_LOST_CLASSES),
            never_started=never_started,
        )

    def _never_started(self, delivery: Delivery) -> bool:
        """Tell whether it is certain that the body did not run; a repair's cannot run before its claim is written."""
        unclaimed = bool(delivery.repair_id) and not delivery.claimed
        return (delivery.started_boot is None or unclaimed) and not self._gaps

    def _identify_from_message(self, item: _Open) -> bool:
        """Learn what a delivery was from its sealed message, where the entry that says it could not be written."""
        delivery = item.delivery
        if not delivery.sealed:
            return False
        try:
            raw = unpack_message(self._sealer.open(delivery.sealed, MESSAGE_CONTEXT))
        except (SealError, ValueError):
            return False
        delivery.task_id = str(raw.headers.get("id") or raw.properties.get("correlation_id") or delivery.token)
        delivery.task = str(raw.headers.get("task") or "")
        retries = raw.headers.get("retries")
        delivery.retries = retries if isinstance(retries, int) else 0
        delivery.queue = delivery.routing_key = str(raw.delivery_info.get("routing_key") or "")
        delivery.exchange = str(raw.delivery_info.get("exchange") or "")
        delivery.root_id = str(raw.headers.get("root_id") or "")
        item.known = True
        self._received.append(delivery)
        return True

    def _batch(self, *, exhausted: bool) -> Batch:
        batch = Batch(
            events=tuple(self._events),
            received=tuple(self._received),
            offsets=dict(self._offsets),
            boot_id=self._boot_id or (boot_id() if self.folder.is_of_this_boot else ""),
            exhausted=exhausted,
            damaged=_capped(self._damaged),
        )
        self._events, self._received, self._damaged = [], [], []
        return batch

    def _open_error(self, sealed: bytes) -> ErrorReport:
        try:
            return error_from_json(self._sealer.open(sealed, ERROR_CONTEXT))
        except SealError as exc:
            # The failure itself must not be lost with the key.
            return ErrorReport(error_class="", text=f"what went wrong cannot be read: {exc}")

    def _holder(self, name: str) -> str:
        holder = self._holders.get(name)
        if holder is None:
            holder = self._holders[name] = f"{self.folder.name}/{name.partition('.')[0]}"
        return holder

    def _token(self, number: int) -> str:
        return f"{self.folder.serial}.{number}"

    # Letting go of segments

    def _finished_segments(self) -> set[str]:
        found: dict[str, list[tuple[int, Path]]] = {}
        for path in self.folder.files():
            process, segment = parse_file_name(path.name) or ("", 0)
            if process != _CARRY:
                found.setdefault(process, []).append((segment, path))
        doomed = set()
        for segments in found.values():
            last = max(segments)[1]
            for _, path in segments:
                try:
                    drained = self._offsets.get(path.name, 0) >= path.stat().st_size
                except FileNotFoundError:
                    continue
                # The last segment of a living process still grows.
                if drained and (path != last or not is_locked(path)):
                    doomed.add(path.name)
        return doomed

    def _carry(self, doomed: Iterable[str]) -> None:
        """Write the entries of open deliveries that lie in doomed segments, or were carried before, to a new file."""
        gone = frozenset(doomed)
        before = [path for path in self.folder.files() if path.name.startswith(_CARRY + ".")]
        number = 1 + max((parsed[1] for path in before if (parsed := parse_file_name(path.name))), default=0)
        name = file_name(_CARRY, number)
        moved: list[tuple[_Open, int, tuple[str, int, int]]] = []
        at = 0
        temporary = self.folder.path / f"{name}.new"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode=0o600)
        with open(descriptor, "wb") as file:
            # What ended there may have other entries in segments that stay: without its end it would look open.
            ids = list(self._closed_ids.items())[-_CARRIED_IDS:]
            closed = encode_json({"ranges": self._closed.ranges(), "ids": ids}).encode()
            at += file.write(make_frame(ENTRY.pack(Kind.CLOSED, 0, 0.0, 0.0) + closed))
            for item in self._open.values():
                for index, place in enumerate(item.places):
                    if place[0] not in gone and not place[0].startswith(_CARRY + "."):
                        continue
                    frame = make_frame(self._carried_payload(place))
                    file.write(frame)
                    moved.append((item, index, (name, at, at + len(frame))))
                    at += len(frame)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self.folder.path / name)
        for item, index, place in moved:
            item.places[index] = place
        for path in before:
            path.unlink(missing_ok=True)

    def _carried_payload(self, place: tuple[str, int, int]) -> bytes:
        name, start, end = place
        with (self.folder.path / name).open("rb") as file:
            file.seek(start)
            data = file.read(end - start)
        frames, _, _ = read_frames(data, final=True)
        if not frames:
            raise OSError(f"{name} changed under its reader")
        content = frames[0][2]
        if content[0] == Kind.CARRIED:
            return content
        process = name.partition(".")[0].encode()
        _, _, boot, wall = ENTRY.unpack_from(content)
        return ENTRY.pack(Kind.CARRIED, 0, boot, wall) + bytes((len(process),)) + process + content


def _capped(damaged: list[str]) -> tuple[str, ...]:
    if len(damaged) <= _MOST_DAMAGE:
        return tuple(damaged)
    return (*damaged[:_MOST_DAMAGE], f"and {len(damaged) - _MOST_DAMAGE} more")


def _identify(delivery: Delivery, identity: bytes) -> None:
    head, quote, tail = identity.partition(b'",')
    if not quote or not head.startswith(b'["') or b"\\" in head or len(tail) > _LONGEST_KNOWN_TAIL:
        # Something that is no plain text, or long: as good as never.
        task_id, *rest = json.loads(identity.decode("ascii"))
        rest[0] = job_type_of(rest[0])
    else:
        # Behind the id, all jobs of one task are mostly alike.
        task_id, rest = head[2:].decode("ascii"), _tail_of(tail)
    task, queue, retries = rest[:3]
    delivery.task_id = delivery.root_id = task_id
    delivery.task = task
    delivery.queue = delivery.routing_key = queue
    delivery.retries = retries
    if len(rest) > 3:
        for key, value in rest[3].items():
            if (name := IDENTITY_NAMES.get(key)) is not None:
                setattr(delivery, name, value)


@lru_cache(maxsize=_KNOWN_TAILS)
def _tail_of(tail: bytes) -> list[Any]:
    """Return what follows the id in an identity; nobody changes it. Decoded, for json would guess the encoding."""
    found: list[Any] = json.loads(f"[{tail.decode('ascii')}")
    found[0] = job_type_of(found[0])
    return found
