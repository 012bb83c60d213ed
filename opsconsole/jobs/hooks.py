"""What an app above has to know in the ledger's own transactions; it registers itself here and is never imported."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opsconsole.jobs.models import Job

Repaired = Callable[["Job", datetime], None]

_repaired: list[Repaired] = []


def when_repaired(function: Repaired) -> Repaired:
    """Register what is called when a job that a repair has put back succeeds, before the job's row is written.

    Before, because locks are taken in one order everywhere: incident, letter, work record.
    """
    _repaired[:] = [function]
    return function


def tell_repaired(job: Job, now: datetime) -> None:
    """Call what is registered, in the transaction that settles the job."""
    for function in _repaired:
        function(job, now)
