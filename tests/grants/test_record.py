"""Writing audit rows, and answering a repeated request from them."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db import IntegrityError, connection, transaction
from django.test.utils import CaptureQueriesContext
from hypothesis import given
from hypothesis import strategies as st

from grants import audit
from grants.access import SYSTEM_CAPABILITY, Capability
from grants.audit import AuditEntry
from grants.errors import IdempotencyKeyInvalid, IdempotencyKeyMissing, IdempotencyKeyReused, ReasonInvalid
from grants.leaf import LEAF_COLUMNS, LEAF_VERSION, leaf_hash, verify_leaf
from grants.models import AuditEvent
from grants.operators import SYSTEM, Operator, OperatorKind
from grants.resources import Resource
from grants.service import service
from opsconsole.core.ids import new_id
from opsconsole.core.request_id import set_request_id
from tests.grants.tools import at_once, write_event

OLGA = Operator(kind=OperatorKind.PERSON, id="1", name="olga", user_id=1)
BRAM = Operator(kind=OperatorKind.PERSON, id="2", name="bram", user_id=2)
BY_GRANT = Capability(id="user-grant:1", text="user-grant:1: incidents.resolve on everything")
INCIDENT = Resource(tenant="t-a", target_type="incident", target_id="I1")
RESOLVED = "operations.incident_resolved"


def resolve(
    resource: Resource = INCIDENT, by: Operator = OLGA, key: str | None = "k-1", digest: str = ""
) -> AuditEvent:
    return audit.record(
        action=RESOLVED, operator=by, resource=resource, capability=BY_GRANT, outcome={"a": 1}, key=key, digest=digest
    )


def replay(resource: Resource = INCIDENT, by: Operator = OLGA, action: str = RESOLVED, digest: str = "") -> Any:
    return audit.replayed(
        key="k-1",
        action=action,
        operator=by,
        target_type=resource.target_type,
        target_id=resource.target_id,
        digest=digest,
    )


@pytest.mark.django_db
def test_a_row_keeps_everything_that_a_reader_of_the_trail_needs() -> None:
    """B16."""
    set_request_id("r-1")
    event = audit.record(
        action="dead_letter.discarded",
        operator=OLGA,
        resource=Resource(tenant="t-a", actor_type="invoice", actor_id="7", target_type="dead_letter", target_id="L1"),
        capability=BY_GRANT,
        outcome={"job": "J1", "attempts": 3, "ambiguous": False},
        reason="paid by hand",
        key="k-1",
        digest="d" * 64,
    )
    set_request_id("")
    stored = AuditEvent.objects.get(pk=event.pk)
    assert isinstance(stored.pk, UUID)
    assert abs(stored.at - datetime.now(UTC)) < timedelta(minutes=1)
    assert (stored.tenant, stored.actor_type, stored.actor_id) == ("t-a", "invoice", "7")
    assert (stored.operator_kind, stored.operator_id, stored.operator_name) == ("person", "1", "olga")
    assert (stored.action, stored.target_type, stored.target_id) == ("dead_letter.discarded", "dead_letter", "L1")
    assert (stored.capability, stored.reason, stored.verdict) == (BY_GRANT.text, "paid by hand", "allowed")
    assert stored.outcome == '{"ambiguous":false,"attempts":3,"job":"J1"}'
    assert stored.outcome_value == {"job": "J1", "attempts": 3, "ambiguous": False}
    assert (stored.idempotency_key, stored.request_digest, stored.request_id) == ("k-1", "d" * 64, "r-1")
    assert verify_leaf(stored)
    for field in AuditEvent._meta.concrete_fields:
        assert getattr(stored, field.attname) == getattr(event, field.attname)


@pytest.mark.django_db
def test_the_target_of_a_command_scoped_read_is_the_command() -> None:
    """B10, B16."""
    event = write_event(resource=Resource(tenant="t-a", actor_type="invoice", actor_id="7", command_id="c-1"))
    assert (event.target_type, event.target_id) == ("command", "c-1")


@pytest.mark.django_db
def test_an_outcome_has_no_floats() -> None:
    with pytest.raises(TypeError):
        write_event(outcome={"rate": 0.5})


@pytest.mark.django_db
def test_an_allowed_row_always_names_a_capability() -> None:
    with pytest.raises(IntegrityError), transaction.atomic():
        write_event(capability=Capability(id="", text=""))


def test_the_hash_covers_every_column_but_itself() -> None:
    """C16: a new column without a new leaf version fails here."""
    columns = {field.attname for field in AuditEvent._meta.concrete_fields}
    assert set(LEAF_COLUMNS[LEAF_VERSION]) == columns - {"leaf_hash"}


@pytest.mark.django_db
@pytest.mark.parametrize("column", LEAF_COLUMNS[LEAF_VERSION])
def test_changing_a_column_changes_the_hash(column: str) -> None:
    """C16."""
    event = AuditEvent.objects.get(pk=resolve().pk)
    assert verify_leaf(event)
    changed: dict[str, Any] = {
        "id": new_id(),
        "at": event.at + timedelta(microseconds=1),
        "leaf_version": 2,
        "denial_key": "x",
        "verdict": "denied",
    }
    setattr(event, column, changed.get(column, f"{getattr(event, column)}x"))
    assert not verify_leaf(event)


@pytest.mark.django_db
def test_a_text_can_not_move_from_one_column_to_the_next_unseen() -> None:
    """C16."""
    event = resolve()
    event.target_type, event.target_id = "incidentI", "1"
    assert leaf_hash(event) != event.leaf_hash


@pytest.mark.django_db
@pytest.mark.parametrize("at", ["2026-05-01T12:00:00+00:00", "2026-05-01T12:00:00.000001+00:00"])
def test_a_time_hashes_the_same_after_it_was_stored(at: str) -> None:
    event = write_event(at=datetime.fromisoformat(at))
    assert verify_leaf(AuditEvent.objects.get(pk=event.pk))


@pytest.mark.django_db
@pytest.mark.parametrize("hostile", ["a\x00b", "a\ud800b", "é" * 300, "𝔸" * 300])
def test_what_no_database_can_store_is_kept_in_a_readable_form(hostile: str) -> None:
    event = AuditEvent.objects.get(pk=write_event(actor_id=hostile, reason=hostile, outcome={"text": hostile}).pk)
    assert verify_leaf(event)
    assert "\x00" not in event.actor_id
    assert len(event.actor_id) <= 255
    json.loads(event.outcome)


def test_two_long_values_with_the_same_head_stay_two() -> None:
    """C10."""
    assert audit.fitted("x" * 300 + "a", 255) != audit.fitted("x" * 300 + "b", 255)
    assert len(audit.fitted("x" * 300, 255)) == 255


@pytest.mark.django_db
def test_a_key_that_nobody_used_replays_nothing() -> None:
    assert replay() is None


@pytest.mark.django_db
def test_the_same_request_replays_its_row() -> None:
    """A9."""
    event = resolve(digest="d")
    assert replay(digest="d").pk == event.pk


@pytest.mark.django_db
@pytest.mark.parametrize(
    "other",
    [
        {"digest": "other"},
        {"resource": Resource(tenant="t-a", target_type="incident", target_id="I2")},
        {"resource": Resource(tenant="t-b", target_type="incident", target_id="I2")},
        {"resource": Resource(tenant="t-a", target_type="dead_letter", target_id="I1")},
    ],
)
def test_a_key_with_another_body_or_target_is_reused(other: dict[str, Any]) -> None:
    """A9, C4: in whatever tenant the other target is."""
    resolve()
    with pytest.raises(IdempotencyKeyReused) as refusal:
        replay(**other)
    assert (refusal.value.status, refusal.value.code) == (409, "idempotency_key_reused")


@pytest.mark.django_db
def test_a_key_belongs_to_its_verb_and_its_operator() -> None:
    """A9, C4."""
    resolve()
    assert replay(action="operations.incident_acknowledged") is None
    assert replay(by=BRAM) is None
    resolve(by=BRAM)


@pytest.mark.django_db
def test_a_second_insert_with_the_key_is_refused_and_the_transaction_goes_on() -> None:
    """A9: the unique key is the last guard."""
    resolve()
    for tenant in ("t-a", "t-b"):
        with pytest.raises(IdempotencyKeyReused):
            resolve(Resource(tenant=tenant, target_type="incident", target_id="I2"))
    assert AuditEvent.objects.count() == 1


@pytest.mark.django_db
def test_the_keys_of_the_system_are_apart_in_each_tenant() -> None:
    """C4: recording keys of two tenants can't collide."""
    write_event("t-a", key="dead-letter:q:1")
    write_event("t-b", key="dead-letter:q:1")
    with pytest.raises(IdempotencyKeyReused):
        write_event("t-b", key="dead-letter:q:1")


