"""Which failures are one incident, which are one letter, and what the incident is called."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadletters.grouping import (
    GroupingMode,
    fingerprint,
    grouping_key,
    short_id,
    short_queue,
    signature,
    summary,
    title,
)
from deadletters.journal.events import Caught

NUMBERS = st.integers(-(10**20), 10**20).map(str) | st.floats(allow_nan=False, allow_infinity=False).map(str)
IDS = (
    st.uuids().map(str)
    | st.integers(2**31, 2**160).map("{:x}".format)
    | st.integers(0, 2**64).map("0x{:x}".format)
    | st.binary(min_size=20, max_size=20).map(lambda raw: f"aB3{raw.hex()}")
)
ADDRESSES = (
    st.ip_addresses(v=4).map(str)
    | st.ip_addresses(v=6).map(str)
    | st.builds("{}:{}".format, st.ip_addresses(v=4), st.integers(1, 65535))
    | st.builds("[{}]:{}".format, st.ip_addresses(v=6), st.integers(1, 65535))
)
TIMES = st.datetimes().map(lambda at: at.isoformat()) | st.datetimes().map(lambda at: f"{at:%Y-%m-%d %H:%M:%S}")
QUOTED = st.text(st.characters(codec="utf-8", exclude_characters="'\""), max_size=30).map(lambda inner: f"'{inner}'")
VALUES = {
    "numbers": NUMBERS,
    "ids": IDS,
    "addresses": ADDRESSES.filter(lambda address: "[" not in address),
    "bracketed addresses": st.builds("[{}]:{}".format, st.ip_addresses(v=6), st.integers(1, 65535)),
    "times": TIMES,
    "quoted parts": QUOTED,
}


@given(st.integers(1, 65535))
def test_a_port_number_never_changes_the_signature(port: int) -> None:
    """INC-01: one outage, one incident."""
    assert signature(f"Connection refused (127.0.0.1:{port})") == "Connection refused (#)"


TEMPLATES = st.sampled_from(["order {} failed", "{}", "({}) gone", "no answer: {}, giving up", "a={} b={}"])


@pytest.mark.parametrize("kind", VALUES)
@given(template=TEMPLATES, data=st.data())
def test_what_varies_never_changes_the_signature(kind: str, template: str, data: st.DataObject) -> None:
    """INC-01."""
    first, second = (template.replace("{}", data.draw(VALUES[kind])) for _ in range(2))
    assert signature(first) == signature(second)


@given(st.lists(NUMBERS, min_size=1, max_size=30), st.lists(NUMBERS, min_size=1, max_size=30))
def test_how_many_numbers_a_list_has_never_changes_the_signature(first: list[str], second: list[str]) -> None:
    """INC-01."""
    assert signature(f"unknown ids [{', '.join(first)}]!") == signature(f"unknown ids [{', '.join(second)}]!")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Key (id)=(5) already exists", "Key (id)=(#) already exists"),
        ("can't open 'a.pdf', won't", "can't open '…', won't"),
        ("no file /data/tenant-a/2026/cv_final.pdf", "no file /data/….pdf"),
        ("no file /tmp/tmpab3x_k9", "no file /tmp/…"),
        ("GET https://api.example.com:8443/v1/x?id=3 failed", "GET https://api.example.com:#/… failed"),
        ("Mailbox ann.lee@example.org is full", "Mailbox <mail> is full"),
        ("at Mon, 30 Nov 2026 12:00:01 +0100 it broke", "at # it broke"),
        ("retry Nov 30 12:30 PM", "retry #"),
        ("sha256 of std::vector", "sha# of std::vector"),
        ("took 10ms", "took #"),
        ("deliver to web-7f9c8d6b5-x4q2z", "deliver to web-#"),
        ("no module named shop.orders", "no module named shop.orders"),
        ("two\n  lines", "two lines"),
        ("a\x00b", "a‹U+#›b"),
    ],
)
def test_the_words_of_an_error_stay(text: str, expected: str) -> None:
    assert signature(text) == expected


@given(st.text(max_size=2_000))
def test_a_signature_is_bounded_and_storable(text: str) -> None:
    shown = signature(text)
    assert len(shown) <= 300
    assert "\x00" not in shown
    assert "\n" not in shown
    shown.encode("utf-8")


def test_different_words_are_different_signatures() -> None:
    assert signature("connection refused") != signature("connection reset")


PARTS: dict[str, Any] = {
    "mode": GroupingMode.CAUSE,
    "tenant": "t-a",
    "source": "prod",
    "task": "deliver_email",
    "error_class": "shop.errors.CardDeclined",
    "call_site": "shop.mail:send",
    "text": "card 7 declined",
    "caught": Caught.FAILURE,
    "fingerprint": "mail:1",
}


def key(**changes: Any) -> str:
    """The key of a failure that differs from the usual one by ``changes``."""
    return grouping_key(**PARTS | changes)


def test_a_key_has_a_version_and_a_hash() -> None:
    assert re.fullmatch(r"g1-[0-9a-f]{64}", key())


@pytest.mark.parametrize("part", ["tenant", "source", "task", "error_class", "call_site"])
def test_every_part_of_a_cause_separates_incidents(part: str) -> None:
    assert key(**{part: "other"}) != key()


@pytest.mark.parametrize(("part", "value"), [("text", "card 8 lost"), ("fingerprint", "mail:2")])
def test_nothing_else_separates_incidents_of_one_place(part: str, value: str) -> None:
    """INC-01: neither the text nor which job it was."""
    assert key(**{part: value}) == key()


def test_without_an_own_frame_the_words_of_the_error_decide() -> None:
    """INC-01: two error classes on one job do not hide each other, and neither do two causes."""
    here = key(call_site="", text="Connection refused (127.0.0.1:1)")
    assert here == key(call_site="", text="Connection refused (127.0.0.1:65535)")
    assert here != key(call_site="", text="Name or service not known")
    assert here != key(call_site="", text="Connection refused (127.0.0.1:1)", error_class="OSError")


@pytest.mark.parametrize(
    ("error_class", "caught"),
    [
        ("billiard.exceptions.TimeLimitExceeded", Caught.FAILURE),
        ("billiard.exceptions.SoftTimeLimitExceeded", Caught.FAILURE),
        ("billiard.exceptions.WorkerLostError", Caught.FAILURE),
        ("builtins.MemoryError", Caught.FAILURE),
        ("celery.exceptions.NotRegistered", Caught.UNKNOWN),
        ("", Caught.WORKER_LOST),
    ],
)
def test_where_the_work_was_cut_off_does_not_separate_incidents(error_class: str, caught: Caught) -> None:
    def cut_off(**changes: Any) -> str:
        return key(error_class=error_class, caught=caught, **changes)

    assert cut_off(call_site="a:b", text="x") == cut_off(call_site="", text="y")
    assert cut_off() != cut_off(task="other")


def test_one_error_class_has_one_name() -> None:
    assert key(error_class="builtins.ValueError") == key(error_class="ValueError")


def test_by_job_each_letter_is_an_incident() -> None:
    """A4: the incident is the letter's, whatever its newest error."""
    by_job = key(mode=GroupingMode.JOB)
    assert by_job == key(mode=GroupingMode.JOB, error_class="x", call_site="", text="y", task="z")
    assert by_job != key(mode=GroupingMode.JOB, fingerprint="mail:2")
    assert by_job != key(mode=GroupingMode.JOB, tenant="t-b")
    assert by_job != key()


