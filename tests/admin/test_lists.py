"""Lists: pages by key, few queries, nothing counted, and no field but those offered."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from deadletters import conf
from deadletters.admin import call_words
from deadletters.arguments import describe_signature
from deadletters.models import DeadLetter, WorkerNode
from grants.actions import Action
from grants.models import AuditEvent
from incidents.models import Incident, Severity
from incidents.services import resolve_incident
from opsconsole.core.database import database_now
from repairs.services import discard_letter, retry_incident, retry_letter
from tests.admin.conftest import SignIn
from tests.admin.tools import text_of
from tests.cast import Cast, give
from tests.factories import dead_letter, seconds

pytestmark = pytest.mark.django_db

QUERIES = {
    # path: queries of a signed-in operator with a warm machinery line; session and user are two of them.
    # The tabs are counted; open jobs, what is newest and one's own views looked at: one query each.
    "/ops/incidents/": 8,
    "/ops/dead-letters/": 8,  # the tabs are counted, the messages opened and one's own views looked at
    "/ops/repairs/": 5,
    "/ops/redrives/": 5,
    "/ops/holds/": 7,
    "/ops/jobs/": 5,
    "/ops/audit/": 6,  # one of them writes down that it was read
    "/ops/workers/": 4,
    "/ops/permissions/": 7,
    "/ops/tokens/": 4,
    "/ops/": 3,  # read again after five seconds: test_overview.py
}
LONGEST = {"incident": 10, "dead letter": 10}


def _numbers(answer: Any) -> list[int]:
    return [row.number for row in answer.context["cl"].result_list]


def _queries(client: Client, path: str) -> list[str]:
    """Return the statements of one page, of which none skips, and none counts without a limit to what it looks at.

    PostgreSQL is also asked for its clock.
    """
    with CaptureQueriesContext(connection) as found:
        assert client.get(path).status_code == 200
    texts = [query["sql"] for query in found.captured_queries]
    assert not [text for text in texts if "COUNT(" in text.upper() or " OFFSET " in text.upper()]
    assert not [text for text in texts if text.count("SUM(1)") > text.count(" LIMIT ")]
    return [text for text in texts if "clock_timestamp" not in text]


def _make_incidents(count: int) -> None:
    model = dead_letter().incident
    Incident.objects.bulk_create(
        Incident(
            number=1_000 + number, tenant="default", source="tests", key=f"k{number}", title=f"incident {number}",
            severity=list(Severity)[number % 4], first_seen_at=model.first_seen_at, opened_at=model.first_seen_at,
            last_seen_at=model.last_seen_at,
        )
        for number in range(count)
    )  # fmt: skip


def test_incidents_are_listed_by_severity_then_newest(cast: Cast, sign_in: SignIn) -> None:
    """A8."""
    _make_incidents(12)
    shown = sign_in(cast.ada).get("/ops/incidents/").context["cl"].result_list
    keys = [(row.severity, row.last_seen_at, row.id) for row in shown]
    assert len(keys) == 13
    assert keys == sorted(keys, reverse=True)


def test_pages_by_key_show_every_incident_once_forwards_and_back(cast: Cast, sign_in: SignIn) -> None:
    """SCA-01."""
    _make_incidents(119)
    client = sign_in(cast.ada)
    answer = client.get("/ops/incidents/")
    pages = [_numbers(answer)]
    while address := answer.context["cl"].next_page:
        answer = client.get(f"/ops/incidents/{address}")
        pages.append(_numbers(answer))
    assert [len(page) for page in pages] == [50, 50, 20]
    assert len({number for page in pages for number in page}) == 120
    back = client.get(f"/ops/incidents/{answer.context['cl'].previous_page}")
    assert _numbers(back) == pages[1]


def test_a_row_that_arrives_meanwhile_moves_no_page(cast: Cast, sign_in: SignIn) -> None:
    _make_incidents(60)
    client = sign_in(cast.ada)
    first = client.get("/ops/incidents/")
    rest = {row.number for row in Incident.objects.all()} - set(_numbers(first))
    Incident.objects.filter(number=_numbers(first)[-1]).update(title="renamed")
    worst = Incident.objects.get(number=1_003)
    Incident.objects.filter(id=worst.id).update(severity=Severity.CRITICAL)
    second = client.get(f"/ops/incidents/{first.context['cl'].next_page}")
    assert set(_numbers(second)) == rest - {1_003}


@pytest.mark.parametrize("path", QUERIES)
def test_a_list_has_few_queries_and_counts_nothing(path: str, cast: Cast, sign_in: SignIn) -> None:
    """SCA-01: the same number of queries however many rows there are."""
    dead_letter()
    retry_incident(
        incident_id=Incident.objects.get().id, by=cast.ada, key="k", letter_ids=[DeadLetter.objects.get().id]
    )
    for _ in range(5):
        dead_letter()
    client = sign_in(cast.ada)
    client.get(path)
    assert len(_queries(client, path)) == QUERIES[path]


def test_the_pages_of_one_record_have_few_queries_and_count_nothing(cast: Cast, sign_in: SignIn) -> None:
    for _ in range(30):
        dead_letter()
    letter = dead_letter()
    client = sign_in(cast.ada)
    for path, most in (
        (f"/ops/incidents/{letter.incident_id}/", LONGEST["incident"]),
        (f"/ops/dead-letters/{letter.id}/", LONGEST["dead letter"]),
        (f"/ops/incidents/{letter.incident_id}/retry/", LONGEST["incident"]),
    ):
        client.get(path)
        assert len(_queries(client, path)) <= most


def _counts(client: Client, query: str = "") -> dict[str, str]:
    return {tab.key: tab.count for tab in client.get(f"/ops/dead-letters/{query}").context["tabs"]}


def test_the_tabs_of_failed_jobs_say_how_many_each_has(
    cast: Cast, sign_in: SignIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SCA-01: one statement, every part of which stops at a bound, and the bound is said."""
    monkeypatch.setattr("opsconsole.core.admin.MOST_COUNTED", 3)
    letters = [dead_letter() for _ in range(6)]
    discard_letter(letter_id=letters[0].id, by=cast.ada, key="0", reason="nobody wants it")
    retry_letter(letter_id=letters[1].id, by=cast.ada, key="1")
    other = dead_letter(task="shop.other", tenant="t-b")
    closed = dead_letter(task="shop.closed").incident
    resolve_incident(incident_id=closed.id, by=cast.ada, key="2", code="loss_accepted", summary="nobody", unrepaired=1)
    client = sign_in(cast.ada)
    assert _counts(client) == {
        "decision": "3+", "held": "0", "retrying": "1", "repaired": "0", "already_done": "0", "discarded": "1",
        "overtaken": "0", "all": "3+",
    }  # fmt: skip
    (asked,) = [text for text in _queries(client, "/ops/dead-letters/") if "SUM(1)" in text]
    assert asked.count(" LIMIT 4") == asked.count("SUM(1)") == 8
    assert _counts(sign_in(cast.bram))["all"] == "1", "of one's own tenant"
    assert _counts(client, f"?incident={other.incident.number}") | {"decision": "1", "all": "1"} == _counts(
        client, "?tenant=t-b"
    )


