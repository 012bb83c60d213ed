"""Reports, the review queues they wait in, and what routes them there."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q

from opsconsole.core.ids import new_id
from opsconsole.jobs.querysets import TenantQuerySet


class QueueStatus(models.TextChoices):
    ACTIVE = "active"  # takes reports
    RETIRED = "retired"  # takes none any more


class Management(models.TextChoices):
    HUMAN = "human"  # people decide
    AI = "ai"  # an endpoint decides, and people what it cannot


class ReportState(models.TextChoices):
    RECEIVED = "received"  # not routed yet
    AI_REVIEW = "ai_review"  # waits for the endpoint of its queue
    HUMAN_REVIEW = "human_review"  # waits for a person
    DECIDED = "decided"  # somebody or something has decided


class RoutingStatus(models.TextChoices):
    PENDING = "pending"  # its job has not routed it yet
    COMPLETE = "complete"  # it lies in a queue
    FAILED = "failed"  # its job has died; routing_error_code says how


class AiConfig(models.Model):
    """How an endpoint is asked about reports, and who gets what it cannot decide."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    tenant = models.CharField(max_length=100)
    name = models.CharField(max_length=100)
    endpoint = models.CharField(max_length=500)
    timeout_seconds = models.IntegerField(db_default=10)
    fallback_queue = models.ForeignKey("ReviewQueue", null=True, on_delete=models.SET_NULL, related_name="+")

    objects = TenantQuerySet.as_manager()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["tenant", "name"], name="ops_ai_config_name")]


class ReviewQueue(models.Model):
    """A queue in which reports wait for people or for an endpoint."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    tenant = models.CharField(max_length=100)
    name = models.CharField(max_length=100)
    purpose = models.CharField(max_length=40, db_default="reports")
    status = models.CharField(max_length=10, choices=QueueStatus.choices, db_default=QueueStatus.ACTIVE)
    management = models.CharField(max_length=10, choices=Management.choices, db_default=Management.HUMAN)
    ai_config = models.ForeignKey(AiConfig, null=True, on_delete=models.PROTECT, related_name="+")
    position = models.IntegerField(db_default=0)

    objects = TenantQuerySet.as_manager()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["tenant", "name"], name="ops_review_queue_name")]

    def __str__(self) -> str:
        return self.name


class RoutingRule(models.Model):
    """The first rule by position that matches a report names its queue; "" matches everything."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    tenant = models.CharField(max_length=100)
    position = models.IntegerField(db_default=0)
    category = models.CharField(max_length=60, blank=True, db_default="")
    contains = models.CharField(max_length=200, blank=True, db_default="")
    queue = models.ForeignKey(ReviewQueue, on_delete=models.PROTECT, related_name="rules")
    priority = models.IntegerField(db_default=50)

    objects = TenantQuerySet.as_manager()

    class Meta:
        indexes = [models.Index(F("tenant"), F("position"), F("id"), name="ops_rule_order")]


class Report(models.Model):
    """One report that somebody has sent in."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    tenant = models.CharField(max_length=100)
    reference = models.CharField(max_length=60)
    category = models.CharField(max_length=60, db_default="")
    subject = models.CharField(max_length=200, db_default="")
    body = models.TextField(db_default="")
    state = models.CharField(max_length=14, choices=ReportState.choices, db_default=ReportState.RECEIVED)
    queue = models.ForeignKey(ReviewQueue, null=True, on_delete=models.PROTECT, related_name="reports")
    priority = models.IntegerField(db_default=50)
    routing_status = models.CharField(max_length=10, choices=RoutingStatus.choices, db_default=RoutingStatus.PENDING)
    routing_error_code = models.CharField(max_length=64, db_default="")
    created_at = models.DateTimeField()
    updated_at = models.DateTimeField()

    objects = TenantQuerySet.as_manager()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["tenant", "reference"], name="ops_report_reference"),
            models.CheckConstraint(condition=Q(state__in=ReportState.values), name="ops_report_state"),
        ]

    def __str__(self) -> str:
        return self.reference


class ReportEvent(models.Model):
    """One change of a report's state, with who or what made it."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    report = models.ForeignKey(Report, on_delete=models.CASCADE, related_name="events")
    job_id = models.UUIDField(null=True)
    from_state = models.CharField(max_length=14)
    to_state = models.CharField(max_length=14)
    reason_code = models.CharField(max_length=64)
    actor_type = models.CharField(max_length=40)
    actor_id = models.CharField(max_length=100)
    at = models.DateTimeField()


class AiDecision(models.Model):
    """What the endpoint said about a report; one a job, so that a job that ran twice has decided once."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    report = models.ForeignKey(Report, on_delete=models.CASCADE, related_name="decisions")
    config = models.ForeignKey(AiConfig, on_delete=models.PROTECT, related_name="+")
    job_id = models.UUIDField(unique=True)
    decision = models.CharField(max_length=60)
    explanation = models.TextField(db_default="")
    at = models.DateTimeField()
