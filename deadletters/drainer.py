"""The drainer: one thread per worker that turns its journal into rows, and recovers the journals of dead workers.

No failure waits for the database in a hook; it waits here. What went wrong is told apart: any error that is not about
the data means that the database is down, so the same batch is tried again until it is back; an entry that fails five
times by itself is set aside, kept sealed and shown.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeAlias

from django.db import DataError, Error, IntegrityError, connections, transaction

from deadletters import conf
from deadletters.holds import rules_of
from deadletters.intake import HostClock, Intake
from deadletters.journal.events import Batch, Caught, Ended, EndState, ErrorReport, Failed, MessageState
from deadletters.journal.folder import JournalRoot, WorkerFolder
from deadletters.journal.frames import MESSAGE_CONTEXT
from deadletters.journal.holds import HoldRule, Message, first_match, payload_hash_of_json
from deadletters.journal.kept import KeptFailures, pack_failure, unpack_failure
from deadletters.journal.message import unpack_body
from deadletters.journal.reader import FolderReader
from deadletters.models import JournalFolder, SetAsideEntry, TaskMinute, TaskPolicy, WorkerNode
from deadletters.policy import TaskPolicySpec
from deadletters.recording import ATTEMPTS, Settlement, record_page
from opsconsole.core.clock import boot_id, boot_now, wall_now
from opsconsole.core.database import RowWriter, database_now, locked
from opsconsole.core.forking import GATE
from opsconsole.core.ids import new_id
from opsconsole.core.redaction import decode_body
from opsconsole.core.safe_text import safe_text, shorten
from opsconsole.core.sealing import SealError
from opsconsole.jobs import ledger
from opsconsole.jobs.tokens import job_id_of

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.25
READ_BYTES = 1 << 20
AT_ONCE = 250
"""Failures in one transaction: more would hold an incident's lock for longer than they save (measured)."""
IDLE_SECONDS = 10.0
"""Opening a connection costs the server about as much as recording a hundred failures (measured)."""
GATHER_SECONDS = 1.0
"""How long one more of a burst waits for others: the statements cost the same for one job as for hundreds."""
TRIES = 5
LONGEST_PAUSE_SECONDS = 5.0
RECOVER_EVERY_SECONDS = 5.0
KEPT_BYTES = 512 << 20
DATA_ERRORS = (DataError, IntegrityError)


Counts: TypeAlias = dict[tuple[str, str, datetime], list[int]]
"""How many of each kind, by tenant, task and minute."""


class DatabaseDown(Exception):
    """The database could not be used; nothing is known to be wrong with the data."""


def policies() -> conf.Policies:
    """Return the declared policies, those of the table included."""
    return conf.Policies(_policy_rows)


def _policy_rows() -> list[TaskPolicySpec]:
    """Return the table's policies; a row that makes no sense is reported and left out, the others hold."""
    specs = []
    for row in TaskPolicy.objects.all():
        try:
            specs.append(row.spec())
        except ValueError as error:
            logger.error("the policy of %s is left out: %s", row.pattern, error)
    return specs


@dataclass(slots=True, kw_only=True)
class Drained:
    """What one batch has become so far, so that a second try does not begin at the start."""

    batch: Batch
    boot_id: str
    failures_done: int = 0
    endings_done: int = 0
    tries: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    is_last: bool = False


