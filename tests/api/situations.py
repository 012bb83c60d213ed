"""What the tests of the API start from: recorded failures, planned repairs, reporting workers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

from deadletters.journal.events import Caught, ErrorReport
from deadletters.models import DeadLetter, WorkerNode
from deadletters.services import HoldTarget, place_hold
from grants.operators import Operator
from incidents.models import Incident
from opsconsole.core.clock import boot_id
from opsconsole.core.database import database_now
from opsconsole.core.ids import new_id
from repairs.redrives.requests import RedriveSelection
from repairs.redrives.services import create_redrive
from repairs.services import retry_incident, retry_letter
from tests.factories import TIMED_OUT, dead_letter, failed, host_clock, intake, record
from tests.jobs.rows import job


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One letter that waits, one that a batch is retrying, each of an incident of its own, and a job of the ledger."""

    letter: DeadLetter
    retried: DeadLetter
    repair_id: UUID
    batch_id: UUID
    job_id: UUID
    redriven: DeadLetter | None = None
    redrive_id: UUID | None = None
    hold_id: UUID | None = None

    @property
    def incident(self) -> Incident:
        found: Incident = self.letter.incident
        return found


def scene(by: Operator, tenant: str = "default") -> Scene:
    """Record two failures of ``tenant`` and let ``by`` retry one of them."""
    letter = dead_letter(tenant=tenant)
    retried = dead_letter(TIMED_OUT, tenant=tenant)
    batch = retry_incident(
        incident_id=retried.incident_id,
        by=by,
        key=f"scene:{new_id()}",
        letter_ids=[retried.id],
        provider_checked=True,
    )
    return Scene(
        letter=letter,
        retried=retried,
        batch_id=batch.batch_id,
        repair_id=UUID(batch.results[0].repair_id),
        job_id=job(tenant=tenant).id,
    )


def planned_redrive(by: Operator, *letters: DeadLetter, **fields: Any) -> UUID:
    """Let ``by`` plan a redrive of these letters, which is then ready to start; return its id."""
    selection = RedriveSelection(letter_ids=tuple(letter.id for letter in letters))
    made = create_redrive(by=by, key=f"redrive:{new_id()}", selection=selection, **fields)
    assert made.state == "ready"
    return made.redrive_id


def placed_hold(by: Operator, tenant: str = "default", **fields: Any) -> UUID:
    """Let ``by`` put ``shop.send_mail`` of a tenant on hold for an hour; return the hold's id."""
    target = HoldTarget(tenant=tenant, **{"job_type": "shop.send_mail", **fields})
    ends_at = database_now() + timedelta(hours=1)
    return place_hold(target=target, reason="a template is broken", ends_at=ends_at, by=by, key=f"{new_id()}").hold_id


def held_letter(hold_id: UUID, **fields: Any) -> DeadLetter:
    """Return the letter of a message that a hold has put aside."""
    nothing = ErrorReport(error_class="", text="")
    event = failed(nothing, caught=Caught.HELD, never_started=True, hold_id=str(hold_id), **fields)
    found = intake(source=fields.get("source", "tests")).failure(event, clock=host_clock(), boot_id=boot_id())
    letter: DeadLetter = DeadLetter.objects.get(id=record(found)[0].letter_id)
    assert letter.state == "held"
    return letter


def retrying(by: Operator, **fields: Any) -> DeadLetter:
    """Return a letter that ``by`` has retried."""
    letter = dead_letter(**fields)
    retry_letter(letter_id=letter.id, by=by, key=f"retrying:{letter.id}", provider_checked=True)
    return DeadLetter.objects.select_related("incident").get(id=letter.id)


def worker_node(name: str = "worker-1", **fields: Any) -> WorkerNode:
    """Store a worker that has just reported itself."""
    now = database_now()
    values: dict[str, Any] = {
        "id": name,
        "source": "tests",
        "host": "host-1",
        "pid": 7,
        "queues": json.dumps(["celery"]),
        "tasks": json.dumps({"shop.send_mail": ""}),
        "started_at": now,
        "seen_at": now,
    }
    return WorkerNode.objects.create(**{**values, **fields})
