"""The first door: whether an operator may do one thing, and by which capability."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from django.db import connection

from grants import sql
from grants.actions import Action
from grants.errors import AccessDenied
from grants.operators import Operator, OperatorKind
from grants.resources import ANY, Resource


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """What allowed something: ``id`` names the grant, ``text`` is that with its scope, as the audit row keeps it."""

    id: str
    text: str


SYSTEM_CAPABILITY = Capability(id="system", text="system")
"""What allows the product's own work; no grant gives it and none can take it away."""


def authorise(operator: Operator, action: Action, resource: Resource) -> Capability:
    """Return the first capability of ``operator`` that allows ``action`` on ``resource``, or raise ``AccessDenied``.

    First means: of the user's own grants the one with the lowest id, and only then their groups', by the same order
    (B1). One statement decides, by the database's clock and by memberships as they are now. It also looks at the user,
    who must still be active staff, and at the token, which must still be there: an operator who was taken out of the
    company in the middle of a long job is refused at the next step. Superusers need grants like everyone else.
    """
    capability = find_capability(operator, action, resource)
    if capability is None:
        raise AccessDenied(operator=operator, action=action, resource=resource)
    return capability


def can(operator: Operator, action: Action, resource: Resource) -> bool:
    """Say whether ``authorise`` would allow it, for the sake of a button; nothing is audited."""
    return find_capability(operator, action, resource) is not None


def actions_on(operator: Operator, actions: Iterable[Action], resource: Resource) -> frozenset[Action]:
    """Return those of ``actions`` for which ``can`` would say yes, with one query, for the sake of a page's buttons."""
    asked = [action for action in actions if token_covers(operator, action, resource)]
    if operator.kind is OperatorKind.SYSTEM:
        return frozenset(asked)
    if operator.user_id is None or not asked or not sql.storable(resource):
        return frozenset()
    with connection.cursor() as cursor:
        cursor.execute(*sql.actions_statement(connection, operator, asked, resource))
        found = {row[0] for row in cursor.fetchall()}
    return frozenset(action for action in asked if action.value in found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What an operator may do, told by one query: at all (``held``), to ``resource`` (``on_it``), and which rows.

    ``tenant_wide`` may be done to everything of the resource's tenant. ``plan`` is for lists of one action's rows.
    """

    resource: Resource
    held: frozenset[Action]
    on_it: frozenset[Action]
    tenant_wide: frozenset[Action]
    plan: sql.Plan

    def of(self, actions: Iterable[Action], resource: Resource) -> frozenset[Action] | None:
        """Return what ``actions_on`` would return, or None where another query has to tell."""
        asked = frozenset(actions) & self.held
        if _scope(resource) == _scope(self.resource):
            return asked & self.on_it
        if not asked or (asked <= self.tenant_wide and resource.tenant == self.resource.tenant):
            return asked
        return None


def access_of(operator: Operator, action: Action, resource: Resource) -> Access:
    """Return what ``held_actions``, ``actions_on`` and the plan of ``action`` say of one operator, with one query."""
    actions = frozenset(Action)
    if operator.kind is OperatorKind.SYSTEM:
        everything = sql.Plan(True, (), ())
        return Access(resource=resource, held=actions, on_it=actions, tenant_wide=actions, plan=everything)
    if operator.user_id is None:
        nothing: frozenset[Action] = frozenset()
        return Access(resource=resource, held=nothing, on_it=nothing, tenant_wide=nothing, plan=sql.Plan(False, (), ()))
    is_storable = sql.storable(resource)
    found = sql.find_access(connection, operator, action, resource if is_storable else Resource(tenant=""))
    named = operator.token_actions if operator.kind is OperatorKind.TOKEN else actions
    covered = frozenset(one for one in actions if is_storable and token_covers(operator, one, resource))
    return Access(
        resource=resource,
        held=frozenset(one for one in actions if one.value in found.held) & (named or frozenset()),
        on_it=frozenset(one for one in covered if one.value in found.covering),
        tenant_wide=frozenset(one for one in covered if one.value in found.tenant_wide),
        plan=found.plan,
    )


def _scope(resource: Resource) -> tuple[str, str, str, str]:
    return resource.tenant, resource.actor_type, resource.actor_id, resource.command_id


def holds(operator: Operator, action: Action) -> bool:
    """Say whether ``operator`` may do ``action`` to anything at all, for the sake of a menu entry."""
    return action in held_actions(operator)


def held_actions(operator: Operator) -> frozenset[Action]:
    """Return every action that ``operator`` may do to something, with one query."""
    if operator.kind is OperatorKind.SYSTEM:
        return frozenset(Action)
    if operator.user_id is None:
        return frozenset()
    statement = sql.grants_statement(connection, "SELECT DISTINCT action", token=operator.kind is OperatorKind.TOKEN)
    with connection.cursor() as cursor:
        cursor.execute(statement, sql.grants_parameters(connection, operator))
        stored = {row[0] for row in cursor.fetchall()}
    held = frozenset(action for action in Action if action.value in stored)
    return held if operator.token_actions is None else held & operator.token_actions


def find_capability(operator: Operator, action: Action, resource: Resource) -> Capability | None:
    """Return what ``authorise`` returns, and None where it raises."""
    if operator.kind is OperatorKind.SYSTEM:
        return SYSTEM_CAPABILITY
    if operator.user_id is None or not token_covers(operator, action, resource) or not sql.storable(resource):
        return None
    statement = sql.probe_statement(connection, token=operator.kind is OperatorKind.TOKEN)
    with connection.cursor() as cursor:
        cursor.execute(statement, sql.probe_parameters(connection, operator, action, resource))
        found = cursor.fetchone()
    if found is None:
        return None
    source, grant_id, tenant, actor_type, actor_id, command_id, group = found
    return name_capability(
        operator=operator,
        grant_id=f"{source}-grant:{grant_id}",
        group=group,
        action=action.value,
        scope=(tenant, actor_type, actor_id, command_id),
    )


def token_covers(operator: Operator, action: Action, resource: Resource) -> bool:
    """Say whether a token's own limits allow it; True for an operator who is no token."""
    if operator.kind is not OperatorKind.TOKEN:
        return True
    # None can only come from a hand-made operator; it allows nothing, rather than everything.
    if operator.token_actions is None or action not in operator.token_actions:
        return False
    return operator.token_tenant in (ANY, resource.tenant)


def name_capability(
    *, operator: Operator, grant_id: str, group: str, action: str, scope: tuple[str, str, str, str]
) -> Capability:
    """Return a capability whose text says which grant it is, through whom, and what it covers."""
    tenant, actor_type, actor_id, command_id = scope
    through = f" of group {group}" if group else ""
    token = f" by token:{operator.id}" if operator.kind is OperatorKind.TOKEN else ""
    covers = f"tenant={tenant} actor_type={actor_type} actor_id={actor_id} command_id={command_id}"
    return Capability(id=grant_id, text=f"{grant_id}{through}{token}: {action} on {covers}")
