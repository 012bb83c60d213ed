"""What makes a function a service: its transaction, and the audit row of a denial."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from django.db import transaction

from grants import audit
from grants.actions import Action
from grants.errors import AccessDenied
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
        at = database_now()
        audit.record_denied(
            operator=operator,
            action=action,
            resource=resource,
            at=at,
            denial_key=_denial_key(operator, action, resource, int(at.timestamp()) // 60),
        )


def _denial_key(operator: Operator, action: Action, resource: Resource, minute: int) -> str:
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
        minute,
    ]
    return hashlib.sha256(canonical_json(parts).encode(errors="backslashreplace")).hexdigest()
