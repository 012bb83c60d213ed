"""Versions of records that count none: a number that is another one whenever what it is made of has changed."""

from __future__ import annotations

import hashlib


def version_of(*told: object) -> int:
    """Return 48 bits of a hash, so that every reader of JSON holds the number exactly."""
    return int.from_bytes(hashlib.sha256(repr([str(part) for part in told]).encode()).digest()[:6])
