"""Stale leases: what is released, how, and what is left alone (A14, C9, C12)."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, connections, transaction

from deadletters.models import Attempt, DeadLetter, WorkerNode
from deadletters.outcome import OutcomeClass
from opsconsole.core.database import database_now
from opsconsole.jobs import ledger
from opsconsole.jobs.errors import LeaseLost
from opsconsole.jobs.kinds import kind_named
from opsconsole.jobs.models import ConnectionLease, EvidenceRequest, Job, JobState, WorkflowDispatch
from repairs import sql
from repairs.models import ReconciliationRun, SweepActionType, SweepRepair
from repairs.reconciliation import jobs as stale_jobs
from repairs.reconciliation import leases
from repairs.reconciliation.jobs import Verdict, decide_job
from repairs.reconciliation.running import run_now
from repairs.services import retry_letter
from tests.cast import Cast
from tests.repairs.reconciliation.rows import (
    ago,
    connection_lease,
    counts,
    fetching,
    leased_dispatch,
    leased_job,
    sweep,
    worker,
)
from tests.repairs.test_retry import race

pytestmark = pytest.mark.django_db


def pages_of(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AT_ONCE", "PAGE"):
        monkeypatch.setattr(leases, name, size)


def test_evidence_not_touched_for_five_minutes_is_pending_again() -> None:
    """A14."""
    (stale,) = fetching(301)
    (fresh,) = fetching(290)
    run = sweep("stale_leases")
    assert counts(run) == (1, 1, 0)
    marker = stale.updated_at
    stale.refresh_from_db()
    fresh.refresh_from_db()
    assert (stale.state, stale.last_error_code) == ("pending", "stale_fetch_lease_recovered")
    assert stale.next_attempt_at == stale.updated_at
    assert timedelta() <= database_now() - stale.updated_at < timedelta(minutes=1)
    assert fresh.state == "fetching"
    row = SweepRepair.objects.get()
    assert row.operation_key == f"stale-evidence:{stale.id}:{marker:%Y-%m-%dT%H:%M:%S.%fZ}"
    assert (row.action_type, row.entity_type, row.entity_id) == (
        SweepActionType.RELEASE_STALE_LEASE, "evidence_fetch_request", str(stale.id),
    )  # fmt: skip
    assert (row.run_id, row.tenant, row.planned_by) == (run.id, "default", "system:system")
    assert json.loads(row.before) == {"state": "fetching", "updatedAt": f"{marker:%Y-%m-%dT%H:%M:%S.%fZ}"}
    assert json.loads(row.after) == {"code": "stale_fetch_lease_recovered", "state": "pending"}
    assert row.id.version == 7


def test_a_dispatch_past_its_lease_has_failed_and_is_due_now() -> None:
    """A14."""
    stale, held = leased_dispatch(1), leased_dispatch(-30)
    assert counts(sweep("stale_leases")) == (1, 1, 0)
    stale.refresh_from_db()
    held.refresh_from_db()
    assert (stale.state, stale.lease_expires_at) == ("failed", None)
    assert stale.last_error_code == "stale_dispatch_lease_recovered"
    assert stale.available_at == stale.updated_at
    assert held.state == "leased"
    assert SweepRepair.objects.get().operation_key.startswith(f"stale-workflow:{stale.id}:")


def test_connection_leases_past_their_expiry_are_deleted() -> None:
    """A14."""
    stale, held = connection_lease(1), connection_lease(-30)
    assert counts(sweep("stale_leases")) == (1, 1, 0)
    assert list(ConnectionLease.objects.all()) == [held]
    row = SweepRepair.objects.get()
    assert (row.entity_type, row.entity_id) == ("connection_execution_lease", str(stale.id))
    assert json.loads(row.after) == {"deleted": True}


def stale_rows() -> dict[str, tuple[Any, dict[str, str]]]:
    """Return a stale row of each table, with what the job has that works on it."""
    (fetch,) = fetching(400)
    dispatch, connection_ = leased_dispatch(10), connection_lease(10)
    return {
        "evidence": (fetch, {"record_type": "evidence_fetch_request", "record_id": str(fetch.id)}),
        "dispatch": (dispatch, {"record_type": "workflow_dispatch_outbox", "record_id": str(dispatch.id)}),
        "connection": (connection_, {"lease_token": connection_.holder}),
    }


@pytest.mark.parametrize("which", ["evidence", "dispatch", "connection"])
def test_what_a_living_job_works_on_is_left_to_it(which: str) -> None:
    """A14, C9, C12: looked at and left alone, until the job's own lease is over."""
    rows = stale_rows()
    row, of_job = rows[which]
    before = type(row).objects.filter(id=row.id).values().get()
    job = leased_job(JobState.RUNNING, -30)
    Job.objects.filter(id=job.id).update(**of_job)
    assert counts(sweep("stale_leases")) == (3, 2, 1)
    assert type(row).objects.filter(id=row.id).values().get() == before
    Job.objects.filter(id=job.id).update(state="succeeded", finished_at=ago(0), lease_expires_at=None)
    assert counts(sweep("stale_leases")) == (1, 1, 0)


