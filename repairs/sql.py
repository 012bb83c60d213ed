"""This app's raw SQL, each in both dialects: releasing a page of claims, and deleting a page of rows.

Raw, because the ORM knows no statement that claims, changes and records in one go: a page of stale leases is one
statement on PostgreSQL, many times as fast as one statement for each row and one for its record. SQLite
has one writer at a time, so there it is three statements in one transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any
from uuid import UUID

from django.db import IntegrityError, connection, models, transaction
from django.db.models import Value

from opsconsole.core.canonical_json import canonical_json
from opsconsole.core.database import AnyOf, RowWriter, is_unique_violation, plain_value
from opsconsole.core.ids import new_id
from opsconsole.core.keyset import RowComparison
from opsconsole.jobs.models import Job, JobState
from repairs.models import SweepActionType, SweepRepair

Key = tuple[datetime, UUID]
"""A row's place in its page: when its claim ended, and its id."""

_ROWS = (
    "id", "run", "tenant", "action_type", "entity_type", "entity_id", "operation_key", "before", "after", "planned_by",
    "applied_at",
)  # fmt: skip
_WRITER = RowWriter(SweepRepair, _ROWS, suffix="ON CONFLICT (operation_key) DO NOTHING")
_COLUMNS = ", ".join("run_id" if name == "run" else name for name in _ROWS)
# RFC 9562: 48 bits of milliseconds, then the version and the variant over random bits. Made once a page; its rows are
# numbered in the last 32 bits, which costs a third of making each and lets every index of ids grow at its end.
_UUID7 = (
    "set_bit(set_bit(overlay(uuid_send(gen_random_uuid()) placing"
    " substring(int8send(floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3) FROM 1 FOR 6),"
    " 52, 1), 53, 1)"
)
_NUMBERED = "encode(overlay((SELECT {first}) placing int4send(row_number() OVER ()::int) FROM 13 FOR 4), 'hex')::uuid"
_ISO = "to_char({column} AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')"


