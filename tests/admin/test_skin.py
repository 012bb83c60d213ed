"""The frame around every page, and what all lists share: menu, environment, views, filters, keys, colours."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from django.db import connection
from django.test import RequestFactory
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from deadletters.models import DeadLetter, WorkerNode
from grants.actions import Action
from grants.models import ScopeUserGrant
from incidents.admin import IncidentAdmin
from incidents.models import Incident
from opsconsole.console.site import environment_tone, site
from opsconsole.core.admin import Cell, Pill, tab_counts
from repairs.models import RepairAction
from tests.admin.conftest import SignIn
from tests.admin.test_in_a_browser import log_in, settle_all
from tests.admin.tools import text_of
from tests.browser import axe_violations
from tests.cast import Cast, give
from tests.factories import dead_letter

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE = "<script>alert(1)</script>"
in_a_browser = pytest.mark.browser


def serve(*tasks: str) -> None:
    """Let a worker report that it serves these."""
    now = timezone.now()
    WorkerNode.objects.create(
        id="w1", source="tests", host="h", pid=1, queues=json.dumps(["celery"]),
        tasks=json.dumps(dict.fromkeys(tasks, "(*args, **kwargs)")), started_at=now, seen_at=now,
    )  # fmt: skip


# -- the environment ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tone"),
    [
        ("production", "red"), ("production-eu", "red"), ("eu.prod", "red"), ("LIVE", "red"), ("Staging 2", "amber"),
        ("pre-production", "amber"), ("preprod", "amber"), ("test", "blue"), ("development", "green"),
        ("reproduction", "violet"), ("delivery", "violet"), ("blue", "violet"), ("non-production", "violet"),
        ("not-live", "violet"),
    ],
)  # fmt: skip
def test_production_is_red_and_nothing_else_is(name: str, tone: str) -> None:
    assert environment_tone(name) == tone


@pytest.mark.django_db
def test_the_bar_has_the_colour_of_the_environment(cast: Cast, sign_in: SignIn, settings: Any) -> None:
    client = sign_in(cast.ada)
    for name, tone in (("production", "red"), ("staging", "amber")):
        settings.OPSCONSOLE_ENVIRONMENT = name
        assert f'<body class="ops ops-environment-{tone} ' in client.get("/ops/incidents/").content.decode()
    settings.OPSCONSOLE_ENVIRONMENT = ""
    assert '<body class="ops ' in client.get("/ops/").content.decode()


@pytest.mark.django_db
def test_every_confirmation_names_the_environment_twice(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    """Above the question, and beside the button that is pressed."""
    client = sign_in(cast.ada)
    for path in (
        f"/ops/incidents/{letter.incident_id}/close/", f"/ops/incidents/{letter.incident_id}/retry/",
        f"/ops/dead-letters/{letter.id}/discard/", f"/ops/dead-letters/{letter.id}/retry/", "/ops/permissions/give/",
        "/ops/tokens/new/",
    ):  # fmt: skip
        main = client.get(path).content.decode().partition("<main")[2]
        assert '<span class="ops-environment">development</span>' in main, path
        assert "In development, written to the audit trail as ada." in text_of(main), path


# -- the menu ----------------------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_the_menu_is_grouped_and_begins_with_the_overview(cast: Cast, sign_in: SignIn) -> None:
    def groups(answer: Any) -> dict[str, list[str]]:
        return {name: [entry["label"] for entry in entries] for name, entries in answer.context["menu_groups"]}

    client = sign_in(cast.ada)
    found = groups(client.get("/ops/incidents/"))
    assert list(found) == ["On call", "Configuration"]
    assert found["On call"][:2] == ["Overview", "Incidents"]
    assert found["Configuration"][:1] == ["Permissions"]
    assert groups(sign_in(cast.nobody).get("/ops/"))["On call"] == ["Overview"]


@pytest.mark.django_db
def test_an_admin_may_have_a_group_of_its_own_and_say_something_in_the_menu(
    cast: Cast, sign_in: SignIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(site._registry[Incident]), "menu_group", "Installed")
    monkeypatch.setattr(type(site._registry[Incident]), "menu_badge", lambda *_: "9 <b>")
    answer = sign_in(cast.ada).get("/ops/")
    assert [name for name, _ in answer.context["menu_groups"]] == ["On call", "Configuration", "Installed"]
    assert '<span class="ops-badge">9 &lt;b&gt;</span>' in answer.content.decode()


@pytest.mark.django_db
def test_where_one_is_is_marked(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.ada)
    for path, label in (("/ops/", "Overview"), (f"/ops/incidents/{letter.incident_id}/", "Incidents")):
        groups = client.get(path).context["menu_groups"]
        assert [one["label"] for _, entries in groups for one in entries if one["is_current"]] == [label]


# -- lists -------------------------------------------------------------------------------------------------------------


def _views(*views: Any) -> Any:
    return lambda *_: views


VIEWS = _views(
    ("open", "Needs action", {"state": "open"}, 1_234),
    ("critical", "Critical", {"state": "", "severity": "critical"}, "1,000+"),
    ("all", "All", {"state": ""}, None),
)


@pytest.mark.django_db
def test_views_keep_the_other_filters_and_mark_the_one_that_shows(
    cast: Cast, sign_in: SignIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(IncidentAdmin, "list_tabs", VIEWS)
    dead_letter()
    client = sign_in(cast.ada)

    def tabs(query: str) -> list[Any]:
        return list(client.get(f"/ops/incidents/?{query}").context["tabs"])

    plain = tabs("")
    assert [(tab.label, tab.count, tab.is_current) for tab in plain] == [
        ("Needs action", "1,234", True), ("Critical", "1,000+", False), ("All", "", False),
    ]  # fmt: skip
    assert [tab.url for tab in plain] == ["?state=open", "?state=&severity=critical", "?state="]
    chosen = tabs("severity=critical&state=&tenant=default&q=12")
    assert [tab.is_current for tab in chosen] == [False, True, False]
    assert chosen[2].url == "?state=&tenant=default"
    assert [tab.is_current for tab in tabs("state=resolved")] == [False, False, False]


@pytest.mark.django_db
def test_a_list_without_views_has_no_tabs(cast: Cast, sign_in: SignIn) -> None:
    answer = sign_in(cast.ada).get("/ops/workers/")
    assert answer.context["tabs"] == []
    assert "ops-tabs" not in answer.content.decode()


@pytest.mark.django_db
def test_what_a_tab_counts_ends_at_a_thousand_and_counts_nothing(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opsconsole.core.admin.MOST_COUNTED", 3)
    for number in range(5):
        dead_letter(task=f"shop.task_{number}")
    with CaptureQueriesContext(connection) as found:
        every, one = Incident.objects.all(), Incident.objects.filter(job_type="shop.task_1")
        assert tab_counts([every, one, Incident.objects.none()]) == ["3+", "1", "0"]
    (asked,) = found.captured_queries
    assert asked["sql"].count("LIMIT 4") == 2
    assert "COUNT(" not in asked["sql"].upper()


@pytest.mark.django_db
def test_a_cell_of_several_parts_is_text_in_each_of_them(
    letter: DeadLetter, cast: Cast, sign_in: SignIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SEC-01."""
    cell = Cell(
        main=HOSTILE, url=f"/x?{HOSTILE}", pills=[Pill(text=HOSTILE, kind="severity-high")],
        lines=[("warn", HOSTILE)], second=HOSTILE,
    )  # fmt: skip
    registered = type(site._registry[Incident])
    monkeypatch.setattr(registered, "columns", ("number", "cell", "plain"))
    monkeypatch.setattr(registered, "column_classes", {"cell": "ops-wide", "plain": "ops-num"})
    monkeypatch.setattr(registered, "cell", lambda *_: cell, raising=False)
    monkeypatch.setattr(registered, "plain", lambda *_: HOSTILE, raising=False)
    html = sign_in(cast.ada).get("/ops/incidents/").content.decode()
    assert HOSTILE not in html
    row = html.partition("<tbody>")[2].partition("</tbody>")[0]
    assert row.count("&lt;script&gt;") == 6
    assert '<span class="ops-pill ops-severity-high">' in row
    assert '<span class="ops-line ops-text-warn">' in row
    assert '<td class="ops-num" data-label="plain">&lt;script&gt;' in row
    assert str(cell) == f"{HOSTILE} {HOSTILE} {HOSTILE} {HOSTILE}"
    assert str(Cell(main="a", pills=[Pill(text="b")], second="c")) == "a b c"


