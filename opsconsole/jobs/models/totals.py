"""How many records each stream has in each state, kept so that a snapshot counts no table (A7)."""

from __future__ import annotations

from django.db import models

from opsconsole.jobs.querysets import TenantQuerySet


class Stream(models.TextChoices):
    """What a snapshot gives totals of."""

    ROUTING = "routing"  # jobs that route reports
    ACTIONS = "actions"
    NOTIFICATIONS = "notifications"
    EMAILS = "emails"
    WORKFLOWS = "workflows"
    EVIDENCE = "evidence"


LAST_EMAIL_ATTEMPT = 8
"""An e-mail counts as failed for good from this attempt on, whatever is still tried (A7)."""
EXHAUSTED = "exhausted"
"""The state under which such an e-mail is counted while it is still tried."""


class StreamTotal(models.Model):
    """One part of a total; the total is the sum of its parts, of which one may be negative.

    Written by the triggers in ``opsconsole.jobs.sql`` in the transaction that adds, changes or removes the records.
    There are as many parts as there have been writers at one moment: each takes one that nobody has locked, or adds its
    own.
    """

    id = models.BigAutoField(primary_key=True)
    tenant = models.CharField(max_length=100)
    stream = models.CharField(max_length=16, choices=Stream.choices)
    state = models.CharField(max_length=20)  # the record's own, or EXHAUSTED
    count = models.BigIntegerField()

    objects = TenantQuerySet.as_manager()

    class Meta:
        indexes = [models.Index(fields=["stream", "tenant", "state"], name="ops_total_of_stream")]
