"""Names for sets of incidents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar
from uuid import UUID

from django.db import connections
from django.db.models import F, Q

from grants.querysets import ScopedQuerySet
from incidents.search import INCIDENT_WORDS
from opsconsole.core.database import database_now, locked, plain_value
from opsconsole.core.search import Searchable

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from incidents.models import Incident

UNSTAMPED = Q(stamped_episode__lt=F("episode") - 1) | Q(state="resolved", stamped_episode__lt=F("episode"))
"""The condition of an index, so one object for it and for what asks through it."""


class IncidentQuerySet(Searchable, ScopedQuerySet):
    """Incidents belong to a tenant as a whole: a grant for one actor shows none."""

    target_type: ClassVar[str] = "incident"
    text_index = INCIDENT_WORDS
    actor_type_column: ClassVar[str | None] = None
    actor_id_column: ClassVar[str | None] = None

    def unresolved(self) -> IncidentQuerySet:
        return self.exclude(state="resolved")

    def unstamped(self) -> IncidentQuerySet:
        """Incidents with an ended episode whose letters have not been told yet (``stamped_episode``)."""
        return self.filter(UNSTAMPED)

    def worst_first(self) -> IncidentQuerySet:
        """Severity, then newest seen, then id (A8)."""
        return self.order_by("-severity", "-last_seen_at", "-id")

    def lock(self, incident_id: UUID) -> Incident:
        """Return the locked row with ``locked_at``, the database's clock after the lock was had.

        Raises ``Incident.DoesNotExist``.
        """
        incident: Incident = locked(self.filter(id=incident_id)).get()
        incident.locked_at = database_now(self.db)
        return incident

    def lock_many(self, incident_ids: list[UUID]) -> dict[UUID, Incident]:
        """Lock several rows in the order of their ids, which every writer of several keeps to."""
        rows: list[Incident] = list(locked(self.filter(id__in=incident_ids).order_by("id")))
        return {row.id: row for row in rows}

    def save_recorded(self, incidents: list[Incident]) -> None:
        """Write what recording or settling changes of locked rows, one statement however many they are."""
        from_row = [
            [_parameter(connections[self.db], getattr(incident, name)) for name in (*RECORDED, "id")]
            for incident in incidents
        ]
        if not from_row:
            return
        assignments = ", ".join(f"{name} = %s" for name in RECORDED)
        with connections[self.db].cursor() as cursor:
            cursor.executemany(
                f"UPDATE {self.model._meta.db_table} SET {assignments}, version = version + 1 WHERE id = %s",  # noqa: S608
                from_row,
            )


RECORDED = (
    "occurrence_count", "letter_count", "unresolved_count", "late_count", "first_seen_at", "last_seen_at",
    "severity", "state", "episode", "opened_at", "reopened_reason", "acknowledged_by", "acknowledged_by_name",
    "acknowledged_at", "acknowledged_occurrences", "acknowledged_until", "resolved_by", "resolved_by_name",
    "resolved_at",
    "resolution_code", "resolution_summary",
)  # fmt: skip
"""What recording and settling may change; the incident's identity is not among it."""


def _parameter(connection: BaseDatabaseWrapper, value: Any) -> Any:
    if connection.vendor == "sqlite":
        return plain_value(connection, value)
    return value
