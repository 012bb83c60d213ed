"""Two operators, two tabs, two controllers at the same moment: one of them is first, and the counts add up."""

from __future__ import annotations

from collections import Counter
from uuid import uuid4

import pytest

from grants.models import AuditEvent
from repairs.errors import RedriveExists, RedriveStanding
from repairs.models import ItemState, Redrive, RedriveItem, RedriveState, RepairAction
from repairs.redrives.services import (
    RedriveMutation,
    cancel_redrive,
    create_redrive,
    pause_redrive,
    resume_redrive,
    start_redrive,
)
from repairs.redrives.stepping import step_redrive
from repairs.services import retry_letter
from tests.cast import Cast
from tests.repairs.redrives.work import (
    FAST,
    counted,
    create,
    letters,
    outstanding,
    started,
    step,
    succeed,
    whole,
    worker,
)
from tests.repairs.test_retry import race

pytestmark = pytest.mark.django_db(transaction=True)


def test_one_key_from_many_tabs_is_one_redrive(cast: Cast) -> None:
    worker()
    letters(5)
    answers = race(
        6, lambda _index: create_redrive(by=cast.ada, key="k", selection=whole(), pace=FAST, expected_count=5)
    )  # fmt: skip
    assert all(isinstance(answer, RedriveMutation) for answer in answers), answers
    assert len({answer.redrive_id for answer in answers}) == 1
    assert Counter(answer.idempotent_replay for answer in answers) == {True: 5, False: 1}
    assert RedriveItem.objects.count() == 5


def test_two_operators_who_plan_the_same_jobs_make_one_redrive(cast: Cast) -> None:
    worker()
    letters(5)
    answers = race(4, lambda _index: create_redrive(by=cast.ada, key=str(uuid4()), selection=whole(), pace=FAST))
    made = [answer for answer in answers if isinstance(answer, RedriveMutation)]
    refused = [answer for answer in answers if isinstance(answer, RedriveExists)]
    assert (len(made), len(refused)) == (1, 3), answers
    assert all(str(made[0].redrive_id) in answer.detail for answer in refused)
    assert Redrive.objects.count() == 1


def test_two_who_start_it_start_it_once(cast: Cast) -> None:
    worker()
    letters(2)
    made = create(cast)
    answers = race(4, lambda _index: start_redrive(redrive_id=made.redrive_id, by=cast.ada, key=str(uuid4())))
    assert Counter(type(answer) for answer in answers) == {RedriveMutation: 1, RedriveStanding: 3}
    assert AuditEvent.objects.filter(action="redrive.started").count() == 1


def test_controllers_that_step_at_once_plan_each_job_once(cast: Cast) -> None:
    worker()
    found = letters(20)
    redrive = started(cast)

    def work(index: int) -> int:
        count = 0
        for _ in range(6):
            stepped = step_redrive(redrive_id=redrive.id, owner=f"w{index}", size=3)
            count += stepped.planned if stepped is not None else 0
        return count

    answers = race(3, work)
    assert all(isinstance(answer, int) for answer in answers), answers
    redrive.refresh_from_db()
    while step(redrive, owner=redrive.lease_owner).planned:
        pass
    assert counted(redrive) == {"planned": 20}
    assert RepairAction.objects.filter(letter__in=found).count() == 20


def test_cancelling_while_it_is_stepped_leaves_no_job_in_between(cast: Cast) -> None:
    worker()
    letters(30)
    redrive = started(cast)

    def work(index: int) -> object:
        if index == 0:
            return cancel_redrive(redrive_id=redrive.id, by=cast.ada, key="c")
        for _ in range(8):
            step_redrive(redrive_id=redrive.id, owner="w", size=4)
        return None

    answers = race(2, work)
    assert isinstance(answers[0], RedriveMutation), answers
    assert counted(redrive) == {"cancelled": 30}
    assert redrive.state == RedriveState.CANCELLED
    assert set(RedriveItem.objects.values_list("letter__state", flat=True)) == {"open"}


def test_pausing_and_letting_go_on_at_once_end_in_one_of_the_two(cast: Cast) -> None:
    worker()
    letters(2)
    redrive = started(cast)

    def work(index: int) -> object:
        decide = pause_redrive if index % 2 else resume_redrive
        return decide(redrive_id=redrive.id, by=cast.ada, key=str(uuid4()))

    answers = race(6, work)
    assert all(isinstance(answer, RedriveMutation | RedriveStanding) for answer in answers), answers
    redrive.refresh_from_db()
    done = Counter(AuditEvent.objects.filter(action__startswith="redrive.").values_list("action", flat=True))
    is_paused = done["redrive.paused"] - done["redrive.resumed"]
    assert (redrive.state == RedriveState.PAUSED) is bool(is_paused)


def test_a_single_retry_beside_a_redrive_runs_each_job_once(cast: Cast) -> None:
    """Particular/ServiceControl#4797: batch and single at the same moment."""
    worker()
    found = letters(12)
    redrive = started(cast)

    def work(index: int) -> object:
        if index:
            for _ in range(8):
                step_redrive(redrive_id=redrive.id, owner="w", size=2)
            return None
        for letter in reversed(found):
            try:
                retry_letter(letter_id=letter.id, by=cast.ada, key=str(letter.id))
            except Exception as refusal:
                if getattr(refusal, "code", "") != "operations_job_overtaken":
                    raise
        return None

    assert race(2, work) == [None, None]
    while step(redrive).planned:
        pass
    live = RepairAction.objects.filter(state="planned")
    assert Counter(live.values_list("letter_id", flat=True)) == dict.fromkeys((one.id for one in found), 1)
    mine = live.filter(redrive=redrive).count()
    assert counted(redrive) == {name: n for name, n in {"planned": mine, "skipped": 12 - mine}.items() if n}
    succeed(outstanding(redrive))
    step(redrive)
    assert redrive.state == RedriveState.FINISHED
    assert RedriveItem.objects.filter(state=ItemState.SUCCEEDED).count() == mine
