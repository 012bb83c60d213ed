"""Celery's signals write the journal: each hook appends one entry to its process's file and returns.

No hook touches a database or raises into Celery, so none can stop a worker, and a failure is on disk before anything
else is asked to know about it. Nothing of Celery is configured or replaced; the only thing that may change what runs is
the start guard, and that only for messages that carry our repair header.

Which signal fires where, and which request it still has, was measured on Celery 5.7 (see docs/what-is-caught.md).
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, cast

from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery, signals
from celery.exceptions import Ignore, Reject, WorkerShutdown, WorkerTerminate
from kombu.serialization import dumps

from deadletters.journal.events import ErrorReport
from deadletters.journal.files import SEGMENT_BYTES, JournalFile
from deadletters.journal.folder import JournalRoot, WorkerFolder
from deadletters.journal.frames import (
    ENTRY,
    ERROR_CONTEXT,
    MESSAGE_CONTEXT,
    End,
    Kind,
    encode_json,
    error_to_json,
    message_part,
    report_part,
)
from deadletters.journal.holds import FILE_NAME as HOLDS_FILE
from deadletters.journal.holds import HoldBook, HoldRule, HoldSource, Message, last_known_path, payload_hash
from deadletters.journal.message import MAX_MESSAGE_BYTES, TOKEN_KEY, pack_message, pack_parts
from deadletters.journal.reports import MAX_TEXT, report_error, shorten
from opsconsole.core.clock import boot_id, boot_now, wall_now
from opsconsole.core.sealing import Sealer
from opsconsole.jobs.tokens import REPAIRED_HEADER, SCOPE_HEADER, TASK_PREFIX

logger = logging.getLogger(__name__)

REPAIR_HEADER: Final = "opsconsole_repair"
"""Message header with the id of the repair that sent it."""
ATTEMPTS_HEADER: Final = "opsconsole_attempts"
"""Message header of a repair that has one attempt, whatever its task would retry by itself: then it is ``single``."""
SINGLE: Final = "single"
CAPTURE_SWITCH: Final = "OPSCONSOLE_CAPTURE"
"""Environment variable; ``off`` keeps every hook out of the worker."""
RETRIABLE: Final = "retriable"
"""Call site of a refused start that may be tried again."""

_FOLDER_VARIABLE: Final = "OPSCONSOLE_WORKER_JOURNAL"
_SYNTHETIC_BYTES: Final = 64 << 10
_LONGEST_IDENTITY: Final = 255
_LOG_SECONDS: Final = 60.0
_REMEMBERED: Final = 1024
_WRAPPED: Final = "_opsconsole_checks_start"
_LAST_ATTEMPT: Final = "_opsconsole_last_attempt"
_RULE: Final = "_opsconsole_hold"
_CLAIMED: Final = "_opsconsole_claimed"

HOLDS_SECONDS: Final = 5.0
"""How long a starting worker waits for the answer what is on hold."""
GIVE_BACK_SECONDS: Final = 10.0
"""How long a message that is held and cannot be written down is kept from other workers."""
_PAUSE_SECONDS: Final = 1.0

Identity = Callable[[str, Any, Any, Mapping[str, Any]], tuple[str, str, str]]
"""Task name, args or None, kwargs or None, headers -> tenant, actor type, actor id."""

_Hook = TypeVar("_Hook", bound=Callable[..., None])


class StartRefused(Ignore):
    """A repair must not start here: its message is dropped. ``retriable`` if nothing forbids to send it again."""

    def __init__(self, reason: str, retriable: bool = False) -> None:
        self.reason = reason
        self.retriable = retriable
        # Both as arguments, so that the exception survives being pickled to the main process.
        super().__init__(reason, retriable)

    def __str__(self) -> str:
        return self.reason


class PutAside(Ignore):
    """A hold has put this message aside: its body does not run, and a letter keeps it."""


class HeldBack(Ignore):
    """A hold keeps this job of the ledger from running: it goes back to the ledger, which waits with it."""


class StartGuard(Protocol):
    """Lets one repair start at most once per attempt."""

    def claim(self, *, repair_id: str, task_id: str, retries: int, holder: str) -> bool:
        """Return if the body may run now; raise ``StartRefused`` if it must not.

        False says that the message is no repair, and has the header of one: it is a job like any other.

        Anything else that is raised counts as refused, retriable: without a claim no body runs.
        """


def _guarded(hook: _Hook) -> _Hook:
    """Keep a hook's own trouble out of the worker; a soft time limit that lands in it belongs to the job."""
    name = hook.__name__

    @functools.wraps(hook)
    def run(self: Hooks, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, *args, **kwargs)
        except SoftTimeLimitExceeded:
            raise
        except Exception as exc:  # noqa: BLE001  whatever it is, the worker goes on
            self._complain(name, exc)

    return cast(_Hook, run)


