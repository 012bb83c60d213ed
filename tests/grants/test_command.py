"""``manage.py grants``."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.core.management import CommandError, call_command

from grants.access import can
from grants.actions import Action
from grants.models import ApiToken, AuditEvent, ScopeUserGrant
from grants.operators import Operator
from grants.resources import Resource
from tests.grants.tools import give


def run(*arguments: str) -> str:
    answer = io.StringIO()
    call_command("grants", *arguments, stdout=answer)
    return answer.getvalue()


def ask(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json"))


@pytest.mark.django_db
def test_bootstrap_makes_the_first_operator_and_prints_a_password_once() -> None:
    assert "Password, shown once: " in run("bootstrap", "ada", "--create")
    assert ask("bootstrap", "ada", "--create")["given"] == []
    assert "every permission on t-a; 19 are new" in run("bootstrap", "ada", "--tenant", "t-a")


def test_a_grant_is_given_listed_and_taken_back(ada: Any, olga: Any) -> None:
    as_ada = ("--operator", "ada")
    given = ask("grant", "inspect", "--user", "olga", "--tenant", "t-a", "--reason", "r", "--expires", "8h", *as_ada)
    assert can(Operator.from_user(olga), Action.INSPECT, Resource(tenant="t-a"))
    ends = ScopeUserGrant.objects.get(user=olga).expires_at
    assert timedelta(hours=7, minutes=58) < ends - datetime.now(UTC) <= timedelta(hours=8)
    assert [one["id"] for one in ask("list", "--user", "olga", *as_ada)] == [given["grant_id"]]
    assert "t-a / * / * / *" in run("list", "--user", "olga", *as_ada)
    run("revoke", given["grant_id"], "--reason", "r", *as_ada)
    assert "No permissions." in run("list", "--user", "olga", *as_ada)
    event = AuditEvent.objects.filter(action="grants.granted").get()
    assert (event.operator_kind, event.operator_name.endswith(" for ada")) == ("cli", True)


def test_a_script_that_runs_twice_with_a_key_grants_once(ada: Any, on_call: Group) -> None:
    """A9."""
    arguments = ["grant", "inspect", "--group", "on-call", "--tenant", "*", "--reason", "r", "--key", "k"]
    arguments += ["--expires", (datetime.now(UTC) + timedelta(days=1)).isoformat(), "--operator", "ada"]
    assert not ask(*arguments)["is_replay"]
    assert ask(*arguments)["is_replay"]


def test_a_time_without_a_zone_is_utc(ada: Any, olga: Any) -> None:
    arguments = ["grant", "inspect", "--user", "olga", "--tenant", "*", "--reason", "r", "--operator", "ada"]
    assert ask(*arguments, "--expires", "2999-01-01")["expires_at"] == "2999-01-01T00:00:00+00:00"
    with pytest.raises(CommandError, match="neither a length"):
        run(*arguments, "--expires", "soon")


def test_a_shell_without_a_name_may_do_nothing_but_bootstrap(ada: Any, olga: Any) -> None:
    with pytest.raises(CommandError, match=r"\(access_denied\)"):
        run("grant", "inspect", "--user", "olga", "--tenant", "*", "--reason", "r", "--expires", "1d")
    assert "No permissions." in run("list")
    with pytest.raises(CommandError, match=r"\(access_denied\)"):
        run("explain", "olga", "inspect", "--tenant", "t-a")
    assert AuditEvent.objects.filter(verdict="denied", operator_kind="cli").count() == 2


def test_explain_answers_about_oneself_and_to_who_manages_grants_there(ada: Any, olga: Any, vera: Any) -> None:
    """C15."""
    give(olga, Action.INSPECT, "t-a")
    assert run("explain", "olga", "inspect", "--tenant", "t-a", "--operator", "olga").startswith("Yes, by user-grant:")
    answer = ask("explain", "olga", "inspect", "--tenant", "t-b", "--operator", "ada")
    assert not answer["allowed"]
    assert "tenant is t-a, not t-b" in answer["reasons"][0]
    assert run("explain", "olga", "export", "--tenant", "t-a", "--operator", "olga").startswith("No.\n")
    with pytest.raises(CommandError, match=r"\(access_denied\)"):
        run("explain", "olga", "inspect", "--tenant", "t-a", "--operator", "vera")


def test_a_manager_of_one_tenant_is_not_told_of_permissions_elsewhere(olga: Any, vera: Any) -> None:
    """C15."""
    give(olga, Action.GRANTS_MANAGE, "t-a")
    give(vera, Action.INSPECT, "t-secret", "patient", "4711")
    answer = run("explain", "vera", "inspect", "--tenant", "t-a", "--operator", "olga")
    assert answer == "No.\n  No permission that you manage allows it.\n"


@pytest.mark.parametrize(
    "command",
    [
        ("explain", "{}", "inspect", "--tenant", "t-b"),
        ("list", "--user", "{}"),
        ("list", "--group", "{}"),
        ("grant", "inspect", "--user", "{}", "--tenant", "t-b", "--reason", "r", "--expires", "8h"),
        ("grant", "inspect", "--group", "{}", "--tenant", "t-b", "--reason", "r", "--expires", "8h"),
    ],
    ids=" ".join,
)
def test_who_manages_nothing_there_learns_nothing_of_who_exists(
    command: tuple[str, ...], olga: Any, vera: Any, on_call: Group
) -> None:
    """C15: the refusal is the same, and comes before anybody is looked for."""
    is_group = "--group" in command
    answers = set()
    for name in ("on-call" if is_group else "vera", "ghost"):
        with pytest.raises(CommandError) as refused:
            run(*(part.format(name) for part in command), "--operator", "olga")
        answers.add(str(refused.value))
    said = "You do not have permission to do this. It needs the permission grants.manage. (access_denied)"
    assert answers == {said}
    assert AuditEvent.objects.filter(verdict="denied", action="grants.manage").exists()


def test_a_token_is_made_used_listed_and_revoked(ada: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    making = ("token", "create", "ci", "--action", "inspect", "--action", "grants.manage", "--operator", "ada")
    made = ask(*making, "--expires", "90d")
    assert len(ask("list", "--token", made["plain"])) == len(Action)
    monkeypatch.setenv("OPSCONSOLE_TOKEN", made["plain"])
    (listed,) = ask("token", "list")
    assert (listed["public_id"], listed["name"], listed["tenant"]) == (made["public_id"], "ci", "*")
    assert "shown once" in run(*making, "--expires", "90d")
    assert "is revoked" in run("token", "revoke", made["public_id"])
    with pytest.raises(CommandError, match=r"\(not_authenticated\)"):
        run("list")
    assert ApiToken.objects.count() == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("token", "create", "--operator", "ada"), "needs a name"),
        (("token", "create", "ci", "--operator", "ada"), "needs --expires"),
        (("token", "revoke", "x", "--operator", "ada"), "is no token id"),
        (("list", "--operator", "nobody"), r"\(principal_not_found\)"),
        (("list", "--group", "nobody", "--operator", "ada"), r"\(principal_not_found\)"),
        (("explain", "ada", "fly", "--tenant", "t"), "invalid choice"),
    ],
)
def test_a_mistake_is_answered_with_what_is_wrong(ada: Any, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        run(*arguments)
