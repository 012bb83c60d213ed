"""Message bodies are read with the plain JSON decoder, or not at all."""

from __future__ import annotations

import json
import math
import pickle
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st
from kombu.serialization import dumps

from opsconsole.core.redaction import MAX_DEPTH, decode_body

JSON_TYPE = "application/json"


def test_a_message_as_celery_sends_it_is_read() -> None:
    message = Celery("x", set_as_default=False).amqp.as_task_v2("id", "name", (1, Decimal("1.10")), {"a": "ü"})
    content_type, encoding, body = dumps(message.body, serializer="json")
    decoded = decode_body(body.encode(), content_type, encoding)
    assert decoded.error is None
    assert decoded.args == [1, {"__type__": "decimal", "__value__": "1.10"}]
    assert decoded.kwargs == {"a": "ü"}
    assert set(decoded.embed) == {"callbacks", "errbacks", "chain", "chord"}


def test_a_type_envelope_stays_what_was_sent() -> None:
    """RET-01: nothing is turned into an object and back, and an unknown type is no error."""
    _, _, envelope = dumps(datetime(2026, 3, 1, tzinfo=UTC), serializer="json")
    body = f'[[{envelope}, {{"__type__": "nope", "__value__": "1"}}], {{}}, {{}}]'.encode()
    decoded = decode_body(body, JSON_TYPE, "utf-8")
    assert decoded.args[0]["__type__"] == "datetime"
    assert decoded.args[1] == {"__type__": "nope", "__value__": "1"}


def test_a_message_of_protocol_one_is_read() -> None:
    message = {"task": "t", "id": "1", "args": [1], "kwargs": {"a": 2}, "retries": 0, "errbacks": None}
    decoded = decode_body(json.dumps(message).encode(), JSON_TYPE, "utf-8")
    assert (decoded.args, decoded.kwargs, decoded.embed, decoded.error) == ([1], {"a": 2}, {"errbacks": None}, None)


@given(st.integers())
def test_integers_are_read_exactly(number: int) -> None:
    """API-05."""
    assert decode_body(f"[[{number}], {{}}, {{}}]".encode(), JSON_TYPE, "utf-8").args == [number]


def test_nan_and_the_infinities_are_read() -> None:
    """CAP-01."""
    decoded = decode_body(b"[[NaN, Infinity, -Infinity], {}, {}]", JSON_TYPE, "utf-8")
    assert math.isnan(decoded.args[0])
    assert decoded.args[1:] == [math.inf, -math.inf]


def test_of_a_key_given_twice_the_last_counts() -> None:
    assert decode_body(b'[[], {"a": 1, "a": 2}, {}]', JSON_TYPE, "utf-8").kwargs == {"a": 2}


def nested(depth: int) -> bytes:
    """A message whose deepest list lies at ``depth``: the message is the first, its args the second."""
    return b"[" * depth + b"]" * (depth - 1) + b", {}, {}]"


def test_a_message_at_the_deepest_nesting_is_read() -> None:
    assert decode_body(nested(MAX_DEPTH), JSON_TYPE, "utf-8").error is None


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 900, 100_000])
def test_a_message_nested_deeper_is_refused(depth: int) -> None:
    assert decode_body(nested(depth), JSON_TYPE, "utf-8").error == "too_deep"


class Bomb:
    """Unpickling it fails the test."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return pytest.fail, ("unpickled",)


@pytest.mark.parametrize(
    "content_type", ["application/x-python-serialize", "application/x-yaml", "application/x-msgpack", "text/plain", ""]
)
def test_another_content_type_is_never_decoded(content_type: str) -> None:
    decoded = decode_body(pickle.dumps(Bomb()), content_type, "binary")
    assert (decoded.error, decoded.args, decoded.document) == ("not_json", [], None)


@pytest.mark.parametrize(
    ("body", "encoding"),
    [(b"{", "utf-8"), (b"", "utf-8"), (b"\xff\xfe", "utf-8"), (b"[[], {}, {}]", "zip"), (b"[[], {}, {}]", "no-such")],
)
def test_what_is_not_the_json_it_says_it_is_is_undecodable(body: bytes, encoding: str) -> None:
    assert decode_body(body, JSON_TYPE, encoding).error == "undecodable"


@pytest.mark.parametrize("body", [b"[1, 2]", b'{"a": 1}', b"[[], [], {}]", b"[{}, {}, {}]", b"[[], {}, 5]", b'"x"'])
def test_json_that_is_no_message_keeps_its_content_for_showing(body: bytes) -> None:
    decoded = decode_body(body, JSON_TYPE, "utf-8")
    assert decoded.error == "wrong_shape"
    assert decoded.document == json.loads(body)


@given(st.binary(max_size=200), st.sampled_from([JSON_TYPE, "application/json; charset=utf-8"]), st.text(max_size=8))
def test_no_body_ever_raises(body: bytes, content_type: str, encoding: str) -> None:
    decode_body(body, content_type, encoding)
