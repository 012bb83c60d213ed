"""A real browser for tests: a page that notices whatever would annoy or endanger the person in front of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, Response, sync_playwright

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
AXE = Path(__file__).parent / "vendor" / "axe-core"
WCAG = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa")
"""The tags of the rules of WCAG 2.2, levels A and AA."""
RUN_AXE = """
axe.run(document, {runOnly: %s, rules: %s, resultTypes: ["violations"]})
  .then((found) => found.violations.flatMap((rule) =>
    rule.nodes.map((node) => `${rule.id}: ${node.target}: ${node.html.slice(0, 160)}`)))
"""
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


def axe_violations(page: Page, *, without: Sequence[str] = (), only: Sequence[str] = ()) -> list[str]:
    """Return what axe finds wrong with the page as it stands, a sentence for each element; both name rules.

    The script goes in through the browser's own protocol: the policy of the page would block a tag, and rightly.
    """
    session = page.context.new_cdp_session(page)
    try:
        if not page.evaluate("'axe' in window"):
            session.send("Runtime.evaluate", {"expression": (AXE / "axe.min.js").read_text()})
        rules = {name: {"enabled": False} for name in without}
        chosen = {"type": "rule", "values": only} if only else {"type": "tag", "values": WCAG}
        run = RUN_AXE % (json.dumps(chosen), json.dumps(rules))
        answer = session.send("Runtime.evaluate", {"expression": run, "awaitPromise": True, "returnByValue": True})
    finally:
        session.detach()
    assert "exceptionDetails" not in answer, answer
    found: list[str] = answer["result"]["value"]
    return found


def visit(page: Page, path: str) -> Response | None:
    """Go there; None for what is no page, but a file, a number or a part of one, which the browser is not shown.

    It would ask for an icon that such an answer does not name.
    """
    asked = page.request.get(path, max_redirects=0)
    if not asked.headers.get("content-type", "").startswith("text/html") or "<html" not in asked.text():
        return None
    return page.goto(path)
