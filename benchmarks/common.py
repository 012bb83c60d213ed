"""What the benchmarks share: databases and brokers of their own, workers, processor time, and how a result is printed.

Absolute numbers belong to one machine. So both sides of every comparison run in one call, in alternating rounds, and
what counts is the median of the ratios of each round.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
from celery import Celery
from psycopg import sql

ROOT = Path(__file__).resolve().parent.parent
# Name -> the variable that names another one, the usual one, its usual port.
SERVERS = {
    "postgresql": ("OPSCONSOLE_BENCH_POSTGRESQL_URL", "postgresql://postgres@127.0.0.1:5432/postgres", 5432),
    "redis": ("OPSCONSOLE_BENCH_REDIS_URL", "redis://127.0.0.1:6379/11", 6379),
    "rabbitmq": ("OPSCONSOLE_BENCH_RABBITMQ_URL", "amqp://guest:guest@127.0.0.1:5672//", 5672),
}
SOURCE = "benchmark"
PATIENCE_SECONDS = 120.0
"""How long anything may take that should take seconds; then the benchmark ends with an error."""
WARM_UP = 200
SLOTS = 64
SLOT_BYTES = 8


def server(name: str) -> str:
    """Return the URL of one of the servers a benchmark needs."""
    variable, usual, _port = SERVERS[name]
    return os.environ.get(variable, "") or usual


def require(names: Iterable[str]) -> None:
    """End with a sentence if one of these servers does not answer."""
    for name in names:
        parts = urlsplit(server(name))
        address = (parts.hostname or "127.0.0.1", parts.port or SERVERS[name][2])
        try:
            socket.create_connection(address, timeout=3).close()
        except OSError as error:
            raise SystemExit(
                f"no {name} at {address[0]}:{address[1]} ({error}); {SERVERS[name][0]} names another"
            ) from None


# --- a run ------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """One call of a benchmark: its options, its temporary folder, and the databases it has made."""

    name: str
    rounds: int
    tasks: int
    folder: Path
    token: str = field(default_factory=lambda: secrets.token_hex(3))
    _databases: list[str] = field(default_factory=list)

    def database(self, label: str, template: str | None = None) -> str:
        """Create a database for this run alone and return its name."""
        name = f"opsconsole_bench_{self.token}_{label}"
        with _maintenance() as connection:
            copied = sql.SQL(" TEMPLATE {}").format(sql.Identifier(template)) if template else sql.SQL("")
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)) + copied)
        self._databases.append(name)
        return name

    def drop(self, name: str) -> None:
        """Drop one of this run's databases, whoever is still connected to it."""
        with _maintenance() as connection:
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))
        self._databases.remove(name)

    def close(self) -> None:
        for name in tuple(self._databases):
            self.drop(name)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def benchmark(name: str, description: str, *, needs: Sequence[str], tasks: int, rounds: int = 5) -> Iterator[Run]:
    """Read the command line, give the benchmark a run of its own, and remove what it made, however it ends.

    ``needs`` names the servers without which it is not even begun.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"alternating rounds (default {rounds})")
    parser.add_argument("--tasks", type=int, default=tasks, help=f"tasks or rows a side and round (default {tasks})")
    options = parser.parse_args()
    if options.rounds < 1 or options.tasks < 1:
        parser.error("--rounds and --tasks are 1 or more")
    require(needs)
    # Nothing of the shell's own console may reach the workers of a benchmark.
    for variable in [variable for variable in os.environ if variable.startswith("OPSCONSOLE_")]:
        if not variable.startswith("OPSCONSOLE_BENCH_"):
            del os.environ[variable]
    # So that "finally" runs when make is interrupted or a time limit ends us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run = Run(
        name=name,
        rounds=options.rounds,
        tasks=options.tasks,
        folder=Path(tempfile.mkdtemp(prefix="opsconsole-bench-")),
    )
    try:
        yield run
    finally:
        run.close()


@contextmanager
def _maintenance() -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(server("postgresql"), autocommit=True, connect_timeout=5) as connection:
        yield connection


def database_url(name: str) -> str:
    """Return the URL of a database on the benchmarks' server."""
    return urlunsplit(urlsplit(server("postgresql"))._replace(path=f"/{name}"))


