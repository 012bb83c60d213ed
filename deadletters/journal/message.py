"""Turns an original message into bytes and back, so that it can be sent again as it was.

The packed form leaves out what Celery writes into every message anyway, which makes a plain job's message small without
compressing it while a worker waits. What JSON cannot hold (AMQP tables know bytes, dates and decimals) is tagged.
Nothing is ever pickled or unpickled.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from hashlib import sha256
from itertools import accumulate
from operator import itemgetter
from typing import Any, Final
from uuid import UUID

from deadletters.journal.events import MessageState
from deadletters.journal.frames import encode_json as _encode

MAX_MESSAGE_BYTES: Final = 1 << 20
HEAD_BYTES: Final = 4096
"""How much of a message over the cap is kept, for people to recognise it by."""
MAX_DEPTH: Final = 100
TOKEN_KEY: Final = "opsconsole_delivery"  # noqa: S105  a name, not a secret
"""Where the hooks put their token into a request's properties; never part of a packed message."""

_HEAD: Final = struct.Struct(">BI")
# Content type and encoding stand first in a head that has them at all, so that most heads need not be read for them.
_UNUSUAL: Final = (b'{"c"', b'{"e"')
_VERSION: Final = 1
_MISSING: Final = object()
# What `celery.app.amqp.AMQP.as_task_v2` writes when the caller asks for nothing special.
_HEADERS: Final[dict[str, Any]] = {
    "lang": "py",
    "shadow": None,
    "eta": None,
    "expires": None,
    "group": None,
    "group_index": None,
    "retries": 0,
    "timelimit": [None, None],
    "parent_id": None,
    "argsrepr": "()",
    "kwargsrepr": "{}",
    "ignore_result": False,
    "replaced_task_nesting": 0,
    "stamped_headers": None,
    "stamps": {},
}
_HEADER_TYPES: Final = {name: type(value) for name, value in _HEADERS.items()}
# Belongs to one passage through the broker, or repeats what stands elsewhere.
_ENVELOPE: Final = ("delivery_tag", "delivery_info", "body_encoding", "application_headers", TOKEN_KEY)
_REPEATING: Final = ("correlation_id", "delivery_mode", "content_type", "content_encoding")
_PROPERTY_CODES: Final = {name: code for code, name in enumerate(_REPEATING)} | dict.fromkeys(_ENVELOPE, -1)
_KEPT_DELIVERY: Final = ("exchange", "routing_key", "redelivered")
_TAG: Final = "\0"
_TAG_TEXT: Final = '"\\u0000":'
_LONGEST_INT: Final = 10**4000

