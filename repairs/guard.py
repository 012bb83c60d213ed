"""The start guard: a repair starts at most once per attempt, whoever is alive and however often it is delivered."""

from __future__ import annotations

import time
from uuid import UUID, uuid4

from django.db import Error, connection
from django.db.models.functions import Coalesce

from deadletters.journal.hooks import StartRefused
from opsconsole.core.database import database_now
from repairs.models import ActionState, RepairAction

TRIES = 3
PAUSE_SECONDS = 0.5
MARK = "#"


def holder_of(claim_holder: str) -> str:
    """Return the journal that a stored claim names, without the mark of the one claim."""
    return claim_holder.rpartition(MARK)[0] or claim_holder


class DatabaseGuard:
    """Claims (repair, attempt, holder) by compare-and-swap before a repair's body runs.

    An attempt is claimed by raising ``claim_retries`` to its number, so a second delivery of it, or one of an earlier
    attempt, finds nothing to raise. ``planned`` is accepted, since the relay may have been killed between sending and
    marking. What is refused does not run, and so does a repair that is unknown here, such as one lost in a failover.
    """

    def claim(self, *, repair_id: str, task_id: str, retries: int, holder: str) -> bool:
        """Claim the start, or raise ``StartRefused``: retriable if the database could not be asked.

        A message that carries the header of a repair with another task id is no repair of ours, somebody copied the
        header; it passes as the ordinary job it is, with False. Each call has a mark of its own in the stored holder:
        an answer that was lost on its way is recognised as this call's, and not as another delivery's in the same
        process.
        """
        try:
            known = UUID(repair_id)
        except ValueError:
            raise StartRefused("the repair header names no repair", retriable=False) from None
        if "/" not in holder or holder.startswith("without journal"):
            # Its end could never be told, so the repair would stay started for ever.
            raise StartRefused("this worker has no journal", retriable=True)
        mark = uuid4().hex[:12]
        marked = f"{holder[: 300 - len(mark) - 1]}{MARK}{mark}"
        for attempt in range(TRIES):
            try:
                is_repair = self._claim(known, task_id, retries, marked)
            except Error as error:
                connection.close()
                if attempt == TRIES - 1:
                    reason = f"the database could not be asked: {type(error).__name__} {MARK}{mark}"
                    raise StartRefused(reason, retriable=True) from error
                time.sleep(PAUSE_SECONDS)
            else:
                return is_repair
        return False

    def _claim(self, repair_id: UUID, task_id: str, retries: int, holder: str) -> bool:
        now = database_now()
        claimed = (
            RepairAction.objects.claimable_start(repair_id, retries)
            .filter(new_task_id=task_id)
            .update(
                state=ActionState.STARTED,
                claim_retries=retries,
                claim_holder=holder,
                started_at=Coalesce("started_at", now),
                sent_at=Coalesce("sent_at", now),
            )
        )
        if claimed:
            return True
        row = RepairAction.objects.filter(id=repair_id).only("state", "new_task_id", "claim_holder").first()
        if row is None:
            raise StartRefused("the repair is not known here", retriable=False)
        if row.new_task_id != task_id:
            return False
        if row.claim_holder == holder:
            return True
        raise StartRefused(f"the repair is {row.state} already", retriable=False)
