"""Searching many failed jobs by a word, newest first, and what its index costs those who record failures.

    python -m benchmarks.search                          # 200,000 jobs
    python -m benchmarks.search --letters 1000000        # about 3 GB of PostgreSQL's disk and ten minutes

Beside the console's search stands what Django's admin would ask: ``icontains`` on the text of the error alone, for the
same rows and the same operator. A rare word is in one job, a middling one in a thousandth of them, a common one in a
fifth; the last one is as common, but in no job of the newest half. The write cost is recording a failure with the
console as in ``recording``, with the index and without it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.common import SOURCE, Goal, Run, benchmark, median, ratio, set_up_django, show, use_database
from benchmarks.incident_50k import make_operator
from benchmarks.recording import EVERY_JOB, console

PAGE = 100
TERMS = {"rare": "quetzalcoatl", "middling": "midgard", "common": "timeout", "common long ago": "yesteryear"}
MOST = 1_000_000
FILL = """
INSERT INTO ops_deadletters_deadletter (id, tenant, source, fingerprint, incident_id, job_type, job_id, task_id, queue,
    actor_type, actor_id, outcome_class, caught, error_class, error_text, payload_preview, occurrence_count,
    first_seen_at, last_seen_at)
SELECT id, 'default', %(source)s, 'celery:' || id, (%(incidents)s::uuid[])[1 + n %% 100], 'shop.tasks.job_' || n %% 40,
    id::text, id::text, 'celery', 'customer', 'c-' || n %% 5000, 'safe', 'failure',
    'shop.errors.' || (ARRAY['CardDeclined', 'MailhubDown', 'QuotaUsedUp', 'NotThere'])[1 + n %% 4],
    format('order %%s was refused by host db-%%s.example.org:5432 after %%s ms: ', n, n %% 300, n * 7 %% 9000)
        || CASE WHEN n %% 5 = 0 THEN 'timeout while waiting ' ELSE 'connection refused by peer ' END
        || CASE WHEN n %% 1000 = 17 THEN 'midgard ' ELSE '' END
        || CASE WHEN n = %(letters)s / 3 THEN 'quetzalcoatl ' ELSE '' END
        || CASE WHEN n %% 5 < 2 AND n < %(letters)s / 2 THEN 'yesteryear ' ELSE '' END
        || repeat(format('the request with number %%s could not be sent to the service in its region; ', n %% 7919), 3),
    format('[["parcel-%%s", "someone-%%s@example.org"], {"order": %%s, "retries": 3, "note": "as agreed"}]',
        n, n %% 9973, n),
    1, now() - (%(letters)s - n) * interval '7 seconds', now() - (%(letters)s - n) * interval '7 seconds'
