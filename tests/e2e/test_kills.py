"""Workers that are killed: what they held is recorded or comes back, and no repair starts twice."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.e2e.conftest import Make
from tests.e2e.installation import Installation, wait_until

SLOW, WELL = 40, 40
OTHER_QUEUE = "where-nobody-sends"


def kill_in_the_middle(installation: Installation, *, main_only: bool) -> None:
    """C2: jobs = letters + successes after a kill, each job in exactly one of the two, and a kill loses nothing."""
    first = installation.start_worker("prefork")
    sent = installation.ask("send", jobs={"e2e.slow": SLOW, "e2e.well": WELL})
    wait_until(lambda: sum(installation.runs().values()) > 20, "the batch has begun")
    if main_only:
        first.kill_main()
    else:
        first.kill()
    assert len(installation.ask("letters")) < SLOW, "it was killed too late to show anything"
    installation.start_worker("prefork")

    letters = installation.wait_for_letters(SLOW)
    wait_until(lambda: set(sent["e2e.well"]) <= known(installation), "every healthy job ran or has a letter")
    letters = installation.ask("letters")
    lost = [letter for letter in letters if letter["caught"] == "worker_lost"]
    assert {letter["occurrence_count"] for letter in letters} == {1}
    recorded = Counter(letter["task_id"] for letter in letters)
    assert set(recorded.values()) == {1}
    assert set(sent["e2e.slow"]) <= set(recorded), "each failure is a letter, on whichever side of the kill"
    assert {letter["task_id"] for letter in letters} - set(sent["e2e.slow"]) <= {letter["task_id"] for letter in lost}
    assert 1 <= len(lost) <= 8, "what was running, or acknowledged and about to"

    installation.heal()
    for incident in installation.ask("incidents"):
        installation.ask("retry", incident=incident["id"], expected_count=incident["unresolved"])
    repairs = installation.wait_for_repairs(len(letters))
    assert Counter(repair["state"] for repair in repairs) == {"succeeded": len(letters)}
    runs = installation.runs()
    assert {runs[repair["task_id"]] for repair in repairs} == {1}
    assert {incident["state"] for incident in installation.ask("incidents")} == {"resolved"}


def known(installation: Installation) -> set[str]:
    return set(installation.runs()) | {letter["task_id"] for letter in installation.ask("letters")}


@pytest.mark.parametrize("main_only", [False, True], ids=["whole worker", "main process"])
def test_a_killed_worker_loses_nothing_on_files_and_sqlite(embedded: Installation, main_only: bool) -> None:
    kill_in_the_middle(embedded, main_only=main_only)


@pytest.mark.postgresql
def test_a_killed_worker_loses_nothing_on_rabbitmq(
    make: Make, rabbitmq_url: str, postgresql_url: str, queue_name: str
) -> None:
    installation = make(queue=queue_name, broker_url=rabbitmq_url, database_url=postgresql_url)
    kill_in_the_middle(installation, main_only=False)


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_relay_that_is_killed_around_the_send_starts_the_repair_once(embedded: Installation, side: str) -> None:
    """Killed between claim and send, or between send and mark; it is sent again, and one start counts."""
    first = embedded.start_worker("threads")
    embedded.ask("send", jobs={"e2e.refused": 1})
    embedded.wait_for_letters(1)
    [incident] = embedded.ask("incidents")
    embedded.heal()
    # Planned while there is no relay; killed and not stopped, because a stopped worker no longer serves the job.
    first.kill()
    assert embedded.ask("retry", incident=incident["id"], expected_count=1)["planned"] == 1

    embedded.environment["E2E_RELAY_DIES"] = side
    dying = embedded.start_worker("threads", include=("tests.e2e.relay_dies",), queue=OTHER_QUEUE, wait=False)
    wait_until(lambda: not dying.is_running, "the relay is killed")
    [repair] = embedded.ask("repairs")
    assert repair["state"] == "planned"

    if side == "after":
        # It relays and does not consume, so that two messages wait for the next worker.
        relaying = embedded.start_worker("threads", queue=OTHER_QUEUE)
        wait_until(lambda: embedded.ask("repairs")[0]["state"] == "sent", "it is sent once its lease has ended")
        relaying.kill()
    embedded.start_worker("threads")
    [repair] = embedded.wait_for_repairs(1)
    refused = 1 if side == "after" else 0
    wait_until(lambda: embedded.ask("balance")["ignored"] == refused, "the second message is refused")
    assert repair["state"] == "succeeded"
    assert embedded.runs()[repair["task_id"]] == 1
    [incident] = embedded.ask("incidents")
    assert incident["state"] == "resolved"
