"""Repairs that nobody sends, and repairs that nobody answers for."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from deadletters.models import DeadLetter, JournalFolder, LetterState
from deadletters.outcome import OutcomeClass
from grants.models import AuditEvent
from incidents.models import IncidentState
from opsconsole.core.database import database_now
from repairs.models import ActionState, RepairAction, RunState, SweepRepair
from repairs.reconciliation.sending import Verdict, decide_unanswered, decide_unsent
from tests.cast import Cast
from tests.repairs.reconciliation.rows import ago, counts, sweep, worker
from tests.repairs.test_retry import race
from tests.repairs.test_settle import HOLDER, claim, ended, repair, repair_delivery

from repairs.settlement import DatabaseSettlement  # isort: skip

pytestmark = pytest.mark.django_db

NODE = HOLDER.partition("/")[0]


def change(action: RepairAction, **fields: Any) -> RepairAction:
    RepairAction.objects.filter(id=action.id).update(**fields)
    action.refresh_from_db()
    return action


def started(cast: Cast, *, since: float = 600, **fields: Any) -> RepairAction:
    """Return a repair that was started so many seconds ago by the worker ``NODE``."""
    action = repair(cast)
    claim(action)
    return change(action, started_at=ago(since), sent_at=ago(since), answer_due_at=ago(-3_000), **fields)


# Not sent


def test_a_planned_repair_whose_sender_is_gone_is_freed(cast: Cast) -> None:
    """A14: its lease is taken, and recorded with its marker; the next relay sends it."""
    action = change(repair(cast), lease_owner="relay", lease_expires_at=ago(5))
    run = sweep("unsent_repairs")
    assert (counts(run), run.incident_count) == ((1, 1, 0), 1)
    marker = action.lease_expires_at
    action.refresh_from_db()
    assert (action.state, action.lease_owner, action.lease_expires_at) == (ActionState.PLANNED, "", None)
    assert marker is not None
    assert SweepRepair.objects.get().operation_key == f"unsent-repair:{action.id}:{marker.isoformat()}"


def test_a_planned_repair_that_is_overdue_is_counted_with_its_incident(cast: Cast) -> None:
    """C9: no sweep can start the worker that would send it; so it is looked at and left alone."""
    change(repair(cast), due_at=ago(121))
    run = sweep("unsent_repairs")
    assert (counts(run), run.incident_count) == ((1, 0, 1), 1)


def test_a_planned_repair_that_is_due_or_being_sent_is_none_of_it(cast: Cast) -> None:
    change(repair(cast), due_at=ago(60))
    change(repair(cast, key="2"), lease_owner="relay", lease_expires_at=ago(-30), due_at=ago(600))
    assert counts(sweep("unsent_repairs")) == (0, 0, 0)


@pytest.mark.parametrize(("expires", "verdict"), [(None, Verdict.WAIT), (-1, Verdict.RELEASE), (1, Verdict.WAIT)])
def test_what_is_decided_about_a_repair_that_is_not_sent(expires: int | None, verdict: Verdict) -> None:
    now = database_now()
    at = None if expires is None else now + timedelta(seconds=expires)
    assert decide_unsent(RepairAction(lease_expires_at=at), now) is verdict


# Not answered


def test_a_repair_on_a_host_that_never_returns_is_given_up(cast: Cast) -> None:
    """C11: failed with ``no_answer``, its letter is open and may already have happened; audited."""
    action = started(cast)
    run = sweep("unanswered_repairs")
    assert (counts(run), run.incident_count) == ((1, 1, 0), 1)
    action.refresh_from_db()
    assert (action.state, action.error_code) == (ActionState.FAILED, "no_answer")
    letter = DeadLetter.objects.select_related("incident").get()
    assert (letter.state, letter.outcome_class) == (LetterState.OPEN, OutcomeClass.AMBIGUOUS)
    assert (letter.incident.state, letter.incident.reopened_reason) == (IncidentState.OPEN, "repair_failed")
    event = AuditEvent.objects.get(action="repairs.no_answer")
    assert (event.operator_kind, event.target_id) == ("system", str(letter.id))
    assert SweepRepair.objects.get().operation_key == f"no-answer:{action.id}:0"
    assert counts(sweep("unanswered_repairs")) == (0, 0, 0)


def test_a_repair_given_up_that_has_succeeded_after_all_closes_its_letter(cast: Cast) -> None:
    """C11: its host came back with the journal."""
    action = started(cast)
    sweep("unanswered_repairs")
    DatabaseSettlement().ended(ended(repair_delivery(action)))
    assert DeadLetter.objects.get().state == LetterState.OVERTAKEN


@pytest.mark.parametrize("seen", [0, 60, 290])
def test_a_repair_whose_worker_has_reported_within_five_minutes_is_waited_for(seen: float, cast: Cast) -> None:
    started(cast)
    worker(seen, name=NODE)
    worker(0, name="other")
    assert counts(sweep("unanswered_repairs"))[1] == 0
    assert RepairAction.objects.get().state == ActionState.STARTED


def test_a_repair_whose_worker_was_silent_for_longer_is_given_up(cast: Cast) -> None:
    started(cast)
    worker(301, name=NODE)
    worker(0, name="other")
    assert counts(sweep("unanswered_repairs")) == (1, 1, 0)


def test_a_repair_is_waited_for_while_its_journal_is_being_recovered(cast: Cast) -> None:
    """C11: another worker of its host is at the journal, and will say how it ended."""
    folder = JournalFolder.objects.create(name=NODE, source="tests", changed_at=ago(20))
    started(cast)
    assert counts(sweep("unanswered_repairs")) == (1, 0, 1)
    folder.closed_at = ago(10)
    folder.save()
    assert counts(sweep("unanswered_repairs")) == (1, 1, 0)


def test_after_an_outage_no_repair_is_given_up_before_its_worker_could_report(cast: Cast) -> None:
    """C12."""
    started(cast)
    worker(400, name=NODE)
    worker(0, name="other", reporting=100)
    run = sweep("unanswered_repairs")
    assert (counts(run)[1], run.waited_since is not None) == (0, True)


@pytest.mark.parametrize("state", [ActionState.SENT, ActionState.STARTED])
def test_a_repair_whose_answer_is_overdue_is_shown_as_such_and_left(state: ActionState, cast: Cast) -> None:
    """C9: a message may still lie in its queue, and a live worker may still be at it."""
    started(cast, state=state)
    worker(0, name=NODE)
    RepairAction.objects.update(answer_due_at=ago(5))
    run = sweep("unanswered_repairs")
    assert (counts(run), run.incident_count) == ((1, 0, 1), 1)


def test_a_limit_holds_for_repairs_too(cast: Cast) -> None:
    """A14."""
    for number in range(3):
        action = repair(cast, key=str(number))
        claim(action)
        change(action, started_at=ago(600))
    assert counts(sweep("unanswered_repairs", limit=2)) == (2, 2, 0)
    assert counts(sweep("unanswered_repairs", limit=2)) == (1, 1, 0)


@pytest.mark.django_db(transaction=True)
def test_an_answer_at_the_same_moment_and_giving_up_end_a_repair_once(cast: Cast) -> None:
    """C11: with the locks in one order; whoever is second finds it settled, or closes the letter as overtaken."""
    actions = []
    for number in range(10):
        action = repair(cast, key=str(number))
        claim(action)
        actions.append(change(action, started_at=ago(600)))

    def work(index: int) -> Any:
        if index == 0:
            return sweep("unanswered_repairs")
        for action in reversed(actions):
            DatabaseSettlement().ended(ended(repair_delivery(action)))
        return None

    run, settled = race(2, work)
    assert (run.state, settled) == (RunState.SUCCEEDED, None)
    states = set(DeadLetter.objects.values_list("state", flat=True))
    assert states <= {LetterState.REPAIRED, LetterState.OVERTAKEN}, states
    given_up = RepairAction.objects.filter(state=ActionState.FAILED).count()
    assert given_up == run.repaired_count == SweepRepair.objects.count()
    assert RepairAction.objects.filter(state=ActionState.SUCCEEDED).count() == 10 - given_up


@pytest.mark.parametrize(
    ("state", "started_ago", "seen_ago", "is_recovering", "is_overdue", "verdict"),
    [
        (ActionState.STARTED, 600, None, False, False, Verdict.GIVE_UP),
        (ActionState.STARTED, 600, 301, False, False, Verdict.GIVE_UP),
        (ActionState.STARTED, 600, 299, False, True, Verdict.WAIT),
        (ActionState.STARTED, 100, None, False, False, Verdict.WAIT),
        (ActionState.STARTED, 100, None, False, True, Verdict.GIVE_UP),
        (ActionState.STARTED, 600, None, True, True, Verdict.WAIT),
        (ActionState.SENT, 600, None, False, True, Verdict.WAIT),
    ],
)
def test_what_is_decided_about_a_repair_that_is_not_answered(
    state: ActionState,
    started_ago: int,
    seen_ago: int | None,
    is_recovering: bool,
    is_overdue: bool,
    verdict: Verdict,
) -> None:
    now = database_now()
    action = RepairAction(state=state, started_at=now - timedelta(seconds=started_ago), planned_at=now)
    seen = None if seen_ago is None else now - timedelta(seconds=seen_ago)
    decided = decide_unanswered(
        action, is_overdue=is_overdue, holder_seen_at=seen, is_recovering=is_recovering, now=now
    )
    assert decided is verdict