@pytest.mark.django_db
def test_a_filter_says_what_it_lets_through(cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.ada)

    def shown(query: str) -> tuple[dict[str, str], int]:
        context = client.get(f"/ops/audit/?{query}").context
        return {one.title: one.chosen for one in context["drop_downs"]}, context["filters_on"]

    assert shown("") == ({"who": "People", "verdict": ""}, 1)
    assert shown("who=&verdict=denied") == ({"who": "", "verdict": "Denied"}, 1)
    assert shown("who=&tenant=a&action=b") == ({"who": "", "verdict": ""}, 2)


@pytest.mark.django_db
@pytest.mark.parametrize("path", ["/ops/incidents/", "/ops/dead-letters/"])
def test_a_tab_is_not_counted_as_a_filter(path: str, cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.ada)
    dead_letter()
    for query, count in (("", 0), ("state=", 0), ("state=&tenant=default", 1), ("tenant=default", 1), ("q=12", 0)):
        answer = client.get(f"{path}?{query}")
        assert answer.context["filters_on"] == count, query
        assert ("Filters: " in answer.content.decode()) == bool(count), query
        assert "state" not in {one.title for one in answer.context["drop_downs"]}


@pytest.mark.django_db
def test_the_foot_of_a_list_offers_only_the_keys_that_work_there(cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.ada)

    def keys(path: str) -> str:
        text = text_of(client.get(path).content.decode()).partition("Rows don't move while you look.")[2]
        return text.partition("? help.")[0]

    assert keys("/ops/dead-letters/").endswith(": / search, "), "it has no rows"
    dead_letter()
    assert keys("/ops/dead-letters/").endswith(": j k next, x select, Enter open, / search, ")
    assert keys("/ops/incidents/").endswith(": j k next, x select, Enter open, / search, ")


