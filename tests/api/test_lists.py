"""Lists: strict queries, an order that pages can trust, and nothing that is not yours."""

from __future__ import annotations

import base64
import json
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group, Permission
from django.db import connection
from django.test.utils import CaptureQueriesContext

from deadletters import selectors
from deadletters.models import DeadLetter
from deadletters.policy import TaskPolicySpec
from grants.actions import Action
from incidents.models import Incident, Severity
from incidents.services import acknowledge_incident, resolve_incident
from opsconsole.core.database import database_now
from repairs.services import discard_letter
from tests.api.client import Api, problem
from tests.api.situations import retrying, scene, worker_node
from tests.cast import Cast, give
from tests.factories import dead_letter, failure, record


def letters(count: int, **fields: Any) -> list[DeadLetter]:
    """Record ``count`` failures of one cause, and give them the same moment: the worst that an order can meet."""
    ids = [recorded.letter_id for recorded in record(*(failure(**fields) for _ in range(count)))]
    return list(DeadLetter.objects.select_related("incident").filter(id__in=ids))


def walk(api: Api, path: str, query: dict[str, Any], step: str = "next") -> list[list[str]]:
    """Follow ``step`` to the end; return the ids of each page."""
    pages = []
    answer = api.get(path, query)
    while True:
        assert answer.status_code == 200, answer.content
        document = answer.json()
        pages.append([row["id"] for row in document["results"]])
        if document[step] is None:
            return pages
        relation = "next" if step == "next" else "prev"
        assert f'<{document[step]}>; rel="{relation}"' in answer["Link"]
        answer = api.get(document[step])


# --- strict queries ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "query",
    [
        "tenat=t-a", "state=opne", "state=", "state=open,", "state=open&state=acknowledged", "created_after=yesterday",
        "limit=0", "limit=101", "limit=x", "limit=", "limit=1e3", "cursor=", "cursor=abc", "cursor=%00",
        "severity=bad", "tenant=", "tenant=%00", "ordering=acknowledged_by__password",
        "acknowledged_by__password__startswith=pbkdf2", "resolved_by__email__startswith=a", "ordering=-details__token",
        "q=hunter2", "search=hunter2", "incident__tenant=t-b", "page=2", "offset=5", "format=json",
    ],
)  # fmt: skip
def test_a_query_that_is_not_understood_is_refused_by_name(ada: Api, query: str) -> None:
    """API-03, SEC-02: nothing is ignored, and only what is listed can be asked for."""
    name = query.partition("=")[0]
    document = problem(ada.client.get(f"/api/v1/incidents?{query}"), 400, "invalid_input")
    assert [error["parameter"] for error in document["errors"]] == [name]
    assert name in document["detail"]


@pytest.mark.parametrize(
    "query",
    [
        "seen_after=yesterday", "seen_before=2026-13-01T00:00:00Z", "incident=12", "incident=x",
        "ordering=-payload_preview", "ordering=oldest", "payload_preview__contains=hunter2", "incident__tenant=t-b",
        "outcome_class=unsafe", "limit=201", "state=gone", "message__blob=x", "seen_after=0001-01-01T00:00:00%2B14:00",
    ],
)  # fmt: skip
def test_a_query_for_letters_that_is_not_understood_is_refused_by_name(ada: Api, query: str) -> None:
    """API-03, SEC-02."""
    document = problem(ada.client.get(f"/api/v1/dead-letters?{query}"), 400, "invalid_input")
    assert [error["parameter"] for error in document["errors"]] == [query.partition("=")[0]]


@pytest.mark.parametrize(
    "path", ["me", "incidents/{incident}", "dead-letters/{letter}", "dead-letters/{letter}/payload", "grants"]
)
def test_what_takes_no_parameter_takes_none(ada: Api, path: str) -> None:
    letter = dead_letter()
    answer = ada.get(path.format(incident=letter.incident_id, letter=letter.id), {"tenant": "default"})
    problem(answer, 400, "invalid_input")


def test_a_change_takes_no_parameter_either(ada: Api) -> None:
    letter = dead_letter()
    answer = ada.post(f"incidents/{letter.incident_id}/acknowledge?take_over=true")
    problem(answer, 400, "invalid_input")


