"""The line under every page's header: whether capture works, so that an empty list is not taken for good news."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models.functions import Now
from django.utils import timezone

from deadletters.models import WorkerNode
from deadletters.querysets import NODE_IS_GONE_AFTER

KEPT_SECONDS = 5.0
REMEMBERED = timedelta(hours=24)
"""A worker that has been silent for longer is no longer counted among those that should report."""
MOST_NODES = 500


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

    @property
    def is_well(self) -> bool:
        """Whether failures are being captured as far as anybody knows."""
        return bool(self.reporting) and not (self.silent or self.dropped or self.troubles)


class _Kept:
    """The last answer of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.machinery: Machinery | None = None
        self.until = 0.0


_kept = _Kept()


def machinery() -> Machinery:
    """Return the state of the machinery, at most five seconds old; one query when it is older."""
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
        .annotate(now=Now())
        .only(
            "host", "seen_at", "stopped_at", "captured_at", "journal_bytes", "journal_oldest_seconds", "dropped_count",
            "trouble",
        )
        .order_by("-seen_at")[:MOST_NODES]
    )  # fmt: skip
    running = [node for node in nodes if node.stopped_at is None]
    now: datetime = getattr(nodes[0], "now", timezone.now()) if nodes else timezone.now()
    alive = [node for node in running if node.seen_at >= now - NODE_IS_GONE_AFTER]
    return Machinery(
        known=len(running),
        reporting=len(alive),
        silent=tuple(sorted({node.host for node in running if node not in alive})[:3]),
        captured_at=max((node.captured_at for node in nodes if node.captured_at), default=None),
        waiting_bytes=sum(node.journal_bytes for node in running),
        waiting_seconds=int(max((node.journal_oldest_seconds for node in running), default=0.0)),
        dropped=sum(node.dropped_count for node in alive),
        troubles=sum(bool(node.trouble) for node in alive),
    )
