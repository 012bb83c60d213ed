"""Reads that span incidents, letters and repairs: the two pages that people decide on, and lists of repairs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from deadletters import selectors as letters_selectors
from deadletters.models import Attempt, DeadLetter, Occurrence
from grants.actions import Action
from grants.models import AuditEvent, Verdict
from grants.operators import Operator
from grants.reading import authorise_anywhere, authorise_read_of, authorise_scope
from grants.resources import Resource
from incidents.models import EpisodeEnd, Incident
from incidents.selectors import episodes_of, find_incident
from opsconsole.core.database import database_now
from opsconsole.core.errors import OpsError
from opsconsole.core.keyset import Page, Source, read_page
from repairs.errors import BatchNotFound, LetterNotFound, ReconciliationRunNotFound, RepairNotFound
from repairs.models import (
    ActionState,
    ReconciliationRun,
    RepairAction,
    RepairBatch,
    RunState,
    SweepRepair,
)
from repairs.refusals import Served, refuse_unrepairable

SHOWN = 50
TIMELINE_REPAIRS = 1_000
STATES = tuple(ActionState.values)
RUN_STATES = tuple(RunState.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentPage:
    """One incident with what a person decides by: its newest letters and repairs, and how it ended before."""

    incident: Incident
    outcomes: dict[str, Any]
    letters: list[DeadLetter]
    repairs: list[RepairAction]
    episodes: list[EpisodeEnd]


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterPage:
    """One letter with its whole history, and what a retry would be told just now.

    ``refusal`` is why it could not be retried; without one, ``warnings`` are what its operator should know first.
    """

    letter: DeadLetter
    occurrences: list[Occurrence]
    attempts: list[Attempt]
    repairs: list[RepairAction]
    refusal: OpsError | None
    warnings: list[str]

    @property
    def traceback(self) -> str:
        """The newest occurrence's traceback, redacted."""
        return self.occurrences[0].traceback_text if self.occurrences else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEntry:
    """One thing that happened to an incident; ``kind`` says what ``details`` hold."""

    id: UUID
    at: datetime
    kind: str  # event | occurrence | repair
    what: str
    who: str
    details: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairFilter:
    """Which repairs are wanted; an empty field wants all."""

    states: tuple[str, ...] = ()
    tenant: str | None = None
    incident: UUID | None = None
    letter: UUID | None = None
    batch: UUID | None = None


def incident_page(operator: Operator, incident_id: UUID) -> IncidentPage:
    """Return an incident's page; raises ``IncidentNotFound``, audited, also for one that is not visible (A8)."""
    incident = find_incident(operator, incident_id)
    repairs = RepairAction.objects.visible_to(operator, Action.INSPECT).filter(incident_id=incident.id)
    return IncidentPage(
        incident=incident,
        outcomes=letters_selectors.outcome_counts(incident),
        letters=letters_selectors.newest_letters(operator, incident, SHOWN),
        repairs=list(repairs.newest_first()[:SHOWN]),
        episodes=episodes_of(incident),
    )


def find_letter(operator: Operator, letter_id: UUID) -> DeadLetter:
    """Return one letter with its incident; raises ``LetterNotFound``, audited, also for one that is not visible."""
    authorise_read_of(operator, Action.INSPECT, DeadLetter.objects.scope(letter_id), LetterNotFound())
    letter: DeadLetter | None = DeadLetter.objects.select_related("incident").filter(id=letter_id).first()
    if letter is None:
        raise LetterNotFound
    return letter


def letter_page(operator: Operator, letter_id: UUID) -> LetterPage:
    """Return a letter's page; raises ``LetterNotFound``, audited, also for one that is not visible."""
    letter = find_letter(operator, letter_id)
    refusal, warnings = preview_retry(letter)
    repairs = RepairAction.objects.visible_to(operator, Action.INSPECT).filter(letter_id=letter.id)
    return LetterPage(
        letter=letter,
        occurrences=letters_selectors.occurrences_of(letter),
        attempts=letters_selectors.attempts_of(letter),
        repairs=list(repairs.newest_first()[:SHOWN]),
        refusal=refusal,
        warnings=warnings,
    )


def preview_retry(letter: DeadLetter) -> tuple[OpsError | None, list[str]]:
    """Return why retrying ``letter`` (with its incident) would be refused just now, or else the warnings with it."""
    now = database_now()
    served = Served.by(letter.source, now)
    try:
        warnings = refuse_unrepairable(
            letter, letter.incident, served=served, now=now, provider_checked=False, run_expired=False
        )
    except OpsError as refusal:
        return refusal, []
    return None, warnings


def timeline(
    operator: Operator, incident_id: UUID, *, limit: int = 50, cursor: str | None = None
) -> Page[TimelineEntry]:
    """Return a page of what happened to an incident, newest first: events, failures and repairs.

    Read from the audit trail and the rows themselves, not stored a second time. Failures are those of its 1,000
    newest letters, repairs its 1,000 newest. Raises ``IncidentNotFound``, audited.
    """
    incident = find_incident(operator, incident_id)
    events = AuditEvent.objects.filter(
        target_type="incident", target_id=str(incident.id), tenant=incident.tenant, verdict=Verdict.ALLOWED
    )
    newest = RepairAction.objects.filter(incident_id=incident.id).newest_first().values("id")[:TIMELINE_REPAIRS]
    repairs = RepairAction.objects.filter(id__in=newest)
    occurrences = letters_selectors.occurrences_of_incident(incident)
    sources: list[Source[TimelineEntry]] = [
        Source(events, ("at", "id"), _event_entry),
        Source(occurrences.rows, occurrences.columns, _occurrence_entry),
        Source(repairs, ("planned_at", "id"), _repair_entry),
    ]
    return read_page("timeline", [sources], limit=limit, cursor=cursor)


