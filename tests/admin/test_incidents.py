"""The page of an incident: what it says, what may be done from it, and that nothing is done twice."""

from __future__ import annotations

import json
from datetime import UTC, timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils.html import escape

from deadletters.arguments import describe_signature
from deadletters.models import DeadLetter, LetterState, WorkerNode
from grants.actions import Action
from grants.models import AuditEvent
from grants.words import may_words
from incidents.models import Incident
from incidents.services import acknowledge_incident, resolve_incident
from opsconsole.core.database import database_now
from opsconsole.core.ids import new_id
from repairs.models import ActionState, RepairAction, RepairBatch
from repairs.refusals import forget_served
from repairs.services import discard_letter, retry_incident, retry_letter
from tests.admin.conftest import SignIn
from tests.admin.tools import confirm, fail_again, hidden_fields, mark_sent, newest_repair, succeed, text_of
from tests.cast import Cast, give
from tests.factories import dead_letter

pytestmark = pytest.mark.django_db


def _url(incident: Incident, suffix: str = "") -> str:
    return f"/ops/incidents/{incident.id}/{suffix}"


def _labels(client: Client, incident: Incident) -> list[tuple[str, bool]]:
    buttons = client.get(_url(incident)).context["buttons"]
    return [(button.label, button.is_primary) for button in [*buttons.bar, *buttons.more]]


def _take(client: Client, incident: Incident) -> Any:
    fields = hidden_fields(client.get(_url(incident)).content.decode(), _url(incident, "take/"))
    return client.post(_url(incident, "take/"), fields, follow=True)


