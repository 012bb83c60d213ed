"""Taking back what a redrive has planned and nobody has sent: its letters go back to where they were."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from deadletters.locking import lock_letter
from deadletters.models import DeadLetter, LetterState
from grants.service import service
from incidents.models import Incident
from opsconsole.core.database import AnyOf, locked
from repairs.models import ActionState, ActionType, ItemState, Redrive, RedriveItem, RepairAction
from repairs.settling import fail_repair

CANNOT_BE_SENT = "cannot_be_sent"


def withdraw_unsent(redrive: Redrive, now: datetime) -> int:
    """Cancel every planned repair of a locked redrive with its item, and return how many; the counts are not saved.

    Locks their incidents, letters and repairs, in that order. A repair that a relay is sending just now is cancelled as
    well, and its message is refused by the start guard; one that has started by then is left to its result.
    """
    unsent = RepairAction.objects.filter(
        redrive=redrive, state=ActionState.PLANNED, action_type=ActionType.RETRY_MESSAGE
    )
    rows = list(unsent.values_list("id", "letter_id", "incident_id"))
    if not rows:
        return 0
    Incident.objects.lock_many(sorted({incident_id for _id, _letter, incident_id in rows}))
    letters = locked(DeadLetter.objects.filter(AnyOf("id", [letter for _id, letter, _incident in rows])).order_by("id"))
    known = set(letters.values_list("id", flat=True))
    still = locked(unsent.filter(AnyOf("id", [repair for repair, _letter, _incident in rows])).order_by("id"))
    withdrawn = dict(still.values_list("id", "letter_id"))
    RepairAction.objects.filter(AnyOf("id", withdrawn)).update(state=ActionState.CANCELLED, settled_at=now)
    DeadLetter.objects.filter(
        AnyOf("id", [letter for letter in withdrawn.values() if letter in known]), state=LetterState.RETRYING
    ).update(state=redrive.letter_state)
    of_them = RedriveItem.objects.filter(AnyOf("repair", withdrawn), redrive=redrive, state=ItemState.PLANNED)
    count = of_them.update(state=ItemState.CANCELLED, code="redrive_cancelled", settled_at=now)
    redrive.outstanding_count -= count
    redrive.cancelled_count += count
    return count


@service
def fail_unsent(*, repair_id: UUID, owner: str, text: str) -> bool:
    """Mark a repair failed whose message cannot be made, unless ``owner`` has lost its lease; its letter waits again.

    A redrive goes on without it; the failed item says why.
    """
    letter_id = RepairAction.objects.values_list("letter_id", flat=True).get(id=repair_id)
    incident, letter = lock_letter(letter_id)
    action = RepairAction.objects.lock(repair_id)
    if action.state != ActionState.PLANNED or action.lease_owner != owner:
        return False
    fail_repair(action, letter, incident, code=CANNOT_BE_SENT, text=text)
    return True
