"""The repairs app: retry, discard, relay, settlement, reconciliation."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.db import DEFAULT_DB_ALIAS
from django.db.models.signals import post_migrate


class RepairsConfig(AppConfig):
    name = "repairs"
    label = "ops_repairs"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Keep the schedule of sweeps filled, and let the ledger tell when a job that was put back has succeeded."""
        from repairs import records  # noqa: F401 - importing registers it; models must be loaded first

        post_migrate.connect(fill_schedule, sender=self)


def fill_schedule(using: str = DEFAULT_DB_ALIAS, **_: Any) -> None:
    """Make the schedule's entries the first time; see ``repairs.reconciliation.schedule``."""
    from repairs.reconciliation.schedule import seed_schedule  # models must be loaded first

    if using == DEFAULT_DB_ALIAS:
        seed_schedule(using)
