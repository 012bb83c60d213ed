"""How a job's body says what went wrong, and what the ledger refuses."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from opsconsole.core.errors import OpsError


class JobError(Exception):
    """The base of what a kind declares: an error with a stable ``code`` that the job's record and its letter show."""

    def __init__(self, code: str, text: str = "") -> None:
        self.code = code
        self.text = text
        super().__init__(f"{code}: {text}" if text else code)

    # Celery sends errors from process to process, and remembers them by their arguments.
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, self.text)


class TryAgain(JobError):
    """Nothing has happened, and it may work later: the next attempt is put off, until there is none left.

    ``after`` is how long whoever was asked wants to be left alone: the pause is then no shorter, up to an hour.
    """

    def __init__(self, code: str, text: str = "", after: timedelta | None = None) -> None:
        self.after = after
        super().__init__(code, text)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, self.text, self.after)


class Refused(JobError):
    """Nothing has happened, and trying again does not help: there is no further attempt."""


class Unanswered(JobError):
    """It may have happened: the request was sent and no answer came."""


class LeaseLost(Exception):
    """The lease of this attempt is over, and the job is somebody else's: what it has to say comes too late (C12)."""


class NotClaimed(Exception):
    """The message is an old one: its job has another lease by now, or has ended."""


class NeverClaimed(Exception):
    """A job's message was lost more often than is waited for; as a failed job has it, nobody raises it."""


class JobNotFound(OpsError):
    """There is no such job, or it is not yours to see; ask whoever grants access to its tenant."""

    code = "job_not_found"
    status = 404
    message = "There is no such job, or you may not see it."


class JobNotCancellable(OpsError):
    """It has run, runs, or was cancelled before; look at the job."""

    code = "job_not_cancellable"
    status = 409
    message = "The job is {state}; only one that waits can be cancelled."


class JobKindUnknown(OpsError):
    """No kind of this name is registered; see docs/add-a-job-type.md."""

    code = "job_kind_unknown"
    status = 400
    message = "There is no kind of job called {kind}."


class JobPayloadInvalid(OpsError):
    """The payload does not fit its kind; correct the named field."""

    code = "job_payload_invalid"
    status = 400
    message = "The payload does not fit {kind}: {detail}"


DECLARED: tuple[type[JobError], ...] = (TryAgain, Refused)
"""Errors after which nothing has happened, whatever the kind does."""


def code_in(error_class: str, text: str) -> str:
    """Return the code of a declared error as a journal knows it, by the class's name and its text; "" for any other."""
    return text.partition(":")[0][:64] if error_class in _DECLARED_NAMES else ""


def qualified(error: type[BaseException]) -> str:
    """Return the name by which a journal knows an error's class."""
    return f"{error.__module__}.{error.__qualname__}"


_DECLARED_NAMES = frozenset(qualified(error) for error in (TryAgain, Refused, Unanswered))
SAFE_ERRORS = tuple(qualified(error) for error in DECLARED)
