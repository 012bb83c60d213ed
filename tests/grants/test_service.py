"""What the ``service`` decorator and a denial do."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction

from grants import audit
from grants import service as service_module
from grants.access import authorise
from grants.actions import Action
from grants.errors import AccessDenied, ReasonInvalid
from grants.leaf import verify_leaf
from grants.models import AuditEvent, CapabilityScope, Verdict
from grants.operators import Operator
from grants.resources import ANY, Resource
from grants.service import record_denial, service
from opsconsole.core.database import database_now
from tests.grants.tools import at_once, give, make_user, write_event

AsOperator = Callable[[Any], Operator]
RESOLVE = Action.INCIDENTS_RESOLVE
INCIDENT = Resource(tenant="t-a", target_type="incident", target_id="I1")


@service
def resolve(*, by: Operator, resource: Resource = INCIDENT) -> str:
    """Write a row, then ask, so that a denial has something to undo."""
    CapabilityScope.objects.create(tenant="written", actor_type=ANY, actor_id=ANY, command_id=ANY)
    capability = authorise(by, RESOLVE, resource)
    audit.record(action="resolved", operator=by, resource=resource, capability=capability, outcome={})
    return capability.id


@pytest.mark.django_db(transaction=True)
def test_a_denial_is_audited_and_nothing_else_remains(operator: AsOperator) -> None:
    """B2, B3."""
    olga = operator(make_user("olga"))
    with pytest.raises(AccessDenied):
        resolve(by=olga)
    assert not CapabilityScope.objects.filter(tenant="written").exists()
    (event,) = AuditEvent.objects.all()
    assert (event.verdict, event.capability, event.outcome_value) == (Verdict.DENIED, "", "denied")
    assert (event.action, event.operator_name, event.tenant) == ("incidents.resolve", "olga", "t-a")
    assert (event.target_type, event.target_id, event.idempotency_key) == ("incident", "I1", None)
    assert verify_leaf(event)


@pytest.mark.django_db(transaction=True)
def test_what_is_allowed_commits_with_its_audit_row(operator: AsOperator) -> None:
    """B3."""
    user = make_user("olga")
    give(user, RESOLVE, "t-a")
    assert resolve(by=operator(user)).startswith("user-grant:")
    assert CapabilityScope.objects.filter(tenant="written").exists()
    assert [event.action for event in AuditEvent.objects.all()] == ["resolved"]


@pytest.mark.django_db(transaction=True)
def test_an_audit_row_that_can_not_be_written_undoes_the_repair(operator: AsOperator) -> None:
    """B3: it fails closed."""
    user = make_user("olga")
    give(user, RESOLVE)

    @service
    def act() -> None:
        CapabilityScope.objects.create(tenant="written", actor_type=ANY, actor_id=ANY, command_id=ANY)
        write_event(outcome={"rate": 0.5})

    with pytest.raises(TypeError):
        act()
    assert not CapabilityScope.objects.filter(tenant="written").exists()


@pytest.mark.django_db(transaction=True)
def test_a_refusal_by_a_rule_writes_nothing() -> None:
    """B3."""

    @service
    def act() -> None:
        raise ReasonInvalid

    with pytest.raises(ReasonInvalid):
        act()
    assert not AuditEvent.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_a_service_inside_a_transaction_is_a_mistake(operator: AsOperator) -> None:
    by = operator(make_user("olga"))
    with transaction.atomic(), pytest.raises(RuntimeError):
        resolve(by=by)
    with transaction.atomic(), pytest.raises(RuntimeError):
        record_denial(by, RESOLVE, INCIDENT)


@pytest.mark.django_db
def test_denials_within_a_minute_fold_into_one_row(
    olga: Any, vera: Any, operator: AsOperator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The design: of one operator, action and resource."""
    start = database_now().replace(second=5)
    monkeypatch.setattr(service_module, "database_now", lambda: start)
    by = operator(olga)
    for _ in range(5):
        record_denial(by, RESOLVE, INCIDENT)
    assert AuditEvent.objects.count() == 1
    record_denial(operator(vera), RESOLVE, INCIDENT)
    record_denial(by, Action.INCIDENTS_ACKNOWLEDGE, INCIDENT)
    record_denial(by, RESOLVE, Resource(tenant="t-b", target_type="incident", target_id="I1"))
    record_denial(by, RESOLVE, Resource(tenant="t-a", target_type="incident", target_id="I2"))
    assert AuditEvent.objects.count() == 5
    monkeypatch.setattr(service_module, "database_now", lambda: start + timedelta(seconds=54))
    record_denial(by, RESOLVE, INCIDENT)
    assert AuditEvent.objects.count() == 5
    monkeypatch.setattr(service_module, "database_now", lambda: start + timedelta(seconds=56))
    record_denial(by, RESOLVE, INCIDENT)
    assert AuditEvent.objects.count() == 6
    assert all(verify_leaf(event) for event in AuditEvent.objects.all())


@pytest.mark.django_db(transaction=True)
def test_ten_threads_that_are_denied_leave_one_row_and_ten_refusals(
    operator: AsOperator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B2: on neither database does the second transaction wait for the first."""
    by = operator(make_user("olga"))
    at = database_now()
    monkeypatch.setattr(service_module, "database_now", lambda: at)
    results = at_once(10, lambda _: resolve(by=by))
    assert [type(result) for result in results] == [AccessDenied] * 10
    assert AuditEvent.objects.count() == 1


@pytest.mark.django_db
def test_a_hostile_resource_is_denied_and_audited(olga: Any, operator: AsOperator) -> None:
    hostile = Resource(tenant="t-a\x00", actor_type="\ud800", actor_id="x" * 5000)
    record_denial(operator(olga), RESOLVE, hostile)
    event = AuditEvent.objects.get()
    assert verify_leaf(event)
    assert event.tenant == "t-a\\x00"


@pytest.mark.django_db(transaction=True)
def test_the_connection_is_usable_after_a_denial(operator: AsOperator) -> None:
    with pytest.raises(AccessDenied):
        resolve(by=operator(make_user("olga")))
    assert not connection.in_atomic_block
    assert AuditEvent.objects.count() == 1
