"""Names for sets of jobs and of the records that jobs work on."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar
from uuid import UUID

from grants.querysets import ScopedQuerySet
from opsconsole.core.database import locked

if TYPE_CHECKING:
    from opsconsole.jobs.models import Job


class TenantQuerySet(ScopedQuerySet):
    """Records that belong to a tenant as a whole: a grant for one actor shows none."""

    actor_type_column: ClassVar[str | None] = None
    actor_id_column: ClassVar[str | None] = None


class JobQuerySet(ScopedQuerySet):
    target_type: ClassVar[str] = "job"

    def unfinished(self) -> JobQuerySet:
        """Neither succeeded nor dead nor cancelled: something will still become of them."""
        return self.filter(state__in=("pending", "retrying", "enqueued", "running"))

    def newest_first(self) -> JobQuerySet:
        return self.order_by("-id")

    def lock(self, job_id: UUID) -> Job:
        """Return the locked row; raises ``Job.DoesNotExist``."""
        job: Job = locked(self.filter(id=job_id)).get()
        return job