@pytest.mark.parametrize(
    "body",
    [
        {}, {"job_typ": "deliver_email"}, {"letters": []}, {"all": False}, {"all": True}, {"expected_count": 1},
        {"all": True, "expected_count": 1, "letters": []}, {"letters": None}, {"letters": ["x"]}, {"letters": "all"},
        {"all": "true", "expected_count": 1}, {"all": True, "expected_count": "1"}, {"filter": {}},
    ],
    ids=json.dumps,
)  # fmt: skip
def test_a_bulk_retry_that_chooses_nothing_never_means_all(ada: Api, body: dict[str, Any]) -> None:
    """API-03."""
    letter = dead_letter()
    answer = ada.post(f"incidents/{letter.incident_id}/retry", body)
    assert answer.status_code == 400, answer.content
    assert answer.json()["code"] in ("invalid_input", "selection_invalid")
    letter.refresh_from_db()
    assert letter.state == "open"


# --- order and pages --------------------------------------------------------------------------------------------------


def test_incidents_come_worst_first_then_newest_then_by_id_across_pages(ada: Api) -> None:
    """A8: each once, in one order, forwards and backwards, with ties in every part of the key."""
    now = database_now()
    for number in range(11):
        letter = dead_letter(task=f"shop.task_{number}")
        Incident.objects.filter(id=letter.incident_id).update(
            severity=(Severity.HIGH, Severity.LOW, Severity.CRITICAL)[number % 3],
            last_seen_at=now + timedelta(microseconds=number % 2),
        )
    expected = [str(pk) for pk in Incident.objects.worst_first().values_list("id", flat=True)]
    for limit in (1, 3, 4, 11, 12):
        pages = walk(ada, "incidents", {"limit": limit})
        assert [one for page in pages for one in page] == expected
        assert {len(page) for page in pages[:-1]} <= {limit}
    last = ada.get("incidents", {"limit": 3})
    while last.json()["next"]:
        last = ada.get(last.json()["next"])
    back = walk(ada, last.json()["previous"], {}, step="previous")
    assert [one for page in reversed(back) for one in page] == expected[:-2]


def test_a_page_costs_no_count_and_no_query_per_row(ada: Api) -> None:
    letters(8)
    with CaptureQueriesContext(connection) as few:
        ada.get("dead-letters", {"limit": 2, "ordering": "newest"})
    with CaptureQueriesContext(connection) as many:
        ada.get("dead-letters", {"limit": 8, "ordering": "newest"})
    assert len(few) == len(many)
    assert not [query for query in many.captured_queries if "COUNT(" in query["sql"].upper()]


@pytest.fixture
def mixed(cast: Cast) -> dict[str, list[str]]:
    """Letters in every standing, each standing's newest first."""
    standing: dict[str, list[str]] = {}

    def put(name: str, *made: DeadLetter) -> None:
        standing.setdefault(name, []).extend(str(letter.id) for letter in made)

    closed = dead_letter(task="shop.closed")
    resolve_incident(
        incident_id=closed.incident_id, by=cast.ada, key="r", code="fixed", summary="It is fixed.", unrepaired=1
    )
    put("resolved", closed)
    aside = dead_letter(task="shop.aside")
    DeadLetter.objects.filter(id=aside.id).update(state="held")
    resolve_incident(
        incident_id=aside.incident_id, by=cast.ada, key="s", code="not_needed", summary="Nobody wants it.", unrepaired=1
    )
    put("resolved", aside)
    waiting = letters(2, task="shop.on_hold")
    DeadLetter.objects.filter(id__in=[one.id for one in waiting]).update(state="held")
    put("held", *waiting)
    given_up = dead_letter(task="shop.given_up")
    discard_letter(letter_id=given_up.id, by=cast.ada, key="d", reason="not needed")
    put("discarded", given_up)
    put("open", *letters(3, task="shop.open_a"))
    held = letters(2, task="shop.held")
    acknowledge_incident(incident_id=held[0].incident_id, by=cast.ada, key="a")
    put("acknowledged", *held)
    put("retrying", retrying(cast.ada, task="shop.tried"))
    put("open", *letters(2, task="shop.open_b"))
    return {name: newest_first(ids) for name, ids in standing.items()}


def newest_first(ids: list[str]) -> list[str]:
    found = DeadLetter.objects.filter(id__in=ids).newest_first().values_list("id", flat=True)
    return [str(letter_id) for letter_id in found]


def test_letters_come_open_then_acknowledged_then_the_rest(ada: Api, mixed: dict[str, list[str]]) -> None:
    """A15, C17, C18: each once, whatever the size of a page, forwards and backwards."""
    expected = [
        *mixed["open"],
        *newest_first(mixed["acknowledged"] + mixed["held"] + mixed["retrying"]),
        *newest_first(mixed["resolved"] + mixed["discarded"]),
    ]
    for limit in (1, 2, 3, 4, 7, 20):
        assert [one for page in walk(ada, "dead-letters", {"limit": limit}) for one in page] == expected
    last = ada.get("dead-letters", {"limit": 4})
    while last.json()["next"]:
        last = ada.get(last.json()["next"])
    back = walk(ada, last.json()["previous"], {}, step="previous")
    kept = len(expected) - len(last.json()["results"])
    assert [one for page in reversed(back) for one in page] == expected[:kept]


