"""Running ten thousand failed jobs again as one redrive, until the broker has every message.

    python -m benchmarks.redrive

The console's side is what a worker's two threads do from the start of a redrive: the redriver judges, locks, plans and
audits each job, the relay opens its message, publishes it under its new id and marks it sent; without the second or two
for which they sleep while there is nothing to do. Beside it on Redis stands RQ's requeue, as its command does it (no
audit, no durable state), and on RabbitMQ a loop of ``send_task`` on a connection that is kept (no database at all). The
dry run that comes before is measured on a hundred thousand jobs, and has a goal of its own. Processor time is that of
this process, of its PostgreSQL backends and of the Redis server.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from celery import Celery

from benchmarks.common import (
    PATIENCE_SECONDS,
    SOURCE,
    Goal,
    Run,
    benchmark,
    cpu_of,
    delete_queues,
    median,
    publish,
    publisher,
    ratio,
    server,
    set_up_django,
    show,
    use_database,
    wait_for,
)
from benchmarks.common import _processes as processes
from benchmarks.hosting import QUEUE
from benchmarks.incident_50k import MULTIPLY, make_operator
from benchmarks.recording import record

MANY = 100_000
"""Jobs of the dry run, and of the redrive whose memory is compared with that of ten thousand."""
FASTER_THAN_RQ = 5.0
FASTER_THAN_SEND_TASK = 1.5
CPU_OF_RQ = 0.25
DRY_RUN_SECONDS = 5.0
MOST_GROWTH_MB = 20.0
AT_ONCE = 10_000
"""Jobs of a redrive that may be sent and not answered."""
AS_ANSWERED = (
    "UPDATE ops_repairs_repairaction SET state = 'succeeded', started_at = now(), settled_at = now()"
    " WHERE state = 'sent'"
)
"""Stands for workers that have run what was sent, where there are more than may wait for an answer."""
LEFT = (
    "SELECT (SELECT sum(waiting_count) FROM ops_repairs_redrive),"
    " (SELECT count(*) FROM ops_repairs_repairaction WHERE state = 'planned')"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """What one side took for all its jobs, in seconds."""

    seconds: float
    cpu: float = 0.0


@contextmanager
def measuring(backends: Callable[[], list[int]] = list) -> Iterator[list[Took]]:
    """Measure a block: its Took is in the list afterwards. ``backends`` finds the PostgreSQL processes it uses."""
    took: list[Took] = []
    servers = list(redis_servers())
    others, client = cpu_of(servers) + cpu_of(backends()), time.process_time()
    begin = time.perf_counter()
    yield took
    seconds = time.perf_counter() - begin
    client = time.process_time() - client
    took.append(Took(seconds=seconds, cpu=client + cpu_of(servers) + cpu_of(backends()) - others))


def backends() -> list[int]:
    """Return the PostgreSQL processes of the database in use."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'"
        )
        return [row[0] for row in cursor.fetchall()]


def redis_servers() -> Iterator[int]:
    """Yield the Redis servers of this host; one elsewhere has none here, and then both sides lack it."""
    for pid, _parent, name in processes():
        if name == "redis-server":
            yield pid


# --- this console -----------------------------------------------------------------------------------------------------


def fill(run: Run, label: str, template: str, count: int) -> str:
    """Make a database with one incident of ``count`` failed jobs, each with its own sealed message; return its name."""
    use_database("postgres")
    name = run.database(label, template)
    use_database(name)
    from django.db import connection

    from deadletters import conf
    from deadletters.intake import open_message, seal_message
    from deadletters.models import DeadLetter, SealedMessage
    from incidents.models import Incident

    record(run, 1, label)
    letter = DeadLetter.objects.get()
    message = SealedMessage.objects.get()
    sealer = conf.sealer()
    packed = open_message(sealer, bytes(message.blob), letter.id)
    copied = {
        "id": "gen_random_uuid()",
        "task_id": "'job-' || number",
        "job_id": "'job-' || number",
        "fingerprint": "'celery:job-' || number",
    }
    columns = [field.column for field in DeadLetter._meta.concrete_fields]
    values = ", ".join(copied.get(column, column) for column in columns)
    with connection.cursor() as cursor:
        cursor.execute(
            MULTIPLY.format(columns=", ".join(columns), values=values), {"count": count - 1, "id": letter.id}
        )
        # Otherwise the foreign key of each message is looked up as in the table of one row that this was.
        cursor.execute("ANALYZE ops_deadletters_deadletter")
        fields = [field.column for field in SealedMessage._meta.concrete_fields]
        ids = list(DeadLetter.objects.exclude(id=letter.id).values_list("id", flat=True))
        with cursor.copy(f"COPY {SealedMessage._meta.db_table} ({', '.join(fields)}) FROM STDIN") as copy:
            for letter_id in ids:
                own = {"letter_id": letter_id, "blob": seal_message(sealer, packed, letter_id)}
                copy.write_row([own.get(field, getattr(message, field)) for field in fields])
        Incident.objects.update(unresolved_count=count, letter_count=count)
        cursor.execute("ANALYZE")
    use_database("postgres")
    return name


