"""The ledger's transitions, each one guarded statement: whoever is late changes nothing and is told so.

The clock is the database's (C12). A lease is held by its token, the task id of the newest dispatch; every write of a
holder repeats the token in its WHERE.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any
from uuid import UUID, uuid4

from django.db import connection, transaction
from django.db.models import Case, F, Q, Value, When

from opsconsole.core.database import AnyOf, database_now, locked
from opsconsole.core.effects import OutcomeClass
from opsconsole.jobs import conf
from opsconsole.jobs.errors import LeaseLost
from opsconsole.jobs.hooks import tell_repaired
from opsconsole.jobs.kind import Kind, overrides
from opsconsole.jobs.models import LEASED, ConnectionLease, Job, JobState
from opsconsole.jobs.tokens import TOKEN_PREFIX

EXHAUSTED = "queue_retries_exhausted"
MOST_LOST_DISPATCHES = 20
"""A message that is lost again and again before its job starts kills what receives it, or nobody receives it at all.

So many a job may have had more than attempts, since it was begun or retried."""
TABLE = Job._meta.db_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched:
    """A job that was taken to be sent: what its message has to say."""

    job_id: UUID
    kind: str
    tenant: str
    actor_type: str
    actor_id: str
    queue: str
    token: str
    repair_id: UUID | None = None  # of the repair that has put it back


# Dispatching


def take_due(*, source: str, owner: str, limit: int, held: Q | None = None) -> list[Dispatched]:
    """Lease up to ``limit`` due jobs to a dispatcher, oldest due first, and return them in that order.

    Those of which ``held`` is true are left where they are.

    On PostgreSQL rows that another dispatcher is taking are passed over; on SQLite there is one writer at a time.
    """
    nonce = uuid4().hex[:8]
    with transaction.atomic():
        now = database_now()
        due = Job.objects.filter(source=source, state__in=("pending", "retrying"), available_at__lte=now)
        if held is not None:
            due = due.exclude(held)
        ids = [row.id for row in locked(due.only("id").order_by("available_at", "id"), skip=True)[:limit]]
        if not ids:
            return []
        rows = {job.id: job for job in Job.objects.filter(AnyOf("id", ids)).defer("payload")}
        taken = [rows[job_id] for job_id in ids]
        for job in taken:
            job.dispatches += 1
            job.lease_token = f"{TOKEN_PREFIX}{job.id}:{job.dispatches}:{nonce}"
        _write_tokens(taken, owner=owner, now=now)
    return [
        Dispatched(
            job_id=job.id,
            kind=job.kind,
            tenant=job.tenant,
            actor_type=job.actor_type,
            actor_id=job.actor_id,
            queue=job.queue,
            token=job.lease_token,
            repair_id=job.repair_id,
        )
        for job in taken
    ]


def _write_tokens(jobs: list[Job], *, owner: str, now: datetime) -> None:
    """Write the new leases: the token's parts are the row's own, so one statement does for all."""
    nonce = jobs[0].lease_token.rpartition(":")[2]
    if connection.vendor == "postgresql":
        own_id = "id::text"
    else:
        own_id = "substr(id,1,8)||'-'||substr(id,9,4)||'-'||substr(id,13,4)||'-'||substr(id,17,4)||'-'||substr(id,21)"
    token = f"'{TOKEN_PREFIX}'||{own_id}||':'||(dispatches + 1)||':'||%s"
    marked, ids = _any_id(job.id for job in jobs)
    with connection.cursor() as cursor:
        cursor.execute(
            f"UPDATE {TABLE} SET state = 'enqueued', lease_token = {token}, dispatches = dispatches + 1,"  # noqa: S608
            f" lease_owner = %s, lease_expires_at = %s, updated_at = %s WHERE {marked}",
            [nonce, owner[:200], _moment(now + conf.dispatched_for()), _moment(now), ids],
        )


def give_back(tokens: Iterable[str], *, delay: timedelta = timedelta()) -> int:
    """Put back jobs that were taken and are not known to have been sent; returns how many still were.

    A message of theirs that has got through after all finds another lease and is passed over.
    """
    listed = list(tokens)
    now = database_now()
    rows = Job.objects.filter(AnyOf("lease_token", listed), state=JobState.ENQUEUED)
    # One that was tried before, or whose key has a newer job waiting, is not pending a second time.
    return rows.update(
        # What was not sent is no lost message: an outage of the broker must not use up what those are allowed.
        dispatches=F("dispatches") - 1,
        state=Case(When(Q(attempts=0) & Q(key=""), then=Value(JobState.PENDING)), default=Value(JobState.RETRYING)),
        lease_owner="",
        lease_expires_at=None,
        available_at=now + delay,
        updated_at=now,
    )


def outstanding(*, source: str, most: int) -> int:
    """Return how many jobs wait in a broker's queue, counting no further than ``most``."""
    return len(Job.objects.filter(source=source, state="enqueued").order_by().values_list("id")[:most])


