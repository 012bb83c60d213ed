"""One lease of patience after an outage of the database, in which nobody could renew anything.

A lease that ran out says that its holder is gone only if the holder could have renewed it. When the database was away
for everybody, the first sweep after it finds every lease expired and every holder alive. So a sweep asks since when the
database has been there without a break, and judges a lease of length L only if that is at least L ago.

What shows that it was there is the workers' own reports, one every ten seconds: a row's ``reporting_since`` is the
first of them since when none was missed. One worker with an unbroken row of reports is proof for all, for what it wrote
others could have written.

- No worker is known (none has reported within a day, or all have said good-bye): there is nobody to wait for, and
  leases are judged by themselves.
- Workers are known and none reports: the database was away, or all of them died together. The first run that finds it
  so waits and notes when (``waited_since``); whichever comes after it while still nobody has reported goes by that
  note. So it costs one lease, even if the next run is one of tomorrow.
- Workers report, but not for long enough yet: the outage is just over, or all were started anew. It is waited until
  one has reported for the length of a lease.

What this can get wrong: a network that parts one host from the database, and not the others, looks like a host that is
gone. Its jobs lose their leases, as they must; the lease's token keeps what they still write from counting (C12).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from deadletters.models import WorkerNode
from repairs.models import ReconciliationRun

REMEMBERED = timedelta(hours=24)
FRESH = timedelta(seconds=30)
"""Three reports: a worker that has not reported for so long shows nothing about the database now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """When a worker reported last, and since when without a break."""

    seen_at: datetime
    since: datetime


def reachable_since(reports: Sequence[Reports], noted: datetime | None, now: datetime) -> datetime | None:
    """Return since when everybody could have renewed a lease; ``None`` if there is nobody who would have. Pure.

    ``noted`` is when an earlier run began to wait because nobody reported.
    """
    if not reports:
        return None
    unbroken = [one.since for one in reports if one.seen_at >= now - FRESH]
    if unbroken:
        return min(unbroken)
    is_the_same_silence = noted is not None and all(one.seen_at <= noted for one in reports)
    return noted if is_the_same_silence else now


def read_reachable_since(now: datetime) -> datetime | None:
    """Return ``reachable_since`` of what the database holds."""
    known = WorkerNode.objects.filter(stopped_at__isnull=True, seen_at__gte=now - REMEMBERED)
    reports = [
        Reports(seen_at=seen_at, since=since or started_at)
        for seen_at, since, started_at in known.values_list("seen_at", "reporting_since", "started_at")
    ]
    waiting = ReconciliationRun.objects.filter(waited_since__isnull=False).newest_first()
    noted = waiting.values_list("waited_since", flat=True).first() if reports else None
    return reachable_since(reports, noted, now)
