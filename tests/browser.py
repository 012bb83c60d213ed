"""A real browser for tests: a page that notices whatever would annoy or endanger the person in front of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# Runs in each document before its own scripts; the console names a violation too, but only in some modes of a policy.
REPORT_VIOLATIONS = """
document.addEventListener("securitypolicyviolation", (event) => window.reportPolicyViolation(
  `${event.effectiveDirective} forbids ${event.blockedURI} on ${event.documentURI}`));
"""


@contextmanager
def open_browser(executable: str) -> Iterator[Browser]:
    """Start ``executable`` and close it at the end.

    Playwright's event loop lives in the thread of the tests meanwhile, in which Django would refuse every query.
    """
    before = os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE")
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=executable, args=list(FLAGS))
            yield browser
            browser.close()
    finally:
        if before is None:
            del os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"]
        else:
            os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = before


@contextmanager
def open_page(browser: Browser, base_url: str) -> Iterator[tuple[Page, list[str]]]:
    """Open a page in a fresh profile; the second value grows by a sentence for each thing that was wrong."""
    troubles: list[str] = []
    context = browser.new_context(base_url=base_url, locale="en-GB", timezone_id="UTC")
    context.expose_function("reportPolicyViolation", lambda what: troubles.append(f"policy violation: {what}"))
    context.add_init_script(REPORT_VIOLATIONS)
    documents: set[str] = set()

    def on_request(request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme in ("http", "https", "ws", "wss") and parts.netloc != urlsplit(base_url).netloc:
            troubles.append(f"request to another host: {request.url}")
        if request.is_navigation_request():
            documents.add(request.url)

    def on_console(message: ConsoleMessage) -> None:
        # The browser reports the status of a refused or missing page as an error; that status is the test's matter.
        own_status = "the server responded with a status of 4" in message.text
        if message.type == "error" and not (own_status and message.location["url"] in documents):
            troubles.append(f"console error: {message.text}")

    context.on("request", on_request)
    context.on("console", on_console)
    context.on("weberror", lambda error: troubles.append(f"uncaught error: {error.error}"))
    try:
        yield context.new_page(), troubles
    finally:
        context.close()
