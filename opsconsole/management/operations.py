"""What the operating commands share: who acts, how they answer, and how they end.

Exit status: 0 done, 1 refused (code and sentence on standard error, the problem document with ``--json``), 2 misused.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn
from uuid import UUID

from django.core.management.base import BaseCommand, CommandParser
from django.core.serializers.json import DjangoJSONEncoder
from rest_framework.serializers import BaseSerializer

from grants.audit import validate_key
from grants.cli import TOKEN_VARIABLE, add_operator_arguments, operator_from_options
from grants.errors import NotAuthenticated
from grants.operators import Operator, OperatorKind
from incidents.admin import incident_number
from incidents.errors import IncidentNotFound
from incidents.selectors import incident_id_of_number
from opsconsole.core.errors import OpsError
from opsconsole.core.ids import new_id
from opsconsole.core.keyset import Page
from opsconsole.core.problems import problem_of
from opsconsole.core.safe_text import mark_unsafe

WIDEST = 60


class NobodyNamed(NotAuthenticated):
    """A shell has no permissions of its own; name the user to act for, or send a token. Not audited (B2)."""

    message = f"Nobody is named: say who acts with --operator USERNAME, or with a token in {TOKEN_VARIABLE}."


class OperationsCommand(BaseCommand):
    """A command with subcommands that call the services and selectors that the REST API calls.

    A subclass adds its subcommands in ``add_subcommands`` by ``self.subcommand``; each handler gets the options and the
    operator.
    """

    needs_operator = True
    """Whether somebody has to be named: not where a shell does what celery beat does by itself."""

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the subcommands."""
        self.subparsers = parser.add_subparsers(dest="subcommand", required=True)
        self.add_subcommands()

    def add_subcommands(self) -> None:
        """Declare them; a subclass does."""
        raise NotImplementedError

    def subcommand(
        self, name: str, help_text: str, handler: Callable[[dict[str, Any], Operator], None], *, changes: bool = False
    ) -> ArgumentParser:
        """Add one subcommand; one that ``changes`` something takes an idempotency key."""
        added: ArgumentParser = self.subparsers.add_parser(name, help=help_text, description=help_text)
        add_common_arguments(added, handler)
        if changes:
            added.add_argument("--key", help="idempotency key, for a script that may run twice (default: a new one)")
        return added

    def handle(self, *_: Any, **options: Any) -> None:
        """Run the subcommand; a refusal ends the process with status 1."""
        try:
            operator = _named_operator(options) if self.needs_operator else operator_from_options(options)
            options["handler"](options, operator)
        except OpsError as refusal:
            self._refuse(refusal, as_json=options["as_json"])

    def _refuse(self, refusal: OpsError, *, as_json: bool) -> NoReturn:
        if as_json:
            text = json.dumps(problem_of(refusal).document, cls=DjangoJSONEncoder)
        else:
            text = mark_unsafe(f"{refusal.code}: {refusal.detail}")
        self.stderr.write(text, style_func=lambda plain: plain)
        sys.exit(1)

    def answer(self, options: dict[str, Any], serializer: BaseSerializer[Any], lines: Iterable[str]) -> None:
        """Print one thing: as the REST API would, or as lines for a person."""
        if options["as_json"]:
            self.stdout.write(json.dumps(serializer.data, cls=DjangoJSONEncoder))
        else:
            self.stdout.write(mark_unsafe("\n".join(lines)))

    def answer_page(
        self,
        options: dict[str, Any],
        page: Page[Any],
        serializer: type[BaseSerializer[Any]],
        columns: Sequence[tuple[str, Callable[[Any], Any]]],
    ) -> None:
        """Print a page: as JSON with the cursors beside it, or as a table."""
        if options["as_json"]:
            rows = [serializer(row).data for row in page.rows]
            document = {"next": page.next, "previous": page.previous, "results": rows}
            self.stdout.write(json.dumps(document, cls=DjangoJSONEncoder))
            return
        self.stdout.write("\n".join(table(page.rows, columns)))
        if page.next is not None:
            self.stdout.write(f"More with --cursor {page.next}")


