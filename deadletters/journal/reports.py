"""Describes an exception where it happened: its names, its text, and the innermost line of the user's own code."""

from __future__ import annotations

import os
import sysconfig
import traceback as tracebacks
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, TracebackType
from typing import Any, Final

from deadletters.journal.events import ErrorReport

MAX_TRACEBACK: Final = 64 << 10
MAX_TEXT: Final = 16 << 10
_MAX_CHAIN: Final = 16
_MAX_CLASSES: Final = 64
_HERE: Final = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARIES: Final = tuple(
    {
        os.path.join(os.path.realpath(path), "")
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        if (path := sysconfig.get_paths().get(name))
    }
)
_INSTALLED: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def report_error(
    exception: BaseException, *, traceback_text: str | None = None, task_module: str = "", original: Any = None
) -> ErrorReport:
    """Describe ``exception``. Never raises for a hostile one.

    ``original`` is the exception before Celery replaced it by something that can be pickled, if it is still at hand.
    Code in the top-level package of ``task_module`` counts as the user's own even where it was installed.
    """
    name = getattr(exception, "exc_cls_name", None)
    if isinstance(name, str) and isinstance(getattr(exception, "exc_module", None), str):
        if isinstance(original, BaseException) and type(original).__name__ == name:
            exception = original
        else:
            qualified = _join(exception.exc_module, name)  # type: ignore[attr-defined]
            return ErrorReport(
                error_class=qualified,
                text=shorten(text_of(exception), MAX_TEXT),
                traceback=shorten(_traceback_text(exception, traceback_text), MAX_TRACEBACK),
                call_site=call_site(exception.__traceback__, task_module),
                classes=(qualified,),
            )
    return ErrorReport(
        error_class=qualified_name(type(exception)),
        text=shorten(text_of(exception), MAX_TEXT),
        traceback=shorten(_traceback_text(exception, traceback_text), MAX_TRACEBACK),
        call_site=call_site(exception.__traceback__, task_module),
        classes=class_names(exception),
    )


def qualified_name(kind: type) -> str:
    """Return ``module.Class``, and just the class for Python's own."""
    return _join(str(getattr(kind, "__module__", "")), str(getattr(kind, "__qualname__", "?")))


def text_of(exception: BaseException) -> str:
    """Return what the exception says about itself, whatever its ``__str__`` does."""
    for describe in (str, repr):
        try:
            text = describe(exception)
        except Exception:  # noqa: BLE001, S112  a foreign __str__ may raise anything
            continue
        if isinstance(text, str):
            return text
    return "<an error that cannot be printed>"


def shorten(text: str, limit: int) -> str:
    """Keep the head and the tail of a text longer than ``limit`` characters."""
    if len(text) <= limit:
        return text
    cut = f"\n[... {len(text) - limit} characters left out ...]\n"
    head = (limit - len(cut)) // 2
    return text[:head] + cut + text[-(limit - len(cut) - head) :]


def class_names(exception: BaseException) -> tuple[str, ...]:
    """Return the names of the error's classes, then those of what caused it and of what was being handled."""
    names: dict[str, None] = {}
    for link in _chain(exception):
        for kind in type(link).__mro__[:-1]:
            names.setdefault(qualified_name(kind))
            if len(names) >= _MAX_CLASSES:
                return tuple(names)
    return tuple(names)


def call_site(traceback: TracebackType | None, task_module: str = "") -> str:
    """Return the innermost frame of the user's own code as ``module:function``, or "" where there is none."""
    package = task_module.partition(".")[0]
    found: tuple[str, CodeType] | None = None
    while traceback is not None:
        frame = traceback.tb_frame
        module = frame.f_globals.get("__name__") or ""
        if not isinstance(module, str):
            module = ""
        if not _is_library(frame.f_code.co_filename) or (
            package and package not in ("celery", "kombu", "billiard") and module.partition(".")[0] == package
        ):
            found = module, frame.f_code
        traceback = traceback.tb_next
    return f"{found[0]}:{found[1].co_qualname}" if found else ""


@lru_cache(maxsize=4096)
def _is_library(filename: str) -> bool:
    if filename.startswith("<"):
        return True
    path = os.path.realpath(filename)
    return path.startswith((*_LIBRARIES, _HERE)) or any(part in path for part in _INSTALLED)


def _chain(exception: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting = [exception]
    while waiting and len(seen) < _MAX_CHAIN:
        link = waiting.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        if link.__cause__ is not None:
            waiting.append(link.__cause__)
        if link.__context__ is not None and not link.__suppress_context__:
            waiting.append(link.__context__)


def _traceback_text(exception: BaseException, given: str | None) -> str:
    if given is not None:
        return given
    if exception.__traceback__ is None:
        return ""
    try:
        return "".join(tracebacks.format_exception(exception))
    except Exception:  # noqa: BLE001  formatting calls the foreign __str__
        return "".join(tracebacks.format_tb(exception.__traceback__))


def _join(module: str, name: str) -> str:
    return name if module in ("", "builtins", "exceptions") else f"{module}.{name}"
