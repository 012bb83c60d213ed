"""Workers of a project that attaches: they run as before, and what fails in them can be repaired."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.attach.conftest import Make
from tests.attach.shop import Shop, wait_until

RUN_EVERYTHING = """
from celery.exceptions import TimeoutError as NotYet
from celery import chain
from shop.celery import app
from shop import tasks
app.finalize()
sent = {
    "add": tasks.add.delay(2, 3),
    "bill": tasks.bill.delay(shop="north", order=7),
    "restock": tasks.restock.delay("shelf"),
    "look_up": tasks.look_up.delay("nowhere"),
    "count_orders": tasks.count_orders.delay(),
    "audited": tasks.audited.delay(4),
    "audited, negative": tasks.audited.delay(-1),
    "plain_base": tasks.plain_base.delay(),
    "Report": app.tasks["shop.tasks.Report"].delay("monday"),
    "chain": chain(tasks.add.s(1, 2), tasks.add.s(3))(),
    "not registered": app.send_task("shop.tasks.gone"),
    "wrong arguments": app.send_task("shop.tasks.add", args=(1,)),
    "describe": tasks.describe_worker.delay(),
}
silent = tasks.silent.delay()
answer = {}
for name, result in sent.items():
    value = result.get(timeout=40, propagate=False)
    answer[name] = [result.state, value if name == "describe" else repr(value), bool(result.traceback)]
answer["silent"] = silent.state
"""


def run_everything(shop: Shop) -> dict[str, Any]:
    shop.start_worker()
    answer: dict[str, Any] = shop.evaluate(RUN_EVERYTHING)
    wait_until(lambda: "silent" in shop.notes(), lambda: shop.text)
    answer["notes"] = shop.notes()
    assert shop.stop_worker() == 0
    answer["messages"] = sorted(kind for kind in ("succeeded in", "raised unexpected", "retry:") if kind in shop.text)
    return answer


def test_every_job_ends_as_it_did_before(make: Make) -> None:
    """Results, states, tracebacks, retries, hooks of the project's own and the configuration within the worker."""
    before = run_everything(make(is_attached=False))
    with_console = make(is_attached=True)
    after = run_everything(with_console)
    assert before["bill"] == ["FAILURE", "ConnectionRefusedError(111, 'Connection refused')", True]
    assert before["restock"][:2] == ["SUCCESS", "'shelf after 2'"]
    assert "on_failure ValueError" in before["notes"]
    assert before["notes"].count("look_up nowhere") == 2
    in_worker = [json.dumps(found.pop("describe")[1]) for found in (before, after)]
    assert json.loads(in_worker[1].replace("shop-1/", "shop-0/")) == json.loads(in_worker[0])
    assert after == before

    letters = with_console.letters()
    assert {letter["job_type"] for letter in letters} == {
        "shop.tasks.bill",
        "shop.tasks.look_up",
        "shop.tasks.audited",
        "shop.tasks.gone",
        "shop.tasks.add",
    }
    assert {letter["source"] for letter in letters} == {"shop"}
    [bill] = [letter for letter in letters if letter["job_type"] == "shop.tasks.bill"]
    assert (bill["tenant"], bill["actor_type"], bill["actor_id"]) == ("north", "order", "7")
    assert bill["outcome_class"] == "safe", "the policy says that it has effects outside, the error that none was made"


SEND_BILLS = """
from shop.tasks import bill
answer = [bill.delay(shop="north", order=number).id for number in (1, 2, 3)]
"""
RETRY_OVER_REST = """
from uuid import uuid4
from django.contrib.auth import get_user_model
from django.test import Client
from grants.actions import Action
from grants.operators import Operator
from grants.services import create_token
from opsconsole.core.database import database_now
person = get_user_model().objects.get(email="ada@shop.example")
token = create_token(by=Operator.from_user(person), name="shop", actions=set(Action), tenant="north",
                     expires_at=database_now().replace(year=2099), key=str(uuid4()))
answered = Client().post(
    f"/console-api/v1/dead-letters/{values['letter']}/retry", data="{}", content_type="application/json",
    headers={"Authorization": f"Bearer {token.plain}", "Idempotency-Key": str(uuid4())},
)
answer = [answered.status_code, answered.json()]
"""


def test_failed_jobs_are_repaired_and_their_incident_closes_by_itself(make: Make) -> None:
    """C11, in a project with ATOMIC_REQUESTS and a user model of its own: one over REST, the rest from the shell."""
    shop = make(is_attached=True)
    person = "from django.contrib.auth import get_user_model\n"
    person += "answer = get_user_model().objects.create_user('ada@shop.example', 'a-long-password', is_staff=True).pk"
    shop.evaluate(person)
    shop.run("grants", "bootstrap", "ada@shop.example")
    shop.start_worker()
    shop.evaluate(SEND_BILLS)
    letters = wait_until(lambda: found if len(found := shop.letters()) == 3 else None, lambda: shop.text)
    assert shop.standing() == [("open", 3, 3, "")]

    shop.heal()
    status, body = shop.evaluate(RETRY_OVER_REST, letter=letters[0]["id"])
    assert status in (200, 202), body
    wait_until(lambda: shop.standing()[0][2] == 2, lambda: shop.text)
    [incident] = {letter["incident_id"] for letter in letters}
    shop.run("incidents", "retry", incident, "--all", "2", "--operator", "ada@shop.example")
    closed = ("resolved", 3, 0, "system:system")
    wait_until(lambda: shop.standing() == [closed], lambda: f"{shop.standing()} {shop.text}")
    assert shop.notes() == sorted(["bill 1", "bill 2", "bill 3"] * 2), "each body ran once more"


ADD = """
from shop.tasks import add
answer = add.delay(2, 3).get(timeout=40)
"""
FAIL = """
from shop.tasks import bill
result = bill.delay(shop="north", order=1)
result.get(timeout=40, propagate=False)
answer = result.state
"""


def test_the_kill_switch_keeps_everything_out_of_the_worker(make: Make) -> None:
    shop = make(is_attached=True, OPSCONSOLE_CAPTURE="off")
    shop.start_worker()
    assert shop.evaluate(FAIL) == "FAILURE"
    assert shop.evaluate(ADD) == 5
    assert shop.stop_worker() == 0
    assert shop.letters() == []
    assert shop.query("SELECT * FROM ops_deadletters_workernode") == []
    assert not (shop.folder / "journal").exists()


def test_a_worker_without_a_journal_folder_starts_and_says_so_loudly(make: Make, tmp_path: Path) -> None:
    (tmp_path / "in-the-way").write_text("a file where a folder should be")
    shop = make(is_attached=True, SHOP_JOURNAL_DIR=str(tmp_path / "in-the-way" / "journal"))
    shop.start_worker()
    assert shop.evaluate(ADD) == 5
    assert shop.evaluate(FAIL) == "FAILURE"
    assert "opsconsole has no journal in this worker and captures nothing" in shop.text


def test_a_worker_without_a_database_starts_and_records_once_it_is_there(make: Make, tmp_path: Path) -> None:
    """A database that is missing delays letters and stops nothing."""
    shop = make(is_attached=True, SHOP_DATABASE=str(tmp_path / "not-yet" / "shop.sqlite3"))
    shop.start_worker()
    assert shop.evaluate(ADD) == 5
    assert shop.evaluate(FAIL) == "FAILURE"
    wait_until(lambda: "the journal keeps it" in shop.text, lambda: shop.text)
    (tmp_path / "not-yet").mkdir()
    shop.run("migrate")
    wait_until(lambda: len(shop.letters()) == 1, lambda: shop.text)
    assert shop.stop_worker() == 0
