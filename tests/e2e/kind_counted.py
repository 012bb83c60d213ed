"""A kind without effects outside: it writes down each run, and finds things unwell until its test's folder is well."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

from opsconsole.core.effects import Effects
from opsconsole.jobs.errors import TryAgain
from opsconsole.jobs.kind import BackOff, Kind, Work
from tests.e2e.jobs import folder


def write_down(work: Work) -> None:
    descriptor = os.open(folder() / "ran", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, f"ledger {work.job_id} {work.attempt}\n".encode())
    finally:
        os.close(descriptor)


class Counted(Kind):
    name = "e2e_counted"
    effects = Effects.NONE
    max_attempts = 2
    lease = timedelta(seconds=20)
    back_off = BackOff(first=timedelta(seconds=0.2), jitter=0.0)

    def run(self, work: Work) -> Any:
        write_down(work)
        time.sleep(float(work.payload.get("seconds", 0)))
        if work.payload.get("fails") and not (folder() / "well").exists():
            raise TryAgain("unwell", "things are not well yet")


KIND = Counted()
