"""The ledger: one row per job, written in the transaction that wants the work done."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q

from grants.resources import Resource
from opsconsole.core.ids import new_id
from opsconsole.jobs.querysets import JobQuerySet


class JobState(models.TextChoices):
    PENDING = "pending", "pending"  # due at available_at; the dispatcher has not taken it
    ENQUEUED = "enqueued", "enqueued"  # leased by a dispatcher and sent, or about to be; no worker has claimed it
    RUNNING = "running", "running"  # a worker has claimed it with the lease's token, and renews the lease
    RETRYING = "retrying", "retrying"  # its last attempt failed; the next is due at available_at
    SUCCEEDED = "succeeded", "succeeded"  # its work is done; finished_at says when
    DEAD = "dead", "dead"  # its last attempt failed for good; a dead letter tells how
    CANCELLED = "cancelled", "cancelled"  # withdrawn before it ran


DUE = (JobState.PENDING, JobState.RETRYING)
LEASED = (JobState.ENQUEUED, JobState.RUNNING)
UNFINISHED = (*DUE, *LEASED)


class Job(models.Model):
    """One unit of background work, as its ledger has it: what is to be done, how often it was tried, who has it.

    ``lease_token`` is the Celery task id of the newest dispatch: whoever writes with another one is late.
    ``record_type`` and ``record_id`` name the record the job works on, ``report_id`` the report that it belongs to, if
    any. ``outcome_class`` is the worst that is known of its attempts so far, "" while nothing speaks against a retry.
    """

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    tenant = models.CharField(max_length=100)
    source = models.CharField(max_length=100)
    actor_type = models.CharField(max_length=100, db_default="")
    actor_id = models.CharField(max_length=200, db_default="")
    kind = models.CharField(max_length=64)
    payload = models.TextField(db_default="{}")
    payload_version = models.IntegerField(db_default=1)
    record_type = models.CharField(max_length=60, db_default="")
    record_id = models.CharField(max_length=200, db_default="")
    report_id = models.UUIDField(null=True)
    key = models.CharField(max_length=200, db_default="")
    queue = models.CharField(max_length=200)
    state = models.CharField(max_length=10, choices=JobState.choices, db_default=JobState.PENDING)
    attempts = models.IntegerField(db_default=0)
    max_attempts = models.IntegerField(db_default=1)
    dispatches = models.IntegerField(db_default=0)
    available_at = models.DateTimeField()
    lease_token = models.CharField(max_length=100, db_default="")
    lease_owner = models.CharField(max_length=200, db_default="")
    lease_expires_at = models.DateTimeField(null=True)
    outcome_class = models.CharField(max_length=12, db_default="")
    outcome_reason = models.CharField(max_length=300, db_default="")
    last_error_code = models.CharField(max_length=64, db_default="")
    last_error_text = models.CharField(max_length=500, db_default="")
    repair_id = models.UUIDField(null=True)
    created_at = models.DateTimeField()
    updated_at = models.DateTimeField()
    finished_at = models.DateTimeField(null=True)

    objects = JobQuerySet.as_manager()

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(state__in=JobState.values), name="ops_job_state"),
            models.CheckConstraint(
                condition=~Q(tenant="*") & ~Q(tenant="") & ~Q(actor_type="*") & ~Q(actor_id="*"), name="ops_job_scope"
            ),
            models.CheckConstraint(
                condition=(Q(state__in=LEASED) & ~Q(lease_token="") & Q(lease_expires_at__isnull=False))
                | (~Q(state__in=LEASED) & Q(lease_expires_at__isnull=True)),
                name="ops_job_lease",
            ),
            models.CheckConstraint(
                condition=(Q(state__in=UNFINISHED) & Q(finished_at__isnull=True))
                | (~Q(state__in=UNFINISHED) & Q(finished_at__isnull=False)),
                name="ops_job_finished_at",
            ),
            models.UniqueConstraint(
                fields=["tenant", "source", "kind", "key"],
                condition=Q(state=JobState.PENDING) & ~Q(key=""),
                name="ops_job_one_pending",
            ),
        ]
        indexes = [
            models.Index(F("source"), F("available_at"), F("id"), condition=Q(state__in=DUE), name="ops_job_due"),
            models.Index(F("lease_expires_at"), F("id"), condition=Q(state__in=LEASED), name="ops_job_leased"),
            models.Index(F("lease_token"), condition=Q(state__in=LEASED), name="ops_job_token"),
            models.Index(F("record_type"), F("record_id"), name="ops_job_of_record"),
            models.Index(F("state"), F("id").desc(), name="ops_job_of_state"),
            models.Index(F("tenant"), F("id").desc(), name="ops_job_of_tenant"),
            models.Index(F("kind"), F("id").desc(), name="ops_job_of_kind"),
            models.Index(F("id").desc(), condition=Q(state__in=UNFINISHED), name="ops_job_unfinished"),
            # What of one kind is due first, for the snapshot.
            models.Index(
                F("kind"),
                F("tenant"),
                F("state"),
                F("available_at"),
                condition=Q(state__in=DUE),
                name="ops_job_due_of_kind",
            ),
            models.Index(F("finished_at"), F("id"), condition=Q(finished_at__isnull=False), name="ops_job_finished"),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.id}"

    @property
    def resource(self) -> Resource:
        """What a request that touches this job touches."""
        return Resource(
            tenant=self.tenant,
            actor_type=self.actor_type,
            actor_id=self.actor_id,
            target_type="job",
            target_id=str(self.id),
        )
