"""The dry run: what running each job of a redrive again would mean, told from rows, and without opening messages.

A page is one short transaction over a few thousand items, so memory stays flat however many there are, and a process
that dies in the middle leaves the next one to go on at the same place. The same judgement is made again, from locked
rows, when an item is planned.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, Protocol
from uuid import UUID

from deadletters import conf as letters_conf
from deadletters.arguments import NO_JSON, Shape, check_arguments, parse_shape
from deadletters.journal.events import MessageState
from deadletters.models import DeadLetter
from grants.service import service
from opsconsole.core.canonical_json import canonical_json
from opsconsole.core.database import AnyOf, database_now
from opsconsole.core.errors import OpsError
from opsconsole.core.redaction import decode_body
from opsconsole.jobs.errors import JobKindUnknown
from opsconsole.jobs.kinds import kind_named
from opsconsole.jobs.models import Job, JobState
from opsconsole.jobs.tokens import TASK_PREFIX, job_id_of
from repairs.models import Redrive, RedriveClass, RedriveItem, RedriveState
from repairs.redrives.requests import RedriveChanges
from repairs.redrives.sql import alike_items, write_classes
from repairs.refusals import LOADED, Served, load_messages, open_letter_message

PAGE = 10_000
SINGLY = 2_000
JUDGED = (
    "id", "state", "is_set_aside", "message_state", "job_type", "queue", "task_id", "outcome_class", "first_seen_at",
    "expires_at", "arguments", "chord_id",
)  # fmt: skip
"""The columns of a letter that a judgement is made from."""


class JudgedRow(Protocol):
    """A letter, or a row with the columns ``JUDGED``."""

    id: UUID
    state: Any
    is_set_aside: bool
    message_state: Any
    job_type: str
    queue: str
    task_id: str
    outcome_class: Any
    first_seen_at: datetime
    expires_at: datetime | None
    arguments: str
    chord_id: str


class Verdict(NamedTuple):
    """What running one job again would mean; without ``concerns`` and as ``safe`` it may simply run."""

    item_class: RedriveClass
    detail: str = ""
    concerns: tuple[RedriveClass, ...] = ()

    @property
    def is_blocked(self) -> bool:
        """Whether no answer lets it run."""
        return not self.concerns and self.item_class is not RedriveClass.SAFE


SAFE = Verdict(RedriveClass.SAFE)


class LedgerJob(NamedTuple):
    """What a judgement looks at of the ledger's row of a job."""

    kind: str
    state: str

    @property
    def has_probe(self) -> bool:
        """Whether its kind can ask the provider what became of it (C13)."""
        try:
            return kind_named(self.kind).has_probe
        except JobKindUnknown:
            return False


