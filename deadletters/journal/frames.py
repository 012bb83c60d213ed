"""The bytes of a journal: frames that survive a torn tail, and the entries inside them.

A frame is a mark, the length and the CRC-32 of its payload, and the payload. A payload begins with its kind, the number
of its delivery within the worker (0 if nobody knows), and the time on both clocks; what follows depends on the kind.
"""

from __future__ import annotations

import json
import struct
from enum import IntEnum
from typing import Any, Final
from zlib import crc32

from deadletters.journal.events import ErrorReport, MessageState
from opsconsole.core.canonical_json import make_encoder

MARK: Final = b"\xf5J"
FRAME: Final = struct.Struct(">2sII")
ENTRY: Final = struct.Struct(">BQdd")
REPORT: Final = struct.Struct(">BII")
LARGEST_FRAME: Final = 64 << 20

MESSAGE_CONTEXT: Final = b"opsconsole message"
"""What a sealed message is bound to: ``Sealer.open(delivery.sealed, MESSAGE_CONTEXT)``."""
ERROR_CONTEXT: Final = b"opsconsole error"


class Kind(IntEnum):
    """What happened, as one byte."""

    HEAD = 1  # first in each file: JSON about the process
    RECEIVED = 2  # identity as JSON
    ACK = 3  # the message, sealed; from here on nobody else has it
    START = 4
    CLAIMED = 5  # the start guard let a repair start; identity as JSON
    END = 6  # one byte of End, then a sealed error where there is one
    ABORT = 7  # postrun without a state: the job was being killed
    FAIL = 8  # a report
    INTERNAL = 9  # a report
    RETRY = 10  # a report
    REVOKED = 11  # a report
    EXPIRED = 12  # a report
    UNKNOWN = 13  # a report
    REJECTED = 14  # a report: a message that Celery could not take for a task
    REJECT = 15  # the message was refused for good; the message, sealed
    REQUEUE = 16  # the message was given back to the broker
    CANCELLED = 17  # Celery stopped the job itself, on a cold shutdown or a lost connection; 1 if it acknowledges late
    GAP = 18  # entries before this one could not be written; JSON count
    CARRIED = 19  # length and name of a process, then a payload of it, moved here when its segment went
    CLOSED = 20  # deliveries that had ended when segments went: ranges of numbers, and the last ones' task ids; JSON
    HELD = 21  # a report: a hold has put the message aside before its body ran; flags say how it is acknowledged


class End(IntEnum):
    """How the body of a job ended, when it did not fail."""

    SUCCESS = 0
    IGNORED = 1
    REJECTED = 2  # Reject(requeue=False)
    REQUEUED = 3  # Reject(requeue=True) before the acknowledgement
    REQUEUED_LATE = 4  # Reject(requeue=True) after it: nobody has the message any more
    REFUSED = 5  # by the start guard
    HELD_BACK = 6  # by a hold, before its body ran: a job of the ledger, which keeps it


IDENTITY_NAMES: Final[dict[str, str]] = {
    "t": "tenant",
    "y": "actor_type",
    "i": "actor_id",
    "x": "exchange",
    "k": "routing_key",
    "p": "priority",
    "r": "root_id",
    "a": "parent_id",
    "g": "group_id",
    "c": "chord_id",
    "f": "repair_id",
    "d": "redelivered",
    "w": "trace_id",
    "s": "sentry_id",
    "h": "hold_id",
    "e": "timed",
    "q": "clock_us",
}
"""What an identity holds beside task id, task, queue and retries, if it is not what is usual."""

_STATES: Final = (MessageState.FULL, MessageState.TOO_LARGE, MessageState.TOO_DEEP, MessageState.MISSING)
_STATE_CODES: Final = {state: bytes((code,)) for code, state in enumerate(_STATES)}
_NO_DIGEST: Final = bytes(32)

