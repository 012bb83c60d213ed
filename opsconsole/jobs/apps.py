"""The jobs app: the ledger, the records that its kinds work on, and the totals that are kept of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.db import DEFAULT_DB_ALIAS, connections
from django.db.models.signals import post_migrate, pre_migrate


class JobsConfig(AppConfig):
    name = "opsconsole.jobs"
    label = "ops_jobs"
    verbose_name = "Job ledger"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the system checks, and keep the triggers of the totals installed."""
        from opsconsole.jobs import checks  # noqa: F401 - importing registers them; models must be loaded first

        pre_migrate.connect(release_totals, sender=self)
        post_migrate.connect(keep_totals, sender=self)


def release_totals(using: str = DEFAULT_DB_ALIAS, plan: Sequence[Any] = (), **_: Any) -> None:
    """Remove the triggers before a migration of this app: SQLite can't rebuild a table that another's trigger names."""
    from opsconsole.jobs import sql  # models must be loaded first

    if any(migration.app_label == "ops_jobs" for migration, _rolled_back in plan):
        sql.drop_triggers(connections[using])


def keep_totals(using: str = DEFAULT_DB_ALIAS, **_: Any) -> None:
    """Install the triggers again after a migration: SQLite drops them whenever a column changes."""
    from opsconsole.jobs import sql  # models must be loaded first

    sql.install_triggers(connections[using])
