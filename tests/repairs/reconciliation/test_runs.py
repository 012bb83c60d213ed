"""Reconciliation runs: one of a kind at a time, finished once, with counts that are true (A13, C9)."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
from django.db import IntegrityError, transaction

from grants.errors import AccessDenied, IdempotencyKeyReused
from grants.models import AuditEvent, Verdict
from grants.operators import SYSTEM
from opsconsole.core.database import database_now
from opsconsole.core.errors import InvalidInput
from opsconsole.jobs.models import EvidenceRequest
from repairs.errors import (
    ReconciliationFinished,
    ReconciliationKindInvalid,
    ReconciliationKindUnknown,
    ReconciliationRunning,
)
from repairs.models import ReconciliationRun, RunState, SweepRepair
from repairs.reconciliation import leases, runs, sweeping, sweeps
from repairs.reconciliation.kinds import KINDS
from repairs.reconciliation.running import run_now, run_scheduled
from repairs.reconciliation.runs import begin_run, finish_run, note_page
from repairs.tasks import reconcile
from tests.cast import Cast
from tests.repairs.reconciliation.rows import counts, fetching, sweep
from tests.repairs.test_retry import race

pytestmark = pytest.mark.django_db


def page_of(run_id: Any, **counted: int) -> None:
    given = {"scanned": 0, "repaired": 0, "skipped": 0, "incidents": 0, **counted}
    note_page(run_id, cursor="", now=database_now(), **given)


@pytest.mark.parametrize("kind", ["", "a", "Stale", "1a", "stale-leases", "stale leases", "a" * 65, "ä" * 3, "a\n"])
def test_what_is_no_name_of_a_kind_is_refused(kind: str) -> None:
    """A13."""
    with pytest.raises(ReconciliationKindInvalid) as refused:
        begin_run(kind=kind, by=SYSTEM)
    assert (refused.value.code, refused.value.status) == ("reconciliation_kind_invalid", 400)
    assert not ReconciliationRun.objects.exists()


@pytest.mark.parametrize("kind", ["ab", "a" * 64, "stale_leases_2"])
def test_a_kind_that_nobody_knows_has_a_refusal_of_its_own(kind: str) -> None:
    """A13."""
    with pytest.raises(ReconciliationKindUnknown):
        begin_run(kind=kind, by=SYSTEM)


def test_every_kind_has_its_parts() -> None:
    assert set(sweeps.PARTS) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sweep_that_finds_nothing_succeeds_with_zeros(kind: str) -> None:
    """A13."""
    run = sweep(kind)
    assert (run.state, counts(run), run.incident_count, run.error_code) == (RunState.SUCCEEDED, (0, 0, 0), 0, "")
    assert run.started_by == "system:system"
    assert run.finished_at is not None


def test_a_run_begins_running_and_finishes_once() -> None:
    """A13."""
    run_id = begin_run(kind="stale_leases", by=SYSTEM).run_id
    assert ReconciliationRun.objects.get().state == RunState.RUNNING
    page_of(run_id, scanned=3, repaired=2, skipped=1)
    assert counts(finish_run(run_id=run_id)) == (3, 2, 1)
    with pytest.raises(ReconciliationFinished):
        finish_run(run_id=run_id, error_code="sweep_failed")
    with pytest.raises(ReconciliationFinished):
        page_of(run_id, scanned=1)
    again = ReconciliationRun.objects.get()
    assert (again.state, counts(again), again.error_code) == (RunState.SUCCEEDED, (3, 2, 1), "")


@pytest.mark.parametrize(("repaired", "state"), [(0, RunState.FAILED), (1, RunState.PARTIAL)])
def test_an_error_after_something_was_repaired_is_partial(repaired: int, state: RunState) -> None:
    """A13."""
    run_id = begin_run(kind="stale_leases", by=SYSTEM).run_id
    page_of(run_id, scanned=2, repaired=repaired)
    run = finish_run(run_id=run_id, error_code="sweep_failed", error_text="it broke")
    assert (run.state, run.error_code, run.error_text) == (state, "sweep_failed", "it broke")


@pytest.mark.parametrize("column", ["scanned_count", "repaired_count", "skipped_count", "incident_count"])
def test_no_count_is_ever_negative(column: str) -> None:
    """A13: the database says so."""
    begin_run(kind="stale_leases", by=SYSTEM)
    with pytest.raises(IntegrityError), transaction.atomic():
        ReconciliationRun.objects.update(**{column: -1})


def test_an_error_in_one_part_leaves_the_others_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A13: partial, with the first error; what the other parts did counts."""
    fetching(400)

    def broken(_sweeping: sweeping.Sweeping) -> None:
        raise RuntimeError("the first part is broken")

    monkeypatch.setitem(sweeps.PARTS, "stale_leases", (broken, *sweeps.PARTS["stale_leases"]))
    run = sweep("stale_leases")
    assert (run.state, run.repaired_count, run.error_code) == (RunState.PARTIAL, 1, "sweep_failed")
    assert "the first part is broken" in run.error_text


