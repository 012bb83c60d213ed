"""What the page of an incident shows beside its words, what its buttons do at once, and what its list says."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from deadletters.arguments import describe_signature
from deadletters.models import Attempt, DeadLetter, LetterState, Occurrence, TracebackText, WorkerNode
from deadletters.selectors import Hourly, open_jobs_of
from grants.actions import Action
from grants.models import AuditEvent, Verdict
from incidents.models import Incident, IncidentState, Severity
from incidents.services import acknowledge_incident, resolve_incident
from opsconsole.core.bounded import capped_counts
from opsconsole.core.database import database_now
from opsconsole.core.ids import new_id
from repairs.admin.bars import breakdown
from repairs.models import RepairAction, RepairBatch
from repairs.refusals import forget_served
from repairs.services import discard_letter, retry_letter
from repairs.story import story_of
from tests.admin.conftest import SignIn
from tests.admin.tools import confirm, hidden_fields, mark_sent, newest_repair, succeed, text_of
from tests.cast import Cast, give
from tests.factories import dead_letter

pytestmark = pytest.mark.django_db
LIST = "/ops/incidents/"


def _url(incident: Incident, suffix: str = "") -> str:
    return f"/ops/incidents/{incident.id}/{suffix}"


def _text(client: Client, path: str) -> str:
    return text_of(client.get(path).content.decode())


def _button(client: Client, incident: Incident, label: str) -> Any:
    buttons = client.get(_url(incident)).context["buttons"]
    return next((one for one in [*buttons.bar, *buttons.more] if one.label.startswith(label)), None)


def _press(client: Client, incident: Incident, suffix: str, **more: Any) -> Any:
    """Press a button of the page that acts at once."""
    url = _url(incident, suffix)
    return client.post(url, hidden_fields(client.get(_url(incident)).content.decode(), url), **more)


def _try_one(client: Client, incident: Incident) -> None:
    _press(client, incident, "take/")
    _press(client, incident, "retry-one/")
    succeed(mark_sent(newest_repair()))


# -- buttons that act at once ------------------------------------------------------------------------------------------


def test_three_clicks_repair_what_asks_nothing(cast: Cast, sign_in: SignIn) -> None:
    """A10, A12, C11: take it, one first, all the rest, each a single POST; and it closes by itself."""
    letters = [dead_letter() for _ in range(4)]
    incident = letters[0].incident
    client = sign_in(cast.olga)
    _try_one(client, incident)
    assert newest_repair().letter_id == letters[0].id, "the oldest one"
    answer = _press(client, incident, "retry/", follow=True)
    assert "3 jobs are on their way: Sent, awaiting result." in text_of(answer.content.decode())
    for action in RepairAction.objects.filter(state="planned"):
        succeed(mark_sent(action))
    assert Incident.objects.get().state == IncidentState.RESOLVED


def test_the_button_that_sends_one_first_says_which(cast: Cast, sign_in: SignIn) -> None:
    letters = [dead_letter() for _ in range(3)]
    incident, name = letters[0].incident, letters[0].job_id
    page = sign_in(cast.olga).get(_url(incident)).content.decode()
    assert f'title="Sends {name}">Retry 1 first</button>' in page
    assert f"“Retry 1 first” sends {name} ." in text_of(page)
    assert text_of(page).count("goes first") == 1
    assert f"{name} goes first Safe to run again" in text_of(page)
    assert "goes first" not in _text(sign_in(cast.vera), _url(incident)), "who may retry nothing sends nothing"


def test_a_button_that_was_pressed_twice_repeats_nothing(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    """A9: a double click, or Back and again, has the same key."""
    for _ in range(3):
        dead_letter()
    client = sign_in(cast.olga)
    for suffix, made in (("retry-one/", 1), ("retry/", 4)):
        url = _url(letter.incident, suffix)
        fields = hidden_fields(client.get(_url(letter.incident)).content.decode(), url)
        client.post(url, fields)
        again = client.post(url, fields, follow=True)
        assert "nothing was repeated" in text_of(again.content.decode())
        assert RepairAction.objects.count() == made
        if suffix == "retry-one/":
            succeed(mark_sent(newest_repair()))


def test_a_second_tab_is_told_that_the_job_is_on_its_way(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    """C17: another key; the newer state is shown with who did it."""
    dead_letter()
    client = sign_in(cast.olga)
    url = _url(letter.incident, "retry-one/")
    first, second = (hidden_fields(client.get(_url(letter.incident)).content.decode(), url) for _ in range(2))
    client.post(url, first)
    answer = client.post(url, second)
    assert answer.status_code == 412
    assert "olga" in text_of(answer.content.decode())
    assert RepairAction.objects.count() == 1


def test_an_old_page_does_nothing_once_somebody_else_has_it(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.olga)
    url = _url(letter.incident, "retry-one/")
    fields = hidden_fields(client.get(_url(letter.incident)).content.decode(), url)
    acknowledge_incident(incident_id=letter.incident_id, by=cast.ada, key="k")
    answer = client.post(url, fields)
    assert answer.status_code == 412
    assert "ada took it" in text_of(answer.content.decode())
    assert not RepairAction.objects.exists()


def _make(letter: DeadLetter, **values: Any) -> None:
    DeadLetter.objects.filter(id=letter.id).update(**values)


@pytest.mark.parametrize("values", [{"outcome_class": "not_declared"}, {"chord_id": "c-1"}])
def test_a_button_that_acts_at_once_asks_if_its_job_has_come_to_need_it(
    values: dict[str, str], letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    """C19: what was not shown is not sent; the question is, and its answer is taken."""
    client = sign_in(cast.olga)
    for page, url in (
        (_url(letter.incident), _url(letter.incident, "retry-one/")),
        (f"/ops/dead-letters/{letter.id}/", f"/ops/dead-letters/{letter.id}/retry/"),
    ):
        fields = hidden_fields(client.get(page).content.decode(), url)
        _make(letter, **values)
        answer = client.post(url, fields)
        assert answer.status_code == 400
        assert not RepairAction.objects.exists()
        _make(letter, outcome_class="safe", chord_id="")
    client.post(url, hidden_fields(answer.content.decode(), ""))
    assert RepairAction.objects.count() == 1


@pytest.mark.parametrize(
    "values",
    [{"outcome_class": "ambiguous", "outcome_reason": "It timed out."}, {"outcome_class": "not_declared"},
     {"chord_id": "c-1"}],
)  # fmt: skip
def test_what_has_a_question_is_asked_about(
    values: dict[str, str], letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    """C19, B6, RET-03: may already have happened, not declared, one of a chord."""
    _make(letter, **values)
    client = sign_in(cast.olga)
    assert (_button(client, letter.incident, "Retry").label, _button(client, letter.incident, "Retry").direct) == (
        "Retry it…", False,
    )  # fmt: skip
    assert _text(client, _url(letter.incident, "retry-one/")).count("chord") == (2 if "chord_id" in values else 0)
    other = dead_letter()
    button = _button(client, letter.incident, "Retry 1")
    assert (button.label, button.direct) == ("Retry 1 first", True), "the other one asks nothing"
    _try_one(client, letter.incident)
    assert newest_repair().letter_id == other.id
    dead_letter()
    button = _button(client, letter.incident, "Retry all")
    assert (button.label, button.direct) == ("Retry all 2…", False)


def test_retrying_all_asks_until_one_has_succeeded(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    for _ in range(2):
        dead_letter()
    client = sign_in(cast.olga)
    assert not _button(client, letter.incident, "Retry all").direct
    _try_one(client, letter.incident)
    assert _button(client, letter.incident, "Retry all").direct


def test_what_somebody_else_has_is_asked_about(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    acknowledge_incident(incident_id=letter.incident_id, by=cast.ada, key="k")
    assert not _button(sign_in(cast.olga), letter.incident, "Retry").direct
    assert _button(sign_in(cast.ada), letter.incident, "Retry").direct


def test_a_job_that_became_ambiguous_meanwhile_is_asked_about(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    """B6: the button of an old page sends nothing."""
    client = sign_in(cast.olga)
    url = _url(letter.incident, "retry-one/")
    fields = hidden_fields(client.get(_url(letter.incident)).content.decode(), url)
    _make(letter, outcome_class="ambiguous", outcome_reason="It timed out.")
    answer = client.post(url, fields)
    assert answer.status_code == 400
    assert "What do you know about it?" in text_of(answer.content.decode())
    assert not RepairAction.objects.exists()


def test_retrying_all_takes_no_other_number_than_was_shown(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    """The count is frozen: where jobs came or went, it is asked again."""
    for _ in range(2):
        dead_letter()
    client = sign_in(cast.olga)
    _try_one(client, letter.incident)
    url = _url(letter.incident, "retry/")
    fields = hidden_fields(client.get(_url(letter.incident)).content.decode(), url)
    dead_letter()
    answer = client.post(url, fields, follow=True)
    text = text_of(answer.content.decode())
    assert "You asked for 2 jobs, and there are 3 now; nothing was changed." in text
    assert "Retry all 3 jobs of INC-" in text
    assert not RepairBatch.objects.exists()
    assert client.post(url, fields | {"expected": "x"}).status_code == 400


@pytest.mark.parametrize("values", [{"outcome_class": "not_declared"}, {"chord_id": "chord-1"}])
def test_as_many_jobs_that_are_other_ones_are_asked_about(
    values: dict[str, str], letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    """C19, RET-03: one that was shown is gone, and one that asks something has come in its place."""
    shown = [dead_letter() for _ in range(2)]
    client = sign_in(cast.olga)
    _try_one(client, letter.incident)
    url = _url(letter.incident, "retry/")
    fields = hidden_fields(client.get(_url(letter.incident)).content.decode(), url)
    discard_letter(letter_id=shown[1].id, by=cast.olga, key="discard", reason="nobody wants it")
    _make(dead_letter(), **values)
    text = text_of(client.post(url, fields, follow=True).content.decode())
    assert "They are not all safe to run again any more." in text
    assert "Retry all 2 jobs of INC-" in text
    assert not RepairBatch.objects.exists()


def test_many_jobs_are_tried_by_one_whose_message_was_looked_at(
    letter: DeadLetter, cast: Cast, sign_in: SignIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many only the rows are read: the one that a click would send is looked at to the end."""
    dead_letter()
    monkeypatch.setattr("repairs.prospects.FULLY_CHECKED", 0)
    client = sign_in(cast.olga)
    assert _button(client, letter.incident, "Retry 1").direct
    now = database_now()
    WorkerNode.objects.create(
        id="w1", source="tests", host="h", pid=1, queues='["celery"]', started_at=now, seen_at=now,
        tasks=json.dumps({"shop.send_mail": describe_signature(lambda address: None)}),
    )  # fmt: skip
    forget_served()
    assert not _button(client, letter.incident, "Retry 1").direct, "its arguments do not fit"


