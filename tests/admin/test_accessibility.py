"""Every page of the console in a real browser: WCAG 2.2 AA by axe, in both colours, wide and on a phone.

The fixture ``page`` fails a test for a console error, a violation of the policy and a request to another host too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from deadletters.models import DeadLetter
from incidents.models import Incident, Severity
from repairs.services import discard_letter
from tests.admin.test_access import PAGES, World
from tests.admin.test_access import world as world
from tests.admin.test_in_a_browser import log_in
from tests.browser import AXE, axe_violations, visit
from tests.cast import Cast
from tests.factories import dead_letter

if TYPE_CHECKING:
    from playwright.sync_api import Page

browser_test = pytest.mark.browser
# No page is marked up otherwise on another database, and to look at all of them takes minutes.
pytestmark = pytest.mark.once
SIZES = {"wide": (1360, 900), "phone": (390, 844)}
OTHER_WIDTHS = (320, 820, 1023, 1024)
"""320 is what a wide page becomes when it is magnified four times (WCAG 1.4.10)."""
COLOUR_RULES = ("color-contrast", "link-in-text-block")
SWAGGER_RULES = {"color-contrast", "nested-interactive", "target-size"}
"""What Swagger UI breaks on the page of the REST API: its colours, buttons within buttons, and small links are its own,
and a sheet of ours over it would not outlive its next release. All that it says is in the schema, which is a text file.
"""
OPEN_ALL = "document.querySelectorAll('details').forEach((one) => { one.name = ''; one.open = true; })"
CLOSE_ALL = "document.querySelectorAll('details').forEach((one) => { one.open = false; })"
SMALL = """(least) => [...document.querySelectorAll(
  "a.button, button, summary, select, input:not([type=hidden]), .ops-tabs a, nav li a, .ops-choice")]
  .filter((one) => one.checkVisibility({visibilityProperty: true}) && one.offsetParent !== null)
  .map((one) => [one.matches("input[type=checkbox], input[type=radio]") ? one.closest("label") ?? one : one, one])
  .filter(([box]) => !box.matches("input[type=checkbox], .skip-to-content-link"))
  .map(([box, one]) => [box.getBoundingClientRect(), one])
  .filter(([box]) => box.height < least || box.width < 24)
  .map(([box, one]) => `${Math.round(box.width)}x${Math.round(box.height)}: ${one.outerHTML.slice(0, 120)}`)
