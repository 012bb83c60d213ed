"""The cast and the tools of the grants tests."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group

from grants.actions import Action
from grants.operators import Operator
from opsconsole.core.database import database_now
from tests.grants.tools import give, make_user


@pytest.fixture
def olga(db: None) -> Any:
    """An active staff user without any grant."""
    return make_user("olga")


@pytest.fixture
def vera(db: None) -> Any:
    """Another one."""
    return make_user("vera")


@pytest.fixture
def ada(db: None) -> Any:
    """Who may do everything everywhere, without end."""
    user = make_user("ada")
    for action in Action:
        give(user, action)
    return user


@pytest.fixture
def on_call(db: None) -> Group:
    """A group without members or grants."""
    return Group.objects.create(name="on-call")


@pytest.fixture
def operator() -> Callable[[Any], Operator]:
    """Return the operator that a user is, read from the database as a request would."""

    def as_operator(user: Any) -> Operator:
        return Operator.from_user(get_user_model().objects.get(pk=user.pk))

    return as_operator


@pytest.fixture
def tomorrow(db: None) -> datetime:
    """The database's time in a day."""
    return database_now() + timedelta(days=1)


@pytest.fixture
def yesterday(db: None) -> datetime:
    """The database's time a day ago."""
    return database_now() - timedelta(days=1)
