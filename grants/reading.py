"""Authorising reads: a refusal is audited like that of a change, without a transaction around what is only looked at.

A service's transaction takes the write lock on SQLite, which a page that polls must not do. What was allowed leaves a
row only where B3 asks for one: the audit trail here, payloads in ``repairs.payloads``.
"""

from __future__ import annotations

from grants.access import Capability, authorise, holds
from grants.actions import Action
from grants.errors import AccessDenied
from grants.operators import Operator
from grants.resources import ANY, Resource
from grants.service import record_denial, record_read
from grants.targets import authorise_target
from opsconsole.core.errors import OpsError

EACH_ROW = Capability(id="each-row", text="audit.read, asked for each row of the answer")
"""What allows a list of all that one may read, to who may not read all of it."""


def authorise_read(operator: Operator, action: Action, resource: Resource) -> Capability:
    """Return the capability for a read that names its scope; raises ``AccessDenied`` (403), audited, before a look."""
    try:
        return authorise(operator, action, resource)
    except AccessDenied as denied:
        record_denial(denied.operator, denied.action, denied.resource)
        raise


def authorise_read_of(operator: Operator, action: Action, resource: Resource | None, not_found: OpsError) -> Capability:
    """Return the capability for a read of what an opaque id names (None: not there).

    Raises ``not_found`` for what is missing and for what the operator may not inspect, ``AccessDenied`` for what they
    may inspect and not read in this way; audited.
    """
    try:
        return authorise_target(operator, action, resource, not_found)
    except AccessDenied as denied:
        record_denial(denied.operator, denied.action, denied.resource)
        if denied.shown_as is not None:
            raise denied.shown_as from None
        raise


def authorise_anywhere(operator: Operator, action: Action) -> None:
    """Refuse, audited, an operator who may do ``action`` to nothing at all; raises ``AccessDenied``."""
    if not holds(operator, action):
        resource = Resource(tenant=ANY)
        record_denial(operator, action, resource)
        raise AccessDenied(operator=operator, action=action, resource=resource)


def authorise_scope(
    operator: Operator, action: Action, *, tenant: str | None, actor_type: str = "", actor_id: str = ""
) -> None:
    """Authorise the scope that a list's filters name, if they name a tenant; raises ``AccessDenied``, audited.

    Without a tenant nothing is named, and the list holds what the operator may see. ``*`` asks for every tenant.
    """
    if tenant is not None:
        authorise_read(operator, action, Resource(tenant=tenant, actor_type=actor_type, actor_id=actor_id))


def audit_reading_of_trail(operator: Operator, tenant: str = ANY, *, how: str = "") -> None:
    """Write that ``operator`` reads the audit trail, of one tenant or of all that they may read of it (B3).

    ``how`` names a way of reading that is to have a row of its own, such as taking a file away.
    Call it after authorising and before the first row is read: where it raises, nothing may be answered.
    """
    trail = Resource(tenant=tenant, target_type="audit_trail", target_id=how)
    record_read(operator, Action.AUDIT_READ, trail, EACH_ROW)