class FolderDrain:
    """Applies the batches of one worker's folder to the database, in order, each exactly once."""

    def __init__(
        self,
        *,
        folder_name: str,
        source: str,
        worker: str,
        settlement: Settlement,
        kept: KeptFailures | None,
        book: conf.Policies,
    ) -> None:
        self.folder_name = folder_name
        self.source = source
        self.worker = worker
        self.settlement = settlement
        self.kept = kept
        self.book = book
        self.captured_at: datetime | None = None

    def stored_offsets(self) -> dict[str, int] | None:
        """Return how far this folder has been counted; None if it has been drained to its end already."""
        with GATE:
            row = JournalFolder.objects.filter(name=self.folder_name).first()
        if row is None:
            return {}
        return None if row.closed_at is not None else json.loads(row.offsets)

    def apply(self, drained: Drained) -> None:
        """Record one batch; raises ``DatabaseDown`` and then goes on where it stopped when called again."""
        try:
            with GATE:
                now = database_now()
                clock = HostClock(database_now=now, boot_now=boot_now(), wall_now=wall_now(), boot_id=boot_id())
                book = self.book.book()
        except Error as error:
            raise DatabaseDown(str(error)) from error
        intake = Intake(
            source=self.source,
            worker=self.worker,
            release=conf.release(),
            sealer=conf.sealer(),
            redactor=conf.redactor(),
            policies=book,
            mode=conf.grouping_mode(),
        )
        self._record_failures(drained, intake, clock)
        self._settle_endings(drained)
        self._give_back(drained)
        self._count(drained, intake, clock)
        self.captured_at = now

    def _record_failures(self, drained: Drained, intake: Intake, clock: HostClock) -> None:
        failures = [event for event in drained.batch.events if isinstance(event, Failed)]
        while drained.failures_done < len(failures):
            start = drained.failures_done
            # After an error the page is one entry long until it is past the one that cannot be recorded.
            size = 1 if drained.tries[start] else AT_ONCE
            page = failures[start : start + size]
            try:
                with GATE:
                    self._record_page(page, intake, clock, drained.boot_id)
            except Error as error:
                if not isinstance(error, DATA_ERRORS):
                    raise DatabaseDown(f"{type(error).__name__}: {error}") from error
                self._failed_to_record(drained, page, start, error)
            except Exception as error:  # noqa: BLE001  (a bug of ours on one entry must not stop those behind it)
                self._failed_to_record(drained, page, start, error)
            else:
                drained.failures_done += len(page)

    def _failed_to_record(self, drained: Drained, page: list[Failed], start: int, error: Exception) -> None:
        drained.tries[start] += 1
        if len(page) > 1:
            # One of them is bad; find it by taking them one by one.
            for index in range(start, start + len(page)):
                drained.tries[index] = max(drained.tries[index], 1)
            return
        logger.warning("cannot record %s: %s: %s", page[0].delivery.task_id, type(error).__name__, error)
        if drained.tries[start] >= TRIES:
            with GATE:
                self._set_aside(page[0], drained.boot_id, error)
            drained.failures_done += 1

    def _record_page(self, page: list[Failed], intake: Intake, clock: HostClock, boot: str) -> None:
        wanted = [failed for failed in page if not self._is_ignored(failed, intake)]
        kept = [
            failed
            for failed in self._put_aside_after_all(wanted)
            if not (failed.delivery.repair_id and self.settlement.is_settled_elsewhere(failed))
        ]
        record_page(kept, intake_of=lambda _failed: (intake, boot), clock=clock, settlement=self.settlement)
        self._keep(kept, boot)

    def _put_aside_after_all(self, page: list[Failed]) -> list[Failed]:
        """Return the page with those put aside that a worker has lost before they started, and that are on hold.

        With an early acknowledgement a worker can be killed between that and writing down that a hold matches.
        """
        if not any(map(_is_lost_unstarted, page)):
            return page
        rules, _overdue = rules_of(self.source)
        return [_put_aside(failed, rules) if rules and _is_lost_unstarted(failed) else failed for failed in page]

    def _keep(self, recorded: list[Failed], boot: str) -> None:
        """Keep a copy on this host of what was recorded, against a failover that loses commits."""
        if self.kept is None or not recorded:
            return
        for failed in recorded:
            delivery = failed.delivery
            delivery.source, delivery.worker, delivery.boot_id = self.source, self.worker, boot
        try:
            self.kept.keep(recorded)
        except OSError as error:
            logger.error("cannot keep a copy of %d failures: %s", len(recorded), error)

    def _is_ignored(self, failed: Failed, intake: Intake) -> bool:
        """A task declared to be ignored is counted and makes no letter, unless it is a repair that somebody awaits.

        What a hold has put aside is kept in any case: its letter is all there is of it.
        """
        if failed.caught is Caught.HELD:
            return False
        return intake.policies.for_task(failed.delivery.task).ignore and not failed.delivery.repair_id

    def _set_aside(self, failed: Failed, boot: str, error: Exception) -> None:
        """Keep an entry that cannot be recorded: sealed, visible, and to be recorded once its cause is mended."""
        delivery = failed.delivery
        delivery.source, delivery.worker, delivery.boot_id = self.source, self.worker, boot
        logger.error("set aside %s (%s) after %d tries: %s", delivery.task_id, delivery.task, TRIES, error)
        try:
            SetAsideEntry.objects.get_or_create(
                source=self.source,
                node=self.folder_name[:200],
                delivery=shorten(f"{delivery.token}:{delivery.task_id}:{delivery.retries}", 300),
                defaults={
                    "tenant": shorten(delivery.tenant, 100),
                    "job_type": shorten(delivery.task, 255),
                    "reason": safe_text(f"{type(error).__name__}: {error}", 2_000),
                    "blob": seal_failed(failed),
                    "set_aside_at": database_now(),
                },
            )
        except Error as second:
            raise DatabaseDown(str(second)) from second

    def _settle_endings(self, drained: Drained) -> None:
        endings = [event for event in drained.batch.events if isinstance(event, Ended) and _concerns_repairs(event)]
        while drained.endings_done < len(endings):
            ended = endings[drained.endings_done]
            ended.delivery.source = self.source
            try:
                with GATE:
                    self.settlement.ended(ended)
            except Error as error:
                if not isinstance(error, DATA_ERRORS):
                    raise DatabaseDown(f"{type(error).__name__}: {error}") from error
                logger.exception("cannot settle %s", ended.delivery.task_id)
            except Exception:
                # A repair that cannot be settled stays visible as unanswered; those behind it must not wait for it.
                logger.exception("cannot settle %s", ended.delivery.task_id)
            drained.endings_done += 1

    def _give_back(self, drained: Drained) -> None:
        """Give jobs of the ledger back to it whose messages went back to the broker, or met a hold before they ran.

        The former are sent again at once, the latter when nothing holds them any more; neither is an attempt. Some
        brokers keep such a message for an hour before they deliver it again; it is passed over then.
        """
        tokens = [
            event.delivery.task_id
            for event in drained.batch.events
            if isinstance(event, Ended)
            and event.state in (EndState.RETURNED, EndState.HELD_BACK)
            and job_id_of(event.delivery.task_id) is not None
        ]
        if not tokens:
            return
        try:
            with GATE:
                ledger.give_back(tokens)
        except Error as error:
            raise DatabaseDown(f"{type(error).__name__}: {error}") from error

    def _count(self, drained: Drained, intake: Intake, clock: HostClock) -> None:
        """Commit counts, attempts and offsets together: counts, unlike letters, have no key to save them."""
        batch = drained.batch
        attempts = []
        # By whole seconds first: what a name and a minute take to make is then paid once for many jobs.
        seconds: Counter[tuple[str, str, int, int, int]] = Counter()
        for delivery in batch.received:
            seconds[delivery.tenant, delivery.task, int(delivery.received_boot), int(delivery.received_wall), 0] += 1
        for event in batch.events:
            delivery = event.delivery
            column = _counted_as(event)
            seconds[delivery.tenant, delivery.task, int(event.at_boot), int(event.at_wall), column] += 1
            if isinstance(event, Ended) and event.state == EndState.RETRY:
                try:
                    at, _exact = clock.moment(boot=event.at_boot, wall=event.at_wall, boot_id=drained.boot_id)
                    attempts.append(self._attempt_row(event, intake, at))
                except Exception:
                    # The attempt is history; a bug in showing one must not stop the counts.
                    logger.exception("cannot keep an attempt of %s", event.delivery.task_id)
        counts: Counts = defaultdict(lambda: [0] * len(COUNTED))
        for (tenant, task, boot, wall, column), number in seconds.items():
            at, _exact = clock.moment(boot=boot, wall=wall, boot_id=drained.boot_id)
            counts[_minute_of(tenant, task, at)][column] += number
        try:
            try:
                self._write_counts(drained, counts, attempts, clock.database_now)
            except (*DATA_ERRORS, OverflowError):
                # Something cannot be stored under its name: the attempts go in one by one, and the numbers stay right
                # under a name that can be.
                logger.exception("counts of %s", self.worker)
                self._write_attempts_one_by_one(attempts)
                merged: Counts = defaultdict(lambda: [0] * len(COUNTED))
                for (_tenant, _task, minute), numbers in counts.items():
                    for index, number in enumerate(numbers):
                        merged["default", "invalid", minute][index] += number
                self._write_counts(drained, merged, [], clock.database_now)
        except Error as error:
            raise DatabaseDown(f"{type(error).__name__}: {error}") from error

    def _write_attempts_one_by_one(self, attempts: list[tuple[Any, ...]]) -> None:
        for row in attempts:
            try:
                with GATE, transaction.atomic():
                    ATTEMPTS.insert([row])
            except (*DATA_ERRORS, OverflowError) as error:
                logger.warning("cannot keep an attempt: %s", error)

    def _write_counts(self, drained: Drained, counts: Counts, attempts: list[tuple[Any, ...]], now: datetime) -> None:
        offsets = drained.batch.offsets
        with GATE, transaction.atomic():
            row = locked(JournalFolder.objects.filter(name=self.folder_name)).first()
            if row is not None and _are_counted(json.loads(row.offsets), offsets):
                # Committed before, and the answer was lost on its way.
                return
            ATTEMPTS.insert(attempts)
            MINUTES.insert(
                (self.source, tenant, task, minute, *numbers)
                for (tenant, task, minute), numbers in sorted(counts.items())
            )
            # The reader's and no older ones: segments that are gone would add up in a worker's long life.
            closed_at = now if drained.is_last else None
            FOLDERS.insert([(self.folder_name, self.source, json.dumps(offsets, sort_keys=True), now, closed_at)])

    def _attempt_row(self, ended: Ended, intake: Intake, at: datetime) -> tuple[Any, ...]:
        error_class, error_text, judgement = intake.retried(ended)
        delivery = ended.delivery
        duration = None
        if delivery.started_boot is not None:
            duration = max(int((ended.at_boot - delivery.started_boot) * 1_000), 0)
        return (
            new_id(), _name(delivery.tenant, 100) or "default", self.source, _name(delivery.task_id, 255),
            min(max(delivery.retries, 0), (1 << 31) - 1), _name(delivery.task, 255), at, duration, error_class,
            error_text,
            judgement.outcome.value, judgement.reason[:300], _name(self.worker, 255), conf.release(),
        )  # fmt: skip


