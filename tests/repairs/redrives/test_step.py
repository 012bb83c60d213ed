"""Running a redrive: what goes out, in which order and how fast, what stops it, and that the counts add up."""

from __future__ import annotations

from uuid import uuid4

import pytest

from deadletters.models import DeadLetter, WorkerNode
from grants.actions import Action
from grants.models import AuditEvent, ScopeUserGrant
from incidents.models import Incident
from incidents.services import resolve_incident
from opsconsole.core.database import database_now
from repairs.errors import JobOvertaken, RedriveAnswerInvalid, RedriveStanding
from repairs.models import ActionState, Redrive, RedriveClass, RedriveItem, RedriveState, RepairAction
from repairs.redrives.requests import AnswerKind, RedriveAnswer, RedriveChanges, RedrivePace, RedriveSelection
from repairs.redrives.services import (
    cancel_redrive,
    pause_redrive,
    resume_redrive,
    retry_failed_items,
    start_redrive,
)
from repairs.redrives.stepping import step_redrive
from repairs.services import cancel_repair, retry_letter
from tests import factories
from tests.cast import Cast, give
from tests.repairs.redrives.test_create import UNDECLARED
from tests.repairs.redrives.work import (
    FAST,
    counted,
    create,
    fail,
    items,
    letter_states,
    letters,
    outstanding,
    sent,
    started,
    step,
    succeed,
    worker,
)

pytestmark = pytest.mark.django_db


def test_the_safe_part_runs_and_the_redrive_ends_with_its_last_answer(cast: Cast) -> None:
    """C11, C14: each job has a repair, an audit row and a result; with the last one the incident closes."""
    worker()
    found = letters(5)
    redrive = started(cast)
    assert step(redrive).planned == 5
    assert counted(redrive) == {"planned": 5}
    assert letter_states([one.id for one in found]) == ["retrying"] * 5
    assert AuditEvent.objects.filter(action="dead-letters.retry", operator_name="ada").count() == 5
    assert RepairAction.objects.filter(redrive=redrive, state="planned", planned_by_name="ada").count() == 5
    succeed(outstanding(redrive))
    assert step(redrive).settled == 5
    assert (redrive.state, counted(redrive)) == (RedriveState.FINISHED, {"succeeded": 5})
    assert Incident.objects.get().state == "resolved"
    assert AuditEvent.objects.filter(action="redrive.finished").count() == 1


def test_what_is_not_safe_is_left_out_with_its_class_as_the_code(cast: Cast) -> None:
    worker()
    letters(2)
    factories.dead_letter(ambiguous=True)
    factories.dead_letter(task="shop.gone")
    redrive = started(cast)
    assert step(redrive).planned == 2
    assert counted(redrive) == {"planned": 2, "skipped": 2}
    assert sorted(items(redrive))[2:] == [("skipped", "ambiguous"), ("skipped", "not_served")]


@pytest.mark.parametrize("kind", [AnswerKind.DID_NOT_HAPPEN, AnswerKind.IDEMPOTENT])
def test_an_answered_class_runs_with_what_was_stated(cast: Cast, kind: AnswerKind) -> None:
    """B6, C13: the repair keeps the statement and where it was seen."""
    worker()
    factories.dead_letter(ambiguous=True)
    answers = {RedriveClass.AMBIGUOUS: RedriveAnswer(kind=kind, reference="OPS-7")}
    redrive = started(cast, answers=answers)
    assert step(redrive).planned == 1
    action = RepairAction.objects.get(redrive=redrive)
    assert (action.provider_answer, action.reference) == (kind.value, "OPS-7")
    # Only who has looked knows; a provider that tells twins apart says nothing about what has happened.
    expected = "safe" if kind is AnswerKind.DID_NOT_HAPPEN else "ambiguous"
    assert DeadLetter.objects.get().outcome_class == expected


def test_what_is_stated_to_have_happened_is_closed_as_done_and_not_sent(cast: Cast) -> None:
    worker()
    factories.dead_letter(ambiguous=True)
    answers = {RedriveClass.AMBIGUOUS: RedriveAnswer(kind=AnswerKind.ALREADY_HAPPENED, reference="report 9")}
    redrive = started(cast, answers=answers)
    assert step(redrive).planned == 0
    assert (redrive.state, items(redrive)) == (RedriveState.FINISHED, [("succeeded", "already_happened")])
    assert DeadLetter.objects.get().state == "already_done"
    assert Incident.objects.get().state == "resolved"