def test_a_job_of_another_record_keeps_no_row_from_being_released() -> None:
    """A14: the job has the id of a record of another type."""
    (fetch,) = fetching(400)
    leased_job(JobState.RUNNING, -30, record_type="report", record_id=str(fetch.id))
    leased_job(JobState.ENQUEUED, -30, record_type="evidence_fetch_request", record_id=str(fetch.id))
    assert counts(sweep("stale_leases")) == (1, 1, 0)


@pytest.mark.parametrize("state", ["pending", "available", "unavailable", "failed"])
def test_evidence_that_nobody_fetches_is_left_alone(state: str) -> None:
    """A14: guarded by the state."""
    fetching(4_000, state=state)
    assert counts(sweep("stale_leases")) == (0, 0, 0)


@pytest.mark.parametrize("state", ["pending", "failed", "delivered", "dead_letter"])
def test_a_dispatch_that_is_not_leased_is_left_alone(state: str) -> None:
    """A14: guarded by the state."""
    leased_dispatch(4_000, state=state)
    assert counts(sweep("stale_leases")) == (0, 0, 0)


def test_the_same_stale_lease_is_never_repaired_twice() -> None:
    """A14: put back as it was, say by a restored backup, its operation key says that it was released."""
    (stale,) = fetching(400)
    marker = stale.updated_at
    assert counts(sweep("stale_leases")) == (1, 1, 0)
    EvidenceRequest.objects.update(state="fetching", updated_at=marker)
    assert counts(sweep("stale_leases")) == (1, 0, 1), "looked at, and left alone"
    assert SweepRepair.objects.count() == 1
    assert EvidenceRequest.objects.get().state == "fetching"
    EvidenceRequest.objects.update(updated_at=marker + timedelta(milliseconds=1))
    assert counts(sweep("stale_leases")) == (1, 1, 0), "another claim of the same row is another lease"


def test_a_page_with_one_that_was_released_before_releases_the_others() -> None:
    """A14, C9: what is recorded is what was changed, and each record has an id of its own."""
    rows = fetching(400, 5)
    markers = {row.id: row.updated_at for row in rows}
    sweep("stale_leases")
    EvidenceRequest.objects.filter(id=rows[2].id).update(state="fetching", updated_at=markers[rows[2].id])
    more = fetching(400, 4)
    assert counts(sweep("stale_leases")) == (5, 4, 1)
    left = EvidenceRequest.objects.filter(state="fetching").values_list("id", flat=True)
    assert list(left) == [rows[2].id]
    recorded = SweepRepair.objects.values_list("entity_id", flat=True)
    assert sorted(recorded) == sorted(str(row.id) for row in (*rows, *more))


def test_a_page_whose_rows_have_moved_is_done_by_their_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """C9: what the first try has done is undone; each row is released and recorded once."""
    if connection.vendor != "postgresql":
        pytest.skip("only PostgreSQL finds rows by where they lie")
    fetching(400, 3)
    tries = []

    def moved(*given: Any) -> Any:
        tries.append(release(*given).repaired)
        raise sql._Moved

    release = sql._release_by_place
    monkeypatch.setattr(sql, "_release_by_place", moved)
    assert counts(sweep("stale_leases")) == (3, 3, 0)
    assert tries[0] == 3
    assert SweepRepair.objects.count() == 3
    assert not EvidenceRequest.objects.filter(state="fetching").exists()


