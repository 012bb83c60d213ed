"""``authorise``: one action on one resource."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from django.contrib.auth.models import Group, Permission
from django.db import connection
from django.test.utils import CaptureQueriesContext

from grants.access import SYSTEM_CAPABILITY, authorise, can, held_actions, holds
from grants.actions import Action
from grants.errors import AccessDenied, NotAnOperator
from grants.models import ScopeUserGrant
from grants.operators import SYSTEM, Operator, OperatorKind
from grants.resources import Resource
from tests.grants.tools import give, make_user

RETRY = Action.DEAD_LETTERS_RETRY
LETTER = Resource(tenant="t-a", actor_type="invoice", actor_id="7")

AsOperator = Callable[[Any], Operator]


def test_nobody_who_is_not_signed_in_is_an_operator() -> None:
    """B2: anonymous is 401, and never reaches a grant."""
    with pytest.raises(NotAnOperator) as refusal:
        Operator.from_user(None)
    assert refusal.value.status == 401


def test_an_operator_without_a_grant_is_denied(olga: Any, operator: AsOperator) -> None:
    """B2."""
    with pytest.raises(AccessDenied) as refusal:
        authorise(operator(olga), RETRY, LETTER)
    assert (refusal.value.status, refusal.value.code, refusal.value.fields) == (403, "access_denied", {})
    assert refusal.value.detail.endswith(f"It needs the permission {RETRY}."), "one line names what is missing"
    assert LETTER.tenant not in refusal.value.detail


@pytest.mark.parametrize(
    "scope",
    [
        ("t-b",),
        ("t-a", "customer"),
        ("t-a", "invoice", "8"),
        ("*", "*", "8"),
        ("t-a", "invoice", "7", "c-1"),
    ],
)
def test_a_grant_for_another_scope_denies(olga: Any, operator: AsOperator, scope: tuple[str, ...]) -> None:
    """B1: each field that is set must equal the resource's own."""
    give(olga, RETRY, *scope)
    assert not can(operator(olga), RETRY, LETTER)


def test_a_grant_for_another_action_denies(olga: Any, operator: AsOperator) -> None:
    """B1."""
    give(olga, Action.INSPECT)
    assert not can(operator(olga), RETRY, LETTER)


@pytest.mark.parametrize("scope", [(), ("t-a",), ("*", "invoice"), ("t-a", "*", "7"), ("t-a", "invoice", "7")])
def test_the_right_grant_allows_and_is_named(olga: Any, operator: AsOperator, scope: tuple[str, ...]) -> None:
    """B1: an omitted field matches anything."""
    grant = give(olga, RETRY, *scope)
    capability = authorise(operator(olga), RETRY, LETTER)
    assert capability.id == f"user-grant:{grant.pk}"
    assert capability.text == (
        f"user-grant:{grant.pk}: dead-letters.retry on tenant={grant.tenant} actor_type={grant.actor_type}"
        f" actor_id={grant.actor_id} command_id=*"
    )


@pytest.mark.parametrize("scope", [("t-a", "invoice"), ("t-a", "*", "7"), ("t-a", "*", "*", "c-1")])
def test_an_actor_scoped_grant_never_covers_a_tenant_wide_read(
    olga: Any, operator: AsOperator, scope: tuple[str, ...]
) -> None:
    """B1."""
    give(olga, Action.AUDIT_READ, *scope)
    assert not can(operator(olga), Action.AUDIT_READ, Resource(tenant="t-a"))


def test_a_request_for_every_tenant_needs_a_capability_for_every_tenant(olga: Any, operator: AsOperator) -> None:
    """B2."""
    give(olga, Action.AUDIT_READ, "t-a")
    assert not can(operator(olga), Action.AUDIT_READ, Resource(tenant="*"))
    give(olga, Action.AUDIT_READ)
    assert can(operator(olga), Action.AUDIT_READ, Resource(tenant="*"))


def test_a_command_narrows_a_grant_to_one_receipt(olga: Any, operator: AsOperator) -> None:
    """B10."""
    give(olga, Action.RECEIPTS_READ, "t-a", command_id="c-1")
    assert can(operator(olga), Action.RECEIPTS_READ, Resource(tenant="t-a", command_id="c-1"))
    assert not can(operator(olga), Action.RECEIPTS_READ, Resource(tenant="t-a", command_id="c-2"))


def test_the_first_matching_grant_is_named_and_own_ones_come_first(
    olga: Any, on_call: Group, operator: AsOperator
) -> None:
    """B1: the first matching capability is the one recorded, each time the same."""
    olga.groups.add(on_call)
    shared = give(on_call, RETRY)
    assert authorise(operator(olga), RETRY, LETTER).text.startswith(f"group-grant:{shared.pk} of group on-call: ")
    first = give(olga, RETRY, "t-a", "invoice")
    give(olga, RETRY)
    assert authorise(operator(olga), RETRY, LETTER).id == f"user-grant:{first.pk}"


