"""Publishing many messages at a time, and saying of each what is known afterwards.

On Redis a chunk of messages is one pipeline; on RabbitMQ a chunk is published without waiting and confirmed by the
broker; every other transport takes them one by one, as kombu's producer does. What arrives is what kombu would have
sent: its producer prepares each message, and only the last step, handing it to the broker, is done here.

Through the outbox, by whoever has rows to mark::

    outbox = Outbox(app)                                    # kept for a page, or for as long as the thread lives
    published = outbox.publish_many(messages)               # raises nothing for what a broker does; at most 45 s
    for row, delivery in zip(rows, published.deliveries):   # one for each message, in their order
        match delivery.outcome:
            case Outcome.SENT: ...      # the broker has it for certain
            case Outcome.NOT_SENT: ...  # it does not, for certain: give it back; delivery.code and .detail say why
            case Outcome.UNKNOWN: ...   # it may have it: send it again only under the same task id, behind the guard
    published.trouble                                       # the first thing that went wrong, in words, or ""

``BROKER_WIDE`` are the codes that the next message would meet as well, so that waiting is better than going on; any
other code is about its own message, and the rest of the page was sent. Duplicates are possible only for what was
UNKNOWN. A page of 100 to 1,000 messages costs few round trips; memory grows with a chunk, not with the page.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from typing import Any

import amqp
import redis
from amqp.exceptions import FrameSyntaxError
from celery import Celery
from kombu import Connection, Producer, Queue
from kombu.common import maybe_declare
from kombu.transport import redis as redis_transport
from kombu.utils.json import dumps

CHUNK = 500
CHUNK_BYTES = 1 << 20
"""Of bodies and payloads in a chunk; what is larger goes alone."""
STEP_SECONDS = 10.0
"""How long a broker may take for one answer, or for confirming a chunk."""
DETAIL_LENGTH = 300
BASIC_PUBLISH = (60, 40)
"""AMQP's number of the method, in what a broker says when it closes a channel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A message, ready to be published."""

    body: bytes
    content_type: str | None
    content_encoding: str | None
    headers: dict[str, Any]
    properties: dict[str, Any]
    exchange: str
    routing_key: str
    queue: str


class Outcome(StrEnum):
    """What is known of a message after it was to be published."""

    SENT = "sent"  # the broker has said that it has it
    NOT_SENT = "not_sent"  # the broker does not have it and will not get it
    UNKNOWN = "unknown"  # it went out and was not answered


@dataclass(frozen=True, slots=True)
class Delivery:
    """What became of one message; code and detail are "" if it was sent, and hold nothing of the message."""

    outcome: Outcome
    code: str = ""
    detail: str = ""

    @property
    def is_sent(self) -> bool:
        return self.outcome is Outcome.SENT

    @property
    def in_words(self) -> str:
        return f"{self.code}: {self.detail}".rstrip(": ")


SENT = Delivery(Outcome.SENT)
BROKER_WIDE = frozenset(
    {
        "broker_unreachable", "broker_blocked", "broker_refused", "connection_lost", "not_confirmed", "out_of_time",
        "not_attempted",
    }
)  # fmt: skip
"""Codes that are about the broker. The others: message_invalid, queue_unknown, queue_refused, exchange_refused,
unroutable, nacked, message_refused (all not sent) and channel_closed (unknown)."""


@dataclass(frozen=True, slots=True)
class Published:
    """What became of a page of messages: one delivery for each, in their order."""

    deliveries: tuple[Delivery, ...]

    @property
    def sent(self) -> int:
        return sum(delivery.is_sent for delivery in self.deliveries)

    @property
    def trouble(self) -> str:
        """The first thing that went wrong, in words; "" if all was sent."""
        return next((delivery.in_words for delivery in self.deliveries if not delivery.is_sent), "")


def in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:DETAIL_LENGTH]


def not_sent(code: str, detail: str = "") -> Delivery:
    return Delivery(Outcome.NOT_SENT, code, detail[:DETAIL_LENGTH])


def unknown(code: str, detail: str = "") -> Delivery:
    return Delivery(Outcome.UNKNOWN, code, detail[:DETAIL_LENGTH])


@dataclass(frozen=True, slots=True)
class Prepared:
    """A message as kombu's producer hands it to a channel."""

    number: int
    message: Any
    exchange: str
    routing_key: str
    size: int


