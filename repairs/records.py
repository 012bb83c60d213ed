"""Retrying a job of the ledger in place: its row and its record go back to work, and the repair waits for the answer.

No message is sent by us: the dispatcher finds the job due. Locks are taken in the one order: incident, letter, job.
"""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from deadletters.locking import lock_letter
from deadletters.models import DECIDABLE, DeadLetter, LetterState
from grants import audit
from grants.access import SYSTEM_CAPABILITY
from grants.audit import AuditEntry
from grants.operators import SYSTEM
from grants.service import service
from incidents.models import Incident
from opsconsole.core.canonical_json import canonical_json
from opsconsole.core.database import locked
from opsconsole.jobs import ledger
from opsconsole.jobs.errors import JobKindUnknown
from opsconsole.jobs.hooks import when_repaired
from opsconsole.jobs.kind import Kind
from opsconsole.jobs.kinds import kind_named
from opsconsole.jobs.models import DUE, Job, JobState
from opsconsole.jobs.tokens import TASK_PREFIX, job_id_of
from repairs.errors import JobNotServed, JobOvertaken, RecordFinished, RepairReferenceMissing
from repairs.models import LIVE, ActionState, ActionType, RepairAction
from repairs.settling import settle_letter

ANSWER_WITHIN = timedelta(hours=1)
LETTER_OVERTAKEN = "dead-letters.overtaken"


def is_of_ledger(letter: DeadLetter) -> bool:
    """Whether the letter's job is one of the ledger's, whose record is put back to work in place (A12)."""
    return job_id_of(letter.task_id) is not None


def refuse_ledger_job(letter: DeadLetter, *, tasks: dict[str, list[str]], has_nodes: bool) -> list[str]:
    """Raise why the ledger's job of a letter cannot be put back to work, or return warnings.

    ``tasks`` are those that live workers serve, ``has_nodes`` whether any worker has ever reported. Raises
    ``RepairReferenceMissing``, ``JobNotServed``, ``JobOvertaken`` or ``RecordFinished``.
    """
    job, kind = find_job(letter)
    refuse_unless_dead(job, kind)
    if not has_nodes:
        return ["no_worker_seen"]
    if f"{TASK_PREFIX}{kind.name}" not in tasks:
        raise JobNotServed(job_type=kind.name, where="")
    return []


def find_job(letter: DeadLetter, *, lock: bool = False) -> tuple[Job, Kind]:
    """Return the letter's job and its kind; raises ``RepairReferenceMissing`` or ``JobNotServed``."""
    rows = Job.objects.filter(id__in=[job_id for job_id in [job_id_of(letter.task_id)] if job_id is not None])
    job: Job | None = (locked(rows) if lock else rows).first()
    if job is None:
        raise RepairReferenceMissing(what="ledger's row")
    return job, _kind_of(job)


def _kind_of(job: Job) -> Kind:
    try:
        return kind_named(job.kind)
    except JobKindUnknown:
        raise JobNotServed(job_type=job.kind, where=", nor does this console know that kind") from None


def refuse_unless_dead(job: Job, kind: Kind) -> None:
    """Refuse what has finished, runs, or waits (C5), and what has no record any more."""
    if job.state != JobState.DEAD:
        finished = job.state in (JobState.SUCCEEDED, JobState.CANCELLED)
        raise (RecordFinished if finished else JobOvertaken)(standing=str(job.state))
    if kind.record_type and kind.record(job) is None:
        raise RepairReferenceMissing(what="record")
    if overtaken := kind.is_overtaken(job):
        raise RecordFinished(standing=overtaken)
    if job.key and _has_successor(job):
        raise JobOvertaken(standing="waiting to run again as a newer job of the same key")


def _has_successor(job: Job) -> bool:
    return Job.objects.filter(
        tenant=job.tenant, source=job.source, kind=job.kind, key=job.key, state=JobState.PENDING
    ).exists()


