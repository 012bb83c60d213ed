"""The start guard: a repair starts at most once per attempt, whoever is alive and however often it is delivered."""

from __future__ import annotations

import time
from uuid import UUID

from django.db import Error, connection
from django.db.models.functions import Coalesce

from deadletters.journal.hooks import StartRefused
from opsconsole.core.database import database_now
from repairs.models import ActionState, RepairAction

TRIES = 3
PAUSE_SECONDS = 0.5


class DatabaseGuard:
    """Claims (repair, attempt, holder) by compare-and-swap before a repair's body runs.

    An attempt is claimed by raising ``claim_retries`` to its number, so a second delivery of it, or one of an earlier
    attempt, finds nothing to raise. ``planned`` is accepted, since the relay may have been killed between sending and
    marking. What is refused does not run, and so does a repair that is unknown here, such as one lost in a failover.
    """

    def claim(self, *, repair_id: str, task_id: str, retries: int, holder: str) -> None:
        """Claim the start, or raise ``StartRefused``: retriable if the database could not be asked."""
        try:
            known = UUID(repair_id)
        except ValueError:
            raise StartRefused("the repair header names no repair", retriable=False) from None
        for attempt in range(TRIES):
            try:
                self._claim(known, task_id, retries, holder)
            except Error as error:
                connection.close()
                if attempt == TRIES - 1:
                    reason = f"the database could not be asked: {type(error).__name__}"
                    raise StartRefused(reason, retriable=True) from error
                time.sleep(PAUSE_SECONDS)
            else:
                return

    def _claim(self, repair_id: UUID, task_id: str, retries: int, holder: str) -> None:
        now = database_now()
        claimed = (
            RepairAction.objects.claimable_start(repair_id, retries)
            .filter(new_task_id=task_id)
            .update(
                state=ActionState.STARTED,
                claim_retries=retries,
                claim_holder=holder[:300],
                started_at=Coalesce("started_at", now),
                sent_at=Coalesce("sent_at", now),
            )
        )
        if claimed:
            return
        row = RepairAction.objects.filter(id=repair_id).values_list("state", "new_task_id").first()
        if row is None:
            raise StartRefused("the repair is not known here", retriable=False)
        if row[1] != task_id:
            raise StartRefused("the repair belongs to another task id", retriable=False)
        raise StartRefused(f"the repair is {row[0]} already", retriable=False)
