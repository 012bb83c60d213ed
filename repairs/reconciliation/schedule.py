"""When sweeps run: entries of celery beat that are made once, and changed only by people afterwards.

``beat_schedule`` in the settings would write its entries again at each start of beat, and undo every change. So a
migration makes each entry the first time it finds none of its name in ``SeededEntry``, and never touches it again:
what was changed stays changed, and what was deleted stays deleted. Where celery beat is not installed there are no
entries, and ``manage.py reconcile --loop`` runs the sweeps at their usual times.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.apps import apps
from django.conf import settings
from django.db import connections, transaction

from grants import audit
from grants.access import authorise
from grants.actions import Action
from grants.operators import Operator
from grants.resources import ANY, Resource
from grants.service import service
from opsconsole.core.canonical_json import JsonValue
from opsconsole.core.database import database_now, locked
from repairs.errors import ScheduleInvalid, ScheduleNotFound
from repairs.models import SeededEntry
from repairs.reconciliation.kinds import KINDS, SweepKind

TASK = "opsconsole.reconcile"
CHANGED = "operations.reconciliation_schedule_changed"
LEAST_SECONDS = 10
MOST_SECONDS = 86_400
BEAT = "django_celery_beat"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """When one kind of sweep runs; ``every`` is ``None`` for an entry that was given another form, say a crontab."""

    kind: str
    every: timedelta | None
    is_on: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleMutation:
    """What a request has made of an entry, or, as a replay, what the first one of its key made of it."""

    name: str
    every_seconds: int
    is_on: bool
    idempotent_replay: bool = False


def has_beat() -> bool:
    """Say whether celery beat keeps its schedule in this database."""
    return apps.is_installed(BEAT)


def entry_name(kind: SweepKind) -> str:
    """Return the name under which the schedule has a sweep."""
    return f"opsconsole: {kind.title.lower()}"


def seed_schedule(using: str) -> None:
    """Make the entries that were never made, after a migration; one that was deleted is not made again."""
    tables = connections[using].introspection.table_names()
    if not has_beat() or not {_entries().model._meta.db_table, SeededEntry._meta.db_table} <= set(tables):
        return
    with transaction.atomic(using=using):
        known = set(SeededEntry._default_manager.using(using).values_list("name", flat=True))
        now = database_now(using)
        for kind in KINDS.values():
            if entry_name(kind) not in known:
                _make_entry(kind, using)
                SeededEntry._default_manager.using(using).create(name=entry_name(kind), created_at=now)


def _make_entry(kind: SweepKind, using: str) -> None:
    seconds = int(kind.every.total_seconds())
    _entries().using(using).get_or_create(
        name=entry_name(kind),
        defaults={
            "task": TASK,
            "args": json.dumps([kind.name]),
            "interval": _interval(seconds, using),
            "queue": str(getattr(settings, "OPSCONSOLE_QUEUE", "opsconsole")),
            # What waited for a worker for so long has been overtaken by those that came after it.
            "expire_seconds": max(2 * seconds, 60),
            "description": kind.about[:200],
        },
    )


def _interval(seconds: int, using: str = "default") -> Any:
    intervals: Any = apps.get_model(BEAT, "IntervalSchedule")._default_manager
    return intervals.using(using).get_or_create(every=seconds, period="seconds")[0]


def _entries() -> Any:
    return apps.get_model(BEAT, "PeriodicTask")._default_manager


def kind_of_entry(entry: Any) -> str:
    """Return the kind that an entry of the schedule sweeps, "" if it is none of ours."""
    if entry.task != TASK:
        return ""
    try:
        (kind,) = json.loads(entry.args or "[]")
    except (ValueError, TypeError):
        return ""
    return kind if isinstance(kind, str) and kind in KINDS else ""


def planned_sweeps() -> list[Planned]:
    """Return when each kind runs, as the schedule has it now; the usual times where there is no schedule."""
    if not has_beat():
        return [Planned(kind=kind.name, every=kind.every, is_on=True) for kind in KINDS.values()]
    found: dict[str, Planned] = {}
    for entry in _entries().filter(task=TASK).select_related("interval").order_by("id"):
        if kind := kind_of_entry(entry):
            found[kind] = Planned(kind=kind, every=_every(entry), is_on=entry.enabled)
    return list(found.values())


def _every(entry: Any) -> timedelta | None:
    if entry.interval is None:
        return None
    return timedelta(**{entry.interval.period: entry.interval.every})


def every_seconds(entry: Any) -> int | None:
    """Return an entry's interval in seconds, ``None`` if it has none."""
    every = _every(entry)
    return None if every is None else max(int(every.total_seconds()), 1)


@service
def change_schedule(*, entry_id: int, by: Operator, key: str, seconds: int, is_on: bool) -> ScheduleMutation:
    """Let one of the console's own entries run every ``seconds`` (10 to 86,400), or not at all.

    Takes ``reconciliation.run`` for every tenant. Locks the entry; beat notices within seconds. Raises
    ``AccessDenied``, ``ScheduleNotFound``, ``ScheduleInvalid`` or ``IdempotencyKeyReused``.
    """
    scope = Resource(tenant=ANY, target_type="schedule", target_id=str(entry_id))
    capability = authorise(by, Action.RECONCILIATION_RUN, scope)
    entry = locked(_entries().filter(id=entry_id)).first() if has_beat() else None
    if entry is None or not kind_of_entry(entry):
        raise ScheduleNotFound
    digest = audit.request_digest({"seconds": seconds, "on": is_on})
    receipt = audit.replayed(
        key=key, action=CHANGED, operator=by, target_type="schedule", target_id=str(entry_id), digest=digest
    )
    if receipt is not None:
        stored: Mapping[str, Any] = json.loads(receipt.outcome)
        return ScheduleMutation(
            name=stored["name"], every_seconds=stored["seconds"], is_on=stored["on"], idempotent_replay=True
        )
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise ScheduleInvalid(least=LEAST_SECONDS, most=f"{MOST_SECONDS:,}")
    before: dict[str, JsonValue] = {"on": bool(entry.enabled), "seconds": every_seconds(entry)}
    entry.interval, entry.enabled, entry.expire_seconds = _interval(seconds), is_on, max(2 * seconds, 60)
    entry.crontab = entry.solar = entry.clocked = None
    # The whole row: what beat compares to see that something has changed is written by the model's own save.
    entry.save()
    audit.record(
        action=CHANGED,
        operator=by,
        resource=scope,
        capability=capability,
        outcome={"before": before, "kind": kind_of_entry(entry), "name": entry.name, "on": is_on, "seconds": seconds},
        key=key,
        digest=digest,
    )
    return ScheduleMutation(name=entry.name, every_seconds=seconds, is_on=is_on)
