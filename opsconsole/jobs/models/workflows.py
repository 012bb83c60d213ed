"""Workflow runs, the signed calls that start them, and the leases on the connections they use."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q

from opsconsole.core.ids import new_id
from opsconsole.jobs.models.reports import Report
from opsconsole.jobs.querysets import TenantQuerySet


class RunState(models.TextChoices):
    CREATED = "created"  # nothing was asked of the engine yet
    DISPATCH_PENDING = "dispatch_pending"  # its dispatch waits to be sent
    QUEUED = "queued"  # the engine has accepted it
    RUNNING = "running"  # the engine is at it
    WAITING = "waiting"  # it waits for something outside
    PAUSED = "paused"  # somebody has paused it
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    REPAIR_REQUIRED = "repair_required"  # its dispatch has died; error_code says how


ACTIVE_RUNS = (
    RunState.CREATED,
    RunState.DISPATCH_PENDING,
    RunState.QUEUED,
    RunState.RUNNING,
    RunState.WAITING,
    RunState.PAUSED,
)


class DispatchState(models.TextChoices):
    PENDING = "pending"  # to be sent at available_at
    LEASED = "leased"  # a job is sending it, until lease_expires_at
    FAILED = "failed"  # an attempt failed; the next is due at available_at
    DELIVERED = "delivered"  # the engine has it
    DEAD_LETTER = "dead_letter"  # its job has died


class WorkflowRun(models.Model):
    """One run of a workflow, as the console knows it. ``revision`` rises with every change of its state."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    tenant = models.CharField(max_length=100)
    report = models.ForeignKey(Report, null=True, on_delete=models.CASCADE, related_name="runs")
    name = models.CharField(max_length=100)
    state = models.CharField(max_length=18, choices=RunState.choices, db_default=RunState.CREATED)
    revision = models.IntegerField(db_default=1)
    error_code = models.CharField(max_length=64, db_default="")
    error_summary = models.CharField(max_length=300, db_default="")
    created_at = models.DateTimeField()
    updated_at = models.DateTimeField()

    objects = TenantQuerySet.as_manager()

    class Meta:
        constraints = [models.CheckConstraint(condition=Q(state__in=RunState.values), name="ops_run_state")]
        indexes = [
            models.Index(
                F("tenant"),
                F("state"),
                F("updated_at"),
                condition=~Q(state=RunState.SUCCEEDED),
                name="ops_run_open",
            ),
        ]


class WorkflowDispatch(models.Model):
    """The signed call that starts a run."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    tenant = models.CharField(max_length=100)
    run = models.ForeignKey(WorkflowRun, on_delete=models.CASCADE, related_name="dispatches")
    endpoint = models.CharField(max_length=500)
    payload = models.TextField(db_default="{}")
    state = models.CharField(max_length=12, choices=DispatchState.choices, db_default=DispatchState.PENDING)
    attempt_count = models.IntegerField(db_default=0)
    available_at = models.DateTimeField()
    lease_expires_at = models.DateTimeField(null=True)
    last_error_code = models.CharField(max_length=64, db_default="")
    created_at = models.DateTimeField()
    updated_at = models.DateTimeField()

    objects = TenantQuerySet.as_manager()

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(state__in=DispatchState.values), name="ops_dispatch_state"),
        ]
        indexes = [
            models.Index(
                F("lease_expires_at"), F("id"), condition=Q(state=DispatchState.LEASED), name="ops_dispatch_leased"
            ),
        ]


class ConnectionLease(models.Model):
    """Who uses a connection to a third party, so that it is used by one at a time.

    ``holder`` is the token of the lease under which the job runs that uses it.
    """

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    tenant = models.CharField(max_length=100)
    connection = models.CharField(max_length=200)
    holder = models.CharField(max_length=200)
    expires_at = models.DateTimeField()

    objects = TenantQuerySet.as_manager()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["tenant", "connection"], name="ops_connection_lease_one"),
        ]
        indexes = [models.Index(F("expires_at"), F("id"), name="ops_connection_lease_expiry")]
