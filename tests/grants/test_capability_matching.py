"""Both doors against an authoriser that anyone can check by reading it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import product
from typing import Any, ClassVar
from unittest import mock

from django.contrib.auth.models import Group
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.django import TestCase

from grants import audit, sql
from grants.access import SYSTEM_CAPABILITY, access_of, actions_on, can, held_actions, holds
from grants.actions import Action
from grants.audit import AuditEntry
from grants.models import ApiToken, AuditEvent
from grants.operators import SYSTEM, Operator, OperatorKind
from grants.querysets import ScopedQuerySet
from grants.resources import ANY, Resource
from grants.selectors import plan_of
from opsconsole.core.database import database_now
from tests.grants.tools import give, make_user

ACTIONS = (Action.INSPECT, Action.DEAD_LETTERS_RETRY)
GRANTED = st.sampled_from([ANY, ANY, "a", "b"])
WANTED = st.sampled_from(["", "a", "b", "c", ANY])


@dataclass(frozen=True)
class Given:
    """A grant as the strategies draw it."""

    holder: str  # the user, a group they are in, or a group they are not in
    action: Action
    tenant: str
    actor_type: str
    actor_id: str
    command_id: str
    has_ended: bool


def covers(granted: str, wanted: str) -> bool:
    return granted == ANY or (granted == wanted and wanted != "")


def allows(grants: list[Given], action: Action, resource: Resource) -> bool:
    """B1, one line a rule."""
    return any(
        grant.holder in ("me", "my group")
        and not grant.has_ended
        and grant.action is action
        and covers(grant.tenant, resource.tenant)
        and covers(grant.actor_type, resource.actor_type)
        and covers(grant.actor_id, resource.actor_id)
        and covers(grant.command_id, resource.command_id)
        for grant in grants
    )


GRANTS = st.lists(
    st.builds(
        Given,
        holder=st.sampled_from(["me", "me", "my group", "another group", "somebody else"]),
        action=st.sampled_from(ACTIONS),
        tenant=GRANTED,
        actor_type=GRANTED,
        actor_id=GRANTED,
        command_id=st.sampled_from([ANY, ANY, ANY, "a"]),
        has_ended=st.sampled_from([False, False, False, True]),
    ),
    max_size=6,
    unique_by=lambda grant: (
        grant.holder, grant.action, grant.tenant, grant.actor_type, grant.actor_id, grant.command_id
    ),
)  # fmt: skip
RESOURCES = st.builds(Resource, tenant=WANTED, actor_type=WANTED, actor_id=WANTED, command_id=WANTED)


class TenantWide(ScopedQuerySet[AuditEvent]):
    """Reads the rows as if they had no actor, as incidents have none."""

    actor_type_column: ClassVar[str | None] = None
    actor_id_column: ClassVar[str | None] = None


class CapabilityMatching(TestCase):
    user: Any
    holders: dict[str, Any]
    token: ApiToken

    @classmethod
    def setUpTestData(cls) -> None:
        cls.user = make_user("olga")
        cls.holders = {
            "me": cls.user,
            "somebody else": make_user("vera"),
            "my group": Group.objects.create(name="mine"),
            "another group": Group.objects.create(name="other"),
        }
        cls.user.groups.add(cls.holders["my group"])
        cls.token, _ = ApiToken.objects.issue(
            user=cls.user, name="t", actions=ACTIONS, tenant=ANY, expires_at=database_now() + timedelta(days=1)
        )
        audit.record_many(
            [
                AuditEntry(
                    action="a",
                    operator=SYSTEM,
                    resource=Resource(tenant=tenant, actor_type=actor_type, actor_id=actor_id),
                    capability=SYSTEM_CAPABILITY,
                    outcome={},
                )
                for tenant, actor_type, actor_id in product(["a", "b", "c"], ["", "a", "b"], ["", "a", "b"])
            ]
        )

    def store(self, grants: list[Given]) -> None:
        now = database_now()
        for grant in grants:
            give(
                self.holders[grant.holder],
                grant.action,
                grant.tenant,
                grant.actor_type,
                grant.actor_id,
                grant.command_id,
                expires_at=now + timedelta(days=-1 if grant.has_ended else 1),
            )

    @given(GRANTS, st.sampled_from(ACTIONS), st.lists(RESOURCES, min_size=1, max_size=5))
    @settings(max_examples=60)
    def test_authorise_agrees_with_the_rules(
        self, grants: list[Given], action: Action, resources: list[Resource]
    ) -> None:
        """B1."""
        self.store(grants)
        me = Operator.from_user(self.user)
        for resource in resources:
            allowed = allows(grants, action, resource)
            assert can(me, action, resource) == allowed, resource
            assert actions_on(me, ACTIONS, resource) == {one for one in ACTIONS if allows(grants, one, resource)}
        assert holds(me, action) == any(
            g.action is action and g.holder in ("me", "my group") and not g.has_ended for g in grants
        )

    @given(GRANTS, st.sampled_from(ACTIONS), st.sampled_from([0, 1, 100]))
    @settings(max_examples=60)
    def test_a_list_shows_exactly_what_authorise_allows(
        self, grants: list[Given], action: Action, tenants_named: int
    ) -> None:
        """B1: lists and their details can't disagree, by whichever way the list is filtered."""
        self.store(grants)
        me = Operator.from_user(self.user)
        with mock.patch.object(sql, "TENANTS_NAMED", tenants_named):
            visible = set(AuditEvent.objects.visible_to(me, action).values_list("pk", flat=True))
            tenant_wide = set(TenantWide(AuditEvent).visible_to(me, action).values_list("pk", flat=True))
        for row in AuditEvent.objects.all():
            resource = Resource(tenant=row.tenant, actor_type=row.actor_type, actor_id=row.actor_id)
            assert (row.pk in visible) == allows(grants, action, resource), resource
            assert (row.pk in tenant_wide) == allows(grants, action, Resource(tenant=row.tenant)), resource

    @given(
        GRANTS,
        st.sampled_from(ACTIONS),
        st.lists(RESOURCES, min_size=1, max_size=4),
        st.frozensets(st.sampled_from(ACTIONS)),
        st.sampled_from([ANY, "a", "b"]),
    )
    @settings(max_examples=60)
    def test_one_look_at_the_grants_says_what_the_single_questions_say(
        self,
        grants: list[Given],
        action: Action,
        resources: list[Resource],
        token_actions: frozenset[Action],
        token_tenant: str,
    ) -> None:
        """B1: what a page shows can't disagree with what its buttons may do."""
        self.store(grants)
        me = Operator.from_user(self.user)
        token = replace(
            me,
            kind=OperatorKind.TOKEN,
            id=str(self.token.public_id),
            token_actions=token_actions,
            token_tenant=token_tenant,
        )
        for who, resource in product((me, token), resources):
            access = access_of(who, action, resource)
            assert access.held == held_actions(who)
            assert access.on_it == actions_on(who, Action, resource)
            plan = plan_of(who, action)
            assert (access.plan.everything, access.plan.tenants) == (plan.everything, plan.tenants)
            assert set(access.plan.shapes) == set(plan.shapes)
            for other in resources:
                assert access.of(ACTIONS, other) in (None, actions_on(who, ACTIONS, other)), other

    @given(GRANTS, st.frozensets(st.sampled_from(ACTIONS)), st.sampled_from([ANY, "a", "b"]), RESOURCES)
    @settings(max_examples=60)
    def test_a_token_never_exceeds_its_owner_or_itself(
        self, grants: list[Given], actions: frozenset[Action], tenant: str, resource: Resource
    ) -> None:
        """B1, and the design: a token is part of its owner's grants."""
        self.store(grants)
        token = Operator(
            kind=OperatorKind.TOKEN,
            id=str(self.token.public_id),
            name="t",
            user_id=self.user.pk,
            token_actions=actions,
            token_tenant=tenant,
        )

        def may(action: Action, wanted: Resource) -> bool:
            return action in actions and tenant in (ANY, wanted.tenant) and allows(grants, action, wanted)

        assert actions_on(token, ACTIONS, resource) == {action for action in ACTIONS if may(action, resource)}
        for action in ACTIONS:
            assert can(token, action, resource) == may(action, resource)
            visible = set(AuditEvent.objects.visible_to(token, action).values_list("pk", flat=True))
            for row in AuditEvent.objects.all():
                wanted = Resource(tenant=row.tenant, actor_type=row.actor_type, actor_id=row.actor_id)
                assert (row.pk in visible) == may(action, wanted)
