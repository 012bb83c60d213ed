"""The settings of the ledger as typed values."""

from __future__ import annotations

from django.conf import settings


def source() -> str:
    """Return whose jobs this project writes and sends: several may share one database."""
    return str(getattr(settings, "OPSCONSOLE_SOURCE", "default"))


def queue() -> str:
    """Return the queue of jobs whose kind names none."""
    return str(getattr(settings, "OPSCONSOLE_QUEUE", "opsconsole"))
