"""What a task does to the world, and whether one that ended badly may have done it: words that all apps share."""

from __future__ import annotations

from enum import StrEnum


class OutcomeClass(StrEnum):
    """Whether a job may have taken effect."""

    SAFE = "safe"  # it did not, or doing it twice does no harm
    NOT_DECLARED = "not_declared"  # nobody has said what the task does
    AMBIGUOUS = "ambiguous"  # it may have

    @property
    def severity(self) -> int:
        """The rank from 0 (safe) to 2 (ambiguous)."""
        return _SEVERITY[self]


_SEVERITY = {OutcomeClass.SAFE: 0, OutcomeClass.NOT_DECLARED: 1, OutcomeClass.AMBIGUOUS: 2}


class Effects(StrEnum):
    """What a task's body does to the world outside its own database transaction, as its policy says."""

    NONE = "none"
    IDEMPOTENT = "idempotent"  # done twice is as good as done once
    OUTSIDE = "outside"  # sends, pays, publishes
    UNDECLARED = "undeclared"
