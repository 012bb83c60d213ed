"""``manage.py demo``: break and heal the services that the jobs of the demo need."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from opsconsole.demo.flaky import answers
from opsconsole.demo.tasks import demo_folder
from opsconsole.demo.workload import RECEIPTS_IN_BURST
from opsconsole.management.own_project import refuse_other_projects

SHOWN_REQUESTS = 12


class Command(BaseCommand):
    """Works through files in the data folder, so it needs neither the console nor a permission."""

    help = "Break or heal the demo's mail and payment services, or say how they are and which payments they took."

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the options."""
        parser.add_argument("what", choices=["break", "heal", "status"])
        parser.add_argument("--json", action="store_true", dest="as_json", help="status: answer in JSON")

    def handle(self, *_: Any, **options: Any) -> None:
        """Do it."""
        refuse_other_projects()
        if options["what"] == "status":
            self._show(as_json=options["as_json"])
            return
        breaking = options["what"] == "break"
        changed = demo_folder().set_broken(breaking)
        if not changed:
            self.stdout.write("The services are broken already." if breaking else "The services are well already.")
        elif breaking:
            self.stdout.write(
                f"Broken: connections to the mail service are refused, the payment service never answers, and the desk "
                f"that reports are about cannot serve. {RECEIPTS_IN_BURST} receipts and some other jobs will fail."
            )
        else:
            self.stdout.write("Healed: no new failures. Retry what has failed, and the incidents close by themselves.")
        if not demo_folder().ports():
            self.stdout.write("The demo is not running; `manage.py up` starts it.")

    def _show(self, *, as_json: bool) -> None:
        folder = demo_folder()
        condition, ports, requests = folder.condition(), folder.ports(), folder.requests()
        services = {name: answers(port) for name, port in ports.items()}
        if as_json:
            document = {
                **asdict(condition),
                "is_running": bool(ports),
                "services": services,
                "payment_requests": [asdict(request) for request in requests],
            }
            self.stdout.write(json.dumps(document))
            return
        state = "broken" if condition.is_broken else "well"
        lines = [f"The services are {state}." if ports else f"The demo is not running; its services are to be {state}."]
        if "mail" in services:
            lines.append(f"Mail       {'accepts connections' if services['mail'] else 'refuses connections'}")
        if "payments" in services:
            lines.append(f"Payments   {'takes requests and never answers' if condition.is_broken else 'answers'}")
        if "desk" in services:
            lines.append(f"Desk       {'answers 503' if condition.is_broken else 'serves'}")
        if requests:
            times = Counter(request.reference for request in requests)
            lines.append("What the payment service has taken (this is where to look before a charge is retried):")
            lines += [
                f"  {time.strftime('%H:%M:%S', time.localtime(request.at))}  {request.reference:<20} "
                f"{'answered' if request.is_answered else 'never answered'}"
                + (f", {times[request.reference]} times in all" if times[request.reference] > 1 else "")
                for request in requests[-SHOWN_REQUESTS:]
            ]
        self.stdout.write("\n".join(lines))
