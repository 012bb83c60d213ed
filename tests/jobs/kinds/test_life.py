"""The whole life of each of the eight kinds: begun, tried, dead with its letter, retried by a person, done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from celery.exceptions import Retry

from deadletters.models import LetterState
from opsconsole.jobs import intake
from opsconsole.jobs.kinds import kind_named
from opsconsole.jobs.models import ActionProposal, Job, JobState, Report, WorkflowRun
from repairs.services import retry_letter
from tests.cast import Cast
from tests.jobs import records
from tests.jobs.mail_server import taking_mail
from tests.jobs.server import TestServer, answers, status
from tests.jobs.steps import dispatch, letter_of, make_due, run

pytestmark = pytest.mark.django_db
TENANT = "default"


@dataclass
class World:
    """What jobs depend on, broken or well."""

    server: TestServer
    mail: Any

    def break_down(self) -> None:
        self.server.on("/hook", status(503))
        self.mail.replies = {"RCPT": "451 later"}

    def heal(self) -> None:
        self.server.on("/hook", answers({"decision": "remove"}))
        self.mail.replies = {}


@pytest.fixture
def world(server: TestServer, settings: Any) -> Iterator[World]:
    settings.OPSCONSOLE_EVIDENCE_ALLOW = ["127.0.0.1"]
    with taking_mail() as mail:
        settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
        settings.EMAIL_HOST, settings.EMAIL_PORT, settings.EMAIL_TIMEOUT = "127.0.0.1", mail.port, 2
        made = World(server, mail)
        made.break_down()
        yield made


def begun(report: Report, endpoint: str) -> dict[str, Callable[[], Any]]:
    """Return how each kind of job with a record of its own begins."""
    return {
        "fetch_evidence": lambda: intake.request_evidence(report=report, url=endpoint),
        "dispatch_workflow": lambda: intake.start_workflow(report=report, name="takedown", endpoint=endpoint),
        "deliver_action": lambda: intake.send_action(report=report, action="hide", endpoint=endpoint),
        "deliver_notification": lambda: intake.send_notice(report=report, body="Seen.", endpoint=endpoint),
        "deliver_email": lambda: intake.send_email(
            report=report, to_address="ada@example.org", subject="Seen", body="Seen."
        ),
        "apply_action_proposal": lambda: intake.propose_action(report=report, action="hide", endpoint=endpoint),
    }


def state_of(job: Job) -> str:
    found = kind_named(job.kind).record(job)
    assert found is not None
    return found.state


def run_until_dead(job: Job) -> list[str]:
    """Run every attempt and return the state of the record after each."""
    states = []
    for _ in range(job.max_attempts):
        run(job, dispatch(job))
        states.append(state_of(job))
        make_due(job)
    job.refresh_from_db()
    assert job.state == JobState.DEAD
    return states


def retry(job: Job, by: Any) -> None:
    retry_letter(letter_id=letter_of(job).id, by=by, key=f"retry {job.id}")


@pytest.mark.parametrize(
    ("kind", "waiting", "dead", "done"),
    [
        ("fetch_evidence", "pending", "failed", "available"),
        ("dispatch_workflow", "failed", "dead_letter", "delivered"),
        ("deliver_action", "retrying", "failed", "delivered"),
        ("deliver_notification", "retrying", "failed", "delivered"),
        ("deliver_email", "retrying", "failed", "delivered"),
        ("apply_action_proposal", "retrying", "failed", "applied"),
    ],
)
def test_a_job_that_has_died_is_retried_and_done(
    world: World, cast: Cast, kind: str, waiting: str, dead: str, done: str
) -> None:
    """A6, A12, C11."""
    begun(records.report(tenant=TENANT), world.server.url("/hook"))[kind]()
    job = Job.objects.get(kind=kind)
    states = run_until_dead(job)
    assert states == [waiting] * (job.max_attempts - 1) + [dead]
    assert letter_of(job).state == LetterState.OPEN
    retry(job, cast.ada)
    assert state_of(job) in ("pending", "queued")
    world.heal()
    assert run(job, dispatch(job)) is None
    assert state_of(job) == done
    job.refresh_from_db()
    assert job.state == JobState.SUCCEEDED
    assert letter_of(job).state == LetterState.REPAIRED
    if kind == "dispatch_workflow":
        assert WorkflowRun.objects.get().state == "queued"
    if kind == "apply_action_proposal":
        assert ActionProposal.objects.get().applied_at is not None


def test_a_report_without_a_queue_is_routed_once_there_is_one(cast: Cast) -> None:
    """A6.1, A12."""
    report = intake.submit_report(tenant=TENANT, reference="R-1")
    job = Job.objects.get()
    run(job, dispatch(job))
    report.refresh_from_db()
    job.refresh_from_db()
    assert (report.routing_status, job.state) == ("failed", JobState.DEAD)
    people = records.queue(tenant=TENANT)
    retry(job, cast.ada)
    assert run(job, dispatch(job)) is None
    report.refresh_from_db()
    assert (report.routing_status, report.queue_id, report.state) == ("complete", people.id, "human_review")


def test_a_report_goes_through_its_endpoint_by_itself(world: World) -> None:
    world.heal()
    to = records.ai_queue(records.ai_config(tenant=TENANT, endpoint=world.server.url("/hook")), tenant=TENANT)
    records.rule(to, tenant=TENANT)
    report = intake.submit_report(tenant=TENANT, reference="R-1")
    first = Job.objects.get()
    assert run(first, dispatch(first)) is None
    second = Job.objects.get(kind="process_ai_report")
    assert run(second, dispatch(second)) is None
    report.refresh_from_db()
    assert report.state == "decided"


def test_a_report_that_no_endpoint_decided_is_with_people_until_a_retry_decides_it(world: World, cast: Cast) -> None:
    """A6.2, A12."""
    people = records.queue(tenant=TENANT)
    to = records.ai_queue(records.ai_config(tenant=TENANT, endpoint=world.server.url("/hook")), tenant=TENANT)
    records.rule(to, tenant=TENANT)
    report = intake.submit_report(tenant=TENANT, reference="R-1")
    first = Job.objects.get()
    run(first, dispatch(first))
    second = Job.objects.get(kind="process_ai_report")
    assert run_until_dead(second)[-1] == "human_review"
    report.refresh_from_db()
    assert (report.queue_id, report.priority) == (people.id, 60)
    world.heal()
    retry(second, cast.ada)
    assert run(second, dispatch(second)) is None
    report.refresh_from_db()
    assert report.state == "decided"


@pytest.mark.parametrize(
    ("asked", "least", "most"), [("120", 120, 151), ("1", 5, 7), ("31536000", 3600, 4501), ("later", 5, 7)]
)
def test_a_pause_that_the_receiver_asks_for_is_kept_to_and_recorded(
    world: World, asked: str, least: int, most: int
) -> None:
    """Retry-After of a 429: no shorter, at most an hour (and a quarter of it, so that many do not come at once)."""
    world.server.on("/hook", status(429, Retry_After=asked))
    intake.send_action(report=records.report(tenant=TENANT), action="hide", endpoint=world.server.url("/hook"))
    job = Job.objects.get(kind="deliver_action")
    said = run(job, dispatch(job))
    job.refresh_from_db()
    pause = (job.available_at - job.updated_at).total_seconds()
    assert least <= pause < most
    assert isinstance(said, Retry)
    assert said.when == pause
    assert (job.state, job.last_error_code) == (JobState.RETRYING, "http_429")
    assert ("asks for a pause" in job.last_error_text) is (asked != "later")
    record = kind_named(job.kind).record(job)
    assert record is not None
    assert record.detail["next_attempt_at"] == job.available_at
