"""Giving and taking back permissions: nobody gives what they don't hold (C15)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.db import IntegrityError, transaction
from guardian.shortcuts import assign_perm

from grants import services
from grants.access import can, holds
from grants.actions import Action
from grants.errors import (
    AccessDenied,
    GrantEndInvalid,
    GrantNotFound,
    GrantToOneself,
    IdempotencyKeyReused,
    PrincipalNotFound,
    ReasonInvalid,
    ScopeInvalid,
)
from grants.leaf import verify_leaf
from grants.models import SCOPE_FIELDS, AuditEvent, CapabilityScope, ScopeGroupGrant, ScopeUserGrant
from grants.operators import SYSTEM, Operator
from grants.resources import ANY, Resource
from opsconsole.core.errors import OpsError
from tests.grants.tools import at_once, give, make_user

AsOperator = Callable[[Any], Operator]
RETRY = Action.DEAD_LETTERS_RETRY


@pytest.fixture
def granting(tomorrow: datetime) -> dict[str, Any]:
    """A complete request; a test changes what it is about."""
    return {
        "action": RETRY,
        "tenant": "t-a",
        "actor_type": "invoice",
        "reason": "on call this week",
        "expires_at": tomorrow,
        "key": "k-1",
    }


def refuse(refusal: type[OpsError], **request: Any) -> None:
    before = ScopeUserGrant.objects.count(), ScopeGroupGrant.objects.count()
    with pytest.raises(refusal):
        services.grant(**request)
    assert before == (ScopeUserGrant.objects.count(), ScopeGroupGrant.objects.count())


def test_a_grant_given_acts_at_once_and_is_audited(
    ada: Any, olga: Any, operator: AsOperator, granting: dict[str, Any]
) -> None:
    """C15."""
    receipt = services.grant(by=operator(ada), user=olga, **granting)
    row = ScopeUserGrant.objects.get(user=olga)
    assert (receipt.grant_id, receipt.is_replay) == (f"user-grant:{row.pk}", False)
    assert can(operator(olga), RETRY, Resource(tenant="t-a", actor_type="invoice", actor_id="7"))
    assert not can(operator(olga), RETRY, Resource(tenant="t-b", actor_type="invoice"))
    assert (row.granted_by, row.granted_by_name, row.reason) == (ada, "ada", "on call this week")
    assert row.expires_at == granting["expires_at"]
    event = AuditEvent.objects.get()
    assert (event.action, event.operator_name, event.reason) == ("grants.granted", "ada", "on call this week")
    assert (event.tenant, event.actor_type, event.target_type, event.target_id) == (
        "t-a",
        "invoice",
        "user",
        str(olga.pk),
    )
    assert event.capability.startswith("user-grant:")
    assert "grants.manage" in event.capability
    outcome: Any = event.outcome_value
    assert (outcome["grant"], outcome["holder"], outcome["replaced"]) == (receipt.grant_id, "olga", None)
    assert verify_leaf(event)


def test_a_group_gets_a_grant_and_its_members_have_it(
    ada: Any, olga: Any, on_call: Group, operator: AsOperator, granting: dict[str, Any]
) -> None:
    olga.groups.add(on_call)
    receipt = services.grant(by=operator(ada), group=on_call, **granting)
    assert receipt.grant_id.startswith("group-grant:")
    assert holds(operator(olga), RETRY)
    assert AuditEvent.objects.get().target_type == "group"


def test_the_same_request_is_answered_from_its_receipt(
    ada: Any, olga: Any, operator: AsOperator, granting: dict[str, Any]
) -> None:
    """A9."""
    first = services.grant(by=operator(ada), user=olga, **granting)
    again = services.grant(by=operator(ada), user=olga, **granting)
    assert (again.grant_id, again.event_id, again.is_replay) == (first.grant_id, first.event_id, True)
    assert ScopeUserGrant.objects.filter(user=olga).count() == 1


def test_a_key_with_another_request_is_reused(
    ada: Any, olga: Any, vera: Any, operator: AsOperator, granting: dict[str, Any]
) -> None:
    """A9, C4."""
    services.grant(by=operator(ada), user=olga, **granting)
    refuse(IdempotencyKeyReused, by=operator(ada), user=vera, **granting)
    refuse(IdempotencyKeyReused, by=operator(ada), user=olga, **granting | {"tenant": "t-b"})


def test_a_receipt_is_not_shown_to_who_may_not_grant_any_more(
    ada: Any, olga: Any, operator: AsOperator, granting: dict[str, Any]
) -> None:
    """C4: authorisation is checked before a replay is read."""
    services.grant(by=operator(ada), user=olga, **granting)
    ScopeUserGrant.objects.filter(user=ada, action=Action.GRANTS_MANAGE).delete()
    refuse(AccessDenied, by=operator(ada), user=olga, **granting)


def test_granting_again_moves_the_end_and_the_trail_keeps_the_old_one(
    ada: Any, olga: Any, operator: AsOperator, granting: dict[str, Any]
) -> None:
    services.grant(by=operator(ada), user=olga, **granting)
    later = granting["expires_at"] + timedelta(days=7)
    services.grant(by=operator(ada), user=olga, **granting | {"expires_at": later, "key": "k-2"})
    assert ScopeUserGrant.objects.get(user=olga).expires_at == later
    outcome: Any = AuditEvent.objects.get(idempotency_key="k-2").outcome_value
    assert outcome["replaced"]["expires_at"] == granting["expires_at"].isoformat()


def test_without_grants_manage_nobody_grants(
    olga: Any, vera: Any, operator: AsOperator, granting: dict[str, Any]
) -> None:
    """C15: no grant at all."""
    refuse(AccessDenied, by=operator(olga), user=vera, **granting)
    event = AuditEvent.objects.get()
    assert (event.verdict, event.action, event.target_id) == ("denied", "grants.manage", str(vera.pk))


@pytest.mark.parametrize(
    ("manage", "held"),
    [
        (("t-b",), (ANY,)),
        ((ANY,), ("t-b",)),
        ((ANY,), None),
        (("t-a", "customer"), (ANY,)),
        ((ANY,), ("t-a", "invoice", "7")),
        ((ANY,), ("t-a", "invoice", "*", "c-1")),
    ],
)
def test_nobody_gives_more_than_they_hold(
    olga: Any,
    vera: Any,
    operator: AsOperator,
    granting: dict[str, Any],
    manage: tuple[str, ...],
    held: tuple[str, ...] | None,
) -> None:
    """C15: neither in another scope, nor in a wider one, nor an action that they lack."""
    give(olga, Action.GRANTS_MANAGE, *manage)
    if held is not None:
        give(olga, RETRY, *held)
    refuse(AccessDenied, by=operator(olga), user=vera, **granting)
    assert AuditEvent.objects.get().verdict == "denied"


def test_who_holds_exactly_the_scope_may_give_it(
    olga: Any, vera: Any, operator: AsOperator, granting: dict[str, Any]
) -> None:
    """C15: the right grant."""
    give(olga, Action.GRANTS_MANAGE, "t-a")
    give(olga, RETRY, "t-a", "invoice")
    services.grant(by=operator(olga), user=vera, **granting)
    refuse(AccessDenied, by=operator(olga), user=vera, **granting | {"actor_type": ANY, "key": "k-2"})
    refuse(AccessDenied, by=operator(olga), user=vera, **granting | {"tenant": ANY, "key": "k-3"})


def test_nobody_grants_to_themselves(ada: Any, on_call: Group, operator: AsOperator, granting: dict[str, Any]) -> None:
    """C15: nor to a group they are in; nor through a shell that acts for them."""
    refuse(GrantToOneself, by=operator(ada), user=ada, **granting)
    refuse(GrantToOneself, by=Operator.cli(ada), user=ada, **granting)
    ada.groups.add(on_call)
    refuse(GrantToOneself, by=operator(ada), group=on_call, **granting)


def test_a_grant_ends_in_the_future_and_not_after_its_granter(
    olga: Any, vera: Any, operator: AsOperator, granting: dict[str, Any], tomorrow: datetime, yesterday: datetime
) -> None:
    """C15: grants without end are the weakness."""
    give(olga, Action.GRANTS_MANAGE)
    give(olga, RETRY, expires_at=tomorrow)
    by = operator(olga)
    refuse(GrantEndInvalid, by=by, user=vera, **granting | {"expires_at": yesterday})
    refuse(GrantEndInvalid, by=by, user=vera, **granting | {"expires_at": tomorrow.replace(tzinfo=None)})
    refuse(GrantEndInvalid, by=by, user=vera, **granting | {"expires_at": tomorrow + timedelta(seconds=1)})
    services.grant(by=by, user=vera, **granting | {"expires_at": tomorrow})


@pytest.mark.parametrize("reason", ["", "  ", "x" * 501])
def test_a_grant_needs_a_reason(
    ada: Any, olga: Any, operator: AsOperator, granting: dict[str, Any], reason: str
) -> None:
    """C15."""
    refuse(ReasonInvalid, by=operator(ada), user=olga, **granting | {"reason": reason})


@pytest.mark.parametrize("value", ["", " t-a", "x" * 256, "t\x00", "t\na"])
def test_a_scope_is_made_of_values_that_can_be_read(
    ada: Any, olga: Any, operator: AsOperator, granting: dict[str, Any], value: str
) -> None:
    refuse(ScopeInvalid, by=operator(ada), user=olga, **granting | {"tenant": value})


def test_who_gets_it_must_be_one_and_be_there(
    ada: Any, olga: Any, on_call: Group, operator: AsOperator, granting: dict[str, Any]
) -> None:
    with pytest.raises(TypeError):
        services.grant(by=operator(ada), user=olga, group=on_call, **granting)
    with pytest.raises(TypeError):
        services.grant(by=operator(ada), **granting)
    gone = make_user("gone")
    type(gone).objects.filter(pk=gone.pk).delete()
    refuse(PrincipalNotFound, by=operator(ada), user=gone, **granting)


def test_the_system_may_grant_and_is_named(olga: Any, granting: dict[str, Any]) -> None:
    services.grant(by=SYSTEM, user=olga, **granting)
    assert ScopeUserGrant.objects.get(user=olga).granted_by_name == "system"
    assert AuditEvent.objects.get().capability == "system"


@pytest.mark.django_db(transaction=True)
def test_of_ten_threads_with_one_key_one_grants_and_nine_replay(operator: AsOperator, granting: dict[str, Any]) -> None:
    """A9: they queue up on the user who gets it."""
    ada, olga = make_user("ada"), make_user("olga")
    give(ada, Action.GRANTS_MANAGE)
    give(ada, RETRY)
    by = operator(ada)
    results: list[Any] = at_once(10, lambda _: services.grant(by=by, user=olga, **granting))
    assert sorted(result.is_replay for result in results) == [False] + [True] * 9
    assert ScopeUserGrant.objects.filter(user=olga).count() == 1
    assert AuditEvent.objects.count() == 1


def test_a_grant_taken_back_is_gone_at_once_and_audited(
    ada: Any, olga: Any, operator: AsOperator, tomorrow: datetime
) -> None:
    """C15."""
    row = give(olga, RETRY, "t-a", expires_at=tomorrow)
    acting = operator(olga)
    receipt = services.revoke(by=operator(ada), grant_id=str(row), reason="left the team", key="k-1")
    assert not can(acting, RETRY, Resource(tenant="t-a"))
    assert (receipt.grant_id, receipt.action, receipt.expires_at) == (str(row), RETRY.value, tomorrow.isoformat())
    event = AuditEvent.objects.get()
    assert (event.action, event.target_id, event.reason) == ("grants.revoked", str(row), "left the team")
    again = services.revoke(by=operator(ada), grant_id=str(row), reason="left the team", key="k-1")
    assert (again.is_replay, again.event_id) == (True, event.pk)
    with pytest.raises(GrantNotFound):
        services.revoke(by=operator(ada), grant_id=str(row), reason="left the team", key="k-2")


def test_a_replayed_revocation_is_authorised_first(ada: Any, olga: Any, operator: AsOperator) -> None:
    """C4."""
    row = give(olga, RETRY, "t-a")
    services.revoke(by=operator(ada), grant_id=str(row), reason="r", key="k-1")
    ScopeUserGrant.objects.filter(user=ada).delete()
    with pytest.raises(AccessDenied):
        services.revoke(by=operator(ada), grant_id=str(row), reason="r", key="k-1")


def test_a_group_grant_is_taken_back_by_its_own_id(ada: Any, on_call: Group, operator: AsOperator) -> None:
    row = give(on_call, RETRY)
    services.revoke(by=operator(ada), grant_id=f"group-grant:{row.pk}", reason="r", key="k-1")
    assert not ScopeGroupGrant.objects.exists()


def test_a_grant_that_one_can_not_manage_is_not_found_and_the_attempt_is_audited(
    olga: Any, vera: Any, operator: AsOperator
) -> None:
    """C15: by opaque id, what is not theirs to see looks like what is not there."""
    row = give(vera, RETRY, "t-a")
    give(olga, Action.GRANTS_MANAGE, "t-b")
    with pytest.raises(GrantNotFound):
        services.revoke(by=operator(olga), grant_id=str(row), reason="r", key="k-1")
    assert AuditEvent.objects.get().verdict == "denied"
    assert ScopeUserGrant.objects.filter(pk=row.pk).exists()


def test_who_manages_grants_but_lacks_the_action_may_not_take_it_back(
    olga: Any, vera: Any, operator: AsOperator
) -> None:
    row = give(vera, RETRY, "t-a")
    give(olga, Action.GRANTS_MANAGE, "t-a")
    with pytest.raises(AccessDenied):
        services.revoke(by=operator(olga), grant_id=str(row), reason="r", key="k-1")
    assert ScopeUserGrant.objects.filter(pk=row.pk).exists()


@pytest.mark.parametrize(
    "grant_id", ["", "5", "user-grant:", "user-grant:x", "user-grant:²", "scope:1", "user-grant:" + "9" * 30]
)
def test_an_id_that_names_no_grant_is_not_found(ada: Any, operator: AsOperator, grant_id: str) -> None:
    with pytest.raises(GrantNotFound):
        services.revoke(by=operator(ada), grant_id=grant_id, reason="r", key="k-1")


@pytest.mark.django_db
@pytest.mark.parametrize("holder", ["user", "group"])
def test_the_repeated_columns_always_equal_the_scope(olga: Any, on_call: Group, holder: str) -> None:
    row = give(olga if holder == "user" else on_call, RETRY, "t-a", "invoice", "7", "c-1")
    row.tenant, row.action = ANY, Action.EXPORT.value
    row.save()
    stored = type(row).objects.get(pk=row.pk)
    assert [getattr(stored, field) for field in SCOPE_FIELDS] == ["t-a", "invoice", "7", "c-1"]
    assert stored.action == RETRY.value


def test_guardians_own_shortcuts_can_not_make_a_grant_without_reason(olga: Any) -> None:
    """C15: they would leave out who gave it, why and until when."""
    scope = CapabilityScope.objects.create(tenant=ANY, actor_type=ANY, actor_id=ANY, command_id=ANY)
    scopes: Any = CapabilityScope.objects.all()
    with pytest.raises(IntegrityError), transaction.atomic():
        assign_perm(RETRY.codename, olga, scope)
    with pytest.raises(IntegrityError), transaction.atomic():
        assign_perm(RETRY.codename, olga, scopes)
    assert not ScopeUserGrant.objects.exists()


@pytest.mark.parametrize("field", SCOPE_FIELDS)
def test_an_empty_scope_column_is_refused_by_the_database(db: None, field: str) -> None:
    """ "" is how a resource says that it has none."""
    with pytest.raises(IntegrityError), transaction.atomic():
        CapabilityScope.objects.create(**dict.fromkeys(SCOPE_FIELDS, ANY) | {field: ""})
