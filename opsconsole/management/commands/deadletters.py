"""``manage.py deadletters``: failed jobs from a shell."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from deadletters import selectors
from deadletters.api.serializers import OUTCOMES, LetterSerializer
from deadletters.models import DeadLetter
from grants.operators import Operator
from opsconsole.management.commands.incidents import add_retry_arguments
from opsconsole.management.operations import (
    OperationsCommand,
    add_page_arguments,
    facts,
    incident_id,
    incident_ref,
    key_of,
    moment,
    record_id,
    words,
)
from repairs import services
from repairs.api.serializers import LetterMutationSerializer, LetterPageSerializer
from repairs.selectors import LetterPage, letter_page


class Command(OperationsCommand):
    """Each subcommand acts with the permissions of ``--operator USERNAME`` or of a token."""

    help = "List dead letters and show, retry, close or discard one."

    def add_subcommands(self) -> None:
        """Declare the subcommands."""
        listing = self.subcommand("list", "List dead letters, open ones first.", self.list)
        listing.add_argument("--state", type=words(selectors.STATES), default=("unresolved",))
        listing.add_argument("--outcome-class", choices=OUTCOMES)
        listing.add_argument("--incident", type=incident_ref, help="INC-0012, #12 or its id")
        for option in (
            "--tenant", "--source", "--job-type", "--queue", "--task-id", "--job-id", "--actor-type", "--actor-id",
        ):  # fmt: skip
            listing.add_argument(option)
        listing.add_argument("--seen-after", type=moment)
        listing.add_argument("--seen-before", type=moment)
        listing.add_argument("--ordering", choices=selectors.ORDERINGS, default="default")
        add_page_arguments(listing, limit=100, most=200)

        _add_letter(self.subcommand("show", "Show one dead letter.", self.show))

        retry = self.subcommand("retry", "Run a job again.", self.retry, changes=True)
        _add_letter(retry)
        add_retry_arguments(retry)

        done = self.subcommand(
            "close-as-done", "State that a job has happened already.", self.close_as_done, changes=True
        )
        _add_letter(done)
        done.add_argument("--reason", required=True)
        done.add_argument("--reference", default="", help="where that was seen")

        discard = self.subcommand("discard", "Give a job up; its message is removed.", self.discard, changes=True)
        _add_letter(discard)
        discard.add_argument("--reason", required=True)

    def list(self, options: dict[str, Any], operator: Operator) -> None:
        """List letters."""
        columns = (
            "tenant", "source", "job_type", "queue", "outcome_class", "task_id", "job_id", "actor_type", "actor_id",
            "seen_after", "seen_before",
        )  # fmt: skip
        wanted = selectors.LetterFilter(
            states=options["state"],
            incident=None if options["incident"] is None else incident_id(options["incident"]),
            **{name: options[name] for name in columns},
        )
        page = selectors.list_letters(
            operator, wanted, ordering=options["ordering"], limit=options["limit"], cursor=options["cursor"]
        )
        shown = (
            ("id", lambda letter: letter.id),
            ("state", lambda letter: letter.standing(letter.incident)),
            ("incident", lambda letter: f"#{letter.incident.number}"),
            ("outcome", lambda letter: letter.outcome_class),
            ("last seen", lambda letter: letter.last_seen_at),
            ("job type", lambda letter: letter.job_type),
            ("error", lambda letter: letter.error_text),
        )
        self.answer_page(options, page, LetterSerializer, shown)

    def show(self, options: dict[str, Any], operator: Operator) -> None:
        """Show one letter."""
        page = letter_page(operator, options["letter"])
        self.answer(options, LetterPageSerializer(page), _describe(page.letter, page))

    def retry(self, options: dict[str, Any], operator: Operator) -> None:
        """Run a job again."""
        mutation = services.retry_letter(
            letter_id=options["letter"],
            by=operator,
            key=key_of(options),
            provider_checked=options["provider_checked"],
            run_expired=options["run_expired"],
            reason=options["reason"],
            reference=options["reference"],
        )
        lines = [f"Planned as repair {mutation.repair_id}; it counts when its job has succeeded."]
        self.answer(options, LetterMutationSerializer(mutation), [*lines, *mutation.warnings])

    def close_as_done(self, options: dict[str, Any], operator: Operator) -> None:
        """State that a job has happened already."""
        mutation = services.close_letter_as_done(
            letter_id=options["letter"],
            by=operator,
            key=key_of(options),
            reason=options["reason"],
            reference=options["reference"],
        )
        self.answer(options, LetterMutationSerializer(mutation), ["Closed as done, without a run."])

    def discard(self, options: dict[str, Any], operator: Operator) -> None:
        """Give a job up."""
        mutation = services.discard_letter(
            letter_id=options["letter"], by=operator, key=key_of(options), reason=options["reason"]
        )
        self.answer(options, LetterMutationSerializer(mutation), ["Discarded; its message is gone."])


def _add_letter(parser: ArgumentParser) -> None:
    parser.add_argument("letter", type=record_id, help="its id")


def _describe(letter: DeadLetter, page: LetterPage) -> list[str]:
    refusal = page.refusal
    return [
        *facts(
            (
                ("job type", letter.job_type),
                ("id", letter.id),
                ("incident", f"#{letter.incident.number}"),
                ("state", letter.standing(letter.incident)),
                ("outcome", f"{letter.outcome_class}: {letter.outcome_reason}"),
                ("tenant", letter.tenant),
                ("actor", f"{letter.actor_type} {letter.actor_id}".strip()),
                ("queue", letter.queue),
                ("task", letter.task_id),
                ("arguments", letter.payload_preview),
                ("error", f"{letter.error_class}: {letter.error_text}"),
                ("failures", letter.occurrence_count),
                ("first seen", letter.first_seen_at),
                ("last seen", letter.last_seen_at),
                ("retry", f"refused, {refusal.code}: {refusal.detail}" if refusal else "possible"),
                ("warnings", ", ".join(page.warnings)),
            )
        ),
        *(["", page.traceback] if page.traceback else []),
    ]
