"""Rows for sweeps to find."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import uuid4

from deadletters.models import WorkerNode
from opsconsole.core.database import database_now
from opsconsole.jobs.models import (
    ConnectionLease,
    DispatchState,
    EvidenceRequest,
    EvidenceState,
    Job,
    JobState,
    Report,
    WorkflowDispatch,
    WorkflowRun,
)
from repairs.models import ReconciliationRun
from repairs.reconciliation.running import run_scheduled


def ago(seconds: float) -> Any:
    return database_now() - timedelta(seconds=seconds)


def report() -> Report:
    now = database_now()
    return Report.objects.create(tenant="default", reference=str(uuid4()), created_at=now, updated_at=now)


def fetching(untouched: float, count: int = 1, **fields: Any) -> list[EvidenceRequest]:
    """Return evidence that is being fetched and was last touched so many seconds ago, the oldest first."""
    of = report()
    now = database_now()
    return EvidenceRequest.objects.bulk_create(
        EvidenceRequest(
            **{
                "tenant": "default",
                "report": of,
                "url": "https://example.org/",
                "state": EvidenceState.FETCHING,
                "created_at": now,
                "updated_at": now - timedelta(seconds=untouched) + timedelta(milliseconds=number),
                **fields,
            }
        )
        for number in range(count)
    )


def leased_dispatch(expired: float, **fields: Any) -> WorkflowDispatch:
    now = database_now()
    run = WorkflowRun.objects.create(tenant="default", name="w", created_at=now, updated_at=now)
    return WorkflowDispatch.objects.create(
        **{
            "tenant": "default",
            "run": run,
            "endpoint": "https://example.org/",
            "state": DispatchState.LEASED,
            "available_at": now,
            "lease_expires_at": now - timedelta(seconds=expired),
            "created_at": now,
            "updated_at": now,
            **fields,
        }
    )


def connection_lease(expired: float) -> ConnectionLease:
    return ConnectionLease.objects.create(
        tenant="default", connection=str(uuid4()), holder="w", expires_at=ago(expired)
    )


def leased_job(state: JobState, expired: float, *, kind: str = "test_plain", **fields: Any) -> Job:
    now = database_now()
    job = Job(
        **{
            "tenant": "default",
            "source": "default",
            "kind": kind,
            "queue": "opsconsole",
            "state": state,
            "attempts": 1 if state == JobState.RUNNING else 0,
            "max_attempts": 3,
            "dispatches": 1,
            "available_at": now,
            "lease_owner": "celery@gone",
            "lease_expires_at": now - timedelta(seconds=expired),
            "created_at": now,
            "updated_at": now,
            **fields,
        }
    )
    job.lease_token = f"job:{job.id}:1:abc"
    job.save(force_insert=True)
    return job


def worker(seen: float = 0.0, *, reporting: float = 3_600.0, name: str = "w1", **fields: Any) -> WorkerNode:
    """Return a worker that reported so many seconds ago, without a break since ``reporting`` seconds ago."""
    return WorkerNode.objects.create(
        **{
            "id": name,
            "source": "tests",
            "host": "h1",
            "pid": 1,
            "started_at": ago(max(reporting, seen)),
            "reporting_since": ago(max(reporting, seen)),
            "seen_at": ago(seen),
            **fields,
        }
    )


def sweep(kind: str, **options: Any) -> ReconciliationRun:
    run = run_scheduled(kind, **options)
    assert run is not None
    return run


def counts(run: ReconciliationRun) -> tuple[int, int, int]:
    return run.scanned_count, run.repaired_count, run.skipped_count