encode_json: Final = make_encoder(sort_keys=False, ensure_ascii=True, allow_nan=True)
"""Any JSON value as short ASCII text."""


Frame = tuple[int, int, bytes]
"""Where a frame starts and ends in its file, and its payload."""


def make_frame(payload: bytes) -> bytes:
    """Return the frame of a payload."""
    return FRAME.pack(MARK, len(payload), crc32(payload)) + payload


def read_frames(data: bytes, *, at: int = 0, final: bool) -> tuple[list[Frame], list[str], int]:
    """Return the frames in ``data``, what is damaged there, and the offset at which to read on.

    The first byte of ``data`` lies at offset ``at`` of its file. Reading stops before a frame that is not complete yet,
    and goes on behind damage at the next whole frame. With ``final`` nothing more will be written: an incomplete frame
    at the end is a torn tail, which is no damage (its writer was killed while writing it).
    """
    frames: list[Frame] = []
    damaged: list[str] = []
    here = 0
    size = len(data)
    unpack = FRAME.unpack_from
    head = FRAME.size
    while size - here >= head:
        mark, length, checksum = unpack(data, here)
        begin = here + head
        end = begin + length
        if mark == MARK and length <= LARGEST_FRAME:
            if end > size and not final:
                return frames, damaged, at + here
            if end <= size:
                payload = data[begin:end]
                if crc32(payload) == checksum:
                    frames.append((at + here, at + end, payload))
                    here = end
                    continue
        following = _next_frame(data, here + 1)
        if following < 0:
            if final and end <= size:
                damaged.append(f"bytes {at + here} to {at + size} hold no whole entry")
            return frames, damaged, at + (size if final else here)
        damaged.append(f"bytes {at + here} to {at + following} hold no whole entry")
        here = following
    return frames, damaged, at + (size if final else here)


def _next_frame(data: bytes, here: int) -> int:
    while (here := data.find(MARK, here)) >= 0 and len(data) - here >= FRAME.size:
        _, length, checksum = FRAME.unpack_from(data, here)
        payload = data[here + FRAME.size : here + FRAME.size + length]
        if len(payload) == length and crc32(payload) == checksum:
            return here
        here += 1
    return -1


def message_part(sealed: bytes, state: MessageState, digest: str) -> bytes:
    """Return how an entry holds a sealed message: its state, its digest, itself."""
    return _STATE_CODES[state] + (bytes.fromhex(digest) if digest else _NO_DIGEST) + sealed


def split_message_part(data: bytes) -> tuple[bytes, MessageState, str]:
    """Return the sealed message, its state and digest; all empty if the entry holds none."""
    if not data:
        return b"", MessageState.MISSING, ""
    digest = data[1:33]
    return data[33:], _STATES[data[0]], "" if digest == _NO_DIGEST else digest.hex()


def report_part(identity: bytes, sealed_error: bytes, message: bytes, flags: int = 0) -> bytes:
    """Return the body of a report: identity, sealed error, message part."""
    return REPORT.pack(flags, len(identity), len(sealed_error)) + identity + sealed_error + message


def split_report_part(data: bytes) -> tuple[int, bytes, bytes, bytes]:
    """Return flags, identity, sealed error and message part of a report."""
    flags, identity, error = REPORT.unpack_from(data)
    middle = REPORT.size + identity
    return flags, data[REPORT.size : middle], data[middle : middle + error], data[middle + error :]


def error_to_json(error: ErrorReport) -> bytes:
    """Return an error as JSON, for sealing."""
    return encode_json([error.error_class, error.text, error.traceback, error.call_site, error.classes]).encode("ascii")


def error_from_json(data: bytes) -> ErrorReport:
    """Return the error that ``error_to_json`` wrote."""
    values: list[Any] = json.loads(data.decode("ascii"))
    error_class, text, traceback, call_site, classes = values
    return ErrorReport(
        error_class=error_class, text=text, traceback=traceback, call_site=call_site, classes=tuple(classes)
    )
