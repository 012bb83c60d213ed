"""What the tests of the console share: posting a confirmation, and settling what it sent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import unescape
from html.parser import HTMLParser
from typing import Any

from django.test import Client

from deadletters.journal.events import Caught, Ended, EndState
from deadletters.models import DeadLetter
from deadletters.recorder import Recorded
from opsconsole.core.clock import boot_now, wall_now
from repairs.models import ActionState, RepairAction
from repairs.settlement import DatabaseSettlement
from tests.factories import TIMED_OUT, delivery, failure, record


class _Forms(HTMLParser):
    """Collects the fields of the forms that are sent by POST."""

    def __init__(self) -> None:
        super().__init__()
        self.forms: list[dict[str, Any]] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if tag == "form":
            self.inside = found.get("method", "").lower() == "post"
            if self.inside:
                self.forms.append({"action": found.get("action", ""), "fields": {}})
        elif tag == "input" and self.inside and found.get("type") in (None, "hidden"):
            self.forms[-1]["fields"][found["name"]] = found.get("value", "")

    def handle_endtag(self, tag: str) -> None:
        if tag == "form":
            self.inside = False


def hidden_fields(html: str, action: str = "") -> dict[str, str]:
    """Return what the page's form for ``action`` sends by itself, as a browser would."""
    parser = _Forms()
    parser.feed(html)
    found = [form["fields"] for form in parser.forms if form["action"] == action]
    assert found, f"the page has no form for {action or 'itself'}"
    return {name: value for name, value in found[0].items() if name != "csrfmiddlewaretoken"}


def text_of(html: str) -> str:
    """Return what a person reads of a page."""
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", html)))


def confirm(client: Client, url: str, answers: Mapping[str, Any] | None = None, **more: Any) -> Any:
    """Open a confirmation and send it with some answers."""
    page = client.get(url)
    assert page.status_code == 200, text_of(page.content.decode())
    return client.post(url, {**hidden_fields(page.content.decode()), **(answers or {})}, **more)


def mark_sent(action: RepairAction) -> RepairAction:
    """Do what the relay does once the broker has a repair's message."""
    RepairAction.objects.filter(id=action.id).update(state=ActionState.SENT, sent_at=action.planned_at)
    action.refresh_from_db()
    return action


def succeed(action: RepairAction) -> None:
    """Report that a repair's job has succeeded, as the drainer of its worker would."""
    sent = delivery(task_id=action.new_task_id, task=action.job_type, repair_id=str(action.id), claimed=True)
    DatabaseSettlement().ended(Ended(delivery=sent, state=EndState.SUCCESS, at_boot=boot_now(), at_wall=wall_now()))


def fail_again(action: RepairAction) -> list[Recorded]:
    """Report that a repair's job has failed for good."""
    sent = delivery(task_id=action.new_task_id, task=action.job_type, repair_id=str(action.id), claimed=True)
    recorded = record(failure(TIMED_OUT, delivery=sent, caught=Caught.FAILURE, letter_id=action.letter_id))
    DatabaseSettlement().failed(recorded, action.planned_at)
    return recorded


def newest_repair(letter: DeadLetter | None = None) -> RepairAction:
    """Return the newest repair, of one letter or of all."""
    actions = RepairAction.objects.newest_first()
    return (actions if letter is None else actions.filter(letter=letter))[0]
