"""How work begins: each function writes a record and the job that works on it, in one transaction or the caller's.

All of them raise ``InvalidInput`` for what a record cannot hold. Text that people read is made safe, and cut where it
is too long for its column; what is acted upon (addresses, names, payloads) is refused instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import validate_email
from django.db import IntegrityError, transaction

from opsconsole.core.canonical_json import canonical_json
from opsconsole.core.database import database_now, is_unique_violation
from opsconsole.core.errors import InvalidInput
from opsconsole.core.safe_text import safe_text
from opsconsole.jobs.http import UrlRefused, parse_url
from opsconsole.jobs.models import (
    ActionDelivery,
    ActionProposal,
    CaseMessage,
    EmailDelivery,
    EvidenceRequest,
    Job,
    Notice,
    NotificationDelivery,
    Report,
    RunState,
    WorkflowDispatch,
    WorkflowRun,
)
from opsconsole.jobs.services import enqueue

LONGEST_BODY = 100_000
LONGEST_ENDPOINT = 500
LONGEST_RECORD_PAYLOAD = 256 << 10


@transaction.atomic
def submit_report(*, tenant: str, reference: str, category: str = "", subject: str = "", body: str = "") -> Report:
    """Take in a report, to be routed; ``reference`` is unique in its tenant."""
    now = database_now()
    report = Report(
        tenant=_name("tenant", tenant, 100),
        reference=_name("reference", reference, 60),
        category=_name("category", category, 60) if category else "",
        subject=safe_text(subject, 200),
        body=safe_text(body, LONGEST_BODY),
        created_at=now,
        updated_at=now,
    )
    try:
        with transaction.atomic():
            report.save(force_insert=True)
    except IntegrityError as error:
        if not is_unique_violation(error):
            raise
        raise InvalidInput(detail=f"reference: there is a report {reference} already.") from None
    _enqueue("route_report", report, record_id=report.id, report_id=str(report.id))
    return report


@transaction.atomic
def request_evidence(*, report: Report, url: str) -> EvidenceRequest:
    """Have what a report points to fetched and kept."""
    _check_url("url", url, 2_000)
    now = database_now()
    evidence = EvidenceRequest.objects.create(
        tenant=report.tenant, report=report, url=url, next_attempt_at=now, created_at=now, updated_at=now
    )
    _enqueue("fetch_evidence", report, record_id=evidence.id, request_id=str(evidence.id), report_id=str(report.id))
    return evidence


@transaction.atomic
def start_workflow(
    *, report: Report, name: str, endpoint: str, payload: Mapping[str, Any] | None = None
) -> WorkflowRun:
    """Have a workflow engine start a run about a report."""
    _check_url("endpoint", endpoint, LONGEST_ENDPOINT)
    now = database_now()
    run = WorkflowRun.objects.create(
        tenant=report.tenant,
        report=report,
        name=_name("name", name, 100),
        state=RunState.DISPATCH_PENDING,
        created_at=now,
        updated_at=now,
    )
    dispatch = WorkflowDispatch.objects.create(
        tenant=report.tenant,
        run=run,
        endpoint=endpoint,
        payload=_payload(payload),
        available_at=now,
        created_at=now,
        updated_at=now,
    )
    _enqueue("dispatch_workflow", report, record_id=dispatch.id, outbox_id=str(dispatch.id), run_id=str(run.id))
    return run


@transaction.atomic
def send_action(
    *, report: Report, action: str, endpoint: str, payload: Mapping[str, Any] | None = None
) -> ActionDelivery:
    """Have the application told of a decision's action."""
    _check_url("endpoint", endpoint, LONGEST_ENDPOINT)
    delivery = ActionDelivery.objects.create(
        report=report,
        action=_name("action", action, 60),
        endpoint=endpoint,
        payload=_payload(payload),
        **_new_delivery(report, database_now()),
    )
    _enqueue("deliver_action", report, record_id=delivery.id, outbox_id=str(delivery.id))
    return delivery


