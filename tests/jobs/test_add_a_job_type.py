"""docs/add-a-job-type.md, followed to the letter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opsconsole.core.effects import Effects
from opsconsole.jobs.errors import JobPayloadInvalid
from opsconsole.jobs.kinds import kind_named, kinds
from opsconsole.jobs.models import Job, JobState
from opsconsole.jobs.services import enqueue
from tests.jobs.server import TestServer, answers, hangs_up, status
from tests.jobs.steps import dispatch, letter_of, run

pytestmark = pytest.mark.django_db
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "add-a-job-type.md").read_text()
MODULE, SETTING, WRITING = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
LONGEST = 40


@pytest.fixture
def module(tmp_path: Path) -> Path:
    """The page's kind as the module that the page names."""
    (tmp_path / "warehouse_jobs.py").write_text(MODULE)
    return tmp_path


@pytest.fixture
def registered(
    module: Path, server: TestServer, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TestServer]:
    """The page's kind in this process, and the warehouse that it tells."""
    monkeypatch.syspath_prepend(str(module))
    said: dict[str, Any] = {}
    exec(SETTING, said)
    settings.OPSCONSOLE_JOB_KINDS = [*settings.OPSCONSOLE_JOB_KINDS, *said["OPSCONSOLE_JOB_KINDS"]]
    settings.WAREHOUSE_URL = server.url("/orders")
    settings.OPSCONSOLE_WEBHOOK_PROBES = [settings.WAREHOUSE_URL]
    kinds.cache_clear()
    yield server
    kinds.cache_clear()
    sys.modules.pop("warehouse_jobs", None)


def write() -> Job:
    """Write a job as the page does."""
    found: dict[str, Any] = {}
    exec(WRITING, found)
    job: Job = found["job"]
    return job


def test_a_kind_is_short() -> None:
    assert len(MODULE.splitlines()) < LONGEST


def test_its_job_is_written_run_and_done(registered: TestServer) -> None:
    registered.on("/orders", status(202))
    job = write()
    assert run(job, dispatch(job)) is None
    job.refresh_from_db()
    assert job.state == JobState.SUCCEEDED
    [asked] = registered.asked
    assert asked.document == {"order": 7}
    assert asked.headers["webhook-id"] == str(job.id)


def test_its_payload_is_checked_when_it_is_written(registered: TestServer) -> None:
    with pytest.raises(JobPayloadInvalid, match="order is the number of an order"):
        enqueue(kind="release_order", tenant="default", payload={"order": "seven"})


def test_what_may_have_happened_is_a_letter_and_the_probe_says_what_did(registered: TestServer) -> None:
    """C13."""
    registered.on("/orders", hangs_up)
    job = write()
    run(job, dispatch(job))
    assert letter_of(job).outcome_class == "ambiguous"
    registered.on(f"/orders/{job.id}", answers({"status": "done"}))
    kind = kind_named("release_order")
    assert kind.effects is Effects.OUTSIDE
    assert kind.has_probe
    assert kind.probe(job).happened is True


@pytest.mark.once
def test_a_worker_serves_it_once_the_setting_names_it(module: Path) -> None:
    script = "import django; django.setup(); from opsconsole.celery import app; app.loader.import_default_modules();"
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "opsconsole.settings.base",
        "OPSCONSOLE_JOB_KINDS": "warehouse_jobs",
        "OPSCONSOLE_VAR_DIR": str(module / "var"),
        "PYTHONPATH": os.pathsep.join([str(module), str(ROOT)]),
    }
    served = subprocess.run(
        [sys.executable, "-c", f"{script} print([name for name in app.tasks if 'release' in name])"],
        env=environment, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert served.stdout.strip() == "['opsconsole.jobs.release_order']"
