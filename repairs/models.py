"""Repairs: what was done about a letter, by whom, and how it ended."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q

from deadletters.models import DeadLetter
from incidents.models import Incident
from opsconsole.core.ids import new_id
from repairs.querysets import RepairActionQuerySet, RepairBatchQuerySet


class ActionType(models.TextChoices):
    RETRY_MESSAGE = "retry_message"  # send the original message again under a new task id
    RETRY_RECORD = "retry_authoritative_record"  # put the ledger's job and its record back to pending (A12)
    CLOSE_AS_DONE = "close_as_done"  # a person found that it had taken effect already
    DISCARD = "discard"  # give up and remove the message


RETRIES = (ActionType.RETRY_MESSAGE, ActionType.RETRY_RECORD)


class ActionState(models.TextChoices):
    PLANNED = "planned"  # committed; the relay has not sent it yet
    SENT = "sent"  # the broker has it; its job has not started
    STARTED = "started"  # the start guard let it begin; claim_retries and claim_holder say which attempt and where
    SUCCEEDED = "succeeded"  # its job has succeeded, or the decision took effect at once
    FAILED = "failed"  # its job has failed for good, or was lost
    CANCELLED = "cancelled"  # withdrawn before it started


LIVE = (ActionState.PLANNED, ActionState.SENT, ActionState.STARTED)


class ProviderAnswer(models.TextChoices):
    """What a person says about a job that may already have happened."""

    NONE = "", "not asked"
    DID_NOT_HAPPEN = "did_not_happen", "did not happen, run again"
    ALREADY_HAPPENED = "already_happened", "already happened, close as done"


class BatchState(models.TextChoices):
    PLANNING = "planning"  # the set is frozen; its letters are being planned page by page
    PLANNED = "planned"  # every letter of the set is planned or refused; results say which


class RepairBatch(models.Model):
    """One request to retry several letters of one incident: the frozen set, and what became of each.

    Its id stands in the request's receipt, so that the same request sent again goes on with the same set.
    """

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    tenant = models.CharField(max_length=100)
    source = models.CharField(max_length=100)
    incident = models.ForeignKey(Incident, on_delete=models.PROTECT, related_name="repair_batches")
    state = models.CharField(max_length=10, choices=BatchState.choices)
    letters = models.TextField()
    results = models.TextField(db_default="[]")
    planned_by = models.CharField(max_length=200)
    planned_by_name = models.CharField(max_length=200, db_default="")
    planned_at = models.DateTimeField()
    finished_at = models.DateTimeField(null=True)

    objects = RepairBatchQuerySet.as_manager()


class RepairAction(models.Model):
    """One change made to one letter. At most one is live per letter, and the database says so."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    tenant = models.CharField(max_length=100)
    source = models.CharField(max_length=100)
    actor_type = models.CharField(max_length=100, db_default="")
    actor_id = models.CharField(max_length=200, db_default="")
    action_type = models.CharField(max_length=30, choices=ActionType.choices)
    # Without the index of a foreign key: one below begins with it.
    letter = models.ForeignKey(DeadLetter, on_delete=models.PROTECT, related_name="repairs", db_index=False)
    incident = models.ForeignKey(Incident, on_delete=models.PROTECT, related_name="repairs", db_index=False)
    batch = models.ForeignKey(RepairBatch, null=True, on_delete=models.PROTECT, related_name="repairs")
    previous = models.ForeignKey("self", null=True, on_delete=models.PROTECT, related_name="+")
    operation_key = models.CharField(max_length=400, unique=True)
    state = models.CharField(max_length=10, choices=ActionState.choices)
    before = models.TextField(db_default="{}")
    after = models.TextField(db_default="{}")
    planned_by = models.CharField(max_length=200)
    planned_by_name = models.CharField(max_length=200, db_default="")
    planned_at = models.DateTimeField()
    reason = models.CharField(max_length=500, db_default="")
    reference = models.CharField(max_length=300, db_default="")
    provider_answer = models.CharField(max_length=20, choices=ProviderAnswer.choices, db_default="")
    job_type = models.CharField(max_length=255, db_default="")
    queue = models.CharField(max_length=200, db_default="")
    new_task_id = models.CharField(max_length=255, db_default="")
    due_at = models.DateTimeField()
    lease_owner = models.CharField(max_length=200, db_default="")
    lease_expires_at = models.DateTimeField(null=True)
    send_count = models.IntegerField(db_default=0)
    send_error = models.CharField(max_length=300, db_default="")
    sent_at = models.DateTimeField(null=True)
    claim_retries = models.IntegerField(db_default=-1)
    claim_holder = models.CharField(max_length=300, db_default="")
    started_at = models.DateTimeField(null=True)
    answer_due_at = models.DateTimeField(null=True)
    settled_at = models.DateTimeField(null=True)
    error_code = models.CharField(max_length=64, db_default="")
    error_text = models.TextField(db_default="")

    objects = RepairActionQuerySet.as_manager()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["letter"], condition=Q(state__in=LIVE), name="ops_repair_one_live"),
            models.CheckConstraint(condition=Q(state__in=ActionState.values), name="ops_repair_state"),
            models.CheckConstraint(
                condition=(Q(state__in=LIVE) & Q(settled_at__isnull=True))
                | (~Q(state__in=LIVE) & Q(settled_at__isnull=False)),
                name="ops_repair_settled_at",
            ),
        ]
        indexes = [
            models.Index(
                F("source"), F("due_at"), F("id"), condition=Q(state=ActionState.PLANNED), name="ops_repair_due"
            ),
            models.Index(F("letter"), F("id").desc(), name="ops_repair_of_letter"),
            models.Index(F("incident"), F("id").desc(), name="ops_repair_of_incident"),
            models.Index(F("tenant"), F("id").desc(), name="ops_repair_of_tenant"),
            models.Index(F("state"), F("id").desc(), name="ops_repair_of_state"),
            models.Index(
                F("answer_due_at"), F("id"), condition=Q(state__in=("sent", "started")), name="ops_repair_unanswered"
            ),
            models.Index(F("claim_holder"), F("id"), condition=Q(state="started"), name="ops_repair_holder"),
        ]

    def __str__(self) -> str:
        return f"{self.action_type} of {self.letter_id} by {self.planned_by_name or self.planned_by}"