FROM (SELECT n, md5(n::text)::uuid AS id FROM generate_series(1, %(letters)s) n) numbers
"""


def fill(letters: int) -> None:
    """Write that many letters of a hundred incidents, with one statement."""
    from django.db import connection

    from incidents.models import Incident
    from opsconsole.core.database import database_now

    now = database_now()
    made = Incident.objects.bulk_create(
        Incident(
            number=number, tenant="default", source=SOURCE, key=f"k{number}", title=f"shop.tasks.job_{number} fails",
            job_type=f"shop.tasks.job_{number}", first_seen_at=now, last_seen_at=now, opened_at=now,
        )
        for number in range(1, 101)
    )  # fmt: skip
    with connection.cursor() as cursor:
        cursor.execute(FILL, {"letters": letters, "incidents": [str(one.id) for one in made], "source": SOURCE})
        cursor.execute("VACUUM ANALYZE ops_deadletters_deadletter")


def timed(work: Callable[[], Any]) -> tuple[float, int]:
    begin = time.perf_counter()
    found = work()
    return time.perf_counter() - begin, len(found)


def reading(run: Run, letters: int) -> tuple[dict[str, list[float]], dict[str, list[float]], float, int]:
    """Search by each word in turns; return the seconds of both sides, of making the index, and its bytes."""
    from django.db import connection

    from deadletters import search
    from deadletters.models import DeadLetter
    from grants.actions import Action
    from opsconsole.core.keyset import Source, read_page

    operator = make_operator()
    search.install(connection, wanted=False)
    fill(letters)
    begin = time.perf_counter()
    search.install(connection, wanted=True)
    building = time.perf_counter() - begin

    def ours(term: str) -> list[Any]:
        rows = DeadLetter.objects.visible_to(operator, Action.INSPECT).newest_first()
        found: Any = search.search_letters(term, within=rows, anywhere=rows)
        return read_page("bench", [[Source(found, ("last_seen_at", "id"))]], limit=PAGE).rows

    def icontains(term: str) -> list[Any]:
        rows = DeadLetter.objects.visible_to(operator, Action.INSPECT).filter(error_text__icontains=term)
        return list(rows.newest_first()[:PAGE])

    took: dict[str, list[float]] = {kind: [] for kind in TERMS}
    plain: dict[str, list[float]] = {kind: [] for kind in TERMS}
    for number in range(-1, run.rounds):  # the first round is for caches
        for kind, term in TERMS.items():
            ours_took, ours_found = timed(partial(ours, term))
            plain_took, plain_found = timed(partial(icontains, term))
            if ours_found != plain_found:
                raise AssertionError(f"{term}: {ours_found} found, {plain_found} by icontains")
            if number >= 0:
                took[kind].append(ours_took)
                plain[kind].append(plain_took)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_relation_size('ops_letter_words')")
        size = int(cursor.fetchone()[0])
    return took, plain, building, size


def writing(run: Run, template: str) -> dict[bool, list[float]]:
    """Record failures with the index and without, in turns; return the seconds of processor time of each round."""
    from django.db import connection

    from deadletters import search

    took: dict[bool, list[float]] = {True: [], False: []}
    for number in range(run.rounds):
        for wanted, rounds in took.items():
            use_database("postgres")
            database = run.database(f"writing_{int(wanted)}_{number}", template)
            use_database(database)
            search.install(connection, wanted=wanted)
            meters = console(run, number)
            rounds.append(sum(meter.total for part, meter in meters.items() if part != EVERY_JOB) / run.tasks)
            use_database("postgres")
            run.drop(database)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--letters", type=int, default=200_000)
    chosen, others = parser.parse_known_args()
    sys.argv[1:] = others
    letters = min(max(chosen.letters, 10_000), MOST)
    with benchmark("search", "Searching failed jobs by a word.", needs=("postgresql",), tasks=2_000) as run:
        template = set_up_django(run)
        use_database("postgres")
        database = run.database("reading", template)
        use_database(database)
        took, plain, building, size = reading(run, letters)
        use_database("postgres")
        run.drop(database)
        written = writing(run, template)
        use_database("postgres")
        rows: list[tuple[Any, ...]] = [
            (kind, 1e3 * median(took[kind]), 1e3 * median(plain[kind]), ratio(took[kind], plain[kind]))
            for kind in TERMS
        ]
        rows.append(
            (
                "us to record one",
                1e6 * median(written[True]),
                1e6 * median(written[False]),
                ratio(written[True], written[False]),
            )
        )
        show(
            run,
            head=("word", "console, ms", "icontains, ms", "ratio"),
            rows=rows,
            goals=[
                *(
                    Goal(
                        what=f"time for a {kind} word against icontains",
                        value=ratio(took[kind], plain[kind]),
                        bound=0.1,
                        at_least=False,
                    )
                    for kind in ("rare", "middling", "common")
                ),
                Goal(
                    what="processor time of recording with the index against without",
                    value=ratio(written[True], written[False]),
                    bound=1.4,
                    at_least=False,
                ),
            ],
            letters=letters,
            index_megabytes=size / 1e6,
            seconds_to_build=building,
        )


if __name__ == "__main__":
    main()
