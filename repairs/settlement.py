"""Settlement: what the journals say of repairs becomes how those repairs ended, each exactly once.

The drainer calls in here, so that the app below never imports the one above.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from uuid import UUID

from django.db import transaction

from deadletters.journal.events import Caught, Delivery, Ended, EndState, Failed
from deadletters.models import DeadLetter, LetterState
from deadletters.recorder import Recorded
from incidents.models import Incident
from opsconsole.core.database import database_now
from repairs.models import LIVE, ActionState, RepairAction
from repairs.settling import settle_letter

SEND_AGAIN_AFTER = timedelta(seconds=5)


class DatabaseSettlement:
    """How repairs end, in the database."""

    def letters_of(self, deliveries: Iterable[Delivery]) -> Mapping[str, UUID]:
        """Return the letter of each delivery that is a repair of ours, by the delivery's token.

        A header that was copied onto another job does not make it a repair: the task id has to be the repair's own.
        """
        named = {delivery.token: (repair, delivery) for delivery in deliveries if (repair := _repair_of(delivery))}
        rows = {
            row.id: row
            for row in RepairAction.objects.filter(id__in={repair for repair, _delivery in named.values()}).only(
                "id", "letter_id", "new_task_id"
            )
        }
        return {
            token: rows[repair].letter_id
            for token, (repair, delivery) in named.items()
            if repair in rows and rows[repair].new_task_id == delivery.task_id
        }

    def is_settled_elsewhere(self, failed: Failed) -> bool:
        """Say whether a lost delivery of a repair is no loss: another worker holds it, or it has its answer.

        A delivery that never got the claim never ran; what counts is the one that did.
        """
        repair_id = _repair_of(failed.delivery)
        if failed.caught != Caught.WORKER_LOST or repair_id is None:
            return False
        action = RepairAction.objects.filter(id=repair_id).only("id", "state", "claim_retries", "claim_holder").first()
        if action is None:
            return False
        if action.state not in LIVE:
            return True
        is_claimed_elsewhere = action.state == ActionState.STARTED and action.claim_retries >= failed.delivery.retries
        return bool(is_claimed_elsewhere and action.claim_holder != failed.delivery.holder)

    def failed(self, recorded: Iterable[Recorded], now: datetime) -> None:
        """Mark the repairs of these occurrences failed, in the transaction that records them."""
        for record in recorded:
            failure = record.failure
            if failure.repair_id is None:
                continue
            RepairAction.objects.filter(id=failure.repair_id, state__in=LIVE).update(
                state=ActionState.FAILED,
                settled_at=now,
                error_code="lost_before_start" if _never_started(record) else failure.caught.value,
                error_text=failure.error_text,
            )

    def ended(self, ended: Ended) -> None:
        """Settle one delivery that did not fail: a repair's, or a redelivery of a job presumed lost."""
        repair_id = _repair_of(ended.delivery)
        if ended.state == EndState.SUCCESS and repair_id is not None:
            with transaction.atomic():
                self._succeeded(repair_id, ended.delivery)
        elif ended.state == EndState.SUCCESS and ended.delivery.redelivered:
            self._came_back(ended.delivery)
        elif ended.state == EndState.REFUSED and repair_id is not None and _is_retriable(ended):
            self._send_again(repair_id, ended.delivery)
        elif ended.state in (EndState.REVOKED, EndState.IGNORED) and repair_id is not None:
            with transaction.atomic():
                self._withdrawn(repair_id, ended)

    def _lock(self, repair_id: UUID, task_id: str) -> tuple[Incident, DeadLetter, RepairAction] | None:
        """Lock incident, letter and repair, in this order; None if it is no repair of ours."""
        letter_id = (
            RepairAction.objects.filter(id=repair_id, new_task_id=task_id).values_list("letter_id", flat=True).first()
        )
        if letter_id is None:
            return None
        while True:
            incident_id = DeadLetter.objects.values_list("incident_id", flat=True).get(id=letter_id)
            incident = Incident.objects.lock(incident_id)
            letter = DeadLetter.objects.lock(letter_id)
            if letter.incident_id == incident_id:
                return incident, letter, RepairAction.objects.lock(repair_id)

    def _succeeded(self, repair_id: UUID, delivery: Delivery) -> None:
        rows = self._lock(repair_id, delivery.task_id)
        if rows is None:
            return
        incident, letter, action = rows
        now = incident.locked_at
        if action.state in LIVE:
            action.state = ActionState.SUCCEEDED
            action.settled_at = now
            action.started_at = action.started_at or now
            action.save(update_fields=["state", "settled_at", "started_at"])
            settle_letter(letter, incident, state=LetterState.REPAIRED, at=now)
        elif action.state == ActionState.FAILED and letter.state == LetterState.OPEN:
            # It was given up as lost, and has finished after all.
            settle_letter(letter, incident, state=LetterState.OVERTAKEN, at=now)

    def _withdrawn(self, repair_id: UUID, ended: Ended) -> None:
        """A repair's job was revoked or ignored: it has not succeeded, so its letter waits for a decision again."""
        rows = self._lock(repair_id, ended.delivery.task_id)
        if rows is None:
            return
        incident, letter, action = rows
        if action.state not in LIVE:
            return
        action.state = ActionState.FAILED
        action.settled_at = incident.locked_at
        action.error_code = ended.state.value
        action.error_text = f"The job was {ended.state.value} and has not done its work."
        action.save(update_fields=["state", "settled_at", "error_code", "error_text"])
        if letter.state == LetterState.RETRYING:
            letter.state = LetterState.OPEN
            letter.save(update_fields=["state"])
        if incident.state == "acknowledged" and not letter.is_closed(incident):
            incident.break_acknowledgement("repair_failed")
            Incident.objects.save_recorded([incident])

    def _came_back(self, delivery: Delivery) -> None:
        """A job presumed lost with its worker was delivered again and has succeeded: nothing is left to repair."""
        waiting = DeadLetter.objects.filter(
            task_id=delivery.task_id, job_type=delivery.task, state=LetterState.OPEN, caught=Caught.WORKER_LOST
        ).values_list("id", flat=True)
        for letter_id in waiting:
            with transaction.atomic():
                incident_id = DeadLetter.objects.values_list("incident_id", flat=True).get(id=letter_id)
                incident = Incident.objects.lock(incident_id)
                letter = DeadLetter.objects.lock(letter_id)
                if letter.state == LetterState.OPEN and letter.incident_id == incident_id:
                    settle_letter(letter, incident, state=LetterState.OVERTAKEN, at=incident.locked_at)

    def _send_again(self, repair_id: UUID, delivery: Delivery) -> None:
        """The guard could not ask the database, so the body has not run; the relay sends it once more.

        Only for a first attempt: a later one has an attempt before it, which is not to be run a second time.
        """
        again = RepairAction.objects.filter(
            id=repair_id,
            new_task_id=delivery.task_id,
            state__in=(ActionState.PLANNED, ActionState.SENT),
            claim_retries__lt=0,
        ).update(
            state=ActionState.PLANNED,
            due_at=database_now() + SEND_AGAIN_AFTER,
            lease_owner="",
            lease_expires_at=None,
            send_error="the start guard could not reach the database",
        )
        if not again and delivery.retries:
            with transaction.atomic():
                self._withdrawn(
                    repair_id,
                    Ended(delivery=delivery, state=EndState.IGNORED, at_boot=0.0, at_wall=0.0),
                )


def _repair_of(delivery: Delivery) -> UUID | None:
    if not delivery.repair_id:
        return None
    try:
        return UUID(delivery.repair_id)
    except ValueError:
        return None


def _is_retriable(ended: Ended) -> bool:
    return ended.error is not None and ended.error.call_site == "retriable"


def _never_started(record: Recorded) -> bool:
    failure = record.failure
    return failure.caught == Caught.WORKER_LOST and failure.never_started
