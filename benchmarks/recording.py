"""What recording one failure takes of the processor, from the failure signal to the committed row.

    python -m benchmarks.recording

Three ways, in one process and without a broker: this console (the journal's hooks, the reader, the drainer and
PostgreSQL), one SQL statement for each failure through Django's cursor, and django-celery-results. Counted is the
processor time of this process and of its PostgreSQL backend, from the failure signal to the committed row. Each side
records a few hundred before it is measured: what a connection learns once is no cost of a failure. What the console's
other hooks take of every job, failed or not, stands beside it and is capture_healthy's matter.
"""

from __future__ import annotations

import json
import shutil
import sys
from typing import Any

from celery import Celery
from celery.app.task import Context
from celery.worker.request import Request

from benchmarks.common import (
    SOURCE,
    WARM_UP,
    Goal,
    Meter,
    Run,
    backend_pid,
    benchmark,
    median,
    ratio,
    set_up_django,
    show,
)
from benchmarks.common import use_database as use
from benchmarks.hosting import CardDeclined, make_app, make_hooks, make_request, running

EVERY_JOB = "(hooks of every job)"
TABLES = """
CREATE TABLE bench_incident (
    id uuid PRIMARY KEY, tenant varchar(100) NOT NULL, key varchar(100) NOT NULL, state varchar(12) NOT NULL,
    title varchar(300) NOT NULL, seen bigint NOT NULL, first_seen_at timestamptz NOT NULL,
    last_seen_at timestamptz NOT NULL, UNIQUE (tenant, key));
CREATE TABLE bench_letter (
    id uuid PRIMARY KEY, tenant varchar(100) NOT NULL, fingerprint varchar(500) NOT NULL,
    incident_id uuid NOT NULL REFERENCES bench_incident, state varchar(12) NOT NULL, job_type varchar(255) NOT NULL,
    error_class varchar(255) NOT NULL, error_text text NOT NULL, traceback text NOT NULL, payload text NOT NULL,
    seen bigint NOT NULL, last_seen_at timestamptz NOT NULL, UNIQUE (tenant, fingerprint));
CREATE INDEX bench_letter_newest ON bench_letter (state, last_seen_at DESC, id DESC);
CREATE INDEX bench_letter_of_incident ON bench_letter (incident_id, last_seen_at DESC);
CREATE TABLE bench_audit (
    id uuid PRIMARY KEY, at timestamptz NOT NULL, tenant varchar(100) NOT NULL, action varchar(100) NOT NULL,
    target varchar(200) NOT NULL, outcome text NOT NULL);
CREATE INDEX bench_audit_newest ON bench_audit (tenant, at DESC);
"""
STATEMENT = """
WITH incident AS (
    INSERT INTO bench_incident (id, tenant, key, state, title, seen, first_seen_at, last_seen_at)
    VALUES (%(incident)s, %(tenant)s, %(key)s, 'open', %(title)s, 1, now(), now())
    ON CONFLICT (tenant, key) DO UPDATE SET seen = bench_incident.seen + 1, last_seen_at = now(), state = 'open'
    RETURNING id
), letter AS (
    INSERT INTO bench_letter (id, tenant, fingerprint, incident_id, state, job_type, error_class, error_text,
        traceback, payload, seen, last_seen_at)
    SELECT %(letter)s, %(tenant)s, %(fingerprint)s, incident.id, 'open', %(job_type)s, %(error_class)s,
        %(error_text)s, %(traceback)s, %(payload)s, 1, now() FROM incident
    ON CONFLICT (tenant, fingerprint) DO UPDATE SET seen = bench_letter.seen + 1, last_seen_at = now()
    RETURNING id
)
INSERT INTO bench_audit (id, at, tenant, action, target, outcome)
SELECT %(event)s, now(), %(tenant)s, 'dead_letter.recorded', letter.id::text, %(outcome)s FROM letter
"""


class Failing:
    """Failures as Celery hands them to its signals: request, exception, traceback."""

    def __init__(self, count: int) -> None:
        self.app = make_app()
        self.count = count

    def __iter__(self) -> Any:
        for number in range(self.count):
            request = make_request(self.app, "bench.fail", number)
            yield number, request


def failure_of(request: Request, number: int) -> tuple[CardDeclined, Any]:
    """Run the body; Celery makes the same description of its error whether anything records it or not."""
    from billiard.einfo import ExceptionInfo

    try:
        request.task.run(number)
    except CardDeclined as error:
        return error, ExceptionInfo(sys.exc_info())
    raise AssertionError("a task that fails has not failed")


# --- this console -----------------------------------------------------------------------------------------------------


def console(run: Run, number: int) -> dict[str, Meter]:
    """Record through hooks, reader and drainer; return what each part took."""
    record(run, WARM_UP, f"{number}-warm-up")
    meters = record(run, run.tasks, str(number))
    check_letters(WARM_UP + run.tasks)
    return meters


def check_letters(expected: int) -> None:
    from deadletters.models import DeadLetter

    if (found := DeadLetter.objects.count()) != expected:
        raise AssertionError(f"{found} letters of {expected} failures")


