"""Publishing many at a time: it arrives as Celery would have sent it, and what is said of each message is true."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import kombu
import pytest
import redis
from celery import Celery
from kombu import Exchange, Queue
from kombu.transport.virtual import exchange as virtual_exchange

from opsconsole.core import outbox as outbox_module
from opsconsole.core import publishing
from opsconsole.core.outbox import Outbox
from opsconsole.core.publishing import (
    BROKER_WIDE,
    SENT,
    Confirmed,
    Outcome,
    Outgoing,
    Pipelined,
    Published,
    Sender,
)
from tests.e2e.proxy import Proxy
from tests.services import RABBITMQ_URL, REDIS_URL

ROOT = Path(__file__).parents[2]
BOTH = pytest.mark.parametrize("url", [REDIS_URL, RABBITMQ_URL], ids=["redis", "rabbitmq"])
pytestmark = pytest.mark.broker


@pytest.fixture
def names() -> Iterator[Callable[[], str]]:
    """Makes names for queues and exchanges that nothing else uses, and removes what was made under them."""
    made: list[str] = []

    def make() -> str:
        made.append(f"opsconsole-test-{uuid4().hex}")
        return made[-1]

    yield make
    with kombu.Connection(RABBITMQ_URL, connect_timeout=2) as broker:
        channel: Any = broker.default_channel
        for name in made:
            channel.queue_delete(name)
            channel.exchange_delete(name)
    with redis.Redis.from_url(REDIS_URL) as client:
        for name in made:
            for key in client.scan_iter(f"*{name}*", count=1000):
                client.delete(key)


def app_on(url: str, *queues: Queue, **options: Any) -> Celery:
    app = Celery("tests", broker=url, set_as_current=False)
    app.conf.broker_transport_options = options
    if queues:
        app.conf.task_queues = queues
    return app


def outgoing(queue: str, number: int = 0, **changed: Any) -> Outgoing:
    task_id = changed.pop("task_id", str(uuid4()))
    message = Outgoing(
        body=json.dumps([[number], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]).encode(),
        content_type="application/json",
        content_encoding="utf-8",
        headers={"lang": "py", "task": "published.note", "id": task_id, "root_id": task_id, "retries": 0},
        properties={"correlation_id": task_id, "delivery_mode": 2, "priority": 0},
        exchange="",
        routing_key="",
        queue=queue,
    )
    return replace(message, **changed)


def numbers(url: str, queue: str, **options: Any) -> list[int]:
    """Take everything off a queue and return the messages' numbers in their order."""
    found = []
    with kombu.Connection(url, transport_options=options) as connection:
        channel: Any = connection.default_channel
        while (message := channel.basic_get(queue, no_ack=True)) is not None:
            found.append(json.loads(message.body)[0][0])
    return found


def outcomes(published: Published) -> list[str]:
    return [delivery.code or str(delivery.outcome) for delivery in published.deliveries]


def sender_of(outbox: Outbox) -> type[Sender]:
    assert outbox._sender is not None
    return type(outbox._sender)


def published(app: Celery, messages: list[Outgoing], **options: Any) -> Published:
    outbox = Outbox(app)
    try:
        return outbox.publish_many(messages, **options)
    finally:
        outbox.close()


# -- What arrives ------------------------------------------------------------------------------------------------------


def raw_messages(url: str, queue: str, *, sep: str = "\x06\x16", prefix: str = "") -> list[dict[str, Any]]:
    """Take everything off a queue as it lies there, for Redis with the name of its list."""
    if url.startswith("redis"):
        found = []
        with redis.Redis.from_url(url, decode_responses=True) as client:
            for key in sorted(client.scan_iter(f"{prefix}{queue}*", count=1000)):
                for payload in reversed(client.lrange(key, 0, -1)):
                    message = json.loads(payload)
                    message["properties"].pop("delivery_tag")
                    found.append({"key": key, **message})
                client.delete(key)
        return found
    found = []
    with kombu.Connection(url) as connection:
        channel: Any = connection.default_channel
        channel.auto_decode = False
        while (message := channel.basic_get(queue, no_ack=True)) is not None:
            info = {name: message.delivery_info[name] for name in ("exchange", "routing_key", "redelivered")}
            found.append({"body": bytes(message.body), "properties": message.properties, "info": info})
    return found


