"""Text is stored and shown the same on every database, and says where it was altered."""

from __future__ import annotations

import re
import sqlite3
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsconsole.core.safe_text import mark_unsafe, safe_text, shorten

ANY_TEXT = st.text(st.characters(codec=None), max_size=120) | st.text("\x00\ud800‮ab\n", max_size=120)


def is_storable(value: str) -> bool:
    """PostgreSQL takes what is UTF-8 without NUL."""
    return "\x00" not in value and value == value.encode("utf-8").decode("utf-8")


@given(ANY_TEXT, st.integers(0, 150))
def test_any_text_becomes_storable_and_fits(value: str, limit: int) -> None:
    """CAP-01: no text may keep a failure from being recorded."""
    safe = safe_text(value, limit)
    assert is_storable(safe)
    assert len(safe) <= limit


@given(ANY_TEXT, st.integers(0, 150))
def test_making_text_safe_twice_changes_nothing_more(value: str, limit: int) -> None:
    once = safe_text(value, limit)
    assert safe_text(once, limit) == once


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=100))
def test_clean_text_that_fits_is_returned_as_it_is(value: str) -> None:
    assert safe_text(value, 100) is value


def test_a_nul_is_visibly_marked() -> None:
    """CAP-01: what had to be altered says so."""
    assert safe_text("cannot parse \x00\x01 header", 100) == "cannot parse ‹U+0000›‹U+0001› header"


def test_a_lone_surrogate_is_visibly_marked() -> None:
    assert safe_text("a\ud83d", 100) == "a‹U+D83D›"


def test_a_bidirectional_override_cannot_reorder_a_line() -> None:
    assert safe_text("access = ‮⁦user⁩", 100) == "access = ‹U+202E›‹U+2066›user‹U+2069›"


def test_an_escape_sequence_reaches_no_terminal() -> None:
    assert "\x1b" not in safe_text("\x1b[2J", 100)


@pytest.mark.parametrize("value", ["a\tb\nc", "naïve – 東京 🎉", "👩‍💻", "عربي"])
def test_readable_text_of_any_script_stays(value: str) -> None:
    assert safe_text(value, 100) == value


def test_sqlite_stores_what_postgresql_would_store() -> None:
    value = safe_text("a\x00b\udfffc", 100)
    with sqlite3.connect(":memory:") as database:
        assert database.execute("SELECT ?", [value]).fetchone() == (value,)
    database.close()


def test_a_subclass_of_text_loses_its_promises() -> None:
    """SEC-01: a text that calls itself safe HTML is only text once it is stored."""

    class SafeHtml(str):
        __slots__ = ()

    assert type(safe_text(SafeHtml("<b>"), 10)) is str


def test_a_long_text_keeps_its_head_and_its_tail_and_says_how_much_is_missing() -> None:
    traceback = "Traceback (most recent call last):\n" + "  File x\n" * 1000 + "ValueError: the cause"
    shown = safe_text(traceback, 300)
    assert shown.startswith("Traceback (most recent call last):")
    assert shown.endswith("ValueError: the cause")
    note = re.search(r"\n‹… (\d+) characters left out …›\n", shown)
    assert note is not None
    assert len(traceback) == len(shown) - len(note[0]) + int(note[1])


@given(ANY_TEXT.filter(lambda value: len(value) > 60))
def test_the_note_counts_the_characters_of_the_original(value: str) -> None:
    shown = safe_text(value, 59)
    head, count, tail = re.split(r"[ \n]‹… (\d+) characters left out …›[ \n]", shown)
    kept = len(value) - int(count)
    beginning = next(n for n in range(kept + 1) if mark_unsafe(value[:n]) == head)
    assert mark_unsafe(value[len(value) - (kept - beginning) :] if kept > beginning else "") == tail


def test_a_thirty_megabyte_traceback_takes_no_time() -> None:
    huge = "x\x00" * 15_000_000
    began = time.process_time()
    assert len(safe_text(huge, 20_000)) <= 20_000
    assert time.process_time() - began < 0.5


@given(ANY_TEXT, st.integers(0, 60))
def test_a_shortened_id_is_storable_and_fits(value: str, limit: int) -> None:
    short = shorten(value, limit)
    assert is_storable(short)
    assert len(short) <= limit
    assert short == shorten(value, limit)


@given(st.lists(ANY_TEXT, min_size=2, max_size=2, unique=True), st.text("x", max_size=80))
def test_two_ids_stay_distinct_however_much_they_share(pair: list[str], common: str) -> None:
    """C10: cutting and marking must not merge two jobs."""
    first, second = (shorten(f"{common}{value}", 40) for value in pair)
    assert first != second


def test_two_long_ids_with_one_beginning_stay_distinct() -> None:
    """C10, CAP-01: ids of 700 letters."""
    first, second = shorten("x" * 700, 200), shorten("x" * 701, 200)
    assert first != second
    assert len(first) == len(second) == 200
    assert first.startswith("x" * 183 + "~")


def test_a_short_clean_id_is_returned_as_it_is() -> None:
    assert shorten("job-77", 200) == "job-77"


@given(ANY_TEXT)
def test_shortening_twice_changes_nothing_more(value: str) -> None:
    assert shorten(shorten(value, 40), 40) == shorten(value, 40)
