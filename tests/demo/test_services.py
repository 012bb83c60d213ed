"""The demo's services: what they do when they are well, and what when they are broken."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from opsconsole.demo.flaky import Services, answers
from opsconsole.demo.folder import KEPT_REQUESTS, Condition, DemoFolder


@pytest.fixture
def folder(tmp_path: Path) -> DemoFolder:
    return DemoFolder(tmp_path / "demo")


@pytest.fixture
def services(folder: DemoFolder) -> Iterator[Services]:
    running = Services(folder)
    yield running
    running.stop()


def ask(port: int, method: str = "POST", document: Any = None, timeout: float = 5) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request(method, "/any", body=json.dumps(document or {}))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def wait_until(is_so: Callable[[], bool]) -> None:
    for _ in range(100):
        if is_so():
            return
        time.sleep(0.02)
    pytest.fail("it did not come about", pytrace=False)


def test_a_new_demo_is_broken(folder: DemoFolder) -> None:
    assert folder.condition() == Condition(is_broken=True, breakage=1, since=0.0)
    begun = folder.begin()
    assert begun.is_broken
    assert begun.breakage == 1
    assert begun.since > 0


def test_healing_and_breaking_are_changes_once(folder: DemoFolder) -> None:
    folder.begin()
    assert folder.set_broken(True) is False
    assert folder.set_broken(False) is True
    assert folder.set_broken(False) is False
    assert folder.condition().breakage == 1
    assert folder.set_broken(True) is True
    assert folder.condition().breakage == 2


def test_the_broken_mail_service_refuses_connections_and_keeps_its_port(services: Services) -> None:
    port = services.folder.ports()["mail"]
    with pytest.raises(ConnectionRefusedError):
        ask(port)
    services.folder.set_broken(False)
    services.look()
    assert ask(port) == (202, {"state": "accepted"})
    services.folder.set_broken(True)
    services.look()
    with pytest.raises(ConnectionRefusedError):
        ask(port)
    assert services.folder.ports()["mail"] == port


def test_the_broken_payment_service_writes_a_request_down_and_never_answers(services: Services) -> None:
    with pytest.raises(TimeoutError):
        ask(services.payments.port, document={"reference": "charge-1"}, timeout=0.3)
    [request] = services.folder.requests()
    assert (request.reference, request.is_answered) == ("charge-1", False)


def test_the_payment_service_answers_when_it_is_well(services: Services) -> None:
    services.folder.set_broken(False)
    assert ask(services.payments.port, document={"reference": "charge-2"}) == (
        201,
        {"state": "paid", "reference": "charge-2"},
    )
    assert ask(services.payments.port, method="GET")[0] == 200
    [request] = services.folder.requests()
    assert request.is_answered


def test_a_client_that_is_gone_frees_its_thread(services: Services) -> None:
    before = threading.active_count()
    with pytest.raises(TimeoutError):
        ask(services.payments.port, method="GET", timeout=0.2)
    wait_until(lambda: threading.active_count() <= before)


def test_stopping_forgets_the_ports(folder: DemoFolder) -> None:
    services = Services(folder)
    port = services.payments.port
    assert answers(port)
    services.stop()
    assert folder.ports() == {}
    assert not answers(port)


def test_old_requests_are_dropped_when_the_services_start(folder: DemoFolder) -> None:
    for number in range(KEPT_REQUESTS + 5):
        folder.note_request(f"charge-{number}", is_answered=True)
    folder.drop_old_requests()
    text = (folder.path / "requests.jsonl").read_text()
    assert text.count("\n") == KEPT_REQUESTS
    assert folder.requests()[0].reference == "charge-5"


def test_a_line_that_is_being_written_is_not_read(folder: DemoFolder) -> None:
    folder.note_request("whole", is_answered=True)
    with (folder.path / "requests.jsonl").open("a") as file:
        file.write('{"at": 1.0, "refer')
    assert [request.reference for request in folder.requests()] == ["whole"]
