"""The drainer: batches from a worker's journal become rows exactly once, whatever the database does meanwhile."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from django.core.management import call_command
from django.db import DataError, InternalError, OperationalError

from deadletters import conf, drainer
from deadletters.drainer import DatabaseDown, Drained, FolderDrain
from deadletters.intake import Intake
from deadletters.journal.events import Batch, Delivery, Ended, EndState, ErrorReport, Failed
from deadletters.journal.files import JournalFile
from deadletters.journal.folder import JournalRoot
from deadletters.journal.kept import KeptFailures
from deadletters.models import Attempt, DeadLetter, JournalFolder, SetAsideEntry, TaskMinute, TaskPolicy, WorkerNode
from deadletters.policy import TaskPolicySpec
from deadletters.recorder import Recorded
from deadletters.replay import replay_kept, replay_set_aside
from opsconsole.core.clock import boot_id, boot_now, wall_now
from opsconsole.core.database import database_now
from opsconsole.core.ids import new_id
from tests import factories
from tests.clock import time_of

pytestmark = pytest.mark.django_db


class NoRepairs:
    """A settlement for journals without repairs; it remembers what it was told."""

    def __init__(self) -> None:
        self.endings: list[Ended] = []

    def letters_of(self, deliveries: Iterable[Delivery]) -> Mapping[str, UUID]:
        return {}

    def letters_of_repairs(self, repair_ids: Iterable[UUID]) -> Mapping[UUID, UUID]:
        return {}

    def is_settled_elsewhere(self, failed: Failed) -> bool:
        return False

    def failed(self, recorded: Iterable[Recorded], now: datetime) -> None: ...

    def ended(self, ended: Ended) -> None:
        self.endings.append(ended)


def drain(tmp_path: Path | None = None, **fields: Any) -> FolderDrain:
    kept = None
    if tmp_path is not None:
        kept = KeptFailures(JournalRoot(tmp_path), 1 << 20, 3_600, sealer=conf.sealer())
    return FolderDrain(
        folder_name="w.1.boot.1",
        source="tests",
        worker="celery@tests",
        settlement=fields.get("settlement", NoRepairs()),
        kept=kept,
        book=drainer.policies(),
    )


def drainer_in(path: Path) -> drainer.Drainer:
    """Return the drainer of a worker without any journal; its thread is not started."""
    root = JournalRoot(path)
    return drainer.Drainer(
        folder=root.create_worker_folder("w"), root=root, source="tests", worker="w", settlement=NoRepairs(),
        flush=lambda: None,
    )  # fmt: skip


def batch(*events: Failed | Ended, offset: int = 100, received: tuple[Delivery, ...] = ()) -> Drained:
    made = Batch(events=events, received=received, offsets={"main.000001.j": offset}, boot_id=boot_id())
    return Drained(batch=made, boot_id=boot_id())


def ended(state: EndState, **fields: Any) -> Ended:
    return Ended(delivery=factories.delivery(**fields), state=state, at_boot=boot_now(), at_wall=wall_now())


def test_counts_balance_and_are_committed_with_the_offset() -> None:
    """received = succeeded + failed + retried + ignored + revoked + lost + returned + in flight."""
    events = (
        factories.failed(),
        ended(EndState.SUCCESS),
        ended(EndState.RETRY),
        ended(EndState.IGNORED),
        ended(EndState.REVOKED),
        ended(EndState.RETURNED),
    )
    running = factories.delivery()
    received = (*(event.delivery for event in events), running)
    drain().apply(batch(*events, received=received))
    row = TaskMinute.objects.get()
    ends = [row.succeeded, row.failed, row.retried, row.ignored, row.revoked, row.lost, row.returned]
    assert ends == [1, 1, 1, 1, 1, 0, 1]
    assert row.received == sum(ends) + 1
    assert json.loads(JournalFolder.objects.get().offsets) == {"main.000001.j": 100}


def test_an_attempt_that_celery_retries_is_kept_with_its_error() -> None:
    error = ErrorReport(error_class="shop.errors.MailhubDown", text="refused", classes=("ConnectionRefusedError",))
    event = replace(ended(EndState.RETRY, task_id="t", retries=1, started_boot=boot_now() - 2), error=error)
    drain().apply(batch(event))
    drain().apply(batch(event))
    attempt = Attempt.objects.get()
    assert (attempt.task_id, attempt.retries, attempt.outcome_class) == ("t", 1, "safe")
    assert attempt.duration_ms is not None
    assert 1_900 < attempt.duration_ms < 3_000


def test_a_database_that_is_down_keeps_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only database raises InternalError: both mean wait, and neither sets anything aside."""
    monkeypatch.setattr(drainer, "AT_ONCE", 100)
    events = [factories.failed() for _ in range(250)]
    drained = batch(*events)
    real, calls = drainer.record_page, iter(range(10))

    def fail_on_the_second_page(*args: Any, **kwargs: Any) -> Any:
        number = next(calls)
        if number == 1:
            raise OperationalError("gone")
        if number == 2:
            raise InternalError("cannot execute INSERT in a read-only transaction")
        return real(*args, **kwargs)

    monkeypatch.setattr(drainer, "record_page", fail_on_the_second_page)
    folder = drain()
    for _ in range(2):
        with pytest.raises(DatabaseDown):
            folder.apply(drained)
        assert DeadLetter.objects.count() == 100
        assert not TaskMinute.objects.exists()
    folder.apply(drained)
    assert DeadLetter.objects.count() == 250
    assert TaskMinute.objects.get().failed == 250
    assert not SetAsideEntry.objects.exists()


