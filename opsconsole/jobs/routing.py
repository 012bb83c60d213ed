"""Where a report goes: rules, queues, and the people who take what an endpoint cannot decide."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from django.db.models import Q

from opsconsole.core.database import locked
from opsconsole.jobs.models import (
    AiConfig,
    Management,
    QueueStatus,
    Report,
    ReportEvent,
    ReportState,
    ReviewQueue,
    RoutingRule,
)

REPORTS = "reports"
SYSTEM = "system"
ROUTER = "report-router"
REVIEWER = "ai-review"
HANDED_OVER_PRIORITY = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The queue that a report goes to; ``ai_config_id`` is set where an endpoint decides first."""

    queue_id: UUID
    priority: int
    ai_config_id: UUID | None = None


def choose_route(report: Report) -> Route | None:
    """Return where the report goes, ``None`` if there is no queue for it.

    The first matching rule by position whose queue takes reports decides, else it is the first queue of people.
    """
    usable = Q(queue__management=Management.HUMAN) | Q(queue__ai_config__isnull=False)
    rules = (
        RoutingRule.objects.filter(usable, tenant=report.tenant, queue__status=QueueStatus.ACTIVE)
        .select_related("queue")
        .order_by("position", "id")
    )
    for rule in rules.iterator():
        if matches(rule, report):
            queue = rule.queue
            is_ai = queue.management == Management.AI
            return Route(queue_id=queue.id, priority=rule.priority, ai_config_id=queue.ai_config_id if is_ai else None)
    queue_id = first_human_queue(report.tenant)
    return Route(queue_id=queue_id, priority=report.priority) if queue_id else None


def matches(rule: RoutingRule, report: Report) -> bool:
    """Say whether a rule is about a report: its category, and words in subject or body, case aside; "" is any."""
    if rule.category and rule.category != report.category:
        return False
    words = rule.contains.casefold()
    return not words or words in report.subject.casefold() or words in report.body.casefold()


def first_human_queue(tenant: str) -> UUID | None:
    """Return the first active queue of people for reports, by position."""
    queues = ReviewQueue.objects.filter(
        tenant=tenant, purpose=REPORTS, status=QueueStatus.ACTIVE, management=Management.HUMAN
    )
    found: UUID | None = queues.order_by("position", "id").values_list("id", flat=True).first()
    return found


def fallback_queue(tenant: str, config_id: UUID | None) -> UUID | None:
    """Return who takes what this configuration's endpoint cannot decide (A6.2).

    That is its fallback queue while that one is active and people's, else the first such queue for reports.
    """
    if config_id is None:
        return first_human_queue(tenant)
    config = AiConfig.objects.filter(
        id=config_id,
        tenant=tenant,
        fallback_queue__status=QueueStatus.ACTIVE,
        fallback_queue__management=Management.HUMAN,
    )
    found: UUID | None = config.values_list("fallback_queue_id", flat=True).first()
    return found or first_human_queue(tenant)


def lock_report(report_id: UUID | None, tenant: str) -> Report | None:
    """Return the locked report, ``None`` if there is none."""
    if report_id is None:
        return None
    found: Report | None = locked(Report.objects.filter(id=report_id, tenant=tenant)).first()
    return found


def write_event(
    report: Report, *, to_state: ReportState, reason: str, actor: str, job_id: UUID | None, at: datetime
) -> None:
    """Write that the locked report goes from its state to another; the caller writes the report."""
    ReportEvent.objects.create(
        report=report,
        job_id=job_id,
        from_state=report.state,
        to_state=to_state,
        reason_code=reason,
        actor_type=SYSTEM,
        actor_id=actor,
        at=at,
    )


def hand_to_people(
    report: Report, *, config_id: UUID | None, reason: str, error_code: str, job_id: UUID, at: datetime
) -> None:
    """Move a locked report from ``ai_review`` to the people who take over, with a priority of at least 60 (A6.2)."""
    write_event(report, to_state=ReportState.HUMAN_REVIEW, reason=reason, actor=REVIEWER, job_id=job_id, at=at)
    report.state = ReportState.HUMAN_REVIEW
    report.queue_id = fallback_queue(report.tenant, config_id)
    report.priority = max(report.priority, HANDED_OVER_PRIORITY)
    report.routing_error_code = error_code
    report.updated_at = at
    report.save(update_fields=["state", "queue", "priority", "routing_error_code", "updated_at"])
