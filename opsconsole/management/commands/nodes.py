"""``manage.py nodes``: which workers report, and what they serve, from a shell."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from deadletters.api.serializers import NodeSerializer
from deadletters.selectors import list_worker_nodes
from grants.operators import Operator
from opsconsole.management.operations import OperationsCommand, add_common_arguments, add_page_arguments


class Command(OperationsCommand):
    """Acts with the permissions of ``--operator USERNAME`` or of a token."""

    help = "List the workers that report to this console."

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the options; there is one thing to do, so there are no subcommands."""
        add_common_arguments(parser, self.list)
        parser.add_argument("--source")
        parser.add_argument("--all", action="store_true", help="also those that are gone")
        add_page_arguments(parser, limit=50, most=100)

    def list(self, options: dict[str, Any], operator: Operator) -> None:
        """List workers."""
        live = None if options["all"] else True
        page = list_worker_nodes(
            operator, source=options["source"], live=live, limit=options["limit"], cursor=options["cursor"]
        )
        columns = (
            ("worker", lambda report: report.node.id),
            ("source", lambda report: report.node.source),
            ("alive", lambda report: "yes" if report.is_live else "no"),
            ("seen", lambda report: report.node.seen_at),
            ("queues", lambda report: ",".join(report.queues)),
            ("tasks", lambda report: len(report.tasks)),
            ("waiting", lambda report: report.node.waiting_words),
            ("trouble", lambda report: report.node.trouble),
        )
        self.answer_page(options, page, NodeSerializer, columns)