# Running


def claim(*, job_id: UUID, token: str, owner: str, kind: Kind) -> Job | None:
    """Claim a dispatched job for the worker that has its message; ``None`` if the message is an old one.

    Counts the attempt. The kind's record is marked in the same transaction.
    """
    if not overrides(kind, "begin"):
        return _claim(job_id, token, owner, kind.lease)
    with transaction.atomic():
        job = _claim(job_id, token, owner, kind.lease)
        if job is not None:
            kind.begin(job, job.updated_at)
        return job


def _claim(job_id: UUID, token: str, owner: str, lease: timedelta) -> Job | None:
    if connection.vendor == "postgresql":
        now, until = "statement_timestamp()", "statement_timestamp() + %s"
        times: list[Any] = [lease]
    else:
        moment = database_now()
        now, until = "%s", "%s"
        times = [_moment(moment), _moment(moment + lease)]
    rows = Job.objects.raw(
        f"UPDATE {TABLE} SET state = 'running', attempts = attempts + 1, updated_at = {now},"  # noqa: S608
        f" lease_expires_at = {until}, lease_owner = %s"
        f" WHERE id = %s AND lease_token = %s AND state = 'enqueued' RETURNING *",
        [*times, owner[:200], _id(job_id), token],
    )
    found: list[Job] = list(rows)
    return found[0] if found else None


def renew(job: Job, kind: Kind) -> bool:
    """Renew the lease of a running job from now on, and in the same transaction those of what it works on.

    These are its record's and those of the connections that it uses, which otherwise would be taken from a body that is
    alive and slow. Returns whether the job still was held; nothing is written if not.
    """
    now = database_now()
    with transaction.atomic():
        rows = Job.objects.filter(lease_token=job.lease_token, state=JobState.RUNNING)
        if rows.update(lease_expires_at=now + kind.lease, updated_at=now) != 1:
            return False
        job.lease_expires_at = now + kind.lease
        kind.renew(job, now)
        used = ConnectionLease.objects.filter(tenant=job.tenant, holder=job.lease_token)
        used.update(expires_at=job.lease_expires_at)
    return True


def succeed(job: Job, kind: Kind, result: Any) -> None:
    """Settle a running job as done, with its record and with the repair that had put it back (C11).

    Raises ``LeaseLost``, with nothing written, if the job is somebody else's by now.
    """
    if job.repair_id is None and not overrides(kind, "complete"):
        _finish(job, JobState.SUCCEEDED)
        return
    with transaction.atomic():
        now = database_now()
        if job.repair_id is not None:
            tell_repaired(job, now)
        _finish(job, JobState.SUCCEEDED, now)
        kind.complete(job, result, now)


def _finish(job: Job, state: JobState, now: datetime | None = None) -> None:
    if connection.vendor == "postgresql" and now is None:
        moment, times = "statement_timestamp()", []
    else:
        at = _moment(now or database_now())
        moment, times = "%s", [at, at]
    with connection.cursor() as cursor:
        cursor.execute(
            f"UPDATE {TABLE} SET state = '{state.value}', finished_at = {moment}, updated_at = {moment},"  # noqa: S608
            " lease_owner = '', lease_expires_at = NULL, last_error_code = '', last_error_text = ''"
            " WHERE id = %s AND lease_token = %s AND state = 'running'",
            [*times, _id(job.id), job.lease_token],
        )
        if cursor.rowcount != 1:
            raise LeaseLost(f"job {job.id} has another lease by now")
    job.state = state


def put_off(
    job: Job,
    kind: Kind,
    *,
    code: str,
    text: str,
    outcome: OutcomeClass | None = None,
    reason: str = "",
    after: timedelta | None = None,
) -> timedelta:
    """Put a running job off after a failed attempt, and return for how long; raises ``LeaseLost``.

    ``after`` is a pause that was asked for (``TryAgain``): it is kept to, up to an hour.
    """
    delay = kind.back_off.delay(job.attempts, after)
    with transaction.atomic():
        now = database_now()
        held = Job.objects.filter(id=job.id, lease_token=job.lease_token, state=JobState.RUNNING)
        job.available_at = now + delay
        worse = outcome is not None and outcome is not OutcomeClass.SAFE
        changes: dict[str, Any] = {"outcome_class": outcome, "outcome_reason": reason[:300]} if worse else {}
        if not held.update(
            state=JobState.RETRYING,
            available_at=job.available_at,
            lease_owner="",
            lease_expires_at=None,
            last_error_code=code[:64],
            last_error_text=text[:500],
            updated_at=now,
            **changes,
        ):
            raise LeaseLost(f"job {job.id} has another lease by now")
        job.state = JobState.RETRYING
        kind.put_off(job, code, now)
    return delay


# Dying


class Death(StrEnum):
    """What the end of one delivery means for its job."""

    STALE = "stale"  # the job has another lease, or has ended: the delivery has nothing to say
    AGAIN = "again"  # it may be run again by itself
    FINAL = "final"  # a person has to decide: a dead letter