@pytest.mark.django_db
def test_the_page_for_what_is_not_there_is_the_same_for_what_is_not_yours(cast: Cast, sign_in: SignIn) -> None:
    """Byte for byte, and it says how to ask."""
    other = dead_letter(tenant="t-b")
    client = sign_in(cast.olga)
    missing = client.get("/ops/incidents/01890000-0000-7000-8000-000000000000/")
    foreign = client.get(f"/ops/incidents/{other.incident_id}/")
    assert (missing.status_code, foreign.status_code) == (404, 404)
    assert missing.content == foreign.content
    assert "olga asks for access in opsconsole development" in text_of(missing.content.decode())


@pytest.mark.django_db
def test_the_audit_trail_offers_itself_as_csv_with_its_filters(cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.ada)
    (link,) = client.get("/ops/audit/?who=&tenant=default&cursor=").context["list_links"]
    assert link == ("Take away as CSV", "/ops/audit/csv/?tenant=default&who=")
    assert client.get(link[1])["Content-Type"] == "text/csv; charset=utf-8"
    assert client.get("/ops/workers/").context["list_links"] == ()


@pytest.mark.django_db
def test_what_somebody_may_do_is_a_table_by_action_and_tenant(cast: Cast, sign_in: SignIn) -> None:
    give(cast.olga, Action.PAYLOADS_READ, tenant="t-b", actor_type="customer", actor_id="7")
    client = sign_in(cast.ada)

    def table(query: str) -> tuple[list[str], dict[str, list[tuple[str, str]]]]:
        matrix = client.get(f"/ops/permissions/explain/?{query}").context["matrix"]
        return matrix.tenants, {action: [cell[1:] for cell in cells] for action, cells in matrix.rows}

    tenants, rows = table("user=olga")
    assert tenants == ["default", "t-b"]
    assert rows["inspect"] == [("yes", ""), ("no", "")]
    assert rows["payloads.read"] == [("no", ""), ("part", "customer 7")]
    assert rows["grants.manage"] == [("no", ""), ("no", "")]
    assert set(rows) == {action.value for action in Action}
    assert table("user=olga&tenant=t-b")[0] == ["t-b"]
    assert table("user=vera&tenant=t-z")[1]["inspect"] == [("yes", "")]
    text = text_of(client.get("/ops/permissions/explain/?user=vera").content.decode())
    assert "Action every tenant Read the audit trail audit.read no" in text
    ScopeUserGrant.objects.filter(user_id=cast.vera.user_id).update(expires_at=timezone.now() - timedelta(days=1))
    assert client.get("/ops/permissions/explain/?user=vera").context["matrix"] is None


