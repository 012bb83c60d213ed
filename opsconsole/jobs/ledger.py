"""The ledger's transitions, each one guarded statement: whoever is late changes nothing and is told so.

The clock is the database's (C12). A lease is held by its token, the task id of the newest dispatch; every write of a
holder repeats the token in its WHERE.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

from django.core.exceptions import EmptyResultSet
from django.db import DEFAULT_DB_ALIAS, connection, connections, transaction
from django.db.models import Case, F, Q, Value, When
from django.db.models.functions import Now

from opsconsole.core.database import AnyOf, database_now, locked
from opsconsole.core.effects import OutcomeClass
from opsconsole.jobs import conf
from opsconsole.jobs.errors import LeaseLost
from opsconsole.jobs.hooks import tell_repaired
from opsconsole.jobs.kept import KEPT
from opsconsole.jobs.kind import Kind, overrides
from opsconsole.jobs.models import LEASED, ConnectionLease, Job, JobState
from opsconsole.jobs.tokens import TOKEN_PREFIX

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

EXHAUSTED = "queue_retries_exhausted"
MOST_LOST_DISPATCHES = 20
"""A message that is lost again and again before its job starts kills what receives it, or nobody receives it at all.

So many a job may have had more than attempts, since it was begun or retried."""
TABLE = Job._meta.db_table
_COLUMNS = ", ".join(str(field.column) for field in Job._meta.concrete_fields)
_NAMES = [field.attname for field in Job._meta.concrete_fields]
_HYPHENATED = "substr(id,1,8)||'-'||substr(id,9,4)||'-'||substr(id,13,4)||'-'||substr(id,17,4)||'-'||substr(id,21)"
"""A UUID as text, of the digits that SQLite keeps."""


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

    Those of which ``held`` is true are left where they are. One statement, which is its own transaction: of what a job
    costs, reading and locking a page first and writing it afterwards is a large part (measured). On PostgreSQL rows
    that another dispatcher is taking are passed over; on SQLite there is one writer at a time.
    """
    due = Job.objects.filter(source=source, state__in=("pending", "retrying"))
    if held is not None:
        due = due.exclude(held)
    if connection.vendor == "postgresql":
        due = due.filter(available_at__lte=Now())
        own_id, now, until = "id::text", "statement_timestamp()", "statement_timestamp() + %s"
        # An array, so that the page is chosen once.
        chosen = f"id = ANY(ARRAY({{page}} FOR UPDATE OF {TABLE} SKIP LOCKED))"
        times: list[Any] = [conf.dispatched_for()]
    else:
        moment = database_now()
        due = due.filter(available_at__lte=moment)
        own_id, now, until, chosen = _HYPHENATED, "%s", "%s", "id IN ({page})"
        times = [_moment(moment + conf.dispatched_for()), _moment(moment)]
    try:
        page, parameters = due.order_by("available_at", "id").values("id")[:limit].query.sql_with_params()
    except EmptyResultSet:
        return []  # all of them are held
    with connection.cursor() as cursor:
        # The token's parts are the row's own: one statement does for all.
        cursor.execute(
            f"UPDATE {TABLE} SET state = 'enqueued', dispatches = dispatches + 1,"  # noqa: S608
            f" lease_token = '{TOKEN_PREFIX}'||{own_id}||':'||(dispatches + 1)||':'||%s,"
            f" lease_owner = %s, lease_expires_at = {until}, updated_at = {now}"
            f" WHERE {chosen.format(page=page)} AND state IN ('pending', 'retrying')"
            " RETURNING available_at, id, kind, tenant, actor_type, actor_id, queue, lease_token, repair_id",
            [uuid4().hex[:8], owner[:200], *times, *parameters],
        )
        rows = cursor.fetchall()
    return [
        Dispatched(
            job_id=_uuid(job_id),
            kind=kind,
            tenant=tenant,
            actor_type=actor_type,
            actor_id=actor_id,
            queue=queue,
            token=token,
            repair_id=None if repair_id is None else _uuid(repair_id),
        )
        for _at, job_id, kind, tenant, actor_type, actor_id, queue, token, repair_id in sorted(
            rows, key=lambda row: (row[0], row[1])
        )
    ]


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
    waiting = f"SELECT 1 FROM {TABLE} WHERE source = %s AND state = 'enqueued' LIMIT %s"  # noqa: S608
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT count(*) FROM ({waiting}) AS waiting", [source, most])  # noqa: S608
        return int(cursor.fetchone()[0])


# Running


def claim(*, job_id: UUID, token: str, owner: str, kind: Kind) -> Job | None:
    """Claim a dispatched job for the worker that has its message; ``None`` if the message is an old one.

    Counts the attempt. The kind's record is marked in the same transaction.
    """
    if not overrides(kind, "begin"):
        return _claim(job_id, token, owner, kind.lease, KEPT.connection())
    with transaction.atomic():
        job = _claim(job_id, token, owner, kind.lease, connections[DEFAULT_DB_ALIAS])
        if job is not None:
            kind.begin(job, job.updated_at)
        return job


def _claim(job_id: UUID, token: str, owner: str, lease: timedelta, using: BaseDatabaseWrapper) -> Job | None:
    if using.vendor == "postgresql":
        now, until = "statement_timestamp()", "statement_timestamp() + %s"
        times: list[Any] = [lease]
    else:
        moment = database_now()
        now, until = "%s", "%s"
        times = [_moment(moment), _moment(moment + lease)]
    statement = (
        f"UPDATE {TABLE} SET state = 'running', attempts = attempts + 1, updated_at = {now},"  # noqa: S608
        f" lease_expires_at = {until}, lease_owner = %s"
        f" WHERE id = %s AND lease_token = %s AND state = 'enqueued' RETURNING {_COLUMNS}"
    )
    parameters = [*times, owner[:200], _id(job_id), token]
    if using.vendor != "postgresql":
        found: list[Job] = list(Job.objects.raw(statement, parameters))
        return found[0] if found else None
    # What the driver gives are the model's own values already; a raw query set would work out for each job anew what
    # to make of its columns, which takes as long as the statement (measured).
    with using.cursor() as cursor:
        cursor.execute(statement, parameters)
        row = cursor.fetchone()
    return None if row is None else Job.from_db(using.alias, _NAMES, row)


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
        _finish(job, JobState.SUCCEEDED, KEPT.connection())
        return
    with transaction.atomic():
        now = database_now()
        if job.repair_id is not None:
            tell_repaired(job, now)
        _finish(job, JobState.SUCCEEDED, connections[DEFAULT_DB_ALIAS], now)
        kind.complete(job, result, now)


def _finish(job: Job, state: JobState, using: BaseDatabaseWrapper, now: datetime | None = None) -> None:
    if using.vendor == "postgresql" and now is None:
        moment, times = "statement_timestamp()", []
    else:
        at = _moment(now or database_now())
        moment, times = "%s", [at, at]
    with using.cursor() as cursor:
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


def _uuid(value: Any) -> UUID:
    return value if isinstance(value, UUID) else UUID(value)


def _id(job_id: UUID) -> Any:
    return job_id if connection.vendor == "postgresql" else job_id.hex


def _moment(moment: datetime) -> Any:
    return connection.ops.adapt_datetimefield_value(moment)
