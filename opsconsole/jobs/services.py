"""Writing jobs into the ledger, and withdrawing them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import IntegrityError, transaction

from grants import audit
from grants.actions import Action
from grants.operators import Operator
from grants.service import service
from grants.targets import authorise_target
from opsconsole.core.database import database_now, is_unique_violation
from opsconsole.core.ids import new_id
from opsconsole.jobs import conf
from opsconsole.jobs.errors import JobNotCancellable, JobNotFound, JobPayloadInvalid
from opsconsole.jobs.kinds import kind_named
from opsconsole.jobs.models import DUE, Job, JobState

JOB_CANCELLED = Action.JOBS_CANCEL.value
LONGEST_PAYLOAD = 1 << 20


def enqueue(
    *,
    kind: str,
    tenant: str,
    payload: Mapping[str, Any],
    record_id: str = "",
    report_id: UUID | None = None,
    actor_type: str = "",
    actor_id: str = "",
    key: str = "",
    available_at: datetime | None = None,
    max_attempts: int | None = None,
) -> Job:
    """Write a job into the ledger, in the transaction of the work that wants it; it is sent after the commit.

    With a ``key``, at most one job of its kind and tenant waits at a time: while one does, it is returned and nothing
    is written; one that is running or waits for its next attempt does not count, since it may have read too little.
    ``available_at`` puts it off. Raises ``JobKindUnknown`` or ``JobPayloadInvalid``.
    """
    found = kind_named(kind)
    try:
        # Escaped, so that a NUL or half a character in it can be stored; a NaN is refused, no reader could have it.
        text = json.dumps(dict(payload), allow_nan=False, separators=(",", ":"))
        found.check(payload)
    except (TypeError, ValueError, RecursionError) as error:
        raise JobPayloadInvalid(kind=kind, detail=str(error)[:300]) from error
    if len(text) > LONGEST_PAYLOAD:
        raise JobPayloadInvalid(kind=kind, detail=f"it has {len(text)} bytes, and at most {LONGEST_PAYLOAD} are kept.")
    now = database_now()
    job = Job(
        id=new_id(),
        tenant=tenant,
        source=conf.source(),
        actor_type=actor_type,
        actor_id=actor_id,
        kind=kind,
        payload=text,
        payload_version=found.payload_version,
        record_type=found.record_type,
        record_id=record_id,
        report_id=report_id,
        key=key,
        queue=found.queue or conf.queue(),
        state=JobState.PENDING,
        max_attempts=found.max_attempts if max_attempts is None else max_attempts,
        available_at=available_at or now,
        created_at=now,
        updated_at=now,
    )
    if not key:
        job.save(force_insert=True)
        return job
    return _insert_or_find(job)


def _insert_or_find(job: Job) -> Job:
    waiting = Job.objects.filter(
        tenant=job.tenant, source=job.source, kind=job.kind, key=job.key, state=JobState.PENDING
    )
    while True:
        known: Job | None = waiting.first()
        if known is not None:
            return known
        try:
            with transaction.atomic():
                job.save(force_insert=True)
        except IntegrityError as error:
            # Somebody was first; it may have been taken since, and then this one is wanted after all.
            if not is_unique_violation(error):
                raise
        else:
            return job


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMutation:
    """What a request did to a job, or, as a replay, what the first one of its key did."""

    job_id: UUID
    state: str
    event_id: UUID | None = None
    idempotent_replay: bool = False


@service
def cancel_job(*, job_id: UUID, by: Operator, key: str, reason: str) -> JobMutation:
    """Withdraw a job that waits: pending, or waiting for its next attempt. ``reason`` has 1 to 500 characters (B4).

    Locks the job; writes one audit event. Raises ``JobNotFound``, ``AccessDenied``, ``ReasonInvalid``,
    ``IdempotencyKeyReused`` or ``JobNotCancellable``.
    """
    reason = audit.validate_reason(reason)
    scope = Job.objects.scope(job_id)
    capability = authorise_target(by, Action.JOBS_CANCEL, scope, JobNotFound())
    job = _lock(job_id)
    digest = audit.request_digest({"reason": reason})
    receipt = audit.replayed(
        key=key, action=JOB_CANCELLED, operator=by, target_type="job", target_id=str(job_id), digest=digest
    )
    if receipt is not None:
        return JobMutation(job_id=job_id, state=JobState.CANCELLED.value, event_id=receipt.id, idempotent_replay=True)
    if job.state not in DUE:
        raise JobNotCancellable(state=str(job.state))
    now = database_now()
    job.state, job.finished_at, job.updated_at = JobState.CANCELLED, now, now
    job.save(update_fields=["state", "finished_at", "updated_at"])
    kind_named(job.kind).cancel(job, now)
    event = audit.record(
        action=JOB_CANCELLED,
        operator=by,
        resource=job.resource,
        capability=capability,
        outcome={"attempts": job.attempts, "job": job.kind, "state": str(job.state)},
        reason=reason,
        key=key,
        digest=digest,
        at=now,
    )
    return JobMutation(job_id=job_id, state=str(job.state), event_id=event.id)


def _lock(job_id: UUID) -> Job:
    try:
        return Job.objects.lock(job_id)
    except Job.DoesNotExist:
        raise JobNotFound from None
