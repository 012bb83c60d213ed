"""Lists of letters in A15's order, which mixes the letter's own column with its incident's, so that no index has it.

Acknowledging and closing write the incident alone (C18): whether an open letter counts as open, acknowledged or
resolved is only known with its incident. Joined and sorted, a page of a hundred thousand open letters costs as much as
all of them. So each part of the order is looked for in the way that finds it in few rows:

- **By walking** the index of the letters' own states, newest first, and keeping what counts as the part that is wanted.
  It fills a page at once where most of what is open (or held) by itself also counts so, which is the usual thing.
- **By incident**, where walking would pass over many: of each of the incidents that can have such letters, the index of
  its letters gives the newest; a page can only have letters of the incidents whose newest are the newest of all.

What is closed is written into each letter a little later (``closed_at``, by the sweep ``closed_letters``) and has an
index; letters of a closed incident that have not been told yet are found by way of those incidents.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from operator import itemgetter
from typing import TypeAlias
from uuid import UUID

from django.db.models import F, OuterRef, Q, Subquery

from deadletters.models import DECIDABLE, SETTLED, DeadLetter, LetterState
from deadletters.querysets import DeadLetterQuerySet
from incidents.models import UNRESOLVED_STATES, Incident, IncidentState
from opsconsole.core.bounded import rows_of_each
from opsconsole.core.database import AnyOf
from opsconsole.core.keyset import Key, Page, Source, read_page

CURRENT = Q(episode=F("incident__episode")) & ~Q(incident__state=IncidentState.RESOLVED)
CLOSED_WITH_INCIDENT = Q(incident__state=IncidentState.RESOLVED) | Q(episode__lt=F("incident__episode"))
STANDINGS: dict[str, Q] = {
    "open": Q(state=LetterState.OPEN, incident__state=IncidentState.OPEN, episode=F("incident__episode")),
    "acknowledged": Q(
        state=LetterState.OPEN, incident__state=IncidentState.ACKNOWLEDGED, episode=F("incident__episode")
    ),
    "held": Q(state=LetterState.HELD) & CURRENT,
    "retrying": Q(state=LetterState.RETRYING),
    "resolved": Q(state__in=DECIDABLE) & CLOSED_WITH_INCIDENT,
    **{str(state): Q(state=state) for state in SETTLED},
}
"""What ``DeadLetter.standing`` says, as conditions: the state that a reader sees (C18)."""
OF_INCIDENT = {
    "open": (LetterState.OPEN,),
    "acknowledged": (LetterState.OPEN,),
    "held": (LetterState.HELD,),
    "resolved": DECIDABLE,
}
"""The standings that depend on the incident, and the letters' own states that can have them."""
UNRESOLVED = ("open", "acknowledged", "held", "retrying")
SEGMENTS = (UNRESOLVED[:1], UNRESOLVED[1:], ("resolved", *(str(state) for state in SETTLED)))
"""A15: open, then acknowledged, then the rest. A's acknowledged is also what is being retried (C17)."""

KEY = ("last_seen_at", "id")
FIRST_WALK = 50
"""So many rows more than a page has are walked over before a part is looked for by its incidents."""
LONG_WALK = 5_000
MOST_INCIDENTS = 500
"""The newest letter of so many incidents is looked up in about two milliseconds (measured); of more, walking is
cheaper: each of them has such letters."""
NO_INCIDENT = UUID(int=0)
Row: TypeAlias = tuple[Key, DeadLetter]


def read_letters(
    rows: DeadLetterQuerySet,
    standings: tuple[str, ...],
    *,
    ordering: str,
    limit: int,
    cursor: str | None,
    is_narrow: bool = False,
) -> Page[DeadLetter]:
    """Return a page of ``rows`` with those standings (empty: all), in A15's order or simply newest first.

    ``is_narrow``: the rows are of one incident or of one job, or are found by their words, so that they are few or have
    an index of their own; then they are simply joined with their incidents.
    """
    rows = rows.select_related("incident")
    if ordering == "newest":
        if standings:
            condition = Q()
            for name in standings:
                condition |= STANDINGS[name]
            rows = rows.filter(condition)
        return read_page("letters:newest", [[Source(rows, KEY)]], limit=limit, cursor=cursor)
    parts = _joined if is_narrow else _parts
    segments = [parts(rows, segment, standings) for segment in SEGMENTS]
    return read_page("letters:default", segments, limit=limit, cursor=cursor)


def _joined(rows: DeadLetterQuerySet, segment: tuple[str, ...], standings: tuple[str, ...]) -> list[Source[DeadLetter]]:
    """Return the sources of one segment of a few letters."""
    if not standings and "resolved" in segment:
        return [Source(rows.exclude(state=LetterState.RETRYING).exclude(Q(state__in=DECIDABLE) & CURRENT), KEY)]
    return [Source(rows.filter(STANDINGS[name]), KEY) for name in segment if not standings or name in standings]


def _parts(rows: DeadLetterQuerySet, segment: tuple[str, ...], standings: tuple[str, ...]) -> list[Source[DeadLetter]]:
    """Return the sources of one segment, each of which an index answers."""
    if not standings and "resolved" in segment:
        # One pass over all that is closed, whatever its state: it is nearly everything, so one for each state would be
        # five too many.
        told = rows.filter(closed_at__isnull=False).exclude(state=LetterState.RETRYING)
        return [Source(told, KEY), *_untold(rows, "resolved")]
    found: list[Source[DeadLetter]] = []
    for name in segment:
        if standings and name not in standings:
            continue
        if name == "resolved":
            found += [Source(rows.filter(state=state, closed_at__isnull=False), KEY) for state in DECIDABLE]
        found += _untold(rows, name) if name in OF_INCIDENT else [Source(rows.filter(STANDINGS[name]), KEY)]
    return found


