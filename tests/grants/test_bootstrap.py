"""The first operator."""

from __future__ import annotations

import getpass
import socket
from datetime import datetime
from typing import Any

import pytest
from django.contrib.auth import authenticate, get_user_model

from grants import audit, operators, services
from grants.access import can, held_actions
from grants.actions import Action
from grants.errors import NotAnOperator, PrincipalNotFound, ScopeInvalid
from grants.models import AuditEvent, ScopeUserGrant
from grants.operators import Operator
from grants.resources import ANY, Resource
from tests.grants.tools import give, make_user


def test_a_bootstrapped_user_may_do_everything_without_end(olga: Any) -> None:
    receipt = services.bootstrap(username="olga")
    assert set(receipt.given) == {action.value for action in Action}
    acting = Operator.from_user(olga)
    assert held_actions(acting) == frozenset(Action)
    assert can(acting, Action.AUDIT_READ, Resource(tenant=ANY))
    assert not ScopeUserGrant.objects.filter(expires_at__isnull=False).exists()


def test_a_bootstrap_is_audited_as_the_shell_it_ran_in(olga: Any) -> None:
    services.bootstrap(username="olga", tenant="t-a")
    event = AuditEvent.objects.get()
    assert (event.operator_kind, event.operator_id) == ("cli", f"{operators.os_user()}@{socket.gethostname()}")
    assert (event.action, event.tenant, event.target_id) == ("grants.bootstrapped", "t-a", str(olga.pk))
    assert event.capability.startswith("bootstrap")


def test_a_bootstrap_on_one_tenant_gives_nothing_elsewhere(olga: Any) -> None:
    services.bootstrap(username="olga", tenant="t-a")
    acting = Operator.from_user(olga)
    assert can(acting, Action.INSPECT, Resource(tenant="t-a"))
    assert not can(acting, Action.INSPECT, Resource(tenant="t-b"))
    with pytest.raises(ScopeInvalid):
        services.bootstrap(username="olga", tenant="")


def test_a_second_bootstrap_changes_and_audits_nothing(olga: Any) -> None:
    services.bootstrap(username="olga")
    before = list(ScopeUserGrant.objects.order_by("id").values())
    assert services.bootstrap(username="olga").given == ()
    assert list(ScopeUserGrant.objects.order_by("id").values()) == before
    assert AuditEvent.objects.count() == 1


def test_what_had_an_end_has_none_afterwards(olga: Any, yesterday: datetime, tomorrow: datetime) -> None:
    give(olga, Action.INSPECT, expires_at=yesterday)
    give(olga, Action.EXPORT, expires_at=tomorrow)
    assert len(services.bootstrap(username="olga").given) == len(Action)
    assert not ScopeUserGrant.objects.filter(expires_at__isnull=False).exists()


@pytest.mark.django_db
def test_a_missing_user_is_made_on_request_only() -> None:
    with pytest.raises(PrincipalNotFound):
        services.bootstrap(username="ada")
    receipt = services.bootstrap(username="ada", create=True)
    assert receipt.created_user
    assert receipt.password is not None
    made: Any = authenticate(username="ada", password=receipt.password)
    assert (made.is_staff, made.is_superuser) == (True, False)
    again = services.bootstrap(username="ada", create=True)
    assert (again.created_user, again.password) == (False, None)


@pytest.mark.django_db
def test_a_user_is_made_with_the_password_that_was_given() -> None:
    assert services.bootstrap(username="ada", create=True, password="given").password is None
    assert authenticate(username="ada", password="given") is not None


@pytest.mark.django_db
@pytest.mark.parametrize("more", [{"staff": False}, {"is_active": False}])
def test_a_user_who_can_not_sign_in_to_the_console_is_refused(more: dict[str, Any]) -> None:
    user = make_user("olga", **more)
    with pytest.raises(NotAnOperator):
        services.bootstrap(username="olga")
    assert not ScopeUserGrant.objects.filter(user=user).exists()


@pytest.mark.django_db
def test_nothing_remains_of_a_bootstrap_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(audit, "record", fail)
    with pytest.raises(RuntimeError):
        services.bootstrap(username="ada", create=True)
    assert not get_user_model().objects.exists()


@pytest.mark.django_db
def test_a_process_without_a_login_name_is_named_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr(getpass, "getuser", unknown)
    assert Operator.cli().id.startswith("uid")
