"""What a reader makes of a worker's entries: each delivery's end once, whatever was killed when."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deadletters.journal import reader as module
from deadletters.journal.events import Batch, Caught, Ended, EndState, Event, Failed, MessageState
from deadletters.journal.folder import WorkerFolder
from deadletters.journal.frames import MESSAGE_CONTEXT, End, Kind
from deadletters.journal.message import unpack_message
from deadletters.journal.reader import FINISHED, FolderReader
from opsconsole.core.clock import boot_id, boot_now
from opsconsole.core.sealing import Sealer, derive_key
from tests.deadletters.journal_writer import ERROR, SEALER, Writer


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    made = Writer(tmp_path)
    yield made
    made.die()


def reader(writer: Writer, offsets: dict[str, int] | None = None) -> FolderReader:
    return FolderReader(writer.folder, SEALER, offsets)


def told(*events: Event) -> list[tuple[str, str]]:
    return [(e.delivery.task_id, str(e.state if isinstance(e, Ended) else e.caught)) for e in events]


def body_of(event: Event) -> str:
    return unpack_message(SEALER.open(event.delivery.sealed, MESSAGE_CONTEXT)).body.decode()


def finish(writer: Writer, offsets: dict[str, int] | None = None) -> Batch:
    writer.die()
    return reader(writer, offsets).finish()


# Single endings


def test_a_healthy_job_is_received_once_and_succeeds_once(writer: Writer) -> None:
    writer.healthy(1, 1.0)
    read = reader(writer)
    batch = read.read()
    assert told(*batch.events) == [("id-1", "succeeded")]
    (delivery,) = batch.received
    assert delivery.token == f"{writer.folder.serial}.1"
    assert (delivery.task, delivery.queue, delivery.routing_key, delivery.root_id) == (
        "shop.charge",
        "celery",
        "celery",
        "id-1",
    )
    assert delivery.acked
    assert delivery.received_boot == pytest.approx(writer.began + 1.0)
    assert delivery.started_boot == pytest.approx(writer.began + 1.2)
    assert delivery.holder == f"{writer.folder.name}/child-7"
    assert batch.exhausted
    assert batch.boot_id == boot_id()
    again = read.read()
    assert (again.events, again.received, again.offsets) == ((), (), batch.offsets)
    assert read.open_deliveries == []


def test_every_part_of_the_identity_is_read(writer: Writer) -> None:
    more: dict[str, Any] = {
        "t": "acme", "y": "user", "i": "7", "x": "shop", "k": "shop.pay", "p": 3, "r": "root", "a": "parent",
        "g": "group", "c": "chord", "f": "repair", "d": True, "w": "trace", "s": "sentry",
    }  # fmt: skip
    writer.received(1, 1.0, retries=2, **more)
    (delivery,) = reader(writer).read().received
    assert (delivery.tenant, delivery.actor_type, delivery.actor_id) == ("acme", "user", "7")
    assert (delivery.exchange, delivery.routing_key, delivery.priority) == ("shop", "shop.pay", 3)
    assert (delivery.root_id, delivery.parent_id, delivery.group_id, delivery.chord_id) == (
        "root",
        "parent",
        "group",
        "chord",
    )
    assert (delivery.repair_id, delivery.redelivered, delivery.retries) == ("repair", True, 2)
    assert (delivery.trace_id, delivery.sentry_id) == ("trace", "sentry")


def test_a_failure_has_its_error_and_the_real_message(writer: Writer) -> None:
    writer.received(1, 1.0)
    writer.ack(1, 1.1)
    writer.start(1, 1.2)
    writer.report(Kind.FAIL, 1, 1.3, text="synthetic")
    (failed,) = reader(writer).read().events
    assert isinstance(failed, Failed)
    assert failed.caught is Caught.FAILURE
    assert failed.error == ERROR
    assert body_of(failed) == "body"
    assert failed.delivery.message_state is MessageState.FULL
    assert not failed.never_started


def test_a_failure_takes_the_message_that_main_writes_a_moment_later(writer: Writer) -> None:
    """With late acknowledgement, and in a race with early, the child's failure is on disk before main's message."""
    writer.received(1, 1.0)
    writer.start(1, 1.2)
    writer.report(Kind.FAIL, 1, 1.3, text="synthetic")
    writer.ack(1, 1.4)
    (failed,) = reader(writer).read().events
    assert body_of(failed) == "body"
    assert failed.delivery.acked


def test_a_fresh_failure_waits_for_its_message_and_not_for_ever(writer: Writer) -> None:
    now = boot_now() - writer.began
    writer.received(1, now - 1.5)
    writer.start(1, now - 1.4)
    writer.report(Kind.FAIL, 1, now - 1.0, text="synthetic")
    read = reader(writer)
    assert read.read().events == ()
    writer.ack(1, now - 0.5)
    (failed,) = read.read().events
    assert body_of(failed) == "body"
    writer.received(2, now - 5)
    writer.start(2, now - 4)
    writer.report(Kind.FAIL, 2, now - 3, text="synthetic")
    (failed,) = read.read().events
    assert body_of(failed) == "synthetic"


def test_the_last_moment_is_left_to_the_next_read(writer: Writer) -> None:
    now = boot_now() - writer.began
    writer.healthy(1, now - 10)
    writer.healthy(2, now - 0.35)  # its last entry is 0.05 s old
    read = reader(writer)
    assert told(*read.read().events) == [("id-1", "succeeded")]
    assert told(*FolderReader(writer.folder, SEALER, settle_seconds=0).read().events) == [
        ("id-1", "succeeded"),
        ("id-2", "succeeded"),
    ]


def test_a_failure_of_a_child_is_usable_alone(writer: Writer) -> None:
    """Main dies before it wrote that it had received the message: the child's report has all that is needed."""
    writer.start(1, 1.0)
    writer.report(Kind.FAIL, 1, 1.1, text="synthetic", retries=2, t="acme", f="repair")
    batch = finish(writer)
    (failed,) = batch.events
    assert isinstance(failed, Failed)
    assert failed.delivery in batch.received
    assert (failed.delivery.task_id, failed.delivery.retries, failed.delivery.tenant) == ("id-1", 2, "acme")
    assert failed.delivery.repair_id == "repair"
    assert body_of(failed) == "synthetic"
    assert not failed.delivery.acked


