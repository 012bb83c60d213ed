"""Redrives' raw SQL, each in both dialects: freezing a set, and writing what differs from item to item.

Raw, because the ORM cannot insert what a query selects, nor set each of many rows to a value of its own with one
statement: 200,000 letters are frozen by one statement, and none of them is read into this process for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import IntegrityError, connection, transaction
from django.db.models import QuerySet

from opsconsole.core.canonical_json import canonical_json
from opsconsole.core.database import is_unique_violation, plain_value
from repairs.models import RedriveItem

ITEMS = RedriveItem._meta.db_table
TRIES = 3


def freeze(redrive_id: UUID, letters: QuerySet[Any], most: int) -> int:
    """Make every one of ``letters`` an item, oldest first, and return how many those were, ``most`` + 1 at most.

    One that another redrive has which has not ended is left out of the work at once, as a skipped item that names it.
    Two redrives that want the same letter at the same moment: the second waits for the first and then sees it.
    """
    for _ in range(TRIES - 1):
        try:
            with transaction.atomic():
                return _freeze(redrive_id, letters, most)
        except IntegrityError as error:
            if not is_unique_violation(error):
                raise
    return _freeze(redrive_id, letters, most)


def _freeze(redrive_id: UUID, letters: QuerySet[Any], most: int) -> int:
    chosen = letters.order_by().values("id", "actor_type", "actor_id", "first_seen_at")[: most + 1]
    query, parameters = chosen.query.sql_with_params()
    other = "'in redrive ' || replace(CAST(other.redrive_id AS text), '-', '')"
    with connection.cursor() as cursor:
        # Every name is one of this module's, every value a parameter.
        cursor.execute(
            f"INSERT INTO {ITEMS} (redrive_id, position, letter_id, actor_type, actor_id, item_class, state, code,"  # noqa: S608
            " detail, settled_at)"
            " SELECT %s, row_number() OVER (ORDER BY chosen.first_seen_at, chosen.id), chosen.id, chosen.actor_type,"
            " chosen.actor_id, CASE WHEN other.id IS NULL THEN 'safe' ELSE 'in_other_redrive' END,"
            " CASE WHEN other.id IS NULL THEN 'waiting' ELSE 'skipped' END,"
            " CASE WHEN other.id IS NULL THEN '' ELSE 'in_other_redrive' END,"
            f" CASE WHEN other.id IS NULL THEN '' ELSE {other} END, NULL"
            f" FROM ({query}) AS chosen LEFT JOIN {ITEMS} AS other"
            " ON other.letter_id = chosen.id AND other.state IN ('waiting', 'planned')",
            [plain_value(connection, redrive_id) if connection.vendor == "sqlite" else redrive_id, *parameters],
        )
        return int(cursor.rowcount)


def write_repairs(rows: Sequence[tuple[int, UUID]]) -> None:
    """Set the repair of each of these items, and make them planned."""
    if not rows:
        return
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                f"UPDATE {ITEMS} AS item SET state = 'planned', repair_id = given.repair"  # noqa: S608
                " FROM unnest(%s::bigint[], %s::uuid[]) AS given(id, repair) WHERE item.id = given.id",
                [[item_id for item_id, _ in rows], [repair_id for _, repair_id in rows]],
            )
        else:
            cursor.executemany(
                f"UPDATE {ITEMS} SET state = 'planned', repair_id = %s WHERE id = %s",  # noqa: S608
                [(repair_id.hex, item_id) for item_id, repair_id in rows],
            )


def write_results(rows: Sequence[tuple[int, str, str, str, UUID | None]], at: datetime) -> None:
    """Write how items have ended: (item, state, code, detail, repair or None to leave it)."""
    if not rows:
        return
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            ids, states, codes, details, repairs = (list(column) for column in zip(*rows, strict=True))
            cursor.execute(
                f"UPDATE {ITEMS} AS item SET state = given.state, code = given.code, detail = given.detail,"  # noqa: S608
                " repair_id = coalesce(given.repair, item.repair_id), settled_at = %s, is_behind = false"
                " FROM unnest(%s::bigint[], %s::text[], %s::text[], %s::text[], %s::uuid[])"
                " AS given(id, state, code, detail, repair) WHERE item.id = given.id",
                [at, ids, states, codes, details, repairs],
            )
        else:
            moment = plain_value(connection, at)
            cursor.executemany(
                f"UPDATE {ITEMS} SET state = %s, code = %s, detail = %s, repair_id = coalesce(%s, repair_id),"  # noqa: S608
                " settled_at = %s, is_behind = 0 WHERE id = %s",
                [
                    (state, code, detail, repair.hex if repair is not None else None, moment, item_id)
                    for item_id, state, code, detail, repair in rows
                ],
            )


def first_waiting(redrive_id: UUID, actors: Sequence[tuple[str, str]]) -> list[int]:
    """Return the first waiting item of each of these actors (type, id) that has one."""
    if not actors:
        return []
    first = (
        f"(SELECT item.id FROM {ITEMS} AS item WHERE item.redrive_id = %s AND item.state = 'waiting'"  # noqa: S608
        " AND item.actor_id <> '' AND item.actor_type = given.actor_type AND item.actor_id = given.actor_id"
        " ORDER BY item.position LIMIT 1)"
    )
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                f"SELECT {first} FROM unnest(%s::text[], %s::text[]) AS given(actor_type, actor_id)",  # noqa: S608
                [redrive_id, [kind for kind, _ in actors], [actor for _, actor in actors]],
            )
        else:
            cursor.execute(
                f"SELECT {first} FROM (SELECT json_extract(value, '$[0]') AS actor_type,"  # noqa: S608
                " json_extract(value, '$[1]') AS actor_id FROM json_each(%s)) AS given",
                [redrive_id.hex, canonical_json([list(actor) for actor in actors])],
            )
        return [row[0] for row in cursor.fetchall() if row[0] is not None]
