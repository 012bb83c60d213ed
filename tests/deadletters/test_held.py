"""What becomes of a message that a hold has put aside: read from the journal, recorded, counted, and heard of again."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from deadletters.holds import held_letters, incidents_of_hold
from deadletters.journal.events import Caught, Ended, EndState, ErrorReport, Failed, MessageState
from deadletters.journal.frames import Kind, report_part
from deadletters.journal.holds import HoldBook, HoldRule, Message, last_known_path, payload_hash
from deadletters.journal.reader import FolderReader
from deadletters.models import DeadLetter, Hold, LetterState, Occurrence, TaskMinute, TaskPolicy
from deadletters.services import HoldTarget, end_hold
from grants.models import AuditEvent
from incidents.models import Incident, IncidentState, Severity
from opsconsole.core.clock import boot_id, boot_now, wall_now
from opsconsole.core.database import database_now
from repairs.services import retry_letter
from repairs.settlement import DatabaseSettlement
from tests import factories
from tests.cast import Cast
from tests.deadletters.journal_writer import SEALER, Writer
from tests.deadletters.test_drain import batch, drain
from tests.deadletters.test_holds import place

HOLD = "11111111-1111-7111-8111-111111111111"


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path)


def held_entry(writer: Writer, number: int, at: float, **more: Any) -> None:
    identity = writer.identity(number, **{"h": HOLD, "q": 7, **more})
    writer.put(Kind.HELD, number, at, report_part(identity, b"", writer.message(number)), process="child-7")


def told(events: Any) -> list[tuple[str, str]]:
    return [
        (event.delivery.task_id, str(event.caught if isinstance(event, Failed) else event.state)) for event in events
    ]


# The journal


@pytest.mark.parametrize("is_late", [True, False])
def test_a_message_is_put_aside_once_it_is_written_down_and_acknowledged(writer: Writer, is_late: bool) -> None:
    """In either order: acknowledged early, the main process's entry is there first."""
    writer.received(1, 0)
    if not is_late:
        writer.ack(1, 1)
    held_entry(writer, 1, 2, e=True)
    reader = FolderReader(writer.folder, SEALER)
    if is_late:
        assert not reader.read().events
        writer.ack(1, 3)
    (event,) = reader.read().events
    assert isinstance(event, Failed)
    assert (event.caught, event.never_started, event.delivery.acked) == (Caught.HELD, True, True)
    assert (event.delivery.hold_id, event.delivery.timed, event.delivery.clock_us) == (HOLD, True, 7)
    assert (event.delivery.message_state, event.at_boot) == (MessageState.FULL, writer.began + 2)
    writer.die()
    assert not FolderReader(writer.folder, SEALER, reader.offsets).finish().events


def test_what_is_read_up_to_between_the_two_is_told_once(writer: Writer) -> None:
    """The balance: a reader that goes on from there after a crash counts no message a second time."""
    writer.received(1, 0)
    held_entry(writer, 1, 2)
    writer.ack(1, 3)
    first = FolderReader(writer.folder, SEALER, settle_seconds=boot_now() - writer.began - 2.5)
    assert not first.read().events
    second = FolderReader(writer.folder, SEALER, first.offsets)
    assert told(second.read().events) == [("id-1", "held")]
    assert not FolderReader(writer.folder, SEALER, second.offsets).read().events


def test_what_was_written_down_and_not_acknowledged_stays_the_brokers(writer: Writer) -> None:
    """C2: no letter, for the broker sends it again; recorded now, it would be a letter and a message."""
    writer.received(1, 0)
    held_entry(writer, 1, 1)
    writer.received(2, 0)
    held_entry(writer, 2, 1)
    writer.put(Kind.REQUEUE, 2, 2)
    writer.die()
    assert told(FolderReader(writer.folder, SEALER).finish().events) == [("id-2", "returned"), ("id-1", "returned")]


def test_after_a_crash_of_the_host_what_was_written_down_counts(writer: Writer, monkeypatch: Any) -> None:
    """The disk was waited for with that entry, and not with the acknowledgement's: better two than none."""
    writer.received(1, 0)
    held_entry(writer, 1, 1)
    writer.die()
    monkeypatch.setattr(type(writer.folder), "is_of_this_boot", property(lambda _self: False))
    (event,) = FolderReader(writer.folder, SEALER).finish().events
    assert told([event]) == [("id-1", "held")]
    assert event.delivery.message_state is MessageState.FULL


def test_a_job_of_the_ledger_goes_back_to_it(writer: Writer) -> None:
    writer.received(1, 0, id="job:01900000-0000-7000-8000-000000000000:1:ab")
    writer.ack(1, 1)
    writer.put(Kind.END, 1, 2, b"\x06", process="child-7")
    writer.die()
    (event,) = FolderReader(writer.folder, SEALER).finish().events
    assert isinstance(event, Ended)
    assert event.state is EndState.HELD_BACK


