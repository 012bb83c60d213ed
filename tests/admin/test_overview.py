"""The overview: each number is that of the list it links to, as far as the operator's grants go, and it adds up."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import time
from datetime import datetime, timedelta
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from django.db import DatabaseError, connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from deadletters.arguments import describe_signature
from deadletters.models import DeadLetter, TaskMinute, WorkerNode
from deadletters.policy import TaskPolicySpec
from grants.actions import Action
from grants.operators import Operator
from incidents.models import Incident, Severity
from incidents.services import acknowledge_incident, resolve_incident
from opsconsole.console import judged, overview, queues
from opsconsole.console.machinery import Machinery, ServedQueue, machinery
from opsconsole.console.overview import etag_of, overview_for
from opsconsole.console.queues import Asker, Depth, Heard, QueueRow
from opsconsole.core import charts
from opsconsole.core.database import database_now
from opsconsole.jobs.models import Job
from repairs.refusals import forget_served
from repairs.services import retry_letter
from tests.admin.conftest import SignIn
from tests.admin.tools import text_of
from tests.cast import Cast, give, make_operator
from tests.factories import TIMED_OUT, dead_letter, seconds
from tests.jobs.rows import email, job, run

HOUR = timedelta(hours=1)
CARD = re.compile(
    r'<a class="ops-card-link" href="(?P<url>[^"]+)"><span>(?P<noun>[^<]+)</span> '
    r"<strong>(?P<number>[^<]+)</strong></a> <p>(?P<scope>.*?)</p>"
)


def policies(severity: str) -> list[TaskPolicySpec]:
    return [TaskPolicySpec(pattern="shop.*", effects="outside", severity=severity)]  # type: ignore[arg-type]


def cards(client: Client) -> dict[str, re.Match[str]]:
    """Return the cards of a page that was read afresh, by their nouns."""
    overview.forget()
    html = client.get("/ops/").content.decode()
    return {unescape(found["noun"]): found for found in CARD.finditer(html)}


def numbers(client: Client) -> dict[str, str]:
    return {noun: found["number"] for noun, found in cards(client).items()}


def rows_of(client: Client, url: str) -> int:
    """Return how many rows a list has, on all of its pages."""
    count, address = 0, url
    while address:
        found = client.get(address).context["cl"]
        count += len(found.result_list)
        address = f"{url.partition('?')[0]}{found.next_page}" if found.next_page else ""
    return count


def count(
    at: datetime, task: str = "shop.send_mail", *, tenant: str = "default", source: str = "tests", **n: int
) -> None:
    minute = at.replace(second=0, microsecond=0)
    TaskMinute.objects.create(tenant=tenant, source=source, job_type=task, minute=minute, **n)


def worker(name: str = "w1", *, age: float = 3, **fields: Any) -> WorkerNode:
    now = database_now()
    values = {"source": "tests", "host": f"host-{name}", "pid": 1, "started_at": now - 3 * HOUR}
    made: WorkerNode = WorkerNode.objects.create(id=name, seen_at=now - seconds(age), **{**values, **fields})
    return made


@pytest.fixture
def situation(cast: Cast) -> None:
    """Jobs of two tenants in every state that a card could count by mistake."""
    for _ in range(3):
        dead_letter()
    dead_letter(ambiguous=True, policies=policies("critical"), queue="mail")
    dead_letter(tenant="t-b", queue="mail")
    dead_letter(tenant="t-b", ambiguous=True, queue="", task="shop.charge")
    taken = dead_letter(task="shop.taken", policies=policies("critical"))
    acknowledge_incident(incident_id=taken.incident_id, by=cast.ada, key="take")
    closed = dead_letter(task="shop.closed")
    resolve_incident(
        incident_id=closed.incident_id, by=cast.ada, key="close", code="loss_accepted", summary="gone", unrepaired=1
    )
    retried = dead_letter(task="shop.retried")
    retry_letter(letter_id=retried.id, by=cast.ada, key="retry")
    old = dead_letter(task="shop.old")
    DeadLetter.objects.filter(id=old.id).update(last_seen_at=database_now() - 3 * HOUR)


@pytest.mark.django_db
@pytest.mark.parametrize("name", ["ada", "olga", "bram", "vera"])
def test_each_number_is_that_of_the_list_it_links_to(name: str, situation: None, cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(getattr(cast, name))
    found = cards(client)
    assert len(found) == 5
    for noun, card in found.items():
        assert rows_of(client, unescape(card["url"])) == int(card["number"]), noun
    html = client.get("/ops/").content.decode()
    by_queue = re.findall(r'<a href="([^"]+queue=[^"]+)">[^<]+</a></th>\s*<td[^>]*>([^<]+)</td>', html)
    assert by_queue
    by_holder = re.findall(r'<a href="([^"]+)">(?:Nobody|ada \(you\))</a></th>\s*<td[^>]*>([^<]+)</td>', html)
    assert len(by_holder) == (2 if name == "ada" else 1)
    for url, number in (*by_queue, *by_holder):
        assert rows_of(client, unescape(url)) == int(number)


@pytest.mark.django_db
def test_the_numbers_are_what_the_situation_is(situation: None, cast: Cast, sign_in: SignIn) -> None:
    """Taken, closed, retried and old jobs are counted where they belong and nowhere else."""
    assert list(numbers(sign_in(cast.ada)).values()) == ["5", "1", "8", "2", "9"]
    text = text_of(sign_in(cast.ada).get("/ops/").content.decode())
    assert "2 more are taken" in text
    assert "of the 8" in text
    assert "in 7 incidents not closed" in text


@pytest.mark.django_db
def test_a_page_shows_nothing_of_another_tenant(situation: None, cast: Cast, sign_in: SignIn) -> None:
    """GRA-02: neither numbers nor names, also not from what was read for somebody else a moment ago."""
    now = database_now()
    count(now, "shop.of_default", received=5, failed=5)
    count(now, "shop.of_b", tenant="t-b", received=7, failed=7)
    html = {who: sign_in(getattr(cast, who)).get("/ops/").content.decode() for who in ("ada", "bram", "olga")}
    assert "shop.of_default" not in html["bram"]
    assert "shop.of_b" in html["bram"]
    assert "t-b" not in text_of(html["olga"])
    assert "shop.of_b" not in html["olga"]
    assert "INC-" in html["bram"]
    shown = {incident.number for incident in Incident.objects.filter(tenant="t-b")}
    assert {int(number) for number in re.findall(r"INC-0*(\d+)", html["bram"])} <= shown


@pytest.mark.django_db
def test_a_grant_over_one_actor_counts_that_actors_jobs(cast: Cast, sign_in: SignIn) -> None:
    """B1: jobs of the actor, no incident, and no count of the whole tenant."""
    dead_letter(actor_type="customer", actor_id="7")
    dead_letter(actor_type="customer", actor_id="8", ambiguous=True)
    one = make_operator("one")
    give(one, Action.INSPECT, tenant="default", actor_type="customer", actor_id="7")
    count(database_now(), "shop.send_mail", received=9, failed=9)
    client = sign_in(one)
    assert list(numbers(client).values()) == ["0", "0", "1", "0", "1"]
    for card in cards(client).values():
        assert rows_of(client, unescape(card["url"])) == int(card["number"])
    html = client.get("/ops/").content.decode()
    assert "INC-" not in html
    assert "No job was received" in html


@pytest.mark.django_db
def test_who_may_see_nothing_is_told_what_to_ask_for(cast: Cast, sign_in: SignIn) -> None:
    dead_letter()
    answer = sign_in(cast.nobody).get("/ops/")
    text = text_of(answer.content.decode())
    assert answer.status_code == 200
    assert "hold no permission to see failed jobs" in text
    assert "to see inspect to repair incidents.acknowledge, dead-letters.retry" in text
    assert "shop.send_mail" not in text
    assert "data-live=" not in answer.content.decode()


@pytest.mark.django_db
def test_beyond_the_bounds_a_number_says_so(
    situation: None, cast: Cast, sign_in: SignIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SCA-01: "2+" instead of a count; the incidents' own counts still tell how many jobs there are."""
    monkeypatch.setattr(overview, "COUNTED_JOBS", 2)
    found = cards(sign_in(cast.ada))
    assert [card["number"] for noun, card in found.items() if "may already" not in noun] == ["5", "1", "8", "2+"]
    assert found["… that may already have happened"]["scope"] == "of the first 2 counted"
    monkeypatch.setattr(overview, "COUNTED_INCIDENTS", 3)
    shown = list(numbers(sign_in(cast.ada)).values())
    assert (shown[:3], shown[4]) == (["2+", "1", "2+"], "2+")
    assert "a number with + was counted so far and no further" in sign_in(cast.ada).get("/ops/").content.decode()


