"""The schedule of sweeps: made once, changed by people, kept as they left it; and the banner that none runs."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings
from django_celery_beat.models import CrontabSchedule, PeriodicTask

from grants.errors import AccessDenied, IdempotencyKeyReused
from grants.models import AuditEvent
from opsconsole.core.database import database_now
from repairs.apps import fill_schedule
from repairs.errors import ScheduleInvalid, ScheduleNotFound
from repairs.models import SeededEntry
from repairs.reconciliation.kinds import KINDS
from repairs.reconciliation.schedule import CHANGED, TASK, change_schedule, entry_name, planned_sweeps
from repairs.reconciliation.watch import is_overdue, read_watch
from tests.cast import Cast
from tests.repairs.reconciliation.rows import ago, sweep

pytestmark = pytest.mark.django_db

NAME = "opsconsole: stale leases"


def entry(name: str = NAME) -> Any:
    return PeriodicTask.objects.select_related("interval").get(name=name)


def test_a_migration_makes_one_entry_for_each_sweep() -> None:
    rows = PeriodicTask.objects.filter(task=TASK)
    assert {row.name for row in rows} == {entry_name(kind) for kind in KINDS.values()}
    one = entry()
    assert (one.args, one.queue, one.enabled) == ('["stale_leases"]', settings.OPSCONSOLE_QUEUE, True)
    assert (one.interval.every, one.interval.period) == (30, "seconds")
    assert one.expire_seconds == 60, "what waited too long for a worker is not run after those that came later"


def test_what_was_changed_stays_changed_and_what_was_deleted_stays_deleted() -> None:
    entry("opsconsole: retention").delete()
    PeriodicTask.objects.filter(name=NAME).update(enabled=False, queue="elsewhere")
    fill_schedule()
    fill_schedule()
    assert not PeriodicTask.objects.filter(name="opsconsole: retention").exists()
    assert (entry().enabled, entry().queue) == (False, "elsewhere")
    assert PeriodicTask.objects.filter(task=TASK).count() == len(KINDS) - 1


def test_an_entry_of_a_new_release_is_made_beside_those_that_are_there() -> None:
    PeriodicTask.objects.filter(name=NAME).delete()
    SeededEntry._default_manager.filter(name=NAME).delete()
    fill_schedule()
    assert entry().enabled


def test_the_loop_goes_by_the_schedule_as_it_is_now(cast: Cast) -> None:
    entry("opsconsole: retention").delete()
    change_schedule(entry_id=entry().pk, by=cast.ada, key="k", seconds=45, is_on=False)
    crontab = CrontabSchedule.objects.create(minute="5")
    PeriodicTask.objects.filter(name="opsconsole: undelivered jobs").update(interval=None, crontab=crontab)
    found = {one.kind: one for one in planned_sweeps()}
    assert "retention" not in found
    assert (found["stale_leases"].every, found["stale_leases"].is_on) == (timedelta(seconds=45), False)
    assert found["undelivered_dispatches"].every is None
    assert found["closed_letters"].every == timedelta(minutes=1)


def test_who_may_run_sweeps_changes_when_they_run(cast: Cast) -> None:
    """B3: audited with before and after; the same key answers again."""
    done = change_schedule(entry_id=entry().pk, by=cast.ada, key="k", seconds=120, is_on=True)
    assert (done.name, done.every_seconds, done.is_on) == (NAME, 120, True)
    assert (entry().interval.every, entry().expire_seconds) == (120, 240)
    event = AuditEvent.objects.get(action=CHANGED)
    outcome = json.loads(event.outcome)
    assert (outcome["before"], outcome["seconds"]) == ({"on": True, "seconds": 30}, 120)
    assert "reconciliation.run" in event.capability
    assert change_schedule(entry_id=entry().pk, by=cast.ada, key="k", seconds=120, is_on=True).idempotent_replay
    with pytest.raises(IdempotencyKeyReused):
        change_schedule(entry_id=entry().pk, by=cast.ada, key="k", seconds=60, is_on=True)
    assert AuditEvent.objects.filter(action=CHANGED).count() == 1


def test_others_change_nothing(cast: Cast) -> None:
    with pytest.raises(AccessDenied):
        change_schedule(entry_id=entry().pk, by=cast.olga, key="k", seconds=120, is_on=False)
    assert (entry().interval.every, entry().enabled) == (30, True)


def test_an_entry_of_somebody_else_is_changed_where_it_was_made(cast: Cast) -> None:
    foreign = PeriodicTask.objects.create(name="theirs", task="shop.sweep", interval=entry().interval)
    pretended = PeriodicTask.objects.create(name="odd", task=TASK, args='["nothing"]', interval=entry().interval)
    for pk in (foreign.pk, pretended.pk, 999_999):
        with pytest.raises(ScheduleNotFound):
            change_schedule(entry_id=pk, by=cast.ada, key="k", seconds=120, is_on=True)


@pytest.mark.parametrize("seconds", [9, 0, -1, 86_401])
def test_a_sweep_runs_every_ten_seconds_to_once_a_day(seconds: int, cast: Cast) -> None:
    with pytest.raises(ScheduleInvalid):
        change_schedule(entry_id=entry().pk, by=cast.ada, key="k", seconds=seconds, is_on=True)


# The banner


@pytest.mark.parametrize(
    ("finished", "begun", "overdue"),
    [
        (299, 9_999, False),
        (301, 9_999, True),
        (301, 0, True),
        (None, 299, False),
        (None, 301, True),
        (None, None, True),
    ],
)
def test_sweeps_are_overdue_after_five_minutes(finished: int | None, begun: int | None, overdue: bool) -> None:
    now = database_now()

    def at(seconds: int | None) -> Any:
        return None if seconds is None else now - timedelta(seconds=seconds)

    assert is_overdue(at(finished), at(begun), now) is overdue


def test_a_new_schedule_has_five_minutes_for_its_first_sweep() -> None:
    SeededEntry._default_manager.update(created_at=ago(299))
    assert read_watch().is_overdue is False
    SeededEntry._default_manager.update(created_at=ago(301))
    assert read_watch().is_overdue is True
    run = sweep("retention")
    assert (read_watch().finished_at, read_watch().is_overdue) == (run.finished_at, False)
