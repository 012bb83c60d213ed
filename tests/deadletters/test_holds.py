"""Placing, moving and ending a hold: who may, what is refused, and that a request counts once."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import connections
from kombu.serialization import dumps as kombu_dumps
from kombu.utils.json import loads as json_loads

from deadletters.errors import HoldEndInvalid, HoldInvalid, HoldNotActive, HoldNotFound, TooManyHolds
from deadletters.holds import HoldFilter, find_hold, list_holds, payload_hash_of, rules_of
from deadletters.journal.holds import payload_hash
from deadletters.models import Hold, HoldState
from deadletters.services import HoldTarget, end_hold, expire_hold, extend_hold, place_hold
from grants.actions import Action
from grants.errors import AccessDenied, IdempotencyKeyReused, ReasonInvalid
from grants.models import AuditEvent, Verdict
from grants.operators import Operator
from opsconsole.core.database import database_now
from opsconsole.core.errors import OpsError
from tests import factories
from tests.cast import Cast, give

pytestmark = pytest.mark.django_db

MAIL = HoldTarget(tenant="default", job_type="shop.send_mail")


def ahead(**length: float) -> datetime:
    return database_now() + timedelta(**length)


def place(by: Operator, target: HoldTarget = MAIL, key: str = "k", **more: Any) -> Hold:
    values: dict[str, Any] = {"reason": "the provider is down", "ends_at": ahead(hours=1), **more}
    return Hold.objects.get(id=place_hold(target=target, by=by, key=key, **values).hold_id)


def test_a_hold_is_placed_with_reason_end_and_audit(cast: Cast) -> None:
    """B3, B4: the row and its audit event are one transaction, and name who, why, until when and what."""
    hold = place(cast.ada, HoldTarget(tenant="default", source="shop", job_type="shop.send_mail", queue="mail"))
    assert (hold.state, hold.placed_by_name, hold.letter_count) == (HoldState.ACTIVE, "ada", 0)
    assert hold.words == "task shop.send_mail, queue mail, tenant default"
    event = AuditEvent.objects.get(action="holds.placed")
    assert (event.target_type, event.target_id, event.reason) == ("hold", str(hold.id), "the provider is down")
    told = json.loads(event.outcome)
    assert (told["jobType"], told["queue"], told["tenant"], told["source"]) == (
        "shop.send_mail", "mail", "default", "shop",
    )  # fmt: skip
    assert datetime.fromisoformat(told["endsAt"]) == hold.ends_at


def test_the_same_request_again_places_no_second_hold(cast: Cast) -> None:
    """A9, C4: the same key answers as the first time; with another body it is refused."""
    ends_at = ahead(hours=1)
    first = place_hold(target=MAIL, reason="down", ends_at=ends_at, by=cast.ada, key="k")
    again = place_hold(target=MAIL, reason="down", ends_at=ends_at, by=cast.ada, key="k")
    assert (again.hold_id, again.idempotent_replay, first.idempotent_replay) == (first.hold_id, True, False)
    with pytest.raises(IdempotencyKeyReused):
        place_hold(target=MAIL, reason="another", ends_at=ends_at, by=cast.ada, key="k")
    assert Hold.objects.count() == 1


def test_who_may_hold_one_tenant_holds_neither_another_nor_every_one(cast: Cast) -> None:
    """B1, B2: denied and audited; a whole task or queue needs the action on every tenant."""
    with pytest.raises(AccessDenied):
        place(cast.olga)
    give(cast.olga, Action.DEAD_LETTERS_HOLD, tenant="default")
    for tenant in ("t-b", "*"):
        with pytest.raises(AccessDenied):
            place(cast.olga, HoldTarget(tenant=tenant, queue="mail"))
    denied = AuditEvent.objects.filter(action="dead-letters.hold", verdict=Verdict.DENIED)
    assert sorted(denied.values_list("tenant", flat=True)) == ["*", "default", "t-b"]
    assert place(cast.olga).tenant == "default"
    assert place(cast.ada, HoldTarget(tenant="*", queue="mail"), key="all").tenant == "*"


@pytest.mark.parametrize(
    "target",
    [
        HoldTarget(tenant="default"),
        HoldTarget(tenant="", job_type="a"),
        HoldTarget(tenant="default", source="", job_type="a"),
        HoldTarget(tenant="default", job_type="*"),
        HoldTarget(tenant="default", job_type="a\x00b"),
        HoldTarget(tenant="default", job_type="\ud800"),
        HoldTarget(tenant="t" * 101, job_type="a"),
        HoldTarget(tenant="default", queue="q", payload_hash="0" * 64),
        HoldTarget(tenant="default", job_type="a", payload_hash="A" * 64),
        HoldTarget(tenant="default", job_type="a", payload_hash="0" * 63),
    ],
)
def test_a_target_that_makes_no_sense_is_refused(cast: Cast, target: HoldTarget) -> None:
    with pytest.raises(HoldInvalid):
        place(cast.ada, target)
    assert not Hold.objects.exists()


def test_a_hold_has_an_end_within_a_week_and_a_reason(cast: Cast) -> None:
    """B4."""
    for ends_at in (ahead(seconds=-1), ahead(days=7, minutes=1), datetime(2099, 1, 1)):
        with pytest.raises(HoldEndInvalid):
            place(cast.ada, ends_at=ends_at)
    for reason, refusal in ((" ", ReasonInvalid), ("x" * 501, ReasonInvalid), ("a\x00b", HoldInvalid)):
        with pytest.raises(refusal):
            place(cast.ada, reason=reason)


def test_there_are_never_more_holds_than_a_worker_can_compare_with(cast: Cast, monkeypatch: Any) -> None:
    monkeypatch.setattr("deadletters.services.MOST_HOLDS", 1)
    first = place(cast.ada)
    with pytest.raises(TooManyHolds):
        place(cast.ada, key="k2")
    end_hold(hold_id=first.id, reason="over", by=cast.ada, key="e")
    place(cast.ada, key="k2")


def test_the_end_of_a_hold_is_moved_and_an_ended_one_stays_as_it_is(cast: Cast) -> None:
    """C6, C7: a refused change leaves no row; a second end is told who was first by the state."""
    hold = place(cast.ada)
    later = ahead(days=2)
    moved = extend_hold(hold_id=hold.id, ends_at=later, reason="still down", by=cast.ada, key="x")
    assert (moved.ends_at, moved.state) == (later, "active")
    done = end_hold(hold_id=hold.id, reason="it is up", by=cast.ada, key="e")
    again = end_hold(hold_id=hold.id, reason="it is up", by=cast.ada, key="e")
    assert (done.state, again.state, again.idempotent_replay) == ("ended", "ended", True)
    hold.refresh_from_db()
    assert (hold.state, hold.ended_by_name) == (HoldState.ENDED, "ada")
    for change in (
        lambda: end_hold(hold_id=hold.id, reason="again", by=cast.ada, key="e2"),
        lambda: extend_hold(hold_id=hold.id, ends_at=ahead(hours=3), reason="again", by=cast.ada, key="x2"),
    ):
        with pytest.raises(HoldNotActive):
            change()
    assert AuditEvent.objects.filter(target_type="hold").count() == 3


def test_a_hold_whose_time_is_over_expires_once_and_is_no_rule_before_that(cast: Cast) -> None:
    """C12: by the database's clock; the row of the trail is the system's."""
    hold = place(cast.ada)
    assert not expire_hold(hold_id=hold.id)
    Hold.objects.filter(id=hold.id).update(ends_at=ahead(seconds=-1))
    assert rules_of("tests") == ([], [hold.id])
    with pytest.raises(HoldNotActive):
        extend_hold(hold_id=hold.id, ends_at=ahead(hours=1), reason="late", by=cast.ada, key="x")
    assert expire_hold(hold_id=hold.id)
    assert not expire_hold(hold_id=hold.id)
    hold.refresh_from_db()
    assert (hold.state, hold.ended_by_name) == (HoldState.EXPIRED, "system")
    assert AuditEvent.objects.get(action="holds.expired").operator_name == "system"
    assert rules_of("tests") == ([], [])


def test_a_worker_is_told_the_holds_of_its_source_and_of_every_source(cast: Cast) -> None:
    own = place(cast.ada, HoldTarget(tenant="default", source="shop", job_type="a"), key="1")
    every = place(cast.ada, HoldTarget(tenant="*", queue="q"), key="2")
    place(cast.ada, HoldTarget(tenant="default", source="other", job_type="a"), key="3")
    rules, overdue = rules_of("shop")
    assert ([rule.id for rule in rules], overdue) == ([str(own.id), str(every.id)], [])
    assert rules[1].ends_boot > rules[0].ends_boot - 5


def test_a_hold_is_seen_by_who_may_inspect_its_tenant_and_one_of_all_by_everybody(cast: Cast) -> None:
    """B7: not there and not yours look the same."""
    mine = place(cast.ada, key="1")
    theirs = place(cast.ada, HoldTarget(tenant="t-b", job_type="a"), key="2")
    every = place(cast.ada, HoldTarget(tenant="*", queue="q"), key="3")
    seen = [hold.id for hold in list_holds(cast.olga, HoldFilter()).rows]
    assert seen == [every.id, mine.id]
    assert find_hold(cast.olga, every.id).id == every.id
    for hold_id in (theirs.id, uuid4()):
        with pytest.raises(HoldNotFound):
            find_hold(cast.olga, hold_id)
        with pytest.raises(HoldNotFound):
            end_hold(hold_id=hold_id, reason="not mine", by=cast.olga, key="e")
    with pytest.raises(OpsError):
        end_hold(hold_id=mine.id, reason="may not", by=cast.olga, key="e")
    with pytest.raises(AccessDenied):
        list_holds(cast.nobody, HoldFilter())
    filtered = list_holds(cast.ada, HoldFilter(tenant="default", states=("active",)))
    assert [hold.id for hold in filtered.rows] == [every.id, mine.id]


def test_a_letter_and_a_worker_hash_the_same_payload_alike() -> None:
    """Whatever JSON carries: what kombu has made of a date in the message, a worker has decoded again."""
    args = ["a@example.org", 1.5, {"b": None, "a": [1, "\u00fc"]}]
    kwargs = {"at": datetime(2026, 1, 2, tzinfo=UTC), "id": UUID(int=7), "sum": Decimal("1.10")}
    _type, _encoding, body = kombu_dumps([args, kwargs, {}], serializer="json")
    letter = factories.dead_letter(body=body.encode())
    decoded = json_loads(body)
    assert decoded[1]["at"] == kwargs["at"]
    assert payload_hash_of(letter) == payload_hash(tuple(decoded[0]), decoded[1])
    assert payload_hash_of(letter) != payload_hash(tuple(decoded[0]), {})
    letter.message.delete()
    letter.refresh_from_db()
    assert payload_hash_of(letter) is None


@pytest.mark.django_db(transaction=True)
def test_many_requests_with_one_key_place_one_hold(cast: Cast) -> None:
    """A9: threads that race with one key get one hold, and the others are its replays."""
    ends_at = ahead(hours=1)
    barrier = threading.Barrier(6)
    found: list[tuple[UUID, bool]] = []

    def run() -> None:
        try:
            barrier.wait()
            done = place_hold(target=MAIL, reason="down", ends_at=ends_at, by=cast.ada, key="k")
            found.append((done.hold_id, done.idempotent_replay))
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({hold_id for hold_id, _replay in found}) == Hold.objects.count() == 1
    assert sorted(replay for _id, replay in found) == [False, *[True] * 5]