def test_what_a_letter_is_found_by_is_what_it_says(ada: Api, mixed: dict[str, list[str]]) -> None:
    """C18: a letter's acknowledged and resolved are its incident's."""
    for name in selectors.STANDINGS:
        for ordering in selectors.ORDERINGS:
            rows = ada.rows("dead-letters", {"state": name, "ordering": ordering})
            assert sorted(row["id"] for row in rows) == sorted(mixed.get(name, []))
            assert {row["state"] for row in rows} <= {name}
    unresolved = {row["id"] for row in ada.rows("dead-letters", {"state": "unresolved"})}
    assert unresolved == {*mixed["open"], *mixed["acknowledged"], *mixed["held"], *mixed["retrying"]}
    both = ada.rows("dead-letters", {"state": "discarded,open", "limit": 3})
    assert [row["state"] for row in both] == ["open", "open", "open"]


def test_a_letter_of_an_earlier_episode_is_resolved_while_its_incident_is_open(ada: Api, cast: Cast) -> None:
    """C7, C18."""
    old = dead_letter()
    resolve_incident(
        incident_id=old.incident_id, by=cast.ada, key="r", code="fixed", summary="It is fixed.", unrepaired=1
    )
    new = dead_letter()
    assert new.incident_id == old.incident_id
    states = {row["id"]: row["state"] for row in ada.rows("dead-letters")}
    assert states == {str(old.id): "resolved", str(new.id): "open"}
    assert [row["id"] for row in ada.rows("dead-letters", {"state": "resolved"})] == [str(old.id)]


def test_newest_is_an_order_of_its_own(ada: Api, mixed: dict[str, list[str]]) -> None:
    everything = newest_first([one for ids in mixed.values() for one in ids])
    pages = walk(ada, "dead-letters", {"ordering": "newest", "limit": 4})
    assert [one for page in pages for one in page] == everything


def test_letters_are_found_by_each_of_their_columns(ada: Api) -> None:
    wanted = dead_letter(task="shop.pay", queue="slow", tenant="t-a", actor_type="order", actor_id="42", ambiguous=True)
    dead_letter()
    moment = wanted.last_seen_at
    for query in (
        {"tenant": "t-a"}, {"job_type": "shop.pay"}, {"queue": "slow"}, {"task_id": wanted.task_id},
        {"job_id": wanted.job_id}, {"actor_type": "order"}, {"actor_id": "42"}, {"outcome_class": "ambiguous"},
        {"incident": str(wanted.incident_id)},
        {"tenant": "t-a", "seen_after": moment.isoformat(), "seen_before": (moment + timedelta(1)).isoformat()},
    ):  # fmt: skip
        assert [row["id"] for row in ada.rows("dead-letters", query)] == [str(wanted.id)], query
    for query in ({"source": "other"}, {"seen_before": moment.isoformat(), "tenant": "t-a"}):
        assert ada.rows("dead-letters", query) == []


def test_incidents_are_found_by_each_of_their_columns(ada: Api, cast: Cast) -> None:
    wanted = dead_letter(
        task="shop.pay", tenant="t-a", policies=[TaskPolicySpec(pattern="shop.pay", severity="critical")]
    )
    dead_letter()
    acknowledge_incident(incident_id=wanted.incident_id, by=cast.ada, key="a")
    for query in (
        {"state": "acknowledged"}, {"severity": "critical,low"}, {"tenant": "t-a"}, {"job_type": "shop.pay"},
        {"holder": "me"}, {"holder": "ada"}, {"holder": cast.ada.ref},
    ):  # fmt: skip
        assert [row["id"] for row in ada.rows("incidents", query)] == [str(wanted.incident_id)], query
    assert len(ada.rows("incidents", {"state": "unresolved"})) == 2
    assert ada.rows("incidents", {"source": "other"}) == []
    assert ada.rows("incidents", {"state": "resolved"}) == []


