"""What a person does about failed jobs: run them again, state that they are done, give them up.

Every change takes the same seven steps under the same locks: incident, letter, repair.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from deadletters.locking import LetterMoved, lock_letter
from deadletters.models import DECIDABLE, DeadLetter, LetterState, SealedMessage, WorkerNode
from deadletters.outcome import OutcomeClass
from grants import audit
from grants.access import Capability, authorise, find_capability
from grants.actions import Action
from grants.errors import AccessDenied
from grants.models import AuditEvent
from grants.operators import Operator
from grants.resources import Resource
from grants.service import record_denials, service
from grants.targets import authorise_target
from incidents.errors import IncidentNotFound, IncidentResolved
from incidents.models import Incident, IncidentState
from incidents.services import check_version, lock_incident, save_incident
from opsconsole.core.canonical_json import canonical_json
from opsconsole.core.database import AnyOf, RowWriter
from opsconsole.core.errors import InvalidInput, OpsError
from opsconsole.core.ids import new_id
from repairs.errors import (
    IncidentHasNoLetter,
    IncidentNotRepairable,
    JobOvertaken,
    LetterNotFound,
    RecordFinished,
    RepairNotCancellable,
    RepairNotFound,
    SelectionDrifted,
    SelectionInvalid,
    TooMany,
)
from repairs.guard import holder_of
from repairs.models import ActionState, ActionType, BatchState, ProviderAnswer, RepairAction, RepairBatch
from repairs.records import as_record_retry, close_overtaken, is_of_ledger, mark_overtaken, put_back, take_back
from repairs.refusals import LOADED, Served, load_messages, refuse_unrepairable, unload_messages
from repairs.settling import give_up_repair, settle_letter

LETTER_RETRIED = Action.DEAD_LETTERS_RETRY.value
LETTER_DISCARDED = Action.DEAD_LETTERS_DISCARD.value
LETTER_DONE = "dead-letters.close-as-done"
INCIDENT_RETRIED = "operations.incident_retry_applied"
REPAIR_CANCELLED = "repairs.cancel"
MOST_LETTERS = 1_000
PAGE = 100
PLANNED_ROWS = RowWriter(
    RepairAction,
    (
        "id", "tenant", "source", "actor_type", "actor_id", "action_type", "letter", "incident", "batch", "previous",
        "operation_key", "state", "before", "after", "planned_by", "planned_by_name", "planned_at", "reason",
        "reference", "provider_answer", "job_type", "queue", "new_task_id", "due_at",
    ),
)  # fmt: skip
"""What a new repair has; the rest is what the database gives it."""
NOT_HAPPENED = "an operator found that the earlier attempts had not taken effect"


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterMutation:
    """What a request did to one letter, or, as a replay, what the first one of its key did."""

    letter_id: UUID
    state: str
    incident_id: UUID
    incident_state: str
    repair_id: UUID | None
    new_task_id: str = ""
    warnings: tuple[str, ...] = ()
    event_id: UUID | None = None
    idempotent_replay: bool = False

    @classmethod
    def from_receipt(cls, receipt: AuditEvent, letter_id: UUID) -> LetterMutation:
        stored = json.loads(receipt.outcome)
        return cls(
            letter_id=letter_id,
            state=stored["state"],
            incident_id=UUID(stored["incident"]),
            incident_state=stored["incidentState"],
            repair_id=UUID(stored["repair"]) if stored["repair"] else None,
            new_task_id=stored["newTask"],
            warnings=tuple(stored["warnings"]),
            event_id=receipt.id,
            idempotent_replay=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterResult:
    """What became of one letter of many: planned or closed with its repair, or refused with a code and why."""

    letter_id: str
    status: str  # planned | closed | refused
    repair_id: str = ""
    code: str = ""
    detail: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMutation:
    """What became of a request to retry several letters of an incident."""

    batch_id: UUID
    incident_id: UUID
    incident_state: str
    results: tuple[LetterResult, ...] = field(default=())
    idempotent_replay: bool = False

    @property
    def planned(self) -> int:
        return sum(result.status == "planned" for result in self.results)

    @property
    def refused(self) -> int:
        return len(self.results) - self.planned


@dataclass(frozen=True, slots=True, kw_only=True)
class LettersClosed:
    """What became of a request to close several letters of an incident as done."""

    incident_id: UUID
    incident_state: str
    results: tuple[LetterResult, ...]
    idempotent_replay: bool = False

    @property
    def closed(self) -> int:
        return sum(result.status == "closed" for result in self.results)


def retry_letter(
    *,
    letter_id: UUID,
    by: Operator,
    key: str,
    provider_checked: bool = False,
    run_expired: bool = False,
    reason: str = "",
    reference: str = "",
    version: int | None = None,
) -> LetterMutation:
    """Plan to run one failed job again; it counts when it has succeeded (B5, B6, C11, C17).

    A message is sent again by the relay; a job of the ledger goes back to pending in place, with its record (A12).
    Takes an incident that nobody has for ``by`` (A12). ``provider_checked`` is the operator's word that the last
    attempt did not take effect; ``reference`` says where that was seen. Never talks to the broker. Locks incident,
    letter and the ledger's job. Raises ``LetterNotFound``, ``AccessDenied``, ``IdempotencyKeyReused``,
    ``IncidentChanged``, or why the letter cannot be retried (``refuse_unrepairable``); one whose record has finished
    without it is closed as overtaken all the same (C5).
    """
    request = _RetryRequest(
        by=by, provider_checked=provider_checked, run_expired=run_expired, reason=reason, reference=reference
    )
    try:
        return _retry_letter(letter_id=letter_id, request=request, key=key, version=version)
    except RecordFinished:
        mark_overtaken(letter_id=letter_id)
        raise


@service
def _retry_letter(*, letter_id: UUID, request: _RetryRequest, key: str, version: int | None) -> LetterMutation:
    by, reason, reference = request.by, request.reason, request.reference
    _check_texts(reason, reference)
    scope = DeadLetter.objects.scope(letter_id)
    capability = authorise_target(by, Action.DEAD_LETTERS_RETRY, scope, LetterNotFound())
    incident, letter = _lock(letter_id)
    body = {
        "provider_checked": request.provider_checked, "run_expired": request.run_expired, "reason": reason,
        "reference": reference,
    }  # fmt: skip
    digest = audit.request_digest(body)
    receipt = _replayed(key, LETTER_RETRIED, by, letter, digest)
    if receipt is not None:
        return LetterMutation.from_receipt(receipt, letter_id)
    check_version(incident, version)
    served = Served.by(letter.source, incident.locked_at)
    action, warnings = _plan_retry(letter, incident, request, key=key, served=served, previous=_newest_repair(letter))
    action.save(force_insert=True)
    if action.action_type == ActionType.RETRY_RECORD:
        put_back(action, letter, incident.locked_at)
    letter.save(update_fields=["state", "outcome_class", "outcome_reason"])
    _take_if_untaken(incident, by)
    return _record(
        LETTER_RETRIED, letter, incident, action, by=by, capability=capability, key=key, digest=digest,
        warnings=warnings, reason=request.told,
    )  # fmt: skip


@service
def close_letter_as_done(
    *, letter_id: UUID, by: Operator, key: str, reason: str, reference: str = "", version: int | None = None
) -> LetterMutation:
    """State that a job has taken effect already, and close its letter without a run (C19).

    ``reason`` is 1 to 500 characters (B4). Locks incident and letter; raises what ``retry_letter`` raises,
    ``ReasonInvalid``, and ``JobOvertaken`` for a letter that is not open.
    """
    reason = audit.validate_reason(reason)
    _check_texts(reason, reference)
    scope = DeadLetter.objects.scope(letter_id)
    capability = authorise_target(by, Action.DEAD_LETTERS_RETRY, scope, LetterNotFound())
    incident, letter = _lock(letter_id)
    digest = audit.request_digest({"reason": reason, "reference": reference})
    receipt = _replayed(key, LETTER_DONE, by, letter, digest)
    if receipt is not None:
        return LetterMutation.from_receipt(receipt, letter_id)
    check_version(incident, version)
    action = _decide(
        letter, incident, by=by, key=key, action_type=ActionType.CLOSE_AS_DONE, state=LetterState.ALREADY_DONE,
        reason=reason, reference=reference, answer=ProviderAnswer.ALREADY_HAPPENED,
    )  # fmt: skip
    return _record(
        LETTER_DONE, letter, incident, action, by=by, capability=capability, key=key, digest=digest, reason=reason
    )


def close_letters_as_done(
    *,
    incident_id: UUID,
    letter_ids: list[UUID],
    by: Operator,
    key: str,
    reason: str,
    reference: str = "",
    version: int | None = None,
) -> LettersClosed:
    """State of several jobs of one incident that they have taken effect already; each is closed or refused by itself.

    In pages of 100, each one transaction, so that no lock is held long. A letter's own key is made of ``key`` and its
    id: the same request goes on where a crash stopped it, and answers as before once it is done. ``version`` is
    compared before the first letter is closed. Raises ``IncidentNotFound``, ``AccessDenied``, ``SelectionInvalid``,
    ``TooMany``, ``LetterNotFound``, ``IncidentChanged``, ``ReasonInvalid`` or ``IdempotencyKeyReused`` (C19).
    """
    reason = audit.validate_reason(reason)
    _check_texts(reason, reference)
    if not letter_ids or len(set(letter_ids)) != len(letter_ids):
        raise SelectionInvalid(detail="Name at least one failed job, and none twice.")
    if len(letter_ids) > MOST_LETTERS:
        raise TooMany(found=len(letter_ids), most=MOST_LETTERS)
    pages = [letter_ids[start : start + PAGE] for start in range(0, len(letter_ids), PAGE)]
    done = [
        _close_page(
            incident_id=incident_id, letter_ids=page, rest=letter_ids[PAGE:] if page is pages[0] else [], by=by,
            key=key, reason=reason, reference=reference, version=version if page is pages[0] else None,
        )
        for page in pages
    ]  # fmt: skip
    return LettersClosed(
        incident_id=incident_id,
        incident_state=done[-1].incident_state,
        results=tuple(result for page in done for result in page.results),
        idempotent_replay=all(page.idempotent_replay for page in done),
    )


@service
def _close_page(
    *,
    incident_id: UUID,
    letter_ids: list[UUID],
    rest: list[UUID],
    by: Operator,
    key: str,
    reason: str,
    reference: str,
    version: int | None,
) -> LettersClosed:
    """Close one page of letters; as a replay if every one of them was closed with this key before.

    With the first page come the ids of all others: nothing is closed if any of them is none of the incident's.
    """
    authorise_target(by, Action.DEAD_LETTERS_RETRY, Incident.objects.scope(incident_id), IncidentNotFound())
    incident = lock_incident(incident_id)
    letters = DeadLetter.objects.lock_many(letter_ids)
    digest = audit.request_digest({"reason": reason, "reference": reference})
    keys = {letter_id: f"{key}:{letter_id}" for letter_id in letters}
    receipts = {
        letter.id: receipt
        for letter in letters.values()
        if (receipt := _replayed(keys[letter.id], LETTER_DONE, by, letter, digest)) is not None
    }
    # One that was closed with this key may have failed again since, and belong to another incident.
    unknown = [letter_id for letter_id in letter_ids if letter_id not in receipts] + ([] if receipts else rest)
    if DeadLetter.objects.filter(AnyOf("id", unknown), incident=incident).count() != len(unknown):
        raise LetterNotFound
    if not receipts:
        check_version(incident, version)
    capabilities: dict[Resource, Capability | None] = {}
    results: list[LetterResult] = []
    denied: list[Resource] = []
    for letter in letters.values():
        name = str(letter.id)
        if letter.id in receipts:
            repair = LetterMutation.from_receipt(receipts[letter.id], letter.id).repair_id
            results.append(LetterResult(letter_id=name, status="closed", repair_id=str(repair)))
            continue
        try:
            capability = _authorise_letter(by, letter, capabilities)
            action = _decide(
                letter, incident, by=by, key=keys[letter.id], action_type=ActionType.CLOSE_AS_DONE,
                state=LetterState.ALREADY_DONE, reason=reason, reference=reference,
                answer=ProviderAnswer.ALREADY_HAPPENED,
            )  # fmt: skip
        except OpsError as refusal:
            results.append(LetterResult(letter_id=name, status="refused", code=refusal.code, detail=refusal.detail))
            if isinstance(refusal, AccessDenied):
                denied.append(refusal.resource)
            continue
        _record(
            LETTER_DONE, letter, incident, action, by=by, capability=capability, key=keys[letter.id], digest=digest,
            reason=reason,
        )  # fmt: skip
        results.append(LetterResult(letter_id=name, status="closed", repair_id=str(action.id)))
    if denied:
        record_denials(by, Action.DEAD_LETTERS_RETRY, denied)
    return LettersClosed(
        incident_id=incident.id,
        incident_state=str(incident.state),
        results=tuple(sorted(results, key=lambda result: result.letter_id)),
        idempotent_replay=len(receipts) == len(letters),
    )


@service
def discard_letter(
    *, letter_id: UUID, by: Operator, key: str, reason: str, version: int | None = None
) -> LetterMutation:
    """Give one failed job up: its message is removed for good, its row and its history stay (B8).

    The audit row keeps job, attempts, outcome class and cause, never the payload. Locks incident and letter; raises
    what ``close_letter_as_done`` raises.
    """
    reason = audit.validate_reason(reason)
    scope = DeadLetter.objects.scope(letter_id)
    capability = authorise_target(by, Action.DEAD_LETTERS_DISCARD, scope, LetterNotFound())
    incident, letter = _lock(letter_id)
    digest = audit.request_digest({"reason": reason})
    receipt = _replayed(key, LETTER_DISCARDED, by, letter, digest)
    if receipt is not None:
        return LetterMutation.from_receipt(receipt, letter_id)
    check_version(incident, version)
    action = _decide(
        letter, incident, by=by, key=key, action_type=ActionType.DISCARD, state=LetterState.DISCARDED, reason=reason
    )
    SealedMessage.objects.filter(letter_id=letter.id).delete()
    DeadLetter.objects.filter(id=letter.id).update(payload_preview="", message_state="missing")
    return _record(
        LETTER_DISCARDED, letter, incident, action, by=by, capability=capability, key=key, digest=digest, reason=reason
    )


@service
def cancel_repair(*, repair_id: UUID, by: Operator, key: str) -> LetterMutation:
    """Withdraw a repair; its letter waits for a decision again.

    One that has not started is cancelled, wherever its message is: the start guard refuses what is cancelled. One that
    has started is given up only when no answer is to be expected any more, because its time is over or the worker that
    holds it has not reported for a minute; then it counts as failed, and may have happened. Locks incident, letter and
    repair. Raises ``RepairNotFound``, ``AccessDenied``, ``IdempotencyKeyReused`` or ``RepairNotCancellable``.
    """
    scope = RepairAction.objects.scope(repair_id)
    capability = authorise_target(by, Action.DEAD_LETTERS_RETRY, scope, RepairNotFound())
    letter_id = RepairAction.objects.values_list("letter_id", flat=True).get(id=repair_id)
    incident, letter = _lock(letter_id)
    action = RepairAction.objects.lock(repair_id)
    digest = audit.request_digest({"repair": str(repair_id)})
    receipt = _replayed(key, REPAIR_CANCELLED, by, letter, digest)
    if receipt is not None:
        return LetterMutation.from_receipt(receipt, letter_id)
    if action.state == ActionState.STARTED and _is_given_up(action, incident.locked_at):
        give_up_repair(action, letter, incident, text="Given up: no answer was to be expected any more.")
    elif action.state in (ActionState.PLANNED, ActionState.SENT):
        if action.action_type == ActionType.RETRY_RECORD and not take_back(action, letter, incident.locked_at):
            raise RepairNotCancellable(state="started")
        action.state = ActionState.CANCELLED
        action.settled_at = incident.locked_at
        action.save(update_fields=["state", "settled_at"])
        if letter.state == LetterState.RETRYING:
            # Nothing has run, so that a job that was on hold is so again.
            letter.state = LetterState(json.loads(action.before)["state"])
            letter.save(update_fields=["state"])
        save_incident(incident)
    else:
        raise RepairNotCancellable(state=action.state)
    return _record(REPAIR_CANCELLED, letter, incident, action, by=by, capability=capability, key=key, digest=digest)


def _is_given_up(action: RepairAction, now: datetime) -> bool:
    """Say whether a started repair will not answer: its time is over, or its worker has not reported for a minute."""
    if action.answer_due_at is not None and action.answer_due_at < now:
        return True
    node = holder_of(action.claim_holder).partition("/")[0]
    return not WorkerNode.objects.live(now).filter(id=node).exists()


def retry_incident(
    *,
    incident_id: UUID,
    by: Operator,
    key: str,
    letter_ids: list[UUID] | None = None,
    expected_count: int | None = None,
    provider_checked: bool = False,
    run_expired: bool = False,
    reason: str = "",
    reference: str = "",
    version: int | None = None,
) -> BatchMutation:
    """Plan to run several failed jobs of one incident again: those named, or all ``expected_count`` of them (A12).

    The set is frozen first, in one transaction with its receipt; then it is planned in pages of 100, each letter with
    its own audit row, so that no lock is held long. The first job that is planned takes an incident that nobody has;
    one all of whose chosen jobs are refused stays as it is. The same key goes on where a crash stopped it, and answers
    with the stored results once it is done. Without ``letter_ids``, every open letter of the running episode is meant,
    oldest first, and their number has to be ``expected_count``; more than 1,000 are refused.
    Raises ``IncidentNotFound``, ``AccessDenied``, ``IncidentResolved``, ``IncidentHasNoLetter``, ``SelectionInvalid``,
    ``SelectionDrifted``, ``TooMany``, ``IncidentChanged`` or ``IdempotencyKeyReused``.
    """
    _check_texts(reason, reference)
    request = _RetryRequest(
        by=by, provider_checked=provider_checked, run_expired=run_expired, reason=reason, reference=reference
    )
    begun = _begin_batch(
        incident_id=incident_id, request=request, key=key, letter_ids=letter_ids, expected_count=expected_count,
        version=version,
    )  # fmt: skip
    if begun.state == BatchState.PLANNING:
        for page in _pages(json.loads(begun.letters)):
            _plan_page(batch_id=begun.batch_id, letter_ids=page, request=request)
    return _finish_batch(batch_id=begun.batch_id, idempotent_replay=begun.idempotent_replay)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RetryRequest:
    by: Operator
    provider_checked: bool
    run_expired: bool
    reason: str
    reference: str

    @property
    def told(self) -> str:
        """The reason of the audit row: what was given as one, or where it was seen that nothing had happened (C19)."""
        if self.reason or not (self.provider_checked and self.reference):
            return self.reason
        return f"It had not happened: {self.reference}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    batch_id: UUID
    state: str
    letters: str
    idempotent_replay: bool


@service
def _begin_batch(
    *,
    incident_id: UUID,
    request: _RetryRequest,
    key: str,
    letter_ids: list[UUID] | None,
    expected_count: int | None,
    version: int | None,
) -> _Begun:
    by = request.by
    scope = Incident.objects.scope(incident_id)
    capability = authorise_target(by, Action.DEAD_LETTERS_RETRY, scope, IncidentNotFound())
    incident = lock_incident(incident_id)
    digest = audit.request_digest(
        {
            "letters": None if letter_ids is None else sorted(str(letter_id) for letter_id in letter_ids),
            "expected_count": expected_count,
            "provider_checked": request.provider_checked,
            "run_expired": request.run_expired,
            "reason": request.reason,
            "reference": request.reference,
        }
    )
    receipt = audit.replayed(
        key=key, action=INCIDENT_RETRIED, operator=by, target_type="incident", target_id=str(incident_id), digest=digest
    )
    if receipt is not None:
        batch = RepairBatch.objects.get(id=json.loads(receipt.outcome)["batch"])
        return _Begun(batch_id=batch.id, state=batch.state, letters=batch.letters, idempotent_replay=True)
    check_version(incident, version)
    if incident.is_resolved:
        raise IncidentResolved
    chosen = _choose(incident, letter_ids, expected_count)
    batch = RepairBatch.objects.create(
        tenant=incident.tenant,
        source=incident.source,
        incident=incident,
        state=BatchState.PLANNING,
        letters=canonical_json([str(letter_id) for letter_id in chosen]),
        planned_by=by.ref,
        planned_by_name=by.name,
        planned_at=incident.locked_at,
    )
    audit.record(
        action=INCIDENT_RETRIED,
        operator=by,
        resource=incident.resource,
        capability=capability,
        outcome={"batch": str(batch.id), "letters": len(chosen), "incidentState": str(incident.state)},
        reason=request.told,
        key=key,
        digest=digest,
    )
    return _Begun(batch_id=batch.id, state=batch.state, letters=batch.letters, idempotent_replay=False)


def _choose(incident: Incident, letter_ids: list[UUID] | None, expected_count: int | None) -> list[UUID]:
    """Return the frozen set, oldest first; an empty choice never means all."""
    if not incident.letter_count:
        raise IncidentHasNoLetter
    letters = DeadLetter.objects.filter(incident=incident)
    if letter_ids is not None:
        if not letter_ids or len(set(letter_ids)) != len(letter_ids):
            raise SelectionInvalid(detail="Name at least one failed job, and none twice.")
        if len(letter_ids) > MOST_LETTERS:
            raise TooMany(found=len(letter_ids), most=MOST_LETTERS)
        found = list(letters.filter(id__in=letter_ids).oldest_first().values_list("id", flat=True))
        if len(found) != len(letter_ids):
            raise LetterNotFound
        return found
    if expected_count is None:
        raise SelectionInvalid(detail="Name the failed jobs, or say all together with the number you expect.")
    waiting = letters.unresolved().filter(state=LetterState.OPEN).oldest_first().values_list("id", flat=True)
    found = list(waiting[: MOST_LETTERS + 1])
    count = len(found) if len(found) <= MOST_LETTERS else waiting.count()
    if count != expected_count:
        raise SelectionDrifted(expected=expected_count, found=count)
    if count > MOST_LETTERS:
        raise TooMany(found=count, most=MOST_LETTERS)
    if not found:
        raise IncidentNotRepairable(detail="none of its jobs waits for a decision.")
    return found


def _pages(letter_ids: list[str]) -> Iterator[list[UUID]]:
    for start in range(0, len(letter_ids), PAGE):
        yield [UUID(text) for text in letter_ids[start : start + PAGE]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """One letter of a page with the repair planned for it; neither is written yet."""

    letter: DeadLetter
    action: RepairAction
    warnings: list[str]
    capability: Capability
    key: str


@service
def _plan_page(*, batch_id: UUID, letter_ids: list[UUID], request: _RetryRequest) -> None:
    """Plan one page of a batch: each letter by itself, refusals included; what a key has planned stays planned.

    What is read and written of a page is read and written for all of its letters together.
    """
    by = request.by
    batch = RepairBatch.objects.select_related("incident").get(id=batch_id)
    # The grant is asked again: it may have been taken away since the set was frozen.
    authorise(by, Action.DEAD_LETTERS_RETRY, batch.incident.resource)
    incident = lock_incident(batch.incident_id)
    batch = RepairBatch.objects.get(id=batch_id)
    results = {result["letter_id"]: result for result in json.loads(batch.results)}
    is_begun = any(result["status"] == "planned" for result in results.values())
    wanted = [letter_id for letter_id in letter_ids if str(letter_id) not in results]
    planned, refused, denied = _judge(wanted, incident, request, batch)
    if denied:
        record_denials(by, Action.DEAD_LETTERS_RETRY, denied)
    if planned:
        _write_planned(planned, incident.locked_at)
        # Only once: what a failed repair has opened again since is to be seen, and not taken by the pages that follow.
        if is_begun:
            save_incident(incident)
        else:
            _take_if_untaken(incident, by)
        _audit_planned(planned, incident, request, batch)
    told = sorted((*map(_told, planned), *refused), key=lambda result: result.letter_id)
    results |= {result.letter_id: asdict(result) for result in told}
    batch.results = canonical_json(list(results.values()))
    batch.save(update_fields=["results"])


def _judge(
    letter_ids: list[UUID], incident: Incident, request: _RetryRequest, batch: RepairBatch
) -> tuple[list[_Planned], list[LetterResult], list[Resource]]:
    """Lock letters of a locked incident and return which are planned and which refused, and what of those was denied.

    Nothing is written, but that a letter whose record has finished without it is closed as overtaken (C5).
    """
    served = Served.by(batch.source, incident.locked_at)
    letters = [*DeadLetter.objects.defer("payload_preview", "error_text").lock_many(letter_ids).values()]
    newest = RepairAction.objects.newest_of(letter_ids)
    capabilities: dict[Resource, Capability | None] = {}
    planned: list[_Planned] = []
    refused: list[LetterResult] = []
    denied: list[Resource] = []
    for start in range(0, len(letters), LOADED):
        few = letters[start : start + LOADED]
        load_messages(few)
        for letter in few:
            # Not from the client's key: with one of that form for another letter, this one's audit row were missing.
            key = f"batch:{batch.id}:{letter.id}"
            try:
                capability = _authorise_letter(request.by, letter, capabilities)
                if letter.incident_id != incident.id:
                    raise JobOvertaken(standing="part of another incident")
                action, warnings = _plan_retry(
                    letter, incident, request, key=key, served=served, previous=newest[letter.id], batch=batch
                )
            except OpsError as refusal:
                refused.append(
                    LetterResult(letter_id=str(letter.id), status="refused", code=refusal.code, detail=refusal.detail)
                )
                if isinstance(refusal, AccessDenied):
                    denied.append(refusal.resource)
                elif isinstance(refusal, RecordFinished):
                    close_overtaken(letter, incident)
                continue
            planned.append(_Planned(letter=letter, action=action, warnings=warnings, capability=capability, key=key))
        unload_messages(few)
    return planned, refused, denied


def _authorise_letter(by: Operator, letter: DeadLetter, capabilities: dict[Resource, Capability | None]) -> Capability:
    """Do what ``authorise`` does for each letter, asking once for those that no grant can tell apart."""
    # The target plays no part in a decision.
    scope = replace(letter.resource, target_type="", target_id="")
    if scope not in capabilities:
        capabilities[scope] = find_capability(by, Action.DEAD_LETTERS_RETRY, scope)
    capability = capabilities[scope]
    if capability is None:
        raise AccessDenied(operator=by, action=Action.DEAD_LETTERS_RETRY, resource=letter.resource)
    return capability


def _write_planned(planned: list[_Planned], at: datetime) -> None:
    messages = [one.action for one in planned if one.action.action_type == ActionType.RETRY_MESSAGE]
    rows = [[getattr(action, field.attname) for field in PLANNED_ROWS.fields] for action in messages]
    if PLANNED_ROWS.insert(rows) != len(rows):
        raise RuntimeError("a repair could not be written")
    for one in planned:
        if one.action.action_type == ActionType.RETRY_RECORD:
            one.action.save(force_insert=True)
            put_back(one.action, one.letter, at)
    DeadLetter.objects.filter(id__in=[one.letter.id for one in planned]).update(state=LetterState.RETRYING)
    answered = [one.letter for one in planned if one.action.provider_answer == ProviderAnswer.DID_NOT_HAPPEN]
    if answered:
        DeadLetter.objects.filter(id__in=[letter.id for letter in answered]).update(
            outcome_class=OutcomeClass.SAFE, outcome_reason=NOT_HAPPENED
        )


def _audit_planned(planned: list[_Planned], incident: Incident, request: _RetryRequest, batch: RepairBatch) -> None:
    digest = audit.request_digest({"batch": str(batch.id)})
    entries = [
        audit.AuditEntry(
            action=LETTER_RETRIED,
            operator=request.by,
            resource=one.letter.resource,
            capability=one.capability,
            outcome=_outcome(one.letter, incident, one.action, one.warnings),
            reason=request.told,
            key=one.key,
            digest=digest,
        )
        for one in planned
    ]
    if audit.record_many(entries, at=incident.locked_at) != len(entries):
        raise RuntimeError(f"an audit row of batch {batch.id} could not be written")


def _told(one: _Planned) -> LetterResult:
    return LetterResult(
        letter_id=str(one.letter.id), status="planned", repair_id=str(one.action.id), warnings=tuple(one.warnings)
    )


@service
def _finish_batch(*, batch_id: UUID, idempotent_replay: bool) -> BatchMutation:
    batch = RepairBatch.objects.select_related("incident").get(id=batch_id)
    if batch.state != BatchState.PLANNED:
        incident = lock_incident(batch.incident_id)
        RepairBatch.objects.filter(id=batch_id, state=BatchState.PLANNING).update(
            state=BatchState.PLANNED, finished_at=incident.locked_at
        )
    results = [LetterResult(**{**item, "warnings": tuple(item["warnings"])}) for item in json.loads(batch.results)]
    return BatchMutation(
        batch_id=batch_id,
        incident_id=batch.incident_id,
        incident_state=str(batch.incident.state),
        results=tuple(results),
        idempotent_replay=idempotent_replay,
    )


def _lock(letter_id: UUID) -> tuple[Incident, DeadLetter]:
    """Lock a letter's incident, then the letter; raises ``LetterNotFound`` or ``JobOvertaken``."""
    try:
        return lock_letter(letter_id)
    except DeadLetter.DoesNotExist:
        raise LetterNotFound from None
    except LetterMoved:
        raise JobOvertaken(standing="failing again") from None


