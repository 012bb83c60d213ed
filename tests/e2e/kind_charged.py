"""The same with effects outside: what is lost in the middle of it may have happened."""

from __future__ import annotations

from opsconsole.core.effects import Effects
from tests.e2e.kind_counted import Counted


class Charged(Counted):
    name = "e2e_charged"
    effects = Effects.OUTSIDE


KIND = Charged()
