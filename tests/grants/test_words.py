"""Every permission and every verb of the audit trail has a sentence for people."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from grants.actions import Action
from grants.models import Verdict
from grants.words import DID, MAY, audit_words, may_words, target_words

ROOT = Path(__file__).parents[2]
APPS = ("grants", "incidents", "deadletters", "repairs")
VERBS = ("grants.", "tokens.", "queue.", "operations.", "repairs.", "dead-letters.", "holds.", "redrive.")


def _constants() -> Iterator[tuple[str, str]]:
    """Yield (file, value) of each text that is a module's constant."""
    for app in APPS:
        for file in (ROOT / app).rglob("*.py"):
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                    yield str(file.relative_to(ROOT)), str(node.value.value)


def _literals(name: str) -> Iterator[str]:
    """Yield each text that is given as that argument anywhere."""
    for app in APPS:
        for file in (ROOT / app).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.keyword) and node.arg == name and isinstance(node.value, ast.Constant):
                    yield str(node.value.value)


def test_every_permission_has_its_sentence() -> None:
    assert set(MAY) == set(Action)
    assert len(set(MAY.values())) == len(MAY), "two that read alike can't be told apart"


def test_every_verb_that_is_written_has_its_sentence() -> None:
    written = {value: file for file, value in _constants() if value.startswith(VERBS) and " " not in value}
    assert {value: file for value, file in written.items() if value not in DID} == {}
    assert set(DID) - set(written) <= {action.value for action in Action}
    assert len(written) > 10


def test_no_sentence_says_dead_letter() -> None:
    for text in (*MAY.values(), *DID.values(), *map(target_words, _literals("target_type"))):
        assert "letter" not in text, text
        assert "_" not in text, text


@pytest.mark.parametrize(
    ("action", "verdict", "said"),
    [
        ("dead-letters.discard", Verdict.ALLOWED, "gave a failed job up for good"),
        ("dead-letters.discard", Verdict.DENIED, "was not allowed to give a failed job up for good"),
        ("operations.incident_released", Verdict.ALLOWED, "gave an incident back"),
        ("later.release", Verdict.ALLOWED, "later.release"),
        ("later.release", Verdict.DENIED, "was refused later.release"),
    ],
)
def test_a_row_says_what_was_done_or_refused(action: str, verdict: Verdict, said: str) -> None:
    assert audit_words(action, verdict) == said


def test_a_name_that_is_none_has_no_sentence() -> None:
    assert may_words("nothing.at-all") == ""