class Judge:
    """Judges letters for one redrive, at one moment; what many letters have in common is decided once."""

    def __init__(self, redrive: Redrive, served: Served, changes: RedriveChanges) -> None:
        self.letter_state = redrive.letter_state
        self.cut_off = redrive.cut_off
        self.target_queue = redrive.target_queue
        self.served = served
        self.changes = changes
        self.now = served.at
        self.keys = frozenset(letters_conf.sealer().key_ids)
        self._fits: dict[tuple[str, str, str], Verdict | None] = {}
        self._ages: dict[str, int | None] = {}

    def of(self, row: JudgedRow, *, key_id: str | None, jobs: Mapping[UUID, LedgerJob]) -> Verdict:
        """Return what running this letter's job again would mean.

        ``key_id`` is the key that its stored message is sealed with (None without a message), ``jobs`` has the
        ledger's rows of those whose job is one of the ledger's.
        """
        if row.state != self.letter_state:
            return Verdict(RedriveClass.OVERTAKEN, f"it is {row.state} by now")
        if row.is_set_aside:
            return Verdict(RedriveClass.NOT_CAPTURED, "its recording is not complete")
        if self.is_too_old(row):
            most = self._most_seconds(row.job_type)
            return Verdict(RedriveClass.TOO_OLD, f"{row.job_type} may run again for {most} seconds after it failed")
        job_id = job_id_of(row.task_id)
        blocked = self._of_ledger(jobs.get(job_id)) if job_id is not None else self._of_message(row, key_id)
        return blocked or self._concerns(row)

    def is_too_old(self, row: JudgedRow) -> bool:
        """Whether this one has passed the age that its task's policy sets."""
        most = self._most_seconds(row.job_type)
        return most is not None and (self.now - row.first_seen_at).total_seconds() > most

    def _most_seconds(self, job_type: str) -> int | None:
        if job_type not in self._ages:
            self._ages[job_type] = self.served.policies.for_task(job_type).max_age_seconds
        return self._ages[job_type]

    def _of_ledger(self, job: LedgerJob | None) -> Verdict | None:
        if job is None:
            return Verdict(RedriveClass.NOT_CAPTURED, "the ledger's row of it is not there any more")
        if job.state != JobState.DEAD:
            return Verdict(RedriveClass.OVERTAKEN, f"its job is {job.state} by now")
        task = f"{TASK_PREFIX}{job.kind}"
        if self.changes.of_arguments or task in self.changes.tasks or job.kind in self.changes.tasks:
            return Verdict(RedriveClass.NOT_PATCHABLE, "a job of the ledger is put back as it is")
        if self.served.has_nodes and task not in self.served.signatures:
            return Verdict(RedriveClass.NOT_SERVED, f"no live worker serves {job.kind}")
        return None

    def _of_message(self, row: JudgedRow, key_id: str | None) -> Verdict | None:
        if row.message_state != MessageState.FULL:
            return Verdict(RedriveClass.NOT_CAPTURED, f"its message was not stored in full ({row.message_state})")
        if key_id is None:
            return Verdict(RedriveClass.NOT_CAPTURED, "its message has been removed")
        if key_id not in self.keys:
            return Verdict(RedriveClass.NOT_CAPTURED, f"its message is sealed with the key {key_id}, unknown here")
        alike = row.job_type, row.queue, row.arguments
        if alike not in self._fits:
            self._fits[alike] = self._fit(*alike)
        return self._fits[alike]

    def _fit(self, job_type: str, queue: str, arguments: str) -> Verdict | None:
        task = self.changes.tasks.get(job_type, job_type)
        shape = parse_shape(arguments)
        if self.changes.of_arguments and arguments == NO_JSON:
            return Verdict(RedriveClass.NOT_PATCHABLE, "its arguments are no JSON")
        if shape is not None:
            missing = [name for name in (*self.changes.remove, *self.changes.rename) if name not in shape.names]
            if missing:
                return Verdict(RedriveClass.NOT_PATCHABLE, f"it has no keyword {missing[0]}"[:300])
            shape = changed_shape(shape, self.changes)
            if shape is None:
                return Verdict(RedriveClass.NOT_PATCHABLE, "a renamed keyword would be there twice")
        if not self.served.has_nodes:
            return None
        if task not in self.served.signatures:
            return Verdict(RedriveClass.NOT_SERVED, f"no live worker serves {task}")
        wanted = self.target_queue or queue
        if wanted and wanted not in self.served.queues[task]:
            return Verdict(RedriveClass.NOT_SERVED, f"no live worker serves {task} on the queue {wanted}"[:300])
        if shape is None:
            return None
        misfits = [shape.misfit(text) for text in self.served.signatures[task]]
        if misfits and all(misfits):
            return Verdict(RedriveClass.ARGUMENTS_DO_NOT_FIT, (misfits[0] or "")[:300])
        return None

    def _concerns(self, row: JudgedRow) -> Verdict:
        # What nearly every letter of a big redrive is, is asked first.
        is_expired = row.expires_at is not None and row.expires_at <= self.now
        is_cut_off = self.cut_off is not None and row.first_seen_at < self.cut_off
        if row.outcome_class == RedriveClass.SAFE and not (is_expired or is_cut_off or row.chord_id):
            return SAFE
        concerns = []
        if row.outcome_class != RedriveClass.SAFE:
            concerns.append(RedriveClass(str(row.outcome_class)))
        if is_expired:
            concerns.append(RedriveClass.EXPIRED)
        if is_cut_off:
            concerns.append(RedriveClass.OLDER_THAN_CUT_OFF)
        if row.chord_id:
            concerns.append(RedriveClass.CHORD_MEMBER)
        return Verdict(concerns[0], "", tuple(concerns))

    def read_closely(self, letters: Iterable[DeadLetter]) -> dict[UUID, Verdict]:
        """Return the verdicts of those whose message has to be opened because their row has no shape of it.

        Only what it keeps from running: the rest is ``of``'s.
        """
        found: dict[UUID, Verdict] = {}
        for letter in letters:
            try:
                raw = open_letter_message(letter)
            except OpsError as refusal:
                found[letter.id] = Verdict(RedriveClass.NOT_CAPTURED, refusal.detail[:300])
                continue
            decoded = decode_body(raw.body, raw.content_type or "", raw.content_encoding or "")
            if decoded.error:
                continue
            shape = changed_shape(Shape(len(decoded.args), tuple(decoded.kwargs)), self.changes)
            task = self.changes.tasks.get(letter.job_type, letter.job_type)
            texts = self.served.signatures.get(task, [])
            if shape is None:
                found[letter.id] = Verdict(RedriveClass.NOT_PATCHABLE, "it has not the keywords that are to change")
                continue
            misfits = [check_arguments(text, range(shape.positional), dict.fromkeys(shape.names)) for text in texts]
            if misfits and all(misfits):
                found[letter.id] = Verdict(RedriveClass.ARGUMENTS_DO_NOT_FIT, (misfits[0] or "")[:300])
        return found


