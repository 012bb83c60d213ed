"""What A8 and A15 say of the two lists, to the letter: filters, order, sizes of pages."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from deadletters.models import DeadLetter
from incidents.models import Incident, IncidentState, Severity
from incidents.services import acknowledge_incident
from opsconsole.core.database import database_now
from opsconsole.core.ids import new_id
from tests.api.client import Api, problem
from tests.cast import Cast
from tests.factories import dead_letter

pytestmark = pytest.mark.django_db
# Numbers that no incident of the run has by itself: PostgreSQL counts on from test to test.
OWN = 1_000_000


def copies(row: Any, count: int, **fields: Any) -> None:
    """Store ``count`` more of a row; a field may be a function of the number."""
    model = type(row)
    values = {field.attname: getattr(row, field.attname) for field in model._meta.concrete_fields}
    made = []
    for number in range(count):
        chosen = {name: value(number) if callable(value) else value for name, value in fields.items()}
        made.append(model(**{**values, "id": new_id(), **chosen}))
    model._default_manager.bulk_create(made)


@pytest.fixture
def incidents() -> list[Incident]:
    """One of each state and severity, twice, the second of a pair seen a minute before the first."""
    first = dead_letter().incident
    now = database_now()
    states = [(state, severity) for state in IncidentState for severity in Severity] * 2
    copies(
        first, len(states), number=lambda n: OWN + n, key=lambda n: f"key-{n}",
        state=lambda n: states[n][0].value, severity=lambda n: states[n][1].value,
        last_seen_at=lambda n: now - timedelta(minutes=n // 12),
        resolved_at=lambda n: now if states[n][0] == IncidentState.RESOLVED else None,
        acknowledged_at=lambda n: now if states[n][0] == IncidentState.ACKNOWLEDGED else None,
        unresolved_count=lambda n: 0 if states[n][0] == IncidentState.RESOLVED else 1,
    )  # fmt: skip
    return list(Incident.objects.filter(number__gte=OWN))


def told(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(row["state"], row["severity"]) for row in rows if row["number"] >= OWN]


def test_severity_is_stored_as_its_rank() -> None:
    """A8: critical, high, medium, low, in an order that an index has."""
    assert [severity.label for severity in sorted(Severity, reverse=True)] == ["critical", "high", "medium", "low"]
    ordered = next(index for index in Incident._meta.indexes if index.name == "ops_incident_all")
    assert [str(one) for one in ordered.expressions] == [
        "OrderBy(F(severity), descending=True)",
        "OrderBy(F(last_seen_at), descending=True)",
        "OrderBy(F(id), descending=True)",
    ]


def test_incidents_are_filtered_by_state_and_severity_together(ada: Api, incidents: list[Incident]) -> None:
    """A8."""
    for state in IncidentState.values:
        for severity in ("critical", "high", "medium", "low"):
            found = told(ada.rows("incidents", {"state": state, "severity": severity}))
            assert found == [(state, severity)] * 2
    both = told(ada.rows("incidents", {"state": "open,resolved", "severity": "low,critical"}))
    assert sorted(set(both)) == [("open", "critical"), ("open", "low"), ("resolved", "critical"), ("resolved", "low")]
    assert {state for state, _ in told(ada.rows("incidents", {"state": "unresolved"}))} == {"open", "acknowledged"}


@pytest.mark.parametrize("query", [{}, {"state": "open"}, {"severity": "high,low"}, {"state": "unresolved"}])
def test_incidents_come_by_severity_then_newest_seen_then_id(
    ada: Api, incidents: list[Incident], query: dict[str, str]
) -> None:
    """A8: whatever is filtered, and with ties in every part."""
    rows = ada.rows("incidents", query)
    by_id = {str(one.id): one for one in Incident.objects.all()}
    keys = [(by_id[row["id"]].severity, by_id[row["id"]].last_seen_at, by_id[row["id"]].id) for row in rows]
    assert len(keys) > 3
    assert keys == sorted(keys, reverse=True)


@pytest.mark.parametrize(
    ("path", "default", "most"), [("incidents", 50, 100), ("dead-letters", 100, 200)], ids=["A8", "A15"]
)
def test_a_page_has_its_default_size_and_none_is_larger_than_its_bound(
    ada: Api, path: str, default: int, most: int
) -> None:
    """A8: 1 to 100, default 50. A15: 1 to 200, default 100."""
    letter = dead_letter()
    if path == "incidents":
        copies(letter.incident, most + 5, number=lambda n: OWN + n, key=lambda n: f"key-{n}")
    else:
        copies(letter, most + 5, fingerprint=lambda n: f"f-{n}")
    assert len(ada.rows(path)) == default
    assert len(ada.rows(path, {"limit": most})) == most
    assert len(ada.rows(path, {"limit": 1})) == 1
    for wrong in ("0", "-1", str(most + 1), "x", "1.5", ""):
        document = problem(ada.get(path, {"limit": wrong}), 400, "invalid_input")
        assert [error["parameter"] for error in document["errors"]] == ["limit"]


def test_a_page_of_letters_goes_over_from_open_to_acknowledged_to_the_rest(ada: Api, cast: Cast) -> None:
    """A15: newest first within each, also where an older open one meets a newer acknowledged one."""
    now = database_now()
    opened, taken, done = (dead_letter(task=f"shop.{name}") for name in ("opened", "taken", "done"))
    acknowledge_incident(incident_id=taken.incident_id, by=cast.ada, key="a")
    DeadLetter.objects.filter(id=done.id).update(state="repaired", closed_at=now)
    for letter, minutes in ((opened, 30), (taken, 20), (done, 10)):
        DeadLetter.objects.filter(id=letter.id).update(last_seen_at=now - timedelta(minutes=minutes))
        copies(
            DeadLetter.objects.get(id=letter.id), 2, fingerprint=lambda n, of=letter: f"{of.id}-{n}",
            last_seen_at=lambda n, at=minutes: now - timedelta(minutes=at + n + 1),
        )  # fmt: skip
    rows = ada.rows("dead-letters")
    assert [row["state"] for row in rows] == ["open"] * 3 + ["acknowledged"] * 3 + ["repaired"] * 3
    for state in ("open", "acknowledged", "repaired"):
        seen = [row["last_seen_at"] for row in rows if row["state"] == state]
        assert seen == sorted(seen, reverse=True)
    for limit in (2, 4, 5):
        first = ada.get("dead-letters", {"limit": limit}).json()
        second = ada.get(first["next"]).json()
        ids = [row["id"] for row in first["results"] + second["results"]]
        assert ids == [row["id"] for row in rows[: 2 * limit]]
