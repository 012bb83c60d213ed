"""Kinds of jobs for the tests of the ledger: plain ones, and one whose record is a file per hook."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from opsconsole.core.effects import Effects
from opsconsole.jobs.kind import BackOff, Kind, Work
from opsconsole.jobs.models import Job

BODIES: dict[str, Callable[[Work], Any]] = {}
"""What the next jobs of a kind do, by its name; a test sets it."""
TOLD: list[tuple[str, str, str]] = []
"""What the hooks of ``test_watched`` were told: hook, state of the job, code."""


class Plain(Kind):
    """Does what the test has put into ``BODIES``; nothing outside."""

    name = "test_plain"
    effects = Effects.NONE
    max_attempts = 3
    back_off = BackOff(first=timedelta(seconds=10), jitter=0.0)

    def check(self, payload: Mapping[str, Any]) -> None:
        if "forbidden" in payload:
            raise ValueError("forbidden is not a field of it")

    def run(self, work: Work) -> Any:
        return BODIES.get(self.name, lambda _work: None)(work)


class Outside(Plain):
    """The same, but its body reaches the world outside."""

    name = "test_outside"
    effects = Effects.OUTSIDE


class Watched(Outside):
    """The same, and its hooks are written down."""

    name = "test_watched"
    record_type = ""

    def begin(self, job: Job, now: datetime) -> None:
        TOLD.append(("begin", str(job.state), ""))

    def complete(self, job: Job, result: Any, now: datetime) -> None:
        TOLD.append(("complete", str(job.state), str(result)))

    def put_off(self, job: Job, code: str, now: datetime) -> None:
        TOLD.append(("put_off", str(job.state), code))

    def mark_dead(self, job: Job, code: str, now: datetime) -> None:
        if BODIES.get("mark_dead"):
            raise RuntimeError("its record cannot be marked")
        TOLD.append(("mark_dead", str(job.state), code))

    def requeue(self, job: Job, now: datetime) -> None:
        TOLD.append(("requeue", str(job.state), ""))

    def is_overtaken(self, job: Job) -> str:
        return "applied" if BODIES.get("applied") else ""