def _replayed(key: str, action: str, by: Operator, letter: DeadLetter, digest: str) -> AuditEvent | None:
    return audit.replayed(
        key=key, action=action, operator=by, target_type="dead_letter", target_id=str(letter.id), digest=digest
    )


def _check_texts(reason: str, reference: str) -> None:
    if len(reason) > 500:
        raise InvalidInput(detail="The reason has at most 500 characters.", field="reason")
    if len(reference) > 300:
        raise InvalidInput(detail="The reference has at most 300 characters.", field="reference")
    if "\x00" in reason + reference:
        raise InvalidInput(detail="Text holds a NUL character.", field="reason")


def _plan_retry(
    letter: DeadLetter,
    incident: Incident,
    request: _RetryRequest,
    *,
    key: str,
    served: Served,
    previous: UUID | None,
    batch: RepairBatch | None = None,
) -> tuple[RepairAction, list[str]]:
    """Plan to send a locked letter's message again; raises the first refusal, with nothing changed.

    The repair and what changes of the letter (state, outcome class and its reason) are for the caller to write.
    """
    now = incident.locked_at
    warnings = refuse_unrepairable(
        letter,
        incident,
        served=served,
        now=now,
        provider_checked=request.provider_checked,
        run_expired=request.run_expired,
    )
    was_ambiguous = letter.outcome_class == OutcomeClass.AMBIGUOUS
    answer = ProviderAnswer.DID_NOT_HAPPEN if was_ambiguous else ProviderAnswer.NONE
    action = RepairAction(
        id=new_id(),
        tenant=letter.tenant,
        source=letter.source,
        actor_type=letter.actor_type,
        actor_id=letter.actor_id,
        action_type=ActionType.RETRY_MESSAGE,
        letter=letter,
        incident=incident,
        batch=batch,
        previous_id=previous,
        operation_key=_operation_key(request.by, ActionType.RETRY_MESSAGE, key, letter),
        state=ActionState.PLANNED,
        before=canonical_json({"outcome": str(letter.outcome_class), "state": str(letter.state)}),
        after=canonical_json({"attempts": 0, "state": "retrying"}),
        planned_by=request.by.ref,
        planned_by_name=request.by.name,
        planned_at=now,
        reason=request.reason,
        reference=request.reference,
        provider_answer=answer,
        job_type=letter.job_type,
        queue=letter.queue,
        new_task_id=str(new_id()),
        due_at=now,
    )
    if is_of_ledger(letter):
        as_record_retry(action, letter, now)
    letter.state = LetterState.RETRYING
    if was_ambiguous:
        # From here on the earlier attempts are known not to have taken effect, so they no longer count (C19).
        letter.outcome_class = OutcomeClass.SAFE
        letter.outcome_reason = NOT_HAPPENED
    return action, warnings