@pytest.mark.parametrize("error", [DataError("value too long"), KeyError("a bug of ours")], ids=["data", "bug"])
def test_an_entry_that_fails_five_times_is_set_aside_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The others of its page are recorded; it is kept sealed, shown, and recorded once its cause is mended."""
    bad = factories.failed(task_id="bad")
    events = [factories.failed() for _ in range(30)]
    events.insert(17, bad)
    real = Intake.failure

    def break_on_the_bad_one(self: Intake, failed: Failed, **kwargs: Any) -> Any:
        if failed.delivery.task_id == "bad":
            raise error
        return real(self, failed, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(Intake, "failure", break_on_the_bad_one)
        drain().apply(batch(*events))
        assert DeadLetter.objects.count() == 30
        entry = SetAsideEntry.objects.get()
        assert type(error).__name__ in entry.reason
        assert b"bad" not in bytes(entry.blob)
        still = replay_set_aside(NoRepairs())
        assert len(still.refused) == (1 if isinstance(error, KeyError | DataError) else 0)
    done = replay_set_aside(NoRepairs())
    assert (done.recorded, done.refused) == (1, [])
    assert DeadLetter.objects.filter(task_id="bad").count() == 1
    entry.refresh_from_db()
    assert entry.applied_at is not None


def test_what_was_lost_in_a_failover_is_replayed_once(tmp_path: Path) -> None:
    """Kept failures are recorded again by delivery: what is missing comes back, what is there stays as it is."""
    drain(tmp_path).apply(batch(*[factories.failed() for _ in range(5)]))
    lost = DeadLetter.objects.first()
    assert lost is not None
    first_seen, incident = lost.first_seen_at, lost.incident
    lost.delete()
    incident.letter_count -= 1
    incident.unresolved_count -= 1
    incident.occurrence_count -= 1
    incident.save()
    kept = KeptFailures(JournalRoot(tmp_path), 1 << 20, 3_600, sealer=conf.sealer())
    report = replay_kept(kept, NoRepairs())
    assert (report.seen, report.recorded) == (5, 1)
    again = DeadLetter.objects.get(task_id=lost.task_id)
    assert abs((again.first_seen_at - first_seen).total_seconds()) < 0.1
    incident.refresh_from_db()
    assert (incident.letter_count, incident.unresolved_count) == (5, 5)
    assert replay_kept(kept, NoRepairs()).recorded == 0


def test_a_full_disk_costs_the_copy_and_not_the_letter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(KeptFailures, "keep", full)
    drain(tmp_path).apply(batch(factories.failed()))
    assert DeadLetter.objects.count() == 1
    assert TaskMinute.objects.get().failed == 1


def test_an_ignored_task_is_counted_and_makes_no_letter(settings: Any) -> None:
    settings.OPSCONSOLE_TASK_POLICIES = [TaskPolicySpec(pattern="shop.*", ignore=True)]
    drain().apply(batch(factories.failed()))
    assert TaskMinute.objects.get().failed == 1
    assert not DeadLetter.objects.exists()


def test_a_wrong_boot_marks_the_time_as_inexact() -> None:
    event = factories.failed(ago=30)
    drained = batch(event)
    drained.boot_id = "another boot"
    drain().apply(drained)
    letter = DeadLetter.objects.get()
    assert letter.occurrences.get().is_exact is False
    assert 29 < (letter.occurrences.get().recorded_at - letter.first_seen_at).total_seconds() < 32


def test_journal_status_and_replay_speak_json(
    tmp_path: Path, settings: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    settings.OPSCONSOLE_JOURNAL_DIR = str(tmp_path)
    folder = conf.journal_root().root.path
    drain(folder).apply(batch(factories.failed()))
    call_command("journal", "status", "--json")
    status = json.loads(capsys.readouterr().out)
    assert status["root"] == str(folder)
    assert folder.parent == tmp_path
    assert status["kept_bytes"] > 0
    call_command("journal", "replay", "--json")
    assert json.loads(capsys.readouterr().out) == {"seen": 1, "recorded": 0, "refused": []}


def test_settlement_is_told_of_repairs_and_redeliveries_alone() -> None:
    settlement = NoRepairs()
    repair = ended(EndState.SUCCESS, repair_id="r")
    back = ended(EndState.SUCCESS, redelivered=True)
    drain(settlement=settlement).apply(batch(ended(EndState.SUCCESS), repair, back))
    assert settlement.endings == [repair, back]


def test_counts_that_cannot_be_stored_under_their_name_are_kept_under_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile name must not stop the journal, and no count is lost."""
    real = FolderDrain._write_counts
    calls = iter(range(10))

    def refuse_the_first(self: FolderDrain, *args: Any) -> None:
        if next(calls) == 0:
            raise DataError("value too long")
        real(self, *args)

    monkeypatch.setattr(FolderDrain, "_write_counts", refuse_the_first)
    drain().apply(batch(ended(EndState.SUCCESS), ended(EndState.SUCCESS, tenant="t-b")))
    row = TaskMinute.objects.get()
    assert (row.tenant, row.job_type, row.succeeded) == ("default", "invalid", 2)


