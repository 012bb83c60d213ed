"""Which incidents a search finds: by number, by an id of one of their jobs, by their own words, by those of jobs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from uuid import UUID

from grants.actions import Action
from opsconsole.core.database import AnyOf
from opsconsole.core.search import Search, TextIndex, is_storable

if TYPE_CHECKING:
    from grants.operators import Operator
    from incidents.querysets import IncidentQuerySet

INCIDENT_WORDS = TextIndex(
    name="ops_incident_words",
    table="ops_incidents_incident",
    columns=("job_type", "title", "summary"),
    split=("title",),
    order=("-severity", "-last_seen_at", "-id"),
)
JOBS_LOOKED_AT = 1_000
HELP = "INC-0175 or 175, a job or task id, or words of the error"


def incident_number(text: str) -> int | None:
    """Return the number that somebody typed, as INC-0012, #12 or 12; None for what is none."""
    match = re.fullmatch(r"(?:inc-|#)?0*([0-9]{1,18})", text.strip().lower(), re.ASCII)
    return None if match is None else int(match[1])


def typed_id(text: str) -> UUID | None:
    """Return the id of a row that somebody typed, with its hyphens or without; None for what is none."""
    if re.fullmatch(r"[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}", text.lower(), re.ASCII) is None:
        return None
    return UUID(text)


def search_incidents(
    typed: str, *, within: IncidentQuerySet, anywhere: IncidentQuerySet, by: Operator
) -> IncidentQuerySet:
    """Return the incidents that ``typed`` finds; ``by`` may see all of ``anywhere``, and ``within`` is filtered, too.

    A number or an id finds what it names in any state. Otherwise it is words that are looked for: in what the incidents
    of the list say themselves (job type, title, summary), and only if none of them has the words, in their newest jobs,
    whose arguments and actors no incident has. Every statement holds the scope: what may not be seen changes nothing.
    """
    typed = typed.strip()
    # The letters' app is above this one: its rows are reached through the relation, and by methods of its own.
    letters: Any = anywhere.model._meta.get_field("letters").related_model
    visible = letters._default_manager.visible_to(by, Action.INSPECT)
    if is_storable(typed) and (named := _named(typed, anywhere, visible)) is not None:
        return named
    found = within.containing(typed)
    if found.search is None or found.search.words.trouble or found.order_by(*INCIDENT_WORDS.order).first_rows(1):
        return found
    jobs = visible.containing(typed).newest_first().only("id", "incident_id").first_rows(JOBS_LOOKED_AT)
    if not jobs:
        return found
    through = within.filter(AnyOf("id", {job.incident_id for job in jobs}))
    told = f"By words of their jobs, the newest {JOBS_LOOKED_AT:,} of which were looked at. {found.search.note}"
    through.search = Search(words=found.search.words, told=told)
    return through


def _named(typed: str, anywhere: IncidentQuerySet, letters: Any) -> IncidentQuerySet | None:
    """Return the incidents that are named by a number or an id; None if nothing is."""
    number = incident_number(typed)
    if number is not None:
        found = anywhere.filter(number=number)
        if found.exists():
            found.search = Search(told="By number, in any state.")
            return found
    named = letters.named(typed)
    ids = set() if named is None else set(named.order_by().values_list("incident_id", flat=True)[:JOBS_LOOKED_AT])
    if (id_ := typed_id(typed)) is not None:
        ids.add(id_)
    found = anywhere.filter(id__in=ids)
    # Not every id names something here: an order's or a request's stands in the texts, which are looked at next.
    if not ids or not found.exists():
        return None
    found.search = Search(told="By an id, in any state.")
    return found
