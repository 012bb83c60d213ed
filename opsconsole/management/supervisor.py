"""Several processes under one in the foreground: started together, stopped together, their lines in one terminal."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

LOOK_EVERY_SECONDS = 0.2
STOP_WITHIN_SECONDS = 25.0
_PR_SET_PDEATHSIG = 1
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Loaded before any fork: looking it up in a forked child could wait for a lock that nobody there holds.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(slots=True, kw_only=True)
class Child:
    """One process, the leader of a group of its own, so that Ctrl-C in the terminal reaches only the supervisor."""

    name: str
    process: subprocess.Popen[bytes]
    pump: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        """Whether it has not ended; one that has is not reaped yet, so that its number stays its own."""
        if self.process.returncode is not None:
            return False
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def finish(self) -> None:
        """End whatever is left of the process and of those it has started, then reap it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Supervisor:
    """Starts children, passes their lines on with a name in front, and stops them all when one ends or it is told to.

    Used as a context manager: while it is open, SIGINT, SIGTERM and SIGHUP ask for a stop, and nothing that was started
    outlives it.
    """

    def __init__(self, write: Callable[[str], Any], *, stop_within_seconds: float = STOP_WITHIN_SECONDS) -> None:
        self.children: list[Child] = []
        self._write = write
        self._stop_within = stop_within_seconds
        self._lock = threading.Lock()
        self._asked = 0
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Supervisor:
        for number in _STOP_SIGNALS:
            self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @property
    def is_stopping(self) -> bool:
        """Whether somebody has asked for a stop."""
        return self._asked > 0

    def say(self, text: str) -> None:
        """Write one line of our own; a terminal that is gone is a reason to stop."""
        with self._lock:
            try:
                self._write(text)
            except OSError:
                self._asked += 1

    def start(
        self, name: str, command: Sequence[str], *, env: Mapping[str, str], pass_fds: Iterable[int] = ()
    ) -> Child:
        """Start a process; on Linux it is told to end even if the supervisor is killed without a chance to say so."""
        process = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=tuple(pass_fds),
            preexec_fn=_end_with_parent if _LIBC is not None else None,
        )
        child = Child(name=name, process=process)
        self.children.append(child)
        return child

    def watch(self) -> None:
        """Begin to pass lines on; called when all are started, because forking beside threads is asking for trouble."""
        width = max(len(child.name) for child in self.children)
        for child in self.children:
            child.pump = threading.Thread(target=self._pump, args=(child, width), daemon=True)
            child.pump.start()

    def ended(self) -> Child | None:
        """Return a child that is no longer running."""
        return next((child for child in self.children if not child.is_running), None)

    def wait(self) -> Child | None:
        """Wait until a stop is asked for, and return None, or until a child ends, and return that."""
        while not self.is_stopping:
            if (child := self.ended()) is not None:
                return child
            time.sleep(LOOK_EVERY_SECONDS)
        return None

    def stop(self) -> None:
        """End all, the latest first and one after the other, so that none loses what it still needs.

        What takes longer than the time is killed, and so is everything on a second signal.
        """
        deadline = time.monotonic() + self._stop_within
        patience = max(self._asked, 1)
        for child in reversed(self.children):
            child.signal(signal.SIGTERM)
            while child.is_running and time.monotonic() < deadline and self._asked <= patience:
                time.sleep(LOOK_EVERY_SECONDS / 4)
            if child.is_running:
                self.say(f"{child.name} did not stop in time and is killed.")
            child.finish()
        for child in self.children:
            if child.pump is not None:
                child.pump.join(2)
        self.children.clear()

    def _on_signal(self, *_: object) -> None:
        self._asked += 1

    def _pump(self, child: Child, width: int) -> None:
        stream: IO[bytes] | None = child.process.stdout
        if stream is None:
            return
        with stream:
            for line in stream:
                self.say(f"{child.name:<{width}} | {line.decode(errors='replace').rstrip()}")


def describe_end(child: Child) -> str:
    """Say how a child that has ended did; asked once it is finished."""
    code = child.process.returncode
    if code is not None and code < 0:
        try:
            return f"{child.name} was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"{child.name} was ended by signal {-code}"
    return f"{child.name} ended by itself with exit code {code}"


def _end_with_parent() -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
