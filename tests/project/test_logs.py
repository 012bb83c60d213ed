"""Log lines: what is in them, and that no text can pose as one."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest
from celery import Celery

from opsconsole.core.request_id import set_request_id
from opsconsole.logs import ContextFilter, JsonLines, ReadableLines


def record(message: str, *args: object, error: bool = False, **extra: object) -> logging.LogRecord:
    made = logging.getLogger("shop").makeRecord(
        "shop", logging.WARNING, __file__, 1, message, args, sys.exc_info() if error else None, extra=extra
    )
    assert ContextFilter().filter(made)
    return made


def as_json(made: logging.LogRecord) -> dict[str, Any]:
    line = JsonLines().format(made)
    assert line.isascii()
    assert line.isprintable(), "a line is one line, wherever it is read"
    parsed: dict[str, Any] = json.loads(line)
    return parsed


HOSTILE = "paid\n2026-01-01 00:00:00,000Z INFO shop: all is well \x1b[2J\x00\x85\u2028\u202e\ud800"


def test_a_message_cannot_pose_as_another_line() -> None:
    readable = ReadableLines().format(record("%s", HOSTILE))
    assert len(readable.splitlines()) == 1
    assert readable.isprintable()
    assert as_json(record("%s", HOSTILE))["message"] == HOSTILE


def test_a_traceback_cannot_pose_as_a_line() -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        made = record("failed", error=True)
    first, *rest = ReadableLines().format(made).splitlines()
    assert first.endswith("WARNING  shop: failed")
    assert rest
    assert all(line.startswith("    | ") and line.isprintable() for line in rest)
    assert "ValueError: paid\n" in as_json(made)["exc_info"]


def test_a_line_names_level_logger_process_time_and_what_was_added() -> None:
    parsed = as_json(record("%d letters", 3, letters=3))
    assert parsed["time"].endswith("+00:00")
    assert {key: parsed[key] for key in ("level", "logger", "message", "letters")} == {
        "level": "WARNING",
        "logger": "shop",
        "message": "3 letters",
        "letters": 3,
    }
    assert isinstance(parsed["process"], int)


def test_a_line_names_the_request_it_was_written_under() -> None:
    set_request_id("7c9e6679-7425-40de-944b-e07fc1f90ae7")
    try:
        made = record("hello")
    finally:
        set_request_id("")
    assert as_json(made)["request_id"] == "7c9e6679-7425-40de-944b-e07fc1f90ae7"
    assert ReadableLines().format(made).endswith("[request_id=7c9e6679-7425-40de-944b-e07fc1f90ae7]")
    assert "request_id" not in as_json(record("outside"))


def test_a_line_names_the_task_it_was_written_under() -> None:
    app = Celery("shop", set_as_current=False)
    made: list[logging.LogRecord] = []

    @app.task(name="shop.charge")
    def charge() -> None:
        made.append(record("charging"))

    charge.apply(task_id="4f1c").get()
    assert {key: as_json(made[0])[key] for key in ("task", "task_id")} == {"task": "shop.charge", "task_id": "4f1c"}
    assert ReadableLines().format(made[0]).endswith("[task=shop.charge task_id=4f1c]")
    assert "task_id" not in as_json(record("outside"))


def test_the_arguments_that_celery_adds_to_its_records_are_left_out() -> None:
    parsed = as_json(record("Task %s failed", "shop.charge", data={"args": "('4111 1111 1111 1111',)"}))
    assert "4111" not in json.dumps(parsed)


@pytest.mark.parametrize("value", [object(), {1: "x"}, b"\xff", float("nan"), {"deep": [object()]}])
def test_an_added_value_that_json_has_no_form_for_costs_no_line(value: object) -> None:
    line = JsonLines().format(record("hello", odd=value))
    assert '"message": "hello"' in line
