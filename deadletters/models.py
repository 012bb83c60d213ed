"""Dead letters, their occurrences, and what is known of the workers that had them."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING
from uuid import UUID

from django.core.exceptions import ValidationError
from django.db import models
from django.db.models import F, Q

from deadletters.grouping import GroupingMode
from deadletters.journal.events import Caught, MessageState
from deadletters.outcome import Effects, OutcomeClass
from deadletters.policy import TaskPolicySpec
from deadletters.querysets import (
    DeadLetterQuerySet,
    HoldQuerySet,
    OccurrenceQuerySet,
    TaskMinuteQuerySet,
    WorkerNodeQuerySet,
)
from grants.resources import Resource
from incidents.models import HOLD_CATEGORY, Grouping, Incident, Severity
from opsconsole.core.ids import new_id
from opsconsole.core.versions import version_of


class LetterState(models.TextChoices):
    """A letter's own state. "Acknowledged" and "resolved" are read from its incident and episode (C18)."""

    OPEN = "open"  # a decision is wanted
    HELD = "held"  # its message was put aside before its body ran; nothing has failed, and its hold's release sends it
    RETRYING = "retrying"  # a repair is planned, sent or running; its job has not answered yet
    REPAIRED = "repaired"  # the repaired job has succeeded
    ALREADY_DONE = "already_done"  # a person found that it had taken effect
    DISCARDED = "discarded"  # given up; the message is gone
    OVERTAKEN = "overtaken"  # the original delivery succeeded after all


DECIDABLE = (LetterState.OPEN, LetterState.HELD)
UNSETTLED = (*DECIDABLE, LetterState.RETRYING)
SETTLED = (LetterState.REPAIRED, LetterState.ALREADY_DONE, LetterState.DISCARDED, LetterState.OVERTAKEN)


def _choices(enum: type[Caught] | type[MessageState] | type[OutcomeClass] | type[Effects]) -> list[tuple[str, str]]:
    return [(member.value, member.value) for member in enum]