class Preparing:
    """Stands for a channel before kombu's producer, and keeps what the producer would have it publish."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self.kept: tuple[Any, str, str] = (None, "", "")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def basic_publish(self, message: Any, *, exchange: str, routing_key: str, **_options: Any) -> None:
        self.kept = (message, exchange, routing_key)


class Sender:
    """Sends messages one by one over one connection, and keeps what became of them; each transport's is a kind of it.

    One that has ``gone`` set sends nothing more: its connection is of no use.
    """

    most = 1

    def __init__(self, app: Celery, connection: Connection) -> None:
        self.app = app
        self.connection: Any = connection
        self.channel: Any = connection.default_channel
        self.gone: Delivery | None = None
        self._preparing = Preparing(self.channel)
        self._producer: Any = Producer(self._preparing, auto_declare=False)  # type: ignore[arg-type]
        self._queues: dict[str, Delivery | None] = {}
        self._deliveries: list[Delivery | None] = []

    def send(self, messages: Sequence[Outgoing], *, ends_at: float) -> Published:
        """Send messages in their order until ``ends_at`` on the monotonic clock."""
        self._begin(len(messages))
        chunk: list[Prepared] = []
        size = 0
        for number, outgoing in enumerate(messages):
            if self.gone or time.monotonic() > ends_at:
                break
            prepared = self._prepare(number, outgoing)
            if prepared is None:
                continue
            full = len(chunk) >= self.most or size + prepared.size > CHUNK_BYTES
            if chunk and (full or self._goes_alone(prepared)):
                self._send_chunk(chunk)
                chunk, size = [], 0
                if self.gone:
                    break
            if self._goes_alone(prepared):
                self._send_alone(prepared)
            else:
                chunk.append(prepared)
                size += prepared.size
        if chunk and not self.gone:
            self._send_chunk(chunk)
        rest = self.gone or not_sent("out_of_time", "the broker was too slow for the whole page")
        return Published(tuple(rest if delivery is None else delivery for delivery in self._deliveries))

    def _begin(self, count: int) -> None:
        # Queues that expire are declared again for each page, as kombu does for each message; it remembers the others.
        self._queues = {}
        self._deliveries = [None] * count

    def _prepare(self, number: int, outgoing: Outgoing) -> Prepared | None:
        """Declare a message's queue and return the message; None if it cannot be sent, which is noted."""
        refused = self._declared(outgoing.queue) if outgoing.queue else None
        if refused is None and not self.gone:
            try:
                self._producer.publish(
                    outgoing.body,
                    exchange=outgoing.exchange,
                    routing_key=outgoing.routing_key or outgoing.queue,
                    content_type=outgoing.content_type,
                    content_encoding=outgoing.content_encoding,
                    headers=outgoing.headers,
                    retry=False,
                    **outgoing.properties,
                )
                message, exchange, routing_key = self._preparing.kept
                return self._complete(number, message, exchange, routing_key, size=len(outgoing.body))
            except Exception as error:  # noqa: BLE001  (whatever a stored header or property can be wrong with)
                refused = self._invalid(error)
        if refused is not None:
            self._deliveries[number] = refused
        return None

    def _complete(self, number: int, message: Any, exchange: str, routing_key: str, *, size: int) -> Prepared:
        return Prepared(number, message, exchange, routing_key, size)

    @staticmethod
    def _invalid(error: Exception) -> Delivery:
        # The error's text may quote the message.
        return not_sent("message_invalid", f"the message cannot be written for this broker ({type(error).__name__})")

    def _declared(self, name: str) -> Delivery | None:
        """Declare a queue as the app knows it, once; returns why nothing can be sent to it.

        A virtual transport silently drops what no binding routes (measured).
        """
        if name in self._queues:
            return self._queues[name]
        refused: Delivery | None = None
        try:
            queue: Queue = self.app.amqp.queues[name]
            maybe_declare(queue, self.channel)
        except KeyError:
            refused = not_sent("queue_unknown", "the app does not know the queue and may not make it")
        except self.connection.channel_errors as error:
            refused = not_sent(self._code_of(error), in_words(error))
        except Exception as error:  # noqa: BLE001  (each transport has its own; all end the connection's use)
            self.gone = not_sent("broker_unreachable", in_words(error))
        self._queues[name] = refused
        return refused

    @staticmethod
    def _code_of(error: Exception) -> str:  # noqa: ARG004
        """Return what a refusal of a queue is about."""
        return "queue_refused"

    def _goes_alone(self, prepared: Prepared) -> bool:  # noqa: ARG002
        return False

    def _send_alone(self, prepared: Prepared) -> None:
        self._plainly(prepared)

    def _send_chunk(self, chunk: list[Prepared]) -> None:
        for prepared in chunk:
            self._plainly(prepared)

    def _plainly(self, prepared: Prepared) -> None:
        """Send one message through the channel's own way."""
        try:
            self.channel.basic_publish(
                prepared.message, exchange=prepared.exchange, routing_key=prepared.routing_key, mandatory=False
            )
        except Exception as error:  # noqa: BLE001  (each transport has its own; all mean "not known to be sent")
            self._deliveries[prepared.number] = unknown("connection_lost", in_words(error))
            self.gone = not_sent("not_attempted", in_words(error))
        else:
            self._deliveries[prepared.number] = SENT


