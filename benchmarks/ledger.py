"""What a job of the ledger costs: the same empty body as a plain Celery task and as a job, on Redis.

    python -m benchmarks.ledger

Prefork worker with two children. A plain task is a message; a job is a row that is leased, sent, claimed, settled and
counted, each of it durable on PostgreSQL, so that it is neither lost nor run twice. Both sides begin with everything
written, and end when all of it is done: for the ledger, when the last row says so. In the end one job is written into
an empty ledger, several times over, to see how long it takes to be sent.
"""

from __future__ import annotations

import os
import time

from benchmarks.common import (
    Goal,
    Run,
    Worker,
    benchmark,
    median,
    publish,
    ratio,
    scalar,
    set_up_django,
    show,
    use_database,
    wait_for,
)

DONE = "SELECT count(*) FROM ops_jobs_job WHERE state = 'succeeded'"
IDLE_JOBS = 10


def plain(run: Run, database: str) -> float:
    """Return how many plain tasks a second the worker does."""
    worker = Worker(run, side="none", broker="redis", database=database)
    try:
        worker.wait_until_ready()
        publish(worker.app, task="bench.noop", count=run.tasks, queue=worker.queue)
        begin = time.monotonic()
        worker.consume()
        return run.tasks / (worker.wait_for_tasks(run.tasks) - begin)
    finally:
        worker.stop()


def ledger(run: Run, template: str) -> tuple[float, float, list[float]]:
    """Return how many jobs a second, the worker's processor time for each, and how long single ones took at idle."""
    database = run.database(f"ledger_{time.monotonic_ns()}", template)
    worker = Worker(run, side="ledger", broker="redis", database=database)
    try:
        worker.wait_until_ready()
        use_database(database)
        write_jobs(run.tasks, worker.queue)
        before = worker.cpu()
        begin = time.monotonic()
        worker.consume()
        wait_for("every job to be done", lambda: scalar(database, DONE) == run.tasks, pause=0.05)
        rate = run.tasks / (time.monotonic() - begin)
        cpu = (worker.cpu() - before) / run.tasks
        waits = []
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
    return rate, cpu, waits


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
        plain_rates, rates, cpus, waits = [], [], [], []
        for _ in range(run.rounds):
            plain_rates.append(plain(run, template))
            rate, cpu, idle = ledger(run, template)
            rates.append(rate)
            cpus.append(cpu)
            waits += idle
        show(
            run,
            head=("side", "jobs/s", "of plain"),
            rows=[
                ("plain task on Redis", median(plain_rates), 1.0),
                ("job of the ledger", median(rates), ratio(rates, plain_rates)),
            ],
            goals=[
                Goal(what="throughput against plain tasks", value=ratio(rates, plain_rates), bound=0.6),
                Goal(what="longest wait of a job at idle", value=max(waits), bound=1.5, at_least=False, unit=" s"),
            ],
        )


if __name__ == "__main__":
    main()
