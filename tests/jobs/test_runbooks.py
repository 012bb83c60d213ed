"""Whoever is woken by a failed job of a built-in type is told what to do about it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as configured
from django.core.exceptions import ImproperlyConfigured

from deadletters.conf import OWN_TASK, published
from deadletters.drainer import policies
from deadletters.outcome import Effects
from opsconsole.jobs.kinds import BUILT_IN, kind_named
from repairs.reconciliation.schedule import TASK

pytestmark = pytest.mark.django_db
KINDS = [path.rpartition(".")[2] for path in BUILT_IN]


@pytest.mark.parametrize("name", KINDS)
def test_every_built_in_type_has_a_runbook_that_is_there(name: str) -> None:
    page, _, heading = kind_named(name).runbook.partition("#")
    text = (Path(configured.BASE_DIR) / page).read_text()
    assert re.search(rf"^## {heading}$", text, re.MULTILINE)


def test_where_the_docs_are_published_it_is_a_link(settings: Any) -> None:
    settings.OPSCONSOLE_DOCS_URL = "https://wiki.example/ops/"
    spec = policies().book().for_task("deliver_email")
    assert spec.runbook == "https://wiki.example/ops/runbooks.md#deliver_email"
    assert published("https://runbooks.example/mail") == "https://runbooks.example/mail"


def test_an_address_that_is_none_is_refused_by_name(settings: Any) -> None:
    settings.OPSCONSOLE_DOCS_URL = "javascript:alert(1)"
    with pytest.raises(ImproperlyConfigured, match="OPSCONSOLE_DOCS_URL"):
        published("docs/runbooks.md")


def test_the_consoles_own_task_is_harmless(settings: Any) -> None:
    """A sweep looks at what there is: one that was lost with its worker is no question for a person."""
    assert OWN_TASK == TASK
    assert policies().book().for_task(TASK).effects is Effects.NONE
    settings.OPSCONSOLE_TASK_POLICIES = [{"pattern": TASK, "effects": "outside"}]
    assert policies().book().for_task(TASK).effects is Effects.OUTSIDE, "what a project declares goes before"
