"""What a kind of job is: one class that knows how to do its work, and what becomes of its record with the job.

A kind is written in one file; ``docs/add-a-job-type.md`` shows a whole one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import UUID

from opsconsole.core.effects import Effects

if TYPE_CHECKING:
    from opsconsole.jobs.models import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One attempt at a job, as its body sees it.

    ``idempotency_key`` is the same for every attempt and every repair of the job: what a provider is told, so that it
    does twice what it was asked twice only once.
    """

    job_id: UUID
    tenant: str
    payload: Mapping[str, Any]
    record_id: str
    attempt: int  # from 1
    max_attempts: int
    heartbeat: Callable[[], None] = field(default=lambda: None, compare=False)  # raises LeaseLost
    token: str = ""  # the lease under which this attempt runs

    @property
    def idempotency_key(self) -> str:
        return str(self.job_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordState:
    """The authoritative record that a job works on, and its state right now."""

    record_type: str
    record_id: str
    state: str
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswer:
    """What the provider said when it was asked whether a job has taken effect (C13)."""

    happened: bool | None  # None: the provider could not tell
    evidence: str  # what it answered, at most 300 characters, for the repair's reference


MOST_ASKED = timedelta(hours=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackOff:
    """How long an attempt is put off: doubled each time, with a random part so that a burst comes back as none."""

    first: timedelta = timedelta(seconds=5)
    factor: float = 2.0
    most: timedelta = timedelta(minutes=15)
    jitter: float = 0.25

    def delay(self, failed_attempts: int, asked: timedelta | None = None) -> timedelta:
        """Return the pause after so many failed attempts (at least 1), no shorter than the one that was asked for.

        An hour of that is kept to: whoever asks for a year must not put work off for ever.
        """
        plain = min(self.first * self.factor ** min(failed_attempts - 1, 30), self.most)
        if asked is not None:
            plain = max(plain, min(asked, MOST_ASKED))
        return plain * (1 + self.jitter * random.random())  # noqa: S311  (spreads load, guards nothing)


class Kind:
    """One kind of job. A subclass states the facts and overrides what its records need; hooks do nothing by themselves.

    ``run`` is called outside any transaction. Everything else is called inside the transaction in which the ledger
    changes the job, with the job's row locked, so that job and record cannot disagree; what raises there undoes both.
    """

    name: ClassVar[str]
    effects: ClassVar[Effects]  # of ``run``, outside the database
    payload_version: ClassVar[int] = 1
    record_type: ClassVar[str] = ""  # such as "report"; "" if it works on none
    max_attempts: ClassVar[int] = 5
    lease: ClassVar[timedelta] = timedelta(seconds=60)  # renewed by itself while the body runs
    back_off: ClassVar[BackOff] = BackOff()
    retries_unanswered: ClassVar[bool] = (
        False  # try again by itself what may have happened: only with an idempotency key
    )
    severity: ClassVar[str] = "high"
    team: ClassVar[str] = ""
    runbook: ClassVar[str] = ""  # an address, or a page of our docs folder
    queue: ClassVar[str] = ""  # "" is OPSCONSOLE_QUEUE

    def check(self, payload: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` with a sentence that names the field if a payload is none of this kind's."""

    def run(self, work: Work) -> Any:
        """Do the work and return what ``complete`` needs; raises ``TryAgain``, ``Refused`` or ``Unanswered``."""
        raise NotImplementedError

    def begin(self, job: Job, now: datetime) -> None:
        """The job is claimed: its record is being worked on, until ``job.lease_expires_at``."""

    def renew(self, job: Job, now: datetime) -> None:
        """The body is still at work: its record is being worked on, until ``job.lease_expires_at``."""

    def complete(self, job: Job, result: Any, now: datetime) -> None:
        """The body has returned ``result``: write it."""

    def put_off(self, job: Job, code: str, now: datetime) -> None:
        """An attempt has failed with ``code``; the next is due at ``job.available_at``."""

    def release(self, job: Job, code: str, now: datetime) -> None:
        """The job's lease was taken from a holder that is gone (A14); it is due at ``job.available_at``."""
        self.put_off(job, code, now)

    def mark_dead(self, job: Job, code: str, now: datetime) -> None:
        """The job has died: mark its record, unless that has finished already (A6)."""

    def requeue(self, job: Job, now: datetime) -> None:
        """A person retries the dead job: its record goes back to pending, attempts 0, lease and error cleared (A12)."""

    def cancel(self, job: Job, now: datetime) -> None:
        """The waiting job was withdrawn."""

    def record(self, job: Job) -> RecordState | None:  # noqa: ARG002
        """Return the record and its state, ``None`` if there is none any more."""
        return None

    def is_overtaken(self, job: Job) -> str:  # noqa: ARG002
        """Return the state of a record that has finished without this job, so that a retry is too late; else ""."""
        return ""

    @property
    def has_probe(self) -> bool:
        """Whether ``probe`` asks anybody."""
        return type(self).probe is not Kind.probe

    def probe(self, job: Job) -> ProbeAnswer:
        """Ask the provider, outside any transaction, whether the job has taken effect (C13)."""
        raise NotImplementedError


def overrides(kind: Kind, hook: str) -> bool:
    """Say whether a kind does something of its own at ``hook``: what it does not is spared its transaction."""
    return getattr(type(kind), hook) is not getattr(Kind, hook)
