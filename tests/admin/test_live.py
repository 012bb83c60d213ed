"""The live parts: what changes is there by the next look, and nobody is disturbed by it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from django.contrib.sessions.models import Session
from django.test import Client

from deadletters.models import TaskMinute, WorkerNode
from grants.actions import Action
from grants.models import ScopeUserGrant
from incidents.services import acknowledge_incident
from opsconsole.console import machinery, overview
from opsconsole.console.site import POLICY
from opsconsole.core.database import database_now
from tests.admin.conftest import SignIn
from tests.admin.test_in_a_browser import log_in
from tests.browser import open_page
from tests.cast import Cast, give, make_operator
from tests.factories import dead_letter

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LIVE = "/ops/live/overview/"
WAIT_MS = 15_000


def let_time_pass() -> None:
    """Let what was read be older than five seconds."""
    for kept in overview._scopes.values():
        kept.until = 0


# -- the fragment ------------------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_who_has_the_newest_is_told_so(cast: Cast, sign_in: SignIn) -> None:
    letter = dead_letter()
    client = sign_in(cast.ada)
    page = client.get("/ops/").content.decode()
    etag = re.search(r'data-live-etag="&quot;(\w+)&quot;"', page)
    assert etag is not None
    given = f'"{etag[1]}"'
    same = client.get(LIVE, headers={"if-none-match": given})
    assert (same.status_code, same.content, same["ETag"]) == (304, b"", given)
    assert same["Content-Security-Policy"] == POLICY
    assert client.get(LIVE, headers={"if-none-match": f'W/"other", W/{given}'}).status_code == 304
    acknowledge_incident(incident_id=letter.incident_id, by=cast.ada, key="k")
    let_time_pass()
    other = client.get(LIVE, headers={"if-none-match": given})
    assert other.status_code == 200
    assert other["ETag"] != given
    html = other.content.decode()
    assert html.count("data-live-part=") == 9
    assert "ada (you)" in html
    assert "<html" not in html


@pytest.mark.django_db
def test_the_page_and_its_fragment_are_the_same(cast: Cast, sign_in: SignIn) -> None:
    dead_letter()
    client = sign_in(cast.ada)
    page, part = client.get("/ops/").content.decode(), client.get(LIVE).content.decode()
    line, _, rest = part.partition('<div data-live-part="cards">')
    assert line.strip() in page
    assert rest.strip() in page


@pytest.mark.django_db
def test_who_may_see_nothing_gets_nothing(cast: Cast, sign_in: SignIn) -> None:
    """In fours: nobody, no grant, another tenant's, and after the grant was taken away."""
    dead_letter()
    assert Client().get(LIVE).status_code == 302
    assert sign_in(cast.nobody).get(LIVE).status_code == 403
    assert "shop.send_mail" not in sign_in(cast.bram).get(LIVE).content.decode()
    client = sign_in(cast.olga)
    assert client.get(LIVE).status_code == 200
    ScopeUserGrant.objects.filter(user_id=cast.olga.user_id).delete()
    assert client.get(LIVE).status_code == 403


@pytest.mark.django_db
def test_a_grant_over_one_actor_is_told_what_changed_and_ends_at_once(cast: Cast, sign_in: SignIn) -> None:
    """B1: no incident tells that something changed, and no plan of grants tells which actors they name."""
    one = make_operator("one")
    for actor in ("7", "8"):
        give(one, Action.INSPECT, tenant="default", actor_type="customer", actor_id=actor)
        dead_letter(actor_type="customer", actor_id=actor)
    client = sign_in(one)

    def look(etag: str) -> tuple[int, str, list[str]]:
        answer = client.get(LIVE, headers={"if-none-match": etag})
        return answer.status_code, answer["ETag"], re.findall(r"<strong>(\d+)</strong>", answer.content.decode())[:5]

    status, etag, shown = look("")
    assert (status, shown) == (200, ["0", "0", "2", "0", "2"])
    assert look(etag)[0] == 304
    dead_letter(actor_type="customer", actor_id="8")
    status, etag, shown = look(etag)
    assert (status, shown) == (200, ["0", "0", "3", "0", "3"])
    ScopeUserGrant.objects.filter(user_id=one.user_id).last().delete()
    assert look(etag)[::2] == (200, ["0", "0", "1", "0", "1"])


