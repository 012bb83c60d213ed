"""``manage.py grants`` for a second operator: a user who is made with the first permission that they get."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.core.management import CommandError, call_command

from grants.models import AuditEvent, ScopeUserGrant
from tests.cast import Cast, cast

__all__ = ["cast"]
GIVING = ("grant", "inspect", "--user", "bob", "--tenant", "default", "--reason", "on call", "--expires", "8h")


def run(*words: str) -> str:
    out = io.StringIO()
    call_command("grants", *words, stdout=out)
    return out.getvalue()


def test_a_user_is_made_with_the_first_permission_and_given_the_next(cast: Cast) -> None:
    said = run(*GIVING, "--create", "--operator", "ada")
    password = said.rpartition("Password, shown once: ")[2].strip()
    bob = get_user_model().objects.get(username="bob")
    assert bob.check_password(password)
    assert (bob.is_staff, bob.is_superuser, bob.is_active) == (True, False, True)
    again = run("grant", "dead-letters.retry", *GIVING[2:], "--create", "--operator", "ada")
    assert "Password" not in again
    held = ScopeUserGrant.objects.filter(user=bob).values_list("action", "tenant")
    assert set(held) == {("inspect", "default"), ("dead-letters.retry", "default")}
    assert AuditEvent.objects.filter(action="grants.granted", target_id=str(bob.pk)).count() == 2


def test_the_password_is_in_the_json_once(cast: Cast) -> None:
    def ask() -> Any:
        return json.loads(run(*GIVING, "--create", "--json", "--operator", "ada"))["password"]

    assert len(ask()) > 20
    assert ask() is None


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--create", "--operator", "olga"), "access_denied"),  # who manages nothing makes nobody
        (("--operator", "ada"), "principal_not_found"),
        (("--create", "--operator", "ada", "--expires", "2001-01-01"), "grant_end_invalid"),
    ],
)
def test_where_the_permission_is_refused_nobody_is_made(words: tuple[str, ...], code: str, cast: Cast) -> None:
    with pytest.raises(CommandError, match=rf"\({code}\)"):
        run(*GIVING, *words)
    assert not get_user_model().objects.filter(username="bob").exists()


def test_who_is_not_named_is_told_how_to_name_somebody(cast: Cast) -> None:
    assert "--operator USERNAME" in run("list")
    with pytest.raises(CommandError, match=r"\(access_denied\) Nobody is named: say who acts with --operator USERNAME"):
        run(*GIVING)
    assert "--operator USERNAME" not in run("list", "--operator", "nobody")
