"""Holds over REST: what is held, and how what was put aside is sent on."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from deadletters.models import DeadLetter, Hold
from grants.actions import Action
from grants.models import AuditEvent, ScopeUserGrant
from opsconsole.core.database import database_now
from repairs import releases
from repairs.models import Redrive
from repairs.redrives.services import start_redrive
from tests.api.client import Api, problem
from tests.api.situations import held_letter, placed_hold
from tests.cast import Cast, give
from tests.factories import dead_letter
from tests.repairs.redrives.work import counted, outstanding, sent, step, succeed, worker


def ahead(**length: float) -> str:
    return (database_now() + timedelta(**length)).isoformat()


def asked(**fields: Any) -> dict[str, Any]:
    return {"tenant": "default", "reason": "a template is broken", "ends_at": ahead(hours=1), **fields}


def test_a_hold_is_placed_looked_at_moved_and_ended(ada: Api) -> None:
    placed = ada.post("holds", asked(job_type="shop.send_mail"))
    assert placed.status_code == 201, placed.content
    path = f"holds/{placed.json()['hold_id']}"
    assert placed["Location"] == f"/api/v1/{path}"
    shown = ada.get(path).json()
    assert (shown["job_type"], shown["state"], shown["held_count"], shown["incidents"]) == (
        "shop.send_mail", "active", 0, [],
    )  # fmt: skip
    assert [row["id"] for row in ada.rows("holds", {"tenant": "default", "state": "active"})] == [shown["id"]]
    later = ahead(hours=5)
    assert ada.post(f"{path}/extend", {"ends_at": later, "reason": "longer"}).status_code == 200
    assert ada.post(f"{path}/end", {"reason": "mended"}).json()["state"] == "ended"
    problem(ada.post(f"{path}/end", {"reason": "again"}), 409, "hold_not_active")
    problem(ada.post(f"{path}/extend", {"ends_at": later, "reason": "again"}), 409, "hold_not_active")


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({}, 400, "hold_invalid"),
        ({"queue": "*"}, 400, "hold_invalid"),
        ({"queue": "celery", "payload_hash": "ab"}, 400, "hold_invalid"),
        ({"queue": "celery", "reason": " "}, 400, "reason_invalid"),
        ({"queue": "celery", "ends_at": "2020-01-01T00:00:00Z"}, 400, "hold_end_invalid"),
        ({"queue": "celery", "until": "2h"}, 400, "invalid_input"),
        ({"queue": "celery", "tenant": 1}, 400, "invalid_input"),
        ({"payload_of": str(UUID(int=1))}, 404, "payload_not_known"),
        ({"payload_of": str(UUID(int=1)), "job_type": "a"}, 400, "invalid_input"),
    ],
)
def test_what_cannot_be_held_is_refused_with_its_code(ada: Api, fields: dict[str, Any], status: int, code: str) -> None:
    problem(ada.post("holds", asked(**fields)), status, code)
    assert not Hold.objects.exists()


def test_messages_like_a_failed_job_are_named_by_that_job(ada: Api, bram: Api) -> None:
    letter = dead_letter()
    problem(bram.post("holds", asked(tenant="t-b", payload_of=str(letter.id))), 404, "payload_not_known")
    made = ada.post("holds", asked(payload_of=str(letter.id)))
    shown = ada.get(f"holds/{made.json()['hold_id']}").json()
    assert (shown["job_type"], len(shown["payload_hash"])) == ("shop.send_mail", 64)


def test_the_same_request_again_is_answered_as_the_first_time(ada: Api, cast: Cast) -> None:
    """A9, C4."""
    body = asked(queue="celery")
    first = ada.post("holds", body, key="K")
    path = f"holds/{first.json()['hold_id']}"
    held_letter(UUID(first.json()["hold_id"]))
    for name, sending in (("", body), ("/extend", {"reason": "x", "ends_at": ahead(hours=2)}), ("/release", {})):
        before = first if not name else ada.post(f"{path}{name}", sending, key="K")
        again = ada.post(f"{path}{name}" if name else "holds", sending, key="K")
        assert (again.status_code, again["Idempotent-Replayed"]) == (before.status_code, "true"), name
        assert again.json() == {**before.json(), "idempotent_replay": True}
        assert again.get("Location") == before.get("Location")
        problem(ada.post(f"{path}{name}" if name else "holds", {**sending, "reason": "y"}, key="K"), 409,
                "idempotency_key_reused")  # fmt: skip
    assert (Hold.objects.count(), Redrive.objects.count()) == (1, 1)


def test_what_was_put_aside_is_sent_on_by_a_redrive(ada: Api, cast: Cast) -> None:
    """C14: frozen, judged safe as it has never run, started like any other, and done when its jobs have succeeded."""
    worker()
    hold_id = placed_hold(cast.ada)
    first, second = held_letter(hold_id, ago=9.0), held_letter(hold_id)
    shown = ada.get(f"holds/{hold_id}").json()
    assert (shown["held_count"], [each["unresolved_count"] for each in shown["incidents"]]) == (2, [2])
    drifted = problem(ada.post(f"holds/{hold_id}/release", {"expected_count": 1}), 409, "selection_drifted")
    assert drifted["fields"] == {"expected": 1, "found": 2}
    pace = {"canary_size": 0, "rate_per_second": 10_000}
    released = ada.post(f"holds/{hold_id}/release", {"expected_count": 2, "pace": pace})
    assert released.status_code == 201, released.content
    (made,) = released.json()["redrives"]
    assert (made["state"], made["total"], released["Location"]) == (
        "ready", 2, f"/api/v1/redrives/{made['redrive_id']}",
    )  # fmt: skip
    assert ada.get(released["Location"]).json()["classes"] == [
        {"class": "safe", "count": 2, "answers": [], "answer": None}
    ]
    assert ada.get(f"holds/{hold_id}").json()["redrive"] == made["redrive_id"]
    assert ada.post(f"redrives/{made['redrive_id']}/start").status_code == 202
    redrive = Redrive.objects.get(id=made["redrive_id"])
    step(redrive)
    assert [repair.letter_id for repair in outstanding(redrive)] == [first.id, second.id]
    sent(redrive)
    succeed(outstanding(redrive))
    step(redrive)
    assert counted(redrive) == {"succeeded": 2}
    assert set(DeadLetter.objects.values_list("state", flat=True)) == {"repaired"}
    assert AuditEvent.objects.filter(action="holds.released", target_id=str(hold_id)).count() == 1


def test_a_cancelled_release_puts_everything_back_on_hold(ada: Api, cast: Cast) -> None:
    worker()
    hold_id = placed_hold(cast.ada)
    letter = held_letter(hold_id)
    made = ada.post(f"holds/{hold_id}/release", {"pace": {"canary_size": 0}}).json()["redrives"][0]
    redrive = Redrive.objects.get(id=made["redrive_id"])
    start_redrive(redrive_id=redrive.id, by=cast.ada, key="s")
    step(redrive)
    letter.refresh_from_db()
    assert letter.state == "retrying"
    assert ada.post(f"redrives/{redrive.id}/cancel").status_code == 200
    letter.refresh_from_db()
    assert letter.state == "held"
    assert ada.post(f"holds/{hold_id}/release").status_code == 201


def test_a_hold_of_every_tenant_is_released_as_one_redrive_for_each(ada: Api, cast: Cast) -> None:
    hold_id = placed_hold(cast.ada, tenant="*")
    held_letter(hold_id)
    held_letter(hold_id, tenant="t-b")
    released = ada.post(f"holds/{hold_id}/release", {"expected_count": 2})
    assert released.status_code == 201
    assert released["Location"] == f"/api/v1/holds/{hold_id}"
    found = Redrive.objects.filter(id__in=[one["redrive_id"] for one in released.json()["redrives"]])
    assert sorted((one.tenant, one.total_count) for one in found) == [("default", 1), ("t-b", 1)]


def test_sending_on_needs_to_hold_and_nothing_else(olga: Api, cast: Cast) -> None:
    """GRA-02: who holds a tenant's messages sends them on; a redrive of failed jobs stays closed to them."""
    hold_id = placed_hold(cast.ada)
    held_letter(hold_id)
    give(cast.olga, Action.REDRIVE_RUN, tenant="default")
    problem(olga.post(f"holds/{hold_id}/release"), 403, "access_denied")
    assert not Redrive.objects.exists()
    give(cast.olga, Action.DEAD_LETTERS_HOLD, tenant="default")
    path = f"redrives/{olga.post(f'holds/{hold_id}/release').json()['redrives'][0]['redrive_id']}"
    assert olga.post(f"{path}/start").status_code == 202
    ScopeUserGrant.objects.filter(user_id=cast.olga.user_id, action=Action.REDRIVE_RUN.value).delete()
    assert olga.post(f"{path}/pause").status_code == 200
    ScopeUserGrant.objects.filter(user_id=cast.olga.user_id, action=Action.DEAD_LETTERS_HOLD.value).delete()
    problem(olga.post(f"{path}/resume"), 403, "access_denied")