@pytest.mark.django_db
def test_a_person_who_opens_the_fragment_is_sent_to_the_page(cast: Cast, sign_in: SignIn) -> None:
    answer = sign_in(cast.ada).get(LIVE, headers={"sec-fetch-dest": "document"})
    assert (answer.status_code, answer["Location"]) == (302, "/ops/")


# -- in a browser ------------------------------------------------------------------------------------------------------


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look every second, at what is read each time."""
    monkeypatch.setattr(overview, "LIVE_SECONDS", 1)
    monkeypatch.setattr(overview, "KEPT_SECONDS", 0.0)


@pytest.fixture
def burning(page: Page, soon: None, cast: Cast) -> Page:
    """The overview of who sees all, with one incident on it."""
    dead_letter()
    log_in(page)
    return page


def browser_test(function: Any) -> Any:
    """Let a test run in a browser, beside the server that answers it."""
    for mark in (pytest.mark.browser, pytest.mark.django_db(transaction=True)):
        function = mark(function)
    return function


def number(page: Page, noun: str = "Incidents needing action") -> str:
    return page.locator(".ops-card", has_text=noun).locator("strong").inner_text()


def wait_for_number(page: Page, wanted: str) -> None:
    page.locator(".ops-card", has_text="Incidents needing action").locator(
        "strong", has_text=re.compile(f"^{wanted}$")
    ).wait_for(timeout=WAIT_MS)


@browser_test
def test_a_change_is_there_by_the_next_look_unless_it_is_paused(burning: Page) -> None:
    page = burning
    assert number(page) == "1"
    page.evaluate("window.isTheSameDocument = true")
    dead_letter(task="shop.second")
    wait_for_number(page, "2")
    page.get_by_role("button", name="Pause").click()
    page.get_by_text("Paused; shown as of").wait_for()
    dead_letter(task="shop.third")
    page.wait_for_timeout(2_500)
    assert number(page) == "2"
    page.get_by_role("button", name="Resume").click()
    wait_for_number(page, "3")
    page.get_by_text("Refreshes every 1 s").wait_for()
    assert page.evaluate("window.isTheSameDocument")


@browser_test
def test_what_has_focus_or_is_marked_is_left_alone_and_renewed_afterwards(burning: Page) -> None:
    """The part in which somebody is at work stays; the others go on, and it follows once it is left."""
    page = burning
    link = page.locator("a.ops-card-link").first
    link.focus()
    link.evaluate("(element) => { element.isTheSameElement = true; }")
    dead_letter(task="shop.second")
    page.locator("[data-live-part=loudest]", has_text="shop.second").wait_for(timeout=WAIT_MS)
    page.wait_for_timeout(1_500)
    assert number(page) == "1"
    assert page.evaluate("document.activeElement.isTheSameElement")
    page.get_by_role("button", name="Pause").focus()
    wait_for_number(page, "2")
    # The same for text that somebody is marking in order to copy it.
    page.evaluate(
        "getSelection().selectAllChildren(document.querySelector('[data-live-part=loudest] tbody tr td.ops-what'))"
    )
    dead_letter(task="shop.third")
    wait_for_number(page, "3")
    assert "shop.third" not in page.locator("[data-live-part=loudest]").inner_text()
    page.evaluate("getSelection().removeAllRanges()")
    page.locator("[data-live-part=loudest]", has_text="shop.third").wait_for(timeout=WAIT_MS)


@browser_test
@pytest.mark.usefixtures("soon")
def test_the_machinerys_line_is_kept_up_to_date_as_well(
    page: Page, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machinery, "KEPT_SECONDS", 0.0)
    log_in(page)
    page.locator(".ops-machinery", has_text="No worker reports").wait_for()
    now = database_now()
    node = WorkerNode.objects.create(id="w1", source="tests", host="h", pid=1, started_at=now, seen_at=now)
    page.locator(".ops-machinery", has_text="Capture works.").wait_for(timeout=WAIT_MS)
    WorkerNode.objects.filter(id=node.id).update(trouble="the journal's disk is full")
    page.locator(".ops-machinery", has_text="1 with trouble").wait_for(timeout=WAIT_MS)


@browser_test
def test_a_fold_stays_open(burning: Page) -> None:
    page = burning
    page.get_by_text("The numbers as a table").click()
    page.get_by_role("button", name="Pause").focus()
    now = database_now()
    TaskMinute.objects.create(
        tenant="default", source="tests", job_type="shop.x", minute=now.replace(second=0, microsecond=0), failed=7
    )
    page.locator("[data-live-part=charts] h2", has_text="total 7").wait_for(timeout=WAIT_MS)
    assert page.locator("[data-live-keep=hours]").get_attribute("open") is not None


@browser_test
@pytest.mark.usefixtures("soon")
def test_without_an_answer_the_page_says_how_old_it_is(browser: Browser, live_server: Any, cast: Cast) -> None:
    """And goes on by itself once there is one. The console's messages about the failed requests are the point here."""
    dead_letter()
    with open_page(browser, live_server.url) as (page, troubles):
        log_in(page)
        page.route("**/live/**", lambda route: route.abort())
        page.get_by_text(re.compile(r"Not updated since \d\d:\d\d:\d\d UTC. No answer; it is asked again.")).wait_for(
            timeout=WAIT_MS
        )
        assert page.locator(".ops-stale").count() == 1
        page.unroute("**/live/**")
        page.route("**/live/**", lambda route: route.fulfill(status=503, body="down"))
        page.get_by_text("The console answers with an error").wait_for(timeout=WAIT_MS)
        page.unroute("**/live/**")
        dead_letter(task="shop.second")
        wait_for_number(page, "2")
        assert page.locator(".ops-stale").count() == 0
        assert {trouble.partition(":")[0] for trouble in troubles} == {"console error"}


