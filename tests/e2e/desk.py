"""An operator's desk: a process that sends jobs and calls services, one JSON line in, one out.

It lives in a process of its own because the test run has other settings, and stays, because starting one takes seconds.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from io import StringIO
from typing import Any
from uuid import UUID, uuid4

import django

django.setup()

from django.conf import settings  # noqa: E402
from django.core.management import call_command  # noqa: E402
from django.db import connections  # noqa: E402
from django.db.models import Sum  # noqa: E402
from django.test import Client  # noqa: E402
from django_celery_beat.models import IntervalSchedule, PeriodicTask  # noqa: E402

from deadletters.drainer import COUNTED  # noqa: E402
from deadletters.holds import held_letters, incidents_of_hold, payload_hash_of  # noqa: E402
from deadletters.models import DeadLetter, Hold, Occurrence, TaskMinute, WorkerNode  # noqa: E402
from deadletters.selectors import LetterFilter  # noqa: E402
from deadletters.services import HoldTarget, end_hold, place_hold  # noqa: E402
from grants.actions import Action  # noqa: E402
from grants.operators import Operator  # noqa: E402
from grants.principals import user_named  # noqa: E402
from grants.services import bootstrap, create_token  # noqa: E402
from incidents.models import Incident  # noqa: E402
from opsconsole.celery import app  # noqa: E402
from opsconsole.core.database import database_now  # noqa: E402
from opsconsole.jobs.models import Job  # noqa: E402
from opsconsole.jobs.services import enqueue  # noqa: E402
from repairs.models import ReconciliationRun, Redrive, RedriveClass, RedriveItem, RepairAction  # noqa: E402
from repairs.reconciliation.running import run_scheduled  # noqa: E402
from repairs.reconciliation.schedule import TASK, kind_of_entry  # noqa: E402
from repairs.redrives import services as redrives  # noqa: E402
from repairs.redrives.requests import AnswerKind, RedriveAnswer, RedrivePace, RedriveSelection  # noqa: E402
from repairs.services import retry_incident, retry_letter  # noqa: E402

USER = "e2e"


def source() -> str:
    return str(settings.OPSCONSOLE_SOURCE)


def operator() -> Operator:
    bootstrap(username=USER, create=True)
    return Operator.cli(user_named(USER))


def send(jobs: dict[str, int], misfits: tuple[str, ...] = (), pause: float = 0.0) -> dict[str, list[str]]:
    """Send so many of each job, mixed, and return their ids by name."""
    sent: dict[str, list[str]] = {name: [] for name in jobs}
    for number in range(max(jobs.values())):
        for name, count in jobs.items():
            if number < count:
                kwargs = {"nummber": number} if name in misfits else {"number": number}
                task = name.removesuffix(":misfit")
                sent[name].append(app.send_task(task, kwargs=kwargs).id)
        if pause:
            time.sleep(pause)
    return sent


def letters() -> list[dict[str, Any]]:
    """Return every letter of this source with when its occurrences happened."""
    rows = DeadLetter.objects.filter(source=source()).order_by("id")
    happened: dict[UUID, list[float]] = {}
    for letter_id, at in Occurrence.objects.filter(letter__source=source()).values_list("letter_id", "happened_at"):
        happened.setdefault(letter_id, []).append(at.timestamp())
    return [
        {
            "id": str(row.id),
            "task_id": row.task_id,
            "job_id": row.job_id,
            "job_type": row.job_type,
            "state": row.state,
            "caught": row.caught,
            "outcome": row.outcome_class,
            "incident": str(row.incident_id),
            "occurrence_count": row.occurrence_count,
            "happened": sorted(happened.get(row.id, [])),
        }
        for row in rows
    ]


def count_letters() -> int:
    return DeadLetter.objects.filter(source=source()).count()


def incidents() -> list[dict[str, Any]]:
    return [
        {
            "id": str(row.id),
            "number": row.number,
            "job_type": row.job_type,
            "state": row.state,
            "letters": row.letter_count,
            "occurrences": row.occurrence_count,
            "unresolved": row.unresolved_count,
            "resolved_by": row.resolved_by,
        }
        for row in Incident.objects.filter(source=source()).order_by("number")
    ]


def repairs() -> list[dict[str, Any]]:
    return [
        {
            "state": row.state,
            "task_id": row.new_task_id,
            "old_task_id": row.letter.task_id,
            "job_type": row.job_type,
            "error": row.error_code,
            "sends": row.send_count,
            "send_error": row.send_error,
        }
        for row in RepairAction.objects.filter(source=source()).select_related("letter").order_by("id")
    ]


def retry(incident: str, expected_count: int) -> dict[str, Any]:
    """Retry all letters of an incident through the service, and say how long the call took."""
    by = operator()
    began = time.monotonic()
    done = retry_incident(
        incident_id=UUID(incident),
        by=by,
        key=str(uuid4()),
        expected_count=expected_count,
        provider_checked=True,
    )
    return {
        "planned": done.planned,
        "refused": sorted({result.code for result in done.results if result.status == "refused"}),
        "seconds": time.monotonic() - began,
    }


def token() -> str:
    """Return the secret of a new API token that may do everything."""
    operator()
    made = create_token(
        by=Operator.from_user(user_named(USER)),
        name="e2e",
        actions=set(Action),
        tenant="*",
        expires_at=database_now().replace(year=2099),
        key=str(uuid4()),
    )
    return str(made.plain)


def retry_over_rest(incident: str, expected_count: int) -> dict[str, Any]:
    answer = Client().post(
        f"/api/v1/incidents/{incident}/retry",
        data=json.dumps({"all": True, "expected_count": expected_count, "provider_checked": True}),
        content_type="application/json",
        headers={"Authorization": f"Bearer {token()}", "Idempotency-Key": str(uuid4()), "Host": "localhost"},
    )
    return {"status": answer.status_code, "body": answer.json()}


def retry_over_cli(incident: str, expected_count: int) -> str:
    out = StringIO()
    operator()
    call_command(
        "incidents", "retry", incident, "--all", str(expected_count), "--provider-checked", "--operator", USER,
        "--json", stdout=out,
    )  # fmt: skip
    return out.getvalue()


def start_redrive(expected_count: int, pace: dict[str, Any], answers: dict[str, str] | None = None) -> str:
    """Plan and start a redrive of all that waits in this source, and return its id."""
    by = operator()
    made = redrives.create_redrive(
        by=by,
        key=str(uuid4()),
        selection=RedriveSelection(letters=LetterFilter(tenant="default", source=source())),
        expected_count=expected_count,
        pace=RedrivePace(**pace),
    )
    stated = {
        RedriveClass(name): RedriveAnswer(kind=AnswerKind(kind), reference="e2e")
        for name, kind in (answers or {}).items()
    }
    redrives.start_redrive(redrive_id=made.redrive_id, by=by, key=str(uuid4()), answers=stated)
    return str(made.redrive_id)


def decide_redrive(redrive: str, decision: str) -> str:
    """Pause, resume or cancel a redrive."""
    decide = getattr(redrives, f"{decision}_redrive")
    done: redrives.RedriveMutation = decide(redrive_id=UUID(redrive), by=operator(), key=str(uuid4()))
    return done.state


def redrive(redrive: str) -> dict[str, Any]:
    """Return how a redrive stands: its state, its kept counts, and its items with the task that ran each."""
    row = Redrive.objects.get(id=UUID(redrive))
    items = (
        RedriveItem.objects.filter(redrive=row).order_by("position").values_list("state", "code", "repair__new_task_id")
    )
    names = ("waiting", "outstanding", "succeeded", "failed", "skipped", "cancelled")
    return {
        "state": row.state,
        "pause": row.pause_code,
        "text": row.pause_text,
        "total": row.total_count,
        "counts": {name: count for name in names if (count := getattr(row, f"{name}_count"))},
        "items": [
            {"state": state, "code": code, "task_id": task_id}
            for state, code, task_id in items.values_list("state", "code", "repair__new_task_id")
        ],
    }


def write_jobs(kind: str, count: int, payload: dict[str, Any] | None = None) -> list[str]:
    """Write so many jobs into the ledger and return their ids."""
    return [str(enqueue(kind=kind, tenant="default", payload=payload or {}).id) for _ in range(count)]


def jobs() -> list[dict[str, Any]]:
    """Return every job of the ledger of this source."""
    rows = Job.objects.filter(source=source()).order_by("id")
    return [{"id": str(row.id), "kind": row.kind, "state": row.state, "attempts": row.attempts} for row in rows]


def sweep(kind: str) -> dict[str, Any]:
    """Run a sweep as beat does, and say what it changed."""
    run = run_scheduled(kind)
    return {} if run is None else {"state": run.state, "repaired": run.repaired_count}


def sweep_every(kind: str, seconds: int) -> None:
    """Have beat run this sweep so often, and no other."""
    every, _ = IntervalSchedule.objects.get_or_create(every=seconds, period=IntervalSchedule.SECONDS)
    for entry in PeriodicTask.objects.filter(task=TASK):
        entry.enabled = kind_of_entry(entry) == kind
        entry.interval, entry.queue = every, settings.OPSCONSOLE_QUEUE
        entry.save()


def sweeps(kind: str) -> list[str]:
    """Return the states of the runs of a sweep, oldest first."""
    return list(ReconciliationRun.objects.filter(kind=kind).order_by("id").values_list("state", flat=True))


def balance() -> dict[str, int]:
    """Return the sums of the balance line: what was received, and how it ended."""
    sums = TaskMinute.objects.filter(source=source()).aggregate(**{name: Sum(name) for name in COUNTED})
    return {name: value or 0 for name, value in sums.items()}


def place(seconds: float = 3_600, **target: str) -> str:
    """Place a hold on messages of this source and return its id."""
    done = place_hold(
        target=HoldTarget(tenant="default", source=source(), **target),
        reason="the provider is down",
        ends_at=database_now() + timedelta(seconds=seconds),
        by=operator(),
        key=str(uuid4()),
    )
    return str(done.hold_id)


def end(hold: str) -> None:
    end_hold(hold_id=UUID(hold), reason="the provider is up", by=operator(), key=str(uuid4()))


def hold(hold: str) -> dict[str, Any]:
    """Return how a hold stands, and the task ids that it has put aside, in the order in which they are sent on."""
    row = Hold.objects.get(id=UUID(hold))
    kept = list(held_letters(row).values_list("task_id", "attempts", "message_state", "chord_id"))
    return {
        "state": row.state,
        "letter_count": row.letter_count,
        "held": [task_id for task_id, *_ in kept],
        "attempts": sorted({attempts for _, attempts, *_ in kept}),
        "messages": sorted({message for _, _, message, _ in kept}),
        "chords": sorted({chord for *_, chord in kept}),
        "incidents": [
            (one.state, one.acknowledged_by_name, one.unresolved_count) for one in incidents_of_hold(operator(), row)
        ],
    }


def payload_hash(letter: str) -> str | None:
    return payload_hash_of(DeadLetter.objects.get(id=UUID(letter)))


def retry_one(letter: str) -> str:
    return retry_letter(letter_id=UUID(letter), by=operator(), key=str(uuid4())).new_task_id


def nodes() -> list[dict[str, Any]]:
    rows = WorkerNode.objects.filter(source=source()).order_by("started_at")
    return [{"id": row.id, "pid": row.pid, "trouble": row.trouble, "tasks": json.loads(row.tasks)} for row in rows]


COMMANDS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        send, letters, count_letters, incidents, repairs, retry, retry_over_rest, retry_over_cli, balance, nodes,
        write_jobs, jobs, sweep, sweep_every, sweeps, token, start_redrive, decide_redrive, redrive,
        place, end, hold, payload_hash, retry_one,
    )
}  # fmt: skip


def main() -> None:
    print(json.dumps({"answer": "ready"}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = {"answer": COMMANDS[asked.pop("do")](**asked)}
        except Exception:
            answer = {"error": traceback.format_exc()}
            # A connection that a database outage has killed must not be used again.
            connections.close_all()
        print(json.dumps(answer, default=str), flush=True)


if __name__ == "__main__":
    main()
