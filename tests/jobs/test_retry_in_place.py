"""Retrying a dead job of the ledger: its row and its record go back to work in place, and success closes the letter."""

from __future__ import annotations

import json

import pytest

from deadletters.journal.events import MessageState
from deadletters.models import DeadLetter, LetterState, WorkerNode
from grants.models import AuditEvent
from incidents.models import IncidentState
from opsconsole.core.database import database_now
from opsconsole.jobs.errors import Refused, TryAgain, Unanswered
from opsconsole.jobs.ledger import take_due
from opsconsole.jobs.models import Job, JobState
from repairs.errors import (
    JobOvertaken,
    LetterNotFound,
    ProviderOutcomeUnknown,
    RecordFinished,
    RepairNotCancellable,
    RepairReferenceMissing,
)
from repairs.models import ActionState, ActionType, RepairAction
from repairs.prospects import Prospect, blocked_rows, check_letter, prospect_of
from repairs.refusals import Served
from repairs.services import cancel_repair, retry_incident, retry_letter
from tests.cast import Cast
from tests.jobs.kinds_of_tests import BODIES, TOLD
from tests.jobs.steps import dispatch, kill, letter_of, run

pytestmark = pytest.mark.django_db


def test_a_retry_puts_job_and_record_back_to_pending(cast: Cast) -> None:
    """A12: pending, attempts 0, due now, lease and last error cleared; repair action with before and after; audited."""
    job = kill("test_watched", Refused("no"))
    letter = letter_of(job)
    TOLD.clear()
    done = retry_letter(letter_id=letter.id, by=cast.ada, key="k1")
    job.refresh_from_db()
    assert (job.state, job.attempts, job.last_error_code, job.lease_token) == (JobState.PENDING, 0, "", "")
    assert job.available_at <= job.updated_at
    assert TOLD == [("requeue", "pending", "")]
    action = RepairAction.objects.get(id=done.repair_id)
    assert (action.action_type, action.state) == (ActionType.RETRY_RECORD, ActionState.SENT)
    assert json.loads(action.before)["job"] == "dead"
    assert json.loads(action.after) == {"attempts": 0, "automaticAttemptsReset": True, "state": "pending"}
    letter.refresh_from_db()
    assert letter.state == LetterState.RETRYING
    assert (letter.incident.state, letter.incident.acknowledged_by) == (IncidentState.ACKNOWLEDGED, cast.ada.ref)
    assert AuditEvent.objects.filter(action="dead-letters.retry", target_id=str(letter.id)).count() == 1


def test_the_repair_counts_when_the_job_has_succeeded_and_the_incident_closes_by_itself(cast: Cast) -> None:
    """C11"""
    job = kill("test_watched", Refused("no"))
    letter = letter_of(job)
    done = retry_letter(letter_id=letter.id, by=cast.ada, key="k1")
    BODIES.pop("test_watched")
    assert run(job, dispatch(job)) is None
    job.refresh_from_db()
    letter.refresh_from_db()
    letter.incident.refresh_from_db()
    assert job.state == JobState.SUCCEEDED
    assert RepairAction.objects.get(id=done.repair_id).state == ActionState.SUCCEEDED
    assert (letter.state, letter.incident.state) == (LetterState.REPAIRED, IncidentState.RESOLVED)


def test_a_repair_that_fails_is_back_as_repair_failed_in_its_letter(cast: Cast) -> None:
    """C11, C1: the same letter, one more occurrence, the incident open again."""
    job = kill("test_watched", Refused("no"))
    letter = letter_of(job)
    done = retry_letter(letter_id=letter.id, by=cast.ada, key="k1")
    run(job, dispatch(job))
    letter.refresh_from_db()
    incident = letter.incident
    incident.refresh_from_db()
    assert RepairAction.objects.get(id=done.repair_id).state == ActionState.FAILED
    assert (letter.state, letter.occurrence_count) == (LetterState.OPEN, 2)
    assert (incident.state, incident.reopened_reason, incident.letter_count) == (
        IncidentState.OPEN,
        "repair_failed",
        1,
    )
    # And it can be repaired again.
    retry_letter(letter_id=letter.id, by=cast.ada, key="k2")
    BODIES.pop("test_watched")
    run(job, dispatch(job))
    letter.refresh_from_db()
    assert letter.state == LetterState.REPAIRED


