"""The settings of redrives, read where they are used."""

from __future__ import annotations

from django.conf import settings


def approval_above() -> int | None:
    """Return the number of jobs above which a second person has to approve a redrive; ``None`` = never."""
    above = getattr(settings, "OPSCONSOLE_REDRIVE_APPROVAL_ABOVE", None)
    return None if above in (None, "") else int(above)


def low_priority_queue() -> str:
    """Return the queue to which a redrive of low priority sends its jobs; "" if there is none."""
    return str(getattr(settings, "OPSCONSOLE_REDRIVE_QUEUE", "") or "")
