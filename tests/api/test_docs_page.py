"""The documentation in a real browser."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pytest_django.live_server_helper import LiveServer

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.mark.django_db(transaction=True)
def test_the_documentation_shows_every_operation_under_its_policy(page: Page, live_server: LiveServer) -> None:
    """The fixture fails the test for a console error, a violation of the policy and a foreign request."""
    page.goto(f"{live_server.url}/api/docs/")
    page.get_by_text("/api/v1/dead-letters/{letter_id}/retry").wait_for(timeout=30_000)
    page.get_by_text("Run a job again", exact=True).click()
    page.get_by_role("button", name="Try it out").wait_for()
    assert page.locator(".opblock").count() > 20