def test_a_success_alone_tells_nothing_and_loses_nothing(writer: Writer) -> None:
    writer.start(1, 1.0)
    writer.end(1, 1.1)
    batch = finish(writer)
    assert (batch.events, batch.received) == ((), ())


def test_a_success_that_is_read_before_its_receipt_waits_for_it(writer: Writer) -> None:
    writer.start(1, 1.0)
    writer.end(1, 1.1)
    read = reader(writer)
    first = read.read()
    assert first.events == ()
    writer.received(1, 0.9)
    second = read.read()
    assert told(*second.events) == [("id-1", "succeeded")]
    assert reader(writer, first.offsets).read().events == second.events
    assert reader(writer, second.offsets).read().events == ()


def test_a_claimed_repair_that_succeeded_is_told_even_if_main_wrote_nothing(writer: Writer) -> None:
    writer.start(1, 1.0)
    writer.put(Kind.CLAIMED, 1, 1.05, writer.identity(1, f="repair-9"), process="child-7")
    writer.end(1, 1.1)
    (ended,) = finish(writer).events
    assert told(ended) == [("id-1", "succeeded")]
    assert (ended.delivery.repair_id, ended.delivery.claimed) == ("repair-9", True)
    assert ended.delivery.holder == f"{writer.folder.name}/child-7"


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (End.SUCCESS, "succeeded"),
        (End.IGNORED, "ignored"),
        (End.REFUSED, "refused"),
        (End.REJECTED, "task_failure"),
        (End.REQUEUED_LATE, "requeued_after_ack"),
    ],
)
def test_each_end_of_a_body_has_its_event(writer: Writer, end: End, expected: str) -> None:
    writer.received(1, 1.0)
    writer.ack(1, 1.1)
    writer.start(1, 1.2)
    writer.end(1, 1.3, end)
    (event,) = reader(writer).read().events
    assert told(event) == [("id-1", expected)]
    assert (event.error == ERROR) == (end not in (End.SUCCESS, End.IGNORED))


def test_a_requeued_message_is_returned_when_it_is_given_back(writer: Writer) -> None:
    writer.received(1, 1.0)
    writer.start(1, 1.2)
    writer.end(1, 1.3, End.REQUEUED)
    read = reader(writer)
    assert read.read().events == ()
    writer.put(Kind.REQUEUE, 1, 1.4)
    assert told(*read.read().events) == [("id-1", "returned")]


