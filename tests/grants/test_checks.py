"""The hosts that are refused by a system check; the triggers' check is in test_append_only."""

from __future__ import annotations

from typing import Any

import pytest
from django.db.models import Model

from grants.actions import Action
from grants.checks import check_database_routing, check_time_zones
from grants.models import CapabilityScope


class GrantsElsewhere:
    """A database router as a host project may have one."""

    def db_for_read(self, model: type[Model], **_: Any) -> str | None:
        return None

    def db_for_write(self, model: type[Model], **_: Any) -> str | None:
        return "other" if model._meta.app_label == "ops_grants" else None


class UsersElsewhere:
    """Another one, which leaves our apps alone."""

    def db_for_read(self, model: type[Model], **_: Any) -> str | None:
        return "other" if model._meta.app_label == "auth" else None

    db_for_write = db_for_read


def test_local_times_are_refused(settings: Any) -> None:
    assert check_time_zones() == []
    settings.USE_TZ = False
    assert [message.id for message in check_time_zones()] == ["ops_grants.E001"]


def test_our_apps_on_another_database_are_refused(settings: Any) -> None:
    assert check_database_routing() == []
    settings.DATABASE_ROUTERS = [GrantsElsewhere()]
    (message,) = check_database_routing()
    assert message.id == "ops_grants.E002"
    assert "ops_grants" in message.msg
    assert "Not supported yet" in str(message.hint)
    settings.DATABASE_ROUTERS = [UsersElsewhere()]
    assert check_database_routing() == []


@pytest.mark.parametrize("action", list(Action))
def test_every_action_has_a_permission_whose_name_guardian_can_read(action: Action) -> None:
    """guardian splits a permission at the dot."""
    assert (action.codename, action.value) in CapabilityScope._meta.permissions
    assert action.codename.replace("_", "").isalpha()


def test_no_two_actions_share_a_permission() -> None:
    assert len({action.codename for action in Action}) == len(Action) == 19
