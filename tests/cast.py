"""The cast: one operator per role, and one of another tenant."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission

from grants.actions import Action
from grants.models import CapabilityScope, ScopeUserGrant
from grants.operators import Operator
from grants.services import bootstrap
from opsconsole.core.database import database_now


@dataclass(frozen=True, slots=True)
class Cast:
    """``ada`` holds everything everywhere, ``olga`` repairs ``default``, ``bram`` repairs ``t-b``, ``vera`` reads all,
    ``nobody`` is staff without a grant."""

    ada: Operator
    olga: Operator
    bram: Operator
    vera: Operator
    nobody: Operator


REPAIRS = (
    Action.INSPECT,
    Action.DEAD_LETTERS_RETRY,
    Action.DEAD_LETTERS_DISCARD,
    Action.INCIDENTS_ACKNOWLEDGE,
    Action.INCIDENTS_RESOLVE,
)


def make_operator(name: str) -> Operator:
    return Operator.from_user(get_user_model().objects.create_user(name, password="pw", is_staff=True))


def give(operator: Operator, *actions: Action, tenant: str = "*", actor_type: str = "*", actor_id: str = "*") -> None:
    """Give grants without an audit row, for tests that are not about granting."""
    scope, _made = CapabilityScope.objects.get_or_create(
        tenant=tenant, actor_type=actor_type, actor_id=actor_id, command_id="*"
    )
    for action in actions:
        permission = Permission.objects.get(content_type__app_label="ops_grants", codename=action.codename)
        ScopeUserGrant(
            user_id=operator.user_id,
            permission=permission,
            content_object=scope,
            granted_by_name="tests",
            reason="a role of the cast",
            granted_at=database_now(),
        ).save()


@pytest.fixture
def cast(db: None) -> Cast:
    ada = make_operator("ada")
    bootstrap(username="ada")
    olga, bram, vera, nobody = (make_operator(name) for name in ("olga", "bram", "vera", "nobody"))
    give(olga, *REPAIRS, tenant="default")
    give(bram, *REPAIRS, tenant="t-b")
    give(vera, Action.INSPECT)
    return Cast(ada=ada, olga=olga, bram=bram, vera=vera, nobody=nobody)
