"""Planning the next jobs of a redrive: by the page, each judged again under its lock, each with its audit row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from deadletters.models import DeadLetter, LetterState, Occurrence
from deadletters.outcome import OutcomeClass
from grants import audit
from grants.access import Capability, find_capability
from grants.operators import Operator
from grants.recall import recall_operator
from grants.resources import Resource
from incidents.models import Incident, IncidentState
from opsconsole.core.canonical_json import canonical_json
from opsconsole.core.database import AnyOf, RowWriter, locked
from opsconsole.core.errors import OpsError
from opsconsole.core.ids import new_id
from opsconsole.jobs.tokens import job_id_of
from repairs.errors import RecordFinished
from repairs.models import (
    ActionState,
    ActionType,
    ItemState,
    ProviderAnswer,
    Redrive,
    RedriveClass,
    RedriveItem,
    RedriveState,
    RepairAction,
)
from repairs.records import as_record_retry, close_overtaken, put_back
from repairs.redrives.judging import JUDGED, Judge, LedgerJob, Verdict, changes_for_judging, ledger_jobs
from repairs.redrives.requests import AnswerKind, RedriveAnswer, RedriveChanges, unpack_answers
from repairs.redrives.sql import write_repairs
from repairs.refusals import LOADED, Served, load_messages
from repairs.services import LETTER_DONE, LETTER_RETRIED, NOT_HAPPENED
from repairs.settling import settle_letter

GRANT_REVOKED = "grant_revoked"
JOB_NOT_SERVED = "job_not_served"
PROBED_NO, PROBED_YES = "probe_did_not_happen", "probe_already_happened"
"""Codes of a waiting item whose provider has been asked; its detail is what that said."""
PROBES_AT_ONCE = 5
ABOUT_THE_PAST = (AnswerKind.DID_NOT_HAPPEN, AnswerKind.ALREADY_HAPPENED)
"""Statements about attempts that there had been when they were made, and not about a later one."""
_EFFECTS = (RedriveClass.AMBIGUOUS.value, RedriveClass.NOT_DECLARED.value)
_LETTER = (
    *JUDGED, "tenant", "source", "actor_type", "actor_id", "incident_id", "attempts", "error_class", "outcome_reason",
)  # fmt: skip
_ROWS = RowWriter(
    RepairAction,
    (
        "id", "tenant", "source", "actor_type", "actor_id", "action_type", "letter", "incident", "redrive",
        "is_single_attempt", "previous", "operation_key", "state", "before", "after", "planned_by", "planned_by_name",
        "planned_at", "reason", "reference", "provider_answer", "job_type", "queue", "new_task_id", "due_at",
    ),
)  # fmt: skip
_AFTER = canonical_json({"attempts": 0, "state": "retrying"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemResult:
    """How an item has ended; ``repair_id`` is set if it was not planned before."""

    item_id: int
    actor: tuple[str, str]
    state: ItemState
    code: str = ""
    detail: str = ""
    repair_id: UUID | None = None


@dataclass(slots=True, kw_only=True)
class Planned:
    """What a page has come to. ``results`` are items that have ended without being planned; the caller writes them."""

    planned: int = 0
    results: list[ItemResult] = field(default_factory=list)
    probes: tuple[int, ...] = ()
    pause_code: str = ""
    pause_text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    id: int
    letter_id: UUID
    actor: tuple[str, str]
    code: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One item that is to run, with what is stated about it."""

    item: _Item
    letter: Any
    capability: Capability
    answer: ProviderAnswer
    reference: str


def plan_items(redrive: Redrive, count: int, now: datetime) -> Planned:
    """Plan the next ``count`` items of a locked redrive that runs, in the caller's transaction.

    Locks their incidents, then their letters, and judges each again: what has changed since the dry run so that it may
    not run, or only with an answer that nobody has given, is left out; so is what has failed again since the dry run,
    if its answer is about what has happened. Stops and asks for a pause where the operator by whose grants it runs has
    lost one, and where no worker serves a task any more.
    """
    return _Page(redrive, now).plan(count)


