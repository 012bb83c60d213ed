"""What is written later of closed incidents, and whether the incidents' kept counts are the truth."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from uuid import UUID

from django.db.models import Count, F, Q

from deadletters.models import UNSETTLED, DeadLetter
from grants import audit
from grants.access import SYSTEM_CAPABILITY
from grants.operators import SYSTEM
from incidents.models import EpisodeEnd, Incident
from incidents.services import RESOLVED, save_incident
from opsconsole.core.canonical_json import canonical_json
from opsconsole.core.database import AnyOf
from opsconsole.core.ids import new_id
from repairs.models import SweepActionType, SweepRepair
from repairs.reconciliation.sweeping import Sweeping, Tally
from repairs.sql import beyond, record_repairs

COUNT_CORRECTED = "operations.incident_count_corrected"
STAMPED_AT_ONCE = 100
COUNTED_AT_ONCE = 100


# Stamping


def stamp(sweeping: Sweeping) -> None:
    """Write ``closed_at`` into the letters of ended episodes, which closing an incident leaves to this (C18).

    A page is a thousand letters of one incident, under its lock: 40,000 at once would hold up every recorder of it.
    Says nothing new about a letter: which ones are closed is read from their incident, with or without this.
    """
    last: UUID | None = None
    while size := sweeping.size(STAMPED_AT_ONCE):
        with sweeping.page():
            waiting = beyond(Incident.objects.unstamped(), ("id",), None if last is None else (last,))
            found = list(waiting.values_list("id", flat=True)[:size])
        for incident_id in found:
            while sweeping.size() and not _stamp_page(sweeping, incident_id):
                pass
        if len(found) < size:
            return
        last = found[-1]


def _stamp_page(sweeping: Sweeping, incident_id: UUID) -> bool:
    """Stamp some letters of one incident; returns whether those were the last."""
    with sweeping.page() as tally:
        size = sweeping.size()
        incident = Incident.objects.lock(incident_id)
        ended = incident.episode if incident.is_resolved else incident.episode - 1
        waiting = DeadLetter.objects.filter(
            incident=incident, state__in=UNSETTLED, closed_at__isnull=True, episode__lte=ended
        )
        rows = list(waiting.order_by("id").values_list("id", "episode")[:size])
        at = dict(EpisodeEnd.objects.filter(incident=incident).values_list("episode", "resolved_at"))
        for episode in {episode for _id, episode in rows}:
            ids = [letter_id for letter_id, of in rows if of == episode]
            # An episode without its end can only be an edited one: it was over by now.
            closed_at = at.get(episode) or tally.now
            tally.add(scanned=len(ids), repaired=waiting.filter(AnyOf("id", ids)).update(closed_at=closed_at))
        if rows:
            sweeping.incidents.add(incident.id)
        if len(rows) == size:
            return False
        Incident.objects.filter(id=incident.id).update(stamped_episode=ended)
        return True


# Counting


class CountVerdict(StrEnum):
    """What is done about an incident's kept count."""

    LEAVE = "leave"  # it is the truth
    CORRECT = "correct"  # it is not; something is unresolved
    CLOSE = "close"  # nothing is unresolved, so the incident is closed as it would have been


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """An incident's kept count of unresolved letters, and how many there are."""

    kept: int
    found: int


def decide_count(counted: Counted, *, is_resolved: bool) -> CountVerdict:
    """Say what is done about an incident whose letters were counted under its lock. Pure."""
    if is_resolved:
        # A resolved incident's letters read as closed through it: its count is 0 by definition.
        return CountVerdict.LEAVE
    if counted.found == 0:
        return CountVerdict.CLOSE
    return CountVerdict.LEAVE if counted.kept == counted.found else CountVerdict.CORRECT


