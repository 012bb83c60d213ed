"""What happened to an incident and its jobs, for its page: one statement."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db.models import Case, F, QuerySet, Sum, Value, When

from deadletters.models import DeadLetter
from deadletters.selectors import Hourly, hourly_of, hourly_rows
from incidents.models import Incident
from incidents.story import COLUMNS, Told, event_parts, part_of
from opsconsole.core.bounded import Tally, rows_of
from repairs.models import RETRIES, ActionState, ActionType, BatchState, RepairAction, RepairBatch

BATCHES = 50
DEEDS = 200
"""Single repairs that are looked at for the lines about what people did."""
COUNTED_BATCHES = 5
"""Batches whose ends are counted: each has up to a thousand repairs."""
AT_ONCE = timedelta(seconds=5)

_BATCH, _COUNT, _SINGLE, _RETRY, _OF_JOB, _HOUR = "batch", "count", "single", "retry", "of job", "hour"
_OWN = frozenset({_BATCH, _COUNT, _SINGLE, _RETRY, _OF_JOB, _HOUR})


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """What somebody did to jobs of an incident at once: a batch is one, and so is the same done to one after another.

    ``states`` count how it went, empty for a batch that is too far back to be counted. ``job`` names the job if it is
    one.
    """

    at: datetime
    who: str
    action_type: str
    jobs: int
    refused: int = 0
    states: dict[str, int] = field(default_factory=dict)
    reason: str = ""
    job: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentStory:
    """What an incident's page tells beside how it stands; lists are newest first.

    ``told`` are its ``event_parts``, ``deeds`` what people did to its jobs, ``latest_retry`` the state of the newest
    retry of the running episode (whether trying one first has been done, and how it ended), ``of_job`` the repairs of
    the job that is looked at, without what their own pages show.
    """

    told: Sequence[Told]
    deeds: Sequence[Deed]
    latest_retry: ActionState | None
    of_job: Sequence[RepairAction]
    hourly: Hourly | None


def story_of(
    incident: Incident, *, since: datetime | None, letter: DeadLetter | None, most_of_job: int
) -> IncidentStory:
    """Return an incident's story; the caller has authorised. One query, of which every part has a limit.

    Failures are counted by the hour from ``since`` on, not at all if it is None; ``letter`` is the job looked at.
    """
    parts = [*event_parts(incident), *_deed_parts(incident), _latest_retry(incident)]
    if letter is not None:
        parts.append(_of_job(letter)[:most_of_job])
    found: dict[str, list[Told]] = {}
    for values in rows_of(parts, [] if since is None else [_per_hour(incident, since)]):
        row = Told(*values)
        found.setdefault(row.part, []).append(row)
    told = [row for part in found if part not in _OWN for row in found[part]]
    deeds = [*_batch_deeds(found.get(_BATCH, []), found.get(_COUNT, [])), *_single_deeds(found.get(_SINGLE, []))]
    retry = next(iter(found.get(_RETRY, [])), None)
    return IncidentStory(
        told=told,
        deeds=sorted(deeds, key=lambda deed: deed.at, reverse=True),
        latest_retry=None if retry is None else ActionState(retry.state),
        of_job=[_as_repair(row, letter) for row in found.get(_OF_JOB, []) if letter is not None],
        hourly=None if since is None else hourly_of(incident, {row.what: row.number for row in found.get(_HOUR, [])}),
    )


def _deed_parts(incident: Incident) -> list[QuerySet[Any]]:
    """Return batches, how the repairs of the newest of them ended, and repairs of one job each."""
    batches = RepairBatch.objects.filter(incident=incident).order_by("-planned_at", "-id")
    counted = RepairAction.objects.filter(batch_id__in=batches.values("id")[:COUNTED_BATCHES])
    single = RepairAction.objects.filter(incident=incident, batch__isnull=True).newest_first()
    job = Case(When(letter__job_id="", then=F("letter__task_id")), default=F("letter__job_id"))
    return [
        part_of(
            _BATCH, batches, at="planned_at", id="id", who="planned_by", name="planned_by_name", state="state",
            text="letters",
        )[:BATCHES],
        part_of(
            _COUNT, counted.order_by().values("batch_id", "state").annotate(repairs=Sum(Value(1))), id="batch_id",
            state="state", number="repairs",
        ),
        part_of(
            _SINGLE, single, at="planned_at", id="letter_id", who="planned_by", name="planned_by_name",
            what="action_type", state="state", text=Case(When(reason="", then=F("reference")), default=F("reason")),
            more=job,
        )[:DEEDS],
    ]  # fmt: skip


def _latest_retry(incident: Incident) -> QuerySet[Any]:
    retries = RepairAction.objects.filter(
        incident=incident, action_type__in=RETRIES, planned_at__gte=incident.opened_at
    )
    if incident.is_resolved:
        retries = retries.none()
    return part_of(_RETRY, retries.exclude(state=ActionState.CANCELLED).newest_first(), state="state")[:1]


def _of_job(letter: DeadLetter) -> QuerySet[Any]:
    return part_of(
        _OF_JOB, RepairAction.objects.filter(letter=letter).newest_first(), at="planned_at", id="id",
        what="action_type", state="state", text="new_task_id", name="before", more="after", sent_at="sent_at",
        due_at="answer_due_at",
    )  # fmt: skip


def _as_repair(row: Told, letter: DeadLetter) -> RepairAction:
    return RepairAction(
        id=row.id, letter=letter, action_type=row.what, state=row.state, planned_at=row.moment, new_task_id=row.text,
        before=row.name, after=row.more, sent_at=row.sent_at, answer_due_at=row.due_at,
    )  # fmt: skip


def _per_hour(incident: Incident, since: datetime) -> Tally:
    rows, hour = hourly_rows(incident, since)
    columns: Mapping[str, str] = {"part": f"'{_HOUR}'", "what": hour, "number": "SUM(1)"}
    return Tally(rows=rows, by=hour, columns=[columns.get(name) for name in COLUMNS])


def _batch_deeds(batches: Iterable[Told], counts: Iterable[Told]) -> list[Deed]:
    states: dict[UUID | None, dict[str, int]] = {}
    for row in counts:
        states.setdefault(row.id, {})[row.state] = row.number
    deeds = []
    for place, batch in enumerate(batches):
        jobs = len(json.loads(batch.text))
        found = states.get(batch.id, {})
        is_told = place < COUNTED_BATCHES and batch.state == BatchState.PLANNED
        deeds.append(
            Deed(
                at=batch.moment,
                who=batch.name or batch.who,
                action_type=ActionType.RETRY_MESSAGE.value,
                jobs=jobs,
                refused=jobs - sum(found.values()) if is_told else 0,
                states=found,
            )
        )
    return deeds


def _single_deeds(repairs: Iterable[Told]) -> list[Deed]:
    """Put together what one person did to one job after another, with one reason; ``repairs`` are newest first."""
    runs: list[list[Told]] = []
    for repair in repairs:
        if runs and _continues(runs[-1], repair):
            runs[-1].append(repair)
        else:
            runs.append([repair])
    return [
        Deed(
            at=run[0].moment,
            who=run[0].name or run[0].who,
            action_type=run[0].what,
            jobs=len(run),
            states=dict(Counter(repair.state for repair in run)),
            reason=run[0].text,
            job=run[0].more if len(run) == 1 else "",
        )
        for run in runs
    ]


def _continues(run: Sequence[Told], earlier: Told) -> bool:
    later = run[-1]
    is_same = all(getattr(later, name) == getattr(earlier, name) for name in ("who", "what", "text"))
    # The same job again is another try, and how the first one went is to be seen.
    is_again = any(repair.id == earlier.id for repair in run)
    return is_same and not is_again and later.moment - earlier.moment <= AT_ONCE
