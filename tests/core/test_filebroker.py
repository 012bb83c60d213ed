"""The broker made of files: no message is seen half written, and none is lost with the process that had taken it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection, Message, Queue
from kombu.asynchronous import Hub
from kombu.exceptions import ChannelError

from opsconsole.core import filebroker

ROOT = Path(__file__).parents[2]
QUEUE = "jobs.of-one"


def connect(folder: Path, *, polling_interval: float = 0.01) -> Connection:
    (folder / "messages").mkdir(exist_ok=True)
    options = {
        "data_folder_in": str(folder / "messages"),
        "data_folder_out": str(folder / "messages"),
        "control_folder": str(folder / "control"),
        "polling_interval": polling_interval,
    }
    return Connection(
        "filesystem://localhost", transport="opsconsole.core.filebroker:Transport", transport_options=options
    )


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Connection]:
    with connect(tmp_path) as connection:
        yield connection


def send(broker: Connection, *bodies: Any, queue: str = QUEUE) -> None:
    with broker.SimpleQueue(queue) as simple:
        for body in bodies:
            simple.put(body)


def take(broker: Connection, queue: str = QUEUE) -> Any:
    return broker.default_channel.basic_get(queue)


def bodies(broker: Connection) -> list[Any]:
    found = []
    while (message := take(broker)) is not None:
        found.append(message.decode())
        message.ack()
    return found


def test_messages_come_in_the_order_in_which_they_were_sent(broker: Connection) -> None:
    send(broker, *range(30))
    assert bodies(broker) == list(range(30))


def test_an_acknowledged_message_leaves_no_file(broker: Connection, tmp_path: Path) -> None:
    send(broker, "one")
    take(broker).ack()
    assert list(tmp_path.rglob("*.msg")) == []


def test_a_taken_message_is_on_disk_until_it_is_acknowledged(broker: Connection, tmp_path: Path) -> None:
    send(broker, "one")
    message = take(broker)
    assert len(list((tmp_path / "taken").rglob("*.msg"))) == 1
    assert list((tmp_path / "messages").iterdir()) == []
    message.ack()


def test_a_rejected_message_is_gone(broker: Connection, tmp_path: Path) -> None:
    send(broker, "one")
    take(broker).reject()
    assert take(broker) is None
    assert list(tmp_path.rglob("*.msg")) == []


def test_a_requeued_message_comes_back_first_and_says_so(broker: Connection) -> None:
    send(broker, "one", "two")
    first = take(broker)
    assert first.delivery_info["redelivered"] is False
    first.requeue()
    again = take(broker)
    assert again.decode() == "one"
    assert again.delivery_info["redelivered"] is True


def test_closing_the_channel_puts_back_what_was_not_acknowledged(broker: Connection, tmp_path: Path) -> None:
    send(broker, "one", "two")
    with broker.channel() as channel:
        channel.basic_get(QUEUE)
        channel.basic_get(QUEUE).ack()
    with connect(tmp_path) as other:
        assert bodies(other) == ["one"]


def test_what_is_consumed_without_acknowledgement_leaves_no_file(broker: Connection, tmp_path: Path) -> None:
    send(broker, "one")
    assert broker.default_channel.basic_get(QUEUE, no_ack=True).decode() == "one"
    assert list(tmp_path.rglob("*.msg")) == []
    send(broker, "two")
    got = []
    with broker.Consumer([Queue(QUEUE)], callbacks=[lambda body, _: got.append(body)], no_ack=True):
        broker.drain_events(timeout=5)
    assert got == ["two"]
    assert list(tmp_path.rglob("*.msg")) == []


HOLD = """
import sys, time
from pathlib import Path
from tests.core.test_filebroker import connect, take
broker = connect(Path(sys.argv[1]))
for number in range(3):
    message = take(broker)
message.ack()
print("ready", flush=True)
time.sleep(60)
"""


def hold_three(folder: Path) -> subprocess.Popen[str]:
    """Start a process that takes three messages and acknowledges the last of them."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "ready\n"
    return process


def test_what_a_killed_process_had_taken_is_delivered_to_another_one(broker: Connection, tmp_path: Path) -> None:
    send(broker, "one", "two", "acknowledged", "four")
    process = hold_three(tmp_path)
    try:
        assert take(broker).decode() == "four"
        assert take(broker) is None, "it lives and holds them"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with connect(tmp_path) as other:
        first, second = take(other), take(other)
        assert [first.decode(), second.decode()] == ["one", "two"]
        assert first.delivery_info["redelivered"] is True
        assert take(other) is None


