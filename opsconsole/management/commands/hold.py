"""``manage.py hold``: put messages aside before they run, and send them on, from a shell."""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError
from datetime import datetime, timedelta
from typing import Any

from deadletters import holds, services
from deadletters.api.holds import HoldMutationSerializer, HoldPageSerializer, HoldSerializer, hold_page
from deadletters.models import Hold, HoldState
from grants.operators import Operator
from opsconsole.core.database import database_now
from opsconsole.management.operations import (
    OperationsCommand,
    add_page_arguments,
    facts,
    key_of,
    moment,
    record_id,
    table,
    words,
)
from opsconsole.management.redrives import add_pace_arguments, pace_of
from repairs.api.holds import ReleaseSerializer
from repairs.redrives.requests import RedrivePace
from repairs.releases import release_hold

_LENGTH = re.compile(r"([0-9]{1,6})([dhm])", re.ASCII)
WHEN = "2h, 30m, 7d, or an ISO 8601 time; a script with --key gives a time, which is the same when it runs again"
UNITS = {"d": "days", "h": "hours", "m": "minutes"}


class Command(OperationsCommand):
    """Each subcommand acts with the permissions of ``--operator USERNAME`` or of a token."""

    help = "Put messages aside before they run: place, list, show, extend or end a hold, and release what it has."

    def add_subcommands(self) -> None:
        """Declare the subcommands."""
        place = self.subcommand("place", "Put matching messages aside from now on.", self.place, changes=True)
        place.add_argument("--tenant", required=True, help="one, or * for every one")
        place.add_argument("--source", default="*", help="one (default: every one)")
        place.add_argument("--task", default="", help="messages of this task")
        place.add_argument("--queue", default="", help="messages from this queue")
        place.add_argument("--task-id", default="", help="this one message, or job of the ledger")
        place.add_argument("--payload-of", type=record_id, metavar="ID", help="those like this failed job")
        place.add_argument("--payload-hash", default="", metavar="HASH", help="the same by its hash, with --task")
        place.add_argument("--reason", required=True)
        place.add_argument("--until", type=_end, required=True, metavar="WHEN", help=WHEN)

        listing = self.subcommand("list", "List holds, newest first.", self.list)
        listing.add_argument("--state", type=words(tuple(HoldState.values)), default=())
        for option in ("--tenant", "--source", "--task", "--queue"):
            listing.add_argument(option)
        add_page_arguments(listing, limit=50, most=100)

        _add_hold(self.subcommand("show", "Show one hold and what it has put aside.", self.show))

        extend = self.subcommand("extend", "Move the end of a hold.", self.extend, changes=True)
        _add_hold(extend)
        extend.add_argument(
            "--until", type=_end, required=True, metavar="WHEN", help="2h, 30m, 7d, or an ISO 8601 time"
        )
        extend.add_argument("--reason", required=True)

        end = self.subcommand("end", "Stop holding; what was put aside stays so.", self.end, changes=True)
        _add_hold(end)
        end.add_argument("--reason", required=True)

        release = self.subcommand("release", "Plan a redrive of what was put aside.", self.release, changes=True)
        _add_hold(release)
        release.add_argument("--expected-count", type=int, metavar="N", help="how many are put aside")
        release.add_argument("--reason", default="")
        add_pace_arguments(release)

    def place(self, options: dict[str, Any], operator: Operator) -> None:
        """Place a hold."""
        task, payload = options["task"], options["payload_hash"]
        if options["payload_of"] is not None:
            task, payload = holds.named_payload(operator, options["payload_of"])
        target = services.HoldTarget(
            tenant=options["tenant"],
            source=options["source"],
            job_type=task,
            queue=options["queue"],
            task_id=options["task_id"],
            payload_hash=payload,
        )
        done = services.place_hold(
            target=target, reason=options["reason"], ends_at=_ahead(options["until"]), by=operator, key=key_of(options)
        )
        line = f"On hold as {done.hold_id} until {done.ends_at:%Y-%m-%d %H:%M:%S}; workers know within seconds."
        self.answer(options, HoldMutationSerializer(done), [line])

    def list(self, options: dict[str, Any], operator: Operator) -> None:
        """List holds."""
        wanted = holds.HoldFilter(
            states=options["state"],
            tenant=options["tenant"],
            source=options["source"],
            job_type=options["task"],
            queue=options["queue"],
        )
        page = holds.list_holds(operator, wanted, limit=options["limit"], cursor=options["cursor"])
        columns = (
            ("id", lambda hold: hold.id),
            ("state", lambda hold: hold.state),
            ("ends", lambda hold: hold.ends_at),
            ("put aside", lambda hold: "" if hold.put_aside is None else hold.put_aside),
            ("by", lambda hold: hold.placed_by_name),
            ("what", lambda hold: hold.words),
            ("reason", lambda hold: hold.reason),
        )
        self.answer_page(options, page, HoldSerializer, columns)

    def show(self, options: dict[str, Any], operator: Operator) -> None:
        """Show one hold."""
        hold: Any = hold_page(operator, options["hold"])
        columns = (
            ("incident", lambda incident: f"#{incident.number}"),
            ("tenant", lambda incident: incident.tenant),
            ("source", lambda incident: incident.source),
            ("put aside", lambda incident: incident.unresolved_count),
        )
        lines = _describe(hold) + (["", *table(hold.incidents, columns)] if hold.incidents else [])
        self.answer(options, HoldPageSerializer(hold), lines)

    def extend(self, options: dict[str, Any], operator: Operator) -> None:
        """Move the end of a hold."""
        done = services.extend_hold(
            hold_id=options["hold"],
            ends_at=_ahead(options["until"]),
            reason=options["reason"],
            by=operator,
            key=key_of(options),
        )
        self.answer(options, HoldMutationSerializer(done), [f"It ends at {done.ends_at:%Y-%m-%d %H:%M:%S}."])

    def end(self, options: dict[str, Any], operator: Operator) -> None:
        """End a hold."""
        done = services.end_hold(hold_id=options["hold"], reason=options["reason"], by=operator, key=key_of(options))
        line = f"New messages run again; `hold release {done.hold_id}` sends on what was put aside."
        self.answer(options, HoldMutationSerializer(done), [line])

    def release(self, options: dict[str, Any], operator: Operator) -> None:
        """Plan a redrive of what a hold has put aside."""
        done = release_hold(
            hold_id=options["hold"],
            by=operator,
            key=key_of(options),
            expected_count=options["expected_count"],
            pace=pace_of(options, RedrivePace()),
            reason=options["reason"],
        )
        lines = [
            f"Planned to send on {one.total} as {one.redrive_id}; it starts with `redrives start {one.redrive_id}`."
            for one in done.redrives
        ]
        self.answer(options, ReleaseSerializer(done), lines)