def test_a_manual_run_looks_at_the_oldest_of_each_up_to_its_limit(cast: Cast) -> None:
    """A14: at most ``limit`` each, oldest first."""
    rows = fetching(400, 5)
    for _ in range(3):
        leased_dispatch(10)
    done = run_now(kind="stale_leases", by=cast.ada, key="k", limit=2).run
    assert (counts(done), done.row_limit) == ((4, 4, 0), 2)
    released = set(EvidenceRequest.objects.filter(state="pending").values_list("id", flat=True))
    assert released == {rows[0].id, rows[1].id}
    assert WorkflowDispatch.objects.filter(state="failed").count() == 2


def test_rows_that_are_left_alone_do_not_starve_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """STYLE 5: pages go on by key, also past a page in which nothing could be released."""
    pages_of(2, monkeypatch)
    rows = fetching(400, 6)
    markers = {row.id: row.updated_at for row in rows}
    sweep("stale_leases")
    for row in rows[:4]:
        EvidenceRequest.objects.filter(id=row.id).update(state="fetching", updated_at=markers[row.id])
    EvidenceRequest.objects.filter(id=rows[5].id).update(
        state="fetching", updated_at=markers[rows[5].id] + timedelta(milliseconds=5)
    )
    assert counts(sweep("stale_leases")) == (5, 1, 4)