@pytest.mark.django_db
def test_rows_without_a_key_are_all_written() -> None:
    resolve(key=None)
    resolve(key=None)
    assert AuditEvent.objects.count() == 2


@pytest.mark.django_db
def test_a_long_derived_key_is_stored_with_its_hash_and_still_found() -> None:
    """C10."""
    long_key = "dead-letter:" + "q" * 700
    write_event(key=long_key + "a")
    write_event(key=long_key + "b")
    found = audit.replayed(
        key=long_key + "a",
        action="queue.dead_lettered",
        operator=SYSTEM,
        target_type="dead_letter",
        target_id="1",
        digest="",
    )
    assert found is not None
    assert found.idempotency_key == audit.stored_key(long_key + "a")


def entry(number: int, tenant: str = "t-a") -> AuditEntry:
    return AuditEntry(
        action="queue.dead_lettered",
        operator=SYSTEM,
        resource=Resource(tenant=tenant, target_type="dead_letter", target_id=str(number)),
        capability=SYSTEM_CAPABILITY,
        outcome={"letter": number},
        key=f"dead-letter:q:{number}",
    )


@pytest.mark.django_db
def test_each_row_of_a_batch_is_what_it_would_be_alone() -> None:
    """C16: rows that share most of what they say are made together, and differ in nothing that they do not share."""
    shared = {"same": "100 % and \u00e4"}
    entries = [
        replace(entry(1), outcome=shared),
        replace(entry(2), outcome=shared, reason='a "quoted" %s \\ reason'),
        replace(entry(3), key=None, outcome={"same": "else"}),
        replace(entry(4), key="k" * 700),
        replace(entry(5), operator=OLGA, capability=BY_GRANT, key="o-1", digest="d" * 64, request_id="r-1"),
        replace(entry(6), resource=Resource(tenant="t-\ud800", actor_type="cart", actor_id="7", target_type="letter",
                                            target_id="\0" * 300)),
        replace(entry(7), resource=Resource(tenant="t-a", command_id="skip")),
    ]  # fmt: skip
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert audit.record_many(entries, at=now) == len(entries)
    rows = {row["idempotency_key"] or row["outcome"]: row for row in AuditEvent.objects.values()}
    for one in entries:
        alone = {**audit._columns(one, now)}
        row = rows[alone["idempotency_key"] or alone["outcome"]]
        differing = {name for name, value in alone.items() if row[name] != value}
        assert differing == {"id", "leaf_hash"}
    assert all(verify_leaf(event) for event in AuditEvent.objects.all())


