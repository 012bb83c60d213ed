"""What keeps a worker's rules true: asked before its first message, then every two seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import OperationalError

from deadletters import hold_watch
from deadletters.hold_watch import DatabaseHolds, HoldWatch
from deadletters.journal import hooks as module
from deadletters.journal.folder import JournalRoot
from deadletters.journal.holds import HoldBook, HoldRule, last_known_path
from deadletters.journal.hooks import Hooks
from deadletters.models import Hold, HoldState
from deadletters.services import HoldTarget, end_hold
from opsconsole.core.database import database_now
from tests.cast import Cast
from tests.deadletters.journal_app import make_app
from tests.deadletters.journal_writer import SEALER
from tests.deadletters.test_held import rule
from tests.deadletters.test_holds import place


class Answers:
    """What knows the holds: an answer, an error, or nothing for a while."""

    def __init__(self, answer: list[HoldRule] | Exception, seconds: float = 0.0) -> None:
        self.answer = answer
        self.seconds = seconds

    def read(self) -> Sequence[HoldRule]:
        time.sleep(self.seconds)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def started(root: Path, holds: Answers | None) -> list[str]:
    """Start a worker's hooks and return the rules that it knows before it asks for a message."""
    hooks = Hooks(make_app({}), source="tests", sealer=SEALER, root=JournalRoot(root), holds=holds)
    hooks._on_worker_init(sender=SimpleNamespace(hostname="worker@host"))
    hooks.close()
    hooks.app.close()
    return [one.id for one in hooks.holds.in_force()]


@pytest.mark.parametrize("trouble", [Answers(OperationalError("down")), Answers([], seconds=1.0)])
def test_a_worker_starts_with_what_it_is_told_or_with_what_was_known_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: Answers
) -> None:
    """Before its first message, and in time: a database that does not answer stops no worker."""
    monkeypatch.setattr(module, "HOLDS_SECONDS", 0.3)
    assert started(tmp_path, trouble) == []
    assert started(tmp_path, Answers([rule(id="a")])) == ["a"]
    assert started(tmp_path, trouble) == ["a"]
    assert started(tmp_path, Answers([])) == []
    assert started(tmp_path, trouble) == []
    assert started(tmp_path, None) == []


def test_a_worker_without_a_journal_knows_the_holds_all_the_same(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.write_text("a file where the folder should be")
    assert started(root, Answers([rule(id="a")])) == ["a"]


@pytest.mark.django_db
def test_the_rules_follow_what_is_placed_moved_and_ended(cast: Cast, tmp_path: Path) -> None:
    """C12; a hold whose time is over is written down by whoever looks first."""
    book = HoldBook(tmp_path / "holds.json", last_known_path(tmp_path, "shop"))
    watch = HoldWatch(source="shop", book=lambda: book)
    watch.look()
    assert book.in_force() == ()
    hold = place(cast.ada, HoldTarget(tenant="default", source="shop", job_type="a"), key="1")
    place(cast.ada, HoldTarget(tenant="default", source="other", job_type="a"), key="2")
    watch.look()
    before = (tmp_path / "holds.json").stat().st_ino
    watch.look()
    assert [one.id for one in book.in_force()] == [str(hold.id)]
    assert (tmp_path / "holds.json").stat().st_ino == before, "written only when something has changed"
    Hold.objects.filter(id=hold.id).update(ends_at=database_now() - timedelta(seconds=1))
    watch.look()
    assert book.in_force() == ()
    assert Hold.objects.get(id=hold.id).state == HoldState.EXPIRED
    third = place(cast.ada, HoldTarget(tenant="*", queue="q"), key="3")
    watch.look()
    assert [one.id for one in book.in_force()] == [str(third.id)]
    end_hold(hold_id=third.id, reason="over", by=cast.ada, key="e")
    watch.look()
    assert book.in_force() == ()


def test_a_database_that_is_away_changes_no_rule_and_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = HoldBook(None, last_known_path(tmp_path, "shop"))
    book.put([rule(id="a")])
    answers: list[Any] = [OperationalError("down"), OperationalError("down"), ([], [])]

    def rules_of(_source: str) -> Any:
        answer = answers.pop(0) if answers else ([], [])
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(hold_watch, "rules_of", rules_of)
    monkeypatch.setattr(hold_watch, "EVERY_SECONDS", 0.05)
    watch = HoldWatch(source="shop", book=lambda: book)
    watch.start()
    deadline = time.monotonic() + 10
    said = set()
    while book.in_force() and time.monotonic() < deadline:
        said.add(watch.trouble)
        time.sleep(0.005)
    watch.stop()
    watch.join(5)
    assert not watch.is_alive()
    assert "holds cannot be read: OperationalError: down" in said
    assert (watch.trouble, book.in_force()) == ("", ())


@pytest.mark.django_db(transaction=True)
def test_the_question_at_the_start_leaves_no_connection_behind(cast: Cast) -> None:
    hold = place(cast.ada, HoldTarget(tenant="default", source="shop", job_type="a"))
    found = module._in_time(DatabaseHolds("shop").read, 10)
    assert [one.id for one in found] == [str(hold.id)]
