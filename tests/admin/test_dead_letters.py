"""The page of a failed job, what may be done about it, and the action on several."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from deadletters.models import Attempt, DeadLetter, LetterState, Occurrence, SealedMessage, TracebackText
from grants.models import AuditEvent, Verdict
from incidents.models import Incident
from incidents.services import acknowledge_incident
from opsconsole.core.database import database_now
from opsconsole.core.ids import new_id
from repairs.models import ActionState, RepairAction
from repairs.services import close_letter_as_done, retry_letter
from tests.admin.conftest import SignIn
from tests.admin.tools import confirm, fail_again, hidden_fields, mark_sent, newest_repair, text_of
from tests.cast import Cast
from tests.factories import dead_letter

pytestmark = pytest.mark.django_db
LIST = "/ops/dead-letters/"


def _url(letter: DeadLetter, suffix: str = "") -> str:
    return f"/ops/dead-letters/{letter.id}/{suffix}"


def test_the_page_shows_the_error_the_redacted_arguments_and_the_routing(cast: Cast, sign_in: SignIn) -> None:
    letter = dead_letter(body=b'[["a@example.org"], {"password": "hunter2"}, {}]', queue="mail", chord_id="c-1")
    answer = sign_in(cast.olga).get(_url(letter))
    text = text_of(answer.content.decode())
    for said in (
        "shop.errors.MailhubDown: connection refused", "Traceback of the newest failure", "a@example.org", "mail",
        letter.task_id, "celery@tests", "Safe to run again", "belongs to a chord", "Failed for good",
    ):  # fmt: skip
        assert said in text, said
    assert "hunter2" not in text
    assert "<details><summary>Traceback" in answer.content.decode()


def test_the_page_shows_every_attempt_and_marks_the_one_that_may_have_happened(cast: Cast, sign_in: SignIn) -> None:
    letter = dead_letter(ambiguous=True)
    occurrence = letter.occurrences.get()
    for retries in range(2):
        Attempt.objects.create(
            tenant=letter.tenant, source=letter.source, task_id=letter.task_id, retries=retries,
            job_type=letter.job_type, happened_at=occurrence.happened_at - timedelta(minutes=9 - retries),
            duration_ms=1_500, error_class="ValueError", error_text=f"try {retries}", outcome_class="safe",
            outcome_reason="nothing was sent",
        )  # fmt: skip
    rows = sign_in(cast.olga).get(_url(letter)).context["history"]
    assert [(row.what, row.error_text, row.took) for row in rows] == [
        ("Failed for good", occurrence.error_text, ""),
        ("Failed, retried by Celery", "try 1", "1.5 s"),
        ("Failed, retried by Celery", "try 0", "1.5 s"),
    ]
    assert [row.is_the_reason for row in rows] == [True, False, False]


def test_the_attempts_of_a_repair_are_told_from_those_of_the_first_run(
    letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    """C1: each run begins with attempt 1; the words count the attempts of all of them."""
    client = sign_in(cast.olga)
    assert "1 attempt ·" in text_of(client.get(_url(letter)).content.decode())
    confirm(client, _url(letter, "retry/"))
    first = newest_repair(letter)
    Attempt.objects.create(
        tenant=letter.tenant, source=letter.source, task_id=first.new_task_id, retries=0, job_type=letter.job_type,
        happened_at=database_now(), error_class="ValueError", outcome_class="safe",
    )  # fmt: skip
    fail_again(mark_sent(first))
    confirm(client, _url(letter, "retry/"), {"answer": "did_not_happen", "reference": "log"})
    fail_again(mark_sent(newest_repair(letter)))
    Occurrence.objects.filter(repair_id=first.id).update(retries=1)
    answer = client.get(_url(letter))
    rows = {(row.attempt, row.run) for row in answer.context["history"]}
    assert rows == {(1, ""), (1, "repair 1"), (2, "repair 1"), (1, "repair 2")}
    text = text_of(answer.content.decode())
    assert "4 attempts in 3 runs" in text
    assert "1 of repair 2" in text
    of_incident = client.get(f"/ops/incidents/{letter.incident_id}/")
    assert {(row.attempt, row.run) for row in of_incident.context["focus"]["history"]} == rows
    assert "1 attempt in the last of 3 runs" in text_of(of_incident.content.decode())


def test_a_big_traceback_is_cut_and_offered_as_a_file(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    """SCA-01."""
    TracebackText.objects.update(text="x" * 299_999 + "\n")
    DeadLetter.objects.update(error_text="y" * 200_000, payload_preview="z" * 200_000)
    client = sign_in(cast.olga)
    page = client.get(_url(letter))
    assert len(page.content) < 100_000
    address = page.context["traceback_url"]
    assert address in page.content.decode()
    file = client.get(address)
    assert (len(file.content), file["Content-Type"]) == (300_000, "text/plain; charset=utf-8")
    assert file["Content-Disposition"].startswith("attachment")
    occurrence = dead_letter(tenant="t-b").occurrences.get()
    assert client.get(_url(letter, f"traceback/{occurrence.id}/")).status_code == 404


def test_retrying_asks_and_sends_it(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.olga)
    answer = confirm(client, _url(letter, "retry/"), follow=True)
    text = text_of(answer.content.decode())
    assert "1 job is on its way" in text
    assert "Sent, awaiting result" in text
    assert newest_repair(letter).state == ActionState.PLANNED
    assert answer.context["buttons"].bar == []
    again = client.get(_url(letter, "retry/"))
    assert again.context["asked"].submit == ""


@pytest.mark.parametrize(
    ("answers", "state", "actions"),
    [
        ({"answer": "leave"}, LetterState.OPEN, 0),
        ({"answer": "did_not_happen", "reference": "log"}, LetterState.RETRYING, 1),
        ({"answer": "already_happened", "reference": "log"}, LetterState.ALREADY_DONE, 1),
    ],
)
def test_a_job_that_may_have_happened_is_asked_about(
    answers: dict[str, str], state: str, actions: int, cast: Cast, sign_in: SignIn
) -> None:
    """B6, C19."""
    letter = dead_letter(ambiguous=True)
    client = sign_in(cast.olga)
    page = client.get(_url(letter, "retry/"))
    assert page.context["asked"].form["answer"].value() == "leave"
    assert "may already have happened, because: " in text_of(page.content.decode())
    assert confirm(client, _url(letter, "retry/"), {}).status_code == 400
    assert confirm(client, _url(letter, "retry/"), answers).status_code == 302
    assert (DeadLetter.objects.get().state, RepairAction.objects.count()) == (state, actions)


@pytest.mark.parametrize("answer", ["did_not_happen", "already_happened"])
def test_an_answered_retry_that_is_sent_twice_is_a_replay(answer: str, cast: Cast, sign_in: SignIn) -> None:
    """A9: what the job asked is not asked any more after the first time, and is read all the same."""
    letter = dead_letter(ambiguous=True)
    client = sign_in(cast.olga)
    sent = hidden_fields(client.get(_url(letter, "retry/")).content.decode()) | {"answer": answer, "reference": "log"}
    assert client.post(_url(letter, "retry/"), sent).status_code == 302
    again = client.post(_url(letter, "retry/"), sent, follow=True)
    assert "nothing was repeated" in text_of(again.content.decode())
    assert RepairAction.objects.count() == 1


@pytest.mark.parametrize("suffix", ["done/", "discard/"])
def test_a_decision_that_is_sent_twice_is_a_replay(
    suffix: str, letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    """A9."""
    client = sign_in(cast.olga)
    sent = hidden_fields(client.get(_url(letter, suffix)).content.decode()) | {"reason": "a test"}
    assert client.post(_url(letter, suffix), sent).status_code == 302
    again = client.post(_url(letter, suffix), sent, follow=True)
    assert "nothing was repeated" in text_of(again.content.decode())
    assert RepairAction.objects.count() == 1


@pytest.mark.parametrize("suffix", ["done/", "discard/"])
def test_a_decision_without_a_reason_keeps_its_key_and_what_was_seen(
    suffix: str, letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    client = sign_in(cast.olga)
    sent = hidden_fields(client.get(_url(letter, suffix)).content.decode())
    dead_letter()
    wrong = client.post(_url(letter, suffix), sent | {"reason": " "})
    assert wrong.status_code == 400
    assert hidden_fields(wrong.content.decode()) == sent


def test_an_expired_job_that_is_sent_twice_is_a_replay(cast: Cast, sign_in: SignIn) -> None:
    """A9: once it is on its way it has expired no more, as far as the form is concerned."""
    letter = dead_letter(headers={"expires": (database_now() - timedelta(hours=1)).isoformat()})
    client = sign_in(cast.olga)
    sent = hidden_fields(client.get(_url(letter, "retry/")).content.decode()) | {"run_expired": "on"}
    assert client.post(_url(letter, "retry/"), sent).status_code == 302
    again = client.post(_url(letter, "retry/"), sent, follow=True)
    assert "nothing was repeated" in text_of(again.content.decode())
    assert RepairAction.objects.count() == 1


def test_an_expired_job_runs_only_if_that_is_said(cast: Cast, sign_in: SignIn) -> None:
    gone = (database_now() - timedelta(hours=1)).isoformat()
    letter = dead_letter(headers={"expires": gone})
    client = sign_in(cast.olga)
    buttons = client.get(_url(letter)).context["buttons"].bar
    assert ("Retry…", False) in [(button.label, button.is_primary) for button in buttons]
    assert "expired" in text_of(client.get(_url(letter, "retry/")).content.decode())
    assert confirm(client, _url(letter, "retry/")).status_code == 409
    assert confirm(client, _url(letter, "retry/"), {"run_expired": "on"}).status_code == 302
    assert RepairAction.objects.count() == 1


def test_stating_that_it_happened_needs_a_reason_and_closes_it(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    """B4."""
    client = sign_in(cast.olga)
    assert confirm(client, _url(letter, "done/"), {"reason": "  "}).status_code == 400
    confirm(client, _url(letter, "done/"), {"reason": "seen in the log", "reference": "OPS-1"})
    assert DeadLetter.objects.get().state == LetterState.ALREADY_DONE
    assert newest_repair(letter).reason == "seen in the log"


def test_discarding_is_behind_more_needs_a_reason_and_says_it_is_final(
    letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    """B8."""
    client = sign_in(cast.olga)
    buttons = client.get(_url(letter)).context["buttons"]
    assert "Discard…" not in [button.label for button in buttons.bar]
    assert [(button.label, button.is_danger) for button in buttons.more] == [("Discard…", True)]
    assert "cannot be undone" in text_of(client.get(_url(letter, "discard/")).content.decode())
    assert confirm(client, _url(letter, "discard/"), {"reason": ""}).status_code == 400
    assert confirm(client, _url(letter, "discard/"), {"reason": "a test"}).status_code == 302
    assert DeadLetter.objects.get().state == LetterState.DISCARDED
    assert not SealedMessage.objects.exists()
    assert client.get(_url(letter, "discard/")).context["asked"].submit == ""


def test_a_second_discard_of_another_tab_is_told_that_somebody_was_first(
    letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    client = sign_in(cast.ada)
    fields = hidden_fields(client.get(_url(letter, "discard/")).content.decode()) | {"reason": "a test"}
    retry_letter(letter_id=letter.id, by=cast.olga, key="k")
    answer = client.post(_url(letter, "discard/"), fields)
    assert answer.status_code == 412
    assert "olga was there first" in text_of(answer.content.decode())
    assert DeadLetter.objects.get().state == LetterState.RETRYING


# -- several -----------------------------------------------------------------------------------------------------------


def _select(client: Any, *ids: Any, action: str = "retry_selected") -> Any:
    return client.post(LIST, {"action": action, "_selected_action": [str(one) for one in ids]})


def _send(client: Any, page: Any) -> Any:
    fields = {**hidden_fields(page.content.decode())}
    return client.post(LIST, fields, follow=True)


def test_selected_jobs_are_shown_and_then_retried_one_by_one(cast: Cast, sign_in: SignIn) -> None:
    safe = [dead_letter(), dead_letter()]
    ambiguous = dead_letter(ambiguous=True)
    client = sign_in(cast.olga)
    page = _select(client, *(one.id for one in (ambiguous, *reversed(safe))))
    text = text_of(page.content.decode())
    assert "Retry 2 of 3 selected jobs?" in text
    assert "Skipped, because: 1 may already have happened" in text
    assert hidden_fields(page.content.decode())["letters"].split() == [str(one.id) for one in safe]
    assert not RepairAction.objects.exists()
    answer = _send(client, page)
    assert "2 jobs are on the way: Sent, awaiting result." in text_of(answer.content.decode())
    assert set(RepairAction.objects.values_list("letter_id", flat=True)) == {one.id for one in safe}
    again = _send(client, page)
    assert RepairAction.objects.count() == 2
    assert again.status_code == 200


def test_selecting_more_jobs_asks_the_database_no_more_often(cast: Cast, sign_in: SignIn) -> None:
    """SCA-01: one by one or of one incident each, up to those whose messages are opened for the page."""
    client = sign_in(cast.olga)
    letters = [dead_letter(task=f"shop.task_{number}") for number in range(20)]

    def queries(count: int) -> int:
        with CaptureQueriesContext(connection) as found:
            page = _select(client, *(one.id for one in letters[:count]))
        assert f"Retry {count} of {count} selected jobs?" in text_of(page.content.decode())
        return len(found)

    queries(1)
    assert queries(20) == queries(2)


def test_a_reader_cannot_retry_by_hand_made_posts(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    """ADM-01: nothing happens, the message says how many were refused, and each is audited."""
    client = sign_in(cast.vera)
    assert client.get(LIST).context["bulk_actions"] == []
    page = _select(client, letter.id)
    assert page.status_code == 200
    assert "1 is not yours to retry" in text_of(page.content.decode())
    sent = client.post(
        LIST, {"action": "retry_selected", "confirmed": "yes", "letters": str(letter.id), "idempotency_key": "k"},
        follow=True,
    )  # fmt: skip
    assert "1 refused" in text_of(sent.content.decode())
    denied = AuditEvent.objects.filter(operator_name="vera", verdict=Verdict.DENIED, action="dead-letters.retry")
    assert denied.filter(target_id=str(letter.id)).exists()
    assert not RepairAction.objects.exists()


def test_one_granted_and_one_not_granted_job_do_what_each_may(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    """ADM-01."""
    other = dead_letter(tenant="t-b")
    client = sign_in(cast.olga)
    answer = client.post(
        LIST,
        {
            "action": "retry_selected", "confirmed": "yes", "idempotency_key": "k",
            "letters": f"{letter.id} {other.id} {new_id()} nonsense",
        },
        follow=True,
    )  # fmt: skip
    text = text_of(answer.content.decode())
    assert "1 job is on the way" in text
    assert "3 refused" in text
    assert list(RepairAction.objects.values_list("letter_id", flat=True)) == [letter.id]
    assert AuditEvent.objects.filter(operator_name="olga", verdict=Verdict.DENIED, target_id=str(other.id)).exists()
    page = text_of(_select(client, other.id, new_id()).content.decode())
    assert "2 are not yours to retry, or not there" in page


@pytest.mark.parametrize("path", ["dead-letters", "incidents", "repairs", "audit", "workers", "permissions", "tokens"])
def test_no_list_deletes_anything(path: str, letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    """ADM-01: no delete action exists, not even for who may do everything."""
    retry_letter(letter_id=letter.id, by=cast.ada, key="k")
    rows = [model.objects.count() for model in (DeadLetter, Incident, RepairAction, AuditEvent, Occurrence)]
    ids = [str(letter.id), str(letter.incident_id), "1"]
    client = sign_in(cast.ada)
    answer = client.post(
        f"/ops/{path}/",
        {"action": "delete_selected", "_selected_action": ids, "index": "0", "post": "yes"},
        follow=True,
    )
    assert answer.status_code == 200
    assert "no such action" in text_of(answer.content.decode())
    for address in ("add/", f"{letter.id}/delete/", f"{letter.id}/change/", f"{letter.id}/history/"):
        assert client.post(f"/ops/{path}/{address}", {"post": "yes"}).status_code == 404
    left = [model.objects.count() for model in (DeadLetter, Incident, RepairAction, AuditEvent, Occurrence)]
    assert all(now >= before for now, before in zip(left, rows, strict=True)), "reading the trail adds to it"


@pytest.mark.parametrize("address", ["autocomplete/?term=a", "jsi18n/", "r/1/1/", "ops_incidents/"])
def test_the_popups_and_lookups_of_the_stock_admin_are_not_there(address: str, cast: Cast, sign_in: SignIn) -> None:
    """GRA-02."""
    assert sign_in(cast.ada).get(f"/ops/{address}").status_code == 404


@pytest.mark.parametrize("values", [{}, {"_selected_action": ["nonsense"]}, {"action": "retry_selected"}])
def test_an_empty_or_broken_selection_changes_nothing(
    values: Any, letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    answer = sign_in(cast.ada).post(LIST, {"action": "retry_selected", **values}, follow=True)
    assert answer.status_code == 200
    assert not RepairAction.objects.exists()


def test_more_than_a_thousand_are_not_retried_at_once(cast: Cast, sign_in: SignIn) -> None:
    letters = " ".join(str(new_id()) for _ in range(1_001))
    values = {"action": "retry_selected", "confirmed": "yes", "idempotency_key": "k", "letters": letters}
    answer = sign_in(cast.ada).post(LIST, values, follow=True)
    assert "at most 1,000" in text_of(answer.content.decode())


# -- repairs -----------------------------------------------------------------------------------------------------------


def test_a_repair_that_has_not_started_can_be_withdrawn(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    done = retry_letter(letter_id=letter.id, by=cast.olga, key="k")
    client = sign_in(cast.olga)
    page = client.get(f"/ops/repairs/{done.repair_id}/")
    assert [button.label for button in page.context["buttons"].bar] == ["Withdraw…"]
    answer = confirm(client, f"/ops/repairs/{done.repair_id}/withdraw/", follow=True)
    assert "is withdrawn" in text_of(answer.content.decode())
    assert DeadLetter.objects.get().state == LetterState.OPEN
    assert client.get(f"/ops/repairs/{done.repair_id}/withdraw/").context["asked"].submit == ""


def test_the_list_of_repairs_says_their_state_in_words(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    done = retry_letter(letter_id=letter.id, by=cast.olga, key="k")
    client = sign_in(cast.olga)
    sent_at = database_now() - timedelta(hours=2)
    actions = RepairAction.objects.filter(id=done.repair_id)

    def words() -> str:
        return str(client.get("/ops/repairs/").context["rows"][0][2][2])

    assert words() == "Planned, about to be sent"
    actions.update(state=ActionState.SENT, sent_at=sent_at, answer_due_at=database_now() + timedelta(hours=1))
    assert words() == "Sent, awaiting result"
    actions.update(answer_due_at=sent_at + timedelta(hours=1))
    assert words() == "Sent, no answer for 2 h"
    assert client.get("/ops/repairs/?state=live").context["cl"].result_count == 1
    assert client.get("/ops/repairs/?state=failed").context["cl"].result_count == 0


@pytest.mark.parametrize("suffix", ["retry/", "done/", "discard/"])
def test_what_became_of_a_job_meanwhile_is_said_in_words(
    suffix: str, letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    """The API names the state as its field does; a person reads what that means."""
    client = sign_in(cast.olga)
    sent = hidden_fields(client.get(_url(letter, suffix)).content.decode()) | {"reason": "a test"}
    other = dead_letter()
    close_letter_as_done(letter_id=letter.id, by=cast.ada, key="k", reason="it is in the log")
    assert Incident.objects.get().version > int(sent["version"])
    sent |= hidden_fields(client.get(_url(other, "discard/")).content.decode()) | {"idempotency_key": "mine"}
    answer = client.post(_url(letter, suffix), sent)
    text = text_of(answer.content.decode())
    assert answer.status_code == 409
    assert "The job is known to have happened already; nothing was changed." in text
    assert f"{letter.job_id} is now: Closed, had already happened; INC-" in text
    assert "already_done" not in answer.content.decode()


def test_a_retry_of_a_settled_job_says_in_words_why_it_cannot_be(
    letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    close_letter_as_done(letter_id=letter.id, by=cast.ada, key="k", reason="it is in the log")
    page = sign_in(cast.olga).get(_url(letter, "retry/")).content.decode()
    assert "The job is known to have happened already" in text_of(page)
    assert "already_done" not in page
    assert "a retry makes it yours" not in page


def test_of_several_what_waits_no_more_is_counted_in_words(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.olga)
    dead_letter()
    url = f"/ops/incidents/{letter.incident_id}/retry/"
    sent = hidden_fields(client.get(url).content.decode())
    close_letter_as_done(letter_id=letter.id, by=cast.ada, key="k", reason="it is in the log")
    sent |= {"version": hidden_fields(client.get(url).content.decode())["version"]}
    text = text_of(client.post(url, sent, follow=True).content.decode())
    assert "1 job is on its way: Sent, awaiting result. 1 refused. 1: It did not wait for a decision any more." in text


def test_a_settled_job_is_not_called_safe_to_run_again(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.ada)
    assert "Safe to run again, because: " in text_of(client.get(_url(letter)).content.decode())
    confirm(client, _url(letter, "discard/"), {"reason": "nobody wants it"})
    text = text_of(client.get(_url(letter)).content.decode())
    assert "Discarded of INC-" in text
    assert "Safe to run again, because" not in text
    of_incident = client.get(f"/ops/incidents/{letter.incident_id}/")
    assert [row["outcome"] for row in of_incident.context["letters"]] == [""]


def test_who_retries_selected_jobs_that_somebody_else_has_is_told_who(cast: Cast, sign_in: SignIn) -> None:
    letters = [dead_letter(), dead_letter(task="shop.other")]
    ids = [letter.id for letter in letters]
    client = sign_in(cast.ada)
    assert "Somebody else has" not in text_of(_select(client, *ids).content.decode())
    acknowledge_incident(incident_id=letters[1].incident_id, by=cast.olga, key="k")
    text = text_of(_select(client, *ids).content.decode())
    assert f"INC-{letters[1].incident.number:04d} : olga has it" in text
    assert f"INC-{letters[0].incident.number:04d} :" not in text
    assert "Somebody else has" not in text_of(_select(sign_in(cast.olga), *ids).content.decode())