def environment(run: Run, database: str, **more: str) -> dict[str, str]:
    """Return the environment of a process that uses ``database`` and keeps its files in the run's folder."""
    return {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "benchmarks.settings",
        "PYTHONPATH": str(ROOT),
        "OPSCONSOLE_DATABASE_URL": database_url(database),
        "OPSCONSOLE_BROKER_URL": "memory://",
        "OPSCONSOLE_VAR_DIR": str(run.folder / "var"),
        "OPSCONSOLE_JOURNAL_DIR": str(run.folder / "journal"),
        "OPSCONSOLE_SOURCE": SOURCE,
        "OPSCONSOLE_LOG_LEVEL": "ERROR",
        "CELERY_SKIP_CHECKS": "1",
        **more,
    }


def set_up_django(run: Run) -> str:
    """Start Django in this process on a new, migrated database; return its name, for copies of it."""
    name = run.database("template")
    os.environ.update(environment(run, name))
    import django
    from django.core.management import call_command

    django.setup()
    call_command("migrate", verbosity=0)
    use_database(name)
    return name


def use_database(name: str) -> None:
    """Let this process's Django go on with another database."""
    from django.db import connection

    connection.close()
    connection.settings_dict["NAME"] = name


# --- processor time ---------------------------------------------------------------------------------------------------


def cpu_of(pids: Iterable[int]) -> float:
    """Return the seconds of processor time, user and system, that the threads of these processes have had.

    From schedstat, in nanoseconds: /proc/PID/stat counts in hundredths of a second. Threads that have ended are left
    out, which no process measured here has.
    """
    total = 0
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with suppress(OSError):
                total += int(path.read_text().split()[0])
    return total / 1e9


def tree(pid: int) -> list[int]:
    """Return a process and all its living descendants."""
    children: dict[int, list[int]] = {}
    for child, parent, _name in _processes():
        children.setdefault(parent, []).append(child)
    found = [pid]
    for known in found:
        found += children.get(known, [])
    return found


def postgresql_cpu() -> float:
    """Return the processor time that the whole PostgreSQL server has had, ended backends included; NaN if it is remote.

    It is the server's, not a database's: it should have nothing else to do meanwhile.
    """
    processes = list(_processes())
    servers = {pid for pid, _parent, name in processes if name == "postgres"}
    masters = {parent for pid, parent, name in processes if name == "postgres" and parent in servers}
    if not masters:
        return float("nan")
    ended = 0
    for pid in masters:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ended += int(fields[13]) + int(fields[14])  # cutime and cstime: of children that were waited for
    return cpu_of(servers) + ended / os.sysconf("SC_CLK_TCK")


def backend_pid() -> int:
    """Return the process of this thread's Django connection."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return int(cursor.fetchone()[0])


def _processes() -> Iterator[tuple[int, int, str]]:
    """Yield process id, its parent's, and its command's name."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            head, _, rest = path.read_text().rpartition(")")
            pid, _, name = head.partition(" (")
            yield int(pid), int(rest.split()[1]), name


class Meter:
    """Processor time of this process and of its PostgreSQL backend, while a block of code runs."""

    def __init__(self) -> None:
        self.client = 0.0
        self.database = 0.0

    @property
    def total(self) -> float:
        return self.client + self.database

    @contextmanager
    def client_only(self) -> Iterator[None]:
        begin = time.process_time()
        yield
        self.client += time.process_time() - begin

    @contextmanager
    def both(self, backend: int) -> Iterator[None]:
        database, client = cpu_of([backend]), time.process_time()
        yield
        self.client += time.process_time() - client
        self.database += cpu_of([backend]) - database


# --- workers ----------------------------------------------------------------------------------------------------------


def publisher(broker: str) -> Celery:
    """Return a Celery app that only sends."""
    return Celery("publisher", broker=server(broker), set_as_current=False)


