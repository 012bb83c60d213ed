"""Taking and closing an incident of 50,000 failed jobs while four recorders go on recording into it.

    python -m benchmarks.incident_50k

The console writes the incident alone: its jobs read as acknowledged or closed through it. Compared with writing every
job, as consoles do that keep the state in each row (state columns of ours stand in for theirs). Each recorder is a
process that adds failures of known jobs to this very incident, twenty every quarter of a second; beside the two times
stands the longest that one of their transactions took meanwhile, most of which is waiting for the incident.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import SOURCE, Goal, Run, benchmark, environment, median, set_up_django, show, wait_for

RECORDERS = 4
AT_ONCE = 20
PAUSE_SECONDS = 0.25
"""Between two transactions of a recorder, as a drainer has it; without it four would measure how fast two cores are."""
KNOWN = 5_000
"""Of the incident's jobs, those that fail again."""
BETWEEN_SECONDS = 1.0
"""Between two operations, so that what waited for the first has ended before the second."""

MULTIPLY = """
INSERT INTO ops_deadletters_deadletter ({columns})
SELECT {values} FROM ops_deadletters_deadletter, generate_series(1, %(count)s) AS number WHERE id = %(id)s
"""
PUT_BACK = (
    "UPDATE ops_deadletters_deadletter SET state = 'open', closed_at = NULL, episode = 1"
    " WHERE incident_id = %(id)s AND (state <> 'open' OR closed_at IS NOT NULL OR episode <> 1)",
    "DELETE FROM ops_incidents_episodeend WHERE incident_id = %(id)s",
    "UPDATE ops_incidents_incident SET state = 'open', episode = 1, reopened_reason = '', acknowledged_by = '',"
    " acknowledged_by_name = '', acknowledged_at = NULL, acknowledged_occurrences = NULL, acknowledged_until = NULL,"
    " resolved_by = '', resolved_at = NULL, resolution_code = '', resolution_summary = '',"
    " unresolved_count = %(count)s, letter_count = %(count)s WHERE id = %(id)s",
)
LOCK = "SELECT id FROM ops_incidents_incident WHERE id = %(id)s FOR UPDATE"
EVERY_ROW = {
    "acknowledge": (
        LOCK,
        "UPDATE ops_deadletters_deadletter SET state = 'retrying' WHERE incident_id = %(id)s AND state = 'open'",
        "UPDATE ops_incidents_incident SET state = 'acknowledged', acknowledged_at = now() WHERE id = %(id)s",
    ),
    "close": (
        LOCK,
        "UPDATE ops_deadletters_deadletter SET state = 'discarded', closed_at = now()"
        " WHERE incident_id = %(id)s AND state IN ('open', 'retrying')",
        "UPDATE ops_incidents_incident SET state = 'resolved', resolved_at = now(), unresolved_count = 0"
        " WHERE id = %(id)s",
    ),
}


# --- recorders --------------------------------------------------------------------------------------------------------


def record(variables: dict[str, str], folder: str, number: int, task_ids: list[str]) -> None:
    """Record failures of known jobs until there is a file ``stop``; hold still while there is one named ``pause``."""
    os.environ.update(variables)
    import django

    django.setup()
    from django.db import transaction

    from deadletters.recorder import record_failures
    from opsconsole.core.database import database_now

    base = Path(folder)
    spans: list[tuple[float, float]] = []
    retries = 0
    chance = random.Random(number)
    while not (base / "stop").exists():
        if (base / "pause").exists():
            (base / f"paused-{number}").touch()
            time.sleep(0.01)
            continue
        (base / f"paused-{number}").unlink(missing_ok=True)
        retries += 1
        chosen = chance.sample(task_ids, AT_ONCE)
        failures = [prepare(task_id, 1_000_000 * (number + 1) + retries) for task_id in chosen]
        begin = time.monotonic()
        with transaction.atomic():
            record_failures(failures, now=database_now())
        spans.append((begin, time.monotonic()))
        time.sleep(PAUSE_SECONDS)
    (base / f"spans-{number}").write_text(json.dumps(spans))