SHORT = st.text("a:1", max_size=4)


@given(st.tuples(SHORT, SHORT, SHORT, SHORT, SHORT), st.tuples(SHORT, SHORT, SHORT, SHORT, SHORT))
def test_two_different_causes_never_read_alike(first: tuple[str, ...], second: tuple[str, ...]) -> None:
    """C10: joining parts must not merge what differs."""
    names = ("tenant", "source", "task", "error_class", "call_site")
    keys = [key(**dict(zip(names, parts, strict=True)), text="") for parts in (first, second)]
    assert (keys[0] == keys[1]) is (first == second)


def test_a_fingerprint_names_queue_and_job() -> None:
    """A2."""
    assert fingerprint("mail", "job-77", "m-1") == "mail:job-77"


@pytest.mark.parametrize("job_id", [None, ""])
def test_a_fingerprint_without_a_job_names_the_message(job_id: str | None) -> None:
    """A2."""
    assert fingerprint("mail", job_id, "m-1") == "mail:message:m-1"


PART = st.text("a:", max_size=6) | st.sampled_from(
    ["message", "message:", "message:a", "x" * 499, "x" * 700, "\x00" * 600]
)


@given(st.tuples(PART, st.none() | PART, PART), st.tuples(PART, st.none() | PART, PART))
def test_two_different_jobs_never_have_one_fingerprint(
    first: tuple[str, Any, str], second: tuple[str, Any, str]
) -> None:
    """A2, C10: however their parts are cut, and wherever they have colons."""

    def identity(queue: str, job_id: str | None, message_id: str) -> tuple[str, str, str]:
        return (queue, "job", job_id) if job_id else (queue, "message", message_id)

    prints = [fingerprint(*parts) for parts in (first, second)]
    assert (prints[0] == prints[1]) is (identity(*first) == identity(*second))
    assert all(len(each) <= 500 for each in prints)


