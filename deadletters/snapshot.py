"""How the whole operation stands, in one answer (A7): job records, incidents, failed jobs, budgets, intake.

It lies here because it reads jobs, incidents and letters, which know nothing of each other. No table of records is
counted: triggers keep how many there are in each state, and the first of those that wait is one look into an index. So
it costs the same with a backlog of a million, which is when it is looked at. Every part goes through ``visible_to``, so
that it is what the lists would show.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models import (
    Case,
    Count,
    DateTimeField,
    F,
    IntegerField,
    Min,
    Q,
    QuerySet,
    Sum,
    Value,
    When,
)
from django.db.models.functions import Cast

from deadletters.listing import STANDINGS, UNRESOLVED
from deadletters.models import DeadLetter
from grants.actions import Action
from grants.operators import Operator
from grants.reading import authorise_anywhere, authorise_scope
from grants.selectors import plan_of
from grants.sql import Plan
from incidents.models import UNRESOLVED_STATES, Incident, IncidentState, Severity
from opsconsole.core.bounded import moment_of, rows_around, rows_of
from opsconsole.core.database import database_now
from opsconsole.jobs.models import (
    ACTIVE_RUNS,
    DUE,
    LEASED,
    ActionDelivery,
    BudgetPolicy,
    BudgetReservation,
    BudgetUsage,
    DeliveryState,
    EmailDelivery,
    EvidenceState,
    Job,
    JobState,
    NotificationDelivery,
    RunState,
    Stream,
    StreamTotal,
    SurgeState,
)
from opsconsole.jobs.models.budgets import ReservationStatus, SurgeMode
from opsconsole.jobs.models.deliveries import FAILED, FAILED_EMAIL
from opsconsole.jobs.models.totals import EXHAUSTED
from opsconsole.jobs.sql import FIRST, ROUTING_KIND, TOTALS_WITH_FIRST

NEWEST = 100
SHOWN_SURGES = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCounts:
    """What waits in one stream. ``oldest_due_at`` is when the first of what is pending or retrying was or will be due.

    The rest of ``total`` is done, or was withdrawn.
    """

    total: int = 0
    pending: int = 0
    in_flight: int = 0
    retrying: int = 0
    terminally_failed: int = 0
    oldest_due_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowCounts:
    """Workflow runs; ``oldest_active_at`` is the last change of the one that has stood still for longest.

    One that needs repair is not active, and stands still all the same.
    """

    total: int = 0
    active: int = 0
    repair_required: int = 0
    failed: int = 0
    oldest_active_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceCounts:
    """Requests for evidence; unavailable are also those whose job has died."""

    total: int = 0
    pending: int = 0
    fetching: int = 0
    unavailable: int = 0
    oldest_active_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetCounts:
    """What may be spent and what is: policies that are not retired, reservations that are held, units used so far."""

    active_policies: int = 0
    active_reservations: int = 0
    consumed_units: int = 0
    next_expiry_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentCounts:
    """Incidents that are not closed; high priority are the high and critical ones of them, taken or not."""

    open: int = 0
    acknowledged: int = 0
    high_priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSurge:
    """Whether a tenant's intake is in a surge."""

    tenant: str
    mode: str = SurgeMode.NORMAL.value
    entered_at: datetime | None = None
    recover_after: datetime | None = None
    reason_codes: tuple[str, ...] = ()
    revision: int = 0  # 0: nothing was ever said of this tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeSurge:
    """The worst mode of all visible tenants, ``normal`` if there is none, and the tenants that anything is said of."""

    mode: str = SurgeMode.NORMAL.value
    tenants: tuple[TenantSurge, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnresolvedLetter:
    """A failed job that waits for a decision or for its repair, and the record that it worked on, if it is ours."""

    id: UUID
    tenant: str
    source: str
    queue: str
    job_type: str
    job_id: str
    state: str  # as a reader sees it (C18)
    error_code: str
    occurrence_count: int
    first_seen_at: datetime
    last_seen_at: datetime
    incident_id: UUID
    record_type: str = ""
    record_id: str = ""
    report_id: UUID | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedDelivery:
    """Something that was to be sent and has failed for good, with the report that it is about."""

    delivery_type: str  # action, notification or email
    id: UUID
    tenant: str
    report_reference: str
    state: str
    attempt_count: int
    error_code: str
    updated_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """The counts of everything that jobs work on."""

    routing: StreamCounts = field(default_factory=StreamCounts)
    actions: StreamCounts = field(default_factory=StreamCounts)
    notifications: StreamCounts = field(default_factory=StreamCounts)
    emails: StreamCounts = field(default_factory=StreamCounts)
    workflows: WorkflowCounts = field(default_factory=WorkflowCounts)
    evidence: EvidenceCounts = field(default_factory=EvidenceCounts)
    budgets: BudgetCounts = field(default_factory=BudgetCounts)
    incidents: IncidentCounts = field(default_factory=IncidentCounts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A7, as of ``generated_at`` of the database's clock; both lists are newest first and hold 100 at most."""

    generated_at: datetime
    streams: Streams
    intake_surge: IntakeSurge
    unresolved_letters: tuple[UnresolvedLetter, ...]
    failed_deliveries: tuple[FailedDelivery, ...]


def operations_snapshot(operator: Operator, *, tenant: str | None = None) -> Snapshot:
    """Return how everything stands that ``operator`` may inspect, or, of that, what belongs to ``tenant`` (A7).

    Empty tables give zeros and nulls. Raises ``AccessDenied``, audited, for a tenant that they may not inspect as a
    whole (``*``: every one), and for who may inspect nothing at all.
    """
    authorise_scope(operator, Action.INSPECT, tenant=tenant)
    authorise_anywhere(operator, Action.INSPECT)
    scope = Scope(operator, plan_of(operator, Action.INSPECT), None if tenant == "*" else tenant)
    return Snapshot(
        generated_at=database_now(),
        streams=streams_of(scope),
        intake_surge=_surge(scope),
        unresolved_letters=_unresolved_letters(scope),
        failed_deliveries=_failed_deliveries(scope),
    )


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose snapshot it is: everything that ``plan`` lets ``operator`` see, of one tenant if it is named."""

    operator: Operator
    plan: Plan
    tenant: str | None = None

    def of(self, model: Any) -> Any:
        """Return the visible rows of a model."""
        rows = model.objects.visible_to(self.operator, Action.INSPECT, plan=self.plan)
        return rows if self.tenant is None else rows.filter(tenant=self.tenant)

    @property
    def has_parts_of_tenants(self) -> bool:
        """Whether some of what is seen are single actors' jobs, of which no total is kept: those are counted."""
        return any(not (shape.any_actor_type and shape.any_actor_id) for shape in self.plan.shapes)


# -- counts ------------------------------------------------------------------------------------------------------------

NO_TIME = Cast(Value(None), DateTimeField())
NO_WORD = Value("")
NO_MARK = Value(0, output_field=IntegerField())
COUNTED = ("part", "word", "mark", "n", "moment")
IS_GRAVE = Case(When(severity__gte=Severity.HIGH, then=Value(1)), default=NO_MARK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """So many rows of one part that are alike, and the first of their times."""

    word: str
    mark: int
    n: int
    moment: datetime | None


def streams_of(scope: Scope) -> Streams:
    """Return all counts, with two queries."""
    return _as_streams([*_kept(scope), *rows_of(list(_counted(scope)))])


def kept_streams_of(scope: Scope) -> Streams:
    """Return the counts of what totals are kept of, with one query; those of budgets and incidents are left out.

    Of routing too, for who sees single actors' jobs of a tenant: theirs would have to be counted.
    """
    return _as_streams(_kept(scope))


def _as_streams(rows: Iterable[tuple[Any, ...]]) -> Streams:
    found: dict[str, list[Alike]] = {}
    for part, word, mark, n, moment in rows:
        one = Alike(word=word, mark=mark, n=int(n or 0), moment=None if moment is None else moment_of(moment))
        found.setdefault(part, []).append(one)
    return Streams(
        routing=_stream(found.get(Stream.ROUTING, [])),
        actions=_stream(found.get(Stream.ACTIONS, [])),
        notifications=_stream(found.get(Stream.NOTIFICATIONS, [])),
        emails=_stream(found.get(Stream.EMAILS, [])),
        workflows=_workflows(found.get(Stream.WORKFLOWS, [])),
        evidence=_evidence(found.get(Stream.EVIDENCE, [])),
        budgets=_budgets(found),
        incidents=_incidents(found.get("incidents", [])),
    )


def _kept(scope: Scope) -> list[tuple[Any, ...]]:
    """Return the rows, as COUNTED names them, of what totals are kept of."""
    totals = scope.of(StreamTotal)
    if scope.has_parts_of_tenants:
        totals = totals.exclude(stream=Stream.ROUTING)
    rows = rows_around(totals.values("tenant", "stream", "state", "count"), TOTALS_WITH_FIRST)
    return [(stream, state, 0, n, moment) for stream, state, n, moment in rows]


def _counted(scope: Scope) -> Iterator[QuerySet[Any, Any]]:
    """Yield the queries, with rows of COUNTED, of what no total is kept of: there is little of it."""
    if scope.has_parts_of_tenants:
        jobs = scope.of(Job).filter(kind=ROUTING_KIND)
        yield _grouped(Stream.ROUTING, jobs, word=F("state"), moment=Min("available_at"))
    yield _grouped("policies", scope.of(BudgetPolicy).filter(retired_at__isnull=True))
    held = scope.of(BudgetReservation).filter(status=ReservationStatus.RESERVED)
    yield _grouped("reservations", held, moment=Min("expires_at"))
    yield _grouped("units", scope.of(BudgetUsage), n=Sum("consumed_units"))
    open_ones = scope.of(Incident).filter(state__in=UNRESOLVED_STATES)
    yield _grouped("incidents", open_ones, word=F("state"), mark=IS_GRAVE)


def _grouped(
    part: str, rows: Any, *, word: Any = NO_WORD, mark: Any = NO_MARK, n: Any = None, moment: Any = NO_TIME
) -> QuerySet[Any, Any]:
    return (  # type: ignore[no-any-return]
        rows.order_by()
        .annotate(part=Value(str(part)), word=word, mark=mark)
        .values("part", "word", "mark")
        .annotate(n=Count("*") if n is None else n, moment=moment)
        .values_list(*COUNTED)
    )


def _stream(rows: list[Alike]) -> StreamCounts:
    return StreamCounts(
        total=sum(one.n for one in rows),
        pending=_sum(rows, "pending"),
        in_flight=_sum(rows, *LEASED, DeliveryState.DELIVERING),
        retrying=_sum(rows, "retrying"),
        terminally_failed=_sum(rows, JobState.DEAD, DeliveryState.FAILED, EXHAUSTED),
        oldest_due_at=_first(rows, *DUE, EXHAUSTED),
    )


def _workflows(rows: list[Alike]) -> WorkflowCounts:
    return WorkflowCounts(
        total=sum(one.n for one in rows),
        active=_sum(rows, *ACTIVE_RUNS),
        repair_required=_sum(rows, RunState.REPAIR_REQUIRED),
        failed=_sum(rows, RunState.FAILED),
        oldest_active_at=_first(rows, *FIRST[Stream.WORKFLOWS][0]),
    )


def _evidence(rows: list[Alike]) -> EvidenceCounts:
    return EvidenceCounts(
        total=sum(one.n for one in rows),
        pending=_sum(rows, EvidenceState.PENDING),
        fetching=_sum(rows, EvidenceState.FETCHING),
        unavailable=_sum(rows, EvidenceState.UNAVAILABLE, EvidenceState.FAILED),
        oldest_active_at=_first(rows, *FIRST[Stream.EVIDENCE][0]),
    )


def _budgets(found: dict[str, list[Alike]]) -> BudgetCounts:
    held = found.get("reservations", [])
    return BudgetCounts(
        active_policies=_sum(found.get("policies", []), ""),
        active_reservations=_sum(held, ""),
        consumed_units=_sum(found.get("units", []), ""),
        next_expiry_at=_first(held, ""),
    )


def _incidents(rows: list[Alike]) -> IncidentCounts:
    return IncidentCounts(
        open=_sum(rows, IncidentState.OPEN),
        acknowledged=_sum(rows, IncidentState.ACKNOWLEDGED),
        high_priority=sum(one.n for one in rows if one.mark),
    )


def _sum(rows: Iterable[Alike], *words: str) -> int:
    return sum(one.n for one in rows if one.word in words)


def _first(rows: Iterable[Alike], *words: str) -> datetime | None:
    return min((one.moment for one in rows if one.word in words and one.moment is not None), default=None)


# -- rows --------------------------------------------------------------------------------------------------------------

LETTER_COLUMNS = (
    "id", "tenant", "source", "queue", "job_type", "job_id", "error_code", "occurrence_count", "first_seen_at",
    "last_seen_at", "incident_id",
)  # fmt: skip
REPORTS = {
    "action": (ActionDelivery, FAILED, "report__reference"),
    "notification": (NotificationDelivery, FAILED, "notice__report__reference"),
    "email": (EmailDelivery, FAILED_EMAIL, "message__report__reference"),
}


def _surge(scope: Scope) -> IntakeSurge:
    """Return what is said of the tenants' intake, those that are not normal first."""
    rows = scope.of(SurgeState).order_by(Case(When(mode=SurgeMode.NORMAL, then=1), default=0), "tenant")[:SHOWN_SURGES]
    found = [
        TenantSurge(
            tenant=row.tenant,
            mode=row.mode,
            entered_at=row.entered_at,
            recover_after=row.recover_after,
            reason_codes=tuple(json.loads(row.reason_codes)),
            revision=row.revision,
        )
        for row in rows
    ]
    if scope.tenant is not None and not found:
        found = [TenantSurge(tenant=scope.tenant)]
    modes = {one.mode for one in found}
    worst = next((mode for mode in (SurgeMode.SURGE, SurgeMode.ELEVATED) if mode in modes), SurgeMode.NORMAL)
    return IntakeSurge(mode=worst.value, tenants=tuple(found))


def _unresolved_letters(scope: Scope) -> tuple[UnresolvedLetter, ...]:
    """Return the newest unresolved letters, with the records of those that are jobs of our ledger; two queries."""
    letters = scope.of(DeadLetter)
    rows = rows_of(
        [
            letters.filter(STANDINGS[name])
            .order_by("-last_seen_at", "-id")
            .annotate(standing=Value(name))
            .values_list(*LETTER_COLUMNS, "standing")[:NEWEST]
            for name in UNRESOLVED
        ]
    )
    dicts = [dict(zip((*LETTER_COLUMNS, "state"), row, strict=True)) for row in rows]
    for one in dicts:
        one |= {name: UUID(str(one[name])) for name in ("id", "incident_id")}
        one |= {name: moment_of(one[name]) for name in ("first_seen_at", "last_seen_at")}
    dicts = sorted(dicts, key=lambda one: (one["last_seen_at"], one["id"]), reverse=True)[:NEWEST]
    records = _records_of(scope, [one["job_id"] for one in dicts])
    return tuple(UnresolvedLetter(**one, **records.get(one["job_id"], {})) for one in dicts)


def _records_of(scope: Scope, job_ids: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return what the jobs of these ids work on, where the ledger has them."""
    ids = [found for text in job_ids if (found := _as_id(text)) is not None]
    if not ids:
        return {}
    columns = ("record_type", "record_id", "report_id")
    rows = scope.of(Job).filter(id__in=ids).values_list("id", *columns)
    return {str(job_id): dict(zip(columns, values, strict=True)) for job_id, *values in rows}


def _as_id(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def _failed_deliveries(scope: Scope) -> tuple[FailedDelivery, ...]:
    """Return the newest of what could not be sent, of all three kinds together; one query."""
    rows = rows_of([_newest_failed(scope, name, *how) for name, how in REPORTS.items()])
    found = [
        FailedDelivery(
            delivery_type=name,
            id=UUID(str(row_id)),
            tenant=tenant,
            report_reference=reference,
            state=state,
            attempt_count=attempts,
            error_code=code,
            updated_at=moment_of(updated_at),
        )
        for name, row_id, tenant, reference, state, attempts, code, updated_at in rows
    ]
    return tuple(sorted(found, key=lambda one: (one.updated_at, one.id), reverse=True)[:NEWEST])


def _newest_failed(scope: Scope, name: str, model: Any, failed: Q, reference: str) -> Any:
    return (
        scope.of(model)
        .filter(failed)
        .order_by("-updated_at", "-id")
        .annotate(delivery_type=Value(name), reference=F(reference))
        .values_list(
            "delivery_type", "id", "tenant", "reference", "state", "attempt_count", "last_error_code", "updated_at"
        )[:NEWEST]
    )