"""


def test_axe_is_the_file_that_its_manifest_names() -> None:
    manifest = json.loads((AXE / "manifest.json").read_text())
    found = {name: hashlib.sha256((AXE / name).read_bytes()).hexdigest() for name in manifest["files"]}
    assert found == manifest["files"]
    head = (AXE / "axe.min.js").read_text()[:600]
    assert f"axe v{manifest['version']}" in head
    assert manifest["licence"] == "MPL-2.0"
    assert "Mozilla Public" in head


def addresses(world: World) -> dict[str, str]:
    """Return every page of the console, and some that look otherwise with another address."""
    found = {name: entry.path(world) for name, entry in PAGES.items()}
    return found | {
        "nothing there": "/ops/nothing/",
        "not understood": "/ops/incidents/?x=1",
        "incidents, none found": "/ops/incidents/?q=999999",
        "incidents, filtered": "/ops/incidents/?state=&severity=high",
        "failed jobs, all": "/ops/dead-letters/?state=",
        "incident, all jobs": f"/ops/incidents/{world.letter.incident_id}/?show=all",
        "explained: yes": "/ops/permissions/explain/?user=ada&action=inspect&tenant=default",
        "explained: no": "/ops/permissions/explain/?user=nobody&action=inspect&tenant=default",
        "explained: nobody": "/ops/permissions/explain/?user=zoe&action=inspect&tenant=default",
    }


@pytest.fixture
def full_world(world: World, cast: Cast) -> World:
    """Rows of every look: each severity and state, each class of outcome, long words and closed ones."""
    letters = [dead_letter(task=f"shop.task_{number}", ambiguous=number % 2 == 0) for number in range(5)]
    for number, letter in enumerate(letters):
        Incident.objects.filter(id=letter.incident_id).update(
            severity=list(Severity)[number % 4], title=f"ConnectTimeout: {'x' * 60 * number}", state="open"
        )
    discard_letter(letter_id=letters[4].id, by=cast.ada, key="discard", reason="nobody wants it")
    DeadLetter.objects.filter(id=letters[3].id).update(job_id="j" * 120, queue="q" * 80, error_text="e" * 3_000)
    return world


def states(page: Page, *, has_folds: bool) -> Iterator[tuple[str, str, bool]]:
    """Bring the page into each colour and size, and open whatever can be opened in it.

    Yields (size, colours, whether all is open).
    """
    for size, (width, height) in SIZES.items():
        page.set_viewport_size({"width": width, "height": height})
        for is_open in (False, True) if has_folds else (False,):
            page.evaluate(OPEN_ALL if is_open else CLOSE_ALL)
            for colours in ("light", "dark"):
                page.emulate_media(color_scheme=colours)
                yield size, colours, is_open


def scrolls(page: Page, width: int) -> bool:
    """Say whether the page scrolls sideways at that width, whatever is open in it."""
    page.set_viewport_size({"width": width, "height": 900})
    return bool(page.evaluate("document.documentElement.scrollWidth > innerWidth"))


def look_at(page: Page, name: str, *, has_folds: bool | None = None) -> list[str]:
    """Return what is wrong with the page in any of its states."""
    found = []
    if has_folds is None:
        has_folds = page.locator("main details").count() > 0
    for size, colours, is_open in states(page, has_folds=has_folds):
        if colours == "dark":  # nothing but the colours is another than in the light
            troubles = axe_violations(page, only=COLOUR_RULES)
        else:
            # An open menu lies over other things; how big they are is measured with it closed.
            troubles = axe_violations(page, without=["target-size"] if is_open else [])
            width = page.evaluate("document.documentElement.scrollWidth")
            troubles += [f"scrolls sideways, {width} px wide"] if width > SIZES[size][0] else []
            troubles += [f"too small: {one}" for one in page.evaluate(SMALL, 44 if size == "phone" else 24)]
        found += [f"{name} ({size}, {colours}{', all open' if is_open else ''}): {one}" for one in troubles]
    return found


@browser_test
@pytest.mark.django_db(transaction=True)
def test_the_rules_find_what_is_wrong(page: Page, cast: Cast) -> None:
    """The script runs under the policy of the page, and its answers arrive."""
    page.goto("/ops/login/")
    assert look_at(page, "login", has_folds=False) == []
    page.evaluate("document.querySelector('label').remove()")
    page.evaluate("document.querySelector('h1').style.color = '#b8b8b8'")
    page.evaluate("document.querySelector('button[type=submit]').style.cssText = 'min-height: 20px; padding: 0'")
    page.evaluate("document.querySelector('main').style.width = '500px'")
    text = "\n".join(look_at(page, "login", has_folds=False))
    for words in ("phone, light): label", "wide, light): color-contrast", "too small", "scrolls sideways"):
        assert words in text


@browser_test
@pytest.mark.django_db(transaction=True)
def test_every_page_is_accessible_in_every_colour_and_size(page: Page, full_world: World, cast: Cast) -> None:
    """WCAG 2.2 AA, nothing to press that is too small, and no scrolling sideways."""
    troubles = []
    page.goto("/ops/login/")
    troubles += look_at(page, "login", has_folds=False)
    page.set_viewport_size({"width": 1360, "height": 900})
    log_in(page)
    page.goto("/ops/logout/")
    troubles += look_at(page, "the menu of a phone", has_folds=True)
    for name, path in addresses(full_world).items():
        if visit(page, path) is not None:
            troubles += look_at(page, name)
            troubles += [f"{name}: scrolls sideways at {width} px" for width in OTHER_WIDTHS if scrolls(page, width)]
    assert troubles == [], "\n".join(troubles)


def moments(page: Page, world: World) -> Iterator[str]:
    """Do what brings up the pages that have no address of their own, and yield the name of each."""
    page.goto("/ops/dead-letters/")
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keys").wait_for()
    yield "the keys, explained"
    page.keyboard.press("Escape")
    page.get_by_label("Select all on this page").check()
    yield "failed jobs, all selected"
    page.get_by_role("button", name="Retry selected").click()
    page.locator(".ops-where").wait_for()
    yield "the confirmation for those selected"
    page.goto(f"/ops/incidents/{world.letter.incident_id}/close/")
    page.locator("form").evaluate_all("(all) => all.forEach((form) => { form.noValidate = true; })")
    page.get_by_role("button", name="Close, leave").click()
    page.locator(".ops-error").first.wait_for()
    yield "a confirmation with something missing"
    page.goto("/ops/tokens/new/")
    page.get_by_label("Name").fill("nightly report")
    page.get_by_label("inspect").check()
    page.get_by_label("On tenant").fill("default")
    page.get_by_role("button", name="Make it").click()
    page.locator("#token").wait_for()
    yield "a new token"
    page.goto("/ops/logout/")
    page.get_by_role("button", name="Log out").click()
    page.get_by_text("You are logged out").wait_for()
    yield "logged out"
    page.goto("/ops/login/")
    page.get_by_label("Username").fill("vera")
    page.get_by_label("Password").fill("wrong")
    page.get_by_role("button", name="Log in").click()
    page.locator(".errornote").wait_for()
    yield "a wrong password"
    page.get_by_label("Password").fill("pw")
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url("**/ops/")
    page.goto(f"/ops/incidents/{world.letter.incident_id}/")
    yield "an incident whose buttons are missing"
    page.goto(f"/ops/incidents/{world.letter.incident_id}/close/")
    yield "not allowed"


@browser_test
@pytest.mark.django_db(transaction=True)
def test_what_pressing_a_button_brings_is_accessible_too(page: Page, full_world: World, cast: Cast) -> None:
    """Dialogs, messages, refusals."""
    troubles = []
    page.set_viewport_size({"width": 1360, "height": 900})
    log_in(page)
    for name in moments(page, full_world):
        troubles += look_at(page, name, has_folds=False)
        page.set_viewport_size({"width": 1360, "height": 900})
    assert troubles == [], "\n".join(troubles)


@browser_test
@pytest.mark.django_db(transaction=True)
def test_the_page_of_the_api_breaks_only_what_is_listed(page: Page, cast: Cast) -> None:
    log_in(page)
    page.goto("/api/docs/")
    page.get_by_text("/api/v1/dead-letters/{letter_id}/retry").wait_for()
    for width, height in SIZES.values():
        page.set_viewport_size({"width": width, "height": height})
        found = axe_violations(page)
        assert {one.partition(":")[0] for one in found} == SWAGGER_RULES
        assert page.evaluate("document.documentElement.scrollWidth") <= width
