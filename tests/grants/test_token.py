"""API tokens: part of their owner's grants, for a while."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.apps import apps
from django.conf import settings
from django.db import IntegrityError, OperationalError, connection, transaction
from django.db.models import QuerySet
from django.test import RequestFactory
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from knox.settings import knox_settings
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

from grants import services
from grants.access import authorise, can, held_actions
from grants.actions import Action
from grants.authentication import TokenAuthentication, operator_of
from grants.errors import AccessDenied, NotAnOperator, NotAuthenticated, TokenInvalid, TokenNotFound
from grants.models import ApiToken, AuditEvent
from grants.operators import Operator, OperatorKind
from grants.resources import ANY, Resource
from tests.grants.tools import give

AsOperator = Callable[[Any], Operator]
RETRY = Action.DEAD_LETTERS_RETRY
LETTER = Resource(tenant="t-a")


@pytest.fixture
def making(tomorrow: datetime) -> dict[str, Any]:
    """A complete request for a token."""
    return {"name": "ci", "actions": {RETRY}, "tenant": "t-a", "expires_at": tomorrow, "key": "k-1"}


def send(header: str | None) -> Request:
    headers: Any = {} if header is None else {"Authorization": header}
    return Request(RequestFactory().get("/", headers=headers), authenticators=[TokenAuthentication()])


def bearer(plain: str | None) -> Operator:
    request = send(f"Bearer {plain}")
    request.user  # noqa: B018 - authenticates
    return operator_of(request)


def test_a_token_acts_with_its_part_of_its_owners_grants(
    ada: Any, operator: AsOperator, making: dict[str, Any]
) -> None:
    made = services.create_token(by=operator(ada), **making)
    acting = bearer(made.plain)
    assert (acting.kind, acting.id, acting.name) == (OperatorKind.TOKEN, made.public_id, "ci (ada)")
    assert f"by token:{made.public_id}: dead-letters.retry" in authorise(acting, RETRY, LETTER).text
    assert not can(acting, RETRY, Resource(tenant="t-b"))
    assert not can(acting, RETRY, Resource(tenant=ANY))
    assert not can(acting, Action.INSPECT, LETTER)
    assert held_actions(acting) == {RETRY}


def test_a_token_for_every_tenant_has_those_of_its_owner(
    olga: Any, operator: AsOperator, making: dict[str, Any]
) -> None:
    give(olga, RETRY, "t-a")
    acting = bearer(services.create_token(by=operator(olga), **making | {"tenant": ANY}).plain)
    assert can(acting, RETRY, LETTER)
    assert not can(acting, RETRY, Resource(tenant="t-b"))


def test_only_the_hash_of_a_token_is_kept(ada: Any, operator: AsOperator, making: dict[str, Any]) -> None:
    """The design: a dump of the database holds no token."""
    made = services.create_token(by=operator(ada), **making)
    assert made.plain is not None
    assert made.plain.startswith("ops_")
    secret = made.plain[20:]
    stored = [str(value) for row in ApiToken.objects.values() for value in row.values()]
    stored += [str(value) for row in AuditEvent.objects.values() for value in row.values()]
    assert not [value for value in stored if secret in value]


def test_making_a_token_is_audited_and_answered_once_with_the_token(
    ada: Any, operator: AsOperator, making: dict[str, Any]
) -> None:
    """A9."""
    made = services.create_token(by=operator(ada), **making)
    again = services.create_token(by=operator(ada), **making)
    assert (again.is_replay, again.plain, again.public_id) == (True, None, made.public_id)
    assert ApiToken.objects.count() == 1
    event = AuditEvent.objects.get()
    assert (event.action, event.capability) == ("tokens.created", f"own token of user {ada.pk}")
    assert event.outcome_value == {
        "token": made.public_id,
        "name": "ci",
        "owner": "ada",
        "expires_at": making["expires_at"].isoformat(),
        "actions": [RETRY.value],
        "tenant": "t-a",
    }


@pytest.mark.parametrize(
    "wrong", [{"name": " "}, {"name": "x" * 201}, {"actions": set()}, {"expires_at": timezone.now() - timedelta(1)}]
)
def test_a_token_has_a_name_an_action_and_an_end(
    ada: Any, operator: AsOperator, making: dict[str, Any], wrong: dict[str, Any]
) -> None:
    with pytest.raises(TokenInvalid):
        services.create_token(by=operator(ada), **making | wrong)
    assert not ApiToken.objects.exists()


def test_a_token_without_an_end_is_refused_by_the_database(ada: Any) -> None:
    endless: dict[str, Any] = {"digest": "d", "user": ada, "name": "n", "actions": [], "tenant": ANY, "expiry": None}
    with pytest.raises(IntegrityError), transaction.atomic():
        ApiToken.objects.create(**endless)


def test_nobody_puts_an_action_into_a_token_that_they_lack(
    olga: Any, operator: AsOperator, making: dict[str, Any]
) -> None:
    """C15."""
    give(olga, Action.INSPECT)
    with pytest.raises(AccessDenied):
        services.create_token(by=operator(olga), **making | {"actions": {Action.INSPECT, RETRY}})
    assert not ApiToken.objects.exists()
    assert AuditEvent.objects.get().verdict == "denied"


def test_a_token_makes_no_token(ada: Any, operator: AsOperator, making: dict[str, Any]) -> None:
    acting = bearer(services.create_token(by=operator(ada), **making).plain)
    with pytest.raises(TokenInvalid):
        services.create_token(by=acting, **making | {"key": "k-2"})


def test_a_token_may_not_give_what_only_its_owner_holds(
    ada: Any, olga: Any, operator: AsOperator, making: dict[str, Any], tomorrow: datetime
) -> None:
    """C15."""
    making |= {"actions": {Action.GRANTS_MANAGE, Action.INSPECT}}
    acting = bearer(services.create_token(by=operator(ada), **making).plain)
    giving: dict[str, Any] = {"by": acting, "user": olga, "reason": "r", "expires_at": tomorrow}
    services.grant(**giving, action=Action.INSPECT, tenant="t-a", key="k-2")
    for action, tenant in ((RETRY, "t-a"), (Action.INSPECT, "t-b"), (Action.INSPECT, ANY)):
        with pytest.raises(AccessDenied):
            services.grant(**giving, action=action, tenant=tenant, key=f"k-{action}-{tenant}")


def deactivate(token: ApiToken) -> None:
    type(token.user).objects.filter(pk=token.user_id).update(is_active=False)


def take_staff(token: ApiToken) -> None:
    type(token.user).objects.filter(pk=token.user_id).update(is_staff=False)


def expire(token: ApiToken) -> None:
    ApiToken.objects.filter(pk=token.pk).update(expiry=timezone.now() - timedelta(seconds=1))


def revoke(token: ApiToken) -> None:
    services.revoke_token(by=Operator.from_token(token), public_id=token.public_id, key="k-9")


@pytest.mark.parametrize("end", [deactivate, take_staff, expire, revoke])
def test_a_token_is_dead_at_the_next_request_and_at_the_next_step(
    ada: Any, operator: AsOperator, making: dict[str, Any], end: Callable[[ApiToken], None]
) -> None:
    """The design: it dies with its owner, its end, or its revocation."""
    plain = services.create_token(by=operator(ada), **making).plain
    acting = bearer(plain)
    assert can(acting, RETRY, LETTER)
    end(ApiToken.objects.get())
    assert not can(acting, RETRY, LETTER)
    assert not AuditEvent.objects.visible_to(acting, RETRY).exists()
    with pytest.raises(AuthenticationFailed):
        bearer(plain)


def test_a_grant_that_its_owner_loses_is_lost_to_the_token(
    olga: Any, operator: AsOperator, making: dict[str, Any]
) -> None:
    row = give(olga, RETRY)
    acting = bearer(services.create_token(by=operator(olga), **making).plain)
    row.delete()
    assert not can(acting, RETRY, LETTER)


def test_revoking_is_for_the_owner_and_for_who_manages_grants_there(
    ada: Any, olga: Any, vera: Any, operator: AsOperator, making: dict[str, Any]
) -> None:
    give(olga, RETRY)
    made = services.create_token(by=operator(olga), **making)
    token = ApiToken.objects.get()
    give(vera, Action.GRANTS_MANAGE, "t-b")
    with pytest.raises(AccessDenied):
        services.revoke_token(by=operator(vera), public_id=token.public_id, key="k-1")
    assert ApiToken.objects.exists()
    receipt = services.revoke_token(by=operator(ada), public_id=token.public_id, key="k-2")
    assert (receipt.public_id, receipt.is_replay) == (made.public_id, False)
    assert not ApiToken.objects.exists()
    assert services.revoke_token(by=operator(ada), public_id=token.public_id, key="k-2").is_replay
    with pytest.raises(TokenNotFound):
        services.revoke_token(by=operator(olga), public_id=token.public_id, key="k-3")
    with pytest.raises(TokenNotFound):
        services.revoke_token(by=operator(ada), public_id=uuid4(), key="k-4")


def test_an_action_of_another_release_in_a_token_allows_nothing(
    ada: Any, operator: AsOperator, making: dict[str, Any]
) -> None:
    plain = services.create_token(by=operator(ada), **making).plain
    ApiToken.objects.update(actions=["universe.destroy", RETRY.value])
    assert bearer(plain).token_actions == frozenset({RETRY})


@pytest.mark.parametrize(
    "header", ["Bearer", "Bearer a b", "Bearer wrong", "Bearer ops_", "Bearer ops_" + "0" * 64, "bearer ops_\xff"]
)
@pytest.mark.django_db
def test_a_bad_token_is_refused_and_never_falls_back_to_the_session(header: str) -> None:
    """B2: 401."""
    with pytest.raises(AuthenticationFailed) as refusal:
        send(header).user  # noqa: B018
    assert refusal.value.status_code == 401
    assert TokenAuthentication().authenticate_header(send(None)) == 'Bearer realm="opsconsole"'


@pytest.mark.parametrize("header", [None, "", "Basic b2xnYTpzZWNyZXQ=", "Token abc"])
@pytest.mark.django_db
def test_another_header_is_left_to_others_and_nobody_is_an_operator(header: str | None) -> None:
    """B2."""
    request = send(header)
    assert TokenAuthentication().authenticate(request) is None
    with pytest.raises(NotAnOperator):
        operator_of(request)


def test_a_session_is_an_operator_if_its_user_is_active_staff(olga: Any) -> None:
    request: Any = RequestFactory().get("/")
    with pytest.raises(NotAuthenticated):
        operator_of(request)
    request.user = olga
    assert operator_of(request).kind is OperatorKind.PERSON
    olga.is_staff = False
    with pytest.raises(NotAnOperator):
        operator_of(request)


def test_the_last_use_is_stored_once_a_minute(ada: Any, operator: AsOperator, making: dict[str, Any]) -> None:
    plain = services.create_token(by=operator(ada), **making).plain
    bearer(plain)
    first = ApiToken.objects.get().last_used_at
    assert first is not None
    with CaptureQueriesContext(connection) as queries:
        bearer(plain)
    assert len(queries) == 1
    ApiToken.objects.update(last_used_at=first - timedelta(minutes=2))
    bearer(plain)
    last = ApiToken.objects.get().last_used_at
    assert last is not None
    assert last >= first


def test_a_database_that_can_not_be_written_still_lets_a_token_in(
    ada: Any,
    operator: AsOperator,
    making: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = services.create_token(by=operator(ada), **making).plain

    def fail(*_: object, **__: object) -> None:
        raise OperationalError("attempt to write a readonly database")

    monkeypatch.setattr(QuerySet, "update", fail)
    assert bearer(plain).user_id == ada.pk
    assert "was not stored" in caplog.text


@pytest.fixture
def _host_uses_knox(settings: Any) -> None:
    settings.REST_KNOX = {"TOKEN_PREFIX": "host", "AUTH_HEADER_PREFIX": "Host", "TOKEN_LIMIT_PER_USER": 1}
    settings.REST_KNOX["AUTH_TOKEN_CHARACTER_LENGTH"] = 2


@pytest.mark.usefixtures("_host_uses_knox")
def test_a_host_that_uses_knox_keeps_its_tokens_and_settings(
    ada: Any, operator: AsOperator, making: dict[str, Any]
) -> None:
    theirs, plain = apps.get_model("knox", "AuthToken").objects.create(user=ada, expiry=timedelta(seconds=-1))
    ours = services.create_token(by=operator(ada), **making).plain
    assert ours is not None
    assert len(ours) == len("ops_") + 64
    assert can(bearer(ours), RETRY, LETTER)
    with pytest.raises(AuthenticationFailed):
        bearer(plain)
    assert list(ada.auth_token_set.all()) == [theirs]
    assert knox_settings.AUTH_HEADER_PREFIX == "Host"
    assert not hasattr(settings, "KNOX_TOKEN_MODEL")
