"""``deliver_notification``: a notice about a report, told to whoever takes notices."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from opsconsole.jobs.bases import WebhookKind
from opsconsole.jobs.kinds.deliver_action import DELIVERY_STATES
from opsconsole.jobs.models import CaseMessage, DeliveryState, Job, MessageState, Notice, NotificationDelivery
from opsconsole.jobs.querysets import TenantQuerySet


class DeliverNotification(WebhookKind):
    """Sends the signed call; with the delivery go its notice and the notice's message (A6.6)."""

    name = "deliver_notification"
    runbook = "docs/runbooks.md#deliver_notification"
    record_type = "notification_outbox"
    ids = ("outbox_id",)
    states = DELIVERY_STATES

    def records(self) -> TenantQuerySet:
        return NotificationDelivery.objects.select_related("notice__report", "notice__message")

    def document(self, record: NotificationDelivery, payload: Mapping[str, Any]) -> dict[str, Any]:
        notice = record.notice
        return {
            "notice": str(notice.id),
            "report": notice.report.reference,
            "message": notice.message.body if notice.message else "",
            "payload": payload,
        }

    def complete(self, job: Job, result: Any, now: datetime) -> None:
        super().complete(job, result, now)
        if self.row(job).filter(state=DeliveryState.DELIVERED).exists():
            self._tell_notice(job, MessageState.DELIVERED, now)

    def mark_dead(self, job: Job, code: str, now: datetime) -> None:
        super().mark_dead(job, code, now)
        if self.row(job).filter(state=DeliveryState.FAILED).exists():
            self._tell_notice(job, MessageState.FAILED, now)

    def requeue(self, job: Job, now: datetime) -> None:
        super().requeue(job, now)
        if self.row(job).filter(state=DeliveryState.PENDING).exists():
            self._tell_notice(job, MessageState.PENDING, now)

    def _tell_notice(self, job: Job, state: MessageState, now: datetime) -> None:
        """Write the delivery's state to notice and message, unless they have arrived (in another way, perhaps)."""
        # The guard stands in the UPDATE itself, not in what it selects from: only there is it asked again after a lock.
        delivery = self.row(job)
        messages = CaseMessage.objects.filter(id__in=delivery.values("notice__message_id"))
        messages.exclude(delivery_state=MessageState.DELIVERED).update(delivery_state=state)
        notices = Notice.objects.filter(id__in=delivery.values("notice_id"))
        notices.exclude(delivery_state=MessageState.DELIVERED).update(delivery_state=state, updated_at=now)


KIND = DeliverNotification()
