"""What a retry of the failed jobs of an incident would mean: counted, sorted, and chosen from, for pages that ask.

Everything here is bounded: the first thousands of an incident's jobs are looked at, and the page says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any
from uuid import UUID

from django.db.models import Q

from deadletters.journal.events import MessageState
from deadletters.models import DeadLetter, LetterState
from deadletters.outcome import OutcomeClass
from incidents.models import Incident
from opsconsole.core.errors import OpsError
from repairs.errors import LetterTooOld, ProviderOutcomeUnknown
from repairs.refusals import NAMES_NO_JOB, NO_JOB, Served, refusal_of
from repairs.services import MOST_LETTERS

COUNTED = 5_000
FULLY_CHECKED = 25
"""Jobs whose stored message is opened for a page: each costs a decryption and up to a megabyte."""
JUDGED = (
    "id", "state", "outcome_class", "outcome_reason", "message_state", "is_set_aside", "job_type", "queue",
    "first_seen_at", "chord_id", "error_class", "worker", "release",
)  # fmt: skip


class Prospect(StrEnum):
    """What a retry of one job would mean; the first three are its outcome class."""

    SAFE = "safe"
    AMBIGUOUS = "ambiguous"
    NOT_DECLARED = "not_declared"
    BLOCKED = "blocked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How many jobs of an incident wait for a decision, by what a retry would mean; ``awaiting`` are under repair."""

    safe: int = 0
    ambiguous: int = 0
    not_declared: int = 0
    blocked: int = 0
    awaiting: int = 0
    reasons: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    is_capped: bool = False

    @property
    def retriable(self) -> int:
        """Jobs that could be sent again."""
        return self.safe + self.ambiguous + self.not_declared

    @property
    def waiting(self) -> int:
        """Jobs that wait for a person."""
        return self.retriable + self.blocked


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One open job with what a retry would mean; ``refusal`` is why it cannot be, or must be asked about first."""

    letter: DeadLetter
    prospect: Prospect
    remark: str
    refusal: OpsError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The open jobs that one request may retry, oldest first; ``left_out`` says that there are more."""

    checked: Sequence[Checked]
    left_out: bool

    def of(self, *prospects: Prospect) -> list[Checked]:
        """Return those of some prospects."""
        return [one for one in self.checked if one.prospect in prospects]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The unsettled jobs of an incident as its page shows them: judged in the way in which a retry of all would be.

    ``checked`` are the open ones where they are few, each checked to the end; many are judged by their rows.
    """

    tiles: Tiles
    checked: dict[UUID, Checked] | None = None
    waiting: Sequence[Any] = ()  # the rows that were judged, in no order, with the columns JUDGED
    found: Sequence[tuple[Prospect, str]] = ()  # of each of these, what a retry would mean, and why

    @property
    def first_safe(self) -> UUID | None:
        """The oldest job that is safe to run again and asks nothing, as far as its row tells: the one to try first.

        One of a chord is left out: that the chord's body will not run has to be said before.
        """
        safe = [
            row for row, (prospect, _) in zip(self.waiting, self.found, strict=True) if _asks_nothing(row, prospect)
        ]
        return min(safe, key=lambda row: (row.first_seen_at, row.id)).id if safe else None

    @property
    def asks_nothing(self) -> bool:
        """Whether every job that waits may simply run again: all are safe, and no more than one request may name."""
        if not self.waiting or self.tiles.is_capped or len(self.waiting) > MOST_LETTERS:
            return False
        return all(_asks_nothing(row, found[0]) for row, found in zip(self.waiting, self.found, strict=True))

    def of_letter(self, letter: DeadLetter, served: Served) -> tuple[Prospect, str]:
        """Return what a retry of an open job would mean, and why."""
        if self.checked is not None and letter.id in self.checked:
            return self.checked[letter.id].prospect, self.checked[letter.id].remark
        return prospect_of(letter, served)

    def rows(self, prospect: Prospect, incident: Incident, served: Served) -> Q:
        """Return the condition for the open jobs that were judged so."""
        if self.checked is not None:
            return Q(id__in=[one.letter.id for one in self.checked.values() if one.prospect is prospect])
        blocked = blocked_rows(incident.job_type, served)
        return blocked if prospect is Prospect.BLOCKED else ~blocked & Q(outcome_class=prospect.value)


def judge_jobs(incident: Incident, served: Served) -> Judged:
    """Judge an incident's unsettled jobs, the first 5,000 of them; one query, and one more where they are few."""
    if incident.is_resolved:
        return Judged(tiles=Tiles())
    rows = _unsettled(incident)
    waiting = [row for row in rows[:COUNTED] if row.state == LetterState.OPEN]
    checked: dict[UUID, Checked] | None = None
    if len(waiting) <= FULLY_CHECKED and len(rows) <= COUNTED:
        checked = {one.letter.id: one for one in check_letters(waiting, incident, served)}
        waiting = [row for row in waiting if row.id in checked]
        found = [(checked[row.id].prospect, checked[row.id].remark) for row in waiting]
    else:
        found = [prospect_of(row, served) for row in waiting]
    reasons: dict[str, Counter[str]] = {}
    for prospect, reason in found:
        reasons.setdefault(prospect.value, Counter())[reason] += 1
    tiles = Tiles(
        **Counter(prospect.value for prospect, _reason in found),
        awaiting=min(len(rows), COUNTED) - len(waiting),
        reasons={name: said.most_common(3) for name, said in reasons.items()},
        is_capped=len(rows) > COUNTED,
    )
    return Judged(tiles=tiles, checked=checked, waiting=waiting, found=found)