def prepare(task_id: str, retries: int) -> Any:
    """Return one failure of the incident's cause, ready to be recorded."""
    from deadletters import conf
    from deadletters.intake import HostClock, Intake
    from deadletters.journal.events import Caught, Delivery, ErrorReport, Failed
    from deadletters.policy import PolicyBook
    from opsconsole.core.clock import boot_id, boot_now, wall_now
    from opsconsole.core.database import database_now

    intake = Intake(
        source=SOURCE,
        worker="bench@host",
        release="",
        sealer=conf.sealer(),
        redactor=conf.redactor(),
        policies=PolicyBook([]),
        mode=conf.grouping_mode(),
    )
    failed = Failed(
        delivery=Delivery(token="", task_id=task_id, task="shop.charge_card", retries=retries, queue="celery"),
        caught=Caught.FAILURE,
        at_boot=boot_now(),
        at_wall=wall_now(),
        error=ErrorReport(error_class="shop.errors.CardDeclined", text="declined", call_site="shop.cards:charge"),
    )
    clock = HostClock(database_now=database_now(), boot_now=boot_now(), wall_now=wall_now(), boot_id=boot_id())
    return intake.failure(failed, clock=clock, boot_id=boot_id())


# --- the incident -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Big:
    """The incident, how many letters it has, and some of their task ids."""

    id: Any
    count: int
    task_ids: list[str]


def make_incident(count: int) -> Big:
    """Record one failure as the product does, and multiply its letter."""
    from django.db import connection, transaction

    from deadletters.models import DeadLetter
    from deadletters.recorder import record_failures
    from opsconsole.core.database import database_now

    with transaction.atomic():
        record_failures([prepare("job-0", 0)], now=database_now())
    letter = DeadLetter.objects.get()
    copied = {
        "id": "gen_random_uuid()",
        "task_id": "'job-' || number",
        "job_id": "'job-' || number",
        "fingerprint": "'celery:job-' || number",
    }
    columns = [field.column for field in DeadLetter._meta.concrete_fields]
    statement = MULTIPLY.format(
        columns=", ".join(columns), values=", ".join(copied.get(column, column) for column in columns)
    )
    with connection.cursor() as cursor:
        cursor.execute(statement, {"count": count - 1, "id": letter.id})
        cursor.execute("ANALYZE ops_deadletters_deadletter")
    big = Big(
        id=letter.incident_id, count=count, task_ids=[f"job-{number}" for number in range(1, min(count, KNOWN + 1))]
    )
    put_back(big, vacuum=True)
    return big


def put_back(big: Big, *, vacuum: bool) -> None:
    """Make it as it was before anybody took it; ``vacuum`` where every row was written."""
    from django.db import connection, transaction

    with transaction.atomic(), connection.cursor() as cursor:
        for statement in PUT_BACK:
            cursor.execute(statement, {"id": big.id, "count": big.count})
    if vacuum:
        with connection.cursor() as cursor:
            cursor.execute("VACUUM ops_deadletters_deadletter")


def by_console(big: Big, what: str, operator: Any, key: str) -> None:
    from incidents.models import Incident
    from incidents.services import acknowledge_incident, resolve_incident

    if what == "acknowledge":
        acknowledge_incident(incident_id=big.id, by=operator, key=key)
        return
    resolve_incident(
        incident_id=big.id,
        by=operator,
        key=key,
        code="not_repaired",
        summary="measured, not repaired",
        unrepaired=Incident.objects.values_list("unresolved_count", flat=True).get(id=big.id),
    )


def by_every_row(big: Big, what: str) -> None:
    from django.db import connection, transaction

    with transaction.atomic(), connection.cursor() as cursor:
        for statement in EVERY_ROW[what]:
            cursor.execute(statement, {"id": big.id})


def make_operator() -> Any:
    """Return a person who may do everything."""
    from django.contrib.auth import get_user_model

    from grants.operators import Operator
    from grants.services import bootstrap

    user = get_user_model().objects.create_user("ada", is_staff=True)
    bootstrap(username="ada")
    return Operator.from_user(user)


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Did:
    """One operation, when it was done."""

    side: str
    what: str
    begin: float
    end: float