def test_a_job_of_two_classes_runs_only_if_both_are_answered(cast: Cast) -> None:
    """An answer about lateness says nothing about what may already have happened."""
    worker()
    expired = (database_now() - factories.seconds(5)).isoformat()
    factories.dead_letter(ambiguous=True, headers={"expires": expired})
    late = {RedriveClass.EXPIRED: RedriveAnswer(kind=AnswerKind.RUN_EXPIRED)}
    first = started(cast, answers=late)
    step(first)
    assert items(first) == [("skipped", "ambiguous")]
    looked = {RedriveClass.AMBIGUOUS: RedriveAnswer(kind=AnswerKind.DID_NOT_HAPPEN, reference="x")}
    second = started(cast, answers=looked)
    step(second)
    assert items(second) == [("skipped", "expired")]
    third = started(cast, answers={**late, **looked})
    assert step(third).planned == 1


def test_a_statement_without_a_reference_is_refused(cast: Cast) -> None:
    worker()
    factories.dead_letter(UNDECLARED, policies=[])
    made = create(cast)
    answers = {RedriveClass.NOT_DECLARED: RedriveAnswer(kind=AnswerKind.DID_NOT_HAPPEN)}
    with pytest.raises(RedriveAnswerInvalid):
        start_redrive(redrive_id=made.redrive_id, by=cast.ada, key="s", answers=answers)
    assert Redrive.objects.get().state == RedriveState.READY


def test_what_has_changed_since_the_dry_run_is_judged_again(cast: Cast) -> None:
    """One is retried by somebody, one may have happened by now, one is closed: none of them is sent."""
    worker()
    retried, doubtful, closed, plain = letters(4)
    redrive = started(cast)
    retry_letter(letter_id=retried.id, by=cast.ada, key="r")
    DeadLetter.objects.filter(id=doubtful.id).update(outcome_class="ambiguous")
    DeadLetter.objects.filter(id=closed.id).update(state="already_done", closed_at=database_now())
    assert step(redrive).planned == 1
    assert items(redrive) == [
        ("skipped", "overtaken"), ("skipped", "ambiguous"), ("skipped", "overtaken"), ("planned", ""),
    ]  # fmt: skip
    assert RepairAction.objects.filter(redrive=redrive).get().letter_id == plain.id


def test_jobs_go_out_oldest_first_at_the_rate_and_up_to_what_may_be_outstanding(cast: Cast) -> None:
    worker()
    found = letters(10)
    redrive = started(cast, pace=RedrivePace(rate_per_second=3, max_outstanding=4, canary_size=0))
    # A second's worth can be saved up, never more.
    assert step(redrive).planned == 3
    assert [action.letter_id for action in outstanding(redrive)] == [one.id for one in found[:3]]
    again = step_redrive(redrive_id=redrive.id, owner="w")
    assert again is not None
    assert again.planned == 0
    assert step(redrive).planned == 1
    assert step(redrive).planned == 0
    succeed(outstanding(redrive)[:2])
    assert (step(redrive).planned, counted(redrive)) == (2, {"planned": 4, "succeeded": 2, "waiting": 4})


def test_the_jobs_of_one_actor_run_one_after_the_other(cast: Cast) -> None:
    worker()
    mine = letters(3, actor_type="order", actor_id="7")
    other = factories.dead_letter(actor_type="order", actor_id="8")
    redrive = started(cast)
    assert step(redrive).planned == 2
    assert {action.letter_id for action in outstanding(redrive)} == {mine[0].id, other.id}
    succeed(outstanding(redrive))
    assert step(redrive).planned == 1
    assert [action.letter_id for action in outstanding(redrive)] == [mine[1].id]
    fail(outstanding(redrive))
    step(redrive)
    assert items(redrive)[2] == ("skipped", "earlier_job_failed")
    assert redrive.state == RedriveState.FINISHED
    assert counted(redrive) == {"failed": 1, "skipped": 1, "succeeded": 2}