def _decide(
    letter: DeadLetter,
    incident: Incident,
    *,
    by: Operator,
    key: str,
    action_type: ActionType,
    state: LetterState,
    reason: str,
    reference: str = "",
    answer: ProviderAnswer = ProviderAnswer.NONE,
) -> RepairAction:
    """Close a locked letter, open or held, by a person's decision, with its action; raises ``JobOvertaken``."""
    if letter.state not in DECIDABLE:
        raise JobOvertaken(standing=letter.standing(incident))
    now = incident.locked_at
    action = RepairAction(
        id=new_id(),
        tenant=letter.tenant,
        source=letter.source,
        actor_type=letter.actor_type,
        actor_id=letter.actor_id,
        action_type=action_type,
        letter=letter,
        incident=incident,
        previous_id=_newest_repair(letter),
        operation_key=_operation_key(by, action_type, key, letter),
        state=ActionState.SUCCEEDED,
        before=canonical_json({"outcome": str(letter.outcome_class), "state": str(letter.state)}),
        after=canonical_json({"state": state.value}),
        planned_by=by.ref,
        planned_by_name=by.name,
        planned_at=now,
        reason=reason,
        reference=reference,
        provider_answer=answer,
        job_type=letter.job_type,
        queue=letter.queue,
        due_at=now,
        settled_at=now,
    )
    action.save(force_insert=True)
    settle_letter(letter, incident, state=state, at=now)
    return action