def test_an_answer_that_was_lost_does_not_count_twice() -> None:
    """The commit had happened; the drainer, not knowing, applies the batch again."""
    drained = batch(ended(EndState.SUCCESS))
    drain().apply(drained)
    drain().apply(drained)
    assert TaskMinute.objects.get().succeeded == 1
    drain().apply(batch(ended(EndState.SUCCESS), offset=200))
    assert TaskMinute.objects.get().succeeded == 2


def test_an_ending_that_cannot_be_settled_stops_nothing_behind_it() -> None:
    class Hostile(NoRepairs):
        def ended(self, ended: Ended) -> None:
            if ended.delivery.task_id == "bad":
                raise DataError("a NUL character")
            super().ended(ended)

    settlement = Hostile()
    good = ended(EndState.SUCCESS, repair_id="r", task_id="good")
    drain(settlement=settlement).apply(batch(ended(EndState.SUCCESS, repair_id="r", task_id="bad"), good))
    assert settlement.endings == [good]
    assert TaskMinute.objects.get().succeeded == 2


@pytest.mark.parametrize(("priority", "retries"), [(100_000, 0), (None, 2**31), (None, 2**63)])
def test_a_number_out_of_range_costs_no_letter(priority: int | None, retries: int) -> None:
    drain().apply(batch(factories.failed(priority=priority, retries=retries)))
    assert DeadLetter.objects.count() == 1
    assert not SetAsideEntry.objects.exists()


def test_an_attempt_number_out_of_range_stops_no_journal() -> None:
    drain().apply(batch(ended(EndState.RETRY, retries=2**63)))
    assert Attempt.objects.get().retries == 2**31 - 1
    assert TaskMinute.objects.get().retried == 1


def test_a_policy_that_makes_no_sense_is_left_out_and_the_others_hold(caplog: pytest.LogCaptureFixture) -> None:
    TaskPolicy.objects.create(pattern="shop.bad", safe_errors="not-a-name!")
    TaskPolicy.objects.create(pattern="shop.*", severity=40)
    drain().apply(batch(factories.failed()))
    assert DeadLetter.objects.get().incident.severity == 40
    assert "shop.bad" in caplog.text


def test_a_folder_that_cannot_be_recovered_does_not_keep_the_others_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Folder:
        def __init__(self, name: str) -> None:
            self.name = name
            self.deleted = False

        def delete(self) -> None:
            self.deleted = True

        def release(self) -> None: ...

    folders = [Folder("bad"), Folder("good")]

    def recover(folder: Any, _drain: object) -> bool:
        if folder.name == "bad":
            raise ValueError("no sense in it")
        return True

    monkeypatch.setattr(JournalRoot, "dead_folders", lambda _self: iter(folders))
    monkeypatch.setattr(drainer, "recover_folder", recover)
    root = JournalRoot(tmp_path)
    for name in ("good", "bad"):
        now = database_now()
        WorkerNode.objects.create(id=name, source="tests", host="h", pid=1, started_at=now, seen_at=now)
    thread = drainer.Drainer(
        folder=root.create_worker_folder("w"), root=root, source="tests", worker="w", settlement=NoRepairs(),
        flush=lambda: None,
    )  # fmt: skip
    assert thread.recover() == 1
    # What was recovered has ended, and is not missed as silent for ever.
    assert list(WorkerNode.objects.filter(stopped_at=None).values_list("id", flat=True)) == ["bad"]
    assert [folder.deleted for folder in folders] == [False, True]


