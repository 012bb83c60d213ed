"""The kind of job of the ledger's benchmark: it does what the bare task does, and has no record."""

from __future__ import annotations

from typing import Any

from benchmarks import app
from opsconsole.core.effects import Effects
from opsconsole.jobs.kind import Kind, Work


class Noop(Kind):
    name = "bench_noop"
    effects = Effects.NONE

    def run(self, work: Work) -> Any:
        app.count()


KIND = Noop()
