"""A job that is taken for dead while its worker is just done: whoever is first, finished work stays finished."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction

from opsconsole.jobs.kinds import kind_named
from opsconsole.jobs.kinds.process_ai_report import Verdict
from opsconsole.jobs.models import MessageState, Notice
from tests.jobs import records
from tests.jobs.kinds.test_contract import CASES, Case
from tests.jobs.records import EXHAUSTED, NOW, columns, job

pytestmark = pytest.mark.django_db(transaction=True)
ROUNDS = 5
LATE = NOW + timedelta(seconds=1)


def at_once(*acts: Callable[[], Any]) -> None:
    """Run each act in a thread and a transaction of its own, all starting together."""
    barrier = threading.Barrier(len(acts))
    failures: list[BaseException] = []

    def begin(act: Callable[[], Any]) -> None:
        try:
            barrier.wait(10)
            with transaction.atomic():
                act()
        except BaseException as error:
            failures.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=begin, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []


@pytest.mark.parametrize("case", [case for case in CASES if case.kind != "fetch_evidence"], ids=lambda case: case.kind)
def test_what_was_done_never_ends_as_failed(case: Case) -> None:
    """A6."""
    kind = kind_named(case.kind)
    for _ in range(ROUNDS):
        record = case.make(state=case.in_flight)
        of = job(case.kind, record)
        at_once(
            lambda of=of: kind.mark_dead(of, EXHAUSTED, LATE),
            lambda of=of: kind.complete(of, None, LATE),
            lambda of=of: kind.release(of, "lease_expired", LATE),
        )
        assert columns(record)["state"] == case.done


def test_a_notice_that_has_arrived_never_ends_as_failed() -> None:
    """A6.6."""
    kind = kind_named("deliver_notification")
    for _ in range(ROUNDS):
        delivery = records.notification(state="delivering")
        of = job("deliver_notification", delivery)
        at_once(
            lambda of=of: kind.mark_dead(of, EXHAUSTED, NOW),
            lambda of=of: kind.complete(of, None, NOW),
        )
        assert Notice.objects.get(id=delivery.notice_id).delivery_state == MessageState.DELIVERED


def test_a_report_is_handed_to_people_or_decided_and_has_one_history() -> None:
    """A6.2: both at once end as decided, whether people had it for a moment or not."""
    kind = kind_named("process_ai_report")
    records.queue()
    for _ in range(ROUNDS):
        made = records.report(state="ai_review", queue=records.ai_queue())
        of = job("process_ai_report", made)
        verdict = Verdict(config_id=made.queue.ai_config_id, decision="remove", explanation="")
        at_once(
            lambda of=of: kind.mark_dead(of, EXHAUSTED, NOW),
            lambda of=of, verdict=verdict: kind.complete(of, verdict, LATE),
        )
        made.refresh_from_db()
        assert made.state == "decided"
        assert [event.to_state for event in made.events.order_by("at")] in (
            ["decided"],
            ["human_review", "decided"],
        )