def _is_lost_unstarted(failed: Failed) -> bool:
    delivery = failed.delivery
    return (
        failed.caught is Caught.WORKER_LOST
        and failed.never_started
        and delivery.message_state is MessageState.FULL
        and not delivery.repair_id
        and job_id_of(delivery.task_id) is None
    )


def _put_aside(failed: Failed, rules: list[HoldRule]) -> Failed:
    """Return a lost delivery as one that the first rule which matches has put aside; as it is if none does."""
    delivery = failed.delivery

    def hash_of_payload() -> str:
        try:
            packed = conf.sealer().open(delivery.sealed, MESSAGE_CONTEXT)
        except SealError:
            return ""
        decoded = decode_body(*unpack_body(packed))
        return "" if decoded.error else payload_hash_of_json([decoded.args, decoded.kwargs])

    message = Message(
        tenant=delivery.tenant, task=delivery.task, queue=delivery.queue, task_id=delivery.task_id,
        payload_hash=hash_of_payload,
    )  # fmt: skip
    rule = first_match(rules, message)
    if rule is None:
        return failed
    delivery.hold_id, delivery.clock_us = rule.id, rule.clock_us
    return replace(failed, caught=Caught.HELD, error=ErrorReport(error_class="", text=""), sealed_error=b"")


def _are_counted(stored: dict[str, int], offsets: dict[str, int]) -> bool:
    """Whether everything up to ``offsets`` has been counted already."""
    return bool(offsets) and all(stored.get(name, -1) >= offset for name, offset in offsets.items())


