"""How long things are kept, and removing what is older, a page at a time.

Never removed: a letter that is unresolved or whose repair is under way, a job that such a letter names, an incident,
and the audit trail. Each page is one short transaction; a run that is stopped anywhere leaves nothing half removed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from django.conf import settings
from django.db.models import Exists, F, Model, OuterRef, Q, QuerySet

from deadletters.models import (
    Attempt,
    DeadLetter,
    JournalFolder,
    LetterState,
    Occurrence,
    SealedMessage,
    TaskMinute,
    TracebackText,
    WorkerNode,
)
from incidents.models import Incident
from opsconsole.core.database import AnyOf, locked
from opsconsole.jobs.models import Job, JobState
from repairs.models import (
    LIVE,
    BatchState,
    ItemState,
    ReconciliationRun,
    Redrive,
    RedriveItem,
    RepairAction,
    RepairBatch,
    SweepRepair,
)
from repairs.reconciliation.sweeping import PAGE, Part, Sweeping
from repairs.sql import beyond, delete_rows

LETTERS_AT_ONCE = 200
"""Closed letters in one transaction: each has occurrences and repairs, and its incident is locked meanwhile."""
WORKERS_KEPT = timedelta(days=30)
QUIET_RUNS_KEPT = timedelta(days=1)
"""Runs that found nothing to do, of which there are thousands a day."""


def kept_days(setting: str, default: int) -> timedelta:
    """Return how long something is kept, as the settings say."""
    return timedelta(days=int(getattr(settings, setting, default)))


def letters_kept() -> timedelta:
    return kept_days("OPSCONSOLE_KEEP_CLOSED_LETTERS_DAYS", 90)


def messages_kept() -> timedelta:
    return kept_days("OPSCONSOLE_KEEP_MESSAGES_DAYS", 30)


def message_kept_until(letter: DeadLetter, incident: Incident) -> datetime | None:
    """Return until when a closed letter's message is kept, and so until when it can be retried.

    ``None`` while it is unresolved: then it is kept for as long as that.
    """
    if not letter.is_closed(incident):
        return None
    closed_at = letter.closed_at or incident.resolved_at
    return None if closed_at is None else closed_at + messages_kept()


# Closed letters


def remove_letters(sweeping: Sweeping) -> None:
    """Remove letters that were closed long ago, with their occurrences, messages and repairs.

    The incident stays, with its counts. It is locked, as whoever records a failure of one of its letters does: a letter
    that comes back is either reopened before this looks, or is a new one after it.
    """
    last: tuple[datetime, UUID] | None = None
    while size := sweeping.size(LETTERS_AT_ONCE):
        with sweeping.page() as tally:
            old = _closed_before(tally.now - letters_kept())
            found = list(beyond(old, ("closed_at", "id"), last).values_list("closed_at", "id", "incident_id")[:size])
            Incident.objects.lock_many(sorted({incident_id for _at, _id, incident_id in found}))
            ids = [letter_id for _at, letter_id, _incident in found]
            still = locked(old.filter(AnyOf("id", ids)), skip=True).values_list("id", flat=True)
            tally.add(scanned=len(found), repaired=_remove(list(still)))
        if len(found) < size:
            return
        last = found[-1][:2]


def _closed_before(moment: datetime) -> QuerySet[DeadLetter]:
    live = RepairAction.objects.filter(letter=OuterRef("pk"), state__in=LIVE)
    unended = RedriveItem.objects.filter(letter=OuterRef("pk"), state__in=(ItemState.WAITING, ItemState.PLANNED))
    old: QuerySet[DeadLetter] = (
        DeadLetter.objects.filter(closed_at__lte=moment)
        .exclude(state=LetterState.RETRYING)
        .exclude(DeadLetter.objects.is_unresolved())
        .exclude(Exists(live))
        .exclude(Exists(unended))
    )
    return old


def _remove(letter_ids: list[UUID]) -> int:
    if not letter_ids:
        return 0
    tracebacks = list(
        Occurrence.objects.filter(AnyOf("letter", letter_ids), traceback__isnull=False)
        .order_by()
        .values_list("traceback_id", flat=True)
        .distinct()
    )
    delete_rows(RedriveItem, "letter", letter_ids)
    delete_rows(RepairAction, "letter", letter_ids)
    delete_rows(SealedMessage, "letter", letter_ids)
    delete_rows(Occurrence, "letter", letter_ids)
    removed = delete_rows(DeadLetter, "id", letter_ids)
    # One that is recorded again just now is refused by the database and recorded by the next try.
    used = Occurrence.objects.filter(traceback=OuterRef("pk"))
    unused = TracebackText.objects.filter(AnyOf("digest", tracebacks)).exclude(Exists(used))
    delete_rows(TracebackText, "digest", list(unused.values_list("digest", flat=True)))
    return removed


def remove_messages(sweeping: Sweeping) -> None:
    """Remove the sealed messages of letters closed some time ago; the letters stay, and can't be retried any more."""
    last: tuple[datetime, UUID] | None = None
    while size := sweeping.size(PAGE):
        with sweeping.page() as tally:
            old = _closed_before(tally.now - messages_kept()).filter(message__isnull=False)
            found = list(beyond(old, ("closed_at", "id"), last).values_list("closed_at", "id")[:size])
            ids = [letter_id for _at, letter_id in found]
            # The letter's lock keeps a retry from being planned between the look and the removal.
            still = list(locked(old.filter(AnyOf("id", ids)), skip=True).values_list("id", flat=True))
            tally.add(scanned=len(found), repaired=delete_rows(SealedMessage, "letter", still))
        if len(found) < size:
            return
        last = found[-1]


