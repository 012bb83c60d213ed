"""Giving and taking back permissions and tokens.

Nobody gives what they don't hold: whoever grants or revokes needs ``grants.manage`` over the whole scope and the action
itself over the whole scope, and a grant ends no later than those do (C15).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from secrets import token_urlsafe
from typing import Any
from uuid import UUID

from django.contrib.auth import get_user_model
from django.contrib.auth.base_user import AbstractBaseUser
from django.contrib.auth.models import Group

from grants import audit, selectors
from grants.access import Capability, authorise, find_capability, held_actions
from grants.actions import Action
from grants.errors import (
    AccessDenied,
    GrantEndInvalid,
    GrantNotFound,
    GrantToOneself,
    NotAnOperator,
    PrincipalNotFound,
    ScopeInvalid,
    TokenInvalid,
    TokenNotFound,
)
from grants.models import (
    ID_LENGTH,
    NAME_LENGTH,
    SCOPE_FIELDS,
    ApiToken,
    AuditEvent,
    CapabilityScope,
    ScopeGroupGrant,
    ScopeUserGrant,
)
from grants.operators import Operator, OperatorKind
from grants.principals import group_ids, user_named
from grants.resources import ANY, Resource
from grants.service import service
from opsconsole.core.canonical_json import JsonValue
from opsconsole.core.database import database_now, locked

GRANTED = "grants.granted"
REVOKED = "grants.revoked"
BOOTSTRAPPED = "grants.bootstrapped"
TOKEN_CREATED = "tokens.created"  # noqa: S105
TOKEN_REVOKED = "tokens.revoked"  # noqa: S105
BOOTSTRAP_CAPABILITY = Capability(id="bootstrap", text="bootstrap: a shell on a host of this installation")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantReceipt:
    """What giving or taking back a permission answered, the first time and each time its key comes again."""

    grant_id: str  # "user-grant:5" or "group-grant:7"
    action: str
    expires_at: str | None  # ISO 8601
    is_replay: bool
    event_id: UUID

    @classmethod
    def from_event(cls, event: AuditEvent, *, is_replay: bool) -> GrantReceipt:
        """Read the receipt that an audit row is."""
        outcome: Any = event.outcome_value
        return cls(
            grant_id=outcome["grant"],
            action=outcome["action"],
            expires_at=outcome["expires_at"],
            is_replay=is_replay,
            event_id=event.pk,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReceipt:
    """What making or revoking a token answered; ``plain`` is the token itself and comes once only."""

    public_id: str
    name: str
    expires_at: str
    plain: str | None
    is_replay: bool
    event_id: UUID

    @classmethod
    def from_event(cls, event: AuditEvent, *, is_replay: bool, plain: str | None = None) -> TokenReceipt:
        """Read the receipt that an audit row is; the row never held the token."""
        outcome: Any = event.outcome_value
        return cls(
            public_id=outcome["token"],
            name=outcome["name"],
            expires_at=outcome["expires_at"],
            plain=plain,
            is_replay=is_replay,
            event_id=event.pk,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapReceipt:
    """What a bootstrap did; nothing given means that the user held everything already."""

    username: str
    tenant: str
    created_user: bool
    password: str | None  # only if one was made up
    given: tuple[str, ...]


@service
def grant(
    *,
    by: Operator,
    action: Action,
    reason: str,
    expires_at: datetime,
    key: str,
    tenant: str,
    actor_type: str = ANY,
    actor_id: str = ANY,
    command_id: str = ANY,
    user: AbstractBaseUser | None = None,
    group: Group | None = None,
) -> GrantReceipt:
    """Give one action on one scope to one user or one group, until ``expires_at``.

    Locks the user or group. A grant of the same action on the same scope that they hold already is replaced, so that
    its end can be moved; the audit row keeps the old one. Raises ``AccessDenied`` unless ``by`` holds both
    ``grants.manage`` and the action over the whole scope, ``GrantToOneself``, ``GrantEndInvalid``, ``ScopeInvalid``,
    ``ReasonInvalid`` and ``IdempotencyKeyReused``.
    """
    principal = _one_of(user, group)
    scope = dict(zip(SCOPE_FIELDS, (tenant, actor_type, actor_id, command_id), strict=True))
    _check_scope(scope)
    why = audit.validate_reason(reason)
    resource = Resource(**scope, target_type=_kind(principal), target_id=str(principal.pk))
    capability = authorise(by, Action.GRANTS_MANAGE, resource)
    authorise(by, action, resource)
    _refuse_oneself(by, principal)
    _lock(principal)
    digest = audit.request_digest({**scope, "action": action.value, "reason": why, "expires_at": expires_at})
    if receipt := audit.replayed(
        key=key,
        action=GRANTED,
        operator=by,
        target_type=resource.target_type,
        target_id=resource.target_id,
        digest=digest,
    ):
        return GrantReceipt.from_event(receipt, is_replay=True)
    now = database_now()
    _check_end(by, action, resource, expires_at, now)
    row, replaced = _put_grant(
        principal, action, scope, by=by, reason=why, expires_at=expires_at, now=now, granted_by_id=by.user_id
    )
    event = audit.record(
        action=GRANTED,
        operator=by,
        resource=resource,
        capability=capability,
        outcome={**_describe(row, principal), "replaced": replaced},
        reason=why,
        key=key,
        digest=digest,
        at=now,
    )
    return GrantReceipt.from_event(event, is_replay=False)


@service
def revoke(*, by: Operator, grant_id: str, reason: str, key: str) -> GrantReceipt:
    """Take back a grant by its id (``user-grant:5``).

    Locks the user or group. Raises ``GrantNotFound``, also for a grant that ``by`` can't manage (which is audited),
    ``AccessDenied`` unless ``by`` holds the granted action itself too, ``ReasonInvalid`` and ``IdempotencyKeyReused``.
    Giving up one's own permission is allowed.
    """
    why = audit.validate_reason(reason)
    model, pk = selectors.parse_grant_id(grant_id)
    digest = audit.request_digest({"grant": grant_id, "reason": why})
    row = model.objects.filter(pk=pk).first()
    if row is None:
        return _replay_revocation(by=by, grant_id=grant_id, key=key, digest=digest)
    principal = row.user if isinstance(row, ScopeUserGrant) else row.group
    resource = Resource(
        **{field: getattr(row, field) for field in SCOPE_FIELDS}, target_type="grant", target_id=grant_id
    )
    capability = find_capability(by, Action.GRANTS_MANAGE, resource)
    if capability is None:
        raise AccessDenied(operator=by, action=Action.GRANTS_MANAGE, resource=resource, shown_as=GrantNotFound())
    authorise(by, Action(row.action), resource)
    _lock(principal)
    if model.objects.filter(pk=pk).delete()[0] == 0:
        return _replay_revocation(by=by, grant_id=grant_id, key=key, digest=digest)
    event = audit.record(
        action=REVOKED,
        operator=by,
        resource=resource,
        capability=capability,
        outcome=_describe(row, principal),
        reason=why,
        key=key,
        digest=digest,
    )
    return GrantReceipt.from_event(event, is_replay=False)


@service
def create_token(
    *, by: Operator, name: str, actions: Collection[Action], tenant: str, expires_at: datetime, key: str
) -> TokenReceipt:
    """Make an API token for ``by`` themselves: some of the actions they hold, on one tenant or ``*``, for a while.

    Locks the owner. The token is in ``plain`` of this one answer; a replay has None there. A token can't make another
    one, which would outlive it. Raises ``TokenInvalid``, ``AccessDenied`` for an action that the owner doesn't hold,
    and ``IdempotencyKeyReused``.
    """
    owner = _token_owner(by)
    title = name.strip()
    if not 1 <= len(title) <= NAME_LENGTH:
        raise TokenInvalid(detail=f"A token's name is 1 to {NAME_LENGTH} characters.")
    if not actions:
        raise TokenInvalid(detail="A token needs at least one action.")
    _check_scope({"tenant": tenant})
    resource = Resource(tenant=tenant, target_type="user", target_id=str(owner.pk))
    held = held_actions(by)
    for action in sorted(actions):
        if action not in held:
            raise AccessDenied(operator=by, action=action, resource=resource)
    _lock(owner)
    digest = audit.request_digest(
        {"name": title, "actions": sorted(actions), "tenant": tenant, "expires_at": expires_at}
    )
    if receipt := audit.replayed(
        key=key,
        action=TOKEN_CREATED,
        operator=by,
        target_type=resource.target_type,
        target_id=resource.target_id,
        digest=digest,
    ):
        return TokenReceipt.from_event(receipt, is_replay=True)
    now = database_now()
    if expires_at <= now:
        raise TokenInvalid(detail="A token ends in the future.")
    token, plain = ApiToken.objects.issue(user=owner, name=title, actions=actions, tenant=tenant, expires_at=expires_at)
    event = audit.record(
        action=TOKEN_CREATED,
        operator=by,
        resource=resource,
        capability=_own(by),
        outcome={**_describe_token(token), "actions": list(token.actions), "tenant": tenant},
        key=key,
        digest=digest,
        at=now,
    )
    return TokenReceipt.from_event(event, is_replay=False, plain=plain)


@service
def revoke_token(*, by: Operator, public_id: UUID, key: str) -> TokenReceipt:
    """Revoke a token at once: one's own, or one that ``grants.manage`` over its tenant covers.

    Locks the token. Raises ``TokenNotFound``, ``AccessDenied`` and ``IdempotencyKeyReused``.
    """
    digest = audit.request_digest({"token": public_id})
    token = locked(ApiToken.objects.filter(public_id=public_id)).first()
    if token is None:
        receipt = audit.replayed(
            key=key,
            action=TOKEN_REVOKED,
            operator=by,
            target_type="token",
            target_id=str(public_id),
            digest=digest,
        )
        if receipt is None:
            raise TokenNotFound
        return TokenReceipt.from_event(receipt, is_replay=True)
    resource = Resource(tenant=token.tenant, target_type="token", target_id=str(public_id))
    is_own = by.user_id is not None and by.user_id == token.user_id
    capability = _own(by) if is_own else authorise(by, Action.GRANTS_MANAGE, resource)
    outcome = _describe_token(token)
    token.delete()
    event = audit.record(
        action=TOKEN_REVOKED,
        operator=by,
        resource=resource,
        capability=capability,
        outcome=outcome,
        key=key,
        digest=digest,
    )
    return TokenReceipt.from_event(event, is_replay=False)


@service
def bootstrap(
    *, username: str, tenant: str = ANY, create: bool = False, password: str | None = None
) -> BootstrapReceipt:
    """Give a user every action on one tenant or all, without end: how an installation gets its first operator.

    It asks for no capability, since there is nobody yet who could hold one: whoever can run this on a host can read its
    database anyway. It is audited as ``cli:<os user>@<host>``. What the user holds already stays; what had an end gets
    none. With ``create`` a missing user is made, as staff, with ``password`` or one that is made up and returned.
    Raises ``PrincipalNotFound``, and ``NotAnOperator`` for a user who is there but not active staff.
    """
    by = Operator.cli()
    _check_scope({"tenant": tenant})
    made_up: str | None = None
    created = False
    try:
        user = user_named(username)
    except PrincipalNotFound:
        if not create:
            raise
        made_up = token_urlsafe(18) if password is None else None
        user = _create_staff(username, password or made_up or "")
        created = True
    if not user.is_active or not getattr(user, "is_staff", False):
        raise NotAnOperator
    _lock(user)
    scope = dict.fromkeys(SCOPE_FIELDS, ANY) | {"tenant": tenant}
    endless = set(
        ScopeUserGrant.objects.filter(user_id=user.pk, expires_at__isnull=True, **scope).values_list(
            "action", flat=True
        )
    )
    missing = [action for action in Action if action.value not in endless]
    now = database_now()
    for action in missing:
        _put_grant(user, action, scope, by=by, reason="bootstrap", expires_at=None, now=now, granted_by_id=None)
    given = [action.value for action in missing]
    if created or missing:
        audit.record(
            action=BOOTSTRAPPED,
            operator=by,
            resource=Resource(tenant=tenant, target_type="user", target_id=str(user.pk)),
            capability=BOOTSTRAP_CAPABILITY,
            outcome={"username": username, "created_user": created, "given": list(given)},
            reason="bootstrap",
            at=now,
        )
    return BootstrapReceipt(
        username=username, tenant=tenant, created_user=created, password=made_up, given=tuple(given)
    )


def _one_of(user: AbstractBaseUser | None, group: Group | None) -> AbstractBaseUser | Group:
    if user is not None and group is None:
        return user
    if group is not None and user is None:
        return group
    raise TypeError("a grant is for one user or one group")


def _kind(principal: AbstractBaseUser | Group) -> str:
    return "group" if isinstance(principal, Group) else "user"


def _check_scope(scope: dict[str, str]) -> None:
    for field, value in scope.items():
        limit = ID_LENGTH if field.endswith("_id") else NAME_LENGTH
        # What is not printable could not be told apart by whoever reads the grant.
        if not 1 <= len(value) <= limit or not value.isprintable() or value != value.strip():
            raise ScopeInvalid(field=field, limit=limit)


def _refuse_oneself(by: Operator, principal: AbstractBaseUser | Group) -> None:
    if by.user_id is None:
        return
    mine = group_ids(by.user_id).filter(group_id=principal.pk).exists() if isinstance(principal, Group) else False
    if mine or (not isinstance(principal, Group) and principal.pk == by.user_id):
        raise GrantToOneself


def _lock(principal: AbstractBaseUser | Group) -> None:
    """Lock who gets something, so that two requests about them queue up; raises if they are gone by now."""
    if locked(type(principal)._base_manager.filter(pk=principal.pk)).first() is None:
        raise PrincipalNotFound


def _check_end(by: Operator, action: Action, resource: Resource, expires_at: datetime, now: datetime) -> None:
    if expires_at.tzinfo is None or expires_at <= now:
        raise GrantEndInvalid
    if by.kind is OperatorKind.SYSTEM:
        return
    for needed in (Action.GRANTS_MANAGE, action):
        ends = selectors.ends_of(by, needed, resource)
        if not any(end is None or end >= expires_at for end in ends):
            raise GrantEndInvalid


def _put_grant(
    principal: AbstractBaseUser | Group,
    action: Action,
    scope: dict[str, str],
    *,
    by: Operator,
    reason: str,
    expires_at: datetime | None,
    now: datetime,
    granted_by_id: Any,
) -> tuple[ScopeUserGrant | ScopeGroupGrant, JsonValue]:
    """Store a grant in place of the same one with another end; return it and a description of the old one."""
    stored, _ = CapabilityScope.objects.get_or_create(defaults=None, **scope)
    model: Any = ScopeGroupGrant if isinstance(principal, Group) else ScopeUserGrant
    holder = {f"{_kind(principal)}_id": principal.pk}
    old = model.objects.filter(action=action.value, content_object=stored, **holder).first()
    replaced = _describe(old, principal) if old is not None else None
    if old is not None:
        old.delete()
    row = model.objects.give(
        **holder,
        action=action,
        scope=stored,
        reason=reason,
        granted_by_id=granted_by_id,
        granted_by_name=audit.fitted(by.name, ID_LENGTH),
        granted_at=now,
        expires_at=expires_at,
    )
    return row, replaced


def _describe(row: ScopeUserGrant | ScopeGroupGrant, principal: AbstractBaseUser | Group) -> dict[str, JsonValue]:
    return {
        "grant": str(row),
        "holder": principal.name if isinstance(principal, Group) else principal.get_username(),
        "action": row.action,
        **{field: getattr(row, field) for field in SCOPE_FIELDS},
        "expires_at": row.expires_at.isoformat() if row.expires_at is not None else None,
    }


def _describe_token(token: ApiToken) -> dict[str, JsonValue]:
    return {
        "token": str(token.public_id),
        "name": token.name,
        "owner": token.user.get_username(),
        "expires_at": token.expiry.isoformat(),
    }


def _replay_revocation(*, by: Operator, grant_id: str, key: str, digest: str) -> GrantReceipt:
    receipt = audit.replayed(
        key=key, action=REVOKED, operator=by, target_type="grant", target_id=grant_id, digest=digest
    )
    if receipt is None:
        raise GrantNotFound
    outcome: Any = receipt.outcome_value
    resource = Resource(**{field: outcome[field] for field in SCOPE_FIELDS}, target_type="grant", target_id=grant_id)
    authorise(by, Action.GRANTS_MANAGE, resource)
    return GrantReceipt.from_event(receipt, is_replay=True)


def _token_owner(by: Operator) -> AbstractBaseUser:
    if by.user_id is None or by.kind not in (OperatorKind.PERSON, OperatorKind.CLI):
        raise TokenInvalid(detail="Only a person makes a token, and for themselves.")
    owner: AbstractBaseUser | None = get_user_model()._base_manager.filter(pk=by.user_id).first()
    if owner is None:
        raise PrincipalNotFound
    return owner


def _own(by: Operator) -> Capability:
    """Return what allows a person to deal with their own tokens: that they are theirs."""
    return Capability(id="own-token", text=f"own token of user {by.user_id}")


def _create_staff(username: str, password: str) -> AbstractBaseUser:
    model: Any = get_user_model()
    user: AbstractBaseUser = model._default_manager.create_user(
        **{model.USERNAME_FIELD: username, "password": password, "is_staff": True}
    )
    return user