def test_one_run_without_a_limit_releases_all_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A14: no cap other than time; page after page."""
    pages_of(100, monkeypatch)
    fetching(400, 450)
    with_queries = _statements(lambda: sweep("stale_leases"))
    assert EvidenceRequest.objects.filter(state="pending").count() == SweepRepair.objects.count() == 450
    assert sum("stale-evidence" in text for text in with_queries) <= 5 * 3, "by the page, not by the row"


def _statements(work: Any) -> list[str]:
    from django.test.utils import CaptureQueriesContext

    with CaptureQueriesContext(connection) as found:
        work()
    return [query["sql"] for query in found.captured_queries]


@pytest.mark.postgresql
@pytest.mark.django_db(transaction=True)
def test_a_row_that_somebody_holds_is_skipped_and_counted() -> None:
    """C9: a holder that is at the row just now is not waited for."""
    held, free = fetching(400, 2)

    def hold_and_sweep(index: int) -> ReconciliationRun | None:
        if index:
            return None
        with transaction.atomic():
            list(EvidenceRequest.objects.select_for_update().filter(id=held.id))
            return race(1, lambda _index: sweep("stale_leases"))[0]

    run = race(1, hold_and_sweep)[0]
    assert counts(run) == (2, 1, 1)
    assert EvidenceRequest.objects.get(id=held.id).state == "fetching"
    assert EvidenceRequest.objects.get(id=free.id).state == "pending"


@pytest.mark.django_db(transaction=True)
def test_a_holder_that_is_back_in_time_keeps_its_claim() -> None:
    """A14, C12: guarded again at the write: touched while sweeps run, no row is ever both touched and released."""
    rows = fetching(400, 40)

    def work(index: int) -> int:
        if index == 0:
            return sweep("stale_leases").repaired_count
        touched = 0
        for row in rows:
            touched += EvidenceRequest.objects.filter(id=row.id, state="fetching").update(updated_at=database_now())
        return touched

    repaired, touched = race(2, work)
    assert repaired + touched >= 40
    assert EvidenceRequest.objects.filter(state="pending").count() == repaired == SweepRepair.objects.count()
    assert EvidenceRequest.objects.filter(state="fetching").count() == 40 - repaired


# After an outage


def test_after_an_outage_of_the_database_leases_are_given_one_more_length() -> None:
    """C12: workers report again, but for less than a lease: each of them may be about to renew."""
    worker(0, reporting=20)
    fetching(400)
    leased_dispatch(10)
    connection_lease(10)
    job = leased_job(JobState.RUNNING, 10)
    run = sweep("stale_leases")
    assert run.repaired_count == 0
    assert run.waited_since is not None
    assert EvidenceRequest.objects.get().state == "fetching"
    job.refresh_from_db()
    assert job.state == JobState.RUNNING


def test_where_a_worker_has_reported_for_the_length_of_a_lease_leases_are_judged() -> None:
    """C12: one unbroken row of reports shows that everybody could have renewed."""
    worker(0, reporting=20, name="new")
    worker(0, reporting=61, name="old")
    fetching(400)
    run = sweep("stale_leases")
    assert (run.repaired_count, run.waited_since) == (1, None)


def test_a_report_from_before_an_outage_that_is_just_over_shows_nothing() -> None:
    """C12: the database may have been away ever since, and each holder may be about to renew."""
    worker(25, reporting=900)
    fetching(400)
    job = leased_job(JobState.RUNNING, 10)
    run = sweep("stale_leases")
    assert (run.repaired_count, run.waited_since is not None) == (0, True)
    job.refresh_from_db()
    assert job.state == JobState.RUNNING
    WorkerNode.objects.update(seen_at=ago(2))
    assert sweep("stale_leases").repaired_count == 2


def test_where_all_workers_are_silent_it_is_waited_once() -> None:
    """C12: the first run notes when it found so; a lease later the dead are taken for dead."""
    worker(300)
    fetching(400)
    first = sweep("stale_leases")
    assert (first.repaired_count, first.waited_since is not None) == (0, True)
    assert sweep("stale_leases").repaired_count == 0, "still within the lease"
    ReconciliationRun.objects.update(waited_since=ago(61))
    assert sweep("stale_leases").repaired_count == 1


def test_a_silence_after_new_reports_is_another_one() -> None:
    """C12."""
    worker(40)
    fetching(400)
    ReconciliationRun.objects.create(
        kind="stale_leases", state="succeeded", started_by="system:system", started_at=ago(900),
        heartbeat_at=ago(900), finished_at=ago(900), waited_since=ago(900),
    )  # fmt: skip
    assert sweep("stale_leases").repaired_count == 0


def test_where_no_worker_is_known_there_is_nobody_to_wait_for() -> None:
    """C12: those that have said good-bye, or were silent for a day, count for nothing."""
    worker(10, name="stopped", stopped_at=ago(5))
    worker(90_000, name="forgotten")
    fetching(400)
    assert sweep("stale_leases").repaired_count == 1


def test_a_worker_that_missed_reports_begins_to_count_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """C12: what ``reporting_since`` says, as a worker writes it."""
    from celery import Celery

    from deadletters import nodes
    from deadletters.nodes import Reporter, Standing

    standing = Standing(journal_bytes=0, journal_oldest_seconds=0.0, dropped=0, trouble="", captured_at=None)
    reporter = Reporter(
        Celery("tests", set_as_current=False), node="w9", source="tests", pid=1, pool="solo", concurrency=1,
        queues=list, standing=lambda: standing,
    )  # fmt: skip
    began = database_now()
    since = []
    for after in (0, 10, 20, 90, 100):
        monkeypatch.setattr(nodes, "database_now", lambda after=after: began + timedelta(seconds=after))
        reporter.report()
        since.append((WorkerNode.objects.get(id="w9").reporting_since - began).total_seconds())  # type: ignore[operator]
    assert since == [0, 0, 0, 90, 90]


# Jobs of the ledger


def test_a_running_job_past_its_lease_runs_again_where_that_does_no_harm() -> None:
    """A14: its attempt counts, it is put off, and the old holder can write nothing more (C12)."""
    job = leased_job(JobState.RUNNING, 5)
    before = Job.objects.get(id=job.id)
    run = sweep("stale_leases")
    assert counts(run) == (1, 1, 0)
    job.refresh_from_db()
    assert (job.state, job.attempts, job.lease_expires_at) == (JobState.RETRYING, 1, None)
    assert job.last_error_code == "worker_lost"
    assert job.available_at > database_now()
    assert not DeadLetter.objects.exists()
    assert Attempt.objects.count() == 1
    row = SweepRepair.objects.get()
    assert (row.action_type, row.entity_type, row.entity_id) == ("release_stale_lease", "job", str(job.id))
    assert row.operation_key == f"stale-job:job:{job.id}:1:abc"
    with pytest.raises(LeaseLost):
        ledger.succeed(before, kind_named("test_plain"), None)
    assert ledger.renew(before, kind_named("test_plain")) is False


def test_a_running_job_that_may_have_happened_becomes_a_failed_job() -> None:
    """A14, C19: nobody but a person runs it again."""
    job = leased_job(JobState.RUNNING, 5, kind="test_outside")
    run = sweep("stale_leases")
    assert (counts(run), run.incident_count) == ((1, 1, 0), 1)
    job.refresh_from_db()
    assert job.state == JobState.DEAD
    letter = DeadLetter.objects.get(job_id=str(job.id))
    assert (letter.outcome_class, letter.caught, letter.state) == (OutcomeClass.AMBIGUOUS, "worker_lost", "open")
    assert SweepRepair.objects.get().action_type == SweepActionType.RECORD_LOST_JOB
    assert counts(sweep("stale_leases")) == (0, 0, 0)


def test_a_job_without_an_attempt_left_becomes_a_failed_job() -> None:
    """A14."""
    job = leased_job(JobState.RUNNING, 5, attempts=3)
    sweep("stale_leases")
    job.refresh_from_db()
    assert job.state == JobState.DEAD
    assert DeadLetter.objects.get().job_id == str(job.id)


def test_a_job_whose_lease_is_renewed_is_left_alone() -> None:
    """C12."""
    leased_job(JobState.RUNNING, -5)
    assert counts(sweep("stale_leases")) == (0, 0, 0)


def test_a_job_of_a_kind_that_is_not_known_here_is_left_to_who_knows_it() -> None:
    """C9: looked at, and left alone."""
    job = leased_job(JobState.RUNNING, 5, kind="of_another_project")
    assert counts(sweep("stale_leases")) == (1, 0, 1)
    job.refresh_from_db()
    assert (job.state, job.lease_token.endswith(":lost")) == (JobState.RUNNING, False)


def test_a_sweep_that_is_killed_after_taking_a_job_over_leaves_it_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A14: between the two transactions; the token is changed once."""
    job = leased_job(JobState.RUNNING, 5)

    class Killed(BaseException):
        pass

    def die(*_args: Any) -> bool:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(stale_jobs, "_record_lost", die)
        with pytest.raises(Killed):
            sweep("stale_leases")
    ReconciliationRun.objects.update(heartbeat_at=ago(600))
    job.refresh_from_db()
    assert (job.state, job.lease_token) == (JobState.RUNNING, f"job:{job.id}:1:abc:lost")
    assert counts(sweep("stale_leases")) == (1, 1, 0)
    job.refresh_from_db()
    assert job.state == JobState.RETRYING


