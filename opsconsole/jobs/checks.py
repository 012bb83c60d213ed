"""What ``manage.py check`` says about a database on which the totals of streams would not be true."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core.checks import CheckMessage, Error, Tags, register
from django.db import DEFAULT_DB_ALIAS, connections

from opsconsole.jobs import sql


@register(Tags.database)
def check_total_triggers(databases: Sequence[str] | None = None, **_: Any) -> list[CheckMessage]:
    """Report a migrated database on which records are added without being counted."""
    if DEFAULT_DB_ALIAS not in (databases or ()):
        return []
    missing = sql.missing_triggers(connections[DEFAULT_DB_ALIAS])
    if not missing:
        return []
    return [
        Error(
            f"The totals of the job records are not kept: the triggers {', '.join(missing)} are missing or disabled.",
            hint="Run manage.py migrate --skip-checks, which installs them again and counts what is there.",
            id="ops_jobs.E001",
        )
    ]