# The rules


def rule(**values: Any) -> HoldRule:
    known: dict[str, Any] = {
        "id": str(uuid4()), "tenant": "default", "job_type": "shop.send_mail", "queue": "", "task_id": "",
        "payload_hash": "", "ends_at": "2099", "ends_boot": boot_now() + 60, "ends_wall": wall_now() + 60,
        "boot": boot_id(), "clock_us": 1_000_000,
    }  # fmt: skip
    return HoldRule(**{**known, **values})


def book(tmp_path: Path) -> HoldBook:
    return HoldBook(tmp_path / "holds.json", last_known_path(tmp_path, "tests"))


def test_a_host_on_which_nothing_was_ever_held_keeps_no_file_of_it(tmp_path: Path) -> None:
    last_known = last_known_path(tmp_path, "tests")
    book = HoldBook(None, last_known)
    book.put([])
    assert not last_known.exists()
    book.put([rule(id="a")])
    book.put([])
    assert json.loads(last_known.read_bytes()) == []


def message(**values: Any) -> Message:
    known: dict[str, Any] = {
        "tenant": "default", "task": "shop.send_mail", "queue": "mail", "task_id": "t-1",
        "payload_hash": lambda: "0" * 64,
    }  # fmt: skip
    return Message(**{**known, **values})


@pytest.mark.parametrize(
    ("values", "is_held"),
    [
        ({}, True),
        ({"tenant": "*"}, True),
        ({"tenant": "t-b"}, False),
        ({"job_type": "shop.other"}, False),
        ({"job_type": "", "queue": "mail"}, True),
        ({"job_type": "", "queue": "other"}, False),
        ({"queue": "other"}, False),
        ({"task_id": "t-1"}, True),
        ({"task_id": "t-2"}, False),
        ({"payload_hash": "0" * 64}, True),
        ({"payload_hash": "1" * 64}, False),
        ({"ends_boot": 0.0}, False),
        ({"ends_boot": 0.0, "boot": "another"}, True),
        ({"ends_wall": 0.0, "boot": "another"}, False),
    ],
)
def test_a_message_is_held_if_every_named_part_is_the_same(
    tmp_path: Path, values: dict[str, Any], is_held: bool
) -> None:
    known = book(tmp_path)
    known.put([rule(**values)])
    assert (known.matching(message()) is not None) is is_held


def test_a_child_learns_of_the_rules_within_a_second_and_keeps_them_if_the_file_goes(tmp_path: Path) -> None:
    known = book(tmp_path)
    child = HoldBook.of_child(tmp_path / "holds.json", tmp_path / "none")
    child._look_at = float("-inf")
    assert child.in_force() == ()
    known.put([rule()])
    assert child.in_force() == (), "it looks once a second"
    child._look_at = float("-inf")
    assert child.in_force() == known.in_force() != ()
    (tmp_path / "holds.json").unlink()
    child._look_at = float("-inf")
    assert child.in_force() != ()
    known.put([])
    child._look_at = float("-inf")
    assert child.in_force() == ()


def test_a_worker_that_cannot_ask_takes_what_was_known_last_on_its_host(tmp_path: Path) -> None:
    last_known = last_known_path(tmp_path, "tests")
    HoldBook(None, last_known).put([rule(id="a", clock_us=1_000_000)])
    late = HoldBook(tmp_path / "holds.json", last_known)
    late.recall()
    assert [one.id for one in late.in_force()] == ["a"]
    assert json.loads((tmp_path / "holds.json").read_text())[0]["id"] == "a"
    # By one reading of the clock, all that this host's workers receive falls into one order.
    late.put([rule(id="b", clock_us=1_000_900)])
    assert late.in_force()[0].clock_us == 1_000_000
    late.put([rule(id="c", clock_us=9_000_000)])
    assert late.in_force()[0].clock_us == 9_000_000
    last_known.write_text("{nonsense")
    HoldBook(None, last_known).recall()


# Recording


@pytest.fixture
def hold(cast: Cast) -> Hold:
    return place(cast.ada)


def put_aside(hold_id: object, *, ago: float = 0.0, **fields: Any) -> Failed:
    return factories.failed(
        ErrorReport(error_class="", text=""), caught=Caught.HELD, ago=ago, never_started=True, hold_id=str(hold_id),
        **fields,
    )  # fmt: skip


