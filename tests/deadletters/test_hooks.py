"""Real workers on real brokers: however a job ends, its journal says so once.

One worker runs all cases of a pool, a broker and a way to acknowledge; the tests then look at what its journal says.
Nothing here needs a database. The rows are those of docs/what-is-caught.md.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import kombu
import psutil
import pytest
import redis
from billiard.exceptions import SoftTimeLimitExceeded
from celery import signals
from celery.app.task import Context
from celery.worker.request import Request
from kombu import Exchange, Queue
from kombu.message import Message

from deadletters.journal import hooks as module
from deadletters.journal.events import Caught, Delivery, Ended, EndState, Event, Failed, MessageState
from deadletters.journal.folder import JournalRoot, WorkerFolder
from deadletters.journal.frames import ENTRY, MESSAGE_CONTEXT, Kind, read_frames, split_report_part
from deadletters.journal.hooks import REPAIR_HEADER, RETRIABLE, Hooks, StartRefused, connect
from deadletters.journal.message import TOKEN_KEY, RawMessage, unpack_message
from deadletters.journal.reader import FolderReader
from tests import services
from tests.clock import time_of
from tests.deadletters.journal_app import make_app
from tests.deadletters.journal_writer import SEALER

ROOT = Path(__file__).resolve().parents[2]
MODULE = "tests.deadletters.journal_app"
TIMEOUT = 60.0


class Worker:
    """A worker of tests/deadletters/journal_app.py in a process group of its own, and a client of its broker."""

    def __init__(self, base: Path, pool: str, broker: str, *, late: bool, concurrency: int = 2, **extra: str) -> None:
        self.base = base
        self.late = late
        self.queue = f"journal-test-{uuid4().hex}"
        self.broker = broker or str(base / "broker")
        for name in ("marks", "guard"):
            (base / name).mkdir(parents=True)
        self.environment = {
            **os.environ,
            "JOURNAL_APP_BROKER": self.broker,
            "JOURNAL_APP_JOURNAL": str(base / "journal"),
            "JOURNAL_APP_QUEUE": self.queue,
            "JOURNAL_APP_LATE": "1" if late else "0",
            "JOURNAL_APP_MARKS": str(base / "marks"),
            "JOURNAL_APP_GUARD": str(base / "guard"),
            **extra,
        }
        self.app = make_app(self.environment)
        self.root = JournalRoot(base / "journal")
        self.log = (base / "log").open("w+")
        command = [sys.executable, "-m", "celery", "-A", MODULE, "worker", "-P", pool, "-c", str(concurrency)]
        self.process = subprocess.Popen(
            [*command, "-l", "WARNING", "--without-gossip", "--without-mingle", "-n", f"{self.queue}@host"],
            env=self.environment,
            cwd=ROOT,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.events: list[Event] = []
        self.received: list[Delivery] = []
        self.damaged: list[str] = []
        self.offsets: dict[str, int] = {}
        self._reader: FolderReader | None = None

    def send(self, name: str, *args: Any, task_id: str | None = None, **options: Any) -> str:
        task_id = task_id or str(uuid4())
        self.app.send_task(f"{MODULE}.{name}", args=args, task_id=task_id, **options)
        return task_id

    def publish(self, body: bytes, headers: dict[str, Any], content_type: str = "application/json") -> None:
        """Put a message on the queue as no Celery client would."""
        queue = self.app.amqp.queues[self.queue]
        with self.app.connection_for_write() as connection:
            connection.Producer().publish(
                body,
                exchange=queue.exchange,
                routing_key=queue.routing_key,
                declare=[queue],
                headers=headers,
                content_type=content_type,
                content_encoding="utf-8",
            )

    def folder(self) -> WorkerFolder:
        deadline = time.monotonic() + TIMEOUT
        while not (folders := self.root.folders()):
            self.still_runs(deadline)
            time.sleep(0.05)
        return folders[0]

    def read(self) -> None:
        if self._reader is None:
            self._reader = FolderReader(self.folder(), SEALER)
        batch = self._reader.read()
        self._take(batch.events, batch.received, batch.damaged)
        self.offsets = batch.offsets

    def _take(self, events: Any, received: Any, damaged: Any) -> None:
        self.events += events
        self.received += received
        self.damaged += damaged

    def still_runs(self, deadline: float) -> None:
        if self.process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"the worker did not do its work:\n{self.output()[-3000:]}")

    def wait_for(self, count: int) -> None:
        """Read the living worker's journal until that many deliveries have ended."""
        deadline = time.monotonic() + TIMEOUT
        while len(self.events) < count:
            self.still_runs(deadline)
            self.read()
            time.sleep(0.1)

    def wait_for_marks(self, *marks: str) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not set(marks) <= set(self.marks()):
            self.still_runs(deadline)
            time.sleep(0.05)

    def marks(self) -> list[str]:
        path = self.base / "marks" / "marks"
        return path.read_text().splitlines() if path.exists() else []

    def output(self) -> str:
        self.log.flush()
        return (self.base / "log").read_text()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)
        self.process.wait(TIMEOUT)

    def finish(self) -> None:
        """Recover the folder as another worker would, from the offsets stored last."""
        deadline = time.monotonic() + 10
        while not (dead := list(self.root.dead_folders())):
            assert time.monotonic() < deadline, "a child still holds its file"
            time.sleep(0.05)
        (folder,) = dead
        batch = FolderReader(folder, SEALER, self.offsets).finish()
        self._take(batch.events, batch.received, batch.damaged)
        folder.delete()

    def close(self) -> None:
        if self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
            self.process.kill()
            self.process.wait(TIMEOUT)
        self.log.close()
        self.app.close()
        if self.broker.startswith("redis"):
            with redis.Redis.from_url(self.broker) as client:
                for key in client.scan_iter(f"*{self.queue}*", count=1000):
                    client.delete(key)
        elif "://" in self.broker:
            with kombu.Connection(self.broker) as connection:
                connection.default_channel.queue_delete(self.queue)
                connection.default_channel.exchange_delete(self.queue)

    # What came out

    def of(self, task_id: str) -> list[Event]:
        return [event for event in self.events if event.delivery.task_id == task_id]

    def only(self, task_id: str) -> Event:
        (event,) = self.of(task_id)
        return event

    def failed(self, task_id: str) -> Failed:
        event = self.only(task_id)
        assert isinstance(event, Failed)
        return event

    def ended(self, task_id: str) -> Ended:
        event = self.only(task_id)
        assert isinstance(event, Ended)
        return event


