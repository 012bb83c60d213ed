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
