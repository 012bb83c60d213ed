"""Why an operator may or may not do a thing (C15)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.utils import timezone

from grants import selectors
from grants.access import find_capability
from grants.actions import Action
from grants.errors import AccessDenied, PrincipalNotFound
from grants.models import ApiToken, AuditEvent
from grants.operators import SYSTEM, Operator
from grants.resources import ANY, Resource
from grants.selectors import (
    EXPLAINED_GRANTS,
    explain,
    explain_to,
    grant_visible_to,
    grants_named,
    grants_of_user,
    grants_visible_to,
    tenants_named,
)
from tests.grants.tools import give, make_user

AsOperator = Callable[[Any], Operator]
RETRY = Action.DEAD_LETTERS_RETRY
LETTER = Resource(tenant="t-a", actor_type="invoice", actor_id="7")


def test_yes_names_the_capability_and_each_compared_field(olga: Any, on_call: Group, operator: AsOperator) -> None:
    """C15."""
    olga.groups.add(on_call)
    give(on_call, RETRY, "t-a", "invoice")
    explanation = explain(operator(olga), RETRY, LETTER)
    assert explanation.allowed
    assert explanation.capability == find_capability(operator(olga), RETRY, LETTER)
    assert [(one.field, one.wanted, one.granted) for one in explanation.compared] == [
        ("action", RETRY.value, RETRY.value),
        ("tenant", "t-a", "t-a"),
        ("actor_type", "invoice", "invoice"),
        ("actor_id", "7", "*"),
        ("command_id", "", "*"),
    ]
    assert all(one.matches for one in explanation.compared)
    assert explanation.reasons == ()
    assert not AuditEvent.objects.exists()


def test_no_says_that_no_permission_names_the_action(olga: Any, operator: AsOperator) -> None:
    """C15."""
    give(olga, Action.INSPECT)
    explanation = explain(operator(olga), RETRY, LETTER)
    assert (explanation.allowed, explanation.capability, explanation.compared) == (False, None, ())
    assert explanation.reasons == ("None of olga's 1 permissions names this action.",)


def test_no_says_how_each_permission_misses_nearest_first(olga: Any, operator: AsOperator, yesterday: datetime) -> None:
    """C15."""
    far = give(olga, RETRY, "t-b", "customer")
    near = give(olga, RETRY, "t-a", "invoice", "8")
    ended = give(olga, RETRY, expires_at=yesterday)
    reasons = explain(operator(olga), RETRY, LETTER).reasons
    assert set(reasons[:2]) == {
        f"{near}: actor_id is 8, not 7.",
        f"{ended}: it ended at {yesterday:%Y-%m-%d %H:%M} UTC.",
    }
    assert reasons[2] == f"{far}: tenant is t-b, not t-a; actor_type is customer, not invoice."
    assert (
        f"{near}: actor_type is invoice, not none; actor_id is 8, not none."
        in explain(operator(olga), RETRY, Resource(tenant="t-a")).reasons
    )


def test_no_names_a_bounded_number_of_permissions(olga: Any, operator: AsOperator) -> None:
    for number in range(EXPLAINED_GRANTS + 3):
        give(olga, RETRY, f"t-{number}")
    reasons = explain(operator(olga), RETRY, LETTER).reasons
    assert len(reasons) == EXPLAINED_GRANTS + 1
    assert reasons[-1] == "3 more permissions for this action don't cover it either."


@pytest.mark.parametrize("lost", ["is_active", "is_staff"])
def test_no_says_that_the_user_is_no_operator_any_more(ada: Any, operator: AsOperator, lost: str) -> None:
    acting = operator(ada)
    setattr(ada, lost, False)
    ada.save()
    assert explain(acting, RETRY, LETTER).reasons == ("Only an active staff user is an operator.",)


def test_no_says_what_a_token_lacks(ada: Any, tomorrow: datetime) -> None:
    token, _ = ApiToken.objects.issue(user=ada, name="ci", actions=[Action.INSPECT], tenant="t-b", expires_at=tomorrow)
    acting = Operator.from_token(token)
    ApiToken.objects.update(expiry=timezone.now() - timedelta(seconds=1))
    assert explain(acting, RETRY, LETTER).reasons == (
        "The token was revoked or has ended.",
        "The token does not name this action.",
        "The token is for tenant t-b only.",
    )


def test_a_shell_is_told_to_name_a_user_and_the_system_may_do_all(db: None) -> None:
    (reason,) = explain(Operator.cli(), RETRY, LETTER).reasons
    assert "--operator" in reason
    explanation = explain(SYSTEM, RETRY, LETTER)
    assert (explanation.allowed, explanation.compared) == (True, ())


def test_a_users_permissions_are_their_own_and_their_groups_with_ended_ones_marked(
    olga: Any, vera: Any, on_call: Group, yesterday: datetime
) -> None:
    olga.groups.add(on_call)
    own = give(olga, RETRY, "t-a", expires_at=yesterday)
    shared = give(on_call, Action.INSPECT)
    give(vera, RETRY)
    held = grants_of_user(olga)
    assert [(one.id, one.holder, one.is_group, one.is_live) for one in held] == [
        (str(own), "olga", False, False),
        (str(shared), "on-call", True, True),
    ]


def test_who_manages_one_tenant_sees_the_grants_inside_it_and_their_own(
    olga: Any, vera: Any, on_call: Group, operator: AsOperator
) -> None:
    """C15: also who else holds what is only for those who may manage it."""
    mine = give(olga, Action.GRANTS_MANAGE, "t-a")
    inside = give(vera, RETRY, "t-a", "invoice", "7", "c-1")
    give(vera, RETRY, "t-b")
    give(vera, RETRY)
    shared = give(on_call, RETRY, "t-a")
    assert {one.id for one in grants_visible_to(operator(olga))} == {str(mine), str(inside), str(shared)}
    assert [one.id for one in grants_visible_to(operator(olga), user=vera)] == [str(inside)]
    assert [one.id for one in grants_visible_to(operator(olga), group=on_call)] == [str(shared)]
    assert len(grants_visible_to(operator(vera))) == 3
    assert grants_visible_to(Operator.cli()) == []


def test_a_groups_permissions_tell_nobody_who_else_is_in_it(
    olga: Any, vera: Any, on_call: Group, operator: AsOperator
) -> None:
    """C15: they are one's own through the group; of another member one sees what one manages."""
    shared = give(on_call, RETRY, "t-b")
    give(olga, Action.GRANTS_MANAGE, "t-a")
    for member in (olga, vera):
        member.groups.add(on_call)
    asking = operator(olga)
    assert str(shared) in {one.id for one in grants_visible_to(asking)}
    assert str(shared) in {one.id for one in grants_named(asking, username="olga")}
    assert grants_visible_to(asking, user=vera) == grants_named(asking, username="vera") == []
    explanation = explain_to(asking, RETRY, LETTER, username="vera")
    assert explanation.reasons == ("No permission that you manage allows it.",)