def changed_shape(shape: Shape, changes: RedriveChanges) -> Shape | None:
    """Return the shape of patched arguments; None where the patch wants what is not there, or would make one twice."""
    if not changes.of_arguments:
        return shape
    if any(name not in shape.names for name in (*changes.remove, *changes.rename)):
        return None
    kept = [changes.rename.get(name, name) for name in shape.names if name not in changes.remove]
    if len(set(kept)) != len(kept):
        return None
    return Shape(shape.positional, tuple(dict.fromkeys((*kept, *changes.set))))


def ledger_jobs(task_ids: Iterable[str]) -> dict[UUID, LedgerJob]:
    """Return the ledger's rows of those tasks that are jobs of the ledger, with one query if there are any."""
    ids = {job_id for task_id in task_ids if task_id.startswith("job:") and (job_id := job_id_of(task_id)) is not None}
    if not ids:
        return {}
    rows = Job.objects.filter(AnyOf("id", ids)).values_list("id", "kind", "state")
    return {job_id: LedgerJob(kind, str(state)) for job_id, kind, state in rows}


@service
def judge_page(*, redrive_id: UUID, size: int = PAGE) -> bool:
    """Judge the next ``size`` items of a redrive's dry run, and say whether there are more; the last makes it ready."""
    redrive = Redrive.objects.lock(redrive_id)
    if redrive.state != RedriveState.PLANNING:
        return False
    last = min(redrive.judged_to + size, redrive.total_count)
    if last > redrive.judged_to:
        judge = Judge(redrive, Served.by(redrive.source, database_now()), changes_for_judging(redrive))
        classes = Counter(json.loads(redrive.classes))
        classes.update(_judge_page(judge, redrive, last))
        redrive.classes = canonical_json(dict(classes))
        redrive.judged_to = last
    if last == redrive.total_count:
        redrive.state = RedriveState.READY
        redrive.judged_at = database_now()
    redrive.save(update_fields=["classes", "judged_to", "state", "judged_at"])
    return redrive.state == RedriveState.PLANNING


