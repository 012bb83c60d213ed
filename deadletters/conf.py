"""The settings of this product as typed values, read once per process."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, Error, connections
from django.utils.module_loading import import_string

from deadletters.grouping import GroupingMode
from deadletters.journal.folder import ChosenRoot, JournalRoot, choose_root
from deadletters.policy import PolicyBook, TaskPolicySpec
from opsconsole.core.effects import Effects
from opsconsole.core.redaction import DEFAULT_PATTERNS, Redactor
from opsconsole.core.sealing import Sealer
from opsconsole.jobs.errors import SAFE_ERRORS
from opsconsole.jobs.kinds import kinds

Identity = Callable[[str, Any, Any, Any], tuple[str, str, str]]


def source() -> str:
    """Return the name under which this project's workers record: environment, service, broker."""
    name = str(getattr(settings, "OPSCONSOLE_SOURCE", "default"))
    if not 1 <= len(name) <= 100 or "\x00" in name:
        raise ImproperlyConfigured("OPSCONSOLE_SOURCE has 1 to 100 characters")
    return name


def release() -> str:
    """Return the release of the running code, "" if nobody says."""
    return str(getattr(settings, "OPSCONSOLE_RELEASE", "") or os.environ.get("OPSCONSOLE_RELEASE", ""))[:100]


@lru_cache(maxsize=1)
def sealer() -> Sealer:
    """Return what seals messages; raises ``ImproperlyConfigured`` for keys that are none."""
    try:
        return Sealer.from_settings(getattr(settings, "OPSCONSOLE_KEYS", ""), settings.SECRET_KEY)
    except ValueError as error:
        raise ImproperlyConfigured(f"OPSCONSOLE_KEYS: {error}") from error


@lru_cache(maxsize=1)
def redactor() -> Redactor:
    """Return what takes secrets out of readable columns: the defaults and OPSCONSOLE_REDACT's names."""
    extra = getattr(settings, "OPSCONSOLE_REDACT", ())
    return Redactor((*DEFAULT_PATTERNS, *extra))


@lru_cache(maxsize=1)
def identity() -> Identity | None:
    """Return the project's function from a message to (tenant, actor type, actor id), if it has one."""
    path = getattr(settings, "OPSCONSOLE_IDENTITY", None)
    if not path:
        return None
    found: Identity = import_string(path) if isinstance(path, str) else path
    return found


def kept_seconds() -> float:
    """Return how long a copy of a recorded failure is kept on the worker's disk, for a replay."""
    return float(getattr(settings, "OPSCONSOLE_KEEP_JOURNAL_HOURS", 24)) * 3_600


def journal_root() -> ChosenRoot:
    """Return where this installation's journals lie: below the configured or default folder, a folder of its own.

    Two projects of one user share the default folder, and a worker recovers what it finds: it must never record the
    jobs of another project in its own database.
    """
    chosen = choose_root(getattr(settings, "OPSCONSOLE_JOURNAL_DIR", None))
    return replace(chosen, root=JournalRoot(chosen.root.path / installation()))


def installation() -> str:
    """Return a short name for the database that this process records in."""
    known = connections[DEFAULT_DB_ALIAS].settings_dict
    parts = [str(known.get(name) or "") for name in ("ENGINE", "HOST", "PORT", "NAME")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def grouping_mode() -> GroupingMode:
    """Return INCIDENT_GROUPING; it decides about new letters only."""
    try:
        return GroupingMode(getattr(settings, "INCIDENT_GROUPING", "cause"))
    except ValueError as error:
        raise ImproperlyConfigured("INCIDENT_GROUPING is 'cause' or 'job'") from error


def search_index() -> bool:
    """Say whether letters and incidents are to have an index of their words; ``migrate`` makes or removes it."""
    return bool(getattr(settings, "OPSCONSOLE_SEARCH_INDEX", True))


def settings_digest() -> str:
    """Return a short hash of what worker and web must agree on; secrets are in it only as hashes."""
    parts = (settings.SECRET_KEY, str(getattr(settings, "OPSCONSOLE_KEYS", "")), grouping_mode().value)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


OWN_TASK = "opsconsole.reconcile"
"""The task that runs the sweeps, which an app above this one brings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    book: PolicyBook
    at: float


class Policies:
    """The declared policies: OPSCONSOLE_TASK_POLICIES and the table; the table wins, and is read every ten seconds."""

    def __init__(self, load_rows: Callable[[], list[TaskPolicySpec]], max_age_seconds: float = 10.0) -> None:
        self._load_rows = load_rows
        self._max_age = max_age_seconds
        self._loaded: _Loaded | None = None
        self._lock = threading.Lock()

    def book(self) -> PolicyBook:
        """Return the current policies; a database that is down leaves the last known ones."""
        loaded = self._loaded
        if loaded is None or time.monotonic() - loaded.at > self._max_age:
            with self._lock:
                rows = {spec.pattern: spec for spec in (*own_policies(), *kind_policies(), *declared_policies())}
                try:
                    rows.update({spec.pattern: spec for spec in self._load_rows()})
                except Error:
                    if loaded is None:
                        raise
                    return loaded.book
                loaded = self._loaded = _Loaded(book=PolicyBook(list(rows.values())), at=time.monotonic())
        return loaded.book


def own_policies() -> list[TaskPolicySpec]:
    """Return what is known about our own task: a sweep looks at what there is, so it may always run again."""
    return [TaskPolicySpec(pattern=OWN_TASK, effects=Effects.NONE, runbook=published("docs/reconciliation.md"))]


def published(runbook: str) -> str:
    """Return where a page of the docs folder is to be read: below OPSCONSOLE_DOCS_URL, if there is one."""
    url = str(getattr(settings, "OPSCONSOLE_DOCS_URL", ""))
    if url and not url.startswith(("https://", "http://")):
        raise ImproperlyConfigured("OPSCONSOLE_DOCS_URL is an http or https address")
    return f"{url.rstrip('/')}/{runbook.removeprefix('docs/')}" if url and runbook.startswith("docs/") else runbook


def kind_policies() -> list[TaskPolicySpec]:
    """Return what the kinds of the job ledger say of themselves; a declared policy of the same name goes before."""
    return [
        TaskPolicySpec(
            pattern=kind.name,
            team=kind.team,
            severity=kind.severity,
            runbook=published(kind.runbook),
            effects=kind.effects,
            safe_errors=SAFE_ERRORS,
        )
        for kind in kinds().values()
    ]


def declared_policies() -> list[TaskPolicySpec]:
    """Return the policies of OPSCONSOLE_TASK_POLICIES; raises ``ImproperlyConfigured`` naming the wrong one."""
    declared = []
    for entry in getattr(settings, "OPSCONSOLE_TASK_POLICIES", ()):
        try:
            declared.append(entry if isinstance(entry, TaskPolicySpec) else TaskPolicySpec(**entry))
        except (TypeError, ValueError) as error:
            raise ImproperlyConfigured(f"OPSCONSOLE_TASK_POLICIES: {entry!r}: {error}") from error
    return declared