def raw(event: Event) -> RawMessage:
    return unpack_message(SEALER.open(event.delivery.sealed, MESSAGE_CONTEXT))


class Cases(Worker):
    """A worker that has run every case once, been stopped warmly, and been read to the end."""

    def __init__(self, base: Path, pool: str, broker: str, *, late: bool) -> None:
        super().__init__(base, pool, broker, late=late, JOURNAL_APP_IDENTITY="1")
        self.prefork = pool == "prefork"
        self.ids: dict[str, str] = {}

    def case(self, key: str, name: str, *args: Any, **options: Any) -> None:
        self.ids[key] = self.send(name, *args, **options)

    def run(self) -> None:
        expected = 0
        for key, name, args, options, endings in (
            ("ok", "ok", (1,), {"priority": 3, "headers": {"custom": {"a": [1]}}}, 1),
            ("plain", "plain", (5,), {"headers": {"tenant": "acme", "traceparent": TRACE, "sentry-trace": SENTRY}}, 1),
            ("library", "through_library", (5,), {}, 1),
            ("again", "again", (6,), {}, 3),
            ("ignored", "ignored", (), {}, 1),
            ("rejected", "rejected", (False,), {}, 1),
            ("requeued", "rejected", (True,), {}, 2 if self.late else 1),
            ("unpicklable", "unpicklable", (), {}, 1),
            ("wrong arguments", "plain", (), {}, 1),
            ("before start", "never_begins", (), {}, 1),
            ("unknown", "no_such_job", (1,), {"headers": {"tenant": "acme"}}, 1),
            # RabbitMQ drops an expired message itself.
            ("expired", "scripted_dead_end", (), {"expires": -5}, 0 if "amqp" in self.broker else 1),
            ("fails twice", "fails_twice", (), {}, 1),
            ("eager inside", "inner_eager", (), {}, 1),
            ("claimed", "repaired", ("claimed",), {"headers": {REPAIR_HEADER: "r1"}}, 1),
            ("refused", "repaired", ("refused",), {"headers": {REPAIR_HEADER: "no-1"}}, 1),
            ("refused for now", "repaired", ("later",), {"headers": {REPAIR_HEADER: "later-1"}}, 1),
            ("guard broken", "repaired", ("broken",), {"headers": {REPAIR_HEADER: "broken-1"}}, 1),
            ("claimed twice", "repaired_again", ("again",), {"headers": {REPAIR_HEADER: "r2"}}, 2),
        ):
            self.case(key, name, *args, **options)
            expected += endings
        for _ in range(2):
            self.case("same id", "slow", "same", 0.4, task_id="same-id")
            self.case("same repair", "repaired", "same repair", task_id="same-repair", headers={REPAIR_HEADER: "r3"})
            expected += 2
        self.publish(b"{oops", {"task": f"{MODULE}.ok", "id": "undecodable", "retries": 0})
        self.publish(b"[[], {}, {}]", {"other": "no task"})
        self.publish(b"x", {"task": f"{MODULE}.ok", "id": "bad-content"}, content_type="application/x-python-serialize")
        self.publish(b"[[], {}, {}]", {"task": f"{MODULE}.ok", "id": "bad-eta", "eta": "yesterday-ish"})
        self.publish(b"[[], [], {}]", {"task": f"{MODULE}.ok", "id": "bad-kwargs", "retries": 0})
        expected += 5
        if self.prefork:
            for key, endings in (("soft", 1), ("hard", 1), ("killed", 1), ("killed_again", 2), ("exits", 1)):
                self.case(key, key)
                expected += endings
        else:
            self.case("exits", "exits")
            expected += 0 if self.late else 1
        # With the worker listening: one is revoked, one expires while it waits for its time.
        self.wait_for(1)
        self.ids["revoked"] = str(uuid4())
        self.app.control.revoke(self.ids["revoked"])
        self.case("revoked", "scripted_dead_end", countdown=2, task_id=self.ids["revoked"])
        self.case("expired later", "scripted_dead_end", countdown=2, expires=1.5)
        self.wait_for(expected + 2)
        self.signal(signal.SIGTERM)
        self.finish()


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SENTRY = "771a43a4192642f0b136d5159a501700-0af7651916cd43dd-1"

