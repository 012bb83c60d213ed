"""Which failures are one incident, which failures are one letter, and what the incident is called.

A cause is where the user's own code failed and how, never a line number (any edit moves it), never an id or a port in
the error's text (every occurrence would be new). Parts of a key are length-prefixed before they are hashed, so that no
two different lists of parts read the same.
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache
from hashlib import sha256

from deadletters.journal.events import Caught
from opsconsole.core.safe_text import mark_unsafe, safe_text, shorten

SIGNATURE_LENGTH = 300
FINGERPRINT_LENGTH = 500
NAME_LENGTH = 200
TITLE_LENGTH = 200
SUMMARY_LENGTH = 1_000

_KEY_VERSION = "g1"
# Enough to fill a signature; what stands further back decides nothing.
_READ = 1_000


class GroupingMode(StrEnum):
    """What one incident stands for."""

    CAUSE = "cause"  # everything that failed in the same place in the same way
    JOB = "job"  # one letter


# --- the text without what varies ------------------------------------------------------------------------------------

# An apostrophe inside a word opens nothing.
_QUOTED = re.compile(r"""(?<!\w)(?:'[^']*'|"[^"]*"|`[^`]*`)(?!\w)|‘[^’]*’|“[^”]*”|«[^»]*»""")
_QUOTED_LIST = re.compile(r"'…'(?:[ ,;]+(?:and |or )?'…')+")
_URL_REST = re.compile(r"""(\b[a-z][a-z0-9+.-]{0,20}://[^\s/?#'"<>,;]*)[/?#][^\s'"<>,;]*""", re.IGNORECASE)
_MAIL = re.compile(r"[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}")
_PATH = re.compile(r"(?<![\w./:…])(/[\w.@+~-]+/)(?:[\w.@+~%-]+/)*(?:[\w@+~%-]*(\.[A-Za-z]{1,5}\b)|[\w.@+~%-]*)")
_WINDOWS_PATH = re.compile(r"\b([A-Za-z]:\\)[^\s'\"<>|]+")
_LONG_TOKEN = re.compile(r"(?<![A-Za-z0-9+/_-])[A-Za-z0-9+/_-]{20,}+={0,2}")
_UUID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE)
_IPV6 = re.compile(r"(?<![\w:])(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}(?:%\w+)?(?![\w:])", re.IGNORECASE)
_HEX = re.compile(r"\b[0-9a-f]{8,}\b", re.IGNORECASE)
_WITH_DIGIT = re.compile(r"(?<![A-Za-z0-9])[A-Za-z]*+\d[A-Za-z0-9]*")
_NUMBERED_WORD = re.compile(r"([a-z]{3,})\d{1,4}\Z")
_SIGN = re.compile(r"(?<![\w#])[+-](?=#)")
_RUN = re.compile(r"#(?:[ ,;:/.|+_-]*#)+")
_DAY = r"(?:mon|tue|wed|thu|fri|sat|sun)[a-z]{0,6},? "
_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]{0,6}\b"
_DATE_WORDS = re.compile(rf"\b(?:{_DAY})?(?:{_MONTH} (?=#)|(?=#)#[ -]{_MONTH}[ ,-]+(?=#))|{_DAY}(?=#)", re.IGNORECASE)
_NOON = re.compile(r"# ?[ap]m\b", re.IGNORECASE)