def record(run: Run, count: int, name: str) -> dict[str, Meter]:
    """Record ``count`` failures through a journal of their own."""
    from deadletters import conf, drainer
    from deadletters.journal.reader import FolderReader
    from repairs.settlement import DatabaseSettlement

    every_job, hooking, reading, recording = Meter(), Meter(), Meter(), Meter()
    path = run.folder / f"journal-{name}"
    failing = Failing(count)
    hooks = make_hooks(failing.app, path, conf.sealer(), SOURCE)
    for job, request in failing:
        with every_job.client_only():
            hooks._on_task_received(request=request)
            request.message.ack()
        with running(request) as task:
            with every_job.client_only():
                hooks._on_task_prerun(sender=task)
            try:
                error, info = failure_of(request, job)
                raise error
            except CardDeclined:
                with hooking.client_only():
                    hooks._on_task_failure(
                        sender=task, task_id=request.id, exception=error, args=[job], kwargs={}, einfo=info
                    )
                    hooks._on_task_postrun(sender=task, state="FAILURE", retval=error)
    hooks.flush()
    assert hooks.folder is not None
    reader = FolderReader(hooks.folder, conf.sealer(), settle_seconds=0)
    drain = drainer.FolderDrain(
        folder_name=hooks.folder.name,
        source=SOURCE,
        worker="bench@host",
        settlement=DatabaseSettlement(),
        kept=drainer.KeptFailures(hooks.root, drainer.KEPT_BYTES, 3_600.0, sealer=conf.sealer()),
        book=drainer.policies(),
    )
    backend = backend_pid()
    exhausted = False
    while not exhausted:
        with reading.client_only():
            batch = reader.read(drainer.READ_BYTES)
        with recording.both(backend):
            drain.apply(drainer.Drained(batch=batch, boot_id=batch.boot_id))
        exhausted = batch.exhausted
    hooks.close()
    shutil.rmtree(path)
    return {EVERY_JOB: every_job, "hook of the failure": hooking, "reader": reading, "drainer, PostgreSQL": recording}


# --- one statement a failure ------------------------------------------------------------------------------------------


def statement(run: Run, number: int) -> dict[str, Meter]:
    """Record each failure in its signal with one statement through Django's cursor, committed at once."""
    from django.db import connection

    from opsconsole.core.ids import new_id

    with connection.cursor() as cursor:
        cursor.execute(TABLES)
    meter = Meter()
    backend = backend_pid()
    for job, request in Failing(WARM_UP + run.tasks):
        if job == WARM_UP:
            meter = Meter()
        error, info = failure_of(request, job)
        name = f"{type(error).__module__}.{type(error).__qualname__}"
        with meter.both(backend), connection.cursor() as cursor:
            cursor.execute(
                STATEMENT,
                {
                    "incident": new_id(),
                    "letter": new_id(),
                    "event": new_id(),
                    "tenant": "default",
                    "key": f"{request.task.name}:{name}",
                    "title": f"{request.task.name} fails with {name}",
                    "fingerprint": f"celery:{request.id}",
                    "job_type": request.task.name,
                    "error_class": name,
                    "error_text": str(error),
                    "traceback": info.traceback,
                    "payload": json.dumps([[job], {}]),
                    "outcome": json.dumps({"jobType": request.task.name, "version": 1}),
                },
            )
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM bench_letter")
        if (found := cursor.fetchone()[0]) != WARM_UP + run.tasks:
            raise AssertionError(f"{found} rows of {WARM_UP + run.tasks} failures")
    return {"statement": meter}


# --- the peer ---------------------------------------------------------------------------------------------------------


def results(run: Run, number: int) -> dict[str, Meter]:
    """Record with django-celery-results, at its defaults, on a connection that is kept (in a worker it is not)."""
    from celery import states
    from django_celery_results.backends.database import DatabaseBackend
    from django_celery_results.models import TaskResult

    meter = Meter()
    failing = Failing(WARM_UP + run.tasks)
    app: Celery = failing.app
    backend = DatabaseBackend(app)
    pid = backend_pid()
    for job, request in failing:
        if job == WARM_UP:
            meter = Meter()
        error, info = failure_of(request, job)
        with meter.both(pid):
            backend.store_result(
                request.id, error, states.FAILURE, traceback=info.traceback, request=Context(request.request_dict)
            )
    if (found := TaskResult.objects.count()) != WARM_UP + run.tasks:
        raise AssertionError(f"{found} results of {WARM_UP + run.tasks} failures")
    return {"store_result": meter}


SIDES = {
    "opsconsole": ("opsconsole", console),
    "statement": ("one SQL statement", statement),
    "results": ("django-celery-results", results),
}


def main() -> None:
    with benchmark("recording", "The cost of recording one failure.", needs=("postgresql",), tasks=2_000) as run:
        template = set_up_django(run)
        parts: dict[str, list[dict[str, Meter]]] = {side: [] for side in SIDES}
        for number in range(run.rounds):
            for side, (_label, measure) in SIDES.items():
                use("postgres")
                database = run.database(f"{side}_{number}", template)
                use(database)
                parts[side].append(measure(run, number))
                use("postgres")
                run.drop(database)
        totals = {
            side: [sum(meter.total for part, meter in found.items() if part != EVERY_JOB) for found in parts[side]]
            for side in SIDES
        }
        rows = []
        for side, (label, _measure) in SIDES.items():
            for part in parts[side][0]:
                client = 1e6 * median(found[part].client for found in parts[side]) / run.tasks
                database_cpu = 1e6 * median(found[part].database for found in parts[side]) / run.tasks
                rows.append((label, part, client, database_cpu, client + database_cpu))
            total = 1e6 * median(totals[side]) / run.tasks
            rows.append((label, "from failure to row", "", "", total))
        show(
            run,
            head=("side", "part", "client us/failure", "PostgreSQL us/failure", "sum"),
            rows=rows,
            goals=[
                Goal(
                    what="processor time against one SQL statement a failure",
                    value=ratio(totals["opsconsole"], totals["statement"]),
                    bound=0.6,
                    at_least=False,
                ),
                Goal(
                    what="processor time of django-celery-results against ours",
                    value=ratio(totals["results"], totals["opsconsole"]),
                    bound=5.0,
                ),
            ],
        )


if __name__ == "__main__":
    main()