class HeldBy(Enum):
    """How the job that has a row is found: the column of the job, and what it is compared with."""

    RECORD = ("record_id", "t.id::text", "id")
    TOKEN = ("lease_token", "t.holder", "holder")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """A table whose rows are claimed for a time, and what is done with a row whose time is over.

    ``state`` is that of a claimed row ("" = every row is one). ``changes`` are assignments as both databases read them,
    with ``%(now)s``; none deletes the row. ``marker`` is the column that says how old the claim is; ``before`` and
    ``after`` are what the record says, the marker under ``marker_name``. ``held_by`` says how a row's job is found, the
    lease of which is renewed with the row's: while that one lives, so does the row's. ``only`` is one more condition,
    as both databases read it.
    """

    model: type[models.Model]
    entity_type: str
    action_type: SweepActionType
    key: str  # the first part of the operation key
    marker: str
    marker_name: str
    state: str
    changes: Mapping[str, str]
    after: Mapping[str, str | bool]
    held_by: HeldBy | None = None
    only: str = ""

    @property
    def table(self) -> str:
        return self.model._meta.db_table

    def before(self, marker: str) -> dict[str, str]:
        """Return what a row was like."""
        return {self.marker_name: marker} | ({"state": self.state} if self.state else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """What a page has come to; ``last`` is where the next one begins, ``None`` at the end."""

    scanned: int
    repaired: int
    last: Key | None


def claimed(claims: Claims, *, ended_before: datetime) -> models.QuerySet[Any]:
    """Return the rows whose claim ended at ``ended_before`` or earlier."""
    rows = claims.model._default_manager.filter(**{f"{claims.marker}__lte": ended_before})
    if claims.state:
        rows = rows.filter(state=claims.state)
    return rows.extra(where=[claims.only]) if claims.only else rows  # noqa: S610  (a constant of this code's)


def _alive(claims: Claims) -> str:
    """Return the condition that no job with a living lease has the row, as PostgreSQL reads it."""
    if claims.held_by is None:
        return ""
    column, own, _ = claims.held_by.value
    record = " AND j.record_type = %(entity)s" if claims.held_by is HeldBy.RECORD else ""
    return (
        f" AND NOT EXISTS (SELECT 1 FROM {Job._meta.db_table} j WHERE j.{column} = {own}{record}"  # noqa: S608
        " AND j.state = 'running' AND j.lease_expires_at > %(now)s)"
    )


def _without_living(claims: Claims, rows: list[dict[str, Any]], now: datetime) -> list[dict[str, Any]]:
    """Leave out the rows that a job with a living lease has."""
    if claims.held_by is None or not rows:
        return rows
    column, _, own = claims.held_by.value
    living = Job.objects.filter(
        AnyOf(column, [str(row[own]) for row in rows]), state=JobState.RUNNING, lease_expires_at__gt=now
    )
    if claims.held_by is HeldBy.RECORD:
        living = living.filter(record_type=claims.entity_type)
    held = set(living.values_list(column, flat=True))
    return [row for row in rows if str(row[own]) not in held]


def release_claims(
    claims: Claims, *, run_id: UUID, by: str, ended_before: datetime, now: datetime, after: Key | None, size: int
) -> Released:
    """Release the oldest ``size`` claims that ended at ``ended_before`` or earlier, beyond ``after``; record each.

    In the caller's transaction. A row that somebody holds, whose job is alive, that has changed meanwhile, or whose
    very claim was released before (its operation key is there) is left alone, and counted as looked at.
    """
    given = (claims, run_id, by, ended_before, now, after, size)
    return _release_in_one(*given) if connection.vendor == "postgresql" else _release_in_three(*given)


def _release_in_one(
    claims: Claims, run_id: UUID, by: str, ended_before: datetime, now: datetime, after: Key | None, size: int
) -> Released:
    given = (claims, run_id, by, ended_before, now, after, size)
    try:
        with transaction.atomic():
            return _release_by_place(*given)
    except IntegrityError as error:
        if not is_unique_violation(error):
            raise
    except _Moved:
        pass
    return _release_by_id(*given)


class _Moved(Exception):
    """A row that was claimed was not changed: it was written meanwhile, and lies in another place."""


def _release_by_place(
    claims: Claims, run_id: UUID, by: str, ended_before: datetime, now: datetime, after: Key | None, size: int
) -> Released:
    """Release a page whose rows are found by where they lie, and none of which has been released before.

    That is nearly every page. Each look into an index costs a row as much as writing it does (measured), so none is
    made that does not add to the index. Raises ``_Moved`` or ``IntegrityError``, upon which nothing may be kept.
    """
    table, guard = claims.table, _guard(claims)
    change = f"UPDATE {table} t SET {_assignments(claims)}" if claims.changes else f"DELETE FROM {table} t"  # noqa: S608
    statement = (
        f"WITH seen AS MATERIALIZED ({_seen(claims, after, 't.ctid AS place,')}),"  # noqa: S608
        f" claimed AS MATERIALIZED (SELECT t.ctid AS place, {_described(claims)}"
        f" FROM {table} t WHERE t.ctid = ANY(ARRAY(SELECT place FROM seen)) AND {guard}{_alive(claims)}"
        " FOR UPDATE OF t SKIP LOCKED),"
        f" written AS ({_inserted()}),"
        f" changed AS ({change} WHERE t.ctid = ANY(ARRAY(SELECT place FROM claimed)) AND {guard} RETURNING 1)"
        " SELECT (SELECT count(*) FROM seen), (SELECT count(*) FROM claimed), (SELECT count(*) FROM changed),"
        f" last.marker, last.id {_LAST}"
    )
    with connection.cursor() as cursor:
        cursor.execute(statement, _parameters(claims, run_id, by, ended_before, now, after, size))
        scanned, held, repaired, last_at, last_id = cursor.fetchone()
    if repaired != held:
        raise _Moved
    last = (last_at.astimezone(UTC), last_id) if scanned == size else None
    return Released(scanned=scanned, repaired=repaired, last=last)


def _release_by_id(
    claims: Claims, run_id: UUID, by: str, ended_before: datetime, now: datetime, after: Key | None, size: int
) -> Released:
    """Release a page, leaving alone what was released before."""
    table, guard = claims.table, _guard(claims)
    change = f"UPDATE {table} t SET {_assignments(claims)}" if claims.changes else f"DELETE FROM {table} t"  # noqa: S608
    # Arrays in the place of joins: of what a statement writes the planner knows no numbers, and takes a page of
    # thousands for a few rows, to be compared each with each.
    statement = (
        f"WITH seen AS MATERIALIZED ({_seen(claims, after)}),"  # noqa: S608
        f" claimed AS MATERIALIZED (SELECT {_described(claims)}"
        f" FROM {table} t WHERE t.id = ANY(ARRAY(SELECT id FROM seen)) AND {guard}{_alive(claims)}"
        " FOR UPDATE OF t SKIP LOCKED),"
        f" written AS ({_inserted()} ON CONFLICT (operation_key) DO NOTHING RETURNING entity_id),"
        f" changed AS ({change} WHERE t.id = ANY(ARRAY(SELECT entity_id::uuid FROM written)) AND {guard} RETURNING 1)"
        f" SELECT (SELECT count(*) FROM seen), (SELECT count(*) FROM changed), last.marker, last.id {_LAST}"
    )
    with connection.cursor() as cursor:
        cursor.execute(statement, _parameters(claims, run_id, by, ended_before, now, after, size))
        scanned, repaired, last_at, last_id = cursor.fetchone()
    last = (last_at.astimezone(UTC), last_id) if scanned == size else None
    return Released(scanned=scanned, repaired=repaired, last=last)


_LAST = (
    "FROM (SELECT 1) AS one LEFT JOIN (SELECT marker, id FROM seen ORDER BY marker DESC, id DESC LIMIT 1) AS last"
    " ON true"
)


def _guard(claims: Claims) -> str:
    state = " AND t.state = %(state)s" if claims.state else ""
    return f"t.{claims.marker} <= %(ended_before)s{state}" + (f" AND {claims.only}" if claims.only else "")


def _seen(claims: Claims, after: Key | None, columns: str = "") -> str:
    marker = claims.marker
    beyond = f" AND (t.{marker}, t.id) > (%(after_at)s, %(after_id)s)" if after is not None else ""
    return (
        f"SELECT {columns} t.id, t.{marker} AS marker FROM {claims.table} t WHERE {_guard(claims)}{beyond}"  # noqa: S608
        f" ORDER BY t.{marker}, t.id LIMIT %(size)s"
    )


def _described(claims: Claims) -> str:
    return f"t.tenant, t.id::text AS name, {_ISO.format(column=f't.{claims.marker}')} AS marker"


def _inserted() -> str:
    return (
        f"INSERT INTO {SweepRepair._meta.db_table} ({_COLUMNS})"  # noqa: S608
        f" SELECT {_NUMBERED.format(first=_UUID7)}, %(run)s, tenant, %(action)s, %(entity)s, name,"
        " %(key)s || ':' || name || ':' || marker, %(head)s || marker || %(tail)s, %(after)s, %(by)s, %(now)s"
        # In the order of the operation keys: neighbours in an index are then written one after the other.
        " FROM (SELECT * FROM claimed ORDER BY name) AS claimed"
    )


def _parameters(
    claims: Claims, run_id: UUID, by: str, ended_before: datetime, now: datetime, after: Key | None, size: int
) -> dict[str, Any]:
    head, _, tail = canonical_json(claims.before("\0")).partition("\\u0000")
    parameters: dict[str, Any] = {
        "ended_before": ended_before, "state": claims.state, "size": size, "key": claims.key, "run": run_id,
        "action": claims.action_type.value, "entity": claims.entity_type, "head": head, "tail": tail,
        "after": canonical_json(dict(claims.after)), "by": by, "now": now,
    }  # fmt: skip
    return parameters | ({"after_at": after[0], "after_id": after[1]} if after is not None else {})


def _release_in_three(
    claims: Claims, run_id: UUID, by: str, ended_before: datetime, now: datetime, after: Key | None, size: int
) -> Released:
    marker = claims.marker
    rows = claimed(claims, ended_before=ended_before)
    columns = ("id", "tenant", marker) + (() if claims.held_by is None else (claims.held_by.value[2],))
    found = list(beyond(rows, (marker, "id"), after).values(*columns)[:size])
    free = [(row["id"], row["tenant"], row[marker]) for row in _without_living(claims, found, now)]
    keys = {_operation_key(claims, row_id, at): row_id for row_id, _tenant, at in free}
    after_text = canonical_json(dict(claims.after))
    written = record_repairs(
        [
            SweepRepair(
                id=new_id(),
                run_id=run_id,
                tenant=tenant,
                action_type=claims.action_type,
                entity_type=claims.entity_type,
                entity_id=str(row_id),
                operation_key=_operation_key(claims, row_id, at),
                before=canonical_json(claims.before(_iso(at))),
                after=after_text,
                planned_by=by,
                applied_at=now,
            )
            for row_id, tenant, at in free
        ]
    )
    repaired = _change(claims, [keys[key] for key in written], ended_before, now) if written else 0
    last = (found[-1][marker], found[-1]["id"]) if len(found) == size else None
    return Released(scanned=len(found), repaired=repaired, last=last)


def _change(claims: Claims, ids: list[UUID], ended_before: datetime, now: datetime) -> int:
    # Names of tables and columns are constants of this module's callers; every value is a parameter.
    table = claims.table
    change = f"UPDATE {table} SET {_assignments(claims)}" if claims.changes else f"DELETE FROM {table}"  # noqa: S608
    state = " AND state = %(state)s" if claims.state else ""
    state += f" AND {claims.only}" if claims.only else ""
    with connection.cursor() as cursor:
        cursor.execute(
            f"{change} WHERE id IN (SELECT value FROM json_each(%(ids)s))"  # noqa: S608
            f" AND {claims.marker} <= %(ended_before)s{state}",
            {
                "ids": canonical_json([row_id.hex for row_id in ids]),
                "ended_before": plain_value(connection, ended_before),
                "now": plain_value(connection, now),
                "state": claims.state,
            },
        )
        return int(cursor.rowcount)


def _assignments(claims: Claims) -> str:
    return ", ".join(f"{column} = {value}" for column, value in claims.changes.items())


def _operation_key(claims: Claims, row_id: UUID, at: datetime) -> str:
    return f"{claims.key}:{row_id}:{_iso(at)}"


def _iso(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"


def beyond(rows: models.QuerySet[Any], columns: tuple[str, ...], after: Sequence[Any] | None) -> models.QuerySet[Any]:
    """Return ``rows`` in the order of ``columns``, those after one place in it: how every sweep pages."""
    ordered = rows.order_by(*columns)
    if after is None:
        return ordered
    fields = [rows.model._meta.get_field(name) for name in columns]
    values = tuple(Value(value, output_field=field) for value, field in zip(after, fields, strict=True))
    return ordered.filter(RowComparison(columns, values, ">"))


def record_repairs(rows: Sequence[SweepRepair]) -> set[str]:
    """Write what a sweep changed, and return the operation keys that were new: only those may be changed."""
    columns = [field.attname for field in _WRITER.fields]
    values = [[getattr(row, name) for name in columns] for row in rows]
    if connection.vendor == "postgresql":
        return _WRITER.insert_returning(values, "operation_key")
    # Which of many were new is asked at once: RETURNING would take a statement for each.
    _WRITER.insert(values)
    new = SweepRepair.objects.filter(AnyOf("id", [row.id for row in rows]))
    return set(new.values_list("operation_key", flat=True))


def delete_rows(model: type[models.Model], column: str, values: Sequence[Any]) -> int:
    """Delete the rows whose ``column`` is one of ``values``, and return how many those were.

    Without the ORM's collector, which reads every row that depends on one before it deletes any: the caller knows what
    depends on what, and the database refuses what was forgotten.
    """
    if not values:
        return 0
    field: Any = model._meta.get_field(column)
    table = model._meta.db_table
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            kind = (field.db_type(connection) or "text").split("(")[0]
            statement = f"DELETE FROM {table} WHERE {field.column} = ANY(%s::{kind}[])"  # noqa: S608
            cursor.execute(statement, [list(values)])
        else:
            given = canonical_json([plain_value(connection, value) for value in values])
            statement = f"DELETE FROM {table} WHERE {field.column} IN (SELECT value FROM json_each(%s))"  # noqa: S608
            cursor.execute(statement, [given])
        return max(int(cursor.rowcount), 0)
