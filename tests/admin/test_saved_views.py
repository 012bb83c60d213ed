"""Views of one's own: a list's filters and search under a name, for nobody but who saved them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from django.test import Client

from grants.errors import SavedViewInvalid, TooManySavedViews
from grants.models import SavedView
from grants.saved_views import MOST_VIEWS, delete_view, save_view, saved_views
from tests.admin.conftest import SignIn
from tests.admin.test_in_a_browser import log_in
from tests.browser import axe_violations
from tests.cast import Cast
from tests.factories import dead_letter

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.django_db
LIST = "/ops/incidents/"


def _names(client: Client, path: str = LIST) -> list[tuple[str, bool]]:
    return [(view.name, is_current) for view, is_current in client.get(path).context["saved_views"]]


def _save(client: Client, path: str, name: str) -> Any:
    return client.post(path, {"view_name": name, "save_view": "yes"}, follow=True)


def test_a_view_keeps_filters_and_search_and_leads_back_to_them(cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.ada)
    _save(client, f"{LIST}?state=critical&severity=high&q=INC-7&e=1", " Bad  ones ")
    view = SavedView.objects.get()
    assert (view.name, view.query) == ("Bad ones", "q=INC-7&severity=high&state=critical")
    assert _names(client) == [("Bad ones", False)]
    assert _names(client, f"{LIST}?{view.query}") == [("Bad ones", True)]
    assert _names(client, "/ops/dead-letters/") == [], "each list has views of its own"


def test_saving_under_the_same_name_replaces_the_view(cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.ada)
    _save(client, f"{LIST}?severity=high", "mine")
    _save(client, f"{LIST}?severity=low", "mine")
    assert SavedView.objects.get().query == "severity=low"


def test_nobody_sees_or_deletes_the_views_of_another(cast: Cast, sign_in: SignIn) -> None:
    _save(sign_in(cast.ada), LIST, "hers")
    view = SavedView.objects.get()
    other = sign_in(cast.olga)
    assert _names(other) == []
    said = other.post(LIST, {"delete_view": str(view.pk)}, follow=True).content.decode()
    assert "There is no such view any more." in said
    assert SavedView.objects.exists()
    for _ in range(2):
        sign_in(cast.ada).post(LIST, {"delete_view": str(view.pk)})
    assert not SavedView.objects.exists()


@pytest.mark.parametrize("view_id", ["", "x", "9" * 40, "²", "-1"])
def test_what_is_no_view_is_not_deleted(view_id: str, cast: Cast, sign_in: SignIn) -> None:
    answer = sign_in(cast.ada).post(LIST, {"delete_view": view_id}, follow=True)
    assert "There is no such view any more." in answer.content.decode()


@pytest.mark.parametrize("name", ["", "   ", "x" * 61, "a\x00b", "a\u202eb"])
def test_a_name_that_is_none_is_refused(name: str, cast: Cast, sign_in: SignIn) -> None:
    assert "Give the view a name" in _save(sign_in(cast.ada), LIST, name).content.decode()
    assert not SavedView.objects.exists()
    with pytest.raises(SavedViewInvalid):
        save_view(by=cast.ada, list_slug="incidents", name="long", query="q" * 2_001)


def test_there_are_twenty_views_of_a_list_at_most(cast: Cast) -> None:
    for number in range(MOST_VIEWS):
        save_view(by=cast.ada, list_slug="incidents", name=f"view {number:02}", query="")
    with pytest.raises(TooManySavedViews):
        save_view(by=cast.ada, list_slug="incidents", name="one more", query="")
    save_view(by=cast.ada, list_slug="incidents", name="view 00", query="q=1")
    save_view(by=cast.ada, list_slug="dead-letters", name="one more", query="")
    assert len(saved_views(cast.ada, "incidents")) == MOST_VIEWS
    first = saved_views(cast.ada, "incidents")[0]
    assert delete_view(by=cast.ada, list_slug="incidents", view_id=first.pk)
    save_view(by=cast.ada, list_slug="incidents", name="one more", query="")


@pytest.mark.parametrize("path", ["/ops/audit/", "/ops/workers/"])
def test_a_list_without_views_saves_none(path: str, cast: Cast, sign_in: SignIn) -> None:
    _save(sign_in(cast.ada), path, "x")
    assert not SavedView.objects.exists()


@pytest.mark.browser
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("width", [390, 1360])
def test_a_view_is_saved_opened_and_deleted_by_hand(page: Page, width: int, cast: Cast) -> None:
    dead_letter()
    page.set_viewport_size({"width": width, "height": 844})
    log_in(page)

    def open_views() -> None:
        if width < 768:
            page.locator(".ops-fold > summary").click()
        page.locator("summary", has_text="My views").click()

    page.goto(f"{LIST}?severity=high")
    for name in ("first", "second"):
        open_views()
        page.get_by_label("Save these filters and this search as").fill(name)
        page.keyboard.press("Enter")
        page.get_by_text(f"This view is saved as “{name}”.").wait_for()
    page.goto(LIST)
    open_views()
    assert axe_violations(page, without=["target-size"]) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.get_by_role("link", name="first").click()
    page.wait_for_url("**/?severity=high")
    open_views()
    page.get_by_role("button", name="Delete the view second").click()
    page.get_by_text("The view is deleted.").wait_for()
    assert [view.name for view in SavedView.objects.all()] == ["first"]
