"""The operating commands: same services and rows as the REST API, from a shell."""

from __future__ import annotations

import io
import json
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.core.management import call_command, load_command_class
from django.core.management.base import BaseCommand

from deadletters.models import WorkerNode
from grants.actions import Action
from grants.cli import TOKEN_VARIABLE
from grants.models import AuditEvent
from grants.operators import os_user
from grants.services import create_token
from incidents.models import Incident
from opsconsole.core.database import database_now
from repairs.models import RepairAction
from tests.api.client import Api
from tests.api.situations import retrying, scene, worker_node
from tests.cast import Cast, cast
from tests.factories import dead_letter, failure, record

__all__ = ["cast"]
MISSING = "01970000-0000-7000-8000-000000000000"


class Result:
    """What a command printed and how it ended."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run(*words: str, who: str | None = "ada") -> Result:
    """Run a command as ``manage.py`` would, with the permissions of ``who``."""
    out, err = io.StringIO(), io.StringIO()
    asking = ["--operator", who] if who is not None else []
    status = 0
    try:
        call_command(words[0], *words[1:], *asking, stdout=out, stderr=err)
    except SystemExit as ended:
        status = int(ended.code or 0)
    return Result(status, out.getvalue().strip(), err.getvalue().strip())


def from_shell(*words: str) -> int:
    """Run a command through its own entry point; return its exit status."""
    command: BaseCommand = load_command_class("opsconsole", words[0])
    with pytest.raises(SystemExit) as ended:
        command.run_from_argv(["manage.py", *words])
    return int(ended.value.code or 0)


def test_the_same_rows_are_listed_as_over_rest(cast: Cast) -> None:
    scene(cast.ada)
    worker_node()
    api = Api(cast.ada)
    for words, path in (
        (("incidents", "list", "--state", "open,acknowledged"), "incidents"),
        (("deadletters", "list"), "dead-letters"),
        (("repairs", "list"), "repair-actions"),
        (("nodes",), "worker-nodes"),
    ):
        assert run(*words, "--json").json["results"] == api.rows(path), words
        assert run(*words).out
    listed = run("audit", "list", "--json", "--action", "dead-letters.retry").json["results"]
    assert listed == api.rows("audit", {"action": "dead-letters.retry"})


@pytest.mark.parametrize(("seconds", "told"), [(0.4, "nothing"), (75.0, "99,427 bytes, oldest 75 s")])
def test_what_waits_in_a_journal_is_told_as_on_the_page(cast: Cast, seconds: float, told: str) -> None:
    """A journal keeps what it has recorded for a while: its size alone is nothing to worry about."""
    worker_node()
    WorkerNode.objects.update(journal_bytes=99_427, journal_oldest_seconds=seconds)
    assert told in run("nodes").out


def test_reading_goes_by_the_operators_grants(cast: Cast) -> None:
    """GRA-01, GRA-02: the same doors as everywhere; refusals are audited."""
    made = scene(cast.ada)
    for words in (("incidents", "list"), ("deadletters", "list"), ("repairs", "list")):
        assert len(run(*words, "--json", who="olga").json["results"]) >= 1
        for other in ("bram", "nobody"):
            assert run(*words, "--json", who=other).json["results"] == [], (words, other)
    for words in (
        ("incidents", "show", str(made.incident.id)),
        ("incidents", "show", f"#{made.incident.number}"),
        ("incidents", "acknowledge", str(made.incident.number)),
        ("incidents", "release", str(made.incident.number)),
        ("deadletters", "show", str(made.letter.id)),
        ("deadletters", "retry", str(made.letter.id)),
        ("repairs", "show", str(made.repair_id)),
    ):
        hidden = run(*words, who="bram")
        assert (hidden.status, hidden.out) == (1, "")
        assert "not_found: " in hidden.err
    assert run("audit", "list", who="olga").err.startswith("access_denied: ")
    assert run("nodes", who="nobody").err.startswith("access_denied: ")
    assert run("incidents", "list", "--tenant", "t-b", who="olga").err.startswith("access_denied: ")
    assert AuditEvent.objects.filter(operator_kind="cli", verdict="denied").count() > 5


def test_an_incident_is_taken_and_closed_by_its_number(cast: Cast) -> None:
    """A10, A11."""
    letter = dead_letter()
    number = f"#{letter.incident.number}"
    taken = run("incidents", "acknowledge", number, "--key", "K1", "--json")
    assert taken.json["changed"] is True
    assert run("incidents", "acknowledge", number, "--key", "K1", "--json").json == {
        **taken.json, "idempotent_replay": True,
    }  # fmt: skip
    assert "already" in run("incidents", "acknowledge", number).out
    shown = run("incidents", "show", number)
    assert f"{os_user()}@" in shown.out
    assert run("incidents", "release", number).out == "Nobody has it now."
    assert run("incidents", "release", number).out == "Nobody had it."
    assert letter.incident.title in shown.out
    closed = run("incidents", "resolve", number, "--code", "fixed", "--summary", "It is fixed.", "--unrepaired", "1")
    assert closed.out == "It is resolved."
    assert Incident.objects.get().resolution_summary == "[fixed] It is fixed."
    event = AuditEvent.objects.get(action="operations.incident_resolved")
    assert (event.operator_kind, event.operator_name.endswith(" for ada")) == ("cli", True)


def test_a_page_names_the_team_and_the_runbook_of_the_tasks_policy(cast: Cast, settings: Any) -> None:
    number = f"#{dead_letter().incident.number}"
    told = {"team": "Mail", "runbook": "https://runbooks.example/mail"}
    settings.OPSCONSOLE_TASK_POLICIES = [{"pattern": "shop.*", **told}]
    shown = run("incidents", "show", number, "--json").json
    assert {name: shown[name] for name in told} == told
    assert all(text in run("incidents", "show", number).out for text in told.values())


def test_what_an_operator_typed_is_no_command_to_the_terminal_of_another(cast: Cast) -> None:
    """In a table, in the facts of one thing, in a line, and in a refusal."""
    typed = "\x1b]0;owned\x07\x1b[2J\x9b1mgone\nnext line"
    letter, other = dead_letter(), dead_letter()
    get_user_model().objects.filter(pk=cast.olga.user_id).update(username="ol\x1b[2Jga")
    discarded = run("deadletters", "discard", str(letter.id), "--reason", typed, "--json").json
    said = [
        run("audit", "list").out,
        run("repairs", "show", discarded["repair_id"]).out,
        run("incidents", "acknowledge", str(other.incident.number), who="ol\x1b[2Jga").out,
        run("incidents", "list", "--tenant", typed, who="olga").err,
        run("incidents", "list", who=typed).err,
    ]
    for text in said:
        assert not [character for character in text if character != "\n" and not character.isprintable()], repr(text)
    assert "‹U+001B›[2J" in said[0]
    assert "\nnext line" in said[1]
    assert run("repairs", "show", discarded["repair_id"], "--json").json["reason"] == typed


def test_columns_are_headed_by_what_they_hold(cast: Cast) -> None:
    letter = retrying(cast.ada)
    head, row = run("incidents", "show", str(letter.incident.number)).out.splitlines()[-2:]
    assert (head.split("  ")[0], row.split()[0]) == ("dead letter", str(letter.id))
    for words in (("deadletters", "list"), ("repairs", "list")):
        head, row = run(*words).out.splitlines()
        assert row[head.index("job type") :].startswith(letter.job_type), words


def test_jobs_of_an_incident_are_run_again(cast: Cast) -> None:
    """A12, API-03: all needs their number."""
    ids = [recorded.letter_id for recorded in record(*(failure() for _ in range(3)))]
    number = str(Incident.objects.get().number)
    wrong = run("incidents", "retry", number, "--all", "2")
    assert (wrong.status, wrong.err.split(":")[0]) == (1, "selection_drifted")
    assert run("incidents", "retry", number, "--letter", str(ids[0]), "--json").json["planned"] == 1
    assert run("incidents", "retry", number, "--all", "2").out == "2 planned, 0 refused."
    again = run("incidents", "retry", number, "--letter", str(ids[0]))
    assert "operations_job_overtaken" in again.out


def test_a_job_is_run_again_closed_or_given_up(cast: Cast) -> None:
    """B4, B6, B8, C19."""
    first, second, third = dead_letter(ambiguous=True), dead_letter(), dead_letter()
    refused = run("deadletters", "retry", str(first.id))
    assert (refused.status, refused.err.split(":")[0]) == (1, "provider_outcome_unknown")
    assert "refused, provider_outcome_unknown" in run("deadletters", "show", str(first.id)).out
    planned = run("deadletters", "retry", str(first.id), "--provider-checked", "--reason", "asked them")
    assert planned.out.startswith("Planned as repair ")
    assert run("deadletters", "close-as-done", str(second.id), "--reason", "seen").status == 0
    assert run("deadletters", "discard", str(third.id), "--reason", "not needed", "--json").json["state"] == "discarded"
    assert run("deadletters", "discard", str(third.id), "--reason", " ").err.startswith("reason_invalid: ")
    listed = run("deadletters", "list", "--state", "retrying,already_done,discarded", "--json").json["results"]
    states = {row["id"]: row["state"] for row in listed}
    assert states == {str(first.id): "retrying", str(second.id): "already_done", str(third.id): "discarded"}


def test_a_repair_is_watched_and_withdrawn(cast: Cast) -> None:
    letter = retrying(cast.ada)
    repair = RepairAction.objects.get(letter=letter)
    assert "planned" in run("repairs", "show", str(repair.id)).out
    assert (
        run("repairs", "list", "--state", "planned", "--incident", str(letter.incident.number)).out.count(
            "retry_message"
        )
        == 1
    )
    assert run("repairs", "cancel", str(repair.id), "--json").json["state"] == "open"
    assert run("repairs", "cancel", str(repair.id)).err.startswith("repair_not_cancellable: ")


def test_long_lists_say_how_to_go_on(cast: Cast) -> None:
    record(*(failure() for _ in range(3)))
    first = run("deadletters", "list", "--limit", "2")
    cursor = first.out.rpartition("--cursor ")[2]
    assert len(run("deadletters", "list", "--limit", "2", "--cursor", cursor, "--json").json["results"]) == 1
    assert run("deadletters", "list", "--cursor", "x").err.startswith("invalid_input: ")


def test_a_refusal_in_json_is_the_problem_that_rest_answers(cast: Cast) -> None:
    refused = run("incidents", "show", MISSING, "--json")
    assert (refused.status, refused.out) == (1, "")
    problem = json.loads(refused.err)
    assert (problem["code"], problem["status"]) == ("operations_incident_not_found", 404)
    assert run("incidents", "show", "#999").err.startswith("operations_incident_not_found: ")


def test_where_nobody_is_named_everything_is_refused_and_says_how_to_name_somebody(cast: Cast) -> None:
    """B2: not audited. An empty list would look as if there were nothing."""
    made = scene(cast.ada)
    before = AuditEvent.objects.count()
    for words in (
        ("incidents", "list"),
        ("incidents", "show", str(made.incident.number)),
        ("incidents", "acknowledge", str(made.incident.number)),
        ("incidents", "release", str(made.incident.number)),
        ("incidents", "resolve", str(made.incident.number), "--code", "fixed", "--summary", "It is fixed."),
        ("incidents", "retry", str(made.incident.number), "--all", "1"),
        ("deadletters", "list"),
        ("deadletters", "show", str(made.letter.id)),
        ("deadletters", "retry", str(made.letter.id)),
        ("deadletters", "close-as-done", str(made.letter.id), "--reason", "x"),
        ("deadletters", "discard", str(made.letter.id), "--reason", "x"),
        ("repairs", "list"),
        ("repairs", "show", str(made.repair_id)),
        ("repairs", "cancel", str(made.repair_id)),
        ("nodes",),
        ("audit", "list"),
    ):
        refused = run(*words, who=None)
        assert (refused.status, refused.out) == (1, ""), words
        assert refused.err.startswith("not_authenticated: Nobody is named"), words
        assert "--operator USERNAME" in refused.err
        assert TOKEN_VARIABLE in refused.err
        assert json.loads(run(*words, "--json", who=None).err)["code"] == "not_authenticated", words
    assert AuditEvent.objects.count() == before
    assert run("deadletters", "list", who="no-such").err.startswith("principal_not_found: ")


@pytest.mark.parametrize("named", ["INC-{:04d}", "inc-{}", "#{}", "{}"])
def test_an_incident_is_named_as_people_name_it(named: str, cast: Cast) -> None:
    letter = retrying(cast.ada)
    name = named.format(letter.incident.number)
    assert run("incidents", "show", name, "--json").json["id"] == str(letter.incident_id)
    assert run("incidents", "acknowledge", name).status == 0
    for command in ("deadletters", "repairs"):
        assert len(run(command, "list", "--incident", name, "--json").json["results"]) == 1


def test_a_token_acts_with_its_own_limits(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    letter, other = dead_letter(), dead_letter(tenant="t-b")
    made = create_token(
        by=cast.ada, name="script", actions={Action.INSPECT}, tenant="default",
        expires_at=database_now() + timedelta(days=1), key="K",
    )  # fmt: skip
    monkeypatch.setenv(TOKEN_VARIABLE, made.plain or "")
    assert [row["id"] for row in run("deadletters", "list", "--json", who=None).json["results"]] == [str(letter.id)]
    assert run("deadletters", "show", str(other.id), who=None).status == 1
    assert run("deadletters", "discard", str(letter.id), "--reason", "x", who=None).err.startswith("access_denied: ")
    monkeypatch.setenv(TOKEN_VARIABLE, "ops_nonsense")
    assert run("deadletters", "list", who=None).err.startswith("not_authenticated: ")


@pytest.mark.parametrize(
    "words",
    [
        ("incidents",), ("incidents", "list", "--state", "opne"), ("incidents", "show"), ("incidents", "show", "x"),
        ("incidents", "show", "INC-"), ("incidents", "show", "ticket-5"),
        ("incidents", "retry", "1"), ("incidents", "list", "--limit", "0"),
        ("deadletters", "list", "--seen-after", "x"), ("deadletters", "discard", MISSING),
        ("audit", "list", "--verdict", "maybe"), ("nodes", "--bogus"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_misuse_ends_with_status_2(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    """API-03: what is not understood is never ignored."""
    assert from_shell(*words) == 2
    assert "usage: manage.py" in capsys.readouterr().err


@pytest.mark.django_db
def test_a_refusal_ends_with_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert from_shell("nodes") == 1
    assert capsys.readouterr().err.startswith("not_authenticated: Nobody is named")