@pytest.mark.parametrize("query", ["?outcome=safe", "?queue=celery", "?q=mailhub"])
def test_what_no_index_holds_together_is_not_counted(query: str, cast: Cast, sign_in: SignIn) -> None:
    dead_letter()
    client = sign_in(cast.ada)
    assert set(_counts(client, query).values()) == {""}
    assert not [text for text in _queries(client, f"/ops/dead-letters/{query}") if "SUM(1)" in text]


def test_what_is_looked_up_row_by_row_is_not_counted(cast: Cast, sign_in: SignIn) -> None:
    letter = dead_letter()
    DeadLetter.objects.update(actor_type="order", actor_id="7")
    give(cast.nobody, Action.INSPECT, tenant="default", actor_type="order")
    client = sign_in(cast.nobody)
    assert set(_counts(client).values()) == {""}
    assert [row.id for row in client.get("/ops/dead-letters/").context["cl"].result_list] == [letter.id]


@pytest.mark.parametrize(
    "query",
    [
        "acknowledged_by__password__startswith=pbkdf2",
        "resolved_by__email__startswith=a",
        "ordering=acknowledged_by__password",
        "ordering=-details__token",
        "incident__tenant=t-b",
        "tenant__startswith=t",
        "state=nonsense",
        "severity=nonsense",
        "cursor=nonsense",
        "all=&id__in=1",
        "q=1&title__contains=x",
    ],
)
@pytest.mark.parametrize("path", ["/ops/incidents/", "/ops/dead-letters/"])
def test_only_what_the_list_offers_can_be_asked(path: str, query: str, cast: Cast, sign_in: SignIn) -> None:
    """SEC-02: anything else is 400, whether or not such a field exists."""
    answer = sign_in(cast.olga).get(f"{path}?{query}")
    assert answer.status_code == 400
    assert "Content-Security-Policy" in answer.headers


