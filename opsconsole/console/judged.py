"""What a retry of the failed jobs that need a decision would mean, for the overview: judged as the lists judge them.

Jobs that are alike in what a judgement looks at are judged together. Where there are few in all, each is checked to the
end, its stored message and arguments included, as on the list of failed jobs; many are judged by their rows, as on the
list of incidents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta

from django.db.models import Q

from deadletters.models import DeadLetter, LetterState
from deadletters.querysets import DeadLetterQuerySet
from deadletters.selectors import OpenJob, UnresolvedJobs, count_unresolved, unresolved_rows
from repairs.prospects import FULLY_CHECKED, Prospect, check_letter, prospect_of
from repairs.refusals import Served

LONGEST_AGE = timedelta(days=36_500)
"""An age beyond which a policy's limit is none, and could not be taken off a date."""

ByQueue = Counter[tuple[str, Prospect]]


def judge_waiting(letters: DeadLetterQuerySet, waiting: Sequence[UnresolvedJobs], now: datetime, limit: int) -> ByQueue:
    """Return how many of the ``waiting`` jobs of each queue a retry would mean what; ``limit`` is what was counted."""
    if not waiting:
        return Counter()
    served = {source: Served.lately(source) for source in sorted({one.source for one in waiting})}
    if sum(one.count for one in waiting) <= FULLY_CHECKED:
        return _checked(letters, served, now)
    too_old = _too_old(letters, waiting, served, limit)
    found: ByQueue = Counter()
    for one in waiting:
        old = min(too_old[one.alike], one.count)
        found[one.queue, Prospect.BLOCKED] += old
        row = OpenJob(one.outcome_class, one.message_state, one.is_set_aside, one.queue, now, one.job_type)
        found[one.queue, prospect_of(row, served[one.source])[0]] += one.count - old
    return found


def _checked(letters: DeadLetterQuerySet, served: dict[str, Served], now: datetime) -> ByQueue:
    """Check a few jobs to the end."""
    rows = unresolved_rows(letters).filter(state=LetterState.OPEN).select_related("incident", "message")
    found: list[DeadLetter] = list(rows.defer("payload_preview", "error_text")[:FULLY_CHECKED])
    return Counter(
        (one.queue, check_letter(one, one.incident, served=served[one.source], now=now).prospect)
        for one in found
        if one.source in served
    )


def _too_old(
    letters: DeadLetterQuerySet, waiting: Sequence[UnresolvedJobs], served: dict[str, Served], limit: int
) -> Counter[tuple[str, ...]]:
    """Return how many jobs of each kind have passed the age that the policy of their task sets; one query, or none."""
    condition = Q()
    for job_type, policies, at in {
        (one.job_type, served[one.source].policies, served[one.source].at) for one in waiting
    }:
        most = policies.for_task(job_type).max_age_seconds
        if most is not None and most < LONGEST_AGE.total_seconds():
            condition |= Q(job_type=job_type, first_seen_at__lt=at - timedelta(seconds=most))
    if not condition:
        return Counter()
    counted, _is_capped = count_unresolved(letters.filter(condition, state=LetterState.OPEN), limit)
    return Counter({one.alike: one.count for one in counted})
