"""Start guard and settlement: a repair starts once per attempt, and counts when its job has succeeded."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from django.db import OperationalError, transaction

from deadletters.journal.events import Caught, Delivery, Ended, EndState, ErrorReport, Failed
from deadletters.journal.hooks import StartRefused
from deadletters.models import DeadLetter, LetterState, Occurrence
from deadletters.outcome import OutcomeClass
from deadletters.recorder import record_failures
from grants.models import AuditEvent
from incidents.models import EpisodeEnd, Incident, IncidentState
from incidents.services import resolve_incident
from opsconsole.core.clock import boot_id, boot_now, wall_now
from opsconsole.core.database import database_now
from repairs.guard import DatabaseGuard, holder_of
from repairs.models import ActionState, RepairAction
from repairs.services import retry_letter
from repairs.settlement import DatabaseSettlement
from tests import factories
from tests.cast import Cast
from tests.repairs.test_retry import race

pytestmark = pytest.mark.django_db

HOLDER = "celery_h.1.abc.1/child-7"


def repair(cast: Cast, letter: DeadLetter | None = None, key: str = "k", **fields: Any) -> RepairAction:
    letter = letter or factories.dead_letter()
    retry_letter(letter_id=letter.id, by=cast.ada, key=key, **fields)
    return RepairAction.objects.newest_first().filter(letter=letter)[0]


def claim(action: RepairAction, retries: int = 0, holder: str = HOLDER) -> None:
    DatabaseGuard().claim(repair_id=str(action.id), task_id=action.new_task_id, retries=retries, holder=holder)


def repair_delivery(action: RepairAction, **fields: Any) -> Delivery:
    return factories.delivery(
        **{"task_id": action.new_task_id, "repair_id": str(action.id), "holder": HOLDER, "claimed": True, **fields}
    )


def ended(delivery: Delivery, state: EndState = EndState.SUCCESS, error: ErrorReport | None = None) -> Ended:
    return Ended(delivery=delivery, state=state, at_boot=boot_now(), at_wall=wall_now(), error=error)


def record_repair_failure(failed: Failed) -> None:
    """Do what the drainer does with a failed delivery that carries a repair header."""
    settlement = DatabaseSettlement()
    if settlement.is_settled_elsewhere(failed):
        return
    letters = settlement.letters_of([failed.delivery])
    failure = factories.intake().failure(
        failed,
        clock=factories.host_clock(),
        boot_id=boot_id(),
        letter_id=letters.get(failed.delivery.token),
    )
    with transaction.atomic():
        recorded = record_failures([failure], now=database_now())
        settlement.failed(recorded, database_now())


# The guard


def test_a_claim_marks_the_repair_started_by_its_holder(cast: Cast) -> None:
    action = repair(cast)
    claim(action)
    action.refresh_from_db()
    assert (action.state, action.claim_retries, holder_of(action.claim_holder)) == (ActionState.STARTED, 0, HOLDER)
    assert action.started_at is not None


def test_a_second_delivery_of_an_attempt_does_not_start(cast: Cast) -> None:
    action = repair(cast)
    claim(action)
    with pytest.raises(StartRefused) as refused:
        claim(action, holder="another/child-8")
    assert refused.value.retriable is False
    action.refresh_from_db()
    assert holder_of(action.claim_holder) == HOLDER


def test_the_next_attempt_of_a_repair_starts_and_an_earlier_one_does_not(cast: Cast) -> None:
    action = repair(cast)
    for attempt in (0, 1, 2):
        claim(action, retries=attempt)
    for attempt in (0, 1, 2):
        with pytest.raises(StartRefused):
            claim(action, retries=attempt)


def test_an_unknown_repair_does_not_run(cast: Cast) -> None:
    """A repair that a failover has lost would otherwise run without a trace."""
    for repair_id in (str(uuid4()), "not an id"):
        with pytest.raises(StartRefused):
            DatabaseGuard().claim(repair_id=repair_id, task_id="t", retries=0, holder=HOLDER)


def test_a_withdrawn_repair_does_not_start(cast: Cast) -> None:
    from repairs.services import cancel_repair

    action = repair(cast)
    cancel_repair(repair_id=action.id, by=cast.ada, key="c")
    with pytest.raises(StartRefused):
        claim(action)


def test_without_a_database_the_start_is_refused_and_may_be_sent_again(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    action = repair(cast)
    guard = DatabaseGuard()

    def down(*_args: object) -> None:
        raise OperationalError("gone")

    monkeypatch.setattr(guard, "_claim", down)
    monkeypatch.setattr("repairs.guard.PAUSE_SECONDS", 0)
    monkeypatch.setattr("repairs.guard.connection.close", lambda: None)
    with pytest.raises(StartRefused) as refused:
        guard.claim(repair_id=str(action.id), task_id=action.new_task_id, retries=0, holder=HOLDER)
    assert refused.value.retriable is True
    refusal = ErrorReport(error_class="StartRefused", text="no database", call_site="retriable")
    RepairAction.objects.update(state=ActionState.SENT, sent_at=database_now())
    DatabaseSettlement().ended(ended(repair_delivery(action, claimed=False), EndState.REFUSED, refusal))
    action.refresh_from_db()
    assert action.state == ActionState.PLANNED


@pytest.mark.django_db(transaction=True)
def test_fifty_deliveries_of_one_repair_start_once(cast: Cast) -> None:
    action = repair(cast)
    answers = race(50, lambda index: claim(action, holder=f"h/{index}"))
    assert sum(answer is None for answer in answers) == 1
    assert sum(isinstance(answer, StartRefused) for answer in answers) == 49


# Settlement


def test_the_job_that_succeeds_closes_letter_and_incident(cast: Cast) -> None:
    """C11: done means succeeded, not sent; with the last letter the incident closes itself, in one transaction."""
    action = repair(cast)
    claim(action)
    DatabaseSettlement().ended(ended(repair_delivery(action)))
    action.refresh_from_db()
    letter = DeadLetter.objects.get()
    incident = Incident.objects.get()
    assert (action.state, letter.state) == (ActionState.SUCCEEDED, LetterState.REPAIRED)
    assert (incident.state, incident.resolution_code, incident.resolved_by) == (
        IncidentState.RESOLVED, "repaired", "system:system",
    )  # fmt: skip
    assert EpisodeEnd.objects.get().unrepaired_count == 0
    assert AuditEvent.objects.filter(action="operations.incident_resolved", operator_kind="system").count() == 1


def test_the_incident_stays_open_until_its_last_letter_is_repaired(cast: Cast) -> None:
    first, second = factories.dead_letter(), factories.dead_letter()
    action = repair(cast, first)
    DatabaseSettlement().ended(ended(repair_delivery(action)))
    incident = Incident.objects.get()
    assert (incident.state, incident.unresolved_count) == (IncidentState.ACKNOWLEDGED, 1)
    DatabaseSettlement().ended(ended(repair_delivery(repair(cast, second, key="k2"))))
    incident.refresh_from_db()
    assert (incident.state, incident.unresolved_count) == (IncidentState.RESOLVED, 0)


def test_a_success_reported_twice_settles_once(cast: Cast) -> None:
    action = repair(cast)
    for _ in range(2):
        DatabaseSettlement().ended(ended(repair_delivery(action)))
    assert EpisodeEnd.objects.count() == 1
    assert Incident.objects.get().unresolved_count == 0


def test_a_failed_repair_is_an_occurrence_of_its_letter_and_opens_the_incident(cast: Cast) -> None:
    """C11, C1: fingerprint and first_seen_at stay; the letter is back, and so is the incident, as "repair failed"."""
    letter = factories.dead_letter()
    action = repair(cast, letter)
    claim(action)
    record_repair_failure(factories.failed(delivery=repair_delivery(action)))
    again = DeadLetter.objects.get()
    action.refresh_from_db()
    incident = Incident.objects.get()
    assert (again.id, again.fingerprint, again.first_seen_at) == (letter.id, letter.fingerprint, letter.first_seen_at)
    assert (again.state, again.occurrence_count) == (LetterState.OPEN, 2)
    assert (action.state, action.error_code) == (ActionState.FAILED, "task_failure")
    assert (incident.state, incident.reopened_reason, incident.unresolved_count) == (
        IncidentState.OPEN, "repair_failed", 1,
    )  # fmt: skip
    assert Occurrence.objects.filter(repair_id=action.id).count() == 1
    second = repair(cast, again, key="k2")
    assert second.previous_id == action.id


def test_a_failed_repair_of_a_closed_letter_opens_its_incident_again(cast: Cast) -> None:
    """C3: a letter closed without repair that fails its retry is unresolved, so its incident is not resolved."""
    letter = factories.dead_letter()
    resolve_incident(incident_id=letter.incident_id, by=cast.ada, key="z", code="gone", summary="gone", unrepaired=1)
    action = repair(cast, letter)
    claim(action)
    record_repair_failure(factories.failed(delivery=repair_delivery(action)))
    incident = Incident.objects.get()
    assert (incident.state, incident.episode, incident.unresolved_count) == (IncidentState.OPEN, 2, 1)


def test_a_successful_repair_of_a_closed_letter_leaves_the_incident_closed(cast: Cast) -> None:
    letter = factories.dead_letter()
    resolve_incident(incident_id=letter.incident_id, by=cast.ada, key="z", code="gone", summary="gone", unrepaired=1)
    action = repair(cast, letter)
    DatabaseSettlement().ended(ended(repair_delivery(action)))
    letter.refresh_from_db()
    incident = Incident.objects.get()
    assert (letter.state, incident.state, incident.resolution_code) == ("repaired", IncidentState.RESOLVED, "gone")
    assert incident.unresolved_count == 0


def test_a_repair_lost_while_running_may_have_happened(cast: Cast) -> None:
    """C19: the claim says that it had begun; nothing says what it had done by then."""
    action = repair(cast)
    claim(action)
    record_repair_failure(factories.failed(caught=Caught.WORKER_LOST, delivery=repair_delivery(action)))
    letter = DeadLetter.objects.get()
    action.refresh_from_db()
    assert (action.state, action.error_code) == (ActionState.FAILED, "worker_lost")
    assert letter.outcome_class == OutcomeClass.AMBIGUOUS


def test_a_repair_lost_before_it_started_is_safe_to_send_again(cast: Cast) -> None:
    action = repair(cast)
    lost = factories.failed(
        caught=Caught.WORKER_LOST, never_started=True, delivery=repair_delivery(action, claimed=False, holder="")
    )
    record_repair_failure(lost)
    letter = DeadLetter.objects.get()
    action.refresh_from_db()
    assert (action.state, action.error_code) == (ActionState.FAILED, "lost_before_start")
    assert (letter.state, letter.outcome_class) == (LetterState.OPEN, OutcomeClass.SAFE)


def test_the_loss_of_one_worker_does_not_fail_a_repair_that_another_one_runs(cast: Cast) -> None:
    action = repair(cast)
    claim(action, holder="other/child-1")
    lost = factories.failed(
        caught=Caught.WORKER_LOST, never_started=True, delivery=repair_delivery(action, claimed=False, holder="")
    )
    record_repair_failure(lost)
    action.refresh_from_db()
    assert action.state == ActionState.STARTED
    assert Occurrence.objects.count() == 1


def test_a_repair_given_up_as_lost_that_succeeds_after_all_is_overtaken(cast: Cast) -> None:
    action = repair(cast)
    claim(action)
    record_repair_failure(factories.failed(caught=Caught.WORKER_LOST, delivery=repair_delivery(action)))
    DatabaseSettlement().ended(ended(repair_delivery(action)))
    assert DeadLetter.objects.get().state == LetterState.OVERTAKEN
    assert Incident.objects.get().state == IncidentState.RESOLVED


def test_a_lost_job_that_is_redelivered_and_succeeds_takes_its_letter_back(cast: Cast) -> None:
    """DESIGN 4: the entry precedes the ack, so a kill between them makes a letter for a message that comes back."""
    lost = factories.failed(caught=Caught.WORKER_LOST, task_id="back")
    factories.record(factories.intake().failure(lost, clock=factories.host_clock(), boot_id=boot_id()))
    DatabaseSettlement().ended(ended(factories.delivery(task_id="back", redelivered=True, source="tests")))
    assert DeadLetter.objects.get().state == LetterState.OVERTAKEN
    assert Incident.objects.get().state == IncidentState.RESOLVED


@pytest.mark.parametrize("state", [EndState.REVOKED, EndState.IGNORED])
def test_a_repair_that_was_revoked_or_ignored_has_not_done_its_work(cast: Cast, state: EndState) -> None:
    action = repair(cast)
    DatabaseSettlement().ended(ended(repair_delivery(action), state))
    action.refresh_from_db()
    assert (action.state, action.error_code) == (ActionState.FAILED, state.value)
    assert DeadLetter.objects.get().state == LetterState.OPEN
    assert Incident.objects.get().state == IncidentState.OPEN


def test_a_header_copied_onto_another_job_does_not_make_it_a_repair(cast: Cast) -> None:
    action = repair(cast)
    stranger = factories.delivery(task_id="somebody else's", repair_id=str(action.id))
    assert DatabaseSettlement().letters_of([stranger]) == {}
    DatabaseSettlement().ended(ended(stranger))
    action.refresh_from_db()
    assert action.state == ActionState.PLANNED


@pytest.mark.django_db(transaction=True)
def test_settlements_of_one_incident_at_the_same_time_count_exactly(cast: Cast) -> None:
    actions = [repair(cast, factories.dead_letter(), key=f"k{number}") for number in range(20)]

    def settle(index: int) -> None:
        DatabaseSettlement().ended(ended(repair_delivery(actions[index])))

    assert race(20, settle) == [None] * 20
    incident = Incident.objects.get()
    assert (incident.state, incident.unresolved_count) == (IncidentState.RESOLVED, 0)
    assert EpisodeEnd.objects.count() == 1


# What a delivery without the claim may not do


def test_a_duplicate_that_never_started_says_nothing_about_a_repair_that_has_its_answer(cast: Cast) -> None:
    """A copy that reaches a worker without the task must not reopen what has succeeded."""
    action = repair(cast)
    claim(action)
    DatabaseSettlement().ended(ended(repair_delivery(action)))
    copy = repair_delivery(action, claimed=False, holder="")
    record_repair_failure(factories.failed(caught=Caught.UNKNOWN, never_started=True, delivery=copy))
    assert DeadLetter.objects.get().state == LetterState.REPAIRED
    assert Incident.objects.get().state == IncidentState.RESOLVED
    assert Occurrence.objects.count() == 1


@pytest.mark.parametrize("state", [EndState.REVOKED, EndState.IGNORED])
def test_a_revoked_duplicate_does_not_fail_the_repair_that_runs(cast: Cast, state: EndState) -> None:
    action = repair(cast)
    claim(action)
    DatabaseSettlement().ended(ended(repair_delivery(action, claimed=False, holder=""), state))
    action.refresh_from_db()
    assert action.state == ActionState.STARTED


def test_a_refused_duplicate_does_not_send_a_running_repair_again(cast: Cast) -> None:
    action = repair(cast)
    claim(action)
    refusal = ErrorReport(error_class="StartRefused", text="no database #abc", call_site="retriable")
    DatabaseSettlement().ended(ended(repair_delivery(action, claimed=False), EndState.REFUSED, refusal))
    action.refresh_from_db()
    assert action.state == ActionState.STARTED


def test_a_claim_whose_answer_was_lost_is_this_calls_own(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database had committed it; the second try must not be refused by the first one's success."""
    action = repair(cast)
    guard = DatabaseGuard()
    real = guard._claim
    calls = iter(range(5))

    def lose_the_answer(*args: Any) -> None:
        real(*args)
        if next(calls) == 0:
            raise OperationalError("gone")

    monkeypatch.setattr(guard, "_claim", lose_the_answer)
    monkeypatch.setattr("repairs.guard.PAUSE_SECONDS", 0)
    monkeypatch.setattr("repairs.guard.connection.close", lambda: None)
    guard.claim(repair_id=str(action.id), task_id=action.new_task_id, retries=0, holder=HOLDER)
    with pytest.raises(StartRefused):
        claim(action)


