"""``python -m tests``: the whole suite on SQLite and on PostgreSQL, which is what ``make test`` runs.

What touches the database runs on both, and what does not runs once: three runs at the same time, since each waits more
than it computes. They share no database, queue, port or file. Further arguments go to every pytest. Succeeds if all do,
and says at the end how each ended.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any


def run_side_by_side(commands: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Run the commands at the same time and return how each ended.

    The first one's output is seen as it comes, that of each other one after those before it have ended. An interrupt
    and a request to end are passed on to all as an interrupt, after which pytest cleans up, and that is waited for.
    """
    first, *others = commands
    with contextlib.ExitStack() as stack:
        outputs = {name: stack.enter_context(tempfile.TemporaryFile()) for name in others}
        started: dict[str, subprocess.Popen[bytes]] = {}

        def interrupt(number: int, _frame: Any) -> None:
            if number == signal.SIGINT and sys.stdin.isatty():
                return  # the terminal has told them already
            for process in started.values():
                process.send_signal(signal.SIGINT)

        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, interrupt))
        for name, words in commands.items():
            output = outputs.get(name)
            started[name] = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT if output else None)
        codes = {first: started[first].wait()}
        for name, output in outputs.items():
            print(f"\n== {name}, which runs meanwhile", flush=True)
            codes[name] = started[name].wait()
            output.seek(0)
            for line in output:
                sys.stdout.buffer.write(line)
            sys.stdout.flush()
    return codes


def main() -> int:
    pytest = [sys.executable, "-m", "pytest", *sys.argv[1:]]
    codes = run_side_by_side(
        {
            "sqlite": [*pytest, "--database", "sqlite", "--part", "database"],
            "postgresql": [*pytest, "--database", "postgresql", "--part", "database"],
            "no database": [*pytest, "--part", "rest"],
        }
    )
    print("exit codes: " + ", ".join(f"{name} {code}" for name, code in codes.items()), flush=True)
    return 1 if any(codes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