class Pipelined(Sender):
    """Redis: each chunk is one pipeline of the commands with which kombu's channel would have sent it."""

    most = CHUNK

    def __init__(self, app: Celery, connection: Connection) -> None:
        super().__init__(app, connection)
        self._routes: dict[tuple[str, str], tuple[str, ...] | None] = {}
        with self.channel.conn_or_acquire() as client:
            # From here on a connection is in the pool: what fails later had begun.
            client.ping()

    @staticmethod
    def is_for(connection: Connection) -> bool:
        """Whether the connection's channel is kombu's own for a single Redis, TLS and Sentinel included.

        A client that repeats what timed out would send a whole pipeline twice.
        """
        channel: Any = connection.default_channel
        if not isinstance(channel, redis_transport.Channel) or type(channel)._put is not redis_transport.Channel._put:
            return False
        options = channel.pool.connection_kwargs
        if options.get("retry_on_timeout") or options.get("retry_on_error") or options.get("retry"):
            return False
        return isinstance(channel.client, redis.Redis)

    def _begin(self, count: int) -> None:
        super()._begin(count)
        self._routes = {}

    def _goes_alone(self, prepared: Prepared) -> bool:
        """Say whether this is for the channel itself: a broadcast, or a queue with commands beside the push."""
        queues = self._route(prepared)
        expiring = getattr(self.channel, "_expires", None) or {}
        return queues is None or any(queue in expiring for queue in queues)

    def _send_alone(self, prepared: Prepared) -> None:
        if not self.gone:
            self._plainly(prepared)

    def _route(self, prepared: Prepared) -> tuple[str, ...] | None:
        """Return the queues to which kombu would push; None for what is left to it. Asked once a page and route."""
        if not prepared.exchange:
            return (prepared.routing_key,)
        route = (prepared.exchange, prepared.routing_key)
        if route not in self._routes:
            plain = self.channel.typeof(prepared.exchange).type in ("direct", "topic")
            if not plain or self.channel.deadletter_queue is not None:
                self._routes[route] = None
            else:
                try:
                    self._routes[route] = tuple(queue for queue in self.channel._lookup(*route) if queue)
                except Exception as error:  # noqa: BLE001  (nothing was sent: this only reads the bindings)
                    self.gone = not_sent("broker_unreachable", in_words(error))
                    self._routes[route] = None
        return self._routes[route]

    def _send_chunk(self, chunk: list[Prepared]) -> None:
        channel = self.channel
        replies: dict[int, list[Exception | None]] = {}

        def pushed(_length: Any, *, number: int, **_options: Any) -> Exception | None:
            replies[number].append(None)
            return None

        with channel.conn_or_acquire() as client, client.pipeline(transaction=False) as pipe:
            # Called as each reply is read: what was answered before a connection died is known to be there.
            pipe.set_response_callback("LPUSH", pushed)
            numbers = []
            expected = dict.fromkeys((prepared.number for prepared in chunk), 0)
            for prepared in chunk:
                queues = self._route(prepared)
                if not queues:
                    self._deliveries[prepared.number] = not_sent("unroutable", "the exchange routes it to no queue")
                    continue
                try:
                    channel._inplace_augment_message(prepared.message, prepared.exchange, prepared.routing_key)
                    priority = channel._get_message_priority(prepared.message, reverse=False)
                    payload = dumps(prepared.message)
                except Exception as error:  # noqa: BLE001  (whatever a stored header can be wrong with)
                    self._deliveries[prepared.number] = self._invalid(error)
                    continue
                replies[prepared.number] = []
                for queue in queues:
                    expected[prepared.number] += 1
                    numbers.append(prepared.number)
                    pipe.execute_command("LPUSH", channel._q_for_pri(queue, priority), payload, number=prepared.number)
            trouble = ""
            try:
                answers = pipe.execute(raise_on_error=False)
            except Exception as error:  # noqa: BLE001  (the client's, the socket's, or TLS's)
                trouble = in_words(error)
                self.gone = not_sent("not_attempted", trouble)
            else:
                for number, answer in zip(numbers, answers, strict=True):
                    if isinstance(answer, Exception):
                        replies[number].append(answer)
        for number, answered in replies.items():
            self._deliveries[number] = self._judged(answered, expected[number], trouble)

    @staticmethod
    def _code_of(error: Exception) -> str:
        """Tell a queue that is no list, or not this user's, from a server that takes nothing (full, or no master)."""
        is_of_queue = isinstance(error, redis.exceptions.NoPermissionError) or "WRONGTYPE" in str(error)
        return "queue_refused" if is_of_queue else "broker_refused"

    @classmethod
    def _judged(cls, answered: list[Exception | None], expected: int, trouble: str) -> Delivery:
        refusals = [answer for answer in answered if answer is not None]
        if len(answered) < expected:
            return unknown("connection_lost", trouble)
        if not refusals:
            return SENT
        if len(refusals) == expected:
            return not_sent(cls._code_of(refusals[0]), in_words(refusals[0]))
        return unknown(cls._code_of(refusals[0]), in_words(refusals[0]))


