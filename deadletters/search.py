"""Which letters a search finds: by an id, by the number of their incident, by their words."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from django.db import connections
from django.db.models import F, IntegerField, Q, Value

from incidents.search import INCIDENT_WORDS, incident_number, typed_id
from opsconsole.core.bounded import rows_of
from opsconsole.core.search import Search, TextIndex, is_storable
from opsconsole.core.search import install as install_index

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from deadletters.querysets import DeadLetterQuerySet

LETTER_WORDS = TextIndex(
    name="ops_letter_words",
    table="ops_deadletters_deadletter",
    # Only what readers see, from which the redactor has taken the secrets before it was stored. The ids have indexes
    # of their own: a word that no other row has is what costs an index of words most.
    columns=("job_type", "error_class", "error_text", "payload_preview", "actor_type", "actor_id"),
    split=("error_class",),
    order=("-last_seen_at", "-id"),
)
HELP = "an id, INC-0175, or words of the error, the arguments, the actor"


def search_letters(typed: str, *, within: DeadLetterQuerySet, anywhere: DeadLetterQuerySet) -> DeadLetterQuerySet:
    """Return the letters that ``typed`` finds; all of ``anywhere`` may be seen, and ``within`` is filtered, too.

    An id, or the number of an incident, finds what it names in any state. Otherwise it is words that are looked for in
    the letters of the list. Every statement holds the scope: what may not be seen changes nothing.
    """
    typed = typed.strip()
    if is_storable(typed) and (named := named_letters(anywhere, typed)) is not None:
        return named
    return within.containing(typed)


def named_letters(rows: DeadLetterQuerySet, typed: str, *, by_incident: bool = True) -> DeadLetterQuerySet | None:
    """Return the letters that an id names: task id, job id, the letter's own, the number of an incident, or eight
    characters and more of the beginning of a task id, whichever finds some first; None if none does.
    """
    # Each is answered by one index: with OR in one condition SQLite reads all letters of the tenant.
    ways = [
        (Q(task_id=typed), "By task id, in any state."),
        (Q(job_id=typed) & ~Q(job_id=F("task_id")), "By job id, in any state."),
    ]
    if (id_ := typed_id(typed)) is not None:
        ways.append((Q(id=id_), "By its own id."))
    if by_incident and (number := incident_number(typed)) is not None:
        told = f"Jobs of incident INC-{number:04d}, in any state. In quotes, a number is looked for in the texts."
        ways.append((Q(incident__number=number), told))
    if re.fullmatch(r"[0-9a-f]{8}[0-9a-f-]{0,27}", typed, re.ASCII):
        # LIKE finds no place in SQLite's index, and on PostgreSQL nothing else does in this one.
        is_like = connections[rows.db].vendor == "postgresql"
        begins = Q(task_id__startswith=typed) if is_like else Q(task_id__gte=typed, task_id__lt=f"{typed}g")
        ways.append((begins, "By the beginning of the task id, in any state."))
    asked = [
        rows.order_by().filter(condition).values_list(Value(number, output_field=IntegerField()))[:1]
        for number, (condition, _told) in enumerate(ways)
    ]
    # No database promises the parts of a union in their order.
    number = min((way for (way,) in rows_of(asked)), default=None)
    if number is None:
        return None
    condition, told = ways[number]
    found = rows.filter(condition)
    found.search = Search(told=told)
    return found


def install(connection: BaseDatabaseWrapper, *, wanted: bool) -> None:
    """Make the indexes of words of letters and incidents, or remove them."""
    for index in (INCIDENT_WORDS, LETTER_WORDS):
        install_index(index, connection, wanted=wanted)
