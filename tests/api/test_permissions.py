"""Every route in four hands: a stranger's, and an operator's with no grant, one for another tenant, the right one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
from django.urls import get_resolver, reverse

from grants.actions import Action
from grants.models import AuditEvent, ScopeUserGrant
from opsconsole.core.database import database_now
from opsconsole.core.rest import API_NAMESPACE
from repairs.models import Redrive, RedriveItem
from repairs.reconciliation.running import run_scheduled
from tests.api.client import Api, problem
from tests.api.situations import Scene, held_letter, placed_hold, planned_redrive, scene, worker_node
from tests.cast import Cast, give, make_operator
from tests.factories import dead_letter

OPEN_TO_ALL = {"schema", "docs", "unknown"}
"""They say what the code says, and nothing of what is stored."""


@dataclass(frozen=True)
class Four:
    """What a route answers without a grant, with one elsewhere, and with the right one; 401 goes without saying."""

    ids: Callable[[Scene], dict[str, Any]]
    without: int
    elsewhere: int
    right: int
    body: Callable[[Scene], dict[str, Any]] = lambda _: {}


def incident(scene: Scene) -> dict[str, Any]:
    return {"incident_id": scene.incident.id}


def letter(scene: Scene) -> dict[str, Any]:
    return {"letter_id": scene.letter.id}


def repair(scene: Scene) -> dict[str, Any]:
    return {"repair_id": scene.repair_id}


def batch(scene: Scene) -> dict[str, Any]:
    return {"batch_id": scene.batch_id}


def ledger_job(scene: Scene) -> dict[str, Any]:
    return {"job_id": scene.job_id}


def sweep(_: Scene) -> dict[str, Any]:
    run = run_scheduled("retention")
    assert run is not None
    return {"run_id": run.id}


def redrive(scene: Scene, **standing: Any) -> dict[str, Any]:
    if standing:
        Redrive.objects.filter(id=scene.redrive_id).update(**standing)
    return {"redrive_id": scene.redrive_id}


def big_redrive(scene: Scene) -> dict[str, Any]:
    return redrive(scene, needs_approval=True, planned_by="person:0", planned_by_user="0")


def running_redrive(scene: Scene) -> dict[str, Any]:
    return redrive(scene, state="running")


def paused_redrive(scene: Scene) -> dict[str, Any]:
    return redrive(scene, state="paused", pause_code="operator")


def failed_redrive(scene: Scene) -> dict[str, Any]:
    RedriveItem.objects.filter(redrive_id=scene.redrive_id).update(state="failed")
    ended = {"state": "finished", "ended_at": database_now(), "waiting_count": 0, "failed_count": 1}
    return redrive(scene, pause_code="", **ended)


def hold(scene: Scene) -> dict[str, Any]:
    return {"hold_id": scene.hold_id}


def end_of_hold(_: Scene) -> dict[str, Any]:
    return {"reason": "later", "ends_at": (database_now() + timedelta(hours=2)).isoformat()}


def nothing(_: Scene) -> dict[str, Any]:
    return {}


def newest_grant(_: Scene) -> dict[str, Any]:
    return {"grant_id": str(ScopeUserGrant.objects.get(user__username="pupil"))}


FOURS: dict[tuple[str, str], Four] = {
    # Lists show what one may see, and name no scope here: an empty one is no refusal.
    ("GET", "incidents"): Four(nothing, 200, 200, 200),
    ("GET", "dead-letters"): Four(nothing, 200, 200, 200),
    ("GET", "repair-actions"): Four(nothing, 200, 200, 200),
    ("GET", "jobs"): Four(nothing, 200, 200, 200),
    ("GET", "grants"): Four(nothing, 200, 200, 200),
    # Of what belongs to no tenant, of the trail and of the whole one must be allowed some part at least.
    ("GET", "snapshot"): Four(nothing, 403, 200, 200),
    ("GET", "worker-nodes"): Four(nothing, 403, 200, 200),
    ("GET", "reconciliation-runs"): Four(nothing, 403, 200, 200),
    ("GET", "reconciliation-run"): Four(sweep, 403, 200, 200),
    ("GET", "reconciliation-run-repairs"): Four(sweep, 403, 200, 200),
    ("GET", "audit"): Four(nothing, 403, 403, 200),
    # One of every tenant is known to whoever may inspect anything.
    ("GET", "holds"): Four(nothing, 403, 200, 200),
    # About oneself.
    ("GET", "me"): Four(nothing, 200, 200, 200),
    ("POST", "authorize"): Four(nothing, 200, 200, 200, lambda _: {"action": "inspect", "tenant": "default"}),
    # By an opaque id.
    ("GET", "incident"): Four(incident, 404, 404, 200),
    ("GET", "incident-letters"): Four(incident, 404, 404, 200),
    ("GET", "incident-timeline"): Four(incident, 404, 404, 200),
    ("POST", "incident-acknowledge"): Four(incident, 404, 404, 200),
    ("POST", "incident-release"): Four(incident, 404, 404, 200),
    ("POST", "incident-resolve"): Four(
        incident, 404, 404, 200, lambda _: {"code": "fixed", "summary": "It is fixed.", "unrepaired": 1}
    ),
    ("POST", "incident-retry"): Four(incident, 404, 404, 202, lambda _: {"all": True, "expected_count": 1}),
    ("GET", "dead-letter"): Four(letter, 404, 404, 200),
    ("GET", "dead-letter-payload"): Four(letter, 404, 404, 200),
    ("POST", "dead-letter-retry"): Four(letter, 404, 404, 202),
    ("POST", "dead-letter-close-as-done"): Four(letter, 404, 404, 200, lambda _: {"reason": "It was there."}),
    ("POST", "dead-letter-discard"): Four(letter, 404, 404, 200, lambda _: {"reason": "Nobody needs it."}),
    ("GET", "job"): Four(ledger_job, 404, 404, 200),
    ("GET", "job-payload"): Four(ledger_job, 404, 404, 200),
    ("GET", "repair-action"): Four(repair, 404, 404, 200),
    ("POST", "repair-action-cancel"): Four(repair, 404, 404, 200),
    ("GET", "repair-batch"): Four(batch, 404, 404, 200),
    ("GET", "redrives"): Four(nothing, 200, 200, 200),
    ("POST", "redrives"): Four(nothing, 404, 404, 201, lambda scene: {"letters": [str(scene.letter.id)]}),
    ("GET", "redrive"): Four(redrive, 404, 404, 200),
    ("GET", "redrive-items"): Four(redrive, 404, 404, 200),
    ("POST", "redrive-approve"): Four(big_redrive, 404, 404, 200),
    ("POST", "redrive-start"): Four(redrive, 404, 404, 202),
    ("POST", "redrive-pause"): Four(running_redrive, 404, 404, 200),
    ("POST", "redrive-resume"): Four(paused_redrive, 404, 404, 202),
    ("POST", "redrive-cancel"): Four(redrive, 404, 404, 200),
    ("POST", "redrive-retry-failed"): Four(failed_redrive, 404, 404, 201),
    ("GET", "hold"): Four(hold, 404, 404, 200),
    ("POST", "hold-extend"): Four(hold, 404, 404, 200, end_of_hold),
    ("POST", "hold-end"): Four(hold, 404, 404, 200, lambda _: {"reason": "It is mended."}),
    ("POST", "hold-release"): Four(hold, 404, 404, 201),
    # A sweep touches every tenant.
    ("POST", "reconciliation-runs"): Four(nothing, 403, 403, 201, lambda _: {"kind": "stale_leases"}),
    # The scope is named in the body.
    ("POST", "holds"): Four(
        nothing, 403, 403, 201, lambda scene: {"tenant": "default", "queue": "celery", **end_of_hold(scene)}
    ),
    # The scope is named in the body, or the grant is one that cannot be managed.
    ("POST", "grants"): Four(
        nothing, 403, 403, 201,
        lambda _: {
            "user": "pupil", "action": "inspect", "tenant": "default", "reason": "on call",
            "expires_at": "2100-01-01T00:00:00Z",
        },
    ),
    ("POST", "grant-revoke"): Four(newest_grant, 404, 404, 200, lambda _: {"reason": "no longer on call"}),
}  # fmt: skip


def routes() -> set[tuple[str, str]]:
    """Return method and name of every route of the API, read from the URLconf."""
    _, resolver = get_resolver().namespace_dict[API_NAMESPACE]
    found = set()
    for pattern in resolver.url_patterns:
        if pattern.name not in OPEN_TO_ALL:
            methods = {"get", "post", "put", "patch", "delete"} & set(dir(pattern.callback.cls))
            found |= {(method.upper(), pattern.name) for method in methods}
    return found


def test_every_route_of_the_api_stands_in_the_table_of_fours() -> None:
    assert routes() == set(FOURS)


@pytest.fixture
def the_scene(cast: Cast) -> Scene:
    pupil = make_operator("pupil")
    give(pupil, Action.INSPECT, tenant="default")
    worker_node()
    redriven = dead_letter(task="shop.redriven")
    redrive_id, hold_id = planned_redrive(cast.ada, redriven), placed_hold(cast.ada)
    held_letter(hold_id)
    return replace(scene(cast.ada), redriven=redriven, redrive_id=redrive_id, hold_id=hold_id)


def send(api: Api, route: tuple[str, str], four: Four, the_scene: Scene) -> Any:
    method, name = route
    path = reverse(f"{API_NAMESPACE}:{name}", kwargs=four.ids(the_scene))
    return api.get(path) if method == "GET" else api.post(path, four.body(the_scene))


def refused_ones(api: Api, the_scene: Scene, expected: Callable[[Four], int]) -> dict[tuple[str, str], Any]:
    """Send every route's request; return the answers, once their statuses are as expected and their lists empty."""
    answers = {route: send(api, route, four, the_scene) for route, four in FOURS.items()}
    statuses = {route: answer.status_code for route, answer in answers.items()}
    assert statuses == {route: expected(four) for route, four in FOURS.items()}
    for answer in answers.values():
        if answer.status_code < 300:
            assert str(the_scene.letter.id) not in answer.content.decode()
            assert str(the_scene.incident.id) not in answer.content.decode()
            assert str(the_scene.job_id) not in answer.content.decode()
            assert str(the_scene.redrive_id) not in answer.content.decode()
            assert str(the_scene.hold_id) not in answer.content.decode()
    the_scene.letter.refresh_from_db()
    assert the_scene.letter.state == "open"
    return answers