@pytest.mark.parametrize(
    ("kind", "expected", "never_started"),
    [
        (Kind.INTERNAL, "task_internal_error", False),
        (Kind.EXPIRED, "expired", True),
        (Kind.UNKNOWN, "task_unknown", True),
        (Kind.REJECTED, "task_rejected", True),
        (Kind.RETRY, "retried", None),
        (Kind.REVOKED, "revoked", None),
    ],
)
def test_each_report_has_its_event(writer: Writer, kind: Kind, expected: str, never_started: bool | None) -> None:
    if kind not in (Kind.UNKNOWN, Kind.REJECTED):
        writer.received(1, 1.0)
        writer.ack(1, 1.1)
        writer.start(1, 1.2)
    writer.report(kind, 1, 1.3, process="main", text="real")
    batch = reader(writer).read()
    (event,) = batch.events
    assert told(event) == [("id-1", expected)]
    assert len(batch.received) == 1
    assert event.delivery.acked
    assert getattr(event, "never_started", None) == never_started


def test_a_message_refused_before_its_start_without_any_signal_is_a_failure(writer: Writer) -> None:
    """Celery does so with an ETA that no clock can hold."""
    writer.received(1, 1.0)
    writer.ack(1, 1.1, kind=Kind.REJECT)
    (failed,) = reader(writer).read().events
    assert isinstance(failed, Failed)
    assert failed.caught is Caught.REJECTED_MESSAGE
    assert failed.never_started
    assert body_of(failed) == "body"


# One end each


def test_the_second_report_of_a_hard_limit_adds_nothing(writer: Writer) -> None:
    """Its second signal has the id and nothing else: no token, no queue."""
    writer.received(1, 1.0)
    writer.ack(1, 1.1)
    writer.start(1, 1.2)
    writer.report(Kind.FAIL, 1, 2.2, process="main")
    writer.report(Kind.FAIL, 0, 2.3, process="main", id="id-1")
    assert told(*reader(writer).read().events) == [("id-1", "task_failure")]


def test_a_report_without_a_number_means_the_newest_open_delivery_of_its_id(writer: Writer) -> None:
    for number in (1, 2, 3):
        writer.received(number, 1.0 + number, id="same" if number < 3 else "other")
        writer.ack(number, 1.1 + number)
        writer.start(number, 1.2 + number)
    writer.report(Kind.FAIL, 0, 9.0, process="main", id="same")
    read = reader(writer)
    (failed,) = read.read().events
    assert failed.delivery.token.endswith(".2")
    assert [delivery.token.rpartition(".")[2] for delivery in read.open_deliveries] == ["1", "3"]


def test_a_report_about_nothing_known_is_a_failure_of_its_own_and_the_same_when_read_again(writer: Writer) -> None:
    writer.report(Kind.FAIL, 0, 9.0, process="main", id="stranger")
    first, second = reader(writer).read(), reader(writer).read()
    assert told(*first.events) == [("stranger", "task_failure")]
    assert first.events[0].delivery.token == second.events[0].delivery.token


def test_a_lost_child_whose_job_had_succeeded_is_no_failure(writer: Writer) -> None:
    writer.healthy(1, 1.0)
    writer.report(Kind.FAIL, 1, 9.0, process="main")
    assert told(*reader(writer).read().events) == [("id-1", "succeeded")]


def test_a_failure_that_main_reports_again_is_one_failure(writer: Writer) -> None:
    """A raising on_failure: first an internal error in the child, then a failure with the wrong error in main."""
    writer.received(1, 1.0)
    writer.ack(1, 1.1)
    writer.start(1, 1.2)
    writer.put(Kind.ABORT, 1, 1.3, process="child-7")
    writer.report(Kind.INTERNAL, 1, 1.4)
    writer.report(Kind.FAIL, 1, 1.5, process="main")
    assert told(*reader(writer).read().events) == [("id-1", "task_internal_error")]


