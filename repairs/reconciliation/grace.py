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
- The newest report is older than a third of the lease: an outage that has just ended may have begun after it, and may
  have hidden every renewal since. It is waited for the next report. A living holder renews once a third of its lease
  is used up, and tries each second, so a newer report shows that it could.

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
class Reachable:
    """Since when everybody could have renewed a lease, and how old the report is that shows it; both at one moment.

    ``since`` is ``None`` if there is nobody who would have renewed one, ``shown_ago`` if nobody reports.
    """

    since: datetime | None = None
    shown_ago: timedelta | None = None

    def may_judge(self, lease: timedelta, now: datetime) -> bool:
        """Say whether whoever holds a lease of this length could have renewed it."""
        if self.since is None:
            return True
        if self.shown_ago is not None and self.shown_ago > lease / 3:
            return False
        return self.since + lease <= now


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """When a worker reported last, and since when without a break."""

    seen_at: datetime
    since: datetime


def reachable_by(reports: Sequence[Reports], noted: datetime | None, now: datetime) -> Reachable:
    """Return since when the database has been there for everybody, as far as ``reports`` show. Pure.

    ``noted`` is when an earlier run began to wait because nobody reported.
    """
    if not reports:
        return Reachable()
    unbroken = [one for one in reports if one.seen_at >= now - FRESH]
    if unbroken:
        newest = max(one.seen_at for one in unbroken)
        return Reachable(since=min(one.since for one in unbroken), shown_ago=now - newest)
    is_the_same_silence = noted is not None and all(one.seen_at <= noted for one in reports)
    return Reachable(since=noted if is_the_same_silence else now)


def read_reachable(now: datetime) -> Reachable:
    """Return ``reachable_by`` of what the database holds."""
    known = WorkerNode.objects.filter(stopped_at__isnull=True, seen_at__gte=now - REMEMBERED)
    reports = [
        Reports(seen_at=seen_at, since=since or started_at)
        for seen_at, since, started_at in known.values_list("seen_at", "reporting_since", "started_at")
    ]
    waiting = ReconciliationRun.objects.filter(waited_since__isnull=False).newest_first()
    noted = waiting.values_list("waited_since", flat=True).first() if reports else None
    return reachable_by(reports, noted, now)
