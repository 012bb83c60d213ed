"""This app's raw SQL, for PostgreSQL and SQLite: the triggers that keep the totals of streams, their recount, and what
reads them.

Raw because Django has neither triggers nor a statement that compares what is counted with what is kept, and takes three
times as long to put the reading statement together as the databases to answer it (measured). Table names are written
out: the app label never changes. Unlike the audit trail's, these triggers do not fire in a session that replays
as a replica: it is sent the totals themselves.
"""
# ruff: noqa: S608 - what is put together here are constants of this module; values are parameters

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from django.db import DEFAULT_DB_ALIAS, connections, transaction

from opsconsole.jobs.models.totals import EXHAUSTED, LAST_EMAIL_ATTEMPT, Stream

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

TOTALS = "ops_jobs_streamtotal"
ROUTING_KIND = "route_report"
TABLES: dict[Stream, str] = {
    Stream.ROUTING: "ops_jobs_job",
    Stream.ACTIONS: "ops_jobs_actiondelivery",
    Stream.NOTIFICATIONS: "ops_jobs_notificationdelivery",
    Stream.EMAILS: "ops_jobs_emaildelivery",
    Stream.WORKFLOWS: "ops_jobs_workflowrun",
    Stream.EVIDENCE: "ops_jobs_evidencerequest",
}
ONLY: dict[Stream, str] = {Stream.ROUTING: f"{{row}}kind = '{ROUTING_KIND}'"}
"""Which rows of the table belong to a stream, where not all do. Neither that nor a row's tenant ever changes."""
STATES: dict[Stream, str] = {
    Stream.EMAILS: f"CASE WHEN {{row}}state = 'retrying' AND {{row}}attempt_count >= {LAST_EMAIL_ATTEMPT}"
    f" THEN '{EXHAUSTED}' ELSE {{row}}state END"
}
"""The state under which a row is counted, where it is not its own."""


def _state(stream: Stream, row: str = "") -> str:
    return STATES.get(stream, "{row}state").format(row=row)


def _only(stream: Stream, word: str, row: str = "") -> str:
    return f" {word} {ONLY[stream].format(row=row)}" if stream in ONLY else ""


def _trigger(stream: Stream, event: str) -> str:
    return f"ops_total_{stream.value}_{event}"


# --- PostgreSQL -------------------------------------------------------------------------------------------------------
# A statement is counted at once, however many rows it touches. A writer takes a part of the total that nobody has
# locked, or adds one, and so waits for nobody: with a fixed number of parts, two transactions that write to the same
# streams in another order would sooner or later wait for each other, and one of them would be undone.

_POSTGRESQL_EVENTS = {
    "added": "AFTER INSERT ON {table} REFERENCING NEW TABLE AS added",
    "changed": "AFTER UPDATE ON {table} REFERENCING OLD TABLE AS removed NEW TABLE AS added",
    "removed": "AFTER DELETE ON {table} REFERENCING OLD TABLE AS removed",
    "emptied": "AFTER TRUNCATE ON {table}",
}
_POSTGRESQL_BODY = """
DECLARE
    who text;
    old_state text;
    new_state text;
    is_counted boolean;
    are_many boolean;
    one record;
BEGIN
    SELECT {first} INTO who, old_state, new_state, is_counted, are_many FROM {tables} LIMIT 1;
    IF NOT FOUND OR NOT are_many AND (NOT is_counted OR old_state = new_state) THEN
        RETURN NULL;
    END IF;
    IF NOT are_many THEN
        {single}
        RETURN NULL;
    END IF;
    FOR one IN SELECT tenant, state, sum(n) AS n FROM ({rows}) AS touched GROUP BY 1, 2 HAVING sum(n) <> 0 LOOP
        {counted}
    END LOOP;
    RETURN NULL;
END
"""
# Locked and changed by one statement: each one costs a writer of a single row as much as the row.
_POSTGRESQL_COUNTED = """UPDATE {totals} SET count = count + {n} WHERE id = (SELECT id FROM {totals}
            WHERE stream = '{stream}' AND tenant = {tenant} AND state = {state} LIMIT 1 FOR UPDATE SKIP LOCKED);
        IF NOT FOUND THEN
            INSERT INTO {totals} (tenant, stream, state, count) VALUES ({tenant}, '{stream}', {state}, {n});
        END IF;"""
