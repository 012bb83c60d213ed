"""What a worker's journal says once its entries have been put together: plain values, no Django.

Times are seconds: ``*_boot`` on the host's CLOCK_BOOTTIME (runs through suspend, restarts at zero with the host),
``*_wall`` on its wall clock. The drainer turns them into the database's time as "database now minus age".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias


class MessageState(StrEnum):
    """How much of the original message the journal holds."""

    FULL = "full"  # sealed is the whole message
    TOO_LARGE = "too_large"  # over the cap: sealed is its head, digest is the whole body's
    TOO_DEEP = "too_deep"  # nested deeper than 100: kept, never sent again
    MISSING = "missing"  # nobody had it any more when it was asked for


class Caught(StrEnum):
    """Which hook saw a job end badly."""

    FAILURE = "task_failure"
    INTERNAL = "task_internal_error"
    UNKNOWN = "task_unknown"
    REJECTED_MESSAGE = "task_rejected"
    EXPIRED = "expired"
    REQUEUED_AFTER_ACK = "requeued_after_ack"  # Reject(requeue=True) of a message that had been acknowledged already
    WORKER_LOST = "worker_lost"  # the worker died with the job acknowledged and unfinished
    HELD = "held"  # nothing went wrong: a hold put the message aside before its body ran


class EndState(StrEnum):
    """How a delivery ended when it did not end as a failure."""

    SUCCESS = "succeeded"
    RETRY = "retried"  # Celery published the next attempt itself
    IGNORED = "ignored"
    REVOKED = "revoked"  # by somebody, before or while running
    RETURNED = "returned"  # not acknowledged: the broker still has it
    REFUSED = "refused"  # our start guard would not let a repair start
    HELD_BACK = "held_back"  # a hold sent a job of the ledger back to it before its body ran


@dataclass(slots=True, kw_only=True)
class Delivery:
    """One message as one worker received it. Identity is fixed at ``task_received``.

    Kept failures hold these fields by their order: a new one goes to the end, and none is taken out.
    """

    token: str  # unique per delivery on this host; (task id, retries) is not
    task_id: str
    task: str
    retries: int = 0
    tenant: str = "default"
    actor_type: str = ""
    actor_id: str = ""
    queue: str = ""
    exchange: str = ""
    routing_key: str = ""
    priority: int | None = None
    root_id: str = ""
    parent_id: str = ""
    group_id: str = ""
    chord_id: str = ""  # id of the chord's body, if the job is a member of its header
    repair_id: str = ""  # from our repair header: this delivery is a repair
    redelivered: bool = False
    trace_id: str = ""
    sentry_id: str = ""
    received_boot: float = 0.0
    received_wall: float = 0.0
    acked: bool = False  # the broker no longer has it
    started_boot: float | None = None  # its body may have run from here on
    holder: str = ""  # journal file of the process that started it
    claimed: bool = False  # the start guard had claimed its repair
    sealed: bytes = b""  # the message, sealed by opsconsole.core.sealing
    message_state: MessageState = MessageState.MISSING
    message_digest: str = ""  # sha256 of a body that is not held whole, hexadecimal
    source: str = ""  # where it was received; filled in when a failure is kept for a replay
    worker: str = ""
    boot_id: str = ""
    preview: str = ""  # sealed-free, already redacted short text of the arguments ("" if unknown)
    hold_id: str = ""  # of the hold that put it aside
    timed: bool = False  # it had a time to start at, so that when it was received says nothing of its turn
    clock_us: int = 0  # the database's clock at zero of the host's boot clock, as its turn is told by


# The two events are not frozen, though nobody changes one: a frozen field takes three times as long to set.


@dataclass(slots=True, kw_only=True)
class Ended:
    """A delivery that ended without being a failure."""

    delivery: Delivery
    state: EndState
    at_boot: float
    at_wall: float
    error: ErrorReport | None = None  # of the attempt that Celery retries, or why a start was refused


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReport:
    """An error as the process that had it saw it, not yet redacted."""

    error_class: str  # qualified name, such as "shop.errors.CardDeclined"
    text: str
    traceback: str = ""
    call_site: str = ""  # innermost frame of the user's own code, "module:function"
    classes: tuple[str, ...] = ()  # qualified names of the error, its bases, and of its causes and their bases


@dataclass(slots=True, kw_only=True)
class Failed:
    """A delivery that is, or adds to, a dead letter: it ended badly for good, or a hold has put it aside."""

    delivery: Delivery
    caught: Caught
    at_boot: float
    at_wall: float
    error: ErrorReport
    never_started: bool = False  # certain that its body did not run
    # The error as the journal holds it, empty if the reader found it out; sealed twice, one error looks like two.
    sealed_error: bytes = field(default=b"", compare=False, repr=False)


Event: TypeAlias = Ended | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one read of a worker folder brought: events in order, and the offsets to store with what they count."""

    events: tuple[Event, ...]
    received: tuple[Delivery, ...]  # deliveries first seen in this read, for the balance
    offsets: dict[str, int] = field(default_factory=dict)  # file name -> bytes read
    boot_id: str = ""
    exhausted: bool = True  # nothing more to read right now
    damaged: tuple[str, ...] = ()  # what could not be read, one sentence each
