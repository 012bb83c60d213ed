"""Reads about letters: lists in their order, the parts of a letter's page, workers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.db import connections
from django.db.models import BigIntegerField, Case, DateTimeField, F, Q, QuerySet, Sum, Value, When
from django.db.models.functions import TruncHour

from deadletters import drainer
from deadletters.journal.events import Caught
from deadletters.listing import STANDINGS, UNRESOLVED, read_letters
from deadletters.models import (
    UNSETTLED,
    Attempt,
    DeadLetter,
    LetterState,
    Occurrence,
    WorkerNode,
)
from deadletters.outcome import OutcomeClass
from deadletters.policy import PolicyBook
from deadletters.querysets import DeadLetterQuerySet, TaskMinuteQuerySet
from deadletters.search import search_letters
from grants.actions import Action
from grants.operators import Operator
from grants.reading import authorise_anywhere, authorise_scope
from incidents.models import UNRESOLVED_STATES, Incident
from incidents.selectors import find_incident
from opsconsole.core.bounded import count_alike, rows_of_each
from opsconsole.core.database import database_now
from opsconsole.core.keyset import Page, Source, read_page
from opsconsole.core.search import asked

if TYPE_CHECKING:
    from deadletters.querysets import DeadLetterQuerySet

NO_ID, NO_EPISODE = UUID(int=0), -1
"""What no incident has: in the place of one in a query that is asked for several."""
SHOWN_OCCURRENCES = 50
SHOWN_ATTEMPTS = 100
COUNTED_LETTERS = 1_000
TIMELINE_LETTERS = 1_000
HOURLY_ROWS = 50_000
"""Rows that a chart of one incident looks at."""
EACH_FAILURE = 1_000
"""Jobs of an incident up to which its chart counts every failure; of more, each job once."""

STATES = (*STANDINGS, "unresolved")
ORDERINGS = ("default", "newest")


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterFilter:
    """Which letters are wanted; an empty field wants all. ``states`` are standings, or ``unresolved``."""

    states: tuple[str, ...] = ()
    tenant: str | None = None
    source: str | None = None
    job_type: str | None = None
    queue: str | None = None
    outcome_class: str | None = None
    error_class: str | None = None
    incident: UUID | None = None
    task_id: str | None = None
    job_id: str | None = None
    actor_type: str | None = None
    actor_id: str | None = None
    seen_after: datetime | None = None
    seen_before: datetime | None = None
    text: str | None = None

    def condition(self) -> Q:
        """Return the filter, but for the states, as a condition on letters."""
        columns = (
            "source", "job_type", "queue", "outcome_class", "error_class", "task_id", "actor_type", "actor_id",
        )  # fmt: skip
        wanted = {name: getattr(self, name) for name in columns}
        wanted |= {"incident_id": self.incident, "last_seen_at__gte": self.seen_after}
        wanted |= {"last_seen_at__lt": self.seen_before, "tenant": None if self.tenant == "*" else self.tenant}
        condition = Q(**{name: value for name, value in wanted.items() if value is not None})
        return condition if self.job_id is None else condition & DeadLetterQuerySet.is_of_job(self.job_id)

    def standings(self) -> tuple[str, ...]:
        """Return the wanted standings; empty for all."""
        chosen = dict.fromkeys(
            name for state in self.states for name in (UNRESOLVED if state == "unresolved" else (state,))
        )
        return tuple(chosen)


def list_letters(
    operator: Operator,
    wanted: LetterFilter,
    *,
    ordering: str = "default",
    limit: int = 100,
    cursor: str | None = None,
) -> Page[DeadLetter]:
    """Return a page of what ``operator`` may see, in A15's order or simply newest first.

    Raises ``AccessDenied`` for a scope they may not inspect, ``InvalidFields`` for a bad cursor.
    """
    authorise_scope(
        operator,
        Action.INSPECT,
        tenant=wanted.tenant,
        actor_type=wanted.actor_type or "",
        actor_id=wanted.actor_id or "",
    )
    rows = DeadLetter.objects.visible_to(operator, Action.INSPECT).filter(wanted.condition())
    if wanted.text is not None:
        rows = asked(search_letters(wanted.text, within=rows, anywhere=rows))
    is_narrow = any((wanted.text, wanted.incident, wanted.task_id, wanted.job_id))
    return read_letters(rows, wanted.standings(), ordering=ordering, limit=limit, cursor=cursor, is_narrow=is_narrow)


def letters_of_incident(
    operator: Operator,
    incident_id: UUID,
    *,
    states: tuple[str, ...] = (),
    ordering: str = "default",
    limit: int = 100,
    cursor: str | None = None,
) -> Page[DeadLetter]:
    """Return a page of an incident's letters; raises ``IncidentNotFound``, audited, for one that is not visible."""
    incident = find_incident(operator, incident_id)
    wanted = LetterFilter(states=states, incident=incident.id)
    rows = DeadLetter.objects.visible_to(operator, Action.INSPECT).filter(wanted.condition())
    return read_letters(rows, wanted.standings(), ordering=ordering, limit=limit, cursor=cursor, is_narrow=True)