@pytest.mark.django_db(transaction=True)
def test_a_job_that_finishes_at_the_same_moment_is_either_done_or_lost() -> None:
    """C12: never both; twenty jobs, a holder that settles them and a sweep."""
    jobs = [leased_job(JobState.RUNNING, 5) for _ in range(20)]
    kind = kind_named("test_plain")

    def work(index: int) -> int:
        try:
            if index == 0:
                return sweep("stale_leases").repaired_count
            done = 0
            for job in reversed(jobs):
                try:
                    ledger.succeed(job, kind, None)
                    done += 1
                except LeaseLost:
                    pass
            return done
        finally:
            connections.close_all()

    repaired, done = race(2, work)
    assert repaired + done == 20, (repaired, done)
    assert Job.objects.filter(state=JobState.SUCCEEDED).count() == done
    assert Job.objects.filter(state=JobState.RETRYING).count() == repaired


@pytest.mark.parametrize(
    ("state", "expired", "could_renew", "is_known", "verdict"),
    [
        (JobState.RUNNING, 1, True, True, Verdict.TAKE),
        (JobState.RUNNING, 0, True, True, Verdict.TAKE),
        (JobState.RUNNING, -1, True, True, Verdict.LEAVE),
        (JobState.ENQUEUED, 1, True, True, Verdict.LEAVE),
        (JobState.RUNNING, 1, True, False, Verdict.LEAVE),
        (JobState.RUNNING, 1, False, True, Verdict.LEAVE),
    ],
)
def test_what_is_decided_about_a_job(
    state: JobState, expired: int, could_renew: bool, is_known: bool, verdict: Verdict
) -> None:
    """C12: by the database's clock, and only if its holder could have renewed."""
    now = database_now()
    job = Job(state=state, lease_expires_at=now - timedelta(seconds=expired))
    assert decide_job(job, could_renew=could_renew, is_known=is_known, now=now) is verdict


# Undelivered


