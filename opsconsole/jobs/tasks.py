"""The Celery tasks of the ledger: one for each kind, called ``opsconsole.jobs.<kind>``."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from celery import Task, shared_task

from opsconsole.jobs.kind import Kind
from opsconsole.jobs.kinds import kinds
from opsconsole.jobs.runner import run_job
from opsconsole.jobs.tokens import TASK_PREFIX


def _task_of(kind: Kind) -> Any:
    @shared_task(
        name=f"{TASK_PREFIX}{kind.name}",
        bind=True,
        # The ledger counts attempts and knows who has the job; the broker is to forget the message at once.
        acks_late=False,
        max_retries=0,
        ignore_result=True,
        expires=None,
    )
    def run(self: Task[Any, Any], job_id: str) -> None:
        run_job(job_id=UUID(job_id), token=str(self.request.id), owner=str(self.request.hostname or ""), kind=kind)

    return run


TASKS = {name: _task_of(kind) for name, kind in kinds().items()}
