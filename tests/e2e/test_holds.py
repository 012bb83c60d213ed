"""Holds with real workers: what matches goes aside, in order and once, whatever is killed; nothing of it runs."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.e2e.conftest import Make
from tests.e2e.installation import Installation, wait_until

SECONDS = 10.0
"""How long after the click no live worker may start a matching job any more."""
MANY, FEW = 160, 12


@pytest.fixture
def installed(request: pytest.FixtureRequest, make: Make, queue_name: str) -> Installation:
    """Files and SQLite, or a broker and PostgreSQL."""
    if request.param == "files":
        embedded: Installation = request.getfixturevalue("embedded")
        return embedded
    broker = request.getfixturevalue(f"{request.param}_url")
    return make(queue=queue_name, broker_url=broker, database_url=request.getfixturevalue("postgresql_url"))


BROKERS = [
    pytest.param("files", id="files-sqlite"),
    pytest.param("redis", marks=[pytest.mark.broker, pytest.mark.postgresql], id="redis-postgresql"),
    pytest.param("rabbitmq", marks=[pytest.mark.broker, pytest.mark.postgresql], id="rabbitmq-postgresql"),
]
TASKS = [pytest.param("e2e.steady", id="early"), pytest.param("e2e.steady_late", id="late")]


def all_known(installation: Installation, hold: str, sent: list[str]) -> dict[str, Any]:
    """Wait until each message has run or was put aside, and return how the hold stands then."""

    def known() -> dict[str, Any] | None:
        found: dict[str, Any] = installation.ask("hold", hold=hold)
        return found if {*found["held"], *installation.runs()} >= set(sent) else None

    found: dict[str, Any] = wait_until(known, lambda: f"{installation.ask('hold', hold=hold)} {installation.logs()}")
    return found


def balanced(installation: Installation) -> dict[str, int]:
    """Wait until everything received has ended in one of the columns (C2), and return them."""

    def sums() -> dict[str, int] | None:
        found: dict[str, int] = installation.ask("balance")
        return found if found["received"] == sum(found.values()) - found["received"] else None

    found: dict[str, int] = wait_until(sums, lambda: f"{installation.ask('balance')}")
    return found


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
@pytest.mark.parametrize("installed", BROKERS, indirect=True)
def test_what_matches_goes_aside_among_healthy_jobs(installed: Installation, pool: str, task: str) -> None:
    """C14: within ten seconds of the click, prefetched ones too; in order, each once, sealed; then on a later worker.

    The balance line adds up, and what the hold has put aside is an incident that its operator has.
    """
    first = installed.start_worker(pool)
    sent = installed.ask("send", jobs={task: MANY, "e2e.well": FEW})
    wait_until(lambda: sum(installed.runs().values()) > 3, "the batch has begun")
    hold = installed.ask("place", job_type=task)
    clicked = time.monotonic()
    last_start, runs = clicked, 0
    while time.monotonic() - clicked < SECONDS and runs + len(installed.ask("hold", hold=hold)["held"]) < MANY:
        if (now := sum(installed.runs()[one] for one in sent[task])) > runs:
            last_start, runs = time.monotonic(), now
        time.sleep(0.1)
    assert last_start - clicked < SECONDS / 2
    found = all_known(installed, hold, sent[task])
    ran = installed.runs()
    assert found["held"] == [one for one in sent[task] if one not in ran], "in the order in which they were sent"
    assert found["held"], "the batch was too short"
    wait_until(lambda: set(sent["e2e.well"]) <= set(installed.runs()), "the healthy ones run")
    assert (found["letter_count"], found["messages"], found["attempts"]) == (len(found["held"]), ["full"], [0])
    [(state, holder, unresolved)] = found["incidents"]
    assert (state, holder.endswith("e2e"), unresolved) == ("acknowledged", True, len(found["held"]))

    first.stop()
    installed.start_worker(pool)
    later = installed.ask("send", jobs={task: FEW, "e2e.well": FEW})
    wait_until(lambda: set(later["e2e.well"]) <= set(installed.runs()), "the healthy ones run")
    found = all_known(installed, hold, later[task])
    assert not set(later[task]) & set(installed.runs()), "a worker knows the holds before its first message"
    assert found["held"][-FEW:] == later[task]
    counted = balanced(installed)
    # One whose acknowledgement a closing connection did not take any more comes again, and is put aside again.
    assert len(found["held"]) <= counted["held"] <= len(found["held"]) + 4
    letters = installed.ask("letters")
    assert {(one["state"], one["caught"], one["outcome"], one["occurrence_count"]) for one in letters} == {
        ("held", "held", "safe", 1)
    }

    installed.ask("end", hold=hold)
    time.sleep(SECONDS / 2)
    after = installed.ask("send", jobs={task: 2})
    wait_until(lambda: set(after[task]) <= set(installed.runs()), "nothing is held any more")
    assert installed.ask("hold", hold=hold)["held"] == found["held"], "what was put aside stays so"
    assert set(installed.runs().values()) == {1}


# Redis keeps for an hour what a killed worker had not acknowledged, which is long for a test to wait.
@pytest.mark.parametrize("step", ["noted", "acknowledging", "recording", "recorded"])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("pool", ["prefork", "threads"])
@pytest.mark.parametrize("installed", [BROKERS[0], BROKERS[2]], indirect=True)
def test_a_worker_killed_at_any_step_loses_nothing_and_runs_nothing(
    installed: Installation, pool: str, task: str, step: str
) -> None:
    """C2, C14: killed when it was written down, acknowledged or recorded; each message is one letter in the end."""
    hold = installed.ask("place", job_type=task)
    installed.environment["E2E_HOLD_DIES"] = step
    sent = installed.ask("send", jobs={task: FEW})[task]
    dying = installed.start_worker(pool, include=("tests.e2e.hold_dies",), wait=False)
    wait_until(lambda: not dying.is_running, lambda: f"the worker dies: {dying.text}")
    dying.kill()
    installed.environment["E2E_HOLD_DIES"] = ""
    installed.start_worker(pool)
    wait_until(
        lambda: {one["task_id"] for one in installed.ask("letters")} >= set(sent),
        lambda: f"{installed.ask('letters')} {installed.logs()}",
        90.0,
    )
    letters = installed.ask("letters")
    assert sorted(one["task_id"] for one in letters) == sorted(sent)
    assert not installed.runs()
    assert {(one["state"], one["caught"], one["outcome"]) for one in letters} == {("held", "held", "safe")}
    assert sorted(installed.ask("hold", hold=hold)["held"]) == sorted(sent)
    assert {one["occurrence_count"] for one in letters} == {1}


def test_a_retry_under_way_is_held_with_its_attempts_and_a_repair_passes(embedded: Installation) -> None:
    """C5, C14: the attempt that would come next is put aside; sent by itself, it runs in spite of the hold."""
    embedded.start_worker("prefork")
    (job,) = embedded.ask("send", jobs={"e2e.retries_on": 1})["e2e.retries_on"]
    wait_until(lambda: embedded.runs()[job] == 1, "its first attempt has run")
    hold = embedded.ask("place", job_type="e2e.retries_on", task_id=job)
    [letter] = embedded.wait_for_letters(1)
    ran = embedded.runs()[job]
    assert (letter["state"], embedded.ask("hold", hold=hold)["attempts"]) == ("held", [ran])
    assert 1 <= ran <= 5
    repair = embedded.ask("retry_one", letter=letter["id"])
    wait_until(lambda: embedded.runs()[repair] > 1, lambda: f"the repair runs, and its retries: {embedded.logs()}")


def test_messages_like_one_that_was_held_are_held_by_their_payload(embedded: Installation) -> None:
    embedded.start_worker("prefork")
    first = embedded.ask("place", job_type="e2e.well")
    time.sleep(SECONDS / 2)
    [sent] = embedded.ask("send", jobs={"e2e.well": 1}).values()
    [letter] = embedded.wait_for_letters(1)
    named = embedded.ask("payload_hash", letter=letter["id"])
    embedded.ask("end", hold=first)
    hold = embedded.ask("place", job_type="e2e.well", payload_hash=named)
    time.sleep(SECONDS / 2)
    alike, *others = embedded.ask("send", jobs={"e2e.well": 4})["e2e.well"]
    wait_until(lambda: set(others) <= set(embedded.runs()), "the others run")
    wait_until(lambda: embedded.ask("hold", hold=hold)["held"] == [alike], "that one is held")
    assert not {alike, *sent} & set(embedded.runs())


def test_a_hold_ends_by_itself_on_time_and_says_so(embedded: Installation) -> None:
    """C12: workers let go at its end by the database's clock, and the row says it a moment later."""
    embedded.start_worker("prefork")
    hold = embedded.ask("place", seconds=8, job_type="e2e.well")
    time.sleep(4)
    held = embedded.ask("send", jobs={"e2e.well": 2})["e2e.well"]
    wait_until(lambda: embedded.ask("hold", hold=hold)["held"] == held, "they are held")
    wait_until(lambda: embedded.ask("hold", hold=hold)["state"] == "expired", "it has expired", 15)
    later = embedded.ask("send", jobs={"e2e.well": 2})["e2e.well"]
    wait_until(lambda: set(later) <= set(embedded.runs()), "nothing is held any more")
    assert embedded.ask("hold", hold=hold)["held"] == held


