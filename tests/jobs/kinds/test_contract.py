"""What every kind with a record of its own does at each moment of its job, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from opsconsole.core.ids import new_id
from opsconsole.jobs.bases import RecordKind
from opsconsole.jobs.errors import Refused
from opsconsole.jobs.kind import overrides
from opsconsole.jobs.kinds import BUILT_IN, kind_named, kinds
from tests.jobs import records
from tests.jobs.records import LATER, NOW, columns, job, work

pytestmark = pytest.mark.django_db


@dataclass(frozen=True)
class Case:
    kind: str
    make: Callable[..., Any]
    pending: str
    in_flight: str
    retrying: str
    done: str
    failed: str
    due: str = "next_attempt_at"


CASES = [
    Case("fetch_evidence", records.evidence, "pending", "fetching", "pending", "available", "failed"),
    Case(
        "dispatch_workflow", records.dispatch, "pending", "leased", "failed", "delivered", "dead_letter", "available_at"
    ),
    Case("deliver_action", records.action, "pending", "delivering", "retrying", "delivered", "failed"),
    Case("deliver_notification", records.notification, "pending", "delivering", "retrying", "delivered", "failed"),
    Case("deliver_email", records.email, "pending", "delivering", "retrying", "delivered", "failed"),
    Case("apply_action_proposal", records.proposal, "queued", "applying", "retrying", "applied", "failed"),
]
every_record = pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)


def kind_of(case: Case) -> RecordKind:
    kind = kind_named(case.kind)
    assert isinstance(kind, RecordKind)
    return kind


def test_the_eight_kinds_are_registered() -> None:
    """A1."""
    names = [
        "route_report",
        "process_ai_report",
        "fetch_evidence",
        "dispatch_workflow",
        "deliver_action",
        "deliver_notification",
        "deliver_email",
        "apply_action_proposal",
    ]
    assert [path.rpartition(".")[2] for path in BUILT_IN] == names
    assert set(names) <= set(kinds())


@pytest.mark.parametrize("name", [path.rpartition(".")[2] for path in BUILT_IN])
def test_every_kind_marks_its_record_dead_and_knows_it(name: str) -> None:
    kind = kind_named(name)
    for hook in ("mark_dead", "record", "is_overtaken", "check", "cancel", "complete"):
        assert overrides(kind, hook), hook
    assert kind.record_type
    assert kind.__doc__


@every_record
def test_a_claimed_job_puts_its_record_in_flight(case: Case) -> None:
    record = case.make(last_error_code="http_503")
    claimed = job(case.kind, record, attempts=3)
    kind_of(case).begin(claimed, NOW)
    found = columns(record)
    assert (found["state"], found["attempt_count"], found["updated_at"]) == (case.in_flight, 3, NOW)
    if kind_of(case).has_lease:
        assert found["lease_expires_at"] == claimed.lease_expires_at


@every_record
def test_an_attempt_that_is_put_off_says_why_and_when_the_next_is_due(case: Case) -> None:
    record = case.make(state=case.in_flight, attempt_count=2)
    kind_of(case).put_off(job(case.kind, record), "http_503", NOW)
    found = columns(record)
    assert (found["state"], found["last_error_code"], found[case.due]) == (case.retrying, "http_503", LATER)
    assert found["attempt_count"] == 2
    assert found.get("lease_expires_at") is None


@every_record
def test_a_record_that_is_not_in_flight_is_neither_put_off_nor_released(case: Case) -> None:
    """A14: guarded again at the write."""
    for state in {case.pending, case.failed, case.done}:
        record = case.make(state=state)
        before = columns(record)
        kind_of(case).put_off(job(case.kind, record), "http_503", NOW + timedelta(hours=1))
        kind_of(case).release(job(case.kind, record), "lease_expired", NOW + timedelta(hours=1))
        assert columns(record) == before


@every_record
def test_a_released_record_is_due_at_once(case: Case) -> None:
    """A14."""
    record = case.make(state=case.in_flight)
    kind_of(case).release(job(case.kind, record), "lease_expired", NOW)
    found = columns(record)
    code = {
        "fetch_evidence": "stale_fetch_lease_recovered",
        "dispatch_workflow": "stale_dispatch_lease_recovered",
    }.get(case.kind, "lease_expired")
    assert (found["state"], found["last_error_code"], found[case.due]) == (case.retrying, code, NOW)
    assert found.get("lease_expires_at") is None


@every_record
def test_a_requeued_record_is_pending_due_now_and_without_a_trace_of_what_failed(case: Case) -> None:
    """A12."""
    lease = {"lease_expires_at": NOW} if kind_of(case).has_lease else {}
    record = case.make(state=case.failed, attempt_count=5, last_error_code="queue_retries_exhausted", **lease)
    kind_of(case).requeue(job(case.kind, record), LATER)
    found = columns(record)
    assert (found["state"], found["attempt_count"], found[case.due]) == (case.pending, 0, LATER)
    assert (found["last_error_code"], found.get("lease_expires_at")) == ("", None)


@every_record
def test_finished_work_is_not_touched_by_any_hook(case: Case) -> None:
    """A6, A12, C5."""
    record = case.make(state=case.done)
    before = columns(record)
    of, late = job(case.kind, record), NOW + timedelta(hours=1)
    kind = kind_of(case)
    kind.begin(of, late)
    kind.put_off(of, "http_503", late)
    kind.release(of, "lease_expired", late)
    kind.mark_dead(of, records.EXHAUSTED, late)
    kind.requeue(of, late)
    kind.cancel(of, late)
    kind.complete(of, None, late)
    assert columns(record) == before


@every_record
def test_a_retry_is_overtaken_by_work_that_was_finished_otherwise(case: Case) -> None:
    """C5."""
    assert kind_of(case).is_overtaken(job(case.kind, case.make(state=case.done))) == case.done
    for state in {case.pending, case.in_flight, case.retrying, case.failed}:
        assert kind_of(case).is_overtaken(job(case.kind, case.make(state=state))) == ""


@every_record
def test_a_record_whose_job_was_withdrawn_has_failed_and_says_so(case: Case) -> None:
    record = case.make(state=case.pending)
    kind_of(case).cancel(job(case.kind, record), NOW)
    found = columns(record)
    assert (found["state"], found["last_error_code"]) == (case.failed, "cancelled")


@every_record
def test_the_record_of_a_job_is_named_with_its_state(case: Case) -> None:
    record = case.make(state=case.failed, attempt_count=4, last_error_code="http_503")
    found = kind_of(case).record(job(case.kind, record))
    assert found is not None
    assert (found.record_id, found.state) == (str(record.id), case.failed)
    assert found.record_type == kind_of(case).record_type
    assert (found.detail["attempt_count"], found.detail["last_error_code"]) == (4, "http_503")


@every_record
def test_a_job_of_another_tenant_never_reaches_the_record(case: Case) -> None:
    record = case.make(state=case.in_flight)
    before = columns(record)
    foreign = job(case.kind, record, tenant="meadow")
    kind = kind_of(case)
    for hook in (kind.begin, kind.requeue, kind.cancel):
        hook(foreign, LATER)
    kind.put_off(foreign, "http_503", LATER)
    kind.release(foreign, "lease_expired", LATER)
    kind.mark_dead(foreign, records.EXHAUSTED, LATER)
    kind.complete(foreign, None, LATER)
    assert columns(record) == before
    assert kind.record(foreign) is None
    with pytest.raises(Refused) as caught:
        kind.run(work(foreign))
    assert caught.value.code == "record_missing"


HOSTILE_IDS = ["", "no-id", "' OR 1=1 --", "\x00", "9" * 200, "{}", str(new_id())]


@every_record
@pytest.mark.parametrize("record_id", HOSTILE_IDS)
def test_a_job_without_a_record_does_nothing_and_says_so(case: Case, record_id: str) -> None:
    if "\x00" in record_id:
        of = job(case.kind)  # no database keeps it; it can come with a message all the same
        of.record_id = record_id
    else:
        of = job(case.kind, record_id=record_id)
    kind = kind_of(case)
    kind.begin(of, NOW)
    kind.put_off(of, "http_503", NOW)
    kind.release(of, "lease_expired", NOW)
    kind.mark_dead(of, records.EXHAUSTED, NOW)
    kind.requeue(of, NOW)
    assert kind.record(of) is None
    assert kind.is_overtaken(of) == ""
    with pytest.raises(Refused) as caught:
        kind.run(work(of))
    assert caught.value.code == "record_missing"


@pytest.mark.parametrize("name", [path.rpartition(".")[2] for path in BUILT_IN])
@pytest.mark.parametrize("value", [None, 7, "", "no-id", ["x"], {"a": 1}, "\x00", True])
def test_a_payload_that_names_no_record_does_not_fit(name: str, value: Any) -> None:
    kind = kind_named(name)
    good = records.payload_for(name, None)
    kind.check(good)
    for field in good:
        with pytest.raises(ValueError, match=f"^{field} is the id of a record"):
            kind.check({**good, field: value})
        with pytest.raises(ValueError, match=f"^{field} is the id of a record"):
            kind.check({key: kept for key, kept in good.items() if key != field})


@every_record
def test_work_that_is_done_already_is_not_done_again(case: Case) -> None:
    """The endpoints of these records are a closed port: asking it would be an error."""
    assert kind_named(case.kind).run(work(job(case.kind, case.make(state=case.done)))) is None