def test_a_page_that_fails_is_undone_with_its_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """C9: what was rolled back is not reported."""
    fetching(400)

    def breaks_after(*args: Any, **options: Any) -> Any:
        release(*args, **options)
        raise RuntimeError("broken after the write")

    release = leases.release_claims
    monkeypatch.setattr(leases, "release_claims", breaks_after)
    run = sweep("stale_leases")
    assert (run.state, counts(run)) == (RunState.FAILED, (0, 0, 0))
    assert EvidenceRequest.objects.get().state == "fetching"
    assert not SweepRepair.objects.exists()


def test_a_second_run_of_a_kind_does_nothing_while_one_runs() -> None:
    """A13: another kind is not in its way."""
    begin_run(kind="stale_leases", by=SYSTEM)
    assert run_scheduled("stale_leases") is None
    assert reconcile("stale_leases") == "already running"
    assert run_scheduled("retention") is not None
    assert ReconciliationRun.objects.filter(kind="stale_leases").count() == 1


def test_a_run_that_was_killed_is_closed_by_the_next_one() -> None:
    """A13: failed, ``run_abandoned``; what it had done stays counted."""
    dead = begin_run(kind="stale_leases", by=SYSTEM).run_id
    page_of(dead, scanned=5, repaired=4, skipped=1)
    ReconciliationRun.objects.update(heartbeat_at=database_now() - runs.ABANDONED_AFTER - timedelta(seconds=1))
    run = sweep("stale_leases")
    assert run.state == RunState.SUCCEEDED
    closed = ReconciliationRun.objects.get(id=dead)
    assert (closed.state, closed.error_code, counts(closed)) == (RunState.FAILED, "run_abandoned", (5, 4, 1))
    assert closed.finished_at is not None


def test_a_run_that_still_gives_signs_of_life_is_not_closed() -> None:
    begin_run(kind="stale_leases", by=SYSTEM)
    ReconciliationRun.objects.update(heartbeat_at=database_now() - runs.ABANDONED_AFTER + timedelta(seconds=20))
    assert run_scheduled("stale_leases") is None


def test_a_run_that_was_taken_for_dead_undoes_the_page_it_is_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """C9: it neither repairs nor counts once it is closed, and leaves the record of its end as it is."""
    fetching(400, 3)

    def close_and_release(*args: Any, **options: Any) -> Any:
        ReconciliationRun.objects.update(state=RunState.FAILED, finished_at=database_now(), error_code="run_abandoned")
        return release(*args, **options)

    release = leases.release_claims
    monkeypatch.setattr(leases, "release_claims", close_and_release)
    run_scheduled("stale_leases")
    # The page is undone, and with it, in one process, the closing that stands in for another's.
    assert EvidenceRequest.objects.filter(state="fetching").count() == 3
    assert not SweepRepair.objects.exists()


def test_a_killed_run_leaves_its_pages_done_and_the_next_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """C9: killed after its second page of three; the two runs together repair each row once."""
    for name in ("AT_ONCE", "PAGE"):
        monkeypatch.setattr(leases, name, 2)
    fetching(400, 5)

    class Killed(BaseException):
        pass

    pages = iter((0, 0, 1))

    def release_or_die(*args: Any, **options: Any) -> Any:
        if next(pages):
            raise Killed
        return release(*args, **options)

    release = leases.release_claims
    with monkeypatch.context() as patched:
        patched.setattr(leases, "release_claims", release_or_die)
        with pytest.raises(Killed):
            run_scheduled("stale_leases")
    dead = ReconciliationRun.objects.get()
    assert (dead.state, counts(dead)) == (RunState.RUNNING, (4, 4, 0))
    ReconciliationRun.objects.update(heartbeat_at=database_now() - timedelta(hours=1))
    assert counts(sweep("stale_leases")) == (1, 1, 0)
    assert SweepRepair.objects.count() == 5
    assert not EvidenceRequest.objects.filter(state="fetching").exists()