def test_another_users_decision_is_explained_by_the_permissions_that_one_manages(
    olga: Any, vera: Any, operator: AsOperator
) -> None:
    """C15: neither those elsewhere are told nor how many there are."""
    give(olga, Action.GRANTS_MANAGE, "t-a")
    for number in range(EXPLAINED_GRANTS + 3):
        give(vera, RETRY, f"t-secret-{number}", "invoice", "7")
    asking = operator(olga)
    assert explain_to(asking, RETRY, LETTER, username="vera").reasons == ("No permission that you manage allows it.",)
    inside = give(vera, RETRY, "t-a", "customer")
    assert explain_to(asking, RETRY, LETTER, username="vera").reasons == (
        f"{inside}: actor_type is customer, not invoice.",
    )


def test_who_manages_everything_is_told_everything(ada: Any, olga: Any, operator: AsOperator) -> None:
    """C15."""
    give(olga, Action.INSPECT, "t-b")
    explained = explain_to(operator(ada), RETRY, LETTER, username="olga")
    assert explained == explain(operator(olga), RETRY, LETTER)
    assert explained.reasons == ("None of olga's 1 permissions names this action.",)


def test_ones_own_decision_is_explained_by_name_too(olga: Any, operator: AsOperator) -> None:
    """C15: whole, and without asking for any permission."""
    give(olga, RETRY, "t-b")
    (reason,) = explain_to(operator(olga), RETRY, Resource(tenant="t-a"), username="olga").reasons
    assert "tenant is t-b, not t-a" in reason
    assert not AuditEvent.objects.exists()


def test_who_may_not_know_is_refused_before_anybody_is_looked_for(olga: Any, vera: Any, operator: AsOperator) -> None:
    give(olga, Action.GRANTS_MANAGE, "t-a")
    for name in ("vera", "ghost"):
        with pytest.raises(AccessDenied):
            explain_to(operator(olga), RETRY, Resource(tenant="t-b"), username=name)
        with pytest.raises(AccessDenied):
            grants_named(operator(vera), username=name if name == "ghost" else "olga")
    with pytest.raises(PrincipalNotFound):
        explain_to(operator(olga), RETRY, LETTER, username="ghost")


def test_a_decision_about_a_user_who_is_no_operator_is_no(ada: Any, operator: AsOperator) -> None:
    give(make_user("guest", staff=False), RETRY)
    explanation = explain_to(operator(ada), RETRY, LETTER, username="guest")
    assert (explanation.allowed, explanation.reasons) == (False, ("Only an active staff user is an operator.",))


def test_one_permission_is_found_by_its_id_however_many_there_are(
    olga: Any, vera: Any, on_call: Group, operator: AsOperator, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(olga, Action.GRANTS_MANAGE, "t-a")
    inside, shared, foreign = give(vera, RETRY, "t-a"), give(on_call, RETRY, "t-a"), give(vera, RETRY, "t-b")
    monkeypatch.setattr(selectors, "LISTED_GRANTS", 1)
    asking = operator(olga)
    for row, holder in ((inside, "vera"), (shared, "on-call")):
        found = grant_visible_to(asking, str(row))
        assert found is not None
        assert (found.id, found.holder) == (str(row), holder)
    assert grant_visible_to(operator(vera), str(foreign)) is not None
    for unseen in (str(foreign), "user-grant:0", "user-grant:x", "x:1", "", "user-grant:" + "9" * 30):
        assert grant_visible_to(asking, unseen) is None


def test_the_tenants_of_a_filter_are_those_that_permissions_name(
    ada: Any, olga: Any, vera: Any, on_call: Group, operator: AsOperator
) -> None:
    """GRA-02: a permission for one actor in every tenant names none, and none is told."""
    assert tenants_named(operator(ada), RETRY, 10) is None
    assert tenants_named(operator(vera), RETRY, 10) == []
    give(vera, RETRY, "t-b")
    give(vera, RETRY, "t-a")
    assert tenants_named(operator(vera), RETRY, 10) == ["t-a", "t-b"]
    assert tenants_named(operator(vera), RETRY, 1) == ["t-a"]
    olga.groups.add(on_call)
    give(olga, RETRY, "!first", "invoice")
    give(on_call, RETRY, ANY, "invoice", "7")
    assert tenants_named(operator(olga), RETRY, 10) == [ANY, "!first"]
    assert tenants_named(operator(olga), RETRY, 1) == [ANY]