def test_two_deliveries_of_one_id_in_one_worker_end_apart(writer: Writer) -> None:
    """(task id, retries) is not one delivery: a duplicate shares it."""
    for number in (1, 2):
        writer.received(number, 1.0 + number / 10, id="same")
        writer.ack(number, 1.5 + number / 10)
    writer.start(1, 2.0, process="child-7")
    writer.start(2, 2.0, process="child-8")
    writer.end(2, 2.1, End.REFUSED, process="child-8")
    writer.end(1, 9.0, process="child-7")
    events = reader(writer).read().events
    assert [(event.delivery.token[-1], str(event.state)) for event in events if isinstance(event, Ended)] == [
        ("2", "refused"),
        ("1", "succeeded"),
    ]


def test_a_job_that_celery_stopped_is_returned_if_the_broker_still_has_it(writer: Writer) -> None:
    """On a lost connection Celery cancels the job and calls that a retry; nothing is sent again by the worker."""
    writer.received(1, 1.0)
    writer.start(1, 1.1)
    writer.put(Kind.CANCELLED, 1, 1.2, b"\1")
    writer.put(Kind.ABORT, 1, 1.3, process="child-7")
    assert told(*reader(writer).read().events) == [("id-1", "returned")]


def test_a_job_that_celery_stopped_while_its_acknowledgement_was_under_way_is_lost(writer: Writer) -> None:
    """With early acknowledgement the real one may follow a loop turn later than the worker's belief in it."""
    writer.received(1, 1.0)
    writer.start(1, 1.1)
    writer.put(Kind.CANCELLED, 1, 1.2, b"\0")
    writer.ack(1, 1.3)
    assert told(*finish(writer).events) == [("id-1", "worker_lost")]


def test_a_redelivery_ends_what_the_worker_had_forgotten(writer: Writer) -> None:
    """When its connection breaks a worker drops the jobs that wait in it, and the broker delivers them again."""
    writer.received(1, 1.0, id="forgotten")
    writer.received(2, 1.0, id="running")
    writer.start(2, 1.1)
    writer.received(3, 5.0, id="forgotten", d=True)
    writer.received(4, 5.0, id="running", d=True)
    read = reader(writer)
    assert told(*read.read().events) == [("forgotten", "returned")]
    assert [delivery.token[-1] for delivery in read.open_deliveries] == ["2", "3", "4"]


# Dead workers


def test_a_dead_workers_acknowledged_and_unfinished_job_is_lost(writer: Writer) -> None:
    writer.received(1, 1.0)
    writer.ack(1, 1.1)
    writer.start(1, 1.2)
    (failed,) = finish(writer).events
    assert isinstance(failed, Failed)
    assert failed.caught is Caught.WORKER_LOST
    assert failed.error.error_class == "billiard.exceptions.WorkerLostError"
    assert failed.at_boot == pytest.approx(writer.began + 1.2)
    assert failed.at_wall == pytest.approx(1e9 + 1.2)
    assert not failed.never_started
    assert body_of(failed) == "body"


def test_a_job_that_was_acknowledged_and_never_started_is_lost_and_safe(writer: Writer) -> None:
    writer.received(1, 1.0)
    writer.ack(1, 1.1)
    (failed,) = finish(writer).events
    assert isinstance(failed, Failed)
    assert failed.never_started
    assert failed.at_boot == pytest.approx(writer.began + 1.1)


def test_a_job_that_the_broker_still_has_is_returned(writer: Writer) -> None:
    writer.received(1, 1.0)
    writer.received(2, 1.0)
    writer.start(2, 1.2)
    assert told(*finish(writer).events) == [("id-1", "returned"), ("id-2", "returned")]


def test_being_killed_in_the_body_is_no_end(writer: Writer) -> None:
    """Cold shutdown sends postrun without a state: taken for an end, the loss would vanish."""
    writer.received(1, 1.0)
    writer.ack(1, 1.1)
    writer.start(1, 1.2)
    writer.put(Kind.CANCELLED, 1, 1.3, b"\0")
    writer.put(Kind.ABORT, 1, 1.3, process="child-7")
    assert told(*finish(writer).events) == [("id-1", "worker_lost")]


def test_a_repair_that_was_not_claimed_never_started_whatever_prerun_says(writer: Writer) -> None:
    for number in (1, 2):
        writer.received(number, 1.0, f=f"repair-{number}")
        writer.ack(number, 1.1)
        writer.start(number, 1.2, process=f"child-{number}")
    writer.put(Kind.CLAIMED, 2, 1.3, writer.identity(2, f="repair-2"), process="child-2")
    events = finish(writer).events
    assert [getattr(event, "never_started", None) for event in events] == [True, False]
    assert [event.delivery.claimed for event in events] == [False, True]


