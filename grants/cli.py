"""Who acts when a ``manage.py`` command is run; for every command that goes through a service."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Mapping
from typing import Any

from grants.errors import NotAuthenticated
from grants.models import ApiToken
from grants.operators import Operator
from grants.principals import user_named

TOKEN_VARIABLE = "OPSCONSOLE_TOKEN"  # noqa: S105


def add_operator_arguments(parser: ArgumentParser) -> None:
    """Add ``--operator`` and ``--token`` to a command."""
    who = parser.add_mutually_exclusive_group()
    who.add_argument(
        "--operator",
        metavar="USERNAME",
        help="act with this user's permissions; audited as cli:<os user>@<host> for that user",
    )
    who.add_argument(
        "--token",
        help=f"act as this API token; {TOKEN_VARIABLE} in the environment keeps it out of the list of processes",
    )


def operator_from_options(options: Mapping[str, Any]) -> Operator:
    """Return who acts: a token if one was given, else the shell, with the permissions of ``--operator`` or none.

    Raises ``NotAuthenticated`` for a token that is not live, ``NotAnOperator`` for a user who is no operator and
    ``PrincipalNotFound`` for one who does not exist.
    """
    if options.get("operator"):
        return Operator.cli(user_named(options["operator"]))
    plain = options.get("token") or os.environ.get(TOKEN_VARIABLE, "")
    if not plain:
        return Operator.cli()
    token = ApiToken.objects.live(plain)
    if token is None:
        raise NotAuthenticated
    return Operator.from_token(token)
