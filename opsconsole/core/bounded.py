"""Several queries with a LIMIT each, sent as one statement: for pages that count a little of many things.

Raw because the ORM's union can't take sliced queries on SQLite. Each part is a query of the ORM, so that what an
operator may see is decided where it always is; only the frame around them is written here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from django.core.exceptions import EmptyResultSet
from django.db import connections
from django.db.models import QuerySet

from opsconsole.core.database import plain_value


def capped_counts(querysets: Sequence[QuerySet[Any]], most: int) -> list[int]:
    """Return how many rows each query has, ``most + 1`` for all that have more than ``most``."""
    parts, parameters = [], []
    for queryset in querysets:
        compiled = _compiled(queryset.order_by().values("pk")[: most + 1])
        if compiled is None:
            parts.append("0")
            continue
        parts.append(f"(SELECT COALESCE(SUM(1), 0) FROM ({compiled[0]}) AS t)")  # noqa: S608 - compiled by the ORM
        parameters += compiled[1]
    if not parts:
        return []
    with connections[querysets[0].db].cursor() as cursor:
        cursor.execute(f"SELECT {', '.join(parts)}", parameters)
        return [int(count) for count in cursor.fetchone()]


@dataclass(frozen=True, slots=True)
class Tally:
    """A part of ``rows_of`` with a row for each value that ``by`` has among the rows of a sliced query, alias ``t``.

    ``by`` and ``columns`` are expressions of that query; a column None is NULL.
    """

    rows: QuerySet[Any]
    by: str
    columns: Sequence[str | None]


def rows_of(querysets: Sequence[QuerySet[Any]], tallies: Sequence[Tally] = ()) -> list[tuple[Any, ...]]:
    """Return the rows of several ``values_list`` queries, and of what else has their columns, one after another.

    The columns have to be of the same types in all of them.
    """
    compiled = [(found, queryset) for queryset in querysets if (found := _compiled(queryset)) is not None]
    if not compiled:
        return []
    first: Any = compiled[0][1]
    compiler = _typed(first)
    parts = [(f"SELECT * FROM ({text}) AS t{number}", values) for number, ((text, values), _) in enumerate(compiled)]  # noqa: S608
    parts += [found for tally in tallies if (found := _tallied(tally, compiler)) is not None]
    return _fetch(
        compiler, " UNION ALL ".join(text for text, _ in parts), [one for _, values in parts for one in values]
    )


def rows_around(queryset: QuerySet[Any], statement: str) -> list[tuple[Any, ...]]:
    """Return the rows of a statement that is written around one query, in the place of ``{rows}``.

    For what the ORM would take longer to put together than the database to answer.
    """
    compiled = _compiled(queryset)
    if compiled is None:
        return []
    with connections[queryset.db].cursor() as cursor:
        cursor.execute(statement.replace("{rows}", compiled[0]), compiled[1])
        return list(cursor.fetchall())


def moment_of(value: datetime | str) -> datetime:
    """Return a time as ``rows_of`` has it: SQLite's is text, or has lost its zone; either is in UTC."""
    moment = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def rows_of_each(
    query: Callable[..., QuerySet[Any]], markers: Sequence[Any], keys: Sequence[Sequence[Any]]
) -> list[tuple[Any, ...]]:
    """Return the rows of the ``values_list`` query for each of ``keys``, one after another.

    It is compiled once, with ``markers`` in the place of a key: for fifty keys, compiling costs more than the database.
    No other parameter of the query may be equal to a marker. Keys are of ids and whole numbers.
    """
    made: Any = query(*markers)
    compiled = _compiled(made)
    if compiled is None or not keys:
        return []
    connection = connections[made.db]
    stored = [plain_value(connection, marker) if connection.vendor == "sqlite" else marker for marker in markers]
    places = [stored.index(value) if value in stored else None for value in compiled[1]]
    if connection.vendor == "postgresql":
        # So it is planned once, too: fifty parts of a union cost it ten times what they take to run (measured).
        return _fetch(_typed(made), *_for_each(compiled, places, keys))
    parameters: list[Any] = []
    for key in keys:
        given = [plain_value(connection, one) if connection.vendor == "sqlite" else one for one in key]
        parameters += [
            value if place is None else given[place] for value, place in zip(compiled[1], places, strict=True)
        ]
    statement = " UNION ALL ".join(f"SELECT * FROM ({compiled[0]}) AS t{number}" for number in range(len(keys)))  # noqa: S608
    return _fetch(_typed(made), statement, parameters)


def _for_each(
    compiled: tuple[str, list[Any]], places: Sequence[int | None], keys: Sequence[Sequence[Any]]
) -> tuple[str, list[Any]]:
    """Return the statement that joins a query with its keys: their columns stand where its markers were."""
    text, values = compiled
    first, *pieces = re.split(r"(?<!%)%s", text)
    for piece, place in zip(pieces, places, strict=True):
        first += ("%s" if place is None else f"k.c{place}") + piece
    columns = list(zip(*keys, strict=True))
    kinds = ["uuid" if isinstance(column[0], UUID) else "bigint" for column in columns]
    arrays = ", ".join(f"%s::{kind}[]" for kind in kinds)
    names = ", ".join(f"c{number}" for number in range(len(columns)))
    statement = f"SELECT t.* FROM unnest({arrays}) AS k({names}) CROSS JOIN LATERAL ({first}) AS t"  # noqa: S608
    given = [value for value, place in zip(values, places, strict=True) if place is None]
    return statement, [*(list(column) for column in columns), *given]


def _typed(queryset: QuerySet[Any]) -> Any:
    """Return what knows the types of a query's columns: SQLite's driver has ids and times as text."""
    compiler = queryset.query.get_compiler(queryset.db)
    compiler.pre_sql_setup()
    return compiler


def _fetch(compiler: Any, statement: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    with compiler.connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        return list(compiler.results_iter(results=[cursor.fetchall()], tuple_expected=True))


def _tallied(tally: Tally, compiler: Any) -> tuple[str, list[Any]] | None:
    compiled = _compiled(tally.rows)
    if compiled is None:
        return None
    kinds = [expression.output_field.db_type(compiler.connection) for expression, _, _ in compiler.select]
    columns = [
        f"CAST(NULL AS {kind})" if column is None else column for column, kind in zip(tally.columns, kinds, strict=True)
    ]
    return f"SELECT {', '.join(columns)} FROM ({compiled[0]}) AS t GROUP BY {tally.by}", compiled[1]  # noqa: S608


def count_alike(queryset: QuerySet[Any], columns: Sequence[str], limit: int) -> list[tuple[Any, ...]]:
    """Return the distinct values of ``columns`` among the first ``limit`` rows, each with its number as the last item.

    The query brings filters and order; ids come back as the database stores them.
    """
    compiled = _compiled(queryset.values_list(*columns)[:limit])
    if compiled is None:
        return []
    connection = connections[queryset.db]
    names = ", ".join(connection.ops.quote_name(name) for name in columns)
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {names}, COUNT(*) FROM ({compiled[0]}) AS t GROUP BY {names}", compiled[1])  # noqa: S608
        return list(cursor.fetchall())


def _compiled(queryset: QuerySet[Any]) -> tuple[str, list[Any]] | None:
    """Return the statement and its parameters; None for what can have no rows."""
    try:
        text, parameters = queryset.query.get_compiler(queryset.db).as_sql()
    except EmptyResultSet:
        return None
    return text, list(parameters)