def as_captured(url: str, queue: str, exchange: str, routing_key: str) -> Outgoing:
    """Take one message off a queue and return it as it would be sent again."""
    with kombu.Connection(url) as connection:
        channel: Any = connection.default_channel
        message = channel.basic_get(queue, no_ack=True)
        assert message is not None
        kept = {
            name: value
            for name, value in message.properties.items()
            if name in ("priority", "reply_to", "delivery_mode", "correlation_id") and value is not None
        }
        body = message.body if isinstance(message.body, bytes) else message.body.encode()
        return Outgoing(
            body=body,
            content_type=message.content_type,
            content_encoding=message.content_encoding,
            headers=dict(message.headers),
            properties=kept,
            exchange=exchange,
            routing_key=routing_key,
            queue=queue,
        )


SENDINGS: list[dict[str, Any]] = [
    {"args": (1,)},
    {"args": (1,), "kwargs": {"text": "Grüße \u2028"}, "headers": {"tenant": "t-a", "deep": {"list": [1, None, 2.5]}}},
    {"args": (2**60,), "time_limit": 30, "soft_time_limit": 20, "correlation_id": "c-1", "reply_to": "answers"},
    {"args": (), "stamped_headers": ["trace"], "trace": "abc", "group_id": "g", "group_index": 3, "retries": 2},
    {"args": ("x" * 50_000,), "eta": datetime(2040, 1, 1, tzinfo=UTC)},
    {"args": (1,), "serializer": "pickle"},
    {"args": (1,), "serializer": "yaml"},
]


@BOTH
@pytest.mark.parametrize("sending", SENDINGS, ids=lambda sending: "-".join(sending))
def test_a_message_arrives_byte_for_byte_as_celery_would_have_sent_it(
    url: str, sending: dict[str, Any], names: Callable[[], str]
) -> None:
    """RET-01, RET-02: body, headers, stamps, limits, priority and correlation id are the original's."""
    queue = names()
    app = app_on(url)
    task_id = str(uuid4())
    for priority in (0, 5) if url.startswith("redis") else (0,):
        twice = [
            app.send_task("published.note", queue=queue, task_id=task_id, priority=priority, **sending)
            for _ in range(2)
        ]
        assert len(twice) == 2
        (captured, original) = (as_captured(url, queue, "", queue), raw_messages(url, queue))
        result = published(app, [captured])
        assert result.deliveries == (SENT,)
        assert raw_messages(url, queue) == original
    app.close()