def test_a_repair_that_had_begun_is_lost_with_its_worker_although_the_broker_still_has_it(writer: Writer) -> None:
    """Its redelivery is refused by the start guard, so nobody would ever hear of it again."""
    for number in (1, 2):
        writer.received(number, 1.0, f=f"repair-{number}")
        writer.start(number, 1.2)
        writer.put(Kind.CLAIMED, number, 1.3, writer.identity(number, f=f"repair-{number}"), process="child-7")
    writer.put(Kind.REQUEUE, 1, 1.4)
    events = finish(writer).events
    assert told(*events) == [("id-1", "worker_lost"), ("id-2", "worker_lost")]
    assert not any(getattr(event, "never_started", True) for event in events)


def test_after_a_gap_nothing_is_certain(writer: Writer) -> None:
    writer.received(1, 1.0)
    writer.ack(1, 1.1)
    writer.put(Kind.GAP, 0, 1.2, b'{"lost": 3}', process="child-7")
    batch = finish(writer)
    (failed,) = batch.events
    assert isinstance(failed, Failed)
    assert not failed.never_started
    assert batch.damaged == ("child-7.000001.j: 3 entries could not be written",)


def test_after_a_gap_a_lost_job_is_known_by_its_message(writer: Writer) -> None:
    writer.put(Kind.GAP, 0, 1.0, b'{"lost": 1}')
    writer.ack(1, 1.1)
    batch = finish(writer)
    assert told(*batch.events) == [("id-1", "worker_lost")]
    assert [delivery.queue for delivery in batch.received] == ["celery"]


def test_finishing_twice_tells_nothing_twice(writer: Writer) -> None:
    writer.received(1, 1.0)
    writer.ack(1, 1.1)
    writer.die()
    read = reader(writer)
    first = read.finish()
    assert len(first.events) == 1
    assert first.offsets[FINISHED] == 1
    assert read.finish().events == ()
    assert reader(writer, first.offsets).finish().events == ()
    assert reader(writer, first.offsets).read().events == ()


def test_a_worker_from_before_a_restart_of_the_host_is_read_whole(tmp_path: Path) -> None:
    """Its boot clock may be ahead of ours: nothing in it is too young to be read."""
    writer = Writer(tmp_path)
    writer.began = boot_now() + 1e6
    writer.healthy(1, 1.0)
    writer.die()
    old = writer.folder.path.with_name("worker.1.00000000.ff")
    writer.folder.path.rename(old)
    read = FolderReader(WorkerFolder(old), SEALER)
    assert told(*read.read().events) == [("id-1", "succeeded")]


# Reading on


def busy(writer: Writer) -> None:
    for number in range(1, 61):
        at = number / 4
        child = f"child-{number % 3}"
        writer.received(number, at)
        match number % 6:
            case 0:
                pass
            case 1:
                writer.ack(number, at + 0.1)
            case 2:
                writer.ack(number, at + 0.1)
                writer.start(number, at + 0.2, process=child)
            case 3:
                writer.ack(number, at + 0.1)
                writer.start(number, at + 0.2, process=child)
                writer.report(Kind.FAIL, number, at + 0.25, process=child, text="synthetic")
                writer.report(Kind.FAIL, 0, at + 0.26, id=f"id-{number}", process="main")
            case 4:
                writer.start(number, at + 0.15, process=child)
                writer.end(number, at + 0.2, process=child)
                writer.ack(number, at + 0.25)
            case 5:
                writer.ack(number, at + 0.1)
                writer.start(number, at + 0.2, process=child)
                writer.report(Kind.RETRY, number, at + 0.25, process=child)


EXPECTED = {"returned": 10, "worker_lost": 20, "task_failure": 10, "succeeded": 10, "retried": 10}


def counts(events: list[Event]) -> Counter[str]:
    return Counter(what for _, what in told(*events))


