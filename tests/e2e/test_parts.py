"""One part of an installation is killed and the others live: beat, web, the worker that dispatches, the database."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from tests.e2e.conftest import Make
from tests.e2e.installation import Installation, Process, wait_until
from tests.e2e.postgresql import OwnPostgresql
from tests.e2e.test_kills import OTHER_QUEUE
from tests.e2e.test_ledger import KINDS, states, wait_until_all_ended, with_kinds

DOWN_SECONDS = 20.0
LETTERS = 60


def beat(installation: Installation) -> Process:
    return installation.start(
        "beat", "-m", "celery", "-A", "opsconsole", "beat", "--max-interval", "1", "--pidfile=", "--loglevel", "INFO"
    )


def test_beat_that_is_killed_leaves_no_run_behind_and_the_next_one_goes_on(embedded: Installation) -> None:
    """A13: sweeps stop with beat and begin again with it; jobs are done all the while."""
    with_kinds(embedded)
    embedded.ask("sweep_every", kind="undelivered_dispatches", seconds=1)
    embedded.start_worker("threads")
    first = beat(embedded)
    wait_until(lambda: len(embedded.ask("sweeps", kind="undelivered_dispatches")) >= 2, lambda: first.log.read_text())
    first.kill()

    embedded.ask("write_jobs", kind="e2e_counted", count=5)
    wait_until(lambda: states(embedded) == {"succeeded": 5}, "jobs are done without beat")
    swept = embedded.ask("sweeps", kind="undelivered_dispatches")
    second = beat(embedded)
    wait_until(
        lambda: len(embedded.ask("sweeps", kind="undelivered_dispatches")) >= len(swept) + 2,
        lambda: second.log.read_text(),
    )
    second.kill()
    wait_until(lambda: set(embedded.ask("sweeps", kind="undelivered_dispatches")) == {"succeeded"}, "each has ended")


class Web:
    """The web processes of an installation, on a port of their own."""

    def __init__(self, installation: Installation) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.token = installation.ask("token")
        self.installation = installation

    def start(self) -> Process:
        started = self.installation.start(
            "web", "-m", "gunicorn", "opsconsole.wsgi:application", "--bind", f"127.0.0.1:{self.port}",
            "--worker-class", "gthread", "--threads", "4", "--no-control-socket", "--log-level", "warning",
        )  # fmt: skip
        wait_until(self.is_up, lambda: started.log.read_text())
        return started

    def is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def post(self, path: str, body: dict[str, Any], key: str) -> tuple[int, dict[str, Any]]:
        """Return status and document; raises ``OSError`` if there is no answer."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/api/v1/{path}",
            data=json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {self.token}", "Idempotency-Key": key, "Content-Type": "application/json",
            },
            method="POST",
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as refused:
            return refused.code, json.loads(refused.read())


def test_web_that_is_killed_in_the_middle_of_a_retry_repeats_nothing(embedded: Installation) -> None:
    """A9: the same request again goes on where the kill stopped it, and every job runs once."""
    embedded.start_worker("threads")
    embedded.ask("send", jobs={"e2e.refused": LETTERS})
    embedded.wait_for_letters(LETTERS)
    [incident] = embedded.ask("incidents")
    web = Web(embedded)
    first = web.start()
    embedded.heal()
    key, body = str(uuid4()), {"all": True, "expected_count": LETTERS}
    answered: list[Any] = []

    def ask() -> None:
        try:
            answered.append(web.post(f"incidents/{incident['id']}/retry", body, key))
        except OSError as error:
            answered.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    # As soon as anything of it is written; how far it has come by then differs from run to run.
    wait_until(lambda: answered or embedded.ask("repairs"), "the request is at it", 20)
    first.kill()
    asking.join()

    web.start()
    status, done = web.post(f"incidents/{incident['id']}/retry", body, key)
    assert status in (200, 202), done
    repairs = embedded.wait_for_repairs(LETTERS)
    assert Counter(repair["state"] for repair in repairs) == {"succeeded": LETTERS}
    runs = embedded.runs()
    assert {runs[repair["task_id"]] for repair in repairs} == {1}
    assert len({repair["old_task_id"] for repair in repairs}) == LETTERS
    [incident] = embedded.ask("incidents")
    assert incident["state"] == "resolved"


def test_a_dispatcher_that_is_killed_alone_leaves_its_jobs_to_the_next(embedded: Installation) -> None:
    """A14: what it had sent is run, what it had only leased is sent again, and nothing runs twice."""
    with_kinds(embedded)
    # It sends and takes nothing, so that killing it kills no job.
    sending = embedded.start_worker("threads", queue=OTHER_QUEUE)
    embedded.ask("write_jobs", kind="e2e_charged", count=60)
    wait_until(lambda: states(embedded)["enqueued"] > 0, "it sends")
    sending.kill()
    left = states(embedded)
    assert left["enqueued"] + left["pending"] == 60
    embedded.start_worker("threads")
    wait_until_all_ended(embedded, 60)
    assert states(embedded) == {"succeeded": 60}
    assert Counter(embedded.runs().values()) == {1: 60}
    assert embedded.ask("letters") == []


@pytest.fixture
def own_postgresql() -> Iterator[OwnPostgresql]:
    server = OwnPostgresql()
    yield server
    server.close()


@pytest.mark.postgresql
def test_jobs_outlive_a_database_that_is_away_for_longer_than_their_lease(
    make: Make, rabbitmq_url: str, queue_name: str, own_postgresql: OwnPostgresql
) -> None:
    """C12: a job that runs all the while is not taken from its worker; each ends once, as a success or as a letter."""
    installation = make(queue=queue_name, broker_url=rabbitmq_url, database_url=own_postgresql.url, **KINDS)
    installation.migrate()
    worker = installation.start_worker("prefork")
    # Longer than outage and lease (20 s), and with effects outside: lost, it would be a letter; run again, twice.
    [long_one] = installation.ask("write_jobs", kind="e2e_charged", count=1, payload={"seconds": DOWN_SECONDS + 4})
    installation.ask("write_jobs", kind="e2e_charged", count=40, payload={"seconds": 0.4})
    installation.ask("write_jobs", kind="e2e_counted", count=10, payload={"fails": True})
    wait_until(lambda: installation.runs()[long_one] and sum(installation.runs().values()) > 6, "the batch has begun")
    own_postgresql.crash()
    time.sleep(DOWN_SECONDS)
    own_postgresql.start()

    def sweep() -> bool:
        """Return whether the database answers; the desk's own connection was cut as well."""
        try:
            installation.ask("sweep", kind="stale_leases")
        except AssertionError:
            return False
        return True

    wait_until(sweep, "the database is back", 20)

    def have_ended() -> bool:
        sweep()
        installation.ask("sweep", kind="undelivered_dispatches")
        return sum(states(installation)[state] for state in ("succeeded", "dead")) == 51

    wait_until(have_ended, lambda: f"{states(installation)}; {installation.logs()}", 60)
    jobs = {job["id"]: job for job in installation.ask("jobs")}
    dead = {job_id for job_id, job in jobs.items() if job["state"] == "dead"}
    letters = wait_until(
        lambda: [one for one in [installation.ask("letters")] if len(one) == len(dead)], "each dead job has a letter"
    )[0]
    assert {letter["job_id"] for letter in letters} == dead
    assert jobs[long_one]["state"] == "succeeded", installation.logs()
    runs = installation.runs()
    assert max(runs[job_id] for job_id, job in jobs.items() if job["kind"] == "e2e_charged") == 1
    assert all(runs[job_id] for job_id, job in jobs.items() if job["state"] == "succeeded")
    assert worker.is_running