def list_repairs(
    operator: Operator, wanted: RepairFilter, *, limit: int = 50, cursor: str | None = None
) -> Page[RepairAction]:
    """Return a page of the repairs that ``operator`` may see, newest first; raises ``AccessDenied``."""
    authorise_scope(operator, Action.INSPECT, tenant=wanted.tenant)
    chosen = {"letter_id": wanted.letter, "incident_id": wanted.incident, "batch_id": wanted.batch}
    chosen["tenant"] = None if wanted.tenant == "*" else wanted.tenant  # type: ignore[assignment]
    rows = RepairAction.objects.visible_to(operator, Action.INSPECT).filter(
        **{name: value for name, value in chosen.items() if value is not None}
    )
    if wanted.states:
        rows = rows.filter(state__in=wanted.states)
    return read_page("repairs", [[Source(rows, ("id",))]], limit=limit, cursor=cursor)


def find_repair(operator: Operator, repair_id: UUID) -> RepairAction:
    """Return one repair; raises ``RepairNotFound``, audited, also for one that is not visible."""
    authorise_read_of(operator, Action.INSPECT, RepairAction.objects.scope(repair_id), RepairNotFound())
    action: RepairAction | None = RepairAction.objects.filter(id=repair_id).first()
    if action is None:
        raise RepairNotFound
    return action


def find_batch(operator: Operator, batch_id: UUID) -> RepairBatch:
    """Return one batch; raises ``BatchNotFound``, audited, also for one that is not visible."""
    batch: RepairBatch | None = RepairBatch.objects.filter(id=batch_id).first()
    scope = None
    if batch is not None:
        scope = Resource(tenant=batch.tenant, target_type="repair_batch", target_id=str(batch.id))
    authorise_read_of(operator, Action.INSPECT, scope, BatchNotFound())
    if batch is None:
        raise BatchNotFound
    return batch


def list_runs(
    operator: Operator,
    *,
    kind: str | None = None,
    states: tuple[str, ...] = (),
    limit: int = 50,
    cursor: str | None = None,
) -> Page[ReconciliationRun]:
    """Return a page of the sweeps, newest first; raises ``AccessDenied`` for who may inspect nothing at all.

    A run belongs to no tenant and names none: whoever sees part of what it may have changed sees that it was.
    """
    authorise_anywhere(operator, Action.INSPECT)
    rows = ReconciliationRun.objects.all()
    if kind is not None:
        rows = rows.filter(kind=kind)
    if states:
        rows = rows.filter(state__in=states)
    return read_page("runs", [[Source(rows, ("id",))]], limit=limit, cursor=cursor)


def find_run(operator: Operator, run_id: UUID) -> ReconciliationRun:
    """Return one sweep; raises ``AccessDenied`` or ``ReconciliationRunNotFound``."""
    authorise_anywhere(operator, Action.INSPECT)
    run: ReconciliationRun | None = ReconciliationRun.objects.filter(id=run_id).first()
    if run is None:
        raise ReconciliationRunNotFound
    return run


def list_repairs_of_run(
    operator: Operator, run_id: UUID, *, limit: int = 50, cursor: str | None = None
) -> Page[SweepRepair]:
    """Return a page of what a sweep changed of the tenants that ``operator`` may see; raises what ``find_run`` does."""
    run = find_run(operator, run_id)
    rows = SweepRepair.objects.visible_to(operator, Action.INSPECT).filter(run=run)
    return read_page("repairs-of-run", [[Source(rows, ("id",))]], limit=limit, cursor=cursor)


def _event_entry(event: AuditEvent) -> TimelineEntry:
    return TimelineEntry(
        id=event.id,
        at=event.at,
        kind="event",
        what=event.action,
        who=event.operator_name,
        details={"reason": event.reason, "outcome": json.loads(event.outcome)},
    )


def _occurrence_entry(occurrence: Occurrence) -> TimelineEntry:
    return TimelineEntry(
        id=occurrence.id,
        at=occurrence.happened_at,
        kind="occurrence",
        what=occurrence.error_class,
        who=occurrence.worker,
        details={
            "letter": str(occurrence.letter_id),
            "job_type": occurrence.letter.job_type,
            "caught": occurrence.caught,
            "outcome_class": occurrence.outcome_class,
            "is_late": occurrence.is_late,
            "repair": None if occurrence.repair_id is None else str(occurrence.repair_id),
        },
    )


def _repair_entry(action: RepairAction) -> TimelineEntry:
    return TimelineEntry(
        id=action.id,
        at=action.planned_at,
        kind="repair",
        what=action.action_type,
        who=action.planned_by_name or action.planned_by,
        details={"letter": str(action.letter_id), "state": action.state, "reason": action.reason},
    )