@pytest.mark.parametrize("order", ["o=1", "o=-3", "o=2.1", "o=99", "_popup=1", "p=7", "p=x", "_facets=True"])
def test_the_order_of_a_list_cannot_be_chosen(order: str, cast: Cast, sign_in: SignIn) -> None:
    """SEC-02: an order is an oracle too."""
    _make_incidents(5)
    client = sign_in(cast.olga)
    assert _numbers(client.get(f"/ops/incidents/?{order}")) == _numbers(client.get("/ops/incidents/"))


def test_a_cursor_of_another_list_is_refused(cast: Cast, sign_in: SignIn) -> None:
    _make_incidents(60)
    client = sign_in(cast.ada)
    address = client.get("/ops/incidents/").context["cl"].next_page
    assert client.get(f"/ops/dead-letters/{address}").status_code == 400


def test_a_cursor_shows_nothing_of_another_tenant(cast: Cast, sign_in: SignIn) -> None:
    """SEC-02: a cursor is a place in the order, not a permission."""
    dead_letter(tenant="t-b")
    mine = dead_letter()
    forged = json.dumps(["ops_incidents.incident", 0, 0, 50, "2999-01-01 00:00:00+00:00", str(mine.incident_id)])
    cursor = base64.urlsafe_b64encode(forged.encode()).decode().rstrip("=")
    answer = sign_in(cast.olga).get(f"/ops/incidents/?cursor={cursor}")
    assert answer.status_code == 200
    assert _numbers(answer) == [mine.incident.number]


def test_an_incident_is_found_by_its_number_in_any_state(cast: Cast, sign_in: SignIn) -> None:
    _make_incidents(5)
    client = sign_in(cast.ada)
    for text in ("1003", "INC-1003", "inc-01003", "#1003"):
        assert _numbers(client.get("/ops/incidents/", {"q": text})) == [1_003]
    assert _numbers(client.get("/ops/incidents/", {"q": "100"})) == []
    assert _numbers(client.get("/ops/incidents/", {"q": "9" * 30})) == []


def test_no_tab_says_how_many_there_are_while_a_search_leaves_fewer(cast: Cast, sign_in: SignIn) -> None:
    _make_incidents(5)
    client = sign_in(cast.ada)

    def counts(typed: str) -> list[str]:
        return [tab.count for tab in client.get("/ops/incidents/", {"q": typed}).context["tabs"]]

    assert counts("")[0] == "6"
    assert counts(" ") == counts("")
    assert set(counts("nosuchword")) == {""}


def test_a_search_finds_no_incident_of_another_tenant(cast: Cast, sign_in: SignIn) -> None:
    other = dead_letter(tenant="t-b").incident
    assert _numbers(sign_in(cast.olga).get("/ops/incidents/", {"q": str(other.number)})) == []


def test_a_job_is_found_by_its_ids_and_by_nothing_redacted(cast: Cast, sign_in: SignIn) -> None:
    """SEC-02: search hunter2."""
    found = dead_letter(body=b'[["a"], {"password": "hunter2"}, {}]')
    client = sign_in(cast.olga)
    for text, count in ((found.task_id, 1), (found.job_id, 1), (found.task_id[1:], 0), ("hunter2", 0), ("a", 1)):
        rows = client.get("/ops/dead-letters/", {"q": text}).context["cl"].result_list
        assert len(rows) == count, text