class Confirmed(Sender):
    """RabbitMQ: a channel in confirm mode, on which a chunk is published and then waited for.

    A channel that the broker closes takes with it what is not confirmed yet. What makes it do so is mostly an exchange
    that is not there or not allowed, so the first message to each exchange goes alone: its refusal is its own.
    """

    most = CHUNK

    def __init__(self, app: Celery, connection: Connection) -> None:
        super().__init__(app, connection)
        self._amqp: Any = self.connection.connection
        # For whatever is asked without a time of its own: a stuck broker may hold no caller longer.
        self._amqp.sock.settimeout(STEP_SECONDS)
        self._amqp.on_blocked = lambda _reason: self._set_blocked(True)
        self._amqp.on_unblocked = lambda: self._set_blocked(False)
        self._blocked = False
        self._confirming: Any = None
        self._tag = 0
        self._unconfirmed: dict[int, Prepared] = {}
        self._returned: dict[int, Delivery] = {}
        self._proven: set[str] = set()
        self._refused: dict[str, Delivery] = {}

    @staticmethod
    def is_for(connection: Connection) -> bool:
        """Whether the connection is py-amqp's and to a broker that confirms."""
        established: Any = connection.connection
        if not isinstance(established, amqp.Connection):
            return False
        return bool(established.server_capabilities.get("publisher_confirms"))

    def _set_blocked(self, blocked: bool) -> None:
        self._blocked = blocked

    def _begin(self, count: int) -> None:
        super()._begin(count)
        self._refused = {}

    def _send_chunk(self, chunk: list[Prepared]) -> None:
        while (left := self._undecided(chunk)) and not self.gone:
            proven = list(takewhile(lambda prepared: prepared.exchange in self._proven, left))
            self._attempt(proven or left[:1])

    def _undecided(self, chunk: list[Prepared]) -> list[Prepared]:
        """Return what is still to be sent of a chunk; what goes to a refused exchange is not."""
        left = []
        for prepared in chunk:
            if self._deliveries[prepared.number] is not None:
                continue
            if refused := self._refused.get(prepared.exchange):
                self._deliveries[prepared.number] = refused
            else:
                left.append(prepared)
        return left

    def _attempt(self, chunk: list[Prepared]) -> None:
        """Publish and wait; what has no delivery afterwards was not begun, as the broker has closed the channel."""
        try:
            self._open()
            for prepared in chunk:
                if self._blocked:
                    # Sent to a broker that reads nothing, it would be neither here nor there.
                    self.gone = not_sent("broker_blocked", "the broker takes no messages (an alarm)")
                    break
                self._publish(prepared)
            self._wait()
        except self.connection.channel_errors as error:
            self._channel_closed(error)
        except Exception as error:  # noqa: BLE001  (the client's, the socket's, or TLS's)
            self._lost(unknown("connection_lost", in_words(error)))

    def _open(self) -> None:
        if self._confirming is not None:
            return
        channel = self.connection.channel()
        channel.auto_decode = False  # a returned message is compared with what was sent
        channel.events["basic_ack"].add(self._on_ack)
        channel.events["basic_nack"].add(self._on_nack)
        channel.events["basic_return"].add(self._on_return)
        channel.confirm_select()
        self._confirming, self._tag = channel, 0

    def _publish(self, prepared: Prepared) -> None:
        channel = self._confirming
        # The broker counts from the channel's first message; noted before, as an answer may be read on the way.
        self._tag += 1
        self._unconfirmed[self._tag] = prepared
        try:
            # Not the channel's own attribute, which with the option confirm_publish waits for each message.
            type(channel).basic_publish(
                channel, prepared.message, exchange=prepared.exchange, routing_key=prepared.routing_key, mandatory=True
            )
        except (*self.connection.channel_errors, OSError):
            raise
        except Exception as error:
            # Also a connection error of the client's, which it raises for a table it cannot write.
            if not self._amqp.connected or not _is_about_the_message(error):
                raise
            del self._unconfirmed[self._tag]
            self._tag -= 1
            self._deliveries[prepared.number] = self._invalid(error)

    def _wait(self) -> None:
        """Read what the broker says until it has said something of each message."""
        ends_at = time.monotonic() + STEP_SECONDS
        while self._unconfirmed:
            left = ends_at - time.monotonic()
            if left <= 0:
                code = "broker_blocked" if self._blocked else "not_confirmed"
                self._lost(unknown(code, f"no answer from the broker within {STEP_SECONDS:.0f} s"))
                return
            try:
                self._amqp.drain_events(timeout=left)
            except TimeoutError:
                continue

    def _on_ack(self, tag: int, multiple: bool) -> None:
        for settled, prepared in self._settled(tag, multiple):
            self._proven.add(prepared.exchange)
            self._deliveries[prepared.number] = self._returned.pop(settled, SENT)

    def _on_nack(self, tag: int, multiple: bool) -> None:
        for _settled, prepared in self._settled(tag, multiple):
            self._deliveries[prepared.number] = not_sent("nacked", "the broker or a full queue refused it")

    def _settled(self, tag: int, multiple: bool) -> list[tuple[int, Prepared]]:
        tags = [one for one in self._unconfirmed if one <= tag] if multiple else [tag]
        return [(one, self._unconfirmed.pop(one)) for one in tags if one in self._unconfirmed]

    def _on_return(self, error: Exception, exchange: str, routing_key: str, message: Any) -> None:
        """Note which message came back. The broker does not say, but what is alike in all of this is the same."""
        for tag, prepared in self._unconfirmed.items():
            if tag not in self._returned and _is_same(prepared, exchange, routing_key, message):
                self._returned[tag] = not_sent("unroutable", in_words(error))
                # Its queue was there when it was declared: the next page declares it again.
                self.connection.declared_entities.clear()
                return

    def _channel_closed(self, error: Exception) -> None:
        """Settle what was on a channel that the broker has closed; the next chunk gets a new one."""
        waiting = list(self._unconfirmed.values())
        closed = unknown("channel_closed", in_words(error))
        if len(waiting) == 1 and getattr(error, "method_sig", None) == BASIC_PUBLISH:
            # It was alone, so it is what the broker did not take.
            closed = not_sent("message_refused", in_words(error))
            if isinstance(error, amqp.exceptions.NotFound | amqp.exceptions.AccessRefused):
                closed = self._refused[waiting[0].exchange] = not_sent("exchange_refused", in_words(error))
        for prepared in waiting:
            self._deliveries[prepared.number] = closed
        self._unconfirmed.clear()
        self._returned.clear()
        self._proven.clear()
        channel, self._confirming = self._confirming, None
        try:
            if channel is not None:
                channel.close()  # the client has opened it anew
        except Exception as closing:  # noqa: BLE001  (as above)
            self._lost(unknown("connection_lost", in_words(closing)))

    def _lost(self, delivery: Delivery) -> None:
        for prepared in self._unconfirmed.values():
            self._deliveries[prepared.number] = delivery
        self._unconfirmed.clear()
        self._returned.clear()
        self.gone = self.gone or not_sent(
            delivery.code if delivery.code == "broker_blocked" else "not_attempted", delivery.detail
        )


def _is_about_the_message(error: Exception) -> bool:
    return isinstance(error, FrameSyntaxError) or not isinstance(error, amqp.exceptions.AMQPError)


def _is_same(prepared: Prepared, exchange: str, routing_key: str, message: Any) -> bool:
    sent = prepared.message
    return (
        (prepared.exchange, prepared.routing_key) == (exchange, routing_key)
        and sent.properties.get("correlation_id") == message.properties.get("correlation_id")
        and bytes(sent.body) == bytes(message.body)
    )


def sender_for(app: Celery, connection: Connection) -> Sender:
    """Return the fastest way that the connection's transport has; raises whatever its client raises."""
    # Asked in this order because only one of the clients may be installed with a given kombu.
    kind: type[Sender] = Sender
    if connection.transport.driver_type == "amqp" and Confirmed.is_for(connection):
        kind = Confirmed
    elif connection.transport.driver_type == "redis" and Pipelined.is_for(connection):
        kind = Pipelined
    return kind(app, connection)
