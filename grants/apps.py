"""The grants app: operators, what they may do, and the record of what was done."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.db import DEFAULT_DB_ALIAS, connections
from django.db.models.signals import post_migrate


class GrantsConfig(AppConfig):
    name = "grants"
    label = "ops_grants"
    verbose_name = "Operators and audit"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the system checks, and keep the audit triggers installed."""
        from grants import checks  # noqa: F401 - importing registers them; models must be loaded first

        post_migrate.connect(protect_audit_trail, sender=self)


def protect_audit_trail(using: str = DEFAULT_DB_ALIAS, **_: Any) -> None:
    """Install the triggers again after a migration: SQLite drops them whenever a column changes."""
    from grants import sql  # models must be loaded first

    sql.install_triggers(connections[using])
