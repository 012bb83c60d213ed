"""Settings of the test suite: the defaults, on the database that pytest's ``--database`` chose (tests/databases.py)."""

import os

from opsconsole.settings.base import *  # noqa: F403
from opsconsole.settings.base import DATABASES, LOGGING, VAR_DIR

# Threads of one test share a file; an in-memory database would be another one for each. A name of its own for each run
# lets runs go on side by side.
_SQLITE = DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3"
DATABASES["default"]["TEST"] = {
    "NAME": str(VAR_DIR / "test.sqlite3") if _SQLITE else f"test_opsconsole_{os.getpid()}",
}
# A connection kept for later would still be open when the database of the run is dropped.
DATABASES["default"]["CONN_MAX_AGE"] = 0

PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]  # fast on purpose
# pytest catches what is logged; a handler of ours would write to a stream that pytest closes before the last line.
LOGGING["root"]["handlers"] = []
OPSCONSOLE_JOB_KINDS = ["tests.jobs.kind_plain", "tests.jobs.kind_outside", "tests.jobs.kind_watched"]
