"""What makes a function a service: its transaction, and the audit row of a denial; and the row of a read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import wraps
from typing import ParamSpec, TypeVar

from django.db import transaction

from grants import audit
from grants.access import Capability, find_capability
from grants.actions import Action
from grants.errors import AccessDenied
from grants.models import AuditEvent
from grants.operators import Operator
from grants.resources import Resource
from opsconsole.core.canonical_json import canonical_json
from opsconsole.core.database import database_now

P = ParamSpec("P")
R = TypeVar("R")


def service(function: Callable[P, R]) -> Callable[P, R]:
    """Run ``function`` in a durable transaction; a denial is audited in a second one, after the first is undone.

    Written inside the first, the denial would be rolled back with it; written on a second connection, it would wait for
    ever on SQLite. A service called inside a transaction raises ``RuntimeError``: what it returns must stay true.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with transaction.atomic(durable=True):
                return function(*args, **kwargs)
        except AccessDenied as denied:
            record_denial(denied.operator, denied.action, denied.resource)
            if denied.shown_as is not None:
                raise denied.shown_as from None
            raise

    return run


def record_denial(operator: Operator, action: Action, resource: Resource) -> None:
    """Audit that ``operator`` was refused, in a transaction of its own (B2).

    Further denials of the same operator, action and resource within the same minute of the database's clock add no
    row: a page that polls would otherwise bury the trail.
    """
    with transaction.atomic(durable=True):
        record_denials(operator, action, [resource])


def record_denials(operator: Operator, action: Action, resources: Iterable[Resource]) -> None:
    """Do what ``record_denial`` does for each, in the caller's transaction.

    For a service that refuses some of many and does the rest, so that the denials stand or fall with what it did.
    """
    at = database_now()
    denials = {_key_of_minute(operator, action, resource, at): (operator, action, resource) for resource in resources}
    audit.record_denied(denials, at=at)


def record_read(operator: Operator, action: Action, resource: Resource, otherwise: Capability) -> None:
    """Audit that ``operator`` reads what leaves a row, in a transaction of its own and before the answer (B3).

    The row names the capability for all of ``resource``, or else ``otherwise``. It is folded like a denial: who goes
    through the pages of a list leaves one a minute, and for the rest of it this is one look, which waits for no lock.
    """
    at = database_now()
    # No client's key can be in the way: keys belong to their action, and no request that has one is a read.
    key = _key_of_minute(operator, action, resource, at)
    if AuditEvent.objects.filter(
        operator_kind=operator.kind.value, operator_id=operator.id, action=action.value, idempotency_key=key
    ).exists():
        return
    capability = find_capability(operator, action, resource) or otherwise
    entry = audit.AuditEntry(
        action=action.value, operator=operator, resource=resource, capability=capability, outcome={}, key=key
    )
    with transaction.atomic(durable=True):
        audit.record_many([entry], at=at)


def _key_of_minute(operator: Operator, action: Action, resource: Resource, at: datetime) -> str:
    parts = [
        operator.kind.value,
        operator.id,
        action.value,
        resource.tenant,
        resource.actor_type,
        resource.actor_id,
        resource.command_id,
        resource.target_type,
        resource.target_id,
        int(at.timestamp()) // 60,
    ]
    return hashlib.sha256(canonical_json(parts).encode(errors="backslashreplace")).hexdigest()
