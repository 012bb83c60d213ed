"""Pages by key: a page starts where the last one ended, found through an index and without counting anything.

A list is an order of rows by one key, all parts descending, the last of them unique. Where no single index gives the
order, it is put together: a *segment* after another, and within a segment several *sources* merged by key. Each source
is one query that an index answers, so a page costs about as many rows as it shows.
"""

from __future__ import annotations

import base64
import binascii
import heapq
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, TypeAlias, TypeVar
from uuid import UUID

from django.db.models import BooleanField, F, Func, QuerySet, Value

from opsconsole.core.problems import FieldError, InvalidFields
from opsconsole.core.search import Searchable

T = TypeVar("T")
Key: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Source(Generic[T]):
    """Rows with the columns that are their key, and what a page shows of a row (the row itself by default)."""

    rows: QuerySet[Any]
    columns: tuple[str, ...]
    show: Callable[[Any], T] | None = None

    def take(self, bound: Key | None, count: int, *, backwards: bool) -> list[tuple[Key, T]]:
        """Return up to ``count`` rows beyond ``bound``, next to it first."""
        rows = self.beyond(bound, backwards=backwards)
        taken = rows.first_rows(count) if isinstance(rows, Searchable) else rows[:count]
        return [
            (tuple(getattr(row, name) for name in self.columns), self.show(row) if self.show else row) for row in taken
        ]

    def beyond(self, bound: Key | None, *, backwards: bool) -> QuerySet[Any]:
        """Return the rows beyond ``bound``, all of them without one, next to it first."""
        rows = self.rows.order_by(*(name if backwards else f"-{name}" for name in self.columns))
        if bound is None:
            return rows
        fields = [self.rows.model._meta.get_field(name) for name in self.columns]
        values = [Value(value, output_field=field) for value, field in zip(bound, fields, strict=True)]
        return rows.filter(RowComparison(self.columns, tuple(values), ">" if backwards else "<"))


Segment: TypeAlias = Sequence[Source[T]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[T]):
    """Rows, and the cursors of the pages beside them where there are any."""

    rows: list[T]
    next: str | None = None
    previous: str | None = None


class RowComparison(Func):
    """``(a, b, c) < (x, y, z)``: both databases compare row values and find the place in an index over the columns."""

    def __init__(self, columns: tuple[str, ...], values: tuple[Any, ...], operator: str) -> None:
        super().__init__(*(F(name) for name in columns), *values, output_field=BooleanField())
        self.operator = operator

    def as_sql(self, compiler: Any, connection: Any, **_: Any) -> Any:  # type: ignore[override]  # noqa: ARG002
        """Return the comparison; columns come first, as many values after them."""
        parts = [compiler.compile(expression) for expression in self.get_source_expressions()]
        half = len(parts) // 2
        left, right = (", ".join(sql for sql, _ in side) for side in (parts[:half], parts[half:]))
        return f"({left}) {self.operator} ({right})", [value for _, values in parts for value in values]


@dataclass(frozen=True, slots=True)
class _Place:
    """Between two rows: at ``key`` of a segment, looking forwards or backwards."""

    backwards: bool
    segment: int
    key: Key


def read_page(list_name: str, segments: Sequence[Segment[T]], *, limit: int, cursor: str | None = None) -> Page[T]:
    """Return the page at ``cursor``, or the first one; raises ``InvalidFields`` for a cursor of anything else.

    ``list_name`` stands in the cursor: one of another list, or of another order, is refused.
    """
    types = _key_types(segments)
    place = None if cursor is None else _read_cursor(list_name, cursor, len(segments), types)
    backwards = place is not None and place.backwards
    found: list[tuple[int, Key, T]] = []
    for index in _walk(place, len(segments)):
        bound = place.key if place is not None and index == place.segment else None
        wanted = limit + 1 - len(found)
        taken = [source.take(bound, wanted, backwards=backwards) for source in segments[index]]
        merged = heapq.merge(*taken, key=lambda pair: pair[0], reverse=not backwards)
        found += [(index, key, row) for (key, row), _ in zip(merged, range(wanted), strict=False)]
        if len(found) > limit:
            break
    has_more = len(found) > limit
    found = found[:limit]
    if backwards:
        found.reverse()
    if not found:
        return Page(rows=[])
    (first_segment, first_key, _), (last_segment, last_key, _) = found[0], found[-1]
    before = _write_cursor(list_name, _Place(True, first_segment, first_key))
    after = _write_cursor(list_name, _Place(False, last_segment, last_key))
    return Page(
        rows=[row for _, _, row in found],
        next=after if backwards or has_more else None,
        previous=before if (has_more if backwards else place is not None) else None,
    )


def _walk(place: _Place | None, count: int) -> Iterator[int]:
    if place is None:
        yield from range(count)
    elif place.backwards:
        yield from range(place.segment, -1, -1)
    else:
        yield from range(place.segment, count)


def _key_types(segments: Sequence[Segment[Any]]) -> tuple[str, ...]:
    source = next(source for segment in segments for source in segment)
    return tuple(source.rows.model._meta.get_field(name).get_internal_type() for name in source.columns)


def _write_cursor(list_name: str, place: _Place) -> str:
    key = [value if isinstance(value, int) else str(value) for value in place.key]
    text = json.dumps([list_name, int(place.backwards), place.segment, *key], separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _read_cursor(list_name: str, text: str, segments: int, types: tuple[str, ...]) -> _Place:
    try:
        decoded = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        name, backwards, segment, *parts = json.loads(decoded)
        if name != list_name or backwards not in (0, 1) or type(segment) is not int or not 0 <= segment < segments:
            raise ValueError
        return _Place(bool(backwards), segment, tuple(_KINDS[t](p) for t, p in zip(types, parts, strict=True)))
    except (ValueError, TypeError, KeyError, OverflowError, binascii.Error, RecursionError):
        raise InvalidFields([FieldError(parameter="cursor", detail="This is no cursor of this list.")]) from None


def _integer(part: Any) -> int:
    if type(part) is not int or not -(2**15) <= part < 2**15:
        raise ValueError
    return part


def _wide_integer(part: Any) -> int:
    if type(part) is not int or not -(2**31) <= part < 2**31:
        raise ValueError
    return part


def _moment(part: Any) -> datetime:
    moment = datetime.fromisoformat(part)
    if moment.tzinfo is None:
        raise ValueError
    # A moment at the ends of time overflows in another zone: here, where it is refused, and not in the database.
    return moment.astimezone(UTC)


def _text(part: Any) -> str:
    if type(part) is not str or not part.isprintable():
        raise ValueError
    return part


_KINDS: dict[str, Callable[[Any], Any]] = {
    "CharField": _text,
    "SmallIntegerField": _integer,
    "IntegerField": _wide_integer,
    "DateTimeField": _moment,
    "UUIDField": lambda part: UUID(_text(part)),
}
