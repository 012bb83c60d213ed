"""``manage.py repairs``: what was done about failed jobs, from a shell."""

from __future__ import annotations

from typing import Any

from grants.operators import Operator
from opsconsole.management.operations import (
    OperationsCommand,
    add_page_arguments,
    facts,
    incident_id,
    incident_ref,
    key_of,
    record_id,
    words,
)
from repairs import selectors, services
from repairs.api.serializers import LetterMutationSerializer, RepairSerializer


class Command(OperationsCommand):
    """Each subcommand acts with the permissions of ``--operator USERNAME`` or of a token."""

    help = "List repairs, show one, or withdraw one that has not started."

    def add_subcommands(self) -> None:
        """Declare the subcommands."""
        listing = self.subcommand("list", "List repairs, newest first.", self.list)
        listing.add_argument("--state", type=words(selectors.STATES), default=())
        listing.add_argument("--tenant")
        listing.add_argument("--incident", type=incident_ref, help="INC-0012, #12 or its id")
        listing.add_argument("--letter", type=record_id)
        listing.add_argument("--batch", type=record_id)
        add_page_arguments(listing, limit=50, most=100)

        show = self.subcommand("show", "Show one repair.", self.show)
        show.add_argument("repair", type=record_id)

        cancel = self.subcommand("cancel", "Withdraw a repair that has not started.", self.cancel, changes=True)
        cancel.add_argument("repair", type=record_id)

    def list(self, options: dict[str, Any], operator: Operator) -> None:
        """List repairs."""
        wanted = selectors.RepairFilter(
            states=options["state"],
            tenant=options["tenant"],
            incident=None if options["incident"] is None else incident_id(options["incident"]),
            letter=options["letter"],
            batch=options["batch"],
        )
        page = selectors.list_repairs(operator, wanted, limit=options["limit"], cursor=options["cursor"])
        columns = (
            ("id", lambda action: action.id),
            ("what", lambda action: action.action_type),
            ("state", lambda action: action.state),
            ("planned", lambda action: action.planned_at),
            ("by", lambda action: action.planned_by_name),
            ("job type", lambda action: action.job_type),
        )
        self.answer_page(options, page, RepairSerializer, columns)

    def show(self, options: dict[str, Any], operator: Operator) -> None:
        """Show one repair."""
        action = selectors.find_repair(operator, options["repair"])
        names = (
            "action_type", "state", "job_type", "queue", "letter_id", "incident_id", "batch_id", "previous_id",
            "planned_by_name", "planned_at", "reason", "reference", "provider_answer", "new_task_id", "send_count",
            "send_error", "sent_at", "started_at", "answer_due_at", "settled_at", "error_code", "error_text",
        )  # fmt: skip
        lines = facts((name.replace("_", " "), getattr(action, name)) for name in names)
        self.answer(options, RepairSerializer(action), lines)

    def cancel(self, options: dict[str, Any], operator: Operator) -> None:
        """Withdraw a repair."""
        mutation = services.cancel_repair(repair_id=options["repair"], by=operator, key=key_of(options))
        self.answer(options, LetterMutationSerializer(mutation), ["Withdrawn; the job waits for a decision again."])
