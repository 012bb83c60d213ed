"""What is done to several selected rows at once: each by itself, under a key of its own, and never twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from django.test import Client

from deadletters.models import DeadLetter, LetterState, SealedMessage
from grants.models import AuditEvent, Verdict
from incidents.models import EpisodeEnd, Incident, IncidentState
from incidents.services import acknowledge_incident, resolve_incident
from opsconsole.core.ids import new_id
from repairs.services import discard_letter
from tests.admin.conftest import SignIn
from tests.admin.test_in_a_browser import log_in
from tests.admin.tools import hidden_fields, text_of
from tests.browser import axe_violations
from tests.cast import Cast
from tests.factories import dead_letter

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.django_db
INCIDENTS, JOBS = "/ops/incidents/", "/ops/dead-letters/"
WHY = {"code": "loss_accepted", "summary": "the list was of last year"}


def _incidents(count: int) -> list[Incident]:
    return [dead_letter(task=f"shop.task_{number}").incident for number in range(count)]


def _chosen(client: Client, path: str, action: str, *rows: Any) -> dict[str, Any]:
    """Return what a list sends for some of its rows, as a browser would."""
    page = client.get(path)
    key = page.context["bulk_key"]
    assert f'name="idempotency_key" value="{key}"' in page.content.decode()
    return {"idempotency_key": key, "action": action, "_selected_action": [str(one.id) for one in rows]}


def _said(answer: Any) -> str:
    return " ".join(str(one) for one in answer.context["messages"])


def _name(incident: Incident) -> str:
    return f"INC-{incident.number:04d}"


# -- taking ------------------------------------------------------------------------------------------------------------


def test_the_selected_incidents_are_taken_at_once_each_with_an_audit_row_of_its_own(
    cast: Cast, sign_in: SignIn
) -> None:
    """A10."""
    found = _incidents(3)
    client = sign_in(cast.olga)
    sent = _chosen(client, INCIDENTS, "take_selected", *found[:2])
    assert _said(client.post(INCIDENTS, sent, follow=True)) == "2 incidents taken."
    states = list(Incident.objects.order_by("number").values_list("state", "acknowledged_by"))
    assert states == [("acknowledged", cast.olga.ref)] * 2 + [("open", "")]
    rows = AuditEvent.objects.filter(action="operations.incident_acknowledged")
    assert {row.idempotency_key for row in rows} == {f"{sent['idempotency_key']}:{one.id}" for one in found[:2]}


def test_sending_the_list_twice_or_from_a_page_that_came_back_repeats_nothing(cast: Cast, sign_in: SignIn) -> None:
    """A9."""
    found = _incidents(2)
    client = sign_in(cast.olga)
    sent = _chosen(client, INCIDENTS, "take_selected", *found)
    client.post(INCIDENTS, sent, follow=True)
    acknowledge_incident(incident_id=found[0].id, by=cast.ada, key="k", take_over=True)
    said = _said(client.post(INCIDENTS, sent, follow=True))
    assert said == "2 incidents taken: that was done before, and nothing was repeated."
    assert Incident.objects.get(id=found[0].id).acknowledged_by == cast.ada.ref
    assert AuditEvent.objects.filter(action="operations.incident_acknowledged").count() == 3


def test_what_somebody_has_or_has_closed_is_refused_by_name_and_the_rest_is_taken(cast: Cast, sign_in: SignIn) -> None:
    """A list that is old: nobody is relieved of an incident by it."""
    had, over, free = _incidents(3)
    client = sign_in(cast.olga)
    sent = _chosen(client, INCIDENTS, "take_selected", had, over, free)
    acknowledge_incident(incident_id=had.id, by=cast.ada, key="k")
    resolve_incident(incident_id=over.id, by=cast.ada, key="k", unrepaired=1, **WHY)
    said = _said(client.post(INCIDENTS, sent, follow=True))
    assert said.startswith("1 incident taken. 2 refused. ")
    assert f"{_name(had)}: ada has it already." in said
    assert f"{_name(over)}: The incident is resolved already." in said
    assert Incident.objects.get(id=had.id).acknowledged_by == cast.ada.ref


def test_whoever_may_not_take_is_offered_nothing_and_their_hand_made_form_is_refused_and_audited(
    cast: Cast, sign_in: SignIn
) -> None:
    """ADM-01: what may not be seen is not named either."""
    found = dead_letter(tenant="t-b").incident
    assert sign_in(cast.vera).get(INCIDENTS).context["bulk_actions"] == []
    sent = {"action": "take_selected", "_selected_action": [str(found.id), str(new_id()), "x"], "idempotency_key": "k"}
    said = _said(sign_in(cast.olga).post(INCIDENTS, sent, follow=True))
    assert said.startswith("3 refused.")
    assert _name(found) not in said
    assert Incident.objects.get().state == IncidentState.OPEN
    assert AuditEvent.objects.filter(verdict=Verdict.DENIED, operator_name="olga", target_id=str(found.id)).exists()


@pytest.mark.parametrize("count", [0, 101])
@pytest.mark.parametrize(
    ("path", "action"),
    [
        (INCIDENTS, "take_selected"),
        (INCIDENTS, "close_selected"),
        (JOBS, "discard_selected"),
        (JOBS, "done_selected"),
    ],
)
def test_no_row_or_more_than_a_hundred_change_nothing(
    path: str, action: str, count: int, cast: Cast, sign_in: SignIn
) -> None:
    sent = {"action": action, "_selected_action": [str(new_id()) for _ in range(count)], "idempotency_key": "k"}
    assert "at most 100. Nothing was changed." in _said(sign_in(cast.ada).post(path, sent, follow=True))


# -- closing -----------------------------------------------------------------------------------------------------------


def test_closing_shows_what_will_change_and_what_is_skipped_and_why(cast: Cast, sign_in: SignIn) -> None:
    first, held, over = _incidents(3)
    acknowledge_incident(incident_id=held.id, by=cast.olga, key="k")
    resolve_incident(incident_id=over.id, by=cast.ada, key="k", unrepaired=1, **WHY)
    client = sign_in(cast.ada)
    page = client.post(INCIDENTS, _chosen(client, INCIDENTS, "close_selected", first, held, over))
    text = text_of(page.content.decode())
    for said in (
        "Close 2 of 3 selected incidents without repairing?",
        "Will change: 2 incidents with 2 jobs not repaired",
        "Skipped, because: 1 incident closed already",
        f"{_name(held)} : olga has it",
        "Close 2 incidents, leave 2 jobs undone",
    ):
        assert said in text, said
    assert EpisodeEnd.objects.count() == 1


def test_a_code_and_a_reason_are_required_and_the_form_keeps_its_key(cast: Cast, sign_in: SignIn) -> None:
    found = _incidents(2)
    client = sign_in(cast.ada)
    page = client.post(INCIDENTS, _chosen(client, INCIDENTS, "close_selected", *found))
    fields = hidden_fields(page.content.decode())
    again = client.post(INCIDENTS, {**fields, "code": "", "summary": ""})
    assert again.status_code == 400
    assert hidden_fields(again.content.decode()) == fields
    assert not EpisodeEnd.objects.exists()


def test_what_was_confirmed_is_closed_once_with_its_frozen_number(cast: Cast, sign_in: SignIn) -> None:
    """A9, A11: an incident that has failed again since then is left open, and the answer says so."""
    calm, busy = _incidents(2)
    client = sign_in(cast.ada)
    page = client.post(INCIDENTS, _chosen(client, INCIDENTS, "close_selected", calm, busy))
    dead_letter(task=busy.job_type)
    sent = {**hidden_fields(page.content.decode()), **WHY}
    said = _said(client.post(INCIDENTS, sent, follow=True))
    assert said.startswith("1 incident is closed. 1 refused. ")
    assert f"{_name(busy)}: 2 of its jobs are not repaired" in said
    repeated = _said(client.post(INCIDENTS, sent, follow=True))
    assert repeated.startswith("1 incident is closed: that was done before, and nothing was repeated. 1 refused.")
    assert list(Incident.objects.order_by("number").values_list("state", flat=True)) == ["resolved", "open"]
    assert EpisodeEnd.objects.get().resolution_code == "loss_accepted"
    assert AuditEvent.objects.filter(action="operations.incident_resolved").count() == 1


def test_an_incident_that_somebody_took_since_the_question_is_not_closed(cast: Cast, sign_in: SignIn) -> None:
    found = _incidents(1)[0]
    client = sign_in(cast.ada)
    page = client.post(INCIDENTS, _chosen(client, INCIDENTS, "close_selected", found))
    acknowledge_incident(incident_id=found.id, by=cast.olga, key="k")
    said = _said(client.post(INCIDENTS, {**hidden_fields(page.content.decode()), **WHY}, follow=True))
    assert said == f"1 refused. {_name(found)}: The incident has changed since you looked at it."
    assert Incident.objects.get().state == IncidentState.ACKNOWLEDGED


def test_closing_takes_both_permissions(cast: Cast, sign_in: SignIn) -> None:
    """Olga may close what is repaired, and nothing else."""
    found = _incidents(1)[0]
    client = sign_in(cast.olga)
    assert [one.value for one in client.get(INCIDENTS).context["bulk_actions"]] == ["take_selected"]
    sent = {"action": "close_selected", "_selected_action": [str(found.id)], "idempotency_key": "k"}
    page = client.post(INCIDENTS, sent)
    assert "1 incident not yours to close, or not there" in text_of(page.content.decode())
    assert AuditEvent.objects.filter(
        verdict=Verdict.DENIED, operator_name="olga", action="incidents.close-unrepaired", target_id=str(found.id)
    ).exists()
    client.post(INCIDENTS, {**sent, **WHY, "confirmed": "yes", "incidents": str(found.id)})
    assert Incident.objects.get().state == IncidentState.OPEN


# -- failed jobs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "service", "state"),
    [
        ("discard_selected", "dead-letters.discard", LetterState.DISCARDED),
        ("done_selected", "dead-letters.close-as-done", LetterState.ALREADY_DONE),
    ],
)
def test_a_decision_about_several_jobs_is_asked_about_and_then_taken_once_for_each(
    action: str, service: str, state: str, cast: Cast, sign_in: SignIn
) -> None:
    """A9, ADM-01."""
    letters = [dead_letter(), dead_letter(), dead_letter(task="shop.other")]
    over = dead_letter()
    discard_letter(letter_id=over.id, by=cast.ada, key="k", reason="r")
    client = sign_in(cast.olga)
    page = client.post(JOBS, _chosen(client, JOBS, action, *letters, over))
    text = text_of(page.content.decode())
    assert "3 of 4 selected jobs" in text
    assert "Will change: 3 jobs." in text
    assert "Skipped, because: 1 job not waiting for a decision any more" in text
    fields = hidden_fields(page.content.decode())
    refused = client.post(JOBS, {**fields, "reason": ""})
    assert refused.status_code == 400
    assert hidden_fields(refused.content.decode()) == fields
    sent = {**fields, "reason": "of last year"}
    said = _said(client.post(JOBS, sent, follow=True))
    assert said.startswith("3 jobs are ")
    assert {one.state for one in DeadLetter.objects.exclude(id=over.id)} == {state}
    rows = AuditEvent.objects.filter(action=service, operator_name="olga", verdict=Verdict.ALLOWED)
    assert {row.idempotency_key for row in rows} == {f"{sent['idempotency_key']}:{one.id}" for one in letters}
    assert "nothing was repeated" in _said(client.post(JOBS, sent, follow=True))
    assert rows.count() == 3


def test_a_job_that_is_settled_meanwhile_is_refused_and_the_others_are_discarded(cast: Cast, sign_in: SignIn) -> None:
    settled, other = dead_letter(), dead_letter()
    client = sign_in(cast.olga)
    page = client.post(JOBS, _chosen(client, JOBS, "discard_selected", settled, other))
    discard_letter(letter_id=settled.id, by=cast.ada, key="k", reason="r")
    sent = {**hidden_fields(page.content.decode()), "reason": "of last year"}
    said = _said(client.post(JOBS, sent, follow=True))
    assert said.startswith("1 job is discarded. 1 refused. ")
    assert "The job is discarded already" in said
    assert not SealedMessage.objects.exists()


def test_jobs_of_another_tenant_are_neither_decided_nor_named(cast: Cast, sign_in: SignIn) -> None:
    """ADM-01."""
    found = dead_letter(tenant="t-b")
    client = sign_in(cast.olga)
    sent = {"action": "discard_selected", "_selected_action": [str(found.id)], "idempotency_key": "k"}
    page = text_of(client.post(JOBS, sent).content.decode())
    assert "1 job not yours to decide about, or not there" in page
    said = _said(client.post(JOBS, {**sent, "confirmed": "yes", "letters": str(found.id), "reason": "r"}, follow=True))
    assert said == "1 refused. One of them: There is no such failed job, or you may not see it."
    assert found.task_id not in page
    assert DeadLetter.objects.get().state == LetterState.OPEN


# -- in a browser ------------------------------------------------------------------------------------------------------


@pytest.mark.browser
@pytest.mark.django_db(transaction=True)
def test_rows_are_selected_by_key_and_taken_with_one_press(page: Page, cast: Cast) -> None:
    _incidents(3)
    log_in(page)
    page.goto(INCIDENTS)
    for key in "jxjx":
        page.keyboard.press(key)
    assert axe_violations(page) == []
    page.get_by_role("button", name="Take 2", exact=True).dblclick()
    page.get_by_text("2 incidents taken.").wait_for()
    page.go_back()
    again = page.get_by_role("button", name="Take 2", exact=True)
    if again.count() and again.is_visible():
        again.click()
        page.wait_for_load_state()
    assert Incident.objects.filter(state=IncidentState.ACKNOWLEDGED).count() == 2
    assert AuditEvent.objects.filter(action="operations.incident_acknowledged").count() == 2


@pytest.mark.browser
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("width", [390, 1360])
def test_closing_and_discarding_stand_behind_more_and_ask_first(page: Page, width: int, cast: Cast) -> None:
    incident = _incidents(1)[0]
    page.set_viewport_size({"width": width, "height": 844})
    log_in(page)
    for path, label in ((JOBS, "Discard…"), (INCIDENTS, "Close without repairing…")):
        page.goto(path)
        page.locator("tbody input[type=checkbox]").first.check()
        page.locator(".ops-bulk").get_by_text("More", exact=True).click()
        assert axe_violations(page, without=["target-size"]) == []
        page.get_by_role("button", name=label).click()
        page.locator(".ops-where").wait_for()
        assert axe_violations(page) == []
    page.get_by_label("Why").select_option("loss_accepted")
    page.get_by_label("What happened, in your words").fill("the list was of last year")
    page.get_by_role("button", name="Close 1 incident, leave 1 job undone").click()
    page.get_by_text("1 incident is closed.").wait_for()
    incident.refresh_from_db()
    assert incident.state == IncidentState.RESOLVED
