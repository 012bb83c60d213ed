"""The console's pages over a million failed jobs, beside the lists of Django's own admin on the same rows.

    python -m benchmarks.lists [--tasks 1000000]

A fifth as many incidents; one of them has 50,000 of the jobs, and one job has a traceback of 30 MB. Each job has its
message, as it says of itself. A page is the whole answer, from the request to its last byte, with
a test client: template and queries, no network. Beside the first page of a list stand the one in its middle and one
near its end. The statements of the API's lists are timed by themselves, from being sent to their last row.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.common import Goal, benchmark, median, ratio, set_up_django, show
from benchmarks.incident_50k import make_operator, prepare

LARGE = 50_000
TRACEBACK_BYTES = 30 << 20
TENANTS = 10
SQL_MS = 5.0
"""What the statements of a page of a list may take, at any depth."""
SECONDS = 2.0
"""Within which an incident of many jobs and a job with a large traceback are to open."""

INCIDENTS = """
INSERT INTO ops_incidents_incident ({columns})
SELECT {values} FROM ops_incidents_incident, generate_series(1, %(count)s) AS nth WHERE id = %(id)s
"""
LETTERS = """
WITH numbered AS (SELECT id, tenant, row_number() OVER (ORDER BY number) - 1 AS place FROM ops_incidents_incident)
INSERT INTO ops_deadletters_deadletter ({columns})
SELECT {values} FROM ops_deadletters_deadletter AS l, generate_series(1, %(count)s) AS nth
JOIN numbered AS i ON i.place = CASE WHEN nth <= %(large)s THEN 0 ELSE nth %% %(incidents)s END
WHERE l.id = %(id)s
"""
MESSAGES = """
WITH one AS MATERIALIZED (SELECT * FROM ops_deadletters_sealedmessage WHERE letter_id = %(id)s)
INSERT INTO ops_deadletters_sealedmessage (letter_id, blob, key_id, digest, stored_at)
SELECT l.id, one.blob, one.key_id, one.digest, one.stored_at
FROM one, ops_deadletters_deadletter AS l WHERE l.id <> %(id)s
"""
COUNTS = """
UPDATE ops_incidents_incident AS i SET letter_count = c.all, occurrence_count = c.all,
    unresolved_count = CASE WHEN i.state = 'resolved' THEN 0 ELSE c.open END
FROM (SELECT incident_id, count(*) AS all, count(*) FILTER (WHERE state = 'open') AS open
      FROM ops_deadletters_deadletter GROUP BY 1) AS c
WHERE c.incident_id = i.id
"""


def fill(count: int, *, indexed: bool = True) -> Any:
    """Record one failure as the product does, and make ``count`` of it; return it. ``indexed``: for the search."""
    from django.db import connection, transaction

    from deadletters import search
    from deadletters.models import DeadLetter
    from deadletters.recorder import record_failures
    from incidents.models import Incident
    from opsconsole.core.database import database_now

    with transaction.atomic():
        record_failures([prepare("job-0", 0)], now=database_now())
    # Made at the end: filled row by row, an index of a million rows takes several times as long.
    search.install(connection, wanted=False)
    letter = DeadLetter.objects.get()
    incidents = max(count // 5, 10)
    of_incident = {
        "id": "gen_random_uuid()",
        "number": "5000 + nth",
        "key": "'key-' || nth",
        "tenant": f"'t-' || (nth %% {TENANTS})",
        "severity": "10 * (1 + nth %% 4)",
        # Nineteen of twenty are over, as in a console that is in use, and their jobs have been told.
        "state": "CASE WHEN nth %% 20 > 0 THEN 'resolved' WHEN nth %% 1000 = 0 THEN 'acknowledged' ELSE 'open' END",
        "resolved_at": "CASE WHEN nth %% 20 = 0 THEN NULL ELSE now() END",
        "acknowledged_at": "CASE WHEN nth %% 1000 = 0 THEN now() ELSE NULL END",
        "stamped_episode": "CASE WHEN nth %% 20 = 0 THEN 0 ELSE 1 END",
        "unresolved_count": "0",
        "title": "'shop.charge_card fails with CardDeclined no ' || nth",
        "last_seen_at": "now() - nth * interval '7 seconds'",
    }
    of_letter = {
        "id": "gen_random_uuid()",
        "incident_id": "i.id",
        "tenant": "i.tenant",
        "task_id": "'job-' || nth",
        "job_id": "'job-' || nth",
        "fingerprint": "'celery:job-' || nth",
        "queue": "'queue-' || (nth %% 7)",
        "error_text": "'the card of order ' || nth || ' was declined by the bank, which gives no reason'",
        "payload_preview": "'[' || nth || ', \"order\"], {}'",
        # One in twenty was closed with its incident and not repaired: by itself it is open for ever.
        "state": "CASE WHEN nth <= %(large)s OR nth %% 10 = 0 THEN 'open' ELSE 'repaired' END",
        "closed_at": "CASE WHEN nth <= %(large)s OR nth %% 20 = 0 THEN NULL ELSE now() END",
        "last_seen_at": "now() - nth * interval '1 second'",
    }
    with connection.cursor() as cursor:
        columns = [field.column for field in Incident._meta.concrete_fields]
        values = ", ".join(of_incident.get(column, column) for column in columns)
        cursor.execute(
            INCIDENTS.format(columns=", ".join(columns), values=values),
            {"count": incidents - 1, "id": letter.incident_id},
        )
        columns = [field.column for field in DeadLetter._meta.concrete_fields]
        values = ", ".join(of_letter.get(column, f"l.{column}") for column in columns)
        cursor.execute(
            LETTERS.format(columns=", ".join(columns), values=values),
            {"count": count - 1, "large": LARGE, "incidents": incidents, "id": letter.id},
        )
        cursor.execute(COUNTS)
        cursor.execute(MESSAGES, {"id": letter.id})
        cursor.execute("INSERT INTO ops_deadletters_tracebacktext VALUES ('large', repeat('x', %s))", [TRACEBACK_BYTES])
        cursor.execute("UPDATE ops_deadletters_occurrence SET traceback_id = 'large' WHERE letter_id = %s", [letter.id])
        search.install(connection, wanted=indexed)
        cursor.execute("VACUUM ANALYZE")
    return letter


# --- pages ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One page: how long it took each time, in ms, and what it is."""

    times: list[float]
    queries: int
    kilobytes: float