def publish(app: Celery, *, task: str, count: int, queue: str, ignore_result: bool = True) -> None:
    """Send ``count`` messages to ``queue``.

    ``ignore_result`` travels in each message: sent as true it would switch a result backend off.
    """
    with app.producer_pool.acquire(block=True) as producer:
        for number in range(count):
            app.send_task(
                task, args=(number,), queue=queue, producer=producer, ignore_result=ignore_result, retry=False
            )


def delete_queues(app: Celery, names: Iterable[str]) -> None:
    with app.connection_for_write() as connection:
        channel = connection.default_channel
        for name in names:
            with suppress(Exception):
                # Emptied first: on Redis a queue is only deleted by the process that has declared it.
                channel.queue_purge(name)
                channel.queue_delete(name)
            if (client := getattr(channel, "client", None)) is not None:
                # On Redis the bindings of a queue outlive it.
                client.delete(f"_kombu.binding.{name}", f"_kombu.binding_permanent.{name}")


class Worker:
    """A Celery worker of the benchmarks' app in its own process group, started without anything to do."""

    def __init__(self, run: Run, *, side: str, broker: str, database: str) -> None:
        self.queue = f"opsconsole.bench.{run.token}.{secrets.token_hex(3)}"
        self.node = f"bench-{secrets.token_hex(3)}@localhost"
        self.app = publisher(broker)
        self._idle = f"{self.queue}.idle"
        self._folder = Path(tempfile.mkdtemp(dir=run.folder))
        self._log = (self._folder / "log").open("wb")
        counters = self._folder / "done"
        counters.write_bytes(bytes(SLOTS * SLOT_BYTES))
        with counters.open("r+b") as file:
            self._counters = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "celery", "-A", "benchmarks.app", "worker", "-P", "prefork", "-c", "2",
                "-Q", self._idle, "-n", self.node, "-l", "WARNING", "--without-gossip", "--without-mingle",
            ],
            cwd=ROOT,
            env=environment(
                run,
                database,
                BENCH_SIDE=side,
                BENCH_BROKER=server(broker),
                BENCH_FOLDER=str(self._folder),
            ),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self._pids: list[int] = []

    def wait_until_ready(self) -> None:
        wait_for("the worker to start", lambda: (self._folder / "ready").exists(), self._check)
        self._pids = tree(self.process.pid)

    def consume(self) -> None:
        """Let it take what was published to its queue."""
        answer = self.app.control.add_consumer(self.queue, destination=[self.node], reply=True, timeout=10)
        if not answer:
            raise RuntimeError(f"the worker does not answer; its log:\n{self.log()}")

    def pause(self) -> None:
        """Let it take nothing any more."""
        self.app.control.cancel_consumer(self.queue, destination=[self.node], reply=True, timeout=10)

    def done(self) -> int:
        """Return how many task bodies have run."""
        return sum(self._counters)

    def wait_for_tasks(self, count: int) -> float:
        """Wait until that many bodies have run, and return when that was seen."""
        wait_for(f"{count} tasks to run", lambda: self.done() >= count, self._check, pause=0.002)
        return time.monotonic()

    def cpu(self) -> float:
        """Return the processor time of its main process and its children."""
        return cpu_of(self._pids)

    def stop(self) -> None:
        """End it warmly; only if it does not end, by force, and only what it has started."""
        pids = tree(self.process.pid) if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        if self.process.poll() is None:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait(10)
        self._log.close()
        delete_queues(self.app, (self.queue, self._idle))
        self.app.close()

    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-4_000:]

    def _check(self) -> None:
        if self.process.poll() is not None:
            raise RuntimeError(f"the worker has ended with {self.process.returncode}; its log:\n{self.log()}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How fast tasks ran in a worker and what they took of the processor."""

    rate: float  # tasks a second
    cpu: float  # seconds a task, of the worker's processes, its threads included
    database_cpu: float  # seconds a task, of the whole PostgreSQL server
    lag: float  # seconds from the last task's body until everything was recorded


def run_tasks(worker: Worker, *, task: str, count: int, side: str, recorded: Callable[[], int] | None) -> Ran:
    """Let the worker run ``count`` published tasks, and wait until ``recorded`` says that all of them are recorded."""

    def wait_until_recorded(expected: int) -> None:
        if recorded is not None:
            wait_for(f"{expected} tasks to be recorded", lambda: recorded() >= expected, worker._check, pause=0.02)

    # What is done once, such as first imports and first statements, is no cost of a task.
    publish(worker.app, task=task, count=WARM_UP, queue=worker.queue, ignore_result=side != "results")
    worker.wait_until_ready()
    worker.consume()
    worker.wait_for_tasks(WARM_UP)
    wait_until_recorded(WARM_UP)
    worker.pause()
    publish(worker.app, task=task, count=count, queue=worker.queue, ignore_result=side != "results")
    cpu, database = worker.cpu(), postgresql_cpu()
    worker.consume()
    first = WARM_UP + max(count // 20, 1)
    begin = worker.wait_for_tasks(first)
    already = worker.done()
    end = worker.wait_for_tasks(WARM_UP + count)
    wait_until_recorded(WARM_UP + count)
    lag = time.monotonic() - end
    # As long for each side, so that what runs while a worker idles weighs the same.
    time.sleep(max(1.0 - lag, 0.0))
    if recorded is not None and (found := recorded()) != WARM_UP + count:
        raise AssertionError(f"{found} recorded of {WARM_UP + count}")
    return Ran(
        rate=(WARM_UP + count - already) / max(end - begin, 1e-9),
        cpu=(worker.cpu() - cpu) / count,
        database_cpu=(postgresql_cpu() - database) / count,
        lag=lag,
    )


def wait_for(
    what: str,
    condition: Callable[[], bool],
    check: Callable[[], None] = lambda: None,
    *,
    pause: float = 0.02,
    seconds: float = PATIENCE_SECONDS,
) -> None:
    """Wait for a condition; raises ``TimeoutError`` if it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        time.sleep(pause)


def scalar(database: str, statement: str) -> int:
    """Ask a database for one number."""
    with psycopg.connect(database_url(database), autocommit=True, connect_timeout=5) as connection:
        row = connection.execute(statement.encode()).fetchone()
        return int(row[0]) if row and row[0] is not None else 0


# --- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a benchmark is to show: a measured value and its bound."""

    what: str
    value: float
    bound: float
    at_least: bool = True
    unit: str = ""

    @property
    def is_met(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound


def median(values: Iterable[float]) -> float:
    return statistics.median(list(values))


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median of the ratios of each round: what disturbs a round disturbs both its sides."""
    return median(a / b for a, b in zip(above, below, strict=True))


def show(run: Run, *, head: Sequence[str], rows: Iterable[Sequence[Any]], goals: Sequence[Goal], **more: Any) -> None:
    """Print a table, whether each goal was met, and all of it once more as one line of JSON."""
    rows = list(rows)
    cells = [list(head), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    print(f"\n{run.name}: {run.rounds} rounds of {run.tasks}")
    for number, row in enumerate(cells):
        print("  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
        if number == 0:
            print("  " + "  ".join("-" * width for width in widths))
    for goal in goals:
        sign = ">=" if goal.at_least else "<="
        verdict = "met" if goal.is_met else "MISSED"
        print(f"  {goal.what}: {_cell(goal.value)}{goal.unit} (goal {sign} {goal.bound:g}{goal.unit}: {verdict})")
    document = {
        "benchmark": run.name,
        "rounds": run.rounds,
        "tasks": run.tasks,
        "goals": [
            {"what": goal.what, "value": _rounded(goal.value), "bound": goal.bound, "at_least": goal.at_least,
             "met": goal.is_met}
            for goal in goals
        ],
        "table": {"head": list(head), "rows": [_rounded(list(row)) for row in rows]},
        **{name: _rounded(value) for name, value in more.items()},
    }  # fmt: skip
    print(json.dumps(document), flush=True)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        if value != value:
            return "-"
        return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"
    return str(value)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return None if value != value else float(f"{value:.5g}")
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