@lru_cache(maxsize=1024)
def signature(text: str) -> str:
    """Return an error's text without what varies from one occurrence to the next, at most 300 characters (INC-01).

    Numbers, ids, addresses and times become ``#``, what stands in quotes ``…``, and of a URL or a path only its
    beginning stays. Give it redacted text: it removes what varies, not what is secret. What cannot be told from a word,
    such as a random id without a digit, stays.
    """
    value = " ".join(text[:_READ].split())
    if not value.isprintable():
        value = mark_unsafe(value)
    value = _QUOTED_LIST.sub("'…'", _QUOTED.sub("'…'", value))
    if "://" in value:
        value = _URL_REST.sub(r"\1/…", value)
    if "@" in value:
        value = _MAIL.sub("<mail>", value)
    if "/" in value:
        value = _PATH.sub(r"\1…\2", value)
    if ":\\" in value:
        value = _WINDOWS_PATH.sub(r"\1…", value)
    if value.count("-") > 3:
        value = _UUID.sub("#", value)
    if value.count(":") > 1:
        value = _IPV6.sub("#", value)
    value = _HEX.sub("#", _LONG_TOKEN.sub(_without_token, value))
    value = _RUN.sub("#", _SIGN.sub("", _WITH_DIGIT.sub(_without_number, value)))
    if "#" in value:
        value = _RUN.sub("#", _NOON.sub("#", _DATE_WORDS.sub("", value)))
    return value[:SIGNATURE_LENGTH].rstrip()


def _without_token(match: re.Match[str]) -> str:
    token = match[0]
    mixed = any(map(str.isdigit, token)) and any(map(str.isupper, token)) and any(map(str.islower, token))
    return "#" if mixed else token


def _without_number(match: re.Match[str]) -> str:
    # "sha256" stays a word, "7f3a" does not; short hexadecimal looks like both and is taken for an id.
    word = _NUMBERED_WORD.match(match[0])
    return f"{word[1]}#" if word and not set(word[1]) <= set("abcdef") else "#"


# --- keys ------------------------------------------------------------------------------------------------------------

# Where the work was when it was cut off says nothing about why.
_CUT_OFF = frozenset({"TimeLimitExceeded", "SoftTimeLimitExceeded", "WorkerLostError", "NotRegistered"})


def grouping_key(
    *,
    mode: GroupingMode,
    tenant: str,
    source: str,
    task: str,
    error_class: str,
    call_site: str,
    text: str,
    caught: Caught,
    fingerprint: str,
) -> str:
    """Return the key of the incident that a failure belongs to: a version and 64 hexadecimal digits.

    By cause: tenant, source, job type, error class and the innermost frame of the user's own code
    (``module:function``); where there is none, the signature of the (redacted) text. Time limits, lost workers,
    exhausted memory and unknown tasks have neither. By job: tenant, source and the letter's fingerprint.
    """
    if mode is GroupingMode.JOB:
        return _hashed(mode.value, tenant, source, fingerprint)
    name = error_class.removeprefix("builtins.")
    if _is_cut_off(caught, name):
        return _hashed(mode.value, tenant, source, task, name)
    if call_site:
        return _key_of_place(str(mode), tenant, source, task, name, call_site)
    return _hashed(mode.value, tenant, source, task, name, "text", signature(text))


@lru_cache(maxsize=1024)
def _key_of_place(mode: str, tenant: str, source: str, task: str, name: str, call_site: str) -> str:
    # Remembered, for a burst of failures comes from one place.
    return _hashed(mode, tenant, source, task, name, "frame", call_site)


def fingerprint(queue: str, job_id: str | None, message_id: str) -> str:
    """Return a letter's fingerprint: ``<source queue>:<job id>``, or ``<source queue>:message:<message id>`` (A2).

    At most 500 characters. A hash stands beside every part that was shortened, and beside one that would let two
    different jobs read alike: a queue's name with a colon in it, a job id that begins like the other form (C10).
    """
    if ":" in queue:
        queue = _with_hash(queue)
    if job_id:
        kind, name = "", _with_hash(job_id) if job_id.startswith("message:") else job_id
    else:
        kind, name = "message:", message_id
    whole = f"{shorten(queue, FINGERPRINT_LENGTH)}:{kind}{shorten(name, FINGERPRINT_LENGTH)}"
    if len(whole) <= FINGERPRINT_LENGTH:
        return whole
    queue = shorten(queue, NAME_LENGTH)
    return f"{queue}:{kind}{shorten(name, FINGERPRINT_LENGTH - len(queue) - 1 - len(kind))}"


