"""What on-call works on: one incident per cause, its episodes, and its true counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db import models
from django.db.models import F, Q

from grants.resources import Resource
from incidents.querysets import UNSTAMPED, IncidentQuerySet
from opsconsole.core.ids import new_id

if TYPE_CHECKING:
    from datetime import datetime


class Severity(models.IntegerChoices):
    """A rank, so that "worst first, then newest" is one descending index (facts: a CASE costs a scan)."""

    LOW = 10, "low"
    MEDIUM = 20, "medium"
    HIGH = 30, "high"
    CRITICAL = 40, "critical"

    @classmethod
    def named(cls, name: str) -> Severity:
        """Return the severity of that name; raises ``ValueError`` for any other."""
        return next((member for member in cls if member.label == name), None) or cls(name)


class IncidentState(models.TextChoices):
    OPEN = "open"  # nobody has it; at least one letter is unresolved
    ACKNOWLEDGED = "acknowledged"  # somebody has it; at least one letter is unresolved
    RESOLVED = "resolved"  # no letter is unresolved; resolved_at, code and summary say how it ended


HOLD_CATEGORY = "hold"
"""Of an incident whose jobs have not failed: a hold has put them aside. Its key is ``hold:`` and the hold's id."""
UNRESOLVED_STATES = (IncidentState.OPEN, IncidentState.ACKNOWLEDGED)


class Grouping(models.TextChoices):
    CAUSE = "cause"  # all letters with one cause are one incident
    JOB = "job"  # one incident per letter, as source system A has it


class IncidentNumber(models.Model):
    """A row is one drawn incident number: portable, and no two recorders wait for each other over it."""

    id = models.BigAutoField(primary_key=True)


