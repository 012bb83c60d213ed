"""``route_report``: puts a new report into the review queue that its rules name."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from opsconsole.core.effects import Effects
from opsconsole.jobs import services
from opsconsole.jobs.bases import CANCELLED, RECORD_MISSING, check_ids, record_uuid
from opsconsole.jobs.errors import Refused
from opsconsole.jobs.kind import Kind, RecordState, Work
from opsconsole.jobs.models import Job, Report, ReportState, RoutingStatus
from opsconsole.jobs.querysets import TenantQuerySet
from opsconsole.jobs.routing import ROUTER, Route, choose_route, lock_report, write_event


class RouteReport(Kind):
    """Routes the report; nothing of it leaves the database (A6.1).

    Declared errors: ``Refused`` for ``no_queue`` (no rule's queue takes reports, and no people's does either: make one,
    then retry) and for ``record_missing``.
    """

    name = "route_report"
    runbook = "docs/runbooks.md#route_report"
    effects = Effects.NONE
    record_type = "report"

    def check(self, payload: Mapping[str, Any]) -> None:
        check_ids(payload, ("report_id",))

    def run(self, work: Work) -> Route | None:
        report_id = record_uuid(work.record_id)
        report: Report | None = Report.objects.filter(id=report_id, tenant=work.tenant).first() if report_id else None
        if report is None:
            raise Refused(RECORD_MISSING, "there is no report of this id in this tenant")
        if report.routing_status == RoutingStatus.COMPLETE:
            return None
        route = choose_route(report)
        if route is None:
            raise Refused("no_queue", "no rule matches, and there is no active queue of people")
        return route

    def complete(self, job: Job, result: Route | None, now: datetime) -> None:
        """Write queue and state, and want the endpoint asked where one decides, in the same transaction."""
        report = lock_report(record_uuid(job.record_id), job.tenant)
        if report is None or result is None or report.routing_status == RoutingStatus.COMPLETE:
            return
        report.queue_id, report.priority = result.queue_id, result.priority
        report.routing_status, report.routing_error_code = RoutingStatus.COMPLETE, ""
        report.updated_at = now
        if report.state == ReportState.RECEIVED:
            state = ReportState.AI_REVIEW if result.ai_config_id else ReportState.HUMAN_REVIEW
            write_event(report, to_state=state, reason="routed", actor=ROUTER, job_id=job.id, at=now)
            report.state = state
        report.save(update_fields=["queue", "priority", "routing_status", "routing_error_code", "state", "updated_at"])
        if result.ai_config_id and report.state == ReportState.AI_REVIEW:
            services.enqueue(
                kind="process_ai_report",
                tenant=job.tenant,
                payload={"report_id": str(report.id), "ai_config_id": str(result.ai_config_id)},
                record_id=str(report.id),
                report_id=report.id,
                actor_type=job.actor_type,
                actor_id=job.actor_id,
                key=str(report.id),
            )

    def mark_dead(self, job: Job, code: str, now: datetime) -> None:
        self._unrouted(job).update(routing_status=RoutingStatus.FAILED, routing_error_code=code[:64], updated_at=now)

    def requeue(self, job: Job, now: datetime) -> None:
        self._unrouted(job).update(routing_status=RoutingStatus.PENDING, routing_error_code="", updated_at=now)

    def cancel(self, job: Job, now: datetime) -> None:
        self.mark_dead(job, CANCELLED, now)

    def record(self, job: Job) -> RecordState | None:
        columns = ("routing_status", "routing_error_code", "state", "reference")
        found = self._report(job).values(*columns).first()
        if found is None:
            return None
        state = found.pop("routing_status")
        return RecordState(record_type=self.record_type, record_id=job.record_id, state=state, detail=found)

    def is_overtaken(self, job: Job) -> str:
        is_routed = self._report(job).filter(routing_status=RoutingStatus.COMPLETE).exists()
        return RoutingStatus.COMPLETE.value if is_routed else ""

    def _report(self, job: Job) -> TenantQuerySet:
        report_id = record_uuid(job.record_id)
        return Report.objects.filter(id=report_id, tenant=job.tenant) if report_id else Report.objects.none()

    def _unrouted(self, job: Job) -> TenantQuerySet:
        return self._report(job).exclude(routing_status=RoutingStatus.COMPLETE)


KIND = RouteReport()
