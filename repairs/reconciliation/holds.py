"""Holds whose time is over. Workers obey the end by themselves and write it down; where none lives, this does."""

from __future__ import annotations

from deadletters.models import Hold
from deadletters.services import note_expired
from repairs.reconciliation.sweeping import Sweeping

PAGE = 100


def expired_holds(sweeping: Sweeping) -> None:
    """Write down of each hold that its time is over, each with its audit row; each guarded again under its lock."""
    while size := sweeping.size(PAGE):
        with sweeping.page() as tally:
            found = list(Hold.objects.overdue(tally.now).order_by("id").values_list("id", flat=True)[:size])
            tally.add(scanned=len(found), repaired=sum(note_expired(hold_id) for hold_id in found))
        if len(found) < size:
            return
