"""Sweeps in the console: their list and pages, running one, changing the schedule, and the banner on every page."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django_celery_beat.models import PeriodicTask

from grants.actions import Action
from grants.models import AuditEvent
from incidents.models import Incident
from incidents.services import resolve_incident
from opsconsole.jobs.models import EvidenceRequest
from repairs.models import ReconciliationRun, SeededEntry
from repairs.reconciliation import sweeps
from tests.admin.conftest import SignIn
from tests.admin.tools import confirm, text_of
from tests.cast import Cast, give
from tests.factories import dead_letter
from tests.repairs.reconciliation.rows import ago, fetching, sweep

pytestmark = pytest.mark.django_db(transaction=True)


def test_the_list_says_what_ran_and_what_it_found(cast: Cast, sign_in: SignIn) -> None:
    fetching(400, 3)
    sweep("stale_leases")
    text = text_of(sign_in(cast.vera).get("/ops/sweeps/").content.decode())
    assert "Stale leases Succeeded 3 3 0 0" in text
    assert "system" in text
    assert "Run now" not in text, "vera may look only"


def test_a_page_shows_what_was_changed_of_the_tenants_one_may_see(cast: Cast, sign_in: SignIn) -> None:
    """GRA-02."""
    (mine,) = fetching(400)
    (other,) = fetching(400, tenant="t-b")
    run = sweep("stale_leases")
    text = text_of(sign_in(cast.olga).get(f"/ops/sweeps/{run.id}/").content.decode())
    assert f"Stale lease given back: evidence_fetch_request {mine.id} of default" in text
    assert str(other.id) not in text
    assert "Repaired 2" in text


def test_a_page_says_why_a_sweep_failed_as_text(cast: Cast, sign_in: SignIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-01."""

    def broken(_sweeping: object) -> None:
        raise RuntimeError("<script>alert(1)</script>\u202e")

    monkeypatch.setitem(sweeps.PARTS, "retention", (broken,))
    run = sweep("retention")
    page = sign_in(cast.vera).get(f"/ops/sweeps/{run.id}/").content.decode()
    assert "<script>alert" not in page
    assert "sweep_failed" in page
    assert "Failed" in text_of(page)


def test_who_may_runs_a_sweep_in_two_clicks(cast: Cast, sign_in: SignIn) -> None:
    fetching(400, 2)
    client = sign_in(cast.ada)
    assert "Run now" in text_of(client.get("/ops/sweeps/").content.decode())
    answer = confirm(client, "/ops/sweeps/run/?kind=stale_leases", {"kind": "stale_leases"}, follow=True)
    run = ReconciliationRun.objects.get()
    assert answer.redirect_chain == [(f"/ops/sweeps/{run.id}/", 302)]
    assert "Stale leases: 2 looked at, 2 repaired." in text_of(answer.content.decode())
    assert (run.started_by, run.repaired_count) == (cast.ada.ref, 2)
    assert AuditEvent.objects.filter(action="operations.reconciliation_started", operator_name="ada").count() == 1


def test_a_form_sent_twice_runs_once(cast: Cast, sign_in: SignIn) -> None:
    """A9."""
    client = sign_in(cast.ada)
    fields = {"kind": "stale_leases", "idempotency_key": "K1"}
    client.post("/ops/sweeps/run/", fields)
    fetching(400)
    text = text_of(client.post("/ops/sweeps/run/", fields, follow=True).content.decode())
    assert "that was done before" in text
    assert ReconciliationRun.objects.count() == 1
    assert EvidenceRequest.objects.get().state == "fetching"


def test_one_that_is_running_already_is_said_and_nothing_started(cast: Cast, sign_in: SignIn) -> None:
    """A13."""
    from grants.operators import SYSTEM
    from repairs.reconciliation.runs import begin_run

    begin_run(kind="retention", by=SYSTEM)
    answer = confirm(sign_in(cast.ada), "/ops/sweeps/run/", {"kind": "retention"})
    assert answer.status_code == 409
    assert "A sweep of retention is already running" in text_of(answer.content.decode())


@pytest.mark.parametrize("kind", ["", "nothing_of_ours"])
def test_a_form_without_a_sweep_of_ours_comes_back(kind: str, cast: Cast, sign_in: SignIn) -> None:
    assert confirm(sign_in(cast.ada), "/ops/sweeps/run/", {"kind": kind}).status_code == 400
    assert not ReconciliationRun.objects.exists()


