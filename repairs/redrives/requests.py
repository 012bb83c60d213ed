"""What is asked of a redrive: which jobs, how fast, with which changes, and what is answered for those not safe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

from deadletters.selectors import STATES, LetterFilter
from opsconsole.core.canonical_json import canonical_json
from repairs.errors import RedriveAnswerInvalid, RedriveInvalid, SelectionInvalid
from repairs.models import ANSWERABLE, RedriveClass

MOST_NAMED = 10_000
"""Letters that one request may name; more are chosen by an incident or by a filter."""
MOST_ITEMS = 500_000
RATE = (1, 10_000)
OUTSTANDING = (1, 10_000)
CANARY = (0, 1_000)
LONGEST_REFERENCE = 300
LONGEST_REASON = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class RedriveSelection:
    """Which letters: exactly one of these is given.

    ``letters`` names at least tenant and source; without states it means the open ones. ``failed_of`` is an earlier
    redrive, of which the failed jobs are meant.
    """

    letter_ids: tuple[UUID, ...] = ()
    incident_id: UUID | None = None
    letters: LetterFilter | None = None
    failed_of: UUID | None = None

    def check(self) -> None:
        """Raise ``SelectionInvalid`` unless it means one set."""
        given = [bool(self.letter_ids), self.incident_id is not None, self.letters is not None, bool(self.failed_of)]
        if sum(given) != 1:
            raise SelectionInvalid(detail="Name failed jobs, or an incident, or a filter, or an earlier redrive.")
        if len(set(self.letter_ids)) != len(self.letter_ids):
            raise SelectionInvalid(detail="Name no failed job twice.")
        if len(self.letter_ids) > MOST_NAMED:
            raise SelectionInvalid(detail=f"Name at most {MOST_NAMED:,} failed jobs; choose more by a filter.")
        if self.letters is None:
            return
        if not self.letters.tenant or self.letters.tenant == "*" or not self.letters.source:
            raise SelectionInvalid(detail="A redrive is of one tenant and one source: name both in the filter.")
        unknown = set(self.letters.states) - set(STATES)
        if unknown:
            raise SelectionInvalid(detail=f"There is no state {min(unknown)}.")

    def described(self) -> dict[str, Any]:
        """Return it as JSON without floats, as the redrive keeps it and its receipt hashes it."""
        if self.letter_ids:
            return {"letters": sorted(str(letter_id) for letter_id in self.letter_ids)}
        if self.incident_id is not None:
            return {"incident": str(self.incident_id)}
        if self.failed_of is not None:
            return {"failedOf": str(self.failed_of)}
        given = {name: value for name, value in asdict(self.letters or LetterFilter()).items() if value}
        return {"filter": {name: _plain(value) for name, value in given.items()}}


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, UUID) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class RedrivePace:
    """How fast, and when to stop.

    ``rate_per_second`` jobs are sent at most, and ``max_outstanding`` wait for their answer at most. The first
    ``canary_size`` are sent as single attempts, and the rest only once they have succeeded. With ``stop_percent`` it
    pauses when more than so many per cent of at least ten jobs have failed since it was started or let go on.
    """

    rate_per_second: int = 50
    max_outstanding: int = 500
    canary_size: int = 5
    stop_percent: int | None = 10

    def check(self) -> None:
        """Raise ``RedriveInvalid`` naming the field that makes no sense."""
        for name, (least, most) in (
            ("rate_per_second", RATE),
            ("max_outstanding", OUTSTANDING),
            ("canary_size", CANARY),
        ):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise RedriveInvalid(detail=f"{name} is a whole number from {least:,} to {most:,}.", field=name)
        stop = self.stop_percent
        if stop is not None and (type(stop) is not int or not 0 <= stop <= 100):
            raise RedriveInvalid(
                detail="stop_percent is a whole number from 0 to 100, or left out.", field="stop_percent"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RedriveChanges:
    """What is sent differently from the originals, which are kept.

    ``tasks`` maps a task's old name to its new one. The rest is of keyword arguments: those that are set, whether they
    were there or not; removed; and renamed, which have to be there.
    """

    tasks: Mapping[str, str] = field(default_factory=dict)
    set: Mapping[str, Any] = field(default_factory=dict)
    remove: tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)

    @property
    def of_arguments(self) -> bool:
        """Whether arguments are changed, and not only names of tasks."""
        return bool(self.set or self.remove or self.rename)

    def __bool__(self) -> bool:
        return bool(self.tasks) or self.of_arguments

    def check(self) -> None:
        """Raise ``RedriveInvalid`` for what cannot be one change."""
        names = [*self.tasks, *self.tasks.values(), *self.set, *self.remove, *self.rename, *self.rename.values()]
        if not all(isinstance(name, str) and 1 <= len(name) <= 255 and "\x00" not in name for name in names):
            raise RedriveInvalid(detail="Names of tasks and keywords have 1 to 255 characters.", field="changes")
        touched = [*self.set, *self.remove, *self.rename]
        if len(set(touched)) != len(touched):
            raise RedriveInvalid(detail="One keyword is set, removed or renamed, not two of these.", field="changes")
        made = [*self.set, *self.rename.values()]
        if len(set(made)) != len(made):
            raise RedriveInvalid(detail="Two changes would make one keyword.", field="changes")
        try:
            text = json.dumps(dict(self.set), allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            raise RedriveInvalid(detail="What is set has to be JSON.", field="changes") from None
        if len(text) > 100_000:
            raise RedriveInvalid(detail="What is set has at most 100,000 characters.", field="changes")

    def described(self) -> dict[str, Any]:
        """Return its names, without any value: what anybody may read of it."""
        return {
            "remove": sorted(self.remove),
            "rename": dict(self.rename),
            "set": sorted(self.set),
            "tasks": dict(self.tasks),
        }


class AnswerKind(StrEnum):
    """What is stated about all jobs of one class, so that they may run, or need not."""

    DID_NOT_HAPPEN = "did_not_happen"  # somebody has looked: run them again
    ALREADY_HAPPENED = "already_happened"  # somebody has looked: close them as done
    IDEMPOTENT = "idempotent"  # the provider does twice only once what has the same key: run them again
    PROBE = "probe"  # the kind asks the provider of each; what it cannot tell is left out
    RUN_EXPIRED = "run_expired"  # late is right
    RUN_OLD = "run_old"  # although they failed before the cut-off
    RUN_ALONE = "run_alone"  # although no chord's body will run


_OF_EFFECTS = (AnswerKind.DID_NOT_HAPPEN, AnswerKind.ALREADY_HAPPENED, AnswerKind.IDEMPOTENT, AnswerKind.PROBE)
ANSWERS: dict[RedriveClass, tuple[AnswerKind, ...]] = {
    RedriveClass.AMBIGUOUS: _OF_EFFECTS,
    RedriveClass.NOT_DECLARED: _OF_EFFECTS,
    RedriveClass.EXPIRED: (AnswerKind.RUN_EXPIRED,),
    RedriveClass.OLDER_THAN_CUT_OFF: (AnswerKind.RUN_OLD,),
    RedriveClass.CHORD_MEMBER: (AnswerKind.RUN_ALONE,),
}
"""Which answers each class takes."""
STATEMENTS = (AnswerKind.DID_NOT_HAPPEN, AnswerKind.ALREADY_HAPPENED, AnswerKind.IDEMPOTENT)
"""Answers that somebody vouches for, and that say where it was seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedriveAnswer:
    """What its operator states about one class. ``reference`` says where that was seen: a ticket, a report."""

    kind: AnswerKind
    reference: str = ""


