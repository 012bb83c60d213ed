"""What is known about a task beforehand, and which of several patterns counts."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadletters.grouping import GroupingMode
from deadletters.outcome import Effects
from deadletters.policy import PolicyBook, Severity, TaskPolicySpec


def book(*patterns: str) -> PolicyBook:
    """A book of policies that are empty but for their pattern."""
    return PolicyBook(TaskPolicySpec(pattern=pattern) for pattern in patterns)


def test_a_task_without_a_policy_has_nothing_declared() -> None:
    spec = book("shop.*").for_task("mail.send")
    assert (spec.effects, spec.severity, spec.safe_errors, spec.ignore) == (
        Effects.UNDECLARED,
        Severity.HIGH,
        (),
        False,
    )
    assert (spec.max_age_seconds, spec.grouping, spec.team, spec.runbook) == (None, None, "", "")


@pytest.mark.parametrize(
    ("task", "pattern"),
    [
        ("shop.mail.send", "shop.mail.send"),
        ("shop.mail.other", "shop.mail.*"),
        ("shop.pay", "shop.*"),
        ("other", "*"),
        ("shop.mail.s", "shop.mail.?"),
        ("SHOP.pay", "*"),
    ],
)
def test_the_most_specific_pattern_wins(task: str, pattern: str) -> None:
    assert book("*", "shop.*", "shop.mail.*", "shop.mail.?", "shop.mail.send").for_task(task).pattern == pattern


PATTERNS = st.lists(st.text("ab.*?", min_size=1, max_size=5), max_size=6, unique=True)


@given(PATTERNS, st.text("ab.", max_size=5), st.randoms())
def test_the_order_in_which_patterns_were_written_never_matters(patterns: list[str], task: str, random: Any) -> None:
    found = book(*patterns).for_task(task).pattern
    random.shuffle(patterns)
    assert book(*patterns).for_task(task).pattern == found
    matching = [pattern for pattern in patterns if fnmatchcase(task, pattern)]
    assert found in matching if matching else found == "*"
    assert found == task if task in patterns else True


def test_looking_up_twice_gives_the_same_policy() -> None:
    policies = book("shop.*")
    assert policies.for_task("shop.pay") is policies.for_task("shop.pay")


def test_any_number_of_unknown_names_takes_bounded_memory() -> None:
    policies = book("shop.*")
    for number in range(10_000):
        policies.for_task(f"shop.{number}")
    assert len(policies._found) <= 4_096


def test_a_pattern_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pattern: 'shop\.\*' is given twice"):
        book("shop.*", "mail", "shop.*")


def test_values_may_be_given_as_they_are_written_in_settings() -> None:
    spec = TaskPolicySpec.from_mapping(
        "shop.*",
        {
            "team": "shop",
            "severity": "low",
            "effects": "outside",
            "grouping": "job",
            "safe_errors": ["CardDeclined", "shop.errors.Closed"],
            "runbook": "https://wiki.example/shop",
            "max_age_seconds": 3600,
            "ignore": True,
        },
    )
    assert (spec.severity, spec.effects, spec.grouping) == (Severity.LOW, Effects.OUTSIDE, GroupingMode.JOB)
    assert spec.safe_errors == ("CardDeclined", "shop.errors.Closed")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pattern", ""),
        ("pattern", " shop.*"),
        ("pattern", "a\nb"),
        ("pattern", "x" * 256),
        ("pattern", 5),
        ("team", None),
        ("team", "a\x00"),
        ("severity", "urgent"),
        ("runbook", "javascript:alert(1)"),
        ("runbook", "see the wiki"),
        ("runbook", "docs/../secrets.md"),
        ("runbook", "docs/runbooks.md\n"),
        ("runbook", "/docs/runbooks.md"),
        ("effects", "some"),
        ("safe_errors", "ValueError"),
        ("safe_errors", [ValueError]),
        ("safe_errors", ["Value Error"]),
        ("safe_errors", [""]),
        ("safe_errors", None),
        ("ignore", "yes"),
        ("ignore", 1),
        ("max_age_seconds", 0),
        ("max_age_seconds", -1),
        ("max_age_seconds", True),
        ("max_age_seconds", 1.5),
        ("max_age_seconds", "1h"),
        ("grouping", "task"),
    ],
)
def test_nonsense_is_refused_with_the_field_and_the_value(field: str, value: Any) -> None:
    """SEC-01: a runbook is a link, so it must be one that runs nothing."""
    with pytest.raises(ValueError, match=rf"^{field}: ") as refused:
        TaskPolicySpec(**{"pattern": "shop.*", field: value})
    named = value[0] if isinstance(value, list) else value
    assert repr(named) in str(refused.value)


def test_a_misspelt_field_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^efects: no such field in the policy of 'shop\.\*'"):
        TaskPolicySpec.from_mapping("shop.*", {"efects": "none"})
