"""GET snapshot: its shape, whose it is, and its entity tag."""

from __future__ import annotations

import pytest

from opsconsole.jobs.models import SurgeState
from tests.api.client import Api, problem
from tests.cast import Cast
from tests.factories import dead_letter
from tests.jobs.rows import action, job, run

pytestmark = pytest.mark.django_db

NOTHING = {"total": 0, "pending": 0, "in_flight": 0, "retrying": 0, "terminally_failed": 0, "oldest_due_at": None}


def test_empty_tables_give_zeros_and_nulls(ada: Api) -> None:
    """A7."""
    document = ada.get("snapshot").json()
    assert document.pop("generated_at").endswith("Z")
    assert document == {
        **dict.fromkeys(("routing", "actions", "notifications", "emails"), NOTHING),
        "workflows": {"total": 0, "active": 0, "repair_required": 0, "failed": 0, "oldest_active_at": None},
        "evidence": {"total": 0, "pending": 0, "fetching": 0, "unavailable": 0, "oldest_active_at": None},
        "budgets": {"active_policies": 0, "active_reservations": 0, "consumed_units": 0, "next_expiry_at": None},
        "incidents": {"open": 0, "acknowledged": 0, "high_priority": 0},
        "intake_surge": {"mode": "normal", "tenants": []},
        "unresolved_letters": [],
        "failed_deliveries": [],
    }


def test_it_tells_what_one_may_inspect(cast: Cast, ada: Api, olga: Api, bram: Api) -> None:
    """A7, GRA-01."""
    ours = dead_letter()
    dead_letter(tenant="t-b", task="shop.other")
    made = job("running")
    job(tenant="t-b")
    sent = action("failed", last_error_code="refused")
    run("repair_required")
    document = olga.get("snapshot").json()
    assert document["routing"] == {**NOTHING, "total": 1, "in_flight": 1}
    assert document["workflows"]["repair_required"] == 1
    assert document["incidents"] == {"open": 1, "acknowledged": 0, "high_priority": 1}
    assert [one["id"] for one in document["unresolved_letters"]] == [str(ours.id)]
    assert [(one["report_reference"], one["error_code"]) for one in document["failed_deliveries"]] == [
        (sent.report.reference, "refused")
    ]
    assert bram.get("snapshot").json()["routing"]["pending"] == 1
    assert ada.get("snapshot").json()["routing"]["total"] == 2
    assert ada.get("snapshot", {"tenant": made.tenant}).json()["routing"]["total"] == 1


def test_a_tenant_that_is_named_is_authorised_before_anything_is_looked_up(olga: Api, nobody: Api, ada: Api) -> None:
    """DESIGN 7."""
    assert olga.get("snapshot", {"tenant": "default"}).status_code == 200
    for tenant in ("t-b", "no-such", "*"):
        problem(olga.get("snapshot", {"tenant": tenant}), 403, "access_denied")
    problem(nobody.get("snapshot"), 403, "access_denied")
    assert ada.get("snapshot", {"tenant": "*"}).status_code == 200


@pytest.mark.parametrize("query", ["tenant=", "tenat=default", "limit=5", "tenant=a&tenant=b"])
def test_a_query_that_is_not_understood_is_refused_by_name(ada: Api, query: str) -> None:
    """API-03."""
    document = problem(ada.client.get(f"/api/v1/snapshot?{query}"), 400, "invalid_input")
    assert [error["parameter"] for error in document["errors"]] == [query.partition("=")[0]]


def test_its_entity_tag_lasts_until_something_but_the_clock_moves_on(ada: Api, olga: Api) -> None:
    first = ada.get("snapshot")
    tag = first["ETag"]
    assert tag.startswith('W/"')
    again = ada.get("snapshot", If_None_Match=tag)
    assert (again.status_code, again.content, again["ETag"]) == (304, b"", tag)
    SurgeState.objects.create(tenant="t-b", mode="surge", updated_at="2026-12-01T00:00:00Z")
    changed = ada.get("snapshot", If_None_Match=tag)
    assert changed.status_code == 200
    assert changed["ETag"] != tag
    assert olga.get("snapshot", If_None_Match=tag).status_code == 304, "nothing of it is olga's"
