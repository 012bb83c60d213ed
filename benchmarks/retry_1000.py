"""Retrying an incident of 1,000 jobs: how fast that is planned, and how fast the relay sends it.

    python -m benchmarks.retry_1000

For information; there is no goal. Planning locks, checks and audits each job; the relay claims pages of them, sends
each original message under its new id and marks it sent. Beside them stand what sending alone takes (``send_task`` on a
connection that is kept, no database) and what RQ's own requeue takes on Redis (no audit, no durable state).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from celery import Celery

from benchmarks.common import (
    Run,
    benchmark,
    delete_queues,
    median,
    publish,
    publisher,
    server,
    set_up_django,
    show,
    use_database,
)
from benchmarks.hosting import QUEUE
from benchmarks.incident_50k import make_operator
from benchmarks.recording import console

MOST = 1_000


def seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def retry(run: Run, template: str, broker: str, label: str) -> tuple[float, float]:
    """Plan and send all letters of one incident in a new database; return the seconds of each."""
    use_database("postgres")
    database = run.database(label, template)
    use_database(database)
    from incidents.models import Incident
    from repairs.models import ActionState, RepairAction
    from repairs.services import retry_incident

    console(run, 0)
    operator = make_operator()
    incident = Incident.objects.get()

    def plan() -> None:
        done = retry_incident(incident_id=incident.id, by=operator, key="retry", expected_count=run.tasks)
        if done.planned != run.tasks:
            raise AssertionError(f"{done.planned} planned of {run.tasks}")

    app = publisher(broker)
    app.conf.update(broker_transport_options={"confirm_publish": True} if broker == "rabbitmq" else {})
    try:
        took = seconds(plan), seconds(lambda: relay(app))
        sent = RepairAction.objects.filter(state=ActionState.SENT).count()
        if (found := waiting(app)) != run.tasks or sent != run.tasks:
            raise AssertionError(f"{found} messages and {sent} marked sent of {run.tasks}")
    finally:
        delete_queues(app, (QUEUE,))
        app.close()
        use_database("postgres")
    run.drop(database)
    return took


def relay(app: Celery) -> None:
    """Send every planned repair, as the relay's thread does."""
    from benchmarks.common import SOURCE
    from repairs.relay import Relay

    sender = Relay(app, source=SOURCE, owner="bench")
    while sender.send_due():
        pass


def waiting(app: Celery) -> int:
    """Return how many messages are in the queue."""
    with app.connection_for_write() as connection:
        return int(connection.default_channel.queue_declare(QUEUE, passive=True).message_count)


def send_only(run: Run, broker: str) -> float:
    app = publisher(broker)
    try:
        return seconds(lambda: publish(app, task="bench.fail", count=run.tasks, queue=QUEUE))
    finally:
        delete_queues(app, (QUEUE,))
        app.close()


def rq_requeue(run: Run) -> float:
    """Requeue as many failed RQ jobs one by one, as its command does."""
    from redis import Redis
    from rq import Queue
    from rq.job import JobStatus
    from rq.registry import FailedJobRegistry

    connection = Redis.from_url(server("redis"))
    queue = Queue(QUEUE, connection=connection)
    registry = FailedJobRegistry(queue=queue)
    jobs = [queue.create_job("builtins.abs", args=(number,)) for number in range(run.tasks)]
    try:
        for job in jobs:
            job.save()
            job.set_status(JobStatus.FAILED)
            registry.add(job, ttl=-1)
        took = seconds(lambda: [registry.requeue(job.id) for job in jobs])
        if len(queue) != run.tasks:
            raise AssertionError(f"{len(queue)} jobs of {run.tasks} were requeued")
        return took
    finally:
        for job in jobs:
            with suppress(Exception):
                job.delete()
        queue.delete(delete_jobs=True)
        connection.close()


def main() -> None:
    with benchmark(
        "retry_1000", "Retry one incident's jobs.", needs=("postgresql", "redis", "rabbitmq"), tasks=MOST
    ) as run:
        if run.tasks > MOST:
            raise SystemExit(f"one request retries at most {MOST} jobs")
        template = set_up_django(run)
        took: dict[str, list[float]] = {}
        for number in range(run.rounds):
            for broker in ("redis", "rabbitmq"):
                planned, sent = retry(run, template, broker, f"{broker}_{number}")
                took.setdefault("plan (lock, check, audit)", []).append(planned)
                took.setdefault(f"relay on {broker}", []).append(sent)
                took.setdefault(f"send_task alone on {broker}", []).append(send_only(run, broker))
            took.setdefault("RQ requeue on redis", []).append(rq_requeue(run))
        show(
            run,
            head=("step", "jobs/s", "ms/job"),
            rows=[
                (step, run.tasks / median(values), 1e3 * median(values) / run.tasks)
                for step, values in sorted(took.items())
            ],
            goals=[],
        )


if __name__ == "__main__":
    main()