@pytest.mark.django_db
def test_who_does_not_see_every_permission_of_somebody_gets_no_table_of_them(cast: Cast, sign_in: SignIn) -> None:
    """C15: the table would say no where the answer above it says yes."""
    give(cast.olga, Action.GRANTS_MANAGE, tenant="default")
    give(cast.vera, Action.DEAD_LETTERS_RETRY, tenant="default")
    client = sign_in(cast.olga)
    context = client.get("/ops/permissions/explain/?user=vera&action=inspect&tenant=default").context
    assert context["answer"].allowed
    assert [one.action for one in context["held"]] == ["dead-letters.retry"]
    assert context["matrix"] is None
    assert client.get("/ops/permissions/explain/?user=olga").context["matrix"].tenants == ["default"]


# -- in a browser ------------------------------------------------------------------------------------------------------


def colours(page: Page) -> str:
    """Return what the page is painted on."""
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


WHITE, BLACK = "rgb(255, 255, 255)", "rgb(15, 20, 27)"


@in_a_browser
@pytest.mark.django_db(transaction=True)
def test_colours_follow_the_system_until_others_are_chosen(page: Page, cast: Cast) -> None:
    page.emulate_media(color_scheme="dark")
    page.goto("/ops/login/")
    assert colours(page) == BLACK
    toggle = page.locator("[data-theme-toggle]")
    toggle.click()
    assert (colours(page), toggle.get_attribute("aria-label")) == (WHITE, "Colours: light. Change to dark")
    log_in(page)
    assert colours(page) == WHITE
    page.emulate_media(color_scheme="light")
    toggle.click()
    assert colours(page) == BLACK
    page.reload(wait_until="commit")
    page.locator("header").wait_for()
    assert colours(page) == BLACK
    toggle.click()
    assert (colours(page), toggle.get_attribute("aria-label")) == (WHITE, "Colours: auto. Change to light")


@in_a_browser
@pytest.mark.django_db(transaction=True)
def test_without_scripts_colours_follow_the_system_and_menus_open(
    browser: Browser, live_server: Any, cast: Cast
) -> None:
    for _ in range(2):
        dead_letter()
    context = browser.new_context(
        base_url=live_server.url, java_script_enabled=False, color_scheme="dark", viewport={"width": 390, "height": 844}
    )
    page = context.new_page()
    log_in(page)
    assert not page.locator("[data-theme-toggle]").is_visible()
    page.locator("summary", has_text="Menu").click()
    page.get_by_role("navigation", name="Menu").get_by_role("link", name="Failed jobs").click()
    page.locator("summary", has_text="Filters").click()
    page.locator("summary", has_text="Outcome").click()
    page.get_by_role("link", name="Safe to run again").click()
    assert "outcome=safe" in page.url
    page.locator("input[name=_selected_action]").first.check()
    page.get_by_role("button", name="Retry selected").click()
    page.get_by_role("button", name="Retry 1").wait_for()
    page.locator("summary", has_text="Menu").click()
    page.get_by_role("link", name="Log out").click()
    page.get_by_role("button", name="Log out").click()
    page.get_by_text("You are logged out").wait_for()
    context.close()


