"""What a page of the console weighs: kilobytes with a cold cache, requests, and database queries.

    python -m benchmarks.pages

Each page is opened in a browser profile of its own, so that nothing is cached, and nothing is compressed. Queries are
counted for a second request of the same person, when the line about the machinery is warm. The lists hold more rows
than a page shows; none of the three numbers depends on how many more, nor on the machine, nor on the database (SQLite).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.common import Goal, Run, benchmark, environment, show

MOST_KB = {"list": 420.0, "page": 100.0}
MOST_QUERIES = 8
JOBS_OF_ONE = 30


@dataclass(frozen=True)
class Weighed:
    """One page: ``kind`` chooses its bound, ``kilobytes`` is what came over the wire."""

    name: str
    kind: str
    kilobytes: float
    html: float
    requests: int
    queries: int


def set_up(run: Run) -> None:
    """Start Django on a new SQLite file, with the fast password hash of the tests."""
    os.environ.update(environment(run, "unused", OPSCONSOLE_DATABASE_URL=f"sqlite:///{run.folder / 'pages.sqlite3'}"))
    import django
    from django.conf import settings
    from django.core.management import call_command

    django.setup()
    settings.ALLOWED_HOSTS = ["*"]
    call_command("migrate", verbosity=0)


def make_rows(count: int) -> dict[str, tuple[str, str]]:
    """Fill the tables, and return the pages by name: (kind, address)."""
    from django.utils import timezone

    from deadletters.models import WorkerNode
    from grants.models import AuditEvent
    from grants.services import bootstrap
    from repairs.services import retry_letter
    from tests.cast import make_operator
    from tests.factories import dead_letter

    ada = make_operator("ada")
    bootstrap(username="ada")
    now = timezone.now()
    for number in range(20):
        WorkerNode.objects.create(
            id=f"w{number}", source="tests", host=f"host-{number}", pid=1, queues=json.dumps(["celery"]),
            tasks=json.dumps({"shop.send_mail": "(*args, **kwargs)"}), started_at=now, seen_at=now, captured_at=now,
        )  # fmt: skip
    for number in range(count):
        dead_letter(task=f"shop.task_{number}", ambiguous=number % 3 == 0)
    letters = [dead_letter() for _ in range(JOBS_OF_ONE)]
    for number, letter in enumerate(letters[:10]):
        retry_letter(letter_id=letter.id, by=ada, key=f"pages-{number}")
    incident, letter = letters[-1].incident_id, letters[-1].id
    event = AuditEvent.objects.order_by("-at")[0]
    return {
        "overview": ("page", "/ops/"),
        "incidents": ("list", "/ops/incidents/"),
        "incident": ("page", f"/ops/incidents/{incident}/"),
        "confirm a retry of all": ("page", f"/ops/incidents/{incident}/retry/"),
        "confirm closing": ("page", f"/ops/incidents/{incident}/close/"),
        "failed jobs": ("list", "/ops/dead-letters/"),
        "failed job": ("page", f"/ops/dead-letters/{letter}/"),
        "repairs": ("list", "/ops/repairs/"),
        "jobs": ("list", "/ops/jobs/"),
        "workers": ("list", "/ops/workers/"),
        "worker": ("page", "/ops/workers/w1/"),
        "audit": ("list", "/ops/audit/?who="),
        "audit event": ("page", f"/ops/audit/{event.id}/"),
        "permissions": ("list", "/ops/permissions/"),
        "explain": ("page", "/ops/permissions/explain/"),
        "API tokens": ("list", "/ops/tokens/"),
        "not found": ("page", "/ops/nothing/"),
        "log in": ("page", "/ops/login/"),
    }


def signed_in(name: str) -> Any:
    """Return a test client in which ``name`` is signed in, or nobody."""
    from django.contrib.auth import get_user_model
    from django.test import Client

    client = Client()
    if name:
        client.force_login(get_user_model().objects.get(username=name))
    return client


@contextmanager
def serving() -> Iterator[str]:
    """Serve the project in a thread and yield its address."""
    from django.contrib.staticfiles.handlers import StaticFilesHandler
    from django.test.testcases import LiveServerThread

    thread = LiveServerThread("127.0.0.1", StaticFilesHandler)
    thread.daemon = True
    thread.start()
    thread.is_ready.wait()
    if thread.error:
        raise thread.error
    try:
        yield f"http://127.0.0.1:{thread.port}"
    finally:
        thread.terminate()


def weigh(browser: Any, base: str, address: str, cookie: tuple[str, str] | None) -> tuple[float, float, int]:
    """Open a page with a cold cache; return its kilobytes, those of its HTML, and how many requests it made."""
    context = browser.new_context(base_url=base)
    if cookie is not None:
        context.add_cookies([{"name": cookie[0], "value": cookie[1], "url": base}])
    page = context.new_page()
    session = context.new_cdp_session(page)
    session.send("Network.enable")
    bytes_of: dict[str, float] = {}
    session.on(
        "Network.loadingFinished", lambda event: bytes_of.update({event["requestId"]: event["encodedDataLength"]})
    )
    answer = page.goto(address, wait_until="networkidle")
    assert answer is not None
    assert cookie is None or not page.url.endswith("/login/"), page.url
    html = len(answer.body())
    context.close()
    return sum(bytes_of.values()) / 1_000, html / 1_000, len(bytes_of)


def count_queries(client: Any, address: str) -> int:
    """Return the queries of a second request."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    client.get(address)
    with CaptureQueriesContext(connection) as found:
        client.get(address)
    return len(found)


def weigh_all(count: int) -> list[Weighed]:
    """Make the rows and weigh every page."""
    from django.conf import settings

    from tests.browser import open_browser
    from tests.services import find_chromium

    pages = make_rows(count)
    weighed = []
    with serving() as base, open_browser(find_chromium()) as browser:
        for name, (kind, address) in pages.items():
            client = signed_in("" if name == "log in" else "ada")
            queries = count_queries(client, address)
            session = client.cookies.get(settings.SESSION_COOKIE_NAME)
            cookie = (settings.SESSION_COOKIE_NAME, session.value) if session else None
            kilobytes, html, requests = weigh(browser, base, address, cookie)
            weighed.append(
                Weighed(name=name, kind=kind, kilobytes=kilobytes, html=html, requests=requests, queries=queries)
            )
    return weighed


def main() -> None:
    with benchmark("pages", "Weigh the console's pages.", needs=(), tasks=60, rounds=1) as run:
        set_up(run)
        weighed = weigh_all(run.tasks)
        heaviest = {kind: max(one.kilobytes for one in weighed if one.kind == kind) for kind in MOST_KB}
        goals = [
            Goal(what=f"heaviest {kind}", value=heaviest[kind], bound=most, at_least=False, unit=" KB")
            for kind, most in MOST_KB.items()
        ]
        queries = max(one.queries for one in weighed)
        goals.append(Goal(what="most queries", value=float(queries), bound=MOST_QUERIES, at_least=False))
        show(
            run,
            head=("page", "kind", "KB cold", "HTML KB", "requests", "queries"),
            rows=[(one.name, one.kind, one.kilobytes, one.html, one.requests, one.queries) for one in weighed],
            goals=goals,
        )


if __name__ == "__main__":
    sys.exit(main())
