"""Retention: what is removed when, and what never is."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.test import override_settings

from deadletters.models import (
    Attempt,
    DeadLetter,
    JournalFolder,
    Occurrence,
    SealedMessage,
    TaskMinute,
    TracebackText,
    WorkerNode,
)
from grants.models import AuditEvent
from incidents.models import Incident
from incidents.services import resolve_incident
from opsconsole.jobs.models import Job, JobState
from repairs.models import ReconciliationRun, RepairAction, SweepRepair
from repairs.reconciliation.retention import message_kept_until
from repairs.services import discard_letter, retry_letter
from tests import factories
from tests.cast import Cast
from tests.repairs.reconciliation.rows import ago, counts, fetching, leased_job, sweep, worker
from tests.repairs.test_retry import race

pytestmark = pytest.mark.django_db

DAY = 86_400


def discarded(cast: Cast, days: float, **fields: Any) -> DeadLetter:
    """Return a letter that was discarded so many days ago; another one of its cause is left."""
    letter = factories.dead_letter(**fields)
    factories.dead_letter(**fields)
    discard_letter(letter_id=letter.id, by=cast.ada, key=str(uuid4()), reason="test")
    DeadLetter.objects.filter(id=letter.id).update(closed_at=ago(days * DAY))
    letter.refresh_from_db()
    return letter


def test_a_letter_closed_long_ago_goes_with_all_that_is_its_own(cast: Cast) -> None:
    """DESIGN 9: occurrences, message, repairs and tracebacks; the incident and the audit trail stay."""
    letter = discarded(cast, 91)
    audited = AuditEvent.objects.count()
    incident = Incident.objects.get()
    run = sweep("retention")
    assert counts(run) == (1, 1, 0)
    assert not DeadLetter.objects.filter(id=letter.id).exists()
    assert not RepairAction.objects.exists()
    assert Occurrence.objects.count() == DeadLetter.objects.count() == 1
    assert TracebackText.objects.count() == 1, "the other letter still has it"
    assert AuditEvent.objects.count() == audited + 1
    assert Incident.objects.get().letter_count == incident.letter_count == 2


def test_a_traceback_that_nobody_has_any_more_goes_with_the_last_letter(cast: Cast) -> None:
    letter = factories.dead_letter()
    discard_letter(letter_id=letter.id, by=cast.ada, key="k", reason="test")
    DeadLetter.objects.update(closed_at=ago(91 * DAY))
    assert TracebackText.objects.count() == 1
    sweep("retention")
    assert not TracebackText.objects.exists()
    assert not DeadLetter.objects.exists()


def test_a_letter_that_was_closed_lately_stays(cast: Cast) -> None:
    discarded(cast, 89)
    assert counts(sweep("retention")) == (0, 0, 0)
    with override_settings(OPSCONSOLE_KEEP_CLOSED_LETTERS_DAYS=88):
        assert counts(sweep("retention")) == (1, 1, 0)


def test_an_unresolved_letter_is_never_removed_however_old(cast: Cast) -> None:
    """DESIGN 9: not even one that says when it was closed."""
    factories.dead_letter()
    DeadLetter.objects.update(closed_at=ago(900 * DAY), first_seen_at=ago(900 * DAY), last_seen_at=ago(900 * DAY))
    assert counts(sweep("retention")) == (0, 0, 0)
    assert SealedMessage.objects.count() == DeadLetter.objects.count() == 1


def test_a_closed_letter_whose_repair_is_under_way_stays(cast: Cast) -> None:
    letter = factories.dead_letter()
    retry_letter(letter_id=letter.id, by=cast.ada, key="k")
    resolve_incident(
        incident_id=letter.incident_id, by=cast.ada, key="k", code="loss_accepted", summary="by hand", unrepaired=1
    )
    DeadLetter.objects.update(closed_at=ago(91 * DAY))
    Incident.objects.update(stamped_episode=1)
    sweep("retention")
    assert DeadLetter.objects.count() == RepairAction.objects.count() == SealedMessage.objects.count() == 1


def test_a_message_goes_thirty_days_after_its_letter_was_closed(cast: Cast) -> None:
    """DESIGN 9: the letter stays, and can't be retried any more."""
    letter = factories.dead_letter()
    other = factories.dead_letter()
    resolve_incident(
        incident_id=letter.incident_id, by=cast.ada, key="k", code="loss_accepted", summary="by hand", unrepaired=2
    )
    DeadLetter.objects.filter(id=letter.id).update(closed_at=ago(31 * DAY))
    DeadLetter.objects.filter(id=other.id).update(closed_at=ago(29 * DAY))
    assert counts(sweep("retention")) == (1, 1, 0)
    assert list(SealedMessage.objects.values_list("letter_id", flat=True)) == [other.id]
    assert DeadLetter.objects.count() == 2