def recount(sweeping: Sweeping) -> None:
    """Compare the kept counts of some unresolved incidents with their letters, and put right what differs.

    Goes round: a run looks at as many pages as its time allows and the next goes on where it stopped, so that the cost
    does not grow with what there is. Only what differs is locked and counted again. A difference is a bug of ours or an
    edit by hand, so it leaves an audit row.
    """
    for _round in range(ROUNDS):
        size = sweeping.size(COUNTED_AT_ONCE)
        if not size:
            return
        with sweeping.page() as tally:
            last = UUID(sweeping.cursor) if sweeping.cursor else None
            page = list(beyond(Incident.objects.unresolved(), ("id",), None if last is None else (last,))[:size])
            differing = _differing(page)
            tally.scanned += len(page)
            sweeping.cursor = str(page[-1].id) if len(page) == size else ""
        for incident_id in differing:
            with sweeping.page() as tally:
                _correct(sweeping, tally, incident_id)
        if not sweeping.cursor:
            return


ROUNDS = 20
"""Pages of one run: with one a minute every incident of two thousand is looked at each minute."""


def _differing(page: list[Incident]) -> list[UUID]:
    counts = dict(
        DeadLetter.objects.filter(AnyOf("incident", [one.id for one in page]), state__in=UNSETTLED)
        .filter(episode=F("incident__episode"))
        .order_by()
        .values_list("incident")
        .annotate(Count("id"))
    )
    return [
        one.id
        for one in page
        if decide_count(Counted(kept=one.unresolved_count, found=counts.get(one.id, 0)), is_resolved=one.is_resolved)
        is not CountVerdict.LEAVE
    ]


def _correct(sweeping: Sweeping, tally: Tally, incident_id: UUID) -> None:
    try:
        incident = Incident.objects.lock(incident_id)
    except Incident.DoesNotExist:
        return
    found = DeadLetter.objects.filter(Q(incident=incident), Q(state__in=UNSETTLED), Q(episode=incident.episode)).count()
    kept = incident.unresolved_count
    verdict = decide_count(Counted(kept=kept, found=found), is_resolved=incident.is_resolved)
    if verdict is CountVerdict.LEAVE:
        # A recorder was between its letter and its count.
        return
    key = f"count:{incident.id}:{incident.version}"
    row = SweepRepair(
        id=new_id(),
        run_id=sweeping.run_id,
        tenant=incident.tenant,
        action_type=SweepActionType.CORRECT_COUNT,
        entity_type="incident",
        entity_id=str(incident.id),
        operation_key=key,
        before=canonical_json({"state": str(incident.state), "unresolved": kept}),
        after=canonical_json({"state": "resolved" if verdict is CountVerdict.CLOSE else str(incident.state),
                              "unresolved": found}),
        planned_by=sweeping.started_by,
        applied_at=incident.locked_at,
    )  # fmt: skip
    if not record_repairs([row]):
        return
    incident.unresolved_count = found
    entries = [_entry(incident, COUNT_CORRECTED, key, {"found": found, "kept": kept, "run": str(sweeping.run_id)})]
    if verdict is CountVerdict.CLOSE:
        entries.append(_close(incident))
    else:
        save_incident(incident)
    audit.record_many(entries, at=incident.locked_at)
    sweeping.incidents.add(incident.id)
    tally.repaired += 1


def _close(incident: Incident) -> audit.AuditEntry:
    """Close a locked incident of which no letter is unresolved, as settling the last one would have."""
    code = "repaired"
    end = incident.close(
        by=SYSTEM.ref,
        name=SYSTEM.name,
        at=incident.locked_at,
        code=code,
        summary=f"[{code}] No job of it waits any more; its count was corrected.",
    )
    save_incident(incident)
    end.save(force_insert=True)
    return _entry(
        incident,
        RESOLVED,
        f"closed:{incident.id}:{incident.episode}",
        {"code": code, "episode": incident.episode, "number": incident.number, "state": "resolved"},
    )


def _entry(incident: Incident, action: str, key: str, outcome: dict[str, str | int]) -> audit.AuditEntry:
    return audit.AuditEntry(
        action=action,
        operator=SYSTEM,
        capability=SYSTEM_CAPABILITY,
        resource=incident.resource,
        key=key,
        outcome=dict(outcome),
    )