class DeadLetter(models.Model):
    """One job that failed with no automatic attempt left, or that a hold has put aside before it ran.

    Unresolved means: own state open, held or retrying, in the running episode of an incident that is not resolved. A
    letter of an earlier episode was closed with that episode.
    """

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    tenant = models.CharField(max_length=100)
    source = models.CharField(max_length=100)
    fingerprint = models.CharField(max_length=500)
    # Here and below without the index of a foreign key where one below begins with it: each index costs every failure.
    incident = models.ForeignKey(Incident, on_delete=models.PROTECT, related_name="letters", db_index=False)
    episode = models.IntegerField(db_default=1)
    job_type = models.CharField(max_length=255)
    queue = models.CharField(max_length=200, db_default="")
    job_id = models.CharField(max_length=200, db_default="")
    task_id = models.CharField(max_length=255, db_default="")
    actor_type = models.CharField(max_length=100, db_default="")
    actor_id = models.CharField(max_length=200, db_default="")
    state = models.CharField(max_length=12, choices=LetterState.choices, db_default=LetterState.OPEN)
    outcome_class = models.CharField(max_length=12, choices=_choices(OutcomeClass))
    outcome_reason = models.CharField(max_length=300, db_default="")
    caught = models.CharField(max_length=30, choices=_choices(Caught))
    error_code = models.CharField(max_length=64, db_default="queue_retries_exhausted")
    error_class = models.CharField(max_length=255, db_default="")
    error_text = models.TextField(db_default="")
    call_site = models.CharField(max_length=300, db_default="")
    attempts = models.IntegerField(db_default=1)
    payload_version = models.IntegerField(db_default=1)
    payload_preview = models.TextField(db_default="")
    message_state = models.CharField(max_length=10, choices=_choices(MessageState), db_default="missing")
    exchange = models.CharField(max_length=255, db_default="")
    routing_key = models.CharField(max_length=255, db_default="")
    priority = models.SmallIntegerField(null=True)
    root_id = models.CharField(max_length=255, db_default="")
    parent_id = models.CharField(max_length=255, db_default="")
    group_id = models.CharField(max_length=255, db_default="")
    chord_id = models.CharField(max_length=255, db_default="")
    worker = models.CharField(max_length=255, db_default="")
    release = models.CharField(max_length=100, db_default="")
    trace_id = models.CharField(max_length=64, db_default="")
    sentry_id = models.CharField(max_length=64, db_default="")
    is_set_aside = models.BooleanField(db_default=False)
    # Whether its job names a report, and an outbox (A5); which ones stands in the job, as everything else of a payload.
    has_report = models.BooleanField(db_default=False)
    has_outbox = models.BooleanField(db_default=False)
    # What a dry run over very many letters asks of each message, so that it need not open them: when its sender did not
    # want it to run any more, and the shape of its arguments (see ``deadletters.arguments.describe_arguments``).
    expires_at = models.DateTimeField(null=True)
    arguments = models.CharField(max_length=300, db_default="")
    # Of the hold that put its message aside, also after the hold and its row are gone.
    hold_id = models.UUIDField(null=True)
    occurrence_count = models.BigIntegerField(db_default=0)
    first_seen_at = models.DateTimeField()
    last_seen_at = models.DateTimeField()
    closed_at = models.DateTimeField(null=True)

    objects = DeadLetterQuerySet.as_manager()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["tenant", "source", "fingerprint"], name="ops_letter_fingerprint"),
            models.CheckConstraint(
                condition=~Q(tenant="*") & ~Q(tenant="") & ~Q(actor_type="*") & ~Q(actor_id="*"),
                name="ops_letter_scope",
            ),
            models.CheckConstraint(condition=Q(state__in=LetterState.values), name="ops_letter_state"),
            models.CheckConstraint(
                condition=Q(state__in=UNSETTLED) | Q(closed_at__isnull=False), name="ops_letter_closed_at"
            ),
        ]
        indexes = [
            models.Index(F("last_seen_at").desc(), F("id").desc(), name="ops_letter_newest"),
            models.Index(F("state"), F("last_seen_at").desc(), F("id").desc(), name="ops_letter_state_newest"),
            models.Index(F("tenant"), F("last_seen_at").desc(), F("id").desc(), name="ops_letter_tenant_newest"),
            models.Index(
                F("tenant"), F("state"), F("last_seen_at").desc(), F("id").desc(), name="ops_letter_tenant_state"
            ),
            models.Index(
                F("incident"), F("state"), F("last_seen_at").desc(), F("id").desc(), name="ops_letter_of_incident"
            ),
            models.Index(
                F("tenant"),
                F("actor_type"),
                F("actor_id"),
                F("last_seen_at").desc(),
                F("id").desc(),
                name="ops_letter_of_actor",
            ),
            # Compared byte by byte, so that the beginning of an id finds its place in it, too.
            models.Index(fields=["task_id"], opclasses=["varchar_pattern_ops"], name="ops_letter_task_id"),
            # A job of Celery's has its task's id, so that this index holds the others alone and costs most failures
            # nothing; ``DeadLetterQuerySet.is_of_job`` asks so that both are used.
            models.Index(F("job_id"), condition=~Q(job_id=F("task_id")), name="ops_letter_job_id"),
            # What a hold has put aside, in the order in which it came.
            models.Index(
                F("hold_id"), F("first_seen_at"), F("id"), condition=Q(hold_id__isnull=False), name="ops_letter_of_hold"
            ),
            # For retention, and for the part of a list that is closed; a letter is written into them when it is closed.
            models.Index(F("closed_at"), F("id"), condition=Q(closed_at__isnull=False), name="ops_letter_closed"),
            models.Index(
                F("last_seen_at").desc(),
                F("id").desc(),
                condition=Q(closed_at__isnull=False),
                name="ops_letter_closed_newest",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.job_type} {self.job_id or self.task_id}"

    @property
    def resource(self) -> Resource:
        """What a request that touches this letter touches."""
        return Resource(
            tenant=self.tenant,
            actor_type=self.actor_type,
            actor_id=self.actor_id,
            target_type="dead_letter",
            target_id=str(self.id),
        )

    def is_closed(self, incident: Incident) -> bool:
        """Whether this letter is closed, by itself or with an episode of its incident."""
        return self.state in SETTLED or incident.is_resolved or self.episode < incident.episode

    def standing(self, incident: Incident) -> str:
        """The state a reader sees: its own, or acknowledged or resolved as its incident says (A10, A11, C18)."""
        if self.state in SETTLED or self.state == LetterState.RETRYING:
            return str(self.state)
        if self.is_closed(incident):
            return "resolved"
        return str(self.state) if self.state == LetterState.HELD else str(incident.state)


class HoldState(models.TextChoices):
    """Whether matching messages are put aside. What was put aside stays so however a hold ends, until it is sent on."""

    ACTIVE = "active"  # workers put matching messages aside, until ends_at
    ENDED = "ended"  # somebody has ended it
    EXPIRED = "expired"  # its time was over


class Hold(models.Model):
    """Which messages are put aside before they run: those in which every named part is the same.

    ``tenant`` and ``source`` are ``*`` for every one. Workers obey ``ends_at`` by themselves; ``expired`` is written a
    moment later. ``letter_count`` is how many messages it has put aside, not how many still are.
    """

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    tenant = models.CharField(max_length=100)
    source = models.CharField(max_length=100)
    job_type = models.CharField(max_length=255, db_default="")
    queue = models.CharField(max_length=200, db_default="")
    task_id = models.CharField(max_length=255, db_default="")
    payload_hash = models.CharField(max_length=64, db_default="")
    state = models.CharField(max_length=12, choices=HoldState.choices, db_default=HoldState.ACTIVE)
    reason = models.CharField(max_length=500)
    placed_by = models.CharField(max_length=200)
    placed_by_name = models.CharField(max_length=200, db_default="")
    placed_at = models.DateTimeField()
    ends_at = models.DateTimeField()
    ended_by = models.CharField(max_length=200, db_default="")
    ended_by_name = models.CharField(max_length=200, db_default="")
    ended_at = models.DateTimeField(null=True)
    released_at = models.DateTimeField(null=True)
    redrive_id = models.UUIDField(null=True)
    letter_count = models.BigIntegerField(db_default=0)

    objects = HoldQuerySet.as_manager()

    if TYPE_CHECKING:
        locked_at: datetime

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(state__in=HoldState.values), name="ops_hold_state"),
            models.CheckConstraint(condition=~Q(tenant="") & ~Q(source=""), name="ops_hold_scope"),
            models.CheckConstraint(
                condition=~Q(job_type="") | ~Q(queue="") | ~Q(task_id=""), name="ops_hold_names_something"
            ),
            models.CheckConstraint(
                condition=Q(state=HoldState.ACTIVE, ended_at__isnull=True)
                | (~Q(state=HoldState.ACTIVE) & Q(ended_at__isnull=False)),
                name="ops_hold_ended_at",
            ),
        ]
        indexes = [
            # What each worker asks for every two seconds: never more than a few rows.
            models.Index(F("source"), F("id"), condition=Q(state=HoldState.ACTIVE), name="ops_hold_active"),
            models.Index(F("placed_at").desc(), F("id").desc(), name="ops_hold_newest"),
            models.Index(F("tenant"), F("placed_at").desc(), F("id").desc(), name="ops_hold_of_tenant"),
        ]

    def __str__(self) -> str:
        return self.words

    @property
    def words(self) -> str:
        """What it holds, for people."""
        named = (
            ("task", self.job_type), ("queue", self.queue), ("task id", self.task_id),
            ("payload", self.payload_hash[:12]), ("tenant", "" if self.tenant == "*" else self.tenant),
        )  # fmt: skip
        return ", ".join(f"{what} {value}" for what, value in named if value)

    @property
    def incident_key(self) -> str:
        """The key of its incidents: one for each tenant and source of which it has put messages aside."""
        return hold_incident_key(self.id)

    @property
    def resource(self) -> Resource:
        """What a request that touches this hold touches; ``*`` asks for a capability over every tenant (B2)."""
        return Resource(tenant=self.tenant, target_type="hold", target_id=str(self.id))

    @property
    def version(self) -> int:
        """What an entity tag compares: another number after each decision, not after each message put aside."""
        return version_of(self.state, self.ends_at, self.ended_at, self.released_at, self.redrive_id)

    def extend(self, *, until: datetime) -> None:
        """Move its end."""
        self.ends_at = until
        self.save(update_fields=["ends_at"])

    def release(self, *, redrive_id: UUID, at: datetime) -> None:
        """Note the redrive that sends on what was put aside, the first one of several."""
        self.redrive_id, self.released_at = redrive_id, at
        self.save(update_fields=["redrive_id", "released_at"])

    def end(self, *, state: HoldState, by: str, name: str, at: datetime) -> None:
        """Stop holding; what was put aside stays so."""
        self.state, self.ended_by, self.ended_by_name, self.ended_at = state, by, name, at
        self.save(update_fields=["state", "ended_by", "ended_by_name", "ended_at"])


