"""``manage.py redrive``: run many failed jobs again as one piece of work, after its dry run."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from deadletters.selectors import STATES, LetterFilter
from grants.operators import Operator
from opsconsole.core.errors import OpsError
from opsconsole.management.operations import (
    OperationsCommand,
    add_common_arguments,
    incident_id,
    incident_ref,
    key_of,
    moment,
    record_id,
    words,
)
from opsconsole.management.redrives import (
    add_answer_arguments,
    add_change_arguments,
    add_pace_arguments,
    changes_of,
    pace_of,
    tell,
    watch,
)
from repairs.models import RedriveState
from repairs.redrives.judging import judge_page
from repairs.redrives.requests import RedrivePace, RedriveSelection, check_answers
from repairs.redrives.services import create_redrive, start_redrive

FILTERS = {
    "--tenant": "tenant", "--source": "source", "--task": "job_type", "--queue": "queue", "--error": "error_class",
    "--outcome-class": "outcome_class", "--actor-type": "actor_type", "--actor-id": "actor_id", "--text": "text",
}  # fmt: skip
"""Options and what they are in a filter of failed jobs."""
HELP = {
    "--tenant": "of one tenant: a filter needs it",
    "--source": "of one source: a filter needs it",
    "--task": "that failed in this task",
    "--queue": "that came from this queue",
    "--error": "whose error has this class, such as builtins.ValueError",
    "--text": "that a search finds by these words",
}


class Command(OperationsCommand):
    """Acts with the permissions of ``--operator USERNAME`` or of a token."""

    help = (
        "Plan to run failed jobs again: freeze the set, tell what running each again would mean, and start it. With"
        " --dry-run nothing is started; `redrives start` does that later."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the options."""
        add_common_arguments(parser, self.redrive)
        which = parser.add_argument_group("which jobs", "named, or of an incident, or all that a filter leaves")
        which.add_argument("--letter", action="append", type=record_id, dest="letters", metavar="ID", default=[])
        which.add_argument("--incident", type=incident_ref, help="INC-0012, #12 or its id: its open jobs")
        for option, name in FILTERS.items():
            which.add_argument(option, dest=name, help=HELP.get(option))
        which.add_argument("--state", type=words(STATES), dest="states", default=(), help="default: open ones")
        which.add_argument("--seen-after", type=moment)
        which.add_argument("--seen-before", type=moment)
        which.add_argument(
            "--expected-count", type=int, metavar="N", help="how many there are; refused if it is another number"
        )
        pace = parser.add_argument_group("how fast")
        add_pace_arguments(pace)  # type: ignore[arg-type]
        how = parser.add_argument_group("how")
        how.add_argument("--to-queue", default="", metavar="NAME", help="send them to this queue, not to their own")
        how.add_argument("--low-priority", action="store_true", help="send them to the queue OPSCONSOLE_REDRIVE_QUEUE")
        how.add_argument("--cut-off", type=moment, help="those that failed before are a class of their own")
        add_change_arguments(how)  # type: ignore[arg-type]
        add_answer_arguments(how)  # type: ignore[arg-type]
        how.add_argument("--reason", default="")
        parser.add_argument("--dry-run", action="store_true", help="tell what it would mean, and start nothing")
        parser.add_argument("--watch", action="store_true", help="print each change; status 0 only if all succeed")
        parser.add_argument("--key", help="idempotency key, for a script that may run twice (default: a new one)")

    def redrive(self, options: dict[str, Any], operator: Operator) -> None:
        """Plan it, tell its dry run, and start and watch it if asked to."""
        answers: dict[Any, Any] = dict(options["answer"])
        check_answers(answers)
        key = key_of(options)
        made = create_redrive(
            by=operator,
            key=key,
            selection=_selection(options),
            expected_count=options["expected_count"],
            pace=pace_of(options, RedrivePace()),
            cut_off=options["cut_off"],
            target_queue=options["to_queue"],
            low_priority=options["low_priority"],
            changes=changes_of(options),
            reason=options["reason"],
        )
        if made.state == RedriveState.PLANNING:
            # So many that the workers would judge them: this process waits anyway.
            while judge_page(redrive_id=made.redrive_id):
                pass
        if options["dry_run"]:
            tell(self, options, operator, made.redrive_id)
            self._hint(options, f"Nothing is sent before `redrives start {made.redrive_id}`.")
            return
        try:
            start_redrive(
                redrive_id=made.redrive_id, by=operator, key=f"{key}:start", answers=answers, reason=options["reason"]
            )
        except OpsError:
            tell(self, options, operator, made.redrive_id)
            raise
        if options["watch"]:
            if not options["as_json"]:
                tell(self, options, operator, made.redrive_id)
            watch(self, options, operator, made.redrive_id)
        tell(self, options, operator, made.redrive_id)
        self._hint(options, f"Started; follow it with `redrives watch {made.redrive_id}`.")

    def _hint(self, options: dict[str, Any], sentence: str) -> None:
        if not options["as_json"]:
            self.stdout.write(f"\n{sentence}")


def _selection(options: dict[str, Any]) -> RedriveSelection:
    """Return which jobs were named; a filter beside another choice would be one that is ignored (API-03)."""
    given = {name: options[name] for name in (*FILTERS.values(), "states", "seen_after", "seen_before")}
    given = {name: value for name, value in given.items() if value not in (None, ())}
    named = options["incident"] is not None or options["letters"]
    if named and given:
        raise CommandError(
            "--incident and --letter go without a filter; --to-queue names the queue to send to.", returncode=2
        )
    if options["incident"] is not None:
        incident = incident_id(options["incident"])
        return RedriveSelection(letter_ids=tuple(options["letters"]), incident_id=incident)
    if not given:
        return RedriveSelection(letter_ids=tuple(options["letters"]))
    if options["expected_count"] is None and not options["dry_run"]:
        raise CommandError(
            "A filter needs --expected-count, the number of jobs that you mean, or --dry-run.", returncode=2
        )
    return RedriveSelection(letters=LetterFilter(**given))