def test_leaving_a_group_takes_its_grants_away_at_once(olga: Any, on_call: Group, operator: AsOperator) -> None:
    give(on_call, RETRY)
    olga.groups.add(on_call)
    acting = operator(olga)
    assert can(acting, RETRY, LETTER)
    olga.groups.remove(on_call)
    assert not can(acting, RETRY, LETTER)
    assert not holds(acting, RETRY)


def test_an_expired_grant_is_absent_and_one_that_ends_later_is_not(
    olga: Any, vera: Any, operator: AsOperator, yesterday: datetime, tomorrow: datetime
) -> None:
    """C15: by the database's clock."""
    give(olga, RETRY, expires_at=yesterday)
    give(vera, RETRY, expires_at=tomorrow)
    assert not can(operator(olga), RETRY, LETTER)
    assert not holds(operator(olga), RETRY)
    assert can(operator(vera), RETRY, LETTER)


def test_a_grant_ends_at_its_very_second(olga: Any, operator: AsOperator) -> None:
    """A time without a fraction is stored shorter on SQLite, where times are compared as text."""
    grant = give(olga, RETRY)
    with connection.cursor() as cursor:
        cursor.execute("SELECT CURRENT_TIMESTAMP")
        now = cursor.fetchone()[0]
    if isinstance(now, str):
        now = datetime.fromisoformat(f"{now}+00:00")
    ScopeUserGrant.objects.filter(pk=grant.pk).update(expires_at=now.replace(microsecond=0))
    assert not can(operator(olga), RETRY, LETTER)


@pytest.mark.parametrize("lost", ["is_active", "is_staff"])
def test_whoever_is_no_longer_active_staff_is_denied_in_the_middle_of_their_work(
    ada: Any, operator: AsOperator, lost: str
) -> None:
    acting = operator(ada)
    assert can(acting, RETRY, LETTER)
    setattr(ada, lost, False)
    ada.save()
    assert not can(acting, RETRY, LETTER)
    assert held_actions(acting) == frozenset()
    with pytest.raises(NotAnOperator):
        operator(ada)


def test_a_superuser_has_no_bypass(db: None, operator: AsOperator) -> None:
    """The design: an audit row always names a capability."""
    assert not can(operator(make_user("root", is_superuser=True)), RETRY, LETTER)


def test_djangos_own_permission_of_the_same_name_allows_nothing(
    vera: Any, on_call: Group, operator: AsOperator
) -> None:
    """GRA-01: a model-level permission is no grant."""
    permission = Permission.objects.get(content_type__app_label="ops_grants", codename=RETRY.codename)
    on_call.permissions.add(permission)
    vera.groups.add(on_call)
    vera.user_permissions.add(permission)
    assert not can(operator(vera), RETRY, LETTER)
    assert not holds(operator(vera), RETRY)


def test_the_system_may_do_everything_by_a_capability_of_its_own() -> None:
    assert authorise(SYSTEM, RETRY, LETTER) == SYSTEM_CAPABILITY
    assert held_actions(SYSTEM) == frozenset(Action)


def test_a_shell_without_a_user_may_do_nothing(ada: Any) -> None:
    assert not can(Operator.cli(), Action.INSPECT, LETTER)
    assert held_actions(Operator.cli()) == frozenset()
    assert can(Operator.cli(ada), Action.INSPECT, LETTER)


@pytest.mark.parametrize("value", ["*\x00", "\ud800", "'; DROP TABLE x --", "%s", "%(user)s"])
def test_a_hostile_value_matches_only_grants_for_any(olga: Any, operator: AsOperator, value: str) -> None:
    give(olga, RETRY, "t-a")
    resource = Resource(tenant="t-a", actor_type=value, actor_id=value)
    # What no database can store is refused outright; the rest is a value like any other.
    assert can(operator(olga), RETRY, resource) is ("\x00" not in value and "\ud800" not in value)
    assert not can(operator(olga), RETRY, Resource(tenant=value))


def test_a_hand_made_token_operator_without_limits_may_do_nothing(ada: Any) -> None:
    forged = Operator(kind=OperatorKind.TOKEN, id="00000000-0000-0000-0000-000000000000", name="?", user_id=ada.pk)
    assert not can(forged, RETRY, LETTER)


def test_one_query_decides_however_many_grants_there_are(olga: Any, on_call: Group, operator: AsOperator) -> None:
    olga.groups.add(on_call)
    for number in range(20):
        give(olga, RETRY, f"t-{number}")
        give(on_call, RETRY, f"t-{number}", "invoice")
    acting = operator(olga)
    with CaptureQueriesContext(connection) as queries:
        authorise(acting, RETRY, Resource(tenant="t-19", actor_type="invoice"))
    assert len(queries) == 1
    with CaptureQueriesContext(connection) as queries:
        assert held_actions(acting) == {RETRY}
    assert len(queries) == 1