@pytest.mark.django_db
def test_a_batch_skips_what_was_recorded_before_and_repeats_within_itself() -> None:
    """A5: written once however often the letter is recorded."""
    assert audit.record_many([]) == 0
    assert audit.record_many([entry(number) for number in range(60)]) == 60
    assert audit.record_many([entry(number) for number in [*range(50, 100), 99]]) == 40
    assert audit.record_many([entry(1, "t-b")]) == 1
    assert AuditEvent.objects.count() == 101
    assert all(verify_leaf(event) for event in AuditEvent.objects.all())


@pytest.mark.django_db
@pytest.mark.postgresql
def test_a_batch_is_one_insert_and_one_look_at_the_clock() -> None:
    with CaptureQueriesContext(connection) as queries:
        audit.record_many([entry(number) for number in range(100)])
    assert len(queries) == 2


@pytest.mark.django_db(transaction=True)
def test_of_ten_threads_with_one_key_on_ten_targets_one_wins() -> None:
    """A9: the others are told that the key is used, and none gets a server error."""

    def request(number: int) -> AuditEvent:
        @service
        def act() -> AuditEvent:
            return resolve(Resource(tenant=f"t-{number % 3}", target_type="incident", target_id=f"I{number}"))

        return act()

    results = at_once(10, request)
    assert [type(result) for result in results].count(AuditEvent) == 1
    assert [type(result) for result in results].count(IdempotencyKeyReused) == 9
    assert AuditEvent.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_batches_that_overlap_in_opposite_orders_do_not_wait_for_each_other_for_ever() -> None:
    def batch(number: int) -> int:
        with transaction.atomic():
            numbers = range(100) if number % 2 else range(99, -1, -1)
            return audit.record_many([entry(one) for one in numbers])

    assert sum(result for result in at_once(4, batch) if isinstance(result, int)) == 100
    assert AuditEvent.objects.count() == 100