def test_the_page_says_what_how_many_since_when_and_who(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    dead_letter()
    text = text_of(sign_in(cast.olga).get(_url(letter.incident)).content.decode())
    incident = Incident.objects.get(id=letter.incident_id)
    for said in (
        incident.title, "2 of 2 jobs not repaired", "nobody on it", "High", "Open", "tenant default", "source tests",
        "connection refused by 127.0.0.1:2525", "2 safe to run again", "0 may already have happened",
        "Failed jobs needing a decision", "system opened it",
    ):  # fmt: skip
        assert said in text, said


def test_the_page_names_the_team_and_links_the_runbook_of_the_tasks_policy(
    letter: DeadLetter, cast: Cast, sign_in: SignIn, settings: Any
) -> None:
    client = sign_in(cast.olga)
    assert "Runbook" not in text_of(client.get(_url(letter.incident)).content.decode())
    address = 'https://runbooks.example/"><script>alert(1)</script>'
    forget_served()
    settings.OPSCONSOLE_TASK_POLICIES = [{"pattern": "shop.*", "team": "Mail <b>", "runbook": address}]
    page = client.get(_url(letter.incident)).content.decode()
    assert "Team Mail <b> · Runbook" in text_of(page)
    assert f'<a href="{escape(address)}" rel="noopener noreferrer">Runbook</a>' in page
    assert "<script>alert" not in page


def test_the_page_of_a_built_in_type_says_where_its_runbook_is(cast: Cast, sign_in: SignIn, settings: Any) -> None:
    path = _url(dead_letter(task="deliver_email").incident)
    client = sign_in(cast.ada)
    assert "Runbook: docs/runbooks.md#deliver_email" in text_of(client.get(path).content.decode())
    settings.OPSCONSOLE_DOCS_URL = "https://wiki.example/ops"
    forget_served()
    assert '<a href="https://wiki.example/ops/runbooks.md#deliver_email"' in client.get(path).content.decode()


def test_the_primary_button_is_the_next_step(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    """Take it, then 1 first, and all once that one has succeeded; back to 1 first after one that failed."""
    for _ in range(3):
        dead_letter()
    client = sign_in(cast.olga)
    incident = letter.incident

    def primary() -> list[str]:
        return [label for label, is_primary in _labels(client, incident) if is_primary]

    assert primary() == ["Take it"]
    _take(client, incident)
    assert primary() == ["Retry 1 first"]
    confirm(client, _url(incident, "retry-one/"))
    assert primary() == []
    assert "Sent, awaiting result" in text_of(client.get(_url(incident)).content.decode())
    fail_again(mark_sent(newest_repair()))
    assert primary() == ["Take it"]
    _take(client, incident)
    assert primary() == ["Retry 1 first"]
    confirm(client, _url(incident, "retry-one/"))
    succeed(mark_sent(newest_repair()))
    assert primary() == ["Retry all 3…"], "the one that failed again may have happened: it is asked about"


def test_taking_it_is_one_click(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    """A10."""
    answer = _take(sign_in(cast.olga), letter.incident)
    assert "olga has it" in text_of(answer.content.decode())
    assert Incident.objects.get().acknowledged_by == cast.olga.ref


def test_a_button_that_may_not_be_pressed_is_absent_and_one_line_names_the_grant(
    letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    client = sign_in(cast.vera)
    text = text_of(client.get(_url(letter.incident)).content.decode())
    assert _labels(client, letter.incident) == []
    for action in ("incidents.acknowledge", "incidents.resolve", "incidents.close-unrepaired", "dead-letters.retry"):
        assert f"the permission {action} ({may_words(action)}) on tenant default" in text
    assert text.count("Close without repairing 1 job: needs") == 1, "what needs two is one line"


def test_closing_without_repair_needs_its_own_grant(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.olga)
    assert not [label for label, _ in _labels(client, letter.incident) if label.startswith("Close")]
    give(cast.olga, Action.INCIDENTS_CLOSE_UNREPAIRED, tenant="default")
    assert "Close without repairing 1 job…" in [label for label, _ in _labels(client, letter.incident)]


def test_closing_without_repair_states_the_number_and_wants_code_and_summary(
    letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    """A11: and promises nothing of what happens later."""
    dead_letter()
    client = sign_in(cast.ada)
    page = client.get(_url(letter.incident, "close/"))
    text = text_of(page.content.decode())
    assert "Close without repairing 2 jobs" in text
    assert "retried from its own page until" in text
    assert "A new failure opens the incident again." in text
    assert "development" in text
    form = page.context["asked"].form
    assert (form["code"].value(), form["summary"].value()) == (None, None)
    assert confirm(client, _url(letter.incident, "close/")).status_code == 400
    answers = {"code": "loss_accepted", "summary": "  went out by hand "}
    answer = confirm(client, _url(letter.incident, "close/"), answers, follow=True)
    assert "went out by hand" in text_of(answer.content.decode())
    assert "Closed by ada" in text_of(answer.content.decode())
    incident = Incident.objects.get()
    assert (incident.state, incident.resolution_summary) == ("resolved", "[loss_accepted] went out by hand")
    assert _labels(client, incident) == []


def test_a_wrong_form_keeps_its_key_and_what_was_seen(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.ada)
    url = _url(letter.incident, "close/")
    sent = hidden_fields(client.get(url).content.decode())
    back = hidden_fields(client.post(url, sent).content.decode())
    assert back == sent


def test_a_double_submit_closes_once(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    """A9: the second answer is a replay and says so."""
    client = sign_in(cast.ada)
    url = _url(letter.incident, "close/")
    fields = hidden_fields(client.get(url).content.decode()) | {"code": "loss_accepted", "summary": "by hand"}
    client.post(url, fields)
    again = client.post(url, fields, follow=True)
    assert "nothing was repeated" in text_of(again.content.decode())
    assert AuditEvent.objects.filter(action="operations.incident_resolved").count() == 1


def test_an_old_page_is_told_who_changed_it_and_how_it_stands(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    """Two people on one incident: the second sees the first before they decide."""
    client = sign_in(cast.ada)
    url = _url(letter.incident, "close/")
    fields = hidden_fields(client.get(url).content.decode()) | {"code": "loss_accepted", "summary": "by hand"}
    acknowledge_incident(incident_id=letter.incident_id, by=cast.olga, key="k")
    answer = client.post(url, fields)
    text = text_of(answer.content.decode())
    assert answer.status_code == 412
    assert "olga took it" in text
    assert "It is now: Taken by olga" in text
    assert Incident.objects.get().state == "acknowledged"


def test_taking_what_somebody_took_meanwhile_says_who(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.ada)
    fields = hidden_fields(client.get(_url(letter.incident)).content.decode(), _url(letter.incident, "take/"))
    acknowledge_incident(incident_id=letter.incident_id, by=cast.olga, key="k")
    answer = client.post(_url(letter.incident, "take/"), fields)
    assert answer.status_code == 412
    assert "olga took it" in text_of(answer.content.decode())
    assert Incident.objects.get().acknowledged_by == cast.olga.ref


def test_taking_what_they_have_already_says_so(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    """A10: a second tab, from before they took it in the first one; nothing is changed and nothing was wrong."""
    client = sign_in(cast.ada)
    take = _url(letter.incident, "take/")
    fields = hidden_fields(client.get(_url(letter.incident)).content.decode(), take)
    _take(client, letter.incident)
    before = Incident.objects.get().version
    answer = client.post(take, fields, follow=True)
    assert answer.status_code == 200
    assert f"You have INC-{letter.incident.number:04d}." in text_of(answer.content.decode())
    assert Incident.objects.get().version == before
    assert client.post(take, fields | {"idempotency_key": "another"}).status_code == 302
    resolve_incident(
        incident_id=letter.incident_id, by=cast.ada, key="c", code="fixed", summary="by hand", unrepaired=1
    )
    assert client.post(take, fields | {"idempotency_key": "a third"}).status_code == 412


def test_further_failures_do_not_stop_a_decision(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    """In a storm the version rises all the time; only what a person could have decided on counts."""
    client = sign_in(cast.olga)
    fields = hidden_fields(client.get(_url(letter.incident)).content.decode(), _url(letter.incident, "take/"))
    dead_letter()
    assert Incident.objects.get().version > int(fields["version"])
    assert client.post(_url(letter.incident, "take/"), fields).status_code == 302
    assert Incident.objects.get().acknowledged_by == cast.olga.ref


def test_closing_with_an_old_number_is_refused(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    """A person who says 1 job does not close 2."""
    client = sign_in(cast.ada)
    url = _url(letter.incident, "close/")
    fields = hidden_fields(client.get(url).content.decode()) | {"code": "loss_accepted", "summary": "by hand"}
    dead_letter()
    answer = client.post(url, fields)
    assert answer.status_code == 409
    assert "2 of its jobs are not repaired" in text_of(answer.content.decode())
    assert Incident.objects.get().state == "open"


def test_a_post_without_its_key_or_version_changes_nothing(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.ada)
    assert client.post(_url(letter.incident, "take/")).status_code == 400
    assert client.post(_url(letter.incident, "take/"), {"idempotency_key": "k"}).status_code == 412
    assert Incident.objects.get().state == "open"


def test_an_incident_is_taken_over_only_after_a_look_at_who_has_it(
    letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    acknowledge_incident(incident_id=letter.incident_id, by=cast.olga, key="k")
    client = sign_in(cast.ada)
    assert "Take over from olga…" in [label for label, _ in _labels(client, letter.incident)]
    answer = confirm(client, _url(letter.incident, "take/"), follow=True)
    assert "You have INC-" in text_of(answer.content.decode())
    assert Incident.objects.get().acknowledged_by == cast.ada.ref


def test_retrying_one_shows_it_and_sends_it_once(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    """A9, A12: a double click sends nothing more, and an incident nobody had is the operator's."""
    dead_letter()
    client = sign_in(cast.olga)
    url = _url(letter.incident, "retry-one/")
    page = client.get(url)
    text = text_of(page.content.decode())
    assert "1 safe to run again" in text
    assert letter.job_id in text
    assert "Nobody has this incident; a retry makes it yours." in text
    fields = hidden_fields(page.content.decode())
    assert fields["letter"] == str(letter.id)
    client.post(url, fields)
    again = client.post(url, fields, follow=True)
    assert RepairAction.objects.count() == 1
    assert "nothing was repeated" in text_of(again.content.decode())
    assert Incident.objects.get().acknowledged_by == cast.olga.ref


@pytest.mark.parametrize("answer", ["did_not_happen", "already_happened"])
@pytest.mark.parametrize("suffix", ["retry-one/", "retry/"])
def test_an_answered_retry_that_is_sent_twice_is_a_replay(
    suffix: str, answer: str, cast: Cast, sign_in: SignIn
) -> None:
    """A9: what the job asked is not asked any more after the first time, and is read all the same."""
    letter = dead_letter(ambiguous=True)
    client = sign_in(cast.olga)
    url = _url(letter.incident, suffix)
    sent = hidden_fields(client.get(url).content.decode()) | {"answer": answer, "reference": "mailhub log 12:03"}
    assert client.post(url, sent).status_code == 302
    written = (AuditEvent.objects.count(), Incident.objects.get().version)
    again = client.post(url, sent, follow=True)
    assert again.status_code == 200
    assert "was not changed" not in text_of(again.content.decode())
    assert (AuditEvent.objects.count(), Incident.objects.get().version) == written
    assert RepairAction.objects.count() == 1


def test_two_tabs_send_one_job_once(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    """C17: the second tab has another key, and is told what became of the job."""
    client = sign_in(cast.olga)
    url = _url(letter.incident, "retry-one/")
    first, second = (hidden_fields(client.get(url).content.decode()) for _ in range(2))
    assert first["idempotency_key"] != second["idempotency_key"]
    client.post(url, first)
    answer = client.post(url, second)
    assert answer.status_code == 412
    assert "olga" in text_of(answer.content.decode())
    assert RepairAction.objects.count() == 1


def test_retry_all_sends_what_is_safe_and_asks_about_the_rest(cast: Cast, sign_in: SignIn) -> None:
    """C19, B6: the answer that does no harm is preselected."""
    incident, safe, ambiguous = _mixed()
    client = sign_in(cast.olga)
    page = client.get(_url(incident, "retry/"))
    text = text_of(page.content.decode())
    assert "2 safe to run again" in text
    assert "1 may already have happened" in text
    assert "may already have happened, because: " in text
    assert page.context["asked"].form["answer"].value() == "leave"
    answer = confirm(client, _url(incident, "retry/"), {"answer": "leave"}, follow=True)
    assert "2 jobs are on their way: Sent, awaiting result. 1 left as they are." in text_of(answer.content.decode())
    assert set(RepairAction.objects.values_list("letter_id", flat=True)) == {one.id for one in safe}
    assert DeadLetter.objects.get(id=ambiguous.id).state == LetterState.OPEN


def _mixed() -> tuple[Incident, list[DeadLetter], DeadLetter]:
    """Return an incident with two safe jobs and one that may already have happened."""
    safe = [dead_letter(), dead_letter()]
    ambiguous = dead_letter()
    DeadLetter.objects.filter(id=ambiguous.id).update(
        outcome_class="ambiguous", outcome_reason="It timed out waiting for an answer."
    )
    return Incident.objects.get(), safe, ambiguous


def test_an_answer_that_acts_needs_a_reference(cast: Cast, sign_in: SignIn) -> None:
    incident, _, _ = _mixed()
    answer = confirm(sign_in(cast.olga), _url(incident, "retry/"), {"answer": "did_not_happen"})
    assert answer.status_code == 400
    assert "Say where you saw it" in text_of(answer.content.decode())
    assert not RepairAction.objects.exists()


def test_it_did_not_happen_runs_it_again_too(cast: Cast, sign_in: SignIn) -> None:
    incident, _, ambiguous = _mixed()
    answers = {"answer": "did_not_happen", "reference": "mailhub log 12:03"}
    confirm(sign_in(cast.olga), _url(incident, "retry/"), answers)
    assert RepairAction.objects.filter(state=ActionState.PLANNED).count() == 3
    action = newest_repair(ambiguous)
    assert (action.provider_answer, action.reference) == ("did_not_happen", "mailhub log 12:03")


def test_it_already_happened_closes_it_and_runs_the_others(cast: Cast, sign_in: SignIn) -> None:
    incident, safe, ambiguous = _mixed()
    client = sign_in(cast.olga)
    page = hidden_fields(client.get(_url(incident, "retry/")).content.decode())
    answers = page | {"answer": "already_happened", "reference": "mailhub log 12:03"}
    for _ in range(2):
        client.post(_url(incident, "retry/"), answers)
    assert DeadLetter.objects.get(id=ambiguous.id).state == LetterState.ALREADY_DONE
    assert RepairAction.objects.filter(action_type="retry_message").count() == len(safe)
    assert RepairAction.objects.count() == len(safe) + 1


def test_closing_as_happened_rests_on_what_was_looked_at(cast: Cast, sign_in: SignIn) -> None:
    """Whether or not there is anything to run beside it; the incident is somebody else's by now."""
    letter = dead_letter(ambiguous=True)
    client = sign_in(cast.olga)
    url = _url(letter.incident, "retry/")
    sent = hidden_fields(client.get(url).content.decode()) | {"answer": "already_happened", "reference": "log"}
    acknowledge_incident(incident_id=letter.incident_id, by=cast.ada, key="k")
    answer = client.post(url, sent)
    assert answer.status_code == 412
    assert "ada took it" in text_of(answer.content.decode())
    assert DeadLetter.objects.get().state == LetterState.OPEN
    assert not RepairAction.objects.exists()


def test_several_are_closed_as_happened_although_the_first_changes_the_incident(cast: Cast, sign_in: SignIn) -> None:
    letters = [dead_letter(ambiguous=True) for _ in range(3)]
    client = sign_in(cast.olga)
    answers = {"answer": "already_happened", "reference": "log"}
    answer = confirm(client, _url(letters[0].incident, "retry/"), answers, follow=True)
    assert "3 closed as already happened." in text_of(answer.content.decode())
    assert {one.state for one in DeadLetter.objects.all()} == {LetterState.ALREADY_DONE}


@pytest.mark.parametrize("tenant", ["default", "t-b"])
def test_only_jobs_of_the_incident_are_closed_from_its_page(tenant: str, cast: Cast, sign_in: SignIn) -> None:
    """GRA-02: not those of another one, whether or not the operator could close them from there."""
    letter, other = dead_letter(ambiguous=True), dead_letter(ambiguous=True, tenant=tenant, task="shop.other")
    assert letter.incident_id != other.incident_id
    client = sign_in(cast.ada)
    url = _url(letter.incident, "retry/")
    sent = hidden_fields(client.get(url).content.decode()) | {"answer": "already_happened", "reference": "log"}
    assert client.post(url, sent | {"asked": f"{letter.id} {other.id}"}).status_code == 404
    assert {one.state for one in DeadLetter.objects.all()} == {LetterState.OPEN}


@pytest.mark.parametrize("name", ["run", "asked"])
def test_a_form_that_names_no_ids_or_too_many_changes_nothing(
    name: str, letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    """Nothing is left out in silence, and one request does at most what one page can show."""
    client = sign_in(cast.olga)
    url = _url(letter.incident, "retry/")
    sent = hidden_fields(client.get(url).content.decode()) | {"answer": "already_happened", "reference": "log"}
    broken = client.post(url, sent | {name: f"{letter.id} nonsense"})
    assert broken.status_code == 400
    assert "is no id" in text_of(broken.content.decode())
    many = " ".join(str(new_id()) for _ in range(1_001))
    with CaptureQueriesContext(connection) as found:
        answer = client.post(url, sent | {name: many})
    assert answer.status_code == 400
    assert "more than the 1000" in text_of(answer.content.decode())
    assert len(found) < 30
    assert not RepairAction.objects.exists()


def test_what_cannot_be_retried_is_listed_with_its_reason(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    DeadLetter.objects.filter(id=letter.id).update(message_state="too_large")
    dead_letter()
    client = sign_in(cast.olga)
    text = text_of(client.get(_url(letter.incident, "retry/")).content.decode())
    assert "1 can't be retried" in text
    assert "not fully captured (too_large)" in text
    assert "1 can't be retried" in text_of(client.get(_url(letter.incident)).content.decode())
    confirm(client, _url(letter.incident, "retry/"))
    assert RepairAction.objects.count() == 1


def test_a_retry_of_all_takes_at_most_the_oldest_thousand(
    letter: DeadLetter, cast: Cast, sign_in: SignIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("repairs.prospects.MOST_LETTERS", 2)
    monkeypatch.setattr("repairs.prospects.FULLY_CHECKED", 1)
    dead_letter()
    dead_letter()
    page = sign_in(cast.olga).get(_url(letter.incident, "retry/"))
    assert "The oldest 2 now" in text_of(page.content.decode())
    assert len(hidden_fields(page.content.decode())["run"].split()) == 2


def test_a_hand_made_post_cannot_retry_a_job_of_another_incident_or_tenant(
    letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    """GRA-02, ADM-01."""
    other = dead_letter(tenant="t-b")
    client = sign_in(cast.olga)
    fields = hidden_fields(client.get(_url(letter.incident, "retry/")).content.decode()) | {"run": str(other.id)}
    assert client.post(_url(letter.incident, "retry/"), fields).status_code == 404
    fields = hidden_fields(client.get(_url(letter.incident, "retry-one/")).content.decode())
    assert client.post(_url(letter.incident, "retry-one/"), fields | {"letter": str(other.id)}).status_code == 400
    assert client.post(_url(letter.incident, "retry-one/"), fields | {"letter": "x"}).status_code == 400
    assert not RepairAction.objects.exists()


def test_an_incident_closes_by_itself_once_its_jobs_have_succeeded(
    letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    """C11."""
    client = sign_in(cast.olga)
    confirm(client, _url(letter.incident, "retry-one/"))
    succeed(mark_sent(newest_repair()))
    text = text_of(client.get(_url(letter.incident)).content.decode())
    assert "1 of 1 job settled" in text
    assert "Closed: repaired Every job of it is settled. A new failure opens the incident again." in text
    assert "How this was closed before" not in text
    assert "Repaired" in text


def test_a_failed_repair_is_back_as_repair_failed_with_its_lineage(
    letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    """C1, C11."""
    client = sign_in(cast.olga)
    confirm(client, _url(letter.incident, "retry-one/"))
    fail_again(mark_sent(newest_repair()))
    text = text_of(client.get(_url(letter.incident)).content.decode())
    assert "Repair failed" in text
    assert f"The last retry failed again: {DeadLetter.objects.get().error_class} ." in text
    page = text_of(client.get(f"/ops/dead-letters/{letter.id}/").content.decode())
    assert f"{letter.task_id} failed" in page
    assert f"→ repair 1 {newest_repair().new_task_id} Repair failed" in page


def test_the_jobs_of_a_big_incident_are_paged(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    for _ in range(29):
        dead_letter()
    client = sign_in(cast.olga)
    pages = [client.get(_url(letter.incident))]
    while address := pages[-1].context["letters_next"]:
        pages.append(client.get(_url(letter.incident) + address))
    shown = [row["letter"].id for page in pages for row in page.context["letters"]]
    assert ([len(page.context["letters"]) for page in pages], len(set(shown))) == ([10, 10, 10], 30)
    assert client.get(_url(letter.incident) + "?show=nonsense").status_code == 400
    for show in ("decision", "safe", "ambiguous", "not_declared", "blocked", "awaiting", "all"):
        assert client.get(_url(letter.incident) + f"?show={show}").status_code == 200


def test_jobs_that_the_operator_may_not_see_are_not_listed(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    """GRA-02: an incident names its own tenant's jobs only, and each by its own scope."""
    text = sign_in(cast.bram).get(_url(letter.incident)).content.decode()
    assert letter.job_id not in text


def test_a_job_of_a_closed_incident_can_still_be_retried_from_its_own_page(
    letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    client = sign_in(cast.ada)
    confirm(client, _url(letter.incident, "close/"), {"code": "loss_accepted", "summary": "by hand"})
    answer = client.get(f"/ops/dead-letters/{letter.id}/")
    assert "Closed without repair" in text_of(answer.content.decode())
    assert "Retry…" in [button.label for button in answer.context["buttons"].bar]
    confirm(client, f"/ops/dead-letters/{letter.id}/retry/")
    assert newest_repair(letter).state == ActionState.PLANNED


def test_how_it_was_closed_before_is_told_once_it_is_open_again(
    letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    """C7; how it is closed now stands above, once."""
    client = sign_in(cast.ada)
    confirm(client, _url(letter.incident, "close/"), {"code": "loss_accepted", "summary": "by hand"})
    answer = client.get(_url(letter.incident))
    text = text_of(answer.content.decode())
    assert "Closed: the loss is accepted by hand" in text
    assert "1 job closed without repair" in text
    assert "0 of 1" not in text
    assert "1 job closed without repair" in answer.context["as_text"]
    assert "can still be retried from its own page" in text
    assert "How this was closed before" not in text
    dead_letter()
    text = text_of(client.get(_url(letter.incident)).content.decode())
    assert "episode 1, by ada: the loss is accepted , 1 job not repaired. by hand" in text
    assert "system opened it again" in text
    assert "ada closed it: the loss is accepted" in text


def test_an_incident_closed_as_done_has_nothing_to_retry_and_no_code_in_its_text(
    letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    client = sign_in(cast.ada)
    confirm(client, f"/ops/dead-letters/{letter.id}/done/", {"reason": "seen in the log"})
    page = client.get(_url(letter.incident)).content.decode()
    text = text_of(page)
    assert "Closed: it had already happened Every job of it is settled." in text
    assert "can still be retried" not in text
    assert "already_done" not in page


def test_a_code_that_somebody_typed_is_shown_as_words(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    resolve_incident(
        incident_id=letter.incident_id, by=cast.ada, key="k", code="fixed_upstream", summary="They mended it.",
        unrepaired=1,
    )  # fmt: skip
    text = text_of(sign_in(cast.ada).get(_url(letter.incident)).content.decode())
    assert "Closed: fixed upstream They mended it." in text


def test_a_closed_incident_offers_no_close(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.ada)
    confirm(client, _url(letter.incident, "close/"), {"code": "loss_accepted", "summary": "by hand"})
    assert client.get(_url(letter.incident, "close/")).status_code == 302
    text = text_of(client.get(_url(letter.incident, "retry/")).content.decode())
    assert "There is nothing to retry" in text
    assert "a retry makes it yours" not in text
    assert "No job of INC-" in text
    assert "No job of INC-" in text_of(client.get(_url(letter.incident, "retry-one/")).content.decode())


# -- what the page counts is what its confirmations say ----------------------------------------------------------------


def serve(task: str = "shop.send_mail", queue: str = "celery", function: Any = lambda *args, **kwargs: None) -> None:
    """Let one live worker serve a task."""
    now = database_now()
    WorkerNode.objects.create(
        id="w1", source="tests", host="h", pid=1, queues=json.dumps([queue]),
        tasks=json.dumps({task: describe_signature(function)}), started_at=now, seen_at=now,
    )  # fmt: skip


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(
    ("served", "reason"),
    [
        ({"task": "shop.other"}, "No live worker serves shop.send_mail."),
        ({"queue": "mail"}, "No live worker serves shop.send_mail on the queue celery."),
    ],
)
def test_the_page_offers_no_retry_of_what_no_worker_serves(
    served: dict[str, Any], reason: str, many: bool, letter: DeadLetter, cast: Cast, sign_in: SignIn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Few jobs are checked to the end, of many only their rows: both say so, and list them under it."""
    monkeypatch.setattr("repairs.prospects.FULLY_CHECKED", 0 if many else 25)
    dead_letter()
    serve(**served)
    client = sign_in(cast.ada)
    answer = client.get(_url(letter.incident))
    text = text_of(answer.content.decode())
    assert "0 safe to run again" in text
    assert "2 can't be retried" in text
    assert reason in text
    assert not [label for label, _ in _labels(client, letter.incident) if label.startswith("Retry")]
    assert {row["outcome"] for row in answer.context["letters"]} == {"Can't be retried"}
    blocked, safe = (client.get(_url(letter.incident) + f"?show={name}") for name in ("blocked", "safe"))
    assert (len(blocked.context["letters"]), len(safe.context["letters"])) == (2, 0)
    asked = text_of(client.get(_url(letter.incident, "retry/")).content.decode())
    assert "No job of INC-" in asked
    assert "2 can't be retried" in asked


def test_the_page_offers_no_retry_of_jobs_whose_arguments_do_not_fit(
    letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    """What only the message tells is counted as well."""
    serve(function=lambda address: None)
    client = sign_in(cast.ada)
    text = text_of(client.get(_url(letter.incident)).content.decode())
    assert "0 safe to run again" in text
    assert "1 can't be retried 1: The arguments do not fit" in text
    assert not [label for label, _ in _labels(client, letter.incident) if label.startswith("Retry")]
    assert "1 can't be retried" in text_of(client.get(_url(letter.incident, "retry/")).content.decode())
    answer = client.get(f"/ops/dead-letters/{letter.id}/")
    page = text_of(answer.content.decode())
    assert "Can't be retried now" in page
    assert "It can't be retried now: The arguments do not fit" in page
    assert [button.label for button in answer.context["buttons"].bar] == ["It already happened…"]
    assert "Safe to run again, because" not in page


def test_of_many_jobs_those_that_are_too_old_are_listed_as_such(
    letter: DeadLetter, cast: Cast, sign_in: SignIn, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("repairs.prospects.FULLY_CHECKED", 0)
    young = dead_letter()
    DeadLetter.objects.filter(id=letter.id).update(first_seen_at=database_now() - timedelta(seconds=120))
    client = sign_in(cast.ada)
    for seconds, blocked in ((60, [letter.id]), (10**15, [])):
        forget_served()
        settings.OPSCONSOLE_TASK_POLICIES = [{"pattern": "shop.*", "max_age_seconds": seconds}]
        answer = client.get(_url(letter.incident) + "?show=blocked")
        assert [row["letter"].id for row in answer.context["letters"]] == blocked
        assert answer.context["tiles"].blocked == len(blocked)
        safe = client.get(_url(letter.incident) + "?show=safe")
        assert {row["letter"].id for row in safe.context["letters"]} == {letter.id, young.id} - set(blocked)


def test_one_job_is_not_called_all_jobs(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    text = text_of(sign_in(cast.ada).get(_url(letter.incident, "retry/")).content.decode())
    assert "Retry the 1 job of INC-" in text
    assert "1 of 1 job not repaired , 1 final failure ·" in text_of(
        sign_in(cast.ada).get(_url(letter.incident)).content.decode()
    )


# -- the timeline ------------------------------------------------------------------------------------------------------


def _timeline(client: Client, incident: Incident) -> list[str]:
    lines = client.get(_url(incident)).context["timeline"]
    return [f"{one.who} {one.what}{f': {one.detail}' if one.detail else ''}" for one in lines]


def test_the_timeline_says_who_did_what_and_how_it_went(cast: Cast, sign_in: SignIn) -> None:
    """A first try that failed, a batch as one line, a job given up, one that had happened."""
    first, *_others = letters = [dead_letter() for _ in range(5)]
    incident = first.incident
    client = sign_in(cast.olga)
    retry_letter(letter_id=first.id, by=cast.olga, key="first")
    fail_again(mark_sent(newest_repair()))
    chosen = [one.id for one in letters[:3]]
    retry_incident(incident_id=incident.id, by=cast.ada, key="b", letter_ids=chosen, provider_checked=True)
    actions = list(RepairAction.objects.filter(batch__isnull=False).order_by("id"))
    assert "ada retried 3 jobs: 3 about to be sent" in _timeline(client, incident)
    for action in actions[:2]:
        succeed(mark_sent(action))
    mark_sent(actions[2])
    discard_letter(letter_id=letters[3].id, by=cast.ada, key="d", reason="nobody wants it")
    confirm(client, f"/ops/dead-letters/{letters[4].id}/done/", {"reason": "it is in the log"})
    assert _timeline(client, incident)[:5] == [
        f"olga closed 1 job ({letters[4].job_id}) as already happened: it is in the log",
        f"ada discarded 1 job ({letters[3].job_id}): nobody wants it",
        "ada retried 3 jobs: 1 awaiting result, 2 succeeded",
        "system opened it again: Repair failed",
        f"olga retried 1 job ({first.job_id}): failed again",
    ]
    assert RepairBatch.objects.count() == 1
    succeed(actions[2])
    assert _timeline(client, incident)[0] == "system closed it: repaired"


def test_the_timeline_says_how_many_of_a_batch_were_refused(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    blocked = dead_letter()
    DeadLetter.objects.filter(id=blocked.id).update(message_state="too_large")
    retry_incident(incident_id=letter.incident_id, by=cast.ada, key="b", letter_ids=[letter.id, blocked.id])
    assert "ada retried 2 jobs: 1 about to be sent, 1 refused" in _timeline(sign_in(cast.ada), letter.incident)


def test_the_same_done_to_one_job_after_another_is_one_line(cast: Cast, sign_in: SignIn) -> None:
    letters = [dead_letter(ambiguous=True) for _ in range(3)]
    client = sign_in(cast.olga)
    answers = {"answer": "already_happened", "reference": "mailhub log"}
    confirm(client, _url(letters[0].incident, "retry/"), answers)
    assert _timeline(client, letters[0].incident)[:2] == [
        "system closed it: it had already happened",
        "olga closed 3 jobs as already happened: It had already happened: mailhub log",
    ]


def test_all_repairs_of_an_incident_can_be_reached(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.ada)
    assert client.get(_url(letter.incident)).context["all_repairs"] == ""
    for number in range(20):
        retry_letter(letter_id=dead_letter().id, by=cast.ada, key=str(number))
    assert client.get(_url(letter.incident)).context["all_repairs"] == ""
    retry_letter(letter_id=letter.id, by=cast.ada, key="21st")
    page = client.get(_url(letter.incident))
    assert len(page.context["repairs"]) == 20
    assert len(client.get(page.context["all_repairs"]).context["cl"].result_list) == 21


# -- somebody else has it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["incidents/{incident}/retry/", "incidents/{incident}/retry-one/", "dead-letters/{letter}/retry/",
     "dead-letters/{letter}/done/", "dead-letters/{letter}/discard/"],
)  # fmt: skip
def test_who_decides_about_what_somebody_else_has_is_warned(
    path: str, letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    dead_letter()
    url = f"/ops/{path.format(incident=letter.incident_id, letter=letter.id)}"
    assert "talk to them first" not in text_of(sign_in(cast.ada).get(url).content.decode())
    acknowledge_incident(incident_id=letter.incident_id, by=cast.olga, key="k")
    text = text_of(sign_in(cast.ada).get(url).content.decode())
    assert f"olga has INC-{letter.incident.number:04d}, taken" in text
    assert "talk to them first" in text
    assert "talk to them first" not in text_of(sign_in(cast.olga).get(url).content.decode())


# -- pages that wait for results ---------------------------------------------------------------------------------------


def _renews(client: Client, path: str) -> bool:
    page = client.get(path).content.decode()
    says = "This page renews itself every 3 s until the result is here." in text_of(page)
    assert ('<noscript><meta http-equiv="refresh" content="3"></noscript>' in page) is says
    assert ('data-renew="3"' in page) is says
    return says


def test_pages_renew_themselves_while_a_repair_waits_for_its_result(
    letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    client = sign_in(cast.ada)
    of_letter, of_incident = f"/ops/dead-letters/{letter.id}/", _url(letter.incident)
    assert [_renews(client, path) for path in (of_incident, of_letter)] == [False, False]
    retry_letter(letter_id=letter.id, by=cast.ada, key="k")
    action = newest_repair()
    paths = (of_incident, of_letter, f"/ops/repairs/{action.id}/")
    assert [_renews(client, path) for path in paths] == [True, True, True]
    assert not _renews(client, _url(letter.incident, "close/")), "no page on which somebody fills in a form"
    succeed(mark_sent(action))
    assert [_renews(client, path) for path in paths] == [False, False, False]


def test_the_page_says_when_it_was_read_and_can_be_read_again(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    """One that renews itself needs no link for it."""
    client = sign_in(cast.ada)
    answer = client.get(_url(letter.incident), {"show": "all", "worker": "a&b"})
    page = answer.content.decode()
    assert f"as of {answer.context['as_of'].astimezone(UTC):%H:%M:%S} UTC Refresh" in text_of(page)
    assert f'<a href="{_url(letter.incident)}?show=all&amp;worker=a%26b">Refresh</a>' in page
    retry_letter(letter_id=letter.id, by=cast.ada, key="k")
    text = text_of(client.get(_url(letter.incident)).content.decode())
    assert " UTC" in text[text.index("as of ") :]
    assert "Refresh" not in text


def test_a_page_looks_less_often_for_a_result_that_has_not_come_for_minutes(
    letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    retry_letter(letter_id=letter.id, by=cast.ada, key="k")
    RepairAction.objects.update(planned_at=database_now() - timedelta(minutes=3))
    assert sign_in(cast.ada).get(_url(letter.incident)).context["renew"] == 30


def test_what_is_said_once_is_left_longer_where_the_whole_page_is_fetched_again(
    letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    answer = confirm(sign_in(cast.ada), f"/ops/dead-letters/{letter.id}/retry/", follow=True)
    assert '<meta http-equiv="refresh" content="15">' in answer.content.decode()


def test_an_incident_that_lost_its_holder_says_who_had_it_until_what(
    letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    """C1: until somebody takes it again."""
    dead_letter()
    client = sign_in(cast.ada)

    def said() -> str:
        return text_of(client.get(_url(letter.incident)).content.decode())

    acknowledge_incident(incident_id=letter.incident_id, by=cast.olga, key="k")
    assert "Was taken by" not in said()
    retry_letter(letter_id=letter.id, by=cast.olga, key="k")
    fail_again(mark_sent(newest_repair()))
    event = AuditEvent.objects.get(action="operations.incident_reopened")
    moment = f"{event.at.astimezone(UTC):%d %b %Y %H:%M:%S}"
    assert f"Was taken by olga until a repair failed at {moment} UTC. Nobody has it now." in said()
    _take(client, letter.incident)
    assert "Was taken by" not in said()


def test_the_holder_gives_it_back_with_one_press(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    """A9: an old page that is sent again says so, and changes nothing."""
    client = sign_in(cast.olga)
    _take(client, letter.incident)
    assert ("Give it back", False) in _labels(client, letter.incident)
    fields = hidden_fields(client.get(_url(letter.incident)).content.decode(), _url(letter.incident, "release/"))
    for end in (" now.", " now: that was done before, and nothing was repeated."):
        answer = client.post(_url(letter.incident, "release/"), fields, follow=True)
        assert f"Nobody has INC-{letter.incident.number:04d}{end}" in text_of(answer.content.decode())
    assert Incident.objects.get().state == "open"
    assert "olga gave it back" in text_of(client.get(_url(letter.incident)).content.decode())


def test_giving_back_what_another_has_asks_first_and_names_them_on_the_timeline(
    letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    acknowledge_incident(incident_id=letter.incident_id, by=cast.olga, key="k")
    client = sign_in(cast.ada)
    assert ("Give it back for olga…", False) in _labels(client, letter.incident)
    page = text_of(client.get(_url(letter.incident, "release/")).content.decode())
    assert "olga has had it for 0 s" in page
    confirm(client, _url(letter.incident, "release/"))
    assert "ada gave it back: olga had it" in text_of(client.get(_url(letter.incident)).content.decode())
    assert "Give it back" not in {label for label, _ in _labels(sign_in(cast.vera), letter.incident)}
