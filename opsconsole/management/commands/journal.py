"""``manage.py journal``: what the journals of this host hold, and recording again what a database has lost."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.core.serializers.json import DjangoJSONEncoder
from django.db import Error

from deadletters import conf
from deadletters.drainer import KEPT_BYTES
from deadletters.journal.folder import ChosenRoot
from deadletters.journal.kept import KeptFailures
from deadletters.models import JournalFolder, SetAsideEntry, WorkerNode
from deadletters.replay import Replayed, replay_kept, replay_set_aside
from opsconsole.core.database import database_now
from repairs.settlement import DatabaseSettlement


class Command(BaseCommand):
    help = "Show the journals of this host, or record again what they have kept."

    def add_arguments(self, parser: CommandParser) -> None:
        subcommands = parser.add_subparsers(dest="subcommand", required=True)
        status = subcommands.add_parser("status", help="what lies on this host and what waits to be recorded")
        replay = subcommands.add_parser(
            "replay", help="record again the failures kept for 24 hours; harmless to repeat"
        )
        replay.add_argument(
            "--set-aside", action="store_true", help="record the entries set aside instead of those kept"
        )
        for parser_ in (status, replay):
            parser_.add_argument("--json", action="store_true", dest="as_json", help="answer in JSON")

    def handle(self, *_args: Any, subcommand: str, **options: Any) -> None:
        chosen = conf.journal_root()
        kept = KeptFailures(chosen.root, KEPT_BYTES, conf.kept_seconds(), sealer=conf.sealer())
        try:
            if subcommand == "status":
                self._status(chosen, kept, options["as_json"])
            else:
                settlement = DatabaseSettlement()
                done = replay_set_aside(settlement) if options["set_aside"] else replay_kept(kept, settlement)
                self._replayed(done, options["as_json"])
        except Error as error:
            raise CommandError(f"the database cannot be used: {error}; nothing is lost, try again later") from error

    def _status(self, chosen: ChosenRoot, kept: KeptFailures, as_json: bool) -> None:
        counted = {row.name: row for row in JournalFolder.objects.all()}
        folders = [
            {
                "name": folder.name,
                "alive": folder.is_alive(),
                "bytes": folder.size(),
                "counted_bytes": sum(json.loads(counted[folder.name].offsets).values())
                if folder.name in counted
                else 0,
            }
            for folder in chosen.root.folders()
        ]
        now = database_now()
        nodes = list(WorkerNode.objects.live(now))
        status = {
            "root": str(chosen.root.path),
            "why": chosen.why,
            "bytes": chosen.root.usage(),
            "kept_bytes": kept.usage() if kept.path.exists() else 0,
            "folders": folders,
            "nodes": [
                {
                    "id": node.id,
                    "source": node.source,
                    "waiting_bytes": node.journal_bytes,
                    "oldest_seconds": node.journal_oldest_seconds,
                    "dropped": node.dropped_count,
                    "trouble": node.trouble,
                    "captured_at": node.captured_at,
                }
                for node in nodes
            ],
            "set_aside": SetAsideEntry.objects.filter(applied_at__isnull=True).count(),
        }
        if as_json:
            self.stdout.write(json.dumps(status, cls=DjangoJSONEncoder))
            return
        self.stdout.write(
            f"Journals lie in {chosen.root.path} ({chosen.why}): {status['bytes']} bytes, kept {status['kept_bytes']}."
        )
        for folder in folders:
            state = "writing" if folder["alive"] else "left by a dead worker, to be recovered by the next one"
            self.stdout.write(f"  {folder['name']}: {state}, {folder['bytes']} bytes")
        for node in nodes:
            late = f", {node.trouble}" if node.trouble else ""
            self.stdout.write(f"  {node.id} reports: {node.journal_bytes} bytes{late}")
        self.stdout.write(f"{status['set_aside']} entries are set aside.")

    def _replayed(self, done: Replayed, as_json: bool) -> None:
        if as_json:
            self.stdout.write(json.dumps(asdict(done)))
        else:
            self.stdout.write(f"{done.seen} looked at, {done.recorded} were missing and are recorded now.")
            for refusal in done.refused:
                self.stderr.write(f"still not recorded: {refusal}")
        if done.refused:
            raise CommandError(f"{len(done.refused)} entries could not be recorded", returncode=1)
