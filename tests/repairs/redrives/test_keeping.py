"""How long redrives are kept, and what a letter keeps of its message for the dry run."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from deadletters.arguments import NO_JSON, Shape, describe_arguments, parse_shape
from deadletters.models import DeadLetter
from opsconsole.core.database import database_now
from repairs.models import Redrive, RedriveItem, RepairAction
from repairs.redrives.services import retry_failed_items
from tests import factories
from tests.cast import Cast
from tests.repairs.reconciliation.rows import sweep
from tests.repairs.redrives.work import create, fail, letters, outstanding, started, step, succeed, worker

pytestmark = pytest.mark.django_db
LONG_AGO = timedelta(days=91)


def test_an_ended_redrive_goes_with_its_jobs(cast: Cast) -> None:
    worker()
    letters(2)
    redrive = started(cast)
    step(redrive)
    succeed(outstanding(redrive))
    step(redrive)
    sweep("retention")
    assert Redrive.objects.count() == 1
    then = database_now() - LONG_AGO
    Redrive.objects.update(ended_at=then)
    DeadLetter.objects.update(closed_at=then)
    sweep("retention")
    assert not RepairAction.objects.exists()
    assert not RedriveItem.objects.exists()
    assert not Redrive.objects.exists()


def test_a_closed_job_that_a_redrive_still_waits_for_stays(cast: Cast) -> None:
    worker()
    letters(1)
    create(cast)
    DeadLetter.objects.update(state="discarded", closed_at=database_now() - LONG_AGO)
    sweep("retention")
    assert DeadLetter.objects.count() == RedriveItem.objects.count() == 1


def test_a_redrive_stays_as_long_as_another_one_retries_its_jobs(cast: Cast) -> None:
    worker()
    letters(1)
    first = started(cast)
    step(first)
    fail(outstanding(first))
    step(first)
    retry_failed_items(redrive_id=first.id, by=cast.ada, key="again")
    Redrive.objects.filter(id=first.id).update(ended_at=database_now() - LONG_AGO)
    sweep("retention")
    assert Redrive.objects.count() == 2


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({}, '[1,"order"]'),
        ({"body": b"[[1, 2], {}, {}]"}, "[2]"),
        ({"body": b'[[], {"b": 1, "a": 2}, {}]'}, '[0,"a","b"]'),
        ({"body": b"[1]"}, NO_JSON),
        ({"body": b"not json"}, NO_JSON),
        ({"body": b'[[], {"' + b"k" * 400 + b'": 1}, {}]'}, ""),
        ({"message_state": "missing"}, ""),
    ],
)
def test_a_letter_keeps_the_shape_of_its_arguments(fields: dict[str, Any], arguments: str) -> None:
    assert factories.dead_letter(**fields).arguments == arguments


def test_a_name_with_a_nul_is_kept_escaped() -> None:
    """No database takes one."""
    text = describe_arguments([], {"a\x00": 1})
    assert "\x00" not in text
    assert parse_shape(text) == Shape(0, ("a\x00",))


@pytest.mark.parametrize("text", ["", NO_JSON, "nonsense", "7"])
def test_what_is_no_shape_says_nothing(text: str) -> None:
    assert parse_shape(text) is None


@pytest.mark.parametrize(
    ("expires", "known"),
    [("2026-01-01T00:00:00+00:00", True), ("2026-01-01T00:00:00", True), ("soon", False), (17, False), (None, False)],
)
def test_a_letter_keeps_when_its_sender_gave_it_up(expires: Any, known: bool) -> None:
    letter = factories.dead_letter(headers={"expires": expires})
    assert (letter.expires_at is not None) is known


def test_an_expiry_at_the_end_of_time_is_none() -> None:
    assert factories.dead_letter(headers={"expires": "9999-12-31T23:59:59-10:00"}).expires_at is None