# The same, as most messages have it: everything usual except these five.
_VARIABLE: Final = ("id", "task", "argsrepr", "kwargsrepr", "origin")
_FIXED: Final = tuple(name for name in _HEADERS if name not in _VARIABLE)
_FIXED_VALUES: Final = tuple(_HEADERS[name] for name in _FIXED)
_FIXED_TYPES: Final = tuple(_HEADER_TYPES[name] for name in _FIXED)
_USUAL_COUNT: Final = len(_FIXED) + len(_VARIABLE) + 1
_get_fixed: Final = itemgetter(*_FIXED)
_get_variable: Final = itemgetter(*_VARIABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RawMessage:
    """A message as it was received. ``compression`` is the method its body had on the wire; ``body`` is without it."""

    body: bytes
    content_type: str | None
    content_encoding: str | None
    properties: dict[str, Any]
    headers: dict[str, Any]
    delivery_info: dict[str, Any] = field(default_factory=dict)
    compression: str = ""
    total_bytes: int = 0  # of the whole body, when ``body`` is only its head


def pack_message(message: Any, max_bytes: int = MAX_MESSAGE_BYTES) -> tuple[bytes, MessageState, str]:
    """Return a kombu message as bytes, how much of it they hold, and the SHA-256 of a body that they do not hold whole.

    In hexadecimal; "" for a body that is there, whose digest can be taken once a job has failed.
    """
    return pack_parts(
        body=message.body,
        content_type=message.content_type,
        content_encoding=message.content_encoding,
        properties=message.properties or {},
        headers=message.headers or {},
        delivery_info=message.delivery_info or {},
        max_bytes=max_bytes,
    )


def pack_parts(
    *,
    body: Any,
    content_type: str | None,
    content_encoding: str | None,
    properties: Mapping[str, Any],
    headers: Mapping[str, Any],
    delivery_info: Mapping[str, Any],
    max_bytes: int = MAX_MESSAGE_BYTES,
) -> tuple[bytes, MessageState, str]:
    """Pack what a message consists of; see ``pack_message``."""
    raw = _body_bytes(body, content_encoding)
    digest = ""
    state = MessageState.FULL
    head: dict[str, Any] = {}
    if content_type != "application/json":
        head["c"] = content_type
    if content_encoding != "utf-8":
        head["e"] = content_encoding
    _put_headers(head, headers)
    _put_properties(head, properties, headers, content_type, content_encoding)
    get = delivery_info.get
    head["d"] = [get("exchange"), get("routing_key"), get("redelivered")]
    if len(raw) > max_bytes:
        state = MessageState.TOO_LARGE
        head["n"] = len(raw)
        digest = sha256(raw).hexdigest()
        raw = raw[:HEAD_BYTES]
    elif (not content_type or "json" in content_type) and is_deeper_than(raw, MAX_DEPTH):
        state = MessageState.TOO_DEEP
    try:
        text = _to_json(head)
    except RecursionError:
        state = MessageState.TOO_DEEP
        text = _to_json(_without_unfit_values(head))
    if len(text) > max_bytes:
        state = MessageState.TOO_LARGE
        text = _to_json(_without_unfit_values(head))
    encoded = text.encode("ascii")
    return _HEAD.pack(_VERSION, len(encoded)) + encoded + raw, state, digest


def unpack_message(data: bytes) -> RawMessage:
    """Return what ``pack_message`` packed; raises ``ValueError`` for anything else."""
    try:
        head, body = _split(data)
        content_type = head.get("c", "application/json")
        content_encoding = head.get("e", "utf-8")
        headers = _get_headers(head)
        return RawMessage(
            body=body,
            content_type=content_type,
            content_encoding=content_encoding,
            properties=_get_properties(head, headers, content_type, content_encoding),
            headers=headers,
            delivery_info={
                name: value for name, value in zip(_KEPT_DELIVERY, head["d"], strict=True) if value is not None
            },
            compression=str(head.get("z", "")),
            total_bytes=head.get("n", len(body)),
        )
    except (struct.error, UnicodeDecodeError, KeyError, TypeError, AttributeError) as exc:
        raise ValueError("this is not a packed message") from exc


def unpack_body(data: bytes) -> tuple[bytes, str, str]:
    """Return a packed message's body, content type and content encoding, without putting its headers together.

    Raises ``ValueError`` for what ``pack_message`` has not packed.
    """
    try:
        version, length = _HEAD.unpack_from(data)
        begin = _HEAD.size + length
        if version == _VERSION and begin <= len(data) and not data.startswith(_UNUSUAL, _HEAD.size):
            return data[begin:], "application/json", "utf-8"
        head, body = _split(data)
        return body, head.get("c", "application/json") or "", head.get("e", "utf-8") or ""
    except (struct.error, UnicodeDecodeError, TypeError, AttributeError) as exc:
        raise ValueError("this is not a packed message") from exc


def unpack_expiry(data: bytes) -> Any:
    """Return the header ``expires`` of a packed message, None for one without, without reading what has none.

    Raises ``ValueError`` for what ``pack_message`` has not packed.
    """
    try:
        _version, length = _HEAD.unpack_from(data)
        if data.find(b'"expires"', _HEAD.size, _HEAD.size + length) < 0:
            return None
        head, _body = _split(data)
        return head.get("h", {}).get("expires")
    except (struct.error, UnicodeDecodeError, TypeError, AttributeError) as exc:
        raise ValueError("this is not a packed message") from exc


def _split(data: bytes) -> tuple[Any, bytes]:
    version, length = _HEAD.unpack_from(data)
    if version != _VERSION or len(data) < _HEAD.size + length:
        raise ValueError("this is not a packed message")
    return _from_json(data[_HEAD.size : _HEAD.size + length].decode("ascii")), data[_HEAD.size + length :]


def is_deeper_than(body: bytes, depth: int) -> bool:
    """Tell whether a JSON text nests more than ``depth`` lists and objects, without decoding it."""
    # A text with few opening brackets, as nearly all have, is settled by two fast counts.
    if body.count(b"[") + body.count(b"{") <= depth:
        return False
    brackets = _STRING.sub(b"", body).translate(_STEP, _NOT_BRACKETS)
    return max(accumulate(map(_STEPS.__getitem__, brackets), initial=0)) > depth


_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_NOT_BRACKETS: Final = bytes(value for value in range(256) if value not in b"[]{}")
_STEP: Final = bytes.maketrans(b"[{]}", b"\x01\x01\x02\x02")
_STEPS: Final = (0, 1, -1)


def _body_bytes(body: Any, content_encoding: str | None) -> bytes:
    if isinstance(body, bytes):
        return body
    if body is None:
        return b""
    if isinstance(body, str):
        try:
            return body.encode(content_encoding or "utf-8")
        except (LookupError, UnicodeError):
            return body.encode("utf-8", "surrogatepass")
    if isinstance(body, bytearray | memoryview):
        return bytes(body)
    return repr(body).encode("utf-8", "surrogatepass")


def _put_headers(head: dict[str, Any], headers: Mapping[str, Any]) -> None:
    if len(headers) == _USUAL_COUNT and (variable := _variable_headers(headers)) is not None:
        head["f"] = variable
        return
    rest: dict[str, Any] = {}
    usual = 0
    task_id = headers.get("id", _MISSING)
    for name, value in headers.items():
        default = _HEADERS.get(name, _MISSING)
        if default is not _MISSING:
            usual += 1
            if default is value or (type(value) is _HEADER_TYPES[name] and default == value):
                continue
        elif name == "root_id":
            usual += 1
            if type(value) is str and value == task_id:
                continue
        elif name == "compression":
            head["z"] = value
            continue
        rest[name] = value
    head["h"] = rest
    if usual != len(_HEADERS) + 1:
        head["a"] = [name for name in (*_HEADERS, "root_id") if name not in headers]


def _variable_headers(headers: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return the five headers that tell such a message from another, or None if anything in it is unusual."""
    try:
        fixed = _get_fixed(headers)
        variable = _get_variable(headers)
        task_id, root_id = variable[0], headers["root_id"]
    except KeyError:
        return None
    # By type as well: 0, False and 0.0 are equal to Python and different to the receiver.
    if fixed != _FIXED_VALUES or tuple(map(type, fixed)) != _FIXED_TYPES:
        return None
    return variable if type(task_id) is str and type(root_id) is str and task_id == root_id else None


def _get_headers(head: Mapping[str, Any]) -> dict[str, Any]:
    rest = head["h"] if "h" in head else dict(zip(_VARIABLE, head["f"], strict=True))
    absent = head.get("a", ())
    headers = {
        name: (value.copy() if isinstance(value, list | dict) else value)
        for name, value in _HEADERS.items()
        if name not in absent
    }
    headers.update(rest)
    if "root_id" not in rest and "root_id" not in absent:
        headers["root_id"] = headers["id"]
    return headers


def _put_properties(
    head: dict[str, Any],
    properties: Mapping[str, Any],
    headers: Mapping[str, Any],
    content_type: str | None,
    content_encoding: str | None,
) -> None:
    rest = {}
    same = []
    for name, value in properties.items():
        code = _PROPERTY_CODES.get(name)
        if code is None:
            rest[name] = value
        elif code < 0:
            continue
        elif code == 0 and type(value) is str and value == headers.get("id", _MISSING):
            same.append(0)
        elif code == 1 and type(value) is int and value == 2:
            same.append(1)
        elif (code == 2 and value == content_type) or (code == 3 and value == content_encoding):
            same.append(code)
        else:
            rest[name] = value
    if rest:
        head["p"] = rest
    same.sort()
    if same != [0, 1]:
        head["s"] = same


def _get_properties(
    head: Mapping[str, Any], headers: Mapping[str, Any], content_type: str | None, content_encoding: str | None
) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for index in head.get("s", (0, 1)):
        name, value = (
            ("correlation_id", headers.get("id")),
            ("delivery_mode", 2),
            ("content_type", content_type),
            ("content_encoding", content_encoding),
        )[index]
        properties[name] = value
    properties.update(head.get("p", {}))
    return properties


def _without_unfit_values(head: Mapping[str, Any]) -> dict[str, Any]:
    """Return a packed head whose overlong or endless header and property values were left out."""
    kept = dict(head)
    if "f" in kept:
        kept["h"] = dict(zip(_VARIABLE, kept.pop("f"), strict=True))
    for part in ("h", "p"):
        fit = {}
        for name, value in kept.get(part, {}).items():
            try:
                if len(name) + len(_to_json(value)) <= HEAD_BYTES:
                    fit[name] = value
            except RecursionError:
                continue
        kept[part] = dict(list(fit.items())[:64])
    return kept


def _to_json(value: Any) -> str:
    try:
        text = _encode(value)
    except (TypeError, ValueError):
        return _encode(_tagged(value))
    # Our tag turning up in somebody's own keys must not be taken for a tag when it is read.
    return _encode(_tagged(value)) if _TAG_TEXT in text else text


def _from_json(text: str) -> Any:
    return json.loads(text, object_hook=_untagged) if _TAG_TEXT in text else json.loads(text)


def _tagged(value: Any) -> Any:
    if value is None or isinstance(value, bool | str | float):
        return value
    if isinstance(value, int):
        return value if -_LONGEST_INT < value < _LONGEST_INT else {_TAG: ["int", hex(value)]}
    if isinstance(value, list):
        return [_tagged(item) for item in value]
    if isinstance(value, dict):
        if _TAG not in value and all(isinstance(name, str) for name in value):
            return {name: _tagged(item) for name, item in value.items()}
        return {_TAG: ["dict", [[_tagged(name), _tagged(item)] for name, item in value.items()]]}
    if isinstance(value, bytes | bytearray | memoryview):
        return {_TAG: ["bytes", base64.b64encode(bytes(value)).decode("ascii")]}
    for name, kind in _DATE_KINDS:
        if isinstance(value, kind):
            return {_TAG: [name, value.isoformat()]}
    if isinstance(value, Decimal | UUID):
        return {_TAG: ["decimal" if isinstance(value, Decimal) else "uuid", str(value)]}
    if isinstance(value, timedelta):
        return {_TAG: ["seconds", value.total_seconds()]}
    if isinstance(value, tuple | set | frozenset):
        return {_TAG: ["tuple" if isinstance(value, tuple) else "set", [_tagged(item) for item in value]]}
    return {_TAG: ["repr", _short_repr(value)]}


# datetime stands before date, which it is a subclass of.
_DATE_KINDS: Final[tuple[tuple[str, type[datetime | date | time]], ...]] = (
    ("datetime", datetime),
    ("date", date),
    ("time", time),
)


def _untagged(found: dict[str, Any]) -> Any:
    if len(found) != 1 or _TAG not in found:
        return found
    kind, value = found[_TAG]
    match kind:
        case "bytes":
            return base64.b64decode(value)
        case "int":
            return int(value, 16)
        case "dict":
            return dict(value)
        case "datetime":
            return datetime.fromisoformat(value)
        case "date":
            return date.fromisoformat(value)
        case "time":
            return time.fromisoformat(value)
        case "decimal":
            return Decimal(value)
        case "uuid":
            return UUID(value)
        case "seconds":
            return timedelta(seconds=value)
        case "tuple":
            return tuple(value)
        case "set":
            return set(value)
        case _:
            return value


def _short_repr(value: Any) -> str:
    try:
        return repr(value)[:1000]
    except Exception:  # noqa: BLE001  a foreign __repr__ may raise anything
        return f"<{type(value).__name__}>"
