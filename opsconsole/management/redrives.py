"""What the commands about redrives share: how a pace, changes and answers are typed, how one is told, and watching."""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn
from uuid import UUID

from django.core.serializers.json import DjangoJSONEncoder
from django.db import Error, close_old_connections
from django.utils import timezone

from grants.operators import Operator
from opsconsole.core.safe_text import mark_unsafe
from opsconsole.management.operations import OperationsCommand, facts, table
from repairs.api.redrives import RedrivePageSerializer, page_of
from repairs.models import Redrive, RedriveState
from repairs.redrives.requests import AnswerKind, RedriveAnswer, RedriveChanges, RedrivePace
from repairs.redrives.selectors import RedriveProgress, RedriveSample, get_redrive

EVERY_SECONDS = 1.0
INTERRUPTED = 130
"""What a shell says of a process that Ctrl-C has ended."""
NEVER = "never"


def add_pace_arguments(parser: ArgumentParser) -> None:
    """Add how fast, and when to stop."""
    standard = RedrivePace()
    parser.add_argument(
        "--canary", type=int, metavar="N", help=f"run so many first, each once (default: {standard.canary_size})"
    )
    parser.add_argument(
        "--rate", type=int, metavar="N", help=f"so many a second at most (default: {standard.rate_per_second})"
    )
    parser.add_argument(
        "--max-outstanding",
        type=int,
        metavar="N",
        help=f"so many wait for their answer at most (default: {standard.max_outstanding})",
    )
    parser.add_argument(
        "--stop-percent",
        type=_percent,
        metavar="N",
        help=f"pause when more than so many per cent have failed, or {NEVER} (default: {standard.stop_percent})",
    )


def pace_of(options: dict[str, Any], standard: RedrivePace) -> RedrivePace:
    """Return the pace that was typed; what was left out is the ``standard``'s."""
    named = {
        "canary_size": options["canary"],
        "rate_per_second": options["rate"],
        "max_outstanding": options["max_outstanding"],
    }
    pace = replace(standard, **{name: value for name, value in named.items() if value is not None})
    stop = options["stop_percent"]
    return pace if stop is None else replace(pace, stop_percent=None if stop == NEVER else stop)


def has_pace(options: dict[str, Any]) -> bool:
    """Whether anything about the pace was typed."""
    return any(options[name] is not None for name in ("canary", "rate", "max_outstanding", "stop_percent"))


def pace_of_redrive(redrive: Redrive) -> RedrivePace:
    return RedrivePace(
        rate_per_second=redrive.rate_per_second,
        max_outstanding=redrive.max_outstanding,
        canary_size=redrive.canary_size,
        stop_percent=redrive.stop_percent,
    )


def add_change_arguments(parser: ArgumentParser) -> None:
    """Add what is sent differently from the originals."""
    parser.add_argument(
        "--rename", action="append", type=_pair, default=[], metavar="OLD=NEW", help="send a task under another name"
    )
    parser.add_argument(
        "--set", action="append", type=_value, default=[], metavar="NAME=JSON", help="set a keyword argument"
    )
    parser.add_argument("--remove", action="append", default=[], metavar="NAME", help="remove a keyword argument")
    parser.add_argument(
        "--rename-argument", action="append", type=_pair, default=[], metavar="OLD=NEW", help="of a keyword argument"
    )


def changes_of(options: dict[str, Any]) -> RedriveChanges:
    """Return the changes that were typed."""
    return RedriveChanges(
        tasks=dict(options["rename"]),
        set=dict(options["set"]),
        remove=tuple(options["remove"]),
        rename=dict(options["rename_argument"]),
    )


def add_answer_arguments(parser: ArgumentParser) -> None:
    """Add what is stated about the classes that are not safe."""
    parser.add_argument(
        "--answer",
        action="append",
        type=_answer,
        default=[],
        metavar="CLASS=ANSWER[:REFERENCE]",
        help="such as ambiguous=did_not_happen:TICKET-5; classes without an answer are left out",
    )


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ArgumentTypeError(f"{text!r} is not OLD=NEW")
    return name, value