def test_filters_keep_what_they_say(cast: Cast, sign_in: SignIn) -> None:
    dead_letter()
    dead_letter(ambiguous=True, tenant="t-b")
    client = sign_in(cast.ada)

    def tenants(query: str) -> list[str]:
        return sorted(row.tenant for row in client.get(f"/ops/incidents/?{query}").context["cl"].result_list)

    assert tenants("") == ["default", "t-b"]
    assert tenants("tenant=t-b") == ["t-b"]
    assert tenants("severity=low") == []
    assert tenants("severity=high") == ["default", "t-b"]
    assert tenants("state=mine") == []
    assert tenants("state=resolved") == []
    assert tenants("state=") == ["default", "t-b"]
    letters = client.get("/ops/dead-letters/?outcome=ambiguous").context["cl"].result_list
    assert [row.tenant for row in letters] == ["t-b"]
    number = Incident.objects.get(tenant="t-b").number
    letters = client.get(f"/ops/dead-letters/?incident=INC-{number:04d}").context["cl"].result_list
    assert [row.tenant for row in letters] == ["t-b"]


def test_the_tenant_filter_names_only_tenants_one_may_see(cast: Cast, sign_in: SignIn) -> None:
    """GRA-02, SCA-01: and it reads no table to find them, except where every tenant may be seen."""
    for tenant in ("default", "t-b", "t-c"):
        dead_letter(tenant=tenant)
    give(cast.olga, Action.INSPECT, tenant="t-z")

    def named(operator: Any) -> list[str]:
        filters = sign_in(operator).get("/ops/incidents/").context["link_filters"]
        return [choice["display"] for spec, choices in filters if spec.title == "tenant" for choice in choices]

    assert named(cast.olga) == ["default", "t-z", "All"]
    assert named(cast.bram) == ["t-b", "All"]
    assert named(cast.vera) == ["default", "t-b", "t-c", "All"]


def test_too_many_tenants_are_typed_instead_of_listed(cast: Cast, sign_in: SignIn) -> None:
    dead_letter()
    for number in range(51):
        give(cast.olga, Action.INSPECT, tenant=f"t-{number:03d}")
    answer = sign_in(cast.olga).get("/ops/incidents/?tenant=t-001")
    assert answer.status_code == 200
    assert [spec.title for spec in answer.context["typed_filters"]] == ["task", "tenant"]
    assert _numbers(answer) == []


def test_a_grant_for_one_actor_shows_its_jobs_and_no_incident(cast: Cast, sign_in: SignIn) -> None:
    """B1."""
    mine = dead_letter(actor_type="customer", actor_id="7")
    dead_letter(actor_type="customer", actor_id="8")
    give(cast.nobody, Action.INSPECT, tenant="default", actor_type="customer", actor_id="7")
    client = sign_in(cast.nobody)
    assert [row.id for row in client.get("/ops/dead-letters/").context["cl"].result_list] == [mine.id]
    assert _numbers(client.get("/ops/incidents/")) == []
    assert client.get(f"/ops/incidents/{mine.incident_id}/").status_code == 404
    assert client.get(f"/ops/dead-letters/{mine.id}/").status_code == 200


def test_a_nul_in_a_filter_or_search_is_no_error(cast: Cast, sign_in: SignIn) -> None:
    dead_letter()
    client = sign_in(cast.ada)
    for query, status in (("q=%00", 200), ("incident=%00", 200), ("tenant=%00", 400)):
        assert client.get(f"/ops/dead-letters/?{query}").status_code == status, query
    assert client.get("/ops/audit/?tenant=%00&action=%00").status_code == 200


def test_the_audit_list_begins_with_what_people_did(cast: Cast, sign_in: SignIn) -> None:
    letter = dead_letter()
    retry_incident(incident_id=letter.incident_id, by=cast.olga, key="k", letter_ids=[letter.id])
    client = sign_in(cast.ada)

    def kinds(query: str) -> set[str]:
        return {row.operator_kind for row in client.get(f"/ops/audit/?{query}").context["cl"].result_list}

    assert kinds("") == {"person", "cli"}
    assert kinds("who=machines") == {"system"}
    assert kinds("who=") == {"person", "cli", "system"}
    rows = client.get("/ops/audit/?operator_name=olga&action=dead-letters.retry").context["cl"].result_list
    assert [row.target_id for row in rows] == [str(letter.id)]
    assert client.get("/ops/audit/?tenant=t-b").context["cl"].result_list == []


