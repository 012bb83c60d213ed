"""The leaf hash of an audit row: what makes a changed row show (C16).

The hash is SHA-256 over a zero byte (RFC 6962's mark of a leaf, so that no inner node of a later tree can pass for a
row) and the canonical JSON of every other column, the version of this list of columns included.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from datetime import UTC
from typing import TYPE_CHECKING, Any

from opsconsole.core.canonical_json import make_encoder

if TYPE_CHECKING:
    from grants.models import AuditEvent

LEAF_VERSION = 1
# The text that canonical_json gives, without its search for floats: a row has none, and a batch has many rows.
_canonical = make_encoder(sort_keys=True, ensure_ascii=False, allow_nan=False)
LEAF_COLUMNS: dict[int, tuple[str, ...]] = {
    1: (
        "id",
        "at",
        "tenant",
        "operator_kind",
        "operator_id",
        "operator_name",
        "action",
        "actor_type",
        "actor_id",
        "target_type",
        "target_id",
        "capability",
        "reason",
        "verdict",
        "outcome",
        "idempotency_key",
        "request_digest",
        "request_id",
        "denial_key",
        "leaf_version",
    )
}
"""The columns that each version hashes. A new column is a new version; an old row is checked by its own."""


def hash_leaf(columns: Mapping[str, Any], version: int = LEAF_VERSION) -> str:
    """Return the leaf hash, in hexadecimal, of a row given as column values."""
    values = {name: columns[name] for name in LEAF_COLUMNS[version]}
    values["id"] = str(values["id"])
    # Both databases keep microseconds, and isoformat() would leave them out when they are zero.
    values["at"] = values["at"].astimezone(UTC).isoformat(timespec="microseconds")
    return hashlib.sha256(b"\x00" + _canonical(values).encode()).hexdigest()


def leaf_hash(event: AuditEvent) -> str:
    """Return the hash that ``event``'s columns have now."""
    return hash_leaf(event.__dict__, event.leaf_version)


def verify_leaf(event: AuditEvent) -> bool:
    """Say whether ``event`` still is what was written; False also for a version that was never written."""
    if event.leaf_version not in LEAF_COLUMNS:
        return False
    return hmac.compare_digest(leaf_hash(event), event.leaf_hash)
