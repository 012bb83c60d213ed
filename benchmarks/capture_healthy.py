"""What the console costs while nothing fails: a worker without it and one with it.

    python -m benchmarks.capture_healthy

Prefork worker with two children on RabbitMQ; the console's side with PostgreSQL, its drainer running. Tasks that do
nothing, at full speed, are the worst case; tasks of 20 ms are what it looks like at work. The bytes are what the
journal was given for each job, read while no segment was full; in the end a recovery, as any later worker makes it,
has to leave nothing on the disk.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from benchmarks.common import (
    SOURCE,
    Goal,
    Ran,
    Run,
    Worker,
    benchmark,
    median,
    publish,
    ratio,
    run_tasks,
    scalar,
    set_up_django,
    show,
    use_database,
    wait_for,
)

BYTES_FROM = 2_000
"""So few jobs that no process fills a segment, which would be pruned before it is looked at."""
COUNTED = f"SELECT sum(succeeded) FROM ops_deadletters_taskminute WHERE source = '{SOURCE}'"


def measure(run: Run, template: str, side: str, task: str, count: int) -> tuple[Ran, int]:
    """Run one side once, on a copy of the empty database; return also the bytes that it left on the disk."""
    database = run.database(f"{side}_{time.monotonic_ns()}", template)
    worker = Worker(run, side=side, broker="rabbitmq", database=database)
    try:
        ran = run_tasks(
            worker,
            task=task,
            count=count,
            side=side,
            recorded=(lambda: scalar(database, COUNTED)) if side != "none" else None,
        )
    finally:
        worker.stop()
    left = bytes_left(run, database) if side != "none" else 0
    run.drop(database)
    return ran, left


def bytes_a_job(run: Run, template: str) -> float:
    """Return what a job that does nothing adds to the journal."""
    count = min(run.tasks, BYTES_FROM)
    database = run.database("bytes", template)
    worker = Worker(run, side="opsconsole", broker="rabbitmq", database=database)
    try:
        worker.wait_until_ready()
        before = size_of(run)
        publish(worker.app, task="bench.noop", count=count, queue=worker.queue)
        worker.consume()
        wait_for("everything to be recorded", lambda: scalar(database, COUNTED) == count)
        size = size_of(run) - before
    finally:
        worker.stop()
    bytes_left(run, database)
    run.drop(database)
    return size / count


def bytes_left(run: Run, database: str) -> int:
    """Recover what the worker that has just ended left behind, and return what is on the disk after that."""
    from deadletters import conf, drainer
    from deadletters.drainer import FolderDrain, recover_folder
    from repairs.settlement import DatabaseSettlement

    use_database(database)
    for folder in conf.journal_root().root.dead_folders():
        drain = FolderDrain(
            folder_name=folder.name,
            source=SOURCE,
            worker="",
            settlement=DatabaseSettlement(),
            kept=None,
            book=drainer.policies(),
        )
        if recover_folder(folder, drain):
            folder.delete()
        folder.release()
    use_database("postgres")
    return size_of(run)


def journal(run: Run) -> Path:
    return run.folder / "journal"


def size_of(run: Run) -> int:
    """Return the bytes in every journal of this run."""
    return sum(
        os.lstat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(journal(run)) for name in names
    )


def main() -> None:
    with benchmark("capture_healthy", "No task fails.", needs=("postgresql", "rabbitmq"), tasks=4_000) as run:
        template = set_up_django(run)
        # A database that somebody is connected to cannot be copied.
        use_database("postgres")
        size = bytes_a_job(run, template)
        results: dict[tuple[str, str], list[Ran]] = {}
        left = 0
        for _ in range(run.rounds):
            for task, count in (("bench.noop", run.tasks), ("bench.short", max(run.tasks // 10, 20))):
                for side in ("none", "opsconsole"):
                    ran, still_there = measure(run, template, side, task, count)
                    results.setdefault((side, task), []).append(ran)
                    left = max(left, still_there)
        rate = {key: [ran.rate for ran in rans] for key, rans in results.items()}
        extra_cpu = median(
            with_us.cpu - without.cpu
            for with_us, without in zip(results["opsconsole", "bench.noop"], results["none", "bench.noop"], strict=True)
        )
        labels = {"none": "without", "opsconsole": "with opsconsole"}
        tasks = {"bench.noop": "nothing", "bench.short": "20 ms"}
        show(
            run,
            head=("task", "side", "tasks/s", "of without", "worker CPU ms/task", "PostgreSQL CPU ms/task", "lag s"),
            rows=[
                (
                    tasks[task],
                    labels[side],
                    median(rate[side, task]),
                    ratio(rate[side, task], rate["none", task]),
                    1e3 * median(ran.cpu for ran in rans),
                    1e3 * median(ran.database_cpu for ran in rans),
                    median(ran.lag for ran in rans) if side != "none" else float("nan"),
                )
                for (side, task), rans in results.items()
            ],
            goals=[
                Goal(
                    what="throughput of tasks that do nothing",
                    value=ratio(rate["opsconsole", "bench.noop"], rate["none", "bench.noop"]),
                    bound=0.80,
                ),
                Goal(
                    what="processor time that a task costs more, worker and drainer",
                    value=1e3 * extra_cpu,
                    bound=0.15,
                    at_least=False,
                    unit=" ms",
                ),
                Goal(
                    what="throughput of 20 ms tasks",
                    value=ratio(rate["opsconsole", "bench.short"], rate["none", "bench.short"]),
                    bound=0.985,
                ),
                Goal(what="journal of a job", value=size, bound=1024, at_least=False, unit=" bytes"),
                Goal(what="left on the disk after draining", value=float(left), bound=0, at_least=False, unit=" bytes"),
            ],
        )


if __name__ == "__main__":
    main()
