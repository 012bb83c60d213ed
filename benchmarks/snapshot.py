"""The snapshot of 1.2 million job records, beside the eleven statements by which another console reads the same.

    python -m benchmarks.snapshot [--tasks 1200000]

A quarter each are jobs that route reports, actions, notifications and e-mails, nine of ten of them done; a sixth as
many failed jobs. Both sides find the same indexes and read everything, over one connection; ours is the whole
selector, with grants and Python. Beside it stands what counting costs who writes one row and transaction at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common import Goal, Meter, Run, backend_pid, benchmark, median, ratio, set_up_django, show
from benchmarks.incident_50k import make_operator
from benchmarks.lists import fill

TENANTS = 10
WRITTEN = 300
"""Rows a side and round when writing is measured."""

# Nine of ten are done; the rest is in every other state. Times go back about as far as in a console that is in use.
STATE = """CASE WHEN nth % 10 > 0 THEN '{done}' WHEN nth % 50 = 10 THEN 'pending' WHEN nth % 50 = 20 THEN '{leased}'
    WHEN nth % 50 = 30 THEN 'retrying' ELSE '{failed}' END"""
JOB_STATE = STATE.format(done="succeeded", leased="running", failed="dead")
SENT_STATE = STATE.format(done="delivered", leased="delivering", failed="failed")
AGO = "now() - nth * interval '7 seconds'"
TENANT = f"'t-' || (nth % {TENANTS})"
FILL = (
    f"""INSERT INTO ops_jobs_report (id, tenant, reference, created_at, updated_at)
    SELECT gen_random_uuid(), {TENANT}, 'R-' || nth, {AGO}, {AGO} FROM generate_series(1, :count) AS nth""",
    """CREATE TEMPORARY TABLE numbered AS
    SELECT id, tenant, row_number() OVER (ORDER BY reference) AS nth FROM ops_jobs_report""",
    f"""INSERT INTO ops_jobs_job (id, tenant, source, kind, queue, state, available_at, lease_token, lease_expires_at,
        created_at, updated_at, finished_at)
    SELECT gen_random_uuid(), tenant, 'benchmark', 'route_report', 'opsconsole', {JOB_STATE}, {AGO},
        CASE WHEN nth % 50 = 20 THEN 'token' ELSE '' END, CASE WHEN nth % 50 = 20 THEN now() END, {AGO}, {AGO},
        CASE WHEN nth % 10 > 0 OR nth % 50 IN (0, 40) THEN now() END
    FROM numbered""",
    f"""INSERT INTO ops_jobs_actiondelivery (id, tenant, report_id, action, endpoint, state, next_attempt_at,
        created_at, updated_at)
    SELECT gen_random_uuid(), tenant, id, 'close', '', {SENT_STATE}, {AGO}, {AGO}, {AGO} FROM numbered""",
    f"""INSERT INTO ops_jobs_notice (id, tenant, report_id, updated_at)
    SELECT id, tenant, id, {AGO} FROM numbered""",
    f"""INSERT INTO ops_jobs_notificationdelivery (id, tenant, notice_id, endpoint, state, next_attempt_at, created_at,
        updated_at)
    SELECT gen_random_uuid(), tenant, id, '', {SENT_STATE}, {AGO}, {AGO}, {AGO} FROM numbered""",
    f"""INSERT INTO ops_jobs_casemessage (id, tenant, report_id, created_at)
    SELECT id, tenant, id, {AGO} FROM numbered""",
    f"""INSERT INTO ops_jobs_emaildelivery (id, tenant, message_id, to_address, state, attempt_count, next_attempt_at,
        created_at, updated_at)
    SELECT gen_random_uuid(), tenant, id, 'a@example.org', {SENT_STATE}, nth % 12, {AGO}, {AGO}, {AGO} FROM numbered""",
    f"""INSERT INTO ops_jobs_workflowrun (id, tenant, name, state, created_at, updated_at)
    SELECT gen_random_uuid(), tenant, 'review',
        CASE WHEN nth % 10 > 0 THEN 'succeeded' WHEN nth % 20 = 0 THEN 'running' ELSE 'failed' END, {AGO}, {AGO}
    FROM numbered WHERE nth % 10 < 2""",
    f"""INSERT INTO ops_jobs_evidencerequest (id, tenant, report_id, url, state, created_at, updated_at)
    SELECT gen_random_uuid(), tenant, id, '',
        CASE WHEN nth % 10 > 0 THEN 'available' WHEN nth % 20 = 0 THEN 'pending' ELSE 'failed' END, {AGO}, {AGO}
    FROM numbered WHERE nth % 10 < 2""",
    "VACUUM ANALYZE",
)


def _of_deliveries(table: str, failed: str, terminal: str, due: str) -> str:
    return f"""SELECT COUNT(*), SUM(CASE WHEN state = 'pending' THEN 1 ELSE 0 END),
        SUM(CASE WHEN state = 'delivering' THEN 1 ELSE 0 END), SUM(CASE WHEN {failed} THEN 1 ELSE 0 END),
        SUM(CASE WHEN {terminal} THEN 1 ELSE 0 END), MIN(CASE WHEN state IN ('pending', 'retrying') THEN {due} END)
    FROM {table}"""


PLAIN = ("state = 'retrying'", "state = 'failed'", "next_attempt_at")
THEIRS = (
    """SELECT COUNT(*), SUM(CASE WHEN state = 'pending' THEN 1 ELSE 0 END),
        SUM(CASE WHEN state = 'enqueued' THEN 1 ELSE 0 END), SUM(CASE WHEN state = 'running' THEN 1 ELSE 0 END),
        SUM(CASE WHEN state = 'retrying' THEN 1 ELSE 0 END), SUM(CASE WHEN state = 'dead' THEN 1 ELSE 0 END),
        MIN(CASE WHEN state IN ('pending', 'retrying') THEN available_at END)
    FROM ops_jobs_job WHERE kind = 'route_report'""",
    _of_deliveries("ops_jobs_actiondelivery", *PLAIN),
    _of_deliveries("ops_jobs_notificationdelivery", *PLAIN),
    _of_deliveries(
        "ops_jobs_emaildelivery",
        "state = 'retrying' AND attempt_count < 8",
        "state = 'failed' OR state = 'retrying' AND attempt_count >= 8",
        "COALESCE(next_attempt_at, created_at)",
    ),
    """SELECT COUNT(*), SUM(CASE WHEN state IN ('created', 'dispatch_pending', 'queued', 'running', 'waiting', 'paused')
            THEN 1 ELSE 0 END),
        SUM(CASE WHEN state = 'repair_required' THEN 1 ELSE 0 END), SUM(CASE WHEN state = 'failed' THEN 1 ELSE 0 END),
        MIN(CASE WHEN state NOT IN ('succeeded', 'failed') THEN updated_at END)
    FROM ops_jobs_workflowrun""",
    """SELECT COUNT(*), SUM(CASE WHEN state = 'pending' THEN 1 ELSE 0 END),
        SUM(CASE WHEN state = 'fetching' THEN 1 ELSE 0 END),
        SUM(CASE WHEN state IN ('failed', 'unavailable') THEN 1 ELSE 0 END),
        MIN(CASE WHEN state IN ('pending', 'fetching') THEN updated_at END)
    FROM ops_jobs_evidencerequest""",
    """SELECT COUNT(*), (SELECT COUNT(*) FROM ops_jobs_budgetreservation WHERE status = 'reserved'),
        (SELECT COALESCE(SUM(consumed_units), 0) FROM ops_jobs_budgetusage),
        (SELECT MIN(expires_at) FROM ops_jobs_budgetreservation WHERE status = 'reserved')
    FROM ops_jobs_budgetpolicy WHERE retired_at IS NULL""",
    """SELECT COUNT(*), SUM(CASE WHEN state = 'open' THEN 1 ELSE 0 END),
        SUM(CASE WHEN state = 'acknowledged' THEN 1 ELSE 0 END),
        SUM(CASE WHEN severity >= 30 AND state <> 'resolved' THEN 1 ELSE 0 END)
    FROM ops_incidents_incident""",
    "SELECT * FROM ops_jobs_surgestate WHERE tenant = 't-1' LIMIT 1",
    """SELECT id, queue, job_type, job_id, state, error_code, occurrence_count, first_seen_at, last_seen_at
    FROM ops_deadletters_deadletter WHERE state IN ('open', 'retrying')
    ORDER BY last_seen_at DESC, id DESC LIMIT 100""",
    """SELECT 'action', o.id, r.reference, o.state, o.attempt_count, o.last_error_code, o.updated_at AS at
    FROM ops_jobs_actiondelivery o JOIN ops_jobs_report r ON r.id = o.report_id WHERE o.state = 'failed'
    UNION ALL
    SELECT 'notification', o.id, r.reference, o.state, o.attempt_count, o.last_error_code, o.updated_at
    FROM ops_jobs_notificationdelivery o JOIN ops_jobs_notice n ON n.id = o.notice_id
    JOIN ops_jobs_report r ON r.id = n.report_id WHERE o.state = 'failed'
    ORDER BY at DESC LIMIT 100""",
)
"""What stands where the other console has two columns for one state of ours is put in our words."""


def fill_records(run: Run) -> None:
    from django.db import connection

    with connection.cursor() as cursor:
        for statement in FILL:
            cursor.execute(statement.replace(":count", str(run.tasks // 4)))


def ask_theirs() -> list[Sequence[Any]]:
    """Run the eleven statements and return the first row of each."""
    from django.db import connection

    found = []
    with connection.cursor() as cursor:
        for statement in THEIRS:
            cursor.execute(statement)
            found.append((cursor.fetchall() or [()])[0])
    return found


def check_equal(theirs: list[Sequence[Any]], ours: Any) -> None:
    """Raise unless both sides have counted the same."""
    streams = ours.streams
    routing, incidents = theirs[0], theirs[7]
    pairs = [
        (list(routing[:2]), [streams.routing.total, streams.routing.pending]),
        (routing[2] + routing[3], streams.routing.in_flight),
        (list(routing[4:7]), [streams.routing.retrying, streams.routing.terminally_failed,
                              streams.routing.oldest_due_at]),
        *(
            (list(row), [one.total, one.pending, one.in_flight, one.retrying, one.terminally_failed, one.oldest_due_at])
            for row, one in zip(theirs[1:4], (streams.actions, streams.notifications, streams.emails), strict=True)
        ),
        (list(theirs[4]), [streams.workflows.total, streams.workflows.active, streams.workflows.repair_required,
                           streams.workflows.failed, streams.workflows.oldest_active_at]),
        (list(theirs[5]), [streams.evidence.total, streams.evidence.pending, streams.evidence.fetching,
                           streams.evidence.unavailable, streams.evidence.oldest_active_at]),
        (list(incidents[1:]), [streams.incidents.open, streams.incidents.acknowledged,
                               streams.incidents.high_priority]),
    ]  # fmt: skip
    for theirs_one, ours_one in pairs:
        if theirs_one != ours_one:
            raise AssertionError(f"they count {theirs_one}, and we {ours_one}")


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Return how many ms a call takes, and how many of the processor's: this process's and its backend's.

    What the backend's helpers take is not in it, which the eleven statements have and the snapshot has not.
    """
    meter, backend = Meter(), backend_pid()
    begin = time.perf_counter()
    with meter.both(backend):
        call()
    return 1e3 * (time.perf_counter() - begin), 1e3 * meter.total