def test_a_cursor_belongs_to_its_list_and_order(ada: Api) -> None:
    letters(3)
    cursor = dict(parse_qsl(urlsplit(ada.get("dead-letters", {"limit": 1}).json()["next"]).query))["cursor"]
    assert ada.get("dead-letters", {"limit": 1, "cursor": cursor}).status_code == 200
    problem(ada.get("dead-letters", {"ordering": "newest", "cursor": cursor}), 400, "invalid_input")
    problem(ada.get("audit", {"cursor": cursor}), 400, "invalid_input")


@pytest.mark.parametrize(
    "forged",
    [
        "[]", "{}", "7", '["incidents",0,0]', '["incidents",0,0,1,2,3]',
        '["incidents",0,9,40,"2026-01-01T00:00:00+00:00","01970000-0000-7000-8000-000000000000"]',
        '["incidents",2,0,40,"2026-01-01T00:00:00+00:00","01970000-0000-7000-8000-000000000000"]',
        '["incidents",0,0,99999,"2026-01-01T00:00:00+00:00","01970000-0000-7000-8000-000000000000"]',
        '["incidents",0,0,true,"2026-01-01T00:00:00+00:00","01970000-0000-7000-8000-000000000000"]',
        '["incidents",0,0,40,"2026-01-01T00:00:00","01970000-0000-7000-8000-000000000000"]',
        '["incidents",0,0,40,null,"01970000-0000-7000-8000-000000000000"]',
        '["incidents",0,0,40,"2026-01-01T00:00:00+00:00",5]',
        '["incidents",0,0,40,"2026-01-01T00:00:00+00:00",{}]',
        '["incidents",0,0,40,"0001-01-01T00:00:00+14:00","01970000-0000-7000-8000-000000000000"]',
        '["incidents",0,0,40,"9999-12-31T23:59:59-14:00","01970000-0000-7000-8000-000000000000"]',
        "[" * 300,
    ],
)  # fmt: skip
def test_a_forged_cursor_is_refused(ada: Api, forged: str) -> None:
    cursor = base64.urlsafe_b64encode(forged.encode()).decode().rstrip("=")
    problem(ada.get("incidents", {"cursor": cursor}), 400, "invalid_input")


def test_a_page_is_found_through_an_index(ada: Api, cast: Cast) -> None:
    """SCA-01: the order of each list and the place of each page come from an index, on both databases."""
    letters(30)
    plans = {
        "incidents": ("ops_incident_all", selectors_sql(lambda: ada.get("incidents"), "ops_incidents_incident")),
        "dead-letters": (
            "ops_letter_newest",
            selectors_sql(lambda: ada.get("dead-letters", {"ordering": "newest"}), "ops_deadletters_deadletter"),
        ),
        "audit": ("ops_audit_newest", selectors_sql(lambda: ada.get("audit"), "ops_grants_auditevent")),
    }
    for name, (index, statement) in plans.items():
        plan = explain(statement)
        assert index in plan, (name, plan)
        assert "TEMP B-TREE" not in plan, (name, plan)
        assert "Sort" not in plan, (name, plan)


def selectors_sql(call: Any, table: str) -> str:
    """Return the statement that ``call`` reads ``table``'s page by."""
    with CaptureQueriesContext(connection) as captured:
        assert call().status_code == 200
    found = [query["sql"] for query in captured.captured_queries if f'FROM "{table}"' in query["sql"]]
    return next(sql for sql in found if "ORDER BY" in sql)


def explain(statement: str) -> str:
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            # Small tables are sorted rather than looked up; the question is whether the index can give the order.
            cursor.execute("SET LOCAL enable_seqscan = off")
            cursor.execute("SET LOCAL enable_sort = off")
            cursor.execute("SET LOCAL enable_bitmapscan = off")
            cursor.execute(f"EXPLAIN {statement}")
        else:
            cursor.execute(f"EXPLAIN QUERY PLAN {statement}")
        return "\n".join(" ".join(str(cell) for cell in row) for row in cursor.fetchall())


def test_the_next_page_begins_inside_the_index(ada: Api) -> None:
    """SCA-01: a row comparison is an index condition, not a filter over what came before."""
    letters(30)
    following = ada.get("dead-letters", {"ordering": "newest", "limit": 5}).json()["next"]
    plan = explain(selectors_sql(lambda: ada.get(following), "ops_deadletters_deadletter"))
    if connection.vendor == "postgresql":
        assert "Index Cond: (ROW(last_seen_at, id) <" in plan, plan
    else:
        assert "USING INDEX ops_letter_newest ((last_seen_at,id)<(?,?))" in plan or "last_seen_at<?" in plan, plan


# --- whose rows -------------------------------------------------------------------------------------------------------


