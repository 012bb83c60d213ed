"""Whether a job that ended badly may nevertheless have done its work: the outcome class of a letter, and why.

The question is asked before a retry. *Safe* means that running the job again does no harm, *ambiguous* that the last
run may have taken effect, *not declared* that nobody has said what the task does. The reason is a sentence for the
operator who has to decide. Certainty is what counts: an error is safe only where it shows that nothing was sent.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from deadletters.journal.events import Caught
from opsconsole.core.effects import Effects, OutcomeClass

__all__ = ["Effects", "Judgement", "OutcomeClass", "combine", "judge"]


@dataclass(frozen=True, slots=True)
class Judgement:
    """An outcome class with the sentence that explains it."""

    outcome: OutcomeClass
    reason: str


# Errors of a request that was never sent: there was no connection to send it on.
_NOT_SENT = frozenset(
    {
        "ConnectionRefusedError",
        "socket.gaierror",
        "socket.herror",
        "ssl.SSLCertVerificationError",
        "urllib3.exceptions.NewConnectionError",
        "urllib3.exceptions.NameResolutionError",
        "urllib3.exceptions.ConnectTimeoutError",
        "requests.exceptions.ConnectTimeout",
        "httpx.ConnectError",
        "httpx.ConnectTimeout",
        "httpx.PoolTimeout",
        "httpcore.ConnectError",
        "httpcore.ConnectTimeout",
        "httpcore.PoolTimeout",
        "aiohttp.client_exceptions.ClientConnectorError",
        "aiohttp.client_exceptions.ConnectionTimeoutError",
        "botocore.exceptions.EndpointConnectionError",
        "botocore.exceptions.ConnectTimeoutError",
        "smtplib.SMTPConnectError",
    }
)
# Errors of a request that may have been sent and whose answer never came.
_NO_ANSWER = frozenset(
    {
        "ConnectionResetError",
        "ConnectionAbortedError",
        "BrokenPipeError",
        "http.client.RemoteDisconnected",
        "http.client.IncompleteRead",
        "http.client.BadStatusLine",
        "requests.exceptions.ReadTimeout",
        "requests.exceptions.ChunkedEncodingError",
        "urllib3.exceptions.ReadTimeoutError",
        "urllib3.exceptions.ProtocolError",
        "urllib3.exceptions.IncompleteRead",
        "httpx.ReadTimeout",
        "httpx.WriteTimeout",
        "httpx.ReadError",
        "httpx.WriteError",
        "httpx.CloseError",
        "httpx.RemoteProtocolError",
        "httpcore.ReadTimeout",
        "httpcore.WriteTimeout",
        "httpcore.ReadError",
        "httpcore.WriteError",
        "httpcore.RemoteProtocolError",
        "aiohttp.client_exceptions.ServerDisconnectedError",
        "aiohttp.client_exceptions.SocketTimeoutError",
        "botocore.exceptions.ReadTimeoutError",
        "botocore.exceptions.ConnectionClosedError",
        "smtplib.SMTPServerDisconnected",
    }
)
# A time-out of no particular call: connecting may end in one as well as reading, so the above have the first word.
_TIMEOUTS = frozenset(
    {
        "TimeoutError",
        "socket.timeout",
        "asyncio.exceptions.TimeoutError",
        "concurrent.futures._base.TimeoutError",
        "requests.exceptions.Timeout",
        "aiohttp.client_exceptions.ServerTimeoutError",
        "redis.exceptions.TimeoutError",
    }
)

# Bare names, since Celery, billiard and our own hooks report the same class under several modules.
_ENDED_FROM_OUTSIDE = {
    "TimeLimitExceeded": "It was killed at its time limit; what it had sent by then is unknown.",
    "SoftTimeLimitExceeded": "It was stopped at its time limit; what it had sent by then is unknown.",
    "WorkerLostError": "The worker died while it was running; what it had sent by then is unknown.",
    "Terminated": "It was terminated while it was running; what it had sent by then is unknown.",
    "EncodeError": "Its work was done; only the result could not be written down.",
}
PUT_ASIDE = "A hold put it aside before this attempt was started."
_NOT_STARTED = {
    Caught.UNKNOWN: "No worker knew a task of this name, so nothing has run.",
    Caught.REJECTED_MESSAGE: "The message could not be read, so nothing has run.",
    Caught.EXPIRED: "It expired before it was started, so nothing has run.",
    Caught.HELD: PUT_ASIDE,
}

_TIMED_OUT = "It timed out waiting; what it had asked for may have been done."
_HARMLESS = {
    Effects.NONE: "The task is declared to have no effects outside, so running it again does no harm.",
    Effects.IDEMPOTENT: "The task is declared to be idempotent, so running it again does no harm.",
}

# Drivers and clients that say only in words what happened to the connection.
_CONNECTION_ERRORS = ("OperationalError", "InterfaceError", "ConnectionError", "ConnectError")
_REFUSED_WORDS = re.compile(
    r"connection refused|could not connect|name or service not known|could not translate host name"
    r"|failed to resolve|nodename nor servname|temporary failure in name resolution|no route to host",
    re.IGNORECASE,
)
_BROKEN_WORDS = re.compile(
    r"closed the connection|connection closed|already closed|connection reset|broken pipe|lost connection"
    r"|terminating connection|gone away|timed out|timeout",
    re.IGNORECASE,
)
# What Python says when a call does not fit its function: (the function) (the rest).
_MISFIT = re.compile(
    r"(?P<function>[\w.<>]+)\(\) (?:missing \d+ required |takes .{1,120} given\Z|got an unexpected keyword argument "
    r"|got multiple values for |got some positional-only arguments |keywords must be strings"
    r"|argument after \*\*? must be )"
)


def judge(
    *,
    caught: Caught,
    error_class: str,
    classes: tuple[str, ...],
    text: str,
    effects: Effects,
    safe_errors: tuple[str, ...],
    never_started: bool,
    message_missing: bool,
    call_site: str | None = None,
    task: str = "",
) -> Judgement:
    """Judge one final or retried failure.

    ``classes`` are the qualified names of the error and its bases up to ``BaseException``, then those of its causes
    and of what was being handled; only the former can be declared safe. ``call_site`` is the innermost
    frame of the user's own code: empty where there was none, None where nobody looked. ``task`` is the task's name;
    with it a call that does not fit is told from one that the task itself made.
    """
    error_class = error_class.removeprefix("builtins.")
    judgement = _judge(
        caught,
        error_class,
        classes,
        # Elsewhere the words decide nothing, and without them a burst of failures is one case.
        text if error_class.endswith(_CONNECTION_ERRORS) else "",
        effects,
        safe_errors,
        never_started,
        call_site == "" and error_class.endswith("TypeError") and _is_misfit(text, task),
    )
    if message_missing:
        return Judgement(judgement.outcome, f"{judgement.reason} Its message was not fully captured.")
    return judgement


def combine(previous: Judgement | None, new: Judgement) -> Judgement:
    """Return the worse of two judgements about one job, the newer one where they are alike (C19).

    A job that may have taken effect at its first attempt still may have after a second one that was refused at the
    door. The caller starts from None again after somebody has found out that nothing has happened.
    """
    if previous is not None and previous.outcome.severity > new.outcome.severity:
        return previous
    return new


@lru_cache(maxsize=256)
def _judge(
    caught: Caught,
    error_class: str,
    classes: tuple[str, ...],
    text: str,
    effects: Effects,
    safe_errors: tuple[str, ...],
    never_started: bool,
    is_misfit: bool,
) -> Judgement:
    chain = (error_class, *(name.removeprefix("builtins.") for name in classes))
    if never_started:
        return Judgement(OutcomeClass.SAFE, _NOT_STARTED.get(caught, "It had not been started, so nothing has run."))
    if caught in _NOT_STARTED:
        return Judgement(OutcomeClass.SAFE, _NOT_STARTED[caught])
    if effects in _HARMLESS:
        return Judgement(OutcomeClass.SAFE, _HARMLESS[effects])
    name = error_class.rpartition(".")[2]
    if name == "NotRegistered":
        return Judgement(OutcomeClass.SAFE, _NOT_STARTED[Caught.UNKNOWN])
    if is_misfit:
        return Judgement(OutcomeClass.SAFE, "The arguments did not fit the task, so its body did not run.")
    if _is_declared(error_class, safe_errors):
        return Judgement(OutcomeClass.SAFE, f"{name} is declared safe: nothing has happened when it is raised.")
    every = frozenset(chain)
    if (reason := _why_ambiguous(caught, error_class, name, every)) is not None:
        return Judgement(OutcomeClass.AMBIGUOUS, reason)
    if safe_errors and any(_is_declared(other, safe_errors) for other in _its_own(name, chain)):
        return Judgement(OutcomeClass.SAFE, f"{name} comes from an error that is declared safe.")
    return _judge_connection(name, every, text) or _judge_by_effects(effects, name)


def _its_own(name: str, chain: tuple[str, ...]) -> tuple[str, ...]:
    """Return the error's class and bases: what was being handled when it was raised says nothing about it.

    Celery's word for "no attempt left" is the exception: it is raised while handling the error it stands for.
    """
    if name == "MaxRetriesExceededError" or "BaseException" not in chain:
        return chain
    return chain[: chain.index("BaseException")]


def _why_ambiguous(caught: Caught, error_class: str, name: str, chain: frozenset[str]) -> str | None:
    if caught is Caught.WORKER_LOST:
        return _ENDED_FROM_OUTSIDE["WorkerLostError"]
    if name in _ENDED_FROM_OUTSIDE:
        return _ENDED_FROM_OUTSIDE[name]
    if not chain.isdisjoint(_NO_ANSWER):
        return "The connection broke after the request may have been sent, and no answer came."
    if error_class in _TIMEOUTS:
        return _TIMED_OUT
    if caught is Caught.INTERNAL:
        return "Celery failed around the task, not in it; the task's own work may have been done."
    return None


def _judge_connection(name: str, chain: frozenset[str], text: str) -> Judgement | None:
    """Judge an error of a connection, by its class or, where the class does not say it, by its words."""
    not_sent = Judgement(OutcomeClass.SAFE, "No connection was made, so the request was not sent.")
    if not chain.isdisjoint(_NOT_SENT):
        return not_sent
    if not chain.isdisjoint(_TIMEOUTS):
        return Judgement(OutcomeClass.AMBIGUOUS, _TIMED_OUT)
    if name.endswith(_CONNECTION_ERRORS):
        if _REFUSED_WORDS.search(text):
            return not_sent
        if _BROKEN_WORDS.search(text):
            return Judgement(OutcomeClass.AMBIGUOUS, "The connection broke; what had been sent by then is unknown.")
    return None


def _judge_by_effects(effects: Effects, name: str) -> Judgement:
    if effects is Effects.OUTSIDE:
        return Judgement(
            OutcomeClass.AMBIGUOUS, f"The task has effects outside, and {name or 'its error'} is not declared safe."
        )
    return Judgement(OutcomeClass.NOT_DECLARED, "Nobody has declared what the task does before it fails like this.")


def _is_declared(error_class: str, safe_errors: tuple[str, ...]) -> bool:
    return error_class in safe_errors or error_class.rpartition(".")[2] in safe_errors


def _is_misfit(text: str, task: str) -> bool:
    """Say whether the text is Python's about a call of the task itself, whose body then did not run."""
    match = _MISFIT.match(text)
    if match is None:
        return False
    function = match["function"].rpartition(".")[2]
    return not task or function in (task.rpartition(".")[2], "run")
