"""The host's clocks tell the same to every process of the host."""

from __future__ import annotations

import subprocess
import sys
import time

from opsconsole.core.clock import boot_id, boot_now, wall_now


def test_the_boot_clock_runs_on_and_is_shared_by_processes() -> None:
    before = boot_now()
    code = "from opsconsole.core.clock import *; print(boot_now(), boot_id())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert before < float(told[0]) < boot_now()
    assert " ".join(told[1:]) == boot_id()


def test_the_wall_clock_counts_from_1970() -> None:
    assert abs(wall_now() - time.time()) < 1