def hold_incident_key(hold_id: object) -> str:
    """Return the key of the incidents of a hold."""
    return f"hold:{hold_id}"


def hold_of(incident: Incident) -> UUID | None:
    """Return the hold whose incident this is; None for every other incident."""
    return UUID(incident.key.partition(":")[2]) if incident.category == HOLD_CATEGORY else None


class TracebackText(models.Model):
    """One traceback, stored once however many occurrences have it; see ``Occurrence.traceback_text``."""

    digest = models.CharField(primary_key=True, max_length=64)
    text = models.TextField()


class Occurrence(models.Model):
    """One final failure of a letter; unique by delivery, so that a second report changes nothing (C2)."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    letter = models.ForeignKey(DeadLetter, on_delete=models.CASCADE, related_name="occurrences", db_index=False)
    tenant = models.CharField(max_length=100)
    source = models.CharField(max_length=100)
    delivery = models.CharField(max_length=300)
    task_id = models.CharField(max_length=255, db_default="")
    retries = models.IntegerField(db_default=0)
    repair_id = models.UUIDField(null=True)
    happened_at = models.DateTimeField()
    is_exact = models.BooleanField(db_default=True)
    recorded_at = models.DateTimeField()
    is_late = models.BooleanField(db_default=False)
    caught = models.CharField(max_length=30)
    outcome_class = models.CharField(max_length=12)
    outcome_reason = models.CharField(max_length=300, db_default="")
    error_class = models.CharField(max_length=255, db_default="")
    error_text = models.TextField(db_default="")
    traceback = models.ForeignKey(TracebackText, null=True, on_delete=models.PROTECT, related_name="+", db_index=False)
    worker = models.CharField(max_length=255, db_default="")
    release = models.CharField(max_length=100, db_default="")

    objects = OccurrenceQuerySet.as_manager()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["tenant", "source", "delivery"], name="ops_occurrence_delivery"),
        ]
        indexes = [
            models.Index(F("letter"), F("happened_at").desc(), F("id").desc(), name="ops_occurrence_of_letter"),
            models.Index(F("traceback"), name="ops_occurrence_traceback"),
        ]

    @property
    def traceback_text(self) -> str:
        """The whole redacted traceback, "" without one. A stored one that ends in the middle of its last line has been
        parted from the error's own words, which this row keeps.
        """
        if self.traceback is None:
            return ""
        text = self.traceback.text
        return text if text.endswith("\n") else f"{text}{self.error_text}\n"


class Attempt(models.Model):
    """One failed attempt that Celery retried by itself; kept for days, not for ever."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    tenant = models.CharField(max_length=100)
    source = models.CharField(max_length=100)
    task_id = models.CharField(max_length=255)
    retries = models.IntegerField()
    job_type = models.CharField(max_length=255)
    happened_at = models.DateTimeField()
    duration_ms = models.BigIntegerField(null=True)
    error_class = models.CharField(max_length=255, db_default="")
    error_text = models.TextField(db_default="")
    outcome_class = models.CharField(max_length=12)
    outcome_reason = models.CharField(max_length=300, db_default="")
    worker = models.CharField(max_length=255, db_default="")
    release = models.CharField(max_length=100, db_default="")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["tenant", "source", "task_id", "retries"], name="ops_attempt_delivery"),
        ]
        indexes = [models.Index(F("happened_at"), name="ops_attempt_age")]


