"""A database or broker that is gone, stuck or read-only: nothing is lost or run twice, and nobody is kept waiting."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import Make
from tests.e2e.installation import Desk, wait_until
from tests.e2e.postgresql import OwnPostgresql
from tests.e2e.proxy import Proxy

DOWN_SECONDS = 8.0
READ_ONLY_SECONDS = 4.0
PAUSE_SECONDS = 0.08


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


@pytest.mark.postgresql
def test_failures_during_a_database_outage_are_recorded_with_their_own_times(
    make: Make, rabbitmq_url: str, queue_name: str, own_postgresql: OwnPostgresql
) -> None:
    """PostgreSQL is killed, comes back, and is read-only for a while; the worker is never restarted."""
    installation = make(queue=queue_name, broker_url=rabbitmq_url, database_url=own_postgresql.url)
    installation.migrate()
    worker = installation.start_worker("prefork")
    count = int((DOWN_SECONDS + READ_ONLY_SECONDS + 6) / PAUSE_SECONDS)
    sent: dict[str, list[str]] = {}
    sender = Desk(installation.environment, installation.folder / "sender.log")
    jobs = {"e2e.raises": count, "e2e.well": count // 2}
    sending = threading.Thread(target=lambda: sent.update(sender.ask("send", jobs=jobs, pause=PAUSE_SECONDS)))
    began = time.time()
    sending.start()
    try:
        time.sleep(2)
        own_postgresql.crash()
        time.sleep(DOWN_SECONDS)
        own_postgresql.start()
        time.sleep(2)
        own_postgresql.set_read_only(True)
        time.sleep(READ_ONLY_SECONDS)
        own_postgresql.set_read_only(False)
    finally:
        sending.join()
        sender.close()
    ended = time.time()

    letters = installation.wait_for_letters(count)
    assert Counter(letter["task_id"] for letter in letters) == Counter(sent["e2e.raises"])
    assert {letter["occurrence_count"] for letter in letters} == {1}
    happened = sorted(at for letter in letters for at in letter["happened"])
    gaps = [later - earlier for earlier, later in itertools.pairwise(happened)]
    assert max(gaps) < DOWN_SECONDS / 2, "they are not bunched where the database came back"
    assert began - 1 < happened[0]
    assert happened[-1] < ended + 2
    assert happened[-1] - happened[0] > DOWN_SECONDS + READ_ONLY_SECONDS
    assert worker.is_running
    [node] = installation.ask("nodes")
    assert node["pid"] == worker.process.pid
    [incident] = installation.ask("incidents")
    assert (incident["letters"], incident["unresolved"]) == (count, count)

    def is_balanced() -> bool:
        sums = installation.ask("balance")
        return bool(sums["received"] == sums["failed"] + sums["succeeded"] == count + count // 2)

    wait_until(is_balanced, "the balance line is exact after the outage", 20)


@pytest.mark.postgresql
@pytest.mark.parametrize("trouble", ["refuses", "hangs"])
def test_a_retry_never_waits_for_the_broker(
    make: Make, proxy: Proxy, postgresql_url: str, queue_name: str, trouble: str
) -> None:
    """The request answers at once while the broker is gone or stuck; the job runs once when it is back."""
    installation = make(queue=queue_name, broker_url=proxy.url, database_url=postgresql_url)
    installation.start_worker("threads")
    installation.ask("send", jobs={"e2e.refused": 3})
    installation.wait_for_letters(3)
    [incident] = installation.ask("incidents")
    installation.heal()

    if trouble == "refuses":
        proxy.refuse()
    else:
        proxy.hang()
    done = installation.ask("retry", incident=incident["id"], expected_count=3)
    assert done["planned"] == 3
    assert done["seconds"] < 1.0
    time.sleep(4)
    assert {repair["state"] for repair in installation.ask("repairs")} == {"planned"}
    proxy.pass_on()

    repairs = installation.wait_for_repairs(3, seconds=90)
    assert Counter(repair["state"] for repair in repairs) == {"succeeded": 3}
    runs = installation.runs()
    assert {runs[repair["task_id"]] for repair in repairs} == {1}
    [incident] = installation.ask("incidents")
    assert (incident["state"], incident["resolved_by"]) == ("resolved", "system:system")
