"""What keeps the demo's worker busy: a gentle stream of jobs, and once per breakage a burst of failures.

How many jobs can fail is bounded: the burst, and then one receipt every fifteen seconds until there have been sixty.
Run as ``python -m opsconsole.demo.workload``; ``manage.py up`` does.
"""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from opsconsole.demo.folder import DemoFolder

STEP_SECONDS = 0.25
RECEIPTS_IN_BURST = 40
RECEIPTS_PER_SECOND = 4
TRICKLE_EVERY_SECONDS = 15.0
TRICKLE_AT_MOST = 60
HEALTHY_EVERY_SECONDS = 1.0

HARBOUR, MEADOW = "harbour", "meadow"
CUSTOMERS = {HARBOUR: ("ada", "bram", "carol", "dilip"), MEADOW: ("edith", "femi")}

BROKEN = "The mail service is down and the payment service does not answer: jobs fail from now on."
WELL = "The services are well again: no new failures. Press retry, and the incidents close by themselves."


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A message to send: the name of a task and its keyword arguments."""

    task: str
    kwargs: dict[str, Any]


class Jobs:
    """Makes jobs with numbers and customers that differ from one to the next."""

    def __init__(self, first: int) -> None:
        self._numbers = itertools.count(first)
        self._customers: dict[str, Iterator[str]] = {
            tenant: itertools.cycle(customers) for tenant, customers in CUSTOMERS.items()
        }

    def _job(self, task: str, tenant: str, **kwargs: Any) -> Job:
        kwargs.update(tenant=tenant, customer=next(self._customers[tenant]))
        return Job(task=task, kwargs=kwargs)

    def receipt(self, tenant: str) -> Job:
        return self._job("demo.send_receipt", tenant, order=next(self._numbers))

    def charge(self, tenant: str) -> Job:
        number = next(self._numbers)
        return self._job("demo.charge_card", tenant, reference=f"charge-{number}", amount=f"{number % 90 + 10}.00")

    def statement(self, tenant: str) -> Job:
        return self._job("demo.build_statement", tenant, month=time.strftime("%Y-%m", time.gmtime()))

    def label(self, tenant: str) -> Job:
        return self._job("demo.render_label", tenant, order=next(self._numbers))

    def stock(self, tenant: str) -> Job:
        return self._job("demo.import_stock", tenant, warehouse=f"warehouse-{next(self._numbers) % 3 + 1}")

    def misspelt_address(self, tenant: str) -> Job:
        return self._job("demo.update_address", tenant, streat=f"{next(self._numbers) % 80 + 1} Harbour Road")

    def unserved(self, tenant: str) -> Job:
        """A job that no worker knows, as after a deployment that has renamed a task."""
        return self._job("demo.archive_orders", tenant, year=2020)

    def prices(self, tenant: str) -> Job:
        return self._job("demo.refresh_prices", tenant)

    def visits(self, tenant: str) -> Job:
        return self._job("demo.count_visits", tenant, page="/offers")

    def burst(self) -> list[tuple[float, Job]]:
        """Return what fails once per breakage, with the second at which each is sent."""
        planned = [(2 + number / RECEIPTS_PER_SECOND, self.receipt(HARBOUR)) for number in range(RECEIPTS_IN_BURST)]
        planned += [(3.0, self.charge(HARBOUR)), (14.0, self.charge(HARBOUR)), (16.0, self.charge(MEADOW))]
        planned += [(4.0, self.misspelt_address(HARBOUR)), (20.0, self.misspelt_address(HARBOUR))]
        planned += [(5.0, self.unserved(MEADOW)), (6.0, self.unserved(MEADOW))]
        planned += [(7.0, self.stock(HARBOUR)), (8.0, self.stock(HARBOUR))]
        planned += [(9.0, self.label(MEADOW)), (22.0, self.statement(HARBOUR))]
        return sorted(planned, key=lambda pair: pair[0])


class Workload:
    """Decides at each step what is to be sent, and sends it; time comes in as seconds of a clock that only goes on."""

    def __init__(
        self, folder: DemoFolder, *, jobs: Jobs, send: Callable[[Job], None], say: Callable[[str], None]
    ) -> None:
        self.folder = folder
        self.jobs = jobs
        self.send = send
        self.say = say
        self._was_broken: bool | None = None
        self._planned: deque[tuple[float, Job]] = deque()
        self._healthy_at = 0.0
        self._receipt_at = 0.0
        self._trickled = (0, 0)  # breakage, receipts sent since

    def step(self, now: float) -> None:
        """Send what is due."""
        condition = self.folder.condition()
        if condition.is_broken != self._was_broken:
            self.say(BROKEN if condition.is_broken else WELL)
            self._was_broken = condition.is_broken
        if not condition.is_broken:
            self._planned.clear()
        elif self.folder.burst_done() < condition.breakage:
            self.folder.set_burst_done(condition.breakage)
            self._planned = deque((now + second, job) for second, job in self.jobs.burst())
        while self._planned and self._planned[0][0] <= now:
            self.send(self._planned.popleft()[1])
        if now >= self._healthy_at:
            self._healthy_at = now + HEALTHY_EVERY_SECONDS
            self.send(self.jobs.prices(MEADOW))
            self.send(self.jobs.visits(HARBOUR))
        if now >= self._receipt_at:
            self._receipt_at = now + TRICKLE_EVERY_SECONDS
            self._send_receipts(is_broken=condition.is_broken, breakage=condition.breakage)

    def _send_receipts(self, *, is_broken: bool, breakage: int) -> None:
        if not is_broken:
            self.send(self.jobs.receipt(HARBOUR))
            self.send(self.jobs.charge(MEADOW))
            return
        sent = self._trickled[1] if self._trickled[0] == breakage else 0
        if sent < TRICKLE_AT_MOST:
            self._trickled = (breakage, sent + 1)
            self.send(self.jobs.receipt(MEADOW))


def main() -> None:
    import django

    from opsconsole.celery import app

    django.setup()

    from opsconsole.demo.reports import Reports
    from opsconsole.demo.tasks import demo_folder

    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())

    def say(text: str) -> None:
        print(text, flush=True)

    def send(job: Job) -> None:
        try:
            app.send_task(job.task, kwargs=job.kwargs)
        except Exception as error:  # noqa: BLE001  (whatever the broker's client raises: the next one may get through)
            say(f"{job.task} could not be sent: {type(error).__name__}: {error}")

    workload = Workload(demo_folder(), jobs=Jobs(int(time.time()) % 900_000 + 100_000), send=send, say=say)
    reports = Reports(demo_folder(), first=int(time.time()), say=say)
    while not stopping.wait(STEP_SECONDS):
        workload.step(time.monotonic())
        reports.step(time.monotonic())


if __name__ == "__main__":
    main()