class SealedMessage(models.Model):
    """The original message as the worker received it, compressed and sealed: what a retry sends."""

    letter = models.OneToOneField(DeadLetter, primary_key=True, on_delete=models.CASCADE, related_name="message")
    blob = models.BinaryField()
    key_id = models.CharField(max_length=64)
    digest = models.CharField(max_length=64, db_default="")
    stored_at = models.DateTimeField()


class WorkerNode(models.Model):
    """One worker's own report, written by its main process every ten seconds.

    ``reporting_since`` is the first of its reports since when none was missed: as long, the database was there for
    everybody to renew a lease.
    """

    id = models.CharField(primary_key=True, max_length=200)
    source = models.CharField(max_length=100)
    host = models.CharField(max_length=255)
    boot_id = models.CharField(max_length=64, db_default="")
    pid = models.IntegerField()
    pool = models.CharField(max_length=40, db_default="")
    concurrency = models.IntegerField(db_default=0)
    release = models.CharField(max_length=100, db_default="")
    celery_version = models.CharField(max_length=40, db_default="")
    settings_digest = models.CharField(max_length=64, db_default="")
    queues = models.TextField(db_default="[]")
    tasks = models.TextField(db_default="{}")
    journal_bytes = models.BigIntegerField(db_default=0)
    journal_oldest_seconds = models.FloatField(db_default=0)
    dropped_count = models.BigIntegerField(db_default=0)
    trouble = models.TextField(db_default="")
    started_at = models.DateTimeField()
    reporting_since = models.DateTimeField(null=True)
    seen_at = models.DateTimeField()
    captured_at = models.DateTimeField(null=True)
    stopped_at = models.DateTimeField(null=True)

    objects = WorkerNodeQuerySet.as_manager()

    class Meta:
        indexes = [models.Index(F("source"), F("seen_at").desc(), name="ops_node_seen")]

    def __str__(self) -> str:
        return self.id

    @property
    def waiting_words(self) -> str:
        """What waits in its journal, for people: what has waited for less than a second is on its way."""
        seconds = int(self.journal_oldest_seconds)
        return f"{self.journal_bytes:,} bytes, oldest {seconds} s" if seconds else "nothing"


