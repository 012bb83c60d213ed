"""One process in the foreground, its children, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from opsconsole.management.supervisor import Child, Supervisor, describe_end

ROOT = Path(__file__).parents[2]
SLEEP = "import time; time.sleep(60)"
# Says that it is there only once a signal would be handled.
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('there', flush=True); time.sleep(60)"


class Terminal:
    """Collects what is written."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, text: str) -> None:
        self.lines.append(text)

    def wait_for(self, text: str) -> None:
        for _ in range(200):
            if any(text in line for line in self.lines):
                return
            time.sleep(0.05)
        pytest.fail(f"{text!r} is not in {self.lines}", pytrace=False)


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


@pytest.fixture
def supervisor(terminal: Terminal) -> Iterator[Supervisor]:
    with Supervisor(terminal.write, stop_within_seconds=1.0) as running:
        yield running


@pytest.fixture
def start(supervisor: Supervisor) -> Callable[..., Child]:
    def start_python(name: str, code: str) -> Child:
        return supervisor.start(name, [sys.executable, "-c", code], env=os.environ)

    return start_python


def test_lines_carry_the_name_of_who_wrote_them(
    supervisor: Supervisor, terminal: Terminal, start: Callable[..., Child]
) -> None:
    start("web", "import sys; print('out'); print('\\udcff', file=sys.stderr)")
    start("worker", "print('two'); print('lines')")
    supervisor.watch()
    terminal.wait_for("worker | lines")
    terminal.wait_for("web    | out")


def test_a_child_that_ends_by_itself_is_named_with_its_exit_code(
    supervisor: Supervisor, start: Callable[..., Child]
) -> None:
    start("web", SLEEP)
    start("worker", "raise SystemExit(3)")
    supervisor.watch()
    gone = supervisor.wait()
    supervisor.stop()
    assert gone is not None
    assert describe_end(gone) == "worker ended by itself with exit code 3"


SUICIDE = "import os, signal; print('here', flush=True); os.kill(os.getpid(), signal.SIGKILL)"


def test_a_child_that_is_killed_is_started_again_and_one_line_says_so(
    supervisor: Supervisor, terminal: Terminal, start: Callable[..., Child], tmp_path: Path
) -> None:
    """In its place: it is stopped in its turn, and its lines have its name."""
    mark = tmp_path / "was-here"
    once = f"import os, pathlib, signal; mark = pathlib.Path({str(mark)!r})\n"
    once += "if not mark.exists(): mark.touch(); os.kill(os.getpid(), signal.SIGKILL)\n"
    worker = start("worker", once + f"print('back', flush=True); {SLEEP}")
    web = start("web", SLEEP)
    supervisor.watch()
    before = (worker.process.pid, web.process.pid)
    threading.Thread(target=lambda: (terminal.wait_for("back"), os.kill(os.getpid(), signal.SIGTERM))).start()
    assert supervisor.wait() is None
    assert [line for line in terminal.lines if "started again" in line] == [
        "worker was ended by SIGKILL, and is started again."
    ]
    assert "worker | back" in terminal.lines
    assert supervisor.children == [worker, web]
    assert worker.process.pid != before[0]
    assert web.process.pid == before[1]


def test_a_child_that_is_killed_again_and_again_is_named_with_the_signal(
    supervisor: Supervisor, terminal: Terminal, start: Callable[..., Child]
) -> None:
    """Three times a minute, and then it counts as ended."""
    start("worker", SUICIDE)
    supervisor.watch()
    gone = supervisor.wait()
    supervisor.stop()
    assert gone is not None
    assert describe_end(gone) == "worker was ended by SIGKILL"
    assert [line for line in terminal.lines if "started again" in line] == [
        "worker was ended by SIGKILL, and is started again."
    ] * 3
    assert terminal.lines.count("worker | here") == 4


def test_what_was_started_a_minute_ago_does_not_count(
    supervisor: Supervisor, terminal: Terminal, start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opsconsole.management.supervisor.STARTED_AGAIN_WITHIN_SECONDS", 0.0)
    start("worker", SUICIDE)
    supervisor.watch()

    def stop_after_five() -> None:
        while terminal.lines.count("worker | here") < 5:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_after_five, daemon=True).start()
    assert supervisor.wait() is None


def test_what_a_killed_child_had_started_is_ended_with_it(
    supervisor: Supervisor, terminal: Terminal, start: Callable[..., Child]
) -> None:
    """A worker's pool would run on beside that of the new one."""
    nested = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).pid, flush=True);"
    start("worker", nested + SUICIDE)
    supervisor.watch()
    assert supervisor.wait() is not None
    supervisor.stop()
    pids = [int(line.split("| ")[1]) for line in terminal.lines if line.startswith("worker | ") and "here" not in line]
    assert len(pids) == 4
    for pid in pids:
        wait_until_gone(pid)


def wait_until_gone(pid: int) -> None:
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            return
        time.sleep(0.02)
    pytest.fail(f"{pid} is still there", pytrace=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything(supervisor: Supervisor, start: Callable[..., Child], number: signal.Signals) -> None:
    children = [start("web", SLEEP), start("worker", SLEEP)]
    supervisor.watch()
    os.kill(os.getpid(), number)
    assert supervisor.wait() is None
    supervisor.stop()
    assert [child.process.returncode for child in children] == [-signal.SIGTERM] * 2


def test_the_latest_is_stopped_first(supervisor: Supervisor, terminal: Terminal, start: Callable[..., Child]) -> None:
    code = "import signal, sys; signal.signal(15, lambda *_: sys.exit(print('bye'))); print('up', flush=True);" + SLEEP
    start("first", code)
    start("second", code)
    supervisor.watch()
    terminal.wait_for("first  | up")
    terminal.wait_for("second | up")
    supervisor.stop()
    said = [line for line in terminal.lines if line.endswith("bye")]
    assert said == ["second | bye", "first  | bye"]


def test_one_that_does_not_stop_in_time_is_killed_with_its_own_children(
    supervisor: Supervisor, terminal: Terminal, start: Callable[..., Child]
) -> None:
    nested = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).pid, flush=True);"
    child = start("worker", nested + STUBBORN)
    supervisor.watch()
    terminal.wait_for("there")
    grandchild = int(next(line for line in terminal.lines if "there" not in line).split("| ")[1])
    supervisor.stop()
    assert child.process.returncode == -signal.SIGKILL
    assert any("did not stop in time" in line for line in terminal.lines)
    wait_until_gone(grandchild)


def test_a_second_signal_stops_at_once(terminal: Terminal) -> None:
    with Supervisor(terminal.write, stop_within_seconds=60) as supervisor:
        supervisor.start("worker", [sys.executable, "-c", STUBBORN], env=os.environ)
        supervisor.watch()
        terminal.wait_for("there")
        os.kill(os.getpid(), signal.SIGINT)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        supervisor.stop()
    assert time.monotonic() - began < 10


def test_a_terminal_that_is_gone_asks_for_a_stop() -> None:
    def broken(_: str) -> None:
        raise BrokenPipeError

    with Supervisor(broken) as supervisor:
        supervisor.say("anybody there?")
        assert supervisor.is_stopping


def test_the_signal_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Supervisor(print):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent is gone")
def test_children_do_not_outlive_a_supervisor_that_is_killed() -> None:
    code = (
        "import os, sys, time; from opsconsole.management.supervisor import Supervisor; s = Supervisor(print);"
        f"c = s.start('worker', [sys.executable, '-c', {SLEEP!r}], env=os.environ);"
        "print(c.process.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    wait_until_gone(child)
