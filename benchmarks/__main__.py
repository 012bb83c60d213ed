"""Runs the benchmarks one after the other: ``python -m benchmarks [NAME ...] [--rounds N]``."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.common import ROOT

NAMES = (
    "journal_cost", "recording", "capture_healthy", "capture_failing", "incident_50k", "retry_1000", "redrive",
    "lists", "snapshot", "search", "pages", "ledger", "stale_leases",
)  # fmt: skip


def main(arguments: list[str]) -> int:
    names = [name for name in arguments if name in NAMES] or list(NAMES)
    options = [argument for argument in arguments if argument not in NAMES]
    failed = []
    for name in names:
        ended = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *options], cwd=ROOT, check=False)
        if ended.returncode:
            failed.append(name)
    if failed:
        print(f"\nnot run to the end: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
