"""How the runs of one job ended: final failures, attempts that Celery retried, and the newest traceback; one query."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models import BigIntegerField, BooleanField, QuerySet, UUIDField, Value
from django.db.models.functions import Cast, Left

from deadletters.models import Attempt, DeadLetter
from opsconsole.core.bounded import rows_of

MOST_FAILURES = 200
"""Final failures, and attempts, that are read of one job."""
SHORT_TEXT = 300
"""Characters of an error that a line of a job's history shows; one more is read, to tell that there are more."""

_FINAL, _ATTEMPT, _TRACEBACK = range(3)
_COLUMNS = (
    "kind", "id", "task_id", "happened_at", "retries", "error_class", "short_text", "outcome_class", "outcome_reason",
    "worker", "release", "repair_id", "is_exact", "is_late", "duration_ms",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class KnownFailure:
    """One run, or one attempt of a run, that ended badly."""

    id: UUID
    task_id: str
    happened_at: datetime
    retries: int
    error_class: str
    short_text: str
    outcome_class: str
    outcome_reason: str
    worker: str
    release: str
    repair_id: UUID | None
    is_exact: bool
    is_late: bool
    duration_ms: int | None

    @property
    def error_text(self) -> str:
        """The error as far as a line shows it."""
        return self.short_text if len(self.short_text) <= SHORT_TEXT else f"{self.short_text[:SHORT_TEXT]}…"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHistory:
    """What is known of a job's failures, each newest first; ``attempts`` are those that Celery retried by itself.

    ``traced`` is the newest final failure that has a traceback, and ``traceback`` the beginning of it.
    """

    finals: list[KnownFailure]
    attempts: list[KnownFailure]
    traced: UUID | None = None
    traceback: str = ""


def history_of(letter: DeadLetter, task_ids: Collection[str], *, longest: int) -> JobHistory:
    """Return the newest 200 failures of each kind, and ``longest`` characters of a traceback, which may have many more.

    ``task_ids`` are those under which the job is known to have run; those that failed for good are found by themselves.
    """
    finals = letter.occurrences.newest_first()
    of_job = Attempt.objects.filter(tenant=letter.tenant, source=letter.source).order_by("-happened_at", "-id")
    named = sorted({*task_ids} - {""})
    failed = finals.exclude(task_id="").values("task_id")[:MOST_FAILURES]
    found: dict[int, list[KnownFailure]] = {_FINAL: [], _ATTEMPT: [], _TRACEBACK: []}
    # Two queries for the attempts: one with OR between a list and a query would be answered by reading all of them.
    for kind, *values in rows_of(
        [
            _finals(finals)[:MOST_FAILURES],
            _attempts(of_job.filter(task_id__in=named))[:MOST_FAILURES],
            _attempts(of_job.filter(task_id__in=failed).exclude(task_id__in=named))[:MOST_FAILURES],
            _finals(finals.filter(traceback__isnull=False), kind=_TRACEBACK, text="traceback__text", most=longest)[:1],
        ]
    ):
        found[kind].append(KnownFailure(*values))
    head = next(iter(found[_TRACEBACK]), None)
    return JobHistory(
        finals=found[_FINAL],
        attempts=found[_ATTEMPT],
        traced=None if head is None else head.id,
        traceback="" if head is None else head.short_text,
    )


def _finals(
    rows: QuerySet[Any], *, kind: int = _FINAL, text: str = "error_text", most: int = SHORT_TEXT + 1
) -> QuerySet[Any]:
    made: QuerySet[Any] = rows.annotate(
        kind=Value(kind),
        short_text=Left(text, most),
        duration_ms=_nothing(BigIntegerField()),
    ).values_list(*_COLUMNS)
    return made


def _attempts(rows: QuerySet[Any]) -> QuerySet[Any]:
    made: QuerySet[Any] = rows.annotate(
        kind=Value(_ATTEMPT),
        short_text=Left("error_text", SHORT_TEXT + 1),
        repair_id=_nothing(UUIDField()),
        is_exact=Value(True, output_field=BooleanField()),
        is_late=Value(False, output_field=BooleanField()),
    ).values_list(*_COLUMNS)
    return made


def _nothing(field: Any) -> Cast:
    """Return NULL of a type: PostgreSQL takes one without for text, and puts no other column under it."""
    return Cast(Value(None), field)
