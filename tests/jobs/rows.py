"""The smallest valid rows of the ledger and of the records that jobs work on."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

from opsconsole.core.database import database_now
from opsconsole.jobs.models import (
    LEASED,
    UNFINISHED,
    ActionDelivery,
    CaseMessage,
    EmailDelivery,
    EvidenceRequest,
    Job,
    JobState,
    Notice,
    NotificationDelivery,
    Report,
    WorkflowRun,
)

_numbers = itertools.count(1)


def job(state: str = JobState.PENDING, **fields: Any) -> Job:
    """Store a job of ``route_report`` that fits ``state``."""
    now = database_now()
    values: dict[str, Any] = {
        "tenant": "default",
        "source": "tests",
        "kind": "route_report",
        "queue": "opsconsole",
        "state": state,
        "available_at": now,
        "created_at": now,
        "updated_at": now,
    }
    if state in LEASED:
        values |= {"lease_token": "token", "lease_expires_at": now + timedelta(minutes=1)}
    if state not in UNFINISHED:
        values["finished_at"] = now
    return Job.objects.create(**{**values, **fields})


def report(tenant: str = "default", **fields: Any) -> Report:
    now = database_now()
    values = {"tenant": tenant, "reference": f"R-{next(_numbers)}", "created_at": now, "updated_at": now}
    return Report.objects.create(**{**values, **fields})


def action(state: str = "pending", **fields: Any) -> ActionDelivery:
    """Store an action's delivery, of a report of its own."""
    tenant = fields.pop("tenant", "default")
    of = fields.pop("report", None) or report(tenant)
    return ActionDelivery.objects.create(**{**_delivery(tenant, state), "report": of, "action": "close", **fields})


def notification(state: str = "pending", **fields: Any) -> NotificationDelivery:
    """Store a notification's delivery, of a notice of its own."""
    tenant = fields.pop("tenant", "default")
    notice = Notice.objects.create(tenant=tenant, report=report(tenant), updated_at=database_now())
    return NotificationDelivery.objects.create(**{**_delivery(tenant, state), "notice": notice, **fields})


def email(state: str = "pending", **fields: Any) -> EmailDelivery:
    """Store an e-mail's delivery, of a message of its own."""
    tenant = fields.pop("tenant", "default")
    message = CaseMessage.objects.create(tenant=tenant, report=report(tenant), created_at=database_now())
    return EmailDelivery.objects.create(**{**_delivery(tenant, state), "message": message, **fields})


def run(state: str = "running", **fields: Any) -> WorkflowRun:
    now = database_now()
    values = {"tenant": "default", "name": "review", "state": state, "created_at": now, "updated_at": now}
    return WorkflowRun.objects.create(**{**values, **fields})


def evidence(state: str = "pending", **fields: Any) -> EvidenceRequest:
    now = database_now()
    tenant = fields.pop("tenant", "default")
    values = {"tenant": tenant, "report": report(tenant), "url": "https://example.org", "state": state}
    return EvidenceRequest.objects.create(**{**values, "created_at": now, "updated_at": now, **fields})


def _delivery(tenant: str, state: str) -> dict[str, Any]:
    now = database_now()
    return {"tenant": tenant, "state": state, "next_attempt_at": now, "created_at": now, "updated_at": now}
