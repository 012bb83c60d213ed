"""Search: by ids first and by words second, through an index that follows the rows, within what one may see."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from html import unescape
from typing import Any
from unittest import mock
from uuid import UUID

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext, override_settings

from deadletters import search
from deadletters.apps import keep_search_indexes
from deadletters.journal.events import ErrorReport
from deadletters.models import DeadLetter
from grants.actions import Action
from grants.operators import SYSTEM, Operator
from incidents.models import Incident
from incidents.search import INCIDENT_WORDS, search_incidents
from incidents.services import resolve_incident
from opsconsole.core import search as core
from opsconsole.core.keyset import Source, read_page
from opsconsole.core.search import Words
from tests.api.client import Api, problem
from tests.cast import Cast, give
from tests.factories import dead_letter

pytestmark = pytest.mark.django_db

SignIn = Callable[[Operator], Client]
DECLINED = ErrorReport(
    error_class="shop.errors.CardDeclined",
    text="issuer db-7.example.org:5432 said 51: not sufficient funds",
    call_site="shop.pay:charge",
    classes=("shop.errors.CardDeclined",),
)
BODY = b'[["parcel-88", "caf\xc3\xa9"], {"order": 4711, "password": "hunter2", "token": "tok_live_9f8e7d"}, {}]'


@pytest.fixture
def sign_in(settings: Any) -> SignIn:
    settings.ALLOWED_HOSTS = ["testserver"]

    def signed_in(operator: Operator) -> Client:
        from django.contrib.auth import get_user_model

        client = Client()
        client.force_login(get_user_model().objects.get(pk=operator.user_id))
        return client

    return signed_in


@pytest.fixture
def declined() -> DeadLetter:
    return dead_letter(DECLINED, body=BODY, task="shop.charge_card", actor_type="customer", actor_id="c-1907")


def letters(typed: str, by: Operator = SYSTEM) -> list[DeadLetter]:
    """Return what a search of all letters finds."""
    rows = DeadLetter.objects.visible_to(by, Action.INSPECT).newest_first()
    return search.search_letters(typed, within=rows, anywhere=rows).first_rows(100)


def set_up_again() -> None:
    """Do what ``migrate`` does at its end, inside a test's transaction."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
    keep_search_indexes()


def incidents(typed: str, by: Operator = SYSTEM) -> list[Incident]:
    rows = Incident.objects.visible_to(by, Action.INSPECT).worst_first()
    return search_incidents(typed, within=rows, anywhere=rows, by=by).first_rows(100)


