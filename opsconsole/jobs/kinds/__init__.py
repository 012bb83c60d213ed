"""The kinds of jobs that this installation knows, by name.

``BUILT_IN`` has one line for each file beside this one; a project names the modules of its own kinds in
``OPSCONSOLE_JOB_KINDS``. A module holds one kind as ``KIND``.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import import_module

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from opsconsole.jobs.errors import JobKindUnknown
from opsconsole.jobs.kind import Kind

BUILT_IN: tuple[str, ...] = (
    "opsconsole.jobs.kinds.route_report",
    "opsconsole.jobs.kinds.process_ai_report",
    "opsconsole.jobs.kinds.fetch_evidence",
    "opsconsole.jobs.kinds.dispatch_workflow",
    "opsconsole.jobs.kinds.deliver_action",
    "opsconsole.jobs.kinds.deliver_notification",
    "opsconsole.jobs.kinds.deliver_email",
    "opsconsole.jobs.kinds.apply_action_proposal",
)
NAME = re.compile(r"[a-z][a-z0-9_]{1,63}", re.ASCII)


@lru_cache(maxsize=1)
def kinds() -> dict[str, Kind]:
    """Return every registered kind by its name; raises ``ImproperlyConfigured`` naming the module that is wrong."""
    found: dict[str, Kind] = {}
    for path in (*BUILT_IN, *getattr(settings, "OPSCONSOLE_JOB_KINDS", ())):
        try:
            kind = import_module(path).KIND
        except (ImportError, AttributeError) as error:
            raise ImproperlyConfigured(f"the job kind {path}: {error}") from error
        if not isinstance(kind, Kind) or NAME.fullmatch(kind.name) is None or kind.name == "invalid":
            raise ImproperlyConfigured(f"the job kind {path}: KIND is a Kind with a name such as send_invoice")
        if kind.name in found:
            raise ImproperlyConfigured(f"the job kind {path}: {kind.name} is taken")
        found[kind.name] = kind
    return found


def kind_named(name: str) -> Kind:
    """Return the kind; raises ``JobKindUnknown``."""
    try:
        return kinds()[name]
    except KeyError:
        raise JobKindUnknown(kind=name[:64]) from None