def _untold(rows: DeadLetterQuerySet, standing: str) -> list[Source[DeadLetter]]:
    """Return the letters of a standing that their incident says, of what has not been told that it was closed."""
    untold = rows.filter(closed_at__isnull=True)
    of = Incidents(standing)
    return [ByIncident(untold.filter(state=state), KEY, standing=standing, of=of) for state in OF_INCIDENT[standing]]


class Incidents:
    """The incidents of which letters of a standing can be; asked for once, and no more of them than are used."""

    def __init__(self, standing: str) -> None:
        if standing == "resolved":
            self._rows = Incident.objects.unstamped()
        else:
            states = UNRESOLVED_STATES if standing == "held" else (standing,)
            self._rows = Incident.objects.filter(state__in=states)

    @cached_property
    def ids(self) -> list[UUID]:
        return list(self._rows.values_list("id", flat=True)[: MOST_INCIDENTS + 1])


@dataclass(frozen=True, slots=True)
class ByIncident(Source[DeadLetter]):
    """Of letters of one own state, open or held, those that count as ``standing``, which their incidents say."""

    standing: str = field(kw_only=True)
    of: Incidents = field(kw_only=True)

    def take(self, bound: Key | None, count: int, *, backwards: bool) -> list[Row]:
        """Return up to ``count`` letters beyond ``bound``, next to it first."""
        incidents = self.of.ids
        if not incidents:
            return []
        if self.standing in ("acknowledged", "resolved") and len(incidents) <= MOST_INCIDENTS:
            # Most of what is open by itself is neither: walking would mostly pass over.
            return self._by_incident(incidents, bound, count, backwards=backwards)
        # Explicitly, since a dataclass with slots is another class than the one that super() was written in.
        walked = Source.take(self, bound, count + FIRST_WALK, backwards=backwards)
        found = [(key, row) for key, row in walked if row.standing(row.incident) == self.standing][:count]
        wanted = count - len(found)
        if not wanted or len(walked) < count + FIRST_WALK:
            return found
        if len(incidents) <= MOST_INCIDENTS:
            return found + self._by_incident(incidents, walked[-1][0], wanted, backwards=backwards)
        return found + self._by_long_walks(walked[-1][0], wanted, backwards=backwards)

    def _by_incident(self, incidents: list[UUID], bound: Key | None, count: int, *, backwards: bool) -> list[Row]:
        """Return letters beyond ``bound`` by way of their incidents.

        A page comes from ``count`` incidents at most, those of which the next letter is the next of all.
        """
        rows = self.beyond(bound, backwards=backwards).filter(STANDINGS[self.standing])
        if len(incidents) > count:
            end, incidents = self._next_of(bound, incidents, count, backwards=backwards)
            if end is not None:
                within = Q(last_seen_at__lte=end) if backwards else Q(last_seen_at__gte=end)
                rows = rows.filter(AnyOf("incident", incidents)).filter(within)
                return [((row.last_seen_at, row.id), row) for row in rows[:count]]
        keys = rows_of_each(
            lambda incident: rows.filter(incident_id=incident).values_list(*KEY)[:count],
            (NO_INCIDENT,),
            [(incident,) for incident in incidents],
        )
        keys.sort(reverse=not backwards)
        rows = rows.filter(AnyOf("id", [letter_id for _, letter_id in keys[:count]]))
        return [((row.last_seen_at, row.id), row) for row in rows]

    def _next_of(
        self, bound: Key | None, incidents: list[UUID], count: int, *, backwards: bool
    ) -> tuple[datetime | None, list[UUID]]:
        """Return the incidents with the next letters, and how far from ``bound`` the last of ``count`` of them has one.

        None in the place of that, and all that have any, where those are not so many.
        """
        rows = self.beyond(bound, backwards=backwards).filter(incident_id=OuterRef("pk"))
        # What the incident's state says holds of all of them; with the join that asks it, each takes twice as long.
        is_resolved = self.standing == "resolved"
        rows = rows.filter(STANDINGS["resolved"] if is_resolved else Q(episode=OuterRef("episode")))
        nearest = Subquery(rows.values("last_seen_at")[:1])
        tops = Incident.objects.filter(AnyOf("id", incidents)).annotate(nearest=nearest).values_list("nearest", "id")
        ranked = sorted(
            (pair for pair in tops.order_by() if pair[0] is not None), key=itemgetter(0), reverse=not backwards
        )
        if len(ranked) < count:
            return None, [incident for _, incident in ranked]
        # Letters may have been seen at the same moment: who is level with the last incident is in.
        end = ranked[count - 1][0]
        return end, [incident for at, incident in ranked if at == end or (at < end) is backwards]

    def _by_long_walks(self, bound: Key, count: int, *, backwards: bool) -> list[Row]:
        """Return letters beyond ``bound`` by going on along the index, looking at ids alone."""
        ids: list[UUID] = []
        columns = (*KEY, "state", "episode", "incident__episode", "incident__state")
        while len(ids) < count:
            walked = list(self.beyond(bound, backwards=backwards).values_list(*columns)[:LONG_WALK])
            for _, letter_id, own, episode, newest, state in walked:
                is_closed = state == IncidentState.RESOLVED or episode < newest
                counts_as = own if own == LetterState.HELD else state
                if ("resolved" if is_closed else counts_as) == self.standing:
                    ids.append(letter_id)
            if len(walked) < LONG_WALK:
                break
            bound = walked[-1][:2]
        rows = self.beyond(None, backwards=backwards).filter(AnyOf("id", ids[:count]))
        return [((row.last_seen_at, row.id), row) for row in rows]