@pytest.fixture(params=["first rows", "index"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways to a page: a word among the newest rows, and, as if there were very many, one from the index alone."""
    with mock.patch.object(core, "FIRST", 1_000 if request.param == "first rows" else 0):
        yield


# --- words ------------------------------------------------------------------------------------------------------------


FOUND = (
    "shop.errors.CardDeclined", "CardDeclined", "carddeclined", "declined", "DECLINED card", "Card",
    "sufficient funds", "funds, not sufficient!", "db-7.example.org:5432", "issuer", "5432", "suffi",
    "charge_card", "parcel-88", "4711", "order 4711", "customer", "c-1907", "customer c-1907", "café", "CAFÉ", "51",
    '"order": 4711', "parcel 😀 88",
)  # fmt: skip


def test_a_job_is_found_by_words_of_its_error_arguments_and_actor(way: None, declined: DeadLetter) -> None:
    dead_letter()
    for typed in FOUND:
        assert [row.id for row in letters(typed)] == [declined.id], typed


def test_a_job_is_not_found_by_what_is_no_beginning_of_a_word(way: None, declined: DeadLetter) -> None:
    """All words, whole if they are short, otherwise the beginning of one."""
    for typed in (
        "fficient",
        "sufficient funds tomorrow",
        '"5"',
        "caf3",
        "clined",
        "at",
        "fun ds",
        "c-19072",
        "eclined",
    ):
        assert letters(typed) == [], typed


def test_what_a_search_means_is_told_by_the_list(declined: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    answer = sign_in(cast.olga).get("/ops/dead-letters/", {"q": "funds"})
    assert [row.id for row in answer.context["cl"].result_list] == [declined.id]
    html = answer.content.decode()
    assert answer.context["search_note"] == core.SHORT_MEANING
    assert core.SHORT_MEANING in html
    assert core.MEANING in html.partition("<summary>How words are found</summary>")[2].partition("</details>")[0]


@pytest.mark.parametrize("path", ["/ops/incidents/", "/ops/dead-letters/"])
def test_words_that_were_looked_for_in_one_tab_are_offered_in_all(
    path: str, declined: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    client = sign_in(cast.ada)
    incident = declined.incident
    resolve_incident(incident_id=incident.id, by=cast.ada, key="k", code="other_reason", summary="Done.", unrepaired=1)
    answer = client.get(path, {"q": "declined", "tenant": "default"})
    assert answer.context["cl"].result_list == []
    html = answer.content.decode()
    assert re.search(r"Searched in Needs (action|a decision) only\.", html)
    (link,) = re.findall(r'<a href="([^"]+)">Search in all</a>', html)
    found = client.get(f"{path}{unescape(link)}")
    assert len(found.context["cl"].result_list) == 1
    assert found.context["cl"].query == "declined"
    assert "tenant=default" in link
    assert "Searched in" not in found.content.decode()
    # A number or an id is found in any state, so there is nothing to offer.
    for typed in (f"INC-{incident.number}", declined.task_id, "?!"):
        assert "Searched in" not in client.get(path, {"q": typed}).content.decode(), typed


def test_what_was_redacted_is_found_by_no_search(way: None, declined: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    """SEC-02."""
    error = ErrorReport(
        error_class="shop.Refused",
        text="login failed: password=hunter2 token=tok_live_9f8e7d",
        classes=("shop.Refused",),
    )
    dead_letter(error)
    client = sign_in(cast.ada)
    for typed in (
        "hunter2", "hunter", "tok_live_9f8e7d", "9f8e7d", "9f8", '"hunter2"', "password hunter2", "order hunter2",
        "hunter2*",
    ):  # fmt: skip
        assert letters(typed) == [], typed
        assert incidents(typed) == [], typed
        for path in ("/ops/dead-letters/", "/ops/incidents/"):
            assert client.get(path, {"q": typed, "state": ""}).context["cl"].result_list == [], typed


ODD = (
    "\x00", "fun\x00ds", "'", '"', "''; DROP TABLE x; --", "a OR b", "AND", "NEAR(a b)", "funds*", "*", "-funds",
    "funds AND NOT x", "words:funds", "a & | ! ( ) :* <->", "\\", "\\'", "%", "_", "^funds", "{a b}", "+", "(", ")",
    "x" * 10_000, "x " * 5_000, "!?.,;:", " ", "\t\n", "😀", "👩‍👩‍👧", "مرحبا بالعالم", "שלום",
    "\u202efunds", "क्या",
    "\ud800", "İstanbul", "ß", "1e309", "6e12ab", "9" * 400, "INC-", "#", "INC-99999999999999999999", "\x1b[31m",
    "\ufeff", "a" * 300, "\u0301", "ﬁ", "\u00ad", "\u200b", "[[", "$$", "%s", "%(x)s", "{rows}", "{}", ":x", "?1",
)  # fmt: skip


def test_whatever_is_typed_has_an_answer(way: None, declined: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    """SEC-01: never a syntax error of a database's query language, never a 500."""
    client = sign_in(cast.olga)
    for typed in ODD:
        letters(typed)
        incidents(typed)
        if typed != "\ud800":  # which no address can hold
            for path in ("/ops/dead-letters/", "/ops/incidents/"):
                assert client.get(path, {"q": typed}).status_code == 200, typed


def test_what_cannot_be_searched_for_is_said(declined: DeadLetter, cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.olga)
    for typed, told in (("?!", "type at least one letter or digit"), ("x" * 2_000, "too long"), ("a b c " * 99, "")):
        answer = client.get("/ops/dead-letters/", {"q": typed})
        assert told in answer.context["search_note"]
    assert Words.typed(" ".join(map(str, range(200)))).trouble.startswith("That is too much")


def test_operators_of_a_query_language_are_words_or_nothing(declined: DeadLetter) -> None:
    assert letters("funds OR nothing-like-it") == []
    assert letters("funds NOT sufficient") == [declined]  # its text has the word "not"
    assert letters("funds -sufficient") == [declined]


def test_the_api_searches_as_the_lists_do(way: None, declined: DeadLetter, cast: Cast) -> None:
    """SEC-02: whatever order the list has, nothing redacted and nothing of another tenant is found."""
    other = dead_letter()
    dead_letter(DECLINED, tenant="t-b")
    api = Api(cast.olga)

    def found(path: str, **query: str) -> list[str]:
        answer = api.get(path, query)
        assert answer.status_code == 200, answer.content
        return [row["id"] for row in answer.json()["results"]]

    for ordering in ("default", "newest"):
        for typed in ("declined", "order 4711", declined.task_id, f"INC-{declined.incident.number}"):
            assert found("dead-letters", text=typed, ordering=ordering) == [str(declined.id)], typed
        assert found("dead-letters", text="hunter2", ordering=ordering) == []
        assert found("dead-letters", text="declined", state="repaired", ordering=ordering) == []
    assert set(found("dead-letters", text="shop")) == {str(declined.id), str(other.id)}
    for typed in ("declined", "order 4711", declined.task_id, f"INC-{declined.incident.number}"):
        assert found("incidents", text=typed) == [str(declined.incident_id)], typed
    assert found("incidents", text="declined", state="resolved") == found("incidents", text="hunter2") == []
    for path in ("dead-letters", "incidents"):
        for typed in ("?!", "x" * 10_000, "a\x00b"):
            errors = problem(api.get(path, {"text": typed}), 400, "invalid_input")["errors"]
            assert [error["parameter"] for error in errors] == ["text"]


# --- ids --------------------------------------------------------------------------------------------------------------


def test_an_id_is_looked_for_before_words_and_in_any_state() -> None:
    named = dead_letter(task_id="7f8e9a10-0000-4000-8000-000000000001")
    says_so = dead_letter(body=b'[["7f8e9a10-0000-4000-8000-000000000001"], {}, {}]')
    rows = DeadLetter.objects.newest_first()

    def found(typed: str) -> list[UUID]:
        return [row.id for row in search.search_letters(typed, within=rows.none(), anywhere=rows)]

    assert found(named.task_id) == [named.id]
    assert found(f"  {named.task_id} ") == [named.id]
    assert found(str(named.id)) == [named.id]
    assert found(named.id.hex) == [named.id]
    assert found("7f8e9a10") == [named.id]
    assert found("7f8e9a10-0000-4000-8000-00000000000") == [named.id]
    assert found("7f8e9a1") == []
    assert {row.id for row in letters(f'"{named.task_id}"')} == {says_so.id}


def test_an_id_that_names_nothing_is_looked_for_in_the_texts(way: None) -> None:
    of_order = "5b1f0c9e-2d7a-4c55-9a51-0f6f3e1f7a11"
    letter = dead_letter(body=f'[["{of_order}"], {{}}, {{}}]'.encode())
    assert [row.id for row in letters(of_order)] == [letter.id]
    assert [row.id for row in incidents(of_order)] == [letter.incident_id]


def test_the_number_of_an_incident_finds_its_jobs_and_in_quotes_the_texts() -> None:
    first = dead_letter()
    number = 41_907
    Incident.objects.filter(id=first.incident_id).update(number=number)
    other = dead_letter(DECLINED, body=f"[[{number}], {{}}, {{}}]".encode())
    for typed in (f"INC-{number:04d}", f"inc-{number}", f"#{number}", str(number)):
        assert [row.id for row in letters(typed)] == [first.id]
        assert [row.id for row in incidents(typed)] == [first.incident_id]
    assert [row.id for row in letters(f'"{number}"')] == [other.id]


def test_an_incident_is_found_by_ids_and_words_of_its_jobs(way: None, declined: DeadLetter) -> None:
    dead_letter()
    for typed in (declined.task_id, str(declined.id), str(declined.incident_id)):
        assert [row.id for row in incidents(typed)] == [declined.incident_id]
    for typed in ("declined", "charge_card", "shop.errors.CardDeclined"):
        assert [row.id for row in incidents(typed)] == [declined.incident_id]
    for typed in ("parcel-88", "customer c-1907", "order 4711"):
        assert [row.id for row in incidents(typed)] == [declined.incident_id]


# --- scope ------------------------------------------------------------------------------------------------------------


def test_a_search_finds_nothing_that_one_may_not_see(way: None, cast: Cast, sign_in: SignIn) -> None:
    """GRA-01, SEC-02: by no id, number or word; and the answer is that of a search for what is not there."""
    theirs = dead_letter(DECLINED, body=BODY, tenant="t-b")
    client = sign_in(cast.olga)
    absent = {
        path: client.get(path, {"q": "nosuchword"}).context["search_note"]
        for path in ("/ops/dead-letters/", "/ops/incidents/")
    }
    for typed in ("declined", "parcel-88", "4711 order"):
        for path, note in absent.items():
            answer = client.get(path, {"q": typed})
            assert answer.context["cl"].result_list == []
            assert answer.context["search_note"] == note
    for typed in (theirs.task_id, str(theirs.id), theirs.task_id[:20], f"INC-{theirs.incident.number}"):
        assert letters(typed, cast.olga) == []
        assert incidents(typed, cast.olga) == []
        assert [row.id for row in letters(typed, cast.bram)] == [theirs.id]
        assert [row.id for row in incidents(typed, cast.bram)] in ([theirs.incident_id], [])


def test_a_grant_for_one_actor_finds_its_jobs_and_no_incident(way: None, cast: Cast) -> None:
    """B1."""
    mine = dead_letter(DECLINED, actor_type="customer", actor_id="7")
    dead_letter(DECLINED, actor_type="customer", actor_id="8")
    give(cast.nobody, Action.INSPECT, tenant="default", actor_type="customer", actor_id="7")
    assert [row.id for row in letters("declined", cast.nobody)] == [mine.id]
    assert incidents("declined", cast.nobody) == []
    assert incidents("customer", cast.nobody) == []


def test_what_others_have_does_not_crowd_out_what_one_may_see(cast: Cast) -> None:
    """The rows that are looked at first are the newest of those that one may see."""
    mine = dead_letter(DECLINED)
    for _ in range(5):
        dead_letter(DECLINED, tenant="t-b")
    with mock.patch.object(core, "FIRST", 2), mock.patch.object(core.Searchable, "_through_index", return_value=[]):
        assert [row.id for row in letters("declined", cast.olga)] == []  # fewer than a page: the index is asked
        rows = DeadLetter.objects.visible_to(cast.olga, Action.INSPECT).newest_first()
        assert [row.id for row in rows.containing("declined").first_rows(1)] == [mine.id]


# --- pages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [1_000, 3, 0])
def test_pages_of_a_search_have_every_row_once_in_order(first: int) -> None:
    """SCA-01: whether a page is filled by the newest rows, half of it, or not at all."""
    made = [dead_letter(DECLINED) for _ in range(23)]
    noise = [dead_letter() for _ in range(3)]
    expected = [row.id for row in DeadLetter.objects.exclude(id__in=[n.id for n in noise]).newest_first()]
    assert len(expected) == len(made)
    seen: list[UUID] = []
    cursor: str | None = None
    back: list[str | None] = []
    with mock.patch.object(core, "FIRST", first):
        while True:
            source: Source[Any] = Source(DeadLetter.objects.all().containing("declined"), ("last_seen_at", "id"))
            page = read_page("x", [[source]], limit=5, cursor=cursor)
            seen += [row.id for row in page.rows]
            back.append(page.previous)
            if page.next is None:
                break
            cursor = page.next
        assert seen == expected
        source = Source(DeadLetter.objects.all().containing("declined"), ("last_seen_at", "id"))
        page = read_page("x", [[source]], limit=5, cursor=back[-1])
        assert [row.id for row in page.rows] == expected[15:20]


def test_a_search_counts_nothing_and_keeps_the_filters(cast: Cast, sign_in: SignIn) -> None:
    """SCA-01."""
    for number in range(60):
        dead_letter(DECLINED, queue=f"q{number % 2}")
    safe = dead_letter()
    client = sign_in(cast.olga)
    client.get("/ops/dead-letters/")
    with CaptureQueriesContext(connection) as captured:
        answer = client.get("/ops/dead-letters/", {"q": "declined"})
    statements = [query["sql"].upper() for query in captured.captured_queries]
    assert not [one for one in statements if "COUNT(" in one or " OFFSET " in one]
    assert not [one for one in statements if "DISTINCT" in one and "OPS_DEADLETTERS" in one]
    # The three statements of a search, what this list asks, and the messages of 50 rows in two portions.
    assert len(statements) <= 16, statements
    assert len(answer.context["cl"].result_list) == 50
    following = client.get(f"/ops/dead-letters/{answer.context['cl'].next_page}")
    assert len(following.context["cl"].result_list) == 10
    kept = client.get("/ops/dead-letters/", {"q": "refused", "outcome": "safe"}).context["cl"].result_list
    assert [row.id for row in kept] == [safe.id]
    assert client.get("/ops/dead-letters/", {"q": "declined", "outcome": "safe"}).context["cl"].result_list == []


def test_a_searched_queryset_is_filtered_however_it_is_used(declined: DeadLetter) -> None:
    """What acts on all that a list matches must never get the rest of the table."""
    dead_letter()
    rows = DeadLetter.objects.all().containing("declined")
    assert [row.id for row in rows] == [declined.id]
    assert rows.count() == 1
    assert rows.filter(state="repaired").exists() is False
    assert list(DeadLetter.objects.all().containing("?!")) == []


# --- the index --------------------------------------------------------------------------------------------------------


def test_the_index_follows_a_letter(way: None, declined: DeadLetter) -> None:
    DeadLetter.objects.filter(id=declined.id).update(error_text="quota used up", payload_preview="")
    assert [row.id for row in letters("quota")] == [declined.id]
    assert letters("funds") == letters("parcel-88") == []
    DeadLetter.objects.filter(id=declined.id).update(state="retrying")
    assert [row.id for row in letters("quota card")] == [declined.id]
    incident = declined.incident
    Incident.objects.filter(id=incident.id).update(summary="renamed")
    assert [row.id for row in incidents("renamed")] == [incident.id]
    declined.occurrences.all().delete()
    declined.delete()
    incident.delete()
    assert letters("quota") == []
    assert incidents("renamed") == []


@pytest.mark.skipif(connection.vendor != "sqlite", reason="only SQLite has a table of its own for it")
def test_nothing_of_a_deleted_letter_stays_in_the_index(declined: DeadLetter) -> None:
    declined.delete()
    with connection.cursor() as cursor:
        cursor.execute("SELECT * FROM ops_letter_words WHERE ops_letter_words MATCH 'declined OR parcel'")
        assert cursor.fetchall() == []
        cursor.execute("SELECT * FROM ops_letter_words_rows")
        assert cursor.fetchall() == []


@pytest.mark.postgresql
def test_postgresql_answers_from_the_index() -> None:
    for _ in range(5):
        dead_letter(DECLINED)
    rows = DeadLetter.objects.newest_first().containing("funds declined")
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
        sql, given = rows.order_by().values("id").query.get_compiler(using="default").as_sql()
        cursor.execute(f"EXPLAIN {sql}", given)
        plan = "\n".join(row[0] for row in cursor.fetchall())
    assert "ops_letter_words" in plan


def test_without_an_index_the_newest_are_looked_at_and_the_page_says_so(
    declined: DeadLetter, cast: Cast, sign_in: SignIn
) -> None:
    with override_settings(OPSCONSOLE_SEARCH_INDEX=False):
        set_up_again()
    assert not core.is_ready(search.LETTER_WORDS, connection)
    assert not core.is_ready(INCIDENT_WORDS, connection)
    newer = dead_letter(DECLINED, body=BODY, task="shop.charge_card")
    client = sign_in(cast.olga)
    for typed in ("declined", "CAFÉ 88", "4711", "CardDecl", "not funds", "51"):
        answer = client.get("/ops/dead-letters/", {"q": typed})
        assert [row.id for row in answer.context["cl"].result_list] == [newer.id, declined.id], typed
        assert "There is no search index" in answer.context["search_note"]
    for typed in ("hunter2", "clined", '"5"', "fficient"):
        assert client.get("/ops/dead-letters/", {"q": typed}).context["cl"].result_list == []
    assert [row.id for row in incidents("declined")] == [declined.incident_id]
    assert [row.id for row in letters(declined.task_id)] == [declined.id]
    with mock.patch.object(core, "NEWEST", 1):
        assert [row.id for row in letters("declined")] == [newer.id]
    set_up_again()
    assert core.is_ready(search.LETTER_WORDS, connection)
    with mock.patch.object(core, "FIRST", 0):
        assert [row.id for row in letters("declined")] == [newer.id, declined.id]
        assert [row.id for row in incidents("declined")] == [declined.incident_id]


def test_an_index_that_other_code_has_made_is_made_again(declined: DeadLetter) -> None:
    other = core.TextIndex(name="ops_letter_words", table="ops_deadletters_deadletter", columns=("queue",))
    set_up_again()
    core.install(other, connection, wanted=True)
    assert core.is_ready(other, connection)
    assert not core.is_ready(search.LETTER_WORDS, connection)
    set_up_again()
    with mock.patch.object(core, "FIRST", 0):
        assert [row.id for row in letters("funds")] == [declined.id]


@pytest.mark.skipif(connection.vendor != "sqlite", reason="FTS5 is SQLite's")
def test_a_sqlite_without_fts5_still_records_and_searches(declined: DeadLetter) -> None:
    with mock.patch.object(core, "_has_fts5", return_value=False):
        set_up_again()
        assert not core.is_ready(search.LETTER_WORDS, connection)
        newer = dead_letter(DECLINED)
        assert [row.id for row in letters("funds")] == [newer.id, declined.id]
    set_up_again()
    with mock.patch.object(core, "FIRST", 0):
        assert [row.id for row in letters("funds")] == [newer.id, declined.id]


@pytest.mark.skipif(connection.vendor != "sqlite", reason="PostgreSQL does not rebuild tables")
def test_a_rebuilt_table_is_indexed_anew(declined: DeadLetter) -> None:
    """Django rebuilds a table to alter a column, and its triggers go with the old one."""
    with connection.cursor() as cursor:
        for event in ("insert", "update", "delete"):
            cursor.execute(f"DROP TRIGGER ops_letter_words_{event}")
    missed = dead_letter(DECLINED)
    set_up_again()
    with mock.patch.object(core, "FIRST", 0):
        assert [row.id for row in letters("funds")] == [missed.id, declined.id]