def test_a_message_is_never_seen_half_written(broker: Connection, tmp_path: Path) -> None:
    """kombu's own transport opens the final name first; a reader that comes in between reads nothing and gives up."""
    stop = threading.Event()
    seen: list[str] = []

    def look() -> None:
        while not stop.is_set():
            for path in (tmp_path / "messages").glob("[!.]*"):
                try:
                    json.loads(path.read_text())
                except FileNotFoundError:
                    continue
                except ValueError as error:
                    seen.append(str(error))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for number in range(200):
            send(broker, "x" * 20_000, queue=f"{QUEUE}-{number % 3}")
    finally:
        stop.set()
        thread.join()
    assert seen == []
    assert len(list((tmp_path / "messages").iterdir())) == 200


def test_several_consumers_get_each_message_once(broker: Connection, tmp_path: Path) -> None:
    send(broker, *range(200))
    got: list[int] = []

    def consume() -> None:
        with connect(tmp_path) as own:
            got.extend(bodies(own))

    threads = [threading.Thread(target=consume) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(200))


@pytest.mark.parametrize("text", ["", "[1]", '{"properties": 3, "body": ""}', '{"body": "x"}', "\x00"])
def test_a_file_that_is_no_message_is_put_aside_and_ends_nothing(
    broker: Connection, tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    send(broker, "sound")
    (tmp_path / "messages" / f"!first.{QUEUE}.msg").write_text(text)
    assert take(broker).decode() == "sound"
    assert len(list((tmp_path / "unreadable").iterdir())) == 1
    assert "cannot be read" in caplog.text


def test_bindings_made_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)

    def bind(number: int) -> None:
        with connect(tmp_path) as own:
            barrier.wait()
            own.default_channel._queue_bind("shared", "", "", f"queue-{number}")

    threads = [threading.Thread(target=bind, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with connect(tmp_path) as own:
        assert len(own.default_channel.get_table("shared")) == 8
        own.default_channel._delete("queue-3", "shared", "", "")
        assert len(own.default_channel.get_table("shared")) == 7


def test_an_exchange_cannot_name_a_file_elsewhere(broker: Connection) -> None:
    with pytest.raises(ChannelError):
        broker.default_channel.get_table("../elsewhere")


def test_a_folder_that_is_not_locked_yet_is_left_alone(broker: Connection, tmp_path: Path) -> None:
    beginning = tmp_path / "taken" / ".123-abc"
    beginning.mkdir(parents=True)
    assert take(broker) is None
    assert beginning.exists()


def test_dead_processes_are_looked_for_again_while_running(
    broker: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert take(broker) is None
    send(broker, "one", "two", "three")
    process = hold_three(tmp_path)
    process.kill()
    process.wait()
    monkeypatch.setattr(filebroker, "LOOK_FOR_DEAD_SECONDS", 0.1)
    time.sleep(0.1)
    assert bodies(broker) == ["one", "two"]


# With a worker's event loop


NEVER = 3600.0


class Listener:
    """Consumes in an event loop, as a worker does, and keeps what it got."""

    def __init__(self, folder: Path, *, every_seconds: float, prefetch: int = 0) -> None:
        self.loop = Hub()
        self.got: list[Message] = []
        self.broker = connect(folder, polling_interval=every_seconds)
        self.broker.transport.register_with_event_loop(self.broker.connection, self.loop)
        self.consumer = self.broker.Consumer([Queue(QUEUE)], on_message=self.got.append)
        self.consumer.qos(prefetch_count=prefetch)
        self.consumer.consume()
        self.loop.call_repeatedly(0.01, lambda: None)  # the loop's own turns, not the broker's, so that tests can look

    def run(self, seconds: float = 0.3, *, until: int = sys.maxsize) -> list[Any]:
        end = time.monotonic() + seconds
        while time.monotonic() < end and len(self.got) < until:
            self.loop.run_once()
        return [message.decode() for message in self.got]

    def close(self) -> None:
        self.broker.release()
        self.loop.close()


@pytest.fixture
def listen(tmp_path: Path) -> Iterator[Callable[..., Listener]]:
    listeners = []

    def start(**options: Any) -> Listener:
        listeners.append(Listener(tmp_path, **options))
        return listeners[-1]

    yield start
    for listener in listeners:
        listener.close()


Listen = Callable[..., Listener]


def test_celery_takes_its_event_loop_for_it() -> None:
    assert filebroker.Transport.implements.asynchronous


def test_an_event_loop_delivers_what_comes_in_order(broker: Connection, listen: Listen) -> None:
    send(broker, "first", "second")
    listener = listen(every_seconds=0.02)
    assert listener.run(5, until=2) == ["first", "second"]
    send(broker, "third")
    assert listener.run(5, until=3) == ["first", "second", "third"]


def test_it_looks_only_as_often_as_it_is_told_to(
    broker: Connection, listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    look = filebroker.Transport._look
    monkeypatch.setattr(filebroker.Transport, "_look", lambda self: (looks.append(time.monotonic()), look(self)))
    listen(every_seconds=0.1).run(0.55)
    assert 2 <= len(looks) <= 7


def test_no_more_is_taken_than_is_wanted_and_the_next_as_soon_as_one_is_acknowledged(
    broker: Connection, listen: Listen, tmp_path: Path
) -> None:
    listener = listen(every_seconds=NEVER, prefetch=2)
    send(broker, *range(4))
    assert listener.run() == [0, 1]
    assert len(list((tmp_path / "messages").iterdir())) == 2
    listener.got[0].ack()
    assert listener.run(5, until=3) == [0, 1, 2]
    # The threads of a pool acknowledge too.
    thread = threading.Thread(target=listener.got[1].reject)
    thread.start()
    thread.join()
    assert listener.run(5, until=4) == [0, 1, 2, 3]


def test_an_acknowledgement_that_nobody_waits_for_is_no_reason_to_look(broker: Connection, listen: Listen) -> None:
    send(broker, "one")
    listener = listen(every_seconds=NEVER)
    assert listener.run(5, until=1) == ["one"]
    listener.run(0.1)
    send(broker, "two")
    listener.got[0].ack()
    assert listener.run() == ["one"]


def test_many_messages_do_not_keep_the_loop_from_everything_else(
    broker: Connection, listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filebroker, "MOST_AT_ONCE", 3)
    send(broker, *range(10))
    listener = listen(every_seconds=NEVER)
    at_each_turn = [0]
    listener.loop.on_tick.add(lambda: at_each_turn.append(len(listener.got)))
    assert listener.run(5, until=10) == list(range(10))
    assert max(later - earlier for earlier, later in pairwise(at_each_turn)) == 3


def test_a_consumer_that_is_cancelled_takes_nothing_more(broker: Connection, listen: Listen, tmp_path: Path) -> None:
    listener = listen(every_seconds=0.02)
    listener.run(0.1)
    listener.consumer.cancel()
    send(broker, "one")
    assert listener.run() == []
    assert len(list((tmp_path / "messages").iterdir())) == 1


def test_a_connection_that_is_closed_leaves_nothing_in_the_loop(
    broker: Connection, listen: Listen, tmp_path: Path
) -> None:
    listener = listen(every_seconds=0.02, prefetch=1)
    send(broker, "one", "two")
    assert listener.run(5, until=1) == ["one"]
    listener.broker.release()
    assert listener.loop.readers == {}
    assert listener.run() == ["one"]
    listener.got[0].ack()  # too late, and no error
    with connect(tmp_path) as other:
        assert bodies(other) == ["one", "two"]


def test_a_loop_that_was_reset_listens_to_the_next_connection(
    broker: Connection, listen: Listen, tmp_path: Path
) -> None:
    """A worker resets its loop when a connection fails, closes that, and opens another one."""
    listener = listen(every_seconds=0.02)
    listener.run(0.1)
    listener.loop.reset()
    listener.broker.release()
    listener.broker = connect(tmp_path, polling_interval=0.02)
    listener.broker.transport.register_with_event_loop(listener.broker.connection, listener.loop)
    listener.consumer = listener.broker.Consumer([Queue(QUEUE)], on_message=listener.got.append)
    listener.consumer.consume()
    send(broker, "one")
    assert listener.run(5, until=1) == ["one"]
    assert len(listener.loop.readers) == 1


def test_an_error_ends_the_loop_as_it_ends_a_worker_without_one(listen: Listen, tmp_path: Path) -> None:
    """A timer's errors are only logged, ten times a second."""
    listener = listen(every_seconds=0.02)
    listener.run(0.1)
    (tmp_path / "messages").rmdir()
    with pytest.raises(FileNotFoundError):
        listener.run(5)
