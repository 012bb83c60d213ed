"""``dispatch_workflow``: the signed call that starts a run at the workflow engine."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.db.models import F

from opsconsole.jobs.bases import CANCELLED, States, WebhookKind
from opsconsole.jobs.models import DispatchState, Job, RunState, WorkflowDispatch, WorkflowRun
from opsconsole.jobs.querysets import TenantQuerySet

NOT_STARTED = (RunState.CREATED, RunState.DISPATCH_PENDING, RunState.QUEUED)
RETRIES_EXHAUSTED = "workflow_dispatch_queue_retries_exhausted"


class DispatchWorkflow(WebhookKind):
    """Sends the signed call; with the dispatch goes its run, whose revision rises with every change of its state."""

    name = "dispatch_workflow"
    runbook = "docs/runbooks.md#dispatch_workflow"
    record_type = "workflow_dispatch_outbox"
    ids = ("outbox_id", "run_id")
    due_column = "available_at"
    stale_code = "stale_dispatch_lease_recovered"
    states = States(
        pending=DispatchState.PENDING,
        in_flight=DispatchState.LEASED,
        retrying=DispatchState.FAILED,
        failed=DispatchState.DEAD_LETTER,
        done=(DispatchState.DELIVERED,),
        never_dead=(DispatchState.DELIVERED,),
    )

    def records(self) -> TenantQuerySet:
        return WorkflowDispatch.objects.select_related("run")

    def document(self, record: WorkflowDispatch, payload: Mapping[str, Any]) -> dict[str, Any]:
        return {"run": str(record.run_id), "workflow": record.run.name, "payload": payload}

    def complete(self, job: Job, result: Any, now: datetime) -> None:
        """The engine has the run, unless it has said more about it by now."""
        super().complete(job, result, now)
        runs = self._runs(job, DispatchState.DELIVERED)
        _move(runs.filter(state__in=(RunState.CREATED, RunState.DISPATCH_PENDING)), RunState.QUEUED, now)

    def mark_dead(self, job: Job, code: str, now: datetime) -> None:
        """A6.4: the run waits for a repair, if it has not begun."""
        super().mark_dead(job, code, now)
        _move(
            self._runs(job, DispatchState.DEAD_LETTER).filter(state__in=NOT_STARTED),
            RunState.REPAIR_REQUIRED,
            now,
            error_code=RETRIES_EXHAUSTED,
            error_summary="The call that starts this run has failed in every attempt.",
        )

    def requeue(self, job: Job, now: datetime) -> None:
        """A12; a run that waited for this repair waits for its dispatch again."""
        super().requeue(job, now)
        runs = self._runs(job, DispatchState.PENDING).filter(state=RunState.REPAIR_REQUIRED)
        _move(runs, RunState.DISPATCH_PENDING, now, error_code="", error_summary="")

    def cancel(self, job: Job, now: datetime) -> None:
        """Nobody is to repair a run whose dispatch was withdrawn: it has failed."""
        super(WebhookKind, self).mark_dead(job, CANCELLED, now)
        _move(
            self._runs(job, DispatchState.DEAD_LETTER).filter(state__in=NOT_STARTED),
            RunState.FAILED,
            now,
            error_code="workflow_dispatch_cancelled",
            error_summary="The call that starts this run was withdrawn before it was sent.",
        )

    def _runs(self, job: Job, dispatch: DispatchState) -> TenantQuerySet:
        """Return the run of a dispatch that is in this state: one that was delivered meanwhile takes no run along."""
        return WorkflowRun.objects.filter(
            id__in=self.row(job).filter(state=dispatch).values("run_id"), tenant=job.tenant
        )


def _move(runs: TenantQuerySet, state: RunState, now: datetime, **columns: str) -> None:
    runs.update(state=state, revision=F("revision") + 1, updated_at=now, **columns)


KIND = DispatchWorkflow()