COMBINATIONS = [
    pytest.param(("prefork", "", False), id="prefork-filesystem-early"),
    pytest.param(("prefork", "", True), id="prefork-filesystem-late"),
    pytest.param(("threads", "", False), id="threads-filesystem-early"),
    pytest.param(("threads", "", True), id="threads-filesystem-late"),
    pytest.param(("prefork", services.REDIS_URL, True), id="prefork-redis-late", marks=pytest.mark.broker),
    pytest.param(("threads", services.REDIS_URL, False), id="threads-redis-early", marks=pytest.mark.broker),
    pytest.param(("prefork", services.RABBITMQ_URL, False), id="prefork-rabbitmq-early", marks=pytest.mark.broker),
    pytest.param(("prefork", services.RABBITMQ_URL, True), id="prefork-rabbitmq-late", marks=pytest.mark.broker),
]


@pytest.fixture(scope="module", params=COMBINATIONS)
def cases(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cases]:
    pool, broker, late = request.param
    worker = Cases(tmp_path_factory.mktemp("worker"), pool, broker, late=late)
    try:
        worker.run()
        yield worker
    finally:
        worker.close()


def test_every_delivery_ends_exactly_once(cases: Cases) -> None:
    """The balance line: what was received equals what ended."""
    received = [delivery.token for delivery in cases.received]
    ended = [event.delivery.token for event in cases.events]
    assert sorted(received) == sorted(ended)
    assert len(set(ended)) == len(ended)
    assert cases.damaged == []


def test_the_hooks_complain_about_nothing(cases: Cases) -> None:
    complaints = [line for line in cases.output().splitlines() if "opsconsole" in line and "ERROR" in line]
    (about_the_guard,) = complaints
    assert "start guard failed" in about_the_guard


def test_a_success_is_one_and_its_message_is_what_was_sent(cases: Cases) -> None:
    ended = cases.ended(cases.ids["ok"])
    assert ended.state is EndState.SUCCESS
    delivery = ended.delivery
    assert (delivery.task, delivery.queue, delivery.retries) == (f"{MODULE}.ok", cases.queue, 0)
    assert delivery.holder.startswith(delivery.holder.split("/")[0] + ("/child-" if cases.prefork else "/main"))
    assert delivery.received_boot <= (delivery.started_boot or 0) <= ended.at_boot
    assert abs(ended.at_wall - time.time()) < 300
    if delivery.sealed:
        message = raw(ended)
        assert message.headers["custom"] == {"a": [1]}
        assert message.properties["priority"] == delivery.priority == 3
        assert b"[[1], {}, {" in message.body


def test_a_plain_failure_has_its_error_its_message_and_its_identity(cases: Cases) -> None:
    failed = cases.failed(cases.ids["plain"])
    assert failed.caught is Caught.FAILURE
    assert failed.error.error_class == f"{MODULE}.Declined"
    assert failed.error.text == "card declined for 5"
    assert failed.error.call_site == f"{MODULE}:plain"
    assert "KeyError" in failed.error.classes
    assert "card declined for 5" in failed.error.traceback
    assert not failed.never_started
    delivery = failed.delivery
    assert delivery.acked
    assert delivery.message_state is MessageState.FULL
    assert (delivery.tenant, delivery.queue) == ("acme", cases.queue)
    assert (delivery.trace_id, delivery.sentry_id) == (TRACE.split("-")[1], SENTRY.split("-")[0])
    message = raw(failed)
    assert message.headers["id"] == cases.ids["plain"]
    assert message.headers["tenant"] == "acme"
    assert message.delivery_info["routing_key"] == cases.queue
    assert TOKEN_KEY not in message.properties


