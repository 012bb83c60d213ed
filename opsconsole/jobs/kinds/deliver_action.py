"""``deliver_action``: a decision's action, told to the application that it concerns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opsconsole.jobs.bases import States, WebhookKind
from opsconsole.jobs.models import ActionDelivery, DeliveryState
from opsconsole.jobs.querysets import TenantQuerySet

DELIVERY_STATES = States(
    pending=DeliveryState.PENDING,
    in_flight=DeliveryState.DELIVERING,
    retrying=DeliveryState.RETRYING,
    failed=DeliveryState.FAILED,
    done=(DeliveryState.DELIVERED,),
    never_dead=(DeliveryState.DELIVERED, DeliveryState.FAILED),  # A6.5: unless terminal already
)


class DeliverAction(WebhookKind):
    """Sends the signed call; the delivery is its record (A6.5)."""

    name = "deliver_action"
    runbook = "docs/runbooks.md#deliver_action"
    record_type = "decision_action_outbox"
    ids = ("outbox_id",)
    states = DELIVERY_STATES
    severity = "critical"

    def records(self) -> TenantQuerySet:
        return ActionDelivery.objects.select_related("report")

    def document(self, record: ActionDelivery, payload: Mapping[str, Any]) -> dict[str, Any]:
        return {"action": record.action, "report": record.report.reference, "payload": payload}


KIND = DeliverAction()
