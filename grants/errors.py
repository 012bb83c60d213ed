"""What the grants app refuses, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opsconsole.core.errors import OpsError

if TYPE_CHECKING:
    from grants.actions import Action
    from grants.operators import Operator
    from grants.resources import Resource


class NotAuthenticated(OpsError):
    """Nobody we know asked; sign in, or send a live token. Not audited (B2)."""

    code = "not_authenticated"
    status = 401
    message = "Sign in, or send an API token that is still valid."


class NotAnOperator(NotAuthenticated):
    """The session belongs to somebody who is no operator: only active staff users are, and live tokens of theirs."""


class AccessDenied(OpsError):
    """No capability of the operator allows this; ask someone who holds it, or see ``manage.py grants explain``.

    The sentence names the action, which follows from what was asked alone. Operator and resource are for the audit row:
    they are kept out of what reaches the person who was refused, and would tell them what exists.
    """

    code = "access_denied"
    status = 403
    message = "You do not have permission to do this."

    def __init__(
        self, *, operator: Operator, action: Action, resource: Resource, shown_as: OpsError | None = None
    ) -> None:
        super().__init__()
        self.args = (f"{self.message} It needs the permission {action}.",)
        # What the person is told instead, where "no such thing" must not differ from "not yours" (404).
        self.shown_as = shown_as
        self.operator = operator
        self.action = action
        self.resource = resource


class SavedViewInvalid(OpsError):
    """A view has a name of 1 to 60 characters without control characters, and an address of at most 2,000."""

    code = "saved_view_invalid"
    status = 400
    message = "Give the view a name of 1 to 60 characters; what it filters by may be 2,000 characters long."


class TooManySavedViews(OpsError):
    """Delete one that is not used any more."""

    code = "too_many_saved_views"
    status = 409
    message = "You have {most} saved views of this list already. Delete one first."


class IdempotencyKeyMissing(OpsError):
    """A mutation came without its key; send ``Idempotency-Key`` with a new value for each intent."""

    code = "idempotency_key_missing"
    status = 400
    message = "This request needs an Idempotency-Key header."


class IdempotencyKeyInvalid(OpsError):
    """The key is not 1 to 255 printable ASCII characters; a UUID is a good one."""

    code = "idempotency_key_invalid"
    status = 400
    message = "An idempotency key is 1 to 255 printable ASCII characters."


class IdempotencyKeyReused(OpsError):
    """The key belongs to an earlier request for another target or with another body; use a new one."""

    code = "idempotency_key_reused"
    status = 409
    message = "This idempotency key was used for another request already."


class ReasonInvalid(OpsError):
    """A repair or a change of grants needs a reason that a later reader understands (B4)."""

    code = "reason_invalid"
    status = 400
    message = "A reason of 1 to 500 characters is needed."


class ScopeInvalid(OpsError):
    """A scope's fields are each ``*`` or a value; correct the one that is named."""

    code = "scope_invalid"
    status = 400
    message = "{field} is * or 1 to {limit} characters."


class GrantToOneself(OpsError):
    """Nobody gives a permission to themselves or to a group they are in; ask someone else who holds it (C15)."""

    code = "grant_to_oneself"
    status = 403
    message = "Nobody can give a permission to themselves, nor to a group they belong to."


class GrantEndInvalid(OpsError):
    """A grant ends: in the future, and not after the granter's own permission to give it (C15)."""

    code = "grant_end_invalid"
    status = 400
    message = "A grant ends in the future, and not later than what its granter holds."


class GrantNotFound(OpsError):
    """There is no such grant, or it was taken back already."""

    code = "grant_not_found"
    status = 404
    message = "There is no such permission."


class PrincipalNotFound(OpsError):
    """No user or group has this name."""

    code = "principal_not_found"
    status = 404
    message = "There is no such user or group."


class TokenInvalid(OpsError):
    """A token has a name, at least one action, a tenant and an end in the future."""

    code = "token_invalid"
    status = 400
    message = "{detail}"


class TokenNotFound(OpsError):
    """There is no such token, or it was revoked already."""

    code = "token_not_found"
    status = 404
    message = "There is no such token."