def test_a_page_can_say_until_when_a_letter_can_be_retried(cast: Cast) -> None:
    letter = factories.dead_letter()
    assert message_kept_until(letter, letter.incident) is None
    resolve_incident(
        incident_id=letter.incident_id, by=cast.ada, key="k", code="loss_accepted", summary="by hand", unrepaired=1
    )
    incident = Incident.objects.get()
    assert incident.resolved_at is not None
    assert message_kept_until(letter, incident) == incident.resolved_at + timedelta(days=30)
    with override_settings(OPSCONSOLE_KEEP_MESSAGES_DAYS=2):
        assert message_kept_until(letter, incident) == incident.resolved_at + timedelta(days=2)


def test_old_attempts_and_counts_go() -> None:
    for days in (6, 8):
        Attempt.objects.create(
            tenant="default", source="tests", task_id=str(days), retries=0, job_type="t", happened_at=ago(days * DAY),
            outcome_class="safe",
        )  # fmt: skip
    for days in (29, 31):
        TaskMinute.objects.create(tenant="default", source="tests", job_type="t", minute=ago(days * DAY))
    assert counts(sweep("retention")) == (2, 2, 0)
    assert Attempt.objects.get().task_id == "6"
    assert TaskMinute.objects.count() == 1


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.DEAD, JobState.CANCELLED])
def test_finished_jobs_go_after_thirty_days(state: JobState) -> None:
    for days in (29, 31):
        leased_job(state, 0, lease_expires_at=None, finished_at=ago(days * DAY))
    assert counts(sweep("retention")) == (1, 1, 0)
    assert Job.objects.count() == 1


def test_a_dead_job_stays_as_long_as_its_letter_can_be_retried(cast: Cast) -> None:
    """DESIGN 9: unresolved, or closed within thirty days; its letter would have nothing to put back."""
    leased_job(JobState.RUNNING, 5, kind="test_outside")
    sweep("stale_leases")
    Job.objects.update(finished_at=ago(400 * DAY))
    assert counts(sweep("retention")) == (1, 0, 1)
    letter = DeadLetter.objects.get()
    discard_letter(letter_id=letter.id, by=cast.ada, key="k", reason="test")
    assert counts(sweep("retention")) == (1, 0, 1)
    DeadLetter.objects.update(closed_at=ago(31 * DAY))
    sweep("retention")
    assert not Job.objects.exists()


def test_workers_and_journals_that_are_gone_for_a_month_go() -> None:
    worker(31 * DAY, name="gone")
    worker(29 * DAY, name="late")
    for days in (29, 31):
        JournalFolder.objects.create(name=f"f{days}", source="t", changed_at=ago(days * DAY), closed_at=ago(days * DAY))
    JournalFolder.objects.create(name="open", source="t", changed_at=ago(400 * DAY))
    assert counts(sweep("retention")) == (2, 2, 0)
    assert WorkerNode.objects.get().id == "late"
    assert set(JournalFolder.objects.values_list("name", flat=True)) == {"f29", "open"}


def test_runs_that_found_nothing_go_after_a_day_and_others_with_the_letters() -> None:
    fetching(400)
    busy = sweep("stale_leases")
    quiet = sweep("stale_leases")
    ReconciliationRun.objects.update(finished_at=ago(2 * DAY))
    assert counts(sweep("retention")) == (1, 1, 0)
    assert not ReconciliationRun.objects.filter(id=quiet.id).exists()
    ReconciliationRun.objects.filter(id=busy.id).update(finished_at=ago(91 * DAY))
    sweep("retention")
    assert not SweepRepair.objects.exists()
    assert not ReconciliationRun.objects.filter(id=busy.id).exists()


@pytest.mark.django_db(transaction=True)
def test_a_letter_that_comes_back_while_it_is_to_be_removed_is_there_afterwards(cast: Cast) -> None:
    """C3: reopened or made anew, never lost; ten times at the same moment."""
    for number in range(10):
        letter = factories.dead_letter(task=f"shop.task{number}")
        discard_letter(letter_id=letter.id, by=cast.ada, key=str(uuid4()), reason="test")
        DeadLetter.objects.filter(id=letter.id).update(closed_at=ago(91 * DAY))

        def work(index: int, letter: DeadLetter = letter) -> Any:
            if index == 0:
                return sweep("retention")
            return factories.record(factories.failure(task_id=letter.task_id, task=letter.job_type, retries=1))

        run, recorded = race(2, work)
        assert run.error_code == "", run.error_text
        assert not isinstance(recorded, Exception), recorded
        assert DeadLetter.objects.unresolved().filter(task_id=letter.task_id).count() == 1