def _unsettled(incident: Incident) -> list[Any]:
    """Return the rows to judge, one more than are judged; as whole letters with their messages where they are few."""
    unsettled = DeadLetter.objects.filter(
        incident=incident, episode=incident.episode, state__in=(LetterState.OPEN, LetterState.RETRYING)
    )
    if incident.unresolved_count <= FULLY_CHECKED:
        whole = list(unsettled.select_related("message").defer("payload_preview")[: FULLY_CHECKED + 1])
        # The incident's own count is of a moment ago, so that there may be more by now.
        if len(whole) <= FULLY_CHECKED:
            return whole
    return list(unsettled.values_list(*JUDGED, named=True)[: COUNTED + 1])


def _asks_nothing(row: Any, prospect: Prospect) -> bool:
    return prospect is Prospect.SAFE and not row.chord_id


def prospect_of(row: Any, served: Served) -> tuple[Prospect, str]:
    """Return what a retry of an open job would mean, and why, as far as its row, policy and the live workers tell."""
    if row.is_set_aside:
        return Prospect.BLOCKED, "Its recording is not complete."
    if row.job_type == NO_JOB:
        return Prospect.BLOCKED, f"It can't be repaired: {NAMES_NO_JOB}"
    most = served.most_seconds(row.job_type, row.first_seen_at)
    if most is not None:
        return Prospect.BLOCKED, LetterTooOld(job_type=row.job_type, max_age_seconds=most).detail
    of_ledger = served.is_of_ledger(row.job_type)
    if row.message_state != MessageState.FULL and not of_ledger:
        return Prospect.BLOCKED, f"Its message was not stored in full ({row.message_state})."
    if served.has_nodes and not of_ledger:
        if row.job_type not in served.signatures:
            return Prospect.BLOCKED, f"No live worker serves {row.job_type}."
        if row.queue and row.queue not in served.queues[row.job_type]:
            return Prospect.BLOCKED, f"No live worker serves {row.job_type} on the queue {row.queue}."
    return Prospect(OutcomeClass(row.outcome_class).value), row.outcome_reason


def open_letters(incident: Incident) -> Any:
    """Return the jobs that wait for a decision, oldest first."""
    if incident.is_resolved:
        return DeadLetter.objects.none()
    waiting = DeadLetter.objects.filter(incident=incident, episode=incident.episode, state=LetterState.OPEN)
    return waiting.oldest_first()


def select_open(incident: Incident, served: Served) -> Selection:
    """Return the oldest 1,000 open jobs, each with what a retry would mean.

    A few are checked to the end, message and arguments included; of many only what their rows tell, since each is
    checked again when it is planned.
    """
    letters: list[DeadLetter] = list(open_letters(incident).defer("payload_preview", "error_text")[: MOST_LETTERS + 1])
    left_out = len(letters) > MOST_LETTERS
    if len(letters) <= FULLY_CHECKED:
        return Selection(checked=check_letters(letters, incident, served), left_out=False)
    checked = []
    for letter in letters[:MOST_LETTERS]:
        prospect, reason = prospect_of(letter, served)
        checked.append(Checked(letter=letter, prospect=prospect, remark=reason))
    return Selection(checked=checked, left_out=left_out)


def check_letters(letters: Iterable[Any], incident: Incident, served: Served) -> list[Checked]:
    """Return what a retry of each of a few jobs would mean, their stored messages included; order is kept.

    Of ``letters`` only the ids are read, unless their messages were fetched with them.
    """
    given = list(letters)
    ids = [letter.id for letter in given]
    whole = {letter.id: letter for letter in given if _has_message(letter)}
    missing = [one for one in ids if one not in whole]
    if missing:
        whole |= {letter.id: letter for letter in DeadLetter.objects.filter(id__in=missing).select_related("message")}
    return [check_letter(whole[one], incident, served=served, now=served.at) for one in ids if one in whole]


def _has_message(letter: Any) -> bool:
    return isinstance(letter, DeadLetter) and "message" in letter._state.fields_cache


def check_letter(letter: DeadLetter, incident: Incident, *, served: Served, now: datetime) -> Checked:
    """Return what a retry of one job would mean."""
    refusal = refusal_of(letter, incident, served=served, now=now)
    if refusal is not None and not isinstance(refusal, ProviderOutcomeUnknown):
        return Checked(letter=letter, prospect=Prospect.BLOCKED, remark=refusal.detail, refusal=refusal)
    prospect = Prospect(OutcomeClass(letter.outcome_class).value)
    return Checked(letter=letter, prospect=prospect, remark=letter.outcome_reason, refusal=refusal)


def first_to_retry(incident: Incident, served: Served) -> Checked | None:
    """Return the job to try first: the oldest that is safe, else the oldest that could be sent at all."""
    candidates = check_letters(open_letters(incident).only("id")[:FULLY_CHECKED], incident, served)
    for prospect in (Prospect.SAFE, Prospect.NOT_DECLARED, Prospect.AMBIGUOUS):
        found = next((one for one in candidates if one.prospect is prospect), None)
        if found is not None:
            return found
    return None


def blocked_rows(job_type: str, served: Served) -> Q:
    """Return the condition for jobs of one type that ``prospect_of`` calls blocked; an incident has only one type."""
    of_ledger = served.is_of_ledger(job_type)
    if served.has_nodes and job_type not in served.signatures and not of_ledger:
        return Q(id__isnull=False)
    blocked = Q(is_set_aside=True)
    if not of_ledger:
        blocked |= ~Q(message_state=MessageState.FULL.value)
    most = served.policies.for_task(job_type).max_age_seconds
    if most is not None and most < served.at.timestamp():  # a longer age could not be subtracted, and blocks nothing
        blocked |= Q(first_seen_at__lt=served.at - timedelta(seconds=most))
    if served.has_nodes and not of_ledger:
        blocked |= ~Q(queue="") & ~Q(queue__in=sorted(served.queues[job_type]))
    return blocked
