"""A redrive of 200,000 jobs: frozen by one statement, judged page by page, and memory stays flat.

Takes a minute or two, so it runs only if it is asked for::

    LARGE_TESTS=200000 python -m pytest --database postgresql -s tests/repairs/redrives/test_large.py
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable
from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import connection

from deadletters import conf
from deadletters.models import DeadLetter, WorkerNode
from opsconsole.core.database import database_now
from repairs.models import Redrive, RedriveState
from repairs.redrives.redriver import Redriver
from repairs.redrives.services import cancel_redrive, start_redrive
from tests import factories
from tests.cast import Cast
from tests.repairs.redrives.work import FAST, counted, create, step, worker

COUNT = int(os.environ.get("LARGE_TESTS") or 200_000)
pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.postgresql,
    pytest.mark.skipif(not os.environ.get("LARGE_TESTS"), reason="only with LARGE_TESTS=200000"),
]


def copy_letter(letter: DeadLetter, count: int) -> None:
    """Write so many letters like this one, every tenth of which may already have happened."""
    table = DeadLetter._meta.db_table
    own = {
        "id": "gen_random_uuid()",
        "fingerprint": "'copy:' || n",
        "task_id": "'copy-' || n",
        "job_id": "'copy-' || n",
        "outcome_class": "CASE WHEN n %% 10 = 0 THEN 'ambiguous' ELSE outcome_class END",
        "first_seen_at": "first_seen_at + n * interval '1 millisecond'",
    }
    names = [field.column for field in DeadLetter._meta.concrete_fields]
    values = ", ".join(own.get(name, name) for name in names)
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {table} ({', '.join(names)}) SELECT {values} FROM {table}, generate_series(1, %s) n"
            " WHERE id = %s",
            [count, letter.id],
        )
        # Otherwise each message's foreign key is looked up as in a table of one row.
        cursor.execute("ANALYZE")
        cursor.execute(
            "INSERT INTO ops_deadletters_sealedmessage (letter_id, blob, key_id, digest, stored_at)"
            f" SELECT id, '\\x00', %s, '', now() FROM {table} WHERE fingerprint LIKE 'copy:%%'",
            [conf.sealer().primary],
        )
        cursor.execute("UPDATE ops_incidents_incident SET unresolved_count = %s, letter_count = %s", [count + 1] * 2)
        cursor.execute("ANALYZE")


def timed(what: str, work: Callable[[], object]) -> float:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    took = time.perf_counter() - wall
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{what}: {took:.1f} s, {time.process_time() - cpu:.1f} s of processor time here, peak {peak} MB", flush=True)
    return took


def test_200000_jobs_are_frozen_judged_prepared_and_given_up(cast: Cast) -> None:
    WorkerNode.objects.filter(id=worker().id).update(seen_at=database_now() + timedelta(hours=1))
    letter = factories.dead_letter()
    copy_letter(letter, COUNT - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    made = []
    timed("freeze", lambda: made.append(create(cast, expected_count=COUNT, pace=FAST)))
    redrive = Redrive.objects.get(id=made[0].redrive_id)
    assert redrive.state == RedriveState.PLANNING
    controller = Redriver(source="tests", owner="w")

    def judge() -> None:
        while controller.step():
            pass

    timed("dry run", judge)
    redrive.refresh_from_db()
    assert redrive.state == RedriveState.READY
    assert json.loads(redrive.classes) == {"ambiguous": COUNT // 10 - 1, "safe": COUNT - COUNT // 10 + 1}
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 60_000, f"{grown} kB more than before"
    start_redrive(redrive_id=redrive.id, by=cast.ada, key=str(uuid4()))
    timed("first step", lambda: step(redrive))
    assert counted(redrive) == {
        "planned": 500, "skipped": COUNT // 10 - 1, "waiting": COUNT - COUNT // 10 + 1 - 500,
    }  # fmt: skip
    timed("another step", lambda: step(redrive))
    timed("cancel", lambda: cancel_redrive(redrive_id=redrive.id, by=cast.ada, key="c"))
    assert counted(redrive)["cancelled"] == COUNT - COUNT // 10 + 1