def test_the_audit_list_shows_only_tenants_whose_audit_one_may_read(cast: Cast, sign_in: SignIn) -> None:
    """B16."""
    dead_letter()
    dead_letter(tenant="t-b")
    give(cast.olga, Action.AUDIT_READ, tenant="t-b")
    rows = sign_in(cast.olga).get("/ops/audit/?who=").context["cl"].result_list
    assert {row.tenant for row in rows} == {"t-b"}


def test_the_list_of_failed_jobs_is_told_how_many_are_newer(cast: Cast, sign_in: SignIn) -> None:
    """Such as failed after the one at its top, of this tab, these filters and what one may see; with an ETag."""
    client = sign_in(cast.olga)
    path = "/ops/dead-letters/"
    empty = client.get(path).context["newer_url"]
    assert client.get(empty).json() == {"newer": 0}
    dead_letter()
    assert client.get(empty).json() == {"newer": "1"}
    address = client.get(path).context["newer_url"]
    first = client.get(address)
    assert (first.json(), first["ETag"]) == ({"newer": 0}, '"0"')
    newest = dead_letter(queue="mail")
    dead_letter(tenant="t-b")
    second = client.get(address)
    assert second.json() == {"newer": "1"}
    assert client.get(address, headers={"If-None-Match": second["ETag"]}).status_code == 304
    assert newest in client.get(path).context["cl"].result_list
    since = address.partition("since=")[2]
    for query, count in (("queue=mail", "1"), ("queue=none", 0), ("state=repaired", 0), ("state=", "1")):
        assert client.get(f"{path}newer/?{query}&since={since}").json() == {"newer": count}, query
    for query in ("", "since=", "since=x", f"since={'9' * 17}", "since=1&q=x", "since=1&error_text=x"):
        assert client.get(f"{path}newer/?{query}").status_code == 400, query
    assert client.get(f"{path}newer/?since={'9' * 16}").json() == {"newer": 0}
    assert client.get(f"{path}?q=1").context["newer_url"] == ""


def test_workers_are_alive_late_gone_or_stopped(cast: Cast, sign_in: SignIn) -> None:
    now = database_now()
    for name, age, stopped, digest in (
        ("a", 5, False, conf.settings_digest()), ("b", 40, False, ""), ("c", 90, False, "other"), ("d", 5, True, ""),
    ):  # fmt: skip
        WorkerNode.objects.create(
            id=name, source="tests", host=name, pid=1, queues='["mail"]',
            tasks=json.dumps({"shop.send_mail": describe_signature(lambda a, b=1, *, c, d=None: None)}),
            settings_digest=digest, started_at=now, seen_at=now - seconds(age), stopped_at=now if stopped else None,
            trouble="disk full" if name == "b" else "", journal_bytes=797_240,
            journal_oldest_seconds={"a": 0.4, "b": 0.9, "c": 1.0}.get(name, 12.7),
        )  # fmt: skip
    client = sign_in(cast.vera)
    rows = {cells[0]: cells for _, _, cells in client.get("/ops/workers/").context["rows"]}
    assert {name: cells[1] for name, cells in rows.items()} == {"a": "Alive", "b": "Late", "c": "Gone", "d": "Stopped"}
    assert (rows["a"][-1], rows["b"][-1]) == ("none", "disk full")
    # What waits for less than a second is on its way, here and in the line under the header.
    assert [rows[name][5] for name in "abcd"] == [
        "nothing", "nothing", "797,240 bytes, oldest 1 s", "797,240 bytes, oldest 12 s",
    ]  # fmt: skip
    assert "oldest waiting" not in client.get("/ops/workers/b/").content.decode()
    assert "settings differ" in rows["c"][-1]
    text = text_of(client.get("/ops/workers/a/").content.decode())
    assert "shop.send_mail(a, b=…, *, c, d=…)" in text
    assert client.get("/ops/workers/nobody/").status_code == 404


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda: None, "()"),
        (lambda a, /, b=2: None, "(a, /, b=…)"),
        (lambda a, *rest, b, **more: None, "(a, *args, b, **kwargs)"),
    ],
)
def test_a_task_is_written_as_python_writes_it(function: Any, words: str) -> None:
    assert call_words(describe_signature(function)) == words


