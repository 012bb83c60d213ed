"""The broker of the embedded console: kombu's files, without the two ways in which those lose messages.

kombu writes a message under its final name, so a worker can take one that is half written and ends for it (seen within
a minute of a busy start); and it removes a message when it is taken, so a killed worker loses all that it held. Here a
message gets its name when it is complete, and a taken one lies in a folder of the process that holds it until it is
acknowledged; what a dead process has left is put back. For one host: the locks mean nothing on a network disk.

Unlike kombu's it works with a worker's event loop. Without one, the processes of a pool share a single pipe for their
results, and whichever was killed with the pipe's lock in its hands, as a time limit kills, left all others waiting for
ever. With one, Celery gives each process pipes of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any
from uuid import uuid4

from kombu.exceptions import ChannelError
from kombu.transport import filesystem, virtual
from kombu.transport.filesystem import exchange_queue_t
from kombu.utils.json import dumps, loads

logger = logging.getLogger(__name__)

LOOK_FOR_DEAD_SECONDS = 5.0
MOST_AT_ONCE = 100
"""So many messages are taken before the event loop attends to the pool again."""

_LOCK = ".lock"
_UNFINISHED = "."  # names that begin with it belong to no queue
_AGAIN = "-again"
_EXCHANGE = re.compile(r"[A-Za-z0-9._@-]*")


@dataclass(frozen=True, slots=True)
class _Holding:
    """The folder in which this process keeps what it has taken, locked for as long as the process lives.

    The lock is one of POSIX's, which belong to the process and, unlike flock's, are not inherited by its children: a
    child that outlives a killed worker would otherwise keep the worker's messages from being put back.
    """

    path: Path
    descriptor: int

    @classmethod
    def create(cls, base: Path) -> _Holding:
        name = f"{os.getpid()}-{uuid4().hex[:8]}"
        # Hidden until it is locked: without a lock it looks like a dead process's.
        unfinished = base / f"{_UNFINISHED}{name}"
        unfinished.mkdir(mode=0o700, parents=True)
        descriptor = os.open(unfinished / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.lockf(descriptor, fcntl.LOCK_EX)
        return cls(unfinished.rename(base / name), descriptor)


_holdings: dict[tuple[int, Path], _Holding] = {}
_one_at_a_time = threading.Lock()


def _holding(base: Path) -> _Holding:
    key = (os.getpid(), base)
    if key not in _holdings:
        with _one_at_a_time:
            if key not in _holdings:
                _holdings[key] = _Holding.create(base)
    return _holdings[key]


class QoS(virtual.QoS):
    """Remembers what is delivered and not acknowledged, in memory and as files."""

    channel: Channel

    def ack(self, delivery_tag: str) -> None:
        super().ack(delivery_tag)
        self.channel.drop(delivery_tag)
        self.channel.look_again()

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        if requeue:
            self.channel.give_back(delivery_tag)
        else:
            self.channel.drop(delivery_tag)
        super().ack(delivery_tag)
        self.channel.look_again()

    def restore_unacked(self) -> None:
        self._flush()  # type: ignore[attr-defined]
        delivered: Any = self._delivered
        for tag in list(delivered):
            self.channel.give_back(tag)
        delivered.clear()


class Channel(filesystem.Channel):
    """Queues are the messages in one folder whose names end in the queue's."""

    QoS = QoS
    connection: Any  # a transport, or None once this is closed

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unacknowledged_queues: set[str] = set()
        self._looked_at = -LOOK_FOR_DEAD_SECONDS

    # Messages

    # The two classes above this one call the message by different names.
    def _put(self, queue: str, payload: dict[str, Any], **_: Any) -> None:  # type: ignore[override]
        name = f"{time.time_ns():020d}_{uuid4().hex}.{queue}.msg"
        try:
            _replace(Path(self.data_folder_out), name, dumps(payload))
        except OSError as error:
            raise ChannelError(f"cannot write a message to {self.data_folder_out}: {error.strerror}") from error

    def _get(self, queue: str, timeout: float | None = None) -> Any:  # noqa: ARG002
        self._look_for_dead()
        folder = Path(self.data_folder_in)
        for name in sorted(os.listdir(folder)):
            stem, _, rest = name.partition(".")
            if rest != f"{queue}.msg":
                continue
            held = _holding(self._taken_folder).path / name
            try:
                (folder / name).rename(held)
            except FileNotFoundError:
                continue  # another one was first
            if (payload := self._read(held)) is None:
                continue
            properties = payload["properties"]
            properties["delivery_tag"] = name
            properties.setdefault("delivery_info", {})["redelivered"] = stem.endswith(_AGAIN)
            if queue in self._unacknowledged_queues:
                held.unlink(missing_ok=True)
            return payload
        raise Empty

    def _read(self, held: Path) -> dict[str, Any] | None:
        """Return the message in a file; one that no kombu has written is put aside, so that it ends no worker."""
        try:
            payload: Any = loads(held.read_text())
            if isinstance(payload["properties"], dict) and "body" in payload:
                return dict(payload)
        except (ValueError, KeyError, TypeError):
            pass
        aside = self._taken_folder.parent / "unreadable"
        aside.mkdir(mode=0o700, exist_ok=True)
        held.replace(aside / held.name)
        logger.error("a message that cannot be read was moved to %s", aside / held.name)
        return None

    def drop(self, delivery_tag: str) -> None:
        """Forget a message for good."""
        (_holding(self._taken_folder).path / delivery_tag).unlink(missing_ok=True)

    def give_back(self, delivery_tag: str) -> None:
        """Put a message back in its old place in the queue, marked as delivered before."""
        held = _holding(self._taken_folder).path / delivery_tag
        with contextlib.suppress(FileNotFoundError):
            held.rename(Path(self.data_folder_in) / _marked(delivery_tag))

    def basic_consume(self, queue: str, no_ack: bool, *args: Any, **kwargs: Any) -> Any:
        if no_ack:
            self._unacknowledged_queues.add(queue)
        else:
            self._unacknowledged_queues.discard(queue)
        return super().basic_consume(queue, no_ack, *args, **kwargs)

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        message = super().basic_get(queue, no_ack=no_ack, **kwargs)
        if message is not None and no_ack:
            self.drop(str(message.delivery_tag))
        return message

    @property
    def is_full(self) -> bool:
        """Whether messages may wait here that are not taken before others are acknowledged."""
        return bool(self._consumers) and not self.qos.can_consume()

    def look_again(self) -> None:
        """Have the next message taken at once, where this one's acknowledgement was waited for."""
        if self.connection is not None:
            self.connection.look_if_full()

    def _look_for_dead(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < LOOK_FOR_DEAD_SECONDS:
            return
        self._looked_at = now
        own = _holding(self._taken_folder).path
        for path in self._taken_folder.iterdir():
            # Never our own: closing any descriptor of a file lets go of every lock this process has on it.
            if path != own and not path.name.startswith(_UNFINISHED):
                _put_back(path, Path(self.data_folder_in))

    @property
    def _taken_folder(self) -> Path:
        return Path(self.data_folder_in).absolute().parent / "taken"

    # Exchanges: one file with a table each, replaced as a whole

    def get_table(self, exchange: str) -> list[Any]:
        try:
            return [exchange_queue_t(*row) for row in loads(self._table_file(exchange).read_text())]
        except FileNotFoundError:
            return []

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str | None, queue: str) -> None:
        row = exchange_queue_t(routing_key or "", pattern or "", queue or "")
        with self._changing(exchange) as table:
            if row not in table:
                table.insert(0, row)

    def _delete(self, queue: str, exchange: str, routing_key: str, pattern: str, *args: Any, **kwargs: Any) -> None:
        virtual.Channel._delete(self, queue, exchange, routing_key, pattern, *args, **kwargs)
        row = exchange_queue_t(routing_key or "", pattern or "", queue or "")
        with self._changing(exchange) as table:
            if row in table:
                table.remove(row)

    @contextlib.contextmanager
    def _changing(self, exchange: str) -> Iterator[list[Any]]:
        """Yield an exchange's table under a lock of all tables; what was changed in it is written at the end."""
        file = self._table_file(exchange)
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(file.parent / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                before = self.get_table(exchange)
                table = list(before)
                yield table
                if table != before:
                    _replace(file.parent, file.name, dumps(table))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise ChannelError(f"cannot change {file}: {error.strerror}") from error

    def _table_file(self, exchange: str) -> Path:
        # The name becomes part of a path.
        if not isinstance(exchange, str) or not _EXCHANGE.fullmatch(exchange):
            raise ChannelError(f"{exchange!r} is no name for an exchange")
        return Path(self.control_folder) / f"{exchange}.exchange"


class _Bell:
    """Has an event loop look for messages: every so many seconds, and at once when rung, from whichever thread.

    Looking is left to a reader, not done by the timer, since the loop only logs what a timer's function raises, and a
    worker that is being stopped runs its timers in another thread.
    """

    def __init__(self, loop: Any, look: Callable[[], None], *, every_seconds: float) -> None:
        self._loop = loop
        self._look = look
        self._heard, self._rung = socket.socketpair()
        for end in (self._heard, self._rung):
            end.setblocking(False)
        loop.add_reader(self._heard.fileno(), self._answer)
        self._repeated = loop.call_repeatedly(every_seconds, self.ring)
        self.ring()

    def ring(self) -> None:
        with contextlib.suppress(OSError):  # it is full: it has been rung; or closed
            self._rung.send(b"!")

    def _answer(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._heard.recv(4096)
        self._look()

    def close(self) -> None:
        self._repeated.cancel()
        # Before it is closed: the pool's processes have it open too, so that the loop would go on hearing it.
        if self._heard.fileno() in self._loop.readers:
            self._loop.remove_reader(self._heard.fileno())
        self._heard.close()
        self._rung.close()


class Transport(filesystem.Transport):
    """What the setting ``CELERY_BROKER_TRANSPORT`` names."""

    Channel = Channel
    implements = filesystem.Transport.implements.extend(asynchronous=True)
    channels: Any
    cycle: Any
    polling_interval: float

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        # kombu shares what it believes to be bound between all connections of a process, wherever their folders are.
        self.state = virtual.BrokerState()
        self._bell: _Bell | None = None
        self._is_full = False

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Look for messages every ``polling_interval`` seconds for as long as the connection is open."""
        self.unregister_from_event_loop(connection, loop)
        self._bell = _Bell(loop, self._look, every_seconds=self.polling_interval)

    def unregister_from_event_loop(self, connection: Any, loop: Any) -> None:  # noqa: ARG002
        bell, self._bell = self._bell, None
        if bell is not None:
            bell.close()

    def close_connection(self, connection: Any) -> None:
        self.unregister_from_event_loop(connection, None)
        super().close_connection(connection)

    def look_if_full(self) -> None:
        """Look for messages as soon as the event loop can, if the last look ended because no more were wanted."""
        if self._is_full and self._bell is not None:
            self._is_full = False
            self._bell.ring()

    def _look(self) -> None:
        self._is_full = False
        for _ in range(MOST_AT_ONCE):
            try:
                self.cycle.get(self._deliver)
            except Empty:
                self._is_full = any(channel.is_full for channel in self.channels)
                return
        if self._bell is not None:
            self._bell.ring()


def _put_back(path: Path, queues: Path) -> None:
    """Put back what a process has left, if it is dead; whoever is first does it."""
    try:
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        names = [name for name in os.listdir(path) if not name.startswith(_UNFINISHED)]
        for name in names:
            (path / name).rename(queues / _marked(name))
        shutil.rmtree(path, ignore_errors=True)
        if names:
            logger.warning("put back %d messages that a dead process had taken", len(names))
    except OSError:
        return  # it lives, or another one is at it
    finally:
        os.close(descriptor)


def _marked(name: str) -> str:
    stem, dot, rest = name.partition(".")
    return name if stem.endswith(_AGAIN) else f"{stem}{_AGAIN}{dot}{rest}"


def _replace(folder: Path, name: str, text: str) -> None:
    """Write a file that nobody can see before it is complete."""
    unfinished = folder / f"{_UNFINISHED}{uuid4().hex}"
    try:
        unfinished.write_text(text)
        unfinished.replace(folder / name)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
