"""``manage.py audit``: who did what, or was refused, from a shell."""

from __future__ import annotations

from typing import Any

from grants.api.serializers import AuditEventSerializer
from grants.models import Verdict
from grants.operators import Operator
from grants.selectors import AuditFilter, list_audit
from opsconsole.management.operations import OperationsCommand, add_page_arguments, moment

FILTERS = ("tenant", "action", "operator_ref", "target_type", "target_id", "verdict", "since", "before")


class Command(OperationsCommand):
    """Each subcommand acts with the permissions of ``--operator USERNAME`` or of a token."""

    help = "List the audit trail."

    def add_subcommands(self) -> None:
        """Declare the subcommands."""
        listing = self.subcommand("list", "List audit rows, newest first.", self.list)
        for option in ("--tenant", "--action", "--target-type", "--target-id"):
            listing.add_argument(option)
        listing.add_argument("--by", dest="operator_ref", help="who did it, such as person:5")
        listing.add_argument("--verdict", choices=Verdict.values)
        listing.add_argument("--since", type=moment)
        listing.add_argument("--before", type=moment)
        add_page_arguments(listing, limit=50, most=100)

    def list(self, options: dict[str, Any], operator: Operator) -> None:
        """List audit rows."""
        chosen = {name.removesuffix("_ref"): options[name] for name in FILTERS}
        page = list_audit(operator, AuditFilter(**chosen), limit=options["limit"], cursor=options["cursor"])
        columns = (
            ("at", lambda event: event.at),
            ("operator", lambda event: event.operator_name),
            ("action", lambda event: event.action),
            ("verdict", lambda event: event.verdict),
            ("tenant", lambda event: event.tenant),
            ("target", lambda event: f"{event.target_type} {event.target_id}".strip()),
            ("reason", lambda event: event.reason),
        )
        self.answer_page(options, page, AuditEventSerializer, columns)
