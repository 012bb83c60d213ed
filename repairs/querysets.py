"""Names for sets of repairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar
from uuid import UUID

from django.db import models
from django.db.models import OuterRef, Q, Subquery

from deadletters.models import DeadLetter
from grants.querysets import ScopedQuerySet
from opsconsole.core.database import locked

if TYPE_CHECKING:
    # Named in strings below.
    from repairs.models import ReconciliationRun, Redrive, RedriveItem, RepairAction  # noqa: F401


class RepairBatchQuerySet(ScopedQuerySet):
    """A batch belongs to its incident's tenant."""

    actor_type_column: ClassVar[str | None] = None
    actor_id_column: ClassVar[str | None] = None


class RepairActionQuerySet(ScopedQuerySet):
    target_type: ClassVar[str] = "repair_action"

    def live(self) -> RepairActionQuerySet:
        """Planned, sent or started: its job has not answered."""
        return self.filter(state__in=("planned", "sent", "started"))

    def owning(self, repair_ids: list[UUID]) -> RepairActionQuerySet:
        return self.filter(id__in=repair_ids)

    def newest_first(self) -> RepairActionQuerySet:
        return self.order_by("-id")

    def newest_of(self, letter_ids: list[UUID]) -> dict[UUID, UUID | None]:
        """Return the newest repair of each of these letters, with one query."""
        newest = self.filter(letter=OuterRef("pk")).newest_first().values("id")[:1]
        return dict(DeadLetter.objects.filter(id__in=letter_ids).values_list("id", Subquery(newest)))

    def lock(self, repair_id: UUID) -> RepairAction:
        action: RepairAction = locked(self.filter(id=repair_id)).get()
        return action

    def claimable_start(self, repair_id: UUID, retries: int) -> RepairActionQuerySet:
        """The row if attempt ``retries`` of it may start: not settled, and no such or later attempt has started.

        ``planned`` is accepted, since the relay may have been killed between sending and marking.
        """
        return self.filter(Q(id=repair_id), Q(state__in=("planned", "sent", "started")), Q(claim_retries__lt=retries))


class RedriveQuerySet(ScopedQuerySet):
    target_type: ClassVar[str] = "redrive"

    def newest_first(self) -> RedriveQuerySet:
        return self.order_by("-id")

    def lock(self, redrive_id: UUID) -> Redrive:
        """Return the locked row, which is locked before any incident. Raises ``Redrive.DoesNotExist``."""
        redrive: Redrive = locked(self.filter(id=redrive_id)).get()
        return redrive

    def to_do(self) -> RedriveQuerySet:
        """Redrives that a controller has something to do for; word for word what their index says."""
        return self.filter(Q(state__in=("planning", "canary", "running")) | Q(outstanding_count__gt=0))


class RedriveItemQuerySet(models.QuerySet["RedriveItem"]):
    def waiting(self) -> RedriveItemQuerySet:
        return self.filter(state="waiting")

    def next_due(self) -> RedriveItemQuerySet:
        """Those that may go out next, oldest first: none is behind an earlier one of its actor."""
        return self.filter(state="waiting", is_behind=False).order_by("position")


class ReconciliationRunQuerySet(models.QuerySet["ReconciliationRun"]):
    """Runs belong to no tenant: who may see something may see that there was a sweep, and how much it found."""

    def running(self) -> ReconciliationRunQuerySet:
        return self.filter(state="running")

    def ended_well(self) -> ReconciliationRunQuerySet:
        """Looked at everything, or at least repaired something."""
        return self.filter(state__in=("succeeded", "partial"))

    def newest_first(self) -> ReconciliationRunQuerySet:
        return self.order_by("-id")


class SweepRepairQuerySet(ScopedQuerySet):
    """What a sweep changed belongs to a tenant as a whole: a grant for one actor shows none."""

    actor_type_column: ClassVar[str | None] = None
    actor_id_column: ClassVar[str | None] = None

    def newest_first(self) -> SweepRepairQuerySet:
        return self.order_by("-id")