def test_a_failure_inside_a_library_names_the_users_own_line(cases: Cases) -> None:
    assert cases.failed(cases.ids["library"]).error.call_site == f"{MODULE}:through_library"


def test_attempts_that_celery_repeats_are_no_failures_and_the_last_one_is(cases: Cases) -> None:
    # Celery publishes an attempt before it says so: another child may have ended it by then.
    events = sorted(cases.of(cases.ids["again"]), key=lambda event: event.delivery.retries)
    assert [type(event) for event in events] == [Ended, Ended, Failed]
    assert [event.delivery.retries for event in events] == [0, 1, 2]
    for event in events:
        assert event.error is not None
        assert event.error.error_class == f"{MODULE}.Declined"
    assert isinstance(events[0], Ended)
    assert events[0].state is EndState.RETRY
    assert raw(events[-1]).headers["retries"] == 2
    assert not any(TOKEN_KEY in str(raw(event).headers) for event in events)


def test_ignore_is_no_failure(cases: Cases) -> None:
    assert cases.ended(cases.ids["ignored"]).state is EndState.IGNORED


def test_reject_without_requeue_is_one_failure(cases: Cases) -> None:
    failed = cases.failed(cases.ids["rejected"])
    assert (failed.caught, failed.error.error_class) == (Caught.FAILURE, "celery.exceptions.Reject")
    assert failed.error.text == "not for me"
    assert raw(failed).body


def test_reject_with_requeue_is_lost_after_the_acknowledgement_and_returned_before_it(cases: Cases) -> None:
    events = cases.of(cases.ids["requeued"])
    if not cases.late:
        (failed,) = events
        assert isinstance(failed, Failed)
        assert failed.caught is Caught.REQUEUED_AFTER_ACK
        assert raw(failed).body
    else:
        assert [getattr(event, "state", None) for event in events] == [EndState.RETURNED, EndState.SUCCESS]
        assert events[1].delivery.redelivered or cases.broker.startswith("redis")


def test_an_error_that_cannot_be_pickled_keeps_its_name_and_line(cases: Cases) -> None:
    error = cases.failed(cases.ids["unpicklable"]).error
    assert error.error_class == f"{MODULE}.Unpicklable"
    assert error.text == "7: has a lock"
    assert error.call_site == f"{MODULE}:unpicklable"


def test_wrong_arguments_are_a_failure_without_a_line_of_the_users(cases: Cases) -> None:
    error = cases.failed(cases.ids["wrong arguments"]).error
    assert (error.error_class, error.call_site) == ("TypeError", "")


def test_a_raising_before_start_is_a_failure(cases: Cases) -> None:
    failed = cases.failed(cases.ids["before start"])
    assert failed.error.text == "not today"
    assert failed.error.call_site.endswith("RefusesToStart.before_start")
    assert "never_begins" not in cases.marks()


def test_an_unknown_job_is_a_failure_with_its_message(cases: Cases) -> None:
    failed = cases.failed(cases.ids["unknown"])
    assert (failed.caught, failed.never_started) == (Caught.UNKNOWN, True)
    assert failed.delivery.task == f"{MODULE}.no_such_job"
    assert (failed.delivery.queue, failed.delivery.tenant) == (cases.queue, "acme")
    assert raw(failed).headers["task"] == f"{MODULE}.no_such_job"


@pytest.mark.parametrize("key", ["expired", "expired later"])
def test_an_expired_job_is_a_failure_that_never_started(cases: Cases, key: str) -> None:
    if key == "expired" and "amqp" in cases.broker:
        pytest.skip("RabbitMQ drops it itself, and no worker ever sees it")
    failed = cases.failed(cases.ids[key])
    assert (failed.caught, failed.never_started, failed.delivery.acked) == (Caught.EXPIRED, True, True)
    assert raw(failed).headers["expires"]
    assert raw(failed).headers["id"] == cases.ids[key]


def test_a_revoked_job_is_counted_and_no_failure(cases: Cases) -> None:
    assert cases.ended(cases.ids["revoked"]).state is EndState.REVOKED


def test_a_body_that_nobody_can_decode_is_a_failure(cases: Cases) -> None:
    """Celery acknowledges it and fires no signal at all."""
    failed = cases.failed("undecodable")
    assert (failed.caught, failed.never_started) == (Caught.REJECTED_MESSAGE, True)
    assert raw(failed).body == b"{oops"
    assert failed.delivery.task == f"{MODULE}.ok"


