"""Commands of the console's own project, which a project that attaches finds in its list as well."""

from __future__ import annotations

from django.conf import settings
from django.core.management.base import CommandError


def refuse_other_projects() -> None:
    """Raise ``CommandError`` in a project that is not the console's own."""
    if settings.ROOT_URLCONF != "opsconsole.urls":
        raise CommandError(
            "This starts the console's own project with its demo. A project that attaches the console has web and "
            "workers of its own, and those are all it needs."
        )
