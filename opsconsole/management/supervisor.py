"""Several processes under one in the foreground: started together, stopped together, their lines in one terminal."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

LOOK_EVERY_SECONDS = 0.2
STOP_WITHIN_SECONDS = 25.0
STARTED_AGAIN_AT_MOST = 3
STARTED_AGAIN_WITHIN_SECONDS = 60.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Run as the child, which then becomes the real command: code of ours between fork and exec could wait for ever for a
# lock that a thread of the supervisor held. 1 is PR_SET_PDEATHSIG, which the real command keeps; a supervisor that died
# before it was set has left the child to another parent.
_TIED_TO_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What is run, with what it inherits."""

    words: tuple[str, ...]
    env: Mapping[str, str]
    pass_fds: tuple[int, ...] = ()

    def start(self) -> subprocess.Popen[bytes]:
        tie: tuple[str, ...] = ()
        if sys.platform == "linux":
            tie = (sys.executable, "-I", "-S", "-c", _TIED_TO_PARENT, str(os.getpid()))
        return subprocess.Popen(
            [*tie, *self.words],
            env=dict(self.env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=self.pass_fds,
        )


@dataclass(slots=True, kw_only=True)
class Child:
    """One process, the leader of a group of its own, so that Ctrl-C in the terminal reaches only the supervisor."""

    name: str
    command: Command
    process: subprocess.Popen[bytes]
    pump: threading.Thread | None = None
    started_again: list[float] = field(default_factory=list)

    @property
    def is_running(self) -> bool:
        """Whether it has not ended; one that has is not reaped yet, so that its number stays its own."""
        if self.process.returncode is not None:
            return False
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    @property
    def was_killed(self) -> bool:
        """Whether a signal has ended it; asked before it is finished."""
        found = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return found is not None and found.si_code in (os.CLD_KILLED, os.CLD_DUMPED)

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

    One that was killed has not ended by itself, and is started again, three times a minute at most.

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
        run = Command(words=tuple(command), env=env, pass_fds=tuple(pass_fds))
        child = Child(name=name, command=run, process=run.start())
        self.children.append(child)
        return child

    def watch(self) -> None:
        """Begin to pass lines on; called when all are started, so that their names are set off alike."""
        for child in self.children:
            self._watch(child)

    def ended(self) -> Child | None:
        """Return a child that is no longer running."""
        return next((child for child in self.children if not child.is_running), None)

    def wait(self) -> Child | None:
        """Wait until a stop is asked for, and return None, or until a child ends for good, and return that."""
        while not self.is_stopping:
            if (child := self.ended()) is None:
                time.sleep(LOOK_EVERY_SECONDS)
            elif not self._start_again(child):
                return child
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

    def _start_again(self, child: Child) -> bool:
        """Start a child that was killed again; returns whether that was done."""
        now = time.monotonic()
        before = [at for at in child.started_again if now - at < STARTED_AGAIN_WITHIN_SECONDS]
        if not child.was_killed or len(before) >= STARTED_AGAIN_AT_MOST:
            return False
        child.finish()
        self.say(f"{describe_end(child)}, and is started again.")
        child.process = child.command.start()
        child.started_again = [*before, now]
        self._watch(child)
        return True

    def _watch(self, child: Child) -> None:
        width = max(len(one.name) for one in self.children)
        child.pump = threading.Thread(target=self._pump, args=(child.name, child.process, width), daemon=True)
        child.pump.start()

    def _on_signal(self, *_: object) -> None:
        self._asked += 1

    def _pump(self, name: str, process: subprocess.Popen[bytes], width: int) -> None:
        stream: IO[bytes] | None = process.stdout
        if stream is None:
            return
        with stream:
            for line in stream:
                self.say(f"{name:<{width}} | {line.decode(errors='replace').rstrip()}")


def describe_end(child: Child) -> str:
    """Say how a child that has ended did; asked once it is finished."""
    code = child.process.returncode
    if code is not None and code < 0:
        try:
            return f"{child.name} was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"{child.name} was ended by signal {-code}"
    return f"{child.name} ended by itself with exit code {code}"