def denials(who: str) -> set[tuple[str, str]]:
    """Return action and target type of what somebody was refused, as the trail has it."""
    rows = AuditEvent.objects.filter(operator_name=who, verdict="denied")
    assert {(row.capability, row.outcome) for row in rows} == {("", '"denied"')}
    return {(row.action, row.target_type) for row in rows}


BY_ID = {
    ("inspect", "incident"),
    ("inspect", "dead_letter"),
    ("inspect", "job"),
    ("inspect", "repair_action"),
    ("inspect", "repair_batch"),
    ("incidents.acknowledge", "incident"),
    ("incidents.resolve", "incident"),
    ("dead-letters.retry", "incident"),
    ("dead-letters.retry", "dead_letter"),
    ("dead-letters.retry", "repair_action"),
    ("dead-letters.discard", "dead_letter"),
    ("payloads.read", "dead_letter"),
    ("payloads.read", "job"),
    ("inspect", "redrive"),
    ("redrive.run", "redrive"),
    ("inspect", "hold"),
    ("dead-letters.hold", "hold"),
    ("grants.manage", "user"),
    ("grants.manage", "grant"),
    ("audit.read", ""),
    ("reconciliation.run", "reconciliation_run"),
}


def test_a_stranger_is_asked_to_authenticate_and_not_audited(the_scene: Scene, stranger: Api) -> None:
    """B2: 401, not audited."""
    before = AuditEvent.objects.count()
    for answer in refused_ones(stranger, the_scene, lambda _: 401).values():
        problem(answer, 401, "not_authenticated")
        assert answer["WWW-Authenticate"].startswith("Bearer")
    assert AuditEvent.objects.count() == before


def test_an_operator_without_a_grant_gets_nothing_and_each_refusal_is_audited(the_scene: Scene, nobody: Api) -> None:
    """B2: denied, with no capability, nothing changed. GRA-01."""
    refused_ones(nobody, the_scene, lambda four: four.without)
    assert denials("nobody") == BY_ID | {("inspect", "")}


def test_a_grant_for_another_tenant_gives_nothing_and_each_refusal_is_audited(the_scene: Scene, bram: Api) -> None:
    """B7, GRA-02: 404 by id, whatever the method."""
    refused_ones(bram, the_scene, lambda four: four.elsewhere)
    assert denials("bram") == BY_ID


@pytest.mark.parametrize("route", FOURS, ids=lambda route: "-".join(route))
def test_the_right_grant_gives_what_it_says(route: tuple[str, str], the_scene: Scene, ada: Api) -> None:
    answer = send(ada, route, FOURS[route], the_scene)
    assert answer.status_code == FOURS[route].right, answer.content
