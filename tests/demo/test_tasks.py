"""The demo's jobs fail because of what they need, and are judged and shown accordingly."""

from __future__ import annotations

import inspect
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import current_app
from django.test import override_settings

from deadletters import conf
from deadletters.journal.events import Caught
from deadletters.journal.reports import report_error
from deadletters.outcome import OutcomeClass, judge
from deadletters.policy import PolicyBook
from opsconsole.demo import settings as demo_settings
from opsconsole.demo import tasks
from opsconsole.demo.flaky import Services
from opsconsole.demo.identity import identity
from opsconsole.demo.policies import POLICIES
from opsconsole.demo.workload import HARBOUR, Jobs

ROOT = Path(__file__).parents[2]
WHOSE = {"tenant": "harbour", "customer": "ada"}


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    with override_settings(VAR_DIR=tmp_path):
        tasks.demo_folder.cache_clear()
        running = Services(tasks.demo_folder())
        yield running
        running.stop()
    tasks.demo_folder.cache_clear()


def judged(task: str, error: BaseException) -> OutcomeClass:
    policy = PolicyBook([spec for spec in policies() if spec]).for_task(task)
    report = report_error(error, task_module="opsconsole.demo.tasks")
    return judge(
        caught=Caught.FAILURE,
        error_class=report.error_class,
        classes=report.classes,
        text=report.text,
        effects=policy.effects,
        safe_errors=policy.safe_errors,
        never_started=False,
        message_missing=False,
        call_site=report.call_site,
        task=task,
    ).outcome


def policies() -> list[Any]:
    with override_settings(OPSCONSOLE_TASK_POLICIES=POLICIES):
        return conf.declared_policies()


def test_a_receipt_that_could_not_be_sent_certainly_was_not(services: Services) -> None:
    """C19: a refused connection is safe to retry even for a task with effects outside."""
    with pytest.raises(ConnectionRefusedError) as caught:
        tasks.send_receipt(order=7, **WHOSE)
    assert judged("demo.send_receipt", caught.value) is OutcomeClass.SAFE


def test_a_charge_that_nobody_answered_may_have_been_made(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks.call, "__kwdefaults__", {"timeout": 0.3})
    with pytest.raises(TimeoutError) as caught:
        tasks.charge_card(reference="charge-7", amount="12.00", **WHOSE)
    assert [request.reference for request in services.folder.requests()] == ["charge-7"]
    assert judged("demo.charge_card", caught.value) is OutcomeClass.AMBIGUOUS


def test_every_job_succeeds_once_the_services_are_well(services: Services) -> None:
    services.folder.set_broken(False)
    services.look()
    tasks.send_receipt(order=7, **WHOSE)
    tasks.charge_card(reference="charge-7", amount="12.00", **WHOSE)
    tasks.build_statement(month="2030-01", **WHOSE)
    tasks.render_label(order=7, **WHOSE)
    tasks.import_stock(warehouse="one", **WHOSE)
    tasks.update_address(street="Quay 1", **WHOSE)


def test_without_its_services_a_job_says_what_is_missing(services: Services) -> None:
    services.folder.forget_ports()
    with pytest.raises(tasks.ServiceMissing, match="is not running"):
        tasks.send_receipt(order=7, **WHOSE)


def test_a_label_kills_its_process_while_things_are_broken(tmp_path: Path) -> None:
    code = (
        "from django.conf import settings; settings.configure(VAR_DIR=__import__('sys').argv[1]);"
        "from opsconsole.demo.tasks import render_label; render_label(order=1, tenant='t', customer='c')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, timeout=60)
    assert done.returncode == -signal.SIGKILL


def test_every_job_of_the_workload_but_two_fits_a_task() -> None:
    """The exceptions are what the demo shows: a misspelt argument and a task that no worker has."""
    jobs = Jobs(1)
    misfits = set()
    for job in [*(job for _, job in jobs.burst()), jobs.prices(HARBOUR), jobs.visits(HARBOUR)]:
        task = current_app.tasks.get(job.task)
        try:
            if task is None:
                raise TypeError
            inspect.signature(task.run).bind(**job.kwargs)
        except TypeError:
            misfits.add(job.task)
    assert misfits == {"demo.update_address", "demo.archive_orders"}


def test_a_job_belongs_to_the_customer_in_its_arguments() -> None:
    assert identity("demo.send_receipt", (), WHOSE, {}) == ("harbour", "customer", "ada")


@pytest.mark.parametrize("kwargs", [None, {}, [], "text"])
def test_a_job_that_names_nobody_belongs_to_the_default_tenant(kwargs: Any) -> None:
    assert identity("demo.send_receipt", None, kwargs, {}) == ("default", "", "")


def test_the_policies_are_accepted_and_say_whose_each_job_is() -> None:
    book = PolicyBook(policies())
    assert book.for_task("demo.charge_card").team == "Payments"
    assert book.for_task("demo.refresh_prices").team == "Shop"


def test_the_settings_of_the_demo_name_what_there_is() -> None:
    assert f"{identity.__module__}.{identity.__qualname__}" == demo_settings.OPSCONSOLE_IDENTITY
    assert [tasks.__name__] == demo_settings.CELERY_IMPORTS
    assert demo_settings.OPSCONSOLE_TASK_POLICIES[-len(POLICIES) :] == POLICIES
