"""What is known about a task beforehand: whose it is, how grave its failure is, and what its body does to the world.

Policies are written by name pattern, so that a task of another project has everything a job kind of ours has. This
module is plain Python; where the patterns come from (settings or a table) is the caller's business.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from fnmatch import translate
from typing import Any

from deadletters.grouping import GroupingMode
from deadletters.outcome import Effects

_CACHED_NAMES = 4_096
_WILDCARDS = re.compile(r"\[[^\]]*\]|[*?]")
_RUNBOOK = re.compile(r"https?://|docs/[a-z0-9-]+\.md(#[a-z0-9_-]+)?\Z", re.ASCII)


class Severity(StrEnum):
    """How grave a failure of the task is."""

    CRITICAL = "critical"
    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPolicySpec:
    """The policy of the tasks whose name matches ``pattern`` (shell wildcards, case matters).

    ``severity``, ``effects`` and ``grouping`` may be given by value. ``safe_errors`` names error classes after which
    nothing has happened, by qualified or bare name. ``grouping`` None means the installation's mode,
    ``max_age_seconds`` None that a letter of any age may be retried. Raises ``ValueError`` that names the field and
    the value that make no sense.
    """

    pattern: str
    team: str = ""
    severity: str = Severity.HIGH
    runbook: str = ""
    effects: Effects = Effects.UNDECLARED
    safe_errors: tuple[str, ...] = ()
    ignore: bool = False
    max_age_seconds: int | None = None
    grouping: GroupingMode | None = None

    def __post_init__(self) -> None:
        _check_line("pattern", self.pattern, 255)
        if not self.pattern or self.pattern != self.pattern.strip():
            raise ValueError(f"pattern: {self.pattern!r} is not the name of a task or a pattern of names")
        _check_line("team", self.team, 100)
        _check_line("runbook", self.runbook, 500)
        if self.runbook and not _RUNBOOK.match(self.runbook):
            raise ValueError(
                f"runbook: {self.runbook!r} is not an http or https address, nor a page of our docs folder"
            )
        if not isinstance(self.ignore, bool):
            raise ValueError(f"ignore: {self.ignore!r} is neither True nor False")
        if self.max_age_seconds is not None and (type(self.max_age_seconds) is not int or self.max_age_seconds < 1):
            raise ValueError(f"max_age_seconds: {self.max_age_seconds!r} is not a positive whole number of seconds")
        self._coerce("severity", Severity)
        self._coerce("effects", Effects)
        if self.grouping is not None:
            self._coerce("grouping", GroupingMode)
        object.__setattr__(self, "safe_errors", _error_names(self.safe_errors))

    @classmethod
    def from_mapping(cls, pattern: str, values: Mapping[str, Any]) -> TaskPolicySpec:
        """Build the policy of ``pattern`` from a settings entry; an unknown field is refused by name."""
        known = {field.name for field in fields(cls)} - {"pattern"}
        unknown = sorted(str(name) for name in values if name not in known)
        if unknown:
            raise ValueError(f"{unknown[0]}: no such field in the policy of {pattern!r}; known are {sorted(known)}")
        return cls(pattern=pattern, **values)

    @property
    def is_exact(self) -> bool:
        """Whether the pattern is one task's name."""
        return not _WILDCARDS.search(self.pattern)

    def _coerce(self, name: str, kind: type[StrEnum]) -> None:
        value = getattr(self, name)
        try:
            object.__setattr__(self, name, kind(value))
        except ValueError:
            raise ValueError(f"{name}: {value!r} is none of {[member.value for member in kind]}") from None


class PolicyBook:
    """All policies, looked up by task name; the most specific pattern wins.

    Exact names come before patterns, then the one with most characters that are no wildcard, then the one with fewer
    ``*``, then the longer one, then the alphabet, so that the order in which they were written never matters.
    """

    def __init__(self, specs: Iterable[TaskPolicySpec] = ()) -> None:
        listed = list(specs)
        self._exact: dict[str, TaskPolicySpec] = {}
        for spec in listed:
            if self._exact.setdefault(spec.pattern, spec) is not spec:
                raise ValueError(f"pattern: {spec.pattern!r} is given twice")
        ranked = sorted((spec for spec in listed if not spec.is_exact), key=_specificity)
        self._patterns = [(re.compile(translate(spec.pattern)), spec) for spec in ranked]
        self._default = TaskPolicySpec(pattern="*")
        self._found: dict[str, TaskPolicySpec] = {}

    def for_task(self, name: str) -> TaskPolicySpec:
        """Return the policy of the task; the default one (nothing declared, severity high) where no pattern matches."""
        spec = self._found.get(name)
        if spec is None:
            spec = self._look_up(name)
            # Unknown tasks may bring any number of names.
            if len(self._found) >= _CACHED_NAMES:
                self._found.clear()
            self._found[name] = spec
        return spec

    def _look_up(self, name: str) -> TaskPolicySpec:
        if (exact := self._exact.get(name)) is not None:
            return exact
        return next((spec for regex, spec in self._patterns if regex.match(name)), self._default)


def _specificity(spec: TaskPolicySpec) -> tuple[int, int, int, str]:
    literal = len(_WILDCARDS.sub("", spec.pattern))
    return (-literal, spec.pattern.count("*"), -len(spec.pattern), spec.pattern)


def _check_line(name: str, value: object, limit: int) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name}: {value!r} is not text")
    if len(value) > limit or not value.isprintable():
        raise ValueError(f"{name}: {value!r} is not one line of at most {limit} characters")


def _error_names(value: object) -> tuple[str, ...]:
    # A bare string would be taken for a list of letters.
    if isinstance(value, str) or not isinstance(value, list | tuple | set | frozenset):
        raise ValueError(f"safe_errors: {value!r} is not a list of error class names")
    for name in value:
        if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"safe_errors: {name!r} is not the name of an error class")
    return tuple(value) if isinstance(value, list | tuple) else tuple(sorted(value))