COUNTED = ("received", "succeeded", "failed", "retried", "ignored", "revoked", "lost", "returned", "held")


_ENDED_AS = {
    EndState.SUCCESS: COUNTED.index("succeeded"),
    EndState.RETRY: COUNTED.index("retried"),
    EndState.REVOKED: COUNTED.index("revoked"),
    EndState.RETURNED: COUNTED.index("returned"),
    EndState.HELD_BACK: COUNTED.index("held"),
}
_FAILED_AS = {
    Caught.WORKER_LOST: COUNTED.index("lost"),
    Caught.EXPIRED: COUNTED.index("revoked"),
    Caught.HELD: COUNTED.index("held"),
}


def _counted_as(event: Ended | Failed) -> int:
    """Return in which of the columns an end is counted."""
    if isinstance(event, Failed):
        return _FAILED_AS.get(event.caught, COUNTED.index("failed"))
    return _ENDED_AS.get(event.state, COUNTED.index("ignored"))


def _minute_of(tenant: str, task: str, at: datetime) -> tuple[str, str, datetime]:
    tenant = _name(tenant, 100)
    return (
        tenant if tenant not in ("", "*") else "default",
        _name(task or "invalid", 255),
        at.replace(second=0, microsecond=0),
    )


def _name(value: str, limit: int) -> str:
    return shorten(value, limit)


def _concerns_repairs(ended: Ended) -> bool:
    return bool(ended.delivery.repair_id) or (ended.state == EndState.SUCCESS and ended.delivery.redelivered)