@transaction.atomic
def send_notice(
    *, report: Report, body: str, endpoint: str, payload: Mapping[str, Any] | None = None
) -> NotificationDelivery:
    """Have somebody noticed, by a call to ``endpoint``, with a message if ``body`` has one."""
    _check_url("endpoint", endpoint, LONGEST_ENDPOINT)
    now = database_now()
    message = _message(report, body, now) if body else None
    notice = Notice.objects.create(tenant=report.tenant, report=report, message=message, updated_at=now)
    delivery = NotificationDelivery.objects.create(
        notice=notice, endpoint=endpoint, payload=_payload(payload), **_new_delivery(report, now)
    )
    _enqueue("deliver_notification", report, record_id=delivery.id, outbox_id=str(delivery.id))
    return delivery


@transaction.atomic
def send_email(*, report: Report, to_address: str, subject: str, body: str) -> EmailDelivery:
    """Have a message about a report sent by e-mail."""
    try:
        validate_email(to_address)
    except ValidationError:
        raise InvalidInput(detail="to_address: this is no e-mail address.") from None
    if len(to_address) > 254:
        raise InvalidInput(detail="to_address has at most 254 characters.")
    now = database_now()
    delivery = EmailDelivery.objects.create(
        message=_message(report, body, now),
        to_address=to_address,
        subject=safe_text(" ".join(subject.split()), 200),  # a subject is one line
        **_new_delivery(report, now),
    )
    _enqueue("deliver_email", report, record_id=delivery.id, outbox_id=str(delivery.id))
    return delivery


@transaction.atomic
def propose_action(
    *,
    report: Report,
    action: str,
    endpoint: str,
    payload: Mapping[str, Any] | None = None,
    run: WorkflowRun | None = None,
) -> ActionProposal:
    """Have an action that a run proposes applied through the application's own endpoint."""
    _check_url("endpoint", endpoint, LONGEST_ENDPOINT)
    if run is not None and run.tenant != report.tenant:
        raise InvalidInput(detail="run: it belongs to another tenant.")
    proposal = ActionProposal.objects.create(
        report=report,
        run=run,
        action=_name("action", action, 60),
        endpoint=endpoint,
        payload=_payload(payload),
        **_new_delivery(report, database_now()),
    )
    _enqueue("apply_action_proposal", report, record_id=proposal.id, proposal_id=str(proposal.id))
    return proposal


def _enqueue(kind: str, report: Report, *, record_id: Any, **payload: str) -> Job:
    return enqueue(
        kind=kind,
        tenant=report.tenant,
        payload=payload,
        record_id=str(record_id),
        report_id=report.id,
        key=str(record_id),  # a record never has two jobs waiting
    )


def _new_delivery(report: Report, now: datetime) -> dict[str, Any]:
    return {"tenant": report.tenant, "next_attempt_at": now, "created_at": now, "updated_at": now}


def _message(report: Report, body: str, now: datetime) -> CaseMessage:
    return CaseMessage.objects.create(
        tenant=report.tenant, report=report, body=safe_text(body, LONGEST_BODY), created_at=now
    )


def _name(field: str, value: str, most: int) -> str:
    if not 1 <= len(value) <= most or not value.isprintable() or value == "*":
        raise InvalidInput(detail=f"{field} has 1 to {most} printable characters.")
    return value


def _check_url(field: str, url: str, most: int) -> None:
    try:
        parse_url(url)
    except UrlRefused as error:
        raise InvalidInput(detail=f"{field}: {error}.") from None
    if len(url) > most:
        raise InvalidInput(detail=f"{field} has at most {most} characters.")


def _payload(payload: Mapping[str, Any] | None) -> str:
    try:
        text = canonical_json(dict(payload or {}))
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(detail=f"payload: {error}") from None
    if len(text) > LONGEST_RECORD_PAYLOAD:
        raise InvalidInput(detail=f"payload has at most {LONGEST_RECORD_PAYLOAD} characters as JSON.")
    return text
