"""The audit trail as a file: the same rows as the list, nothing that a spreadsheet would run, and its own row."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime
from typing import Any

import pytest
from django.test import Client

from grants import admin, audit
from grants.access import SYSTEM_CAPABILITY
from grants.actions import Action
from grants.models import AuditEvent
from grants.operators import SYSTEM, Operator
from grants.resources import Resource
from opsconsole.core.csv_rows import csv_lines, safe_cell
from tests.admin.conftest import SignIn
from tests.cast import Cast, give

pytestmark = pytest.mark.django_db(transaction=True)


def _write(by: Operator, *, tenant: str = "t-a", reason: str = "because", count: int = 1) -> None:
    for number in range(count):
        audit.record(
            action="dead-letters.retry",
            operator=by,
            resource=Resource(tenant=tenant, target_type="dead_letter", target_id=f"{reason}-{number}"),
            capability=SYSTEM_CAPABILITY,
            outcome={},
            reason=reason,
        )


def _rows(client: Client, query: str = "") -> list[dict[str, str]]:
    answer: Any = client.get(f"/ops/audit/csv/?{query}")
    assert answer.status_code == 200
    assert answer.headers["Content-Type"] == "text/csv; charset=utf-8"
    assert answer.headers["Content-Disposition"].startswith('attachment; filename="audit-')
    return list(csv.DictReader(io.StringIO(b"".join(answer.streaming_content).decode(), newline="")))


def test_the_file_has_every_column_of_every_row_that_the_list_shows(cast: Cast, sign_in: SignIn) -> None:
    """B3: newest first, filtered alike, and the taking of it is a row of its own."""
    _write(cast.olga, count=5)
    _write(SYSTEM, count=3, reason="machine")
    rows = _rows(sign_in(cast.ada), "action=dead-letters.retry")
    assert [row["target_id"] for row in rows] == [f"because-{number}" for number in reversed(range(5))]
    stored = AuditEvent.objects.get(target_id="because-0")
    assert rows[-1] == {
        field.attname: safe_cell(getattr(stored, field.attname)) for field in AuditEvent._meta.concrete_fields
    }
    (taken,) = AuditEvent.objects.filter(action="audit.read", target_type="audit_trail", target_id="csv")
    assert taken.operator_id == cast.ada.id


def test_nobody_gets_rows_of_tenants_whose_audit_they_may_not_read(cast: Cast, sign_in: SignIn) -> None:
    """GRA-01"""
    give(cast.nobody, Action.AUDIT_READ, tenant="t-a")
    _write(cast.olga, tenant="t-a", reason="mine")
    _write(cast.olga, tenant="t-b", reason="theirs")
    assert {row["tenant"] for row in _rows(sign_in(cast.nobody))} == {"t-a"}


def test_a_long_file_says_that_there_is_more(cast: Cast, sign_in: SignIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages follow one another without a gap, and a cut is never silent."""
    monkeypatch.setattr(admin, "EXPORTED_AT_ONCE", 3)
    _write(cast.olga, count=7)
    client = sign_in(cast.ada)
    assert len(_rows(client, "action=dead-letters.retry")) == 7
    monkeypatch.setattr(admin, "MOST_EXPORTED", 5)
    *rows, last = _rows(client, "action=dead-letters.retry")
    assert [row["target_id"] for row in rows] == [f"because-{number}" for number in (6, 5, 4, 3, 2)]
    assert last["id"] == "Only the newest 5 rows: there are more with these filters."
    monkeypatch.setattr(admin, "MOST_EXPORTED", 7)
    assert len(_rows(client, "action=dead-letters.retry")) == 7, "exactly as many are all of them"


def test_an_unknown_filter_is_refused_before_anything_is_sent(cast: Cast, sign_in: SignIn) -> None:
    """ADM-01: 400 for a value that the list does not offer."""
    assert sign_in(cast.ada).get("/ops/audit/csv/?who=somebody").status_code == 400


@pytest.mark.parametrize(
    "text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "＝1", "-2+3+cmd|' /C calc'!A0"]
)
def test_no_cell_is_a_formula(text: str) -> None:
    """SEC-01: what somebody typed as a reason must not run on the computer of who reads it."""
    (line,) = csv_lines([[text]])
    ((cell,),) = csv.reader(io.StringIO(line, newline=""))
    assert cell == f"'{text}"


def test_other_values_are_as_they_were() -> None:
    values = ["a,b", 'say "yes"', "two\nlines", None, 7, datetime(2026, 1, 2, tzinfo=UTC)]
    (line,) = csv_lines([values])
    (cells,) = csv.reader(io.StringIO(line, newline=""))
    assert cells == ["a,b", 'say "yes"', "two\nlines", "", "7", "2026-01-02T00:00:00+00:00"]
