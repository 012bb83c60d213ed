"""Stale leases: records whose claim has ended without its holder's doing (A14)."""

from __future__ import annotations

from datetime import timedelta

from django.db import connection

from opsconsole.jobs.ledger import MOST_LOST_DISPATCHES
from opsconsole.jobs.models import (
    ConnectionLease,
    DispatchState,
    EvidenceRequest,
    EvidenceState,
    Job,
    JobState,
    WorkflowDispatch,
)
from repairs.models import SweepActionType
from repairs.reconciliation.sweeping import PAGE, Part, Sweeping
from repairs.sql import Claims, HeldBy, Key, claimed, release_claims

FETCH_UNTOUCHED = timedelta(minutes=5)
AT_ONCE = 4_000
"""Rows of a page on PostgreSQL, a tenth of a second: what it costs beside its rows is then little (measured)."""
LEASE = timedelta(seconds=60)
"""How long the lease of a job is that works on one of these records: so much patience an outage is worth."""

STALE_FETCHES = Claims(
    model=EvidenceRequest,
    entity_type="evidence_fetch_request",
    action_type=SweepActionType.RELEASE_STALE_LEASE,
    key="stale-evidence",
    marker="updated_at",
    marker_name="updatedAt",
    state=EvidenceState.FETCHING.value,
    changes={
        "state": "'pending'",
        "next_attempt_at": "%(now)s",
        "last_error_code": "'stale_fetch_lease_recovered'",
        "updated_at": "%(now)s",
    },
    after={"code": "stale_fetch_lease_recovered", "state": "pending"},
    held_by=HeldBy.RECORD,
)
STALE_DISPATCHES = Claims(
    model=WorkflowDispatch,
    entity_type="workflow_dispatch_outbox",
    action_type=SweepActionType.RELEASE_STALE_LEASE,
    key="stale-workflow",
    marker="lease_expires_at",
    marker_name="leaseExpiresAt",
    state=DispatchState.LEASED.value,
    changes={
        "state": "'failed'",
        "available_at": "%(now)s",
        "lease_expires_at": "NULL",
        "last_error_code": "'stale_dispatch_lease_recovered'",
        "updated_at": "%(now)s",
    },
    after={"code": "stale_dispatch_lease_recovered", "state": "failed"},
    held_by=HeldBy.RECORD,
)
STALE_CONNECTIONS = Claims(
    model=ConnectionLease,
    entity_type="connection_execution_lease",
    action_type=SweepActionType.RELEASE_STALE_LEASE,
    key="stale-connection",
    marker="expires_at",
    marker_name="expiresAt",
    state="",
    changes={},
    after={"deleted": True},
    held_by=HeldBy.TOKEN,
)
UNDELIVERED = Claims(
    model=Job,
    entity_type="job",
    action_type=SweepActionType.REQUEUE_UNDELIVERED,
    key="undelivered",
    marker="lease_expires_at",
    marker_name="leaseExpiresAt",
    state=JobState.ENQUEUED.value,
    changes={
        # Of jobs with one key one alone may be pending: a newer one may wait by now.
        "state": "CASE WHEN attempts = 0 AND key = '' THEN 'pending' ELSE 'retrying' END",
        "available_at": "%(now)s",
        "lease_owner": "''",
        "lease_expires_at": "NULL",
        "updated_at": "%(now)s",
    },
    after={"state": "pending"},
    only=f"dispatches - attempts <= {MOST_LOST_DISPATCHES}",
)
"""A message that turns up after all finds another lease, and is passed over: its job never starts twice."""


def stale(claims: Claims, *, untouched: timedelta = timedelta(), lease: timedelta | None = LEASE) -> Part:
    """Return the part that releases the claims of one table, oldest first.

    Stale is what ended ``untouched`` ago, by the database's clock (C12). ``lease`` is how long a holder is given after
    an outage; ``None`` where nobody holds anything. What it can get wrong: a holder that hangs longer than its lease
    and then goes on works beside its successor, until it writes and finds its lease gone.
    """

    def run(sweeping: Sweeping) -> None:
        last: Key | None = None
        # On SQLite whoever else wants to write waits for a page.
        most = AT_ONCE if connection.vendor == "postgresql" else PAGE
        while size := sweeping.size(most):
            with sweeping.page() as tally:
                if lease is not None and not sweeping.may_judge(lease, tally.now):
                    sweeping.has_waited |= claimed(claims, ended_before=tally.now - untouched).exists()
                    return
                done = release_claims(
                    claims,
                    run_id=sweeping.run_id,
                    by=sweeping.started_by,
                    ended_before=tally.now - untouched,
                    now=tally.now,
                    after=last,
                    size=size,
                )
                tally.add(scanned=done.scanned, repaired=done.repaired)
            last = done.last
            if last is None:
                return

    return run