def visit(client: Any, path: str) -> tuple[float, int, float]:
    """Ask for a page and return its ms, its queries and its size."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    with CaptureQueriesContext(connection) as queries:
        begin = time.perf_counter()
        answer = client.get(path)
        took = time.perf_counter() - begin
    if answer.status_code != 200:
        raise AssertionError(f"{path} answers {answer.status_code}")
    return 1e3 * took, len(queries), len(answer.content) / 1024


def deep(path: str, rows: Any, columns: tuple[str, ...], share: float, count: int) -> str:
    """Return the address of the page that begins after ``share`` of the rows that this list shows."""
    from opsconsole.core.admin import CURSOR
    from opsconsole.core.keyset import _Place, _write_cursor

    ordered = rows.order_by(*(f"-{name}" for name in columns)).values_list(*columns)
    key = ordered[int(share * (count - 1))]
    cursor = _write_cursor(rows.model._meta.label_lower, _Place(False, 0, tuple(key)))
    return f"{path}{'&' if '?' in path else '?'}{CURSOR}={cursor}"


# --- statements -------------------------------------------------------------------------------------------------------


def sql_ms(call: Callable[[], Any]) -> float:
    """Return how many ms the database takes for what ``call`` asks, the rows fetched with it."""
    from django.db import connection

    took = 0.0

    def wrapped(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal took
        begin = time.perf_counter()
        try:
            return execute(sql, params, many, context)
        finally:
            took += time.perf_counter() - begin

    with connection.execute_wrapper(wrapped):
        call()
    return 1e3 * took


def api_lists(by: Any) -> dict[tuple[str, str], Callable[[], Any]]:
    """Return the pages of the lists of the API: what each asks, by name and place."""
    from deadletters.models import DeadLetter
    from deadletters.selectors import LetterFilter, list_letters
    from incidents.models import Incident
    from incidents.selectors import IncidentFilter, list_incidents
    from opsconsole.core.keyset import _Place, _write_cursor

    def cursor(name: str, segment: int, key: tuple[Any, ...]) -> str:
        return _write_cursor(name, _Place(False, segment, key))

    pages: dict[tuple[str, str], Callable[[], Any]] = {}
    incidents, worst = Incident.objects.all(), ("severity", "last_seen_at", "id")
    for which, wanted, rows in (
        ("all", IncidentFilter(), incidents),
        ("open", IncidentFilter(states=("open",)), incidents.filter(state="open")),
        ("high", IncidentFilter(severities=("high",)), incidents.filter(severity=30)),
    ):
        ordered, count = rows.worst_first().values_list(*worst), rows.count()
        for share in (0.0, 0.5, 0.999):
            at = cursor("incidents", 0, ordered[int(share * (count - 1))]) if share else None
            pages[f"A8, incidents: {which}", f"at {share:.1%}"] = partial(list_incidents, by, wanted, cursor=at)
    letters, default = DeadLetter.objects.all(), LetterFilter()
    for number, (which, rows) in enumerate(
        (
            ("open", letters.filter(state="open", closed_at=None, incident__state="open")),
            ("acknowledged", letters.filter(state="open", closed_at=None, incident__state="acknowledged")),
            ("the rest", letters.filter(closed_at__isnull=False)),
        )
    ):
        ordered, count = rows.newest_first().values_list("last_seen_at", "id"), rows.count()
        for share in (0.0, 0.5, 0.999) if count else ():
            at = cursor("letters:default", number, ordered[int(share * (count - 1))]) if share or number else None
            pages[f"A15, failed jobs: {which}", f"at {share:.1%}"] = partial(list_letters, by, default, cursor=at)
    return pages


def main() -> None:
    with benchmark("lists", "Pages over many failed jobs.", needs=("postgresql",), tasks=1_000_000, rounds=5) as run:
        set_up_django(run)
        from django.contrib.auth import get_user_model
        from django.test import Client, override_settings

        from deadletters.models import DeadLetter
        from grants.actions import Action
        from grants.operators import Operator
        from incidents.models import Incident

        letter = fill(run.tasks)
        make_operator()
        user = get_user_model().objects.get(username="ada")
        user.is_superuser = True  # for the stock admin alone; the console asks its own grants
        user.save()
        by = Operator.from_user(user)
        with override_settings(ROOT_URLCONF="benchmarks.stock_admin", ALLOWED_HOSTS=["*"], DEBUG=False):
            client = Client()
            client.force_login(user)
            letters = DeadLetter.objects.visible_to(by, Action.INSPECT)
            incidents = Incident.objects.visible_to(by, Action.INSPECT)
            lists = {
                "failed jobs": ("/ops/dead-letters/?state=", letters, ("last_seen_at", "id"), "deadletter"),
                "incidents": ("/ops/incidents/?state=", incidents, ("severity", "last_seen_at", "id"), "incident"),
            }
            paths = {}
            for name, (path, rows, columns, model) in lists.items():
                count = rows.count()
                paths[name, "stock"] = (
                    f"/stock/ops_{model}s/{model}/" if model == "incident" else ("/stock/ops_deadletters/deadletter/")
                )
                paths[name, "first"] = path
                paths[name, "middle"] = deep(path, rows, columns, 0.5, count)
                paths[name, "end"] = deep(path, rows, columns, 0.999, count)
            paths["incidents", "needing action"] = "/ops/incidents/"
            paths["overview", "page"] = "/ops/"
            paths["incident of 50,000", "page"] = f"/ops/incidents/{letter.incident_id}/"
            paths["job with a traceback of 30 MB", "page"] = f"/ops/dead-letters/{letter.id}/"
            measured: dict[tuple[str, str], list[tuple[float, int, float]]] = {key: [] for key in paths}
            for number in range(run.rounds + 1):
                for key, path in paths.items():
                    one = visit(client, path)
                    if number:  # the first round pays for imports and cold pages
                        measured[key].append(one)
        asked = api_lists(by)
        statements: dict[tuple[str, str], list[float]] = {key: [] for key in asked}
        for number in range(run.rounds + 1):
            for key, ask in asked.items():
                took = sql_ms(ask)
                if number:
                    statements[key].append(took)
        times = {key: [one[0] for one in found] for key, found in measured.items()}
        show(
            run,
            head=("page", "which", "ms", "queries", "KB of HTML"),
            rows=[
                (name, which, median(times[name, which]), measured[name, which][-1][1], measured[name, which][-1][2])
                for name, which in paths
            ]
            + [(name, f"{which}, SQL", median(found), "", "") for (name, which), found in statements.items()],
            goals=[
                Goal(
                    what="SQL of a page of a list, at any depth",
                    value=max(median(found) for found in statements.values()),
                    bound=SQL_MS,
                    at_least=False,
                    unit=" ms",
                ),
                *(
                    Goal(
                        what=f"{name}: {which} against the first page",
                        value=ratio(times[name, which], times[name, "first"]),
                        bound=1.3,
                        at_least=False,
                    )
                    for name in lists
                    for which in ("middle", "end")
                ),
                Goal(
                    what="incidents: needing action against the first page",
                    value=ratio(times["incidents", "needing action"], times["incidents", "first"]),
                    bound=1.3,
                    at_least=False,
                ),
                *(
                    Goal(
                        what=f"{name}: first page against Django's admin",
                        value=ratio(times[name, "first"], times[name, "stock"]),
                        bound=0.4,
                        at_least=False,
                    )
                    for name in lists
                ),
                *(
                    Goal(what=f"{name} opens", value=max(times[name, "page"]) / 1e3, bound=SECONDS, at_least=False,
                         unit=" s")
                    for name in ("incident of 50,000", "job with a traceback of 30 MB")
                ),
            ],
        )  # fmt: skip


if __name__ == "__main__":
    main()
