"""The job ledger: a job is written with the work that wants it, is run by whoever holds its lease, and never lost."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from celery.exceptions import Ignore, Retry
from django.db import OperationalError, connection, transaction

from deadletters.journal.events import Caught, Ended, EndState
from deadletters.models import Attempt, DeadLetter, SetAsideEntry
from deadletters.replay import replay_set_aside
from opsconsole.console import machinery
from opsconsole.core.clock import boot_now, wall_now
from opsconsole.core.database import database_now
from opsconsole.core.effects import OutcomeClass
from opsconsole.jobs import ledger, runner
from opsconsole.jobs.errors import JobKindUnknown, JobPayloadInvalid, Refused, TryAgain, Unanswered
from opsconsole.jobs.heart import Heart
from opsconsole.jobs.kind import Work
from opsconsole.jobs.kinds import kind_named
from opsconsole.jobs.models import Job, JobState
from opsconsole.jobs.services import enqueue
from repairs.settlement import DatabaseSettlement
from tests import factories
from tests.clock import time_of
from tests.deadletters.test_drain import batch, drain
from tests.jobs.kinds_of_tests import BODIES, TOLD
from tests.jobs.steps import LOST, died, dispatch, letter_of, make_due, new_job, record, run
from tests.repairs.reconciliation.rows import worker

pytestmark = pytest.mark.django_db


def raising(error: Exception) -> Any:
    def body(_work: Work) -> None:
        raise error

    return body


# Writing


def test_a_job_is_written_with_the_work_that_wants_it_or_not_at_all() -> None:
    """L0: the ledger is a transactional outbox."""
    with transaction.atomic():
        new_job()
        transaction.set_rollback(True)
    assert not Job.objects.exists()


def test_an_unknown_kind_or_a_payload_that_does_not_fit_is_refused_and_nothing_is_written() -> None:
    with pytest.raises(JobKindUnknown):
        enqueue(kind="nobody_knows", tenant="default", payload={})
    for payload in ({"forbidden": 1}, {"a": float("nan")}, {"a": object()}, {"a": "x" * (1 << 20)}):
        with pytest.raises(JobPayloadInvalid):
            enqueue(kind="test_plain", tenant="default", payload=payload)
    assert not Job.objects.exists()


def test_one_job_of_a_key_waits_at_a_time() -> None:
    first = new_job(key="report-7")
    assert new_job(key="report-7").id == first.id
    assert new_job(key="report-8").id != first.id
    dispatch(first)
    # What is on its way may have read too little: the next one waits.
    assert new_job(key="report-7").id != first.id


# Dispatching


def test_due_jobs_are_taken_oldest_first_and_once() -> None:
    now = database_now()
    late, early, future = (new_job(available_at=now + timedelta(seconds=seconds)) for seconds in (-5, -10, 60))
    taken = [one.job_id for one in ledger.take_due(source="default", owner="one", limit=10)]
    assert taken == [early.id, late.id]
    assert ledger.take_due(source="default", owner="two", limit=10) == []
    future.refresh_from_db()
    assert future.state == JobState.PENDING


def test_the_token_that_a_message_carries_is_the_one_in_the_row() -> None:
    job = new_job()
    token = dispatch(job)
    job.refresh_from_db()
    assert (job.lease_token, job.state, job.dispatches) == (token, JobState.ENQUEUED, 1)
    assert token.startswith(f"job:{job.id}:1:")


@pytest.mark.django_db(transaction=True)
def test_two_dispatchers_at_once_take_each_job_once() -> None:
    jobs = {new_job().id for _ in range(60)}
    taken: list[Any] = []
    start = threading.Barrier(4)

    def take(owner: str) -> None:
        try:
            start.wait()
            while page := ledger.take_due(source="default", owner=owner, limit=7):
                taken.extend(one.job_id for one in page)
        finally:
            connection.close()

    threads = [threading.Thread(target=take, args=(f"d{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == sorted(jobs)


def test_what_the_broker_did_not_take_is_given_back_and_its_old_message_is_passed_over() -> None:
    job = new_job()
    token = dispatch(job)
    assert ledger.give_back([token]) == 1
    second = dispatch(job)
    assert second != token
    assert isinstance(run(job, token), Ignore)
    assert run(job, second) is None
    job.refresh_from_db()
    assert (job.state, job.attempts) == (JobState.SUCCEEDED, 1)


# Running


def test_a_job_runs_once_however_often_its_message_is_delivered() -> None:
    runs: list[int] = []
    job = new_job(body=lambda work: runs.append(work.attempt))
    token = dispatch(job)
    assert run(job, token) is None
    assert isinstance(run(job, token), Ignore)
    assert runs == [1]


def test_the_body_sees_its_payload_and_a_key_that_no_attempt_changes() -> None:
    seen: list[Work] = []

    def body(work: Work) -> None:
        seen.append(work)
        if work.attempt == 1:
            raise TryAgain("busy")

    job = new_job(body=body, record_id="r-1")
    assert isinstance(run(job, dispatch(job)), Retry)
    make_due(job)
    assert run(job, dispatch(job)) is None
    assert [work.idempotency_key for work in seen] == [str(job.id)] * 2
    assert (seen[1].payload, seen[1].record_id, seen[1].attempt, seen[1].max_attempts) == ({"order": 7}, "r-1", 2, 3)


def test_a_failed_attempt_is_put_off_twice_as_long_each_time() -> None:
    job = new_job(body=raising(TryAgain("busy", "the service is busy")))
    pauses = []
    for _ in range(2):
        assert isinstance(run(job, dispatch(job)), Retry)
        job.refresh_from_db()
        pauses.append(round((job.available_at - job.updated_at).total_seconds()))
        assert (job.state, job.last_error_code) == (JobState.RETRYING, "busy")
        make_due(job)
    assert pauses == [10, 20]
    assert not DeadLetter.objects.exists()


def test_the_last_attempt_raises_and_the_recorder_writes_letter_and_job_together() -> None:
    """A3: the job dies in the transaction that records its letter; A2: the letter is the job's, not the message's."""
    job = new_job("test_watched", body=raising(TryAgain("busy", "the service is busy")), max_attempts=2)
    run(job, dispatch(job))
    make_due(job)
    assert isinstance(run(job, dispatch(job)), TryAgain)
    job.refresh_from_db()
    letter = letter_of(job)
    assert (job.state, job.last_error_code) == (JobState.DEAD, "queue_retries_exhausted")
    assert (letter.job_type, letter.fingerprint) == ("test_watched", f"{job.queue}:{job.id}")
    assert letter.outcome_class == OutcomeClass.SAFE
    assert "order" in letter.payload_preview
    assert [hook for hook, _state, _code in TOLD] == ["begin", "put_off", "begin", "mark_dead"]


def test_an_error_that_trying_again_cannot_mend_ends_the_job_at_once() -> None:
    job = new_job(body=raising(Refused("not_wanted")))
    assert isinstance(run(job, dispatch(job)), Refused)
    job.refresh_from_db()
    assert (job.state, job.attempts) == (JobState.DEAD, 1)


@pytest.mark.parametrize("error", [Unanswered("no_answer"), ValueError("what was that")])
def test_what_may_have_happened_is_not_run_again_without_a_persons_word(error: Exception) -> None:
    """C19: effects outside, and nobody knows whether they took place."""
    job = new_job("test_outside", body=raising(error))
    run(job, dispatch(job))
    job.refresh_from_db()
    assert job.state == JobState.DEAD
    assert letter_of(job).outcome_class == OutcomeClass.AMBIGUOUS


def test_a_letter_is_judged_by_every_attempt_of_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """C19: an earlier attempt that may have happened is not forgotten when a later one was refused at the door."""
    monkeypatch.setattr("tests.jobs.kinds_of_tests.Outside.retries_unanswered", True)
    job = new_job("test_outside", body=raising(Unanswered("no_answer")), max_attempts=2)
    assert isinstance(run(job, dispatch(job)), Retry)
    make_due(job)
    BODIES["test_outside"] = raising(TryAgain("busy"))
    run(job, dispatch(job))
    assert letter_of(job).outcome_class == OutcomeClass.AMBIGUOUS


# Leases


def test_a_late_writer_changes_nothing_and_is_kept_as_an_attempt() -> None:
    """C12: whoever writes with an old token is refused and recorded."""
    job = new_job("test_watched")

    def body(_work: Work) -> str:
        Job.objects.filter(id=job.id).update(lease_token="job:other")
        return "done"

    BODIES["test_watched"] = body
    said = run(job, dispatch(job))
    assert isinstance(said, Retry)
    assert type(said.exc).__name__ == "LeaseLost"
    job.refresh_from_db()
    assert job.state == JobState.RUNNING
    assert [hook for hook, _state, _code in TOLD] == ["begin"]


def test_a_long_job_keeps_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """C12: heartbeats."""
    job = new_job()
    token = dispatch(job)
    ledger.claim(job_id=job.id, token=token, owner="w", kind=kind_named(job.kind))
    Job.objects.filter(id=job.id).update(lease_expires_at=database_now() - timedelta(seconds=1))
    heart = Heart()
    monkeypatch.setattr(heart, "_run", lambda: None)
    job.refresh_from_db()
    heart.watch(job, kind_named(job.kind))
    heart.beat(1e9)
    job.refresh_from_db()
    assert job.lease_expires_at is not None
    assert job.lease_expires_at > database_now() + timedelta(seconds=50)
    Job.objects.filter(id=job.id).update(lease_token="job:other")
    heart.beat(2e9)
    assert heart.is_lost(token)


def test_a_heart_that_has_stopped_beats_again_with_the_next_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """C12: a thread that died must not leave every later job of its process without renewals."""
    job = new_job()
    dispatch(job)
    job.refresh_from_db()
    heart, began = Heart(), threading.Semaphore(0)
    monkeypatch.setattr(heart, "_run", began.release)
    for _ in range(2):
        heart.watch(job, kind_named(job.kind))
        assert began.acquire(timeout=10)
        assert heart._thread is not None
        heart._thread.join(10)


@pytest.mark.parametrize(("kind", "state"), [("test_plain", JobState.RETRYING), ("test_outside", JobState.DEAD)])
def test_a_job_lost_with_its_worker_runs_again_only_where_that_does_no_harm(kind: str, state: str) -> None:
    """A job lost after its start ends as a success or as a letter, and never twice at once."""
    job = new_job(kind)
    token = dispatch(job)
    ledger.claim(job_id=job.id, token=token, owner="w", kind=kind_named(job.kind))
    record(died(job, token, LOST, caught=Caught.WORKER_LOST))
    job.refresh_from_db()
    assert job.state == state
    assert Attempt.objects.filter(task_id=token).count() == (1 if state == JobState.RETRYING else 0)
    assert DeadLetter.objects.count() == (0 if state == JobState.RETRYING else 1)


def test_a_job_lost_before_its_start_is_due_at_once_and_its_attempt_does_not_count() -> None:
    job = new_job("test_outside")
    token = dispatch(job)
    record(died(job, token, LOST, caught=Caught.WORKER_LOST, never_started=True))
    job.refresh_from_db()
    assert (job.state, job.attempts) == (JobState.PENDING, 0)
    assert not DeadLetter.objects.exists()


def test_a_message_that_no_worker_serves_is_a_letter() -> None:
    job = new_job()
    record(died(job, dispatch(job), LOST, caught=Caught.UNKNOWN, never_started=True))
    job.refresh_from_db()
    assert job.state == JobState.DEAD


def test_a_message_lost_again_and_again_before_its_start_is_a_letter_in_the_end() -> None:
    job = new_job()
    for _ in range(ledger.MOST_LOST_DISPATCHES + 1):
        record(died(job, dispatch(job), LOST, caught=Caught.WORKER_LOST, never_started=True))
    job.refresh_from_db()
    assert job.state == JobState.DEAD


def test_a_failure_of_an_old_lease_is_kept_and_says_nothing_about_the_job() -> None:
    """C12"""
    job = new_job("test_outside")
    old = dispatch(job)
    ledger.give_back([old])
    dispatch(job)
    record(died(job, old))
    job.refresh_from_db()
    assert job.state == JobState.ENQUEUED
    assert not DeadLetter.objects.exists()
    assert Attempt.objects.filter(task_id=old).count() == 1


def test_recording_the_same_end_again_changes_nothing() -> None:
    """C2"""
    job = new_job(body=raising(Refused("no")))
    token = dispatch(job)
    run(job, token)
    record(died(job, token))
    letter = letter_of(job)
    assert letter.occurrence_count == 1
    assert not Attempt.objects.exists()


def test_a_job_whose_row_is_gone_is_a_letter_all_the_same() -> None:
    job = new_job()
    token = dispatch(job)
    Job.objects.all().delete()
    record(died(job, token))
    assert DeadLetter.objects.get().state == "open"


def test_an_effect_that_raises_undoes_the_whole_recording() -> None:
    """A3: letter, incident and record together or not at all."""
    job = new_job("test_watched", body=raising(Refused("no")))
    BODIES["mark_dead"] = lambda _work: None
    token = dispatch(job)
    with pytest.raises(RuntimeError, match="cannot be marked"):
        run(job, token)
    job.refresh_from_db()
    assert job.state == JobState.RUNNING
    assert not DeadLetter.objects.exists()


def test_an_effect_that_goes_on_raising_sets_the_entry_aside_where_pages_show_it() -> None:
    """A3: nothing of it is recorded, the others of its page are, and once the effect is mended all of it is."""
    job = new_job("test_watched")
    token = dispatch(job)
    ledger.claim(job_id=job.id, token=token, owner="w", kind=kind_named(job.kind))
    BODIES["mark_dead"] = lambda _work: None
    other = factories.failed()
    drain().apply(batch(died(job, token), other))
    assert [letter.task_id for letter in DeadLetter.objects.all()] == [other.delivery.task_id]
    job.refresh_from_db()
    assert job.state == JobState.RUNNING
    assert "its record cannot be marked" in SetAsideEntry.objects.get().reason
    worker()
    machinery.forget()
    shown = machinery.machinery()
    assert (shown.set_aside, shown.is_well) == (1, False)

    del BODIES["mark_dead"]
    assert replay_set_aside(DatabaseSettlement()).recorded == 1
    job.refresh_from_db()
    assert (job.state, letter_of(job).state) == (JobState.DEAD, "open")
    machinery.forget()
    assert machinery.machinery().set_aside == 0


def test_a_body_that_is_done_waits_for_a_database_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    job = new_job()
    token = dispatch(job)
    succeed, tries = ledger.succeed, []

    def flaky(*args: Any) -> None:
        tries.append(1)
        if len(tries) < 3:
            raise OperationalError("the server is gone")
        succeed(*args)

    monkeypatch.setattr(ledger, "succeed", flaky)
    monkeypatch.setattr(runner, "_let_go", lambda: None)
    time_of(monkeypatch, runner, sleep=lambda _seconds: None)
    assert run(job, token) is None
    job.refresh_from_db()
    assert job.state == JobState.SUCCEEDED


def test_ids_that_only_look_like_the_ledgers_are_ordinary_jobs() -> None:
    for task_id in ("job:", "job:nonsense:1:x", f"job:{uuid4()}"):
        job = Job(kind="shop.send_mail", queue="celery")
        record(died(job, task_id))
    assert DeadLetter.objects.count() == 3


def test_a_message_that_went_back_to_the_broker_with_a_dead_worker_is_sent_again_at_once() -> None:
    """Redis keeps it for an hour; its old message is passed over when it turns up."""
    job = new_job()
    token = dispatch(job)
    returned = Ended(
        delivery=factories.delivery(task_id=token, task=job.kind, queue=job.queue, acked=False),
        state=EndState.RETURNED,
        at_boot=boot_now(),
        at_wall=wall_now(),
    )
    drain().apply(batch(returned))
    job.refresh_from_db()
    assert job.state == JobState.PENDING
    assert isinstance(run(job, token), Ignore)


def test_jobs_that_fail_with_different_codes_are_different_incidents() -> None:
    """INC-01: the declared code is the cause, wherever in the client that all kinds share it was found out."""
    letters = []
    for code in ("no_queue", "no_queue", "not_wanted"):
        job = new_job(body=raising(Refused(code, "nothing to be done")))
        run(job, dispatch(job))
        letters.append(letter_of(job))
    assert letters[0].incident_id == letters[1].incident_id != letters[2].incident_id
    assert letters[0].incident.title == "test_plain fails with Refused (no_queue)"
    assert letters[0].error_text == "no_queue: nothing to be done"