@in_a_browser
@pytest.mark.django_db(transaction=True)
def test_a_list_is_walked_with_keys(page: Page, cast: Cast) -> None:
    for number in range(3):
        dead_letter(task=f"shop.task_{number}")
    log_in(page)
    page.goto("/ops/dead-letters/")
    bulk = page.get_by_role("button", name="Retry selected")
    focused = "document.activeElement.textContent"
    names = [one.inner_text() for one in page.locator("tbody th a").all()]
    assert len(set(names)) == 3
    page.keyboard.press("j")
    assert page.evaluate(focused) == names[0]
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.evaluate(focused) == names[2]
    page.keyboard.press("k")
    assert page.evaluate(focused) == names[1]
    before = page.locator("tbody tr").first.bounding_box()
    assert not bulk.is_visible()
    page.keyboard.press("x")
    assert page.locator("input[name=_selected_action]:checked").count() == 1
    assert page.locator("[data-selected-count]").inner_text() == "1 of 3 selected"
    assert bulk.is_visible()
    assert page.locator("tbody tr").first.bounding_box() == before
    page.keyboard.press("b")
    assert page.evaluate(focused).startswith("Retry selected")
    page.keyboard.press("k")  # goes on where one was
    assert page.evaluate(focused) == names[0]
    page.get_by_role("button", name="Clear").click()
    assert not bulk.is_visible()
    page.keyboard.press("/")
    page.keyboard.type("jkx?/b")
    assert page.get_by_role("searchbox").input_value() == "jkx?/b"
    assert not page.get_by_role("dialog").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/dead-letters/*-*/")


@in_a_browser
@pytest.mark.django_db(transaction=True)
def test_enter_in_a_rows_box_opens_the_row_and_sends_nothing(page: Page, cast: Cast) -> None:
    dead_letter()
    log_in(page)
    page.goto("/ops/dead-letters/")
    page.locator("input[name=_selected_action]").focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/dead-letters/*-*/")


@in_a_browser
@pytest.mark.django_db(transaction=True)
def test_keys_are_explained_and_can_be_turned_off(page: Page, cast: Cast) -> None:
    """WCAG 2.1.4: who speaks to the computer is not to set off single letters."""
    for _ in range(2):
        dead_letter()
    log_in(page)
    page.goto("/ops/dead-letters/")
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Keys")
    assert dialog.is_visible()
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.closest('dialog') !== null")
    page.keyboard.press("Escape")
    assert not dialog.is_visible()
    page.get_by_role("button", name="Keys").click()
    assert dialog.get_by_text("search", exact=True).is_visible()
    dialog.get_by_label("Single letters work as keys").uncheck()
    dialog.get_by_role("button", name="Close").click()
    page.reload()
    page.keyboard.press("j")
    page.keyboard.press("?")
    assert page.evaluate("document.activeElement === document.body")
    assert not dialog.is_visible()


@in_a_browser
@pytest.mark.django_db(transaction=True)
def test_keys_that_do_nothing_on_a_page_are_not_explained_there(page: Page, cast: Cast) -> None:
    dead_letter()
    log_in(page)
    for path, is_list in (("/ops/", False), ("/ops/dead-letters/", True)):
        page.goto(path)
        page.keyboard.press("?")
        dialog = page.get_by_role("dialog", name="Keys")
        assert dialog.get_by_text("next row, row before").is_visible()
        assert dialog.get_by_text("search", exact=True).is_visible() is is_list
        assert dialog.get_by_text("select the row").is_visible() is is_list
        assert dialog.get_by_text("to the buttons").is_visible() is is_list


