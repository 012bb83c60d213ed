"""The sweep that counts the snapshot's streams again (A7, A13, C9)."""

from __future__ import annotations

import json

import pytest

from grants.models import AuditEvent
from opsconsole.jobs.models import Stream, StreamTotal
from repairs.models import SweepActionType, SweepRepair
from repairs.reconciliation.running import run_now
from tests.cast import Cast
from tests.jobs import records
from tests.repairs.reconciliation.rows import counts, sweep

pytestmark = pytest.mark.django_db


def break_totals() -> None:
    """Leave one total too high, one too low, and one of what is not there."""
    records.email()
    records.action()
    records.action(state="failed")
    StreamTotal.objects.filter(stream=Stream.ACTIONS, state="pending").update(count=7)
    StreamTotal.objects.filter(stream=Stream.EMAILS).delete()
    StreamTotal.objects.create(tenant="ghost", stream=Stream.EVIDENCE, state="failed", count=3)


def test_true_totals_are_counted_and_left_alone() -> None:
    """C9."""
    records.email()
    records.evidence()
    assert counts(sweep("stream_totals")) == (2, 0, 0)
    assert not SweepRepair.objects.exists()


def test_a_broken_total_is_put_right_with_a_record_of_it() -> None:
    """A7, A13, C9: counts are what was changed, each change has before and after."""
    break_totals()
    run = sweep("stream_totals")
    assert (run.state, counts(run)) == ("succeeded", (4, 3, 0))
    found = {
        (row.tenant, row.entity_id): (json.loads(row.before)["count"], json.loads(row.after)["count"])
        for row in SweepRepair.objects.filter(run=run, action_type=SweepActionType.CORRECT_TOTAL)
    }
    assert found == {
        ("harbour", "actions:pending"): (7, 1),
        ("harbour", "emails:pending"): (0, 1),
        ("ghost", "evidence:failed"): (3, 0),
    }
    assert AuditEvent.objects.filter(action="operations.reconciliation_finished").count() == 1
    assert counts(sweep("stream_totals")) == (3, 0, 0)


def test_a_total_that_breaks_again_is_put_right_again() -> None:
    records.email()
    for _ in range(2):
        StreamTotal.objects.update(count=9)
        assert sweep("stream_totals").repaired_count == 1
    assert SweepRepair.objects.count() == 2


def test_a_person_may_have_it_counted(cast: Cast) -> None:
    """A13: with a limit it stops between two streams, and its counts are true of those it came to."""
    break_totals()
    run = run_now(kind="stream_totals", by=cast.ada, key="k", limit=2).run
    assert counts(run) == (2, 1, 0), "the two totals of actions"
    assert counts(run_now(kind="stream_totals", by=cast.ada, key="k2").run) == (4, 2, 0)