def short_queue(queue: str) -> str:
    """Return a queue's name as it is stored: at most 200 characters, a hash beside what was shortened (A2, C10)."""
    return shorten(queue, NAME_LENGTH)


def short_id(message_id: str) -> str:
    """Return a message's or job's id as it is stored: at most 200 characters, a hash beside what was shortened."""
    return shorten(message_id, NAME_LENGTH)


def _is_cut_off(caught: Caught, name: str) -> bool:
    leaf = name.rpartition(".")[2]
    return caught in (Caught.WORKER_LOST, Caught.UNKNOWN) or leaf in _CUT_OFF or leaf.endswith("MemoryError")


def _hashed(*parts: str) -> str:
    joined = "".join([f"{len(part)}:{part}" for part in parts])
    return f"{_KEY_VERSION}-{sha256(joined.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _with_hash(part: str) -> str:
    return f"{part}~{sha256(part.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


# --- words -----------------------------------------------------------------------------------------------------------

_NO_TASK = "An invalid message"
_BY_CLASS = {
    "TimeLimitExceeded": "{task} was killed at its time limit",
    "SoftTimeLimitExceeded": "{task} was stopped at its time limit",
    "WorkerLostError": "{task} lost its worker while running",
    "NotRegistered": "{task} is a task that no worker knows",
}
_BY_CATCH = {
    Caught.WORKER_LOST: _BY_CLASS["WorkerLostError"],
    Caught.UNKNOWN: _BY_CLASS["NotRegistered"],
    Caught.REJECTED_MESSAGE: "{task} could not be read",
    Caught.EXPIRED: "{task} expired before it was started",
    Caught.REQUEUED_AFTER_ACK: "{task} was handed back after it had been acknowledged",
    Caught.HELD: "{task} is on hold",
}


def title(
    *, mode: GroupingMode, task: str, error_class: str, caught: Caught, call_site: str = "", text: str = ""
) -> str:
    """Return an incident's title: one line of at most 200 characters that begins with the job type (A4)."""
    name = shorten(task, 100) or _NO_TASK
    if mode is GroupingMode.JOB:
        return safe_text(f"{name} used up its retries and was given up", TITLE_LENGTH)
    return safe_text(_one_line(_what_happened(name, error_class, caught, call_site, text)), TITLE_LENGTH)


def summary(
    *,
    mode: GroupingMode,
    task: str,
    queue: str,
    error_class: str,
    caught: Caught,
    call_site: str = "",
    text: str = "",
) -> str:
    """Return an incident's summary: what happened, where, from which queue and with which words, in one line (A4).

    The words are the signature of the (redacted) text, so that the summary is true of every letter of the incident.
    """
    name = shorten(task, 100) or _NO_TASK
    sentences = [
        f"{_what_happened(name, error_class, caught, call_site, '')}.",
        f"It came from queue {short_queue(queue)}." if queue else "",
        f"The error says: {words}." if (words := signature(text).rstrip(".")) else "",
        "No automatic attempt is left."
        if mode is GroupingMode.JOB
        else "All jobs that fail like this are counted here.",
    ]
    return safe_text(_one_line(" ".join(sentences)), SUMMARY_LENGTH)


def _what_happened(task: str, error_class: str, caught: Caught, call_site: str, text: str) -> str:
    leaf = error_class.rpartition(".")[2]
    template = _BY_CATCH.get(caught) or _BY_CLASS.get(leaf)
    if template is not None:
        return template.format(task=task)
    if leaf.endswith("MemoryError"):
        return f"{task} ran out of memory"
    if caught is Caught.INTERNAL:
        return f"{task} ended outside its own code with {leaf or 'an unknown error'}"
    if call_site:
        # A place is "module:function"; a declared code stands alone.
        return f"{task} fails with {leaf} " + (f"in {call_site}" if ":" in call_site else f"({call_site})")
    words = signature(text)
    return f"{task} fails with {leaf or 'an unknown error'}{f': {words}' if words else ''}"


def _one_line(value: str) -> str:
    return " ".join(value.split())
