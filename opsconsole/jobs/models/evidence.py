"""Evidence: what a report points to, fetched once and kept with its hash."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q

from opsconsole.core.ids import new_id
from opsconsole.jobs.models.reports import Report
from opsconsole.jobs.querysets import TenantQuerySet


class EvidenceState(models.TextChoices):
    PENDING = "pending"  # to be fetched at next_attempt_at
    FETCHING = "fetching"  # a job is at it; updated_at is renewed while it is
    AVAILABLE = "available"  # content, size and sha256 are there
    UNAVAILABLE = "unavailable"  # the server has said that there is none
    FAILED = "failed"  # its job has died


class EvidenceRequest(models.Model):
    """One URL whose content belongs to a report."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    tenant = models.CharField(max_length=100)
    report = models.ForeignKey(Report, on_delete=models.CASCADE, related_name="evidence")
    url = models.CharField(max_length=2000)
    state = models.CharField(max_length=12, choices=EvidenceState.choices, db_default=EvidenceState.PENDING)
    attempt_count = models.IntegerField(db_default=0)
    next_attempt_at = models.DateTimeField(null=True)
    last_error_code = models.CharField(max_length=64, db_default="")
    content_type = models.CharField(max_length=100, db_default="")
    size = models.BigIntegerField(null=True)
    sha256 = models.CharField(max_length=64, db_default="")
    content = models.BinaryField(null=True)
    fetched_at = models.DateTimeField(null=True)
    created_at = models.DateTimeField()
    updated_at = models.DateTimeField()

    objects = TenantQuerySet.as_manager()

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(state__in=EvidenceState.values), name="ops_evidence_state"),
        ]
        indexes = [
            models.Index(
                F("updated_at"), F("id"), condition=Q(state=EvidenceState.FETCHING), name="ops_evidence_fetching"
            ),
            models.Index(
                F("tenant"),
                F("state"),
                F("updated_at"),
                condition=~Q(state=EvidenceState.AVAILABLE),
                name="ops_evidence_open",
            ),
        ]
