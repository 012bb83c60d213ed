"""This app's raw SQL, for PostgreSQL and SQLite.

Checks are raw because compiling the same query through the ORM costs several times the query (measured: about 5 ms
against 1 ms). Triggers are raw because Django has none. Table names are written out: the app label never changes.
"""
# ruff: noqa: S608 - what is put together here are constants of this module and column names; values are parameters

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from django.contrib.auth import get_user_model
from django.core.exceptions import FieldDoesNotExist
from django.db.models import BooleanField

from grants.actions import Action
from grants.operators import Operator, OperatorKind
from grants.principals import groups_field
from grants.resources import Resource
from opsconsole.core.database import plain_value

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.utils import IntegrityError

USER_GRANTS = "ops_grants_scopeusergrant"
GROUP_GRANTS = "ops_grants_scopegroupgrant"
SCOPES = "ops_grants_capabilityscope"
EVENTS = "ops_grants_auditevent"
TOKENS = "ops_grants_apitoken"

# --- looking up grants ------------------------------------------------------------------------------------------------

NOW = {
    "postgresql": "statement_timestamp()",
    # The text form in which Django stores a time; doubled because the statement also has parameters.
    "sqlite": "strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')",
}
GRANT_COLUMNS = "g.id, g.action, g.tenant, g.actor_type, g.actor_id, g.command_id"
COVERS_RESOURCE = (
    "g.tenant IN (%(tenant)s, '*') AND g.actor_type IN (%(actor_type)s, '*')"
    " AND g.actor_id IN (%(actor_id)s, '*') AND g.command_id IN (%(command_id)s, '*')"
)
COVERS = f"g.action = %(action)s AND {COVERS_RESOURCE}"
# A list has no command, so only grants over any command count.
FOR_LISTS = "g.action = %(action)s AND g.command_id = '*'"


def probe_statement(connection: BaseDatabaseWrapper, *, token: bool) -> str:
    """Return the statement that finds the first grant covering an action on a resource."""
    select = (
        "SELECT CASE rank WHEN 0 THEN 'user' ELSE 'group' END, id, tenant, actor_type, actor_id, command_id, through"
    )
    return _statement(connection.vendor, select, COVERS, token, "ORDER BY rank, id LIMIT 1")


def probe_parameters(
    connection: BaseDatabaseWrapper, operator: Operator, action: Action, resource: Resource
) -> dict[str, Any]:
    """Return the parameters of ``probe_statement``."""
    return {**_resource_parameters(connection, operator, resource), "action": action.value}


def actions_statement(
    connection: BaseDatabaseWrapper, operator: Operator, actions: Sequence[Action], resource: Resource
) -> tuple[str, dict[str, Any]]:
    """Return the statement that finds which of some actions are covered on a resource, and its parameters."""
    names = {f"action_{place}": action.value for place, action in enumerate(actions)}
    listed = ", ".join(f"%({name})s" for name in names)
    token = operator.kind is OperatorKind.TOKEN
    condition = f"g.action IN ({listed}) AND {COVERS_RESOURCE}"
    statement = _statement(connection.vendor, "SELECT DISTINCT action", condition, token, "")
    return statement, {**_resource_parameters(connection, operator, resource), **names}


def _resource_parameters(connection: BaseDatabaseWrapper, operator: Operator, resource: Resource) -> dict[str, Any]:
    return {
        **grants_parameters(connection, operator),
        "tenant": resource.tenant,
        "actor_type": resource.actor_type,
        "actor_id": resource.actor_id,
        "command_id": resource.command_id,
    }


def grants_statement(connection: BaseDatabaseWrapper, select: str, *, token: bool) -> str:
    """Return a statement over every live grant of an operator, whatever it covers."""
    return _statement(connection.vendor, select, "1 = 1", token, "")


def grants_parameters(connection: BaseDatabaseWrapper, operator: Operator) -> dict[str, Any]:
    """Return the parameters that every statement here has."""
    primary_key = get_user_model()._meta.pk
    parameters = {"user": primary_key.get_db_prep_value(operator.user_id, connection)}
    if operator.kind is OperatorKind.TOKEN:
        parameters["token"] = operator.id.replace("-", "") if connection.vendor == "sqlite" else operator.id
    return parameters


