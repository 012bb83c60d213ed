"""Recorded failures stay at hand for a while, sealed, and go by age and size."""

from __future__ import annotations

import os
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest

from deadletters.journal import kept as module
from deadletters.journal.events import Caught, Delivery, ErrorReport, Failed, MessageState
from deadletters.journal.folder import JournalRoot
from deadletters.journal.frames import MESSAGE_CONTEXT
from deadletters.journal.kept import KeptFailures
from opsconsole.core.sealing import Sealer, derive_key
from tests.clock import time_of
from tests.deadletters.journal_writer import SEALER


def failed(number: int, text: str = "no money") -> Failed:
    return Failed(
        delivery=Delivery(
            token=f"worker.{number}",
            task_id=f"id-{number}",
            task="shop.charge",
            retries=2,
            tenant="acme",
            priority=3,
            redelivered=True,
            started_boot=1.5,
            claimed=True,
            sealed=SEALER.seal(b"packed", MESSAGE_CONTEXT),
            message_state=MessageState.FULL,
            message_digest="ab" * 32,
        ),
        caught=Caught.WORKER_LOST,
        at_boot=10.5,
        at_wall=20.5,
        error=ErrorReport(error_class="shop.Declined", text=text, classes=("shop.Declined", "Exception")),
        never_started=True,
    )


@pytest.fixture
def root(tmp_path: Path) -> JournalRoot:
    return JournalRoot(tmp_path / "journal")


def keep_in(root: JournalRoot, *, max_bytes: int = 1 << 20, seconds: float = 3600.0) -> KeptFailures:
    return KeptFailures(root, max_bytes, seconds, sealer=SEALER)


def test_what_was_kept_comes_back_whole_and_in_order(root: JournalRoot) -> None:
    kept = keep_in(root)
    kept.keep([failed(1), failed(2, "lone \ud800 and \0")])
    kept.keep([failed(3)])
    kept.keep([])
    expected = [failed(1), failed(2, "lone \ud800 and \0"), failed(3)]
    found = list(keep_in(root).iter())
    for was, now in zip(expected, found, strict=True):
        assert SEALER.open(now.delivery.sealed, MESSAGE_CONTEXT) == b"packed"
        was.delivery.sealed = now.delivery.sealed = b""
        assert now == was


def test_nothing_kept_is_readable_on_disk(root: JournalRoot) -> None:
    kept = keep_in(root)
    kept.keep([failed(1, "card 4111 declined")])
    (path,) = kept.path.iterdir()
    assert b"4111" not in path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    assert kept.path.stat().st_mode & 0o777 == 0o700


def test_a_torn_or_damaged_file_gives_what_is_left(root: JournalRoot) -> None:
    kept = keep_in(root)
    for number in range(1, 5):
        kept.keep([failed(number)])
    (path,) = kept.path.iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 4 + 50] ^= 0xFF
    path.write_bytes(data[:-10])
    assert [item.delivery.task_id for item in kept.iter()] == ["id-1", "id-3"]


def test_a_lost_key_hides_only_what_it_sealed(root: JournalRoot) -> None:
    other = derive_key("another", "key")
    KeptFailures(root, 1 << 20, 3600.0, sealer=Sealer({"other": other}, "other")).keep([failed(1)])
    keep_in(root).keep([failed(2)])
    assert [item.delivery.task_id for item in keep_in(root).iter()] == ["id-2"]


def test_files_go_when_they_are_too_old(root: JournalRoot) -> None:
    kept = keep_in(root)
    kept.keep([failed(1)])
    (path,) = kept.path.iterdir()
    assert kept.expire() == 0
    os.utime(path, (path.stat().st_mtime - 3601,) * 2)
    assert kept.expire() == 1
    assert list(kept.iter()) == []


def test_the_oldest_go_when_all_together_are_too_large(root: JournalRoot) -> None:
    kept = keep_in(root, max_bytes=20_000)
    for number in range(1, 61):
        kept.keep([failed(number)])
    assert kept.usage() > 20_000
    assert kept.expire() > 0
    assert 15_000 < kept.usage() <= 20_000
    left = [item.delivery.task_id for item in kept.iter()]
    assert left == [f"id-{number}" for number in range(61 - len(left), 61)]


def test_keeping_goes_on_after_its_file_has_expired(root: JournalRoot) -> None:
    kept = keep_in(root, max_bytes=0)
    kept.keep([failed(1)])
    kept.expire()
    kept.keep([failed(2)])
    assert [item.delivery.task_id for item in kept.iter()] == ["id-2"]


def test_a_file_covers_a_small_part_of_the_time(root: JournalRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    time_of(monkeypatch, module, monotonic=lambda: now)
    kept = keep_in(root, seconds=2400.0)
    kept.keep([failed(1)])
    now += 99
    kept.keep([failed(2)])
    now += 2
    kept.keep([failed(3)])
    assert len(list(kept.path.iterdir())) == 2


@pytest.mark.parametrize("fields", [(*module._FIELDS, "task"), module._FIELDS[:-1]])
def test_files_of_another_release_are_read(
    root: JournalRoot, monkeypatch: pytest.MonkeyPatch, fields: tuple[str, ...]
) -> None:
    """One that has a field more at the end than this release, and one that lacks the last."""
    monkeypatch.setattr(module, "_values_of", attrgetter(*fields))
    kept = keep_in(root)
    kept.keep([failed(1)])
    (found,) = kept.iter()
    assert found == replace(failed(1), delivery=replace(failed(1).delivery, sealed=found.delivery.sealed))
