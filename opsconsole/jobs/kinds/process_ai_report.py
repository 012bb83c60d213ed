"""``process_ai_report``: asks the endpoint of an AI-managed queue to decide about a report."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from opsconsole.core.effects import Effects
from opsconsole.core.safe_text import safe_text
from opsconsole.jobs import webhooks
from opsconsole.jobs.bases import RECORD_MISSING, check_ids, record_uuid
from opsconsole.jobs.errors import Refused, TryAgain
from opsconsole.jobs.http import Answer, json_object
from opsconsole.jobs.kind import Kind, RecordState, Work
from opsconsole.jobs.models import AiConfig, AiDecision, Job, Report, ReportEvent, ReportState
from opsconsole.jobs.querysets import TenantQuerySet
from opsconsole.jobs.routing import REVIEWER, hand_to_people, lock_report, write_event

ANSWER_BYTES = 64 << 10
LONGEST_WAIT_SECONDS = 120
EXPLANATION_CHARACTERS = 10_000
RETRIES_EXHAUSTED = "ai_queue_retries_exhausted"
UNDECIDED = "ai_undecided"
CANCELLED = "ai_review_cancelled"
_DECISION = re.compile(r"[a-z][a-z0-9_]{0,59}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the endpoint said; ``decision`` is "" where it cannot decide."""

    config_id: UUID
    decision: str
    explanation: str


class ProcessAiReport(Kind):
    """Posts the report, signed, and writes down what the endpoint says of it (A6.2).

    The answer is ``{"decision": "remove", "explanation": "..."}``, or a decision of ``null`` from an endpoint that
    cannot decide: then people do. Declared errors: ``Refused`` for ``record_missing``, ``ai_config_missing``, an
    endpoint that is no URL and 3xx or 4xx (``http_401``); ``TryAgain`` for all else, a malformed answer
    (``ai_answer_malformed``) included, since to ask twice does no harm.
    """

    name = "process_ai_report"
    runbook = "docs/runbooks.md#process_ai_report"
    effects = Effects.IDEMPOTENT
    record_type = "report"
    lease = timedelta(seconds=LONGEST_WAIT_SECONDS + 30)

    def check(self, payload: Mapping[str, Any]) -> None:
        check_ids(payload, ("report_id", "ai_config_id"))

    def run(self, work: Work) -> Verdict | None:
        report_id = record_uuid(work.record_id)
        report: Report | None = Report.objects.filter(id=report_id, tenant=work.tenant).first() if report_id else None
        if report is None:
            raise Refused(RECORD_MISSING, "there is no report of this id in this tenant")
        if not _may_decide(report, work.job_id):
            return None
        config_id = record_uuid(str(work.payload.get("ai_config_id")))
        configs = AiConfig.objects.filter(tenant=work.tenant)
        config: AiConfig | None = configs.filter(id=config_id).first() if config_id else None
        if config is None:
            raise Refused("ai_config_missing", "the queue's AI configuration is gone")
        answer = webhooks.post(
            endpoint=config.endpoint,
            tenant=work.tenant,
            key=work.idempotency_key,
            document={"type": self.name, "data": _describe(report)},
            timeout=min(max(config.timeout_seconds, 1), LONGEST_WAIT_SECONDS),
            most_bytes=ANSWER_BYTES,
            no_answer=TryAgain,
        )
        return read_verdict(answer, config.id)

    def complete(self, job: Job, result: Verdict | None, now: datetime) -> None:
        """Decide the report, or hand it to people; what somebody else has decided meanwhile stays."""
        report = lock_report(record_uuid(job.record_id), job.tenant)
        if report is None or result is None or not _may_decide(report, job.id):
            return
        if not result.decision:
            if report.state == ReportState.AI_REVIEW:
                hand_to_people(
                    report, config_id=result.config_id, reason=UNDECIDED, error_code="", job_id=job.id, at=now
                )
            return
        AiDecision.objects.get_or_create(
            job_id=job.id,
            defaults={
                "report": report,
                "config_id": result.config_id,
                "decision": result.decision,
                "explanation": result.explanation,
                "at": now,
            },
        )
        write_event(report, to_state=ReportState.DECIDED, reason="ai_decided", actor=REVIEWER, job_id=job.id, at=now)
        report.state, report.routing_error_code, report.updated_at = ReportState.DECIDED, "", now
        report.save(update_fields=["state", "routing_error_code", "updated_at"])

    def mark_dead(self, job: Job, code: str, now: datetime) -> None:  # noqa: ARG002
        """A6.2: people take over, under a code of their own."""
        self._hand_over(job, RETRIES_EXHAUSTED, now)

    def cancel(self, job: Job, now: datetime) -> None:
        self._hand_over(job, CANCELLED, now)

    def record(self, job: Job) -> RecordState | None:
        found = self._report(job).values("state", "routing_error_code", "reference").first()
        if found is None:
            return None
        state = found.pop("state")
        return RecordState(record_type=self.record_type, record_id=job.record_id, state=state, detail=found)

    def is_overtaken(self, job: Job) -> str:
        report: Report | None = self._report(job).first()
        return "" if report is None or _may_decide(report, job.id) else str(report.state)

    def _report(self, job: Job) -> TenantQuerySet:
        report_id = record_uuid(job.record_id)
        return Report.objects.filter(id=report_id, tenant=job.tenant) if report_id else Report.objects.none()

    def _hand_over(self, job: Job, reason: str, now: datetime) -> None:
        report = lock_report(record_uuid(job.record_id), job.tenant)
        if report is not None and report.state == ReportState.AI_REVIEW:
            config_id = configured(job)
            hand_to_people(report, config_id=config_id, reason=reason, error_code=reason, job_id=job.id, at=now)


def _may_decide(report: Report, job_id: UUID) -> bool:
    """Say whether the report still waits for this job.

    It does in ``ai_review``. After the job's death it lies with people (A12 moves it nowhere, so that it is never out
    of their sight); a repaired job decides it after all, as long as nobody has done anything since.
    """
    if report.state == ReportState.AI_REVIEW:
        return True
    if report.state != ReportState.HUMAN_REVIEW:
        return False
    newest = ReportEvent.objects.filter(report=report).order_by("-at", "-id").first()
    return newest is not None and newest.job_id == job_id and newest.reason_code == RETRIES_EXHAUSTED


def configured(job: Job) -> UUID | None:
    """Return the AI configuration that a job's payload names."""
    try:
        return record_uuid(str(json.loads(job.payload)["ai_config_id"]))
    except (ValueError, KeyError, TypeError):
        return None


def _describe(report: Report) -> dict[str, str]:
    return {
        "report": report.reference,
        "category": report.category,
        "subject": report.subject,
        "body": report.body,
    }


def read_verdict(answer: Answer, config_id: UUID) -> Verdict:
    """Return what an endpoint has answered; raises ``TryAgain`` for an answer that is none."""
    try:
        document = json_object(answer)
        decision, explanation = document["decision"], document.get("explanation") or ""
        if not isinstance(explanation, str):
            raise ValueError("the explanation is no text")
        if decision is not None and (not isinstance(decision, str) or _DECISION.fullmatch(decision) is None):
            raise ValueError("the decision is no word such as remove")
    except (ValueError, KeyError) as error:
        raise TryAgain("ai_answer_malformed", f"the endpoint's answer is malformed: {error}") from error
    return Verdict(
        config_id=config_id,
        decision=decision or "",
        explanation=safe_text(explanation, EXPLANATION_CHARACTERS),
    )


KIND = ProcessAiReport()