def _newest_repair(letter: DeadLetter) -> UUID | None:
    newest: UUID | None = RepairAction.objects.filter(letter=letter).newest_first().values_list("id", flat=True).first()
    return newest


def _operation_key(by: Operator, action_type: ActionType, key: str, letter: DeadLetter) -> str:
    return audit.fitted(f"{action_type.value}:{letter.id}:{by.ref}:{key}", 400)


def _take_if_untaken(incident: Incident, by: Operator) -> None:
    """Write the incident, with its operator as the holder if nobody had it (A12)."""
    if incident.state == IncidentState.OPEN:
        incident.take(by=by.ref, name=by.name, at=incident.locked_at)
    save_incident(incident)


def _outcome(letter: DeadLetter, incident: Incident, action: RepairAction, warnings: list[str]) -> dict[str, Any]:
    """Return what the audit row keeps of a repair: ids and what failed, never the payload (B5, B8)."""
    return {
        "ambiguous": json.loads(action.before)["outcome"] == OutcomeClass.AMBIGUOUS,
        "attempts": letter.attempts,
        "cause": letter.error_class,
        "incident": str(incident.id),
        "incidentState": str(incident.state),
        "job": letter.job_type,
        "newTask": action.new_task_id,
        "oldTask": letter.task_id,
        "providerChecked": action.provider_answer == ProviderAnswer.DID_NOT_HAPPEN,
        "reference": action.reference,
        "repair": str(action.id),
        "state": str(letter.state),
        "warnings": list(warnings),
    }


def _record(
    what: str,
    letter: DeadLetter,
    incident: Incident,
    action: RepairAction,
    *,
    by: Operator,
    capability: Capability,
    key: str,
    digest: str,
    warnings: list[str] | None = None,
    reason: str = "",
) -> LetterMutation:
    event = audit.record(
        action=what,
        operator=by,
        resource=letter.resource,
        capability=capability,
        outcome=_outcome(letter, incident, action, warnings or []),
        reason=reason,
        key=key,
        digest=digest,
        at=incident.locked_at,
    )
    return LetterMutation(
        letter_id=letter.id,
        state=str(letter.state),
        incident_id=incident.id,
        incident_state=str(incident.state),
        repair_id=action.id,
        new_task_id=action.new_task_id,
        warnings=tuple(warnings or ()),
        event_id=event.id,
    )
