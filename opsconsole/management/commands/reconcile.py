"""``manage.py reconcile``: run a sweep from a shell, or all of them at their times where there is no celery beat."""

from __future__ import annotations

import signal
import threading
import time
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import Error, close_old_connections
from rest_framework import serializers

from grants.operators import Operator, OperatorKind
from opsconsole.core.errors import OpsError
from opsconsole.management.operations import OperationsCommand, add_common_arguments, key_of
from repairs.api.serializers import RunSerializer
from repairs.errors import ReconciliationRunning
from repairs.models import ReconciliationRun, RunState
from repairs.reconciliation.kinds import KINDS
from repairs.reconciliation.running import run_now, run_scheduled
from repairs.reconciliation.runs import MOST_ROWS
from repairs.reconciliation.schedule import planned_sweeps

PAUSE_SECONDS = 2.0


class RunsSerializer(serializers.Serializer[Any]):
    """The runs of one call."""

    results = RunSerializer(many=True)


class Command(OperationsCommand):
    """Runs as the system, as celery beat would; with ``--operator`` or a token, as whom that names, if they may."""

    help = (
        "Find stuck and lost work and put it right: KIND is one sweep, --all is every one of them, and --loop runs "
        "them at the schedule's times until it is told to stop. Kinds: " + ", ".join(KINDS) + "."
    )
    needs_operator = False

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the options."""
        what = parser.add_mutually_exclusive_group(required=True)
        what.add_argument("kind", nargs="?", metavar="KIND", help="which sweep")
        what.add_argument("--all", action="store_true", help="every sweep, one after the other")
        what.add_argument("--loop", action="store_true", help="go on for ever; does no harm beside celery beat")
        parser.add_argument("--limit", type=_limit, help=f"rows that each part looks at, 1 to {MOST_ROWS}")
        add_common_arguments(parser, self.sweep)
        parser.add_argument("--key", help="idempotency key, for a script that may run twice (default: a new one)")

    def sweep(self, options: dict[str, Any], operator: Operator) -> None:
        """Run what was asked for; the exit status is 1 if a sweep has failed."""
        if options["loop"]:
            self._loop()
            return
        kinds = list(KINDS) if options["all"] else [options["kind"]]
        runs = [self._run(kind, options, operator) for kind in kinds]
        done = [run for run in runs if run is not None]
        lines = [_line(kind, run) for kind, run in zip(kinds, runs, strict=True)]
        self.answer(options, RunsSerializer({"results": done}), lines)
        failed = [run.kind for run in done if run.state in (RunState.FAILED, RunState.PARTIAL)]
        if failed:
            raise CommandError(f"an error ended: {', '.join(failed)}", returncode=1)

    def _run(self, kind: str, options: dict[str, Any], operator: Operator) -> ReconciliationRun | None:
        if operator.kind is OperatorKind.CLI and operator.user_id is None:
            return run_scheduled(kind, limit=options["limit"])
        if not options["all"]:
            return run_now(kind=kind, by=operator, key=key_of(options), limit=options["limit"]).run
        try:
            # A key is for one target, and each kind is one.
            key = f"{key_of(options)}:{kind}"
            return run_now(kind=kind, by=operator, key=key, limit=options["limit"]).run
        except ReconciliationRunning:
            return None

    def _loop(self) -> None:
        with _stopping() as stop:
            due = dict.fromkeys(KINDS, 0.0)
            while not stop.is_set():
                for kind, every in _times():
                    if stop.is_set():
                        break
                    if time.monotonic() >= due[kind]:
                        due[kind] = time.monotonic() + every.total_seconds()
                        self._run_in_loop(kind, stop)
                stop.wait(PAUSE_SECONDS)

    def _run_in_loop(self, kind: str, stop: threading.Event) -> None:
        """Run one sweep; whatever goes wrong is said and tried again when it is due again."""
        try:
            run = run_scheduled(kind, is_stopping=stop.is_set)
        except (Error, OpsError) as error:
            self.stderr.write(f"{kind}: {type(error).__name__}: {error}")
            return
        finally:
            # A connection that broke, or outlived a failover, is not used again.
            close_old_connections()
        if run is not None and (run.repaired_count or run.error_code):
            self.stdout.write(_line(kind, run))


def _times() -> Iterator[tuple[str, timedelta]]:
    """Yield each kind that is on, with its interval; none while the database does not answer."""
    try:
        planned = planned_sweeps()
    except Error:
        close_old_connections()
        planned = []
    yield from ((one.kind, one.every or KINDS[one.kind].every) for one in planned if one.is_on)


@contextmanager
def _stopping() -> Iterator[threading.Event]:
    """An event that SIGTERM and Ctrl-C set, so that the page under way is finished before the process ends."""
    stop = threading.Event()
    before = {one: signal.signal(one, lambda *_: stop.set()) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _line(kind: str, run: ReconciliationRun | None) -> str:
    if run is None:
        return f"{kind}: already running"
    pairs = (
        ("looked at", run.scanned_count),
        ("repaired", run.repaired_count),
        ("left alone", run.skipped_count),
        ("incidents", run.incident_count),
    )
    counts = ", ".join(f"{name} {number:,}" for name, number in pairs)
    waited = "; waited for a lease's length, as nobody could have renewed one" if run.waited_since else ""
    error = f"; {run.error_code}: {run.error_text}" if run.error_code else ""
    return f"{kind}: {run.state}, {counts}{waited}{error}"


def _limit(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MOST_ROWS:
        raise ArgumentTypeError(f"{text!r} is not 1 to {MOST_ROWS}")
    return int(text)