@pytest.mark.django_db
def test_where_more_await_their_result_than_are_counted_the_rest_is_at_most_so_many(
    situation: None, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    for letter in DeadLetter.objects.filter(incident__state="open", tenant="default")[:3]:
        DeadLetter.objects.filter(id=letter.id).update(state="retrying")
    monkeypatch.setattr(overview, "COUNTED_JOBS", 2)
    overview.forget()
    assert overview_for(cast.ada).cards[2].number == "at most 7"


@pytest.mark.django_db
def test_a_letter_that_was_closed_with_an_earlier_episode_is_not_counted(cast: Cast, sign_in: SignIn) -> None:
    letter = dead_letter()
    resolve_incident(
        incident_id=letter.incident_id, by=cast.ada, key="k", code="loss_accepted", summary="gone", unrepaired=1
    )
    assert numbers(sign_in(cast.ada))["Failed jobs needing a decision"] == "0"
    dead_letter()
    assert Incident.objects.get().episode == 2
    assert numbers(sign_in(cast.ada))["Failed jobs needing a decision"] == "1"


# -- the balance -------------------------------------------------------------------------------------------------------


def lines(cast: Cast) -> dict[str, Any]:
    overview.forget()
    found = overview_for(cast.ada)
    return {line.task: line for line in (*found.tasks, found.quiet, found.all_tasks) if line is not None}


def adds_up(line: Any) -> bool:
    ended = line.succeeded + line.failed + line.retried + line.otherwise
    return bool(line.before + line.received == ended + line.in_flight)


@pytest.mark.django_db
def test_what_was_received_has_ended_or_is_in_flight(cast: Cast, sign_in: SignIn) -> None:
    now = database_now()
    worker()
    count(now - 2 * HOUR, received=100, succeeded=90, failed=4)  # six were in flight before
    count(now - seconds(120), received=20, succeeded=10, failed=3, lost=1, retried=2, revoked=1, returned=1, ignored=1)
    count(now - seconds(60), received=5, succeeded=5)
    count(now - seconds(60), "shop.quiet", received=7, succeeded=7)
    found = lines(cast)
    line = found["shop.send_mail"]
    assert (line.before, line.received, line.succeeded, line.failed, line.retried, line.otherwise) == (
        6, 25, 15, 4, 2, 3,
    )  # fmt: skip
    assert (line.in_flight, line.missing) == (7, 0)
    assert found["1 task without a failure"].received == 7
    assert all(adds_up(one) for one in found.values())
    assert found["All tasks"].received == 32
    text = text_of(sign_in(cast.ada).get("/ops/").content.decode())
    assert "balances" in text
    assert "missing" not in text


@pytest.mark.django_db
def test_what_no_worker_reports_on_is_missing(cast: Cast, sign_in: SignIn) -> None:
    now = database_now()
    worker(age=300)
    count(now - seconds(60), received=20, succeeded=16)
    assert lines(cast)["shop.send_mail"].missing == 4
    text = text_of(sign_in(cast.ada).get("/ops/").content.decode())
    assert "missing 4" in text
    assert "Without host-w1, silent since" in text
    worker("w2", source="another")
    machinery_read_afresh()
    assert lines(cast)["shop.send_mail"].missing == 4
    worker("w3")
    machinery_read_afresh()
    found = lines(cast)["1 task without a failure"]
    assert (found.missing, found.in_flight) == (0, 4)


def machinery_read_afresh() -> None:
    from opsconsole.console import machinery as module

    module.forget()


@pytest.mark.django_db
def test_more_ends_than_receipts_are_missing_but_for_the_first_hours(cast: Cast) -> None:
    now = database_now()
    worker()
    first = now.replace(minute=0, second=0, microsecond=0) - 23 * HOUR
    count(first, succeeded=5)  # five were received before the hours that are looked at
    count(now, received=10, succeeded=10)
    found = overview_for(cast.ada)
    assert found.all_tasks.missing == 0
    assert adds_up(found.all_tasks)
    count(now - seconds(60), received=0, succeeded=3)
    assert lines(cast)["All tasks"].missing == 3


@pytest.mark.django_db
def test_a_task_that_fails_links_to_an_incident_that_nobody_is_on_and_to_the_others(
    cast: Cast, sign_in: SignIn
) -> None:
    quiet = dead_letter()
    loud = dead_letter(queue="other", error=TIMED_OUT)
    dead_letter(error=TIMED_OUT)
    count(database_now(), received=3, failed=3)
    worker()
    assert Incident.objects.count() == 2
    line = lines(cast)["shop.send_mail"]
    assert (line.incident.id, line.more_incidents) == (loud.incident_id, 1), "equally bad: the loudest"
    Incident.objects.filter(id=quiet.incident_id).update(severity=Severity.CRITICAL)
    assert lines(cast)["shop.send_mail"].incident.id == quiet.incident_id, "the worst"
    acknowledge_incident(incident_id=quiet.incident_id, by=cast.ada, key="take")
    assert lines(cast)["shop.send_mail"].incident.id == loud.incident_id, "nobody is on it"
    client = sign_in(cast.ada)
    html = client.get("/ops/").content.decode()
    (more,) = re.findall(r'<a class="ops-name" href="([^"]+)">\+1 more</a>', html)
    assert rows_of(client, unescape(more)) == 2


@pytest.mark.django_db
def test_an_incident_that_is_named_is_a_link_to_it(
    cast: Cast, sign_in: SignIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the cards, and where more incidents are counted than shown; of equally loud ones the worst is named."""
    dead_letter()
    worst = dead_letter(task="shop.charge", policies=policies("critical"))
    client = sign_in(cast.ada)
    found = cards(client)
    page = f'href="/ops/incidents/{worst.incident_id}/"'
    assert page in found["Critical, nobody on it"]["scope"]
    assert page in found["Jobs failed in the last hour"]["scope"]
    assert "1 of them in" in found["Jobs failed in the last hour"]["scope"]
    monkeypatch.setattr(overview, "SHOWN_LOUDEST", 1)
    overview.forget()
    html = client.get("/ops/").content.decode()
    assert '<a href="/ops/incidents/?state=unresolved">1 more incident with 1 job' in html


# -- charts ------------------------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_the_hours_show_failures_work_done_and_releases(cast: Cast, sign_in: SignIn) -> None:
    now = database_now()
    this_hour = now.replace(minute=0, second=0, microsecond=0)
    worker("a", release="r411", started_at=now - 70 * HOUR)
    worker("b", release="r412", started_at=now - 5 * HOUR, stopped_at=now - 4 * HOUR)
    worker("c", release="r412", started_at=now - 4 * HOUR)
    count(this_hour - 23 * HOUR, received=3, succeeded=1, failed=2)
    count(this_hour - 30 * HOUR, received=3, failed=3)
    count(this_hour - 2 * HOUR, received=2_010, succeeded=10, failed=1_999, lost=1)
    count(now, received=7, succeeded=3, retried=4)
    html = sign_in(cast.ada).get("/ops/").content.decode()
    found = overview_for(cast.ada)
    assert (found.failed.peak, found.failed.total, found.done.total) == (2_000, 2_002, 14)
    assert [name for name, _at in found.releases] == ["r412"]
    peak = this_hour - 2 * HOUR
    assert (
        f'aria-label="Final failures per hour, last 24 hours: peak 2,000 ({peak:%d %b %H:%M} to {peak + HOUR:%H:%M}), '
        'total 2,002."' in html
    )
    assert html.count('role="img"') == 2
    assert html.count("<rect ") == html.count("</title></rect>") == 48
    assert f"release r412, {now - 5 * HOUR:%H:%M}" in html
    assert "style=" not in html
    assert re.search(rf"{peak:%d %b %H:%M}</th><td class=\"ops-num\">2,000</td><td class=\"ops-num\">10</td>", html)


@pytest.mark.django_db
def test_hours_are_those_of_utc_whatever_the_projects_time_zone(cast: Cast, sign_in: SignIn, settings: Any) -> None:
    now = database_now()
    this_hour = now.replace(minute=0, second=0, microsecond=0)
    for minute in (0, 20, 40):
        count(this_hour - 2 * HOUR + timedelta(minutes=minute), received=1, failed=1)
    settings.TIME_ZONE, settings.LANGUAGE_CODE = "Asia/Kolkata", "de"
    html = sign_in(cast.ada).get("/ops/").content.decode()
    start = this_hour - 2 * HOUR
    assert f'{start:%d %b %H:%M}</th><td class="ops-num">3</td>' in html
    found = overview_for(cast.ada)
    assert f"last 5 minutes, {found.now_from:%H:%M} to {found.at:%H:%M} UTC" in html
    assert not re.search(r'(?:x|y|width|height)="[^"]*,', html)


def test_a_bar_is_as_tall_as_its_share_and_never_nothing() -> None:
    start = datetime(2026, 11, 30, tzinfo=timezone.get_default_timezone())
    starts = [start + HOUR * place for place in range(4)]
    made = charts.bar_chart(
        noun="failed jobs", starts=starts, step=HOUR, values=[0, 1, 5_000, 10_000], height=100,
        marks=[(start + 2 * HOUR, "release 2"), (start - HOUR, "before"), (start + 4 * HOUR, "release 3")],
    )  # fmt: skip
    assert [bar.height for bar in made.bars] == [0, charts.LEAST_HEIGHT, 50, 100]
    assert [bar.y + bar.height for bar in made.bars] == [100] * 4
    assert [(mark.x, mark.anchor) for mark in made.marks] == [(360, "start"), (720, "end")]
    assert made.bars[2].title == "30 Nov 02:00 to 03:00: 5,000 failed jobs"
    empty = charts.bar_chart(noun="failed jobs", starts=starts, step=HOUR, values=[0] * 4, height=100)
    assert (empty.peak, empty.total, {bar.height for bar in empty.bars}) == (0, 0, {0})


def test_the_last_hours_end_with_the_running_one() -> None:
    now = datetime.fromisoformat("2026-11-30T03:14:20+00:00")
    found = charts.hours_before(now, 48)
    assert (found[0].isoformat(), found[-1].isoformat(), len(found)) == (
        "2026-11-28T04:00:00+00:00", "2026-11-30T03:00:00+00:00", 48,
    )  # fmt: skip


# -- failed jobs by queue ----------------------------------------------------------------------------------------------


def _by_queue(by: Operator) -> dict[str, tuple[int, int, int, int, int]]:
    overview.forget()
    forget_served()
    return {
        line.queue: (line.jobs, line.safe, line.ambiguous, line.not_declared, line.cannot)
        for line in (*overview_for(by).by_queue, overview_for(by).all_queues)
    }


@pytest.mark.django_db
@pytest.mark.parametrize("few", [25, 0])
def test_jobs_by_queue_are_judged_as_the_lists_judge_them(
    few: int, cast: Cast, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    """Nobody serves the task, or it is too old: what can't be retried is not called safe, however many there are."""
    monkeypatch.setattr(judged, "FULLY_CHECKED", few)
    dead_letter(queue="mail")
    dead_letter(queue="mail", ambiguous=True)
    dead_letter(queue="bulk", task="shop.gone")
    worker("w1", queues=json.dumps(["mail", "bulk"]), tasks=json.dumps({"shop.send_mail": "(*args, **kwargs)"}))
    assert _by_queue(cast.ada) == {"mail": (2, 1, 1, 0, 0), "bulk": (1, 0, 0, 0, 1), "": (3, 1, 1, 0, 1)}
    settings.OPSCONSOLE_TASK_POLICIES = [{"pattern": "shop.send_mail", "max_age_seconds": 60}]
    assert _by_queue(cast.ada)["mail"] == (2, 1, 1, 0, 0)
    DeadLetter.objects.filter(queue="mail", outcome_class="safe").update(first_seen_at=database_now() - HOUR)
    assert _by_queue(cast.ada)["mail"] == (2, 0, 1, 0, 1)


@pytest.mark.django_db
def test_a_job_whose_arguments_do_not_fit_is_not_called_safe(cast: Cast) -> None:
    dead_letter(queue="mail")
    worker("w1", queues=json.dumps(["mail"]), tasks=json.dumps({"shop.send_mail": describe_signature(lambda: None)}))
    assert _by_queue(cast.ada)["mail"] == (1, 0, 0, 0, 1)


@pytest.mark.django_db
def test_who_sees_jobs_of_one_actor_is_not_told_that_they_are_in_no_incident(cast: Cast) -> None:
    one = make_operator("one")
    give(one, Action.INSPECT, tenant="default", actor_type="customer", actor_id="7")
    dead_letter(actor_type="customer", actor_id="7")
    card = overview_for(one).cards[2]
    assert (card.number, card.scope) == ("1", "among the jobs that you may see")
    assert overview_for(cast.ada).cards[2].scope == "in 1 incident not closed"


# -- broker queues -----------------------------------------------------------------------------------------------------


@pytest.fixture
def apps(monkeypatch: pytest.MonkeyPatch) -> dict[str, Asker]:
    """The brokers that this process may ask, by source; each test fills in its own."""
    found: dict[str, Asker] = {}
    monkeypatch.setattr(queues, "askers", lambda: found)
    return found


def served(*named: tuple[str, str, int]) -> Machinery:
    return Machinery(
        known=1, reporting=1, silent=(), captured_at=None, waiting_bytes=0, waiting_seconds=0, dropped=0, troubles=0,
        queues=tuple(ServedQueue(source=source, name=name, consumers=number) for source, name, number in named),
    )  # fmt: skip


def app_of(url: str) -> Celery:
    made = Celery("asked", broker=url, set_as_current=False)
    made.conf.task_default_queue = "mail"
    return made


def settled(asker: Asker, names: list[str]) -> Heard:
    """Return what was heard once the thread that asks has come back."""
    asker.ask(names)
    if asker._thread is not None:
        asker._thread.join(20)
    return asker.heard


def test_an_empty_queue_of_a_store_has_nothing_waiting(apps: dict[str, Asker]) -> None:
    apps["tests"] = Asker(app_of("memory://"))
    (row,) = queues.queue_rows(served(("tests", "mail", 2)))
    assert (row.waiting, row.consumers, row.is_stuck, row.note) == (0, 2, False, "")


def test_redis_is_asked_how_many_wait(redis_url: str, queue_name: str) -> None:
    app = app_of(redis_url)
    for _ in range(3):
        app.send_task("shop.x", queue=queue_name)
    app.send_task("shop.x", queue=queue_name, priority=9)
    found = settled(Asker(app), [queue_name, f"{queue_name}-empty"])
    assert found.depths[queue_name] == Depth(waiting=4)
    assert found.depths[f"{queue_name}-empty"] == Depth(waiting=0)
    app.close()


def test_rabbitmq_is_asked_without_declaring_anything(rabbitmq_url: str, queue_name: str) -> None:
    app = app_of(rabbitmq_url)
    app.conf.task_create_missing_queues = True
    for _ in range(2):
        app.send_task("shop.x", queue=queue_name)
    missing = f"a-{queue_name}-missing"
    found = settled(Asker(app), [missing, queue_name])
    assert found.depths[queue_name] == Depth(waiting=2, consumers=0)
    assert missing not in found.depths
    assert settled(Asker(app), [missing, queue_name]).depths.keys() == found.depths.keys()
    app.close()


def test_a_queue_in_which_something_waits_and_nobody_takes_it_comes_first(apps: dict[str, Asker]) -> None:
    asker = apps["tests"] = Asker(app_of("memory://"))
    asker._asked_at = time.monotonic()
    asker.heard = Heard(depths={"busy": Depth(waiting=900), "bulk": Depth(waiting=57), "idle": Depth(waiting=0)})
    rows = queues.queue_rows(served(("tests", "busy", 3), ("tests", "bulk", 0), ("else", "far", 2)))
    assert [(row.name, row.waiting, row.is_stuck) for row in rows] == [
        ("bulk", 57, True), ("busy", 900, False), ("idle", 0, False), ("far", None, False),
    ]  # fmt: skip
    assert rows[-1].consumers == 2
    assert "no Celery app of source else" in rows[-1].note


def test_a_broker_that_refuses_is_unknown(apps: dict[str, Asker]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    asker = apps["tests"] = Asker(app_of(f"redis://127.0.0.1:{port}/0"))
    settled(asker, ["mail"])
    (row,) = queues.queue_rows(served(("tests", "mail", 1)))
    assert (row.waiting, row.consumers) == (None, 1)
    assert "has not answered since" in row.note


@pytest.mark.parametrize("scheme", ["redis", "amqp"])
def test_a_broker_that_hangs_hangs_no_page(scheme: str, apps: dict[str, Asker]) -> None:
    """It accepts and never says a word: the page waits a third of a second once, and one thread for seconds."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        asker = apps["tests"] = Asker(app_of(f"{scheme}://127.0.0.1:{silent.getsockname()[1]}//"))
        started = time.monotonic()
        (row,) = queues.queue_rows(served(("tests", "mail", 1)))
        assert time.monotonic() - started < 2
        assert (row.waiting, row.note) == (None, "The broker has been asked; no answer yet.")
        for _ in range(20):
            queues.queue_rows(served(("tests", "mail", 1)))
        assert len([one for one in threading.enumerate() if one.name == "opsconsole-queue-depths"]) == 1
        assert asker._thread is not None
        asker._thread.join(25)
        assert not asker._thread.is_alive()
    (row,) = queues.queue_rows(served(("tests", "mail", 1)))
    assert "has not answered since" in row.note


@pytest.mark.django_db
def test_the_page_says_what_waits_for_nobody_and_what_is_unknown(
    cast: Cast, sign_in: SignIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [
        QueueRow(source="tests", name="bulk", waiting=57, consumers=0),
        QueueRow(source="tests", name="legacy", waiting=None, consumers=None, note="The broker has not answered."),
    ]
    monkeypatch.setattr(overview, "queue_rows", lambda _machinery: found)
    text = text_of(sign_in(cast.ada).get("/ops/").content.decode())
    assert "57 waiting, nobody consuming" in text
    assert "legacy The broker has not answered. unknown unknown" in text


# -- machinery ---------------------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_the_machinery_knows_who_serves_which_queue_and_since_when_a_release(cast: Cast) -> None:
    now = database_now()
    worker("a", queues=json.dumps(["mail", "bulk"]), release="1.0")
    worker("b", queues=json.dumps(["mail"]), release="1.1", started_at=now - HOUR)
    worker("c", age=500, queues=json.dumps(["bulk"]))
    worker("d", queues=json.dumps(["gone"]), stopped_at=now)
    found = machinery()
    assert [(one.name, one.consumers) for one in found.queues] == [("bulk", 1), ("gone", 0), ("mail", 2)]
    assert [one.name for one in found.releases] == ["1.0", "1.1"]
    assert found.sources == {"tests"}
    assert [host for host, _since in found.silent_since] == ["host-c"]


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_streams_are_shown_to_who_sees_a_record_and_to_nobody_else(cast: Cast, sign_in: SignIn) -> None:
    """A7, GRA-01."""
    assert 'id="streams"' not in sign_in(cast.ada).get("/ops/").content.decode()
    overview.forget()
    job("retrying")
    job("succeeded")
    email("failed")
    run("repair_required")
    answer = sign_in(cast.olga).get("/ops/")
    lines = {line.name: line for line in answer.context["overview"].streams}
    assert set(lines) == {"Routing", "E-mails", "Workflow runs"}
    routing = lines["Routing"]
    assert (routing.total, routing.retrying, routing.failed) == (2, 1, 0)
    assert (lines["E-mails"].failed, lines["Workflow runs"].note) == (1, "1 to be repaired")
    text = answer.content.decode()
    assert 'href="/ops/jobs/?show=&amp;kind=route_report&amp;state=retrying">1</a>' in text
    assert 'href="/ops/jobs/?show=&amp;kind=deliver_email">E-mails</a>' in text
    assert 'id="streams"' not in sign_in(cast.bram).get("/ops/").content.decode()


@pytest.mark.django_db
def test_each_number_of_a_stream_leads_to_as_many_jobs(cast: Cast, sign_in: SignIn) -> None:
    """A7: a number and the list behind it can't disagree."""
    for state, count in {"pending": 1, "running": 2, "enqueued": 1, "retrying": 4, "dead": 5, "succeeded": 6}.items():
        for _ in range(count):
            job(state)
    job(kind="fetch_evidence")
    client = sign_in(cast.olga)
    text = client.get("/ops/").content.decode()
    found = re.findall(r'data-label="[^"]+"><a href="(/ops/jobs/[^"]+)">(\d+)</a>', text)
    assert [int(number) for _, number in found] == [19, 1, 3, 4, 5]
    for address, number in found:
        rows = client.get(address.replace("&amp;", "&")).context["cl"].result_list
        assert len(rows) == int(number), address


@pytest.mark.django_db
def test_a_stream_that_moves_on_makes_another_page(cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.olga)
    made = job()
    before = client.get("/ops/live/overview/")["ETag"]
    Job.objects.filter(id=made.id).update(state="dead", finished_at=made.created_at)
    overview.forget()
    assert client.get("/ops/live/overview/")["ETag"] != before


# -- what it costs -----------------------------------------------------------------------------------------------------


def _queries(client: Client, path: str, **headers: Any) -> list[str]:
    with CaptureQueriesContext(connection) as found:
        client.get(path, headers=headers)
    return [query["sql"] for query in found.captured_queries]


@pytest.mark.django_db
def test_the_page_costs_few_queries_and_little_weight(situation: None, cast: Cast, sign_in: SignIn) -> None:
    """At most eight beside those about who asks (session, user) and what a process keeps: workers and policies."""
    client = sign_in(cast.ada)
    for number in range(40):
        count(database_now(), f"shop.task_{number}", received=10, failed=1, succeeded=9)
    client.get("/ops/")
    overview.forget()
    found = _queries(client, "/ops/")
    assert len(found) - 2 <= 8
    assert len(client.get("/ops/").content) < 60_000
    assert len(_queries(client, "/ops/")) == 3, "within five seconds nothing is read again"


@pytest.mark.django_db
def test_a_page_that_has_not_changed_is_read_by_its_first_part(situation: None, cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.ada)
    client.get("/ops/")
    for kept in overview._scopes.values():
        kept.until = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overview, "VERSION_LASTS", timedelta(days=1))
        etag = client.get("/ops/live/overview/")["ETag"]
        for kept in overview._scopes.values():
            kept.until = 0
        found = _queries(client, "/ops/live/overview/", if_none_match=etag)
    assert len(found) <= 4 + 3
    assert not [one for one in found if "ops_deadletters_deadletter" in one]


# -- the database is down ----------------------------------------------------------------------------------------------

ASK = """
import json, os, sys, time
import django
django.setup()
from django.conf import settings
from django.test import Client
settings.ALLOWED_HOSTS = ["testserver"]
client = Client()
client.cookies[settings.SESSION_COOKIE_NAME] = "a" * 32
answers = []
for method, path in (("get", "/ops/"), ("get", "/ops/incidents/"), ("get", "/ops/live/overview/"),
                     ("get", "/ops/login/"), ("post", "/ops/incidents/01890000-0000-7000-8000-000000000000/take/")):
    answer = getattr(client, method)(path)
    answers.append([path, answer.status_code, dict(answer.headers), answer.content.decode()])
print(json.dumps(answers))
"""


@pytest.mark.parametrize("database", ["postgresql://nobody@127.0.0.1:1/none", "sqlite:////nowhere/at/all.sqlite3"])
def test_a_database_that_cannot_be_reached_is_a_page_that_asks_nothing(database: str, tmp_path: Path) -> None:
    """Every page of the console: 503, the policy, no link to what would ask again, and what a POST means."""
    done = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, timeout=60, check=True,
        env={
            "PYTHONPATH": str(Path(__file__).parents[2]), "DJANGO_SETTINGS_MODULE": "opsconsole.settings.base",
            "OPSCONSOLE_DATABASE_URL": database, "OPSCONSOLE_VAR_DIR": str(tmp_path), "PATH": "/usr/bin:/bin",
        },
    )  # fmt: skip
    for path, status, headers, html in json.loads(done.stdout):
        assert status == 503, path
        assert headers["Retry-After"] == "10"
        assert "script-src 'self'" in headers["Content-Security-Policy"]
        assert "no-store" in headers["Cache-Control"]
        text = text_of(html)
        assert "The database does not answer" in text
        assert "Workers do not need this database to run jobs" in text
        assert not re.findall(r"<(a|form|script)\b", html), path
        assert headers["X-Request-ID"] in text
        assert ("It is not known whether what you sent was done" in text) == path.endswith("/take/")


@pytest.mark.django_db
def test_a_statement_that_is_wrong_is_no_database_that_is_down(
    cast: Cast, sign_in: SignIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug, and a migration that was not run, must reach whoever is told of errors."""

    def ask(*_: object) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT nothing_of_the_kind FROM ops_incidents_incident")

    monkeypatch.setattr(overview, "count_unresolved", ask)
    with pytest.raises(DatabaseError, match="nothing_of_the_kind"):
        sign_in(cast.ada).get("/ops/")


@pytest.mark.django_db
def test_the_etag_is_each_operators_own(cast: Cast) -> None:
    """Two who see the same share what was read, but the page marks who is asking."""
    found = overview_for(cast.ada)
    assert overview_for(cast.vera) is found
    assert etag_of(found, cast.ada, machinery()) != etag_of(found, cast.vera, machinery())


@pytest.mark.django_db
def test_hostile_names_show_as_text(cast: Cast, sign_in: SignIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-01: whatever a worker, a message or a broker may call something."""
    hostile = '"><script>alert(1)</script><img src=x onerror=alert(1)>'
    dead_letter(task=f"shop.{hostile}", queue=hostile, error=TIMED_OUT)
    worker(host=hostile, release=hostile, queues=json.dumps([hostile]), age=300)
    count(database_now(), f"shop.{hostile}", received=2, failed=1)
    found = [QueueRow(source="tests", name=hostile, waiting=1, consumers=0, note=hostile)]
    monkeypatch.setattr(overview, "queue_rows", lambda _machinery: found)
    client = sign_in(cast.ada)
    for path in ("/ops/", "/ops/live/overview/"):
        html = client.get(path).content.decode()
        assert "<script>" not in html
        assert "<img" not in html
        assert "&lt;script&gt;" in html


@pytest.mark.django_db
def test_severity_colours_have_words(cast: Cast, sign_in: SignIn) -> None:
    dead_letter(policies=policies("critical"))
    assert Incident.objects.get().severity == Severity.CRITICAL
    html = sign_in(cast.ada).get("/ops/").content.decode()
    assert '<span class="ops-pill ops-severity-critical">Critical</span>' in html


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("tenants", "part", "said"),
    [
        (["*"], False, ""),
        (["t-b"], False, "You see tenant t-b only."),
        (["t-b", "default"], True, "You see tenants default and t-b, and parts of others, only."),
        ([f"t{number}" for number in range(6)], False, "You see tenants t0, t1, t2 and 3 more only."),
        ([], True, "You see parts of tenants only."),
    ],
)
def test_who_does_not_see_every_tenant_is_told_so(
    cast: Cast, sign_in: SignIn, tenants: list[str], part: bool, said: str
) -> None:
    """With the wrong tenant nothing burns, which must not read as good news."""
    dead_letter(actor_type="customer", actor_id="7")
    one = make_operator("one")
    for tenant in tenants:
        give(one, Action.INSPECT, tenant=tenant)
    if part:
        give(one, Action.INSPECT, tenant="shop", actor_type="customer", actor_id="7")
    client = sign_in(one)
    overview.forget()
    for path in ("", "live/overview/", "incidents/", "dead-letters/", "repairs/", "jobs/"):
        found = re.findall(r"You see .*? only\.", text_of(client.get(f"/ops/{path}").content.decode()))
        assert found == ([said] if said else []), path
