"""Why a letter may not be retried: decided from its row, its message, its policy and the live workers.

Nothing here changes anything.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from deadletters import conf
from deadletters.arguments import check_arguments
from deadletters.intake import open_message, parse_expiry
from deadletters.journal.events import MessageState
from deadletters.journal.message import RawMessage, unpack_message
from deadletters.models import DECIDABLE, DeadLetter, SealedMessage, WorkerNode
from deadletters.outcome import OutcomeClass
from deadletters.policy import PolicyBook
from deadletters.selectors import task_policies
from incidents.models import Incident
from opsconsole.core.database import AnyOf, recent_database_now
from opsconsole.core.errors import OpsError
from opsconsole.core.redaction import decode_body
from opsconsole.core.sealing import BrokenSeal, UnknownSealKey
from opsconsole.jobs.tokens import TASK_PREFIX
from repairs.errors import (
    ArgumentsDoNotFit,
    IncidentNotRepairable,
    JobNotServed,
    JobOvertaken,
    LetterSetAside,
    LetterTooOld,
    MessageExpired,
    MessageNotCaptured,
    MessageSealedWithUnknownKey,
    MessageTooDeep,
    ProviderOutcomeUnknown,
)
from repairs.records import is_of_ledger, refuse_ledger_job

NO_JOB = "invalid"
"""The type of what could not be read as any job (A1)."""
NAMES_NO_JOB = "its message names no job."
LOADED = 25
"""Stored messages in memory at once: each may have a megabyte."""
KEPT_SECONDS = 5.0
KEPT_SOURCES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What the live workers of one source serve, and what is declared about tasks, both at one moment.

    ``has_nodes`` is false if no worker has ever reported.
    """

    at: datetime
    has_nodes: bool
    signatures: dict[str, list[str]]  # task name -> different signatures as the workers publish them
    queues: dict[str, set[str]]  # task name -> queues on which a worker that has it listens
    policies: PolicyBook

    @classmethod
    def by(cls, source: str, now: datetime) -> Served:
        signatures: dict[str, list[str]] = {}
        queues: dict[str, set[str]] = {}
        for tasks, listening in WorkerNode.objects.live(now).filter(source=source).values_list("tasks", "queues"):
            heard = json.loads(listening)
            for name, signature in json.loads(tasks).items():
                # A hundred workers of one release publish the same, which need not be compared a hundred times.
                known = signatures.setdefault(name, [])
                if signature not in known:
                    known.append(signature)
                queues.setdefault(name, set()).update(heard)
        has_nodes = bool(signatures) or WorkerNode.objects.filter(source=source).exists()
        return cls(at=now, has_nodes=has_nodes, signatures=signatures, queues=queues, policies=task_policies())

    @classmethod
    def lately(cls, source: str) -> Served:
        """Return what ``by`` said within the last five seconds in this process, for a page that changes nothing.

        Whoever decides asks ``by``: a worker may have gone since.
        """
        with _lately_lock:
            kept = _lately.get(source)
            if kept is None or time.monotonic() >= kept[0]:
                if len(_lately) >= KEPT_SOURCES:
                    _lately.clear()
                kept = time.monotonic() + KEPT_SECONDS, cls.by(source, recent_database_now())
                _lately[source] = kept
        return replace(kept[1], at=recent_database_now())

    def is_of_ledger(self, job_type: str) -> bool:
        """Whether live workers serve jobs of the ledger of this kind, and no task of that name.

        Such a job is put back to work in its own row (A12): neither its message nor its queue stands against it.
        """
        return job_type not in self.signatures and f"{TASK_PREFIX}{job_type}" in self.signatures

    def most_seconds(self, job_type: str, first_seen_at: datetime) -> int | None:
        """Return the age up to which a job of this task may be retried, if one that old has passed it."""
        most = self.policies.for_task(job_type).max_age_seconds
        return most if most is not None and (self.at - first_seen_at).total_seconds() > most else None


_lately: dict[str, tuple[float, Served]] = {}
_lately_lock = threading.Lock()


def forget_served() -> None:
    """Read afresh the next time: for tests."""
    with _lately_lock:
        _lately.clear()


def load_messages(letters: Sequence[DeadLetter]) -> None:
    """Fetch the stored messages of a few letters, of at most ``LOADED``, with one query."""
    ids = [letter.id for letter in letters]
    found = {one.letter_id: one for one in SealedMessage.objects.filter(AnyOf("letter_id", ids)).only("blob", "key_id")}
    for letter in letters:
        # As a prefetch leaves it, which takes three times as long.
        letter._state.fields_cache["message"] = found.get(letter.id)