@pytest.mark.parametrize("text", ["", "nonsense", "[]"])
def test_a_task_whose_signature_is_not_known_has_only_its_name(text: str) -> None:
    assert call_words(text) == ""


@pytest.mark.parametrize("path", ["/ops/incidents/", "/ops/dead-letters/", "/ops/repairs/"])
def test_a_cursor_that_is_none_is_not_understood(path: str, cast: Cast, sign_in: SignIn) -> None:
    """400, and no word of permissions."""
    answer = sign_in(cast.olga).get(f"{path}?cursor=garbage")
    text = text_of(answer.content.decode())
    assert answer.status_code == 400
    assert "Not understood" in text
    assert "Not allowed" not in text


@pytest.mark.parametrize("typed", ["INC-{:04d}", "inc-{}", "#{}", "{}"])
def test_failed_jobs_and_repairs_are_found_by_their_incident(typed: str, cast: Cast, sign_in: SignIn) -> None:
    letter, other = dead_letter(), dead_letter(task="shop.other")
    for number, one in enumerate((letter, other)):
        retry_letter(letter_id=one.id, by=cast.ada, key=str(number))
    client = sign_in(cast.ada)
    wanted = {"incident": typed.format(letter.incident.number)}
    jobs = client.get("/ops/dead-letters/", {**wanted, "state": "retrying"}).context["cl"].result_list
    repairs = client.get("/ops/repairs/", wanted).context["cl"].result_list
    assert ([job.id for job in jobs], [repair.letter_id for repair in repairs]) == ([letter.id], [letter.id])


def test_only_a_job_that_waits_is_said_to_be_safe_to_run_again(cast: Cast, sign_in: SignIn) -> None:
    discard_letter(letter_id=dead_letter().id, by=cast.ada, key="k", reason="nobody wants it")
    dead_letter()
    client = sign_in(cast.ada)
    rows = client.get("/ops/dead-letters/?state=").context["rows"]
    assert sorted((str(cells[1]), str(cells[2]).partition(" No ")[0]) for _, _, cells in rows) == [
        ("Discarded", ""), ("Needs a decision", "Safe to run again"),
    ]  # fmt: skip


def test_an_audit_row_leads_to_what_it_was_done_to(cast: Cast, sign_in: SignIn, letter: DeadLetter) -> None:
    retry_letter(letter_id=letter.id, by=cast.olga, key="k")
    client = sign_in(cast.ada)
    page = client.get("/ops/audit/?action=dead-letters.retry").content.decode()
    assert f'href="/ops/dead-letters/{letter.id}/"' in page
    event = AuditEvent.objects.get(action="dead-letters.retry")
    assert f'href="/ops/dead-letters/{letter.id}/"' in client.get(f"/ops/audit/{event.id}/").content.decode()


def test_a_list_calls_nothing_safe_that_its_own_page_says_can_not_be_sent(
    cast: Cast, sign_in: SignIn, letter: DeadLetter
) -> None:
    """The list judges as the page does, arguments and live workers included."""
    now = database_now()
    WorkerNode.objects.create(
        id="w1", source="tests", host="h", pid=1, queues='["celery"]', started_at=now, seen_at=now,
        tasks=json.dumps({"shop.send_mail": describe_signature(lambda other, another: None)}),
    )  # fmt: skip
    client = sign_in(cast.olga)
    for path in ("/ops/dead-letters/", f"/ops/dead-letters/{letter.id}/"):
        assert "Can't be retried" in text_of(client.get(path).content.decode())
    assert 'ops-good">Safe to run again' not in client.get("/ops/dead-letters/").content.decode()
