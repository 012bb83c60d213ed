"""``deliver_notification``."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from opsconsole.jobs.kinds.deliver_notification import KIND
from opsconsole.jobs.models import NotificationDelivery
from tests.jobs import records
from tests.jobs.records import EXHAUSTED, NOW, columns, job, notification
from tests.jobs.server import TestServer, status

pytestmark = pytest.mark.django_db
LATE = NOW + timedelta(hours=1)


def states(delivery: NotificationDelivery) -> tuple[str, str, str]:
    """Return the states of delivery, notice and message."""
    found = NotificationDelivery.objects.select_related("notice__message").get(id=delivery.id)
    assert found.notice.message is not None
    return found.state, found.notice.delivery_state, found.notice.message.delivery_state


@pytest.mark.parametrize("state", ["pending", "delivering", "retrying"])
def test_with_the_delivery_of_a_dead_job_its_notice_and_message_have_failed(state: str) -> None:
    """A6.6."""
    delivery = notification(state=state, lease_expires_at=NOW)
    KIND.mark_dead(job("deliver_notification", delivery), EXHAUSTED, LATE)
    assert states(delivery) == ("failed", "failed", "failed")
    found = columns(delivery)
    assert (found["last_error_code"], found["lease_expires_at"]) == (EXHAUSTED, None)
    assert columns(delivery.notice)["updated_at"] == LATE


def test_a_delivery_that_has_arrived_is_left_alone_with_its_notice_and_message() -> None:
    """A6.6."""
    delivery = notification(state="delivered")
    before = columns(delivery), columns(delivery.notice)
    KIND.mark_dead(job("deliver_notification", delivery), EXHAUSTED, LATE)
    assert (columns(delivery), columns(delivery.notice)) == before
    assert states(delivery) == ("delivered", "pending", "pending")


def test_a_delivery_that_has_failed_already_keeps_its_reason() -> None:
    """A6.6."""
    delivery = notification(state="failed", last_error_code="http_422", notice_state="failed")
    before = columns(delivery)
    KIND.mark_dead(job("deliver_notification", delivery), EXHAUSTED, LATE)
    assert columns(delivery) == before


def test_a_notice_or_message_that_has_arrived_in_another_way_stays_delivered() -> None:
    """A6.6: finished work is never touched."""
    delivery = notification(notice_state="delivered", message_state="delivered")
    KIND.mark_dead(job("deliver_notification", delivery), EXHAUSTED, LATE)
    assert states(delivery) == ("failed", "delivered", "delivered")


def test_a_notice_without_a_message_fails_alone() -> None:
    """A6.6."""
    delivery = notification()
    notice = delivery.notice
    notice.message = None
    notice.save(update_fields=["message"])
    KIND.mark_dead(job("deliver_notification", delivery), EXHAUSTED, LATE)
    assert columns(notice)["delivery_state"] == "failed"


def test_another_notice_is_left_alone() -> None:
    """A6.6."""
    other = notification()
    KIND.mark_dead(job("deliver_notification", notification()), EXHAUSTED, LATE)
    assert states(other) == ("pending", "pending", "pending")


def test_a_retried_notice_is_pending_again_with_its_message() -> None:
    """A12."""
    delivery = notification(state="failed", notice_state="failed", message_state="failed")
    KIND.requeue(job("deliver_notification", delivery), LATE)
    assert states(delivery) == ("pending", "pending", "pending")


def test_a_notice_is_sent_with_its_message_and_has_arrived(server: TestServer) -> None:
    delivery = notification(endpoint=server.on("/hook", status(200)), payload='{"to": "ada"}')
    of = job("deliver_notification", delivery)
    result: Any = records.run(of)
    [asked] = server.asked
    assert asked.document["type"] == "deliver_notification"
    assert asked.document["data"]["message"] == "We have looked at it."
    assert asked.document["data"]["payload"] == {"to": "ada"}
    KIND.complete(of, result, LATE)
    assert states(delivery) == ("delivered", "delivered", "delivered")