@browser_test
@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("ended", ["session", "grant"])
def test_who_is_no_longer_let_in_is_asked_to_sign_in_and_it_stops(
    ended: str, browser: Browser, live_server: Any, cast: Cast
) -> None:
    dead_letter()
    with open_page(browser, live_server.url) as (page, _troubles):
        asked: list[str] = []
        log_in(page, "olga")
        page.on("request", lambda request: asked.append(request.url) if "/live/" in request.url else None)
        if ended == "session":
            Session.objects.all().delete()
        else:
            ScopeUserGrant.objects.filter(user_id=cast.olga.user_id).delete()
        link = page.get_by_role("link", name="Sign in")
        link.wait_for(timeout=WAIT_MS)
        assert link.get_attribute("href") == "/ops/login/?next=%2Fops%2F"
        assert page.get_by_role("button", name="Pause").count() == 0
        count = len(asked)
        page.wait_for_timeout(2_500)
        assert len(asked) == count


@browser_test
def test_an_answer_that_is_not_the_consoles_leaves_the_page_stale(burning: Page) -> None:
    """Such as the page on which a proxy asks who one is, with status 200."""
    page = burning
    page.route("**/ops/live/**", lambda route: route.fulfill(status=200, body="<h1>Who are you?</h1>"))
    page.get_by_text("Not updated since").wait_for(timeout=WAIT_MS)
    assert number(page) == "1"
    page.unroute_all()
    page.get_by_text("Refreshes every 1 s").wait_for(timeout=WAIT_MS)


@browser_test
def test_a_hidden_page_asks_nothing_and_one_that_is_seen_again_asks_at_once(burning: Page) -> None:
    page = burning
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "/live/" in request.url else None)
    hide = """(hidden) => {
      Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.evaluate(hide, True)
    page.wait_for_timeout(1_000)
    before = len(asked)
    page.wait_for_timeout(2_500)
    assert len(asked) == before
    dead_letter(task="shop.second")
    page.evaluate(hide, False)
    wait_for_number(page, "2")


@browser_test
def test_without_scripts_the_page_is_whole(browser: Browser, live_server: Any, cast: Cast) -> None:
    dead_letter()
    context = browser.new_context(base_url=live_server.url, java_script_enabled=False)
    page = context.new_page()
    log_in(page)
    assert number(page) == "1"
    assert not page.locator("[data-live-pause]").is_visible()
    assert page.get_by_text("load the page again").is_visible()
    context.close()
