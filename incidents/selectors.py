"""Reads about incidents: the on-call list, one incident, how its episodes ended."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from django.db.models import Q

from grants.actions import Action
from grants.operators import Operator
from grants.reading import authorise_read_of, authorise_scope
from incidents.errors import IncidentNotFound
from incidents.models import UNRESOLVED_STATES, EpisodeEnd, Incident, IncidentState, Severity
from incidents.querysets import IncidentQuerySet
from incidents.search import search_incidents
from opsconsole.core.keyset import Page, Source, read_page
from opsconsole.core.search import asked

SHOWN_EPISODES = 50
STATES = (*IncidentState.values, "unresolved")
SEVERITIES = tuple(severity.label for severity in Severity)


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentFilter:
    """Which incidents are wanted; an empty field wants all.

    ``states`` may hold ``unresolved`` for open and acknowledged; ``holder`` is an operator's reference
    (``person:5``), a name, or ``me``.
    """

    states: tuple[str, ...] = ()
    severities: tuple[str, ...] = ()
    tenant: str | None = None
    source: str | None = None
    job_type: str | None = None
    holder: str | None = None
    text: str | None = None

    def condition(self, operator: Operator) -> Q:
        """Return the filter as a condition on incidents."""
        wanted = Q()
        if self.states:
            states = {state for name in self.states for state in _named_states(name)}
            wanted &= Q(state=states.pop()) if len(states) == 1 else Q(state__in=sorted(states))
        if self.severities:
            wanted &= Q(severity__in=[Severity.named(name) for name in self.severities])
        for column, value in (("source", self.source), ("job_type", self.job_type)):
            if value is not None:
                wanted &= Q(**{column: value})
        # "*" names no tenant: whoever may ask for every tenant gets them all.
        if self.tenant not in (None, "*"):
            wanted &= Q(tenant=self.tenant)
        if self.holder is not None:
            holder = operator.ref if self.holder == "me" else self.holder
            wanted &= Q(acknowledged_by=holder) | Q(acknowledged_by_name=holder)
        return wanted


def list_incidents(
    operator: Operator, wanted: IncidentFilter, *, limit: int = 50, cursor: str | None = None
) -> Page[Incident]:
    """Return a page of what ``operator`` may see: worst first, then newest seen, then id (A8).

    Raises ``AccessDenied`` for a tenant they may not inspect, ``InvalidFields`` for a bad cursor.
    """
    authorise_scope(operator, Action.INSPECT, tenant=wanted.tenant)
    rows = Incident.objects.visible_to(operator, Action.INSPECT).filter(wanted.condition(operator))
    if wanted.text is not None:
        rows = asked(search_incidents(wanted.text, within=rows, anywhere=rows, by=operator))
    source: Source[Incident] = Source(rows, ("severity", "last_seen_at", "id"))
    return read_page("incidents", [[source]], limit=limit, cursor=cursor)


def find_incident(operator: Operator, incident_id: UUID) -> Incident:
    """Return one incident; raises ``IncidentNotFound``, audited, also for one that ``operator`` may not inspect."""
    authorise_read_of(operator, Action.INSPECT, Incident.objects.scope(incident_id), IncidentNotFound())
    incident: Incident | None = Incident.objects.filter(id=incident_id).first()
    if incident is None:
        raise IncidentNotFound
    return incident


def incident_id_of_number(number: int) -> UUID | None:
    """Return the id behind a number that somebody said on the phone; whoever uses it is authorised by the id."""
    found: UUID | None = Incident.objects.filter(number=number).values_list("id", flat=True).first()
    return found


def episodes_of(incident: Incident) -> list[EpisodeEnd]:
    """Return how the newest episodes ended, newest first (C7)."""
    return list(EpisodeEnd.objects.filter(incident_id=incident.id).order_by("-episode")[:SHOWN_EPISODES])


def _named_states(name: str) -> tuple[str, ...]:
    return tuple(str(state) for state in UNRESOLVED_STATES) if name == "unresolved" else (name,)


LIGHT = (
    "id", "number", "tenant", "source", "severity", "state", "title", "job_type", "unresolved_count",
    "last_seen_at", "acknowledged_by", "acknowledged_by_name", "version",
)  # fmt: skip
"""What an overview shows of an incident: no text that may be long."""


def unresolved_incidents(incidents: IncidentQuerySet, limit: int) -> tuple[list[Incident], bool]:
    """Return the worst unresolved ones of ``incidents`` with their kept counts; the second value: there are more."""
    rows = list(incidents.filter(state__in=UNRESOLVED_STATES).worst_first().only(*LIGHT)[: limit + 1])
    return rows[:limit], len(rows) > limit
