"""What both databases need to be told differently: the clock, row locks, and inserting many rows at once."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

from django.db import DEFAULT_DB_ALIAS, IntegrityError, connections, models
from django.db.models import Expression, F

from opsconsole.core.clock import boot_now

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models.sql.compiler import SQLCompiler


CLOCK_LASTS_SECONDS = 30.0
_clocks: dict[str, tuple[datetime, float]] = {}


def database_now(using: str = DEFAULT_DB_ALIAS) -> datetime:
    """Return the database's clock, aware and in UTC: what decides what is stale (C12).

    Inside a transaction this is the time of the call, not of the transaction's start. SQLite lives in this process, so
    its clock is this host's.
    """
    connection = connections[using]
    if connection.vendor != "postgresql":
        return datetime.now(UTC)
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        row = cursor.fetchone()
    moment: datetime = row[0]
    return moment.astimezone(UTC)


def recent_database_now(using: str = DEFAULT_DB_ALIAS) -> datetime:
    """Return the database's clock for what a page tells: each process reads it twice a minute and counts on between.

    Nothing is decided by it: what is stale is decided by ``database_now`` (C12).
    """
    if connections[using].vendor != "postgresql":
        return database_now(using)
    read = _clocks.get(using)
    if read is None or boot_now() - read[1] >= CLOCK_LASTS_SECONDS:
        read = _clocks[using] = (database_now(using), boot_now())
    return read[0] + timedelta(seconds=boot_now() - read[1])


def locked(queryset: models.QuerySet[Any], *, skip: bool = False, of: tuple[str, ...] = ("self",)) -> Any:
    """Return ``queryset`` locking its rows; on SQLite the IMMEDIATE transaction is the lock."""
    if connections[queryset.db].vendor != "postgresql":
        return queryset
    return queryset.select_for_update(skip_locked=skip, of=of)


def is_unique_violation(error: IntegrityError) -> bool:
    """Say whether a row was refused because another has its key, and not for what it holds."""
    return getattr(error.__cause__, "sqlstate", None) == "23505" or str(error).startswith("UNIQUE constraint failed")


def is_about_the_statement(error: Exception) -> bool:
    """Say whether a database has answered that it cannot do what it was asked: a bug, or a migration that is missing.

    SQLite's driver raises ``OperationalError`` for that as well.
    """
    return getattr(error.__cause__, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR


class AnyOf(Expression):
    """The condition that a field's value is one of ``values``, in one parameter however many they are.

    ``__in`` has a placeholder for each, which for a few hundred costs more than the query (measured).
    """

    conditional = True
    output_field = models.BooleanField()

    def __init__(self, field: str, values: Iterable[Any]) -> None:
        super().__init__()
        self.values = list(values)
        self._column: Any = F(field)

    def get_source_expressions(self) -> list[Any]:
        return [self._column]

    def set_source_expressions(self, exprs: Sequence[Any]) -> None:
        (self._column,) = exprs

    def as_sql(
        self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **_: Any
    ) -> tuple[str, tuple[str | int, ...]]:
        column, parameters = compiler.compile(self._column)
        if connection.vendor == "postgresql":
            kind = _array_type(self._column.output_field.db_type(connection))
            return f"{column} = ANY(%s::{kind}[])", (*parameters, _array(self.values))
        values = json.dumps([plain_value(connection, value) for value in self.values])
        return f"{column} IN (SELECT value FROM json_each(%s))", (*parameters, values)  # noqa: S608


class RowWriter:
    """Inserts many rows of one model with one statement: arrays on PostgreSQL, ``executemany`` on SQLite.

    ``bulk_create`` spends about four times the processor time on the same rows (measured), which is the difference
    between a drainer that keeps up and one that does not. Values are given in the order of ``columns`` as Python
    values; ids are ``UUID``, times aware.
    """

    def __init__(self, model: type[models.Model], columns: Sequence[str], *, suffix: str = "") -> None:
        self.model = model
        self.fields: list[models.Field[Any, Any]] = [cast(Any, model._meta.get_field(name)) for name in columns]
        self.suffix = suffix
        self._heads: dict[str, str] = {}
        self._kinds: list[str] = []

    def insert(self, rows: Iterable[Sequence[Any]], using: str = DEFAULT_DB_ALIAS) -> int:
        """Insert ``rows`` and return how many the database says it inserted."""
        listed = list(rows)
        if not listed:
            return 0
        connection = connections[using]
        with connection.cursor() as cursor:
            if connection.vendor == "postgresql":
                cursor.execute(*self._with_arrays(connection, listed))
                return int(cursor.rowcount)
            cursor.executemany(self._one_by_one(connection), [self._plain(connection, row) for row in listed])
            return max(int(cursor.rowcount), 0)

    def insert_returning(self, rows: Iterable[Sequence[Any]], column: str, using: str = DEFAULT_DB_ALIAS) -> set[str]:
        """Insert ``rows`` and return the text of ``column`` of those that were new (of the rest nothing)."""
        listed = list(rows)
        if not listed:
            return set()
        connection = connections[using]
        returning = f" RETURNING {connection.ops.quote_name(column)}"
        with connection.cursor() as cursor:
            if connection.vendor == "postgresql":
                statement, parameters = self._with_arrays(connection, listed)
                cursor.execute(statement + returning, parameters)
                return {str(row[0]) for row in cursor.fetchall()}
            statement = self._one_by_one(connection) + returning
            new: set[str] = set()
            for row in listed:
                cursor.execute(statement, self._plain(connection, row))
                found = cursor.fetchone()
                if found is not None:
                    new.add(str(found[0]))
            return new

    def _with_arrays(self, connection: BaseDatabaseWrapper, rows: list[Sequence[Any]]) -> tuple[str, list[str]]:
        """Return one statement for all rows, and its parameters: an array for each column.

        A column with the same value in every row, as most have it in a burst of failures, is an array of one. The first
        column is always a whole array, for it says how many rows there are.
        """
        if not self._kinds:
            self._kinds = [f"%s::{_array_type(field.db_type(connection))}[]" for field in self.fields]
        selected: list[str] = []
        same: list[str] = []
        varying: list[str] = []
        arrays: list[str] = []
        for kind, values in zip(self._kinds, zip(*rows, strict=True), strict=True):
            if varying and values.count(values[0]) == len(values):
                selected.append(f"({kind})[1]")
                same.append(_array(values[:1]))
            else:
                selected.append(f"given.c{len(varying)}")
                varying.append(kind)
                arrays.append(_array(values))
        names = ", ".join(f"c{number}" for number in range(len(varying)))
        source = f"SELECT {', '.join(selected)} FROM unnest({', '.join(varying)}) AS given({names})"  # noqa: S608
        return f"{self._head(connection)} {source} {self.suffix}", same + arrays

    def _one_by_one(self, connection: BaseDatabaseWrapper) -> str:
        return f"{self._head(connection)} VALUES ({', '.join(['%s'] * len(self.fields))}) {self.suffix}"

    def _head(self, connection: BaseDatabaseWrapper) -> str:
        if connection.vendor not in self._heads:
            quote = connection.ops.quote_name
            names = ", ".join(quote(str(field.column)) for field in self.fields)
            self._heads[connection.vendor] = f"INSERT INTO {quote(self.model._meta.db_table)} ({names})"
        return self._heads[connection.vendor]

    def _plain(self, connection: BaseDatabaseWrapper, row: Sequence[Any]) -> list[Any]:
        return [plain_value(connection, value) for value in row]


def _array_type(db_type: str | None) -> str:
    """Return a column's type without its length: an array element is checked by the column, not by the array."""
    return (db_type or "text").split("(")[0].replace("varchar", "text")


