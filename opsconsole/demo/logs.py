"""Log lines of the demo's worker."""

from __future__ import annotations

import logging

LONGEST = 200


class OneLine(logging.Filter):
    """Leaves the first line of a record's text, and no traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = record.getMessage().split("\n", 1)[0][:LONGEST], ()
        record.exc_info = None
        record.exc_text = None
        return True
