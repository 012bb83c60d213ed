"""What kinds share: a record with a state that goes with its job, and a record that is sent as a signed call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar
from uuid import UUID

from opsconsole.core.effects import Effects
from opsconsole.jobs import webhooks
from opsconsole.jobs.errors import Refused
from opsconsole.jobs.kind import Kind, ProbeAnswer, RecordState, Work
from opsconsole.jobs.models import Job
from opsconsole.jobs.querysets import TenantQuerySet

CANCELLED = "cancelled"
RECORD_MISSING = "record_missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Which states of a record go with which moments of its job."""

    pending: str
    in_flight: str
    retrying: str
    failed: str
    done: tuple[str, ...]  # finished work: no hook touches it
    never_dead: tuple[str, ...]  # what the death of the job leaves alone (A6)


def record_uuid(text: str) -> UUID | None:
    """Return the id that a job names, ``None`` for a text that is none: such a record does not exist."""
    try:
        return UUID(text)
    except ValueError:
        return None


def check_ids(payload: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Raise ``ValueError`` naming the first of ``names`` that is no id in text form."""
    for name in names:
        value = payload.get(name)
        if not isinstance(value, str) or record_uuid(value) is None:
            raise ValueError(f"{name} is the id of a record, as text")


class RecordKind(Kind):
    """A kind whose job works on one row with a state.

    Each hook is one UPDATE whose WHERE repeats what must hold, so that a hook which comes late, or for a record that
    was finished otherwise, changes nothing. Rows are found by id and tenant: a job never reaches another tenant's.
    A record's lease is renewed with its job's, in one transaction, so neither is taken from a body that takes long.
    """

    states: ClassVar[States]
    ids: ClassVar[tuple[str, ...]]  # what a payload names
    due_column: ClassVar[str] = "next_attempt_at"
    has_lease: ClassVar[bool] = True
    stale_code: ClassVar[str] = ""  # what a record says whose lease was taken away; "" is what the ledger says

    def records(self) -> TenantQuerySet:
        """Return all records of this kind."""
        raise NotImplementedError

    def check(self, payload: Mapping[str, Any]) -> None:
        check_ids(payload, self.ids)

    def row(self, job: Job) -> TenantQuerySet:
        """Return the job's record, as a set of one row or none."""
        record_id = record_uuid(job.record_id)
        return self.records().filter(id=record_id, tenant=job.tenant) if record_id else self.records().none()

    def load(self, work: Work) -> Any:
        """Return the record to work on; raises ``Refused`` if it is gone."""
        record_id = record_uuid(work.record_id)
        found = self.records().filter(id=record_id, tenant=work.tenant).first() if record_id else None
        if found is None:
            raise Refused(RECORD_MISSING, f"there is no {self.record_type} of this id in this tenant")
        return found

    def is_done(self, record: Any) -> bool:
        """Say whether the record is finished work already."""
        return record.state in self.states.done

    def begin(self, job: Job, now: datetime) -> None:
        lease = {"lease_expires_at": job.lease_expires_at} if self.has_lease else {}
        rows = self.row(job).exclude(state__in=self.states.done)
        rows.update(state=self.states.in_flight, attempt_count=job.attempts, updated_at=now, **lease)

    def renew(self, job: Job, now: datetime) -> None:
        lease = {"lease_expires_at": job.lease_expires_at} if self.has_lease else {}
        self.row(job).filter(state=self.states.in_flight).update(updated_at=now, **lease)

    def complete(self, job: Job, result: Any, now: datetime) -> None:  # noqa: ARG002
        """The record is done; what else there is to write is ``finished``'s."""
        rows = self.row(job).exclude(state__in=self.states.done)
        rows.update(
            state=self.states.done[0], last_error_code="", updated_at=now, **self._no_lease(), **self.finished(now)
        )

    def finished(self, now: datetime) -> dict[str, Any]:  # noqa: ARG002
        """Return further columns of a record that is done."""
        return {}

    def put_off(self, job: Job, code: str, now: datetime) -> None:
        rows = self.row(job).filter(state=self.states.in_flight)
        rows.update(
            state=self.states.retrying, last_error_code=code[:64], updated_at=now, **self._due(job.available_at)
        )

    def release(self, job: Job, code: str, now: datetime) -> None:
        """Only from the state in which a holder had it, due now (A14)."""
        rows = self.row(job).filter(state=self.states.in_flight)
        code = self.stale_code or code[:64]
        rows.update(state=self.states.retrying, last_error_code=code, updated_at=now, **self._due(now))

    def mark_dead(self, job: Job, code: str, now: datetime) -> None:
        rows = self.row(job).exclude(state__in=self.states.never_dead)
        rows.update(state=self.states.failed, last_error_code=code[:64], updated_at=now, **self._no_lease())

    def requeue(self, job: Job, now: datetime) -> None:
        rows = self.row(job).exclude(state__in=self.states.done)
        rows.update(state=self.states.pending, attempt_count=0, last_error_code="", updated_at=now, **self._due(now))

    def cancel(self, job: Job, now: datetime) -> None:
        """A record whose job was withdrawn is not pending for ever: it has failed, and says why."""
        self.mark_dead(job, CANCELLED, now)

    def record(self, job: Job) -> RecordState | None:
        columns = ("state", "attempt_count", "last_error_code", self.due_column, "updated_at")
        found = self.row(job).values(*columns).first()
        if found is None:
            return None
        return RecordState(
            record_type=self.record_type, record_id=job.record_id, state=found.pop("state"), detail=found
        )

    def is_overtaken(self, job: Job) -> str:
        found = self.row(job).filter(state__in=self.states.done).values_list("state", flat=True).first()
        return str(found or "")

    def _no_lease(self) -> dict[str, Any]:
        return {"lease_expires_at": None} if self.has_lease else {}

    def _due(self, at: datetime) -> dict[str, Any]:
        return {self.due_column: at, **self._no_lease()}


class WebhookKind(RecordKind):
    """A kind whose record is sent to its ``endpoint`` as a signed call with the job's idempotency key.

    Declared errors: ``TryAgain`` where nothing was sent (``dns_failed``, ``connection_refused``, ``connect_timed_out``,
    ``connect_failed``, ``tls_untrusted``, ``tls_failed``) and for 429 and 5xx (``http_503``); ``Refused`` for any
    other status (``http_422``), for an endpoint that is no URL, and for ``record_missing`` and ``payload_malformed``;
    ``Unanswered`` where the request went out and no answer came (``timed_out``, ``connection_lost``,
    ``answer_malformed``) and for a gateway that got none (``http_504``).
    """

    effects = Effects.OUTSIDE
    lease = timedelta(seconds=60)

    def document(self, record: Any, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the call says beside its type; ``payload`` is the record's."""
        raise NotImplementedError

    def run(self, work: Work) -> None:
        record = self.load(work)
        if self.is_done(record):
            return
        document = {"type": self.name, "data": self.document(record, read_payload(record.payload))}
        webhooks.post(endpoint=record.endpoint, tenant=work.tenant, key=work.idempotency_key, document=document)

    def probe(self, job: Job) -> ProbeAnswer:
        endpoint = self.row(job).values_list("endpoint", flat=True).first()
        if endpoint is None:
            return ProbeAnswer(happened=None, evidence="The record is gone, and with it whom to ask.")
        return webhooks.probe(endpoint=str(endpoint), tenant=job.tenant, key=str(job.id))


def read_payload(text: str) -> dict[str, Any]:
    """Return a record's payload; raises ``Refused`` if it is no JSON object."""
    try:
        found = json.loads(text)
        # Written again at once: what is read here must be something that can be sent.
        json.dumps(found, allow_nan=False)
    except (ValueError, RecursionError):
        raise Refused("payload_malformed", "the record's payload is no JSON that can be sent") from None
    if not isinstance(found, dict):
        raise Refused("payload_malformed", "the record's payload is no JSON object")
    return found