@dataclass(frozen=True, slots=True)
class Shape:
    """One combination of columns that some of an operator's grants narrow, and whose grants those are."""

    source: str  # user or group
    any_tenant: bool
    any_actor_type: bool
    any_actor_id: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What an operator's live grants of one action look like, for a list filter.

    ``tenants`` are those held whole, by name; if they are too many to name, ``shapes`` has them instead.
    """

    everything: bool
    tenants: tuple[str, ...]
    shapes: tuple[Shape, ...]


TENANTS_NAMED = 100
# Two sources have at most six narrowed shapes each, and one row for every tenant: a limit, which guards against someone
# with thousands of tenants, can only cut off whole tenants.
_PLAN_ROWS = 2 * (6 + 1 + TENANTS_NAMED + 1)
_WILDCARDS = (
    "CASE WHEN tenant = '*' THEN 1 ELSE 0 END AS t, CASE WHEN actor_type = '*' THEN 1 ELSE 0 END AS y,"
    " CASE WHEN actor_id = '*' THEN 1 ELSE 0 END AS i, rank"
)


def plan_for(connection: BaseDatabaseWrapper, operator: Operator, action: Action) -> Plan:
    """Return what ``operator`` holds of ``action``, with one query."""
    select = (
        "SELECT DISTINCT CASE WHEN actor_type <> '*' OR actor_id <> '*' THEN 0 WHEN tenant = '*' THEN 1 ELSE 2 END"
        f" AS place, CASE WHEN actor_type = '*' AND actor_id = '*' THEN tenant ELSE '' END AS whole, {_WILDCARDS}"
    )
    limit = f"ORDER BY place LIMIT {_PLAN_ROWS}"
    statement = _statement(connection.vendor, select, FOR_LISTS, operator.kind is OperatorKind.TOKEN, limit)
    with connection.cursor() as cursor:
        cursor.execute(statement, {**grants_parameters(connection, operator), "action": action.value})
        return _plan(cursor.fetchall())


def _plan(rows: Sequence[Sequence[Any]]) -> Plan:
    """Return the plan that rows of place, whole tenant, its three wildcards and rank make."""
    if any(place == 1 for place, *_ in rows):
        return Plan(True, (), ())
    shapes = [
        Shape("group" if rank else "user", bool(t), bool(y), bool(i)) for place, _, t, y, i, rank in rows if place == 0
    ]
    tenants = sorted({whole for place, whole, *_ in rows if place == 2})
    if len(tenants) <= TENANTS_NAMED:
        return Plan(False, tuple(tenants), tuple(shapes))
    return Plan(False, (), (*shapes, Shape("user", False, True, True), Shape("group", False, True, True)))


@dataclass(frozen=True, slots=True)
class Found:
    """What one look at an operator's grants tells; actions are named as they are stored.

    ``covering`` cover the resource that was asked about, ``tenant_wide`` everything else of its tenant as well.
    """

    held: frozenset[str]
    covering: frozenset[str]
    tenant_wide: frozenset[str]
    plan: Plan


def find_access(connection: BaseDatabaseWrapper, operator: Operator, action: Action, resource: Resource) -> Found:
    """Return what ``operator`` holds at all and on ``resource``, and the plan of ``action``, with one query.

    The resource has to be ``storable``.
    """
    covers, is_listed = COVERS_RESOURCE.replace("g.", ""), FOR_LISTS.replace("g.", "")
    is_narrowed = "actor_type <> '*' OR actor_id <> '*'"
    select = (
        f"SELECT DISTINCT action, CASE WHEN NOT ({covers}) THEN 0 WHEN {is_narrowed} OR command_id <> '*' THEN 1"
        f" ELSE 2 END AS reach, CASE WHEN NOT ({is_listed}) THEN -1 WHEN {is_narrowed} THEN 0 WHEN tenant = '*' THEN 1"
        f" ELSE 2 END AS place, CASE WHEN {is_listed} AND NOT ({is_narrowed}) THEN tenant ELSE '' END AS whole,"
        f" {_WILDCARDS}"
    )
    # Only whole tenants can be cut off here as well: what covers the resource, and what is of no list, comes before.
    limit = f"ORDER BY reach DESC, place LIMIT {_PLAN_ROWS + 3 * 2 * 8 * len(Action)}"
    statement = _statement(connection.vendor, select, "1 = 1", operator.kind is OperatorKind.TOKEN, limit)
    parameters = {**_resource_parameters(connection, operator, resource), "action": action.value}
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        rows = cursor.fetchall()
    return Found(
        held=frozenset(name for name, *_ in rows),
        covering=frozenset(name for name, reach, *_ in rows if reach),
        tenant_wide=frozenset(name for name, reach, *_ in rows if reach == 2),
        plan=_plan([row[2:] for row in rows if row[2] >= 0]),
    )


def storable(resource: Resource) -> bool:
    """Say whether every part is text that a database takes; what is not can't be in any grant."""
    for part in (resource.tenant, resource.actor_type, resource.actor_id, resource.command_id):
        if "\x00" in part:
            return False
        try:
            part.encode()
        except UnicodeEncodeError:
            return False
    return True


