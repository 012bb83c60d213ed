"""Authorising what a request names by an opaque id, so that "not yours" and "not there" cannot be told apart."""

from __future__ import annotations

from grants.access import Capability, authorise, find_capability
from grants.actions import Action
from grants.errors import AccessDenied
from grants.operators import Operator
from grants.resources import Resource
from opsconsole.core.errors import OpsError

NOWHERE = Resource(tenant="(none)")
"""Stands for the scope of what does not exist: it is asked about like any other, so that the answer takes as long."""


def authorise_target(operator: Operator, action: Action, resource: Resource | None, not_found: OpsError) -> Capability:
    """Return the capability for ``action`` on ``resource``, which was looked up by an opaque id (None: not there).

    Raises ``AccessDenied``, audited either way: shown as 403 to who may read it, and as ``not_found`` to who may not.
    What is not there is asked about as well and ends in the same refusal, unless the operator may do it everywhere.
    """
    asked = NOWHERE if resource is None else resource
    capability = find_capability(operator, action, asked)
    if capability is not None:
        if resource is None:
            raise not_found
        return capability
    try:
        authorise(operator, Action.INSPECT, asked)
    except AccessDenied:
        raise AccessDenied(operator=operator, action=action, resource=asked, shown_as=not_found) from None
    if resource is None:
        raise not_found
    raise AccessDenied(operator=operator, action=action, resource=asked)
