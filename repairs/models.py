"""Repairs: what was done about a letter, by whom, and how it ended."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q

from deadletters.models import DeadLetter
from grants.resources import ANY, Resource
from incidents.models import Incident
from opsconsole.core.ids import new_id
from repairs.querysets import (
    ReconciliationRunQuerySet,
    RepairActionQuerySet,
    RepairBatchQuerySet,
    SweepRepairQuerySet,
)


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


class RunState(models.TextChoices):
    RUNNING = "running"  # its holder is at it, and says so with every page
    SUCCEEDED = "succeeded"  # looked at everything it was to look at
    PARTIAL = "partial"  # an error ended a part of it, but something was repaired
    FAILED = "failed"  # an error, and nothing was repaired; or it was killed


ENDED_WELL = (RunState.SUCCEEDED, RunState.PARTIAL)


class ReconciliationRun(models.Model):
    """One sweep and its counts (A13). It spans tenants, so it has none; what it changed of each stands in the repairs.

    ``heartbeat_at`` and the counts are written in the transaction of each page, so that they are true even of a run
    that was killed. ``cursor`` is where a sweep that goes round looks next. ``waited_since`` is set on a run that
    judged no lease, because nobody could have renewed one: see ``repairs.reconciliation.grace``.
    """

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    kind = models.CharField(max_length=64)
    state = models.CharField(max_length=10, choices=RunState.choices, db_default=RunState.RUNNING)
    scanned_count = models.BigIntegerField(db_default=0)
    repaired_count = models.BigIntegerField(db_default=0)
    skipped_count = models.BigIntegerField(db_default=0)
    incident_count = models.BigIntegerField(db_default=0)
    row_limit = models.IntegerField(null=True)
    error_code = models.CharField(max_length=64, db_default="")
    error_text = models.TextField(db_default="")
    started_by = models.CharField(max_length=200)
    started_by_name = models.CharField(max_length=200, db_default="")
    started_at = models.DateTimeField()
    heartbeat_at = models.DateTimeField()
    finished_at = models.DateTimeField(null=True)
    waited_since = models.DateTimeField(null=True)
    cursor = models.CharField(max_length=200, db_default="")

    objects = ReconciliationRunQuerySet.as_manager()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["kind"], condition=Q(state=RunState.RUNNING), name="ops_run_one_of_kind"),
            models.CheckConstraint(condition=Q(state__in=RunState.values), name="ops_reconciliation_state"),
            models.CheckConstraint(
                condition=(Q(state=RunState.RUNNING) & Q(finished_at__isnull=True))
                | (~Q(state=RunState.RUNNING) & Q(finished_at__isnull=False)),
                name="ops_reconciliation_finished_at",
            ),
            models.CheckConstraint(
                condition=Q(scanned_count__gte=0, repaired_count__gte=0, skipped_count__gte=0, incident_count__gte=0),
                name="ops_reconciliation_counts",
            ),
        ]
        indexes = [
            models.Index(F("kind"), F("id").desc(), name="ops_reconciliation_of_kind"),
            models.Index(F("state"), F("id").desc(), name="ops_reconciliation_of_state"),
            models.Index(F("finished_at"), F("id"), name="ops_reconciliation_finished"),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.started_at:%Y-%m-%d %H:%M:%S}"

    @property
    def resource(self) -> Resource:
        """What a request that touches this run touches: every tenant."""
        return Resource(tenant=ANY, target_type="reconciliation_run", target_id=str(self.id))


class SweepActionType(models.TextChoices):
    RELEASE_STALE_LEASE = "release_stale_lease"  # a claim whose holder is gone
    RECORD_LOST_JOB = "record_lost_job"  # the same, of a job that may have happened: it became a failed job
    REQUEUE_UNDELIVERED = "requeue_undelivered"  # a job that was sent and that nobody claimed
    RELEASE_SEND_LEASE = "release_send_lease"  # a planned repair whose sender is gone
    GIVE_UP_REPAIR = "give_up_repair"  # a repair whose worker never came back
    CORRECT_COUNT = "correct_count"  # an incident's kept count that was not the truth
    CORRECT_TOTAL = "correct_total"  # a stream's kept total that was not the truth


class SweepRepair(models.Model):
    """One change that a sweep made to one record, with before and after (A14).

    A table of its own, because a ``RepairAction`` is always about a letter and lives through states, and this is
    neither: it is written once, with what it did. The operation key is made of the record and of the marker of the
    lease that was found stale, so that the same stale lease is never repaired twice.
    """

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    # Not checked by the database, which would look up the one run once for every row: only retention removes runs, and
    # their repairs before them.
    run = models.ForeignKey(
        ReconciliationRun, on_delete=models.PROTECT, related_name="repairs", db_index=False, db_constraint=False
    )
    tenant = models.CharField(max_length=100)
    action_type = models.CharField(max_length=30, choices=SweepActionType.choices)
    entity_type = models.CharField(max_length=60)
    entity_id = models.CharField(max_length=200)
    operation_key = models.CharField(max_length=400)
    before = models.TextField(db_default="{}")
    after = models.TextField(db_default="{}")
    planned_by = models.CharField(max_length=200)
    applied_at = models.DateTimeField()

    objects = SweepRepairQuerySet.as_manager()

    class Meta:
        constraints = [
            # Not of the field, which on PostgreSQL would have a second index for patterns: each costs every row.
            models.UniqueConstraint(fields=["operation_key"], name="ops_sweep_repair_operation"),
            models.CheckConstraint(condition=~Q(tenant="*") & ~Q(tenant=""), name="ops_sweep_repair_tenant"),
        ]
        indexes = [models.Index(F("run"), F("id").desc(), name="ops_sweep_repair_of_run")]

    def __str__(self) -> str:
        return f"{self.action_type} of {self.entity_type} {self.entity_id}"


class SeededEntry(models.Model):
    """A schedule entry that was made once: who deletes or changes it afterwards is not overruled by a migration."""

    name = models.CharField(primary_key=True, max_length=200)
    created_at = models.DateTimeField()
