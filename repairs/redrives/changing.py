"""Applying a redrive's changes to a message: another task's name, other keyword arguments; the original is kept."""

from __future__ import annotations

import json
from typing import Any

from celery.utils.saferepr import saferepr

from deadletters.journal.message import RawMessage
from opsconsole.core.redaction import decode_body
from repairs.redrives.requests import RedriveChanges

LONGEST_REPR = 1_024
"""As Celery itself cuts the texts of arguments that it puts into a message's headers."""


class NotPatchable(Exception):
    """The arguments are no JSON of Celery's second protocol, or have not what the patch wants to change."""


def changed_task(task: str, changes: RedriveChanges) -> str:
    """Return the name under which a task is sent."""
    return changes.tasks.get(task, task)


def changed_keywords(keywords: dict[str, Any], changes: RedriveChanges) -> dict[str, Any]:
    """Return patched keyword arguments, in their order; raises ``NotPatchable``."""
    for name in (*changes.remove, *changes.rename):
        if name not in keywords:
            raise NotPatchable(f"it has no keyword {name}")
    patched: dict[str, Any] = {}
    for name, value in keywords.items():
        if name in changes.remove:
            continue
        new = changes.rename.get(name, name)
        if new in patched:
            raise NotPatchable(f"the keyword {new} would be there twice")
        patched[new] = value
    return {**patched, **changes.set}


def changed_body(raw: RawMessage, changes: RedriveChanges) -> bytes:
    """Return a message's body with its keyword arguments patched; raises ``NotPatchable``.

    Values that are not touched are what a worker reads of the original: integers exact, fractions the same double.
    """
    if not changes.of_arguments:
        return raw.body
    decoded = decode_body(raw.body, raw.content_type or "", raw.content_encoding or "")
    codec = (raw.content_encoding or "utf-8").strip().lower()
    if decoded.error:
        raise NotPatchable("its arguments are no JSON")
    text = raw.body.decode("utf-8" if codec in ("binary", "ascii-8bit") else codec)
    document = json.loads(text)
    if not isinstance(document, list):
        raise NotPatchable("it is a message of Celery's first protocol")
    args, keywords, embed = document
    patched = [args, changed_keywords(keywords or {}, changes), embed]
    # Escaped, so that it is the same bytes in every encoding that JSON of Celery's comes in.
    return json.dumps(patched).encode("utf-8" if codec in ("binary", "ascii-8bit") else codec)


def changed_headers(headers: dict[str, Any], body: bytes, task: str, changes: RedriveChanges) -> dict[str, Any]:
    """Return headers that name the task as it is sent, and show the arguments that are sent."""
    changed = {**headers, "task": task}
    if changes.of_arguments and "kwargsrepr" in headers:
        changed["kwargsrepr"] = saferepr(json.loads(body)[1], LONGEST_REPR)
    return changed
