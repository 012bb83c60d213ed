"""``manage.py keys``: make a sealing key, see which are in use, and seal stored messages with the newest one."""

from __future__ import annotations

import base64
import json
import secrets
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db.models import Count

from deadletters import conf
from deadletters.models import SealedMessage
from deadletters.replay import rotate_messages
from grants import audit
from grants.access import SYSTEM_CAPABILITY
from grants.operators import Operator
from grants.resources import Resource
from opsconsole.core.sealing import KEY_BYTES


class Command(BaseCommand):
    help = "Make a key for OPSCONSOLE_KEYS, list the keys in use, or seal stored messages with the first of them."

    def add_arguments(self, parser: CommandParser) -> None:
        subcommands = parser.add_subparsers(dest="subcommand", required=True)
        subcommands.add_parser(
            "new", help="print a new key as id:base64; put it first in OPSCONSOLE_KEYS"
        ).add_argument("id", help="a name for it, such as 2026-11")
        for name, text in (
            ("status", "how many stored messages each key has, and which keys are missing"),
            ("rotate", "seal every message that has an older key with the first one"),
        ):
            subcommands.add_parser(name, help=text).add_argument("--json", action="store_true", dest="as_json")

    def handle(self, *_args: Any, subcommand: str, **options: Any) -> None:
        if subcommand == "new":
            self._new(options["id"])
        elif subcommand == "status":
            self._status(options["as_json"])
        else:
            self._rotate(options["as_json"])

    def _new(self, name: str) -> None:
        if not name or any(letter in name for letter in ":, ") or len(name.encode()) > 64:
            raise CommandError("a key's id has 1 to 64 bytes and no colon, comma or space")
        self.stdout.write(f"{name}:{base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()}")

    def _status(self, as_json: bool) -> None:
        sealer = conf.sealer()
        counts = dict(SealedMessage.objects.values_list("key_id").annotate(count=Count("pk")).order_by("key_id"))
        missing = sorted(set(counts) - set(sealer.key_ids))
        status = {"primary": sealer.primary, "messages": counts, "missing": missing}
        if as_json:
            self.stdout.write(json.dumps(status))
            return
        self.stdout.write(f"New messages are sealed with {sealer.primary}.")
        for name, count in counts.items():
            note = ": this key is not configured, they cannot be retried" if name in missing else ""
            self.stdout.write(f"  {name}: {count} messages{note}")

    def _rotate(self, as_json: bool) -> None:
        done = rotate_messages()
        audit.record(
            action="keys.rotated",
            operator=Operator.cli(),
            resource=Resource(tenant="(system)", target_type="sealing_key", target_id=conf.sealer().primary),
            capability=SYSTEM_CAPABILITY,
            outcome={"sealedAnew": done.sealed_anew, "unknownKey": done.unknown},
        )
        if as_json:
            self.stdout.write(json.dumps(asdict(done)))
        else:
            self.stdout.write(f"{done.sealed_anew} messages are sealed with {conf.sealer().primary} now.")
        if done.unknown:
            raise CommandError(f"{done.unknown} messages have a key that is not configured; they stay as they are")
