"""Rows as CSV that a spreadsheet opens as text and never runs as a formula."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

_RUNS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


class _Echo:
    """A file whose lines are handed back instead of being kept."""

    def write(self, line: str) -> str:
        return line


def csv_lines(rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """Yield each row as one line of CSV (RFC 4180, a line break may stand inside a quoted cell)."""
    writer = csv.writer(_Echo())
    for row in rows:
        # The writer returns what its file's write returned.
        line: Any = writer.writerow([safe_cell(value) for value in row])
        yield line


def safe_cell(value: Any) -> str:
    """Return a value as text: times in UTC (ISO 8601), None as "", and an apostrophe before what would be a formula."""
    if value is None:
        return ""
    text = value.astimezone(UTC).isoformat() if isinstance(value, datetime) else str(value)
    return f"'{text}" if text.startswith(_RUNS) else text
