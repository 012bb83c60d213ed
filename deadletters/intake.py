"""From a journal event to the columns of a letter: everything that needs no database.

Each value is made safe and readable here, once; the original stays in the sealed message.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any
from uuid import UUID

from deadletters import grouping
from deadletters.arguments import NO_JSON, describe_arguments
from deadletters.journal.events import Caught, Delivery, Ended, ErrorReport, Failed, MessageState
from deadletters.journal.frames import MESSAGE_CONTEXT
from deadletters.journal.message import unpack_body, unpack_expiry
from deadletters.models import hold_incident_key
from deadletters.outcome import Judgement, combine, judge
from deadletters.policy import PolicyBook, TaskPolicySpec
from incidents.models import Severity
from opsconsole.core.effects import OutcomeClass
from opsconsole.core.ids import new_id
from opsconsole.core.redaction import Redactor, decode_body
from opsconsole.core.safe_text import safe_text, shorten
from opsconsole.core.sealing import BrokenSeal, Sealer, SealError
from opsconsole.jobs.errors import code_in
from opsconsole.jobs.models import Job

ERROR_TEXT_LIMIT = 4_000
TRACEBACK_LIMIT = 64_000
LONGEST_KNOWN = 16_000
"""The longest traceback that is remembered: a few megabytes at most for all of them."""
PREVIEW_LIMIT = 4_000
SEVERITIES = {str(member.label): member for member in Severity}
COMPRESS_FROM = 1_024
"""Below this a message gains less from compression than the 40 microseconds are worth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostClock:
    """One reading of a host's clocks beside the database's, to turn ages into the database's time.

    An age on CLOCK_BOOTTIME is exact; after a reboot only the wall clock is left, which is marked inexact.
    """

    database_now: datetime
    boot_now: float
    wall_now: float
    boot_id: str

    def moment(self, *, boot: float, wall: float, boot_id: str) -> tuple[datetime, bool]:
        """Return when it happened on the database's clock, and whether that is exact."""
        if boot_id == self.boot_id:
            return self.database_now - timedelta(seconds=max(self.boot_now - boot, 0.0)), True
        return self.database_now - timedelta(seconds=max(self.wall_now - wall, 0.0)), False


