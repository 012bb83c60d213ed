"""Whatever a job brings along is shown as text: on every page, in every message (SEC-01)."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from deadletters.journal.events import ErrorReport
from deadletters.models import DeadLetter, WorkerNode
from grants.actions import Action
from incidents.models import Incident
from repairs.models import RepairAction
from repairs.services import discard_letter, retry_letter
from tests.admin.conftest import SignIn
from tests.admin.tools import confirm
from tests.cast import Cast, give
from tests.factories import dead_letter

pytestmark = pytest.mark.django_db

SCRIPT = "<script>alert(1)</script>"
IMAGE = "<img src=x onerror=alert(1)>"
SVG = '"><svg onload=alert(1)>'
LINK = "javascript:alert(1)"
TEXTAREA = "</textarea><script>alert(1)</script>"
JSON = "</script><script>alert(1)</script>"
# What may be in a page of ours: a tag that begins any of the above is none of them.
FOREIGN = re.compile(
    r"<(script(?! src=\"/static/ops/[a-z]+\.js\"(?: defer| type=\"module\")?>)|img|svg(?! class=\"ops-))\b"
    r"|href=\"(javascript|data):",
    re.IGNORECASE,
)


def _hostile_letter(number: int = 1, **more: Any) -> DeadLetter:
    error = ErrorReport(
        error_class=f"shop.{SCRIPT}", text=IMAGE, traceback=f"Traceback\n{JSON}", call_site=SVG, classes=(SCRIPT,)
    )
    body = json.dumps([[SCRIPT, LINK], {"url": LINK, "x": JSON, "y": SVG}, {}]).encode()
    letter = dead_letter(error, task=f"shop.{IMAGE}", queue=SVG, task_id=f"id-{SCRIPT}-{number}", body=body, **more)
    DeadLetter.objects.filter(id=letter.id).update(
        worker=SCRIPT, release=SVG, root_id=LINK, chord_id=IMAGE, outcome_reason=IMAGE, trace_id=SVG
    )
    Incident.objects.filter(id=letter.incident_id).update(summary=TEXTAREA, title=IMAGE)
    letter.refresh_from_db()
    return letter


def _is_text(answer: Any, *, has: str = "") -> None:
    html = answer.content.decode()
    assert not FOREIGN.search(html), FOREIGN.search(html)
    assert "script-src 'self'" in answer["Content-Security-Policy"]
    if has:
        assert has in html


def _pages(client: Client, letter: DeadLetter, repair: RepairAction) -> list[str]:
    incident = f"/ops/incidents/{letter.incident_id}"
    one = f"/ops/dead-letters/{letter.id}"
    grants = client.get("/ops/permissions/").context["rows"]
    return [
        "/ops/", "/ops/incidents/", "/ops/dead-letters/?state=", "/ops/repairs/", "/ops/audit/?who=", "/ops/workers/",
        "/ops/workers/w1/", "/ops/permissions/", "/ops/tokens/", f"{incident}/", f"{incident}/?show=all",
        f"{incident}/close/", f"{incident}/retry/", f"{incident}/retry-one/", f"{one}/", f"{one}/retry/",
        f"{one}/done/", f"{one}/discard/", f"/ops/repairs/{repair.id}/", f"/ops/repairs/{repair.id}/withdraw/",
        f"/ops/permissions/explain/?user={SCRIPT}&action=inspect&tenant={IMAGE}",
        f"/ops/permissions/explain/?user=ada&action=inspect&tenant={IMAGE}",
        *(row["revoke_url"] for row in grants if "<" in row["grant"].reason),
        f"/ops/incidents/?q={SCRIPT}", f"/ops/audit/?tenant={SCRIPT}&action={SVG}", f"/ops/incidents/?state={SCRIPT}",
        f"/ops/{SCRIPT}/",
    ]  # fmt: skip


def test_every_page_shows_it_as_text(cast: Cast, sign_in: SignIn) -> None:
    letter = _hostile_letter()
    other = _hostile_letter(2, actor_type="customer", actor_id=IMAGE)
    done = retry_letter(letter_id=other.id, by=cast.ada, key="k", reason=SCRIPT, reference=LINK, provider_checked=True)
    repair = RepairAction.objects.get(id=done.repair_id)
    RepairAction.objects.filter(id=repair.id).update(send_error=IMAGE, error_code="x", error_text=SCRIPT)
    now = timezone.now()
    WorkerNode.objects.create(
        id="w1", source="tests", host=SCRIPT, pid=1, release=SVG, trouble=IMAGE, queues=json.dumps([SVG]),
        tasks=json.dumps({letter.job_type: JSON}), started_at=now, seen_at=now,
    )  # fmt: skip
    give(cast.vera, Action.EXPORT, tenant=f"t-{SVG}")
    client = sign_in(cast.ada)
    pages = _pages(client, letter, repair)
    assert len(pages) > 25
    for path in pages:
        _is_text(client.get(path))
    _is_text(client.get(f"/ops/dead-letters/{letter.id}/"), has="&lt;img src=x onerror=alert(1)&gt;")


def test_messages_show_it_as_text(cast: Cast, sign_in: SignIn) -> None:
    """A job id in the message of success."""
    letter = _hostile_letter()
    client = sign_in(cast.ada)
    answers = {"answer": "did_not_happen", "reference": LINK}
    answer = confirm(client, f"/ops/dead-letters/{letter.id}/retry/", answers, follow=True)
    _is_text(answer, has="1 job is on its way (id-&lt;script&gt;")
    selected = client.post("/ops/dead-letters/", {"action": SCRIPT, "_selected_action": [SVG]}, follow=True)
    _is_text(selected)


def test_refusals_show_it_as_text(cast: Cast, sign_in: SignIn) -> None:
    letter = _hostile_letter()
    client = sign_in(cast.ada)
    discard_letter(letter_id=letter.id, by=cast.olga, key="k", reason=SCRIPT)
    fields = {"idempotency_key": "k2", "reason": TEXTAREA, "version": "1", "standing": SVG}
    answer = client.post(f"/ops/dead-letters/{letter.id}/discard/", fields)
    assert answer.status_code == 412
    _is_text(answer)
    close = f"/ops/incidents/{dead_letter().incident_id}/close/"
    wrong = client.post(close, fields | {"code": SVG, "summary": TEXTAREA, "unrepaired": IMAGE})
    assert wrong.status_code == 400
    _is_text(wrong, has="&lt;/textarea&gt;")


def test_a_resolution_is_shown_as_text(cast: Cast, sign_in: SignIn) -> None:
    letter = _hostile_letter()
    client = sign_in(cast.ada)
    answers = {"code": "loss_accepted", "summary": TEXTAREA}
    answer = confirm(client, f"/ops/incidents/{letter.incident_id}/close/", answers, follow=True)
    _is_text(answer, has="&lt;/textarea&gt;&lt;script&gt;")


def test_the_rule_of_this_file_finds_markup() -> None:
    for text in (SCRIPT, IMAGE, SVG, f'<a href="{LINK}">'):
        assert FOREIGN.search(text)
    assert not FOREIGN.search('<script src="/static/ops/ops.js" defer></script>')
