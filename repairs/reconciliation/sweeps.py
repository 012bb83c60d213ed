"""What each kind of sweep does: its parts, one after the other."""

from __future__ import annotations

from repairs.reconciliation.closing import recount, stamp
from repairs.reconciliation.holds import expired_holds
from repairs.reconciliation.jobs import never_claimed_jobs, stale_jobs
from repairs.reconciliation.leases import (
    FETCH_UNTOUCHED,
    STALE_CONNECTIONS,
    STALE_DISPATCHES,
    STALE_FETCHES,
    UNDELIVERED,
    stale,
)
from repairs.reconciliation.retention import RETENTION
from repairs.reconciliation.sending import unanswered, unsent
from repairs.reconciliation.sweeping import Part
from repairs.reconciliation.totals import recount_streams

PARTS: dict[str, tuple[Part, ...]] = {
    "stale_leases": (
        stale(STALE_FETCHES, untouched=FETCH_UNTOUCHED),
        stale(STALE_DISPATCHES),
        stale(STALE_CONNECTIONS),
        stale_jobs,
    ),
    "undelivered_dispatches": (stale(UNDELIVERED, lease=None), never_claimed_jobs),
    "unsent_repairs": (unsent,),
    "unanswered_repairs": (unanswered,),
    "closed_letters": (stamp, recount),
    "stream_totals": (recount_streams,),
    "expired_holds": (expired_holds,),
    "retention": RETENTION,
}