def test_who_holds_it_for_one_tenant_may_not(cast: Cast, sign_in: SignIn) -> None:
    """B1: a sweep touches every tenant; the button is not there, and the address is refused."""
    give(cast.olga, Action.RECONCILIATION_RUN, tenant="default")
    client = sign_in(cast.olga)
    assert "Run now" not in text_of(client.get("/ops/sweeps/").content.decode())
    assert client.get("/ops/sweeps/run/").status_code == 403
    assert client.post("/ops/sweeps/run/", {"kind": "retention", "idempotency_key": "k"}).status_code == 403


# The schedule


def test_the_schedule_of_a_sweep_is_changed_from_its_page(cast: Cast, sign_in: SignIn) -> None:
    entry = PeriodicTask.objects.get(name="opsconsole: stale leases")
    client = sign_in(cast.ada)
    assert f"/ops/schedule/{entry.pk}/" in client.get("/ops/schedule/").content.decode()
    page = f"/ops/schedule/{entry.pk}/"
    answer = confirm(client, page, {"seconds": "90", "is_on": "on"}, follow=True)
    assert "Stale leases runs every 90 s." in text_of(answer.content.decode())
    answer = confirm(client, page, {"seconds": "90"}, follow=True)
    assert "Stale leases is off." in text_of(answer.content.decode())
    entry.refresh_from_db()
    assert (entry.interval.every, entry.enabled) == (90, False)
    assert AuditEvent.objects.filter(action="operations.reconciliation_schedule_changed").count() == 2
    assert confirm(client, page, {"seconds": "5"}).status_code == 400


def test_what_the_console_has_not_made_is_not_changed_here(cast: Cast, sign_in: SignIn) -> None:
    interval = PeriodicTask.objects.get(name="opsconsole: retention").interval
    foreign = PeriodicTask.objects.create(name="theirs", task="shop.sweep", interval=interval)
    client = sign_in(cast.ada)
    assert f"/ops/schedule/{foreign.pk}/" not in client.get("/ops/schedule/").content.decode()
    assert client.get(f"/ops/schedule/{foreign.pk}/").status_code == 404


# The banner


@pytest.mark.parametrize("path", ["/ops/", "/ops/incidents/", "/ops/sweeps/", "/ops/permissions/"])
def test_every_page_says_when_no_sweep_has_finished_for_five_minutes(path: str, cast: Cast, sign_in: SignIn) -> None:
    sweep("retention")
    ReconciliationRun.objects.update(finished_at=ago(301))
    text = text_of(sign_in(cast.vera).get(path).content.decode())
    assert "No sweep has finished since" in text
    assert "manage.py reconcile --loop" in text


def test_no_page_says_so_while_sweeps_finish(cast: Cast, sign_in: SignIn) -> None:
    run = sweep("retention")
    text = text_of(sign_in(cast.vera).get("/ops/").content.decode())
    assert "No sweep has finished" not in text
    assert run.finished_at is not None
    assert re.search(rf"Last sweep {run.finished_at:%d %b %Y %H:%M:%S}", text) or "No worker reports" in text


def test_a_console_in_which_none_ever_ran_says_so(cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.vera)
    assert "No sweep has finished" not in text_of(client.get("/ops/").content.decode())
    SeededEntry._default_manager.update(created_at=ago(301))
    from opsconsole.console import machinery

    machinery.forget()
    assert "No sweep has finished yet." in text_of(client.get("/ops/").content.decode())


def test_the_page_of_a_closed_job_says_until_when_its_message_is_kept(cast: Cast, sign_in: SignIn) -> None:
    """DESIGN 9: so long it can still be retried."""
    letter = dead_letter()
    client = sign_in(cast.vera)
    page = f"/ops/dead-letters/{letter.id}/"
    assert "Message kept until" not in text_of(client.get(page).content.decode())
    resolve_incident(
        incident_id=letter.incident_id, by=cast.ada, key="k", code="loss_accepted", summary="by hand", unrepaired=1
    )
    resolved_at = Incident.objects.get().resolved_at
    assert resolved_at is not None
    until = resolved_at + timedelta(days=30)
    assert f"Message kept until {until:%d %b %Y %H:%M:%S}" in text_of(client.get(page).content.decode())
