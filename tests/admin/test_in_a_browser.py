"""In a real browser, in which a console error, a policy violation or a foreign request fails the test."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from django.utils import timezone

from deadletters.models import DeadLetter, WorkerNode
from incidents.models import Incident
from opsconsole.core.database import database_now
from repairs.models import RepairAction
from repairs.services import retry_letter
from tests.admin.test_access import PAGES, World
from tests.admin.test_access import world as world
from tests.admin.tools import fail_again, mark_sent, newest_repair, succeed
from tests.browser import visit
from tests.cast import Cast
from tests.factories import dead_letter

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


def log_in(page: Page, name: str = "ada") -> None:
    page.goto("/ops/login/")
    page.get_by_label("Username").fill(name)
    page.get_by_label("Password").fill("pw")
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("heading", name="Overview").wait_for()


def settle_all() -> None:
    """Let every repair that waits be sent and succeed."""
    for action in RepairAction.objects.filter(state="planned"):
        succeed(mark_sent(action))


def test_take_it_then_one_first_then_all_of_them(page: Page, cast: Cast) -> None:
    """A10, A12, C11: three clicks where nothing is ambiguous, and the incident closes by itself."""
    for _ in range(4):
        dead_letter()
    incident = Incident.objects.get()
    now = timezone.now()
    WorkerNode.objects.create(
        id="w1", source="tests", host="h", pid=1, queues=json.dumps(["celery"]),
        tasks=json.dumps({"shop.send_mail": "(*args, **kwargs)"}), started_at=now, seen_at=now,
    )  # fmt: skip
    log_in(page)
    page.get_by_role("navigation", name="Menu").get_by_role("link", name="Incidents").click()
    page.get_by_role("link", name=f"INC-{incident.number:04d}").click()
    page.get_by_role("button", name="Take it").click()
    assert "ada has it" in page.inner_text("main")
    page.get_by_role("button", name="Retry 1 first").click()
    assert "Sent, awaiting result" in page.inner_text("main")
    succeed(mark_sent(newest_repair()))
    page.reload()
    assert "3 of 4 jobs not repaired" in page.inner_text("main")
    page.get_by_role("button", name="Retry all 3").click()
    assert "3 jobs are on their way" in page.inner_text("main")
    settle_all()
    page.reload()
    assert "Closed: repaired" in page.inner_text("main")
    assert (Incident.objects.get().state, RepairAction.objects.count()) == ("resolved", 4)


def test_a_double_click_and_going_back_repeat_nothing_of_a_button_that_acts_at_once(page: Page, cast: Cast) -> None:
    """A9."""
    incident = dead_letter().incident
    dead_letter()
    log_in(page)
    page.goto(f"/ops/incidents/{incident.id}/")
    page.get_by_role("button", name="Retry 1 first").dblclick()
    page.get_by_text("Sent, awaiting result").first.wait_for()
    page.go_back()
    button = page.get_by_role("button", name="Retry 1 first")
    if button.count():
        button.click()
        page.wait_for_load_state()
    assert RepairAction.objects.count() <= 2
    assert RepairAction.objects.filter(letter=DeadLetter.objects.oldest_first()[0]).count() == 1


def test_going_back_and_sending_again_repeats_nothing(page: Page, cast: Cast) -> None:
    letter = dead_letter()
    dead_letter()
    log_in(page)
    page.goto(f"/ops/dead-letters/{letter.id}/retry/")
    page.get_by_role("button", name="Retry it").click()
    page.get_by_text("1 job is on its way").wait_for()
    page.go_back()
    button = page.get_by_role("button", name="Retry it")
    if button.count():  # the browser kept the page; else it asked again and there is nothing left to retry
        button.click()
    assert RepairAction.objects.count() == 1


def test_a_double_click_sends_one_job(page: Page, cast: Cast) -> None:
    letter = dead_letter()
    log_in(page)
    page.goto(f"/ops/dead-letters/{letter.id}/retry/")
    page.get_by_role("button", name="Retry it").dblclick()
    page.get_by_text("Sent, awaiting result").first.wait_for()
    assert RepairAction.objects.count() == 1


def test_selecting_all_rows_of_a_page_and_retrying_them(page: Page, cast: Cast) -> None:
    for _ in range(3):
        dead_letter()
    log_in(page)
    page.goto("/ops/dead-letters/")
    page.get_by_label("Select all on this page").check()
    page.get_by_role("button", name="Retry selected").click()
    page.get_by_role("button", name="Retry 3").click()
    page.get_by_text("3 jobs are on the way").wait_for()
    assert DeadLetter.objects.filter(state="retrying").count() == 3


def test_the_answer_that_does_no_harm_is_preselected(page: Page, cast: Cast) -> None:
    letter = dead_letter(ambiguous=True)
    log_in(page)
    page.goto(f"/ops/dead-letters/{letter.id}/retry/")
    assert page.get_by_label("I don't know: leave it as it is").is_checked()
    page.get_by_label("It did not happen: run it again").check()
    page.get_by_role("button", name="Do as answered").click()
    page.get_by_text("Say where you saw it").wait_for()
    page.get_by_label("Reference").fill("mailhub log")
    page.get_by_role("button", name="Do as answered").click()
    page.get_by_text("1 job is on its way").wait_for()


def test_no_page_breaks_its_policy_or_asks_another_host(page: Page, world: World, cast: Cast) -> None:
    """SEC-01: every page of the console, with text that would run if it could."""
    hostile = "<img src=x onerror=alert(1)><script>alert(1)</script>"
    DeadLetter.objects.update(error_text=hostile, payload_preview=hostile, worker=hostile)
    Incident.objects.update(title=hostile, summary=hostile)
    RepairAction.objects.update(reason=hostile, send_error=hostile)
    log_in(page)
    for name, entry in PAGES.items():
        answer = visit(page, entry.path(world))
        assert answer is None or answer.status in (200, 404), name
    for path in ("/ops/nothing/", "/ops/incidents/?x=1", f"/ops/incidents/{world.letter.incident_id}/?show=all"):
        page.goto(path)
    assert page.locator("img, script:not([src])").count() == 0


def test_a_page_fits_a_phone(page: Page, world: World, cast: Cast) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    log_in(page)
    for name, entry in PAGES.items():
        if visit(page, entry.path(world)) is None:
            continue
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= 390, (name, width)


def test_a_long_name_widens_no_page(page: Page, cast: Cast) -> None:
    """A job that no worker serves is named in the sentence that says so."""
    letter = dead_letter(task=f"shop.{'n' * 240}", queue="q" * 200)
    now = database_now()
    WorkerNode.objects.create(id="w1", source="tests", host="h1", pid=1, started_at=now, seen_at=now)
    log_in(page)
    for width in (390, 1360):
        page.set_viewport_size({"width": width, "height": 844})
        own = (f"incidents/{letter.incident_id}/", f"dead-letters/{letter.id}/")
        for path in ("", "incidents/", "dead-letters/", *own):
            page.goto(f"/ops/{path}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (path, width)


def test_a_page_that_waits_shows_the_result_by_itself(page: Page, cast: Cast) -> None:
    """C11: what was said goes once it is not so any more; a fold stays open."""
    letter = dead_letter()
    log_in(page)
    page.goto(f"/ops/dead-letters/{letter.id}/retry/")
    page.get_by_role("button", name="Retry it").click()
    page.get_by_text("1 job is on its way").wait_for()
    page.get_by_text("Traceback of the newest failure").click()
    page.mouse.click(5, 5)
    succeed(mark_sent(newest_repair()))
    page.locator(".ops-kicker", has_text="Repaired").wait_for()
    assert page.get_by_text("1 job is on its way").count() == 0
    assert page.locator("main details").first.get_attribute("open") is not None
    assert page.locator("[data-renew]").count() == 0


def test_an_incident_closes_before_the_eyes_of_who_has_retried_it(page: Page, cast: Cast) -> None:
    """C11."""
    letter = dead_letter()
    log_in(page)
    page.goto(f"/ops/incidents/{letter.incident_id}/retry/")
    page.get_by_role("button", name="Retry 1").click()
    page.get_by_text("This page renews itself every 3 s").wait_for()
    page.evaluate("window.isTheSameDocument = true")
    page.get_by_text("As text").click()
    page.mouse.click(5, 5)
    succeed(mark_sent(newest_repair()))
    page.get_by_text("Closed: repaired").wait_for()
    assert page.evaluate("window.isTheSameDocument")
    folds = page.locator("main details[open] > summary")
    assert folds.all_inner_texts() == ["As text"], "there are fewer folds than before, and the same one is open"


def test_what_was_said_of_a_retry_that_failed_does_not_stay(page: Page, cast: Cast) -> None:
    """C11: another job still waits for its result, so the page goes on renewing itself."""
    first, _second = dead_letter(), dead_letter()
    log_in(page)
    page.goto(f"/ops/incidents/{first.incident_id}/retry/")
    page.get_by_role("button", name="Retry 2").click()
    said = page.get_by_text("2 jobs are on their way")
    said.wait_for()
    page.wait_for_timeout(4_000)
    assert said.is_visible(), "nothing is different yet"
    fail_again(mark_sent(newest_repair()))
    page.get_by_text("The last retry failed again: ").wait_for()
    assert said.count() == 0
    assert page.locator("[data-renew]").count() == 1


def test_a_page_is_not_renewed_while_a_menu_is_open_in_it(page: Page, cast: Cast) -> None:
    first, _second = dead_letter(), dead_letter()
    log_in(page)
    page.goto(f"/ops/incidents/{first.incident_id}/retry-one/")
    page.get_by_role("button", name="Retry this 1").click()
    page.get_by_text("This page renews itself").wait_for()
    page.get_by_text("More", exact=True).click()
    succeed(mark_sent(newest_repair()))
    page.wait_for_timeout(4_000)
    assert page.get_by_role("link", name="Close without repairing").is_visible()
    page.get_by_text("More", exact=True).click()
    page.mouse.click(5, 5)
    page.get_by_text("1 of 2 jobs not repaired").wait_for()


def test_without_scripts_the_page_is_fetched_again_where_it_was_scrolled_to(
    browser: Browser, live_server: Any, cast: Cast
) -> None:
    letter = dead_letter()
    for _ in range(30):
        dead_letter()
    context = browser.new_context(base_url=live_server.url, java_script_enabled=False)
    page = context.new_page()
    log_in(page)
    retry_letter(letter_id=letter.id, by=cast.ada, key="k")
    page.goto(f"/ops/incidents/{letter.incident_id}/")
    page.mouse.wheel(0, 700)
    page.wait_for_timeout(500)
    before = page.locator("#jobs").bounding_box()
    succeed(mark_sent(newest_repair()))
    page.get_by_text("30 of 31 jobs not repaired").wait_for()
    after = page.locator("#jobs").bounding_box()
    assert before is not None
    assert after is not None
    assert abs(before["y"] - after["y"]) < 200
    context.close()
