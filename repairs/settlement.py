"""Settlement: what the journals say of repairs becomes how those repairs ended, each exactly once.

The drainer calls in here, so that the app below never imports the one above.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from uuid import UUID

from django.db import transaction
from django.db.models import F

from deadletters.journal.events import Caught, Delivery, Ended, EndState, Failed
from deadletters.locking import lock_letter
from deadletters.models import DECIDABLE, DeadLetter, LetterState
from deadletters.recorder import Recorded
from opsconsole.core.database import AnyOf
from repairs.guard import MARK
from repairs.models import LIVE, ActionState, RepairAction
from repairs.settling import fail_repair, settle_letter

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

    def letters_of_repairs(self, repair_ids: Iterable[UUID]) -> Mapping[UUID, UUID]:
        """Return the letter of each of these repairs that a ledger job was put back by."""
        listed = list(repair_ids)
        if not listed:
            return {}
        return dict(RepairAction.objects.filter(AnyOf("id", listed)).values_list("id", "letter_id"))

    def is_settled_elsewhere(self, failed: Failed) -> bool:
        """Say whether a failed delivery of a repair says nothing about it: it never had the claim, another one has."""
        action = _action_of(failed.delivery)
        return action is not None and _is_stale(action, failed.delivery)

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
        delivery = ended.delivery
        action = _action_of(delivery)
        if action is None:
            if ended.state == EndState.SUCCESS and delivery.redelivered:
                self._came_back(delivery)
            return
        if ended.state == EndState.REFUSED:
            if _is_retriable(ended):
                self._send_again(action, ended)
        elif ended.state == EndState.SUCCESS or not _is_stale(action, delivery):
            with transaction.atomic():
                if ended.state == EndState.SUCCESS:
                    self._succeeded(action, delivery)
                elif ended.state in (EndState.REVOKED, EndState.IGNORED):
                    self._withdrawn(action, ended)

    def _succeeded(self, known: RepairAction, delivery: Delivery) -> None:
        incident, letter = lock_letter(known.letter_id)
        action = RepairAction.objects.lock(known.id)
        now = incident.locked_at
        if action.state in LIVE:
            action.state = ActionState.SUCCEEDED
            action.settled_at = now
            action.started_at = action.started_at or now
            action.save(update_fields=["state", "settled_at", "started_at"])
            settle_letter(letter, incident, state=LetterState.REPAIRED, at=now)
        elif action.state == ActionState.FAILED and letter.state == LetterState.OPEN and delivery.claimed:
            # It was given up as lost, and has finished after all.
            settle_letter(letter, incident, state=LetterState.OVERTAKEN, at=now)

    def _withdrawn(self, known: RepairAction, ended: Ended) -> None:
        """A repair's job was revoked or ignored: it has not succeeded, so its letter waits for a decision again."""
        incident, letter = lock_letter(known.letter_id)
        action = RepairAction.objects.lock(known.id)
        if action.state not in LIVE or _is_stale(action, ended.delivery):
            return
        fail_repair(
            action,
            letter,
            incident,
            code=ended.state.value,
            text=f"The job was {ended.state.value} and has not done its work.",
        )

    def _came_back(self, delivery: Delivery) -> None:
        """A job presumed lost with its worker, or put aside, was delivered again and has succeeded.

        Nothing is left to repair, or to send on.
        """
        waiting = DeadLetter.objects.filter(
            tenant=delivery.tenant,
            source=delivery.source,
            task_id=delivery.task_id,
            state__in=DECIDABLE,
            caught__in=(Caught.WORKER_LOST, Caught.HELD),
            occurrences__delivery=f"{delivery.task_id}:{delivery.retries}",
            occurrences__caught=F("caught"),
        ).values_list("id", flat=True)
        for letter_id in list(waiting):
            with transaction.atomic():
                incident, letter = lock_letter(letter_id)
                if letter.state in DECIDABLE:
                    settle_letter(letter, incident, state=LetterState.OVERTAKEN, at=incident.locked_at)

    def _send_again(self, known: RepairAction, ended: Ended) -> None:
        """The guard could not ask the database, so the body has not run; the relay sends it once more.

        Only for a first attempt: a later one has an attempt before it, which is not to be run a second time. A claim
        that was written although its answer was lost is this delivery's own, and is taken back.
        """
        mark = ended.error.text.rpartition(MARK)[2] if ended.error is not None else ""
        with transaction.atomic():
            incident, letter = lock_letter(known.letter_id)
            action = RepairAction.objects.lock(known.id)
            is_own_claim = bool(mark) and action.claim_holder.endswith(f"{MARK}{mark}")
            if action.state not in LIVE or (action.state == ActionState.STARTED and not is_own_claim):
                return
            if ended.delivery.retries:
                fail_repair(
                    action,
                    letter,
                    incident,
                    code="start_refused",
                    text="A later attempt could not be started: the start guard could not reach the database.",
                )
                return
            action.state = ActionState.PLANNED
            action.claim_retries = -1
            action.claim_holder = action.lease_owner = ""
            action.lease_expires_at = None
            action.due_at = incident.locked_at + SEND_AGAIN_AFTER
            action.send_error = "the start guard could not reach the database"
            action.save()


def _action_of(delivery: Delivery) -> RepairAction | None:
    """Return the repair that a delivery carries out.

    A header that was copied onto another job does not make it a repair: the task id has to be the repair's own.
    """
    repair_id = _repair_of(delivery)
    if repair_id is None or "\x00" in delivery.task_id:
        return None
    return RepairAction.objects.filter(id=repair_id, new_task_id=delivery.task_id).first()


def _is_stale(action: RepairAction, delivery: Delivery) -> bool:
    """Say whether a delivery without the claim has nothing to say: the repair has its answer, or another one runs it.

    A delivery that never had the claim never ran, whatever became of its message.
    """
    if delivery.claimed:
        return False
    return action.state not in LIVE or (
        action.state == ActionState.STARTED and action.claim_retries >= delivery.retries
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
