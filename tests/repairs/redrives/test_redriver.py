"""The controller: it goes round, judges big sets, survives an outage and pauses what ran through it."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

import pytest
from django.db import OperationalError

from opsconsole.core.database import database_now
from repairs.models import Redrive, RedriveState
from repairs.redrives import redriver, services, stepping
from repairs.redrives.redriver import Redriver, is_outage
from repairs.redrives.requests import RedriveSelection
from tests import factories
from tests.cast import Cast
from tests.repairs.redrives.work import counted, create, letters, outstanding, started, succeed, worker

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_set_too_big_for_a_request_is_judged_by_the_controller_page_by_page(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker()
    letters(5)
    factories.dead_letter(ambiguous=True)
    monkeypatch.setattr(services, "AT_ONCE", 3)
    made = create(cast)
    assert made.state == RedriveState.PLANNING
    judge = redriver.judge_page
    monkeypatch.setattr(redriver, "judge_page", lambda *, redrive_id: judge(redrive_id=redrive_id, size=2))
    controller = Redriver(source="tests", owner="w")
    for _ in range(4):
        controller.step()
    redrive = Redrive.objects.get()
    assert (redrive.state, redrive.classes) == (RedriveState.READY, '{"ambiguous":1,"safe":5}')
    assert not controller.step(), "a ready one waits for a person"


def test_it_goes_round_until_the_redrive_has_ended(cast: Cast) -> None:
    worker()
    letters(3)
    redrive = started(cast)
    controller = Redriver(source="tests", owner="w")
    Redrive.objects.update(next_due_at=database_now() - factories.seconds(5))
    assert controller.step()
    succeed(outstanding(redrive))
    controller.step()
    assert counted(redrive) == {"succeeded": 3}
    assert redrive.state == RedriveState.FINISHED
    assert not controller.step()


def test_it_leaves_the_redrives_of_other_sources_alone(cast: Cast) -> None:
    worker()
    letters(1)
    started(cast)
    assert not Redriver(source="elsewhere", owner="w").step()


def test_what_ran_while_the_database_was_away_waits_for_a_person(cast: Cast) -> None:
    worker()
    letters(2)
    redrive = started(cast)
    controller = Redriver(source="tests", owner="w")
    Redrive.objects.update(run_since=database_now() - factories.seconds(30))
    controller._note(OperationalError("server closed the connection unexpectedly"))
    controller._say_it_is_over()
    redrive.refresh_from_db()
    assert (redrive.state, redrive.pause_code) == (RedriveState.PAUSED, "database_trouble")
    services.resume_redrive(redrive_id=redrive.id, by=cast.ada, key="r")
    # A second controller that notices later does not undo what a person has decided since.
    late = Redriver(source="tests", owner="x")
    late._trouble_since = controller._trouble_since or redriver.time.monotonic() - 20
    late._say_it_is_over()
    redrive.refresh_from_db()
    assert redrive.state == RedriveState.RUNNING


def test_a_bug_in_one_redrive_pauses_it_and_stands_in_nobodys_way(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    worker()
    first = factories.dead_letter()
    broken = started(cast)
    second = factories.dead_letter()
    well = started(cast, RedriveSelection(letter_ids=(second.id,)))
    plan = redriver.step_redrive

    def step(*, redrive_id: UUID, owner: str, size: int) -> object:
        if redrive_id == broken.id:
            raise KeyError(str(first.id))
        return plan(redrive_id=redrive_id, owner=owner, size=size)

    monkeypatch.setattr(redriver, "step_redrive", step)
    Redrive.objects.update(next_due_at=database_now() - factories.seconds(5))
    Redriver(source="tests", owner="w").step()
    broken.refresh_from_db()
    assert (broken.state, broken.pause_code) == (RedriveState.PAUSED, "controller_error")
    assert counted(well) == {"planned": 1}


def test_a_lock_that_was_not_had_is_no_outage() -> None:
    assert is_outage(OperationalError("server closed the connection"))
    assert not is_outage(OperationalError("database is locked"))
    assert not is_outage(ValueError("a bug"))


def test_what_the_database_refuses_of_one_redrive_pauses_it_and_no_other(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A constraint that one redrive cannot satisfy is no trouble with the database."""
    worker()
    one, other = letters(2)
    refused = started(cast, RedriveSelection(letter_ids=(one.id,)))
    well = started(cast, RedriveSelection(letter_ids=(other.id,)))
    Redrive.objects.update(next_due_at=database_now() - factories.seconds(5))
    settle = stepping._settle

    def overcount(redrive: Redrive, now: datetime) -> int:
        if redrive.id == refused.id:
            redrive.failed_count += 1
        return settle(redrive, now)

    monkeypatch.setattr(stepping, "_settle", overcount)
    controller = Redriver(source="tests", owner="w")
    controller.step()
    refused.refresh_from_db()
    assert (refused.state, refused.pause_code, refused.pause_text) == (
        RedriveState.PAUSED, "controller_error", "IntegrityError",
    )  # fmt: skip
    assert counted(well) == {"planned": 1}


def test_many_that_only_wait_for_answers_do_not_keep_the_ones_after_them_waiting(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker()
    monkeypatch.setattr(redriver, "AT_ONCE", 2)
    redrives = [started(cast, RedriveSelection(letter_ids=(one.id,))) for one in letters(5)]
    Redrive.objects.update(next_due_at=database_now() - factories.seconds(5))
    controller = Redriver(source="tests", owner="w")
    for _ in range(3):
        controller.step()
    assert [counted(one) for one in redrives] == [{"planned": 1}] * 5
    succeed(outstanding(redrives[0]))
    controller.step()
    assert counted(redrives[0]) == {"succeeded": 1}, "after the last page comes the first"