def hold(folder: Path) -> None:
    """Let the recorders hold still, and wait until they do."""
    (folder / "pause").touch()
    wait_for("the recorders to pause", lambda: all((folder / f"paused-{n}").exists() for n in range(RECORDERS)))


def go_on(folder: Path) -> None:
    (folder / "pause").unlink()
    wait_for("the recorders to go on", lambda: not any((folder / f"paused-{n}").exists() for n in range(RECORDERS)))


def measure(run: Run, big: Big, operator: Any, folder: Path) -> list[Did]:
    """Do both operations on both sides in each round."""
    done: list[Did] = []
    for number in range(run.rounds):
        for side in ("console", "every row"):
            go_on(folder)
            begin = time.monotonic()
            time.sleep(2.0)
            # Nothing is done: how long recorders wait for each other. What is open at the end belongs to what follows.
            done.append(Did(side=side, what="nothing", begin=begin, end=begin + 1.0))
            for what in ("acknowledge", "close"):
                begin = time.monotonic()
                if side == "console":
                    by_console(big, what, operator, f"{what}-{number}")
                else:
                    by_every_row(big, what)
                done.append(Did(side=side, what=what, begin=begin, end=time.monotonic()))
                time.sleep(BETWEEN_SECONDS)
            hold(folder)
            put_back(big, vacuum=side != "console")
    return done


def longest_wait(did: Did, spans: list[tuple[float, float]]) -> float:
    """Return the longest that a recorder took for a transaction that was open during this operation."""
    met = [end - begin for begin, end in spans if begin < did.end and end > did.begin]
    return max(met, default=0.0)


def main() -> None:
    with benchmark("incident_50k", "Take and close a large incident.", needs=("postgresql",), tasks=50_000) as run:
        database = set_up_django(run)
        from django.db import connection

        big = make_incident(run.tasks)
        operator = make_operator()
        folder = run.folder / "recorders"
        folder.mkdir()
        (folder / "pause").touch()
        variables = {name: value for name, value in environment(run, database).items() if os.environ.get(name) == value}
        context = multiprocessing.get_context("spawn")
        recorders = [
            context.Process(target=record, args=(variables, str(folder), number, big.task_ids), daemon=True)
            for number in range(RECORDERS)
        ]
        for recorder in recorders:
            recorder.start()
        try:
            hold(folder)
            # Once beforehand, so that no side pays for first imports and statements.
            by_console(big, "acknowledge", operator, "first")
            by_console(big, "close", operator, "first")
            put_back(big, vacuum=False)
            done = measure(run, big, operator, folder)
        finally:
            (folder / "stop").touch()
            for recorder in recorders:
                recorder.join(20)
                if recorder.is_alive():
                    recorder.kill()
        connection.close()
        spans = [
            (float(begin), float(end))
            for number in range(RECORDERS)
            for begin, end in json.loads((folder / f"spans-{number}").read_text())
        ]
        took: dict[tuple[str, str], list[float]] = {}
        waits: dict[tuple[str, str], list[float]] = {}
        for did in done:
            took.setdefault((did.side, did.what), []).append(1e3 * (did.end - did.begin))
            waits.setdefault((did.side, did.what), []).append(1e3 * longest_wait(did, spans))
        show(
            run,
            head=("operation", "side", "ms", "worst ms", "longest transaction of a recorder, ms"),
            rows=[
                (
                    what,
                    side,
                    median(took[side, what]) if what != "nothing" else float("nan"),
                    max(took[side, what]) if what != "nothing" else float("nan"),
                    max(waits[side, what]),
                )
                for what in ("nothing", "acknowledge", "close")
                for side in ("console", "every row")
            ],
            goals=[
                Goal(
                    what=f"{what} an incident of {run.tasks:,}",
                    value=median(took["console", what]),
                    bound=50,
                    at_least=False,
                    unit=" ms",
                )
                for what in ("acknowledge", "close")
            ],
            transactions_recorded=len(spans),
        )


if __name__ == "__main__":
    main()