def test_a_left_out_job_lets_the_next_one_of_its_actor_go(cast: Cast) -> None:
    worker()
    first, _second = letters(2, actor_type="order", actor_id="7")
    redrive = started(cast)
    DeadLetter.objects.filter(id=first.id).update(outcome_class="ambiguous")
    step(redrive)
    step(redrive)
    assert items(redrive) == [("skipped", "ambiguous"), ("planned", "")]


def test_the_canary_goes_first_as_single_attempts_and_the_rest_once_it_has_succeeded(cast: Cast) -> None:
    worker()
    letters(6)
    redrive = started(cast, pace=RedrivePace(rate_per_second=100, max_outstanding=100, canary_size=2))
    assert (step(redrive).planned, redrive.state) == (2, RedriveState.CANARY)
    assert [action.is_single_attempt for action in outstanding(redrive)] == [True, True]
    assert step(redrive).planned == 0
    succeed(outstanding(redrive)[:1])
    assert step(redrive).planned == 0
    succeed(outstanding(redrive))
    assert (step(redrive).planned, redrive.state) == (4, RedriveState.RUNNING)
    assert {action.is_single_attempt for action in outstanding(redrive)} == {False}


def test_a_canary_that_fails_pauses_and_a_person_may_go_on(cast: Cast) -> None:
    worker()
    letters(4)
    redrive = started(cast, pace=RedrivePace(rate_per_second=100, max_outstanding=100, canary_size=1))
    step(redrive)
    fail(outstanding(redrive))
    step(redrive)
    assert (redrive.state, redrive.pause_code) == (RedriveState.PAUSED, "canary_failed")
    assert step(redrive).planned == 0
    resume_redrive(redrive_id=redrive.id, by=cast.ada, key="go")
    assert (step(redrive).planned, redrive.state) == (3, RedriveState.RUNNING)
    assert counted(redrive) == {"failed": 1, "planned": 3}


def test_too_many_failures_pause_it_and_count_anew_after_somebody_looked(cast: Cast) -> None:
    worker()
    letters(40)
    redrive = started(
        cast, pace=RedrivePace(rate_per_second=100, max_outstanding=10, canary_size=0, stop_percent=10)
    )  # fmt: skip
    step(redrive)
    actions = outstanding(redrive)
    fail(actions[:2])
    succeed(actions[2:])
    step(redrive)
    assert (redrive.state, redrive.pause_code) == (RedriveState.PAUSED, "too_many_failed")
    resume_redrive(redrive_id=redrive.id, by=cast.ada, key="go")
    assert step(redrive).planned == 10
    actions = outstanding(redrive)
    fail(actions[:1])
    succeed(actions[1:])
    step(redrive)
    assert redrive.state == RedriveState.RUNNING


def test_a_paused_redrive_plans_nothing_and_still_hears_of_what_was_sent(cast: Cast) -> None:
    worker()
    letters(4)
    redrive = started(cast, pace=RedrivePace(rate_per_second=100, max_outstanding=2, canary_size=0))
    step(redrive)
    pause_redrive(redrive_id=redrive.id, by=cast.ada, key="p", reason="lunch")
    succeed(outstanding(redrive))
    stepped = step(redrive)
    assert (stepped.settled, stepped.planned) == (2, 0)
    assert (redrive.state, redrive.pause_code, redrive.pause_text) == (RedriveState.PAUSED, "operator", "lunch")
    with pytest.raises(RedriveStanding):
        pause_redrive(redrive_id=redrive.id, by=cast.ada, key="p2")
    resume_redrive(redrive_id=redrive.id, by=cast.ada, key="r")
    assert step(redrive).planned == 2


def test_a_cancelled_redrive_takes_back_what_was_not_sent_and_hears_of_the_rest(cast: Cast) -> None:
    worker()
    found = letters(6)
    redrive = started(cast, pace=RedrivePace(rate_per_second=100, max_outstanding=4, canary_size=0))
    step(redrive)
    on_their_way = outstanding(redrive)[:2]
    RepairAction.objects.filter(id__in=[action.id for action in on_their_way]).update(
        state=ActionState.SENT, sent_at=database_now()
    )
    cancel_redrive(redrive_id=redrive.id, by=cast.ada, key="c")
    assert counted(redrive) == {"cancelled": 4, "planned": 2}
    assert letter_states([one.id for one in found]) == ["retrying"] * 2 + ["open"] * 4
    assert RepairAction.objects.filter(redrive=redrive, state="cancelled").count() == 2
    succeed(on_their_way)
    step(redrive)
    assert (redrive.state, counted(redrive)) == (RedriveState.CANCELLED, {"cancelled": 4, "succeeded": 2})
    assert create(cast).total == 4, "its jobs can be in another redrive"


