"""Ids that sort by time (UUID version 7, RFC 9562), so that rows inserted together lie together in every index."""

from __future__ import annotations

from uuid import UUID

from uuid_utils.compat import uuid7


def new_id() -> UUID:
    """Return a new UUIDv7 as the standard library's type."""
    return uuid7()
