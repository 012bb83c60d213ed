"""``manage.py demo``."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.core.management import call_command
from django.test import override_settings

from opsconsole.demo import tasks
from opsconsole.demo.flaky import Services
from opsconsole.demo.folder import DemoFolder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[DemoFolder]:
    with override_settings(VAR_DIR=tmp_path):
        tasks.demo_folder.cache_clear()
        yield tasks.demo_folder()
    tasks.demo_folder.cache_clear()


def demo(*arguments: str) -> str:
    out = io.StringIO()
    call_command("demo", *arguments, stdout=out)
    return out.getvalue()


def test_healing_and_breaking_say_what_follows(folder: DemoFolder) -> None:
    folder.begin()
    assert "incidents close by themselves" in demo("heal")
    assert "well already" in demo("heal")
    assert "40 receipts" in demo("break")
    assert "broken already" in demo("break")


def test_without_services_it_says_how_to_start_them(folder: DemoFolder) -> None:
    assert "manage.py up" in demo("heal")
    assert "not running" in demo("status")


def test_the_status_shows_what_the_payment_service_has_taken(folder: DemoFolder) -> None:
    services = Services(folder)
    try:
        folder.note_request("charge-1", is_answered=False)
        text = demo("status")
        assert "broken" in text
        assert "refuses connections" in text
        assert "charge-1" in text
        assert "never answered" in text
        folder.set_broken(False)
        services.look()
        folder.note_request("charge-1", is_answered=True)
        assert "2 times in all" in demo("status")
    finally:
        services.stop()


def test_the_status_can_be_read_by_a_program(folder: DemoFolder) -> None:
    services = Services(folder)
    try:
        status = json.loads(demo("status", "--json"))
    finally:
        services.stop()
    assert status["is_broken"] is True
    assert status["services"] == {"mail": False, "payments": True, "desk": True}
