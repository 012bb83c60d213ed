"""The demo's reports: all eight kinds of jobs, a burst of failures once per breakage, and a gentle stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError

from opsconsole.demo import reports as demo_reports
from opsconsole.demo import tasks
from opsconsole.demo.flaky import Services
from opsconsole.demo.folder import DemoFolder
from opsconsole.demo.reports import BURST, Reports, prepare
from opsconsole.demo.workload import HARBOUR, MEADOW
from opsconsole.jobs import conf, ledger, webhooks
from opsconsole.jobs.kinds import kind_named
from opsconsole.jobs.models import Job, JobState, Report, ReviewQueue
from repairs.services import retry_letter
from tests.jobs.steps import dispatch, letter_of, make_due, run

pytestmark = pytest.mark.django_db
MINUTE = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> DemoFolder:
    made = DemoFolder(tmp_path)
    made.begin()
    made.set_desk_port(9)
    return made


class Run:
    """Reports on a clock that tests move."""

    def __init__(self, folder: DemoFolder, first: int = 1_000) -> None:
        self.said: list[str] = []
        self.reports = Reports(folder, first=first, say=self.said.append)
        self.now = 1_000.0

    def go_on(self, seconds: float) -> Counter[str]:
        """Let time pass and return what was written meanwhile, by kind."""
        before = Counter(Job.objects.values_list("kind", flat=True))
        end = self.now + seconds
        while self.now < end:
            self.reports.step(self.now)
            self.now += 0.5
        return Counter(Job.objects.values_list("kind", flat=True)) - before


def test_a_burst_has_every_kind_that_is_begun_from_outside(folder: DemoFolder) -> None:
    written = Run(folder).go_on(MINUTE)
    assert set(written) == {
        "route_report",
        "fetch_evidence",
        "dispatch_workflow",
        "deliver_action",
        "deliver_notification",
        "deliver_email",
        "apply_action_proposal",
    }
    assert sum(written.values()) <= 60


def test_there_is_one_burst_for_each_breakage_however_often_the_demo_starts(folder: DemoFolder) -> None:
    Run(folder).go_on(MINUTE)
    assert not Run(folder).go_on(10 * MINUTE)
    folder.set_broken(False)
    folder.set_broken(True)
    assert Run(folder, first=5_000).go_on(MINUTE)
    assert folder.burst_done(BURST) == 2
    assert folder.burst_done() == 0


def test_the_front_desk_is_closed_while_things_are_broken(folder: DemoFolder) -> None:
    running = Run(folder)
    running.go_on(1)
    assert ReviewQueue.objects.get(tenant=MEADOW).status == "retired"
    folder.set_broken(False)
    running.go_on(1)
    assert ReviewQueue.objects.get(tenant=MEADOW).status == "active"


def test_while_all_is_well_there_is_one_round_a_minute(folder: DemoFolder) -> None:
    folder.set_broken(False)
    running = Run(folder)
    first = running.go_on(5)
    assert first["deliver_action"] == 1
    assert running.go_on(10 * MINUTE)["deliver_action"] in (9, 10)
    assert running.said == []


def test_healing_ends_a_burst(folder: DemoFolder) -> None:
    running = Run(folder)
    running.go_on(3)
    folder.set_broken(False)
    running.go_on(1)
    assert running.go_on(50).total() == 0


def test_a_database_that_is_away_is_tried_again(folder: DemoFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any, **__: Any) -> None:
        raise OperationalError("the database is away")

    running = Run(folder)
    monkeypatch.setattr(demo_reports, "prepare", away)
    running.go_on(1)
    assert "the database is away" in running.said[0]
    monkeypatch.setattr(demo_reports, "prepare", prepare)
    running.go_on(3)
    assert Report.objects.exists()


def test_nothing_happens_without_services(tmp_path: Path) -> None:
    Run(DemoFolder(tmp_path)).go_on(MINUTE)
    assert not Report.objects.exists()


# -- With the services themselves --------------------------------------------------------------------------------------


@pytest.fixture
def services(tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Services]:
    settings.VAR_DIR = tmp_path
    tasks.demo_folder.cache_clear()
    monkeypatch.setattr(webhooks, "ANSWER_WITHIN_SECONDS", 3.0)
    folder = tasks.demo_folder()
    folder.begin()
    running = Services(folder)
    settings.EMAIL_BACKEND = "opsconsole.demo.mail.Backend"
    settings.OPSCONSOLE_EVIDENCE_ALLOW = ["127.0.0.1"]
    settings.OPSCONSOLE_WEBHOOK_PROBES = [f"http://127.0.0.1:{running.desk.port}/"]
    yield running
    running.stop()
    tasks.demo_folder.cache_clear()


def run_all() -> None:
    """Run every job until none waits."""
    while waiting := list(Job.objects.unfinished()):
        for job in waiting:
            make_due(job)
        for taken in ledger.take_due(source=conf.source(), owner="dispatcher", limit=100):
            run(Job.objects.get(id=taken.job_id), taken.token)


def test_everything_fails_while_the_services_are_broken_and_is_done_after_a_retry(
    services: Services, cast: Any
) -> None:
    """A6, A12, C11."""
    running = Run(services.folder)
    running.go_on(MINUTE)
    run_all()
    dead = list(Job.objects.filter(state=JobState.DEAD))
    assert len({job.kind for job in dead}) == 8
    unanswered = [job for job in dead if letter_of(job).outcome_class == "ambiguous"]
    assert {job.kind for job in unanswered} == {"apply_action_proposal"}

    services.folder.set_broken(False)
    services.look()
    running.go_on(0.5)
    for job in dead:
        checked = job in unanswered
        retry_letter(letter_id=letter_of(job).id, by=cast.ada, key=f"again {job.id}", provider_checked=checked)
    run_all()
    left = Job.objects.exclude(state=JobState.SUCCEEDED)
    assert list(left.values_list("kind", "state", "last_error_text")) == []
    assert set(Report.objects.filter(tenant=MEADOW).values_list("routing_status", flat=True)) == {"complete"}


def test_the_desk_can_be_asked_what_it_has_done(services: Services) -> None:
    """C13: it has applied a proposal of which nobody has heard."""
    prepare(f"http://127.0.0.1:{services.desk.port}", is_broken=True)
    Run(services.folder).reports.propose(f"http://127.0.0.1:{services.desk.port}")
    job = Job.objects.get(kind="apply_action_proposal")
    kind = kind_named(job.kind)
    assert kind.probe(job).happened is False
    run(job, dispatch(job))
    assert letter_of(job).outcome_class == "ambiguous"
    assert kind.probe(job).happened is True


def test_the_desk_keeps_its_port_from_one_start_to_the_next(tmp_path: Path) -> None:
    folder = DemoFolder(tmp_path)
    first = Services(folder)
    port = first.desk.port
    first.stop()
    second = Services(folder)
    assert second.desk.port == port
    assert folder.ports()["desk"] == port
    second.stop()


def test_a_report_of_the_demo_belongs_to_its_tenants(folder: DemoFolder) -> None:
    Run(folder).go_on(MINUTE)
    assert set(Report.objects.values_list("tenant", flat=True)) == {HARBOUR, MEADOW}
