"""A message survives being packed: what is unpacked can be sent again and is the same job."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import uuid
from decimal import Decimal
from typing import Any

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st
from kombu.message import Message

from deadletters.journal.events import MessageState
from deadletters.journal.message import (
    HEAD_BYTES,
    MAX_DEPTH,
    TOKEN_KEY,
    is_deeper_than,
    pack_message,
    pack_parts,
    unpack_message,
)

app = Celery("packing", broker="memory://", set_as_current=False)


def celery_message(*args: Any, task_id: str = "", **options: Any) -> Message:
    task_id = task_id or str(uuid.uuid4())
    headers, properties, body, _ = app.amqp.as_task_v2(task_id, "shop.charge", args, {}, origin="gen1@host", **options)
    properties.update(delivery_mode=2, priority=0, delivery_tag="tag", body_encoding="base64", delivery_info={"x": 1})
    return Message(
        body=json.dumps(body).encode(),
        content_type="application/json",
        content_encoding="utf-8",
        headers=headers,
        properties=properties,
        delivery_info={"exchange": "", "routing_key": "celery", "consumer_tag": "ctag1"},
    )


def sent_again(properties: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in properties.items() if k not in ("delivery_tag", "body_encoding", "delivery_info")}


def test_a_plain_job_is_small_and_complete() -> None:
    message = celery_message(1)
    packed, state, digest = pack_message(message)
    raw = unpack_message(packed)
    assert state is MessageState.FULL
    assert raw.body == message.body
    assert raw.headers == message.headers
    assert raw.properties == sent_again(message.properties)
    assert (raw.content_type, raw.content_encoding) == ("application/json", "utf-8")
    assert raw.delivery_info == {"exchange": "", "routing_key": "celery"}
    assert digest == "", "taken from the body once the job has failed"
    assert len(packed) < len(message.body) + 200


@pytest.mark.parametrize(
    "options",
    [
        {"retries": 2, "root_id": "other", "parent_id": "parent", "group_id": "group", "group_index": 3},
        {"time_limit": 5, "soft_time_limit": 4, "ignore_result": True},
        {"expires": 60, "countdown": 10, "shadow": "another name"},
        {"stamped_headers": ["tenant"], "tenant": "acme"},
        {"replaced_task_nesting": 1, "reply_to": "queue"},
    ],
)
def test_whatever_celery_can_ask_for_is_kept(options: dict[str, Any]) -> None:
    message = celery_message(1, **options)
    message.properties["priority"] = 9
    message.headers["custom"] = {"trace": ["a", 1.5, None]}
    raw = unpack_message(pack_message(message)[0])
    assert raw.headers == message.headers
    assert raw.properties == sent_again(message.properties)


def test_equal_values_of_other_types_are_kept_apart() -> None:
    message = celery_message(1)
    message.headers.update(retries=False, ignore_result=0, replaced_task_nesting=0.0)
    headers = unpack_message(pack_message(message)[0]).headers
    assert (headers["retries"], headers["ignore_result"]) == (False, 0)
    kinds = [type(headers[name]) for name in ("retries", "ignore_result", "replaced_task_nesting")]
    assert kinds == [bool, int, float]


def test_a_header_that_is_absent_stays_absent() -> None:
    for name in list(celery_message(1).headers):
        message = celery_message(1)
        del message.headers[name]
        assert unpack_message(pack_message(message)[0]).headers == message.headers


def test_our_own_token_is_never_part_of_a_packed_message() -> None:
    message = celery_message(1)
    message.properties[TOKEN_KEY] = 17
    assert TOKEN_KEY not in unpack_message(pack_message(message)[0]).properties


def test_the_compression_is_told_and_not_repeated_as_a_header() -> None:
    """The body is kept without compression: sent with the header, its receiver would fail to open it."""
    message = celery_message(1)
    message.headers["compression"] = "application/x-gzip"
    raw = unpack_message(pack_message(message)[0])
    assert raw.compression == "application/x-gzip"
    assert "compression" not in raw.headers


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.datetimes()
    | st.dates()
    | st.decimals(allow_nan=False)
    | st.uuids(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
names = st.text().filter(lambda name: name not in ("compression",))


@given(
    body=st.binary(max_size=500),
    headers=st.dictionaries(names | st.sampled_from(["id", "root_id", "retries", "stamps", "task"]), plain, max_size=8),
    properties=st.dictionaries(
        st.text().filter(lambda name: name not in ("delivery_tag", "delivery_info", "body_encoding", TOKEN_KEY))
        | st.sampled_from(["priority", "correlation_id", "delivery_mode", "content_type", "reply_to"]),
        plain,
        max_size=6,
    ),
    content_type=st.none() | st.sampled_from(["application/json", "application/x-python-serialize", "text/plain"]),
    content_encoding=st.none() | st.sampled_from(["utf-8", "binary"]),
)
def test_anything_that_amqp_can_carry_comes_back(
    body: bytes,
    headers: dict[str, Any],
    properties: dict[str, Any],
    content_type: str | None,
    content_encoding: str | None,
) -> None:
    packed, _, _ = pack_parts(
        body=body,
        content_type=content_type,
        content_encoding=content_encoding,
        properties=properties,
        headers=headers,
        delivery_info={},
    )
    raw = unpack_message(packed)
    properties.pop("application_headers", None)
    assert raw.body == body
    assert raw.headers == headers
    assert [type(raw.headers[name]) for name in headers] == [type(value) for value in headers.values()]
    assert raw.properties == properties
    assert (raw.content_type, raw.content_encoding) == (content_type, content_encoding)


def test_a_foreign_dictionary_that_looks_like_our_tag_is_not_taken_for_one() -> None:
    hostile = {"\0": ["bytes", "QUJD"]}
    message = celery_message(1)
    message.headers["hostile"] = [hostile, {"\0": ["int", "0xff"], "other": b"x"}]
    assert unpack_message(pack_message(message)[0]).headers == message.headers


def test_hostile_values_survive() -> None:
    message = celery_message(1)
    message.headers["hostile"] = [
        "\0nul",
        "\ud800",
        10**5000,
        float("inf"),
        (1, 2),
        {3: "int key"},
        Decimal("1.10"),
        dt.datetime(2026, 1, 2, tzinfo=dt.UTC),
        dt.timedelta(seconds=1.5),
        {1, 2},
    ]
    assert unpack_message(pack_message(message)[0]).headers["hostile"] == message.headers["hostile"]


def test_an_object_that_nothing_can_hold_is_described() -> None:
    class Hostile:
        def __repr__(self) -> str:
            raise RuntimeError

    message = celery_message(1)
    message.headers["object"] = [object(), Hostile()]
    first, second = unpack_message(pack_message(message)[0]).headers["object"]
    assert first.startswith("<object object")
    assert second == "<Hostile>"


def test_a_text_body_becomes_the_bytes_it_was_on_the_wire() -> None:
    for body, encoding, expected in (
        ("gr\u00fcn", "utf-8", "gr\u00fcn".encode()),
        ("gr\u00fcn", "latin-1", b"gr\xfcn"),
        ("\ud800", "utf-8", b"\xed\xa0\x80"),
        ("x", "no-such-encoding", b"x"),
        (memoryview(b"abc"), "binary", b"abc"),
        (None, None, b""),
    ):
        packed, _, _ = pack_parts(
            body=body, content_type=None, content_encoding=encoding, properties={}, headers={}, delivery_info={}
        )
        assert unpack_message(packed).body == expected


def test_a_body_over_the_cap_leaves_its_head_and_its_digest() -> None:
    message = celery_message("x" * 2_000_000)
    packed, state, digest = pack_message(message)
    raw = unpack_message(packed)
    assert state is MessageState.TOO_LARGE
    assert raw.body == message.body[:HEAD_BYTES]
    assert raw.total_bytes == len(message.body)
    assert digest == hashlib.sha256(message.body).hexdigest()
    assert raw.headers["id"] == message.headers["id"]
    assert len(packed) < HEAD_BYTES + 4096


def test_headers_over_the_cap_are_cut_as_well() -> None:
    message = celery_message(1)
    message.headers["huge"] = "x" * 3_000_000
    packed, state, _ = pack_message(message)
    raw = unpack_message(packed)
    assert state is MessageState.TOO_LARGE
    assert "huge" not in raw.headers
    assert raw.headers["task"] == "shop.charge"
    assert len(packed) < 100_000


def nested(depth: int) -> str:
    return "[" * depth + "1" + "]" * depth


def test_a_body_nested_too_deep_is_kept_whole_and_marked() -> None:
    for extra, expected in ((0, MessageState.FULL), (1, MessageState.TOO_DEEP)):
        message = celery_message(1)
        message.body = nested(MAX_DEPTH + extra).encode()
        packed, state, _ = pack_message(message)
        assert state is expected
        assert unpack_message(packed).body == message.body


def test_headers_nested_too_deep_do_not_stop_the_packing() -> None:
    message = celery_message(1)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    message.headers["deep"] = deep
    packed, state, _ = pack_message(message)
    assert state is MessageState.TOO_DEEP
    assert unpack_message(packed).headers["task"] == "shop.charge"
    while deep:
        deep = deep.pop()  # unwound by hand: freeing it would recurse


def test_brackets_inside_strings_are_not_depth() -> None:
    assert not is_deeper_than(json.dumps(["[" * 500, '"[' * 500, "\\" * 3 + "[" * 200]).encode(), MAX_DEPTH)
    assert is_deeper_than(json.dumps("]" * 500).encode() + nested(101).encode(), MAX_DEPTH)


def test_many_flat_lists_are_not_depth() -> None:
    assert not is_deeper_than(json.dumps([[1, {"a": [2]}]] * 5000).encode(), MAX_DEPTH)


@given(
    st.recursive(
        st.text() | st.integers(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=30,
    )
)
def test_the_bracket_scan_agrees_with_the_decoded_value(value: Any) -> None:
    def depth(found: Any) -> int:
        if isinstance(found, dict):
            return 1 + max((depth(item) for item in found.values()), default=0)
        if isinstance(found, list):
            return 1 + max((depth(item) for item in found), default=0)
        return 0

    text = json.dumps(value).encode()
    for limit in range(6):
        assert is_deeper_than(text, limit) == (depth(value) > limit)


def test_a_pickle_body_is_carried_and_never_looked_into() -> None:
    body = b"\x80\x04cos\nsystem\n" + b"[" * 500
    packed, state, _ = pack_parts(
        body=body,
        content_type="application/x-python-serialize",
        content_encoding="binary",
        properties={},
        headers={},
        delivery_info={},
    )
    assert state is MessageState.FULL
    assert unpack_message(packed).body == body


@pytest.mark.parametrize("data", [b"", b"\x01", b"\x02\0\0\0\x02{}", b"\x01\0\0\0\x09{}", b"\x01\0\0\0\x02{}"])
def test_bytes_that_were_not_packed_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a packed message"):
        unpack_message(data)