def test_a_repair_that_somebody_withdraws_is_cancelled_in_its_redrive(cast: Cast) -> None:
    worker()
    letters(1)
    redrive = started(cast)
    step(redrive)
    cancel_repair(repair_id=outstanding(redrive)[0].id, by=cast.ada, key="w")
    step(redrive)
    assert (redrive.state, items(redrive)) == (RedriveState.FINISHED, [("cancelled", "repair_cancelled")])


def test_only_the_failed_jobs_are_planned_again(cast: Cast) -> None:
    worker()
    found = letters(3)
    redrive = started(cast)
    step(redrive)
    actions = outstanding(redrive)
    succeed(actions[:2])
    fail(actions[2:])
    step(redrive)
    made = retry_failed_items(redrive_id=redrive.id, by=cast.ada, key="again", expected_count=1)
    assert list(RedriveItem.objects.filter(redrive=made.redrive_id).values_list("letter_id", flat=True)) == [
        found[2].id
    ]
    assert Redrive.objects.get(id=made.redrive_id).retry_of_id == redrive.id


def test_a_grant_that_is_taken_away_pauses_it_before_the_next_job(cast: Cast) -> None:
    worker()
    letters(3)
    give(cast.olga, Action.REDRIVE_RUN, tenant="default")
    redrive = started(cast, by=cast.olga, pace=RedrivePace(rate_per_second=100, max_outstanding=1, canary_size=0))
    step(redrive)
    ScopeUserGrant.objects.filter(user_id=cast.olga.user_id, permission__codename="redrive_run").delete()
    succeed(outstanding(redrive))
    assert step(redrive).planned == 0
    assert (redrive.state, redrive.pause_code) == (RedriveState.PAUSED, "grant_revoked")
    resume_redrive(redrive_id=redrive.id, by=cast.ada, key="mine")
    assert step(redrive).planned == 1
    assert RepairAction.objects.filter(redrive=redrive).order_by("-id")[0].planned_by_name == "ada"


def test_a_task_that_nobody_serves_any_more_pauses_it_once(cast: Cast) -> None:
    node = worker()
    letters(2)
    redrive = started(cast)
    WorkerNode.objects.filter(id=node.id).update(tasks='{"other": ""}')
    assert step(redrive).planned == 0
    assert (redrive.state, redrive.pause_code) == (RedriveState.PAUSED, "job_not_served")
    resume_redrive(redrive_id=redrive.id, by=cast.ada, key="go")
    step(redrive)
    assert (redrive.state, items(redrive)) == (RedriveState.FINISHED, [("skipped", "not_served")] * 2)


def test_one_controller_acts_on_a_redrive_until_its_lease_ends(cast: Cast) -> None:
    worker()
    letters(2)
    redrive = started(cast, pace=RedrivePace(rate_per_second=100, max_outstanding=1, canary_size=0))
    step(redrive, owner="first")
    assert step_redrive(redrive_id=redrive.id, owner="second") is None
    Redrive.objects.update(lease_expires_at=database_now() - factories.seconds(1))
    succeed(outstanding(redrive))
    assert step(redrive, owner="second").planned == 1
    assert step_redrive(redrive_id=redrive.id, owner="first") is None


def test_another_queue_and_another_name_stand_in_the_repairs(cast: Cast) -> None:
    worker(shop__post='{"varkw":true,"varargs":true}')
    letters(1)
    redrive = started(
        cast, target_queue="slow", changes=RedriveChanges(tasks={"shop.send_mail": "shop.post"}), pace=FAST
    )  # fmt: skip
    step(redrive)
    action = outstanding(redrive)[0]
    assert (action.queue, action.job_type, action.letter.job_type) == ("slow", "shop.post", "shop.send_mail")