@in_a_browser
@pytest.mark.django_db(transaction=True)
def test_escape_and_a_click_elsewhere_close_a_menu(page: Page, cast: Cast) -> None:
    dead_letter()
    log_in(page)
    page.goto("/ops/incidents/")
    first, second = page.locator(".ops-drop > summary").all()[:2]
    choice = page.locator(".ops-drop:first-of-type .ops-choice").first
    first.click()
    assert choice.is_visible()
    page.keyboard.press("Escape")
    assert not choice.is_visible()
    assert page.evaluate("document.activeElement.parentElement.querySelector('.ops-choice') !== null")
    first.click()
    second.click()
    assert not choice.is_visible()
    assert page.locator("details.ops-drop[open]").count() == 1
    page.get_by_role("heading", name="Incidents").click()
    assert page.locator("details.ops-drop[open]").count() == 0


@in_a_browser
@pytest.mark.django_db(transaction=True)
def test_a_list_tells_of_newer_rows_and_moves_none(page: Page, cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IncidentAdmin, "newer_url", lambda *_: "/ops/incidents/newer/")
    asked: list[str | None] = []
    answers = iter([(200, {"newer": 0}), (200, {"newer": 2}), (304, None)])

    def answer(route: Any) -> None:
        asked.append(route.request.headers.get("if-none-match"))
        status, body = next(answers)
        route.fulfill(status=status, headers={"ETag": f'"{len(asked)}"'}, body=json.dumps(body) if body else "")

    dead_letter()
    log_in(page)
    page.route("**/ops/incidents/newer/", answer)
    page.goto("/ops/incidents/")
    offer = page.locator("[data-newer-url]")
    rows = page.locator("tbody").inner_html()

    def ask() -> None:
        count = len(asked)
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        while len(asked) == count:
            page.wait_for_timeout(20)
        page.wait_for_timeout(50)

    ask()
    assert not offer.is_visible()
    ask()
    assert offer.inner_text() == "2 new, refresh"
    ask()
    assert offer.inner_text() == "2 new, refresh"
    assert asked == [None, '"1"', '"2"']
    assert page.locator("tbody").inner_html() == rows
    offer.click()
    page.wait_for_url("**/ops/incidents/?*")


@in_a_browser
@pytest.mark.django_db(transaction=True)
def test_the_text_to_send_is_copied(page: Page, cast: Cast) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    log_in(page)
    page.goto("/ops/nothing/")
    page.get_by_role("button", name="Copy text").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()").startswith("ada asks for access in opsconsole development")


@in_a_browser
@pytest.mark.django_db(transaction=True)
def test_what_can_be_copied_still_can_once_the_page_has_renewed_itself(page: Page, cast: Cast) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    letter = dead_letter()
    log_in(page)
    page.goto(f"/ops/incidents/{letter.incident_id}/retry/")
    page.get_by_role("button", name="Retry 1").click()
    page.get_by_text("This page renews itself every 3 s").wait_for()
    page.evaluate("document.getElementById('content').dataset.isOld = 'yes'")
    page.locator("#content:not([data-is-old])").wait_for()
    page.get_by_text("As text").click()
    page.get_by_role("button", name="Copy text").click()
    assert page.evaluate("navigator.clipboard.readText()").startswith("INC-")


@in_a_browser
@pytest.mark.django_db(transaction=True)
def test_a_page_that_can_not_be_renewed_says_so(page: Page, cast: Cast) -> None:
    letter = dead_letter()
    log_in(page)
    page.goto(f"/ops/incidents/{letter.incident_id}/retry/")
    page.get_by_role("button", name="Retry 1").click()
    page.get_by_text("This page renews itself every 3 s").wait_for()
    page.route("**/ops/incidents/**", lambda route: route.fulfill(status=200, body="", headers={"X": "y"}))
    page.get_by_text("Not renewed since").wait_for()
    page.unroute_all()
    page.get_by_text("This page renews itself every 3 s").wait_for()


