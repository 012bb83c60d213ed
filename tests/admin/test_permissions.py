"""Giving, explaining and taking back permissions, and one's own API tokens."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, timedelta
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group
from django.test import Client, override_settings
from django.utils import timezone

from grants import selectors
from grants.access import can
from grants.actions import Action
from grants.models import ApiToken, AuditEvent, ScopeGroupGrant, ScopeUserGrant, Verdict
from grants.operators import Operator
from grants.resources import Resource
from grants.services import create_token
from grants.words import MAY
from tests.admin.conftest import SignIn
from tests.admin.tools import confirm, hidden_fields, text_of
from tests.cast import Cast, give
from tests.factories import dead_letter, seconds
from tests.grants.tools import give as give_row

pytestmark = pytest.mark.django_db

GIVE = "/ops/permissions/give/"
EXPLAIN = "/ops/permissions/explain/"


def _unspaced(text: str) -> str:
    """Return what is read of a page without the spaces that stand for tags within brackets."""
    return text.replace("( ", "(").replace(" )", ")")


def _wanted(**more: str) -> dict[str, str]:
    until = f"{timezone.now() + seconds(3_600):%Y-%m-%dT%H:%M}"
    wanted = {"user": "nobody", "group": "", "action": "inspect", "tenant": "default", "reason": "rota"}
    return wanted | {"actor_type": "*", "actor_id": "*", "command_id": "*", "expires_at": until} | more


def _may(operator: Operator, action: Action = Action.INSPECT, tenant: str = "default") -> bool:
    return can(operator, action, Resource(tenant=tenant))


def test_a_permission_is_given_with_a_reason_and_an_end(cast: Cast, sign_in: SignIn) -> None:
    """C15."""
    answer = confirm(sign_in(cast.ada), GIVE, _wanted(), follow=True)
    assert "inspect is given as user-grant:" in text_of(answer.content.decode())
    assert _may(cast.nobody)
    row = ScopeUserGrant.objects.get(user_id=cast.nobody.user_id)
    assert (row.reason, row.granted_by_name) == ("rota", "ada")
    assert row.expires_at is not None


def test_a_double_submit_gives_once(cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.ada)
    values = hidden_fields(client.get(GIVE).content.decode()) | _wanted()
    client.post(GIVE, values)
    answer = client.post(GIVE, values, follow=True)
    assert "nothing was repeated" in text_of(answer.content.decode())
    assert AuditEvent.objects.filter(action="grants.granted").count() == 1


def test_a_permission_is_given_to_a_group(cast: Cast, sign_in: SignIn) -> None:
    Group.objects.create(name="on-call")
    confirm(sign_in(cast.ada), GIVE, _wanted(user="", group="on-call"))
    assert ScopeGroupGrant.objects.get().group.name == "on-call"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"user": ""}, "Name a user or a group"),
        ({"group": "on-call"}, "Name a user or a group"),
        ({"user": "ghost"}, "There is no such user or group"),
        ({"reason": ""}, "required"),
        ({"expires_at": "2001-01-01T00:00"}, "A grant ends in the future"),
        ({"expires_at": "soon"}, "valid date"),
        ({"action": "grants.all"}, "not one of the available choices"),
        ({"user": "ada"}, "Nobody can give a permission to themselves"),
        ({"tenant": " "}, "required"),
        ({"tenant": "a\x00b"}, "Null characters"),
    ],
)
def test_what_cannot_be_given_is_refused_with_its_reason(
    wrong: dict[str, str], said: str, cast: Cast, sign_in: SignIn
) -> None:
    answer = confirm(sign_in(cast.ada), GIVE, _wanted(**wrong))
    assert answer.status_code in (400, 403)
    assert said in text_of(answer.content.decode())
    assert not ScopeUserGrant.objects.filter(user_id=cast.nobody.user_id).exists()


def test_nobody_gives_what_they_do_not_hold(cast: Cast, sign_in: SignIn) -> None:
    """C15: neither another action nor another tenant."""
    give(cast.olga, Action.GRANTS_MANAGE, tenant="default")
    client = sign_in(cast.olga)
    offered = [value for value, _ in client.get(GIVE).context["asked"].form.fields["action"].choices]
    assert "audit.read" not in offered
    assert confirm(client, GIVE, _wanted(action="audit.read")).status_code == 400
    answer = confirm(client, GIVE, _wanted(tenant="t-b"))
    assert answer.status_code == 403
    assert "You do not hold this on that tenant" in text_of(answer.content.decode())
    assert AuditEvent.objects.filter(operator_name="olga", verdict=Verdict.DENIED, tenant="t-b").exists()
    assert confirm(client, GIVE, _wanted()).status_code == 302


@pytest.mark.parametrize("holder", ["user", "group"])
def test_who_gives_permissions_of_one_tenant_learns_nothing_of_who_exists_by_trying_another(
    holder: str, cast: Cast, sign_in: SignIn
) -> None:
    """C15: the refusal comes before anybody is looked for."""
    Group.objects.create(name="on-call")
    give(cast.olga, Action.GRANTS_MANAGE, tenant="default")
    client = sign_in(cast.olga)
    pages = []
    for name in ("nobody" if holder == "user" else "on-call", "ghost"):
        wanted = _wanted(user="", group="", tenant="t-b") | {holder: name}
        answer = confirm(client, GIVE, wanted)
        assert answer.status_code == 403
        pages.append(text_of(answer.content.decode()))
    assert pages[0] == pages[1]
    assert "no such user or group" not in pages[0]


ZONES = ["America/New_York", "Asia/Tokyo", "UTC"]


@pytest.fixture(params=ZONES)
def zone(request: pytest.FixtureRequest) -> Iterator[str]:
    """The time zone of the project that the console is attached to."""
    with override_settings(TIME_ZONE=request.param):
        yield request.param


def test_the_end_of_a_permission_is_utc_whatever_the_projects_time_zone(zone: str, cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.ada)
    offered = client.get(GIVE).content.decode()
    in_a_week = timezone.now() + timedelta(days=7)
    minutes = [in_a_week - timedelta(minutes=1), in_a_week]
    assert any(f'value="{moment:%Y-%m-%dT%H:%M}"' in offered for moment in minutes)
    typed = f"{timezone.now() + timedelta(days=3):%Y-%m-%dT%H:%M}"
    refused = confirm(client, GIVE, _wanted(expires_at=typed, reason=""))
    assert f'value="{typed}"' in refused.content.decode()
    assert confirm(client, GIVE, _wanted(expires_at=typed)).status_code == 302
    row = ScopeUserGrant.objects.get(user_id=cast.nobody.user_id)
    assert f"{row.expires_at.astimezone(UTC):%Y-%m-%dT%H:%M}" == typed


def test_the_end_of_a_token_is_utc_whatever_the_projects_time_zone(zone: str, cast: Cast, sign_in: SignIn) -> None:
    typed = f"{timezone.now() + timedelta(days=3):%Y-%m-%dT%H:%M}"
    confirm(sign_in(cast.olga), "/ops/tokens/new/", _token(expires_at=typed))
    assert f"{ApiToken.objects.get().expiry.astimezone(UTC):%Y-%m-%dT%H:%M}" == typed


def test_the_last_and_the_first_minute_that_can_be_typed_are_no_error(zone: str, cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.ada)
    assert confirm(client, GIVE, _wanted(expires_at="9999-12-31T23:59")).status_code == 302
    assert confirm(client, "/ops/tokens/new/", _token(expires_at="9999-12-31T23:59")).status_code == 200
    for impossible in ("0001-01-01T00:00", "9999-12-31T23:59-14:00", "0001-01-01T00:00+14:00"):
        assert confirm(client, GIVE, _wanted(expires_at=impossible)).status_code == 400
        assert confirm(client, "/ops/tokens/new/", _token(expires_at=impossible)).status_code == 400
    for page in ("/ops/permissions/", f"{EXPLAIN}?user=nobody", "/ops/tokens/"):
        assert "31 Dec 9999 23:59" in client.get(page).content.decode()


def test_a_permission_is_taken_back_with_a_reason(cast: Cast, sign_in: SignIn) -> None:
    row = ScopeUserGrant.objects.filter(user_id=cast.olga.user_id, action="dead-letters.retry").get()
    url = f"/ops/permissions/{row}/take-back/"
    client = sign_in(cast.ada)
    assert confirm(client, url, {"reason": ""}).status_code == 400
    answer = confirm(client, url, {"reason": "rota ended"}, follow=True)
    assert "is taken back" in text_of(answer.content.decode())
    assert not _may(cast.olga, Action.DEAD_LETTERS_RETRY)


def test_a_manager_of_one_tenant_sees_and_takes_back_only_its_permissions(cast: Cast, sign_in: SignIn) -> None:
    """GRA-02."""
    give(cast.olga, Action.GRANTS_MANAGE, tenant="default")
    client = sign_in(cast.olga)
    rows = client.get("/ops/permissions/").context["rows"]
    assert {row["grant"].tenant for row in rows} == {"default"}
    foreign = ScopeUserGrant.objects.filter(user_id=cast.bram.user_id).first()
    url = f"/ops/permissions/{foreign}/take-back/"
    assert client.get(url).status_code == 404
    assert client.post(url, {"reason": "r", "idempotency_key": "k"}).status_code == 404
    for broken in ("user-grant:x", "x", "user-grant:99999999999999999999"):
        assert client.get(f"/ops/permissions/{broken}/take-back/").status_code == 404
    assert ScopeUserGrant.objects.filter(pk=foreign.pk).exists()


def test_a_permission_beyond_those_that_are_listed_can_be_taken_back(
    cast: Cast, sign_in: SignIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selectors, "LISTED_GRANTS", 1)
    client = sign_in(cast.ada)
    listed = {row["grant"].id for row in client.get("/ops/permissions/").context["rows"]}
    row = ScopeUserGrant.objects.filter(user_id=cast.vera.user_id).get()
    assert str(row) not in listed
    answer = confirm(client, f"/ops/permissions/{row}/take-back/", {"reason": "rota ended"}, follow=True)
    assert "is taken back" in text_of(answer.content.decode())
    assert not ScopeUserGrant.objects.filter(pk=row.pk).exists()
    assert not AuditEvent.objects.filter(verdict=Verdict.DENIED).exists()


def test_a_permission_that_is_gone_is_no_denial_for_who_manages_all(cast: Cast, sign_in: SignIn) -> None:
    """B2: denied is who may not, and not who asks for what is not there."""
    url = "/ops/permissions/user-grant:999999999/take-back/"
    assert sign_in(cast.ada).get(url).status_code == 404
    assert not AuditEvent.objects.filter(verdict=Verdict.DENIED).exists()
    assert sign_in(cast.vera).get(url).status_code == 404
    assert AuditEvent.objects.get(verdict=Verdict.DENIED).target_id == "user-grant:999999999"


def test_everyone_sees_their_own_permissions_and_no_other(cast: Cast, sign_in: SignIn) -> None:
    page = sign_in(cast.vera).get("/ops/permissions/")
    assert {row["grant"].holder for row in page.context["rows"]} == {"vera"}
    assert "needs the permission grants.manage" in text_of(page.content.decode())


def _ask(client: Client, **question: str) -> Any:
    return client.get(EXPLAIN, question)


def test_explain_answers_yes_with_the_permission_and_each_field(cast: Cast, sign_in: SignIn) -> None:
    """C15."""
    text = text_of(_ask(sign_in(cast.ada), user="olga", action="inspect", tenant="default").content.decode())
    assert f"Yes: olga may {MAY[Action.INSPECT]} (inspect) on tenant default" in _unspaced(text)
    assert "By user-grant:" in text
    assert "tenant default is covered by default" in text


def test_explain_answers_no_with_what_is_missing(cast: Cast, sign_in: SignIn) -> None:
    """C15."""
    text = text_of(_ask(sign_in(cast.ada), user="olga", action="inspect", tenant="t-b").content.decode())
    assert f"No: olga may not {MAY[Action.INSPECT]} (inspect) on tenant t-b" in _unspaced(text)
    assert "tenant is default, not t-b" in text


def test_everyone_may_ask_about_themselves(cast: Cast, sign_in: SignIn) -> None:
    page = sign_in(cast.vera).get(EXPLAIN)
    assert "Your permissions" in text_of(page.content.decode())
    text = text_of(_ask(sign_in(cast.vera), user="vera", action="audit.read", tenant="x").content.decode())
    assert "No: vera may not read the audit trail (audit.read)" in _unspaced(text)


@pytest.mark.parametrize("user", ["olga", "ghost", "a\x00b"])
def test_who_manages_no_permission_learns_nothing_of_others(user: str, cast: Cast, sign_in: SignIn) -> None:
    """Not even whether the name exists."""
    text = text_of(_ask(sign_in(cast.vera), user=user, action="inspect", tenant="default").content.decode())
    assert "may not" not in text
    assert "dead-letters.retry on tenant" not in text
    assert "The permissions of" not in text_of(_ask(sign_in(cast.vera), user=user).content.decode())


def test_a_shared_group_tells_nothing_of_its_other_members(cast: Cast, sign_in: SignIn) -> None:
    """C15: the answer is that of a name that does not exist."""
    group = Group.objects.create(name="on-call-payroll")
    give_row(group, Action.INSPECT, "default")
    for member in (cast.vera, cast.olga):
        get_user_model().objects.get(pk=member.user_id).groups.add(group)
    client = sign_in(cast.vera)
    assert "on-call-payroll" in client.get("/ops/permissions/").content.decode()
    pages = {}
    for name in ("olga", "ghost"):
        page = _ask(client, user=name)
        assert page.status_code == 200
        pages[name] = text_of(page.content.decode())
        assert "There is no such user, or you manage none of their permissions." in pages[name]
    assert pages["olga"] == pages["ghost"]


def test_a_manager_of_one_tenant_is_not_told_of_permissions_elsewhere(cast: Cast, sign_in: SignIn) -> None:
    give(cast.olga, Action.GRANTS_MANAGE, tenant="default")
    give(cast.bram, Action.EXPORT, tenant="default")
    client = sign_in(cast.olga)
    text = text_of(_ask(client, user="bram", action="inspect", tenant="default").content.decode())
    assert f"No: bram may not {MAY[Action.INSPECT]} (inspect) on tenant default" in _unspaced(text)
    assert "t-b" not in text
    assert "No permission that you manage allows it." in text
    assert _ask(client, user="bram", action="inspect", tenant="t-b").status_code == 403
    assert _ask(client, user="ghost", action="inspect", tenant="t-b").status_code == 403


@pytest.mark.parametrize("page", ["/ops/incidents/", "/ops/dead-letters/", "/ops/repairs/"])
def test_who_sees_one_actor_everywhere_is_not_told_which_tenants_there_are(
    page: str, cast: Cast, sign_in: SignIn
) -> None:
    """GRA-02: the filter is typed instead, and still filters."""
    dead_letter(tenant="alpha-hospital")
    dead_letter(tenant="beta-bank")
    give(cast.nobody, Action.INSPECT, actor_type="order", actor_id="7")
    client = sign_in(cast.nobody)
    text = client.get(page).content.decode()
    assert "alpha-hospital" not in text
    assert "beta-bank" not in text
    assert 'name="tenant"' in text
    assert client.get(page, {"tenant": "beta-bank"}).context["cl"].result_list == []
    give(cast.nobody, Action.INSPECT, tenant="beta-bank")
    assert client.get(page).status_code == 200
    if page == "/ops/incidents/":
        assert [row.tenant for row in client.get(page, {"tenant": "beta-bank"}).context["cl"].result_list] == [
            "beta-bank"
        ]
    assert "alpha-hospital" not in client.get(page).content.decode()


# -- tokens ------------------------------------------------------------------------------------------------------------


def _token(**more: Any) -> dict[str, Any]:
    until = f"{timezone.now() + seconds(3_600):%Y-%m-%dT%H:%M}"
    return {"name": "nightly", "actions": ["inspect"], "tenant": "default", "expires_at": until} | more


def test_a_token_is_shown_once(cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.olga)
    values = hidden_fields(client.get("/ops/tokens/new/").content.decode()) | _token()
    page = client.post("/ops/tokens/new/", values)
    plain = page.context["receipt"].plain
    assert plain in page.content.decode()
    assert ApiToken.objects.live(plain) is not None
    again = client.post("/ops/tokens/new/", values)
    assert plain not in again.content.decode()
    assert "was made before" in text_of(again.content.decode())
    assert ApiToken.objects.count() == 1
    assert plain not in client.get("/ops/tokens/").content.decode()


def test_a_token_offers_only_what_its_maker_holds(cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.vera)
    all_of_them = dict(sign_in(cast.ada).get("/ops/tokens/new/").context["asked"].form.fields["actions"].choices)
    assert all_of_them["dead-letters.ingest"].startswith("Record failures from outside, over REST (")
    form = client.get("/ops/tokens/new/").context["asked"].form
    assert form.fields["actions"].choices == [
        ("inspect", "See incidents, failed jobs with their redacted arguments, repairs, and the workers (inspect)")
    ]
    assert confirm(client, "/ops/tokens/new/", _token(actions=["grants.manage"])).status_code == 400
    past = confirm(client, "/ops/tokens/new/", _token(expires_at="2001-01-01T00:00"))
    assert past.status_code == 400
    assert "A token ends in the future" in text_of(past.content.decode())
    assert not ApiToken.objects.exists()


def test_only_ones_own_tokens_are_listed_and_revoked(cast: Cast, sign_in: SignIn) -> None:
    made = create_token(
        by=cast.olga, name="nightly", actions=[Action.INSPECT], tenant="default",
        expires_at=timezone.now() + seconds(99), key="k",
    )  # fmt: skip
    url = f"/ops/tokens/{made.public_id}/revoke/"
    other = sign_in(cast.vera)
    assert "nightly" not in other.get("/ops/tokens/").content.decode()
    assert other.get(url).status_code == 404
    assert other.post(url, {"idempotency_key": "k"}).status_code in (403, 404)
    assert ApiToken.objects.count() == 1
    answer = confirm(sign_in(cast.olga), url, follow=True)
    assert "nightly is revoked" in text_of(answer.content.decode())
    assert not ApiToken.objects.exists()
