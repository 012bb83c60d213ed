"""``manage.py reconcile``: one sweep, all of them, and the loop that needs no beat."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django_celery_beat.models import PeriodicTask

from grants.models import AuditEvent
from grants.operators import SYSTEM
from opsconsole.jobs.models import EvidenceRequest
from opsconsole.management.commands import reconcile
from repairs.models import ReconciliationRun
from repairs.reconciliation import sweeps
from repairs.reconciliation.kinds import KINDS
from repairs.reconciliation.runs import begin_run
from tests.cast import Cast
from tests.repairs.reconciliation.rows import fetching

pytestmark = pytest.mark.django_db


def run(*words: str) -> str:
    out = io.StringIO()
    call_command("reconcile", *words, stdout=out)
    return out.getvalue()


def refused(*words: str) -> str:
    said = io.StringIO()
    with pytest.raises(SystemExit) as ended:
        call_command("reconcile", *words, stderr=said)
    assert ended.value.code == 1
    return said.getvalue()


def test_a_sweep_runs_as_the_system_and_says_what_it_did() -> None:
    fetching(400, 3)
    said = run("stale_leases", "--limit", "2")
    assert "stale_leases: succeeded, looked at 2, repaired 2, left alone 0" in said
    assert ReconciliationRun.objects.get().started_by == "system:system"


def test_all_sweeps_in_json_are_those_of_the_api() -> None:
    fetching(400)
    found = json.loads(run("--all", "--json"))["results"]
    assert [one["kind"] for one in found] == list(KINDS)
    assert found[0]["repaired_count"] == 1
    assert {"state", "scanned_count", "skipped_count", "incident_count", "error_code"} <= set(found[0])


def test_a_person_runs_it_with_their_own_permission(cast: Cast) -> None:
    run("--all", "--operator", "ada", "--key", "k")
    assert ReconciliationRun.objects.filter(started_by__startswith="cli:").count() == len(KINDS)
    assert AuditEvent.objects.filter(action="operations.reconciliation_started").count() == len(KINDS)
    run("--all", "--operator", "ada", "--key", "k")
    assert ReconciliationRun.objects.count() == len(KINDS)


def test_who_may_not_is_refused(cast: Cast) -> None:
    assert "access_denied" in refused("stale_leases", "--operator", "olga")
    assert not ReconciliationRun.objects.exists()


def test_a_kind_that_is_none_is_refused() -> None:
    """A13."""
    assert "reconciliation_kind_invalid" in refused("Stale-Leases")
    document = json.loads(refused("nothing_of_ours", "--json"))
    assert document["code"] == "reconciliation_kind_unknown"


@pytest.mark.parametrize("words", [[], ["stale_leases", "--all"], ["stale_leases", "--limit", "0"], ["--limit", "x"]])
def test_misuse_is_told(words: list[str]) -> None:
    with pytest.raises(CommandError):
        run(*words)


def test_one_that_is_running_already_is_no_error() -> None:
    begin_run(kind="stale_leases", by=SYSTEM)
    assert run("stale_leases").strip() == "stale_leases: already running"


def test_a_sweep_that_failed_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_sweeping: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setitem(sweeps.PARTS, "retention", (broken,))
    with pytest.raises(CommandError, match="retention"):
        run("retention")


@pytest.mark.django_db(transaction=True)
def test_the_loop_sweeps_by_the_schedule_and_ends_cleanly_at_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without beat; what is off is not run, and what was under way is finished."""
    monkeypatch.setattr(reconcile, "PAUSE_SECONDS", 0.05)
    PeriodicTask.objects.filter(name="opsconsole: retention").update(enabled=False)
    fetching(400)

    def stop() -> None:
        deadline = time.monotonic() + 30
        while (
            time.monotonic() < deadline and ReconciliationRun.objects.filter(state="succeeded").count() < len(KINDS) - 1
        ):
            time.sleep(0.05)
        from django.db import connection

        connection.close()
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    stopper = threading.Thread(target=stop)
    stopper.start()
    said = run("--loop")
    stopper.join()
    assert signal.getsignal(signal.SIGTERM) is before
    assert set(ReconciliationRun.objects.values_list("kind", flat=True)) == set(KINDS) - {"retention"}
    assert set(ReconciliationRun.objects.values_list("state", flat=True)) == {"succeeded"}
    assert EvidenceRequest.objects.get().state == "pending"
    assert "stale_leases: succeeded" in said
