"""Any text, made storable and readable on every database, and visibly marked where it had to be altered.

PostgreSQL refuses NUL and lone surrogates, SQLite keeps them; a terminal obeys escape codes, and a browser reorders a
line that holds a bidirectional override. Each such character is replaced by its code point between guillemets
(``‹U+0000›``), on both databases alike, so that a failure never goes unrecorded and nobody is shown what is not there.
"""

from __future__ import annotations

import re
from hashlib import sha256

# C0 but tab and newline, DEL and C1, characters without width that make two ids look alike (not the joiners, which
# scripts and emoji need), line separators, bidirectional embeddings, overrides and isolates, surrogates, tags.
_UNSAFE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u2028-\u202e\u2060\u2066-\u206f\ufeff\ufff9-\ufffb"
    r"\ud800-\udfff\U000e0000-\U000e007f]"
)
_HASH_DIGITS = 16
_LEAST_ROOM_FOR_BOTH_ENDS = 16


def safe_text(value: str, limit: int) -> str:
    """Return ``value`` with unsafe characters marked and at most ``limit`` characters long.

    What is too long loses its middle, because an error says what happened in its first lines and where in its last; a
    note in between gives the number of characters left out. Clean text that fits is returned as it is, and applying
    the function twice changes nothing more.
    """
    if type(value) is not str:
        value = str.__str__(value)  # a subclass may carry promises of its own, such as "this is safe HTML"
    if len(value) <= limit:
        # The second question spares nearly every traceback the search below.
        if value.isprintable() or value.replace("\n", "").replace("\t", "").isprintable():
            return value
        marked = mark_unsafe(value)
        if len(marked) <= limit:
            return marked
    return cut_middle(value, value, len(value), limit)


def mark_unsafe(value: str) -> str:
    """Return ``value``, at its full length, with each unsafe character replaced by its code point."""
    return _UNSAFE.sub(_mark, value)


def cut_middle(head: str, tail: str, total: int, limit: int) -> str:
    """Join the beginning of ``head`` and the end of ``tail`` around a note of what was left out of ``total``.

    Both are unmarked texts, each either the whole or at least ``limit`` long; the result is marked and fits ``limit``.
    """
    room = limit - len(_note(total, " "))
    if room < _LEAST_ROOM_FOR_BOTH_ENDS:
        return f"{mark_unsafe(head[: _fitting(head, limit - 1)])}…"[: max(limit, 0)]
    beginning = head[: _fitting(head, room - room // 2)]
    end = tail[len(tail) - _fitting(tail[-(room // 2) :][::-1], room // 2) :]
    left_out = max(total - len(beginning) - len(end), 1)
    line_break = "\n" if "\n" in beginning or "\n" in end else " "
    return f"{mark_unsafe(beginning)}{_note(left_out, line_break)}{mark_unsafe(end)}"


def shorten(value: str, limit: int) -> str:
    """Return an id that fits ``limit``, with a hash of the original beside it wherever it had to be altered (C10).

    Two ids that differ anywhere stay different, however long their common beginning is. The answer depends on nothing
    but the arguments; an id that is clean and fits is returned as it is.
    """
    if len(value) <= limit and (value.isprintable() or not _UNSAFE.search(value)):
        return value
    digest = sha256(value.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_DIGITS]
    room = limit - _HASH_DIGITS - 1
    if room < 1:
        return digest[: max(limit, 0)]
    return f"{mark_unsafe(value[:room])[:room]}~{digest}"


def _mark(match: re.Match[str]) -> str:
    return f"‹U+{ord(match[0]):04X}›"


def _note(left_out: int, line_break: str) -> str:
    return f"{line_break}‹… {left_out} characters left out …›{line_break}"


def _fitting(value: str, room: int) -> int:
    """Return how many characters from the start of ``value`` fit ``room`` once the unsafe ones are marked."""
    piece = value[: max(room, 0)]
    taken = used = 0
    for match in _UNSAFE.finditer(piece):
        plain, width = match.start() - taken, len(_mark(match))
        if used + plain + width > room:
            return taken + min(plain, room - used)
        taken, used = match.end(), used + plain + width
    return min(len(piece), taken + max(room - used, 0))
