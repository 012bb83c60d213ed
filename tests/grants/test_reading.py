"""Reading the audit trail is itself audited."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any
from unittest import mock

import pytest
from django.db import DatabaseError
from django.test import Client

from grants import audit, service
from grants.actions import Action
from grants.leaf import verify_leaf
from grants.models import AuditEvent
from grants.operators import Operator
from grants.selectors import AuditFilter, list_audit
from opsconsole.core.database import database_now
from tests.grants.tools import at_once, give, make_user, write_event

AsOperator = Callable[[Any], Operator]
READ = Action.AUDIT_READ.value
PAGES = ("/api/v1/audit", "/ops/audit/")


@pytest.fixture
def moment(db: None, monkeypatch: pytest.MonkeyPatch) -> list[datetime]:
    """What the clock shows while rows are folded; the test moves it."""
    shown = [database_now().replace(second=5, microsecond=0)]
    monkeypatch.setattr(service, "database_now", lambda: shown[0])
    return shown


def _reads() -> list[AuditEvent]:
    return list(AuditEvent.objects.filter(action=READ).order_by("at", "id"))


def _signed_in(user: Any) -> Client:
    client = Client(raise_request_exception=False)
    client.force_login(user)
    return client


@pytest.mark.parametrize("page", PAGES)
def test_a_reading_of_the_trail_is_audited_once_a_minute(page: str, ada: Any, moment: list[datetime]) -> None:
    """B3."""
    client = _signed_in(ada)
    for query in ({}, {"tenant": "*"} if page == PAGES[0] else {"tenant": "t-a"}):
        assert client.get(page, query).status_code == 200
    (row,) = _reads()
    assert (row.verdict, row.operator_name, row.tenant, row.target_type) == ("allowed", "ada", "*", "audit_trail")
    assert "audit.read on tenant=*" in row.capability
    assert verify_leaf(row)
    moment[0] += timedelta(seconds=55)
    assert client.get(page).status_code == 200
    assert len(_reads()) == 2


@pytest.mark.parametrize("page", PAGES)
def test_without_its_audit_row_nothing_of_the_trail_is_shown(page: str, ada: Any) -> None:
    """B3: if the row cannot be written the answer is an error without data."""
    write_event("t-secret")
    with mock.patch.object(audit, "record_many", side_effect=DatabaseError("disk full")):
        answer = _signed_in(ada).get(page)
    assert answer.status_code == 500
    assert "t-secret" not in answer.content.decode()


def test_a_row_that_is_opened_counts_as_reading_its_tenants_trail(ada: Any) -> None:
    """B3."""
    event = write_event("t-a")
    assert _signed_in(ada).get(f"/ops/audit/{event.id}/").status_code == 200
    (row,) = _reads()
    assert (row.tenant, row.operator_name) == ("t-a", "ada")


def test_each_tenant_and_each_reader_has_a_row(
    ada: Any, olga: Any, vera: Any, operator: AsOperator, moment: list[datetime]
) -> None:
    """B3: and who reads what they may, which is not all, has a capability that says so."""
    give(olga, Action.AUDIT_READ, "t-a")
    give(vera, Action.AUDIT_READ, "t-a", "invoice")
    for _ in range(2):
        list_audit(operator(ada), AuditFilter(tenant="t-a"))
        list_audit(operator(ada), AuditFilter(tenant="t-b"))
        list_audit(operator(olga), AuditFilter(tenant="t-a"))
        list_audit(operator(olga), AuditFilter())
        list_audit(operator(vera), AuditFilter())
    rows = {(row.operator_name, row.tenant): row.capability for row in _reads()}
    assert len(rows) == len(_reads()) == 5
    assert "audit.read on tenant=t-a" in rows["olga", "t-a"]
    assert rows["olga", "*"] == rows["vera", "*"] == "audit.read, asked for each row of the answer"


def test_a_row_shows_in_the_answer_that_it_was_written_for(ada: Any, operator: AsOperator) -> None:
    """B3: it is written before the answer."""
    page = list_audit(operator(ada), AuditFilter(action=READ))
    assert [row.operator_name for row in page.rows] == ["ada"]


@pytest.mark.django_db(transaction=True)
def test_readings_at_once_leave_one_row(operator: AsOperator, monkeypatch: pytest.MonkeyPatch) -> None:
    user = make_user("ada")
    give(user, Action.AUDIT_READ)
    reader, now = operator(user), database_now()
    monkeypatch.setattr(service, "database_now", lambda: now)
    answers = at_once(8, lambda _: list_audit(reader, AuditFilter()))
    assert not [answer for answer in answers if isinstance(answer, BaseException)]
    assert len(_reads()) == 1