def test_messages_that_are_no_jobs_are_failures(cases: Cases) -> None:
    for task_id in ("bad-content", "bad-eta"):
        failed = cases.failed(task_id)
        assert (failed.caught, failed.never_started) == (Caught.REJECTED_MESSAGE, True)
    (nameless,) = [event for event in cases.events if event.delivery.task == ""]
    assert nameless.delivery.task_id.startswith("message-")
    assert raw(nameless).headers["other"] == "no task"


def test_arguments_of_the_wrong_shape_are_an_internal_error(cases: Cases) -> None:
    failed = cases.failed("bad-kwargs")
    assert (failed.caught, failed.never_started) == (Caught.INTERNAL, True)


def test_a_job_run_inside_another_is_no_delivery(cases: Cases) -> None:
    assert cases.ended(cases.ids["eager inside"]).state is EndState.SUCCESS
    assert "inner_eager" in cases.marks()
    assert len([event for event in cases.events if event.delivery.task == f"{MODULE}.plain"]) == 2


def test_two_deliveries_with_one_id_end_apart(cases: Cases) -> None:
    first, second = cases.of("same-id")
    assert first.delivery.token != second.delivery.token
    assert all(isinstance(event, Ended) and event.state is EndState.SUCCESS for event in (first, second))


def test_a_limit_in_a_child_is_one_failure(cases: Cases) -> None:
    if not cases.prefork:
        pytest.skip("limits are enforced in a pool of processes only")
    soft = cases.failed(cases.ids["soft"])
    assert soft.error.error_class == "billiard.exceptions.SoftTimeLimitExceeded"
    hard = cases.failed(cases.ids["hard"])
    assert hard.error.error_class == "billiard.exceptions.TimeLimitExceeded"
    for failed in (soft, hard):
        assert not failed.never_started
        assert raw(failed).body


def test_a_killed_child_is_one_failure_that_may_have_happened(cases: Cases) -> None:
    if not cases.prefork:
        pytest.skip("there are no children")
    failed = cases.failed(cases.ids["killed"])
    assert failed.error.error_class == "billiard.exceptions.WorkerLostError"
    assert not failed.never_started
    assert raw(failed).body


def test_a_killed_child_that_celery_tries_again_is_a_failure_at_last(cases: Cases) -> None:
    if not cases.prefork:
        pytest.skip("there are no children")
    first, second = cases.of(cases.ids["killed_again"])
    assert isinstance(first, Ended)
    assert first.state is EndState.RETRY
    assert isinstance(second, Failed)
    assert [event.delivery.retries for event in (first, second)] == [0, 1]
    assert TOKEN_KEY not in str(raw(second))


def test_an_on_failure_that_raises_does_not_hide_the_failure(cases: Cases) -> None:
    """Celery then sends an internal error, and from the main process a failure with the wrong error."""
    failed = cases.failed(cases.ids["fails twice"])
    assert failed.caught is Caught.INTERNAL
    assert failed.error.text == "on_failure broke"
    assert f"{MODULE}.Declined" in failed.error.classes
    assert not failed.never_started
    assert raw(failed).headers["id"] == cases.ids["fails twice"]


def test_system_exit_is_a_failure_unless_the_broker_still_has_the_job(cases: Cases) -> None:
    event = cases.only(cases.ids["exits"])
    if cases.prefork:
        assert isinstance(event, Failed)
        assert event.error.error_class == "billiard.exceptions.WorkerLostError"
    elif cases.late:
        assert isinstance(event, Ended)
        assert event.state is EndState.RETURNED
    else:
        assert isinstance(event, Failed)
        assert event.error.error_class == "SystemExit"


# The start guard


def test_a_repair_is_claimed_once_before_its_body_runs(cases: Cases) -> None:
    """Parent, child and grandchild class are all wrapped: only the first claims."""
    ended = cases.ended(cases.ids["claimed"])
    assert ended.state is EndState.SUCCESS
    assert (ended.delivery.repair_id, ended.delivery.claimed) == ("r1", True)
    task_id, holder = (cases.base / "guard" / "r1.0").read_text().split()
    assert task_id == cases.ids["claimed"]
    assert holder == ended.delivery.holder
    assert cases.marks().count("repaired claimed") == 1


def test_a_refused_repair_does_not_run_and_says_why(cases: Cases) -> None:
    for key, text, call_site in (
        ("refused", "this repair was cancelled", ""),
        ("refused for now", "the database is read-only", RETRIABLE),
        ("guard broken", "the start guard failed: ConnectionError", RETRIABLE),
    ):
        ended = cases.ended(cases.ids[key])
        assert ended.state is EndState.REFUSED
        assert ended.error is not None
        assert (ended.error.error_class, ended.error.text, ended.error.call_site) == ("StartRefused", text, call_site)
        assert not ended.delivery.claimed
    assert not {"repaired refused", "repaired later", "repaired broken"} & set(cases.marks())