def test_a_failed_job_is_retried_at_once_from_its_own_page(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.olga)
    page = client.get(f"/ops/dead-letters/{letter.id}/")
    assert next((one.label, one.direct) for one in page.context["buttons"].bar) == ("Retry it", True)
    url = f"/ops/dead-letters/{letter.id}/retry/"
    for _ in range(2):
        client.post(url, hidden_fields(page.content.decode(), url))
    assert RepairAction.objects.count() == 1
    assert DeadLetter.objects.get().state == LetterState.RETRYING


def test_it_says_how_often_the_task_retries_by_itself_and_where(
    letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    now = database_now()
    tasks = {"shop.send_mail": '{"varargs":true,"varkw":true,"max_retries":5}'}
    WorkerNode.objects.create(
        id="w1", source="tests", host="h", pid=1, queues='["celery"]', tasks=json.dumps(tasks), started_at=now,
        seen_at=now,
    )  # fmt: skip
    client = sign_in(cast.olga)
    for path in (_url(letter.incident, "retry/"), _url(letter.incident, "retry-one/"),
                 f"/ops/dead-letters/{letter.id}/retry/"):  # fmt: skip
        said = "Runs again from attempt 1 (up to 5 automatic retries each), queue celery, with the original arguments"
        assert said in _text(client, path), path


# -- what it shows -----------------------------------------------------------------------------------------------------


def test_what_is_hit_names_only_what_differs(cast: Cast, sign_in: SignIn) -> None:
    letters = [dead_letter() for _ in range(7)]
    for number, letter in enumerate(letters):
        _make(letter, worker=f"w{number}", release="r1" if number else "r2")
    found = {one.title: one for one in sign_in(cast.ada).get(_url(letters[0].incident)).context["breakdowns"]}
    assert set(found) == {"Release", "Worker"}
    assert [(share.value, share.count, share.width) for share in found["Release"].shares] == [
        ("r1", 6, 100), ("r2", 1, 17),
    ]  # fmt: skip
    assert (len(found["Worker"].shares), found["Worker"].more, found["Worker"].rest) == (5, 2, 2)


def test_what_is_hit_says_of_how_many_it_speaks(
    letter: DeadLetter, cast: Cast, sign_in: SignIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SCA-01."""
    for number in range(3):
        _make(dead_letter(), worker=f"w{number}")
    client = sign_in(cast.ada)
    assert "of all 4 jobs that wait" in _text(client, _url(letter.incident))
    monkeypatch.setattr("repairs.prospects.COUNTED", 3)
    text = _text(client, _url(letter.incident))
    assert "of the first 3 jobs that wait" in text
    assert "Of the first 3 jobs that were looked at; there are more." in text


def test_a_breakdown_is_most_frequent_first() -> None:
    assert [share.value for share in breakdown("x", "X", ["b", "a", "b", "c"]).shares] == ["b", "a", "c"]
    assert breakdown("x", "X", []).values == 0


def test_a_value_of_a_breakdown_leads_to_its_jobs(cast: Cast, sign_in: SignIn) -> None:
    letters = [dead_letter() for _ in range(12)]
    for number, letter in enumerate(letters):
        _make(letter, worker="w & x" if number else "", error_class="shop.Other" if number == 1 else letter.error_class)
    client = sign_in(cast.ada)
    page = client.get(_url(letters[0].incident))
    assert "?show=decision&amp;worker=w%20%26%20x#jobs" in page.content.decode()
    first = client.get(_url(letters[0].incident), {"show": "decision", "worker": "w & x"})
    assert "worker w & x" in text_of(first.content.decode())
    second = client.get(_url(letters[0].incident) + first.context["letters_next"])
    shown = [row["letter"].id for answer in (first, second) for row in answer.context["letters"]]
    assert (len(shown), set(shown)) == (11, {one.id for one in letters[1:]})
    for query, found in (({"worker": ""}, [letters[0].id]), ({"error": "shop.Other"}, [letters[1].id]),
                         ({"worker": "", "error": "shop.Other"}, []), ({"queue": "none"}, [])):  # fmt: skip
        answer = client.get(_url(letters[0].incident), query)
        assert [row["letter"].id for row in answer.context["letters"]] == found, query
    assert client.get(_url(letters[0].incident), {"worker": "\x00"}).status_code == 400


def _hourly(incident: Incident, since: datetime) -> Hourly:
    hourly = story_of(incident, since=since, letter=None, most_of_job=0).hourly
    assert hourly is not None
    return hourly


def test_failures_are_counted_by_the_hour(letter: DeadLetter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each failure of a small incident, each job of a big one."""
    now = timezone.now().replace(minute=30, second=0, microsecond=0)
    earlier = now - timedelta(hours=5)
    Occurrence.objects.update(happened_at=now)
    again = Occurrence.objects.get()
    again.pk, again.delivery, again.happened_at = new_id(), "again", earlier
    again.save(force_insert=True)
    _make(letter, last_seen_at=now)
    incident = Incident.objects.get()
    found = _hourly(incident, now - timedelta(hours=40))
    assert (found.counts, found.of_jobs) == ({at.replace(minute=0): 1 for at in (now, earlier)}, False)
    assert list(_hourly(incident, now - timedelta(hours=2)).counts.values()) == [1]
    monkeypatch.setattr("deadletters.selectors.EACH_FAILURE", 0)
    found = _hourly(incident, now - timedelta(hours=40))
    assert (found.counts, found.of_jobs) == ({now.replace(minute=0): 1}, True)


def test_the_chart_is_text_too(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    page = sign_in(cast.ada).get(_url(letter.incident)).content.decode()
    assert re.search(
        r'role="img" aria-label="Final failures per hour, last 48 hours: peak 1 \([^)]*\), total 1."', page
    )
    assert page.count("<rect class=") == 1, "an hour without any has no bar"
    assert "1 final failures</title>" in page


def test_every_attempt_of_the_job_in_focus_is_shown_and_the_guilty_one_marked(cast: Cast, sign_in: SignIn) -> None:
    """C19: not the last attempt, but the one that may have taken effect."""
    other = dead_letter(ago=60)
    letter = dead_letter()
    _make(letter, outcome_class="ambiguous", outcome_reason="It timed out after it was sent.")
    for retries, outcome, reason in (
        (0, "safe", "nothing was sent"),
        (1, "ambiguous", "It timed out after it was sent."),
    ):
        Attempt.objects.create(
            tenant=letter.tenant, source=letter.source, task_id=letter.task_id, retries=retries,
            job_type=letter.job_type, happened_at=timezone.now() - timedelta(minutes=9 - retries),
            error_class="ValueError", error_text=f"try {retries}", outcome_class=outcome, outcome_reason=reason,
        )  # fmt: skip
    client = sign_in(cast.ada)
    focus = client.get(_url(letter.incident)).context["focus"]
    assert focus["letter"].id == letter.id, "the newest one"
    assert [(row.attempt, row.is_the_reason) for row in focus["history"]] == [(1, False), (2, True), (1, False)]
    assert "may already have happened, because: It timed out after it was sent." in _text(client, _url(letter.incident))
    chosen = client.get(_url(letter.incident), {"job": str(other.id)})
    assert chosen.context["focus"]["letter"].id == other.id
    elsewhere = dead_letter(task="shop.other")
    for strange in ("x", str(elsewhere.id), str(new_id())):
        found = client.get(_url(letter.incident), {"job": strange})
        assert found.context["focus"]["letter"].id == letter.id, "only one of this incident"


def test_a_traceback_of_thirty_megabytes_is_not_read_whole(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    """SCA-01."""
    TracebackText.objects.update(text="x" * 30_000_000)
    Occurrence.objects.update(error_text="y" * 1_000_000)
    client = sign_in(cast.ada)
    begin = timezone.now()
    page = client.get(_url(letter.incident))
    assert timezone.now() - begin < timedelta(seconds=2)
    assert len(page.content) < 100_000
    assert page.context["focus"]["traceback_is_cut"]
    assert "The whole traceback as a file" in text_of(page.content.decode())


def test_the_incident_can_be_copied_as_text_and_as_commands(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    context = sign_in(cast.ada).get(_url(letter.incident)).context
    name = f"INC-{letter.incident.number:04d}"
    assert context["as_text"].startswith(
        f"{name} High, Open, nobody on it\n{letter.incident.title}\nnot repaired: 1 of 1"
    )
    assert f"http://testserver/ops/incidents/{letter.incident_id}/" in context["as_text"]
    commands = context["as_curl"].splitlines()
    assert commands[1:] == [
        f'curl -H "Authorization: Bearer $OPSCONSOLE_TOKEN" http://testserver/api/v1/incidents/{letter.incident_id}',
        'curl -X POST -H "Authorization: Bearer $OPSCONSOLE_TOKEN" -H "Idempotency-Key: $(uuidgen)" -H "Content-Type: '
        f"application/json\" -d '{{}}' http://testserver/api/v1/incidents/{letter.incident_id}/acknowledge",
        'curl -X POST -H "Authorization: Bearer $OPSCONSOLE_TOKEN" -H "Idempotency-Key: $(uuidgen)" -H "Content-Type: '
        'application/json" -d \'{"all": true, "expected_count": 1}\' '
        f"http://testserver/api/v1/incidents/{letter.incident_id}/retry",
    ]


@pytest.mark.urls("tests.admin.host_urls")
def test_without_the_rest_api_there_are_no_commands_to_copy(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    page = sign_in(cast.ada).get(_url(letter.incident))
    assert page.status_code == 200
    assert page.context["as_curl"] == ""


def test_who_is_asked_whether_it_happened_is_told_what_to_look_for(cast: Cast, sign_in: SignIn) -> None:
    """A job's id is in no provider's list: whose it is and what it was called with may be; redacted as everywhere."""
    body = b'[[], {"reference": "charge-7", "password": "hunter2", "note": "%s"}, {}]' % (b"n" * 500)
    letters = [
        dead_letter(ambiguous=True, body=body, actor_type="customer", actor_id=f"bram-{number}") for number in range(2)
    ]
    client = sign_in(cast.ada)
    for path in ("retry-one/", "retry/"):
        text = _text(client, _url(letters[0].incident, path))
        assert re.search(r'customer bram-0; reference="charge-7", password="\[redacted\]", note="n+…', text), path
        assert text.count("hunter2") == 0
        assert f"because: {letters[0].outcome_reason}"[:-1] in text
    assert "customer bram-1; reference=" in text
    assert "customer bram-0; reference=" in _text(client, f"/ops/dead-letters/{letters[0].id}/retry/")
    _make(letters[0], outcome_reason="Its worker died.")
    assert "…; Its worker died." in _text(client, _url(letters[0].incident, "retry/")), "reasons that differ are told"


def test_closing_says_what_is_left_undone_and_until_when(
    letter: DeadLetter, cast: Cast, sign_in: SignIn, settings: Any
) -> None:
    dead_letter(ambiguous=False)
    client = sign_in(cast.ada)
    url = _url(letter.incident, "close/")
    kept = f"until {database_now() + timedelta(days=30):%d %b %Y}"
    said = f"Of these jobs: 2 could safely run again. Each can still be retried from its own page {kept}"
    assert said in _text(client, url)
    assert "UTC; then their messages are removed. A new failure opens the incident again." in _text(client, url)
    _make(letter, first_seen_at=database_now() - timedelta(days=1))
    forget_served()
    settings.OPSCONSOLE_TASK_POLICIES = [{"pattern": "shop.*", "max_age_seconds": 10 * 86_400}]
    until = letter.first_seen_at + timedelta(days=9)
    assert f"by the policy of their task: the oldest until {until:%d %b %Y}" in _text(client, url)
    forget_served()
    settings.OPSCONSOLE_TASK_POLICIES = [{"pattern": "shop.*", "max_age_seconds": 10**15}]
    assert f"from its own page {kept}" in _text(client, url)
    settings.OPSCONSOLE_KEEP_MESSAGES_DAYS = 3
    assert f"until {database_now() + timedelta(days=3):%d %b %Y}" in _text(client, url)


def test_closing_does_not_promise_a_retry_of_what_cannot_be_retried(
    letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    client = sign_in(cast.ada)
    url = _url(letter.incident, "close/")
    _make(letter, is_set_aside=True)
    assert "1 can't be retried. Should that change, each can be retried from its own page until" in _text(client, url)
    dead_letter(ambiguous=False)
    assert "1 can't be retried. Those that can be retried can be so from their own pages until" in _text(client, url)


# -- payloads ----------------------------------------------------------------------------------------------------------


def _payload(letter: DeadLetter) -> str:
    return f"/ops/dead-letters/{letter.id}/payload/"


def test_a_payload_is_revealed_once_for_a_reason_that_is_audited(cast: Cast, sign_in: SignIn) -> None:
    """B3, API-05: exactly as it was sent."""
    letter = dead_letter(body=b'[["a@example.org"], {"password": "hunter2", "id": 9221939555730002819}, {}]')
    client = sign_in(cast.ada)
    page = client.get(_url(letter.incident))
    assert page.context["reveal"]["url"] == _payload(letter)
    assert "hunter2" not in page.content.decode()
    assert confirm(client, _payload(letter), {"reason": "  "}).status_code == 400
    rows = AuditEvent.objects.filter(action="payloads.read", verdict=Verdict.ALLOWED)
    assert not rows.exists()
    answer = confirm(client, _payload(letter), {"reason": "who is the recipient"})
    text = text_of(answer.content.decode())
    assert answer.status_code == 200
    assert '"password": "hunter2"' in text
    assert "9221939555730002819" in text
    assert "no-store" in answer["Cache-Control"]
    assert (rows.get().reason, rows.get().target_id) == ("who is the recipient", str(letter.id))
    assert "hunter2" not in rows.get().outcome


def test_who_may_not_read_payloads_is_told_which_grant_is_missing(
    letter: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    client = sign_in(cast.olga)
    for path in (_url(letter.incident), f"/ops/dead-letters/{letter.id}/"):
        text = _text(client, path)
        told = "Reveal the payload: needs the permission payloads.read (read the original arguments of a failed job)"
        assert f"{told} on tenant default" in text
        assert "Reveal…" not in text
    assert client.get(_payload(letter)).status_code == 403
    assert client.post(_payload(letter), {"reason": "please"}).status_code == 403
    give(cast.olga, Action.PAYLOADS_READ, tenant="default")
    assert "Reveal…" in _text(client, _url(letter.incident))


def test_a_payload_that_is_not_there_is_not_offered(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    _make(letter, message_state="too_large")
    client = sign_in(cast.ada)
    assert "The message is not stored in full (too_large)." in _text(client, _url(letter.incident))
    answer = confirm(client, _payload(letter), {"reason": "please"})
    assert answer.status_code == 409
    assert "can't be shown" in text_of(answer.content.decode())


def test_a_payload_that_is_no_json_is_shown_as_its_bytes(cast: Cast, sign_in: SignIn) -> None:
    """EXP-02: nothing is unpickled, and the page opens."""
    letter = dead_letter(body=b"\x80\x04N.")
    answer = confirm(sign_in(cast.ada), _payload(letter), {"reason": "please"})
    assert answer.status_code == 200
    assert "gAROLg==" in answer.content.decode()


def test_a_lone_surrogate_in_a_payload_breaks_no_page(cast: Cast, sign_in: SignIn) -> None:
    letter = dead_letter(body=b'[["\\ud800 <script>alert(1)</script>"], {}, {}]')
    answer = confirm(sign_in(cast.ada), _payload(letter), {"reason": "please"})
    assert answer.status_code == 200
    assert "\\ud800" in answer.content.decode()
    assert "<script>alert" not in answer.content.decode()


# -- the list ----------------------------------------------------------------------------------------------------------


def _tabs(client: Client, query: str = "") -> dict[str, str]:
    return {tab.label: tab.count for tab in client.get(f"{LIST}{query}").context["tabs"]}


def _listed(client: Client, query: str) -> set[int]:
    return {row.number for row in client.get(f"{LIST}{query}").context["cl"].result_list}


@pytest.fixture
def several(cast: Cast) -> dict[str, Incident]:
    """One incident of each kind."""
    found = {
        name: dead_letter(task=f"shop.{name}").incident for name in ("open", "worst", "mine", "taken", "closed", "back")
    }
    Incident.objects.filter(id=found["worst"].id).update(severity=Severity.CRITICAL)
    Incident.objects.filter(id=found["taken"].id).update(severity=Severity.CRITICAL)
    acknowledge_incident(incident_id=found["mine"].id, by=cast.ada, key="mine")
    acknowledge_incident(incident_id=found["taken"].id, by=cast.olga, key="taken")
    for name in ("closed", "back"):
        resolve_incident(
            incident_id=found[name].id, by=cast.ada, key=name, code="loss_accepted", summary="by hand", unrepaired=1
        )
    dead_letter(task="shop.back")
    return found


def test_each_tab_has_what_it_says_and_its_number(several: dict[str, Incident], cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.ada)
    wanted = {
        "": {"open", "worst", "back"}, "?state=open": {"open", "worst", "back"}, "?state=critical": {"worst", "taken"},
        "?state=mine": {"mine"}, "?state=acknowledged": {"mine", "taken"}, "?state=came_back": {"back"},
        "?state=resolved": {"closed"}, "?state=": set(several), "?state=unresolved": set(several) - {"closed"},
        "?state=&task=shop.mine": {"mine"}, "?task=%00": set(),
    }  # fmt: skip
    for query, names in wanted.items():
        assert _listed(client, query) == {several[name].number for name in names}, query
    assert _tabs(client) == {
        "Needs action": "3", "Critical": "2", "Mine": "1", "Taken": "2", "Came back": "1", "Closed": "1", "All": "6",
    }  # fmt: skip
    assert _tabs(client, "?severity=critical")["All"] == "2", "counted under the other filters"
    rows = {
        str(cells[0]): [str(cell) for cell in cells] for _, _, cells in client.get(f"{LIST}?state=").context["rows"]
    }
    back = rows[f"INC-{several['back'].number:04d}"]
    assert (back[1], back[2], back[5], back[7]) == ("High", "Came back", "1 safe", "nobody")
    assert back[3].endswith("shop.back · queue celery · default")
    dead_letter(source="elsewhere")
    told = [str(cells[3]) for _, _, cells in client.get(f"{LIST}?state=").context["rows"]]
    assert any(one.endswith("default · elsewhere") for one in told), "the source, where there are several"
    assert rows[f"INC-{several['closed'].number:04d}"][7] == "closed by ada"


def test_tabs_count_only_what_may_be_seen_and_not_beyond_a_thousand(
    letter: DeadLetter, cast: Cast, sign_in: SignIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GRA-02, SCA-01."""
    dead_letter(tenant="t-b")
    assert _tabs(sign_in(cast.olga))["All"] == "1"
    monkeypatch.setattr("opsconsole.core.admin.MOST_COUNTED", 1)
    assert _tabs(sign_in(cast.vera))["All"] == "1+"
    assert _tabs(sign_in(cast.vera))["Closed"] == "0"


def test_the_outcome_of_the_jobs_of_a_listed_incident_is_told(
    letter: DeadLetter, cast: Cast, sign_in: SignIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    for values in ({"outcome_class": "ambiguous"}, {"outcome_class": "not_declared"}, {"message_state": "missing"}):
        _make(dead_letter(), **values)
    retry_letter(letter_id=dead_letter().id, by=cast.ada, key="k")
    client = sign_in(cast.ada)

    def outcome() -> str:
        return str(client.get(f"{LIST}?state=").context["rows"][0][2][5])

    assert outcome() == "1 safe 1 may have happened 1 not declared 1 can't be retried 1 awaiting result"
    monkeypatch.setattr("repairs.admin.incidents.JOBS_LOOKED_AT", 2)
    assert outcome().endswith("of the first 2")
    assert open_jobs_of([Incident.objects.get()], 2)[letter.incident_id].is_capped
    assert open_jobs_of([], 2) == {}


def _newer(client: Client, address: str, **headers: Any) -> Any:
    return client.get(address, **headers)


def test_a_list_is_told_how_many_are_newer(letter: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    """New ones and such as came back, of this tab and these filters, with an ETag."""
    client = sign_in(cast.olga)
    closed = dead_letter(task="shop.closed").incident
    resolve_incident(incident_id=closed.id, by=cast.ada, key="k", code="loss_accepted", summary="by hand", unrepaired=1)
    Incident.objects.update(opened_at=timezone.now() - timedelta(hours=1))
    address = client.get(LIST).context["newer_url"]
    first = client.get(address)
    assert (first.json(), first["ETag"]) == ({"newer": 0}, '"0"')
    dead_letter()
    assert client.get(address).json() == {"newer": 0}, "one more failure of a known incident"
    dead_letter(task="shop.other")
    dead_letter(task="shop.other", tenant="t-b")
    dead_letter(task="shop.closed")
    second = client.get(address)
    assert second.json() == {"newer": "2"}
    assert client.get(address, headers={"If-None-Match": second["ETag"]}).status_code == 304
    assert client.get(address, headers={"If-None-Match": first["ETag"]}).status_code == 200
    for query in ("?severity=low", "?state=resolved", "?task=shop.none"):
        since = address.partition("since=")[2]
        assert client.get(f"{LIST}newer/{query}&since={since}").json() == {"newer": 0}, query
    assert client.get(f"{LIST}?q=1").context["newer_url"] == ""


def test_an_incident_whose_recording_is_seen_late_counts_as_newer(cast: Cast, sign_in: SignIn) -> None:
    """C12: a worker reads the database's clock, and commits after a page was made that does not have it yet."""
    client = sign_in(cast.ada)
    dead_letter(task="shop.known")
    address = client.get(LIST).context["newer_url"]
    assert client.get(address).json() == {"newer": 0}
    late = dead_letter(task="shop.late").incident
    Incident.objects.filter(id=late.id).update(opened_at=database_now() - timedelta(seconds=20))
    assert client.get(address).json() == {"newer": "1"}


def test_the_list_itself_does_not_take_since_when(cast: Cast, sign_in: SignIn) -> None:
    assert sign_in(cast.ada).get(f"{LIST}?since=1", follow=True).status_code == 400


@pytest.mark.parametrize(
    "query", ["", "?since=", "?since=x", "?since=99999999999999999", "?since=1&title=x", "?since=1&known=x"]
)
def test_a_question_that_is_none_is_not_understood(query: str, cast: Cast, sign_in: SignIn) -> None:
    assert sign_in(cast.ada).get(f"{LIST}newer/{query}").status_code == 400


def test_what_can_have_no_rows_is_counted_without_a_question(cast: Cast) -> None:
    assert capped_counts([], 5) == []
    assert capped_counts([Incident.objects.none(), Incident.objects.all()], 5) == [0, 0]


# -- queries -----------------------------------------------------------------------------------------------------------


def test_the_page_asks_little_beside_who_may_do_what(cast: Cast, sign_in: SignIn) -> None:
    """SCA-01: as many questions for many jobs as for a few."""
    for _ in range(30):
        dead_letter()
    client = sign_in(cast.ada)
    incident = Incident.objects.get()
    client.get(_url(incident))
    with CaptureQueriesContext(connection) as found:
        client.get(_url(incident))
    grants = ("ops_grants_scope", "auth_user", "django_session", "clock_timestamp")
    own = [query["sql"] for query in found.captured_queries if not any(name in query["sql"] for name in grants)]
    assert len(own) <= 13, own