def changes_for_judging(redrive: Redrive) -> RedriveChanges:
    """Return a redrive's changes without the values that are set, which nothing is judged by."""
    stored = json.loads(redrive.changes)
    if not stored:
        return RedriveChanges()
    return RedriveChanges(
        tasks=stored["tasks"], set=dict.fromkeys(stored["set"]), remove=tuple(stored["remove"]), rename=stored["rename"]
    )


def _judge_page(judge: Judge, redrive: Redrive, last: int) -> Counter[str]:
    """Judge the items up to ``last``: what is alike once, and one by one only what cannot be told from that."""
    counted: Counter[str] = Counter()
    singly: list[int] = []
    groups = alike_items(redrive.id, after=redrive.judged_to, last=last, now=judge.now, cut_off=redrive.cut_off)
    for alike in groups:
        verdict = (
            None if alike.is_of_ledger or judge.is_too_old(alike) else judge.of(alike, key_id=alike.key_id, jobs={})
        )
        if verdict is None or not (verdict.is_blocked or alike.arguments):
            singly += alike.listed()
            continue
        counted[verdict.item_class.value] += alike.count
        if verdict != SAFE:
            # What is safe stands there as safe already.
            write_classes(
                redrive.id,
                alike.positions,
                item_class=verdict.item_class.value,
                concerns=",".join(concern.value for concern in verdict.concerns),
                detail=verdict.detail,
            )
    for start in range(0, len(singly), SINGLY):
        counted.update(_write(redrive.id, _judge(judge, redrive.id, singly[start : start + SINGLY])))
    return counted


def _judge(judge: Judge, redrive_id: UUID, positions: Sequence[int]) -> list[tuple[int, Verdict]]:
    """Judge items one by one: jobs of the ledger, whose row says more, and messages that have to be opened."""
    chosen = RedriveItem.objects.filter(AnyOf("position", positions), redrive_id=redrive_id)
    items = list(chosen.order_by("position").values_list("position", "letter_id"))
    rows: dict[UUID, Any] = {
        row.id: row
        for row in DeadLetter.objects.filter(AnyOf("id", [letter_id for _position, letter_id in items]))
        .order_by()
        .values_list(*JUDGED, "message__key_id", named=True)
    }
    jobs = ledger_jobs(row.task_id for row in rows.values())
    verdicts: list[tuple[int, Verdict]] = []
    unread: list[tuple[int, UUID]] = []
    for position, letter_id in items:
        row = rows.get(letter_id)
        if row is None:
            verdicts.append((position, Verdict(RedriveClass.NOT_CAPTURED, "it has been removed")))
            continue
        verdict = judge.of(row, key_id=row.message__key_id, jobs=jobs)
        if not row.arguments and not verdict.is_blocked and not row.task_id.startswith("job:"):
            unread.append((len(verdicts), letter_id))
        verdicts.append((position, verdict))
    for start in range(0, len(unread), LOADED):
        few = unread[start : start + LOADED]
        letters = list(DeadLetter.objects.filter(AnyOf("id", [letter_id for _index, letter_id in few])))
        load_messages(letters)
        closely = judge.read_closely(letters)
        for index, letter_id in few:
            if letter_id in closely:
                verdicts[index] = (verdicts[index][0], closely[letter_id])
    return verdicts


def _write(redrive_id: UUID, verdicts: Sequence[tuple[int, Verdict]]) -> Counter[str]:
    """Write what was found, one statement for all that are alike; what is safe stands there as safe already."""
    alike: dict[Verdict, list[int]] = defaultdict(list)
    for position, verdict in verdicts:
        alike[verdict].append(position)
    counted: Counter[str] = Counter()
    for verdict, positions in alike.items():
        counted[verdict.item_class.value] += len(positions)
        if verdict == SAFE:
            continue
        RedriveItem.objects.filter(AnyOf("position", positions), redrive_id=redrive_id).update(
            item_class=verdict.item_class,
            concerns=",".join(concern.value for concern in verdict.concerns),
            detail=verdict.detail,
        )
    return counted
