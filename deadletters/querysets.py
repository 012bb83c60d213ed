"""Names for sets of letters, occurrences and worker nodes."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, ClassVar
from uuid import UUID

from django.db import models
from django.db.models import Case, F, Q, When

from deadletters.search import LETTER_WORDS, named_letters
from grants.access import holds
from grants.actions import Action
from grants.operators import Operator
from grants.querysets import ScopedQuerySet
from grants.resources import ANY
from opsconsole.core.database import AnyOf, database_now, locked
from opsconsole.core.search import Searchable

if TYPE_CHECKING:
    from deadletters.models import DeadLetter, Hold, Occurrence, WorkerNode  # noqa: F401  (named in the strings below)

NODE_IS_GONE_AFTER = timedelta(seconds=60)
"""Six missed reports: a worker that has not reported for so long does not count as serving anything."""


class DeadLetterQuerySet(Searchable, ScopedQuerySet):
    target_type: ClassVar[str] = "dead_letter"
    text_index = LETTER_WORDS

    def unresolved(self) -> DeadLetterQuerySet:
        """Letters that wait for a decision or for a repair's answer: what no resolved incident may hide."""
        return self.filter(self.is_unresolved())

    def waiting(self) -> DeadLetterQuerySet:
        """Unresolved letters that wait for a decision, found by way of the incidents that are not closed.

        The states of the incident are named, so that their index leads to the letters: one that was closed with its
        incident stays open in its own state, so that there may be a million of those to pass over.
        """
        return self._current("open")

    def held(self) -> DeadLetterQuerySet:
        """Unresolved letters of messages that a hold has put aside: nothing failed, and nobody is asked to decide."""
        return self._current("held")

    def _current(self, state: str) -> DeadLetterQuerySet:
        return self.filter(state=state, episode=F("incident__episode"), incident__state__in=("open", "acknowledged"))

    def resolved(self) -> DeadLetterQuerySet:
        return self.exclude(self.is_unresolved())

    @staticmethod
    def is_unresolved() -> Q:
        return (
            Q(state__in=("open", "held", "retrying"))
            & Q(episode=F("incident__episode"))
            & ~Q(incident__state="resolved")
        )

    @staticmethod
    def is_of_job(job_id: str) -> Q:
        """Letters of one job, found through the index of task ids or that of the job ids that are none."""
        return Q(task_id=job_id, job_id=job_id) | (Q(job_id=job_id) & ~Q(job_id=F("task_id")))

    def named(self, typed: str) -> DeadLetterQuerySet | None:
        """Letters that an id names, for the search of incidents; None if none is."""
        return named_letters(self, typed, by_incident=False)

    def newest_first(self) -> DeadLetterQuerySet:
        return self.order_by("-last_seen_at", "-id")

    def oldest_first(self) -> DeadLetterQuerySet:
        return self.order_by("first_seen_at", "id")

    def lock(self, letter_id: UUID) -> DeadLetter:
        """Return the locked row; the caller has locked its incident before. Raises ``DeadLetter.DoesNotExist``."""
        letter: DeadLetter = locked(self.filter(id=letter_id)).get()
        return letter

    def lock_many(self, letter_ids: list[UUID]) -> dict[UUID, DeadLetter]:
        rows: list[DeadLetter] = list(locked(self.filter(AnyOf("id", letter_ids)).order_by("id")))
        return {row.id: row for row in rows}


class OccurrenceQuerySet(models.QuerySet["Occurrence"]):
    def newest_first(self) -> OccurrenceQuerySet:
        return self.order_by("-happened_at", "-id")


class TaskMinuteQuerySet(ScopedQuerySet):
    """Counts belong to a tenant as a whole: a grant for one actor shows none."""

    actor_type_column: ClassVar[str | None] = None
    actor_id_column: ClassVar[str | None] = None


class HoldQuerySet(ScopedQuerySet):
    """Holds belong to a tenant as a whole, or to every tenant: a grant for one actor shows none of a tenant's."""

    target_type: ClassVar[str] = "hold"
    actor_type_column: ClassVar[str | None] = None
    actor_id_column: ClassVar[str | None] = None

    def seen_by(self, operator: Operator) -> HoldQuerySet:
        """Holds that the operator may know of; one of every tenant is known to whoever may inspect anything at all.

        It says why their jobs do not run, and nothing of anybody's jobs.
        """
        if not holds(operator, Action.INSPECT):
            return self.none()
        return self.told_to(operator).filter(Q(put_aside__isnull=False) | Q(tenant=ANY))

    def told_to(self, operator: Operator) -> HoldQuerySet:
        """Add ``put_aside``, the count of its letters; None for who may not know of the letters of all its tenants."""
        mine = self.model.objects.visible_to(operator, Action.INSPECT).values("id")
        told: HoldQuerySet = self.annotate(put_aside=Case(When(id__in=mine, then=F("letter_count"))))
        return told

    def told_whole(self) -> HoldQuerySet:
        """Add ``put_aside`` as ``told_to`` does for who may know of all of them."""
        told: HoldQuerySet = self.annotate(put_aside=F("letter_count"))
        return told

    def in_force(self, source: str, now: datetime) -> HoldQuerySet:
        """Holds that the workers of a source obey now."""
        return self.filter(source__in=(source, ANY), state="active", ends_at__gt=now)

    def overdue(self, now: datetime) -> HoldQuerySet:
        """Holds whose time is over and which do not say so yet."""
        return self.filter(state="active", ends_at__lte=now)

    def newest_first(self) -> HoldQuerySet:
        return self.order_by("-placed_at", "-id")

    def lock(self, hold_id: UUID) -> Hold:
        """Return the locked row with ``locked_at``, the database's clock after the lock was had.

        Raises ``Hold.DoesNotExist``. Whoever needs an incident or a letter as well has locked those before.
        """
        hold: Hold = locked(self.filter(id=hold_id)).get()
        hold.locked_at = database_now(self.db)
        return hold


class WorkerNodeQuerySet(models.QuerySet["WorkerNode"]):
    def live(self, now: datetime) -> WorkerNodeQuerySet:
        """Workers that reported within the last minute and have not said good-bye."""
        return self.filter(seen_at__gte=now - NODE_IS_GONE_AFTER, stopped_at__isnull=True)
