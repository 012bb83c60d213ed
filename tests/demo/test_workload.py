"""What the demo sends: a burst once per breakage, a bounded trickle, and healthy work all the time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from opsconsole.demo.folder import DemoFolder
from opsconsole.demo.workload import BROKEN, RECEIPTS_IN_BURST, TRICKLE_AT_MOST, WELL, Job, Jobs, Workload

MINUTE = 60.0


class Run:
    """A workload on a clock that tests move."""

    def __init__(self, folder: DemoFolder) -> None:
        self.folder = folder
        self.sent: list[Job] = []
        self.said: list[str] = []
        self.now = 1_000.0
        self.workload = self.begin()

    def begin(self) -> Workload:
        return Workload(self.folder, jobs=Jobs(100), send=self.sent.append, say=self.said.append)

    def go_on(self, seconds: float, step: float = 0.25) -> Counter[str]:
        """Let time pass and return what was sent meanwhile, by task."""
        self.sent.clear()
        end = self.now + seconds
        while self.now < end:
            self.workload.step(self.now)
            self.now += step
        return Counter(job.task for job in self.sent)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    folder = DemoFolder(tmp_path)
    folder.begin()
    return Run(folder)


def test_the_first_minute_has_a_burst_of_one_cause_and_every_other_kind_of_failure(run: Run) -> None:
    sent = run.go_on(MINUTE)
    assert RECEIPTS_IN_BURST <= sent["demo.send_receipt"] <= RECEIPTS_IN_BURST + 5
    kinds = {
        "demo.charge_card",
        "demo.update_address",
        "demo.archive_orders",
        "demo.import_stock",
        "demo.render_label",
        "demo.build_statement",
    }
    assert kinds < set(sent)
    assert run.said == [BROKEN]


def test_it_never_sends_more_than_a_few_jobs_a_second(run: Run) -> None:
    seconds = [sum(run.go_on(1.0).values()) for _ in range(60)]
    assert max(seconds) <= 10
    assert sum(seconds[40:]) / 20 <= 3


def test_failures_are_bounded_however_long_nobody_looks(run: Run) -> None:
    run.go_on(MINUTE)
    before = run.go_on(60 * MINUTE, step=5)["demo.send_receipt"]
    assert before <= TRICKLE_AT_MOST
    assert run.go_on(60 * MINUTE, step=5)["demo.send_receipt"] == 0


def test_a_restart_sends_no_second_burst(run: Run) -> None:
    run.go_on(MINUTE)
    run.workload = run.begin()
    assert run.go_on(MINUTE)["demo.send_receipt"] <= 5


def test_healing_stops_the_burst_at_once(run: Run) -> None:
    run.go_on(4.0)
    run.folder.set_broken(False)
    sent = run.go_on(MINUTE)
    assert sent["demo.update_address"] == sent["demo.archive_orders"] == 0
    assert sent["demo.send_receipt"] <= 5
    assert run.said == [BROKEN, WELL]


def test_breaking_again_sends_another_burst(run: Run) -> None:
    run.go_on(MINUTE)
    run.folder.set_broken(False)
    run.go_on(MINUTE)
    run.folder.set_broken(True)
    assert run.go_on(MINUTE)["demo.send_receipt"] >= RECEIPTS_IN_BURST


def test_healthy_work_goes_on_whatever_happens(run: Run) -> None:
    assert run.go_on(MINUTE)["demo.refresh_prices"] >= 55
    run.folder.set_broken(False)
    assert run.go_on(MINUTE)["demo.refresh_prices"] >= 55


def test_jobs_belong_to_several_tenants_and_customers(run: Run) -> None:
    run.go_on(MINUTE)
    assert {job.kwargs["tenant"] for job in run.sent} == {"harbour", "meadow"}
    assert len({job.kwargs["customer"] for job in run.sent}) >= 5