def _named_operator(options: dict[str, Any]) -> Operator:
    """Return who acts; raises ``NobodyNamed``, since to a shell without permissions every list would look empty."""
    operator = operator_from_options(options)
    if not is_named(operator):
        raise NobodyNamed
    return operator


def is_named(operator: Operator) -> bool:
    """Say whether somebody is named for whom a shell acts."""
    return operator.kind is not OperatorKind.CLI or operator.user_id is not None


def add_common_arguments(parser: ArgumentParser, handler: Callable[[dict[str, Any], Operator], None]) -> None:
    """Add what everything takes: who acts, and how it answers."""
    parser.set_defaults(handler=handler)
    parser.add_argument("--json", action="store_true", dest="as_json", help="answer in JSON, as the REST API does")
    add_operator_arguments(parser)


def add_page_arguments(parser: ArgumentParser, *, limit: int, most: int) -> None:
    """Add ``--limit`` and ``--cursor``."""
    parser.add_argument("--limit", type=_between(1, most), default=limit, help=f"1 to {most} (default: {limit})")
    parser.add_argument("--cursor", help="where to go on, as the last page said")


def words(choices: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Return an argument type: one or several of ``choices``, separated by commas."""

    def read(text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(text.split(",")))
        for word in found:
            if word not in choices:
                raise ArgumentTypeError(f"{word!r} is none of: {', '.join(choices)}")
        return found

    return read


def record_id(text: str) -> UUID:
    """Read an id from an argument."""
    try:
        return UUID(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no id") from None


def incident_ref(text: str) -> UUID | int:
    """Read what names an incident: its id, or its number as ``INC-0012``, ``#12`` or ``12``."""
    number = incident_number(text)
    return record_id(text) if number is None else number


def moment(text: str) -> datetime:
    """Read an ISO 8601 time; without a zone it is UTC."""
    try:
        value = datetime.fromisoformat(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no ISO 8601 time") from None
    return value if value.tzinfo is not None else value.replace(tzinfo=UTC)


def incident_id(ref: UUID | int) -> UUID:
    """Return the id behind what names an incident; raises ``IncidentNotFound`` for a number that none has."""
    if isinstance(ref, UUID):
        return ref
    found = incident_id_of_number(ref)
    if found is None:
        raise IncidentNotFound
    return found


def key_of(options: dict[str, Any]) -> str:
    """Return the given idempotency key, or a new one."""
    return str(new_id()) if options["key"] is None else validate_key(options["key"])


def table(rows: Sequence[Any], columns: Sequence[tuple[str, Callable[[Any], Any]]]) -> list[str]:
    """Return rows as aligned lines under their headings; a cell that is too wide is cut."""
    if not rows:
        return ["Nothing that you may see."]
    cells = [[heading for heading, _ in columns], *([_cell(show(row)) for _, show in columns] for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def facts(pairs: Iterable[tuple[str, Any]]) -> list[str]:
    """Return names and values as lines, without those that are empty."""
    shown = [(name, _cell(value, None)) for name, value in pairs if value not in (None, "", [], ())]
    width = max((len(name) for name, _ in shown), default=0)
    return [f"{name.ljust(width)}  {value}" for name, value in shown]


def _cell(value: Any, most: int | None = WIDEST) -> str:
    if isinstance(value, datetime):
        return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S}"
    # A terminal obeys escape codes. A job's texts are stored clean of them, but what an operator typed, such as a
    # reason, is kept to the letter. Line breaks are left.
    text = mark_unsafe(" ".join(str(value).split()) if most else str(value))
    return text if most is None or len(text) <= most else f"{text[: most - 1]}…"


def _between(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
            raise ArgumentTypeError(f"{text!r} is not {least} to {most}")
        return int(text)

    return read