@dataclass(slots=True, kw_only=True)
class Failure:
    """One final failure, ready to be recorded. Texts are safe and redacted; ``blob`` is sealed for its letter.

    Nobody changes one; frozen, its many fields would take three times as long to set.
    """

    letter_id: UUID  # of the letter it would create
    repaired_letter_id: UUID | None  # of the letter it belongs to, if it is a repair's delivery
    repair_id: UUID | None
    tenant: str
    source: str
    fingerprint: str
    delivery: str
    task_id: str
    retries: int
    task: str  # the name as it came, which the words about its failure are made of
    job_type: str
    queue: str
    job_id: str
    actor_type: str
    actor_id: str
    caught: Caught
    happened_at: datetime
    is_exact: bool
    error_class: str
    error_text: str
    call_site: str
    traceback: str
    traceback_digest: str
    judgement: Judgement
    severity: Severity
    grouping: grouping.GroupingMode
    incident_key: str
    preview: str
    message_state: MessageState
    message_digest: str
    blob: bytes
    key_id: str
    exchange: str
    routing_key: str
    priority: int | None
    root_id: str
    parent_id: str
    group_id: str
    chord_id: str
    worker: str
    release: str
    trace_id: str
    sentry_id: str
    expires_at: datetime | None = None  # after which its sender did not want it to run
    arguments: str = ""  # their shape, see deadletters.arguments
    never_started: bool = False
    is_set_aside: bool = False
    report_id: str = ""  # of the ledger's job, if it belongs to a report
    outbox_id: str = ""  # the same, if it sends what an outbox holds
    hold_id: UUID | None = None  # of the hold that put its message aside
    turn_at: datetime | None = None  # when it was its turn, of such a one; None: when it happened

    @property
    def is_held(self) -> bool:
        """Whether nothing has failed: a hold has put its message aside."""
        return self.caught is Caught.HELD

    @property
    def is_failed_repair(self) -> bool:
        """Whether it is the end of a repair, and so an occurrence of the letter that was repaired."""
        return self.repaired_letter_id is not None

    @property
    def title(self) -> str:
        """The title of the incident that it opens, made only then: most failures find theirs open."""
        return grouping.title(
            mode=self.grouping,
            task=self.task,
            error_class=self.error_class,
            caught=self.caught,
            call_site=self.call_site,
            text=self.error_text,
        )

    @property
    def summary(self) -> str:
        """The summary of the incident that it opens."""
        return grouping.summary(
            mode=self.grouping,
            task=self.task,
            queue=self.queue,
            error_class=self.error_class,
            caught=self.caught,
            call_site=self.call_site,
            text=self.error_text,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """What preparing needs of the process it runs in."""

    source: str
    worker: str
    release: str
    sealer: Sealer
    redactor: Redactor
    policies: PolicyBook
    mode: grouping.GroupingMode

    def failure(
        self,
        failed: Failed,
        *,
        clock: HostClock,
        boot_id: str,
        letter_id: UUID | None = None,
        job: Job | None = None,
    ) -> Failure:
        """Return the columns of one final failure.

        ``letter_id`` names the letter a repair's delivery belongs to. ``job`` is the row of a job of the ledger: whose
        it is, its id, and what is known of its earlier attempts is taken from there.
        """
        delivery, error = failed.delivery, failed.error
        policy = self.policies.for_task(delivery.task)
        new_letter = new_id()
        error_text = self.redactor.text(error.text, limit=ERROR_TEXT_LIMIT)
        traceback, digest = self._traceback(error)
        error_class = shorten(error.error_class, 255)
        call_site = shorten(error.call_site, 300)
        if job is not None and (code := code_in(error.error_class, error.text)):
            # What a kind declares happens in the client that all kinds use: its code is the cause, not the line there.
            call_site = code
        job_type = shorten(delivery.task or "invalid", 255)
        tenant, actor_type, actor_id = self._scope(delivery)
        if job is not None:
            tenant, actor_type, actor_id = job.tenant, job.actor_type, job.actor_id
        message, preview, message_digest, arguments, expires_at = self._message(delivery, new_letter)
        task_id = delivery.task_id
        message_id = task_id or message_digest or delivery.token
        job_id = task_id if job is None else str(job.id)
        fingerprint = grouping.fingerprint(delivery.queue, job_id or None, message_id)
        happened_at, is_exact = clock.moment(boot=failed.at_boot, wall=failed.at_wall, boot_id=boot_id)
        mode = policy.grouping or self.mode
        hold_id = turn_at = None
        if failed.caught is Caught.HELD:
            hold_id, mode = _uuid_of(delivery.hold_id), grouping.GroupingMode.CAUSE
            turn_at = _turn_of(failed)
        judgement = self.judgement(error, policy, delivery, caught=failed.caught, never_started=failed.never_started)
        report_id = outbox_id = ""
        if job is not None:
            judgement = combine(_judged_before(job), judgement)
            payload = json.loads(job.payload)
            preview = self.redactor.preview([], payload, limit=PREVIEW_LIMIT)
            report_id = str(job.report_id or "")
            if isinstance(payload, dict):
                outbox_id = shorten(safe_text(str(payload.get("outbox_id") or ""), 200), 200)
        return Failure(
            letter_id=new_letter,
            repaired_letter_id=letter_id,
            repair_id=_repair_of(delivery, job) if letter_id is not None else None,
            tenant=tenant,
            source=self.source,
            fingerprint=fingerprint,
            delivery=shorten(f"{message_id}:{delivery.retries}", 300),
            task_id=shorten(task_id, 255),
            retries=_fitting(delivery.retries, 0, (1 << 31) - 2) or 0,
            task=delivery.task,
            job_type=job_type,
            queue=shorten(delivery.queue, 200),
            job_id=shorten(job_id, 200),
            actor_type=actor_type,
            actor_id=actor_id,
            caught=failed.caught,
            happened_at=happened_at,
            is_exact=is_exact,
            error_class=error_class,
            error_text=error_text,
            call_site=call_site,
            traceback=traceback,
            traceback_digest=digest,
            judgement=judgement,
            severity=Severity.LOW if failed.caught is Caught.HELD else SEVERITIES[policy.severity],
            grouping=mode,
            incident_key=hold_incident_key(hold_id or "unknown")
            if failed.caught is Caught.HELD
            else grouping.grouping_key(
                mode=mode,
                tenant=tenant,
                source=self.source,
                task=job_type,
                error_class=error_class,
                call_site=call_site,
                text=error_text,
                caught=failed.caught,
                fingerprint=fingerprint,
            ),
            preview=preview,
            message_state=delivery.message_state,
            message_digest=message_digest,
            blob=message,
            key_id=self.sealer.key_id(message) if message else "",
            exchange=shorten(delivery.exchange, 255),
            routing_key=shorten(delivery.routing_key, 255),
            priority=_fitting(delivery.priority, -(1 << 15), (1 << 15) - 1),
            root_id=shorten(delivery.root_id, 255),
            parent_id=shorten(delivery.parent_id, 255),
            group_id=shorten(delivery.group_id, 255),
            chord_id=shorten(delivery.chord_id, 255),
            worker=shorten(self.worker, 255),
            release=self.release,
            expires_at=expires_at,
            arguments=arguments,
            trace_id=safe_text(delivery.trace_id, 64)[:64],
            sentry_id=safe_text(delivery.sentry_id, 64)[:64],
            never_started=failed.never_started,
            report_id=report_id,
            outbox_id=outbox_id,
            hold_id=hold_id,
            turn_at=turn_at,
        )

    def _traceback(self, error: ErrorReport) -> tuple[str, str]:
        """Return the redacted traceback and its digest; "" twice without one. See ``Occurrence.traceback_text``."""
        text = error.traceback.rstrip("\n")
        if not text:
            return "", ""
        # Without the error's own words, which differ from job to job, one row serves all that failed in one place.
        if error.text and len(error.text) <= ERROR_TEXT_LIMIT and text.endswith(f": {error.text}"):
            text = text.removesuffix(error.text)
        else:
            text += "\n"
        if len(text) > LONGEST_KNOWN:
            return _redacted_traceback.__wrapped__(self.redactor, text)
        return _redacted_traceback(self.redactor, text)

    def judgement(
        self,
        error: ErrorReport,
        policy: TaskPolicySpec,
        delivery: Delivery,
        *,
        caught: Caught,
        never_started: bool = False,
    ) -> Judgement:
        """Judge one failed attempt by what its task's policy declares."""
        return judge(
            caught=caught,
            error_class=error.error_class,
            classes=error.classes,
            text=error.text,
            call_site=error.call_site,
            effects=policy.effects,
            safe_errors=policy.safe_errors,
            never_started=never_started,
            message_missing=delivery.message_state != MessageState.FULL,
            task=delivery.task,
        )

    def retried(self, ended: Ended) -> tuple[str, str, Judgement]:
        """Return class, text and judgement of an attempt that Celery retries by itself."""
        error = ended.error or ErrorReport(error_class="", text="")
        policy = self.policies.for_task(ended.delivery.task)
        return (
            shorten(error.error_class, 255),
            self.redactor.text(error.text, limit=ERROR_TEXT_LIMIT),
            self.judgement(error, policy, ended.delivery, caught=Caught.FAILURE),
        )

    def _scope(self, delivery: Delivery) -> tuple[str, str, str]:
        """Return tenant, actor type and actor id as storable names; ``*`` is nobody's name."""
        tenant = shorten(delivery.tenant, 100)
        actor_type = shorten(delivery.actor_type, 100)
        actor_id = shorten(delivery.actor_id, 200)
        if tenant in ("", "*"):
            tenant = "default"
        return tenant, "(any)" if actor_type == "*" else actor_type, "(any)" if actor_id == "*" else actor_id

    def _message(self, delivery: Delivery, letter_id: UUID) -> tuple[bytes, str, str, str, datetime | None]:
        """Return the message sealed for its letter, and what is told of it.

        That is a redacted preview of its arguments, its body's digest, the shape of the arguments, and its expiry.
        """
        digest = delivery.message_digest
        if not delivery.sealed:
            return b"", delivery.preview, digest, "", None
        try:
            packed = self.sealer.open(delivery.sealed, MESSAGE_CONTEXT)
        except SealError as error:
            # Kept as it is: the key may come back, and then it can be opened again.
            return delivery.sealed, f"(the message cannot be opened: {error})", digest, "", None
        blob = seal_message(self.sealer, packed, letter_id)
        body, content_type, content_encoding = unpack_body(packed)
        digest = digest or hashlib.sha256(body).hexdigest()
        if delivery.message_state != MessageState.FULL:
            return blob, f"(not fully captured: {delivery.message_state.value})", digest, "", None
        expires_at = parse_expiry(unpack_expiry(packed))
        decoded = decode_body(body, content_type, content_encoding)
        arguments = NO_JSON if decoded.error else describe_arguments(decoded.args, decoded.kwargs)
        if decoded.error == "wrong_shape":
            preview = self.redactor.preview([decoded.document], {}, limit=PREVIEW_LIMIT)
        elif decoded.error:
            preview = f"({decoded.error}, {len(body)} bytes)"
        else:
            preview = self.redactor.preview(decoded.args, decoded.kwargs, limit=PREVIEW_LIMIT)
        return blob, safe_text(preview, PREVIEW_LIMIT), digest, arguments, expires_at


def parse_expiry(value: Any) -> datetime | None:
    """Return the moment that a message's header ``expires`` names, None if it names none."""
    if not isinstance(value, str):
        return None
    try:
        parsed = datetime.fromisoformat(value)
        return (parsed if parsed.tzinfo is not None else parsed.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


@lru_cache(maxsize=256)
def _redacted_traceback(redactor: Redactor, text: str) -> tuple[str, str]:
    """Return a traceback as it is stored, and its digest; known ones, for a burst brings the same one many times."""
    redacted = redactor.text(text, limit=TRACEBACK_LIMIT)
    return redacted, hashlib.sha256(redacted.encode()).hexdigest()


def _repair_of(delivery: Delivery, job: Job | None) -> UUID | None:
    return UUID(delivery.repair_id) if job is None else job.repair_id


def _turn_of(failed: Failed) -> datetime | None:
    """Return when it was a message's turn that a hold has put aside, None if nothing says so.

    Several processes put aside what one has received, and several transactions record it: only when it was received, by
    a clock that is read once, says which came first. A message with a time to start at takes its turn then.
    """
    delivery = failed.delivery
    boot = failed.at_boot if delivery.timed else delivery.received_boot
    if not delivery.clock_us or not boot:
        return None
    try:
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=delivery.clock_us + round(boot * 1e6))
    except OverflowError:
        return None


def _uuid_of(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def _judged_before(job: Job) -> Judgement | None:
    """Return the worst that the ledger knows of a job's earlier attempts (C19)."""
    if not job.outcome_class:
        return None
    return Judgement(OutcomeClass(job.outcome_class), job.outcome_reason)


def _fitting(value: int | None, least: int, most: int) -> int | None:
    """Return a number of somebody's message as its column can hold it."""
    return None if value is None else min(max(int(value), least), most)


PLAIN, ZLIB = b"\x00", b"\x01"


def seal_message(sealer: Sealer, packed: bytes, letter_id: UUID) -> bytes:
    """Return ``packed`` compressed where that pays, sealed and bound to its letter, so that none can be swapped."""
    if len(packed) >= COMPRESS_FROM:
        return sealer.seal(ZLIB + zlib.compress(packed, 1), letter_id.bytes)
    return sealer.seal(PLAIN + packed, letter_id.bytes)


def open_message(sealer: Sealer, blob: bytes, letter_id: UUID) -> bytes:
    """Return the packed message; raises ``UnknownSealKey`` or ``BrokenSeal``.

    What could not be opened when it was recorded, for want of its key, lies there as the journal had sealed it.
    """
    try:
        opened = sealer.open(blob, letter_id.bytes)
    except BrokenSeal:
        return sealer.open(blob, MESSAGE_CONTEXT)
    if opened[:1] == ZLIB:
        return zlib.decompress(opened[1:])
    return opened[1:]


def rebind_message(sealer: Sealer, failure: Failure, letter_id: UUID) -> bytes:
    """Return a failure's message sealed for another letter than the one it would have made; b"" if it cannot be."""
    try:
        return seal_message(sealer, open_message(sealer, failure.blob, failure.letter_id), letter_id)
    except SealError:
        return b""