@BOTH
def test_messages_keep_their_order_over_many_chunks(
    url: str, names: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = names()
    chunks = []
    for kind in (Pipelined, Confirmed):
        send_chunk = kind._send_chunk

        def counted(self: Any, chunk: list[Any], send_chunk: Any = send_chunk) -> None:
            chunks.append(len(chunk))
            send_chunk(self, chunk)

        monkeypatch.setattr(kind, "_send_chunk", counted)
    app = app_on(url)
    result = published(app, [outgoing(queue, number) for number in range(2_000)])
    assert (result.sent, result.trouble) == (2_000, "")
    assert numbers(url, queue) == list(range(2_000))
    assert max(chunks) == publishing.CHUNK
    assert len(chunks) <= 6
    app.close()


@BOTH
def test_a_chunk_is_bounded_in_bytes_and_a_large_message_goes_alone(url: str, names: Callable[[], str]) -> None:
    queue = names()
    app = app_on(url)
    sizes = [10, publishing.CHUNK_BYTES * 3, 10, publishing.CHUNK_BYTES // 2, publishing.CHUNK_BYTES // 2, 10]
    messages = [
        outgoing(queue, number, body=json.dumps([[number], {"pad": "x" * size}, {}]).encode())
        for number, size in enumerate(sizes)
    ]
    assert published(app, messages).sent == len(sizes)
    assert numbers(url, queue) == list(range(len(sizes)))
    app.close()


@BOTH
def test_many_queues_in_one_page_each_get_their_own(url: str, names: Callable[[], str]) -> None:
    queues = [names() for _ in range(7)]
    app = app_on(url)
    assert published(app, [outgoing(queues[number % 7], number) for number in range(100)]).sent == 100
    assert [numbers(url, queue) for queue in queues] == [list(range(which, 100, 7)) for which in range(7)]
    app.close()


def test_priorities_lie_in_the_lists_that_kombu_reads_first(redis_url: str, names: Callable[[], str]) -> None:
    """Also with steps and a separator of the app's own."""
    for options in ({}, {"priority_steps": list(range(10)), "sep": ":"}):
        queue = names()
        app = app_on(redis_url, **options)
        levels = [0, 9, 5, 3, None, 12, -4, 7]
        messages = [
            outgoing(queue, number, properties={"correlation_id": "c", "priority": level} if level is not None else {})
            for number, level in enumerate(levels)
        ]
        assert published(app, messages).sent == len(levels)
        by_key = {one["key"]: 0 for one in raw_messages(redis_url, queue)}
        for message in messages:
            with app.connection_for_write() as connection:
                properties = dict(message.properties)
                connection.Producer(auto_declare=False).publish(
                    message.body, routing_key=queue, content_type="application/json", content_encoding="utf-8",
                    headers=message.headers, **properties,
                )  # fmt: skip
        assert {one["key"] for one in raw_messages(redis_url, queue)} == set(by_key)
        assert len(by_key) > 2
        app.close()


def test_a_priority_queue_of_rabbitmq_delivers_the_urgent_first(rabbitmq_url: str, names: Callable[[], str]) -> None:
    queue = names()
    app = app_on(rabbitmq_url, Queue(queue, max_priority=9))
    messages = [outgoing(queue, level, properties={"priority": level, "correlation_id": "c"}) for level in (1, 9, 0, 5)]
    assert published(app, messages).sent == 4
    assert numbers(rabbitmq_url, queue) == [9, 5, 1, 0]
    app.close()


def test_a_key_prefix_is_kept(redis_url: str, names: Callable[[], str]) -> None:
    queue = names()
    app = app_on(redis_url, global_keyprefix="shop:")
    result = published(app, [outgoing(queue, number) for number in range(3)])
    assert result.sent == 3
    with redis.Redis.from_url(redis_url) as client:
        assert (client.llen(f"shop:{queue}"), client.llen(queue)) == (3, 0)
    assert numbers(redis_url, queue, global_keyprefix="shop:") == [0, 1, 2]
    app.close()


@BOTH
@pytest.mark.parametrize("kind", ["direct", "topic", "fanout"])
def test_exchanges_route_as_they_are_bound(url: str, kind: str, names: Callable[[], str]) -> None:
    """A fanout on Redis is a broadcast to whoever listens, which kombu sends itself."""
    exchange = Exchange(names(), type=kind)
    first, second = names(), names()
    bound = {"direct": ("a.x", "a.x"), "topic": ("a.*", "#.x"), "fanout": ("", "")}[kind]
    app = app_on(url, Queue(first, exchange, routing_key=bound[0]), Queue(second, exchange, routing_key=bound[1]))
    with app.connection_for_write() as connection:
        for queue in (first, second):
            app.amqp.queues[queue].bind(connection.default_channel).declare()
    messages = [outgoing(first, number, exchange=exchange.name, routing_key="a.x") for number in range(5)]
    result = published(app, messages)
    assert result.sent == 5, result
    if kind == "fanout" and url.startswith("redis"):
        assert [numbers(url, queue) for queue in (first, second)] == [[], []]
    else:
        assert [numbers(url, queue) for queue in (first, second)] == [list(range(5))] * 2
    app.close()


def test_a_queue_that_expires_gets_its_time_with_each_message(redis_url: str, names: Callable[[], str]) -> None:
    queue = names()
    app = app_on(redis_url, Queue(queue, expires=500))
    assert published(app, [outgoing(queue, number) for number in range(3)]).sent == 3
    with redis.Redis.from_url(redis_url) as client:
        kombu_sets_it = "_expires" in vars(_channel_of(app))
        assert (0 < client.ttl(queue) <= 500) is kombu_sets_it
    assert numbers(redis_url, queue) == [0, 1, 2]
    app.close()


def _channel_of(app: Celery) -> Any:
    with app.connection_for_write() as connection:
        return connection.default_channel


@BOTH
def test_a_worker_runs_what_was_published(url: str, names: Callable[[], str], tmp_path: Path) -> None:
    """RET-01, RET-02: a real worker sees headers, priority, correlation id, limits, group and stamps."""
    queue, notes = names(), tmp_path / "notes"
    app = app_on(url)
    app.send_task(
        "published.note", args=("a",), kwargs={"b": 2**60}, queue=queue, priority=5, time_limit=30, soft_time_limit=20,
        group_id="g-1", headers={"tenant": "t-a"}, stamped_headers=["trace"], trace="abc", task_id="original",
    )  # fmt: skip
    captured = as_captured(url, queue, "", queue)
    messages = []
    for task_id in (f"new-{number}" for number in range(20)):
        properties = {**captured.properties, "correlation_id": task_id}
        messages.append(replace(captured, headers={**captured.headers, "id": task_id}, properties=properties))
    assert published(app, messages).sent == 20
    environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    log = (tmp_path / "log").open("wb")
    worker = subprocess.Popen(
        [
            sys.executable, "-m", "celery", "-A", "tests.core.published_app", "worker", "-P", "solo", "-Q", queue,
            "-n", f"{queue}@localhost", "--without-gossip", "--without-mingle", "-l", "WARNING",
        ],
        cwd=ROOT,
        env={**environment, "PUBLISHED_BROKER": url, "PUBLISHED_QUEUE": queue, "PUBLISHED_NOTES": str(notes)},
        stdout=log,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        ends_at = time.monotonic() + 60
        while not notes.exists() or len(notes.read_text().splitlines()) < 20:
            assert worker.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < ends_at, (tmp_path / "log").read_text()
            time.sleep(0.1)
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait(30)
        log.close()
    lines = [json.loads(line) for line in notes.read_text().splitlines()]
    assert [line["id"] for line in lines] == [f"new-{number}" for number in range(20)]
    assert lines[0] == {
        "args": ["a"], "kwargs": {"b": 2**60}, "id": "new-0", "correlation_id": "new-0", "timelimit": [30, 20],
        "group": "g-1", "tenant": "t-a", "stamps": {"trace": "abc"}, "priority": 5,
    }  # fmt: skip
    app.close()


# -- What is said of each ----------------------------------------------------------------------------------------------


@BOTH
def test_a_message_that_cannot_be_written_is_named_and_keeps_nobody_else(url: str, names: Callable[[], str]) -> None:
    """And nothing of it is in the words: they go into rows and logs."""
    queue = names()
    app = app_on(url)
    messages = [outgoing(queue, number) for number in range(5)]
    messages[1] = outgoing(queue, 1, headers={"id": "x", "secret": object()})
    messages[3] = outgoing(queue, 3, properties={"priority": 0, "expiration": object()})
    result = published(app, messages)
    assert outcomes(result) == ["sent", "message_invalid", "sent", "message_invalid", "sent"]
    assert "object at" not in result.trouble
    assert numbers(url, queue) == [0, 2, 4]
    app.close()


@BOTH
def test_a_queue_the_app_may_not_make_is_refused_alone(url: str, names: Callable[[], str]) -> None:
    queue = names()
    app = app_on(url, Queue(queue, Exchange("", type="direct"), routing_key=queue))
    app.conf.task_create_missing_queues = False
    result = published(app, [outgoing(queue, 0), outgoing(names(), 1), outgoing(queue, 2)])
    assert outcomes(result) == ["sent", "queue_unknown", "sent"]
    assert numbers(url, queue) == [0, 2]
    app.close()


@BOTH
def test_nothing_for_nothing(url: str) -> None:
    assert Outbox(app_on(url)).publish_many([]) == Published(())


def test_a_redis_that_refuses_has_refused_what_it_refused(redis_url: str, names: Callable[[], str]) -> None:
    """One of the queues is no list: the pipeline goes on behind it."""
    queue, broken = names(), names()
    app = app_on(redis_url)
    outbox = Outbox(app)
    assert outbox.publish_many([outgoing(queue, -1), outgoing(broken, -1)]).sent == 2
    with redis.Redis.from_url(redis_url) as client:
        client.set(broken, "a string")
    result = outbox.publish_many([outgoing((queue, broken)[number % 2], number) for number in range(6)])
    assert {it.outcome for it in result.deliveries[1::2]} == {Outcome.NOT_SENT}
    outbox.close()
    assert outcomes(result) == ["sent", "queue_refused"] * 3
    assert "WRONGTYPE" in result.trouble
    assert numbers(redis_url, queue) == [-1, 0, 2, 4]
    app.close()


def test_a_redis_without_rights_or_memory_says_which(redis_url: str, names: Callable[[], str]) -> None:
    """A queue that is another user's is the message's own trouble, a server that takes no writes everybody's."""
    queue, forbidden = names(), names()
    user = f"opsconsole-test-{uuid4().hex}"
    allowed = (f"~{queue}*", f"~_kombu.binding*{queue}", f"~_kombu.binding*{forbidden}")
    with redis.Redis.from_url(redis_url) as client:
        client.execute_command("ACL", "SETUSER", user, "on", ">secret", "+@all", *allowed)
        try:
            parts = urlsplit(redis_url)
            address = f"{parts.hostname}:{parts.port or 6379}"
            app = app_on(parts._replace(netloc=f"{user}:secret@{address}").geturl())
            outbox = Outbox(app)
            result = outbox.publish_many([outgoing((queue, forbidden)[number % 2], number) for number in range(4)])
            assert outcomes(result) == ["sent", "queue_refused"] * 2
            assert "queue_refused" not in BROKER_WIDE
            outbox.close()
        finally:
            client.execute_command("ACL", "DELUSER", user)
    assert numbers(redis_url, queue) == [0, 2]
    full = redis.exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")
    assert Pipelined._code_of(full) in BROKER_WIDE
    app.close()


def test_what_an_exchange_of_redis_routes_nowhere_is_not_sent(redis_url: str, names: Callable[[], str]) -> None:
    """kombu drops it without a word."""
    queue, exchange = names(), names()
    app = app_on(redis_url)
    messages = [outgoing(queue, 0), outgoing(queue, 1, exchange=exchange, routing_key="nowhere"), outgoing(queue, 2)]
    assert outcomes(published(app, messages)) == ["sent", "unroutable", "sent"]
    assert numbers(redis_url, queue) == [0, 2]
    app.close()


def test_an_unroutable_message_of_rabbitmq_is_not_sent(rabbitmq_url: str, names: Callable[[], str]) -> None:
    """Those beside it are, and the next page finds the queue declared again."""
    queue, gone = names(), names()
    app = app_on(rabbitmq_url)
    outbox = Outbox(app)
    assert outbox.publish_many([outgoing(queue, 0), outgoing(gone, 0)]).sent == 2
    assert sender_of(outbox) is Confirmed
    with kombu.Connection(rabbitmq_url) as broker:
        broker.default_channel.queue_delete(gone)
    result = outbox.publish_many([outgoing((queue, gone)[number % 2], number, task_id="same") for number in range(20)])
    assert outcomes(result) == ["sent", "unroutable"] * 10
    assert result.deliveries[1].outcome is Outcome.NOT_SENT
    assert outbox.publish_many([outgoing(gone, number) for number in range(3)]).sent == 3
    assert numbers(rabbitmq_url, queue) == [0, *range(0, 20, 2)]
    assert numbers(rabbitmq_url, gone) == [0, 1, 2]
    outbox.close()
    app.close()


def test_a_full_queue_refuses_and_is_heard(rabbitmq_url: str, names: Callable[[], str]) -> None:
    queue, full = names(), names()
    app = app_on(
        rabbitmq_url,
        Queue(queue),
        Queue(full, queue_arguments={"x-max-length": 2, "x-overflow": "reject-publish"}),
    )
    result = published(app, [outgoing((queue, full)[number % 2], number) for number in range(40)])
    counted = Counter(outcomes(result)[1::2])
    assert outcomes(result)[0::2] == ["sent"] * 20
    assert counted["nacked"] >= 15, counted
    assert set(counted) == {"sent", "nacked"}
    assert numbers(rabbitmq_url, queue) == list(range(0, 40, 2))
    sent = [number for number in range(1, 40, 2) if result.deliveries[number].is_sent]
    assert numbers(rabbitmq_url, full) == sent
    app.close()


def test_an_exchange_that_is_not_there_takes_nobody_with_it(rabbitmq_url: str, names: Callable[[], str]) -> None:
    """The broker closes the channel for it; all the others arrive, once."""
    queue, missing = names(), names()
    app = app_on(rabbitmq_url)
    messages = [
        outgoing(queue, number, exchange=missing if number % 10 == 5 else "", routing_key=queue)
        for number in range(1_200)
    ]
    result = published(app, messages)
    assert [number for number, code in enumerate(outcomes(result)) if code != "sent"] == list(range(5, 1_200, 10))
    assert {code for code in outcomes(result) if code != "sent"} == {"exchange_refused"}
    assert "NOT_FOUND" in result.trouble
    assert numbers(rabbitmq_url, queue) == [number for number in range(1_200) if number % 10 != 5]
    app.close()


def test_a_queue_that_cannot_be_declared_takes_nobody_with_it(rabbitmq_url: str, names: Callable[[], str]) -> None:
    """It exists with other arguments than the app's."""
    queue, other = names(), names()
    with kombu.Connection(rabbitmq_url) as broker:
        broker.default_channel.queue_declare(other, durable=True, auto_delete=False, arguments={"x-max-priority": 3})
    app = app_on(rabbitmq_url)
    result = published(app, [outgoing((queue, other)[number % 2], number) for number in range(6)])
    assert outcomes(result) == ["sent", "queue_refused"] * 3
    assert "PRECONDITION_FAILED" in result.trouble
    assert numbers(rabbitmq_url, queue) == [0, 2, 4]
    app.close()


def test_a_message_for_which_the_channel_is_closed_leaves_only_its_chunk_unknown(
    rabbitmq_url: str, names: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker does not say which it was; alone in its chunk it is known not to be sent. No other is lost."""
    queue = names()
    app = app_on(rabbitmq_url)
    outbox = Outbox(app)
    monkeypatch.setattr(Confirmed, "most", 10)
    messages = [outgoing(queue, number) for number in range(41)]
    messages[25] = outgoing(queue, 25, properties={"user_id": "somebody else", "correlation_id": "c"})
    result = outbox.publish_many(messages)
    found = outcomes(result)
    there = numbers(rabbitmq_url, queue)
    assert set(found[:20] + found[30:]) == {"sent"}
    assert set(found[20:30]) <= {"sent", "channel_closed"}
    assert found[25] == "channel_closed"
    assert len(there) == len(set(there)), "nothing is there twice"
    assert {number for number, code in enumerate(found) if code == "sent"} <= set(there)
    assert 25 not in there
    assert outcomes(outbox.publish_many([outgoing(queue, 0), messages[25]])) == ["sent", "message_refused"]
    outbox.close()
    app.close()


# -- A broker that is gone, falls silent, or dies in the middle --------------------------------------------------------


class Cut:
    """Stands before a server; passes on so many bytes to it, or so many of its answers, and then cuts or holds."""

    def __init__(self, url: str) -> None:
        parts = kombu.utils.url.parse_url(url)
        self._server = (parts["hostname"] or "127.0.0.1", parts["port"] or (6379 if "redis" in url else 5672))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.url = url.replace(f":{self._server[1]}", f":{self.port}")
        self.left: dict[str, float] = {"up": float("inf"), "down": float("inf")}
        self.inject = b""
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            server = socket.create_connection(self._server, timeout=5)
            server.settimeout(None)
            self._ends += [client, server]
            threading.Thread(target=self._pump, args=("up", client, server, client), daemon=True).start()
            threading.Thread(target=self._pump, args=("down", server, client, client), daemon=True).start()

    def _pump(self, way: str, source: socket.socket, sink: socket.socket, client: socket.socket) -> None:
        try:
            while data := source.recv(65_536):
                if len(data) > self.left[way]:
                    sink.sendall(data[: int(self.left[way])])
                    if self.inject:
                        client.sendall(self.inject)
                        return  # and reads no more, as a broker with an alarm
                    # So that what went through is worked on before it is cut.
                    time.sleep(0.2)
                    break
                self.left[way] -= len(data)
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listening.close()
        for end in self._ends:
            end.close()


@pytest.fixture
def cut_before() -> Iterator[Callable[[str], Cut]]:
    made: list[Cut] = []

    def make(url: str) -> Cut:
        made.append(Cut(url))
        return made[-1]

    yield make
    for cut in made:
        cut.close()


@BOTH
@pytest.mark.parametrize("way", ["up", "down"])
def test_a_connection_cut_in_the_middle_is_told_truly(
    url: str, way: str, names: Callable[[], str], cut_before: Callable[[str], Cut]
) -> None:
    """B1: what is said to be sent is there, what is said not to be sent is not; the rest is said to be unknown."""
    queue = names()
    cut = cut_before(url)
    app = app_on(cut.url)
    outbox = Outbox(app)
    assert outbox.publish_many([outgoing(queue, -1)]).sent == 1
    cut.left[way] = 350_000 if way == "up" else 40
    result = outbox.publish_many([outgoing(queue, number) for number in range(2_000)])
    assert outbox._connection is None
    there = numbers(url, queue)
    assert there[0] == -1
    assert len(there) == len(set(there)), "nothing is there twice"
    by_outcome = {
        outcome: {number for number, it in enumerate(result.deliveries) if it.outcome is outcome} for outcome in Outcome
    }
    assert by_outcome[Outcome.SENT] <= set(there)
    assert not by_outcome[Outcome.NOT_SENT] & set(there)
    assert by_outcome[Outcome.UNKNOWN]
    assert len(by_outcome[Outcome.UNKNOWN]) <= publishing.CHUNK
    assert by_outcome[Outcome.NOT_SENT], "what was not begun is known not to be sent"
    assert {it.code for it in result.deliveries if not it.is_sent} <= BROKER_WIDE
    assert max(by_outcome[Outcome.SENT], default=-1) < min(by_outcome[Outcome.NOT_SENT])
    cut.left[way] = float("inf")
    rest = sorted(by_outcome[Outcome.NOT_SENT])
    assert outbox.publish_many([outgoing(queue, number) for number in rest]).sent == len(rest), "it connects anew"
    outbox.close()
    app.close()


def test_what_redis_had_answered_before_it_died_is_known(
    redis_url: str, names: Callable[[], str], cut_before: Callable[[str], Cut]
) -> None:
    """Answers are read as they come: those of half a pipeline are worth something."""
    queue = names()
    cut = cut_before(redis_url)
    app = app_on(cut.url)
    outbox = Outbox(app)
    assert outbox.publish_many([outgoing(queue, -1)]).sent == 1
    cut.left["down"] = len(b":2\r\n") * 8 + len(b":10\r\n") * 12  # ":2" to ":9", ":10" to ":21"
    result = outbox.publish_many([outgoing(queue, number) for number in range(100)])
    assert [delivery.outcome for delivery in result.deliveries] == [Outcome.SENT] * 20 + [Outcome.UNKNOWN] * 80
    assert len(numbers(redis_url, queue)) == 101
    app.close()


@BOTH
def test_a_broker_that_is_gone_has_got_nothing(url: str, names: Callable[[], str]) -> None:
    queue = names()
    proxy = Proxy(url)
    proxy.refuse()
    began = time.monotonic()
    result = published(app_on(proxy.url), [outgoing(queue, number) for number in range(1_000)])
    assert set(outcomes(result)) == {"broker_unreachable"}
    assert {it.outcome for it in result.deliveries} == {Outcome.NOT_SENT}
    assert time.monotonic() - began < 15
    proxy.close()


@BOTH
def test_a_broker_that_hangs_holds_nobody_beyond_the_lease(
    url: str, names: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay's lease is a minute. Here a step is a second, and a page may take two."""
    monkeypatch.setattr(publishing, "STEP_SECONDS", 1.0)
    monkeypatch.setattr(outbox_module, "STEP_SECONDS", 1.0)
    queue = names()
    proxy = Proxy(url)
    outbox = Outbox(app_on(proxy.url), timeout_seconds=1)
    assert outbox.publish_many([outgoing(queue, -1)]).sent == 1
    proxy.hang()
    began = time.monotonic()
    result = outbox.publish_many([outgoing(queue, number) for number in range(2_000)], within_seconds=2)
    assert time.monotonic() - began < 5
    assert {it.outcome for it in result.deliveries} == {Outcome.UNKNOWN, Outcome.NOT_SENT}
    assert {it.code for it in result.deliveries} <= BROKER_WIDE
    began = time.monotonic()
    assert {it.outcome for it in outbox.publish_many([outgoing(queue, 1)]).deliveries} == {Outcome.NOT_SENT}
    assert time.monotonic() - began < 5
    outbox.close()
    proxy.close()
    assert outbox_module.WITHIN_SECONDS + 2 * 10 + 5 < 60


@BOTH
def test_a_new_queue_on_a_broker_that_hangs_is_given_up(
    url: str, names: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Declaring has no time of its own in the clients."""
    monkeypatch.setattr(publishing, "STEP_SECONDS", 1.0)
    monkeypatch.setattr(outbox_module, "STEP_SECONDS", 1.0)
    proxy = Proxy(url)
    outbox = Outbox(app_on(proxy.url), timeout_seconds=1)
    assert outbox.publish_many([outgoing(names(), -1)]).sent == 1
    proxy.hang()
    began = time.monotonic()
    result = outbox.publish_many([outgoing(names(), 1), outgoing(names(), 2)])
    assert time.monotonic() - began < 4
    assert set(outcomes(result)) == {"broker_unreachable"}
    outbox.close()
    proxy.close()


def test_a_blocked_rabbitmq_is_waited_for_a_step_and_told(
    rabbitmq_url: str, names: Callable[[], str], cut_before: Callable[[str], Cut], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an alarm it says so and reads no more: what it may have is unknown, nothing else is thrown at it."""
    monkeypatch.setattr(publishing, "STEP_SECONDS", 1.0)
    queue = names()
    cut = cut_before(rabbitmq_url)
    app = app_on(cut.url)
    outbox = Outbox(app)
    assert outbox.publish_many([outgoing(queue, -1)]).sent == 1
    reason = b"low on memory"
    method = struct.pack(">HHB", 10, 60, len(reason)) + reason
    cut.inject = struct.pack(">BHI", 1, 0, len(method)) + method + b"\xce"
    cut.left["up"] = 0
    began = time.monotonic()
    result = outbox.publish_many([outgoing(queue, number) for number in range(2_000)])
    assert time.monotonic() - began < 5
    assert {it.code for it in result.deliveries} == {"broker_blocked"}
    unknown = [number for number, it in enumerate(result.deliveries) if it.outcome is Outcome.UNKNOWN]
    assert unknown == list(range(len(unknown)))
    assert 0 < len(unknown) <= publishing.CHUNK
    assert outbox._connection is None
    assert numbers(rabbitmq_url, queue) == [-1]
    app.close()


@BOTH
def test_time_that_is_over_sends_nothing_more(url: str, names: Callable[[], str]) -> None:
    queue = names()
    result = published(app_on(url), [outgoing(queue, number) for number in range(10)], within_seconds=-1)
    assert set(outcomes(result)) == {"out_of_time"}
    assert numbers(url, queue) == [] if url.startswith("redis") else True


# -- Which way ---------------------------------------------------------------------------------------------------------


def test_each_transport_gets_its_way(redis_url: str, rabbitmq_url: str, names: Callable[[], str]) -> None:
    """A client that repeats what timed out would send a pipeline twice, so it gets the plain way."""
    queue = names()
    for url, options, way in (
        (redis_url, {}, Pipelined),
        (redis_url, {"retry_on_timeout": True}, Sender),
        (rabbitmq_url, {}, Confirmed),
        (rabbitmq_url, {"confirm_publish": True}, Confirmed),
        ("memory://", {}, Sender),
    ):
        outbox = Outbox(app_on(url, **options))
        assert outbox.publish_many([outgoing(queue, number) for number in range(30)]).sent == 30
        assert sender_of(outbox) is way
        if url != "memory://":
            assert numbers(url, queue) == list(range(30))
        outbox.close()


def test_files_take_them_one_by_one(tmp_path: Path, names: Callable[[], str]) -> None:
    options = {
        "data_folder_in": str(tmp_path),
        "data_folder_out": str(tmp_path),
        "control_folder": str(tmp_path / "control"),
    }
    app = app_on("filesystem://", **options)
    app.conf.broker_transport = "opsconsole.core.filebroker:Transport"
    queue = names()
    assert published(app, [outgoing(queue, number) for number in range(10)]).sent == 10
    assert len(list(tmp_path.glob("*.msg"))) == 10


def test_a_plain_transport_that_fails_in_the_middle_stops_there(
    names: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = names()
    app = app_on("memory://")
    count = iter(range(100))
    from kombu.transport import memory

    put = memory.Channel._put

    def fail(self: Any, *args: Any, **kwargs: Any) -> None:
        if next(count) == 4:
            raise ConnectionResetError("gone in the middle")
        put(self, *args, **kwargs)

    monkeypatch.setattr(memory.Channel, "_put", fail)
    result = published(app, [outgoing(queue, number) for number in range(10)])
    assert outcomes(result) == ["sent"] * 4 + ["connection_lost"] + ["not_attempted"] * 5
    assert [it.outcome for it in result.deliveries[4:6]] == [Outcome.UNKNOWN, Outcome.NOT_SENT]
    assert "gone in the middle" in result.trouble


def test_a_broadcast_exchange_of_kombu_has_the_types_that_are_pushed() -> None:
    """What is pushed in a pipeline is what kombu's own channel would push: its types have not become more."""
    assert set(virtual_exchange.STANDARD_EXCHANGE_TYPES) == {"direct", "topic", "fanout"}
