"""A task that is about to start and meets a hold: traced as a worker does it, with a real journal; no database."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from celery.app.trace import build_tracer

from deadletters.journal import hooks as module
from deadletters.journal.events import Caught, EndState, Event, Failed
from deadletters.journal.folder import JournalRoot
from deadletters.journal.frames import MESSAGE_CONTEXT, Kind, message_part
from deadletters.journal.holds import payload_hash
from deadletters.journal.hooks import REPAIR_HEADER, HeldBack, Hooks, PutAside
from deadletters.journal.message import TOKEN_KEY, pack_parts
from deadletters.journal.reader import FolderReader
from opsconsole.jobs.tokens import REPAIRED_HEADER
from tests.clock import time_of
from tests.deadletters.journal_app import FileGuard, make_app
from tests.deadletters.journal_writer import SEALER
from tests.deadletters.test_held import rule

LEDGER_ID = "job:01900000-0000-7000-8000-000000000000:1:ab"


class Traced:
    """Hooks of a worker that runs in this process, and its tasks."""

    def __init__(self, folder: Path) -> None:
        self.app = make_app({"JOURNAL_APP_QUEUE": "shop"})
        self.ran: list[int] = []

        @self.app.task(name="shop.charge", shared=False)
        def charge(amount: int) -> None:
            self.ran.append(amount)

        @self.app.task(name="opsconsole.jobs.bill", shared=False)
        def bill(amount: int) -> None:
            self.ran.append(amount)

        (folder / "guard").mkdir()
        self.hooks = Hooks(
            self.app, source="tests", sealer=SEALER, root=JournalRoot(folder / "journal"),
            guard=FileGuard(folder / "guard"),
        )  # fmt: skip
        self.hooks._on_worker_init(sender=SimpleNamespace(hostname="worker@host"))
        self.hooks.connect()
        self.number = self.holds = 0

    def hold(self, **values: Any) -> None:
        self.holds += 1
        self.hooks.holds.put([rule(**{"job_type": "shop.charge", "id": f"hold-{self.holds}", **values})])

    def run(self, name: str = "shop.charge", *, late: bool = False, amount: int = 1, **headers: Any) -> Any:
        """Receive a message and start its task; returns what the tracer says: the state, and what was raised."""
        self.number += 1
        task = self.app.tasks[name]
        task.acks_late = late
        request = {
            "id": f"id-{self.number}", "task": name, "retries": 0, "is_eager": False, "args": [amount], "kwargs": {},
            "delivery_info": {"exchange": "", "routing_key": "shop"}, "properties": {TOKEN_KEY: self.number}, **headers,
        }  # fmt: skip
        file = self.hooks._file
        assert file is not None
        identity = self.hooks._describe(request, None, request.get("chord"))
        file.append(module.ENTRY.pack(Kind.RECEIVED, self.number, 1.0, 1.0) + identity)
        tracer: Any = build_tracer(name, task, app=self.app, eager=False, propagate=False)
        _retval, info, _time, _text = tracer(request["id"], [amount], {}, request)
        return ("SUCCESS", None) if info is None else (info.state, info.retval)

    def acknowledge(self, number: int) -> None:
        packed, state, digest = pack_parts(
            body=b"[[1], {}, {}]", content_type="application/json", content_encoding="utf-8", properties={},
            headers={"id": f"id-{number}"}, delivery_info={},
        )  # fmt: skip
        assert self.hooks._file is not None
        part = message_part(SEALER.seal(packed, MESSAGE_CONTEXT), state, digest)
        self.hooks._file.append(module.ENTRY.pack(Kind.ACK, number, 2.0, 2.0) + part)

    def events(self) -> list[Event]:
        """Acknowledge everything, and read what the journal says."""
        for number in range(1, self.number + 1):
            self.acknowledge(number)
        self.hooks.flush()
        assert self.hooks.folder is not None
        return list(FolderReader(self.hooks.folder, SEALER, settle_seconds=0).read(to_the_end=True).events)


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Traced]:
    made = Traced(tmp_path)
    monkeypatch.setattr(module, "_connected", made.hooks)
    yield made
    made.hooks.disconnect()
    made.hooks.close()
    made.app.close()


def kinds(events: list[Event]) -> list[str]:
    return [str(event.caught if isinstance(event, Failed) else event.state) for event in events]


@pytest.mark.parametrize("late", [False, True])
def test_a_matching_message_is_written_down_and_its_body_does_not_run(traced: Traced, late: bool) -> None:
    """C14: neither a start nor another end of it stands in the journal."""
    assert traced.run(amount=1)[0] == "SUCCESS"
    traced.hold()
    state, raised = traced.run(amount=2, late=late, chord={"options": {"task_id": "chord"}}, eta="2026-01-01T00:00:00Z")
    assert (state, type(raised)) == ("IGNORED", PutAside)
    traced.hooks.holds.put([])
    assert traced.run(amount=3)[0] == "SUCCESS"
    assert traced.ran == [1, 3]
    events = traced.events()
    assert sorted(kinds(events)) == ["held", "succeeded", "succeeded"]
    (held,) = [event for event in events if isinstance(event, Failed)]
    assert (held.caught, held.delivery.started_boot, held.delivery.hold_id) == (Caught.HELD, None, "hold-1")
    assert (held.delivery.timed, held.delivery.chord_id) == (True, "chord")


def test_what_does_not_match_runs(traced: Traced) -> None:
    traced.hold(tenant="t-b")
    assert traced.run()[0] == "SUCCESS"
    traced.hold(payload_hash=payload_hash([2], {}))
    assert [traced.run(amount=amount)[0] for amount in (1, 2, 3)] == ["SUCCESS", "IGNORED", "SUCCESS"]


def test_a_repair_passes_and_one_with_a_copied_header_does_not(traced: Traced) -> None:
    """C5: an operator has asked for the one; the other is a job like any other, whoever's header it has."""
    traced.hold()
    assert traced.run(amount=1, **{REPAIR_HEADER: "r1"})[0] == "SUCCESS"
    assert traced.run(amount=2, **{REPAIR_HEADER: "copied-r1"})[0] == "IGNORED"
    assert traced.run(amount=3, **{REPAIR_HEADER: "no-r1"})[0] == "IGNORED", "the guard refuses, hold or not"
    assert traced.run(amount=4, **{REPAIRED_HEADER: "r1"})[0] == "IGNORED", "that one is for the ledger's jobs"
    assert traced.ran == [1]
    assert sorted(kinds(traced.events())) == ["held", "held", "refused", "succeeded"]