class _Watch:
    """Stands in for a message's ack, reject and requeue until the first of them is called."""

    __slots__ = ("hooks", "message", "number")

    def __init__(self, hooks: Hooks, message: Any, number: int) -> None:
        self.hooks = hooks
        self.message = message
        self.number = number
        message.ack = self.ack
        message.reject = self.reject
        message.requeue = self.requeue

    def ack(self, multiple: bool = False) -> None:
        message = self._step_aside()
        if not message.acknowledged:
            self.hooks._on_settled(_ACK, self.number, message)
        message.ack(multiple=multiple)

    def reject(self, requeue: bool = False) -> None:
        message = self._step_aside()
        if not message.acknowledged:
            self.hooks._on_settled(Kind.REQUEUE if requeue else Kind.REJECT, self.number, message)
        message.reject(requeue=requeue)

    def requeue(self) -> None:
        message = self._step_aside()
        if not message.acknowledged:
            self.hooks._on_settled(Kind.REQUEUE, self.number, message)
        message.requeue()

    def _step_aside(self) -> Any:
        # Also ends the reference cycle of message and stand-in.
        names = self.message.__dict__
        for name in ("ack", "reject", "requeue"):
            names.pop(name, None)
        return self.message


class Hooks:
    """What is connected to Celery in this process, and the journal file it writes while a worker runs here."""

    def __init__(
        self,
        app: Celery,
        *,
        source: str,
        sealer: Sealer,
        root: JournalRoot,
        identity: Identity | None = None,
        guard: StartGuard | None = None,
        holds: HoldSource | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.app = app
        self.source = source
        self.sealer = sealer
        self.root = root
        self.identity = identity
        self.guard = guard
        self.hold_source = holds
        self.holds = HoldBook(None, last_known_path(root.path, source))
        self.max_message_bytes = max_message_bytes
        self.segment_bytes = segment_bytes
        self.folder: WorkerFolder | None = None
        self.node = ""
        self._file: JournalFile | None = None
        self._main_pid = 0
        self._numbers = itertools.count(1)
        self._queues: dict[tuple[str, str], str] = {}
        self._failed_ids: dict[str, None] = {}
        self._complaints: dict[str, tuple[float, int]] = {}
        self._unopened = 0

    # What others use

    @property
    def dropped(self) -> int:
        """Entries of this process that could not be written until now."""
        return self._unopened + (self._file.dropped if self._file else 0)

    @property
    def holder(self) -> str:
        """Name of this process's journal, as deliveries and claims name who started them; "" without one."""
        return f"{self.folder.name}/{self._file.process}" if self.folder and self._file else ""

    def flush(self) -> None:
        """Write what is buffered; the drainer calls this before each read, at least every 0.25 s."""
        if self._file:
            self._file.flush()

    def close(self) -> None:
        """Write what is buffered and let go of the journal; the worker counts as dead from here on."""
        if self._file:
            self._file.close()

    def undecodable(self, message: Any, exc: BaseException) -> None:
        """Note a message whose body nobody can read, before it is acknowledged."""
        self._report_message(Kind.REJECTED, message, report_error(exc, original=sys.exc_info()[1]))

    def connect(self) -> None:
        """Connect every hook. Connecting twice is the same as once."""
        for name in _SIGNALS:
            signal = getattr(signals, name)
            signal.connect(getattr(self, f"_on_{name}"), weak=False, dispatch_uid=f"opsconsole.journal.{name}")

    def disconnect(self) -> None:
        """Disconnect every hook; tasks that were wrapped stay wrapped and find nothing to do."""
        for name in _SIGNALS:
            getattr(signals, name).disconnect(dispatch_uid=f"opsconsole.journal.{name}")

    # Life of the worker

    @_guarded
    def _on_worker_init(self, sender: Any = None, **_: Any) -> None:
        self._main_pid = os.getpid()
        self.node = str(getattr(sender, "hostname", "") or "worker")
        # First: repairs must be guarded even where no journal can be written.
        self._wrap_tasks()
        try:
            folder = self.root.create_worker_folder(self.node)
            file = self._open_file(folder, "main")
            folder.publish()
            file.folder = folder.path
            self.folder, self._file = folder, file
            # Only a child that does not inherit our memory needs it (start method "spawn").
            os.environ[_FOLDER_VARIABLE] = f"{self._main_pid}:{folder.path}"
        finally:
            # Before the worker asks for its first message, and before its first child is forked.
            self._begin_holds()

    @_guarded
    def _on_worker_process_init(self, **_: Any) -> None:
        if os.getpid() == self._main_pid:
            return
        self._file = None
        self._wrap_tasks()
        if self.folder is None:
            # Only our own parent's: a worker that a job started inherits the variable of the job's worker.
            parent, path = os.environ.get(_FOLDER_VARIABLE, "").partition(":")[::2]
            if parent == str(os.getppid()):
                self.folder = WorkerFolder(Path(path))
            if self.folder is not None:
                self.holds = HoldBook.of_child(self.folder.path / HOLDS_FILE, self.holds.last_known)
        if self.folder is not None:
            self._file = self._open_file(self.folder, f"child-{os.getpid()}")

    @_guarded
    def _on_worker_ready(self, sender: Any = None, **_: Any) -> None:
        # Celery acknowledges a body that it cannot decode and sends no signal; its consumer is asked to tell us first.
        consumer = sender
        if consumer is None or getattr(consumer, _WRAPPED, False):
            return
        before = consumer.on_decode_error

        @functools.wraps(before)
        def on_decode_error(message: Any, exc: Exception) -> Any:
            self.undecodable(message, exc)
            return before(message, exc)

        consumer.on_decode_error = on_decode_error
        setattr(consumer, _WRAPPED, True)

    @_guarded
    def _on_worker_shutdown(self, **_: Any) -> None:
        self.flush()

    # Life of a delivery, in the main process

    @_guarded
    def _on_task_received(self, request: Any = None, **_: Any) -> None:
        file = self._file
        if file is None:
            self._unopened += 1
            return
        boot, wall = boot_now(), wall_now()
        number = next(self._numbers)
        values = request.request_dict
        who = _scope_of(values) or self._who(lambda: _parts_of_request(request))
        identity = self._describe(values, who, _chord_of(request))
        # Among the properties, because Celery copies headers and delivery info into retries, and these nowhere.
        values["properties"] = {**(values.get("properties") or {}), TOKEN_KEY: (number, *who) if who else number}
        file.append(ENTRY.pack(_RECEIVED, number, boot, wall) + identity, buffered=True)
        _Watch(self, request.message, number)

    @_guarded
    def _on_settled(self, kind: int, number: int, message: Any) -> None:
        file = self._file
        if file is None:
            return
        entry = ENTRY.pack(kind, number, boot_now(), wall_now())
        file.append(entry if kind == Kind.REQUEUE else entry + self._message_part(message))

    @_guarded
    def _on_task_revoked(self, request: Any = None, terminated: bool = False, expired: bool = False, **_: Any) -> None:
        if self._file is None:
            return
        values = vars(request)
        number, who = _token(values)
        # One that was expired or revoked when it came was never announced as received.
        number = number or next(self._numbers)
        if not expired:
            self._report(Kind.REVOKED, number, values, who, None, flags=int(bool(terminated)))
            return
        error = ErrorReport(
            error_class="celery.exceptions.TaskRevokedError",
            text=f"expired at {values.get('expires')}",
            classes=("celery.exceptions.TaskRevokedError",),
        )
        self._report(Kind.EXPIRED, number, values, who, error, values.get("args"), values.get("kwargs"))

    @_guarded
    def _on_task_unknown(self, message: Any = None, name: Any = "", **_: Any) -> None:
        error = ErrorReport(
            error_class="celery.exceptions.NotRegistered",
            text=f"no task named {name!r} is registered in this worker",
            classes=("celery.exceptions.NotRegistered", "celery.exceptions.TaskError"),
        )
        self._report_message(Kind.UNKNOWN, message, error)

    @_guarded
    def _on_task_rejected(self, message: Any = None, exc: Any = None, **_: Any) -> None:
        if isinstance(exc, BaseException):
            error = report_error(exc, original=sys.exc_info()[1])
        else:
            error = ErrorReport(
                error_class="celery.exceptions.InvalidTaskError",
                text="the message names no task",
                classes=("celery.exceptions.InvalidTaskError",),
            )
        self._report_message(Kind.REJECTED, message, error)

    # Life of a delivery, in the process that runs it

    @_guarded
    def _on_task_prerun(self, sender: Any = None, **_: Any) -> None:
        file = self._file
        if self.holds.in_force() and self._is_held(sender):
            # Its body will not run, so that it has not started, whatever becomes of this process before that is noted.
            return
        if file is None:
            return
        # Without a token: run eagerly inside another job, which is no delivery.
        if number := _token(vars(sender.request))[0]:
            file.append(ENTRY.pack(_START, number, boot_now(), wall_now()))

    @_guarded
    def _note_start(self, request: Any) -> None:
        number = _token(vars(request))[0]
        if self._file is not None and number:
            self._file.append(ENTRY.pack(_START, number, boot_now(), wall_now()))

    @_guarded
    def _on_task_postrun(self, sender: Any = None, state: Any = None, retval: Any = None, **_: Any) -> None:
        file = self._file
        if file is None or state == "FAILURE":
            return
        values = vars(sender.request)
        number, who = _token(values)
        if not number:
            return
        entry = ENTRY.pack(_ENDED, number, boot_now(), wall_now())
        if state == "SUCCESS":
            file.append(entry + _SUCCESS)
        elif state == "IGNORED" and isinstance(retval, StartRefused):
            refused = ErrorReport(
                error_class="StartRefused", text=retval.reason, call_site=RETRIABLE if retval.retriable else ""
            )
            file.append(entry + _END[End.REFUSED] + self._seal_error(refused))
        elif state == "IGNORED" and isinstance(retval, PutAside):
            # Its own entry says so.
            return
        elif state == "IGNORED" and isinstance(retval, HeldBack):
            file.append(entry + _END[End.HELD_BACK])
        elif state == "IGNORED":
            file.append(entry + _END[End.IGNORED])
        elif state == "REJECTED":
            error = report_error(retval, task_module=type(sender).__module__)
            if reason := getattr(retval, "reason", None):
                error = replace(error, text=shorten(_text(reason), MAX_TEXT))
            if not getattr(retval, "requeue", False):
                end = End.REJECTED
            else:
                end = End.REQUEUED if sender.acks_late else End.REQUEUED_LATE
            file.append(entry + _END[end] + self._seal_error(error), sync=True)
        elif state is None:
            self._on_abort(file, sender, values, number, who)

    def _on_abort(
        self, file: JournalFile, task: Any, values: Mapping[str, Any], number: int, who: tuple[str, ...] | None
    ) -> None:
        """Note that a job was stopped; in a pool of threads, something like ``SystemExit`` is its final failure.

        In a pool of processes the main process learns of it and reports a lost worker; elsewhere nobody ever would.
        """
        error = sys.exc_info()[1]
        if (
            os.getpid() == self._main_pid
            and error is not None
            and not isinstance(error, Exception | WorkerShutdown | WorkerTerminate)
            and not task.acks_late
        ):
            report = report_error(error, task_module=type(task).__module__)
            self._report(Kind.FAIL, number, values, who, report, values.get("args"), values.get("kwargs"))
        else:
            file.append(ENTRY.pack(Kind.ABORT, number, boot_now(), wall_now()))

    @_guarded
    def _on_task_failure(
        self,
        sender: Any = None,
        task_id: Any = None,
        exception: Any = None,
        args: Any = None,
        kwargs: Any = None,
        einfo: Any = None,
        **_: Any,
    ) -> None:
        if self._file is None:
            return
        values = vars(sender.request)
        number, who = _token(values) if values.get("id") == task_id else (0, None)
        in_main = os.getpid() == self._main_pid
        if not number:
            if not in_main or values.get("is_eager"):
                return
            # A hard limit sends the signal twice, the second time with an empty request. Reject is in the end entry.
            if isinstance(exception, Reject) or task_id in self._failed_ids:
                return
            values = {"id": task_id, "task": sender.name}
        elif in_main:
            while len(self._failed_ids) >= _REMEMBERED:
                self._failed_ids.pop(next(iter(self._failed_ids)))
            self._failed_ids[task_id] = None
        report = report_error(
            exception,
            traceback_text=_traceback_of(einfo),
            task_module=type(sender).__module__,
            original=sys.exc_info()[1],
        )
        self._report(Kind.FAIL, number, values, who, report, args, kwargs)

    @_guarded
    def _on_task_internal_error(
        self,
        sender: Any = None,
        task_id: Any = None,
        args: Any = None,
        kwargs: Any = None,
        request: Any = None,
        exception: Any = None,
        einfo: Any = None,
        **_: Any,
    ) -> None:
        if self._file is None:
            return
        values = request if isinstance(request, dict) else {}
        number, who = _token(values)
        if not number and values.get("is_eager"):
            return
        report = report_error(
            exception, traceback_text=_traceback_of(einfo), task_module=type(sender).__module__, original=exception
        )
        self._report(Kind.INTERNAL, number, {"id": task_id, "task": sender.name, **values}, who, report, args, kwargs)

    @_guarded
    def _on_task_retry(self, sender: Any = None, request: Any = None, reason: Any = None, **_: Any) -> None:
        file = self._file
        if file is None:
            return
        values = vars(request)
        number, who = _token(values)
        if not number:
            return
        if reason is None:
            # Celery stopping a job by itself calls that a retry too, and sends nothing.
            file.append(ENTRY.pack(Kind.CANCELLED, number, boot_now(), wall_now()) + bytes((bool(sender.acks_late),)))
            return
        error = reason.exc if isinstance(getattr(reason, "exc", None), BaseException) else reason
        report = report_error(error, task_module=type(sender).__module__)
        if values.get(_LAST_ATTEMPT):
            # Nothing was sent, so this was its end.
            self._report(Kind.FAIL, number, values, who, report, values.get("args"), values.get("kwargs"))
            return
        self._report(Kind.RETRY, number, values, who, report)

    # The start guard

    def _wrap_tasks(self) -> None:
        for task in tuple(self.app.tasks.values()):
            _check_starts_of(type(task))

    def check_start(self, request: Any) -> None:
        """Claim the repair that this request carries out, or raise ``StartRefused``; other requests pass."""
        repair_id = getattr(request, REPAIR_HEADER, None)
        if not repair_id or request.is_eager or getattr(request, _WRAPPED, False):
            return
        # A wrapped class that calls its wrapped parent must not claim a second time: it would refuse itself.
        setattr(request, _WRAPPED, True)
        if self.guard is None:
            raise StartRefused("this worker has no start guard", retriable=True)
        try:
            is_repair = self.guard.claim(
                repair_id=str(repair_id),
                task_id=str(request.id),
                retries=int(request.retries or 0),
                holder=self.holder or f"without journal/{os.getpid()}",
            )
        except (StartRefused, SoftTimeLimitExceeded):
            raise
        except Exception as exc:
            self._complain("claim", exc)
            raise StartRefused(f"the start guard failed: {type(exc).__name__}", retriable=True) from exc
        setattr(request, _CLAIMED, is_repair)
        self._note_claim(request)

    @_guarded
    def _note_claim(self, request: Any) -> None:
        number, who = _token(vars(request))
        if self._file is not None and number:
            identity = self._describe(vars(request), who, request.chord)
            self._file.append(ENTRY.pack(Kind.CLAIMED, number, boot_now(), wall_now()) + identity)

    # Holds

    def _begin_holds(self) -> None:
        """Learn what is to be put aside; what was known last on this host, if nobody can tell in time."""
        path = self.folder.path / HOLDS_FILE if self.folder is not None else None
        self.holds = HoldBook(path, self.holds.last_known)
        if self.hold_source is None:
            return
        try:
            rules = _in_time(self.hold_source.read, HOLDS_SECONDS)
        except Exception as exc:  # noqa: BLE001  a worker that does not start is worse than one that asks again later
            self._complain("holds", exc)
            self._recall_holds()
        else:
            self._put_holds(rules)

    @_guarded
    def _recall_holds(self) -> None:
        self.holds.recall()

    @_guarded
    def _put_holds(self, rules: Sequence[HoldRule]) -> None:
        # Known in memory from here on, even if no disk takes it.
        self.holds.put(rules)

    def _is_held(self, task: Any) -> bool:
        """Say whether a hold will put the message aside with which a task is about to start."""
        request = task.request
        # Where the check before the body is not in place, nothing may be said that only it makes true. Whether a repair
        # is one, the start guard has not said yet.
        if _WRAPPED not in type(task).__dict__ or vars(request).get(REPAIR_HEADER):
            return False
        return self._rule_for(task, request) is not None

    def _rule_for(self, task: Any, request: Any) -> HoldRule | None:
        """Return the rule that puts this delivery aside; once one was found, it stays so for all of this start."""
        decided: HoldRule | None = vars(request).get(_RULE)
        if decided is not None:
            return decided
        if not self.holds.in_force() or request.is_eager or request.called_directly:
            return None
        try:
            rule = self._find_rule(task, request)
        except SoftTimeLimitExceeded:
            raise
        except Exception as exc:  # noqa: BLE001  a message that nobody can compare is on hold for nobody
            self._complain("compare", exc)
            return None
        if rule is not None:
            setattr(request, _RULE, rule)
        return rule

    def _find_rule(self, task: Any, request: Any) -> HoldRule | None:
        values = vars(request)
        # What an operator has asked for runs: a repair that the start guard knows, not one with a header that was
        # copied; and a job of the ledger that was put back, as its message says.
        asked_for = REPAIRED_HEADER if _text(task.name).startswith(TASK_PREFIX) else _CLAIMED
        if values.get(asked_for):
            return None
        who = _token(values)[1]
        info = values.get("delivery_info") or {}
        exchange, routing_key = _text(info.get("exchange")), _text(info.get("routing_key"))

        def hash_of_payload() -> str:
            try:
                return payload_hash(values.get("args"), values.get("kwargs"))
            except (TypeError, ValueError, RecursionError):
                # What JSON cannot hold has no hash, and so no hold by it.
                return ""

        return self.holds.matching(
            Message(
                tenant=who[0] if who else "default",
                task=_text(task.name),
                queue=self._queues.get((exchange, routing_key)) or self._find_queue(exchange, routing_key),
                task_id=_text(values.get("id")),
                payload_hash=hash_of_payload,
            )
        )

    def check_hold(self, task: Any) -> None:
        """Raise ``PutAside`` or ``HeldBack`` if a hold matches the message with which a task is about to start.

        Returns for all others. Where a message that is held cannot be written down, this waits: it must neither run nor
        be lost. Raises ``Reject`` then for one that the broker still has, so that another worker can put it aside.
        """
        request = task.request
        if (rule := self._rule_for(task, request)) is None:
            return
        if _text(task.name).startswith(TASK_PREFIX):
            raise HeldBack(f"hold {rule.id}")
        waited_from = time.monotonic()
        while True:
            try:
                self._note_put_aside(task, request, rule)
            except OSError as exc:
                self._complain("hold", exc)
            else:
                raise PutAside(f"hold {rule.id}")
            if task.acks_late and time.monotonic() - waited_from >= GIVE_BACK_SECONDS:
                raise Reject("a hold could not write it down", requeue=True)
            try:
                time.sleep(_PAUSE_SECONDS)
            except SoftTimeLimitExceeded:
                if task.acks_late:
                    raise Reject("a hold could not write it down", requeue=True) from None
            if self._find_rule(task, request) is None:
                self._note_start(request)
                return

    def _note_put_aside(self, task: Any, request: Any, rule: HoldRule) -> None:
        values = vars(request)
        number, who = _token(values)
        if self._file is None or not number:
            raise OSError("this worker has no journal")
        entry = ENTRY.pack(Kind.HELD, number, boot_now(), wall_now())
        # The real message is in main's entry of the acknowledgement, which a crash of the host may take.
        copy = self._synthetic_message(values, values.get("args"), values.get("kwargs"), self.max_message_bytes)
        identity = self._describe(values, who, values.get("chord"), rule=rule)
        self._file.append_surely(entry + report_part(identity, b"", copy, int(bool(task.acks_late))))

    # Parts of entries

    def _open_file(self, folder: WorkerFolder, process: str) -> JournalFile:
        head = {
            "version": 1,
            "boot": boot_id(),
            "pid": os.getpid(),
            "source": self.source,
            "node": self.node,
        }
        return JournalFile(
            folder.path,
            process,
            head=head,
            segment_bytes=self.segment_bytes,
            trouble=functools.partial(self._complain, "append"),
        )

    def _report(
        self,
        kind: Kind,
        number: int,
        values: Mapping[str, Any],
        who: tuple[str, ...] | None,
        error: ErrorReport | None,
        args: Any = None,
        kwargs: Any = None,
        *,
        flags: int = 0,
    ) -> None:
        file = self._file
        if file is None:
            return
        entry = ENTRY.pack(kind, number, boot_now(), wall_now())
        is_final = kind not in _NOT_FINAL
        # Of a job that just failed main writes the message before the broker forgets it. A copy here matters only if
        # this entry reaches the disk before main's does, and that is when it is synced by itself. The other kinds may
        # have no entry of main's at all: never announced, or never acknowledged.
        is_synced = is_final and file.is_sync_due
        is_copied = kind is not Kind.FAIL or not number or is_synced
        has_copy = is_final and is_copied and args is not None and kwargs is not None
        body = report_part(
            self._describe(values, who, values.get("chord")),
            self._seal_error(error) if error else b"",
            self._synthetic_message(values, args, kwargs) if has_copy else b"",
            flags,
        )
        file.append(entry + body, sync=is_synced)

    def _report_message(self, kind: Kind, message: Any, error: ErrorReport) -> None:
        file = self._file
        if file is None:
            return
        number = next(self._numbers)
        values = dict(message.headers or {})
        properties = message.properties or {}
        values["properties"] = properties
        values["delivery_info"] = {**(message.delivery_info or {}), "priority": properties.get("priority")}
        serial = self.folder.serial if self.folder else ""
        values["id"] = values.get("id") or properties.get("correlation_id") or f"message-{serial}.{number}"
        entry = ENTRY.pack(kind, number, boot_now(), wall_now())
        # Whose job it is can be told of a message that Celery could read, whether or not it knows the task.
        who = _scope_of(values) or (self._who(lambda: _parts_of_message(message)) if kind is Kind.UNKNOWN else None)
        body = report_part(self._describe(values, who, None), self._seal_error(error), self._message_part(message))
        file.append(entry + body, sync=True)

    def _seal_error(self, error: ErrorReport) -> bytes:
        return self.sealer.seal(error_to_json(error), ERROR_CONTEXT)

    def _message_part(self, message: Any) -> bytes:
        packed, state, digest = pack_message(message, self.max_message_bytes)
        return message_part(self.sealer.seal(packed, MESSAGE_CONTEXT), state, digest)

    def _synthetic_message(
        self, values: Mapping[str, Any], args: Any, kwargs: Any, largest: int = _SYNTHETIC_BYTES
    ) -> bytes:
        """Put a message together from what the process that ran it has; used only if nobody kept the real one."""
        embed = {name: values.get(name) for name in ("callbacks", "errbacks", "chain", "chord")}
        try:
            content_type, content_encoding, body = dumps([args, kwargs, embed], serializer="json")
        except Exception:  # noqa: BLE001  arguments that JSON cannot hold: then there is only the real message
            return b""
        if len(body) > largest:
            return b""
        packed, state, digest = pack_parts(
            body=body,
            content_type=content_type,
            content_encoding=content_encoding,
            properties=values.get("properties") or {},
            headers={name: value for name, value in values.items() if name not in _NOT_HEADERS},
            delivery_info=values.get("delivery_info") or {},
            max_bytes=self.max_message_bytes,
        )
        return message_part(self.sealer.seal(packed, MESSAGE_CONTEXT), state, digest)

    def _describe(
        self,
        values: Mapping[str, Any],
        who: tuple[str, ...] | None,
        chord: Any,
        *,
        rule: HoldRule | None = None,
    ) -> bytes:
        """Return the identity part of an entry: what is usual is left out."""
        get = values.get
        info = get("delivery_info") or {}
        exchange = _text(info.get("exchange"))
        routing_key = _text(info.get("routing_key"))
        queue = self._queues.get((exchange, routing_key))
        if queue is None:
            queue = self._find_queue(exchange, routing_key)
        task_id = _text(get("id"))
        more: dict[str, Any] = {}
        if who:
            for key, value, usual in zip("tyi", who, ("default", "", ""), strict=True):
                if value != usual:
                    more[key] = value
        if exchange or routing_key != queue:
            more["x"] = exchange
            more["k"] = routing_key
        priority = info.get("priority")
        if isinstance(priority, int):
            more["p"] = priority
        if info.get("redelivered"):
            more["d"] = True
        root = _text(get("root_id"))
        if root != task_id:
            more["r"] = root
        if parent := get("parent_id"):
            more["a"] = _text(parent)
        if group := get("group"):
            more["g"] = _text(group)
        if chord and (chord_id := _chord_id(chord)):
            more["c"] = chord_id
        if repair := get(REPAIR_HEADER):
            more["f"] = _text(repair)
        if "traceparent" in values and (trace := _trace_id(get("traceparent"))):
            more["w"] = trace
        if ("sentry-trace" in values or "baggage" in values) and (sentry := _sentry_id(values)):
            more["s"] = sentry
        if rule is not None:
            more["h"] = rule.id
            more["q"] = rule.clock_us
            if get("eta"):
                more["e"] = True
        retries = get("retries")
        parts = [task_id, _text(get("task")), queue, retries if isinstance(retries, int) else 0]
        if more:
            parts.append(more)
        return encode_json(parts).encode("ascii")

    def _find_queue(self, exchange: str, routing_key: str) -> str:
        """Name the queue a message came from; brokers tell only where it was sent to."""
        found = routing_key
        if exchange:
            for name, queue in self.app.amqp.queues.consume_from.items():
                if getattr(queue.exchange, "name", "") == exchange and queue.routing_key in (routing_key, "", None):
                    found = name
                    break
        if len(self._queues) < _REMEMBERED:
            self._queues[exchange, routing_key] = found
        return found

    def _who(self, parts: Callable[[], tuple[str, Any, Any, Mapping[str, Any]]]) -> tuple[str, str, str] | None:
        """Ask the project whose a job is; ``parts`` gives what ``Identity`` takes, and may raise."""
        if self.identity is None:
            return None
        try:
            tenant, actor_type, actor_id = self.identity(*parts())
            return _short(tenant) or "default", _short(actor_type), _short(actor_id)
        except SoftTimeLimitExceeded:
            raise
        except Exception as exc:  # noqa: BLE001  it is the host project's code
            self._complain("identity", exc)
            return None

    def _complain(self, what: str, exc: BaseException) -> None:
        """Log one line per kind of trouble and minute, with how many were left out since."""
        now = time.monotonic()
        last, silent = self._complaints.get(what, (-_LOG_SECONDS, 0))
        if now - last < _LOG_SECONDS:
            self._complaints[what] = last, silent + 1
            return
        self._complaints[what] = now, 0
        logger.error(
            "%s: %s: %s; %d entries wait or are lost, %d more such lines were left out",
            _TROUBLE.get(what, f"opsconsole could not note what happened to a job ({what})"),
            type(exc).__name__,
            exc,
            self.dropped,
            silent,
        )


_SIGNALS: Final = (
    "worker_init",
    "worker_process_init",
    "worker_ready",
    "worker_shutdown",
    "task_received",
    "task_prerun",
    "task_postrun",
    "task_failure",
    "task_internal_error",
    "task_retry",
    "task_revoked",
    "task_unknown",
    "task_rejected",
)
_TROUBLE: Final = {
    "append": "opsconsole cannot write its journal",
    "claim": "opsconsole's start guard failed, a repair was not started",
    "identity": "opsconsole could not learn whose a job is",
    "compare": "opsconsole could not tell whether a job is on hold, and lets it run",
    "hold": "opsconsole cannot write down a job that is on hold, which waits and does not run",
    "holds": "opsconsole could not learn what is on hold, and takes what was known last on this host",
    "_on_worker_init": "opsconsole has no journal in this worker and captures nothing",
}
_END: Final = {end: bytes((end,)) for end in End}
# What each job writes, as plain values: asking an enumeration takes as long as packing the entry.
_RECEIVED: Final = int(Kind.RECEIVED)
_ACK: Final = int(Kind.ACK)
_START: Final = int(Kind.START)
_ENDED: Final = int(Kind.END)
_SUCCESS: Final = _END[End.SUCCESS]
_NOT_FINAL: Final = (Kind.RETRY, Kind.REVOKED)
# In a request beside the message's own headers.
_NOT_HEADERS: Final = frozenset(
    {
        "properties",
        "reply_to",
        "correlation_id",
        "hostname",
        "delivery_info",
        "args",
        "kwargs",
        "is_eager",
        "called_directly",
        "callbacks",
        "errbacks",
        "chain",
        "chord",
        "headers",
        "loglevel",
        "logfile",
        "time_limit",
        "soft_time_limit",
        "utc",
        "_children",
        _WRAPPED,
        _LAST_ATTEMPT,
        _RULE,
        _CLAIMED,
    }
)
_TRACE_PARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")
_SENTRY_TRACE: Final = re.compile(r"\s*([0-9a-f]{32})-[0-9a-f]{16}(?:-[01])?\s*")
_SENTRY_BAGGAGE: Final = re.compile(r"(?:^|,)\s*sentry-trace_id=([0-9a-f]{32})")

_connected: Hooks | None = None


def is_switched_off() -> bool:
    """Whether the environment keeps every hook out of the worker."""
    return os.environ.get(CAPTURE_SWITCH, "").strip().lower() in ("off", "0", "false", "no")


def connect(
    app: Celery,
    *,
    source: str,
    sealer: Sealer,
    root: JournalRoot,
    identity: Identity | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    guard: StartGuard | None = None,
    holds: HoldSource | None = None,
    segment_bytes: int = SEGMENT_BYTES,
) -> Hooks:
    """Connect the hooks to Celery's signals and return them; a worker that starts later writes its journal.

    Connecting again replaces hooks that have no open journal, and returns the ones that have. With
    ``OPSCONSOLE_CAPTURE=off`` in the environment nothing is connected, and the start guard is off as well.
    """
    global _connected
    if _connected is not None and _connected.folder is not None:
        return _connected
    if _connected is not None:
        _connected.disconnect()
        _connected = None
    hooks = Hooks(
        app,
        source=source,
        sealer=sealer,
        root=root,
        identity=identity,
        guard=guard,
        holds=holds,
        max_message_bytes=max_message_bytes,
        segment_bytes=segment_bytes,
    )
    if is_switched_off():
        logger.warning("opsconsole captures nothing here: %s is off", CAPTURE_SWITCH)
        return hooks
    hooks.connect()
    _connected = hooks
    return hooks


def _check_starts_of(kind: type) -> None:
    """Let every start of this task class pass the guard first; instances' own ``before_start`` Celery never calls.

    Its ``retry`` sends nothing while it carries out a repair that has a single attempt.
    """
    if _WRAPPED in kind.__dict__:
        return
    own = kind.__dict__.get("before_start")
    own_retry = kind.__dict__.get("retry")

    def before_start(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _connected is not None:
            _connected.check_start(self.request)
            _connected.check_hold(self)
        if own is None:
            return cast(Any, super(cast(Any, kind), self)).before_start(*args, **kwargs)
        return own.__get__(self, type(self))(*args, **kwargs)

    def retry(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = self.request
        is_last = getattr(request, ATTEMPTS_HEADER, None) == SINGLE and bool(getattr(request, REPAIR_HEADER, None))
        before = request.called_directly
        if is_last:
            # What Celery asks before it raises the error that it was given, instead of sending the next attempt. Only
            # for the time of this call: elsewhere it decides whether a task's own ``__call__`` keeps its request.
            request.called_directly = True
            setattr(request, _LAST_ATTEMPT, True)
        try:
            if own_retry is None:
                return cast(Any, super(cast(Any, kind), self)).retry(*args, **kwargs)
            return own_retry.__get__(self, type(self))(*args, **kwargs)
        finally:
            if is_last:
                request.called_directly = before

    kind.before_start = before_start  # type: ignore[attr-defined]
    kind.retry = retry  # type: ignore[attr-defined]
    setattr(kind, _WRAPPED, True)


def _in_time(read: Callable[[], Sequence[HoldRule]], seconds: float) -> Sequence[HoldRule]:
    """Return what ``read`` returns; raises ``TimeoutError`` if it takes longer, and what it raises."""
    found: list[Sequence[HoldRule]] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            found.append(read())
        except Exception as exc:  # noqa: BLE001  told to the thread that waits
            failed.append(exc)

    thread = threading.Thread(target=run, name="opsconsole-holds-at-start", daemon=True)
    thread.start()
    thread.join(seconds)
    if found:
        return found[0]
    raise failed[0] if failed else TimeoutError(f"no answer within {seconds} s")


def _parts_of_request(request: Any) -> tuple[str, Any, Any, Mapping[str, Any]]:
    return request.request_dict.get("task"), request.args, request.kwargs, request.message.headers or {}


def _parts_of_message(message: Any) -> tuple[str, Any, Any, Mapping[str, Any]]:
    headers = message.headers or {}
    payload = message.payload
    args, kwargs = payload[:2] if isinstance(payload, list | tuple) and len(payload) == 3 else (None, None)
    return _text(headers.get("task")), args, kwargs, headers


def _scope_of(values: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return whose a job of the ledger is, as its message says; ``None`` for any other job."""
    scope = values.get(SCOPE_HEADER)
    if not scope or not _text(values.get("task")).startswith(TASK_PREFIX):
        return None
    match scope:
        case [str(tenant), str(actor_type), str(actor_id)]:
            return _short(tenant) or "default", _short(actor_type), _short(actor_id)
    return None


def _token(values: Mapping[str, Any]) -> tuple[int, tuple[str, ...] | None]:
    properties = values.get("properties")
    mark = properties.get(TOKEN_KEY) if properties else None
    if mark is None or isinstance(mark, int):
        return mark or 0, None
    return mark[0], tuple(mark[1:])


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else str(value)


def _short(value: Any) -> str:
    return _text(value)[:_LONGEST_IDENTITY]


def _chord_of(request: Any) -> Any:
    try:
        # Decoded by Celery before; `request.chord` would find the same by a longer way.
        payload = request.message.payload
        if isinstance(payload, list | tuple):
            return payload[2].get("chord")
        return request.chord
    except Exception:  # noqa: BLE001  the message's third part may be anything
        return None


def _chord_id(chord: Any) -> str:
    """Return the id of a chord's body from its signature in a member's message."""
    options = chord.get("options") if isinstance(chord, Mapping) else None
    return _text(options.get("task_id")) if isinstance(options, Mapping) else ""


def _trace_id(value: Any) -> str:
    match = _TRACE_PARENT.fullmatch(value.strip()) if isinstance(value, str) else None
    return match[1] if match else ""


def _sentry_id(values: Mapping[str, Any]) -> str:
    for name, pattern in (("sentry-trace", _SENTRY_TRACE), ("baggage", _SENTRY_BAGGAGE)):
        value = values.get(name)
        if isinstance(value, str) and (match := pattern.search(value)):
            return match[1]
    return ""


def _traceback_of(einfo: Any) -> str | None:
    text = getattr(einfo, "traceback", None)
    return text if isinstance(text, str) else None
