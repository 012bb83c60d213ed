"""Log lines that can be searched and cannot be forged: JSON for machines, one line each for people."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

from celery._state import get_current_task
from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

from opsconsole.core.request_id import current_request_id
from opsconsole.core.safe_text import mark_unsafe

# Attributes that libraries add to records. Celery's "data" has the arguments of the job: not for a log.
_LEFT_OUT = [*RESERVED_ATTRS, "data", "request", "server_time"]


class ContextFilter(logging.Filter):
    """Adds to each record the request and the Celery task it was written under, where there is one."""

    def filter(self, record: logging.LogRecord) -> bool:
        if request_id := current_request_id():
            record.request_id = request_id
        task = get_current_task()
        if task is not None and task.request.id:
            record.task_id = task.request.id
            record.task = task.name
        return True


class JsonLines(JsonFormatter):
    """One JSON object per record; everything outside ASCII is escaped, so a line is a line everywhere."""

    def __init__(self) -> None:
        super().__init__(
            "%(levelname)s %(name)s %(process)d %(message)s",
            rename_fields={"levelname": "level", "name": "logger"},
            reserved_attrs=_LEFT_OUT,
            timestamp="time",
        )


class ReadableLines(logging.Formatter):
    """One line per record for a person at a terminal; tracebacks follow, set off so that no text can pose as a line."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        head = f"{at}Z {record.levelname:<8} {record.name}: {record.getMessage()}"
        lines = [on_one_line(head) + _context(record)]
        if record.exc_info:
            lines += _set_off(self.formatException(record.exc_info))
        if record.stack_info:
            lines += _set_off(self.formatStack(record.stack_info))
        return "\n".join(lines)


def on_one_line(text: str) -> str:
    """Return ``text`` without line breaks and with every other character that deceives a reader marked."""
    return mark_unsafe(text).replace("\n", "\\n")


def _context(record: logging.LogRecord) -> str:
    found: dict[str, Any] = {name: getattr(record, name, "") for name in ("request_id", "task", "task_id")}
    words = " ".join(f"{name}={on_one_line(str(value))}" for name, value in found.items() if value)
    return f" [{words}]" if words else ""


def _set_off(text: str) -> list[str]:
    return [f"    | {on_one_line(line)}" for line in text.split("\n")]