def test_an_incident_that_nobody_has_is_taken_for_whoever_runs_it(cast: Cast) -> None:
    """A12: once; what a failed repair opens again is to be seen."""
    worker()
    letters(2)
    redrive = started(cast, pace=RedrivePace(rate_per_second=100, max_outstanding=1, canary_size=0, stop_percent=None))
    step(redrive)
    assert Incident.objects.get().acknowledged_by_name == "ada"
    fail(outstanding(redrive))
    step(redrive)
    incident = Incident.objects.get()
    assert (incident.state, incident.reopened_reason) == ("open", "repair_failed")


def test_the_same_request_is_a_replay_and_another_one_is_told_that_it_is_late(cast: Cast) -> None:
    worker()
    letters(1)
    made = create(cast)
    for key, replay in (("k", False), ("k", True)):
        done = start_redrive(redrive_id=made.redrive_id, by=cast.ada, key=key)
        assert done.idempotent_replay is replay
    with pytest.raises(RedriveStanding):
        start_redrive(redrive_id=made.redrive_id, by=cast.ada, key=str(uuid4()))
    redrive = Redrive.objects.get()
    step(redrive)
    sent(redrive)
    assert AuditEvent.objects.filter(action="redrive.started").count() == 1


def test_a_paused_redrive_of_which_nothing_is_left_has_ended(cast: Cast) -> None:
    worker()
    letters(1)
    redrive = started(cast, pace=RedrivePace(rate_per_second=100, max_outstanding=5, canary_size=1))
    step(redrive)
    fail(outstanding(redrive))
    step(redrive)
    assert (redrive.state, redrive.pause_code, counted(redrive)) == (RedriveState.FINISHED, "", {"failed": 1})


def test_a_statement_about_what_has_happened_is_not_one_about_a_later_failure(cast: Cast) -> None:
    """B6, C13: somebody has looked, then one was tried once more and may have happened: nobody has looked at that."""
    worker()
    again, looked_at = letters(2, ambiguous=True)
    did_not = {RedriveClass.AMBIGUOUS: RedriveAnswer(kind=AnswerKind.DID_NOT_HAPPEN, reference="OPS-7")}
    redrive = started(cast, answers=did_not)
    retry_letter(letter_id=again.id, by=cast.ada, key="r", provider_checked=True)
    fail([RepairAction.objects.get(letter=again)])
    DeadLetter.objects.filter(id=again.id).update(outcome_class="ambiguous")
    step(redrive)
    assert items(redrive) == [("skipped", "ambiguous"), ("planned", "")]
    assert [action.letter_id for action in outstanding(redrive)] == [looked_at.id]
    # That twice does no harm stays true, however often it was tried.
    harmless = {RedriveClass.AMBIGUOUS: RedriveAnswer(kind=AnswerKind.IDEMPOTENT, reference="OPS-8")}
    second = started(cast, RedriveSelection(letter_ids=(again.id,)), answers=harmless)
    factories.record(factories.failure(task_id=again.task_id, retries=1))
    DeadLetter.objects.filter(id=again.id).update(outcome_class="ambiguous")
    assert step(second).planned == 1


def test_a_job_under_repair_is_left_out_whatever_its_own_state_says(cast: Cast) -> None:
    """The database takes one live repair of a job: a page with such a job must not fail as a whole."""
    worker()
    first, second = letters(2)
    redrive = started(cast)
    retry_letter(letter_id=first.id, by=cast.ada, key="r")
    # As a delivery of the job itself leaves it that has failed after its incident was closed.
    DeadLetter.objects.filter(id=first.id).update(state="open")
    assert step(redrive).planned == 1
    assert items(redrive) == [("skipped", "overtaken"), ("planned", "")]
    assert outstanding(redrive)[0].letter_id == second.id


def test_a_canary_that_fails_during_a_pause_is_not_forgotten(cast: Cast) -> None:
    """C14: the rest follows only once the whole canary has succeeded, or a person was told that it has not."""
    worker()
    letters(5)
    redrive = started(cast, pace=RedrivePace(rate_per_second=100, max_outstanding=100, canary_size=2))
    step(redrive)
    pause_redrive(redrive_id=redrive.id, by=cast.ada, key="lunch")
    actions = outstanding(redrive)
    fail(actions[:1])
    succeed(actions[1:])
    step(redrive)
    resume_redrive(redrive_id=redrive.id, by=cast.ada, key="back")
    assert step(redrive).planned == 0
    assert (redrive.state, redrive.pause_code) == (RedriveState.PAUSED, "canary_failed")
    resume_redrive(redrive_id=redrive.id, by=cast.ada, key="told")
    assert (step(redrive).planned, redrive.state) == (3, RedriveState.RUNNING)


