"""Redrives from a shell: the same services and answers as over REST, and watching one until it has ended."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import pytest
from django.core.management import CommandError

from grants.actions import Action
from grants.models import AuditEvent
from opsconsole.management import redrives as watching
from repairs.models import Redrive, RedriveItem
from tests.api.client import Api
from tests.api.situations import planned_redrive, worker_node
from tests.cast import Cast, cast, give
from tests.clock import time_of
from tests.commands.test_operating import Result, run
from tests.factories import dead_letter

__all__ = ["cast"]
FILTER = ("--tenant", "default", "--source", "tests")


@pytest.fixture(autouse=True)
def _mail_worker(db: None) -> None:
    worker_node(tasks=json.dumps({"shop.send_mail": json.dumps({"positional": ["to", "order"], "required": 1})}))


def redrive_of(result: Result) -> Redrive:
    assert result.status == 0, result.err
    return Redrive.objects.get(id=result.json["id"])


def set_standing(redrive_id: UUID, **fields: Any) -> None:
    Redrive.objects.filter(id=redrive_id).update(**fields)


def finished(succeeded: int, failed: int = 0, skipped: int = 0) -> dict[str, Any]:
    return {
        "state": "finished", "ended_at": "2020-01-01T00:00:00Z", "pause_code": "", "waiting_count": 0,
        "outstanding_count": 0, "succeeded_count": succeeded, "failed_count": failed, "skipped_count": skipped,
    }  # fmt: skip


def test_a_dry_run_tells_every_class_and_starts_nothing(cast: Cast) -> None:
    """C14: the set is frozen and judged, and waits for somebody to start it."""
    dead_letter()
    doubtful = dead_letter(ambiguous=True)
    told = run("redrive", *FILTER, "--dry-run")
    assert told.status == 0, told.err
    redrive = Redrive.objects.get()
    assert redrive.state == "ready"
    assert any(line.split() == ["safe", "1", "runs"] for line in told.out.splitlines())
    ambiguous = next(line for line in told.out.splitlines() if line.startswith("ambiguous"))
    assert ambiguous.split()[1] == "1"
    assert "did_not_happen" in ambiguous
    assert told.out.endswith(f"Nothing is sent before `redrives start {redrive.id}`.")
    listed = run("redrives", "items", str(redrive.id), "--class", "ambiguous", "--json").json["results"]
    assert [item["dead_letter"] for item in listed] == [str(doubtful.id)]
    assert not AuditEvent.objects.filter(action="redrive.started").exists()


def test_what_is_typed_is_what_is_planned(cast: Cast) -> None:
    letter = dead_letter()
    made = run(
        "redrive", "--letter", str(letter.id), "--dry-run", "--canary", "7", "--rate", "20", "--max-outstanding", "100",
        "--stop-percent", "20", "--to-queue", "slow", "--cut-off", "2020-01-01", "--rename",
        "shop.send_mail=shop.post", "--set", 'order={"id": [1.5, null]}', "--rename-argument", "to=receiver",
        "--remove", "lang", "--reason", "moved", "--json",
    )  # fmt: skip
    redrive = redrive_of(made)
    pace = (redrive.canary_size, redrive.rate_per_second, redrive.max_outstanding, redrive.stop_percent)
    assert pace == (7, 20, 100, 20)
    assert (redrive.target_queue, redrive.reason) == ("slow", "moved")
    assert redrive.cut_off is not None
    assert redrive.cut_off.year == 2020
    assert json.loads(redrive.changes) == {
        "remove": ["lang"], "rename": {"to": "receiver"}, "set": ["order"], "tasks": {"shop.send_mail": "shop.post"},
    }  # fmt: skip
    assert made.json["pace"]["stop_percent"] == 20
    other = dead_letter()
    never = run("redrive", "--letter", str(other.id), "--dry-run", "--stop-percent", "never", "--json")
    assert redrive_of(never).stop_percent is None


def test_before_and_after_are_shown_on_samples(cast: Cast) -> None:
    letter = dead_letter()
    told = run("redrive", "--letter", str(letter.id), "--dry-run", "--set", "order=8", "--rename", "shop.send_mail=b")
    before, after = (line for line in told.out.splitlines() if line.startswith(("  - ", "  + ")))
    assert before.startswith("  - shop.send_mail ")
    assert "7" in before
    assert after.startswith("  + b ")
    assert "8" in after


def test_a_filter_needs_the_number_that_is_meant_and_is_refused_if_it_has_changed(cast: Cast) -> None:
    """API-03: nothing is started of a set that nobody has seen."""
    for _ in range(2):
        dead_letter()
    dead_letter(task="shop.other")
    with pytest.raises(CommandError, match="--expected-count"):
        run("redrive", *FILTER)
    drifted = run("redrive", *FILTER, "--task", "shop.send_mail", "--expected-count", "3")
    assert (drifted.status, drifted.err.split(":")[0]) == (1, "selection_drifted")
    assert not Redrive.objects.exists()
    made = run("redrive", *FILTER, "--error", "shop.errors.MailhubDown", "--expected-count", "3", "--json")
    redrive = redrive_of(made)
    assert (redrive.state, redrive.total_count) == ("canary", 3)


def test_a_filter_beside_another_choice_is_refused(cast: Cast) -> None:
    """API-03: what would be ignored is refused."""
    letter = dead_letter()
    for words in (("--incident", str(letter.incident.number)), ("--letter", str(letter.id))):
        with pytest.raises(CommandError, match="without a filter"):
            run("redrive", *words, "--queue", "slow", "--expected-count", "1")
    both = run("redrive", "--incident", str(letter.incident.number), "--letter", str(letter.id))
    assert both.err.startswith("selection_invalid: ")
    assert run("redrive").err.startswith("selection_invalid: ")


def test_an_incident_is_started_with_answers(cast: Cast) -> None:
    """C13, C19: what is stated of a class, and where it was seen."""
    letter = dead_letter(ambiguous=True)
    number = f"#{letter.incident.number}"
    without = run("redrive", "--incident", number, "--answer", "ambiguous=did_not_happen")
    assert without.err.startswith("redrive_answer_invalid: ")
    assert not Redrive.objects.exists()
    made = run("redrive", "--incident", number, "--answer", "ambiguous=did_not_happen:TICKET-5: seen", "--json")
    redrive = redrive_of(made)
    assert json.loads(redrive.answers) == {"ambiguous": ["did_not_happen", "TICKET-5: seen"]}
    assert made.json["classes"][0]["answer"] == {"answer": "did_not_happen", "reference": "TICKET-5: seen"}


def test_the_same_key_is_the_same_redrive(cast: Cast) -> None:
    """C4: a script that runs twice."""
    letter = dead_letter()
    first, second = (run("redrive", "--letter", str(letter.id), "--key", "K", "--json") for _ in range(2))
    assert redrive_of(first) == redrive_of(second)
    assert AuditEvent.objects.filter(action="redrive.started").count() == 1


def test_one_that_needs_a_second_person_is_planned_and_not_started(cast: Cast, settings: Any) -> None:
    settings.OPSCONSOLE_REDRIVE_APPROVAL_ABOVE = 0
    letter = dead_letter()
    refused = run("redrive", "--letter", str(letter.id))
    redrive = Redrive.objects.get()
    assert (refused.status, refused.err.split(":")[0]) == (1, "redrive_not_approved")
    assert str(redrive.id) in refused.out
    assert "a second person has to approve it" in refused.out
    assert run("redrives", "approve", str(redrive.id)).err.startswith("redrive_own_approval: ")
    give(cast.olga, Action.REDRIVE_RUN, tenant="default")
    # Whoever has the shell may name anybody: that is no second person.
    assert run("redrives", "approve", str(redrive.id), who="olga").err.startswith("redrive_own_approval: ")
    assert Api(cast.olga).post(f"redrives/{redrive.id}/approve").status_code == 200
    assert run("redrives", "start", str(redrive.id), "--json").json["state"] == "canary"
    assert "by olga" in run("redrives", "show", str(redrive.id)).out


def test_one_is_paused_let_go_on_at_another_pace_and_cancelled(cast: Cast) -> None:
    redrive_id = planned_redrive(cast.ada, dead_letter())
    name = str(redrive_id)
    assert run("redrives", "pause", name).err.startswith("redrive_standing: ")
    assert run("redrives", "start", name).out.startswith("Started. ")
    assert run("redrives", "pause", name, "--reason", "lunch").out.startswith("Paused; ")
    assert "operator: lunch" in run("redrives", "show", name).out
    assert run("redrives", "resume", name, "--rate", "3").out.startswith("It goes on. ")
    redrive = Redrive.objects.get()
    assert (redrive.rate_per_second, redrive.max_outstanding, redrive.canary_size) == (3, 500, 5)
    assert run("redrives", "cancel", name, "--key", "C", "--json").json["state"] == "cancelled"
    assert run("redrives", "cancel", name, "--key", "C", "--json").json["idempotent_replay"] is True
    assert run("redrives", "cancel", name).err.startswith("redrive_standing: ")


def test_the_failed_of_one_are_planned_again(cast: Cast) -> None:
    redrive_id = planned_redrive(cast.ada, dead_letter())
    RedriveItem.objects.update(state="failed")
    set_standing(redrive_id, **finished(0, 1))
    wrong = run("redrives", "retry-failed", str(redrive_id), "--expected-count", "2")
    assert wrong.err.startswith("selection_drifted: ")
    made = run("redrives", "retry-failed", str(redrive_id), "--expected-count", "1", "--rate", "1", "--json")
    again = Redrive.objects.get(id=made.json["redrive_id"])
    assert (again.retry_of_id, again.rate_per_second, again.state) == (redrive_id, 1, "ready")


def test_the_same_redrives_are_listed_as_over_rest(cast: Cast) -> None:
    """GRA-01, GRA-02: the same rows through the same doors."""
    redrive_id = planned_redrive(cast.ada, dead_letter())
    api = Api(cast.ada)
    assert run("redrives", "list", "--json").json["results"] == api.rows("redrives")
    path = f"redrives/{redrive_id}"
    assert run("redrives", "items", str(redrive_id), "--json").json["results"] == api.rows(f"{path}/items")
    shown = run("redrives", "show", str(redrive_id), "--json").json
    assert shown == {**api.get(path).json(), "links": {"items": ""}}
    assert str(redrive_id) in run("redrives", "list", "--state", "unfinished").out
    assert "safe" in run("redrives", "items", str(redrive_id)).out
    for other in ("bram", "nobody"):
        assert run("redrives", "list", "--json", who=other).json["results"] == []
        for words in (
            ("show",),
            ("items",),
            ("watch",),
            ("start",),
            ("pause",),
            ("resume",),
            ("cancel",),
            ("approve",),
        ):
            hidden = run("redrives", *words, str(redrive_id), who=other)
            assert (hidden.status, hidden.err.split(":")[0]) == (1, "redrive_not_found"), words
    assert run("redrives", "start", str(redrive_id), who="vera").err.startswith("access_denied: ")


def test_changes_need_their_own_capability(cast: Cast) -> None:
    letter = dead_letter()
    give(cast.olga, Action.REDRIVE_RUN, tenant="default")
    refused = run("redrive", "--letter", str(letter.id), "--dry-run", "--set", "order=8", who="olga")
    assert refused.err.startswith("access_denied: ")
    assert not Redrive.objects.exists()
    assert run("redrive", "--letter", str(letter.id), "--dry-run", who="olga").status == 0


# -- watching ----------------------------------------------------------------------------------------------------------


class Stages:
    """Takes a redrive to its next stage whenever a watcher waits."""

    def __init__(self, redrive_id: UUID, *stages: dict[str, Any] | BaseException) -> None:
        self.redrive_id, self.stages = redrive_id, list(stages)

    def sleep(self, _seconds: float) -> None:
        stage = self.stages.pop(0)
        if isinstance(stage, BaseException):
            raise stage
        set_standing(self.redrive_id, **stage)


def watched(monkeypatch: pytest.MonkeyPatch, redrive_id: UUID, *stages: Any, words: tuple[str, ...] = ()) -> Result:
    time_of(monkeypatch, watching, sleep=Stages(redrive_id, *stages).sleep)
    return run("redrives", "watch", str(redrive_id), *words)


@pytest.fixture
def two(cast: Cast) -> UUID:
    return planned_redrive(cast.ada, dead_letter(), dead_letter())


def test_watching_prints_one_line_for_each_change_and_ends_well_if_all_have_succeeded(
    two: UUID, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = {"state": "running", "waiting_count": 0, "outstanding_count": 1, "succeeded_count": 1}
    ended = watched(monkeypatch, two, running, {}, {}, finished(2))
    lines = ended.out.splitlines()
    assert [line.split(" ", 1)[1] for line in lines[:3]] == [
        "ready: 0 % of 2; 2 waiting",
        "running: 50 % of 2; 1 succeeded, 1 outstanding",
        "finished: 100 % of 2; 2 succeeded",
    ]
    assert (ended.status, lines[3:]) == (0, ["All 2 have succeeded."])


@pytest.mark.parametrize(
    ("stages", "sentence"),
    [
        ([finished(1, failed=1)], "1 of 2 have not succeeded; "),
        ([finished(1, skipped=1)], "1 of 2 have not succeeded; "),
        ([{"state": "paused", "pause_code": "stop_ratio", "pause_text": "too many"}], "It waits for somebody"),
        ([{"state": "cancelled", "ended_at": "2020-01-01T00:00:00Z"}], "It was cancelled; 0 of 2"),
    ],
)
def test_any_other_ending_has_status_1(
    two: UUID, monkeypatch: pytest.MonkeyPatch, stages: list[dict[str, Any]], sentence: str
) -> None:
    ended = watched(monkeypatch, two, *stages)
    assert ended.status == 1
    assert ended.out.splitlines()[-1].startswith(sentence)


def test_what_has_been_sent_is_waited_for_though_it_is_paused(two: UUID, monkeypatch: pytest.MonkeyPatch) -> None:
    paused = {"state": "paused", "pause_code": "operator", "waiting_count": 1, "outstanding_count": 1}
    ended = watched(monkeypatch, two, paused, {"outstanding_count": 0, "succeeded_count": 1})
    assert [line.split()[1] for line in ended.out.splitlines()[1:3]] == ["paused", "paused"]
    assert ended.status == 1


def test_a_paused_one_of_which_nothing_is_left_is_about_to_end(two: UUID, monkeypatch: pytest.MonkeyPatch) -> None:
    paused = {"state": "paused", "pause_code": "operator", "waiting_count": 0, "succeeded_count": 2}
    ended = watched(monkeypatch, two, paused, finished(2))
    assert (ended.status, ended.out.splitlines()[-1]) == (0, "All 2 have succeeded.")


def test_interrupting_leaves_it_running_and_says_so(two: UUID, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = watched(monkeypatch, two, {"state": "running"}, KeyboardInterrupt())
    assert ended.status == 130
    assert f"the redrive goes on. Look again with `redrives watch {two}`" in ended.err
    assert Redrive.objects.get(id=two).state == "running"


def test_watching_in_json_gives_a_document_a_line(two: UUID, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = watched(monkeypatch, two, finished(2), words=("--json",))
    documents = [json.loads(line) for line in ended.out.splitlines()]
    assert [(each["state"], each["counts"]["succeeded"]) for each in documents] == [("ready", 0), ("finished", 2)]
    assert documents[1]["progress"] == {"done": 2, "percent": 100, "seconds_left": None}


def test_a_start_that_is_watched_ends_as_its_redrive_does(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    letter = dead_letter()

    def end(_seconds: float) -> None:
        set_standing(Redrive.objects.get().id, **finished(1))

    time_of(monkeypatch, watching, sleep=end)
    ended = run("redrive", "--letter", str(letter.id), "--watch")
    assert (ended.status, ended.out.splitlines()[-1]) == (0, "All 1 have succeeded.")
