"""RowWriter and AnyOf: many in one statement are what they would have been one by one, on both databases."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import pytest

from deadletters.models import DeadLetter, SetAsideEntry
from incidents.models import Incident
from opsconsole.core.database import AnyOf, RowWriter
from opsconsole.core.ids import new_id
from tests import factories

pytestmark = pytest.mark.django_db

WRITER = RowWriter(
    SetAsideEntry,
    ("id", "tenant", "source", "node", "job_type", "delivery", "reason", "blob", "set_aside_at", "applied_at"),
    suffix="ON CONFLICT (source, node, delivery) DO NOTHING",
)
NOW = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
AWKWARD = [
    "", " ", "NULL", "null", "a,b", "{}", "{a,b}", '"', '""', "\\", '\\"', '"\\', "\\\\", "it's", "%s", "%(name)s", "%",
    "two\nlines", "tab\there", "größer", "日本語", "🙂", "\x7f", "\u202e", "'; DROP TABLE x; --", "true", "1", "\\x41",
]  # fmt: skip


def row(
    number: int, *, reason: str = "", blob: bytes = b"", at: datetime = NOW, applied: datetime | None = None
) -> tuple[Any, ...]:
    return (new_id(), "default", "tests", "node", "job", f"delivery-{number}", reason, blob, at, applied)


def test_every_text_comes_back_as_it_was_written() -> None:
    assert WRITER.insert(row(number, reason=text) for number, text in enumerate(AWKWARD)) == len(AWKWARD)
    stored = {entry.delivery: entry.reason for entry in SetAsideEntry.objects.all()}
    assert [stored[f"delivery-{number}"] for number in range(len(AWKWARD))] == AWKWARD


def test_every_byte_comes_back_as_it_was_written() -> None:
    blobs = [b"", b"\x00", b'"\\{},', bytes(range(256))]
    WRITER.insert(row(number, blob=blob) for number, blob in enumerate(blobs))
    assert [bytes(entry.blob) for entry in SetAsideEntry.objects.order_by("delivery")] == blobs


def test_times_keep_their_moment_and_may_be_missing() -> None:
    elsewhere = NOW.astimezone(timezone(timedelta(hours=-9, minutes=-30)))
    WRITER.insert([row(1, at=elsewhere, applied=NOW), row(2)])
    first, second = SetAsideEntry.objects.order_by("delivery")
    assert (first.set_aside_at, first.applied_at, second.applied_at) == (NOW, NOW, None)


def test_only_new_rows_are_counted_and_returned() -> None:
    known, fresh = row(1), row(2)
    WRITER.insert([known])
    assert {UUID(text) for text in WRITER.insert_returning([row(1), fresh], "id")} == {fresh[0]}
    assert WRITER.insert([row(1), row(2), row(3)]) == 1


def test_nothing_is_inserted_for_no_rows() -> None:
    assert WRITER.insert([]) == 0
    assert WRITER.insert_returning([], "id") == set()


def test_any_of_finds_what_a_placeholder_for_each_would_have_found() -> None:
    WRITER.insert(row(number, reason=text) for number, text in enumerate(AWKWARD))
    for wanted in ([], AWKWARD[:1], AWKWARD, ["nothing"]):
        found = SetAsideEntry.objects.filter(AnyOf("reason", wanted))
        assert set(found.values_list("id")) == set(SetAsideEntry.objects.filter(reason__in=wanted).values_list("id"))


def test_any_of_takes_ids_and_follows_relations() -> None:
    recorded = factories.record(*(factories.failure() for _ in range(3)))
    letters = [one.letter_id for one in recorded]
    assert set(DeadLetter.objects.filter(AnyOf("id", letters[:2])).values_list("id", flat=True)) == set(letters[:2])
    incident = Incident.objects.get()
    assert DeadLetter.objects.exclude(AnyOf("incident__key", [incident.key])).count() == 0