def test_small_reads_tell_the_same_as_one(writer: Writer) -> None:
    busy(writer)
    read = reader(writer)
    events: list[Event] = []
    received = 0
    for _ in range(10_000):
        batch = read.read(limit_bytes=64)
        events += batch.events
        received += len(batch.received)
        if batch.exhausted:
            break
    else:
        pytest.fail("never exhausted")
    writer.die()
    events += read.finish().events
    assert counts(events) == EXPECTED
    assert received == 60


@settings(max_examples=30)
@given(st.data())
def test_whoever_reads_on_after_a_crash_tells_each_end_exactly_once(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A reader dies at any moment; the next one starts from the offsets that were stored with the last batch kept."""
    writer = Writer(tmp_path_factory.mktemp("crash"))
    busy(writer)
    offsets: dict[str, int] = {}
    kept: list[Event] = []
    received = 0
    for _ in range(data.draw(st.integers(1, 6))):
        read = reader(writer, offsets)
        for _ in range(data.draw(st.integers(1, 5))):
            batch = read.read(limit_bytes=data.draw(st.sampled_from([100, 1000, 5000])))
            if data.draw(st.booleans()):
                break  # the database did not take this one
            offsets = batch.offsets
            kept += batch.events
            received += len(batch.received)
    writer.die()
    last = reader(writer, offsets).finish()
    assert counts([*kept, *last.events]) == EXPECTED
    assert received + len(last.received) == 60
    assert len({event.delivery.token for event in [*kept, *last.events]}) == 60


def test_what_main_says_is_not_told_before_what_a_child_said_earlier(writer: Writer) -> None:
    """Main's file is short, the child's is long: the parent's lost-worker report must not overtake the success."""
    writer.received(1, 1.0)
    writer.ack(1, 1.1)
    writer.start(1, 1.2)
    for number in range(100, 200):
        writer.start(number, 1.2)
    writer.end(1, 1.3)
    writer.report(Kind.FAIL, 1, 9.0, process="main")
    read = reader(writer)
    events: list[Event] = []
    while not (batch := read.read(limit_bytes=200)).exhausted:
        events += batch.events
    assert told(*events, *batch.events) == [("id-1", "succeeded")]


# Letting go of segments


def segmented(tmp_path: Path) -> Writer:
    return Writer(tmp_path, segment_bytes=4000)


def names(writer: Writer) -> list[str]:
    return sorted(path.name for path in writer.folder.path.iterdir())


def test_drained_segments_go_and_the_ones_being_written_stay(tmp_path: Path) -> None:
    writer = segmented(tmp_path)
    for number in range(1, 101):
        writer.healthy(number, number / 10)
    read = reader(writer)
    assert len(read.read().events) == 100
    gone = read.prune()
    assert len(gone) > 5
    assert [name for name in names(writer) if not name.startswith("carry")] == [
        writer.files["child-7"].path.name,
        writer.files["main"].path.name,
    ]
    writer.healthy(101, 20.0)
    assert told(*read.read().events) == [("id-101", "succeeded")]
    writer.die()


def test_nothing_goes_that_is_not_stored_yet(tmp_path: Path) -> None:
    writer = segmented(tmp_path)
    for number in range(1, 51):
        writer.healthy(number, number / 10)
    read = reader(writer)
    first = read.read(limit_bytes=6000)
    read.read()
    assert read.prune(first.offsets) == ()
    assert read.prune(read.offsets) != ()
    writer.die()


def test_a_dead_childs_drained_file_goes(tmp_path: Path) -> None:
    writer = segmented(tmp_path)
    writer.healthy(1, 1.0, process="child-5")
    writer.files["child-5"].close()
    read = reader(writer)
    read.read()
    assert read.prune() == ("child-5.000001.j",)
    writer.die()


def test_a_long_job_outlives_the_segment_it_was_received_in(tmp_path: Path) -> None:
    """Its identity, message and claim are carried, and it fails with all of them; so it does for the next reader."""
    writer = segmented(tmp_path)
    writer.received(1, 0.1, t="acme", f="repair")
    writer.ack(1, 0.2)
    writer.start(1, 0.3)
    writer.put(Kind.CLAIMED, 1, 0.35, writer.identity(1, f="repair"), process="child-7")
    read = reader(writer)
    offsets: dict[str, int] = {}
    for round_ in range(1, 5):
        for number in range(100 * round_, 100 * round_ + 40):
            writer.healthy(number, number / 10)
        offsets = read.read().offsets
        assert read.prune(offsets)
        if round_ == 2:
            read = reader(writer, offsets)
    assert len([name for name in names(writer) if name.startswith("carry")]) == 1
    assert [delivery.task_id for delivery in reader(writer, offsets).open_deliveries] == ["id-1"]
    writer.die()
    (lost,) = reader(writer, offsets).finish().events
    assert isinstance(lost, Failed)
    assert (lost.delivery.task_id, lost.delivery.tenant, lost.caught) == ("id-1", "acme", Caught.WORKER_LOST)
    assert lost.delivery.claimed
    assert lost.delivery.holder == f"{writer.folder.name}/child-7"
    assert lost.delivery.started_boot == pytest.approx(writer.began + 0.3)
    assert body_of(lost) == "body"
    assert not lost.never_started


def test_a_job_that_ended_is_not_raised_from_a_carry_file(tmp_path: Path) -> None:
    """The segment that says it ended is gone too; the carry file must not bring it back as lost."""
    writer = segmented(tmp_path)
    writer.received(1, 0.1)
    writer.ack(1, 0.2)
    writer.start(1, 0.3)
    read = reader(writer)
    for round_ in range(1, 4):
        for number in range(100 * round_, 100 * round_ + 40):
            writer.healthy(number, number / 10)
        if round_ == 2:
            writer.end(1, 29.0)
        offsets = read.read().offsets
        read.prune(offsets)
    writer.die()
    assert reader(writer, offsets).finish().events == ()


def test_jobs_whose_end_went_with_a_dead_childs_file_are_not_lost_with_the_worker(tmp_path: Path) -> None:
    """However many there were: main's file, which lives on, still says that it received and acknowledged them."""
    writer = Writer(tmp_path)
    many = 2 * module._REMEMBERED_IDS
    for number in range(1, many + 1):
        writer.healthy(number, number / 1000, process="child-5")
    writer.received(many + 1, 20.0)
    writer.ack(many + 1, 20.1)
    read = reader(writer)
    while not (batch := read.read()).exhausted:
        pass
    writer.files["child-5"].close()
    assert read.prune(batch.offsets) == ("child-5.000001.j",)
    writer.start(many + 1, 20.2)
    writer.die()
    recovered = reader(writer, batch.offsets)
    assert recovered.read().events == ()
    assert told(*recovered.finish().events) == [(f"id-{many + 1}", "worker_lost")]


@given(st.lists(st.integers(1, 40)))
def test_a_set_of_numbers_holds_what_was_added(added: list[int]) -> None:
    numbers = module._Numbers()
    for number in added:
        numbers.add(number)
    assert [number for number in range(-1, 45) if number in numbers] == sorted(set(added))
    copy = module._Numbers()
    copy.add_ranges(numbers.ranges())
    assert [number for number in range(-1, 45) if number in copy] == sorted(set(added))
    assert all(first > before + 1 for (_, before), (first, _) in pairwise(numbers.ranges()))


def test_an_acknowledgement_after_the_end_raises_nothing_once_the_end_is_gone(tmp_path: Path) -> None:
    writer = Writer(tmp_path, segment_bytes=1)  # each entry its own segment
    writer.received(1, 1.0)
    writer.start(1, 1.1)
    writer.end(1, 1.2)
    read = reader(writer)
    assert told(*read.read().events) == [("id-1", "succeeded")]
    offsets = read.read().offsets
    read.prune()
    writer.ack(1, 1.3)
    writer.report(Kind.FAIL, 1, 1.4, process="main")
    writer.die()
    assert reader(writer, offsets).finish().events == ()


@pytest.mark.parametrize("step", ["write", "rename", "unlink"])
def test_a_crash_while_letting_go_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    writer = segmented(tmp_path)
    writer.received(1, 0.1)
    writer.ack(1, 0.2)
    for number in range(100, 200):
        writer.healthy(number, number / 10)
    read = reader(writer)
    offsets = read.read().offsets
    read.prune(offsets)
    for number in range(200, 300):
        writer.healthy(number, number / 10)
    offsets = read.read().offsets

    def crash(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "killed here")

    with monkeypatch.context() as patched:
        if step == "write":
            patched.setattr(os, "fsync", crash)
        else:
            patched.setattr(Path, step, crash)
        with pytest.raises(OSError, match="killed here"):
            read.prune(offsets)
    survivor = reader(writer, offsets)
    survivor.prune(offsets)
    writer.die()
    assert told(*reader(writer, offsets).finish().events) == [("id-1", "worker_lost")]


# Damage


def test_damage_is_told_and_costs_only_what_it_hit(writer: Writer) -> None:
    writer.healthy(1, 1.0)
    path = writer.files["main"].path
    at = path.stat().st_size
    writer.received(2, 2.0)
    writer.healthy(3, 3.0)
    data = bytearray(path.read_bytes())
    data[at + 20] ^= 0xFF
    writer.die()
    path.write_bytes(data)
    batch = reader(writer).finish()
    assert told(*batch.events) == [("id-1", "succeeded"), ("id-3", "succeeded")]
    assert len(batch.damaged) == 1
    assert batch.damaged[0].startswith("main.000001.j: bytes")


@pytest.mark.parametrize(
    "entry",
    [
        (Kind.RECEIVED, b"{"),
        (Kind.RECEIVED, b"[1]"),
        (Kind.RECEIVED, b"\xff"),
        (Kind.END, b""),
        (Kind.ACK, b"\x09" + bytes(40)),
        (Kind.FAIL, b"\0"),
        (Kind.FAIL, b"\0" + bytes(8)),
        (Kind.HEAD, b"nothing"),
        (Kind.CARRIED, b"\x05mai"),
        (99, b""),
    ],
)
def test_an_entry_that_makes_no_sense_is_told_and_passed_over(writer: Writer, entry: tuple[Any, bytes]) -> None:
    kind, body = entry
    writer.healthy(1, 1.0)
    writer.put(kind, 2, 1.5, body)
    writer.healthy(3, 2.0)
    batch = reader(writer).read()
    assert told(*batch.events) == [("id-1", "succeeded"), ("id-3", "succeeded")]
    assert len(batch.damaged) == 1
    assert "makes no sense" in batch.damaged[0]


def test_an_entry_too_short_to_be_one_is_told(writer: Writer) -> None:
    writer.files["main"].append(b"x")
    assert reader(writer).read().damaged[0].endswith("is too short")


def test_endless_damage_is_told_in_a_few_words(writer: Writer) -> None:
    for _ in range(500):
        writer.put(Kind.RECEIVED, 1, 1.0, b"{")
    damaged = reader(writer).read().damaged
    assert len(damaged) == 21
    assert damaged[-1] == "and 480 more"


def test_a_failure_sealed_with_a_lost_key_is_still_a_failure(writer: Writer) -> None:
    writer.received(1, 1.0)
    writer.ack(1, 1.1)
    writer.start(1, 1.2)
    writer.report(Kind.FAIL, 1, 1.3)
    other = Sealer({"other": derive_key("x", "y")}, "other")
    (failed,) = FolderReader(writer.folder, other).read().events
    assert isinstance(failed, Failed)
    assert "'test', which is not configured" in failed.error.text
    assert failed.delivery.sealed


def test_an_entry_larger_than_the_limit_is_read(writer: Writer) -> None:
    writer.received(1, 1.0)
    writer.put(Kind.ACK, 1, 1.1, writer.message(1, "x" * 100_000))
    writer.start(1, 1.2)
    writer.report(Kind.FAIL, 1, 1.3)
    read = reader(writer)
    events: list[Event] = []
    while not (batch := read.read(limit_bytes=100)).exhausted:
        events += batch.events
    (failed,) = [*events, *batch.events]
    assert len(body_of(failed)) == 100_000
    assert EndState.SUCCESS not in {getattr(event, "state", None) for event in events}


@pytest.mark.parametrize("name", ["", 'a",b', "back\\slash", 'q"', "ü", "[", "x" * 3_000])
def test_a_delivery_is_known_by_any_id(writer: Writer, name: str) -> None:
    """An id is somebody's text; only a plain one may take the short way of being read."""
    writer.received(1, 1.0, id=name, t="acme")
    writer.received(2, 1.1, id=name, t="acme", w="f" * 2_000)
    writer.end(1, 1.2)
    writer.end(2, 1.3)
    batch = reader(writer).read()
    assert [(one.task_id, one.root_id, one.task, one.tenant) for one in batch.received] == [
        (name, name, "shop.charge", "acme")
    ] * 2
    assert not batch.damaged
