"""Whether sweeps run at all, for a banner: a console in which none does looks as quiet as one in which all is well."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Min

from opsconsole.core.database import recent_database_now
from repairs.models import ReconciliationRun, SeededEntry
from repairs.reconciliation.schedule import has_beat

OVERDUE_AFTER = timedelta(minutes=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepWatch:
    """When a sweep last finished, and whether that is too long ago."""

    finished_at: datetime | None = None
    is_overdue: bool = False


NOT_READ = SweepWatch()


def is_overdue(finished_at: datetime | None, begun_at: datetime | None, now: datetime) -> bool:
    """Say whether no sweep has finished for five minutes. Pure.

    While none ever has, what counts is when the schedule was made (``begun_at``); where there is no schedule, nothing
    will run by itself, and that is to be said at once.
    """
    since = finished_at or begun_at
    return since is None or since <= now - OVERDUE_AFTER


def read_watch() -> SweepWatch:
    """Return the state of the sweeps, with one query where one has ever finished."""
    finished_at = _last_end()
    begun_at = None
    if finished_at is None and has_beat():
        begun_at = SeededEntry._default_manager.aggregate(first=Min("created_at"))["first"]
    return SweepWatch(finished_at=finished_at, is_overdue=is_overdue(finished_at, begun_at, recent_database_now()))


def _last_end() -> datetime | None:
    # By the index from its end, not by a maximum over all of them.
    ended = ReconciliationRun.objects.ended_well().filter(finished_at__isnull=False)
    found: datetime | None = ended.order_by("-finished_at", "-id").values_list("finished_at", flat=True).first()
    return found
