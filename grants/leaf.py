"""The leaf hash of an audit row: what makes a changed row show (C16).

The hash is SHA-256 over a zero byte (RFC 6962's mark of a leaf, so that no inner node of a later tree can pass for a
row) and the canonical JSON of every other column, the version of this list of columns included.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grants.models import AuditEvent

LEAF_VERSION = 1
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


def _form(columns: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Return columns in the order of canonical JSON, and its text with a gap for each value."""
    names = tuple(sorted(columns))
    return names, "{" + ",".join(f'"{name}":%s' for name in names) + "}"


# A row is flat and its columns are known, so that its canonical JSON is a form to fill in: a batch has many rows.
_FORMS = {version: _form(columns) for version, columns in LEAF_COLUMNS.items()}


def hash_leaf(columns: Mapping[str, Any], version: int = LEAF_VERSION) -> str:
    """Return the leaf hash, in hexadecimal, of a row given as column values."""
    names, form = _FORMS[version]
    text = form % tuple([_json(columns[name]) for name in names])
    return hashlib.sha256(b"\x00" + text.encode()).hexdigest()


class AlikeRows:
    """Leaf hashes of rows that are alike but for a few columns; what they share is written once."""

    def __init__(self, columns: Mapping[str, Any], varying: Iterable[str]) -> None:
        names, form = _FORMS[LEAF_VERSION]
        self.varying = tuple(name for name in names if name in frozenset(varying))
        shared = ["%s" if name in self.varying else _json(columns[name]).replace("%", "%%") for name in names]
        self._form = form % tuple(shared)

    def hash_leaf(self, columns: Mapping[str, Any]) -> str:
        """Return the leaf hash of one of the rows, given as at least the columns that vary."""
        text = self._form % tuple([_json(columns[name]) for name in self.varying])
        return hashlib.sha256(b"\x00" + text.encode()).hexdigest()


def _json(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, str):
        return encode_basestring(value)
    if isinstance(value, int):
        return str(value)
    return _moment(value) if isinstance(value, datetime) else f'"{value}"'  # the latter is the id


@lru_cache(maxsize=64)
def _moment(at: datetime) -> str:
    # Both databases keep microseconds, and isoformat() would leave them out when they are zero.
    return f'"{at.astimezone(UTC).isoformat(timespec="microseconds")}"'


def leaf_hash(event: AuditEvent) -> str:
    """Return the hash that ``event``'s columns have now."""
    return hash_leaf(event.__dict__, event.leaf_version)


def verify_leaf(event: AuditEvent) -> bool:
    """Say whether ``event`` still is what was written; False also for a version that was never written."""
    if event.leaf_version not in LEAF_COLUMNS:
        return False
    return hmac.compare_digest(leaf_hash(event), event.leaf_hash)
