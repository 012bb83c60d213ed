"""Redrives with real workers and brokers: killed or cut off in the middle, each job is sent once and the counts add up.

The relay and the controller live in the worker that is killed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import Make
from tests.e2e.installation import Installation, wait_until
from tests.e2e.postgresql import OwnPostgresql
from tests.e2e.proxy import Proxy

COUNT = 60
PACE = {"rate_per_second": 20, "max_outstanding": 12, "canary_size": 3, "stop_percent": None}


@pytest.fixture
def own_postgresql() -> Iterator[OwnPostgresql]:
    server = OwnPostgresql()
    yield server
    server.close()


@pytest.fixture
def proxy(redis_url: str) -> Iterator[Proxy]:
    between = Proxy(redis_url)
    yield between
    between.close()


def begun(installation: Installation, at: int = 15) -> str:
    """Let many jobs fail and start their redrive; return it once so many of them have succeeded."""
    installation.ask("send", jobs={"e2e.refused": COUNT})
    installation.wait_for_letters(COUNT)
    installation.heal()
    redrive: str = installation.ask("start_redrive", expected_count=COUNT, pace=PACE)
    wait_until(
        lambda: installation.ask("redrive", redrive=redrive)["counts"].get("succeeded", 0) >= at,
        lambda: f"{installation.ask('redrive', redrive=redrive)}; {installation.logs()}",
    )
    return redrive


def ended(installation: Installation, redrive: str, state: str = "finished") -> dict[str, Any]:
    def found() -> Any:
        told = installation.ask("redrive", redrive=redrive)
        return told if told["state"] == state and not told["counts"].get("outstanding") else None

    told: dict[str, Any] = wait_until(
        found, lambda: f"{installation.ask('redrive', redrive=redrive)}; {installation.logs()}", 120
    )
    return told


def check(installation: Installation, told: dict[str, Any], *, most_lost: int = 0) -> None:
    """Each job has one result and one repair, no body ran twice, and the kept counts are the items'."""
    states = Counter(item["state"] for item in told["items"])
    assert states == {name.replace("outstanding", "planned"): n for name, n in told["counts"].items()}
    assert sum(states.values()) == told["total"] == COUNT
    assert states["succeeded"] + states["failed"] == COUNT
    assert states["failed"] <= most_lost
    ids = [item["task_id"] for item in told["items"]]
    assert len(set(ids)) == COUNT, "each has a repair of its own"
    runs = installation.runs()
    assert {runs[item["task_id"]] for item in told["items"] if item["state"] == "succeeded"} == {1}
    assert max(runs[task_id] for task_id in ids) == 1
    repairs = installation.ask("repairs")
    assert len(repairs) == COUNT
    letters = Counter(letter["state"] for letter in installation.ask("letters"))
    assert letters["repaired"] == states["succeeded"]
    assert letters["open"] == states["failed"]


def kill_in_the_middle(installation: Installation) -> None:
    first = installation.start_worker("prefork")
    redrive = begun(installation)
    first.kill()
    installation.start_worker("prefork")
    # What ran in the four children at that moment may have happened: it has failed, and was not sent again.
    check(installation, ended(installation, redrive), most_lost=8)


def test_a_killed_worker_on_files_and_sqlite(embedded: Installation) -> None:
    kill_in_the_middle(embedded)


@pytest.mark.postgresql
def test_a_killed_worker_on_redis(make: Make, redis_url: str, postgresql_url: str, queue_name: str) -> None:
    kill_in_the_middle(make(queue=queue_name, broker_url=redis_url, database_url=postgresql_url))


@pytest.mark.postgresql
def test_a_killed_worker_on_rabbitmq(make: Make, rabbitmq_url: str, postgresql_url: str, queue_name: str) -> None:
    kill_in_the_middle(make(queue=queue_name, broker_url=rabbitmq_url, database_url=postgresql_url))


@pytest.mark.postgresql
def test_two_workers_share_one_redrive(make: Make, rabbitmq_url: str, postgresql_url: str, queue_name: str) -> None:
    """One of them controls it; when that is killed, the other goes on."""
    installation = make(queue=queue_name, broker_url=rabbitmq_url, database_url=postgresql_url)
    first, _second = installation.start_worker("threads"), installation.start_worker("threads")
    redrive = begun(installation)
    first.kill()
    check(installation, ended(installation, redrive), most_lost=8)


@pytest.mark.postgresql
def test_a_broker_that_is_gone_pauses_it_and_only_a_person_lets_it_go_on(
    make: Make, proxy: Proxy, postgresql_url: str, queue_name: str
) -> None:
    installation = make(queue=queue_name, broker_url=proxy.url, database_url=postgresql_url)
    installation.start_worker("threads")
    redrive = begun(installation)
    proxy.refuse()
    wait_until(lambda: installation.ask("redrive", redrive=redrive)["state"] == "paused", installation.logs)
    assert installation.ask("redrive", redrive=redrive)["pause"] == "broker_trouble"
    proxy.pass_on()
    # Longer than the relay and the worker take to connect again.
    time.sleep(4)
    assert installation.ask("redrive", redrive=redrive)["state"] == "paused"
    installation.ask("decide_redrive", redrive=redrive, decision="resume")
    check(installation, ended(installation, redrive), most_lost=0)


@pytest.mark.postgresql
def test_a_database_that_is_gone_pauses_it_and_only_a_person_lets_it_go_on(
    make: Make, rabbitmq_url: str, queue_name: str, own_postgresql: OwnPostgresql
) -> None:
    installation = make(queue=queue_name, broker_url=rabbitmq_url, database_url=own_postgresql.url)
    installation.migrate()
    installation.start_worker("threads")
    redrive = begun(installation)
    own_postgresql.crash()
    own_postgresql.start()
    wait_until(lambda: paused_by(installation, redrive) == "database_trouble", installation.logs)
    installation.ask("decide_redrive", redrive=redrive, decision="resume")
    check(installation, ended(installation, redrive), most_lost=0)


def paused_by(installation: Installation, redrive: str) -> str:
    try:
        return str(installation.ask("redrive", redrive=redrive)["pause"])
    except AssertionError:
        return ""  # the desk's own connection died with the server


@pytest.mark.parametrize("task", ["e2e.retries", "e2e.again", "e2e.autoretries"])
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_canary_has_one_attempt_and_its_failure_stops_the_rest(embedded: Installation, task: str, pool: str) -> None:
    """Particular/ServiceControl#938: go on only if the first ones succeed, and learn it by one attempt each."""
    embedded.start_worker(pool)
    embedded.ask("send", jobs={task: 3})
    embedded.wait_for_letters(3)
    before = sum(embedded.runs().values())
    pace = PACE | {"canary_size": 1}
    answers = {"not_declared": "idempotent"}
    redrive = embedded.ask("start_redrive", expected_count=3, pace=pace, answers=answers)
    wait_until(lambda: embedded.ask("redrive", redrive=redrive)["state"] == "paused", embedded.logs)
    told = embedded.ask("redrive", redrive=redrive)
    assert (told["pause"], told["counts"]) == ("canary_failed", {"failed": 1, "waiting": 2})
    assert sum(embedded.runs().values()) == before + 1
    assert [letter["state"] for letter in embedded.ask("letters")] == ["open"] * 3
    embedded.heal()
    embedded.ask("decide_redrive", redrive=redrive, decision="resume")
    told = ended(embedded, redrive)
    assert told["counts"] == {"failed": 1, "succeeded": 2}
