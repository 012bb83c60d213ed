"""``manage.py grants``: the first operator, and everyone's permissions and tokens from a shell."""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from secrets import token_urlsafe
from typing import Any
from uuid import UUID

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.core.serializers.json import DjangoJSONEncoder

from grants import selectors, services
from grants.actions import Action
from grants.audit import validate_key
from grants.cli import add_operator_arguments, operator_from_options
from grants.errors import AccessDenied, PrincipalNotFound
from grants.models import SCOPE_FIELDS, ApiToken
from grants.operators import Operator
from grants.resources import ANY, Resource
from opsconsole.core.database import database_now
from opsconsole.core.errors import OpsError
from opsconsole.core.ids import new_id
from opsconsole.management.operations import NobodyNamed, is_named

UNITS = {"m": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1)}
ACTIONS = [action.value for action in Action]


class Command(BaseCommand):
    """Every subcommand but ``bootstrap`` acts with the permissions of ``--operator USERNAME`` or of a token."""

    help = "Bootstrap the first operator; list, give, take back and explain permissions; make and revoke API tokens."

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the subcommands."""
        subcommands = parser.add_subparsers(dest="subcommand", required=True)

        def subcommand(name: str, help_text: str, handler: Callable[[dict[str, Any]], None]) -> ArgumentParser:
            added: ArgumentParser = subcommands.add_parser(name, help=help_text, description=help_text)
            added.set_defaults(handler=handler)
            added.add_argument("--json", action="store_true", dest="as_json", help="answer in JSON")
            return added

        bootstrap = subcommand("bootstrap", "Give a user every permission, as the first operator.", self.bootstrap)
        bootstrap.add_argument("username")
        bootstrap.add_argument("--tenant", default=ANY, help="only on this tenant (default: all)")
        bootstrap.add_argument("--create", action="store_true", help="make the user if there is none, as staff")
        bootstrap.add_argument("--password", help="of a user that is made; without it one is made up and printed")

        listing = subcommand("list", "List the permissions that you may manage, and your own.", self.list_grants)
        _add_principal(listing, required=False)
        add_operator_arguments(listing)

        grant = subcommand("grant", "Give a permission to a user or a group.", self.grant)
        _add_principal(grant, required=True)
        grant.add_argument(
            "--create", action="store_true", help="make the user if there is none, as staff; prints a password once"
        )
        _add_action_and_scope(grant)
        grant.add_argument("--reason", required=True)
        grant.add_argument("--expires", required=True, metavar="WHEN", help="90d, 8h, 30m, or an ISO 8601 time")
        _add_key(grant)
        add_operator_arguments(grant)

        revoke = subcommand("revoke", "Take back a permission.", self.revoke)
        revoke.add_argument("grant", help="as list shows it, such as user-grant:5")
        revoke.add_argument("--reason", required=True)
        _add_key(revoke)
        add_operator_arguments(revoke)

        explain = subcommand("explain", "Say whether a user may do something, and why.", self.explain)
        explain.add_argument("username")
        _add_action_and_scope(explain, default="")
        add_operator_arguments(explain)

        token = subcommand("token", "Make, list or revoke your API tokens.", self.token)
        token.add_argument("what", choices=["create", "list", "revoke"])
        token.add_argument("name", nargs="?", help="create: a name for it; revoke: its id")
        token.add_argument("--action", action="append", choices=ACTIONS, default=[], dest="actions")
        token.add_argument("--tenant", default=ANY)
        token.add_argument("--expires", metavar="WHEN", help="90d, 8h, 30m, or an ISO 8601 time")
        _add_key(token)
        add_operator_arguments(token)

    def handle(self, *_: Any, **options: Any) -> None:
        """Run the subcommand; a refusal ends with exit status 1 and its code."""
        try:
            options["handler"](options)
        except OpsError as refusal:
            why = f"{refusal.detail} ({refusal.code})"
            if isinstance(refusal, AccessDenied) and not is_named(refusal.operator):
                why = f"{why} {NobodyNamed()}"
            raise CommandError(why) from refusal

    def bootstrap(self, options: dict[str, Any]) -> None:
        """Make the first operator."""
        receipt = services.bootstrap(
            username=options["username"],
            tenant=options["tenant"],
            create=options["create"],
            password=options["password"],
        )
        lines = [f"{receipt.username} has every permission on {_named(receipt.tenant)}; {len(receipt.given)} are new."]
        if receipt.password is not None:
            lines.append(f"Password, shown once: {receipt.password}")
        self._answer(options, asdict(receipt), lines)

    def list_grants(self, options: dict[str, Any]) -> None:
        """List grants."""
        by = operator_from_options(options)
        grants = selectors.grants_named(by, username=options["user"], group=options["group"])
        lines = [
            f"{held.id:<16} {held.holder:<16} {held.action:<26} "
            f"{' / '.join((held.tenant, held.actor_type, held.actor_id, held.command_id))}  "
            f"{_end(held.expires_at, held.is_live)}  by {held.granted_by_name}: {held.reason}"
            for held in grants
        ]
        nothing = "No permissions." if is_named(by) else f"No permissions. {NobodyNamed()}"
        self._answer(options, [asdict(held) for held in grants], lines or [nothing])

    def grant(self, options: dict[str, Any]) -> None:
        """Give a permission; with ``--create`` to a user who is made for it, and does not stay if it is refused."""
        by = operator_from_options(options)
        scope = {field: options[field] for field in SCOPE_FIELDS}
        expires_at, key = _moment(options["expires"]), _key(options)
        user: Any
        password = None
        try:
            user, group = selectors.principal_to_manage(
                by, Resource(**scope), username=options["user"], group=options["group"]
            )
        except PrincipalNotFound:
            if not options["create"] or options["user"] is None:
                raise
            password = token_urlsafe(18)
            user, group = _make_staff(options["user"], password), None
        try:
            receipt = services.grant(
                by=by,
                action=Action(options["action"]),
                **scope,
                reason=options["reason"],
                expires_at=expires_at,
                key=key,
                user=user,
                group=group,
            )
        except OpsError:
            if password is not None:
                user.delete()
            raise
        lines = [f"{receipt.grant_id}: {receipt.action} until {receipt.expires_at}"]
        if password is not None:
            lines.append(f"{options['user']} was made. Password, shown once: {password}")
        self._answer(options, {**asdict(receipt), "password": password}, lines)

    def revoke(self, options: dict[str, Any]) -> None:
        """Take back a permission."""
        receipt = services.revoke(
            by=operator_from_options(options), grant_id=options["grant"], reason=options["reason"], key=_key(options)
        )
        self._answer(options, asdict(receipt), [f"{receipt.grant_id} was taken back."])

    def explain(self, options: dict[str, Any]) -> None:
        """Explain a decision about a user, to themselves or to who manages grants there."""
        explanation = selectors.explain_to(
            operator_from_options(options),
            Action(options["action"]),
            Resource(**{field: options[field] for field in SCOPE_FIELDS}),
            username=options["username"],
        )
        if explanation.capability is not None:
            lines = [f"Yes, by {explanation.capability.text}"]
            lines += [f"  {one.field}: {one.wanted or 'none'} = {_named(one.granted)}" for one in explanation.compared]
        else:
            lines = ["No.", *(f"  {reason}" for reason in explanation.reasons)]
        self._answer(options, asdict(explanation), lines)

    def token(self, options: dict[str, Any]) -> None:
        """Make, list or revoke tokens of the operator."""
        by = operator_from_options(options)
        if options["what"] == "list":
            self._list_tokens(options, by)
        elif options["name"] is None:
            raise CommandError(f"token {options['what']} needs a name or an id.")
        elif options["what"] == "revoke":
            revoked = services.revoke_token(by=by, public_id=_uuid(options["name"]), key=_key(options))
            self._answer(options, asdict(revoked), [f"{revoked.name} ({revoked.public_id}) is revoked."])
        else:
            self._create_token(options, by)

    def _create_token(self, options: dict[str, Any], by: Operator) -> None:
        if options["expires"] is None:
            raise CommandError("token create needs --expires.")
        made = services.create_token(
            by=by,
            name=options["name"],
            actions={Action(name) for name in options["actions"]},
            tenant=options["tenant"],
            expires_at=_moment(options["expires"]),
            key=_key(options),
        )
        self._answer(options, asdict(made), [f"{made.public_id}, shown once: {made.plain}"])

    def _list_tokens(self, options: dict[str, Any], by: Operator) -> None:
        rows = ApiToken.objects.filter(user_id=by.user_id).order_by("created", "public_id")
        tokens = [
            {
                "public_id": str(row.public_id),
                "name": row.name,
                "actions": row.actions,
                "tenant": row.tenant,
                "expires_at": row.expiry,
                "last_used_at": row.last_used_at,
            }
            for row in rows
        ]
        lines = [f"{one['public_id']} {one['name']} {one['tenant']} until {one['expires_at']}" for one in tokens]
        self._answer(options, tokens, lines or ["No tokens."])

    def _answer(self, options: dict[str, Any], value: Any, lines: list[str]) -> None:
        if options["as_json"]:
            self.stdout.write(json.dumps(value, cls=DjangoJSONEncoder, ensure_ascii=False))
        else:
            self.stdout.write("\n".join(lines))


def _make_staff(username: str, password: str) -> Any:
    model: Any = get_user_model()
    return model._default_manager.create_user(
        **{model.USERNAME_FIELD: username, "password": password, "is_staff": True}
    )


def _add_principal(parser: ArgumentParser, *, required: bool) -> None:
    who = parser.add_mutually_exclusive_group(required=required)
    who.add_argument("--user")
    who.add_argument("--group")


def _add_action_and_scope(parser: ArgumentParser, default: str = ANY) -> None:
    parser.add_argument("action", choices=ACTIONS, metavar="action", help=", ".join(ACTIONS))
    parser.add_argument("--tenant", required=True, help="* for all")
    for option in ("--actor-type", "--actor-id", "--command-id"):
        parser.add_argument(option, default=default)


def _add_key(parser: ArgumentParser) -> None:
    parser.add_argument("--key", help="idempotency key, for a script that may run twice (default: a new one)")


def _key(options: dict[str, Any]) -> str:
    return str(new_id()) if options["key"] is None else validate_key(options["key"])


def _uuid(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError as error:
        raise CommandError(f"{text!r} is no token id.") from error


def _moment(text: str) -> datetime:
    """Return the time that ``90d`` from now, or an ISO 8601 time, is; without a zone it is UTC."""
    if length := re.fullmatch(r"([1-9][0-9]{0,4})([mhd])", text):
        return database_now() + int(length.group(1)) * UNITS[length.group(2)]
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise CommandError(f"{text!r} is neither a length such as 90d nor an ISO 8601 time.") from error
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _named(value: str) -> str:
    return "any" if value == ANY else value


def _end(expires_at: datetime | None, is_live: bool) -> str:
    if expires_at is None:
        return "without end"
    return f"{'until' if is_live else 'ended'} {expires_at:%Y-%m-%d %H:%M}"
