"""``visible_to``: which rows a list shows. What it shows exactly is test_capability_matching's."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, ClassVar

import pytest
from django.contrib.auth.models import Group, Permission
from django.db import connection
from django.test.utils import CaptureQueriesContext

from grants import sql
from grants.actions import Action
from grants.models import AuditEvent, ScopeUserGrant
from grants.operators import SYSTEM, Operator
from grants.querysets import ScopedQuerySet
from tests.grants.tools import give, write_event

AsOperator = Callable[[Any], Operator]
READ = Action.AUDIT_READ

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _rows() -> None:
    write_event("t-a")
    write_event("t-a", "invoice", "7")
    write_event("t-a", "invoice", "8")
    write_event("t-b", "invoice", "7")


def seen(operator: Operator) -> list[str]:
    rows = AuditEvent.objects.visible_to(operator, READ).order_by("id")
    return [f"{row.tenant}/{row.actor_type}/{row.actor_id}" for row in rows]


def test_without_a_grant_nothing_is_visible(olga: Any, operator: AsOperator) -> None:
    give(olga, Action.INSPECT)
    assert seen(operator(olga)) == []
    assert seen(Operator.cli()) == []


def test_a_grant_for_another_scope_shows_its_own_rows_only(olga: Any, operator: AsOperator) -> None:
    give(olga, READ, "t-b")
    assert seen(operator(olga)) == ["t-b/invoice/7"]


def test_an_actor_scoped_grant_shows_no_tenant_wide_row(olga: Any, operator: AsOperator) -> None:
    """B1."""
    give(olga, READ, "t-a", "invoice")
    assert seen(operator(olga)) == ["t-a/invoice/7", "t-a/invoice/8"]


def test_grants_of_several_shapes_add_up_and_show_no_row_twice(olga: Any, on_call: Group, operator: AsOperator) -> None:
    olga.groups.add(on_call)
    give(olga, READ, "t-a", "invoice", "7")
    give(on_call, READ, "*", "invoice", "7")
    give(on_call, READ, "t-a")
    assert seen(operator(olga)) == ["t-a//", "t-a/invoice/7", "t-a/invoice/8", "t-b/invoice/7"]


def test_a_grant_narrowed_to_a_command_shows_no_row(olga: Any, operator: AsOperator) -> None:
    """B10."""
    give(olga, READ, "t-a", command_id="c-1")
    assert seen(operator(olga)) == []


def test_a_grant_for_everything_filters_nothing(ada: Any, operator: AsOperator) -> None:
    assert len(seen(operator(ada))) == len(seen(SYSTEM)) == 4
    assert "WHERE" not in str(AuditEvent.objects.visible_to(operator(ada), READ).query)


def test_expiry_and_leaving_a_group_take_rows_away(
    olga: Any, on_call: Group, operator: AsOperator, yesterday: datetime
) -> None:
    """C15."""
    olga.groups.add(on_call)
    give(on_call, READ, "t-b", "invoice")
    give(olga, READ, "t-a", expires_at=yesterday)
    assert seen(operator(olga)) == ["t-b/invoice/7"]
    olga.groups.remove(on_call)
    assert seen(operator(olga)) == []


def test_a_queryset_made_before_a_grant_was_taken_back_shows_nothing_after(olga: Any, operator: AsOperator) -> None:
    grant = give(olga, READ, "t-a", "invoice")
    rows = AuditEvent.objects.visible_to(operator(olga), READ)
    ScopeUserGrant.objects.filter(pk=grant.pk).delete()
    assert list(rows) == []


def test_whoever_lost_staff_status_sees_nothing(ada: Any, operator: AsOperator) -> None:
    acting = operator(ada)
    ada.is_staff = False
    ada.save()
    assert seen(acting) == []


def test_djangos_own_permission_shows_nothing_and_every_way_of_looking_agrees(
    vera: Any, on_call: Group, operator: AsOperator
) -> None:
    """GRA-01: list, count, search, detail and the check itself; only a grant for ``*`` opens every tenant."""
    on_call.permissions.add(Permission.objects.get(content_type__app_label="ops_grants", codename=READ.codename))
    vera.groups.add(on_call)
    one = AuditEvent.objects.order_by("id")[0]

    def ways() -> tuple[int, int, bool, bool]:
        rows = AuditEvent.objects.visible_to(operator(vera), READ)
        return (
            len(rows),
            rows.count(),
            rows.filter(pk=one.pk).exists(),
            rows.filter(action__contains="dead").exists(),
        )

    assert ways() == (0, 0, False, False)
    give(vera, READ, "t-b")
    assert ways() == (1, 1, False, True)
    give(vera, READ)
    assert ways() == (4, 4, True, True)


@pytest.mark.parametrize("held", [0, 1, 150])
def test_a_list_costs_one_query_more_than_an_unfiltered_one(
    olga: Any, operator: AsOperator, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    for number in range(held):
        give(olga, READ, f"t-{number}")
    give(olga, READ, "t-a", "invoice")
    acting = operator(olga)
    with CaptureQueriesContext(connection) as queries:
        assert seen(acting) == ["t-a/invoice/7", "t-a/invoice/8"]
    assert len(queries) == 2


def test_very_many_tenants_are_looked_up_instead_of_named(
    olga: Any, on_call: Group, operator: AsOperator, monkeypatch: pytest.MonkeyPatch
) -> None:
    olga.groups.add(on_call)
    for number in range(sql.TENANTS_NAMED + 1):
        give(olga, READ, f"t-{number}")
    give(on_call, READ, "t-b")
    assert sql.plan_for(connection, operator(olga), READ).tenants == ()
    assert seen(operator(olga)) == ["t-b/invoice/7"]
    give(olga, READ)
    assert len(seen(operator(olga))) == 4


def test_columns_may_have_other_names_and_lie_behind_a_relation(olga: Any, operator: AsOperator) -> None:
    class OfUsers(ScopedQuerySet[ScopeUserGrant]):
        tenant_column: ClassVar[str] = "content_object__tenant"
        actor_type_column: ClassVar[str | None] = "content_object__actor_type"
        actor_id_column: ClassVar[str | None] = None

    mine = give(olga, Action.INSPECT, "t-b", "invoice")
    give(olga, READ, "t-b", "invoice")
    give(olga, READ, "*", "*", "7")
    rows = OfUsers(ScopeUserGrant).visible_to(operator(olga), READ).filter(action="inspect")
    assert [row.pk for row in rows] == [mine.pk]