def test_a_plain_django_permission_shows_nothing(cast: Cast, nobody: Api) -> None:
    """GRA-01: only grants open anything; what a model-level permission says plays no part."""
    group = Group.objects.create(name="everyone")
    group.permissions.set(Permission.objects.all())
    get_user_model().objects.get(pk=cast.nobody.user_id).groups.add(group)
    made = scene(cast.ada)
    for path in ("incidents", "dead-letters", "repair-actions"):
        assert nobody.rows(path) == []
    problem(nobody.get(f"dead-letters/{made.letter.id}"), 404, "dead_letter_not_found")
    problem(nobody.post(f"dead-letters/{made.letter.id}/retry"), 404, "dead_letter_not_found")


def test_each_list_shows_ones_own_tenant_and_only_a_star_shows_all(
    cast: Cast, ada: Api, olga: Api, bram: Api, vera: Api
) -> None:
    """GRA-01: list, filters and details agree."""
    ours, theirs = scene(cast.ada), scene(cast.ada, tenant="t-b")
    for path in ("incidents", "dead-letters", "repair-actions"):
        assert {row["tenant"] for row in olga.rows(path)} == {"default"}, path
        assert {row["tenant"] for row in bram.rows(path)} == {"t-b"}, path
        for all_seeing in (ada, vera):
            assert {row["tenant"] for row in all_seeing.rows(path)} == {"default", "t-b"}, path
    # Filters by what belongs to another tenant find nothing, and say nothing about it.
    assert olga.rows("dead-letters", {"incident": str(theirs.incident.id)}) == []
    assert olga.rows("dead-letters", {"task_id": theirs.letter.task_id}) == []
    assert olga.rows("repair-actions", {"dead_letter": str(theirs.retried.id)}) == []
    assert len(olga.rows("repair-actions", {"incident": str(ours.retried.incident_id)})) == 1
    assert len(olga.rows("repair-actions", {"batch": str(ours.batch_id), "state": "planned"})) == 1


def test_a_tenant_that_is_named_is_authorised_before_anything_is_looked_up(cast: Cast, olga: Api, ada: Api) -> None:
    """DESIGN 7: a route that names its scope answers 403; so does one for a tenant that does not exist."""
    for path in ("incidents", "dead-letters", "repair-actions"):
        assert olga.get(path, {"tenant": "default"}).status_code == 200
        for tenant in ("t-b", "no-such", "*"):
            problem(olga.get(path, {"tenant": tenant}), 403, "access_denied")
        assert ada.get(path, {"tenant": "*"}).status_code == 200
        assert ada.rows(path, {"tenant": "no-such"}) == []


def test_a_grant_for_one_actor_shows_that_actors_letters_and_no_incident(cast: Cast, nobody: Api) -> None:
    """B1: an actor-scoped grant never covers a tenant-wide read."""
    own = dead_letter(tenant="t-a", actor_type="order", actor_id="42")
    dead_letter(tenant="t-a", actor_type="order", actor_id="43")
    give(cast.nobody, Action.INSPECT, tenant="t-a", actor_type="order", actor_id="42")
    assert [row["id"] for row in nobody.rows("dead-letters")] == [str(own.id)]
    assert nobody.rows("incidents") == []
    problem(nobody.get(f"incidents/{own.incident_id}"), 404, "operations_incident_not_found")
    assert nobody.get(f"dead-letters/{own.id}").status_code == 200
    actor = {"actor_type": "order", "actor_id": "42"}
    assert len(nobody.rows("dead-letters", {"tenant": "t-a", **actor})) == 1
    problem(nobody.get("dead-letters", {"tenant": "t-a"}), 403, "access_denied")
    problem(nobody.get("dead-letters", {"tenant": "t-a", "actor_type": "order"}), 403, "access_denied")


def test_workers_are_shown_to_whoever_may_inspect_anything(bram: Api, nobody: Api) -> None:
    worker_node("alive")
    worker_node("gone", seen_at=database_now() - timedelta(minutes=5))
    rows = bram.rows("worker-nodes")
    assert [(row["id"], row["is_live"]) for row in rows] == [("alive", True), ("gone", False)]
    assert rows[0]["tasks"] == {"shop.send_mail": ""}
    assert [row["id"] for row in bram.rows("worker-nodes", {"live": "true"})] == ["alive"]
    assert [row["id"] for row in bram.rows("worker-nodes", {"live": "false", "source": "tests"})] == ["gone"]
    assert len(walk(bram, "worker-nodes", {"limit": 1})) == 2
    problem(nobody.get("worker-nodes"), 403, "access_denied")
