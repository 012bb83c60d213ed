"""``manage.py redrives``: look at redrives and decide about them, from a shell."""

from __future__ import annotations

from typing import Any

from grants.operators import Operator
from opsconsole.management.operations import (
    OperationsCommand,
    add_page_arguments,
    incident_id,
    incident_ref,
    key_of,
    record_id,
    words,
)
from opsconsole.management.redrives import (
    add_answer_arguments,
    add_pace_arguments,
    has_pace,
    pace_of,
    pace_of_redrive,
    tell,
    watch,
)
from repairs.api.redrives import RedriveItemSerializer, RedriveMutationSerializer, RedriveSerializer
from repairs.redrives import selectors, services
from repairs.redrives.requests import RedrivePace
from repairs.redrives.services import RedriveMutation


class Command(OperationsCommand):
    """Each subcommand acts with the permissions of ``--operator USERNAME`` or of a token."""

    help = "List redrives and show, watch, approve, start, pause, resume or cancel one; `redrive` plans one."

    def add_subcommands(self) -> None:
        """Declare the subcommands."""
        listing = self.subcommand("list", "List redrives, newest first.", self.list)
        listing.add_argument("--state", type=words((*selectors.STATES, "unfinished")), default=())
        listing.add_argument("--tenant")
        listing.add_argument("--source")
        listing.add_argument("--incident", type=incident_ref, help="INC-0012, #12 or its id")
        add_page_arguments(listing, limit=50, most=100)

        self._about("show", "Show one redrive: its dry run and how far it is.", self.show)
        self._about("watch", "Print each change; status 0 only if all succeed.", self.watch)

        items = self._about("items", "List the jobs of a redrive, newest first.", self.items)
        items.add_argument("--class", choices=selectors.CLASSES, dest="item_class", help="of the dry run")
        items.add_argument("--state", choices=selectors.ITEM_STATES)
        add_page_arguments(items, limit=100, most=200)

        self._decision("approve", "Approve a large one as the second person.", self.approve)
        start = self._decision("start", "Start one whose dry run is done.", self.start)
        add_answer_arguments(start)
        self._decision("pause", "Send nothing more of it.", self.pause)
        resume = self._decision("resume", "Let a paused one go on.", self.resume)
        add_pace_arguments(resume)
        self._decision("cancel", "Give one up; what was sent gets its result.", self.cancel)
        failed = self._decision("retry-failed", "Plan a redrive of what has failed of one.", self.retry_failed)
        failed.add_argument("--expected-count", type=int, metavar="N", help="how many have failed")
        add_pace_arguments(failed)

    def _about(self, name: str, help_text: str, handler: Any, *, changes: bool = False) -> Any:
        added = self.subcommand(name, help_text, handler, changes=changes)
        added.add_argument("redrive", type=record_id, help="its id")
        return added

    def _decision(self, name: str, help_text: str, handler: Any) -> Any:
        added = self._about(name, help_text, handler, changes=True)
        added.add_argument("--reason", default="")
        if name in ("start", "resume"):
            added.add_argument("--watch", action="store_true", help="print each change; status 0 only if all succeed")
        return added

    def list(self, options: dict[str, Any], operator: Operator) -> None:
        """List redrives."""
        wanted = selectors.RedriveFilter(
            states=options["state"],
            tenant=options["tenant"],
            source=options["source"],
            incident=None if options["incident"] is None else incident_id(options["incident"]),
        )
        page = selectors.list_redrives(operator, wanted, limit=options["limit"], cursor=options["cursor"])
        columns = (
            ("id", lambda redrive: redrive.id),
            ("state", lambda redrive: redrive.state),
            ("paused", lambda redrive: redrive.pause_code),
            ("jobs", lambda redrive: redrive.total_count),
            ("succeeded", lambda redrive: redrive.succeeded_count),
            ("failed", lambda redrive: redrive.failed_count),
            ("planned", lambda redrive: redrive.planned_at),
            ("by", lambda redrive: redrive.planned_by_name),
            ("tenant", lambda redrive: redrive.tenant),
        )
        self.answer_page(options, page, RedriveSerializer, columns)

    def show(self, options: dict[str, Any], operator: Operator) -> None:
        """Show one redrive."""
        tell(self, options, operator, options["redrive"])

    def watch(self, options: dict[str, Any], operator: Operator) -> None:
        """Print each change until it has ended."""
        watch(self, options, operator, options["redrive"])

    def items(self, options: dict[str, Any], operator: Operator) -> None:
        """List jobs of a redrive."""
        page = selectors.list_items(
            operator,
            options["redrive"],
            item_class=options["item_class"],
            state=options["state"],
            limit=options["limit"],
            cursor=options["cursor"],
        )
        columns = (
            ("", lambda item: item.position),
            ("dead letter", lambda item: item.letter_id),
            ("class", lambda item: item.concerns or item.item_class),
            ("state", lambda item: item.state),
            ("why", lambda item: ": ".join(part for part in (item.code, item.detail) if part)),
            ("job type", lambda item: item.letter.job_type),
        )
        self.answer_page(options, page, RedriveItemSerializer, columns)

    def approve(self, options: dict[str, Any], operator: Operator) -> None:
        """Approve one as the second person."""
        done = services.approve_redrive(**_asked(options, operator))
        self._answer(options, done, "Approved; it starts with `redrives start`.")

    def start(self, options: dict[str, Any], operator: Operator) -> None:
        """Start one."""
        answers: dict[Any, Any] = dict(options["answer"])
        done = services.start_redrive(**_asked(options, operator), answers=answers)
        self._go(options, operator, done, "Started.")

    def pause(self, options: dict[str, Any], operator: Operator) -> None:
        """Pause one."""
        done = services.pause_redrive(**_asked(options, operator))
        self._answer(options, done, "Paused; what has been sent gets its result.")

    def resume(self, options: dict[str, Any], operator: Operator) -> None:
        """Let one go on."""
        pace = None
        if has_pace(options):
            pace = pace_of(options, pace_of_redrive(selectors.get_redrive(operator, options["redrive"]).redrive))
        done = services.resume_redrive(**_asked(options, operator), pace=pace)
        self._go(options, operator, done, "It goes on.")

    def cancel(self, options: dict[str, Any], operator: Operator) -> None:
        """Give one up."""
        done = services.cancel_redrive(**_asked(options, operator))
        self._answer(options, done, "Cancelled; what has been sent gets its result.")

    def retry_failed(self, options: dict[str, Any], operator: Operator) -> None:
        """Plan a redrive of what has failed of one."""
        pace = pace_of(options, RedrivePace())
        done = services.retry_failed_items(
            **_asked(options, operator), expected_count=options["expected_count"], pace=pace
        )
        sentence = f"Planned as {done.redrive_id}, of {done.total}; it starts with `redrives start {done.redrive_id}`."
        self._answer(options, done, sentence)

    def _go(self, options: dict[str, Any], operator: Operator, done: RedriveMutation, sentence: str) -> None:
        if options["watch"]:
            watch(self, options, operator, done.redrive_id)
        self._answer(options, done, f"{sentence} Follow it with `redrives watch {done.redrive_id}`.")

    def _answer(self, options: dict[str, Any], done: RedriveMutation, sentence: str) -> None:
        self.answer(options, RedriveMutationSerializer(done), [sentence])


def _asked(options: dict[str, Any], operator: Operator) -> dict[str, Any]:
    return {
        "redrive_id": options["redrive"],
        "by": operator,
        "key": key_of(options),
        "reason": options["reason"],
    }