def seal_failed(failed: Failed) -> bytes:
    """Return one failure sealed, complete enough to be recorded later."""
    return conf.sealer().seal(pack_failure(failed, conf.sealer()))


def open_failed(blob: bytes) -> Failed:
    """Return what ``seal_failed`` sealed; raises ``SealError`` if its key is gone."""
    return unpack_failure(conf.sealer().open(blob), conf.sealer())


MINUTES = RowWriter(
    TaskMinute,
    ("source", "tenant", "job_type", "minute", *COUNTED),
    suffix="ON CONFLICT (source, tenant, job_type, minute) DO UPDATE SET "
    + ", ".join(f"{name} = {TaskMinute._meta.db_table}.{name} + excluded.{name}" for name in COUNTED),
)

FOLDERS = RowWriter(
    JournalFolder,
    ("name", "source", "offsets", "changed_at", "closed_at"),
    suffix="ON CONFLICT (name) DO UPDATE SET source = excluded.source, offsets = excluded.offsets,"
    " changed_at = excluded.changed_at, closed_at = excluded.closed_at",
)


class Drainer(threading.Thread):
    """Drains this worker's own folder every quarter of a second, and dead workers' folders when they turn up."""

    def __init__(
        self,
        *,
        folder: WorkerFolder,
        root: JournalRoot,
        source: str,
        worker: str,
        settlement: Settlement,
        flush: Callable[[], None],
    ) -> None:
        super().__init__(name="opsconsole-drainer", daemon=True)
        self.folder = folder
        self.root = root
        self.source = source
        self.worker = worker
        self.settlement = settlement
        self.flush = flush
        self.trouble = ""
        self.behind_since: float | None = None
        self.captured_at: datetime | None = None
        self._stop_asked = threading.Event()
        self._book = policies()
        self._kept = KeptFailures(root, KEPT_BYTES, conf.kept_seconds(), sealer=conf.sealer())
        self._drain = self._drain_of(folder.name)
        self._reader = FolderReader(folder, conf.sealer())
        self._gathered: Drained | None = None
        self._gathered_at = 0.0
        self._failures_at = float("-inf")
        self._pending: Drained | None = None
        self._worked_at = time.monotonic()

    def stop(self) -> None:
        self._stop_asked.set()

    def run(self) -> None:
        pause = TICK_SECONDS
        recovered_at = -RECOVER_EVERY_SECONDS
        while True:
            stopping = self._stop_asked.wait(pause)
            try:
                more = self.step()
                self._is_well()
                pause = 0.0 if more else TICK_SECONDS
                if not more and not stopping and time.monotonic() - recovered_at > RECOVER_EVERY_SECONDS:
                    recovered_at = time.monotonic()
                    self.recover()
                    self._kept.expire()
                if stopping and not more:
                    break
            except DatabaseDown as error:
                self._is_in_trouble(f"the database cannot be used: {error}")
                self._sync()
                pause = min(max(pause, TICK_SECONDS) * 2, LONGEST_PAUSE_SECONDS)
                if stopping:
                    break
            except Exception as error:
                logger.exception("drainer of %s", self.worker)
                self._is_in_trouble(f"{type(error).__name__}: {error}")
                pause = LONGEST_PAUSE_SECONDS
                if stopping:
                    break
            if self.trouble or time.monotonic() - self._worked_at > IDLE_SECONDS:
                # In trouble a kept connection would not follow a failover; idle it costs the server a backend.
                with GATE:
                    connections.close_all()
        with GATE:
            connections.close_all()

    def step(self) -> bool:
        """Record what this worker's journal brings; returns whether there may be more at once.

        A first failure and a repair's end are recorded at once. What is only counted, and the failures that follow, are
        gathered for a second: beside a busy worker each statement also costs it the interpreter's lock.
        """
        self.flush()
        if self._pending is None:
            batch = self._reader.read(READ_BYTES, to_the_end=self._stop_asked.is_set())
            # Starts and acknowledgements alone change nothing that is counted; a later batch brings their offsets.
            if batch.events or batch.received or not batch.exhausted:
                self._gather(batch)
            if self._gathered is None or not self._is_due(batch):
                if any(isinstance(event, Failed) for event in batch.events):
                    self._sync()
                return not batch.exhausted
            self._pending, self._gathered = self._gathered, None
        self._drain.apply(self._pending)
        if any(isinstance(event, Failed) for event in self._pending.batch.events):
            self._failures_at = time.monotonic()
        exhausted = self._pending.batch.exhausted
        offsets = self._pending.batch.offsets
        self._pending = None
        self.captured_at = self._drain.captured_at
        self._reader.prune(offsets)
        if exhausted:
            self.behind_since = None
        return not exhausted

    def _gather(self, batch: Batch) -> None:
        """Add a batch to those that wait to be recorded together."""
        _report_damage(batch, self.worker)
        now = self._worked_at = time.monotonic()
        if self._gathered is None:
            self._gathered_at = now
            self._gathered = Drained(batch=batch, boot_id=batch.boot_id or boot_id())
        else:
            before = self._gathered.batch
            self._gathered.batch = replace(
                batch,
                events=before.events + batch.events,
                received=before.received + batch.received,
                damaged=before.damaged + batch.damaged,
            )
        if self.behind_since is None and batch.events:
            self.behind_since = now

    def _is_due(self, newest: Batch) -> bool:
        now = time.monotonic()
        if self._stop_asked.is_set() or not newest.exhausted or now - self._gathered_at >= GATHER_SECONDS:
            return True
        is_burst = now - self._failures_at < GATHER_SECONDS
        return any(
            bool(event.delivery.repair_id) or not is_burst if isinstance(event, Failed) else _concerns_repairs(event)
            for event in newest.events
        )

    def recover(self) -> int:
        """Settle the journals that dead workers of this host have left; returns how many."""
        count = 0
        for folder in self.root.dead_folders():
            try:
                if recover_folder(folder, self._drain_of(folder.name)):
                    self._say_it_ended(folder.name)
                    folder.delete()
                    count += 1
            except DatabaseDown:
                raise
            except Exception:
                # The next one is somebody else's story; this one is tried again, and its folder stays.
                logger.exception("cannot recover the journal of %s", folder.name)
            finally:
                folder.release()
        return count

    def _say_it_ended(self, name: str) -> None:
        """Write the good-bye that a killed worker could not: nothing of it is missing any more."""
        try:
            with GATE:
                WorkerNode.objects.filter(id=name, stopped_at__isnull=True).update(
                    stopped_at=database_now(), trouble=""
                )
        except Error as error:
            raise DatabaseDown(str(error)) from error

    def _drain_of(self, name: str) -> FolderDrain:
        return FolderDrain(
            folder_name=name,
            source=self.source,
            worker=self.worker,
            settlement=self.settlement,
            kept=self._kept,
            book=self._book,
        )

    def _sync(self) -> None:
        """Make the disk hold what the database has not yet: hooks wait for it only at the first failure of a burst."""
        try:
            self.folder.sync()
        except OSError as error:
            logger.error("the journal of %s cannot be synced: %s", self.worker, error)

    def _is_well(self) -> None:
        if self.trouble:
            logger.info("drainer of %s: recording again", self.worker)
        self.trouble = ""

    def _is_in_trouble(self, trouble: str) -> None:
        if trouble != self.trouble:
            logger.error("drainer of %s: %s; nothing is lost, the journal keeps it", self.worker, trouble)
        self.trouble = trouble