def test_long_ids_of_one_beginning_stay_distinct() -> None:
    """C10, CAP-01: a job id of 700 letters in a queue whose name has 300."""
    first = fingerprint("q" * 300, "x" * 700, "")
    assert first != fingerprint("q" * 300, "x" * 701, "")
    assert first != fingerprint("q" * 301, "x" * 700, "")
    assert len(first) == 500


@pytest.mark.parametrize("shorten", [short_queue, short_id])
def test_stored_names_are_cut_to_200_characters_with_a_hash(shorten: Any) -> None:
    """A2, C10."""
    assert shorten("x" * 200) == "x" * 200
    assert len(shorten("x" * 201)) == 200
    assert shorten("x" * 201) != shorten("x" * 202)


WORDS: dict[str, Any] = {"task": "deliver_email", "error_class": "shop.CardDeclined", "caught": Caught.FAILURE}


def test_a_title_says_what_fails_how_and_where() -> None:
    shown = title(mode=GroupingMode.CAUSE, call_site="shop.mail:send", **WORDS)
    assert shown == "deliver_email fails with CardDeclined in shop.mail:send"


def test_a_title_without_a_frame_has_the_words_of_the_error() -> None:
    shown = title(mode=GroupingMode.CAUSE, text="refused (127.0.0.1:1)", **WORDS)
    assert shown == "deliver_email fails with CardDeclined: refused (#)"


def test_by_job_title_and_summary_name_the_job_type() -> None:
    """A4."""
    assert title(mode=GroupingMode.JOB, **WORDS) == "deliver_email used up its retries and was given up"
    shown = summary(mode=GroupingMode.JOB, queue="mail", text="no", **WORDS)
    assert shown == (
        "deliver_email fails with CardDeclined. It came from queue mail. The error says: no. "
        "No automatic attempt is left."
    )


@given(
    st.sampled_from(GroupingMode),
    st.sampled_from(Caught),
    st.sampled_from(["", "x.TimeLimitExceeded", "MemoryError", "numpy._ArrayMemoryError", "x.Y"]),
    st.sampled_from(["", "a:b"]),
    st.text(max_size=400),
    st.text(max_size=400),
)
def test_titles_and_summaries_are_one_readable_line_about_the_job_type(
    mode: GroupingMode, caught: Caught, error_class: str, call_site: str, text: str, queue: str
) -> None:
    """A4."""
    common: dict[str, Any] = {"mode": mode, "caught": caught, "error_class": error_class, "call_site": call_site}
    for shown, limit in (
        (title(task="deliver_email", text=text, **common), 200),
        (summary(task="deliver_email", text=text, queue=queue, **common), 1_000),
    ):
        assert "deliver_email" in shown
        assert len(shown) <= limit
        assert "\n" not in shown
        assert "\x00" not in shown
        assert "{task}" not in shown


def test_a_message_without_a_task_name_has_a_title() -> None:
    """A1: its job type is ``invalid``."""
    shown = title(mode=GroupingMode.CAUSE, task="", error_class="", caught=Caught.REJECTED_MESSAGE)
    assert shown == "An invalid message could not be read"
