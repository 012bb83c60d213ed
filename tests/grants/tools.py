"""Makes rows that the tests of this app start from."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from threading import Barrier
from typing import Any, TypeVar

from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group
from django.db import connection

from grants import audit
from grants.access import SYSTEM_CAPABILITY
from grants.actions import Action
from grants.models import AuditEvent, CapabilityScope, ScopeGroupGrant, ScopeUserGrant
from grants.operators import SYSTEM
from grants.resources import ANY, Resource

T = TypeVar("T")


def make_user(username: str, *, staff: bool = True, **more: Any) -> Any:
    """Return a new user; they sign in with the password ``secret``."""
    return get_user_model().objects.create_user(username=username, password="secret", is_staff=staff, **more)


def give(
    holder: Any,
    action: Action,
    tenant: str = ANY,
    actor_type: str = ANY,
    actor_id: str = ANY,
    command_id: str = ANY,
    *,
    expires_at: datetime | None = None,
) -> Any:
    """Store a grant for a user or a group, past every rule of who may give it."""
    scope, _ = CapabilityScope.objects.get_or_create(
        tenant=tenant, actor_type=actor_type, actor_id=actor_id, command_id=command_id
    )
    model: Any = ScopeGroupGrant if isinstance(holder, Group) else ScopeUserGrant
    column = "group_id" if isinstance(holder, Group) else "user_id"
    return model.objects.give(**{column: holder.pk}, action=action, scope=scope, expires_at=expires_at)


def write_event(tenant: str = "t-a", actor_type: str = "", actor_id: str = "", **more: Any) -> AuditEvent:
    """Write an audit row of the system."""
    values: dict[str, Any] = {
        "action": "queue.dead_lettered",
        "operator": SYSTEM,
        "resource": Resource(
            tenant=tenant, actor_type=actor_type, actor_id=actor_id, target_type="dead_letter", target_id="1"
        ),
        "capability": SYSTEM_CAPABILITY,
        "outcome": {"recorded": True},
    }
    return audit.record(**{**values, **more})


def at_once(count: int, function: Callable[[int], T]) -> list[T | BaseException]:
    """Run ``function(0)`` to ``function(count - 1)`` in threads that start together; return results or errors."""
    barrier = Barrier(count)

    def run(number: int) -> T | BaseException:
        try:
            barrier.wait(timeout=30)
            return function(number)
        except BaseException as error:
            return error
        finally:
            connection.close()

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))