def test_a_hold_with_nothing_put_aside_and_one_that_is_being_released_say_so(ada: Api, cast: Cast) -> None:
    hold_id = placed_hold(cast.ada)
    problem(ada.post(f"holds/{hold_id}/release"), 409, "redrive_empty")
    held_letter(hold_id)
    assert ada.post(f"holds/{hold_id}/release").status_code == 201
    problem(ada.post(f"holds/{hold_id}/release"), 409, "redrive_exists")
    problem(ada.post(f"holds/{hold_id}/release", {"pace": {"rate_per_second": 0}}), 400, "redrive_invalid")


@pytest.mark.parametrize("name", ["extend", "end", "release"])
def test_a_change_of_what_has_moved_on_is_refused_with_what_is_there_now(ada: Api, cast: Cast, name: str) -> None:
    hold_id = placed_hold(cast.ada)
    held_letter(hold_id)
    path = f"holds/{hold_id}"
    seen = ada.get(path)["ETag"]
    assert ada.post(f"{path}/extend", {"reason": "x", "ends_at": ahead(hours=3)}, If_Match=seen).status_code == 200
    body = {"extend": {"reason": "x", "ends_at": ahead(hours=2)}, "end": {"reason": "x"}, "release": {}}[name]
    refused = ada.post(f"{path}/{name}", body, If_Match=seen)
    current = problem(refused, 412, "hold_changed")["current"]
    assert refused["ETag"] == f'"{hold_id}:{current["version"]}"'
    assert not Redrive.objects.exists()
    assert ada.post(f"{path}/{name}", body, If_Match=refused["ETag"]).status_code in (200, 201)