def test_a_job_of_the_ledger_goes_back_to_it_unless_it_was_put_back_by_an_operator(traced: Traced) -> None:
    traced.hooks.holds.put([rule(job_type="bill")])
    state, raised = traced.run("opsconsole.jobs.bill", id=LEDGER_ID)
    assert (state, type(raised)) == ("IGNORED", HeldBack)
    assert traced.run("opsconsole.jobs.bill", amount=2, id=LEDGER_ID, **{REPAIRED_HEADER: "r1"})[0] == "SUCCESS"
    assert traced.run("opsconsole.jobs.bill", amount=3, id=LEDGER_ID, **{REPAIR_HEADER: "copied-r1"})[0] == "IGNORED"
    assert traced.ran == [2]
    assert sorted(kinds(traced.events())) == [EndState.HELD_BACK, EndState.HELD_BACK, EndState.SUCCESS]
    traced.hooks.holds.put([rule(job_type="", task_id="01900000-0000-7000-8000-000000000000")])
    assert traced.run("opsconsole.jobs.bill", id=LEDGER_ID)[0] == "IGNORED", "by the job, for all its dispatches"


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def end_without_disk(traced: Traced) -> None:
    """What a worker's processes know of holds needs no disk."""
    with pytest.raises(OSError, match="No space"):
        traced.hooks.holds.put([])


@pytest.fixture
def pauses(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What happens in each pause of a worker that cannot write down what it holds; its clock runs with them."""
    steps: list[Any] = []
    clock = [1_000.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        if steps:
            steps.pop(0)()

    time_of(monkeypatch, module, sleep=sleep, monotonic=lambda: clock[0])
    return steps


@pytest.mark.parametrize("late", [False, True])
def test_while_the_disk_is_full_a_held_message_waits_and_is_written_down_after(
    traced: Traced, pauses: list[Any], monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """It neither runs nor is lost; and nothing that waited in memory tells of it a second time."""
    traced.hold()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        pauses += [lambda: None, lambda: None, patched.undo]
        state, raised = traced.run(amount=1, late=late)
    assert (state, type(raised), traced.ran) == ("IGNORED", PutAside, [])
    assert kinds(traced.events()) == ["held"]


def test_what_cannot_be_written_down_goes_back_to_a_broker_that_still_has_it(
    traced: Traced, pauses: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    traced.hold()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        state, raised = traced.run(late=True)
        assert (state, raised.requeue) == ("REJECTED", True)
        pauses.append(lambda: (_ for _ in ()).throw(SoftTimeLimitExceeded()))
        assert traced.run(late=True)[0] == "REJECTED"
    assert traced.ran == []
    assert "held" not in kinds(traced.events())


def test_a_hold_that_ends_while_its_message_waits_lets_it_run(
    traced: Traced, pauses: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its start is in the journal then: killed in its body, it may have happened."""
    traced.hold()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        pauses += [lambda: None, lambda: end_without_disk(traced)]
        assert traced.run(amount=7)[0] == "SUCCESS"
    assert traced.ran == [7]
    (event,) = traced.events()
    assert event.delivery.started_boot is not None


def test_without_a_journal_what_is_held_does_not_run(
    traced: Traced, pauses: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    traced.hold()
    monkeypatch.setattr(traced.hooks, "_file", None)
    tracer: Any = build_tracer("shop.charge", traced.app.tasks["shop.charge"], app=traced.app)
    traced.app.tasks["shop.charge"].acks_late = True
    _retval, info, *_ = tracer("id", [1], {}, {"id": "id", "task": "shop.charge", "is_eager": False})
    assert (info.state, info.retval.requeue, traced.ran) == ("REJECTED", True, [])


def test_being_put_aside_survives_being_pickled() -> None:
    for kind in (PutAside, HeldBack):
        again = pickle.loads(pickle.dumps(kind("hold x")))
        assert (type(again), str(again)) == (kind, "hold x")
