"""Included by a worker that is to be killed while it puts messages aside; E2E_HOLD_DIES says at which step."""

from __future__ import annotations

import os
import signal
from typing import Any

from deadletters import drainer
from deadletters.journal.files import JournalFile
from deadletters.journal.frames import Kind
from deadletters.journal.hooks import Hooks

SIDE = os.environ.get("E2E_HOLD_DIES", "")


def die() -> None:
    """Kill the worker as a whole, as a host that loses power does."""
    os.killpg(os.getpgid(0), signal.SIGKILL)


def after(owner: Any, name: str) -> None:
    """Die once a step is done."""
    step = getattr(owner, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        step(*args, **kwargs)
        die()

    setattr(owner, name, run)


def before(owner: Any, name: str, *, if_last: Any = None) -> None:
    """Die instead of a step."""
    step = getattr(owner, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        if if_last is None or if_last(*args):
            die()
        return step(*args, **kwargs)

    setattr(owner, name, run)


_noted = False


def _die_at_an_acknowledgement_that_follows() -> None:
    """Die when the acknowledgement is written down of what was put aside, and is not sent."""
    settle = Hooks._on_settled

    def run(self: Hooks, kind: int, number: int, message: Any) -> None:
        settle(self, kind, number, message)
        if kind == Kind.ACK and (message.headers or {}).get("task", "").startswith("e2e.steady"):
            die()

    Hooks._on_settled = run  # type: ignore[method-assign]


if SIDE == "noted":
    after(JournalFile, "append_surely")
elif SIDE == "acknowledging":
    _die_at_an_acknowledgement_that_follows()
elif SIDE == "recording":
    # In the middle of the transaction, with all rows written.
    from deadletters.recorder import _Recording

    after(_Recording, "_write")
elif SIDE == "recorded":
    before(drainer.FolderDrain, "_count", if_last=lambda _drain, drained, *_: bool(drained.failures_done))
