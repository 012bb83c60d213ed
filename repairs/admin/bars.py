"""Bars as the page draws them: their geometry, and what each says. No styles, so that the strictest policy holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from opsconsole.core.admin import thousands

HOUR = timedelta(hours=1)
HOURS = 48
HEIGHT = 72
STEP = 10
GAP = 2
LISTED = 5
SHARE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One hour of a chart, in the units of its view box."""

    x: int
    y: int
    height: int
    words: str
    count: int
    at: datetime
    width: int = STEP - GAP


@dataclass(frozen=True, slots=True, kw_only=True)
class HourChart:
    """Counts by hour, oldest first; hours without any have no bar."""

    bars: Sequence[Bar]
    peak: int
    total: int
    begin: datetime
    middle: datetime
    width: int = HOURS * STEP
    height: int = HEIGHT


def hour_chart(counts: Mapping[datetime, int], now: datetime, noun: str) -> HourChart:
    """Return the bars of the last 48 hours, the running one included; every count is seen, however small."""
    last = now.replace(minute=0, second=0, microsecond=0)
    begin = last - (HOURS - 1) * HOUR
    shown = {at: count for at, count in counts.items() if begin <= at <= last and count}
    peak = max(shown.values(), default=0)
    bars = []
    for at, count in sorted(shown.items()):
        height = max(round(HEIGHT * count / peak), 2)
        words = f"{at:%d %b %H}:00: {thousands(count)} {noun}"
        x = (at - begin) // HOUR * STEP
        bars.append(Bar(x=x, y=HEIGHT - height, height=height, words=words, count=count, at=at))
    return HourChart(bars=bars, peak=peak, total=sum(shown.values()), begin=begin, middle=begin + HOURS // 2 * HOUR)


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
