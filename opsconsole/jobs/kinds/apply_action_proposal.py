"""``apply_action_proposal``: an action that a workflow proposes, applied through the application's own endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from opsconsole.jobs.bases import States, WebhookKind
from opsconsole.jobs.models import ActionProposal, ProposalState
from opsconsole.jobs.querysets import TenantQuerySet


class ApplyActionProposal(WebhookKind):
    """Sends the signed call; the proposal is its record, and is put back only while it is not applied (A6.8, A12)."""

    name = "apply_action_proposal"
    runbook = "docs/runbooks.md#apply_action_proposal"
    record_type = "action_proposal"
    ids = ("proposal_id",)
    severity = "critical"
    states = States(
        pending=ProposalState.QUEUED,
        in_flight=ProposalState.APPLYING,
        retrying=ProposalState.RETRYING,
        failed=ProposalState.FAILED,
        done=(ProposalState.APPLIED,),
        never_dead=(ProposalState.APPLIED,),
    )

    def records(self) -> TenantQuerySet:
        return ActionProposal.objects.select_related("report")

    def document(self, record: ActionProposal, payload: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "proposal": str(record.id),
            "run": str(record.run_id) if record.run_id else None,
            "action": record.action,
            "report": record.report.reference,
            "payload": payload,
        }

    def finished(self, now: datetime) -> dict[str, Any]:
        return {"applied_at": now}


KIND = ApplyActionProposal()
