"""The smallest valid records, each in any state, and the job that works on one."""

from __future__ import annotations

import itertools
import json
from datetime import UTC, datetime, timedelta
from typing import Any

from opsconsole.core.ids import new_id
from opsconsole.jobs.kind import Kind, Work
from opsconsole.jobs.kinds import kind_named
from opsconsole.jobs.models import (
    LEASED,
    UNFINISHED,
    ActionDelivery,
    ActionProposal,
    AiConfig,
    CaseMessage,
    EmailDelivery,
    EvidenceRequest,
    Job,
    JobState,
    Management,
    Notice,
    NotificationDelivery,
    ProposalState,
    Report,
    ReviewQueue,
    RoutingRule,
    WorkflowDispatch,
    WorkflowRun,
)

TENANT = "harbour"
NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
LATER = NOW + timedelta(minutes=3)
ENDPOINT = "http://127.0.0.1:9/hook"
EXHAUSTED = "queue_retries_exhausted"

_numbers = itertools.count(1)


def report(**fields: Any) -> Report:
    values = {"tenant": TENANT, "reference": f"R-{next(_numbers)}", "created_at": NOW, "updated_at": NOW, **fields}
    return stored(Report.objects.create(**values))


def queue(**fields: Any) -> ReviewQueue:
    number = next(_numbers)
    return stored(ReviewQueue.objects.create(**{"tenant": TENANT, "name": f"queue {number}", **fields}))


def ai_config(**fields: Any) -> AiConfig:
    values = {"tenant": TENANT, "name": f"model {next(_numbers)}", "endpoint": ENDPOINT, **fields}
    return stored(AiConfig.objects.create(**values))


def ai_queue(config: AiConfig | None = None, **fields: Any) -> ReviewQueue:
    return queue(management=Management.AI, ai_config=config or ai_config(), **fields)


def rule(to: ReviewQueue, **fields: Any) -> RoutingRule:
    return stored(RoutingRule.objects.create(**{"tenant": TENANT, "queue": to, **fields}))


def evidence(**fields: Any) -> EvidenceRequest:
    values = {"report": None, "url": "https://example.org/photo", **_times(), **fields}
    values["report"] = values["report"] or report()
    return stored(EvidenceRequest.objects.create(**values))


def workflow_run(**fields: Any) -> WorkflowRun:
    values = {"tenant": TENANT, "name": "takedown", "created_at": NOW, "updated_at": NOW, **fields}
    return stored(WorkflowRun.objects.create(**values))


def dispatch(run: WorkflowRun | None = None, **fields: Any) -> WorkflowDispatch:
    values = {"run": run or workflow_run(), "endpoint": ENDPOINT, "available_at": NOW, **_times(), **fields}
    return stored(WorkflowDispatch.objects.create(**values))


def action(**fields: Any) -> ActionDelivery:
    values = {"report": fields.pop("report", None) or report(), "action": "hide", "endpoint": ENDPOINT, **_times()}
    return stored(ActionDelivery.objects.create(**{**values, **fields}))


def message(**fields: Any) -> CaseMessage:
    values = {"tenant": TENANT, "report": fields.pop("report", None) or report(), "body": "We have looked at it."}
    return stored(CaseMessage.objects.create(**{**values, "created_at": NOW, **fields}))


def notification(
    *, notice_state: str = "pending", message_state: str = "pending", **fields: Any
) -> NotificationDelivery:
    said = message(delivery_state=message_state)
    notice = Notice.objects.create(
        tenant=TENANT, report=said.report, message=said, delivery_state=notice_state, updated_at=NOW
    )
    values = {"notice": notice, "endpoint": ENDPOINT, **_times(), **fields}
    return stored(NotificationDelivery.objects.create(**values))


def email(*, message_state: str = "pending", **fields: Any) -> EmailDelivery:
    values = {
        "message": message(delivery_state=message_state),
        "to_address": "ada@example.org",
        "subject": "Your report",
        **_times(),
        **fields,
    }
    return stored(EmailDelivery.objects.create(**values))


def proposal(**fields: Any) -> ActionProposal:
    values = {"report": report(), "action": "hide", "endpoint": ENDPOINT, **_times(), **fields}
    if values.get("state") == ProposalState.APPLIED:
        values.setdefault("applied_at", NOW)
    return stored(ActionProposal.objects.create(**values))


def job(kind: str, record: Any = None, *, state: JobState = JobState.RUNNING, **fields: Any) -> Job:
    """Return a job of ``kind`` for a record, claimed unless another state is asked for."""
    leased = state in LEASED
    values: dict[str, Any] = {
        "tenant": getattr(record, "tenant", TENANT),
        "source": "tests",
        "kind": kind,
        "payload": payload_for(kind, record),
        "record_type": kind_named(kind).record_type,
        "record_id": str(record.id) if record is not None else "",
        "queue": "opsconsole",
        "state": state,
        "attempts": 2,
        "max_attempts": 5,
        "available_at": LATER,
        "lease_token": f"token-{next(_numbers)}" if leased else "",
        "lease_expires_at": NOW + timedelta(seconds=60) if leased else None,
        "created_at": NOW,
        "updated_at": NOW,
        "finished_at": None if state in UNFINISHED else NOW,
        **fields,
    }
    if not isinstance(values["payload"], str):
        values["payload"] = json.dumps(values["payload"])
    return stored(Job.objects.create(**values))


def payload_for(kind: str, record: Any) -> dict[str, str]:
    record_id = str(record.id) if record is not None else str(new_id())
    if kind == "process_ai_report":
        config = record.queue.ai_config_id if record is not None and record.queue else new_id()
        return {"report_id": record_id, "ai_config_id": str(config)}
    if kind == "route_report":
        return {"report_id": record_id}
    if kind == "fetch_evidence":
        return {"request_id": record_id, "report_id": str(record.report_id) if record else str(new_id())}
    if kind == "dispatch_workflow":
        return {"outbox_id": record_id, "run_id": str(record.run_id) if record else str(new_id())}
    if kind == "apply_action_proposal":
        return {"proposal_id": record_id}
    return {"outbox_id": record_id}


def work(of: Job) -> Work:
    """Return one attempt at a job, as its body sees it."""
    return Work(
        job_id=of.id,
        tenant=of.tenant,
        payload=json.loads(of.payload),
        record_id=of.record_id,
        attempt=of.attempts,
        max_attempts=of.max_attempts,
    )


def run(of: Job) -> Any:
    """Run the body of a job and return its result."""
    kind: Kind = kind_named(of.kind)
    return kind.run(work(of))


def stored(row: Any) -> Any:
    """Return a row with the columns that the database has filled in."""
    row.refresh_from_db()
    return row


def columns(row: Any) -> dict[str, Any]:
    """Return what the database has of a row, to compare it with later."""
    found: dict[str, Any] = type(row)._default_manager.filter(pk=row.pk).values().get()
    return found


def _times() -> dict[str, Any]:
    return {"tenant": TENANT, "created_at": NOW, "updated_at": NOW}
