"""Canonical JSON: one value, one text, so that a hash over it means something.

Keys are sorted, separators are compact, text is not escaped to ASCII, and floats are refused: two databases and two
languages do not agree on how to write them back (measured: jsonb changes 1e16 and -0.0).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

JsonValue: TypeAlias = "bool | int | str | list[JsonValue] | dict[str, JsonValue] | None"

_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def canonical_json(value: Any) -> str:
    """Return the canonical text of ``value``; raises ``TypeError`` for a float or for what JSON has no form for."""
    _refuse_floats(value)
    return _ENCODER.encode(value)


def _refuse_floats(value: Any) -> None:
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