def test_a_repaired_job_has_its_automatic_attempts_again(cast: Cast) -> None:
    """A12: attempts 0; the repair is open until the last of them has failed."""
    job = kill(error=Refused("no"))
    Job.objects.filter(id=job.id).update(max_attempts=2)
    done = retry_letter(letter_id=letter_of(job).id, by=cast.ada, key="k1")
    BODIES["test_plain"] = lambda _work: (_ for _ in ()).throw(TryAgain("busy"))
    run(job, dispatch(job))
    job.refresh_from_db()
    assert (job.state, RepairAction.objects.get(id=done.repair_id).state) == (JobState.RETRYING, ActionState.SENT)


def test_one_key_retries_once(cast: Cast) -> None:
    """A9"""
    job = kill(error=Refused("no"))
    letter = letter_of(job)
    first = retry_letter(letter_id=letter.id, by=cast.ada, key="k1")
    again = retry_letter(letter_id=letter.id, by=cast.ada, key="k1")
    assert (again.idempotent_replay, again.repair_id) == (True, first.repair_id)
    with pytest.raises(JobOvertaken):
        retry_letter(letter_id=letter.id, by=cast.ada, key="k2")
    assert RepairAction.objects.count() == 1


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.CANCELLED])
def test_a_job_that_has_finished_is_not_reset_and_its_letter_is_closed_as_overtaken(cast: Cast, state: str) -> None:
    """C5: 409, letter marked, nothing changed."""
    job = kill(error=Refused("no"))
    letter = letter_of(job)
    Job.objects.filter(id=job.id).update(state=state)
    with pytest.raises(RecordFinished) as refused:
        retry_letter(letter_id=letter.id, by=cast.ada, key="k1")
    assert (refused.value.code, refused.value.status) == ("operations_job_overtaken", 409)
    job.refresh_from_db()
    letter.refresh_from_db()
    assert (job.state, letter.state) == (state, LetterState.OVERTAKEN)
    assert not RepairAction.objects.exists()
    assert AuditEvent.objects.filter(action="dead-letters.overtaken").count() == 1


def test_a_record_that_has_finished_without_its_job_is_not_reset(cast: Cast) -> None:
    """C5"""
    job = kill("test_watched", Refused("no"))
    BODIES["applied"] = lambda _work: None
    with pytest.raises(RecordFinished, match="applied"):
        retry_letter(letter_id=letter_of(job).id, by=cast.ada, key="k1")
    job.refresh_from_db()
    assert job.state == JobState.DEAD


def test_a_job_that_waits_or_runs_is_not_reset(cast: Cast) -> None:
    """C5: work under way is not pulled back, and the letter stays as it is."""
    job = kill(error=Refused("no"))
    letter = letter_of(job)
    Job.objects.filter(id=job.id).update(state=JobState.RETRYING, finished_at=None)
    with pytest.raises(JobOvertaken):
        retry_letter(letter_id=letter.id, by=cast.ada, key="k1")
    letter.refresh_from_db()
    assert letter.state == LetterState.OPEN


def test_a_letter_whose_job_is_gone_says_so(cast: Cast) -> None:
    """A12: 409 operations_repair_reference_missing."""
    job = kill(error=Refused("no"))
    letter = letter_of(job)
    Job.objects.all().delete()
    with pytest.raises(RepairReferenceMissing) as refused:
        retry_letter(letter_id=letter.id, by=cast.ada, key="k1")
    assert (refused.value.code, refused.value.status) == ("operations_repair_reference_missing", 409)


def test_a_job_that_may_have_happened_needs_a_persons_word(cast: Cast) -> None:
    """B6, C19"""
    job = kill("test_outside", Unanswered("no_answer"))
    letter = letter_of(job)
    with pytest.raises(ProviderOutcomeUnknown):
        retry_letter(letter_id=letter.id, by=cast.ada, key="k1")
    retry_letter(letter_id=letter.id, by=cast.ada, key="k2", provider_checked=True, reference="provider log")
    job.refresh_from_db()
    assert (job.state, job.outcome_class) == (JobState.PENDING, "")


