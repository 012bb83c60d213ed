"""The line under every page's header: whether capture works, so that an empty list is not taken for good news."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Count, Subquery, Value
from django.db.models.functions import Now
from django.utils import timezone

from deadletters.models import SetAsideEntry, WorkerNode
from deadletters.querysets import NODE_IS_GONE_AFTER
from repairs.reconciliation.watch import NOT_READ, SweepWatch, read_watch

KEPT_SECONDS = 5.0
REMEMBERED = timedelta(hours=24)
"""A worker that has been silent for longer is no longer counted among those that should report."""
MOST_NODES = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedQueue:
    """A queue that some worker has named in its reports, and how many of those that are alive take from it."""

    source: str
    name: str
    consumers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A release and when the first of its workers started, as far back as workers are remembered."""

    name: str
    first_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Machinery:
    """What the workers last said of themselves; every time is the database's."""

    known: int
    reporting: int
    silent: tuple[str, ...]
    captured_at: datetime | None
    waiting_bytes: int
    waiting_seconds: int
    dropped: int
    troubles: int
    set_aside: int = 0
    """Failed jobs whose recording failed again and again: no list has them."""
    silent_since: tuple[tuple[str, datetime], ...] = ()
    sources: frozenset[str] = frozenset()
    """Sources of which a worker is alive."""
    queues: tuple[ServedQueue, ...] = ()
    releases: tuple[Release, ...] = ()
    read_at: datetime | None = None
    """The database's clock when this was read; None if no worker is remembered."""
    read_monotonic: float = 0.0
    sweeps: SweepWatch = NOT_READ

    def database_now(self) -> datetime | None:
        """Return the database's clock now, by this process' count of the seconds since; None where it was not read."""
        if self.read_at is None:
            return None
        return self.read_at + timedelta(seconds=time.monotonic() - self.read_monotonic)

    @property
    def is_well(self) -> bool:
        """Whether failures are being captured as far as anybody knows."""
        return bool(self.reporting) and not (self.silent or self.dropped or self.troubles or self.set_aside)

    @property
    def swept_at(self) -> datetime | None:
        """When a sweep last finished."""
        return self.sweeps.finished_at


class _Kept:
    """The last answer of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.machinery: Machinery | None = None
        self.until = 0.0


_kept = _Kept()


def machinery() -> Machinery:
    """Return the state of the machinery, at most five seconds old; a query of workers and one of sweeps when older."""
    with _kept.lock:
        if _kept.machinery is None or time.monotonic() >= _kept.until:
            _kept.machinery = _read()
            _kept.until = time.monotonic() + KEPT_SECONDS
        return _kept.machinery


def forget() -> None:
    """Read afresh the next time: for tests."""
    with _kept.lock:
        _kept.machinery = None


def _read() -> Machinery:
    nodes = list(
        WorkerNode.objects.filter(seen_at__gte=Now() - REMEMBERED)
        .annotate(now=Now(), set_aside=_set_aside())
        .only(
            "source", "host", "release", "queues", "seen_at", "started_at", "stopped_at", "captured_at",
            "journal_bytes", "journal_oldest_seconds", "dropped_count", "trouble",
        )
        .order_by("-seen_at")[:MOST_NODES]
    )  # fmt: skip
    running = [node for node in nodes if node.stopped_at is None]
    now: datetime = getattr(nodes[0], "now", timezone.now()) if nodes else timezone.now()
    alive = [node for node in running if node.seen_at >= now - NODE_IS_GONE_AFTER]
    silent = [node for node in running if node not in alive]
    return Machinery(
        known=len(running),
        reporting=len(alive),
        silent=tuple(sorted({node.host for node in silent})[:3]),
        captured_at=max((node.captured_at for node in nodes if node.captured_at), default=None),
        waiting_bytes=sum(node.journal_bytes for node in running),
        waiting_seconds=int(max((node.journal_oldest_seconds for node in running), default=0.0)),
        dropped=sum(node.dropped_count for node in alive),
        troubles=sum(bool(node.trouble) for node in alive),
        set_aside=(getattr(nodes[0], "set_aside", 0) or 0) if nodes else 0,
        silent_since=tuple((node.host, node.seen_at) for node in silent[:3]),
        sources=frozenset(node.source for node in alive),
        queues=_queues(nodes, alive),
        releases=_releases(nodes),
        read_at=now if nodes else None,
        read_monotonic=time.monotonic(),
        sweeps=read_watch(),
    )


def _set_aside() -> Subquery:
    """Return how many entries wait to be recorded after all, as a part of another question."""
    waiting = SetAsideEntry.objects.filter(applied_at__isnull=True).order_by().values(one=Value(1))
    return Subquery(waiting.annotate(entries=Count("pk")).values("entries"))


def _queues(nodes: list[WorkerNode], alive: list[WorkerNode]) -> tuple[ServedQueue, ...]:
    """Return also those of workers that have stopped: what waits there waits for nobody."""
    consumers: Counter[tuple[str, str]] = Counter()
    ids = {node.id for node in alive}
    for node in nodes:
        for name in json.loads(node.queues):
            consumers[node.source, name] += node.id in ids
    return tuple(
        ServedQueue(source=source, name=name, consumers=number) for (source, name), number in sorted(consumers.items())
    )


def _releases(nodes: list[WorkerNode]) -> tuple[Release, ...]:
    first: dict[str, datetime] = {}
    for node in nodes:
        if node.release:
            first[node.release] = min(first.get(node.release, node.started_at), node.started_at)
    return tuple(Release(name=name, first_at=at) for name, at in sorted(first.items(), key=lambda pair: pair[1]))
