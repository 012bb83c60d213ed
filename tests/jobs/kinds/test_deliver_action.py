"""``deliver_action``."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from opsconsole.core.effects import Effects
from opsconsole.jobs.errors import JobError, Refused, TryAgain, Unanswered
from opsconsole.jobs.kinds.deliver_action import KIND
from tests.jobs import records
from tests.jobs.records import EXHAUSTED, NOW, action, columns, job
from tests.jobs.server import Behaviour, TestServer, answers, closed_port, hangs_up, status

pytestmark = pytest.mark.django_db
LATE = NOW + timedelta(hours=1)


@pytest.mark.parametrize("state", ["pending", "delivering", "retrying"])
def test_the_delivery_of_a_dead_job_has_failed_for_good(state: str) -> None:
    """A6.5."""
    delivery = action(state=state, lease_expires_at=NOW)
    KIND.mark_dead(job("deliver_action", delivery), EXHAUSTED, LATE)
    found = columns(delivery)
    assert (found["state"], found["last_error_code"], found["lease_expires_at"]) == ("failed", EXHAUSTED, None)
    assert found["updated_at"] == LATE


@pytest.mark.parametrize("state", ["delivered", "failed"])
def test_a_delivery_that_is_terminal_already_is_left_alone(state: str) -> None:
    """A6.5."""
    delivery = action(state=state, last_error_code="http_422" if state == "failed" else "")
    before = columns(delivery)
    KIND.mark_dead(job("deliver_action", delivery), EXHAUSTED, LATE)
    assert columns(delivery) == before


def test_the_application_is_told_what_was_decided(server: TestServer) -> None:
    about = records.report(reference="R-1001")
    delivery = action(
        report=about, action="hide", endpoint=server.on("/hook", status(202)), payload='{"post": "p-7", "rate": 0.5}'
    )
    of = job("deliver_action", delivery)
    assert records.run(of) is None
    [asked] = server.asked
    assert asked.document == {
        "type": "deliver_action",
        "data": {"action": "hide", "report": "R-1001", "payload": {"post": "p-7", "rate": 0.5}},
    }
    assert asked.headers["webhook-id"] == str(of.id)
    KIND.complete(of, None, LATE)
    found = columns(delivery)
    assert (found["state"], found["lease_expires_at"], found["last_error_code"]) == ("delivered", None, "")


def test_every_attempt_and_every_repair_has_the_same_idempotency_key(server: TestServer) -> None:
    delivery = action(endpoint=server.on("/hook", status(503)))
    of = job("deliver_action", delivery)
    for attempt in (1, 2):
        of.attempts = attempt
        with pytest.raises(TryAgain):
            records.run(of)
    assert len({asked.headers["webhook-id"] for asked in server.asked}) == 1


@pytest.mark.parametrize(
    ("behaviour", "meaning"), [(status(503), TryAgain), (status(422), Refused), (hangs_up, Unanswered)]
)
def test_what_came_of_the_call_is_declared(server: TestServer, behaviour: Behaviour, meaning: type[JobError]) -> None:
    with pytest.raises(meaning):
        records.run(job("deliver_action", action(endpoint=server.on("/hook", behaviour))))


def test_nothing_has_happened_where_nobody_listens() -> None:
    with pytest.raises(TryAgain):
        records.run(job("deliver_action", action(endpoint=f"http://127.0.0.1:{closed_port()}/")))


HOSTILE = ["", "no", "[]", "null", '{"a": NaN}', '{"a": Infinity}', "[" * 100_000, '{"a": 1' + "0" * 5_000 + "}"]


@pytest.mark.parametrize("payload", HOSTILE)
def test_a_payload_that_is_none_is_refused_before_anything_is_sent(server: TestServer, payload: str) -> None:
    delivery = action(endpoint=server.on("/hook", status(200)), payload=payload)
    with pytest.raises(Refused) as caught:
        records.run(job("deliver_action", delivery))
    assert caught.value.code == "payload_malformed"
    assert server.asked == []


def test_hostile_text_is_sent_as_what_it_is(server: TestServer) -> None:
    delivery = action(endpoint=server.on("/hook", status(200)), payload='{"a": "\\u0000\\ud800\\u202e"}')
    records.run(job("deliver_action", delivery))
    assert server.asked[0].document["data"]["payload"] == {"a": "\x00\ud800\u202e"}


def test_the_provider_is_asked_whether_it_has_the_key(server: TestServer, settings: Any) -> None:
    """C13."""
    settings.OPSCONSOLE_WEBHOOK_PROBES = [server.url("/hook")]
    of = job("deliver_action", action(endpoint=server.url("/hook")))
    server.on(f"/hook/{of.id}", answers({"status": "done"}))
    assert KIND.has_probe
    answer = KIND.probe(of)
    assert answer.happened is True
    assert "200 done" in answer.evidence


def test_a_delivery_that_is_gone_leaves_nobody_to_ask() -> None:
    """C13."""
    assert KIND.probe(job("deliver_action")).happened is None


def test_it_has_effects_outside_and_does_not_repeat_what_may_have_happened() -> None:
    assert KIND.effects is Effects.OUTSIDE
    assert not KIND.retries_unanswered