class JournalFolder(models.Model):
    """How far one worker's journal has been counted; committed together with what it counts."""

    name = models.CharField(primary_key=True, max_length=200)
    source = models.CharField(max_length=100)
    offsets = models.TextField(db_default="{}")
    changed_at = models.DateTimeField()
    closed_at = models.DateTimeField(null=True)


class TaskMinute(models.Model):
    """What became of one task's deliveries in one minute.

    Over any span: received = succeeded + failed + retried + ignored + revoked + lost + returned + held + in flight.
    """

    id = models.BigAutoField(primary_key=True)
    tenant = models.CharField(max_length=100)
    source = models.CharField(max_length=100)
    job_type = models.CharField(max_length=255)
    minute = models.DateTimeField()
    received = models.BigIntegerField(db_default=0)
    succeeded = models.BigIntegerField(db_default=0)
    failed = models.BigIntegerField(db_default=0)
    retried = models.BigIntegerField(db_default=0)
    ignored = models.BigIntegerField(db_default=0)
    revoked = models.BigIntegerField(db_default=0)
    lost = models.BigIntegerField(db_default=0)
    returned = models.BigIntegerField(db_default=0)
    held = models.BigIntegerField(db_default=0)

    objects = TaskMinuteQuerySet.as_manager()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["source", "tenant", "job_type", "minute"], name="ops_task_minute"),
        ]
        indexes = [models.Index(F("minute"), name="ops_task_minute_age")]


class TaskPolicy(models.Model):
    """What is declared about foreign tasks whose name matches ``pattern``."""

    id = models.BigAutoField(primary_key=True)
    pattern = models.CharField(max_length=255, unique=True)
    team = models.CharField(max_length=100, blank=True, db_default="")
    severity = models.SmallIntegerField(choices=Severity.choices, db_default=Severity.HIGH)
    runbook = models.CharField(max_length=500, blank=True, db_default="")
    effects = models.CharField(max_length=12, choices=_choices(Effects), db_default=Effects.UNDECLARED)
    safe_errors = models.TextField(blank=True, db_default="")
    is_ignored = models.BooleanField(db_default=False)
    max_age_seconds = models.IntegerField(null=True, blank=True)
    grouping = models.CharField(max_length=10, choices=Grouping.choices, blank=True, db_default="")

    def __str__(self) -> str:
        return self.pattern

    def clean(self) -> None:
        """Refuse a policy that makes no sense, naming the field."""
        try:
            self.spec()
        except ValueError as error:
            raise ValidationError(str(error)) from error

    def spec(self) -> TaskPolicySpec:
        """Return the policy as the drainer reads it; raises ``ValueError`` naming the field that makes no sense."""
        return TaskPolicySpec(
            pattern=self.pattern,
            team=self.team,
            severity=self.get_severity_display(),
            runbook=self.runbook,
            effects=Effects(self.effects),
            safe_errors=tuple(self.safe_errors.split()),
            ignore=self.is_ignored,
            max_age_seconds=self.max_age_seconds,
            grouping=GroupingMode(self.grouping) if self.grouping else None,
        )


class SetAsideEntry(models.Model):
    """A journal entry that could not be recorded five times: kept sealed, shown, and replayable."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    tenant = models.CharField(max_length=100)
    source = models.CharField(max_length=100)
    node = models.CharField(max_length=200)
    job_type = models.CharField(max_length=255)
    delivery = models.CharField(max_length=300)
    reason = models.TextField()
    blob = models.BinaryField()
    set_aside_at = models.DateTimeField()
    applied_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["source", "node", "delivery"], name="ops_set_aside_delivery"),
        ]
