"""The settings of redrives, read where they are used."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured


def approval_above() -> int | None:
    """Return the number of jobs above which a second person has to approve a redrive; ``None`` = never.

    Raises ``ImproperlyConfigured``: what is no number must not come to mean that nobody has to.
    """
    above: Any = getattr(settings, "OPSCONSOLE_REDRIVE_APPROVAL_ABOVE", None)
    if above in (None, ""):
        return None
    try:
        return max(int(above), 0)
    except (TypeError, ValueError) as error:
        raise ImproperlyConfigured("OPSCONSOLE_REDRIVE_APPROVAL_ABOVE is a whole number, or empty") from error


def low_priority_queue() -> str:
    """Return the queue to which a redrive of low priority sends its jobs; "" if there is none."""
    return str(getattr(settings, "OPSCONSOLE_REDRIVE_QUEUE", "") or "")
