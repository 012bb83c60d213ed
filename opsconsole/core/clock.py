"""The host's own clocks, for ages that must hold when somebody sets the wall clock.

The database's clock is read where the database is; here is only what a worker can tell without it.
"""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path
from typing import Final

_BOOT_ID_FILE: Final = Path("/proc/sys/kernel/random/boot_id")
# CLOCK_BOOTTIME runs on while the host is suspended; systems without it have CLOCK_MONOTONIC, which may not.
_BOOT_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boot_now() -> float:
    """Seconds since the host started; never jumps, and is the same for every process of the host."""
    return time.clock_gettime(_BOOT_CLOCK)


def wall_now() -> float:
    """Seconds since 1970 on the host's wall clock, which somebody may set."""
    return time.time()


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Name this start of the host; "" where the system does not tell, which equals no stored boot id."""
    try:
        return _BOOT_ID_FILE.read_text().strip()
    except OSError:
        return ""
