"""What ``manage.py check`` says about a project in which grants and audit would not hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, register
from django.db import DEFAULT_DB_ALIAS, connections, router

from grants import sql


@register(Tags.compatibility)
def check_time_zones(**_: Any) -> list[CheckMessage]:
    """Refuse ``USE_TZ = False``."""
    if settings.USE_TZ:
        return []
    return [
        Error(
            "opsconsole needs USE_TZ = True.",
            hint="Expiry, leases and the audit trail compare aware times in UTC; local times repeat an hour in autumn.",
            id="ops_grants.E001",
        )
    ]


@register(Tags.compatibility)
def check_database_routing(**_: Any) -> list[CheckMessage]:
    """Refuse a router that sends one of our apps to another database than ``default``."""
    elsewhere = sorted(
        {
            model._meta.app_label
            for config in apps.get_app_configs()
            if config.label.startswith("ops_")
            for model in config.get_models()
            if {router.db_for_read(model), router.db_for_write(model)} != {DEFAULT_DB_ALIAS}
        }
    )
    return [
        Error(
            f"A database router sends {label} to another database than 'default'.",
            hint="Not supported yet: a repair, its audit row and the grants it was checked by share a transaction.",
            id="ops_grants.E002",
        )
        for label in elsewhere
    ]


@register(Tags.database)
def check_audit_triggers(databases: Sequence[str] | None = None, **_: Any) -> list[CheckMessage]:
    """Report a migrated database on which audit rows could be changed."""
    if DEFAULT_DB_ALIAS not in (databases or ()):
        return []
    missing = sql.missing_triggers(connections[DEFAULT_DB_ALIAS])
    if not missing:
        return []
    return [
        Error(
            f"The audit trail is not protected: the triggers {', '.join(missing)} are missing or disabled.",
            hint="Find out who removed them, then run manage.py migrate --skip-checks, which installs them again.",
            id="ops_grants.E003",
        )
    ]
