"""``route_report``."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from opsconsole.core.effects import Effects
from opsconsole.core.ids import new_id
from opsconsole.jobs.errors import Refused
from opsconsole.jobs.kinds.route_report import KIND
from opsconsole.jobs.models import Job, Report, ReportEvent
from tests.jobs import records
from tests.jobs.records import EXHAUSTED, NOW, ai_queue, columns, job, queue, report, rule

pytestmark = pytest.mark.django_db
LATE = NOW + timedelta(hours=1)


def route(made: Report) -> dict[str, Any]:
    """Route a report and return what the database has of it then."""
    of = job("route_report", made)
    KIND.complete(of, records.run(of), LATE)
    return columns(made)


# -- Dying and coming back ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["pending", "failed"])
def test_the_routing_of_a_dead_job_has_failed(status: str) -> None:
    """A6.1."""
    made = report(routing_status=status)
    KIND.mark_dead(job("route_report", made), EXHAUSTED, LATE)
    found = columns(made)
    assert (found["routing_status"], found["routing_error_code"], found["updated_at"]) == ("failed", EXHAUSTED, LATE)


def test_a_routed_report_does_not_fail() -> None:
    """A6.1."""
    made = report(routing_status="complete", queue=queue(), state="human_review")
    before = columns(made)
    of = job("route_report", made)
    KIND.mark_dead(of, EXHAUSTED, LATE)
    KIND.requeue(of, LATE)
    KIND.cancel(of, LATE)
    assert columns(made) == before


def test_a_retried_routing_is_pending_without_an_error() -> None:
    """A12."""
    made = report(routing_status="failed", routing_error_code=EXHAUSTED)
    KIND.requeue(job("route_report", made), LATE)
    found = columns(made)
    assert (found["routing_status"], found["routing_error_code"]) == ("pending", "")


def test_a_withdrawn_routing_has_failed_and_says_so() -> None:
    made = report()
    KIND.cancel(job("route_report", made), LATE)
    assert columns(made)["routing_error_code"] == "cancelled"


def test_a_retry_is_overtaken_by_a_routing_that_was_done_otherwise() -> None:
    """C5."""
    assert KIND.is_overtaken(job("route_report", report(routing_status="complete"))) == "complete"
    assert KIND.is_overtaken(job("route_report", report(routing_status="failed"))) == ""


def test_the_report_is_named_with_its_routing() -> None:
    found = KIND.record(job("route_report", report(routing_status="failed", routing_error_code="no_queue")))
    assert found is not None
    assert (found.record_type, found.state, found.detail["routing_error_code"]) == ("report", "failed", "no_queue")


# -- Routing -----------------------------------------------------------------------------------------------------------


def test_the_first_matching_rule_by_position_decides() -> None:
    first, second, third = queue(), queue(), queue()
    rule(third, position=30, category="spam", priority=30)
    rule(first, position=10, category="threat", priority=10)
    rule(second, position=20, category="spam", contains="buy", priority=20)
    found = route(report(category="spam", subject="Please BUY this"))
    assert (found["queue_id"], found["priority"]) == (second.id, 20)
    assert (found["routing_status"], found["state"]) == ("complete", "human_review")
    assert route(report(category="spam"))["queue_id"] == third.id


@pytest.mark.parametrize(
    ("fields", "is_matched"),
    [
        ({"category": "spam", "body": "STRASSE 7"}, True),
        ({"category": "spam", "subject": "straße"}, True),
        ({"category": "spam", "subject": "street"}, False),
        ({"category": "Spam", "subject": "straße"}, False),
    ],
)
def test_a_rule_matches_its_category_and_its_words_in_subject_or_body(fields: Any, is_matched: bool) -> None:
    named, other = queue(position=9), queue(position=1)
    rule(named, category="spam", contains="Straße")
    assert route(report(**fields))["queue_id"] == (named.id if is_matched else other.id)


def test_a_rule_without_conditions_matches_everything() -> None:
    queue(position=1)
    named = queue(position=9)
    rule(named)
    assert route(report())["queue_id"] == named.id


def test_a_retired_queue_gets_nothing() -> None:
    retired, active = queue(status="retired"), queue()
    rule(retired, position=1)
    rule(active, position=2)
    assert route(report())["queue_id"] == active.id


def test_without_a_rule_the_first_active_queue_of_people_gets_it() -> None:
    queue(position=1, status="retired")
    ai_queue(position=2)
    queue(position=3, purpose="appeals")
    queue(position=4, tenant="meadow")
    expected = queue(position=5)
    queue(position=6)
    found = route(report(priority=70))
    assert (found["queue_id"], found["priority"]) == (expected.id, 70)


def test_rules_of_another_tenant_do_not_count() -> None:
    foreign = queue(tenant="meadow")
    rule(foreign, tenant="meadow")
    own = queue()
    assert route(report())["queue_id"] == own.id


def test_without_any_queue_it_is_refused() -> None:
    made = report()
    with pytest.raises(Refused) as caught:
        records.run(job("route_report", made))
    assert caught.value.code == "no_queue"


def test_a_report_that_is_gone_is_refused() -> None:
    with pytest.raises(Refused) as caught:
        records.run(job("route_report", record_id=str(new_id())))
    assert caught.value.code == "record_missing"


def test_a_routed_report_has_an_event() -> None:
    queue()
    made = report()
    of = job("route_report", made)
    KIND.complete(of, records.run(of), LATE)
    event = ReportEvent.objects.get(report=made)
    assert (event.from_state, event.to_state, event.reason_code) == ("received", "human_review", "routed")
    assert (event.actor_type, event.actor_id, event.job_id, event.at) == ("system", "report-router", of.id, LATE)


def test_a_report_for_an_endpoint_gets_a_job_in_the_same_transaction() -> None:
    to = ai_queue()
    rule(to)
    made = report()
    of = job("route_report", made, actor_type="reporter", actor_id="ada")
    KIND.complete(of, records.run(of), LATE)
    assert columns(made)["state"] == "ai_review"
    asked = Job.objects.get(kind="process_ai_report")
    assert asked.record_id == str(made.id)
    assert asked.report_id == made.id
    assert asked.state == "pending"
    assert str(to.ai_config_id) in asked.payload
    assert (asked.tenant, asked.actor_type, asked.actor_id) == (made.tenant, "reporter", "ada")


def test_a_queue_of_an_endpoint_without_a_configuration_gets_nothing() -> None:
    broken = queue(management="ai")
    rule(broken)
    people = queue()
    assert route(report())["queue_id"] == people.id


def test_routing_twice_changes_nothing() -> None:
    queue()
    made = report()
    of = job("route_report", made)
    result = records.run(of)
    KIND.complete(of, result, LATE)
    before = columns(made)
    KIND.complete(of, result, LATE + timedelta(hours=1))
    assert records.run(of) is None
    KIND.complete(of, None, LATE + timedelta(hours=1))
    assert columns(made) == before
    assert ReportEvent.objects.count() == 1


def test_a_report_that_was_decided_before_it_was_routed_stays_decided() -> None:
    rule(ai_queue())
    found = route(report(state="decided"))
    assert (found["state"], found["routing_status"]) == ("decided", "complete")
    assert not Job.objects.filter(kind="process_ai_report").exists()


def test_a_job_of_another_tenant_never_reaches_the_report() -> None:
    queue()
    made = report()
    foreign = job("route_report", made, tenant="meadow")
    before = columns(made)
    with pytest.raises(Refused):
        records.run(foreign)
    KIND.mark_dead(foreign, EXHAUSTED, LATE)
    KIND.requeue(foreign, LATE)
    assert KIND.record(foreign) is None
    assert columns(made) == before


def test_nothing_of_it_leaves_the_database() -> None:
    assert KIND.effects is Effects.NONE
