"""Redrives in the console: planned from an incident or a filter, looked at, started, paused, let go on, cancelled."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from django.conf import LazySettings
from django.test import Client

from deadletters.arguments import describe_signature
from deadletters.models import WorkerNode
from deadletters.outcome import OutcomeClass
from grants.actions import Action
from grants.models import AuditEvent
from incidents.models import Incident
from opsconsole.core.database import database_now
from repairs.admin.redrive_words import PAUSE_WORDS, pause_words
from repairs.models import ItemState, Redrive, RedriveItem, RedriveState
from repairs.redrives.requests import RedriveChanges, RedrivePace, RedriveSelection
from repairs.redrives.services import create_redrive, start_redrive
from tests.admin.conftest import SignIn
from tests.admin.tools import confirm, hidden_fields, text_of
from tests.cast import Cast, give
from tests.factories import TIMED_OUT, dead_letter

pytestmark = pytest.mark.django_db(transaction=True)

PACE = {"canary_size": "1", "rate_per_second": "20", "max_outstanding": "100", "stop_percent": "10"}


@pytest.fixture(autouse=True)
def worker(db: None) -> None:
    now = database_now()
    WorkerNode.objects.create(
        id="serves", source="tests", host="h", pid=1, queues='["celery"]', started_at=now, seen_at=now,
        tasks=json.dumps({"shop.send_mail": describe_signature(lambda address, order=None: None)}),
    )  # fmt: skip


def _plan_url(incident: Incident) -> str:
    return f"/ops/redrives/plan/?incident={incident.id}"


def _planned(cast: Cast, count: int = 3, **more: Any) -> Redrive:
    letters = [dead_letter() for _ in range(count)]
    made = create_redrive(
        by=cast.ada, key="plan", selection=RedriveSelection(incident_id=letters[0].incident_id), **more
    )
    return Redrive.objects.get(id=made.redrive_id)


def _page(client: Client, redrive: Redrive, query: str = "") -> str:
    return text_of(client.get(f"/ops/redrives/{redrive.id}/{query}").content.decode())


def test_an_incident_becomes_a_redrive_and_is_started(cast: Cast, sign_in: SignIn) -> None:
    """C14: frozen first, looked at, and nothing is sent before somebody starts it."""
    letters = [dead_letter() for _ in range(3)]
    ambiguous = dead_letter(error=TIMED_OUT)
    client = sign_in(cast.ada)
    answer = confirm(client, _plan_url(letters[0].incident), PACE, follow=True)
    redrive = Redrive.objects.get()
    assert answer.redirect_chain == [(f"/ops/redrives/{redrive.id}/", 302)]
    assert redrive.state == RedriveState.READY
    assert {item.letter_id for item in RedriveItem.objects.all()} == {
        one.id for one in (*letters, ambiguous) if one.incident_id == letters[0].incident_id
    }
    page = _page(client, redrive)
    assert "Waits for its start" in page
    assert "at most 20 a second, 100 awaiting their result" in page
    started = confirm(client, f"/ops/redrives/{redrive.id}/start/", {}, follow=True)
    assert "The redrive is started." in text_of(started.content.decode())
    redrive.refresh_from_db()
    assert (redrive.state, redrive.started_by) == (RedriveState.CANARY, cast.ada.ref)


def test_what_may_already_have_happened_runs_only_with_an_answer_and_a_reference(cast: Cast, sign_in: SignIn) -> None:
    """C13, C19."""
    letter = dead_letter(error=TIMED_OUT)
    assert letter.outcome_class == OutcomeClass.AMBIGUOUS
    made = create_redrive(by=cast.ada, key="k", selection=RedriveSelection(incident_id=letter.incident_id))
    client, url = sign_in(cast.ada), f"/ops/redrives/{made.redrive_id}/start/"
    assert "1 run only if you answer for them: may already have happened" in text_of(client.get(url).content.decode())
    unsaid = confirm(client, url, {"ambiguous": "did_not_happen"})
    assert unsaid.status_code == 400
    assert "Say where you saw it" in text_of(unsaid.content.decode())
    assert Redrive.objects.get().state == RedriveState.READY
    confirm(client, url, {"ambiguous": "did_not_happen", "ambiguous_reference": "CASE-7"})
    assert json.loads(Redrive.objects.get().answers) == {"ambiguous": ["did_not_happen", "CASE-7"]}
    assert "They did not happen: run them again (CASE-7)" in _page(client, Redrive.objects.get())


def test_another_number_of_jobs_than_was_shown_is_asked_again(cast: Cast, sign_in: SignIn) -> None:
    letter = dead_letter()
    client = sign_in(cast.ada)
    seen = hidden_fields(client.get(_plan_url(letter.incident)).content.decode())
    dead_letter()
    answer = client.post(_plan_url(letter.incident), {**seen, **PACE})
    assert answer.status_code == 409
    text = text_of(answer.content.decode())
    assert "Plan a redrive of 2 jobs" in text
    assert not Redrive.objects.exists()
    fresh = hidden_fields(answer.content.decode())
    assert fresh["expected"] == "2"
    client.post(_plan_url(letter.incident), {**fresh, **PACE})
    assert Redrive.objects.get().total_count == 2


def test_a_form_that_is_sent_twice_plans_one_redrive(cast: Cast, sign_in: SignIn) -> None:
    """A9."""
    letter = dead_letter()
    client = sign_in(cast.ada)
    seen = hidden_fields(client.get(_plan_url(letter.incident)).content.decode())
    first, second = (client.post(_plan_url(letter.incident), {**seen, **PACE}, follow=True) for _ in range(2))
    assert Redrive.objects.count() == 1
    assert first.redirect_chain == second.redirect_chain
    assert "that was done before, and nothing was repeated" in text_of(second.content.decode())


def test_changes_take_their_own_grant_and_are_shown_before_and_after(cast: Cast, sign_in: SignIn) -> None:
    """B1: redrive.patch."""
    letter = dead_letter()
    give(cast.nobody, Action.INSPECT, Action.REDRIVE_RUN, tenant="default")
    without = sign_in(cast.nobody).get(_plan_url(letter.incident)).content.decode()
    assert "Change: set keyword arguments" not in without
    client = sign_in(cast.ada)
    wrong = confirm(client, _plan_url(letter.incident), {**PACE, "set": "order = seven"})
    assert wrong.status_code == 400
    assert "The value of order is not JSON" in text_of(wrong.content.decode())
    confirm(client, _plan_url(letter.incident), {**PACE, "set": "order = 8"})
    page = _page(client, Redrive.objects.get())
    assert "What is sent differently" in page
    assert "order=7" in page.replace('"order": ', "order=")
    assert "order=8" in page.replace('"order": ', "order=")


def test_who_may_not_change_messages_may_pause_and_cancel_such_a_redrive_and_not_let_it_run(
    cast: Cast, sign_in: SignIn
) -> None:
    redrive = _planned(cast, changes=RedriveChanges(tasks={"shop.send_mail": "shop.post"}))
    give(cast.olga, Action.REDRIVE_RUN, tenant="default")
    client = sign_in(cast.olga)
    page = _page(client, redrive)
    assert "redrive.patch" in page
    assert "Start…" not in page
    assert "Cancel it…" in page
    assert client.get(f"/ops/redrives/{redrive.id}/start/").status_code == 403
    assert client.get(f"/ops/redrives/{redrive.id}/cancel/").status_code == 200
    give(cast.olga, Action.REDRIVE_PATCH, tenant="default")
    assert "Start…" in _page(client, redrive)
    assert client.get(f"/ops/redrives/{redrive.id}/start/").status_code == 200


def test_who_may_only_look_is_told_which_grant_is_missing(cast: Cast, sign_in: SignIn) -> None:
    """ADM-01."""
    redrive = _planned(cast)
    page = _page(sign_in(cast.vera), redrive)
    assert "Start and Cancel it: needs the permission redrive.run" in page
    assert "Plan one" not in text_of(sign_in(cast.vera).get("/ops/redrives/").content.decode())


def test_pausing_takes_one_click_and_going_on_another_pace(cast: Cast, sign_in: SignIn) -> None:
    """C14: only a person lets it go on."""
    redrive = _planned(cast, pace=RedrivePace(canary_size=0))
    start_redrive(redrive_id=redrive.id, by=cast.ada, key="go")
    client, url = sign_in(cast.ada), f"/ops/redrives/{redrive.id}/"
    fields = hidden_fields(client.get(url).content.decode(), f"{url}pause/")
    for _ in range(2):
        answer = client.post(f"{url}pause/", fields, follow=True)
        assert answer.status_code == 200
    redrive.refresh_from_db()
    assert (redrive.state, redrive.paused_by_name) == (RedriveState.PAUSED, "ada")
    assert ": by ada. It goes on only when somebody lets it." in text_of(client.get(url).content.decode())
    confirm(client, f"{url}resume/", {**PACE, "canary_size": "0", "rate_per_second": "3", "stop_percent": ""})
    redrive.refresh_from_db()
    assert (redrive.state, redrive.rate_per_second, redrive.stop_percent) == (RedriveState.RUNNING, 3, None)
    late = client.post(f"{url}pause/", {**fields, "idempotency_key": "again"}, follow=True)
    assert late.status_code == 200
    stale = client.post(f"{url}pause/", {**fields, "idempotency_key": "third"}, follow=True)
    assert "The redrive is paused; nothing was changed." in text_of(stale.content.decode())


def test_cancelling_leaves_its_jobs_waiting_for_a_decision(cast: Cast, sign_in: SignIn) -> None:
    redrive = _planned(cast)
    client = sign_in(cast.ada)
    answer = confirm(client, f"/ops/redrives/{redrive.id}/cancel/", {"reason": "wrong night"}, follow=True)
    assert "The redrive is cancelled." in text_of(answer.content.decode())
    assert {item.state for item in RedriveItem.objects.all()} == {ItemState.CANCELLED}
    assert {item.letter.state for item in RedriveItem.objects.select_related("letter")} == {"open"}
    event = AuditEvent.objects.get(action="redrive.cancelled")
    assert (event.operator_name, event.reason) == ("ada", "wrong night")


def test_a_large_one_waits_for_a_second_person(cast: Cast, sign_in: SignIn, settings: LazySettings) -> None:
    settings.OPSCONSOLE_REDRIVE_APPROVAL_ABOVE = 2
    redrive = _planned(cast)
    planner = sign_in(cast.ada)
    assert "a second person has to approve it" in _page(planner, redrive)
    own = confirm(planner, f"/ops/redrives/{redrive.id}/approve/", {})
    assert own.status_code == 409
    give(cast.nobody, Action.INSPECT, Action.REDRIVE_RUN, tenant="default")
    second = sign_in(cast.nobody)
    confirm(second, f"/ops/redrives/{redrive.id}/approve/", {"reason": "looked at it"})
    assert "Approved by nobody" in _page(planner, redrive)
    confirm(planner, f"/ops/redrives/{redrive.id}/start/", {})
    redrive.refresh_from_db()
    assert redrive.state == RedriveState.CANARY


def test_jobs_are_listed_by_class_and_by_result(cast: Cast, sign_in: SignIn) -> None:
    redrive = _planned(cast)
    client = sign_in(cast.ada)
    assert "Jobs: Safe to run again" in _page(client, redrive, "?class=safe")
    assert "None." in _page(client, redrive, "?state=failed")
    assert client.get(f"/ops/redrives/{redrive.id}/?class=nonsense").status_code == 400


def test_a_filter_is_chosen_by_hand(cast: Cast, sign_in: SignIn) -> None:
    dead_letter()
    dead_letter(task="shop.other")
    client = sign_in(cast.ada)
    assert "Which failed jobs?" in text_of(client.get("/ops/redrives/plan/").content.decode())
    url = "/ops/redrives/plan/?tenant=default&source=tests&job_type=shop.send_mail"
    assert "Plan a redrive of 1 job of default that match?" in text_of(client.get(url).content.decode())
    confirm(client, url, PACE)
    assert [item.letter.job_type for item in RedriveItem.objects.select_related("letter")] == ["shop.send_mail"]


def test_an_incident_of_more_than_a_thousand_jobs_is_retried_as_a_redrive(
    cast: Cast, sign_in: SignIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("repairs.admin.incidents.MOST_LETTERS", 2)
    letters = [dead_letter() for _ in range(3)]
    page = sign_in(cast.ada).get(f"/ops/incidents/{letters[0].incident_id}/").content.decode()
    assert f'href="{_plan_url(letters[0].incident)}"' in page
    assert f'action="/ops/incidents/{letters[0].incident_id}/retry/"' not in page


def test_every_reason_to_pause_has_words_and_a_line_in_the_guide() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "redrive.md").read_text()
    table = guide.partition("| `pause_code` |")[2].partition("\n\n")[0]
    told = set(re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in table.splitlines()[2:])))
    assert told == set(PAUSE_WORDS)
    stopped = Redrive(pause_code="too_many_failed", pause_text="2 of 10 failed.", paused_by_name="")
    assert pause_words(stopped) == "too many jobs have failed: 2 of 10 failed."
    assert pause_words(Redrive(pause_code="operator", pause_text="lunch", paused_by_name="ada")) == "by ada: lunch"
