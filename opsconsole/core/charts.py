"""Bars over time, as numbers that a template puts into the attributes of an SVG.

No script and no inline style: a chart prints, passes the strict policy, and can be read by who cannot see it, through
its label, a title per bar and the table beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from opsconsole.core.admin import thousands

HOUR = timedelta(hours=1)
WIDTH = 720
GAP = 2
LEAST_HEIGHT = 2
"""What one failure is drawn with beside thousands: little, but there."""
TICKS = 4
LABEL_ROOM = 150
"""Where a mark's words still fit to its right; further right they stand to its left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One span of time."""

    x: float
    y: float
    width: float
    height: float
    title: str
    at: datetime
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A moment of which the bars may be a consequence."""

    x: float
    text_x: float
    anchor: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One row of bars; ``label`` says in words what they show."""

    label: str
    height: int
    bars: tuple[Bar, ...]
    marks: tuple[Mark, ...]
    peak: int
    total: int
    width: int = WIDTH


def bar_chart(
    *,
    noun: str,
    starts: Sequence[datetime],
    step: timedelta,
    values: Sequence[int],
    height: int,
    marks: Sequence[tuple[datetime, str]] = (),
) -> Chart:
    """Return the chart of ``values``, one for each of ``starts``, which lie ``step`` apart.

    ``noun`` names what is counted ("failed jobs"); ``marks`` outside the time shown are left out.
    """
    peak, total = max(values, default=0), sum(values)
    slot = WIDTH / max(len(values), 1)
    bars = []
    for place, (start, value) in enumerate(zip(starts, values, strict=True)):
        tall = max(height * value / peak, LEAST_HEIGHT) if value else 0.0
        bars.append(
            Bar(
                x=round(place * slot + GAP / 2, 1),
                y=round(height - tall, 1),
                width=round(slot - GAP, 1),
                height=round(tall, 1),
                title=f"{span_words(start, step)}: {thousands(value)} {noun}",
                at=start,
                count=value,
            )
        )
    when_peak = "" if not peak else f" ({span_words(starts[list(values).index(peak)], step)})"
    label = (
        f"{noun.capitalize()} per hour, last {len(values)} hours: peak {thousands(peak)}{when_peak}, "
        f"total {thousands(total)}."
    )
    return Chart(
        label=label, height=height, bars=tuple(bars), marks=_marks(starts, step, marks), peak=peak, total=total
    )


def hours_before(now: datetime, count: int) -> list[datetime]:
    """Return the starts of the last hours, oldest first; the running one is the last of them."""
    last = now.replace(minute=0, second=0, microsecond=0)
    return [last - HOUR * back for back in reversed(range(count))]


def ticks(starts: Sequence[datetime]) -> list[str]:
    """Return the words under the chart, evenly spaced, the first with its day."""
    chosen = starts[:: max(len(starts) // TICKS, 1)][:TICKS]
    return [f"{start:%d %b %H:%M}" if not place else f"{start:%H:%M}" for place, start in enumerate(chosen)]


def span_words(start: datetime, step: timedelta) -> str:
    """Return one bar's time, in UTC."""
    return f"{start:%d %b %H:%M} to {start + step:%H:%M}"


def _marks(starts: Sequence[datetime], step: timedelta, marks: Sequence[tuple[datetime, str]]) -> tuple[Mark, ...]:
    if not starts:
        return ()
    length = step * len(starts)
    found = []
    for at, text in marks:
        share = (at - starts[0]) / length
        if 0 <= share <= 1:
            x = round(WIDTH * share, 1)
            is_left = x < WIDTH - LABEL_ROOM
            found.append(Mark(x=x, text_x=x + 4 if is_left else x - 4, anchor="start" if is_left else "end", text=text))
    return tuple(found)