def newest_letters(operator: Operator, incident: Incident, count: int) -> list[DeadLetter]:
    """Return an incident's letters for its page: unresolved ones first, each newest first."""
    rows = DeadLetter.objects.visible_to(operator, Action.INSPECT).filter(incident_id=incident.id)
    return read_letters(rows, (), ordering="default", limit=count, cursor=None, is_narrow=True).rows


def outcome_counts(incident: Incident) -> dict[str, Any]:
    """Count an incident's letters that wait for a decision by outcome class, the newest 1,000 of them at most."""
    waiting = DeadLetter.objects.filter(incident_id=incident.id, state=LetterState.OPEN)
    if incident.is_resolved:
        waiting = waiting.none()
    classes = list(
        waiting.filter(episode=incident.episode)
        .newest_first()
        .values_list("outcome_class", flat=True)[: COUNTED_LETTERS + 1]
    )
    counted = Counter(classes[:COUNTED_LETTERS])
    return {
        **{outcome.value: counted[outcome.value] for outcome in OutcomeClass},
        "is_capped": len(classes) > COUNTED_LETTERS,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Hourly:
    """How often an incident failed in each hour that has a failure.

    ``of_jobs`` says that each job counts once, at its last failure: what a big incident is cheap to be asked for.
    """

    counts: dict[datetime, int]
    of_jobs: bool
    is_capped: bool


def hourly_rows(incident: Incident, since: datetime) -> tuple[QuerySet[Any], str]:
    """Return an incident's final failures, 50,000 at most, and the expression by which they are counted: the hour."""
    rows: Any
    if incident.letter_count > EACH_FAILURE:
        rows = DeadLetter.objects.filter(incident_id=incident.id, last_seen_at__gte=since)
        rows = rows.annotate(moment=F("last_seen_at"))
    else:
        rows = Occurrence.objects.filter(letter__incident_id=incident.id, happened_at__gte=since)
        rows = rows.annotate(moment=F("happened_at"))
    is_postgresql = connections[rows.db].vendor == "postgresql"
    # SQLite has times as text, in UTC.
    hour = "to_char(moment AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24')" if is_postgresql else "substr(moment, 1, 13)"
    return rows.values("moment")[:HOURLY_ROWS], hour


def hourly_of(incident: Incident, counts: Mapping[str, int]) -> Hourly:
    """Return what was counted, by the hour as text."""
    return Hourly(
        counts={datetime.strptime(text, "%Y-%m-%d %H").replace(tzinfo=UTC): n for text, n in counts.items()},
        of_jobs=incident.letter_count > EACH_FAILURE,
        is_capped=sum(counts.values()) >= HOURLY_ROWS,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenJobs:
    """The jobs of one incident of a list that wait for a decision, as many as were looked at."""

    rows: list[OpenJob]
    is_capped: bool


@dataclass(frozen=True, slots=True)
class OpenJob:
    """What a list tells of one of them, named as the letter names it."""

    outcome_class: str
    message_state: str
    is_set_aside: bool
    queue: str
    first_seen_at: datetime
    job_type: str
    outcome_reason: str = ""


def open_jobs_of(incidents: Sequence[Incident], most: int) -> dict[UUID, OpenJobs]:
    """Return the open jobs of each of the incidents of a list, of each ``most`` at most; one query."""
    listed = [one for one in incidents if not one.is_resolved]
    columns = ("incident_id", "outcome_class", "message_state", "is_set_aside", "queue", "first_seen_at", "job_type")

    def of_one(incident_id: UUID, episode: int) -> Any:
        rows = DeadLetter.objects.filter(incident_id=incident_id, state=LetterState.OPEN, episode=episode)
        return rows.values_list(*columns)[: most + 1]

    rows = rows_of_each(of_one, (NO_ID, NO_EPISODE), [(one.id, one.episode) for one in listed])
    found: dict[UUID, list[OpenJob]] = {one.id: [] for one in listed}
    for incident_id, outcome, message, set_aside, queue, first_seen_at, job_type in rows:
        found[incident_id].append(OpenJob(outcome, message, set_aside, queue, first_seen_at, job_type))
    return {incident_id: OpenJobs(rows=jobs[:most], is_capped=len(jobs) > most) for incident_id, jobs in found.items()}


def task_policies() -> PolicyBook:
    """Return what is declared about tasks, as settings and table have it now."""
    return drainer.policies().book()


def occurrences_of(letter: DeadLetter) -> list[Occurrence]:
    """Return a letter's newest occurrences with their tracebacks, newest first."""
    rows = Occurrence.objects.filter(letter_id=letter.id).newest_first().select_related("traceback")
    return list(rows[:SHOWN_OCCURRENCES])


def attempts_of(letter: DeadLetter) -> list[Attempt]:
    """Return the attempts of a letter's task that Celery retried by itself, newest first; they are kept for days."""
    if not letter.task_id:
        return []
    rows = Attempt.objects.filter(tenant=letter.tenant, source=letter.source, task_id=letter.task_id)
    return list(rows.order_by("-retries", "-id")[:SHOWN_ATTEMPTS])


def occurrences_of_incident(incident: Incident) -> Source[Any]:
    """Return the occurrences of an incident's newest 1,000 letters, for its timeline.

    An occurrence does not name its incident, and sorting those of 50,000 letters for each page would cost seconds.
    """
    newest = DeadLetter.objects.filter(incident_id=incident.id).newest_first().values("id")[:TIMELINE_LETTERS]
    rows = Occurrence.objects.filter(letter_id__in=newest).select_related("letter")
    return Source(rows, ("happened_at", "id"))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """One worker as it last reported itself."""

    node: WorkerNode
    is_live: bool
    queues: list[str]
    tasks: dict[str, str]


def list_worker_nodes(
    operator: Operator,
    *,
    source: str | None = None,
    live: bool | None = None,
    limit: int = 50,
    cursor: str | None = None,
) -> Page[WorkerReport]:
    """Return the workers, last seen first; raises ``AccessDenied``, audited, for who may inspect nothing.

    A worker is no tenant's: it serves all of them, and its row holds host, queues and task names, nothing of any job.
    Whoever may inspect anything at all needs it to tell "failed" from "nobody serves it".
    """
    authorise_anywhere(operator, Action.INSPECT)
    now = database_now()
    rows = WorkerNode.objects.all()
    if source is not None:
        rows = rows.filter(source=source)
    if live is not None:
        alive = WorkerNode.objects.live(now)
        rows = rows.filter(id__in=alive.values("id")) if live else rows.exclude(id__in=alive.values("id"))
    alive_ids = set(WorkerNode.objects.live(now).values_list("id", flat=True))

    def report(node: WorkerNode) -> WorkerReport:
        return WorkerReport(
            node=node,
            is_live=node.id in alive_ids,
            queues=json.loads(node.queues),
            tasks=json.loads(node.tasks),
        )

    return read_page("nodes", [[Source(rows, ("seen_at", "id"), report)]], limit=limit, cursor=cursor)


# -- totals for the overview -------------------------------------------------------------------------------------------

SPAN_COLUMNS = ("received", "succeeded", "failed", "retried", "ignored", "revoked", "lost", "returned", "held")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnresolvedJobs:
    """Some unresolved failed jobs that are alike in what an overview shows of them."""

    source: str
    job_type: str
    queue: str
    outcome_class: str
    state: str
    message_state: str
    is_set_aside: bool
    count: int

    @property
    def needs_decision(self) -> bool:
        return self.state == LetterState.OPEN

    @property
    def alike(self) -> tuple[str, ...]:
        """What they have in common."""
        return (
            self.source, self.job_type, self.queue, self.outcome_class, self.state, self.message_state,
            str(self.is_set_aside),
        )  # fmt: skip


def unresolved_rows(letters: DeadLetterQuerySet) -> DeadLetterQuerySet:
    """Return the unresolved ones of ``letters``.

    The states of the incident are named, so that their index leads to the letters: "not resolved" would be answered by
    a look at every incident, and a letter that was closed with its incident stays open in its own state, so that there
    may be a million of those to pass over.
    """
    return letters.filter(state__in=UNSETTLED, episode=F("incident__episode"), incident__state__in=UNRESOLVED_STATES)


def count_unresolved(letters: DeadLetterQuerySet, limit: int) -> tuple[list[UnresolvedJobs], bool]:
    """Count unresolved letters by what an overview shows of them, ``limit`` at most; the second value: there are more.

    ``letters`` is what the operator may see.
    """
    columns = ("source", "job_type", "queue", "outcome_class", "state", "message_state", "is_set_aside")
    counted = [
        UnresolvedJobs(
            source=source,
            job_type=job_type,
            queue=queue,
            outcome_class=outcome,
            state=state,
            message_state=message,
            is_set_aside=bool(set_aside),
            count=count,
        )
        for source, job_type, queue, outcome, state, message, set_aside, count in count_alike(
            unresolved_rows(letters), columns, limit + 1
        )
    ]
    return counted, sum(one.count for one in counted) > limit


def count_failed_since(letters: DeadLetterQuerySet, since: datetime, limit: int) -> tuple[dict[UUID, int], bool]:
    """Count by incident the letters that failed since then, the newest ``limit`` of them; true = there are more.

    What a hold has put aside has not failed.
    """
    rows = letters.filter(last_seen_at__gte=since).exclude(caught=Caught.HELD).newest_first()
    found = {UUID(str(incident)): count for incident, count in count_alike(rows, ("incident_id",), limit + 1)}
    return found, sum(found.values()) > limit


def counts_per_hour(
    minutes: TaskMinuteQuerySet, *, start: datetime, end: datetime, recent: datetime | None = None
) -> list[dict[str, Any]]:
    """Sum the counts of each task from ``start`` to before ``end``: by source and ``hour``, apart from ``recent`` on.

    Those of the minutes from ``recent`` on have ``is_recent`` 1, so that one query serves both spans.
    """
    rows = minutes.filter(minute__gte=start, minute__lt=end)
    is_recent: Any = Value(0, output_field=BigIntegerField())
    if recent is not None:
        is_recent = Case(When(minute__gte=recent, then=Value(1)), default=Value(0), output_field=BigIntegerField())
    return list(
        rows.annotate(hour=TruncHour("minute", output_field=DateTimeField(), tzinfo=UTC), is_recent=is_recent)
        .values("source", "job_type", "hour", "is_recent")
        .annotate(**{f"n_{name}": Sum(name) for name in SPAN_COLUMNS})
        .order_by()
    )