class _Page:
    def __init__(self, redrive: Redrive, now: datetime) -> None:
        self.redrive = redrive
        self.now = now
        self.answers = unpack_answers(redrive.answers)
        self.changes: RedriveChanges = changes_for_judging(redrive)
        self.judge = Judge(redrive, Served.by(redrive.source, now), self.changes)
        self.any_key = next(iter(self.judge.keys), "")
        self.operator: Operator | None = recall_operator(
            ref=redrive.started_by, name=redrive.started_by_name, user=redrive.started_by_user
        )
        self.capabilities: dict[Resource, Capability | None] = {}
        self.incidents: dict[UUID, Incident] = {}
        self.gone: set[UUID] = set()
        self.outcome = Planned()

    def plan(self, count: int) -> Planned:
        items = [
            _Item(id=item_id, letter_id=letter_id, actor=(actor_type, actor_id), code=code, detail=detail)
            for item_id, letter_id, actor_type, actor_id, code, detail in RedriveItem.objects.filter(
                redrive=self.redrive
            )
            .next_due()
            .values_list("id", "letter_id", "actor_type", "actor_id", "code", "detail")[:count]
        ]
        letters = self._lock([item.letter_id for item in items])
        jobs = ledger_jobs(letter.task_id for letter in letters.values())
        closely = self._read_closely(letters.values())
        repaired = self._under_repair(letters)
        tried_since = self._tried_since(letters)
        runs: list[_Run] = []
        closing: list[_Run] = []
        probes: list[int] = []
        for item in items:
            letter = letters.get(item.letter_id)
            if item.letter_id in self.gone:
                self._end(item, ItemState.SKIPPED, RedriveClass.NOT_CAPTURED.value, "it has been removed")
                continue
            if letter is None:
                continue  # it has moved to another incident since; the next step locks that one
            if letter.id in repaired:
                self._end(item, ItemState.SKIPPED, RedriveClass.OVERTAKEN.value, "a repair of it has not answered yet")
                continue
            if self._was_closed(letter):
                self._end(item, ItemState.SKIPPED, RedriveClass.OVERTAKEN.value, "its incident has been closed since")
                continue
            verdict = closely.get(letter.id) or self.judge.of(letter, key_id=self.any_key, jobs=jobs)
            if verdict.item_class is RedriveClass.NOT_SERVED and not self.redrive.skips_unserved:
                self._pause(JOB_NOT_SERVED, verdict.detail)
                break
            if code := self._left_out_as(verdict, item):
                self._end(item, ItemState.SKIPPED, code, verdict.detail)
                continue
            answer = self._answer(verdict, item)
            is_told = answer is not None and answer.kind in ABOUT_THE_PAST and not item.code
            if is_told and letter.id in tried_since:
                self._end(item, ItemState.SKIPPED, verdict.item_class.value, "it was tried again since the dry run")
                continue
            if answer is not None and answer.kind is AnswerKind.PROBE:
                if self._has_probe(letter, jobs):
                    probes.append(item.id)
                else:
                    self._end(item, ItemState.SKIPPED, verdict.item_class.value, "nobody can be asked about it")
                continue
            capability = self._capability(letter)
            if capability is None:
                self._pause(GRANT_REVOKED, f"{self.redrive.started_by_name} may not run jobs again any more.")
                break
            run = _run(item, letter, capability, answer)
            (closing if answer is not None and answer.kind is AnswerKind.ALREADY_HAPPENED else runs).append(run)
        self.outcome.probes = tuple(probes[:PROBES_AT_ONCE])
        self._write_messages([run for run in runs if job_id_of(run.letter.task_id) is None])
        for run in runs:
            if job_id_of(run.letter.task_id) is not None:
                self._put_back(run)
        for run in closing:
            self._close(run)
        self._save_incidents(runs)
        return self.outcome

    # Locking and judging

    def _lock(self, letter_ids: list[UUID]) -> dict[UUID, Any]:
        rows = DeadLetter.objects.filter(AnyOf("id", letter_ids))
        incident_ids = set(rows.order_by().values_list("incident_id", flat=True))
        self.incidents = Incident.objects.lock_many(sorted(incident_ids))
        for incident in self.incidents.values():
            incident.locked_at = self.now
        found = list(locked(rows.order_by("id")).values_list(*_LETTER, named=True))
        # Retention may remove one while it is being frozen, which neither of the two sees of the other.
        self.gone = set(letter_ids) - {letter.id for letter in found}
        return {letter.id: letter for letter in found if letter.incident_id in self.incidents}

    def _under_repair(self, letter_ids: Iterable[UUID]) -> set[UUID]:
        """Return those that have a live repair, whatever their own state: of two the database takes only one.

        A letter that was closed with its incident opens when it fails once more, also while a repair of it is out.
        """
        live = RepairAction.objects.live().filter(AnyOf("letter", letter_ids))
        return set(live.order_by().values_list("letter_id", flat=True))

    def _was_closed(self, letter: Any) -> bool:
        """Whether a person has closed its incident without a repair since the set was frozen.

        What was closed before was chosen as it was.
        """
        resolved_at = self.incidents[letter.incident_id].resolved_at
        return resolved_at is not None and resolved_at > self.redrive.planned_at

    def _tried_since(self, letter_ids: Iterable[UUID]) -> set[UUID]:
        """Return those that have failed, or whose repair has ended, since the set was frozen.

        What was stated of the set as it was is not about that.
        """
        if not any(answer.kind in ABOUT_THE_PAST for answer in self.answers.values()):
            return set()
        since = self.redrive.planned_at
        failed = Occurrence.objects.filter(AnyOf("letter", letter_ids), recorded_at__gt=since)
        repaired = RepairAction.objects.filter(AnyOf("letter", letter_ids), settled_at__gt=since)
        rows = (*failed.values_list("letter_id", flat=True), *repaired.values_list("letter_id", flat=True))
        return set(rows)

    def _read_closely(self, letters: Iterable[Any]) -> dict[UUID, Verdict]:
        """Open the messages of the few letters whose row has no shape of their arguments."""
        ids = [one.id for one in letters if not one.arguments and job_id_of(one.task_id) is None]
        found: dict[UUID, Verdict] = {}
        for start in range(0, len(ids), LOADED):
            few = list(DeadLetter.objects.filter(AnyOf("id", ids[start : start + LOADED]), message_state="full"))
            load_messages(few)
            found |= self.judge.read_closely(few)
        return {
            letter_id: verdict
            for letter_id, verdict in found.items()
            if verdict.item_class != RedriveClass.NOT_CAPTURED
        }

    def _left_out_as(self, verdict: Verdict, item: _Item) -> str:
        """Return the code under which it is left out now, "" if it runs or is closed."""
        if verdict.is_blocked:
            return verdict.item_class.value
        if self._closes(verdict, item):
            return ""
        return next((name.value for name in verdict.concerns if name.value not in self.answers), "")

    def _closes(self, verdict: Verdict, item: _Item) -> bool:
        answer = self._answer(verdict, item)
        return answer is not None and answer.kind is AnswerKind.ALREADY_HAPPENED

    def _answer(self, verdict: Verdict, item: _Item) -> RedriveAnswer | None:
        """Return what is stated about the effects of a job that is not safe, ``None`` if nothing is."""
        name = next((concern.value for concern in verdict.concerns if concern.value in _EFFECTS), "")
        answer = self.answers.get(name)
        if answer is None or answer.kind is not AnswerKind.PROBE or not item.code:
            return answer
        told = AnswerKind.DID_NOT_HAPPEN if item.code == PROBED_NO else AnswerKind.ALREADY_HAPPENED
        return RedriveAnswer(kind=told, reference=item.detail)

    def _has_probe(self, letter: Any, jobs: Mapping[UUID, LedgerJob]) -> bool:
        job_id = job_id_of(letter.task_id)
        return job_id is not None and job_id in jobs and jobs[job_id].has_probe

    def _capability(self, letter: Any) -> Capability | None:
        """Do what ``authorise`` does, asking once for letters that no grant can tell apart."""
        scope = Resource(tenant=letter.tenant, actor_type=letter.actor_type, actor_id=letter.actor_id)
        if scope not in self.capabilities:
            self.capabilities[scope] = self._found_capability(scope)
        return self.capabilities[scope]

    def _found_capability(self, scope: Resource) -> Capability | None:
        """Return the capability by which a job runs, ``None`` if that or any other that it takes is not held now."""
        if self.operator is None:
            return None
        found = [find_capability(self.operator, action, scope) for action in self.redrive.runs_by]
        return None if None in found else found[0]

    def _pause(self, code: str, text: str) -> None:
        self.outcome.pause_code, self.outcome.pause_text = code, text

    def _end(self, item: _Item, state: ItemState, code: str, detail: str, repair_id: UUID | None = None) -> None:
        self.outcome.results.append(
            ItemResult(
                item_id=item.id, actor=item.actor, state=state, code=code, detail=detail[:300], repair_id=repair_id
            )
        )

    # Writing

    def _action(self, run: _Run, previous: UUID | None, **more: Any) -> RepairAction:
        letter, redrive = run.letter, self.redrive
        return RepairAction(
            id=new_id(),
            tenant=letter.tenant,
            source=letter.source,
            actor_type=letter.actor_type,
            actor_id=letter.actor_id,
            letter_id=letter.id,
            incident_id=letter.incident_id,
            redrive_id=redrive.id,
            previous_id=previous,
            operation_key=f"redrive:{redrive.id}:{letter.id}",
            before=canonical_json({"outcome": str(letter.outcome_class), "state": str(letter.state)}),
            planned_by=redrive.started_by[:200],
            planned_by_name=redrive.started_by_name,
            planned_at=self.now,
            reason=redrive.reason,
            reference=run.reference,
            provider_answer=run.answer,
            job_type=letter.job_type,
            queue=letter.queue,
            due_at=self.now,
            **more,
        )

    def _write_messages(self, runs: list[_Run]) -> None:
        """Plan those that are sent as messages: a statement each for repairs, letters, items and audit rows."""
        if not runs:
            return
        redrive, now = self.redrive, self.now
        previous = RepairAction.objects.newest_of([run.letter.id for run in runs])
        is_single = redrive.state == RedriveState.CANARY
        befores: dict[tuple[str, str], str] = {}
        rows, items, entries = [], [], []
        operator = self._operator()
        digest = audit.request_digest({"redrive": str(redrive.id)})
        reason = redrive.reason
        for run in runs:
            letter = run.letter
            known = str(letter.outcome_class), str(letter.state)
            if known not in befores:
                befores[known] = canonical_json({"outcome": known[0], "state": known[1]})
            repair_id, task_id = new_id(), str(new_id())
            key = f"redrive:{redrive.id}:{letter.id}"
            task = self.changes.tasks.get(letter.job_type, letter.job_type)
            rows.append(
                (
                    repair_id, letter.tenant, letter.source, letter.actor_type, letter.actor_id,
                    ActionType.RETRY_MESSAGE.value, letter.id, letter.incident_id, redrive.id, is_single,
                    previous[letter.id], key, ActionState.PLANNED.value, befores[known], _AFTER,
                    redrive.started_by[:200], redrive.started_by_name, now, reason, run.reference, run.answer.value,
                    task, redrive.target_queue or letter.queue, task_id, now,
                )
            )  # fmt: skip
            items.append((run.item.id, repair_id))
            entries.append(
                audit.AuditEntry(
                    action=LETTER_RETRIED,
                    operator=operator,
                    resource=_resource(letter),
                    capability=run.capability,
                    outcome=self._told(run, repair_id, task_id),
                    reason=reason,
                    key=key,
                    digest=digest,
                )
            )
        if _ROWS.insert(rows) != len(rows):
            raise RuntimeError("a repair of a redrive could not be written")
        self._mark_retrying(runs)
        write_repairs(items)
        if audit.record_many(entries, at=now) != len(entries):
            raise RuntimeError(f"an audit row of redrive {redrive.id} could not be written")
        self._count(len(runs))

    def _mark_retrying(self, runs: Sequence[_Run]) -> None:
        """Mark the letters; of those answered for, earlier attempts are known not to have taken effect (C19)."""
        answered = [run.letter.id for run in runs if run.answer is ProviderAnswer.DID_NOT_HAPPEN]
        others = [run.letter.id for run in runs if run.answer is not ProviderAnswer.DID_NOT_HAPPEN]
        if answered:
            DeadLetter.objects.filter(AnyOf("id", answered)).update(
                state=LetterState.RETRYING, outcome_class=OutcomeClass.SAFE, outcome_reason=NOT_HAPPENED
            )
        if others:
            DeadLetter.objects.filter(AnyOf("id", others)).update(state=LetterState.RETRYING)

    def _count(self, planned: int) -> None:
        self.outcome.planned += planned
        self.redrive.waiting_count -= planned
        self.redrive.outstanding_count += planned

    def _put_back(self, run: _Run) -> None:
        """Retry a job of the ledger in place, with its record (A12); its attempts are the ledger's business."""
        letter = DeadLetter.objects.lock(run.letter.id)
        incident = self.incidents[letter.incident_id]
        previous = RepairAction.objects.newest_of([letter.id])[letter.id]
        action = self._action(
            run, previous, action_type=ActionType.RETRY_MESSAGE, state=ActionState.PLANNED, after=_AFTER,
            new_task_id=str(new_id()),
        )  # fmt: skip
        try:
            as_record_retry(action, letter, self.now)
        except OpsError as refusal:
            if isinstance(refusal, RecordFinished):
                close_overtaken(letter, incident)
            self._end(run.item, ItemState.SKIPPED, RedriveClass.OVERTAKEN.value, refusal.detail)
            return
        action.save(force_insert=True)
        put_back(action, letter, self.now)
        self._mark_retrying([run])
        write_repairs([(run.item.id, action.id)])
        self._audit(LETTER_RETRIED, run, action.id, action.new_task_id)
        self._count(1)

    def _close(self, run: _Run) -> None:
        """Close as done what is stated to have happened."""
        letter = DeadLetter.objects.lock(run.letter.id)
        incident = self.incidents[letter.incident_id]
        previous = RepairAction.objects.newest_of([letter.id])[letter.id]
        action = self._action(
            run, previous, action_type=ActionType.CLOSE_AS_DONE, state=ActionState.SUCCEEDED, settled_at=self.now,
            after=canonical_json({"state": LetterState.ALREADY_DONE.value}),
        )  # fmt: skip
        action.save(force_insert=True)
        settle_letter(letter, incident, state=LetterState.ALREADY_DONE, at=self.now)
        self._audit(LETTER_DONE, run, action.id, "", state=LetterState.ALREADY_DONE.value)
        self._end(run.item, ItemState.SUCCEEDED, ProviderAnswer.ALREADY_HAPPENED.value, run.reference, action.id)

    def _audit(
        self, what: str, run: _Run, repair_id: UUID, task_id: str, *, state: str = LetterState.RETRYING.value
    ) -> None:
        entry = audit.AuditEntry(
            action=what,
            operator=self._operator(),
            resource=_resource(run.letter),
            capability=run.capability,
            outcome={**self._told(run, repair_id, task_id), "state": state},
            reason=self.redrive.reason,
            key=f"redrive:{self.redrive.id}:{run.letter.id}",
            digest=audit.request_digest({"redrive": str(self.redrive.id)}),
        )
        if audit.record_many([entry], at=self.now) != 1:
            raise RuntimeError(f"an audit row of redrive {self.redrive.id} could not be written")

    def _told(self, run: _Run, repair_id: UUID, task_id: str) -> dict[str, Any]:
        """Return what the audit row keeps: ids and what failed, never the payload (B5)."""
        letter = run.letter
        return {
            "ambiguous": letter.outcome_class == OutcomeClass.AMBIGUOUS,
            "attempts": letter.attempts,
            "cause": letter.error_class,
            "incident": str(letter.incident_id),
            "incidentState": str(self.incidents[letter.incident_id].state),
            "job": letter.job_type,
            "newTask": task_id,
            "oldTask": letter.task_id,
            "providerChecked": run.answer is ProviderAnswer.DID_NOT_HAPPEN,
            "redrive": str(self.redrive.id),
            "reference": run.reference,
            "repair": str(repair_id),
            "state": LetterState.RETRYING.value,
            "warnings": [],
        }

    def _operator(self) -> Operator:
        if self.operator is None:
            raise RuntimeError("nobody runs this redrive")  # a capability was found, so somebody does
        return self.operator

    def _save_incidents(self, runs: Sequence[_Run]) -> None:
        """Write the incidents of what was planned, with a holder where nobody had one (A12).

        What a failed repair of this redrive has opened again is to be seen, and not taken by the next page.
        """
        changed = {run.letter.incident_id for run in runs}
        incidents = [self.incidents[incident_id] for incident_id in sorted(changed)]
        for incident in incidents:
            came_back = incident.reopened_reason == "repair_failed" and self.redrive.failed_count > 0
            if incident.state == IncidentState.OPEN and not came_back:
                incident.take(by=self.redrive.started_by[:200], name=self.redrive.started_by_name, at=self.now)
        Incident.objects.save_recorded(incidents)


def _run(item: _Item, letter: Any, capability: Capability, answer: RedriveAnswer | None) -> _Run:
    stated = ProviderAnswer(answer.kind.value) if answer is not None else ProviderAnswer.NONE
    return _Run(
        item=item,
        letter=letter,
        capability=capability,
        answer=stated,
        reference=answer.reference if answer is not None else "",
    )


def _resource(letter: Any) -> Resource:
    return Resource(
        tenant=letter.tenant,
        actor_type=letter.actor_type,
        actor_id=letter.actor_id,
        target_type="dead_letter",
        target_id=str(letter.id),
    )