_POSTGRESQL_EMPTIED = "BEGIN DELETE FROM {totals} WHERE stream = '{stream}'; RETURN NULL; END"
_SIGNS = {"added": {"added": 1}, "removed": {"removed": -1}, "changed": {"removed": -1, "added": 1}}


def _body(stream: Stream, event: str) -> str:
    """Return what a trigger does: most statements touch one row, and grouping one row costs more than counting it."""
    if event == "emptied":
        return _POSTGRESQL_EMPTIED.format(totals=TOTALS, stream=stream.value)
    signs = _SIGNS[event]
    one_of = next(iter(signs))
    states = [_state(stream, f"{table}.") if table in signs else "NULL" for table in ("removed", "added")]
    is_counted = ONLY[stream].format(row=f"{one_of}.") if stream in ONLY else "true"
    rows = " UNION ALL ".join(
        f"SELECT tenant, {_state(stream)} AS state, {sign} AS n FROM {table}{_only(stream, 'WHERE')}"
        for table, sign in signs.items()
    )
    own = {"removed": "old_state", "added": "new_state"}
    return _POSTGRESQL_BODY.format(
        first=f"{one_of}.tenant, {', '.join(states)}, {is_counted}, EXISTS (SELECT 1 FROM {one_of} OFFSET 1)",
        tables=", ".join(signs),
        single="\n        ".join(_counted(stream, "who", own[table], str(sign)) for table, sign in signs.items()),
        rows=rows,
        counted=_counted(stream, "one.tenant", "one.state", "one.n"),
    )


def _counted(stream: Stream, tenant: str, state: str, n: str) -> str:
    return _POSTGRESQL_COUNTED.format(totals=TOTALS, stream=stream.value, tenant=tenant, state=state, n=n)


def _install_on_postgresql(connection: BaseDatabaseWrapper, stream: Stream) -> None:
    table = TABLES[stream]
    with connection.cursor() as cursor:
        for event, when in _POSTGRESQL_EVENTS.items():
            name = _trigger(stream, event)
            cursor.execute(
                f"CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql"
                f" AS $body${_body(stream, event)}$body$"
            )
            cursor.execute(f"DROP TRIGGER IF EXISTS {name} ON {table}")
            cursor.execute(
                f"CREATE TRIGGER {name} {when.format(table=table)} FOR EACH STATEMENT EXECUTE FUNCTION {name}()"
            )


def _missing_on_postgresql(connection: BaseDatabaseWrapper) -> list[str]:
    with connection.cursor() as cursor:
        tables = [*TABLES.values(), TOTALS]
        cursor.execute("SELECT name FROM unnest(%s::text[]) name WHERE to_regclass(name) IS NOT NULL", [tables])
        existing = {row[0] for row in cursor.fetchall()}
        cursor.execute(
            "SELECT t.tgname, p.prosrc FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid WHERE NOT t.tgisinternal"
            " AND t.tgenabled IN ('O', 'A') AND t.tgrelid = ANY(SELECT to_regclass(name) FROM unnest(%s::text[]) name)",
            [tables],
        )
        bodies = dict(cursor.fetchall())
    return [
        _trigger(stream, event)
        for stream, table in TABLES.items()
        for event in _POSTGRESQL_EVENTS
        if {table, TOTALS} <= existing and bodies.get(_trigger(stream, event)) != _body(stream, event)
    ]


# --- SQLite -----------------------------------------------------------------------------------------------------------
# There is one writer at a time, so a total has one part; it is made with the first row and stays. Without a part
# nothing is taken away: when all tables are emptied, that of the totals may have been the first.

_PART = f"FROM {TOTALS} WHERE stream = '{{stream}}' AND tenant = {{row}}tenant AND state = {{state}}"
_ADD = (
    f"INSERT INTO {TOTALS} (tenant, stream, state, count) SELECT {{row}}tenant, '{{stream}}', {{state}}, 0"
    f" WHERE NOT EXISTS (SELECT 1 {_PART}); UPDATE {TOTALS} SET count = count + 1 WHERE id = (SELECT MIN(id) {_PART});"
)
_TAKE = f"UPDATE {TOTALS} SET count = count - 1 WHERE id = (SELECT MIN(id) {_PART});"