def _report_damage(batch: Batch, worker: str) -> None:
    for what in batch.damaged:
        logger.error("the journal of %s is damaged: %s", worker, what)


def recover_folder(folder: WorkerFolder, drain: FolderDrain) -> bool:
    """Record what a dead worker's journal still holds and what became of its open deliveries.

    The folder is locked for recovery by the caller. Returns whether it is done with and may be deleted; raises
    ``DatabaseDown``, after which the next try goes on from the committed offsets.
    """
    try:
        offsets = drain.stored_offsets()
    except Error as error:
        raise DatabaseDown(str(error)) from error
    if offsets is None:
        return True
    reader = FolderReader(folder, conf.sealer(), offsets)
    boot = ""
    while True:
        batch = reader.read(READ_BYTES)
        # Recorded as the dead worker would have: in its source and under its name, not the rescuer's.
        drain.source = str(reader.head.get("source") or drain.source)
        drain.worker = str(reader.head.get("node") or drain.worker)
        boot = batch.boot_id or boot
        _report_damage(batch, drain.worker)
        if batch.offsets or batch.events or batch.received:
            drain.apply(Drained(batch=batch, boot_id=boot or boot_id()))
        if batch.exhausted:
            break
    last = reader.finish()
    _report_damage(last, drain.worker)
    drain.apply(Drained(batch=replace(last, exhausted=True), boot_id=last.boot_id or boot, is_last=True))
    if last.events:
        logger.warning("recovered the journal of %s: %d deliveries had been open", folder.name, len(last.events))
    return True
