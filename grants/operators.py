"""Who acts: a person, an API token, the system itself, or somebody at a shell."""

from __future__ import annotations

import getpass
import os
import socket
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from django.contrib.auth.base_user import AbstractBaseUser

from grants.actions import Action
from grants.errors import NotAnOperator

if TYPE_CHECKING:
    from django.contrib.auth.models import AnonymousUser

    from grants.models import ApiToken


class OperatorKind(StrEnum):
    """How an operator came in; stored on every audit row."""

    PERSON = "person"  # an active staff user in a session
    TOKEN = "token"  # noqa: S105 - an API token, with part of its owner's grants
    SYSTEM = "system"  # our own code: recording, reconciliation, relay
    CLI = "cli"  # a shell on one of our hosts, acting with the grants of a user it names


NAME_LENGTH = 200
"""What every record of who did something has room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """Who acts, and whose grants apply.

    ``id`` never changes for one operator and is what receipts belong to; ``name`` is for readers. ``user_id`` is the
    primary key of the user whose grants are looked up, None if there is no such user. A token's own limits are
    ``token_actions`` and ``token_tenant`` (``*`` = every tenant that its owner has); both are None for everyone else.
    """

    kind: OperatorKind
    id: str
    name: str
    user_id: Any | None = None
    token_actions: frozenset[Action] | None = None
    token_tenant: str | None = None

    @property
    def ref(self) -> str:
        """Kind and id in one text, as records store who did something."""
        return f"{self.kind.value}:{self.id}"

    @classmethod
    def from_user(cls, user: AbstractBaseUser | AnonymousUser | None) -> Operator:
        """Return the person behind a session; raises ``NotAnOperator`` unless they are active staff."""
        active = require_active_staff(user)
        return cls(kind=OperatorKind.PERSON, id=str(active.pk), name=active.get_username(), user_id=active.pk)

    @classmethod
    def from_token(cls, token: ApiToken) -> Operator:
        """Return the operator of a token; raises ``NotAnOperator`` unless its owner is active staff.

        That the token is live is the business of whoever looked it up, and again of every ``authorise``.
        """
        owner = require_active_staff(token.user)
        known = {action.value: action for action in Action}
        return cls(
            kind=OperatorKind.TOKEN,
            id=str(token.public_id),
            name=f"{token.name} ({owner.get_username()})"[:NAME_LENGTH],
            user_id=owner.pk,
            # A name that this release does not know allows nothing.
            token_actions=frozenset(known[name] for name in token.actions if name in known),
            token_tenant=token.tenant,
        )

    @classmethod
    def cli(cls, acting_for: AbstractBaseUser | None = None) -> Operator:
        """Return whoever runs this command, as ``<os user>@<host>``.

        A shell has no grants of its own: every check but ``bootstrap`` uses those of ``acting_for``, the user named by
        ``--operator``. Who can run ``manage.py`` can name anyone, so the audit row says both names.
        """
        who = f"{os_user()}@{socket.gethostname()}"
        if acting_for is None:
            return cls(kind=OperatorKind.CLI, id=who, name=who)
        user = require_active_staff(acting_for)
        return cls(
            kind=OperatorKind.CLI, id=who, name=f"{who} for {user.get_username()}"[:NAME_LENGTH], user_id=user.pk
        )


SYSTEM = Operator(kind=OperatorKind.SYSTEM, id="system", name="system")
"""The product itself. Only code names it: no request can, and no command but the one that does what beat does."""


def os_user() -> str:
    """Return the login name of this process, or its number where the host has no name for it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid{os.getuid()}"


def require_active_staff(user: AbstractBaseUser | AnonymousUser | None) -> AbstractBaseUser:
    """Return ``user`` if they may be an operator at all, else raise ``NotAnOperator``."""
    if not isinstance(user, AbstractBaseUser) or not user.is_active or not getattr(user, "is_staff", False):
        raise NotAnOperator
    return user
