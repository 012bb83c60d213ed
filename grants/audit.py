"""Writing the audit trail, and answering a repeated request from it.

An audit row is also the receipt of the request that it records (STYLE: one complete insert in the same transaction).
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from typing import Any

from django.db import IntegrityError, connection, transaction
from django.db.models import CharField, TextField

from grants import sql
from grants.access import Capability
from grants.actions import Action
from grants.errors import IdempotencyKeyInvalid, IdempotencyKeyMissing, IdempotencyKeyReused, ReasonInvalid
from grants.leaf import LEAF_VERSION, AlikeRows, hash_leaf
from grants.models import REASON_LENGTH, AuditEvent, Verdict
from grants.operators import Operator, OperatorKind
from grants.resources import Resource
from opsconsole.core.canonical_json import JsonValue, canonical_json
from opsconsole.core.database import RowWriter, database_now
from opsconsole.core.ids import new_id
from opsconsole.core.request_id import current_request_id

KEY_LENGTH = 255  # of a client's key; a key that we derive from it may be longer
LIMITS: dict[str, int | None] = {field.attname: field.max_length for field in AuditEvent._meta.concrete_fields}
_TEXTS = [
    (field.attname, field.max_length or sys.maxsize)
    for field in AuditEvent._meta.concrete_fields
    if isinstance(field, CharField | TextField) and field.attname != "leaf_hash"
]
_COLUMNS = tuple(field.attname for field in AuditEvent._meta.concrete_fields)
_NEW_EVENTS = RowWriter(AuditEvent, _COLUMNS, suffix="ON CONFLICT DO NOTHING")
_values = itemgetter(*_COLUMNS)


@dataclass(slots=True, kw_only=True)
class AuditEntry:
    """One audit row to be written; see ``record`` for what each part means. Nobody changes one."""

    action: str
    operator: Operator
    resource: Resource
    capability: Capability
    outcome: Mapping[str, JsonValue]
    reason: str = ""
    key: str | None = None
    digest: str = ""
    request_id: str = ""


def replayed(
    *, key: str, action: str, operator: Operator, target_type: str, target_id: str, digest: str
) -> AuditEvent | None:
    """Return the row that this very request left when it was made before, or None if the key is new (A9, C4).

    Call it after authorising and after locking the target. A key belongs to its operator and action, in every tenant;
    raises ``IdempotencyKeyReused`` if it was used for another target or with another body. Keys of the system are
    derived from facts and may repeat from tenant to tenant, so there another target's row is none of ours.
    """
    target_id = fitted(target_id, LIMITS["target_id"])
    rows = AuditEvent.objects.filter(
        operator_kind=operator.kind, operator_id=operator.id, action=action, idempotency_key=stored_key(key)
    ).order_by("id")
    if operator.kind is OperatorKind.SYSTEM:
        rows = rows.filter(target_type=target_type, target_id=target_id)
    found: AuditEvent | None = rows.first()
    if found is None:
        return None
    if (found.target_type, found.target_id, found.request_digest) != (target_type, target_id, digest):
        raise IdempotencyKeyReused
    return found


def replayed_creation(*, key: str, action: str, operator: Operator, target_type: str, digest: str) -> AuditEvent | None:
    """Do what ``replayed`` does for a request that makes its target, which the row it left names.

    There is nothing to lock before: of two at once, the second has to ask again when its own row was refused.
    """
    found = (
        AuditEvent.objects.filter(
            operator_kind=operator.kind, operator_id=operator.id, action=action, idempotency_key=stored_key(key)
        )
        .order_by("id")
        .first()
    )
    if found is not None and (found.target_type, found.request_digest) != (target_type, digest):
        raise IdempotencyKeyReused
    return found


def has_key(*, key: str, action: str, operator: Operator, target_id: str) -> bool:
    """Say whether this operator has done that to a target under this key before, whatever the answer was."""
    return AuditEvent.objects.filter(
        operator_kind=operator.kind,
        operator_id=operator.id,
        action=action,
        idempotency_key=stored_key(key),
        target_id=target_id,
    ).exists()


def record(
    *,
    action: str,
    operator: Operator,
    resource: Resource,
    capability: Capability,
    outcome: Mapping[str, JsonValue],
    reason: str = "",
    key: str | None = None,
    digest: str = "",
    request_id: str = "",
    at: datetime | None = None,
) -> AuditEvent:
    """Write one row in the caller's transaction and return it.

    ``action`` is the fact that happened (``operations.incident_resolved``), ``outcome`` what a replay answers with:
    JSON without floats. ``at`` is the database's clock if the caller has read it already. Raises
    ``IdempotencyKeyReused`` if another request with this key came first; the transaction stays usable.
    """
    entry = AuditEntry(
        action=action,
        operator=operator,
        resource=resource,
        capability=capability,
        outcome=outcome,
        reason=reason,
        key=key,
        digest=digest,
        request_id=request_id,
    )
    columns = _columns(entry, at or database_now())
    try:
        with nullcontext() if key is None else transaction.atomic():
            sql.insert_event(connection, columns)
    except IntegrityError as error:
        if key is not None and sql.violates_key(error):
            raise IdempotencyKeyReused from error
        raise
    event = AuditEvent(**columns)
    event._state.adding = False
    event._state.db = "default"
    return event


def record_many(entries: Sequence[AuditEntry], *, at: datetime | None = None) -> int:
    """Write many rows with one statement and return how many were new; a key that exists already is skipped.

    For the system's batches, whose keys are derived from facts: recording a fact again is no error.
    """
    if not entries:
        return 0
    now = at or database_now()
    # In key order: two batches that insert the same keys the other way round would wait for each other.
    ordered = sorted(entries, key=lambda entry: (entry.resource.tenant, entry.key or ""))
    return _insert_new(_columns_of_many(ordered, now))


def _insert_new(rows: list[dict[str, Any]]) -> int:
    if connection.vendor == "postgresql":
        return _NEW_EVENTS.insert(map(_values, rows))
    return sql.insert_new_events(connection, rows)


def record_denied(denials: Mapping[str, tuple[Operator, Action, Resource]], *, at: datetime) -> None:
    """Write the row of each denial unless one with its denial key is there; called by ``grants.service`` only."""
    nothing = Capability(id="", text="")
    rows = [
        _columns(
            AuditEntry(action=action.value, operator=operator, resource=resource, capability=nothing, outcome={}),
            at,
            verdict=Verdict.DENIED,
            denial_key=denial_key,
        )
        # In key order, as in record_many.
        for denial_key, (operator, action, resource) in sorted(denials.items())
    ]
    if rows:
        _insert_new(rows)


def request_digest(body: Mapping[str, Any]) -> str:
    """Return the hash of a request's validated body: what tells a repeated request from another one with its key."""
    return hashlib.sha256(canonical_json(_hashable(body)).encode(errors="backslashreplace")).hexdigest()


