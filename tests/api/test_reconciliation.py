"""Sweeps over REST: running one, and reading what it did."""

from __future__ import annotations

import pytest

from grants.actions import Action
from grants.operators import SYSTEM
from opsconsole.jobs.models import EvidenceRequest
from repairs.models import ReconciliationRun
from repairs.reconciliation.runs import begin_run
from tests.api.client import Api, problem
from tests.cast import Cast, give, make_operator
from tests.repairs.reconciliation.rows import fetching, sweep

pytestmark = pytest.mark.django_db


def test_a_sweep_is_run_and_answered_with_its_counts(ada: Api) -> None:
    """A13, A14: at most ``limit``, oldest first."""
    fetching(400, 3)
    answer = ada.post("reconciliation-runs", {"kind": "stale_leases", "limit": 2})
    assert answer.status_code == 201, answer.content
    run = answer.json()["run"]
    assert (run["state"], run["scanned_count"], run["repaired_count"], run["skipped_count"]) == ("succeeded", 2, 2, 0)
    assert (run["limit"], run["started_by_name"]) == (2, "ada")
    assert answer["Location"] == f"/api/v1/reconciliation-runs/{run['id']}"
    assert ada.get(f"reconciliation-runs/{run['id']}").json() == run
    rows = ada.rows(f"reconciliation-runs/{run['id']}/repairs")
    assert [row["action_type"] for row in rows] == ["release_stale_lease"] * 2
    assert rows[0]["before"]["state"] == "fetching"
    assert rows[0]["after"]["code"] == "stale_fetch_lease_recovered"


def test_the_same_key_runs_once(ada: Api) -> None:
    """A9."""
    body = {"kind": "stale_leases"}
    first = ada.post("reconciliation-runs", body, key="K1")
    fetching(400)
    again = ada.post("reconciliation-runs", body, key="K1")
    assert again["Idempotent-Replayed"] == "true"
    assert again.json() == {**first.json(), "idempotent_replay": True}
    assert EvidenceRequest.objects.get().state == "fetching"
    problem(ada.post("reconciliation-runs", {**body, "limit": 5}, key="K1"), 409, "idempotency_key_reused")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"kind": "Stale-Leases"}, 400, "reconciliation_kind_invalid"),
        ({"kind": ""}, 400, "reconciliation_kind_invalid"),
        ({"kind": "nothing_of_ours"}, 400, "reconciliation_kind_unknown"),
    ],
)
def test_what_is_no_kind_is_refused(body: dict[str, str], status: int, code: str, ada: Api) -> None:
    """A13."""
    problem(ada.post("reconciliation-runs", body), status, code)
    assert not ReconciliationRun.objects.exists()


@pytest.mark.parametrize("limit", [0, 201, "5", 1.5])
def test_a_limit_that_is_none_is_named(limit: object, ada: Api) -> None:
    """A14."""
    answer = ada.post("reconciliation-runs", {"kind": "stale_leases", "limit": limit})
    assert answer.status_code == 400
    assert answer.json()["errors"][0]["pointer"] == "/limit"


def test_one_that_runs_already_is_said(ada: Api) -> None:
    begin_run(kind="stale_leases", by=SYSTEM)
    problem(ada.post("reconciliation-runs", {"kind": "stale_leases"}), 409, "reconciliation_already_running")


def test_runs_are_listed_newest_first_by_kind_and_state(ada: Api) -> None:
    for kind in ("retention", "stale_leases", "retention"):
        sweep(kind)
    begin_run(kind="closed_letters", by=SYSTEM)
    kinds = [row["kind"] for row in ada.rows("reconciliation-runs")]
    assert kinds == ["closed_letters", "retention", "stale_leases", "retention"]
    assert len(ada.rows("reconciliation-runs", {"kind": "retention"})) == 2
    assert [row["kind"] for row in ada.rows("reconciliation-runs", {"state": "running,failed"})] == ["closed_letters"]
    page = ada.get("reconciliation-runs", {"limit": 3}).json()
    rest = ada.client.get(page["next"]).json()["results"]
    assert [row["kind"] for row in [*page["results"], *rest]] == kinds


def test_what_a_sweep_changed_is_shown_tenant_by_tenant(cast: Cast, ada: Api) -> None:
    """GRA-02: the counts are everybody's, the rows are not."""
    fetching(400, 2)
    fetching(400, tenant="t-b")
    run = sweep("stale_leases")
    seen = {name: Api(who).rows(f"reconciliation-runs/{run.id}/repairs") for name, who in (
        ("ada", cast.ada), ("olga", cast.olga), ("bram", cast.bram),
    )}  # fmt: skip
    assert {name: len(rows) for name, rows in seen.items()} == {"ada": 3, "olga": 2, "bram": 1}
    problem(ada.get("reconciliation-runs/01890000-0000-7000-8000-000000000000"), 404, "reconciliation_run_not_found")


def test_a_grant_over_one_tenant_does_not_run_a_sweep() -> None:
    """B1: a sweep touches every tenant."""
    half = make_operator("half")
    give(half, Action.INSPECT, Action.RECONCILIATION_RUN, tenant="default")
    problem(Api(half).post("reconciliation-runs", {"kind": "stale_leases"}), 403, "access_denied")