def _sqlite_triggers(stream: Stream) -> dict[str, str]:
    table, new, old = TABLES[stream], _state(stream, "NEW."), _state(stream, "OLD.")
    add = _ADD.format(stream=stream.value, row="NEW.", state=new)
    take = _TAKE.format(stream=stream.value, row="OLD.", state=old)
    bodies = {
        "added": f"AFTER INSERT ON {table}{_only(stream, 'WHEN', 'NEW.')} BEGIN {add} END",
        "changed": f"AFTER UPDATE ON {table} WHEN {old} <> {new}{_only(stream, 'AND', 'NEW.')} BEGIN {take} {add} END",
        "removed": f"AFTER DELETE ON {table}{_only(stream, 'WHEN', 'OLD.')} BEGIN {take} END",
    }
    names = {_trigger(stream, event): body for event, body in bodies.items()}
    return {name: f"CREATE TRIGGER {name} {body}" for name, body in names.items()}


def _install_on_sqlite(connection: BaseDatabaseWrapper, stream: Stream) -> None:
    with connection.cursor() as cursor:
        for name, statement in _sqlite_triggers(stream).items():
            cursor.execute(f"DROP TRIGGER IF EXISTS {name}")
            cursor.execute(statement)


def _missing_on_sqlite(connection: BaseDatabaseWrapper) -> list[str]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT type, name, sql FROM sqlite_master WHERE type IN ('table', 'trigger')")
        rows = cursor.fetchall()
    existing = {name for kind, name, _ in rows if kind == "table"}
    bodies = {name: text for kind, name, text in rows if kind == "trigger"}
    return [
        name
        for stream, table in TABLES.items()
        for name, statement in _sqlite_triggers(stream).items()
        if {table, TOTALS} <= existing and bodies.get(name) != statement
    ]


# --- reading ----------------------------------------------------------------------------------------------------------
# The first of a tenant's records in a state is one look into an index. Its condition is repeated word for word, since
# PostgreSQL does not find out that another one means the same.

_DUE = "state IN ('pending', 'retrying')"
_DUE_AT = "COALESCE(next_attempt_at, created_at)"
_RUNS = ("created", "dispatch_pending", "queued", "running", "waiting", "paused", "repair_required")
FIRST: dict[Stream, tuple[tuple[str, ...], str, str]] = {
    Stream.ROUTING: (("pending", "retrying"), f"kind = '{ROUTING_KIND}' AND {_DUE}", "available_at"),
    Stream.ACTIONS: (("pending", "retrying"), _DUE, _DUE_AT),
    Stream.NOTIFICATIONS: (("pending", "retrying"), _DUE, _DUE_AT),
    Stream.EMAILS: (("pending", "retrying", EXHAUSTED), _DUE, _DUE_AT),
    Stream.WORKFLOWS: (_RUNS, "NOT (state = 'succeeded')", "updated_at"),
    Stream.EVIDENCE: (("pending", "fetching"), "NOT (state = 'available')", "updated_at"),
}
"""Which states of a stream wait, the condition of the index that has them, and the time that it is ordered by."""


def _first(stream: Stream) -> str:
    states, condition, time = FIRST[stream]
    listed = ", ".join(f"'{state}'" for state in states)
    state = f"CASE t.state WHEN '{EXHAUSTED}' THEN 'retrying' ELSE t.state END" if EXHAUSTED in states else "t.state"
    return (
        f"WHEN t.stream = '{stream.value}' AND t.state IN ({listed}) THEN (SELECT {time} FROM {TABLES[stream]}"
        f" WHERE tenant = t.tenant AND state = {state} AND {condition} ORDER BY {time} LIMIT 1)"
    )


TOTALS_WITH_FIRST = (
    f"SELECT stream, state, SUM(n), MIN(CASE {' '.join(_first(stream) for stream in TABLES)} END) FROM"
    " (SELECT tenant, stream, state, SUM(count) AS n FROM ({rows}) AS parts GROUP BY tenant, stream, state) AS t"
    " GROUP BY stream, state"
)
"""Around a query of totals: of each stream and state how many records there are, and the first time of what waits."""


