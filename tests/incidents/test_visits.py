"""What is new to somebody: remembered by their browser, by the database's clock."""

from __future__ import annotations

from datetime import datetime, timedelta
from unittest import mock

import pytest
from django.test import Client

from incidents.models import Incident
from opsconsole.core.database import database_now
from tests.admin.conftest import SignIn
from tests.admin.conftest import sign_in as sign_in
from tests.cast import Cast
from tests.factories import dead_letter

pytestmark = pytest.mark.django_db
LIST = "/ops/incidents/"


def _new(client: Client, at: datetime) -> set[str]:
    """Return the tasks of the incidents that the list marks as new when it is opened at that moment."""
    with mock.patch("incidents.admin.database_now", return_value=at):
        answer = client.get(LIST)
    assert ("New to you" in answer.content.decode()) == any(one.is_new for one in answer.context["cl"].result_list)
    return {one.job_type for one in answer.context["cl"].result_list if one.is_new}


def test_what_was_opened_since_the_last_visit_is_marked_until_the_visit_is_over(cast: Cast, sign_in: SignIn) -> None:
    dead_letter(task="shop.old")
    client, now = sign_in(cast.ada), database_now()
    assert _new(client, now) == set(), "nothing is new to who has never been here"
    new = dead_letter(task="shop.new").incident
    Incident.objects.filter(id=new.id).update(opened_at=now + timedelta(minutes=40))
    later = now + timedelta(hours=1)
    assert _new(client, later) == {"shop.new"}
    assert _new(client, later + timedelta(minutes=20)) == {"shop.new"}, "it is the same visit"
    assert _new(client, later + timedelta(hours=2)) == set()


def test_an_incident_that_came_back_is_not_called_new(cast: Cast, sign_in: SignIn) -> None:
    client, now = sign_in(cast.ada), database_now()
    dead_letter()
    _new(client, now)
    Incident.objects.update(episode=2, opened_at=now + timedelta(minutes=40))
    assert _new(client, now + timedelta(hours=1)) == set()


def test_what_another_operator_looked_at_in_the_same_browser_counts_for_nobody_else(
    cast: Cast, sign_in: SignIn
) -> None:
    client, now = sign_in(cast.ada), database_now()
    _new(client, now)
    other = sign_in(cast.vera)
    other.cookies.update({name: cookie for name, cookie in client.cookies.items() if name.startswith("ops_visit_")})
    incident = dead_letter().incident
    Incident.objects.filter(id=incident.id).update(opened_at=now + timedelta(minutes=40))
    assert _new(other, now + timedelta(hours=1)) == set()
    assert _new(client, now + timedelta(hours=1)) == {incident.job_type}


def test_a_cookie_that_is_not_ours_is_none(cast: Cast, sign_in: SignIn) -> None:
    client, now = sign_in(cast.ada), database_now()
    _new(client, now)
    for name in [name for name in client.cookies if name.startswith("ops_visit_")]:
        client.cookies[name] = "/1.0"
    dead_letter()
    assert _new(client, now + timedelta(hours=1)) == set()