def decide_death(
    job: Job, kind: Kind, *, token: str, outcome: OutcomeClass, refused: bool, never_started: bool
) -> Death:
    """Say what a delivery that ended badly means; pure, for recorder and sweeps alike.

    ``outcome`` is the judgement of this attempt; ``refused`` says that trying again does not help, as its body or the
    worker said; ``never_started`` that its body is known not to have run. Being wrong about a holder that is still
    alive runs a job a second time; so only an attempt that does no harm when repeated, or whose provider knows the
    idempotency key, is run again without a person's word.
    """
    if job.lease_token != token or job.state not in LEASED:
        return Death.STALE
    if refused:
        return Death.FINAL
    if never_started or job.state == JobState.ENQUEUED:
        return Death.AGAIN if job.dispatches - job.attempts <= MOST_LOST_DISPATCHES else Death.FINAL
    if job.attempts >= job.max_attempts:
        return Death.FINAL
    return Death.AGAIN if outcome is OutcomeClass.SAFE or kind.retries_unanswered else Death.FINAL


def release(
    job_id: UUID, kind: Kind, *, token: str, code: str, outcome: OutcomeClass, reason: str, never_started: bool = False
) -> bool:
    """Put back a leased job whose holder is gone, in the caller's transaction; returns whether it still was leased.

    One that had not started is due at once, and its attempt does not count; another is put off like a failed attempt.
    """
    job = locked(Job.objects.filter(id=job_id, lease_token=token, state__in=LEASED)).first()
    if job is None:
        return False
    now = database_now()
    had_started = job.state == JobState.RUNNING and not never_started
    if job.state == JobState.RUNNING and never_started:
        job.attempts = max(job.attempts - 1, 0)
    job.available_at = now + (kind.back_off.delay(job.attempts) if had_started else timedelta())
    job.state = JobState.PENDING if not job.attempts and not job.key else JobState.RETRYING
    job.lease_owner, job.lease_expires_at, job.updated_at = "", None, now
    job.last_error_code = code[:64]
    if outcome is not OutcomeClass.SAFE:
        job.outcome_class, job.outcome_reason = outcome, reason[:300]
    job.save(
        update_fields=[
            "attempts", "available_at", "state", "lease_owner", "lease_expires_at", "updated_at", "last_error_code",
            "outcome_class", "outcome_reason",
        ]
    )  # fmt: skip
    kind.release(job, code, now)
    return True


def bury(job_id: UUID, kind: Kind, *, token: str, text: str, now: datetime) -> bool:
    """Mark a leased job dead, with its record (A6), in the transaction that records its letter.

    Returns whether it still had this lease; the caller's plan is overtaken if not.
    """
    job = locked(Job.objects.filter(id=job_id, lease_token=token, state__in=LEASED)).first()
    if job is None:
        return False
    job.state, job.finished_at, job.updated_at = JobState.DEAD, now, now
    job.lease_owner, job.lease_expires_at = "", None
    job.last_error_code, job.last_error_text = EXHAUSTED, text[:500]
    job.save(
        update_fields=[
            "state", "finished_at", "updated_at", "lease_owner", "lease_expires_at", "last_error_code",
            "last_error_text",
        ]
    )  # fmt: skip
    kind.mark_dead(job, EXHAUSTED, now)
    return True


def requeue(job: Job, kind: Kind, *, repair_id: UUID, now: datetime) -> None:
    """Put a locked dead job back to work in place: pending, attempts 0, due now, lease and error cleared (A12)."""
    job.state, job.attempts, job.dispatches, job.available_at = JobState.PENDING, 0, 0, now
    job.finished_at, job.updated_at, job.repair_id = None, now, repair_id
    job.lease_owner, job.lease_token, job.lease_expires_at = "", "", None
    job.last_error_code = job.last_error_text = job.outcome_class = job.outcome_reason = ""
    job.save(
        update_fields=[
            "state", "attempts", "dispatches", "available_at", "finished_at", "updated_at", "repair_id", "lease_owner",
            "lease_token", "lease_expires_at", "last_error_code", "last_error_text", "outcome_class", "outcome_reason",
        ]
    )  # fmt: skip
    kind.requeue(job, now)


def _any_id(ids: Iterable[UUID]) -> tuple[str, Any]:
    """Return the condition that a row's id is one of these, in one parameter."""
    if connection.vendor == "postgresql":
        return "id = ANY(%s::uuid[])", "{" + ",".join(one.hex for one in ids) + "}"
    return "id IN (SELECT value FROM json_each(%s))", "[" + ",".join(f'"{one.hex}"' for one in ids) + "]"


def _id(job_id: UUID) -> Any:
    return job_id if connection.vendor == "postgresql" else job_id.hex


def _moment(moment: datetime) -> Any:
    return connection.ops.adapt_datetimefield_value(moment)