class Incident(models.Model):
    """One cause of failed jobs of one tenant in one source.

    ``unresolved_count`` is kept, not counted: it changes in the transaction that changes a letter, under this row's
    lock. ``version`` changes with every change a person could see, and is the ETag.
    """

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    number = models.BigIntegerField(unique=True)
    tenant = models.CharField(max_length=100)
    source = models.CharField(max_length=100)
    key = models.CharField(max_length=100)
    grouping = models.CharField(max_length=10, choices=Grouping.choices, db_default=Grouping.CAUSE)
    severity = models.SmallIntegerField(choices=Severity.choices, db_default=Severity.HIGH)
    category = models.CharField(max_length=60, db_default="queue_dead_letter")
    state = models.CharField(max_length=12, choices=IncidentState.choices, db_default=IncidentState.OPEN)
    title = models.CharField(max_length=300)
    summary = models.TextField(db_default="")
    job_type = models.CharField(max_length=255, db_default="")
    entity_type = models.CharField(max_length=40, db_default="")
    entity_id = models.CharField(max_length=200, db_default="")
    metadata = models.TextField(db_default="{}")

    occurrence_count = models.BigIntegerField(db_default=0)
    letter_count = models.BigIntegerField(db_default=0)
    unresolved_count = models.BigIntegerField(db_default=0)
    late_count = models.BigIntegerField(db_default=0)
    first_seen_at = models.DateTimeField()
    last_seen_at = models.DateTimeField()

    episode = models.IntegerField(db_default=1)
    opened_at = models.DateTimeField()
    reopened_reason = models.CharField(max_length=60, db_default="")

    acknowledged_by = models.CharField(max_length=200, db_default="")
    acknowledged_by_name = models.CharField(max_length=200, db_default="")
    acknowledged_at = models.DateTimeField(null=True)
    acknowledged_occurrences = models.BigIntegerField(null=True)
    acknowledged_until = models.BigIntegerField(null=True)

    resolved_by = models.CharField(max_length=200, db_default="")
    resolved_by_name = models.CharField(max_length=200, db_default="")
    resolved_at = models.DateTimeField(null=True)
    resolution_code = models.CharField(max_length=64, db_default="")
    resolution_summary = models.TextField(db_default="")
    stamped_episode = models.IntegerField(db_default=0)

    version = models.BigIntegerField(db_default=1)

    objects = IncidentQuerySet.as_manager()

    if TYPE_CHECKING:
        locked_at: datetime

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["tenant", "source", "key"], name="ops_incident_key"),
            models.CheckConstraint(condition=~Q(tenant="*") & ~Q(tenant=""), name="ops_incident_tenant"),
            models.CheckConstraint(condition=Q(state__in=IncidentState.values), name="ops_incident_state"),
            models.CheckConstraint(
                condition=(Q(state=IncidentState.RESOLVED) & Q(resolved_at__isnull=False))
                | (~Q(state=IncidentState.RESOLVED) & Q(resolved_at__isnull=True)),
                name="ops_incident_resolved_at",
            ),
            models.CheckConstraint(
                condition=(Q(state=IncidentState.RESOLVED) & Q(unresolved_count=0))
                | (~Q(state=IncidentState.RESOLVED) & Q(unresolved_count__gte=0)),
                name="ops_incident_hides_no_letter",
            ),
            models.CheckConstraint(
                condition=Q(state=IncidentState.ACKNOWLEDGED, acknowledged_at__isnull=False)
                | ~Q(state=IncidentState.ACKNOWLEDGED),
                name="ops_incident_acknowledged_at",
            ),
        ]
        indexes = [
            models.Index(
                F("state"), F("severity").desc(), F("last_seen_at").desc(), F("id").desc(), name="ops_incident_worst"
            ),
            models.Index(F("severity").desc(), F("last_seen_at").desc(), F("id").desc(), name="ops_incident_all"),
            # What is not closed, worst first: most of what there ever was is closed, and the severe before the rest.
            models.Index(
                F("severity").desc(),
                F("last_seen_at").desc(),
                F("id").desc(),
                name="ops_incident_unresolved",
                condition=~Q(state=IncidentState.RESOLVED),
            ),
            models.Index(
                F("tenant"),
                F("state"),
                F("severity").desc(),
                F("last_seen_at").desc(),
                F("id").desc(),
                name="ops_incident_tenant_worst",
            ),
            # The other tabs of the list that are a few rows of many, and the one filter beside them that is no state.
            models.Index(
                F("severity").desc(),
                F("last_seen_at").desc(),
                F("id").desc(),
                condition=Q(state=IncidentState.OPEN) & ~Q(reopened_reason=""),
                name="ops_incident_came_back",
            ),
            models.Index(
                F("acknowledged_by"),
                F("severity").desc(),
                F("last_seen_at").desc(),
                F("id").desc(),
                condition=Q(state=IncidentState.ACKNOWLEDGED),
                name="ops_incident_held",
            ),
            # What has opened lately, which a page asks for that was made a moment ago.
            models.Index(F("opened_at").desc(), name="ops_incident_opened"),
            models.Index(
                F("job_type"),
                F("severity").desc(),
                F("last_seen_at").desc(),
                F("id").desc(),
                name="ops_incident_of_task",
            ),
            # Of each hold one for each tenant and source: a few rows of all.
            models.Index(F("key"), condition=Q(category=HOLD_CATEGORY), name="ops_incident_of_hold"),
            # What a sweep looks for: hardly any row at a time.
            models.Index(F("id"), condition=UNSTAMPED, name="ops_incident_unstamped"),
        ]

    def __str__(self) -> str:
        return f"#{self.number} {self.title}"

    @property
    def etag(self) -> str:
        """The strong entity tag of this version (RFC 9110)."""
        return f'"{self.id}:{self.version}"'

    @property
    def resource(self) -> Resource:
        """What a request that touches this incident touches."""
        return Resource(tenant=self.tenant, target_type="incident", target_id=str(self.id))

    @property
    def is_resolved(self) -> bool:
        return self.state == IncidentState.RESOLVED

    @property
    def since_acknowledged(self) -> int | None:
        """Occurrences since somebody took it, or ``None`` while nobody has it."""
        if self.acknowledged_occurrences is None:
            return None
        return self.occurrence_count - self.acknowledged_occurrences

    # What recording and settling do to a locked row. They assign only: ``IncidentQuerySet.save_recorded`` writes all.

    def note_occurrence(self, happened_at: datetime, *, is_late: bool = False) -> None:
        """Count one new occurrence; a late one is counted and changes nothing else (C3)."""
        self.occurrence_count += 1
        if is_late:
            self.late_count += 1
            return
        self.first_seen_at = min(self.first_seen_at, happened_at)
        self.last_seen_at = max(self.last_seen_at, happened_at)

    def reopen(self, reason: str, at: datetime) -> None:
        """Begin the next episode; nothing of the last one is inherited."""
        self.state = IncidentState.OPEN
        self.episode += 1
        self.opened_at = at
        self.reopened_reason = reason
        self._clear_acknowledgement()
        self.resolved_by = self.resolved_by_name = self.resolution_code = self.resolution_summary = ""
        self.resolved_at = None

    def break_acknowledgement(self, reason: str) -> str:
        """Open an acknowledged incident again: a repair failed, severity rose, or the chosen count was passed (C1).

        Returns the name of who had it, which the row forgets.
        """
        holder = self.acknowledged_by_name
        self.state = IncidentState.OPEN
        self.reopened_reason = reason
        self._clear_acknowledgement()
        return holder

    def release(self) -> str:
        """Open an acknowledged incident again because its holder lets it go; returns the name of who had it."""
        holder = self.acknowledged_by_name
        self.state = IncidentState.OPEN
        self._clear_acknowledgement()
        return holder

    def take(self, *, by: str, name: str, at: datetime, until_occurrences: int | None = None) -> None:
        """Give it a holder. The first time of an acknowledgement stays (A10)."""
        self.state = IncidentState.ACKNOWLEDGED
        self.acknowledged_by = by
        self.acknowledged_by_name = name
        if self.acknowledged_at is None:
            self.acknowledged_at = at
            self.acknowledged_occurrences = self.occurrence_count
        self.acknowledged_until = until_occurrences

    def close(self, *, by: str, name: str, at: datetime, code: str, summary: str) -> EpisodeEnd:
        """End the episode; returns its record, not yet saved."""
        unrepaired = self.unresolved_count
        self.state = IncidentState.RESOLVED
        self.unresolved_count = 0
        self.resolved_by = by
        self.resolved_by_name = name
        self.resolved_at = at
        self.resolution_code = code
        self.resolution_summary = summary
        return EpisodeEnd(
            incident=self,
            episode=self.episode,
            opened_at=self.opened_at,
            resolved_at=at,
            resolved_by=by,
            resolved_by_name=name,
            resolution_code=code,
            resolution_summary=summary,
            unrepaired_count=unrepaired,
        )

    def _clear_acknowledgement(self) -> None:
        self.acknowledged_by = self.acknowledged_by_name = ""
        self.acknowledged_at = None
        self.acknowledged_occurrences = self.acknowledged_until = None


class EpisodeEnd(models.Model):
    """How one episode of an incident ended; a reopened incident keeps these readable (C7)."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    incident = models.ForeignKey(Incident, on_delete=models.CASCADE, related_name="episode_ends")
    episode = models.IntegerField()
    opened_at = models.DateTimeField()
    resolved_at = models.DateTimeField()
    resolved_by = models.CharField(max_length=200)
    resolved_by_name = models.CharField(max_length=200, db_default="")
    resolution_code = models.CharField(max_length=64)
    resolution_summary = models.TextField(db_default="")
    unrepaired_count = models.BigIntegerField(db_default=0)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["incident", "episode"], name="ops_episode_end"),
        ]