def test_each_attempt_of_a_repair_is_claimed(cases: Cases) -> None:
    events = cases.of(cases.ids["claimed twice"])
    assert [(event.delivery.retries, event.delivery.claimed) for event in events] == [(0, True), (1, True)]
    assert all(event.delivery.repair_id == "r2" for event in events)
    assert cases.marks().count("repaired_again again") == 2


def test_of_two_deliveries_of_one_repair_one_runs(cases: Cases) -> None:
    states = sorted(str(event.state) for event in cases.of("same-repair") if isinstance(event, Ended))
    assert states == ["refused", "succeeded"]
    assert cases.marks().count("repaired same repair") == 1


def test_a_refusal_survives_being_pickled() -> None:
    refused = pickle.loads(pickle.dumps(StartRefused("because", retriable=True)))
    assert (refused.reason, refused.retriable, str(refused)) == ("because", True, "because")


# Workers that die

DEATHS = [
    pytest.param(("prefork", "", False), id="prefork-filesystem-early"),
    pytest.param(("prefork", "", True), id="prefork-filesystem-late"),
    pytest.param(("threads", "", False), id="threads-filesystem-early"),
    pytest.param(("prefork", services.RABBITMQ_URL, False), id="prefork-rabbitmq-early", marks=pytest.mark.broker),
    pytest.param(("prefork", services.REDIS_URL, True), id="prefork-redis-late", marks=pytest.mark.broker),
]


@pytest.fixture
def doomed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Worker]:
    """A worker with one job done, two running, and others received and waiting."""
    pool, broker, late = request.param
    worker = Worker(tmp_path, pool, broker, late=late)
    try:
        done = worker.send("ok")
        worker.wait_for(1)
        assert worker.only(done)
        for name in "abcdef":
            worker.send("slow", name, 60.0, task_id=name)
        deadline = time.monotonic() + TIMEOUT
        # A pool of processes takes no more than one beyond its size from a broker that cannot wait for events.
        while len(worker.marks()) < 2 or len(worker.received) < 4:
            worker.still_runs(deadline)
            worker.read()
            time.sleep(0.05)
        yield worker
    finally:
        worker.close()


def outcomes(worker: Worker) -> dict[str, str]:
    return {
        event.delivery.task_id: "lost" if isinstance(event, Failed) else str(event.state)
        for event in worker.events
        if event.delivery.task_id in "abcdef"
    }


def expected_outcomes(worker: Worker) -> dict[str, str]:
    running = {mark.split()[1] for mark in worker.marks()}
    received = {delivery.task_id for delivery in worker.received} & set("abcdef")
    assert len(running) == 2
    assert received > running
    return {name: "lost" if name in running and not worker.late else "returned" for name in received}


@pytest.mark.parametrize("doomed", DEATHS, indirect=True)
def test_a_killed_workers_running_jobs_are_lost_and_its_waiting_ones_returned(doomed: Worker) -> None:
    assert list(doomed.root.dead_folders()) == []
    os.killpg(doomed.process.pid, signal.SIGKILL)
    doomed.process.wait(TIMEOUT)
    doomed.finish()
    assert outcomes(doomed) == expected_outcomes(doomed)
    for event in doomed.events:
        if isinstance(event, Failed):
            assert (event.caught, event.never_started) == (Caught.WORKER_LOST, False)
            assert raw(event).headers["id"] == event.delivery.task_id


@pytest.mark.parametrize("doomed", DEATHS[:1], indirect=True)
def test_a_worker_whose_main_process_alone_is_killed_is_recovered_too(doomed: Worker) -> None:
    doomed.process.kill()
    doomed.process.wait(TIMEOUT)
    doomed.finish()
    assert outcomes(doomed) == expected_outcomes(doomed)


@pytest.mark.parametrize("doomed", DEATHS[:2], indirect=True)
def test_a_cold_shutdown_loses_what_was_acknowledged(doomed: Worker) -> None:
    """Celery announces a retry that nobody sends, and a postrun without a state: neither is an end."""
    doomed.signal(signal.SIGQUIT)
    doomed.finish()
    assert outcomes(doomed) == expected_outcomes(doomed)


# Workers that are stopped


@pytest.fixture
def replaced(tmp_path: Path) -> Iterator[Worker]:
    """A worker on files whose only child has replaced one that died, and runs a job of nine seconds."""
    worker = Worker(tmp_path, "prefork", "", late=False, concurrency=1)
    try:
        worker.send("killed")
        worker.wait_for(1)
        worker.send("slow", "the last", 9.0, task_id="last")
        worker.wait_for_marks("slow the last")
        yield worker
    finally:
        worker.close()