def _array(values: Sequence[Any]) -> str:
    """Return values of one column as the text of a PostgreSQL array.

    Written here because the driver's own arrays take four times the processor time (measured).
    """
    if not values:
        return "{}"
    try:
        # Most columns are texts with nothing in them that needs an escape: those are written at once.
        texts = '","'.join(values)
    except TypeError:
        return "{" + ",".join(map(_element, values)) + "}"
    if "\\" in texts or texts.count('"') != 2 * (len(values) - 1):
        return "{" + ",".join(map(_element, values)) + "}"
    return f'{{"{texts}"}}'


def _element(value: Any) -> str:
    # Texts first, for most columns have nothing else. Always quoted: an empty text, a word such as NULL, a comma or a
    # brace would mean something else.
    if type(value) is str:
        if '"' in value or "\\" in value:
            value = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{value}"'
    if value is None:
        return "NULL"
    if isinstance(value, UUID):
        return value.hex
    if isinstance(value, datetime):
        return f'"{value.isoformat()}"'
    if isinstance(value, bytes | bytearray | memoryview):
        return f'"\\\\x{value.hex()}"'
    return _element(str.__str__(value) if isinstance(value, str) else str(value))


def plain_value(connection: BaseDatabaseWrapper, value: Any) -> Any:
    """Return ``value`` as SQLite stores it."""
    if isinstance(value, UUID):
        return value.hex
    if isinstance(value, datetime):
        return connection.ops.adapt_datetimefield_value(value)
    return value