def validate_key(text: str | None) -> str:
    """Return the key that an ``Idempotency-Key`` header holds, bare or as a quoted string (RFC 8941).

    Raises ``IdempotencyKeyMissing`` for None or nothing, ``IdempotencyKeyInvalid`` for what is no key.
    """
    key = (text or "").strip(" \t")
    if not key:
        raise IdempotencyKeyMissing
    if key.startswith('"'):
        quoted = re.fullmatch(r'"((?:[^"\\]|\\["\\])*)"', key)
        if quoted is None:
            raise IdempotencyKeyInvalid
        key = re.sub(r'\\(["\\])', r"\1", quoted.group(1))
    if not re.fullmatch(rf"[\x20-\x7e]{{1,{KEY_LENGTH}}}", key):
        raise IdempotencyKeyInvalid
    return key


def validate_reason(text: str) -> str:
    """Return a reason without surrounding space; raises ``ReasonInvalid`` unless 1 to 500 characters remain (B4)."""
    reason = text.strip()
    if not 1 <= len(reason) <= REASON_LENGTH:
        raise ReasonInvalid
    return reason


def stored_key(key: str) -> str:
    """Return ``key`` as the column holds it: a derived one that is too long keeps its head and gets a hash (C10)."""
    return fitted(key, LIMITS["idempotency_key"])


