"""A batch of jobs, some well and some failing in every way: as many letters as failures, and repairs that count.

The promise in one test: what is caused is recorded, each once (C2); one cause is one incident; a job that nobody serves
is refused (B7); a retry starts each body once; a letter closes when its repair has succeeded, and its incident with the
last one, by itself (C11).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.conftest import Make
from tests.e2e.installation import Installation, wait_until

COUNTS = {"e2e.well": 30, "e2e.refused": 12, "e2e.raises": 10, "e2e.retries": 4, "e2e.raises:misfit": 3, "e2e.gone": 3}
ONLY_PREFORK = {"e2e.overruns": 2, "e2e.dies": 2}
"""Threads have no time limits, and a body that kills its process kills the worker."""
BEYOND_REPAIR = {"e2e.raises:misfit": "arguments_do_not_fit", "e2e.gone": "job_not_served"}


def retry_by_service(installation: Installation, incident: dict[str, Any]) -> tuple[int, list[str]]:
    done = installation.ask("retry", incident=incident["id"], expected_count=incident["unresolved"])
    return done["planned"], done["refused"]


def retry_over_rest(installation: Installation, incident: dict[str, Any]) -> tuple[int, list[str]]:
    done = installation.ask("retry_over_rest", incident=incident["id"], expected_count=incident["unresolved"])
    assert done["status"] in (200, 202), done
    return counted(done["body"])


def retry_over_cli(installation: Installation, incident: dict[str, Any]) -> tuple[int, list[str]]:
    out = installation.ask("retry_over_cli", incident=incident["id"], expected_count=incident["unresolved"])
    return counted(json.loads(out))


def counted(answer: dict[str, Any]) -> tuple[int, list[str]]:
    refused = {result["code"] for result in answer["results"] if result["status"] == "refused"}
    return sum(result["status"] == "planned" for result in answer["results"]), sorted(refused)


Retry = Callable[[Installation, dict[str, Any]], tuple[int, list[str]]]


def run_batch(installation: Installation, pool: str, retry: Retry) -> None:
    installation.start_worker(pool)
    counts = COUNTS | (ONLY_PREFORK if pool == "prefork" else {})
    sent = installation.ask("send", jobs=counts, misfits=["e2e.raises:misfit"])
    caused = {task_id: name for name, ids in sent.items() for task_id in ids if name != "e2e.well"}

    letters = installation.wait_for_letters(len(caused))
    assert Counter(letter["task_id"] for letter in letters) == Counter(list(caused)), (
        "each failure one letter, and no other"
    )
    assert {letter["occurrence_count"] for letter in letters} == {1}
    incidents = installation.ask("incidents")
    assert sorted(incident["letters"] for incident in incidents) == sorted(
        count for name, count in counts.items() if name != "e2e.well"
    ), "one cause, one incident"
    assert {incident["state"] for incident in incidents} == {"open"}
    runs = installation.runs()
    assert {runs[task_id] for task_id in sent["e2e.well"]} == {1}
    assert {runs[task_id] for task_id in sent["e2e.retries"]} == {3}, "two automatic retries come before a letter"

    installation.heal()
    by_incident = {letter["incident"]: caused[letter["task_id"]] for letter in letters}
    repairable = 0
    for incident in incidents:
        name = by_incident[incident["id"]]
        planned, refused = retry(installation, incident)
        if name in BEYOND_REPAIR:
            assert (planned, refused) == (0, [BEYOND_REPAIR[name]])
        else:
            assert (planned, refused) == (counts[name], [])
            repairable += planned

    repairs = installation.wait_for_repairs(repairable)
    assert Counter(repair["state"] for repair in repairs) == {"succeeded": repairable}
    runs = installation.runs()
    assert {runs[repair["task_id"]] for repair in repairs} == {1}, "each body ran exactly once more"
    letters = installation.ask("letters")
    assert len(letters) == len(caused)
    for incident in installation.ask("incidents"):
        name = by_incident[incident["id"]]
        states = {letter["state"] for letter in letters if letter["incident"] == incident["id"]}
        if name in BEYOND_REPAIR:
            assert states == {"open"}
        else:
            assert states == {"repaired"}
            assert (incident["state"], incident["unresolved"]) == ("resolved", 0)
            assert incident["resolved_by"] == "system:system"

    def is_balanced() -> bool:
        """Everything received has ended in exactly one way."""
        sums = installation.ask("balance")
        ends = sum(value for name, value in sums.items() if name != "received")
        return bool(sums["received"] == ends == len(caused) + repairable + 30 + 2 * len(sent["e2e.retries"]))

    wait_until(is_balanced, f"balance: {installation.ask('balance')}", 20)


@pytest.mark.parametrize(("pool", "retry"), [("prefork", retry_by_service), ("threads", retry_over_cli)])
def test_a_batch_is_recorded_and_repaired_on_files_and_sqlite(embedded: Installation, pool: str, retry: Retry) -> None:
    run_batch(embedded, pool, retry)


@pytest.mark.postgresql
@pytest.mark.parametrize(("pool", "retry"), [("prefork", retry_over_rest), ("threads", retry_by_service)])
def test_a_batch_is_recorded_and_repaired_on_redis(
    make: Make, redis_url: str, postgresql_url: str, queue_name: str, pool: str, retry: Retry
) -> None:
    run_batch(make(queue=queue_name, broker_url=redis_url, database_url=postgresql_url), pool, retry)


@pytest.mark.postgresql
@pytest.mark.parametrize(("pool", "retry"), [("prefork", retry_by_service), ("threads", retry_by_service)])
def test_a_batch_is_recorded_and_repaired_on_rabbitmq(
    make: Make, rabbitmq_url: str, postgresql_url: str, queue_name: str, pool: str, retry: Retry
) -> None:
    run_batch(make(queue=queue_name, broker_url=rabbitmq_url, database_url=postgresql_url), pool, retry)
