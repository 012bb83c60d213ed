"""What keeps the demo's job ledger busy: reports, and what follows from each of them.

While things are well, one report a minute is routed, and everything that there is is done about it. Once per breakage a
burst of them fails: the desk cannot serve, the mail service refuses connections, and the front desk of one tenant is
closed, so that its reports have nowhere to go. How many jobs can fail is bounded by the burst.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

from django.db import Error, transaction

from opsconsole.core.errors import InvalidInput
from opsconsole.demo.flaky import HOST
from opsconsole.demo.folder import DemoFolder
from opsconsole.demo.workload import HARBOUR, MEADOW
from opsconsole.jobs import intake
from opsconsole.jobs.models import AiConfig, Job, Management, QueueStatus, Report, ReviewQueue, RoutingRule

HEALTHY_EVERY_SECONDS = 60.0
IN_BURST = 4
UNANSWERED_IN_BURST = 2
ATTEMPTS_IN_BURST = 2  # of a job in a burst, so that it has failed before somebody looks elsewhere
BURST = "reports"
OFFERS = "offers"

Act = Callable[[], None]


class Reports:
    """Decides at each step which report comes in; time comes in as seconds of a clock that only goes on."""

    def __init__(self, folder: DemoFolder, *, first: int, say: Callable[[str], None]) -> None:
        self.folder = folder
        self.say = say
        self._numbers = itertools.count(first)
        self._was_broken: bool | None = None
        self._planned: deque[tuple[float, Act]] = deque()
        self._healthy_at = 0.0

    def step(self, now: float) -> None:
        """Do what is due; a database that is away is tried again at the next step."""
        port = self.folder.desk_port()
        if port is None:
            return
        condition = self.folder.condition()
        try:
            if condition.is_broken != self._was_broken:
                prepare(f"http://{HOST}:{port}", is_broken=condition.is_broken)
                self._was_broken = condition.is_broken
                self._healthy_at = now
            if not condition.is_broken:
                self._planned.clear()
                self._do_healthy(now, f"http://{HOST}:{port}")
            elif self.folder.burst_done(BURST) < condition.breakage:
                self.folder.set_burst_done(condition.breakage, BURST)
                self._planned.extend((now + second, act) for second, act in self.burst(f"http://{HOST}:{port}"))
            while self._planned and self._planned[0][0] <= now:
                self._planned.popleft()[1]()
        except (Error, InvalidInput) as error:
            self.say(f"a report could not be written: {type(error).__name__}: {error}")

    def burst(self, desk: str) -> list[tuple[float, Act]]:
        """Return what fails once per breakage, with the second at which each begins."""
        planned: list[tuple[float, Act]] = []
        for number in range(IN_BURST):
            planned.append((2.0 + 2 * number, lambda: self.act_on_everything(desk, attempts=ATTEMPTS_IN_BURST)))
            planned.append((2.5 + 2 * number, lambda: self.submit(MEADOW)))
            planned.append((3.0 + 2 * number, lambda: self.submit(HARBOUR, category=OFFERS)))
        for number in range(UNANSWERED_IN_BURST):
            planned.append((4.0 + 3 * number, lambda: self.propose(desk)))
        return sorted(planned, key=lambda pair: pair[0])

    def submit(self, tenant: str, category: str = "") -> None:
        """Take in a report."""
        self._report(tenant, category)

    @transaction.atomic
    def act_on_everything(self, desk: str, *, attempts: int | None = None) -> None:
        """Take in a report, and begin one job of every kind that sends or fetches."""
        report = self._report(HARBOUR)
        number = report.reference.rpartition("-")[2]
        intake.request_evidence(report=report, url=f"{desk}/photos/{number}")
        intake.start_workflow(report=report, name="takedown", endpoint=f"{desk}/workflows")
        intake.send_action(report=report, action="hide", endpoint=f"{desk}/actions", payload={"post": number})
        intake.send_notice(report=report, body="We are looking at it.", endpoint=f"{desk}/notices")
        intake.send_email(
            report=report, to_address="ada@harbour.example", subject=f"Your report {report.reference}", body="Thanks."
        )
        if attempts is not None:
            Job.objects.filter(report_id=report.id).exclude(kind="route_report").update(max_attempts=attempts)

    @transaction.atomic
    def propose(self, desk: str) -> None:
        """Take in a report, and have an action applied to which the desk gives no answer while it is broken."""
        report = self._report(HARBOUR)
        intake.propose_action(report=report, action="lock_account", endpoint=f"{desk}/proposals")

    def _do_healthy(self, now: float, desk: str) -> None:
        if now < self._healthy_at:
            return
        self._healthy_at = now + HEALTHY_EVERY_SECONDS
        self.act_on_everything(desk)
        self.propose(desk)
        self.submit(HARBOUR, category=OFFERS)
        self.submit(MEADOW)

    def _report(self, tenant: str, category: str = "") -> Report:
        number = next(self._numbers)
        return intake.submit_report(
            tenant=tenant,
            reference=f"R-{number}",
            category=category,
            subject="An offer that is none" if category == OFFERS else "A post about somebody",
            body="Please look at this.",
        )


@transaction.atomic
def prepare(desk: str, *, is_broken: bool) -> None:
    """Make the queues and the rule of the demo; the front desk of one tenant is closed while things are broken."""
    people, _ = ReviewQueue.objects.get_or_create(tenant=HARBOUR, name="Moderators")
    config, _ = AiConfig.objects.update_or_create(
        tenant=HARBOUR, name="Reader", defaults={"endpoint": f"{desk}/reviews", "fallback_queue": people}
    )
    machine, _ = ReviewQueue.objects.get_or_create(
        tenant=HARBOUR,
        name="Offers",
        defaults={"management": Management.AI, "ai_config": config, "position": 1},
    )
    RoutingRule.objects.get_or_create(tenant=HARBOUR, category=OFFERS, queue=machine)
    status = QueueStatus.RETIRED if is_broken else QueueStatus.ACTIVE
    ReviewQueue.objects.update_or_create(tenant=MEADOW, name="Front desk", defaults={"status": status})
