"""What is sent out: actions, notifications, e-mails, and proposals to be applied elsewhere."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Coalesce

from opsconsole.core.ids import new_id
from opsconsole.jobs.models.reports import Report
from opsconsole.jobs.models.totals import LAST_EMAIL_ATTEMPT
from opsconsole.jobs.models.workflows import WorkflowRun
from opsconsole.jobs.querysets import TenantQuerySet


class DeliveryState(models.TextChoices):
    PENDING = "pending"  # due at next_attempt_at
    DELIVERING = "delivering"  # a job is sending it, until lease_expires_at
    RETRYING = "retrying"  # an attempt failed; the next is due at next_attempt_at
    DELIVERED = "delivered"  # the receiver has it
    FAILED = "failed"  # for good: its job has died


class MessageState(models.TextChoices):
    PENDING = "pending"  # not known to have arrived
    DELIVERED = "delivered"
    FAILED = "failed"


class ProposalState(models.TextChoices):
    QUEUED = "queued"  # due at next_attempt_at
    APPLYING = "applying"  # a job is applying it, until lease_expires_at
    RETRYING = "retrying"  # an attempt failed; the next is due at next_attempt_at
    APPLIED = "applied"  # it has taken effect
    FAILED = "failed"  # for good: its job has died


class Delivery(models.Model):
    """What every outgoing record has."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    tenant = models.CharField(max_length=100)
    attempt_count = models.IntegerField(db_default=0)
    next_attempt_at = models.DateTimeField(null=True)
    lease_expires_at = models.DateTimeField(null=True)
    last_error_code = models.CharField(max_length=64, db_default="")
    created_at = models.DateTimeField()
    updated_at = models.DateTimeField()

    objects = TenantQuerySet.as_manager()

    class Meta:
        abstract = True


DUE_DELIVERIES = (DeliveryState.PENDING, DeliveryState.RETRYING)
FAILED = Q(state=DeliveryState.FAILED)
FAILED_EMAIL = FAILED | Q(state=DeliveryState.RETRYING, attempt_count__gte=LAST_EMAIL_ATTEMPT)


def _due_deliveries(name: str) -> models.Index:
    """The index of what is due first; what has no time yet is due since it was made."""
    due_at = Coalesce("next_attempt_at", "created_at")
    return models.Index(F("tenant"), F("state"), due_at, condition=Q(state__in=DUE_DELIVERIES), name=name)


def _newest_failed(name: str, condition: Q = FAILED) -> list[models.Index]:
    """The indexes of the newest failed ones, of all tenants and of one: there are few failed ones to keep in them."""
    newest = (F("updated_at").desc(), F("id").desc())
    return [
        models.Index(*newest, condition=condition, name=name),
        models.Index(F("tenant"), *newest, condition=condition, name=f"{name}_of"),
    ]


class ActionDelivery(Delivery):
    """A decision's action, as a signed call to the application it concerns."""

    report = models.ForeignKey(Report, on_delete=models.CASCADE, related_name="actions")
    action = models.CharField(max_length=60)
    endpoint = models.CharField(max_length=500)
    payload = models.TextField(db_default="{}")
    state = models.CharField(max_length=10, choices=DeliveryState.choices, db_default=DeliveryState.PENDING)

    class Meta:
        constraints = [models.CheckConstraint(condition=Q(state__in=DeliveryState.values), name="ops_action_state")]
        indexes = [_due_deliveries("ops_action_due"), *_newest_failed("ops_action_failed")]


class CaseMessage(models.Model):
    """Something said to somebody about a report."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    tenant = models.CharField(max_length=100)
    report = models.ForeignKey(Report, on_delete=models.CASCADE, related_name="messages")
    body = models.TextField(db_default="")
    delivery_state = models.CharField(max_length=10, choices=MessageState.choices, db_default=MessageState.PENDING)
    created_at = models.DateTimeField()

    objects = TenantQuerySet.as_manager()


class Notice(models.Model):
    """A notice about a report; it may carry a message."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    tenant = models.CharField(max_length=100)
    report = models.ForeignKey(Report, on_delete=models.CASCADE, related_name="notices")
    message = models.ForeignKey(CaseMessage, null=True, on_delete=models.SET_NULL, related_name="notices")
    delivery_state = models.CharField(max_length=10, choices=MessageState.choices, db_default=MessageState.PENDING)
    updated_at = models.DateTimeField()

    objects = TenantQuerySet.as_manager()


class NotificationDelivery(Delivery):
    """A notice, as a signed call."""

    notice = models.ForeignKey(Notice, on_delete=models.CASCADE, related_name="deliveries")
    endpoint = models.CharField(max_length=500)
    payload = models.TextField(db_default="{}")
    state = models.CharField(max_length=10, choices=DeliveryState.choices, db_default=DeliveryState.PENDING)

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(state__in=DeliveryState.values), name="ops_notification_state"),
        ]
        indexes = [_due_deliveries("ops_notification_due"), *_newest_failed("ops_notification_failed")]


class EmailDelivery(Delivery):
    """A message, as an e-mail."""

    message = models.ForeignKey(CaseMessage, on_delete=models.CASCADE, related_name="emails")
    to_address = models.CharField(max_length=254)
    subject = models.CharField(max_length=200, db_default="")
    state = models.CharField(max_length=10, choices=DeliveryState.choices, db_default=DeliveryState.PENDING)

    class Meta:
        constraints = [models.CheckConstraint(condition=Q(state__in=DeliveryState.values), name="ops_email_state")]
        indexes = [
            _due_deliveries("ops_email_due"),
            *_newest_failed("ops_email_failed", FAILED_EMAIL),
        ]


class ActionProposal(Delivery):
    """An action that a run proposes, to be applied through the application's own interface."""

    report = models.ForeignKey(Report, on_delete=models.CASCADE, related_name="proposals")
    run = models.ForeignKey(WorkflowRun, null=True, on_delete=models.SET_NULL, related_name="proposals")
    action = models.CharField(max_length=60)
    endpoint = models.CharField(max_length=500)
    payload = models.TextField(db_default="{}")
    state = models.CharField(max_length=10, choices=ProposalState.choices, db_default=ProposalState.QUEUED)
    applied_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(state__in=ProposalState.values), name="ops_proposal_state"),
            models.CheckConstraint(
                condition=(Q(state=ProposalState.APPLIED) & Q(applied_at__isnull=False))
                | (~Q(state=ProposalState.APPLIED) & Q(applied_at__isnull=True)),
                name="ops_proposal_applied_at",
            ),
        ]