def test_a_hold_of_every_tenant_tells_nobody_how_much_of_others_it_has_put_aside(
    ada: Api, bram: Api, cast: Cast
) -> None:
    """It says why one's own jobs do not run, and nothing of anybody else's."""
    hold_id = placed_hold(cast.ada, tenant="*")
    for tenant in ("default", "default", "t-b"):
        held_letter(hold_id, tenant=tenant)
    whole, part = ada.get(f"holds/{hold_id}").json(), bram.get(f"holds/{hold_id}").json()
    assert (whole["letter_count"], whole["held_count"], len(whole["incidents"])) == (3, 3, 2)
    assert (part["letter_count"], part["held_count"], len(part["incidents"])) == (None, 1, 1)
    assert [row["letter_count"] for row in bram.rows("holds")] == [None]
    assert [row["letter_count"] for row in ada.rows("holds")] == [3]


def test_what_is_sent_on_already_keeps_no_other_tenant_waiting(
    ada: Api, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request makes so many redrives at most; the next makes those of the tenants that are left."""
    monkeypatch.setattr(releases, "MOST_PLACES", 1)
    hold_id = placed_hold(cast.ada, tenant="*")
    held_letter(hold_id)
    held_letter(hold_id, tenant="t-b")
    for _ in range(2):
        assert ada.post(f"holds/{hold_id}/release", {"expected_count": 2}).status_code == 201
    assert sorted(Redrive.objects.values_list("tenant", "total_count")) == [("default", 1), ("t-b", 1)]
    problem(ada.post(f"holds/{hold_id}/release"), 409, "redrive_exists")


def test_two_with_one_key_at_once_send_on_what_one_does(ada: Api, cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    """A9: the second has looked for a receipt before the first had written it, and finds what the first has left."""
    monkeypatch.setattr(releases, "MOST_PLACES", 1)
    hold_id = placed_hold(cast.ada, tenant="*")
    held_letter(hold_id)
    held_letter(hold_id, tenant="t-b")
    first = ada.post(f"holds/{hold_id}/release", key="K")
    look, looks = releases._replayed, iter([False])
    monkeypatch.setattr(
        releases, "_replayed", lambda *args, **named: look(*args, **named) if next(looks, True) else None
    )
    second = ada.post(f"holds/{hold_id}/release", key="K")
    assert second.json() == {**first.json(), "idempotent_replay": True}
    assert [one.tenant for one in Redrive.objects.all()] == ["default"]
