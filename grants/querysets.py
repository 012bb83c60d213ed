"""The second door: which rows an operator may see."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, ClassVar, Self
from uuid import UUID

from django.apps import apps
from django.db import connection
from django.db.models import Exists, Model, OuterRef, Q, QuerySet

from grants import sql
from grants.actions import Action
from grants.operators import Operator, OperatorKind
from grants.principals import group_ids, live
from grants.resources import ANY, Resource

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    M = TypeVar("M", bound=Model, covariant=True, default=Any)
else:
    from typing import TypeVar

    M = TypeVar("M", bound=Model, covariant=True)


class ScopedQuerySet(QuerySet[M]):
    """A queryset of rows that belong to a tenant and perhaps to an actor.

    A model whose columns have other names, or whose rows have no actor, overrides the three column attributes; a name
    may go through a relation (``letter__tenant``). ``target_type`` is what a capability and the audit call such a row.
    """

    tenant_column: ClassVar[str] = "tenant"
    actor_type_column: ClassVar[str | None] = "actor_type"
    actor_id_column: ClassVar[str | None] = "actor_id"
    target_type: ClassVar[str] = ""

    def scope(self, row_id: UUID) -> Resource | None:
        """Return what a capability for the row has to cover, of columns that never change after insert.

        ``None`` if there is no such row.
        """
        names = {"tenant": self.tenant_column, "actor_type": self.actor_type_column, "actor_id": self.actor_id_column}
        columns = {name: column for name, column in names.items() if column is not None}
        row = self.filter(id=row_id).values_list(*columns.values()).first()
        if row is None:
            return None
        return Resource(**dict(zip(columns, row, strict=True)), target_type=self.target_type, target_id=str(row_id))

    def visible_to(self, operator: Operator, action: Action, *, plan: sql.Plan | None = None) -> Self:
        """Keep the rows on which ``authorise(operator, action, ...)`` would find a capability, and no other.

        Asks once which shapes of grants the operator holds, then filters with one equality-only EXISTS for each:
        wildcards inside the subquery could not be hashed, and one row's grants would be searched for every row of the
        table. Whole tenants are named instead, so that an index that begins with the tenant is used; these are the
        tenants of the moment of the call, so a queryset is for one request. Rows have no command: a grant narrowed to
        one shows none of them. Whoever filters several tables at once asks for the ``plan`` of that operator and
        action first (``grants.selectors.plan_of``) and hands it in; it is asked for once then.
        """
        if operator.kind is OperatorKind.SYSTEM:
            return self.all()
        if operator.user_id is None:
            return self.none()
        rows = self.all()
        if operator.kind is OperatorKind.TOKEN:
            if operator.token_actions is None or action not in operator.token_actions or operator.token_tenant is None:
                return self.none()
            if operator.token_tenant != ANY:
                rows = rows.filter(**{self.tenant_column: operator.token_tenant})
        plan = sql.plan_for(connection, operator, action) if plan is None else plan
        if plan.everything:
            return rows
        conditions = [self._grant_exists(shape, operator, action) for shape in plan.shapes if self._has_columns(shape)]
        if plan.tenants:
            conditions.append(Q(**{f"{self.tenant_column}__in": plan.tenants}))
        return rows.filter(reduce(or_, conditions)) if conditions else self.none()

    def _has_columns(self, shape: sql.Shape) -> bool:
        """A grant narrowed by a column that these rows don't have covers none of them (B1)."""
        return (shape.any_actor_type or self.actor_type_column is not None) and (
            shape.any_actor_id or self.actor_id_column is not None
        )

    def _grant_exists(self, shape: sql.Shape, operator: Operator, action: Action) -> Q:
        grants = apps.get_model("ops_grants", "ScopeUserGrant" if shape.source == "user" else "ScopeGroupGrant")
        mine = Q(user_id=operator.user_id) if shape.source == "user" else Q(group_id__in=group_ids(operator.user_id))
        matching = grants._default_manager.filter(
            mine,
            live(),
            action=action.value,
            tenant=ANY if shape.any_tenant else OuterRef(self.tenant_column),
            actor_type=ANY if shape.any_actor_type else OuterRef(self.actor_type_column or ""),
            actor_id=ANY if shape.any_actor_id else OuterRef(self.actor_id_column or ""),
            command_id=ANY,
        )
        return Q(Exists(matching))