def test_what_is_closed_without_a_run_is_no_canary_and_no_success(cast: Cast) -> None:
    """C14: that the first jobs need not run says nothing of how the others will fare."""
    worker()
    letters(2, ambiguous=True)
    letters(12)
    DeadLetter.objects.filter(outcome_class="ambiguous").update(first_seen_at=database_now() - factories.seconds(900))
    happened = {RedriveClass.AMBIGUOUS: RedriveAnswer(kind=AnswerKind.ALREADY_HAPPENED, reference="OPS-7")}
    pace = RedrivePace(rate_per_second=100, max_outstanding=100, canary_size=2, stop_percent=50)
    redrive = started(cast, pace=pace, answers=happened)
    step(redrive)
    assert counted(redrive) == {"succeeded": 2, "waiting": 12}
    step(redrive)
    assert (redrive.state, counted(redrive)) == (RedriveState.CANARY, {"succeeded": 2, "planned": 2, "waiting": 10})
    succeed(outstanding(redrive))
    assert (step(redrive).planned, redrive.state) == (10, RedriveState.RUNNING)


def test_one_that_began_without_a_canary_has_none_after_a_pause(cast: Cast) -> None:
    worker()
    letters(20)
    redrive = started(cast, pace=RedrivePace(rate_per_second=100, max_outstanding=5, canary_size=0))
    step(redrive)
    fail(outstanding(redrive)[:1])
    pause_redrive(redrive_id=redrive.id, by=cast.ada, key="p")
    resume_redrive(redrive_id=redrive.id, by=cast.ada, key="r", pace=RedrivePace(rate_per_second=100))
    step(redrive)
    assert redrive.state == RedriveState.RUNNING


def test_jobs_of_an_incident_that_a_person_closes_meanwhile_are_left_out(cast: Cast) -> None:
    """Whoever has closed it without repairing them wants none of them run; one closed before was chosen as it was."""
    worker()
    letters(3)
    redrive = started(cast, pace=RedrivePace(rate_per_second=100, max_outstanding=1, canary_size=0))
    step(redrive)
    incident = Incident.objects.get()
    resolve_incident(
        incident_id=incident.id, by=cast.ada, key="close", code="not_worth_it", summary="Too late for these.",
        unrepaired=incident.unresolved_count,
    )  # fmt: skip
    succeed(outstanding(redrive))
    step(redrive)
    step(redrive)
    assert items(redrive) == [("succeeded", ""), ("skipped", "overtaken"), ("skipped", "overtaken")]
    left = DeadLetter.objects.filter(state="open").values_list("id", flat=True)
    assert step(started(cast, RedriveSelection(letter_ids=tuple(left)))).planned == 2


def test_a_job_that_retention_has_removed_is_left_out_and_the_redrive_ends(cast: Cast) -> None:
    worker()
    first, second = letters(2)
    redrive = started(cast)
    RedriveItem.objects.filter(letter=first).update(letter_id=uuid4())
    step(redrive)
    assert items(redrive) == [("skipped", "not_captured"), ("planned", "")]
    assert outstanding(redrive)[0].letter_id == second.id


def test_a_job_that_fails_again_while_its_repair_is_out_and_its_incident_is_closed_stays_under_repair(
    cast: Cast,
) -> None:
    """Its own delivery came once more: it is unresolved again, and a second repair of it is refused as overtaken."""
    worker()
    letter = factories.dead_letter()
    retry_letter(letter_id=letter.id, by=cast.ada, key="r")
    resolve_incident(
        incident_id=letter.incident_id, by=cast.ada, key="c", code="not_worth_it", summary="Enough.", unrepaired=1
    )
    factories.record(factories.failure(task_id=letter.task_id, retries=1))
    assert letter_states([letter.id]) == ["retrying"]
    assert Incident.objects.get().unresolved_count == 1
    with pytest.raises(JobOvertaken):
        retry_letter(letter_id=letter.id, by=cast.ada, key="again")
    succeed([RepairAction.objects.get()])
    assert (letter_states([letter.id]), Incident.objects.get().state) == (["repaired"], "resolved")
