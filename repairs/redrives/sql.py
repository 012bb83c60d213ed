"""Redrives' raw SQL, each in both dialects: freezing a set, and writing what differs from item to item.

Raw, because the ORM cannot insert what a query selects, nor set each of many rows to a value of its own with one
statement: 200,000 letters are frozen by one statement, and none of them is read into this process for it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from django.db import IntegrityError, connection, transaction
from django.db.models import QuerySet

from deadletters.models import DeadLetter, SealedMessage
from opsconsole.core.canonical_json import canonical_json
from opsconsole.core.database import is_unique_violation, plain_value
from repairs.models import RedriveItem

ITEMS = RedriveItem._meta.db_table
LETTERS = DeadLetter._meta.db_table
MESSAGES = SealedMessage._meta.db_table
TRIES = 3
NO_LETTER = UUID(int=0)


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


@dataclass(slots=True, kw_only=True)
class Alike:
    """Waiting items of one page whose letters a judgement cannot tell apart, with the columns that it looks at.

    ``positions`` is a list as the database writes it, for ``write_classes``: most of them are never read here.
    ``first_seen_at`` is that of the oldest; ``chord_id`` is any text for all that have one.
    """

    state: str
    is_set_aside: bool
    message_state: str
    job_type: str
    queue: str
    outcome_class: str
    arguments: str
    chord_id: str
    key_id: str | None
    expires_at: datetime | None
    is_of_ledger: bool
    first_seen_at: datetime
    count: int
    positions: str
    id: UUID = NO_LETTER
    task_id: str = ""

    def listed(self) -> list[int]:
        """Return the positions as numbers."""
        numbers: list[int] = json.loads(self.positions.replace("{", "[").replace("}", "]"))
        return numbers


def alike_items(redrive_id: UUID, *, after: int, last: int, now: datetime, cut_off: datetime | None) -> list[Alike]:
    """Return the waiting items of a page, put together by all that the dry run judges by; one statement.

    The database puts them together, because reading each of very many letters would cost ten times the judgement.
    """
    is_postgresql = connection.vendor == "postgresql"
    plain: Any = (lambda value: value) if is_postgresql else (lambda value: plain_value(connection, value))
    positions = "CAST(array_agg(item.position) AS text)" if is_postgresql else "json_group_array(item.position)"
    is_old = "letter.first_seen_at < %s" if cut_off is not None else "1 = 0"
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT letter.state, letter.is_set_aside, letter.message_state, letter.job_type, letter.queue,"  # noqa: S608
            " letter.outcome_class, letter.arguments, letter.chord_id <> '', message.key_id,"
            " coalesce(letter.expires_at <= %s, 1 = 0), letter.task_id LIKE 'job:%%',"
            f" {is_old}, min(letter.first_seen_at), count(*), {positions}"
            f" FROM {ITEMS} AS item JOIN {LETTERS} AS letter ON letter.id = item.letter_id"
            f" LEFT JOIN {MESSAGES} AS message ON message.letter_id = letter.id"
            " WHERE item.redrive_id = %s AND item.position > %s AND item.position <= %s AND item.state = 'waiting'"
            " GROUP BY 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12",
            [plain(now), *([plain(cut_off)] if cut_off is not None else []), plain(redrive_id), after, last],
        )
        return [
            Alike(
                state=row[0], is_set_aside=bool(row[1]), message_state=row[2], job_type=row[3], queue=row[4],
                outcome_class=row[5], arguments=row[6], chord_id="(one)" if row[7] else "", key_id=row[8],
                expires_at=now if row[9] else None, is_of_ledger=bool(row[10]), first_seen_at=_moment(row[12]),
                count=row[13], positions=row[14],
            )
            for row in cursor.fetchall()
        ]  # fmt: skip


def _moment(value: Any) -> datetime:
    moment = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def write_classes(redrive_id: UUID, positions: str, *, item_class: str, concerns: str, detail: str) -> None:
    """Write what was judged of the items at ``positions``, a list as ``Alike`` has it."""
    is_postgresql = connection.vendor == "postgresql"
    chosen = "= ANY(%s::int[])" if is_postgresql else "IN (SELECT value FROM json_each(%s))"
    with connection.cursor() as cursor:
        cursor.execute(
            f"UPDATE {ITEMS} SET item_class = %s, concerns = %s, detail = %s"  # noqa: S608
            f" WHERE redrive_id = %s AND position {chosen}",
            [item_class, concerns, detail, redrive_id if is_postgresql else redrive_id.hex, positions],
        )
