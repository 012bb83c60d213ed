"""Several queries with a LIMIT each, sent as one statement: for pages that count a little of many things.

Raw because the ORM's union can't take sliced queries on SQLite. Each part is a query of the ORM, so that what an
operator may see is decided where it always is; only the frame around them is written here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from django.core.exceptions import EmptyResultSet
from django.db import connections
from django.db.models import QuerySet


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


def rows_of(querysets: Sequence[QuerySet[Any]]) -> list[tuple[Any, ...]]:
    """Return the rows of several ``values_list`` queries, as the database driver has them."""
    compiled = [found for queryset in querysets if (found := _compiled(queryset)) is not None]
    if not compiled:
        return []
    statement = " UNION ALL ".join(f"SELECT * FROM ({text}) AS t{number}" for number, (text, _) in enumerate(compiled))  # noqa: S608
    with connections[querysets[0].db].cursor() as cursor:
        cursor.execute(statement, [value for _, values in compiled for value in values])
        return list(cursor.fetchall())


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


def tally(queryset: QuerySet[Any], expression: str) -> dict[Any, int]:
    """Return how often ``expression`` has each value among the rows of one sliced query, whose alias is ``t``."""
    compiled = _compiled(queryset)
    if compiled is None:
        return {}
    statement = f"SELECT {expression}, SUM(1) FROM ({compiled[0]}) AS t GROUP BY 1"  # noqa: S608
    with connections[queryset.db].cursor() as cursor:
        cursor.execute(statement, compiled[1])
        return {value: int(count) for value, count in cursor.fetchall()}


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
