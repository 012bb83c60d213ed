"""``process_ai_report``."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from opsconsole.core.effects import Effects
from opsconsole.core.ids import new_id
from opsconsole.jobs.errors import JobError, Refused, TryAgain
from opsconsole.jobs.kinds.process_ai_report import KIND
from opsconsole.jobs.models import AiDecision, Job, Report, ReportEvent
from tests.jobs import records
from tests.jobs.records import EXHAUSTED, NOW, ai_config, ai_queue, columns, job, queue, report
from tests.jobs.server import Behaviour, TestServer, answers, drips, hangs, hangs_up, resets, status, streams

pytestmark = pytest.mark.django_db
LATE = NOW + timedelta(hours=1)


def in_ai_review(**config: Any) -> Report:
    return report(state="ai_review", queue=ai_queue(ai_config(**config)), routing_status="complete")


def job_for(made: Report) -> Job:
    return job("process_ai_report", made)


# -- Dying (A6.2) ------------------------------------------------------------------------------------------------------


def test_a_report_whose_job_has_died_goes_to_the_fallback_queue_of_its_configuration() -> None:
    """A6.2."""
    queue(position=1)
    fallback = queue(position=9)
    made = in_ai_review(fallback_queue=fallback)
    of = job_for(made)
    KIND.mark_dead(of, EXHAUSTED, LATE)
    found = columns(made)
    assert (found["state"], found["queue_id"], found["priority"]) == ("human_review", fallback.id, 60)
    assert (found["routing_error_code"], found["updated_at"]) == ("ai_queue_retries_exhausted", LATE)
    assert found["routing_status"] == "complete"
    event = ReportEvent.objects.get(report=made)
    assert (event.from_state, event.to_state) == ("ai_review", "human_review")
    assert (event.reason_code, event.actor_type, event.actor_id) == (
        "ai_queue_retries_exhausted",
        "system",
        "ai-review",
    )
    assert (event.job_id, event.at) == (of.id, LATE)


@pytest.mark.parametrize("fields", [{"status": "retired"}, {"management": "ai"}])
def test_a_fallback_queue_that_is_not_active_or_not_of_people_is_passed_over(fields: dict[str, str]) -> None:
    """A6.2."""
    queue(position=1, status="retired")
    queue(position=2, purpose="appeals")
    queue(position=3, tenant="meadow")
    expected = queue(position=4)
    queue(position=5)
    made = in_ai_review(fallback_queue=queue(position=0, **fields))
    KIND.mark_dead(job_for(made), EXHAUSTED, LATE)
    assert columns(made)["queue_id"] == expected.id


def test_without_a_queue_of_people_it_still_leaves_the_endpoints_hands() -> None:
    """A6.2."""
    made = in_ai_review()
    KIND.mark_dead(job_for(made), EXHAUSTED, LATE)
    assert (columns(made)["state"], columns(made)["queue_id"]) == ("human_review", None)


def test_a_higher_priority_is_kept() -> None:
    """A6.2."""
    made = in_ai_review()
    made.priority = 80
    made.save(update_fields=["priority"])
    KIND.mark_dead(job_for(made), EXHAUSTED, LATE)
    assert columns(made)["priority"] == 80


@pytest.mark.parametrize("state", ["received", "human_review", "decided"])
def test_a_report_in_any_other_state_is_left_alone(state: str) -> None:
    """A6.2."""
    made = report(state=state, queue=ai_queue())
    before = columns(made)
    KIND.mark_dead(job_for(made), EXHAUSTED, LATE)
    assert columns(made) == before
    assert not ReportEvent.objects.exists()


@pytest.mark.parametrize("payload", ["{}", "[]", "null", '{"ai_config_id": 7}', '{"ai_config_id": "no"}'])
def test_a_job_that_names_no_configuration_hands_over_to_the_first_queue(payload: str) -> None:
    """A6.2."""
    first = queue()
    made = in_ai_review(fallback_queue=queue(position=7))
    of = job("process_ai_report", made, payload=payload)
    KIND.mark_dead(of, EXHAUSTED, LATE)
    assert columns(made)["queue_id"] == first.id


def test_a_withdrawn_review_goes_to_people_too() -> None:
    people = queue()
    made = in_ai_review()
    KIND.cancel(job_for(made), LATE)
    found = columns(made)
    assert (found["state"], found["queue_id"], found["routing_error_code"]) == (
        "human_review",
        people.id,
        "ai_review_cancelled",
    )


# -- Coming back -------------------------------------------------------------------------------------------------------


def test_a_retry_leaves_the_report_in_sight_of_people_and_decides_it_after_all(server: TestServer) -> None:
    """A12, C5."""
    queue()
    made = in_ai_review(endpoint=server.on("/ai", answers({"decision": "remove"})))
    of = job_for(made)
    KIND.mark_dead(of, EXHAUSTED, LATE)
    before = columns(made)
    assert KIND.is_overtaken(of) == ""
    KIND.requeue(of, LATE)
    assert columns(made) == before
    KIND.complete(of, records.run(of), LATE)
    assert (columns(made)["state"], columns(made)["routing_error_code"]) == ("decided", "")


@pytest.mark.parametrize("state", ["decided", "human_review"])
def test_a_retry_is_overtaken_by_what_people_have_done(server: TestServer, state: str) -> None:
    """C5."""
    queue()
    made = in_ai_review(endpoint=server.on("/ai", answers({"decision": "remove"})))
    of = job_for(made)
    KIND.mark_dead(of, EXHAUSTED, LATE)
    ReportEvent.objects.create(
        report=made, from_state="human_review", to_state=state, reason_code="taken", actor_type="operator",
        actor_id="ada", at=LATE + timedelta(seconds=1),
    )  # fmt: skip
    Report.objects.filter(id=made.id).update(state=state)
    before = columns(made)
    assert KIND.is_overtaken(of) == state
    assert records.run(of) is None
    assert server.asked == []
    KIND.complete(of, None, LATE)
    assert columns(made) == before


# -- Asking ------------------------------------------------------------------------------------------------------------


def test_the_endpoint_is_asked_and_decides(server: TestServer) -> None:
    endpoint = server.on("/ai", answers({"decision": "remove", "explanation": "It sells\x00 something."}))
    made = in_ai_review(endpoint=endpoint)
    of = job_for(made)
    KIND.complete(of, records.run(of), LATE)
    [asked] = server.asked
    assert asked.document["type"] == "process_ai_report"
    assert asked.document["data"]["report"] == made.reference
    assert asked.headers["webhook-id"] == str(of.id)
    assert columns(made)["state"] == "decided"
    decision = AiDecision.objects.get(report=made)
    assert (decision.decision, decision.explanation) == ("remove", "It sells‹U+0000› something.")
    assert (decision.job_id, decision.at) == (of.id, LATE)
    event = ReportEvent.objects.get(report=made)
    assert (event.from_state, event.to_state, event.reason_code) == ("ai_review", "decided", "ai_decided")


def test_a_job_that_ran_twice_has_decided_once(server: TestServer) -> None:
    made = in_ai_review(endpoint=server.on("/ai", answers({"decision": "remove"})))
    of = job_for(made)
    first, second = records.run(of), records.run(of)
    KIND.complete(of, first, LATE)
    KIND.complete(of, second, LATE)
    assert AiDecision.objects.count() == 1
    assert ReportEvent.objects.count() == 1


def test_what_the_endpoint_cannot_decide_goes_to_people(server: TestServer) -> None:
    fallback = queue()
    made = in_ai_review(endpoint=server.on("/ai", answers({"decision": None})), fallback_queue=fallback)
    of = job_for(made)
    KIND.complete(of, records.run(of), LATE)
    found = columns(made)
    assert (found["state"], found["queue_id"], found["routing_error_code"]) == ("human_review", fallback.id, "")
    assert ReportEvent.objects.get(report=made).reason_code == "ai_undecided"
    assert not AiDecision.objects.exists()


def test_what_people_have_decided_meanwhile_stays(server: TestServer) -> None:
    made = in_ai_review(endpoint=server.on("/ai", answers({"decision": "remove"})))
    of = job_for(made)
    result = records.run(of)
    Report.objects.filter(id=made.id).update(state="decided")
    before = columns(made)
    KIND.complete(of, result, LATE)
    assert columns(made) == before
    assert not AiDecision.objects.exists()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"remove",
        b"[]",
        b"{}",
        b'{"decision": 7}',
        b'{"decision": ""}',
        b'{"decision": "Remove it!"}',
        b'{"decision": ["remove"]}',
        b'{"decision": "' + b"a" * 61 + b'"}',
        b'{"decision": "remove", "explanation": {"a": 1}}',
        b'{"decision": NaN}',
        b'{"decision": "remove"',
        b"\xff\xfe",
        b"[" * 60_000,
    ],
)
def test_a_malformed_answer_is_declared_and_asked_for_again(server: TestServer, answer: bytes) -> None:
    made = in_ai_review(endpoint=server.on("/ai", status(200, answer)))
    with pytest.raises(TryAgain) as caught:
        records.run(job_for(made))
    assert caught.value.code == "ai_answer_malformed"


@pytest.mark.parametrize("make", [lambda size: status(200, json.dumps({"a": "x" * size}).encode()), streams])
def test_an_answer_without_end_is_not_read_to_its_end(server: TestServer, make: Any) -> None:
    made = in_ai_review(endpoint=server.on("/ai", make(5_000_000)))
    with pytest.raises(TryAgain) as caught:
        records.run(job_for(made))
    assert caught.value.code == "ai_answer_malformed"


@pytest.mark.parametrize(
    ("behaviour", "meaning", "code"),
    [
        (status(503), TryAgain, "http_503"),
        (status(429), TryAgain, "http_429"),
        (status(401), Refused, "http_401"),
        (hangs, TryAgain, "timed_out"),
        (drips, TryAgain, "timed_out"),
        (hangs_up, TryAgain, "connection_lost"),
        (resets, TryAgain, "connection_lost"),
    ],
)
def test_what_came_of_it_says_whether_to_ask_again(
    server: TestServer, behaviour: Behaviour, meaning: type[JobError], code: str
) -> None:
    made = in_ai_review(endpoint=server.on("/ai", behaviour), timeout_seconds=1)
    with pytest.raises(meaning) as caught:
        records.run(job_for(made))
    assert caught.value.code == code


def test_a_report_or_a_configuration_that_is_gone_is_refused() -> None:
    with pytest.raises(Refused, match="no report"):
        records.run(job("process_ai_report", record_id=str(new_id())))
    made = report(state="ai_review", queue=queue())
    with pytest.raises(Refused) as caught:
        records.run(job_for(made))
    assert caught.value.code == "ai_config_missing"


def test_a_configuration_of_another_tenant_is_not_used(server: TestServer) -> None:
    foreign = ai_config(tenant="meadow", endpoint=server.on("/ai", answers({"decision": "remove"})))
    made = report(state="ai_review", queue=queue())
    of = job("process_ai_report", made, payload={"report_id": str(made.id), "ai_config_id": str(foreign.id)})
    with pytest.raises(Refused):
        records.run(of)
    assert server.asked == []


def test_to_ask_twice_does_no_harm() -> None:
    assert KIND.effects is Effects.IDEMPOTENT