def test_a_claim_that_nobody_could_confirm_is_taken_back_and_sent_again(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    action = repair(cast)
    guard = DatabaseGuard()
    real = guard._claim

    def lose_every_answer(*args: Any) -> None:
        real(*args)
        raise OperationalError("gone")

    monkeypatch.setattr(guard, "_claim", lose_every_answer)
    monkeypatch.setattr("repairs.guard.PAUSE_SECONDS", 0)
    monkeypatch.setattr("repairs.guard.connection.close", lambda: None)
    with pytest.raises(StartRefused) as refused:
        guard.claim(repair_id=str(action.id), task_id=action.new_task_id, retries=0, holder=HOLDER)
    refusal = ErrorReport(error_class="StartRefused", text=str(refused.value), call_site="retriable")
    DatabaseSettlement().ended(ended(repair_delivery(action, claimed=False), EndState.REFUSED, refusal))
    action.refresh_from_db()
    assert (action.state, action.claim_retries) == (ActionState.PLANNED, -1)


def test_a_worker_without_a_journal_starts_no_repair(cast: Cast) -> None:
    action = repair(cast)
    with pytest.raises(StartRefused):
        claim(action, holder="without journal/7")
    action.refresh_from_db()
    assert action.state == ActionState.PLANNED


def test_a_job_that_carries_a_copied_header_runs_as_the_ordinary_job_it_is(cast: Cast) -> None:
    action = repair(cast)
    DatabaseGuard().claim(repair_id=str(action.id), task_id="somebody else's", retries=0, holder=HOLDER)
    action.refresh_from_db()
    assert action.state == ActionState.PLANNED


def test_a_repair_that_failed_before_its_incident_was_closed_leaves_its_letter_free(cast: Cast) -> None:
    """Late or not, nobody is repairing it any more, so it can be retried."""
    letter = factories.dead_letter(ago=60)
    action = repair(cast, letter)
    claim(action)
    resolve_incident(incident_id=letter.incident_id, by=cast.ada, key="z", code="gone", summary="gone", unrepaired=1)
    record_repair_failure(factories.failed(caught=Caught.WORKER_LOST, ago=30, delivery=repair_delivery(action)))
    letter.refresh_from_db()
    assert letter.state == LetterState.OPEN
    assert Incident.objects.get().state == IncidentState.RESOLVED
    assert repair(cast, letter, key="again").state == ActionState.PLANNED


def test_a_success_of_another_tenant_with_the_same_id_closes_nothing(cast: Cast) -> None:
    lost = factories.failed(caught=Caught.WORKER_LOST, task_id="nightly")
    factories.record(factories.intake().failure(lost, clock=factories.host_clock(), boot_id=boot_id()))
    for fields in ({"tenant": "t-b"}, {"source": "elsewhere"}, {"retries": 3}):
        back = factories.delivery(**{"task_id": "nightly", "redelivered": True, "source": "tests", **fields})
        DatabaseSettlement().ended(ended(back))
    assert DeadLetter.objects.get().state == LetterState.OPEN


def test_a_started_repair_is_given_up_only_when_no_answer_is_to_be_expected(cast: Cast) -> None:
    from repairs.errors import RepairNotCancellable
    from repairs.services import cancel_repair
    from tests.repairs.test_retry import node

    letter = factories.dead_letter()
    action = repair(cast, letter)
    holder = node(id="celery_h.1.abc.1")
    claim(action)
    with pytest.raises(RepairNotCancellable):
        cancel_repair(repair_id=action.id, by=cast.ada, key="c")
    holder.seen_at -= factories.seconds(120)
    holder.save()
    cancel_repair(repair_id=action.id, by=cast.ada, key="c")
    action.refresh_from_db()
    letter.refresh_from_db()
    assert (action.state, action.error_code) == (ActionState.FAILED, "no_answer")
    assert (letter.state, letter.outcome_class) == (LetterState.OPEN, OutcomeClass.AMBIGUOUS)