# --- both -------------------------------------------------------------------------------------------------------------


def missing_triggers(connection: BaseDatabaseWrapper) -> list[str]:
    """Return the triggers that should be there and are not, or are disabled, or say something else by now."""
    if connection.vendor == "postgresql":
        return _missing_on_postgresql(connection)
    return _missing_on_sqlite(connection) if connection.vendor == "sqlite" else []


def install_triggers(connection: BaseDatabaseWrapper) -> None:
    """Create the triggers that are missing, and count what is there already; without our tables this does nothing.

    On PostgreSQL a new trigger locks its table against writers until the count is committed with it.
    """
    missing = set(missing_triggers(connection))
    install = _install_on_postgresql if connection.vendor == "postgresql" else _install_on_sqlite
    for stream in TABLES:
        if any(_trigger(stream, event) in missing for event in _POSTGRESQL_EVENTS):
            with transaction.atomic(using=connection.alias):
                install(connection, stream)
                _recount(connection, stream)


def drop_triggers(connection: BaseDatabaseWrapper) -> None:
    """Remove the triggers: before SQLite rebuilds the table of the totals, which they name."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            for stream in TABLES:
                for event in _POSTGRESQL_EVENTS:
                    # CASCADE: the trigger goes with what it calls, and a table that is gone is in nobody's way.
                    cursor.execute(f"DROP FUNCTION IF EXISTS {_trigger(stream, event)}() CASCADE")
            return
        for stream in TABLES:
            for name in _sqlite_triggers(stream):
                cursor.execute(f"DROP TRIGGER IF EXISTS {name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A total that was wrong, and by how much it was raised (or, negative, lowered) to be right again."""

    stream: Stream
    tenant: str
    state: str
    by: int


def recount_totals(*, streams: Iterable[Stream] = tuple(Stream), using: str = DEFAULT_DB_ALIAS) -> list[Drift]:
    """Compare each total with a count of its table, put right what differs, and return that; for reconciliation.

    Writers go on meanwhile and are not waited for: count and total are read by one statement, for which what others
    commit has either happened in both or in neither, and the difference is added. Each stream is a transaction.
    """
    connection = connections[using]
    found = []
    for stream in streams:
        with transaction.atomic(using=using):
            if connection.vendor == "postgresql":
                with connection.cursor() as cursor:
                    # One recount at a time: two would add the same difference. No writer needs this lock.
                    cursor.execute(f"LOCK TABLE {TOTALS} IN SHARE UPDATE EXCLUSIVE MODE")
            found += _recount(connection, stream)
    return found


def _recount(connection: BaseDatabaseWrapper, stream: Stream) -> list[Drift]:
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {TOTALS} (tenant, stream, state, count) SELECT tenant, %(stream)s, state, SUM(n) FROM"
            f" (SELECT tenant, {_state(stream)} AS state, 1 AS n FROM {TABLES[stream]}{_only(stream, 'WHERE')}"
            f" UNION ALL SELECT tenant, state, -count FROM {TOTALS} WHERE stream = %(stream)s) AS d"
            " GROUP BY tenant, state HAVING SUM(n) <> 0 RETURNING tenant, state, count",
            {"stream": stream.value},
        )
        drifts = [Drift(stream=stream, tenant=t, state=state, by=int(count)) for t, state, count in cursor.fetchall()]
        if connection.vendor == "postgresql":
            # Put the parts together that a burst of writers has left; one that somebody is at is left alone.
            cursor.execute(
                f"WITH gone AS (DELETE FROM {TOTALS} WHERE id = ANY(ARRAY(SELECT id FROM {TOTALS}"
                " WHERE stream = %(stream)s FOR UPDATE SKIP LOCKED)) RETURNING tenant, state, count)"
                f" INSERT INTO {TOTALS} (tenant, stream, state, count)"
                " SELECT tenant, %(stream)s, state, SUM(count) FROM gone GROUP BY tenant, state HAVING SUM(count) <> 0",
                {"stream": stream.value},
            )
    return drifts
