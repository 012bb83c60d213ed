"""A hundred thousand stale leases among a million records: one run of the sweep, and one statement for each.

    python -m benchmarks.stale_leases

The console's side is one scheduled run of ``stale_leases``, in its own pages, with its records and its counts. The
compared one does what the system did that the rules come from: it selects two hundred, and for each row sends one
UPDATE and one INSERT, prepared and in one transaction, on a connection of its own. It is measured on a part, for its
rate does not depend on how many are left: an index holds those alone that are being fetched. The records' ids grow with
time, as those do that the console gives out.
"""

from __future__ import annotations

import resource
import time
import uuid
from typing import Any

import psycopg

from benchmarks.common import Goal, Run, benchmark, database_url, median, ratio, set_up_django, show, use_database

RECORDS = 1_000_000
PART = 3_000
AT_ONCE = 200
GOAL = 12.0
MOST_GROWTH_MB = 20.0
"""What a run may take of memory beyond what the first page took."""

FILL = """
INSERT INTO ops_jobs_evidencerequest
  (id, tenant, report_id, url, state, attempt_count, last_error_code, content_type, sha256, created_at, updated_at)
SELECT
  (lpad(to_hex(extract(epoch FROM now())::bigint * 1000 + nth), 12, '0') || '7' ||
    substr(replace(gen_random_uuid()::text, '-', ''), 14))::uuid, 'default', %(report)s,
  'https://example.org/', 'available', 1, '', '', '', now(), now()
FROM generate_series(1, %(count)s) AS nth
"""
MAKE_STALE = """
UPDATE ops_jobs_evidencerequest
SET state = 'fetching', updated_at = now() - interval '1 hour' + random() * interval '30 minutes'
WHERE id IN (SELECT id FROM ops_jobs_evidencerequest WHERE state <> 'fetching' LIMIT %(count)s)
"""
SELECT = (
    "SELECT id, updated_at FROM ops_jobs_evidencerequest WHERE state = 'fetching' AND updated_at <= %s"
    " ORDER BY updated_at, id LIMIT %s"
)
UPDATE = (
    "UPDATE ops_jobs_evidencerequest SET state = 'pending', next_attempt_at = %s,"
    " last_error_code = 'stale_fetch_lease_recovered', updated_at = %s"
    " WHERE id = %s AND state = 'fetching' AND updated_at <= %s"
)
INSERT = (
    "INSERT INTO ops_repairs_sweeprepair (id, run_id, tenant, action_type, entity_type, entity_id, operation_key,"
    " before, after, planned_by, applied_at) VALUES (%s, %s, 'default', 'release_stale_lease',"
    " 'evidence_fetch_request', %s, %s, %s, '{\"state\":\"pending\"}', 'bench', %s) ON CONFLICT DO NOTHING"
)


def fill(database: str) -> None:
    """Make the million records that nobody fetches."""
    from opsconsole.core.database import database_now
    from opsconsole.jobs.models import Report

    now = database_now()
    of = Report.objects.create(tenant="default", reference="bench", created_at=now, updated_at=now)
    with psycopg.connect(database_url(database), autocommit=True) as connection:
        connection.execute(FILL, {"report": of.id, "count": RECORDS})
        connection.execute("VACUUM ANALYZE ops_jobs_evidencerequest")


def make_stale(database: str, count: int) -> None:
    with psycopg.connect(database_url(database), autocommit=True) as connection:
        connection.execute(MAKE_STALE, {"count": count})
        connection.execute("TRUNCATE ops_repairs_sweeprepair")
        connection.execute("VACUUM ANALYZE ops_jobs_evidencerequest")


def by_page(count: int) -> tuple[float, float]:
    """Let one run release all, and return rows a second and by how many megabytes the process grew meanwhile."""
    from repairs.models import SweepRepair
    from repairs.reconciliation.running import run_scheduled

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    run = run_scheduled("stale_leases")
    took = time.perf_counter() - begin
    if run is None or (run.state, run.repaired_count, run.skipped_count) != ("succeeded", count, 0):
        raise AssertionError(f"the run did not release {count}: {run and run.repaired_count}")
    if (found := SweepRepair.objects.count()) != count:
        raise AssertionError(f"{found} records of {count}")
    return count / took, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def by_row(database: str, count: int) -> float:
    """Release ``count`` rows one by one, two hundred in a transaction, and return rows a second."""
    from repairs.models import ReconciliationRun

    run = ReconciliationRun.objects.newest_first()[0].id
    done = 0
    with psycopg.connect(database_url(database), autocommit=True, prepare_threshold=1) as connection:
        begin = time.perf_counter()
        while done < count:
            with connection.transaction(), connection.cursor() as cursor:
                done += _release_few(cursor, run)
        return done / (time.perf_counter() - begin)


def _release_few(cursor: psycopg.Cursor[Any], run: uuid.UUID) -> int:
    cursor.execute("SELECT clock_timestamp(), clock_timestamp() - interval '5 minutes'")
    now, stale_at = cursor.fetchone() or (None, None)
    cursor.execute(SELECT, (stale_at, AT_ONCE))
    rows = cursor.fetchall()
    if not rows:
        raise AssertionError("there are no stale leases left")
    for row_id, marker in rows:
        cursor.execute(UPDATE, (now, now, row_id, stale_at))
        if cursor.rowcount != 1:
            raise AssertionError("a lease was not released")
        key = f"stale-evidence:{row_id}:{marker.isoformat()}"
        before = f'{{"state":"fetching","updatedAt":"{marker.isoformat()}"}}'
        cursor.execute(INSERT, (uuid.uuid4(), run, str(row_id), key, before, now))
    return len(rows)


def main() -> None:
    with benchmark("stale_leases", "Release stale leases.", needs=("postgresql",), tasks=100_000, rounds=5) as run:
        database = set_up_django(run)
        fill(database)
        # First statements and imports are no cost of a row.
        make_stale(database, 2_000)
        by_page(2_000)
        paged: list[float] = []
        single: list[float] = []
        growth: list[float] = []
        for _ in range(run.rounds):
            make_stale(database, run.tasks)
            rate, grown = by_page(run.tasks)
            paged.append(rate)
            growth.append(grown)
            part = min(PART, run.tasks)
            make_stale(database, part)
            single.append(by_row(database, part))
        _show(run, paged, single, growth)
        use_database("postgres")


def _show(run: Run, paged: list[float], single: list[float], growth: list[float]) -> None:
    show(
        run,
        head=("form", "rows/s", "seconds for all"),
        rows=[
            ("the sweep, by pages", median(paged), run.tasks / median(paged)),
            (f"row by row, {AT_ONCE} in a transaction", median(single), run.tasks / median(single)),
        ],
        goals=[
            Goal(what="rows/s of the sweep to row by row", value=ratio(paged, single), bound=GOAL, unit="x"),
            Goal(
                what="memory of a run beyond the first",
                value=max(growth),
                bound=MOST_GROWTH_MB,
                at_least=False,
                unit=" MB",
            ),
        ],
        ratios=[a / b for a, b in zip(paged, single, strict=True)],
    )


if __name__ == "__main__":
    main()
