"""Jobs of the ledger in a redrive: put back in place, and a provider that is asked what became of them."""

from __future__ import annotations

from uuid import uuid4

import pytest
from django.conf import settings

from deadletters.models import DeadLetter
from deadletters.selectors import LetterFilter
from opsconsole.jobs.errors import Refused, Unanswered
from opsconsole.jobs.kind import ProbeAnswer
from opsconsole.jobs.models import Job, JobState
from repairs.models import ActionType, Redrive, RedriveClass, RedriveItem, RedriveState, RepairAction
from repairs.redrives.probing import ask_providers
from repairs.redrives.requests import AnswerKind, RedriveAnswer, RedriveChanges, RedriveSelection
from repairs.redrives.services import pause_redrive, resume_redrive
from tests.cast import Cast
from tests.jobs.kinds_of_tests import BODIES, Outside
from tests.jobs.steps import dispatch, kill, letter_of, run
from tests.repairs.redrives.work import counted, create, items, started, step

pytestmark = pytest.mark.django_db
PROBE = {RedriveClass.AMBIGUOUS: RedriveAnswer(kind=AnswerKind.PROBE)}


def of_ledger() -> RedriveSelection:
    return RedriveSelection(letters=LetterFilter(tenant="default", source=settings.OPSCONSOLE_SOURCE))


def test_a_dead_job_goes_back_to_pending_and_its_success_settles_the_item(cast: Cast) -> None:
    """A12, C11"""
    job = kill("test_watched", Refused("no"))
    redrive = started(cast, of_ledger())
    assert step(redrive).planned == 1
    job.refresh_from_db()
    action = RepairAction.objects.get(redrive=redrive)
    assert (job.state, job.repair_id, action.action_type) == (JobState.PENDING, action.id, ActionType.RETRY_RECORD)
    BODIES.pop("test_watched")
    assert run(job, dispatch(job)) is None
    step(redrive)
    assert (redrive.state, counted(redrive)) == (RedriveState.FINISHED, {"succeeded": 1})
    assert letter_of(job).state == "repaired"


def test_one_whose_record_has_finished_without_it_is_left_out_and_closed(cast: Cast) -> None:
    """C5"""
    job = kill("test_watched", Refused("no"))
    redrive = started(cast, of_ledger())
    BODIES["applied"] = lambda _work: None
    try:
        assert step(redrive).planned == 0
    finally:
        BODIES.pop("applied")
    assert items(redrive) == [("skipped", "overtaken")]
    assert letter_of(job).state == "overtaken"


def test_one_that_runs_again_already_is_overtaken_in_the_dry_run(cast: Cast) -> None:
    job = kill("test_watched", Refused("no"))
    Job.objects.filter(id=job.id).update(state=JobState.PENDING, finished_at=None)
    create(cast, of_ledger())
    assert Redrive.objects.get().classes == '{"overtaken":1}'


def test_a_job_of_the_ledger_is_not_patched(cast: Cast) -> None:
    kill("test_watched", Refused("no"))
    create(cast, of_ledger(), changes=RedriveChanges(set={"a": 1}))
    assert Redrive.objects.get().classes == '{"not_patchable":1}'


@pytest.mark.parametrize(
    ("happened", "expected", "state"),
    [
        (False, ("planned", ""), "retrying"),
        (True, ("succeeded", "already_happened"), "already_done"),
        (None, ("skipped", "provider_does_not_know"), "open"),
    ],
)
def test_the_provider_is_asked_and_its_answer_is_the_evidence(
    cast: Cast, monkeypatch: pytest.MonkeyPatch, happened: bool | None, expected: tuple[str, str], state: str
) -> None:
    """C13"""
    job = kill("test_outside", Unanswered("timed out"))
    answer = ProbeAnswer(happened=happened, evidence="order 7: see 4711")
    monkeypatch.setattr(Outside, "probe", lambda _self, _job: answer)
    redrive = started(cast, of_ledger(), answers=PROBE)
    stepped = step(redrive)
    assert (stepped.planned, len(stepped.probes)) == (0, 1)
    assert ask_providers(redrive.id, stepped.probes) == 1
    step(redrive)
    assert items(redrive)[0][0] == expected[0]
    if happened is not False:
        assert items(redrive) == [expected]
        assert redrive.state == RedriveState.FINISHED
    if happened is not None:
        assert RepairAction.objects.get(redrive=redrive).reference == "order 7: see 4711"
    assert letter_of(job).state == state
    counted(redrive)


def test_what_has_no_provider_to_ask_is_left_out(cast: Cast) -> None:
    kill("test_outside", Unanswered("timed out"))
    redrive = started(cast, of_ledger(), answers=PROBE)
    assert step(redrive).planned == 0
    assert items(redrive) == [("skipped", "ambiguous")]
    assert DeadLetter.objects.get().state == "open"


def test_a_provider_that_cannot_be_asked_leaves_it_out(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    kill("test_outside", Unanswered("timed out"))

    def unreachable(_self: Outside, _job: Job) -> ProbeAnswer:
        raise ConnectionRefusedError(str(uuid4()))

    monkeypatch.setattr(Outside, "probe", unreachable)
    redrive = started(cast, of_ledger(), answers=PROBE)
    ask_providers(redrive.id, step(redrive).probes)
    step(redrive)
    assert items(redrive) == [("skipped", "provider_does_not_know")]


def test_what_a_provider_says_is_kept_whatever_characters_it_holds(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the database does not take must not be asked for again and again, and keep every other redrive waiting."""
    kill("test_outside", Unanswered("timed out"))
    monkeypatch.setattr(Outside, "probe", lambda _self, _job: ProbeAnswer(happened=None, evidence="\x00\ud800 4711"))
    redrive = started(cast, of_ledger(), answers=PROBE)
    ask_providers(redrive.id, step(redrive).probes)
    assert items(redrive) == [("skipped", "provider_does_not_know")]
    assert "4711" in RedriveItem.objects.get().detail


def test_what_a_provider_has_said_before_a_pause_is_asked_again_after_it(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C13: meanwhile somebody may have tried it once more, and that may have happened."""
    kill("test_outside", Unanswered("timed out"))
    monkeypatch.setattr(Outside, "probe", lambda _self, _job: ProbeAnswer(happened=False, evidence="not yet"))
    redrive = started(cast, of_ledger(), answers=PROBE)
    ask_providers(redrive.id, step(redrive).probes)
    pause_redrive(redrive_id=redrive.id, by=cast.ada, key="p")
    resume_redrive(redrive_id=redrive.id, by=cast.ada, key="r")
    stepped = step(redrive)
    assert (stepped.planned, len(stepped.probes)) == (0, 1)
