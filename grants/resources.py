"""What a request touches, as far as a grant can tell it apart."""

from __future__ import annotations

from dataclasses import dataclass

ANY = "*"
"""Stored in a scope's column for "every value". As a resource's value it asks for a capability over every value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """The scope columns of one request, and what the audit row calls its target.

    "" says that the resource has no such thing (a tenant-wide read has no actor): only ``*`` matches it. ``*`` asks for
    all of them, as a request for every tenant's audit rows does (B2): only ``*`` matches that either.
    The target is for the audit row and plays no part in a decision.
    """

    tenant: str
    actor_type: str = ""
    actor_id: str = ""
    command_id: str = ""
    target_type: str = ""
    target_id: str = ""