@pytest.mark.django_db(transaction=True)
def test_two_beats_at_once_make_one_run() -> None:
    """A13: six threads at one moment; one sweeps, the others find it running or find nothing left."""
    fetching(400, 50)
    answers = race(6, lambda _index: reconcile("stale_leases"))
    assert set(answers) <= {"succeeded", "already running"}, answers
    assert sum(run.repaired_count for run in ReconciliationRun.objects.all()) == 50
    assert SweepRepair.objects.count() == 50
    assert ReconciliationRun.objects.count() == answers.count("succeeded")


@pytest.mark.django_db(transaction=True)
def test_beginning_at_once_begins_one_run() -> None:
    """A13."""
    answers = race(8, lambda _index: begin_run(kind="retention", by=SYSTEM))
    assert sum(isinstance(answer, ReconciliationRunning) for answer in answers) == 7, answers
    assert ReconciliationRun.objects.count() == 1


# By a person


def test_a_person_runs_a_sweep_with_a_grant_for_every_tenant(cast: Cast) -> None:
    fetching(400)
    done = run_now(kind="stale_leases", by=cast.ada, key="k1")
    assert (done.run.state, done.run.repaired_count, done.run.row_limit) == (RunState.SUCCEEDED, 1, 200)
    assert done.run.started_by == cast.ada.ref
    event = AuditEvent.objects.get(action=runs.STARTED)
    assert (event.tenant, event.target_id, event.operator_name) == ("*", "stale_leases", "ada")
    assert "reconciliation.run" in event.capability
    assert json.loads(event.outcome)["run"] == str(done.run.id)
    ended = AuditEvent.objects.get(action=runs.FINISHED)
    assert json.loads(ended.outcome)["repaired"] == 1


def test_the_same_key_answers_with_the_first_run(cast: Cast) -> None:
    """A9, A13."""
    first = run_now(kind="stale_leases", by=cast.ada, key="k1")
    fetching(400)
    again = run_now(kind="stale_leases", by=cast.ada, key="k1")
    assert (again.run.id, again.idempotent_replay, first.idempotent_replay) == (first.run.id, True, False)
    assert EvidenceRequest.objects.get().state == "fetching"
    with pytest.raises(IdempotencyKeyReused):
        run_now(kind="stale_leases", by=cast.ada, key="k1", limit=7)
    with pytest.raises(IdempotencyKeyReused):
        run_now(kind="retention", by=cast.ada, key="k1")
    assert ReconciliationRun.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_one_key_at_once_runs_once(cast: Cast) -> None:
    """A9: whoever comes second waits for the first and answers as it did."""
    answers = race(6, lambda _index: run_now(kind="stale_leases", by=cast.ada, key="k1"))
    assert len({answer.run.id for answer in answers}) == 1, answers
    assert [answer.idempotent_replay for answer in answers].count(False) == 1
    assert AuditEvent.objects.filter(action=runs.STARTED).count() == 1


def test_who_holds_it_for_one_tenant_may_not_sweep_all(cast: Cast) -> None:
    """B2: audited, and nothing was started."""
    with pytest.raises(AccessDenied):
        run_now(kind="stale_leases", by=cast.olga, key="k1")
    assert not ReconciliationRun.objects.exists()
    denied = AuditEvent.objects.get(verdict=Verdict.DENIED)
    assert (denied.operator_name, denied.action) == ("olga", "reconciliation.run")


def test_a_person_is_told_that_one_is_running(cast: Cast) -> None:
    begin_run(kind="stale_leases", by=SYSTEM)
    with pytest.raises(ReconciliationRunning) as refused:
        run_now(kind="stale_leases", by=cast.ada, key="k1")
    assert refused.value.status == 409
    assert not AuditEvent.objects.filter(action=runs.STARTED).exists()


@pytest.mark.parametrize("limit", [0, -1, 201])
def test_a_limit_is_one_to_two_hundred(limit: int, cast: Cast) -> None:
    """A14."""
    with pytest.raises(InvalidInput):
        run_now(kind="stale_leases", by=cast.ada, key="k1", limit=limit)


def test_quiet_runs_of_the_system_leave_no_audit_row() -> None:
    sweep("stale_leases")
    assert not AuditEvent.objects.exists()


def test_an_error_that_ends_beats_task_is_said_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed job for each sweep of an outage would be no help."""
    monkeypatch.setattr("repairs.tasks.run_scheduled", mock.Mock(side_effect=RuntimeError("no database")))
    assert reconcile("stale_leases") == "failed"
    monkeypatch.undo()
    assert reconcile("nothing_of_ours") == "reconciliation_kind_unknown"