def unload_messages(letters: Sequence[DeadLetter]) -> None:
    """Let go of what ``load_messages`` fetched."""
    for letter in letters:
        letter._state.fields_cache.pop("message", None)


def open_letter_message(letter: DeadLetter) -> RawMessage:
    """Return the original message.

    Raises ``MessageNotCaptured``, ``MessageTooDeep`` or ``MessageSealedWithUnknownKey``.
    """
    if letter.message_state == MessageState.TOO_DEEP:
        raise MessageTooDeep
    if letter.message_state != MessageState.FULL:
        raise MessageNotCaptured(state=letter.message_state)
    # Through the relation, so that who works on many letters can fetch their messages together.
    stored: SealedMessage | None = getattr(letter, "message", None)
    if stored is None:
        raise MessageNotCaptured(state="removed")
    try:
        return unpack_message(open_message(conf.sealer(), bytes(stored.blob), letter.id))
    except UnknownSealKey:
        raise MessageSealedWithUnknownKey(key_id=stored.key_id) from None
    except (BrokenSeal, ValueError, zlib.error, RecursionError):
        raise MessageNotCaptured(state="damaged") from None


def expires_at(raw: RawMessage) -> datetime | None:
    """Return the time after which the sender did not want it to run, if the message names one."""
    return parse_expiry(raw.headers.get("expires"))


def refuse_unrepairable(
    letter: DeadLetter,
    incident: Incident,
    *,
    served: Served,
    now: datetime,
    provider_checked: bool,
    run_expired: bool,
) -> list[str]:
    """Raise the first refusal that applies to retrying a locked letter, or return warnings for its operator.

    Raises ``JobOvertaken``, ``LetterSetAside``, ``IncidentNotRepairable``, ``LetterTooOld``, ``MessageNotCaptured``,
    ``MessageTooDeep``, ``MessageSealedWithUnknownKey``, ``MessageExpired``, ``JobNotServed``, ``ArgumentsDoNotFit``,
    ``ProviderOutcomeUnknown``, or, for a job of the ledger, ``RepairReferenceMissing`` or ``RecordFinished``.
    """
    if letter.state not in DECIDABLE:
        raise JobOvertaken(standing=letter.standing(incident))
    if letter.is_set_aside:
        raise LetterSetAside
    if letter.job_type == NO_JOB:
        raise IncidentNotRepairable(detail=NAMES_NO_JOB)
    most = served.most_seconds(letter.job_type, letter.first_seen_at)
    if most is not None:
        raise LetterTooOld(job_type=letter.job_type, max_age_seconds=most)
    if is_of_ledger(letter):
        warnings = refuse_ledger_job(letter, tasks=served.signatures, has_nodes=served.has_nodes)
    else:
        warnings = _refuse_message(letter, served=served, now=now, run_expired=run_expired)
    if letter.outcome_class == OutcomeClass.AMBIGUOUS and not provider_checked:
        raise ProviderOutcomeUnknown(job_id=letter.job_id or letter.task_id, reason=letter.outcome_reason)
    if letter.chord_id:
        warnings.append("chord_body_will_not_run")
    if letter.outcome_class == OutcomeClass.NOT_DECLARED:
        warnings.append("effects_not_declared")
    return warnings


def _refuse_message(letter: DeadLetter, *, served: Served, now: datetime, run_expired: bool) -> list[str]:
    raw = open_letter_message(letter)
    expired = expires_at(raw)
    if expired is not None and expired <= now and not run_expired:
        raise MessageExpired(expired_at=expired.isoformat())
    return _refuse_unserved(letter, raw, served)


def _refuse_unserved(letter: DeadLetter, raw: RawMessage, served: Served) -> list[str]:
    if not served.has_nodes:
        return ["no_worker_seen"]
    if letter.job_type not in served.signatures:
        raise JobNotServed(job_type=letter.job_type, where="")
    if letter.queue and letter.queue not in served.queues[letter.job_type]:
        raise JobNotServed(job_type=letter.job_type, where=f" on the queue {letter.queue}")
    decoded = decode_body(raw.body, raw.content_type or "", raw.content_encoding or "")
    if decoded.error:
        return ["arguments_not_readable"]
    misfits = [check_arguments(text, decoded.args, decoded.kwargs) for text in served.signatures[letter.job_type]]
    if all(misfits):
        raise ArgumentsDoNotFit(job_type=letter.job_type, detail=misfits[0])
    return []


def refusal_of(letter: DeadLetter, incident: Incident, *, served: Served, now: datetime) -> OpsError | None:
    """Return why this letter could not be retried just now, or ``None``: for pages that must not offer it."""
    try:
        refuse_unrepairable(letter, incident, served=served, now=now, provider_checked=False, run_expired=False)
    except OpsError as refusal:
        return refusal
    return None