def test_a_worker_that_is_stopped_finishes_the_jobs_of_children_that_replaced_others(replaced: Worker) -> None:
    """Linux would kill them with the thread of the pool that forked them, which ends while they work."""
    replaced.signal(signal.SIGTERM)
    replaced.finish()
    assert replaced.process.returncode == 0
    assert replaced.ended("last").state is EndState.SUCCESS


def test_a_child_that_replaced_another_ends_with_the_main_process(replaced: Worker) -> None:
    [child] = psutil.Process(replaced.process.pid).children()
    replaced.process.kill()
    replaced.process.wait(TIMEOUT)
    child.wait(2)
    replaced.finish()
    assert outcomes(replaced) == {}
    assert isinstance(replaced.only("last"), Failed)


# Workers without a journal


def test_a_worker_whose_journal_cannot_be_written_works_on_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    worker = Worker(tmp_path, "prefork", "", late=False, JOURNAL_APP_JOURNAL=str(tmp_path / "file" / "journal"))
    try:
        worker.send("slow", "unseen", 0.0)
        worker.send("repaired", "refused", headers={REPAIR_HEADER: "no-1"})
        worker.send("repaired", "claimed", headers={REPAIR_HEADER: "r1"})
        worker.wait_for_marks("slow unseen", "repaired claimed")
        worker.signal(signal.SIGTERM)
        assert "opsconsole has no journal in this worker and captures nothing: NotADirectoryError" in worker.output()
        assert "repaired refused" not in worker.marks()
        assert (tmp_path / "guard" / "r1.0").read_text().split()[1].startswith("without")
    finally:
        worker.close()


def test_the_kill_switch_keeps_every_hook_out(tmp_path: Path) -> None:
    worker = Worker(tmp_path, "prefork", "", late=False, OPSCONSOLE_CAPTURE="off")
    try:
        worker.send("slow", "unseen", 0.0)
        worker.wait_for_marks("slow unseen")
        worker.signal(signal.SIGTERM)
        assert "OPSCONSOLE_CAPTURE is off" in worker.output()
        assert worker.root.folders() == []
    finally:
        worker.close()


# Parts of entries


@pytest.fixture
def hooks(tmp_path: Path) -> Iterator[Hooks]:
    app = make_app({"JOURNAL_APP_QUEUE": "shop"})

    @app.task(name="shop.charge", shared=False)
    def charge(amount: int) -> None:
        """Never called: only its messages are looked at."""

    made = Hooks(app, source="tests", sealer=SEALER, root=JournalRoot(tmp_path / "journal"))
    made._on_worker_init(sender=SimpleNamespace(hostname="worker@host"))
    yield made
    made.close()
    app.close()


def received(hooks: Hooks, embed: Any = None, properties: dict[str, Any] | None = None, **headers: Any) -> Delivery:
    """Let the hooks receive one message and read what they wrote about it."""
    app = hooks.app
    message = Message(
        body=json.dumps([[1], {}, embed or {}]).encode(),
        content_type="application/json",
        content_encoding="utf-8",
        headers={"id": "id-1", "task": "shop.charge", "root_id": "id-1", **headers},
        properties=properties or {},
        delivery_info={"exchange": "shop", "routing_key": "shop"},
    )
    hooks._on_task_received(request=Request(message, app=app, task=app.tasks["shop.charge"], hostname="worker@host"))
    hooks.flush()
    assert hooks.folder is not None
    (delivery,) = FolderReader(hooks.folder, SEALER, settle_seconds=0).read().received
    return delivery