def test_several_are_put_back_together_each_with_its_repair(cast: Cast) -> None:
    """A12 for many: jobs of the ledger and their incident."""
    jobs = [kill(error=Refused("no")) for _ in range(3)]
    incident = letter_of(jobs[0]).incident
    assert {letter_of(job).incident_id for job in jobs} == {incident.id}
    Job.objects.filter(id=jobs[2].id).update(state=JobState.SUCCEEDED)
    done = retry_incident(incident_id=incident.id, by=cast.ada, key="k1", expected_count=3)
    assert (done.planned, done.refused) == (2, 1)
    assert letter_of(jobs[2]).state == LetterState.OVERTAKEN
    BODIES.clear()
    tokens = {one.job_id: one.token for one in take_due(source="default", owner="d", limit=10)}
    for job in jobs[:2]:
        assert run(job, tokens[job.id]) is None
    incident.refresh_from_db()
    assert incident.state == IncidentState.RESOLVED


def test_a_retry_is_withdrawn_while_its_job_waits_and_not_once_it_runs(cast: Cast) -> None:
    job = kill(error=Refused("no"))
    letter = letter_of(job)
    first = retry_letter(letter_id=letter.id, by=cast.ada, key="k1")
    assert first.repair_id is not None
    token = dispatch(job)
    cancel_repair(repair_id=first.repair_id, by=cast.ada, key="c1")
    job.refresh_from_db()
    letter.refresh_from_db()
    assert (job.state, letter.state) == (JobState.DEAD, LetterState.OPEN)
    BODIES.clear()
    run(job, token)
    job.refresh_from_db()
    assert job.state == JobState.DEAD

    second = retry_letter(letter_id=letter.id, by=cast.ada, key="k2")
    assert second.repair_id is not None

    def body(_work: object) -> None:
        with pytest.raises(RepairNotCancellable):
            cancel_repair(repair_id=second.repair_id, by=cast.ada, key="c2")  # type: ignore[arg-type]

    BODIES["test_plain"] = body
    assert run(job, dispatch(job)) is None


def test_a_letter_of_another_tenants_job_is_not_found(cast: Cast) -> None:
    """B7, C4"""
    job = kill(error=Refused("no"), tenant="t-b")
    with pytest.raises(LetterNotFound):
        retry_letter(letter_id=letter_of(job).id, by=cast.olga, key="k1")
    job.refresh_from_db()
    assert job.state == JobState.DEAD


@pytest.mark.parametrize(
    ("tasks", "queues", "message_state", "prospect"),
    [
        (["opsconsole.jobs.test_plain"], ["celery"], MessageState.FULL, Prospect.SAFE),
        (["opsconsole.jobs.test_plain"], ["elsewhere"], MessageState.MISSING, Prospect.SAFE),
        (["shop.send_mail"], ["celery"], MessageState.FULL, Prospect.BLOCKED),
        ([], [], MessageState.FULL, Prospect.SAFE),
    ],
    ids=["served", "neither queue nor message matters", "served by nobody", "no worker has ever reported"],
)
def test_lists_count_it_as_its_own_page_judges_it(
    cast: Cast, tasks: list[str], queues: list[str], message_state: MessageState, prospect: Prospect
) -> None:
    """By its row alone: workers serve its kind under the name of a task, and its row keeps what it is run with."""
    letter = letter_of(kill(error=Refused("no")))
    DeadLetter.objects.update(message_state=message_state)
    now = database_now()
    if tasks:
        WorkerNode.objects.create(
            id="w1", source=letter.source, host="h", pid=1, queues=json.dumps(queues), started_at=now, seen_at=now,
            tasks=json.dumps(dict.fromkeys(tasks, '{"varargs":true,"varkw":true}')),
        )  # fmt: skip
    served = Served.by(letter.source, now)
    letter = letter_of(Job.objects.get())
    assert check_letter(letter, letter.incident, served=served, now=now).prospect == prospect
    assert prospect_of(letter, served)[0] == prospect
    blocked = DeadLetter.objects.filter(blocked_rows(letter.job_type, served)).exists()
    assert blocked == (prospect is Prospect.BLOCKED)
