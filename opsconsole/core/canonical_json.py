"""Canonical JSON: one value, one text, so that a hash over it means something.

Keys are sorted, separators are compact, text is not escaped to ASCII, and floats are refused: two databases and two
languages do not agree on how to write them back (measured: jsonb changes 1e16 and -0.0).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

JsonValue: TypeAlias = "bool | int | str | list[JsonValue] | dict[str, JsonValue] | None"

_PLAIN: Final = frozenset((str, int, bool, type(None)))


def make_encoder(*, sort_keys: bool, ensure_ascii: bool, allow_nan: bool) -> Callable[[Any], str]:
    """Return a function that writes a value as compact JSON text.

    It is the core of ``json.JSONEncoder`` without what ``encode`` sets up again for each text, which for small ones
    costs more than the text itself (measured). Where Python has no such core, ``encode`` does it.
    """
    encoder = json.JSONEncoder(
        sort_keys=sort_keys,
        separators=(",", ":"),
        ensure_ascii=ensure_ascii,
        allow_nan=allow_nan,
        check_circular=False,
    )
    module: Any = json.encoder
    text = module.encode_basestring_ascii if ensure_ascii else module.encode_basestring
    try:
        core = module.c_make_encoder(None, encoder.default, text, None, ":", ",", sort_keys, False, allow_nan)
        sample = [{"b": None, "a": True}, 7, "\u00e4"]
        if "".join(core(sample, 0)) != encoder.encode(sample):
            return encoder.encode
    except (AttributeError, TypeError):
        return encoder.encode
    join = "".join
    return lambda value: join(core(value, 0))


_encode: Final = make_encoder(sort_keys=True, ensure_ascii=False, allow_nan=False)


def canonical_json(value: Any) -> str:
    """Return the canonical text of ``value``; raises ``TypeError`` for a float or for what JSON has no form for."""
    _refuse_floats(value)
    return _encode(value)


def _refuse_floats(value: Any) -> None:
    if type(value) in _PLAIN:
        return
    if isinstance(value, float):
        raise TypeError("canonical JSON has no floats")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError("canonical JSON keys are text")
            _refuse_floats(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_floats(item)