def plan(count: int, key: str, by: Any) -> UUID:
    """Make a redrive of all there is, dry run included."""
    from incidents.models import Incident
    from repairs.redrives.judging import judge_page
    from repairs.redrives.requests import RedrivePace, RedriveSelection
    from repairs.redrives.services import create_redrive

    made = create_redrive(
        by=by,
        key=key,
        selection=RedriveSelection(incident_id=Incident.objects.get().id),
        expected_count=count,
        pace=RedrivePace(rate_per_second=10_000, max_outstanding=AT_ONCE, canary_size=0, stop_percent=None),
    )
    while judge_page(redrive_id=made.redrive_id):
        pass
    return made.redrive_id


def send(redrive_id: UUID, count: int, app: Celery, by: Any) -> Callable[[], None]:
    """Start it, and wait until a worker's threads have sent it all; returns what ends them."""
    from django.db import connection, connections

    from repairs.models import RedriveClass
    from repairs.redrives.redriver import Redriver
    from repairs.redrives.requests import AnswerKind, RedriveAnswer
    from repairs.redrives.services import start_redrive
    from repairs.relay import Relay

    looked = RedriveAnswer(kind=AnswerKind.DID_NOT_HAPPEN, reference="measured")
    start_redrive(redrive_id=redrive_id, by=by, key="start", answers={RedriveClass.NOT_DECLARED: looked})
    redriver, relay = Redriver(source=SOURCE, owner="bench"), Relay(app, source=SOURCE, owner="bench")
    ended = threading.Event()
    troubles: list[str] = []

    def keep_on(work: Callable[[], Any], pause: float) -> None:
        try:
            while not ended.is_set():
                if not work():
                    ended.wait(pause)
        except Exception as error:
            troubles.append(f"{type(error).__name__}: {error}")
        finally:
            ended.wait()  # the PostgreSQL processes are still to be asked for their time
            connections.close_all()

    threads = [
        # The rate gives it a few more jobs with each millisecond: it looks again when there are enough for a page.
        threading.Thread(target=keep_on, args=(lambda: redriver.step() and False, 0.03)),
        threading.Thread(target=keep_on, args=(relay.send_due, 0.03)),
    ]

    def end() -> None:
        ended.set()
        for thread in threads:
            thread.join()

    def all_sent() -> bool:
        with connection.cursor() as cursor:
            if count > AT_ONCE:
                cursor.execute(AS_ANSWERED)
            cursor.execute(LEFT)
            return bool(cursor.fetchone() == (0, 0))

    def check() -> None:
        if troubles or relay.trouble:
            raise RuntimeError("; ".join([*troubles, relay.trouble]))

    for thread in threads:
        thread.start()
    try:
        patience = PATIENCE_SECONDS * max(1, count // 1_000)
        wait_for(f"{count} messages to be sent", all_sent, check, pause=0.05, seconds=patience)
    except BaseException:
        end()
        raise
    return end


def redrive(run: Run, filled: str, broker: str, label: str, count: int) -> Took:
    """Run all jobs of a database again in a copy of it."""
    database = run.database(label, filled)
    use_database(database)
    from grants.models import AuditEvent
    from repairs.models import RepairAction

    by = make_operator()
    app = publisher(broker)
    try:
        redrive_id = plan(count, "redrive", by)
        with measuring(backends) as took:
            end = send(redrive_id, count, app, by)
        end()
        waits, audited = waiting(app), AuditEvent.objects.filter(action="dead-letters.retry").count()
        left = RepairAction.objects.filter(state="planned").count()
        if (waits, audited, left) != (count, count, 0):
            raise AssertionError(f"{waits} messages, {audited} audit rows of {count}; {left} not sent")
    finally:
        delete_queues(app, (QUEUE,))
        app.close()
        use_database("postgres")
    run.drop(database)
    return took[0]


def waiting(app: Celery) -> int:
    """Return how many messages are in the queue."""
    with app.connection_for_write() as connection:
        return int(connection.default_channel.queue_declare(QUEUE, passive=True).message_count)


def dry_run(run: Run, filled: str, count: int, number: int) -> Took:
    """Return what it takes from the request until the redrive is ready."""
    from repairs.models import Redrive

    database = run.database(f"dry_{number}", filled)
    use_database(database)
    by = make_operator()
    with measuring(backends) as took:
        redrive_id = plan(count, "dry", by)
    state, total = Redrive.objects.values_list("state", "total_count").get(id=redrive_id)
    if (state, total) != ("ready", count):
        raise AssertionError(f"a dry run of {total} is {state}")
    use_database("postgres")
    run.drop(database)
    return took[0]


def peak_mb(work: Callable[[], Any]) -> float:
    """Return the most memory that this process had while it did something."""
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    work()
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


# --- the others -------------------------------------------------------------------------------------------------------


def rq_requeue(run: Run) -> Took:
    """Requeue failed RQ jobs as ``rq requeue --all`` does."""
    from redis import Redis
    from rq import Queue
    from rq.job import JobStatus
    from rq.registry import FailedJobRegistry

    connection = Redis.from_url(server("redis"))
    queue = Queue(QUEUE, connection=connection)
    registry = FailedJobRegistry(queue=queue)
    jobs = [queue.create_job("builtins.abs", args=(number,)) for number in range(run.tasks)]
    try:
        with connection.pipeline() as pipeline:
            for job in jobs:
                job.save(pipeline=pipeline)
                job.set_status(JobStatus.FAILED, pipeline=pipeline)
                registry.add(job, ttl=-1, pipeline=pipeline)
            pipeline.execute()
        job_ids = registry.get_job_ids()
        with measuring() as took:
            for job_id in job_ids:
                registry.requeue(job_id)
        if len(queue) != run.tasks:
            raise AssertionError(f"{len(queue)} jobs of {run.tasks} were requeued")
        return took[0]
    finally:
        with suppress(Exception), connection.pipeline() as pipeline:
            for job in jobs:
                pipeline.delete(job.key)
            pipeline.delete(queue.key, registry.key)
            pipeline.srem(queue.redis_queues_keys, queue.key)
            pipeline.execute()
        connection.close()


def send_task(run: Run, broker: str) -> Took:
    """Send as many plain messages with ``send_task``, one after the other."""
    app = publisher(broker)
    try:
        with measuring() as took:
            publish(app, task="bench.fail", count=run.tasks, queue=QUEUE)
        return took[0]
    finally:
        delete_queues(app, (QUEUE,))
        app.close()


def main() -> None:
    with benchmark(
        "redrive", "A redrive of many failed jobs.", needs=("postgresql", "redis", "rabbitmq"), tasks=10_000
    ) as run:
        template = set_up_django(run)
        filled, many = fill(run, "filled", template, run.tasks), fill(run, "many", template, 10 * run.tasks)
        took: dict[str, list[Took]] = {}
        dry: list[Took] = []
        for number in range(run.rounds):
            for step, measure in (
                ("redrive on redis", lambda n=number: redrive(run, filled, "redis", f"redis_{n}", run.tasks)),
                ("RQ requeue on redis", lambda: rq_requeue(run)),
                ("redrive on rabbitmq", lambda n=number: redrive(run, filled, "rabbitmq", f"rabbit_{n}", run.tasks)),
                ("send_task on rabbitmq", lambda: send_task(run, "rabbitmq")),
            ):
                took.setdefault(step, []).append(measure())
            dry.append(dry_run(run, many, 10 * run.tasks, number))
        peaks = [
            peak_mb(lambda f=full, c=count: redrive(run, f, "redis", f"peak_{c}", c))
            for full, count in ((filled, run.tasks), (many, 10 * run.tasks))
        ]
        dry_seconds = median(one.seconds for one in dry)
        seconds = {step: [one.seconds for one in values] for step, values in took.items()}
        cpu = {step: [one.cpu for one in values] for step, values in took.items()}
        show(
            run,
            head=("step", "jobs/s", "ms/job", "cpu us/job"),
            rows=[
                *(
                    (step, run.tasks / median(values), 1e3 * median(values) / run.tasks,
                     1e6 * median(cpu[step]) / run.tasks)
                    for step, values in seconds.items()
                ),
                (f"dry run of {10 * run.tasks:,}", 10 * run.tasks / dry_seconds, 1e2 * dry_seconds / run.tasks,
                 1e5 * median(one.cpu for one in dry) / run.tasks),
            ],
            goals=[
                Goal(
                    what="times as fast as RQ's requeue",
                    value=ratio(seconds["RQ requeue on redis"], seconds["redrive on redis"]),
                    bound=FASTER_THAN_RQ,
                ),
                Goal(
                    what="processor time of RQ's",
                    value=ratio(cpu["redrive on redis"], cpu["RQ requeue on redis"]),
                    bound=CPU_OF_RQ,
                    at_least=False,
                ),
                Goal(
                    what="times as fast as send_task on RabbitMQ",
                    value=ratio(seconds["send_task on rabbitmq"], seconds["redrive on rabbitmq"]),
                    bound=FASTER_THAN_SEND_TASK,
                ),
                Goal(what="dry run", value=dry_seconds, bound=DRY_RUN_SECONDS, at_least=False, unit=" s"),
                Goal(
                    what="more memory for ten times as many",
                    value=peaks[1] - peaks[0],
                    bound=MOST_GROWTH_MB,
                    at_least=False,
                    unit=" MB",
                ),
            ],
            peaks_mb=peaks,
        )  # fmt: skip


if __name__ == "__main__":
    main()