def _value(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    try:
        if not (name and equals):
            raise ValueError
        return name, json.loads(value, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise ArgumentTypeError(f"{text!r} is not NAME=JSON, such as retries=3 or to='\"a@example.org\"'") from None


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def _answer(text: str) -> tuple[str, RedriveAnswer]:
    name, equals, told = text.partition("=")
    kind, _, reference = told.partition(":")
    if not equals or kind not in list(AnswerKind):
        raise ArgumentTypeError(f"{text!r} is not CLASS=ANSWER[:REFERENCE]; answers: {', '.join(AnswerKind)}")
    return name, RedriveAnswer(kind=AnswerKind(kind), reference=reference)


def _percent(text: str) -> int | str:
    if text == NEVER:
        return NEVER
    if not text.isascii() or not text.isdigit():
        raise ArgumentTypeError(f"{text!r} is not a whole number, nor {NEVER!r}")
    return int(text)


# -- telling -----------------------------------------------------------------------------------------------------------


def tell(command: OperationsCommand, options: dict[str, Any], operator: Operator, redrive_id: UUID) -> None:
    """Print one redrive: its state, its classes, and before and after where it changes anything."""
    page = page_of(operator, redrive_id)
    lines = [*described(page["progress"]), *samples_told(page["samples"])]
    command.answer(options, RedrivePageSerializer(page), lines)


def described(progress: RedriveProgress) -> list[str]:
    """Return a redrive as lines for a person."""
    redrive = progress.redrive
    stop = "never" if redrive.stop_percent is None else f"above {redrive.stop_percent} % failed"
    lines = facts(
        (
            ("redrive", redrive.id),
            ("state", redrive.state),
            ("paused", ": ".join(part for part in (redrive.pause_code, redrive.pause_text) if part)),
            ("tenant", redrive.tenant),
            ("source", redrive.source),
            ("jobs", redrive.total_count),
            ("result", _counted(redrive)),
            ("left", _left(progress)),
            ("canary", redrive.canary_size),
            ("rate", f"{redrive.rate_per_second} a second, {redrive.max_outstanding} outstanding at most"),
            ("stops", stop),
            ("queue", redrive.target_queue),
            ("planned by", redrive.planned_by_name),
            ("approval", _approval(redrive)),
            ("started by", redrive.started_by_name),
            ("reason", redrive.reason),
        )
    )
    columns: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        ("class", lambda one: one.item_class),
        ("jobs", lambda one: one.count),
        ("answered", lambda one: "" if one.answer is None else f"{one.answer.kind} {one.answer.reference}".strip()),
        ("takes", lambda one: "runs" if one.item_class == "safe" else ", ".join(one.answers) or "cannot run"),
    )
    return [*lines, "", *table(progress.classes, columns)] if progress.classes else lines


def samples_told(samples: list[RedriveSample]) -> list[str]:
    """Return what jobs are sent as, before and after, as lines for a person."""
    lines: list[str] = []
    for sample in samples:
        after = f"not sent: {sample.trouble}" if sample.trouble else f"{sample.task_after} {sample.arguments_after}"
        lines += ["", str(sample.letter_id), f"  - {sample.task_before} {sample.arguments_before}", f"  + {after}"]
    return lines


def _approval(redrive: Redrive) -> str:
    if not redrive.needs_approval:
        return ""
    return f"by {redrive.approved_by_name}" if redrive.approved_at else "a second person has to approve it"


def _counted(redrive: Redrive) -> str:
    words = (
        (redrive.succeeded_count, "succeeded"),
        (redrive.failed_count, "failed"),
        (redrive.skipped_count, "left out"),
        (redrive.cancelled_count, "cancelled"),
        (redrive.outstanding_count, "outstanding"),
        (redrive.waiting_count, "waiting"),
    )
    return ", ".join(f"{number} {word}" for number, word in words if number)


def _left(progress: RedriveProgress) -> str:
    seconds = progress.seconds_left
    if seconds is None:
        return ""
    return f"about {seconds} s" if seconds < 120 else f"about {seconds // 60} min"


# -- watching ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ending:
    """How watching ends: exit status 0 only if every job of the set has succeeded."""

    status: int
    sentence: str


def watch(command: OperationsCommand, options: dict[str, Any], operator: Operator, redrive_id: UUID) -> None:
    """Print one line for each change until it has ended, or waits for a person; Ctrl-C leaves it running.

    With ``--json`` each line is what the API answers. A database that does not answer is waited for. Ends the process.
    """
    told: tuple[Any, ...] | None = None
    try:
        while True:
            try:
                progress = get_redrive(operator, redrive_id)
            except Error:
                close_old_connections()
                if told != ():
                    command.stderr.write("the database does not answer; waiting for it")
                told = ()
                time.sleep(EVERY_SECONDS)
                continue
            standing = _standing(progress.redrive)
            if standing != told:
                _say(command, options, progress)
            told = standing
            ending = ending_of(progress.redrive)
            if ending is not None:
                _end(command, options, ending)
            time.sleep(EVERY_SECONDS)
    except KeyboardInterrupt:
        command.stderr.write(
            f"\nNo longer watched; the redrive goes on. Look again with `redrives watch {redrive_id}`,"
            f" stop it with `redrives pause {redrive_id}`."
        )
        sys.exit(INTERRUPTED)


def ending_of(redrive: Redrive) -> Ending | None:
    """Return how watching ends, None while something is still to come. Pure.

    One that is paused goes on only by a person, so watching ends once what had been sent has its result. If that was
    all of it, the controller ends it in a moment.
    """
    name = f"`redrives items {redrive.id} --state failed`"
    if redrive.state == RedriveState.FINISHED:
        short = redrive.total_count - redrive.succeeded_count
        if not short:
            return Ending(0, f"All {redrive.total_count} have succeeded.")
        return Ending(1, f"{short} of {redrive.total_count} have not succeeded; {name} lists those that failed.")
    if redrive.outstanding_count:
        return None
    if redrive.state == RedriveState.CANCELLED:
        return Ending(1, f"It was cancelled; {redrive.succeeded_count} of {redrive.total_count} have succeeded.")
    if redrive.state == RedriveState.PAUSED and redrive.waiting_count:
        return Ending(1, f"It waits for somebody to let it go on with `redrives resume {redrive.id}`, or to cancel it.")
    return None


def _standing(redrive: Redrive) -> tuple[Any, ...]:
    return (
        str(redrive.state), redrive.pause_code, redrive.approved_at, redrive.waiting_count, redrive.outstanding_count,
        redrive.succeeded_count, redrive.failed_count, redrive.skipped_count, redrive.cancelled_count,
    )  # fmt: skip


def _say(command: OperationsCommand, options: dict[str, Any], progress: RedriveProgress) -> None:
    redrive = progress.redrive
    if options["as_json"]:
        document = RedrivePageSerializer({"progress": progress, "samples": [], "links": {"items": ""}}).data
        command.stdout.write(json.dumps(document, cls=DjangoJSONEncoder))
    else:
        why = f" ({redrive.pause_code}: {redrive.pause_text})" if redrive.pause_code else ""
        left = f"; {_left(progress)} left" if progress.seconds_left is not None else ""
        line = f"{timezone.now():%H:%M:%S} {redrive.state}{why}: {progress.percent} % of {redrive.total_count}"
        command.stdout.write(mark_unsafe(f"{line}; {_counted(redrive)}{left}"))
    command.stdout.flush()


def _end(command: OperationsCommand, options: dict[str, Any], ending: Ending) -> NoReturn:
    if not options["as_json"]:
        command.stdout.write(ending.sentence)
    sys.exit(ending.status)