@in_a_browser
@pytest.mark.django_db(transaction=True)
def test_the_whole_flow_needs_no_mouse(page: Page, cast: Cast) -> None:
    """A10: sign in, open the worst incident, take it, retry one, retry the rest."""
    for _ in range(3):
        dead_letter()
    serve("shop.send_mail")

    def press(*keys: str) -> None:
        for key in keys:
            page.keyboard.press(key)

    def answer_if_asked() -> None:
        """Press the button of a confirmation, where one stands between a button and its effect."""
        page.locator(".ops-cancel, .messagelist").first.wait_for()
        if page.locator(".ops-cancel").count():
            press("b", "Enter")

    page.goto("/ops/login/")
    page.get_by_label("Username").focus()
    page.keyboard.type("ada")
    press("Tab")
    page.keyboard.type("pw")
    press("Enter")
    page.wait_for_url("**/ops/")
    page.get_by_role("navigation", name="Menu").get_by_role("link", name="Incidents").focus()
    press("Enter")
    page.get_by_role("heading", name="Incidents").wait_for()
    press("j", "Enter")
    page.get_by_role("button", name="Take it").wait_for()
    press("b")
    assert page.evaluate("document.activeElement.textContent") == "Take it"
    press("Enter")
    page.locator(".ops-kicker", has_text="ada has it").wait_for()
    press("b", "Enter")
    answer_if_asked()
    page.get_by_text("1 job is on its way").wait_for()
    settle_all()
    page.reload()
    page.locator(".ops-bar .button", has_text="Retry all 2").focus()
    press("Enter")
    answer_if_asked()
    page.get_by_text("2 jobs are on their way").wait_for()
    assert RepairAction.objects.count() == 3


def test_the_index_is_named_as_the_overview(rf: RequestFactory) -> None:
    """Somebody who may open nothing has no menu at all."""
    assert site.grouped(rf.get("/ops/"), []) == []


@pytest.mark.browser
@pytest.mark.django_db(transaction=True)
def test_a_phone_shows_fifty_failed_jobs_in_a_few_screens_and_all_of_each_when_asked(page: Page, cast: Cast) -> None:
    for number in range(50):
        dead_letter(ambiguous=bool(number % 2))
    DeadLetter.objects.update(error_text="e" * 3_000)
    page.set_viewport_size({"width": 390, "height": 844})
    log_in(page)
    page.goto("/ops/dead-letters/")
    folded = page.evaluate("document.documentElement.scrollHeight")
    assert folded <= 6_000
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    row = page.locator("tbody tr").first
    assert not row.locator(".ops-folded").is_visible()
    assert axe_violations(page) == []
    page.get_by_label("Show all of each row").check()
    assert row.locator(".ops-folded").is_visible()
    assert page.evaluate("document.documentElement.scrollHeight") > folded


@pytest.mark.browser
@pytest.mark.django_db(transaction=True)
def test_a_phone_shows_what_would_be_confirmed_without_scrolling(page: Page, cast: Cast) -> None:
    letters = [dead_letter() for _ in range(30)]
    page.set_viewport_size({"width": 390, "height": 844})
    log_in(page)
    incident, job = f"/ops/incidents/{letters[0].incident_id}", f"/ops/dead-letters/{letters[0].id}"
    for path in (f"{incident}/close/", f"{incident}/retry/", f"{job}/discard/"):
        page.goto(path)
        box = page.locator(".submit-row .button").first.bounding_box()
        assert box is not None
        assert 0 <= box["y"] <= 844 - box["height"], path
        page.evaluate("window.scrollTo(0, document.documentElement.scrollHeight)")
        last = page.locator(".ops-confirm .ops-note").last.bounding_box()
        bar = page.locator(".submit-row").bounding_box()
        assert last is not None
        assert bar is not None
        assert last["y"] + last["height"] <= bar["y"], "the page ends above it"
        assert axe_violations(page) == []
