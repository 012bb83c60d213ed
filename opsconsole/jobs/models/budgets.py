"""What may be spent, what is reserved and used of it, and whether intake is in a surge."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q

from opsconsole.core.ids import new_id
from opsconsole.jobs.querysets import TenantQuerySet


class ReservationStatus(models.TextChoices):
    RESERVED = "reserved"  # held until it is used, given back, or expires
    CONSUMED = "consumed"
    RELEASED = "released"


class SurgeMode(models.TextChoices):
    NORMAL = "normal"
    ELEVATED = "elevated"
    SURGE = "surge"


class BudgetPolicy(models.Model):
    """How many units of something a tenant may use."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    tenant = models.CharField(max_length=100)
    name = models.CharField(max_length=100)
    limit_units = models.BigIntegerField()
    retired_at = models.DateTimeField(null=True)

    objects = TenantQuerySet.as_manager()


class BudgetReservation(models.Model):
    """Units set aside for work under way."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    tenant = models.CharField(max_length=100)
    policy = models.ForeignKey(BudgetPolicy, on_delete=models.CASCADE, related_name="reservations")
    units = models.BigIntegerField()
    status = models.CharField(max_length=10, choices=ReservationStatus.choices, db_default=ReservationStatus.RESERVED)
    expires_at = models.DateTimeField()

    objects = TenantQuerySet.as_manager()

    class Meta:
        indexes = [
            models.Index(
                F("tenant"),
                F("expires_at"),
                condition=Q(status=ReservationStatus.RESERVED),
                name="ops_reservation_active",
            ),
        ]


class BudgetUsage(models.Model):
    """Units used in one period."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    tenant = models.CharField(max_length=100)
    policy = models.ForeignKey(BudgetPolicy, on_delete=models.CASCADE, related_name="usage")
    period = models.CharField(max_length=20)
    consumed_units = models.BigIntegerField(db_default=0)

    objects = TenantQuerySet.as_manager()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["policy", "period"], name="ops_usage_period")]


class SurgeState(models.Model):
    """Whether a tenant's intake is in a surge, since when, and why."""

    tenant = models.CharField(primary_key=True, max_length=100)
    mode = models.CharField(max_length=10, choices=SurgeMode.choices, db_default=SurgeMode.NORMAL)
    entered_at = models.DateTimeField(null=True)
    recover_after = models.DateTimeField(null=True)
    reason_codes = models.TextField(db_default="[]")
    revision = models.IntegerField(db_default=1)
    updated_at = models.DateTimeField()

    objects = TenantQuerySet.as_manager()