@lru_cache(maxsize=64)
def _statement(vendor: str, select: str, condition: str, token: bool, order: str) -> str:
    live = f"(g.expires_at IS NULL OR g.expires_at > {NOW[vendor]})"
    sources = [
        f"SELECT 0 AS rank, {GRANT_COLUMNS}, '' AS through FROM {USER_GRANTS} g"
        f" WHERE g.user_id = %(user)s AND {condition} AND {live}"
    ]
    membership = _membership()
    if membership is not None:
        table, user_column, group_column = membership
        sources.append(
            f"SELECT 1 AS rank, {GRANT_COLUMNS}, named.name AS through FROM {table} member"
            f" JOIN {GROUP_GRANTS} g ON g.group_id = member.{group_column}"
            f" JOIN auth_group named ON named.id = member.{group_column}"
            f" WHERE member.{user_column} = %(user)s AND {condition} AND {live}"
        )
    guards = [f"EXISTS (SELECT 1 FROM {_user_guard()})"]
    if token:
        guards.append(f"EXISTS (SELECT 1 FROM {TOKENS} k WHERE k.public_id = %(token)s AND k.expiry > {NOW[vendor]})")
    return f"{select} FROM ({' UNION ALL '.join(sources)}) found WHERE {' AND '.join(guards)} {order}"


def _user_guard() -> str:
    """Return the FROM and WHERE that find the user while they may be an operator at all."""
    meta = get_user_model()._meta
    conditions = [f'who."{meta.pk.column}" = %(user)s']
    for name in ("is_active", "is_staff"):
        # A custom user model may compute either; then only Operator.from_user can look at it.
        try:
            field = meta.get_field(name)
        except FieldDoesNotExist:
            continue
        if isinstance(field, BooleanField):
            conditions.append(f'who."{field.column}"')
    return f'"{meta.db_table}" who WHERE {" AND ".join(conditions)}'


def _membership() -> tuple[str, str, str] | None:
    """Return table, user column and group column of group membership; None if users have no groups."""
    field = groups_field()
    if field is None:
        return None
    return f'"{field.m2m_db_table()}"', f'"{field.m2m_column_name()}"', f'"{field.m2m_reverse_name()}"'


# --- the audit trail --------------------------------------------------------------------------------------------------

APPEND_ONLY = "ops_audit_append_only"
KEY_CONSTRAINTS = ("ops_audit_key_once", "ops_audit_key_anywhere")
_SAME_KEY = (
    f"SELECT 1 FROM {EVENTS} WHERE operator_kind = {{operator_kind}} AND operator_id = {{operator_id}}"
    " AND action = {action} AND idempotency_key = {idempotency_key}"
    " AND ({operator_kind} <> 'system' OR tenant = {tenant})"
)
_KEY_COLUMNS = ("operator_kind", "operator_id", "action", "idempotency_key", "tenant")
_SAME_KEY_GIVEN = _SAME_KEY.format(**{name: f"%({name})s" for name in _KEY_COLUMNS})
_SAME_KEY_STORED = _SAME_KEY.format(**{name: f"NEW.{name}" for name in _KEY_COLUMNS})
_SAME_DENIAL_GIVEN = f"SELECT 1 FROM {EVENTS} WHERE denial_key = %(denial_key)s"


