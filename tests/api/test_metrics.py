"""``/metrics``: who is told what, in which form, and at what cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from deadletters.models import TaskMinute
from grants.actions import Action
from grants.services import create_token
from opsconsole.console import machinery
from opsconsole.core.database import database_now
from tests.api.client import Api, problem
from tests.api.situations import held_letter, placed_hold, planned_redrive, worker_node
from tests.cast import Cast
from tests.factories import dead_letter


@pytest.fixture(autouse=True)
def _read_afresh() -> Iterator[None]:
    machinery.forget()
    yield
    machinery.forget()


def scrape(api: Api, **headers: str) -> dict[tuple[str, ...], float]:
    """Return each sample by its name and the values of its labels, in the order of the labels' names."""
    answer = api.client.get("/metrics", headers={**api.headers, **headers})
    assert answer.status_code == 200, answer.content
    text = answer.content.decode()
    families = parse_openmetrics(text) if "openmetrics" in answer["Content-Type"] else parse(text)
    return {
        (sample.name.removeprefix("opsconsole_"), *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def minute(tenant: str = "default", ago: float = 60.0, **counts: int) -> None:
    at = (database_now() - timedelta(seconds=ago)).replace(second=0, microsecond=0)
    TaskMinute.objects.create(source="tests", tenant=tenant, job_type="shop.send_mail", minute=at, **counts)


def test_it_tells_what_waits_and_who_works(cast: Cast, ada: Api) -> None:
    worker_node(journal_bytes=4_096, journal_oldest_seconds=9.0, captured_at=database_now())
    letter = dead_letter()
    dead_letter(task="shop.other")
    hold_id = placed_hold(cast.ada)
    held_letter(hold_id)
    planned_redrive(cast.ada, letter)
    minute(received=5, failed=2, succeeded=3)
    minute(ago=120.0, received=1, failed=1)
    minute(ago=7_200.0, received=100, failed=100)
    told = scrape(ada)
    severity = {key[1]: value for key, value in told.items() if key[0] == "unresolved_dead_letters"}
    assert sum(severity.values()) == 3
    assert sum(value for key, value in told.items() if key[0] == "incidents") == 3
    expected = {
        ("held_dead_letters",): 1,
        ("holds",): 1,
        ("redrives", "ready"): 1,
        ("redrives", "running"): 0,
        ("redrive_jobs", "waiting"): 1,
        ("redrive_jobs", "failed"): 0,
        ("task_deliveries_last_hour", "received", "tests", "shop.send_mail"): 6,
        ("task_deliveries_last_hour", "failed", "tests", "shop.send_mail"): 3,
        ("task_deliveries_last_hour", "succeeded", "tests", "shop.send_mail"): 3,
        ("workers_reporting",): 1,
        ("workers_silent",): 0,
        ("journal_waiting_bytes",): 4_096,
        ("journal_waiting_seconds",): 9,
    }
    assert {key: told[key] for key in expected} == expected
    assert abs(told["last_capture_timestamp_seconds",] - database_now().timestamp()) < 60
    assert ("last_sweep_timestamp_seconds",) not in told, "no sweep has ever run"


def test_an_empty_console_tells_zeros(ada: Api) -> None:
    told = scrape(ada)
    assert {key: value for key, value in told.items() if value} in ({}, {("sweeps_overdue",): 1.0})
    assert told["unresolved_dead_letters", "critical"] == told["redrives", "paused"] == told["workers_reporting",] == 0


def test_everybody_is_told_of_what_they_may_see(cast: Cast, bram: Api, nobody: Api, stranger: Api) -> None:
    """GRA-01, GRA-02: 401 for a stranger, 403 for who may see nothing, and of another tenant not a single job."""
    planned_redrive(cast.ada, dead_letter())
    held_letter(placed_hold(cast.ada))
    minute(received=1, failed=1)
    told = scrape(bram)
    assert not [key for key in told if key[0] == "task_deliveries_last_hour"]
    of_jobs = ("incidents", "unresolved_dead_letters", "held_dead_letters", "holds", "redrives", "redrive_jobs")
    assert {value for key, value in told.items() if key[0] in of_jobs} == {0.0}
    refused = stranger.client.get("/metrics")
    problem(refused, 401, "not_authenticated")
    assert refused["WWW-Authenticate"].startswith("Bearer")
    problem(nobody.client.get("/metrics"), 403, "access_denied")


def test_a_scraper_comes_with_a_token_and_says_which_form_it_reads(cast: Cast) -> None:
    dead_letter()
    made = create_token(
        by=cast.ada, name="prometheus", actions={Action.INSPECT}, tenant="*",
        expires_at=database_now() + timedelta(days=1), key="K",
    )  # fmt: skip
    api = Api(token=made.plain or "")
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    for header in ("", "text/plain", accept, "application/openmetrics-text;version=nonsense", "image/png"):
        told = scrape(api, Accept=header)
        assert sum(value for key, value in told.items() if key[0] == "unresolved_dead_letters") == 1, header
    plain = api.client.get("/metrics", headers=api.headers)
    assert plain["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert plain["Cache-Control"] == "private, no-store"
    assert api.client.post("/metrics", headers=api.headers).status_code == 405


def test_a_task_with_any_name_is_one_line(ada: Api) -> None:
    minute(received=1)
    TaskMinute.objects.update(job_type='shop."x"\\\n# HELP', source="é")
    assert scrape(ada)["task_deliveries_last_hour", "received", "é", 'shop."x"\\\n# HELP'] == 1


def test_a_scrape_takes_few_queries_however_much_there_is(cast: Cast, ada: Api) -> None:
    def count() -> int:
        machinery.forget()
        with CaptureQueriesContext(
            connection,
        ) as queries:
            scrape(ada)
        return len(queries)

    count()
    few = count()
    for number in range(5):
        planned_redrive(cast.ada, dead_letter(task=f"shop.task{number}"))
        held_letter(placed_hold(cast.ada))
        minute(tenant=f"t-{number}", received=1)
        worker_node(f"w{number}", tasks=json.dumps({}))
    assert (few, count()) == (few, few)
    assert few <= 14
