"""What a job of the ledger costs: the same empty body as a plain Celery task and as a job, on Redis.

    python -m benchmarks.ledger

Prefork worker with two children, to which the console is attached on both sides: what capturing costs is measured by
``capture_healthy``. A third worker, without it, is shown beside them. A plain task is a message without a result; a job
is a row that is leased, sent, claimed, settled and counted, each of it durable on PostgreSQL, so that it is neither
lost nor run twice. Both sides begin with everything written, the plain side's messages in their queue, and do a few
hundred before the clock starts; they end when all of it is done: for the ledger, when the last row says so. Nothing of
the worker's Celery is configured, and so its Django closes its connections around each task. In the end one job is
written into an empty ledger, several times over, to see how long it takes to be sent.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import psycopg

from benchmarks.common import (
    WARM_UP,
    Goal,
    Run,
    Worker,
    benchmark,
    database_url,
    median,
    postgresql_cpu,
    publish,
    ratio,
    set_up_django,
    show,
    use_database,
    wait_for,
)

DONE = "SELECT count(*) FROM ops_jobs_job WHERE state = 'succeeded'"
IDLE_JOBS = 10
NOTHING = "plain task, no console"
PLAIN = "plain task on Redis"
LEDGER = "job of the ledger"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Jobs a second, and what each took of the processor in microseconds: the worker's, and the whole PostgreSQL's."""

    rate: float
    cpu: float
    database_cpu: float


def plain(run: Run, template: str, *, side: str) -> Rate:
    """Return how many plain tasks a second the worker does."""
    database = run.database(f"plain_{time.monotonic_ns()}", template)
    worker = Worker(run, side=side, broker="redis", database=database)
    try:
        worker.wait_until_ready()
        publish(worker.app, task="bench.noop", count=WARM_UP + run.tasks, queue=worker.queue)
        rate = timed(run, worker, lambda: True)
    finally:
        worker.stop()
    run.drop(database)
    return rate


def ledger(run: Run, template: str) -> tuple[Rate, list[float]]:
    """Return how many jobs a second, and how long single ones took at idle."""
    database = run.database(f"ledger_{time.monotonic_ns()}", template)
    worker = Worker(run, side="ledger", broker="redis", database=database)
    waits = []
    try:
        worker.wait_until_ready()
        use_database(database)
        count = WARM_UP + run.tasks
        write_jobs(count, worker.queue)
        with psycopg.connect(database_url(database), autocommit=True) as connection:

            def all_done() -> bool:
                row = connection.execute(DONE).fetchone()
                return row is not None and row[0] == count

            rate = timed(run, worker, all_done)
        for _ in range(IDLE_JOBS):
            # At another moment of the dispatcher's second each time.
            time.sleep(1.37)
            done = worker.done()
            begin = time.monotonic()
            write_jobs(1, worker.queue)
            waits.append(worker.wait_for_tasks(done + 1) - begin)
    finally:
        worker.stop()
        use_database("postgres")
    run.drop(database)
    return rate, waits


def timed(run: Run, worker: Worker, all_done: Callable[[], bool]) -> Rate:
    """Let a worker do what is written, and measure from the moment that it has warmed up until all is done."""
    worker.consume()
    begin = worker.wait_for_tasks(WARM_UP)
    already = worker.done()
    cpu, database_cpu = worker.cpu(), postgresql_cpu()
    worker.wait_for_tasks(WARM_UP + run.tasks)
    wait_for("every job to be done", all_done, pause=0.005)
    took, count = time.monotonic() - begin, WARM_UP + run.tasks - already
    return Rate(
        rate=count / took,
        cpu=1e6 * (worker.cpu() - cpu) / count,
        database_cpu=1e6 * (postgresql_cpu() - database_cpu) / count,
    )


def write_jobs(count: int, queue: str) -> None:
    from django.db import transaction

    from opsconsole.jobs.models import Job
    from opsconsole.jobs.services import enqueue

    with transaction.atomic():
        ids = [enqueue(kind="bench_noop", tenant="default", payload={"number": number}).id for number in range(count)]
        Job.objects.filter(id__in=ids).update(queue=queue)


def main() -> None:
    with benchmark("ledger", "Jobs that do nothing.", needs=("postgresql", "redis"), tasks=3_000) as run:
        os.environ["OPSCONSOLE_JOB_KINDS"] = "benchmarks.kind_noop"
        os.environ["BENCH_SIDE"], os.environ["BENCH_FOLDER"] = "none", str(run.folder)
        os.environ["BENCH_BROKER"] = "memory://"
        (run.folder / "done").write_bytes(bytes(8))
        template = set_up_django(run)
        use_database("postgres")
        sides: dict[str, list[Rate]] = {NOTHING: [], PLAIN: [], LEDGER: []}
        waits = []
        for _ in range(run.rounds):
            sides[NOTHING].append(plain(run, template, side="none"))
            sides[PLAIN].append(plain(run, template, side="opsconsole"))
            rate, idle = ledger(run, template)
            sides[LEDGER].append(rate)
            waits += idle
        rates = {name: [one.rate for one in found] for name, found in sides.items()}
        show(
            run,
            head=("side", "jobs/s", "of plain", "us of worker", "us of PostgreSQL"),
            rows=[
                (
                    name,
                    median(rates[name]),
                    ratio(rates[name], rates[PLAIN]),
                    median(one.cpu for one in found),
                    median(one.database_cpu for one in found),
                )
                for name, found in sides.items()
            ],
            goals=[
                Goal(what="throughput against plain tasks", value=ratio(rates[LEDGER], rates[PLAIN]), bound=0.6),
                Goal(what="longest wait of a job at idle", value=max(waits), bound=1.5, at_least=False, unit=" s"),
            ],
        )


if __name__ == "__main__":
    main()