def violates_key(error: IntegrityError) -> bool:
    """Say whether ``error`` is about an idempotency key that exists already."""
    diagnosis = getattr(error.__cause__, "diag", None)
    if diagnosis is not None:
        return diagnosis.constraint_name in KEY_CONSTRAINTS
    return any(name in str(error) for name in (*KEY_CONSTRAINTS, f"{EVENTS}.idempotency_key"))


def insert_event(connection: BaseDatabaseWrapper, row: Mapping[str, Any]) -> None:
    """Insert one audit row, given as column values."""
    _execute_insert(connection, [row], "")


def insert_new_events(connection: BaseDatabaseWrapper, rows: Sequence[Mapping[str, Any]]) -> int:
    """Insert on SQLite those audit rows whose idempotency and denial keys are new, and return how many were."""
    # Not ON CONFLICT DO NOTHING: the triggers against REPLACE stop the statement before SQLite skips a row.
    condition = f" WHERE NOT EXISTS ({_SAME_KEY_GIVEN}) AND NOT EXISTS ({_SAME_DENIAL_GIVEN})"
    return _execute_insert(connection, rows, condition)


def _execute_insert(connection: BaseDatabaseWrapper, rows: Sequence[Mapping[str, Any]], condition: str) -> int:
    names = tuple(rows[0])
    placeholders = ", ".join(f"%({name})s" for name in names)
    statement = f"INSERT INTO {EVENTS} ({', '.join(names)}) SELECT {placeholders}{condition}"
    parameters: list[Mapping[str, Any]] = list(rows)
    if connection.vendor == "sqlite":
        parameters = [{name: plain_value(connection, value) for name, value in row.items()} for row in rows]
    with connection.cursor() as cursor:
        # executemany because Django rewrites the placeholders of a statement each time it is executed.
        cursor.executemany(statement, parameters)
        return int(cursor.rowcount)


# --- triggers ---------------------------------------------------------------------------------------------------------
# A trigger on SQLite must name no table but its own: Django rebuilds a table by dropping and renaming it, and SQLite
# refuses the renaming while another table's trigger points at a table that is missing for that moment.

_SQLITE_TRIGGERS = {
    "ops_audit_no_update": (
        EVENTS,
        f"BEFORE UPDATE ON {EVENTS} BEGIN SELECT RAISE(ABORT, '{APPEND_ONLY}'); END",
    ),
    "ops_audit_no_delete": (
        EVENTS,
        f"BEFORE DELETE ON {EVENTS} BEGIN SELECT RAISE(ABORT, '{APPEND_ONLY}'); END",
    ),
    # INSERT OR REPLACE removes the old row without firing a delete trigger.
    "ops_audit_no_replace": (
        EVENTS,
        f"BEFORE INSERT ON {EVENTS} WHEN EXISTS (SELECT 1 FROM {EVENTS} WHERE id = NEW.id)"
        f" BEGIN SELECT RAISE(ABORT, '{APPEND_ONLY}'); END",
    ),
    "ops_audit_no_second_key": (
        EVENTS,
        f"BEFORE INSERT ON {EVENTS} WHEN EXISTS ({_SAME_KEY_STORED})"
        f" BEGIN SELECT RAISE(ABORT, '{KEY_CONSTRAINTS[0]}'); END",
    ),
    "ops_audit_no_second_denial": (
        EVENTS,
        f"BEFORE INSERT ON {EVENTS} WHEN EXISTS (SELECT 1 FROM {EVENTS} WHERE denial_key = NEW.denial_key)"
        " BEGIN SELECT RAISE(ABORT, 'ops_audit_denial_once'); END",
    ),
    "ops_scope_no_update": (
        SCOPES,
        f"BEFORE UPDATE ON {SCOPES} BEGIN SELECT RAISE(ABORT, 'ops_scope_immutable'); END",
    ),
}
_POSTGRESQL_TRIGGERS = {
    "ops_audit_no_change": (EVENTS, "BEFORE UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION {function}()"),
    "ops_audit_no_truncate": (EVENTS, "BEFORE TRUNCATE ON {table} FOR EACH STATEMENT EXECUTE FUNCTION {function}()"),
    "ops_scope_no_update": (SCOPES, "BEFORE UPDATE ON {table} FOR EACH ROW EXECUTE FUNCTION {function}()"),
}
_POSTGRESQL_FUNCTION = "ops_grants_refuse_change"


