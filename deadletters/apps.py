"""The dead letters app: capture, recording, letters."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.db import DEFAULT_DB_ALIAS, connections
from django.db.models.signals import post_migrate


class DeadlettersConfig(AppConfig):
    name = "deadletters"
    label = "ops_deadletters"
    verbose_name = "Failed jobs"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the system checks, and keep the search indexes as the settings want them."""
        from deadletters import checks  # noqa: F401 - importing registers them; models must be loaded first

        post_migrate.connect(keep_search_indexes, sender=self)


def keep_search_indexes(using: str = DEFAULT_DB_ALIAS, **_: Any) -> None:
    """Make or remove the indexes of words after a migration: SQLite drops their triggers whenever a column changes."""
    from deadletters import conf, search  # models must be loaded first

    search.install(connections[using], wanted=conf.search_index())