def fitted(value: str, limit: int | None) -> str:
    """Return text that both databases can store: no NUL or lone surrogate, and not longer than ``limit``.

    What was cut has the hash of the whole beside it, so that two long values never become one.
    """
    if not value.isascii() or "\x00" in value:
        value = value.encode(errors="backslashreplace").decode().replace("\x00", "\\x00")
    if limit is None or len(value) <= limit:
        return value
    digest = hashlib.sha256(value.encode()).hexdigest()
    return f"{value[: limit - len(digest) - 1]}:{digest}"


def _columns(
    entry: AuditEntry, at: datetime, *, verdict: Verdict = Verdict.ALLOWED, denial_key: str | None = None
) -> dict[str, Any]:
    """Return every column of the row, hash included."""
    resource = entry.resource
    target_type, target_id = resource.target_type, resource.target_id
    if not target_type and resource.command_id:
        target_type, target_id = "command", resource.command_id
    columns: dict[str, Any] = {
        "id": new_id(),
        "at": at,
        "tenant": resource.tenant,
        "operator_kind": entry.operator.kind.value,
        "operator_id": entry.operator.id,
        "operator_name": entry.operator.name,
        "action": entry.action,
        "actor_type": resource.actor_type,
        "actor_id": resource.actor_id,
        "target_type": target_type,
        "target_id": target_id,
        "capability": entry.capability.text,
        "reason": entry.reason,
        "verdict": verdict.value,
        # B2 wants "denied" as the outcome itself.
        "outcome": canonical_json("denied" if verdict is Verdict.DENIED else dict(entry.outcome)),
        "idempotency_key": entry.key,
        "request_digest": entry.digest,
        "request_id": entry.request_id or current_request_id(),
        "denial_key": denial_key,
        "leaf_version": LEAF_VERSION,
    }
    for name, limit in _TEXTS:
        value = columns[name]
        # What nearly every value is, is asked here: a call for each would cost more than all the rest.
        if value is not None and (len(value) > limit or not value.isascii() or "\x00" in value):
            columns[name] = fitted(value, LIMITS[name])
    columns["leaf_hash"] = hash_leaf(columns)
    return columns


_VARYING = ("id", "target_id", "idempotency_key", "outcome")


def _columns_of_many(entries: Sequence[AuditEntry], at: datetime) -> list[dict[str, Any]]:
    """Return what ``_columns`` does for each; of entries that are alike, what they share is made once."""
    moulds: dict[tuple[Any, ...], tuple[dict[str, Any], AlikeRows]] = {}
    outcomes: dict[int, str] = {}  # by identity: a batch often has one mapping for many
    rows: list[dict[str, Any]] = []
    for entry in entries:
        resource = entry.resource
        if not resource.target_type:
            rows.append(_columns(entry, at))
            continue
        alike = (
            entry.action, id(entry.operator), id(entry.capability), resource.tenant, resource.actor_type,
            resource.actor_id, resource.target_type, entry.reason, entry.digest, entry.request_id,
        )  # fmt: skip
        mould = moulds.get(alike)
        if mould is None:
            first = _columns(entry, at)
            mould = moulds[alike] = first, AlikeRows(first, _VARYING)
        outcome = outcomes.get(id(entry.outcome))
        if outcome is None:
            outcome = outcomes[id(entry.outcome)] = fitted(canonical_json(dict(entry.outcome)), None)
        key = entry.key
        row = {
            **mould[0],
            "id": new_id(),
            "target_id": fitted(resource.target_id, LIMITS["target_id"]),
            "idempotency_key": None if key is None else fitted(key, LIMITS["idempotency_key"]),
            "outcome": outcome,
        }
        row["leaf_hash"] = mould[1].hash_leaf(row)
        rows.append(row)
    return rows


def _hashable(value: Any) -> Any:
    """Return a validated value as JSON without floats; only for hashing, never to be read back."""
    if isinstance(value, Mapping):
        return {str(name): _hashable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hashable(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(canonical_json(_hashable(item)) for item in value)
    if value is None or isinstance(value, bool | int | str):
        return value
    return {type(value).__name__: str(value)}
