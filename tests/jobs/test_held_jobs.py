"""Jobs of the ledger on hold: not dispatched, and given back if they were; each runs when nothing holds it any more."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from deadletters.holds import ledger_jobs_on_hold, payload_hash_of
from deadletters.journal.events import Ended, EndState
from deadletters.journal.holds import payload_hash
from deadletters.models import DeadLetter, Hold, TaskMinute
from deadletters.services import HoldTarget, end_hold
from opsconsole.core.clock import boot_now, wall_now
from opsconsole.core.database import database_now
from opsconsole.jobs import ledger
from opsconsole.jobs.errors import Refused
from opsconsole.jobs.models import Job, JobState
from repairs.services import retry_letter
from tests import factories
from tests.cast import Cast
from tests.deadletters.test_drain import batch, drain
from tests.deadletters.test_holds import place
from tests.jobs.kinds_of_tests import BODIES
from tests.jobs.steps import dispatch, letter_of, new_job, run

pytestmark = pytest.mark.django_db


def taken() -> list[Any]:
    held = ledger_jobs_on_hold("default")
    return [one.job_id for one in ledger.take_due(source="default", owner="one", limit=10, held=held)]


def hold(cast: Cast, **target: str) -> Hold:
    return place(cast.ada, HoldTarget(**{"tenant": "default", **target}), key=str(uuid4()))


@pytest.mark.parametrize("part", ["job_type", "queue", "task_id"])
def test_a_job_on_hold_is_not_dispatched_until_the_hold_ends(cast: Cast, part: str) -> None:
    """C14: by kind, queue or job; what does not match goes on."""
    job = new_job()
    Job.objects.filter(id=job.id).update(queue="held")
    other = new_job(tenant="t-b")
    named = {"job_type": "opsconsole.jobs.test_plain", "queue": "held", "task_id": str(job.id)}
    placed = hold(cast, **{part: named[part]})
    assert taken() == [other.id]
    assert taken() == []
    end_hold(hold_id=placed.id, reason="over", by=cast.ada, key="e")
    assert taken() == [job.id]


def test_a_hold_of_another_source_or_past_its_end_holds_nothing(cast: Cast) -> None:
    job = new_job()
    hold(cast, source="another", job_type="test_plain")
    past = hold(cast, job_type="test_plain")
    Hold.objects.filter(id=past.id).update(ends_at=database_now() - timedelta(seconds=1))
    assert ledger_jobs_on_hold("default") is None
    assert taken() == [job.id]


def test_a_payload_on_hold_is_that_payload_alone(cast: Cast) -> None:
    """What a letter of such a job says of its payload holds the jobs that are like it."""

    def refuse(_work: Any) -> None:
        raise Refused("no", "never")

    first = new_job(payload={"number": 1}, body=refuse)
    run(first, dispatch(first))
    named = payload_hash_of(letter_of(first))
    assert named is not None
    alike, other = new_job(payload={"number": 1}), new_job(payload={"number": 2})
    hold(cast, job_type="test_plain", payload_hash=named)
    assert taken() == [other.id]
    assert Job.objects.get(id=alike.id).state == JobState.PENDING


def test_a_job_that_was_sent_goes_back_and_has_not_been_tried(cast: Cast) -> None:
    """C14: its message met the hold before it was claimed; no letter, no attempt, and due when nothing holds it."""
    job = new_job()
    token = dispatch(job)
    placed = hold(cast, job_type="test_plain")
    back = Ended(
        delivery=factories.delivery(task_id=token, task=job.kind), state=EndState.HELD_BACK, at_boot=boot_now(),
        at_wall=wall_now(),
    )  # fmt: skip
    drain().apply(batch(back, received=(back.delivery,)))
    job.refresh_from_db()
    assert (job.state, job.attempts) == (JobState.PENDING, 0)
    assert not DeadLetter.objects.exists()
    row = TaskMinute.objects.get()
    assert (row.received, row.held) == (1, 1)
    assert taken() == []
    end_hold(hold_id=placed.id, reason="over", by=cast.ada, key="e")
    assert taken() == [job.id]


def test_a_job_that_an_operator_has_put_back_passes(cast: Cast) -> None:
    """C5: its retry was asked for while the hold was there; so its message says whose it is."""

    def refuse(_work: Any) -> None:
        raise Refused("no", "never")

    job = new_job(body=refuse)
    run(job, dispatch(job))
    hold(cast, job_type="test_plain")
    retry_letter(letter_id=letter_of(job).id, by=cast.ada, key="r")
    BODIES.clear()
    held = ledger_jobs_on_hold("default")
    (one,) = ledger.take_due(source="default", owner="one", limit=10, held=held)
    assert (one.job_id, one.repair_id is not None) == (job.id, True)


def test_a_payload_is_held_however_many_that_are_alike_wait_already(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that wait on hold must not use up the jobs that are compared."""
    monkeypatch.setattr("deadletters.holds.COMPARED_PAYLOADS", 2)
    for number in (1, 1, 1, 2):
        last = new_job(payload={"number": number})
    hold(cast, job_type="test_plain", payload_hash=payload_hash([], {"number": 1}))
    assert taken() == [last.id]
    assert taken() == []
