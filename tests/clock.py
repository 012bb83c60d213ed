"""Another clock for one module."""

from __future__ import annotations

import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def time_of(monkeypatch: pytest.MonkeyPatch, module: ModuleType, **functions: Any) -> None:
    """Give one module its own ``sleep`` or ``monotonic``.

    Put into ``time`` itself they would be those of every thread of the process: a heart or a runtime of another test
    would take a step out of this one's hands.
    """
    monkeypatch.setattr(module, "time", SimpleNamespace(**{**vars(time), **functions}))