def _add_hold(parser: ArgumentParser) -> None:
    parser.add_argument("hold", type=record_id, help="its id")


def _end(text: str) -> timedelta | datetime:
    """Read a length such as ``2h``, or a time."""
    length = _LENGTH.fullmatch(text)
    if length is not None:
        return timedelta(**{UNITS[length[2]]: int(length[1])})
    try:
        return moment(text)
    except ArgumentTypeError:
        raise ArgumentTypeError(f"{text!r} is no length such as 2h, and no ISO 8601 time") from None


def _ahead(end: timedelta | datetime) -> datetime:
    """Return a length from now on, by the database's clock, as a time."""
    return database_now() + end if isinstance(end, timedelta) else end


def _describe(hold: Hold) -> list[str]:
    held: Any = hold
    in_all = "" if held.put_aside is None else f"{held.put_aside}, of which "
    return facts(
        (
            ("hold", hold.id),
            ("what", hold.words),
            ("source", hold.source),
            ("state", hold.state),
            ("reason", hold.reason),
            ("placed by", hold.placed_by_name),
            ("placed", hold.placed_at),
            ("ends", hold.ends_at),
            ("ended by", hold.ended_by_name),
            ("put aside", f"{in_all}{held.held_count}{'+' if held.is_capped else ''} still are"),
            ("sent on by", hold.redrive_id),
        )
    )
