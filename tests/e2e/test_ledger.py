"""Jobs of the ledger on real workers: each ends as a success or as a letter, whatever is killed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.e2e.conftest import Make
from tests.e2e.installation import Installation, wait_until

KINDS = {
    "OPSCONSOLE_JOB_KINDS": "tests.e2e.kind_counted,tests.e2e.kind_charged",
    # The usual quarter of an hour is a long time for a test.
    "OPSCONSOLE_DISPATCHED_FOR_SECONDS": "5",
}
FINAL = {"succeeded", "dead"}


def with_kinds(installation: Installation) -> Installation:
    installation.environment |= KINDS
    return installation


def states(installation: Installation) -> Counter[str]:
    return Counter(job["state"] for job in installation.ask("jobs"))


def wait_until_all_ended(installation: Installation, count: int) -> list[dict[str, Any]]:
    """Wait, with the sweep that beat would run: Redis keeps for an hour what a killed worker had just taken off it."""

    def have_ended() -> bool:
        installation.ask("sweep", kind="undelivered_dispatches")
        return sum(states(installation)[state] for state in FINAL) == count

    wait_until(
        have_ended,
        lambda: f"{count} jobs ended: {states(installation)}; {installation.logs()}",
        90,
    )
    found: list[dict[str, Any]] = installation.ask("jobs")
    return found


def lose_nothing(installation: Installation) -> None:
    """A worker is killed in the middle: succeeded + letters = jobs; what may have happened has run once."""
    first = installation.start_worker("prefork")
    installation.ask("write_jobs", kind="e2e_counted", count=40)
    installation.ask("write_jobs", kind="e2e_counted", count=10, payload={"fails": True})
    installation.ask("write_jobs", kind="e2e_charged", count=30, payload={"seconds": 0.3})
    wait_until(lambda: sum(installation.runs().values()) > 25, f"the batch has begun; {installation.logs()}")
    first.kill()
    assert states(installation)["succeeded"] < 70, "it was killed too late to show anything"
    installation.start_worker("prefork")

    jobs = wait_until_all_ended(installation, 80)
    letters = installation.ask("letters")
    dead = {job["id"] for job in jobs if job["state"] == "dead"}
    assert {letter["job_id"] for letter in letters} == dead
    assert len(letters) == len(dead)
    runs = installation.runs()
    charged = {job["id"] for job in jobs if job["kind"] == "e2e_charged"}
    assert max(runs[job] for job in charged) == 1, "what may have happened is not run again by itself"
    assert set(runs) <= {job["id"] for job in jobs}
    assert all(runs[job["id"]] for job in jobs if job["state"] == "succeeded")

    installation.heal()
    for incident in installation.ask("incidents"):
        installation.ask("retry", incident=incident["id"], expected_count=incident["unresolved"])
    wait_until(
        lambda: states(installation)["succeeded"] == 80, lambda: f"{states(installation)}; {installation.logs()}", 90
    )
    assert {repair["state"] for repair in installation.ask("repairs")} == {"succeeded"}
    assert {incident["state"] for incident in installation.ask("incidents")} == {"resolved"}


def test_a_killed_worker_loses_no_job_on_files_and_sqlite(embedded: Installation) -> None:
    lose_nothing(with_kinds(embedded))


@pytest.mark.postgresql
@pytest.mark.parametrize("broker", ["redis_url", "rabbitmq_url"])
def test_a_killed_worker_loses_no_job(
    make: Make, broker: str, postgresql_url: str, queue_name: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(broker)
    lose_nothing(make(queue=queue_name, broker_url=url, database_url=postgresql_url, **KINDS))


def test_a_job_written_while_no_worker_runs_is_done_when_one_does(embedded: Installation) -> None:
    """L0: the ledger is the queue; nothing is published by whoever writes a job."""
    with_kinds(embedded)
    embedded.ask("write_jobs", kind="e2e_counted", count=3)
    assert states(embedded) == {"pending": 3}
    embedded.start_worker("threads")
    wait_until_all_ended(embedded, 3)
    assert states(embedded) == {"succeeded": 3}