@pytest.mark.parametrize("step", ["", "held back"])
def test_jobs_of_the_ledger_wait_in_it(embedded: Installation, step: str) -> None:
    """C14: not dispatched; and those that were sent already come back, are no attempt, and run when it is over."""
    embedded.environment |= {"OPSCONSOLE_JOB_KINDS": "tests.e2e.kind_counted", "OPSCONSOLE_DISPATCHED_FOR_SECONDS": "5"}
    worker = embedded.start_worker("prefork")
    if step:
        ids = embedded.ask("write_jobs", kind="e2e_counted", count=40, payload={"seconds": 0.5})
        wait_until(lambda: sum(embedded.runs().values()) > 2, "they are on their way")
        hold = embedded.ask("place", job_type="e2e_counted")
        wait_until(lambda: embedded.ask("balance")["held"] > 0, lambda: f"they come back {embedded.logs()}")
        worker.kill()
        embedded.start_worker("prefork")
    else:
        hold = embedded.ask("place", job_type="e2e_counted")
        time.sleep(SECONDS / 2)
        ids = embedded.ask("write_jobs", kind="e2e_counted", count=5)
        time.sleep(SECONDS / 2)
        assert not embedded.runs()
        assert embedded.ask("balance")["received"] == 0
    embedded.ask("end", hold=hold)

    def ended() -> bool:
        embedded.ask("sweep", kind="undelivered_dispatches")
        embedded.ask("sweep", kind="stale_leases")
        return {job["state"] for job in embedded.ask("jobs")} == {"succeeded"}

    wait_until(ended, lambda: f"{embedded.ask('jobs')} {embedded.logs()}", 120)
    assert {job["attempts"] for job in embedded.ask("jobs")} <= {1, 2}
    assert embedded.ask("count_letters") == 0
    assert len(embedded.runs()) == len(ids)