def test_while_the_database_is_down_the_disk_is_made_to_hold_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = JournalRoot(tmp_path)
    folder = root.create_worker_folder("w")
    file = JournalFile(folder.path, "main", head={}, trouble=lambda exc: None)
    thread = drainer.Drainer(
        folder=folder, root=root, source="tests", worker="w", settlement=NoRepairs(), flush=file.flush
    )
    synced: list[str] = []

    def down() -> bool:
        raise drainer.DatabaseDown("gone")

    def fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        thread.stop()

    monkeypatch.setattr(thread, "step", down)
    monkeypatch.setattr(os, "fsync", fsync)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert synced[0] == str(file.path)


class Read:
    """A reader that brings the batches it was given, one at a time."""

    def __init__(self, *batches: Batch) -> None:
        self.batches = list(batches)

    def read(self, *_: Any, **__: Any) -> Batch:
        return self.batches.pop(0) if self.batches else Batch(events=(), received=())

    def prune(self, offsets: dict[str, int]) -> None: ...


def test_what_is_only_counted_is_gathered_and_a_failure_waits_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    thread = drainer_in(tmp_path)
    applied: list[Drained] = []
    now = 100.0
    time_of(monkeypatch, drainer, monotonic=lambda: now)
    monkeypatch.setattr(thread._drain, "apply", applied.append)
    well, failure = ended(EndState.SUCCESS), factories.failed()
    thread._reader = Read(  # type: ignore[assignment]
        Batch(events=(well,), received=(well.delivery,), offsets={"main": 1}, damaged=("bytes 1 to 2",)),
        Batch(events=(well,), received=(), offsets={"main": 2}),
        Batch(events=(failure,), received=(), offsets={"main": 3}),
        Batch(events=(well,), received=(), offsets={"main": 4}),
    )
    assert [thread.step(), thread.step(), len(applied)] == [False, False, 0]
    assert "damaged: bytes 1 to 2" in caplog.text
    thread.step()
    assert [(one.batch.events, one.batch.offsets) for one in applied] == [((well, well, failure), {"main": 3})]
    thread.step()
    now += drainer.GATHER_SECONDS - 0.01
    thread.step()
    assert len(applied) == 1
    now += 0.01
    thread.step()
    assert (applied[1].batch.events, applied[1].batch.offsets) == ((well,), {"main": 4})


def test_the_rest_of_a_burst_is_gathered_and_the_disk_holds_it_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = drainer_in(tmp_path)
    applied: list[Drained] = []
    synced: list[float] = []
    now = 100.0
    time_of(monkeypatch, drainer, monotonic=lambda: now)
    monkeypatch.setattr(thread._drain, "apply", applied.append)
    monkeypatch.setattr(thread.folder, "sync", lambda: synced.append(now))
    failures = [factories.failed() for _ in range(4)]
    repair = factories.failed(repair_id=str(new_id()))
    thread._reader = Read(  # type: ignore[assignment]
        *(Batch(events=(one,), received=(), offsets={"main": number}) for number, one in enumerate(failures)),
        Batch(events=(repair,), received=(), offsets={"main": 9}),
    )
    thread.step()
    assert [one.batch.events for one in applied] == [(failures[0],)]
    for _ in range(3):
        now += 0.25
        thread.step()
    assert (len(applied), synced) == (1, [100.25, 100.5, 100.75])
    # A repair's end is awaited by somebody: it takes along what had been gathered.
    thread.step()
    assert [one.batch.events for one in applied[1:]] == [(*failures[1:], repair)]


def test_a_worker_that_stops_leaves_nothing_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thread = drainer_in(tmp_path)
    applied: list[Drained] = []
    monkeypatch.setattr(thread._drain, "apply", applied.append)
    thread._reader = Read(Batch(events=(ended(EndState.SUCCESS),), received=()))  # type: ignore[assignment]
    thread.step()
    assert applied == []
    thread.stop()
    thread.step()
    assert len(applied) == 1