def as_record_retry(action: RepairAction, letter: DeadLetter, now: datetime) -> None:
    """Make a planned retry one of the record, whose job stays locked; raises what ``refuse_unless_dead`` raises."""
    job, kind = find_job(letter, lock=True)
    refuse_unless_dead(job, kind)
    record = kind.record(job)
    before: dict[str, Any] = {**json.loads(action.before), "job": str(job.state)}
    if record is not None:
        before |= {"record": record.state, "recordId": record.record_id, "recordType": record.record_type}
    action.action_type = ActionType.RETRY_RECORD
    action.state = ActionState.SENT
    action.new_task_id = ""
    action.before = canonical_json(before)
    action.after = canonical_json({"attempts": 0, "automaticAttemptsReset": True, "state": "pending"})
    action.sent_at = now
    action.answer_due_at = now + ANSWER_WITHIN


def put_back(action: RepairAction, letter: DeadLetter, now: datetime) -> None:
    """Put the job that ``as_record_retry`` has locked back to work, with its record (A12).

    The stored repair is told what state its record has got by that: the kind's own word for waiting.
    """
    job, kind = find_job(letter, lock=True)
    ledger.requeue(job, kind, repair_id=action.id, now=now)
    record = kind.record(job)
    if record is not None:
        action.after = canonical_json({**json.loads(action.after), "record": record.state})
        action.save(update_fields=["after"])


def take_back(action: RepairAction, letter: DeadLetter, now: datetime) -> bool:
    """Withdraw a record's retry whose job still waits: dead again, with its record; false if it has started."""
    job, kind = find_job(letter, lock=True)
    if job.repair_id != action.id or job.state not in (*DUE, JobState.ENQUEUED):
        return False
    job.state, job.finished_at, job.updated_at = JobState.DEAD, now, now
    job.lease_owner, job.lease_expires_at = "", None
    job.last_error_code = ledger.EXHAUSTED
    job.save(update_fields=["state", "finished_at", "updated_at", "lease_owner", "lease_expires_at", "last_error_code"])
    kind.mark_dead(job, ledger.EXHAUSTED, now)
    return True


@when_repaired
def settle_record_retry(job: Job, now: datetime) -> None:
    """The job that a repair had put back has succeeded: so has the repair, and its letter is closed (C11)."""
    assert job.repair_id is not None  # noqa: S101  (the ledger tells of no other jobs)
    known = RepairAction.objects.filter(id=job.repair_id, state__in=LIVE).values_list("letter_id", flat=True).first()
    if known is None:
        return
    incident, letter = lock_letter(known)
    action = RepairAction.objects.lock(job.repair_id)
    if action.state not in LIVE:
        return
    action.state, action.settled_at = ActionState.SUCCEEDED, now
    action.started_at = action.started_at or now
    action.save(update_fields=["state", "settled_at", "started_at"])
    settle_letter(letter, incident, state=LetterState.REPAIRED, at=now)


@service
def mark_overtaken(*, letter_id: UUID) -> bool:
    """Close an open letter whose job or record has finished without a repair (C5); returns whether it was closed."""
    incident, letter = lock_letter(letter_id)
    if letter.state not in DECIDABLE or not is_finished(letter):
        return False
    close_overtaken(letter, incident)
    return True


def is_finished(letter: DeadLetter) -> bool:
    """Whether the ledger says that nothing is left to repair."""
    try:
        refuse_unless_dead(*find_job(letter))
    except RecordFinished:
        return True
    except (JobOvertaken, JobNotServed, RepairReferenceMissing):
        return False
    return False


def close_overtaken(letter: DeadLetter, incident: Incident) -> None:
    """Close a locked letter as overtaken, with its audit event."""
    now = incident.locked_at
    settle_letter(letter, incident, state=LetterState.OVERTAKEN, at=now)
    audit.record_many(
        [
            AuditEntry(
                action=LETTER_OVERTAKEN,
                operator=SYSTEM,
                capability=SYSTEM_CAPABILITY,
                resource=letter.resource,
                key=f"overtaken:{letter.id}:{letter.occurrence_count}",
                outcome={"incident": str(incident.id), "job": letter.job_type, "state": str(letter.state)},
            )
        ],
        at=now,
    )