Answers = Mapping[RedriveClass, RedriveAnswer]


def check_answers(answers: Answers) -> None:
    """Raise ``RedriveAnswerInvalid`` naming the class whose answer makes no sense."""
    for name, answer in answers.items():
        if name not in ANSWERABLE:
            raise RedriveAnswerInvalid(detail=f"Nothing can be answered for {name}.", field=str(name))
        if answer.kind not in ANSWERS[RedriveClass(name)]:
            taken = ", ".join(ANSWERS[RedriveClass(name)])
            raise RedriveAnswerInvalid(detail=f"{name} takes one of {taken}.", field=str(name))
        if answer.kind in STATEMENTS and not answer.reference.strip():
            raise RedriveAnswerInvalid(detail=f"Say where it was seen: {name} needs a reference.", field=str(name))
        if len(answer.reference) > LONGEST_REFERENCE or "\x00" in answer.reference:
            raise RedriveAnswerInvalid(detail="A reference has at most 300 characters.", field=str(name))


def pack_answers(answers: Answers) -> str:
    return canonical_json({str(name): [answer.kind.value, answer.reference] for name, answer in answers.items()})


def unpack_answers(text: str) -> dict[str, RedriveAnswer]:
    """Return stored answers by the name of their class."""
    return {
        name: RedriveAnswer(kind=AnswerKind(kind), reference=reference)
        for name, (kind, reference) in json.loads(text).items()
    }
