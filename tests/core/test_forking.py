"""The gate that keeps a process from forking while a thread is inside SQLite."""

from __future__ import annotations

import os
import threading
import time

import pytest

from opsconsole.core import forking
from opsconsole.core.forking import ForkGate


@pytest.fixture
def gate() -> ForkGate:
    gate = ForkGate()
    gate.is_needed = True
    return gate


def test_a_fork_waits_for_the_thread_that_is_inside(gate: ForkGate) -> None:
    left_at: list[float] = []
    entered = threading.Event()

    def work() -> None:
        with gate:
            entered.set()
            time.sleep(0.2)
            left_at.append(time.monotonic())

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait()
    gate.before_fork()
    forked_at = time.monotonic()
    gate.after_in_parent()
    thread.join()
    assert forked_at >= left_at[0]


def test_a_busy_thread_does_not_keep_a_fork_waiting(gate: ForkGate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "LONGEST_WAIT_SECONDS", 30.0)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            with gate:
                time.sleep(0.01)

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(20):
        gate.before_fork()
        assert gate._is_held
        gate.after_in_parent()
    stop.set()
    thread.join()


def test_a_fork_goes_ahead_when_a_thread_does_not_come_out(gate: ForkGate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "LONGEST_WAIT_SECONDS", 0.05)
    with gate:
        gate.before_fork()
        gate.after_in_parent()
    with gate:
        assert gate._lock.locked()
    assert not gate._lock.locked()


def test_a_child_finds_the_gate_open(gate: ForkGate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "GATE", gate)
    child = os.fork()
    if child == 0:
        is_open = not gate.is_needed and not gate._lock.locked() and not gate._is_wanted
        os._exit(0 if is_open else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with gate:
        assert gate._lock.locked()


def test_no_gate_is_needed_where_nothing_asks_for_it() -> None:
    gate = ForkGate()
    with gate:
        gate.before_fork()
        assert not gate._lock.locked()
        gate.after_in_parent()
