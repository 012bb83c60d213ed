"""The sweep that writes down that the time of a hold is over."""

from __future__ import annotations

from datetime import timedelta

import pytest

from deadletters.models import Hold
from deadletters.services import expire_hold
from grants.models import AuditEvent
from opsconsole.core.database import database_now
from repairs.reconciliation.running import run_scheduled
from tests.cast import Cast
from tests.deadletters.test_holds import place

pytestmark = pytest.mark.django_db


def test_holds_expire_where_no_worker_lives_each_once(cast: Cast) -> None:
    """C9, C12: what it reports is what the database changed; a worker that was first leaves it nothing to do."""
    over = [place(cast.ada, key=str(number)) for number in range(3)]
    place(cast.ada, key="still")
    Hold.objects.filter(id__in=[hold.id for hold in over]).update(ends_at=database_now() - timedelta(seconds=1))
    assert expire_hold(hold_id=over[0].id)
    run = run_scheduled("expired_holds")
    assert run is not None
    assert (run.state, run.scanned_count, run.repaired_count) == ("succeeded", 2, 2)
    assert sorted(Hold.objects.values_list("state", flat=True)) == ["active", "expired", "expired", "expired"]
    assert AuditEvent.objects.filter(action="holds.expired").count() == 3
    again = run_scheduled("expired_holds")
    assert again is not None
    assert again.repaired_count == 0
