"""Host projects with user models of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCENARIO = """
from datetime import timedelta
import django
django.setup()
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group
from django.test.utils import setup_databases, teardown_databases
from django.db import connection
from grants import services, sql
from grants.access import authorise, can, held_actions
from grants.actions import Action
from grants.errors import NotAnOperator
from grants.models import ApiToken, AuditEvent
from grants.operators import Operator
from grants.resources import Resource
from grants.selectors import grants_visible_to
from opsconsole.core.database import database_now

old = setup_databases(verbosity=0, interactive=False)
try:
    People = get_user_model()
    print("bootstrapped", len(services.bootstrap(username="ada@example.org", create=True, password="p").given))
    ada = Operator.from_user(People.objects.get(email="ada@example.org"))
    olga = People.objects.create_user("olga@example.org", "p", is_staff=True)
    acting = Operator.from_user(olga)
    letter = Resource(tenant="t-a", actor_type="invoice", actor_id="7")
    end = database_now() + timedelta(days=1)
    give = dict(by=ada, action=Action.AUDIT_READ, tenant="t-a", actor_type="invoice", reason="r", expires_at=end)
    print("before", can(acting, Action.AUDIT_READ, letter))
    services.grant(**give, user=olga, key="k-1")
    print("after", authorise(acting, Action.AUDIT_READ, letter).id.split(":")[0])
    services.grant(**give | {"actor_type": "*", "expires_at": end}, user=olga, key="k-2")
    print("sees", AuditEvent.objects.visible_to(acting, Action.AUDIT_READ).count() > 0)
    if hasattr(olga, "groups"):
        olga.groups.add(Group.objects.create(name="on-call"))
        services.grant(**give | {"action": Action.EXPORT}, group=Group.objects.get(), key="k-3")
        print("by group", authorise(acting, Action.EXPORT, letter).id.split(":")[0])
    print("grants", len(grants_visible_to(ada, user=olga)))
    made = services.create_token(
        by=ada, name="n", actions={Action.INSPECT}, tenant="*", expires_at=end, key="k-4"
    )
    print("token", can(Operator.from_token(ApiToken.objects.live(made.plain)), Action.INSPECT, letter))
    if People.__name__ == "Member":
        People.objects.filter(pk=olga.pk).update(is_staff=False)
        print("no longer staff", can(acting, Action.AUDIT_READ, letter))
    else:
        guest = People.objects.create_user("guest@example.org", "p", is_staff=False)
        try:
            Operator.from_user(guest)
        except NotAnOperator:
            print("guests are no operators")
    print("triggers", sql.missing_triggers(connection))
finally:
    teardown_databases(old, verbosity=0)
"""

COMMON = """bootstrapped 19
before False
after user-grant
sees True
{by_group}grants {grants}
token True
{last}
triggers []
"""


@pytest.mark.parametrize(
    ("model", "by_group", "grants", "last"),
    [
        ("people.Member", "by group group-grant\n", 3, "no longer staff False"),
        ("people.Loner", "", 2, "guests are no operators"),
    ],
)
def test_a_host_may_have_its_own_user_model(tmp_path: Path, model: str, by_group: str, grants: int, last: str) -> None:
    """With other keys and columns, or without groups."""
    environment = os.environ | {
        "DJANGO_SETTINGS_MODULE": "tests.grants.people.settings",
        "PEOPLE_USER_MODEL": model,
        "OPSCONSOLE_VAR_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCENARIO], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stderr == ""
    assert done.stdout == COMMON.format(by_group=by_group, grants=grants, last=last)