def write() -> None:
    """Add rows as a program does that has one to add: each in a transaction of its own."""
    from opsconsole.core.database import database_now
    from opsconsole.jobs.models import WorkflowRun

    now = database_now()
    for _ in range(WRITTEN):
        WorkflowRun.objects.create(tenant="t-1", name="review", state="succeeded", created_at=now, updated_at=now)


def write_uncounted() -> tuple[float, float]:
    """Return what the same takes without triggers."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE ops_jobs_workflowrun DISABLE TRIGGER USER")
        took = timed(write)
        cursor.execute("ALTER TABLE ops_jobs_workflowrun ENABLE TRIGGER USER")
    return took


def main() -> None:
    with benchmark(
        "snapshot", "How everything stands.", needs=("postgresql",), tasks=1_200_000, rounds=7
    ) as run:  # fmt: skip
        set_up_django(run)
        from django.contrib.auth import get_user_model
        from django.db import connection
        from django.test.utils import CaptureQueriesContext

        from deadletters.snapshot import operations_snapshot
        from grants.operators import Operator
        from opsconsole.jobs.sql import recount_totals

        fill(max(run.tasks // 6, 100), indexed=False)
        fill_records(run)
        make_operator()
        by = Operator.from_user(get_user_model().objects.get(username="ada"))
        check_equal(ask_theirs(), operations_snapshot(by))
        sides: dict[str, Callable[[], tuple[float, float]]] = {
            "eleven statements": lambda: timed(ask_theirs),
            "snapshot": lambda: timed(lambda: operations_snapshot(by)),
            "snapshot of one tenant of ten": lambda: timed(lambda: operations_snapshot(by, tenant="t-1")),
            "recounting every total": lambda: timed(recount_totals),
            "300 rows written, not counted": write_uncounted,
            "300 rows written": lambda: timed(write),
        }
        times: dict[str, list[float]] = {name: [] for name in sides}
        processor: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(run.rounds + 1):
            for name, side in sides.items():
                took = side()
                if number:  # the first round pays for imports and cold pages
                    times[name].append(took[0])
                    processor[name].append(took[1])
            recount_totals()
        with CaptureQueriesContext(connection) as queries:
            operations_snapshot(by)
        show(
            run,
            head=("side", "ms", "ms of processor"),
            rows=[(name, median(times[name]), median(processor[name])) for name in sides],
            goals=[
                Goal(
                    what="snapshot against the eleven statements",
                    value=ratio(times["snapshot"], times["eleven statements"]),
                    bound=0.10,
                    at_least=False,
                ),
                Goal(
                    what="writing rows that are counted against writing them only, in processor time",
                    value=ratio(processor["300 rows written"], processor["300 rows written, not counted"]),
                    bound=1.1,
                    at_least=False,
                ),
            ],
            queries=len(queries),
        )


if __name__ == "__main__":
    main()
