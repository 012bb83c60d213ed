"""What happened to an incident, as parts of one statement: the app above adds parts about its jobs.

Every part has the same columns, so that one page asks once for what would be half a dozen questions.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models import BigIntegerField, CharField, DateTimeField, F, Q, QuerySet, UUIDField, Value
from django.db.models.functions import Cast

from grants.models import AuditEvent, Verdict
from incidents.models import HOLD_CATEGORY, EpisodeEnd, Incident

EVENT, END = "event", "end"
EVENTS_TOLD = 50
ENDS_TOLD = 21


@dataclass(frozen=True, slots=True)
class Told:
    """One row of a part. What a column means is said where the part is made; one that means nothing there is empty."""

    part: str
    at: datetime | None
    id: UUID | None
    who: str
    name: str
    what: str
    state: str
    text: str
    more: str
    number: int
    second: int
    sent_at: datetime | None
    due_at: datetime | None

    @property
    def moment(self) -> datetime:
        """The time of a row of a part that has one."""
        if self.at is None:
            raise ValueError(f"a row of {self.part} has no time")
        return self.at


COLUMNS = tuple(field.name for field in fields(Told))


def part_of(part: str, rows: QuerySet[Any], **columns: Any) -> QuerySet[Any]:
    """Return rows as a part: each of ``columns`` is a field's name or an expression, the others are empty.

    A missing time or id has its type: PostgreSQL takes a bare NULL for text, and puts no other column under it.
    """
    empty: dict[str, Any] = {
        **dict.fromkeys(COLUMNS, Value("", output_field=CharField())),
        **dict.fromkeys(("at", "sent_at", "due_at"), Cast(Value(None), DateTimeField())),
        **dict.fromkeys(("number", "second"), Value(0, output_field=BigIntegerField())),
        "part": Value(part, output_field=CharField()),
        "id": Cast(Value(None), UUIDField()),
    }
    given = {column: F(value) if isinstance(value, str) else value for column, value in columns.items()}
    made: QuerySet[Any] = rows.values_list(*(given.get(column, empty[column]) for column in COLUMNS))
    return made


def what_happened_to(incident: Incident) -> Q:
    """Return the condition for the rows of the audit trail that tell of it; of a hold's, also those of the hold."""
    found = Q(target_type="incident", target_id=str(incident.id))
    if incident.category == HOLD_CATEGORY:
        found |= Q(target_type="hold", target_id=incident.key.removeprefix("hold:"))
    return found


def event_parts(incident: Incident) -> list[QuerySet[Any]]:
    """Return what people and the system did to it, and how its episodes ended; each newest first.

    Of an event ``what`` is the action, ``text`` the reason and ``more`` the outcome as JSON; of an end ``what`` is the
    code, ``text`` the summary, ``number`` the episode and ``second`` how many jobs were not repaired.
    """
    events = AuditEvent.objects.filter(what_happened_to(incident), verdict=Verdict.ALLOWED)
    ends = EpisodeEnd.objects.filter(incident=incident)
    return [
        part_of(
            EVENT, events.order_by("-at", "-id"), at="at", id="id", name="operator_name", what="action", text="reason",
            more="outcome",
        )[:EVENTS_TOLD],
        part_of(
            END, ends.order_by("-episode"), at="resolved_at", id="id", name="resolved_by_name", what="resolution_code",
            text="resolution_summary", number="episode", second="unrepaired_count",
        )[:ENDS_TOLD],
    ]  # fmt: skip