# Everything else


class Old(NamedTuple):
    """What is old enough of a table, in the order of the columns that an index has it in; they end in the key."""

    rows: QuerySet[Any]
    order: tuple[str, ...]


Spared = Callable[[Sequence[Any], datetime], set[Any]]


def removing(model: type[Model], old: Callable[[datetime], Old], spared: Spared) -> Part:
    """Return the part that removes old rows of one table; ``spared`` says which of a page's keys are not."""
    key = str(model._meta.pk.attname if model._meta.pk is not None else "id")

    def run(sweeping: Sweeping) -> None:
        last: tuple[Any, ...] | None = None
        while size := sweeping.size(PAGE):
            with sweeping.page() as tally:
                rows, order = old(tally.now)
                found = list(beyond(rows, order, last).values_list(*order)[:size])
                keys = [row[-1] for row in found]
                kept = spared(keys, tally.now) if keys else set()
                gone = [one for one in keys if one not in kept]
                tally.add(scanned=len(found), repaired=delete_rows(model, key, gone))
            if len(found) < size:
                return
            last = found[-1]

    return run


def _none(_keys: Sequence[Any], _now: datetime) -> set[Any]:
    return set()


def _old_attempts(now: datetime) -> Old:
    before = now - kept_days("OPSCONSOLE_KEEP_ATTEMPTS_DAYS", 7)
    return Old(Attempt.objects.filter(happened_at__lte=before), ("happened_at", "id"))


def _old_counts(now: datetime) -> Old:
    before = now - kept_days("OPSCONSOLE_KEEP_COUNTS_DAYS", 30)
    return Old(TaskMinute.objects.filter(minute__lte=before), ("minute", "id"))


def _old_jobs(now: datetime) -> Old:
    before = now - kept_days("OPSCONSOLE_KEEP_FINISHED_JOBS_DAYS", 30)
    finished = (JobState.SUCCEEDED, JobState.DEAD, JobState.CANCELLED)
    return Old(Job.objects.filter(finished_at__lte=before, state__in=finished), ("finished_at", "id"))


def _jobs_of_letters(job_ids: Sequence[UUID], now: datetime) -> set[UUID]:
    """Return those jobs that a letter still needs: it is unresolved, or closed but can be retried yet."""
    names = {str(job_id): job_id for job_id in job_ids}
    # A ledger job's task has another id than the job, which is what the index of job ids holds.
    letters = DeadLetter.objects.filter(AnyOf("job_id", names)).exclude(job_id=F("task_id"))
    recent = Q(closed_at__isnull=True) | Q(closed_at__gt=now - messages_kept())
    needed = letters.filter(recent | DeadLetter.objects.is_unresolved())
    return {names[name] for name in needed.values_list("job_id", flat=True)}


def _old_batches(now: datetime) -> Old:
    repairs = RepairAction.objects.filter(batch=OuterRef("pk"))
    old = RepairBatch.objects.filter(planned_at__lte=now - letters_kept(), state=BatchState.PLANNED)
    return Old(old.exclude(Exists(repairs)), ("planned_at", "id"))


def _old_items(now: datetime) -> Old:
    return Old(RedriveItem.objects.filter(redrive__ended_at__lte=now - letters_kept()), ("id",))


def _old_redrives(now: datetime) -> Old:
    """A redrive goes with the last of its repairs, and not before another one that retries its failed jobs."""
    old = Redrive.objects.filter(ended_at__lte=now - letters_kept())
    for kept in (RedriveItem, RepairAction):
        old = old.exclude(Exists(kept._default_manager.filter(redrive=OuterRef("pk"))))
    return Old(old.exclude(Exists(Redrive.objects.filter(retry_of=OuterRef("pk")))), ("ended_at", "id"))


def _gone_workers(now: datetime) -> Old:
    return Old(WorkerNode.objects.filter(seen_at__lte=now - WORKERS_KEPT), ("seen_at", "id"))


def _closed_folders(now: datetime) -> Old:
    return Old(JournalFolder.objects.filter(closed_at__lte=now - WORKERS_KEPT), ("closed_at", "name"))


def _old_sweep_repairs(now: datetime) -> Old:
    return Old(SweepRepair.objects.filter(run__finished_at__lte=now - letters_kept()), ("id",))


def _old_runs(now: datetime) -> Old:
    repairs = SweepRepair.objects.filter(run=OuterRef("pk"))
    quiet = Q(state="succeeded", repaired_count=0, finished_at__lte=now - QUIET_RUNS_KEPT)
    old = ReconciliationRun.objects.filter(quiet | Q(finished_at__lte=now - letters_kept()))
    return Old(old.exclude(Exists(repairs)), ("finished_at", "id"))


RETENTION: tuple[Part, ...] = (
    remove_letters,
    remove_messages,
    removing(Attempt, _old_attempts, _none),
    removing(TaskMinute, _old_counts, _none),
    removing(Job, _old_jobs, _jobs_of_letters),
    removing(RepairBatch, _old_batches, _none),
    removing(RedriveItem, _old_items, _none),
    removing(Redrive, _old_redrives, _none),
    removing(WorkerNode, _gone_workers, _none),
    removing(JournalFolder, _closed_folders, _none),
    removing(SweepRepair, _old_sweep_repairs, _none),
    removing(ReconciliationRun, _old_runs, _none),
)
