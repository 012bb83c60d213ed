"""What it costs that every task fails: nothing recorded, this console, django-celery-results.

    python -m benchmarks.capture_failing

Prefork worker with two children on Redis; PostgreSQL for both recorders. The console's drainer has to keep up: after
the last task its letters are counted until they are all there, and the wait is printed as the lag.
"""

from __future__ import annotations

from benchmarks.common import (
    SOURCE,
    Goal,
    Ran,
    Run,
    Worker,
    benchmark,
    median,
    ratio,
    run_tasks,
    scalar,
    set_up_django,
    show,
    use_database,
)

SIDES = {
    "none": ("no recording", ""),
    "opsconsole": ("opsconsole", f"SELECT count(*) FROM ops_deadletters_deadletter WHERE source = '{SOURCE}'"),
    "results": ("django-celery-results", "SELECT count(*) FROM django_celery_results_taskresult"),
}


def measure(run: Run, template: str, side: str, number: int) -> Ran:
    """Run one side once, on a copy of the empty database."""
    database = run.database(f"{side}_{number}", template)
    worker = Worker(run, side=side, broker="redis", database=database)
    counted = SIDES[side][1]
    try:
        return run_tasks(
            worker,
            task="bench.fail",
            count=run.tasks,
            side=side,
            recorded=(lambda: scalar(database, counted)) if counted else None,
        )
    finally:
        worker.stop()
        run.drop(database)


def main() -> None:
    with benchmark("capture_failing", "Every task fails.", needs=("postgresql", "redis"), tasks=2_000) as run:
        template = set_up_django(run)
        # A database that somebody is connected to cannot be copied.
        use_database("postgres")
        results: dict[str, list[Ran]] = {side: [] for side in SIDES}
        for number in range(run.rounds):
            for side in SIDES:
                results[side].append(measure(run, template, side, number))
        rates = {side: [ran.rate for ran in rans] for side, rans in results.items()}
        show(
            run,
            head=("side", "tasks/s", "of none", "worker CPU ms/task", "PostgreSQL CPU ms/task", "lag s (longest)"),
            rows=[
                (
                    label,
                    median(rates[side]),
                    ratio(rates[side], rates["none"]),
                    1e3 * median(ran.cpu for ran in results[side]),
                    1e3 * median(ran.database_cpu for ran in results[side]),
                    max(ran.lag for ran in results[side]) if side != "none" else float("nan"),
                )
                for side, (label, _counted) in SIDES.items()
            ],
            goals=[
                Goal(
                    what="throughput against no recording",
                    value=ratio(rates["opsconsole"], rates["none"]),
                    bound=0.75,
                ),
                Goal(
                    what="throughput against django-celery-results",
                    value=ratio(rates["opsconsole"], rates["results"]),
                    bound=2.2,
                ),
                Goal(
                    what="longest lag behind the last task",
                    value=max(ran.lag for ran in results["opsconsole"]),
                    bound=5.0,
                    at_least=False,
                    unit=" s",
                ),
            ],
        )


if __name__ == "__main__":
    main()