def install_triggers(connection: BaseDatabaseWrapper) -> None:
    """Create the triggers that are missing; without our tables this does nothing."""
    missing = missing_triggers(connection)
    if not missing:
        return
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                f"CREATE OR REPLACE FUNCTION {_POSTGRESQL_FUNCTION}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
                " RAISE EXCEPTION '% refuses %: its rows never change', TG_TABLE_NAME, TG_OP"
                " USING ERRCODE = 'insufficient_privilege'; END $$"
            )
            for name in missing:
                table, rest = _POSTGRESQL_TRIGGERS[name]
                body = rest.format(table=table, function=_POSTGRESQL_FUNCTION)
                cursor.execute(f"DROP TRIGGER IF EXISTS {name} ON {table}")
                cursor.execute(f"CREATE TRIGGER {name} {body}")
                # ALWAYS: also for a session that replays as a replica, which skips ordinary triggers.
                cursor.execute(f"ALTER TABLE {table} ENABLE ALWAYS TRIGGER {name}")
            return
        for name in missing:
            cursor.execute(f"DROP TRIGGER IF EXISTS {name}")
            cursor.execute(f"CREATE TRIGGER {name} {_SQLITE_TRIGGERS[name][1]}")


def drop_triggers(connection: BaseDatabaseWrapper) -> None:
    """Remove the triggers, for a test that has to empty the tables."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            for name, (table, _) in _POSTGRESQL_TRIGGERS.items():
                cursor.execute("SELECT to_regclass(%s) IS NOT NULL", [table])
                if cursor.fetchone()[0]:
                    cursor.execute(f"DROP TRIGGER IF EXISTS {name} ON {table}")
            return
        for name in _SQLITE_TRIGGERS:
            cursor.execute(f"DROP TRIGGER IF EXISTS {name}")


@contextmanager
def audit_triggers_dropped(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Run a block, such as the flush after a test, without the triggers."""
    drop_triggers(connection)
    try:
        yield
    finally:
        install_triggers(connection)


def missing_triggers(connection: BaseDatabaseWrapper) -> list[str]:
    """Return the triggers that should be there and are not, or are disabled, or say something else by now."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT name, to_regclass(name) IS NOT NULL FROM unnest(%s::text[]) name", [[EVENTS, SCOPES]]
            )
            tables = dict(cursor.fetchall())
            cursor.execute(
                "SELECT tgname FROM pg_trigger WHERE tgenabled = 'A' AND NOT tgisinternal"
                " AND tgrelid = ANY(SELECT to_regclass(name) FROM unnest(%s::text[]) name)",
                [[EVENTS, SCOPES]],
            )
            there = {row[0] for row in cursor.fetchall()}
            return [name for name, (table, _) in _POSTGRESQL_TRIGGERS.items() if tables[table] and name not in there]
        if connection.vendor != "sqlite":
            return []
        cursor.execute("SELECT type, name, sql FROM sqlite_master WHERE type IN ('table', 'trigger')")
        rows = cursor.fetchall()
    existing = {name for kind, name, _ in rows if kind == "table"}
    bodies = {name: text for kind, name, text in rows if kind == "trigger"}
    return [
        name
        for name, (table, body) in _SQLITE_TRIGGERS.items()
        if table in existing and bodies.get(name) != f"CREATE TRIGGER {name} {body}"
    ]