def test_a_job_that_was_sent_and_never_claimed_is_sent_again_with_a_new_token() -> None:
    """A14: safe, since it never started; a message that turns up after all is passed over."""
    job = leased_job(JobState.ENQUEUED, 5)
    waiting = leased_job(JobState.ENQUEUED, -60)
    old = job.lease_token
    assert counts(sweep("undelivered_dispatches")) == (1, 1, 0)
    job.refresh_from_db()
    waiting.refresh_from_db()
    assert (job.state, job.attempts, waiting.state) == (JobState.PENDING, 0, JobState.ENQUEUED)
    kind = kind_named("test_plain")
    assert ledger.claim(job_id=job.id, token=old, owner="w", kind=kind) is None
    (again,) = ledger.take_due(source="default", owner="d", limit=10)
    assert again.token != old
    assert ledger.claim(job_id=job.id, token=old, owner="w", kind=kind) is None
    assert ledger.claim(job_id=job.id, token=again.token, owner="w", kind=kind) is not None


def test_an_undelivered_job_with_a_key_does_not_collide_with_a_newer_one() -> None:
    leased_job(JobState.ENQUEUED, 5, key="daily")
    Job.objects.create(
        tenant="default", source="default", kind="test_plain", key="daily", queue="q", state=JobState.PENDING,
        available_at=ago(0), created_at=ago(0), updated_at=ago(0),
    )  # fmt: skip
    assert counts(sweep("undelivered_dispatches")) == (1, 1, 0)
    assert sorted(Job.objects.values_list("state", flat=True)) == ["pending", "retrying"]


def test_a_job_whose_message_is_lost_over_and_over_is_a_failed_job_in_the_end(cast: Cast) -> None:
    """A14, C9: nobody claims it, so a person has to know; it has never started, so a retry is safe."""
    job = leased_job(JobState.ENQUEUED, 5, dispatches=ledger.MOST_LOST_DISPATCHES)
    assert counts(sweep("undelivered_dispatches")) == (1, 1, 0)
    (again,) = ledger.take_due(source="default", owner="d", limit=10)
    Job.objects.update(lease_expires_at=ago(5))
    run = sweep("undelivered_dispatches")
    assert (counts(run), run.incident_count) == ((1, 1, 0), 1)
    job.refresh_from_db()
    assert (job.state, job.attempts, job.dispatches) == (JobState.DEAD, 0, ledger.MOST_LOST_DISPATCHES + 1)
    letter = DeadLetter.objects.get(job_id=str(job.id))
    assert (letter.outcome_class, letter.error_class) == (OutcomeClass.SAFE, "opsconsole.jobs.errors.NeverClaimed")
    row = SweepRepair.objects.get(run=run)
    assert (row.action_type, row.operation_key) == (SweepActionType.RECORD_LOST_JOB, f"never-claimed:{again.token}")
    assert json.loads(row.after) == {"code": "queue_retries_exhausted", "state": "dead"}
    assert ledger.claim(job_id=job.id, token=again.token, owner="w", kind=kind_named("test_plain")) is None
    assert counts(sweep("undelivered_dispatches")) == (0, 0, 0)

    retry_letter(letter_id=letter.id, by=cast.ada, key="once more")
    job.refresh_from_db()
    assert (job.state, job.dispatches) == (JobState.PENDING, 0), "what was lost before counts for nothing now"
    (last,) = ledger.take_due(source="default", owner="d", limit=10)
    assert ledger.claim(job_id=job.id, token=last.token, owner="w", kind=kind_named("test_plain")) is not None


def test_what_the_broker_did_not_take_is_no_lost_message() -> None:
    """An outage of the broker makes no failed job, however often the dispatcher tries."""
    job = leased_job(JobState.ENQUEUED, 5, dispatches=ledger.MOST_LOST_DISPATCHES)
    token = job.lease_token
    for _ in range(3):
        assert ledger.give_back([token]) == 1
        (token,) = (one.token for one in ledger.take_due(source="default", owner="d", limit=10))
    job.refresh_from_db()
    assert job.dispatches == ledger.MOST_LOST_DISPATCHES
    Job.objects.update(lease_expires_at=ago(5))
    assert counts(sweep("undelivered_dispatches")) == (1, 1, 0)
    assert not DeadLetter.objects.exists()


def test_a_lost_message_of_a_kind_that_is_not_known_here_is_left_to_who_knows_it() -> None:
    """C9: looked at, and left alone."""
    leased_job(JobState.ENQUEUED, 5, kind="of_another_project", dispatches=ledger.MOST_LOST_DISPATCHES + 1)
    assert counts(sweep("undelivered_dispatches")) == (1, 0, 1)
    assert Job.objects.get().state == JobState.ENQUEUED
