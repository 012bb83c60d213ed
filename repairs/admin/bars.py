"""By what the jobs of an incident differ, as bars of which the longest is the most frequent value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LISTED = 5
SHARE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One value of a breakdown; ``width`` is of a hundred, for the most frequent one."""

    value: str
    count: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """By which values the jobs of an incident differ, most frequent first; ``more`` are the values left out."""

    name: str  # as the address of the page has it
    title: str
    shares: Sequence[Share]
    values: int
    more: int
    rest: int


def breakdown(name: str, title: str, values: Iterable[str]) -> Breakdown:
    """Return the five most frequent values, and how many jobs have any other."""
    counted = Counter(values)
    listed = sorted(counted.items(), key=lambda pair: (-pair[1], pair[0]))[:LISTED]
    most = listed[0][1] if listed else 1
    shares = [Share(value=value, count=count, width=max(round(SHARE * count / most), 1)) for value, count in listed]
    rest = counted.total() - sum(share.count for share in shares)
    return Breakdown(
        name=name, title=title, shares=shares, values=len(counted), more=len(counted) - len(shares), rest=rest
    )