@pytest.mark.parametrize(
    ("header", "key"), [("k-1", "k-1"), (' "k 1" ', "k 1"), (r'"a\"b\\c"', 'a"b\\c'), ("x" * 255, "x" * 255)]
)
def test_a_key_is_read_bare_or_quoted(header: str, key: str) -> None:
    assert audit.validate_key(header) == key


@pytest.mark.parametrize("header", [None, "", "  "])
def test_a_missing_key_is_refused(header: str | None) -> None:
    with pytest.raises(IdempotencyKeyMissing) as refusal:
        audit.validate_key(header)
    assert (refusal.value.status, refusal.value.code) == (400, "idempotency_key_missing")


@pytest.mark.parametrize("header", ["x" * 256, "ü", "a\nb", '""', '"a', r'"a\b"', '"a"b"', "a\x7f"])
def test_a_malformed_key_is_refused(header: str) -> None:
    with pytest.raises(IdempotencyKeyInvalid) as refusal:
        audit.validate_key(header)
    assert (refusal.value.status, refusal.value.code) == (400, "idempotency_key_invalid")


@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=255))
def test_every_printable_key_can_be_sent_quoted(key: str) -> None:
    escaped = key.replace("\\", "\\\\").replace('"', '\\"')
    assert audit.validate_key(f'"{escaped}"') == key


@pytest.mark.parametrize("reason", ["", "   ", "x" * 501])
def test_a_reason_is_one_to_five_hundred_characters(reason: str) -> None:
    """B4."""
    with pytest.raises(ReasonInvalid):
        audit.validate_reason(reason)
    assert audit.validate_reason(f" {'x' * 500} ") == "x" * 500


def test_a_digest_does_not_depend_on_the_order_of_fields_and_tells_values_apart() -> None:
    """A9."""
    now = datetime.now(UTC)
    assert audit.request_digest({"a": 1, "b": [now]}) == audit.request_digest({"b": [now], "a": 1})
    bodies: list[dict[str, Any]] = [{}, {"a": 1}, {"a": "1"}, {"a": 1.0}, {"a": True}, {"a": None}, {"a": [1]}]
    bodies += [{"a": {1}}, {"a": {"b": 1}}, {"a": "\ud800"}, {"a": new_id()}, {"a": now}]
    assert len({audit.request_digest(body) for body in bodies}) == len(bodies)