def record(*events: Failed) -> list[DeadLetter]:
    found = [factories.intake().failure(one, clock=factories.host_clock(), boot_id=boot_id()) for one in events]
    return [DeadLetter.objects.get(id=one.letter_id) for one in factories.record(*found)]


@pytest.mark.django_db
def test_what_was_put_aside_is_a_letter_of_the_hold_and_its_incident_is_its_operators(hold: Hold) -> None:
    """C14: safe, since its body has not run; not a failure, low, and nobody is asked to decide."""
    first, second = record(put_aside(hold.id), put_aside(hold.id, retries=2, chord_id="chord"))
    incident = Incident.objects.get()
    assert (first.state, first.outcome_class, first.caught, first.hold_id, first.attempts, first.error_code) == (
        LetterState.HELD, "safe", "held", hold.id, 0, "held",
    )  # fmt: skip
    assert (second.attempts, second.chord_id, second.message_state) == (2, "chord", "full")
    assert (incident.key, incident.category, incident.severity) == (hold.incident_key, "hold", Severity.LOW)
    assert (incident.state, incident.acknowledged_by_name, incident.unresolved_count) == (
        IncidentState.ACKNOWLEDGED, "ada", 2,
    )  # fmt: skip
    assert incident.title == "On hold: task shop.send_mail, tenant default"
    hold.refresh_from_db()
    assert hold.letter_count == 2
    assert AuditEvent.objects.filter(action="queue.held").count() == 2
    assert not DeadLetter.objects.waiting().exists()
    assert list(held_letters(hold)) == [first, second]


@pytest.mark.django_db
def test_recording_a_held_message_again_changes_nothing(hold: Hold) -> None:
    """C2: unique by delivery, also when the broker sends it again and another worker puts it aside."""
    record(put_aside(hold.id, task_id="t"))
    again = record(put_aside(hold.id, task_id="t"))[0]
    hold.refresh_from_db()
    assert (hold.letter_count, again.occurrence_count, Occurrence.objects.count()) == (1, 1, 1)


@pytest.mark.django_db
def test_a_hold_that_is_not_known_loses_no_message() -> None:
    (letter,) = record(put_aside(HOLD))
    assert (letter.state, letter.hold_id) == (LetterState.HELD, UUID(HOLD))
    assert Incident.objects.get().state == IncidentState.OPEN
    (odd,) = record(put_aside("nonsense"))
    assert (odd.state, odd.hold_id) == (LetterState.HELD, None)


@pytest.mark.django_db
def test_letters_have_the_order_in_which_one_host_received_their_messages(hold: Hold) -> None:
    """C14: whichever process has put one aside first, whichever transaction records it, and however late."""
    now = boot_now()
    clock_us = round(database_now().timestamp() * 1e6) - round(now * 1e6)
    order = [3, 0, 4, 1, 2]
    for number in order:
        record(
            put_aside(
                hold.id, task_id=f"t{number}", received_boot=now + number / 1e5, clock_us=clock_us, ago=order[number]
            )
        )
    timed = put_aside(hold.id, task_id="timed", received_boot=now - 500, clock_us=clock_us, timed=True, ago=-1)
    record(timed)
    assert [letter.task_id for letter in held_letters(hold)] == ["t0", "t1", "t2", "t3", "t4", "timed"]


@pytest.mark.django_db
def test_messages_of_several_tenants_are_one_incident_of_each(cast: Cast) -> None:
    hold = place(cast.ada, HoldTarget(tenant="*", queue="celery"))
    record(put_aside(hold.id, tenant="t-a"), put_aside(hold.id, tenant="t-b"))
    assert [one.tenant for one in incidents_of_hold(cast.ada, hold)] == ["t-a", "t-b"]
    assert [one.tenant for one in incidents_of_hold(cast.bram, hold)] == ["t-b"]


@pytest.mark.django_db
def test_what_runs_after_all_and_fails_waits_for_a_decision(hold: Hold) -> None:
    """C1, C2: killed in the middle of its acknowledgement, the worker leaves letter and message; that one failed."""
    record(put_aside(hold.id, task_id="t"))
    factories.record(factories.failure(factories.TIMED_OUT, task_id="t"))
    letter = DeadLetter.objects.get()
    assert (letter.state, letter.caught, letter.outcome_class) == (LetterState.OPEN, "task_failure", "ambiguous")
    assert (letter.occurrence_count, letter.attempts) == (1, 1)


@pytest.mark.django_db
def test_what_runs_after_all_and_succeeds_needs_no_release(hold: Hold) -> None:
    """C5: closed as overtaken, and its incident with it."""
    record(put_aside(hold.id, task_id="t"))
    delivery = factories.delivery(task_id="t", redelivered=True, source="tests")
    DatabaseSettlement().ended(Ended(delivery=delivery, state=EndState.SUCCESS, at_boot=boot_now(), at_wall=wall_now()))
    assert DeadLetter.objects.get().state == LetterState.OVERTAKEN
    assert Incident.objects.get().state == IncidentState.RESOLVED


