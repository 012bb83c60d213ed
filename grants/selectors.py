"""Reads about grants: who holds what, until when, and why somebody may or may not do a thing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.base_user import AbstractBaseUser
from django.contrib.auth.models import Group
from django.db import connection
from django.db.models import F, Q, QuerySet

from grants import sql
from grants.access import Capability, can, find_capability
from grants.actions import Action
from grants.errors import GrantNotFound, NotAnOperator
from grants.models import SCOPE_FIELDS, ApiToken, AuditEvent, ScopeGroupGrant, ScopeUserGrant
from grants.operators import Operator, OperatorKind
from grants.principals import group_ids, group_named, live, user_named
from grants.reading import audit_reading_of_trail, authorise_anywhere, authorise_read, authorise_scope
from grants.resources import ANY, Resource
from opsconsole.core.database import database_now
from opsconsole.core.keyset import Page, Source, read_page

EXPLAINED_GRANTS = 10
LISTED_GRANTS = 1000
NO_OPERATOR = "Only an active staff user is an operator."
GRANT_MODELS: dict[str, Any] = {"user-grant": ScopeUserGrant, "group-grant": ScopeGroupGrant}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldGrant:
    """One grant as a page shows it; ``id`` is ``user-grant:5`` or ``group-grant:7``."""

    id: str
    holder: str  # a username, or a group's name
    is_group: bool
    action: str
    tenant: str
    actor_type: str
    actor_id: str
    command_id: str
    granted_by_name: str
    reason: str
    granted_at: datetime
    expires_at: datetime | None
    is_live: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One field of a grant beside the same field of what was asked."""

    field: str
    wanted: str
    granted: str

    @property
    def matches(self) -> bool:
        """Whether the grant covers the wanted value."""
        return self.granted in (ANY, self.wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why an operator may or may not do one thing; ``allowed`` is what ``authorise`` itself says (C15).

    Allowed: ``capability`` and each field ``compared``. Not allowed: ``reasons``, nearest first.
    """

    allowed: bool
    operator: str
    action: str
    resource: Resource
    capability: Capability | None
    compared: tuple[Comparison, ...]
    reasons: tuple[str, ...]


def explain(
    operator: Operator, action: Action, resource: Resource, *, told: Sequence[HeldGrant] | None = None
) -> Explanation:
    """Say whether ``operator`` may do ``action`` on ``resource``, and name the capability or what is missing.

    Why not is read from the grants in ``told``, by default all that the operator holds. Whoever shows the answer must
    be allowed to see it; asking changes and audits nothing.
    """
    capability = find_capability(operator, action, resource)
    if capability is None:
        reasons = tuple(_why_not(operator, action, resource, told))
        compared: tuple[Comparison, ...] = ()
    else:
        reasons = ()
        compared = _compare_capability(capability, action, resource)
    return Explanation(
        allowed=capability is not None,
        operator=operator.name,
        action=action.value,
        resource=resource,
        capability=capability,
        compared=compared,
        reasons=reasons,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFilter:
    """Which audit rows are wanted; an empty field wants all. ``operator`` is a reference such as ``person:5``."""

    tenant: str | None = None
    action: str | None = None
    operator: str | None = None
    target_type: str | None = None
    target_id: str | None = None
    verdict: str | None = None
    since: datetime | None = None
    before: datetime | None = None

    def condition(self) -> Q:
        """Return the filter as a condition on audit rows."""
        wanted = {name: getattr(self, name) for name in ("action", "target_type", "target_id", "verdict")}
        wanted |= {"tenant": None if self.tenant == ANY else self.tenant, "at__gte": self.since, "at__lt": self.before}
        if self.operator is not None:
            wanted["operator_kind"], _, wanted["operator_id"] = self.operator.partition(":")
        return Q(**{name: value for name, value in wanted.items() if value is not None})


def list_audit(
    operator: Operator, wanted: AuditFilter, *, limit: int = 50, cursor: str | None = None
) -> Page[AuditEvent]:
    """Return a page of the trail, newest first: of one tenant, of every one for ``*``, else of all that are readable.

    The scope that is named is authorised first; raises ``AccessDenied``, audited, for that (B2, B16), and for an
    operator who may read no part of the trail at all. Reading it is audited too, before anything is read (B3).
    """
    authorise_scope(operator, Action.AUDIT_READ, tenant=wanted.tenant)
    authorise_anywhere(operator, Action.AUDIT_READ)
    audit_reading_of_trail(operator, wanted.tenant or ANY)
    rows = AuditEvent.objects.visible_to(operator, Action.AUDIT_READ).filter(wanted.condition())
    return read_page("audit", [[Source(rows, ("at", "id"))]], limit=limit, cursor=cursor)


def explain_to(asking: Operator, action: Action, resource: Resource, *, username: str | None = None) -> Explanation:
    """Explain a decision to whoever may know it: one's own, or, with ``grants.manage`` there, another user's.

    Of another user's grants only those are told, and counted, that ``asking`` may manage. Raises ``AccessDenied``,
    audited, before it looks for the user, then ``PrincipalNotFound``.
    """
    if username is None:
        return explain(asking, action, resource)
    oneself = _oneself(asking, username)
    if oneself is not None:
        return _explain_user(oneself, action, resource, None)
    authorise_read(asking, Action.GRANTS_MANAGE, resource)
    user = user_named(username)
    told = None if manages_everything(asking) else grants_visible_to(asking, user=user)
    return _explain_user(user, action, resource, told)


def manages_everything(operator: Operator) -> bool:
    """Say whether ``operator`` may give and see every permission there is."""
    return can(operator, Action.GRANTS_MANAGE, Resource(**dict.fromkeys(SCOPE_FIELDS, ANY)))


def principal_to_manage(
    by: Operator, resource: Resource, *, username: str | None, group: str | None
) -> tuple[AbstractBaseUser | None, Group | None]:
    """Return the user or group that a grant on ``resource`` is to be for.

    Who may give none there learns nothing about who exists: raises ``AccessDenied``, audited, before it looks, and
    then ``PrincipalNotFound``.
    """
    target_type, name = ("group", group) if username is None else ("user", username)
    authorise_read(by, Action.GRANTS_MANAGE, replace(resource, target_type=target_type, target_id=name or ""))
    return (
        None if username is None else user_named(username),
        None if group is None else group_named(group),
    )


def grants_named(operator: Operator, *, username: str | None = None, group: str | None = None) -> list[HeldGrant]:
    """Return what ``grants_visible_to`` does, by names; naming another needs ``grants.manage`` somewhere.

    Raises ``AccessDenied``, audited, before it looks for them, and then ``PrincipalNotFound``.
    """
    user = None if username is None else _oneself(operator, username)
    if (username is not None and user is None) or group is not None:
        authorise_anywhere(operator, Action.GRANTS_MANAGE)
    if username is not None and user is None:
        user = user_named(username)
    return grants_visible_to(operator, user=user, group=None if group is None else group_named(group))


def grants_of_user(user: AbstractBaseUser) -> list[HeldGrant]:
    """Return the grants of a user and of their groups, ended ones included, own ones first."""
    return _held(
        ScopeUserGrant.objects.filter(user_id=user.pk), ScopeGroupGrant.objects.filter(group_id__in=group_ids(user.pk))
    )


def grants_visible_to(
    operator: Operator, *, user: AbstractBaseUser | None = None, group: Group | None = None
) -> list[HeldGrant]:
    """Return the grants that ``operator`` may manage and their own, of one user or group if given; 1,000 at most.

    Of another user only those that they may manage: a group's grants, seen as one's own, would tell who else is in it.
    """
    users, groups = _visible(operator, with_own=user is None or user.pk == operator.user_id)
    if user is not None:
        users = users.filter(user_id=user.pk)
        groups = groups.filter(group_id__in=group_ids(user.pk))
    if group is not None:
        users = users.none()
        groups = groups.filter(group_id=group.pk)
    return _held(users, groups)


def grant_visible_to(operator: Operator, grant_id: str) -> HeldGrant | None:
    """Return one grant by its id, if it is among those that ``operator`` may manage and their own."""
    try:
        model, pk = parse_grant_id(grant_id)
    except GrantNotFound:
        return None
    users, groups = _visible(operator)
    if model is ScopeGroupGrant:
        found = _held(users.none(), groups.filter(pk=pk))
    else:
        found = _held(users.filter(pk=pk), groups.none())
    return found[0] if found else None


def parse_grant_id(grant_id: str) -> tuple[Any, int]:
    """Return the model and the key that ``user-grant:5`` or ``group-grant:7`` names; raises ``GrantNotFound``."""
    kind, _, number = grant_id.partition(":")
    if kind not in GRANT_MODELS or not number.isascii() or not number.isdigit() or len(number) > 18:
        raise GrantNotFound
    return GRANT_MODELS[kind], int(number)


def ends_of(operator: Operator, action: Action, resource: Resource) -> list[datetime | None]:
    """Return the ends of all live grants by which ``operator`` may do ``action`` on ``resource``; None = never."""
    covering = Q(action=action.value)
    for field in SCOPE_FIELDS:
        covering &= Q(**{f"{field}__in": (ANY, getattr(resource, field))})
    own = ScopeUserGrant.objects.live().filter(covering, user_id=operator.user_id)
    shared = ScopeGroupGrant.objects.live().filter(covering, group_id__in=group_ids(operator.user_id))
    return [*own.values_list("expires_at", flat=True), *shared.values_list("expires_at", flat=True)]


def _explain_user(
    user: AbstractBaseUser, action: Action, resource: Resource, told: Sequence[HeldGrant] | None
) -> Explanation:
    try:
        operator = Operator.from_user(user)
    except NotAnOperator:
        return Explanation(
            allowed=False,
            operator=user.get_username(),
            action=action.value,
            resource=resource,
            capability=None,
            compared=(),
            reasons=(NO_OPERATOR,),
        )
    return explain(operator, action, resource, told=told)


def _oneself(asking: Operator, username: str) -> AbstractBaseUser | None:
    """Return the user for whom ``asking`` acts, if that is their name; nobody else is looked for."""
    if asking.user_id is None:
        return None
    user: AbstractBaseUser | None = get_user_model()._base_manager.filter(pk=asking.user_id).first()
    return user if user is not None and user.get_username() == username else None


def _visible(
    operator: Operator, *, with_own: bool = True
) -> tuple[QuerySet[ScopeUserGrant], QuerySet[ScopeGroupGrant]]:
    users = ScopeUserGrant.objects.visible_to(operator, Action.GRANTS_MANAGE)
    groups = ScopeGroupGrant.objects.visible_to(operator, Action.GRANTS_MANAGE)
    if with_own and operator.user_id is not None:
        users = users | ScopeUserGrant.objects.filter(user_id=operator.user_id)
        groups = groups | ScopeGroupGrant.objects.filter(group_id__in=group_ids(operator.user_id))
    return users, groups


def _held(users: QuerySet[ScopeUserGrant], groups: QuerySet[ScopeGroupGrant]) -> list[HeldGrant]:
    now = database_now()
    username = f"user__{get_user_model().USERNAME_FIELD}"
    own = users.annotate(holder=F(username)).order_by("holder", "action", "id")[:LISTED_GRANTS]
    shared = groups.annotate(holder=F("group__name")).order_by("holder", "action", "id")[:LISTED_GRANTS]
    return [_as_held(row, now) for row in (*own, *shared)][:LISTED_GRANTS]


def _as_held(row: Any, now: datetime) -> HeldGrant:
    return HeldGrant(
        id=str(row),
        holder=str(row.holder),
        is_group=isinstance(row, ScopeGroupGrant),
        action=row.action,
        tenant=row.tenant,
        actor_type=row.actor_type,
        actor_id=row.actor_id,
        command_id=row.command_id,
        granted_by_name=row.granted_by_name,
        reason=row.reason,
        granted_at=row.granted_at,
        expires_at=row.expires_at,
        is_live=row.expires_at is None or row.expires_at > now,
    )


def _compare(action: Action, resource: Resource, granted: Any) -> tuple[Comparison, ...]:
    fields = (
        Comparison(field=field, wanted=getattr(resource, field), granted=getattr(granted, field))
        for field in SCOPE_FIELDS
    )
    return (Comparison(field="action", wanted=action.value, granted=granted.action), *fields)


def _compare_capability(capability: Capability, action: Action, resource: Resource) -> tuple[Comparison, ...]:
    source, _, number = capability.id.partition(":")
    if source not in GRANT_MODELS:
        return ()
    row = GRANT_MODELS[source].objects.filter(pk=int(number)).first()
    return _compare(action, resource, row) if row is not None else ()


def _why_not(operator: Operator, action: Action, resource: Resource, told: Sequence[HeldGrant] | None) -> Iterable[str]:
    if operator.user_id is None:
        yield "A shell has no permissions of its own; name the user to act for with --operator."
        return
    user = get_user_model()._base_manager.filter(pk=operator.user_id).first()
    if user is None or not user.is_active or not getattr(user, "is_staff", False):
        yield NO_OPERATOR
        return
    if operator.kind is OperatorKind.TOKEN:
        yield from _why_not_by_token(operator, action, resource)
    held = grants_of_user(user) if told is None else told
    of_action = [grant for grant in held if grant.action == action.value]
    if told is None and not of_action:
        yield f"None of {user.get_username()}'s {len(held)} permissions names this action."
    elif not of_action:
        yield "No permission that you manage allows it."
    yield from _why_not_by_grants(of_action, action, resource)


def _why_not_by_token(operator: Operator, action: Action, resource: Resource) -> Iterable[str]:
    if not ApiToken.objects.filter(live("expiry"), public_id=operator.id).exists():
        yield "The token was revoked or has ended."
    if action not in (operator.token_actions or ()):
        yield "The token does not name this action."
    if operator.token_tenant not in (ANY, resource.tenant):
        yield f"The token is for tenant {operator.token_tenant} only."


def _why_not_by_grants(grants: Sequence[HeldGrant], action: Action, resource: Resource) -> Iterable[str]:
    """Explain each near miss, those with the fewest differences first."""
    misses = []
    for grant in grants:
        wrong = [one for one in _compare(action, resource, grant) if not one.matches]
        parts = [f"{one.field} is {one.granted}, not {one.wanted or 'none'}" for one in wrong]
        if not grant.is_live and grant.expires_at is not None:
            parts.append(f"it ended at {grant.expires_at:%Y-%m-%d %H:%M} UTC")
        if parts:  # a covering grant is no reason: then only the token stood in the way
            misses.append((len(parts), f"{grant.id}: {'; '.join(parts)}."))
    for _, text in sorted(misses)[:EXPLAINED_GRANTS]:
        yield text
    if len(misses) > EXPLAINED_GRANTS:
        yield f"{len(misses) - EXPLAINED_GRANTS} more permissions for this action don't cover it either."


def tenants_named(operator: Operator, action: Action, limit: int, *, plan: sql.Plan | None = None) -> list[str] | None:
    """Return the tenants that live grants of ``action`` name, ``limit`` at most; None if one covers every tenant.

    ``*`` stands among them for a grant that names no tenant and covers but some of each one's rows: it opens every
    tenant's list, and says nothing about which tenants there are. ``plan`` is that of ``action``, where it is known.
    """
    if operator.user_id is None:
        return None if operator.kind is OperatorKind.SYSTEM else []
    plan = sql.plan_for(connection, operator, action) if plan is None else plan
    if plan.everything:
        return None
    if not plan.shapes:
        return list(plan.tenants[:limit])
    of_action = Q(live(), action=action.value)
    own = ScopeUserGrant.objects.filter(of_action, user_id=operator.user_id)
    shared = ScopeGroupGrant.objects.filter(of_action, group_id__in=group_ids(operator.user_id))
    found = {
        name for rows in (own, shared) for name in rows.order_by("tenant").values_list("tenant", flat=True).distinct()
    }
    return sorted(found, key=lambda name: (name != ANY, name))[:limit]


def plan_of(operator: Operator, action: Action) -> sql.Plan:
    """Return which rows ``operator`` may see by ``action``, for one who filters several tables: one query.

    It names a scope too: two operators whose plans are equal and have no ``shapes`` see the same rows.
    """
    if operator.kind is OperatorKind.SYSTEM:
        return sql.Plan(True, (), ())
    return sql.Plan(False, (), ()) if operator.user_id is None else sql.plan_for(connection, operator, action)