def test_a_failure_that_waits_for_the_disk_has_a_copy_of_its_message(
    hooks: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the others in a burst only main's entry has it; whoever was killed before that left it with the broker."""
    now = 1000.0
    monkeypatch.setattr("deadletters.journal.files.boot_now", lambda: now)
    copied = []
    for step in (0.0, 0.01, 0.01, 1.0):
        now += step
        task = hooks.app.tasks["shop.charge"]
        task.push_request(id="id-1", task="shop.charge", properties={TOKEN_KEY: 1})
        try:
            hooks._on_task_failure(sender=task, task_id="id-1", exception=ValueError("no"), args=[1], kwargs={})
        finally:
            task.pop_request()
    assert hooks.folder is not None
    (path,) = hooks.folder.files()
    for _, _, payload in read_frames(path.read_bytes(), final=True)[0]:
        if payload[0] == Kind.FAIL:
            copied.append(bool(split_report_part(payload[ENTRY.size :])[3]))
    assert copied == [True, False, False, True]


def test_a_member_of_a_chord_names_the_chords_body(hooks: Hooks) -> None:
    chord = {"task": "shop.sum", "args": [], "kwargs": {}, "options": {"task_id": "body-id"}}
    delivery = received(hooks, {"chord": chord}, group="group-id", parent_id="parent-id", root_id="root-id")
    assert (delivery.chord_id, delivery.group_id) == ("body-id", "group-id")
    assert (delivery.parent_id, delivery.root_id) == ("parent-id", "root-id")


@pytest.mark.parametrize("embed", [{"chord": "nonsense"}, {"chord": {"options": None}}, ["not", "a", "mapping"]])
def test_a_chord_that_makes_no_sense_is_none(hooks: Hooks, embed: Any) -> None:
    assert received(hooks, embed).chord_id == ""


def test_a_queue_behind_an_exchange_is_named(hooks: Hooks) -> None:
    hooks.app.conf.task_queues = (Queue("cards", Exchange("shop"), routing_key="shop"),)
    delivery = received(hooks)
    assert (delivery.queue, delivery.exchange, delivery.routing_key) == ("cards", "shop", "shop")


@pytest.mark.parametrize(
    ("headers", "trace_id", "sentry_id"),
    [
        ({"traceparent": TRACE}, "0af7651916cd43dd8448eb211c80319c", ""),
        ({"traceparent": "nonsense"}, "", ""),
        ({"traceparent": 5, "sentry-trace": None}, "", ""),
        ({"sentry-trace": SENTRY}, "", "771a43a4192642f0b136d5159a501700"),
        ({"baggage": f"a=b, sentry-trace_id={'ab' * 16},c=d"}, "", "ab" * 16),
    ],
)
def test_trace_ids_are_read_from_their_headers(
    hooks: Hooks, headers: dict[str, Any], trace_id: str, sentry_id: str
) -> None:
    delivery = received(hooks, **headers)
    assert (delivery.trace_id, delivery.sentry_id) == (trace_id, sentry_id)


@pytest.mark.parametrize(
    ("identity", "expected"),
    [
        (lambda task, args, kwargs, headers: (headers["tenant"], task, str(args[0])), ("acme", "shop.charge", "1")),
        (lambda *_: (None, None, None), ("default", "", "")),
        (lambda *_: ("x" * 1000, 5, b"y"), ("x" * 255, "5", "b'y'")),
        (lambda *_: 1 / 0, ("default", "", "")),
        (lambda *_: ("too", "few"), ("default", "", "")),
    ],
)
def test_whose_a_job_is_is_asked_once_and_never_stops_it(
    hooks: Hooks, identity: Any, expected: tuple[str, str, str], caplog: pytest.LogCaptureFixture
) -> None:
    hooks.identity = identity
    delivery = received(hooks, tenant="acme")
    assert (delivery.tenant, delivery.actor_type, delivery.actor_id) == expected


def test_hostile_headers_are_text(hooks: Hooks) -> None:
    delivery = received(hooks, id=5, task="shop.charge", root_id=["x"], group={"a": 1}, retries="many")
    assert (delivery.task_id, delivery.root_id, delivery.group_id, delivery.retries) == ("5", "['x']", "{'a': 1}", 0)


def test_the_same_complaint_is_logged_once_a_minute(
    hooks: Hooks, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    time_of(monkeypatch, module, monotonic=lambda: now)
    for _ in range(50):
        hooks._on_task_received(request=None)
    assert len(caplog.records) == 1
    now += 61
    hooks._on_task_received(request=None)
    assert len(caplog.records) == 2
    assert "49 more such lines" in caplog.text


def test_a_soft_time_limit_that_lands_in_a_hook_is_the_jobs(hooks: Hooks, monkeypatch: pytest.MonkeyPatch) -> None:
    def strike(*_: Any, **__: Any) -> None:
        raise SoftTimeLimitExceeded

    assert hooks._file is not None
    monkeypatch.setattr(hooks._file, "append", strike)
    with pytest.raises(SoftTimeLimitExceeded):
        received(hooks)


def test_a_repair_without_a_guard_is_refused(hooks: Hooks) -> None:
    with pytest.raises(StartRefused, match="no start guard") as refusal:
        hooks.check_start(Context({REPAIR_HEADER: "r1", "id": "id-1"}))
    assert refusal.value.retriable
    hooks.check_start(Context({"id": "id-1"}))


def test_connecting_twice_connects_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_connected", None)
    options: dict[str, Any] = {"source": "tests", "sealer": SEALER, "root": JournalRoot(tmp_path)}
    app = make_app({})
    before = len(signals.task_received.receivers)
    try:
        first = connect(app, **options)
        second = connect(app, **options)
        assert first is not second
        assert len(signals.task_received.receivers) == before + 1
        second.folder = WorkerFolder(tmp_path / "worker.1.boot.ff")
        assert connect(app, **options) is second
    finally:
        second.disconnect()
    assert len(signals.task_received.receivers) == before
    app.close()