@pytest.mark.django_db
def test_a_hold_takes_no_letter_from_who_has_to_decide_about_it(hold: Hold) -> None:
    """A job presumed lost may have run: that its message was put aside later does not make it safe (C19)."""
    failure = factories.failure(task_id="t", caught=Caught.WORKER_LOST, message_state=MessageState.MISSING)
    factories.record(failure)
    before = DeadLetter.objects.get()
    record(put_aside(hold.id, task_id="t"))
    after = DeadLetter.objects.get()
    assert (after.state, after.incident_id, after.outcome_class) == ("open", before.incident_id, before.outcome_class)
    assert after.message_state == "full", "but the message that was missing is there now"


@pytest.mark.django_db
def test_a_settled_job_whose_message_comes_again_is_held_and_not_passed_over(cast: Cast, hold: Hold) -> None:
    record(put_aside(hold.id, task_id="t"))
    letter = DeadLetter.objects.get()
    DeadLetter.objects.filter(id=letter.id).update(state="repaired", closed_at=database_now() + timedelta(hours=1))
    Incident.objects.update(unresolved_count=0, state="resolved", resolved_at=database_now())
    record(put_aside(hold.id, task_id="t", retries=1))
    letter.refresh_from_db()
    incident = Incident.objects.get()
    assert (letter.state, letter.hold_id, letter.closed_at) == (LetterState.HELD, hold.id, None)
    assert (incident.state, incident.acknowledged_by_name, incident.unresolved_count) == ("acknowledged", "ada", 1)
    assert retry_letter(letter_id=letter.id, by=cast.ada, key="r").state == "retrying"


@pytest.mark.django_db
def test_counts_balance_with_what_was_put_aside() -> None:
    """received = succeeded + failed + retried + ignored + revoked + lost + returned + held + in flight."""
    back = Ended(delivery=factories.delivery(), state=EndState.HELD_BACK, at_boot=boot_now(), at_wall=wall_now())
    events = (put_aside(HOLD), factories.failed(), back)
    drain().apply(batch(*events, received=tuple(event.delivery for event in events)))
    row = TaskMinute.objects.get()
    assert (row.received, row.held, row.failed) == (3, 2, 1)


@pytest.mark.django_db
def test_a_task_that_is_declared_to_be_ignored_is_kept_all_the_same() -> None:
    """Its letter is all there is of the message."""
    TaskPolicy.objects.create(pattern="shop.*", is_ignored=True)
    drain().apply(batch(put_aside(HOLD), factories.failed()))
    assert [letter.state for letter in DeadLetter.objects.all()] == [LetterState.HELD]


@pytest.mark.django_db
def test_what_was_lost_before_it_started_is_put_aside_while_a_hold_matches(cast: Cast) -> None:
    """C14: killed between an early acknowledgement and writing it down; what had started stays lost."""
    named = payload_hash(["a@example.org"], {"order": 7})
    hold = place(cast.ada, HoldTarget(tenant="default", job_type="shop.send_mail", payload_hash=named))
    lost: dict[str, Any] = {"caught": Caught.WORKER_LOST}
    events = [
        factories.failed(never_started=True, task_id="aside", **lost),
        factories.failed(never_started=False, task_id="started", **lost),
        factories.failed(never_started=True, task_id="other", body=b"[[], {}, {}]", **lost),
        factories.failed(never_started=True, task_id="without", message_state=MessageState.MISSING, **lost),
    ]
    drain().apply(batch(*events))
    found = {letter.task_id: (letter.state, letter.caught, letter.hold_id) for letter in DeadLetter.objects.all()}
    assert found.pop("aside") == ("held", "held", hold.id)
    assert set(found.values()) == {("open", "worker_lost", None)}


@pytest.mark.django_db
def test_failures_alone_ask_nothing_about_holds() -> None:
    with CaptureQueriesContext(connection) as asked:
        factories.record(factories.failure())
    assert not [query for query in asked.captured_queries if "ops_deadletters_hold" in query["sql"]]


@pytest.mark.django_db
def test_what_an_ended_hold_has_put_aside_stays_so(cast: Cast, hold: Hold) -> None:
    record(put_aside(hold.id))
    end_hold(hold_id=hold.id, reason="it is up", by=cast.ada, key="e")
    assert held_letters(hold).count() == 1
    record(put_aside(hold.id))
    assert held_letters(hold).count() == 2, "also what a worker that had not heard of it has put aside"
