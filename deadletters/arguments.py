"""Whether a job's arguments fit the task as it is today.

A worker publishes the signature of each of its tasks as a short JSON text; the console compares stored arguments with
it before it sends them again. A retry that could only end in a ``TypeError`` is refused with the reason.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import Parameter
from typing import Any

from opsconsole.core.safe_text import safe_text

_SHOWN_NAME = 80
_SHOWN_NAMES = 5
LONGEST_SHAPE = 300
NO_JSON = "-"
"""The shape of arguments that nobody here can read: another serializer's, or no message of Celery's second protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSignature:
    """What a task's function can be called with."""

    positional: tuple[str, ...] = ()  # in order; the first of them without a default
    positional_only: int = 0  # how many of them cannot be given by name
    required: int = 0  # how many of them have no default
    varargs: bool = False
    kwonly: tuple[str, ...] = ()
    kwonly_required: tuple[str, ...] = ()
    varkw: bool = False
    max_retries: int | None = None  # automatic retries of the task; None where it has no limit, or it is not known


def describe_signature(task: Any) -> str:
    """Return the signature of a Celery task (or a plain function) as compact JSON; empty where it cannot be known.

    A bound task's ``self`` is not part of it. Never raises, since a worker calls it for tasks it has never seen.
    """
    try:
        parameters = inspect.signature(getattr(task, "run", task)).parameters.values()
    except Exception:  # noqa: BLE001 - inspect runs code of whoever wrote the task
        return ""
    positional = [
        each for each in parameters if each.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ]
    kwonly = [each for each in parameters if each.kind is Parameter.KEYWORD_ONLY]
    described = {
        "positional": [each.name for each in positional],
        "positional_only": sum(each.kind is Parameter.POSITIONAL_ONLY for each in positional),
        "required": sum(each.default is Parameter.empty for each in positional),
        "varargs": any(each.kind is Parameter.VAR_POSITIONAL for each in parameters),
        "kwonly": [each.name for each in kwonly],
        "kwonly_required": [each.name for each in kwonly if each.default is Parameter.empty],
        "varkw": any(each.kind is Parameter.VAR_KEYWORD for each in parameters),
        "max_retries": _max_retries(task),
    }
    kept = {name: value for name, value in described.items() if value or (name == "max_retries" and value is not None)}
    return json.dumps(kept, separators=(",", ":"))


def _max_retries(task: Any) -> int | None:
    try:
        most = task.max_retries
    except Exception:  # noqa: BLE001 - a property of whoever wrote the task
        return None
    return most if type(most) is int and 0 <= most < 1_000_000 else None


def check_arguments(signature_text: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return what of the arguments does not fit the signature, such as ``missing argument 'order_id'``.

    None if they fit, and where the signature is not known: that is no reason to refuse.
    """
    signature = parse_signature(signature_text) if signature_text else None
    if signature is None:
        return None
    complaints = [
        *_surplus(signature, args),
        *_clashes(signature, args, kwargs),
        *_strangers(signature, kwargs),
        *_gaps(signature, args, kwargs),
    ]
    return "; ".join(complaints) or None


@dataclass(frozen=True, slots=True)
class Shape:
    """What a signature is compared with: how many arguments are given by position, and which by name."""

    positional: int
    names: tuple[str, ...]

    def misfit(self, signature_text: str) -> str | None:
        """Return what ``check_arguments`` would say of arguments of this shape."""
        return check_arguments(signature_text, range(self.positional), dict.fromkeys(self.names))


def describe_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the shape of arguments as short JSON, such as ``[2,"order"]``; "" where that would be too long."""
    if not kwargs:
        return f"[{len(args)}]"
    text = json.dumps([len(args), *sorted(kwargs)], separators=(",", ":"))
    # With a NUL in a name no database would take it; escaped it is six characters that are taken.
    return text if len(text) <= LONGEST_SHAPE else ""


@lru_cache(maxsize=2048)
def parse_shape(text: str) -> Shape | None:
    """Read what ``describe_arguments`` wrote; None for "" and ``NO_JSON``."""
    try:
        positional, *names = json.loads(text)
    except (ValueError, TypeError):
        return None
    return Shape(positional, tuple(names))


@lru_cache(maxsize=2048)
def parse_signature(text: str) -> TaskSignature | None:
    """Read what ``describe_signature`` wrote; None for anything else, such as a later version's text."""
    try:
        read: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in json.loads(text).items()}
        signature = TaskSignature(**read)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    lists = (signature.positional, signature.kwonly, signature.kwonly_required)
    counts = (signature.positional_only, signature.required, signature.max_retries or 0)
    well_formed = all(isinstance(names, tuple) and all(isinstance(name, str) for name in names) for names in lists)
    return signature if well_formed and all(isinstance(count, int) for count in counts) else None


def _surplus(signature: TaskSignature, args: Sequence[Any]) -> list[str]:
    most = len(signature.positional)
    if signature.varargs or len(args) <= most:
        return []
    return [f"{len(args)} positional arguments were given and the task takes {f'at most {most}' if most else 'none'}"]


def _clashes(signature: TaskSignature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    by_position = signature.positional[signature.positional_only : len(args)]
    twice = [name for name in by_position if name in kwargs]
    return [f"{_named('argument', twice)} {_was(twice)} given by position and by name"] if twice else []


def _strangers(signature: TaskSignature, kwargs: Mapping[str, Any]) -> list[str]:
    if signature.varkw:
        return []
    known = {*signature.positional[signature.positional_only :], *signature.kwonly}
    unknown = [name for name in kwargs if name not in known]
    return [f"unexpected {_named('argument', unknown)}"] if unknown else []


def _gaps(signature: TaskSignature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    by_name_only = signature.positional_only
    missing = [
        name
        for position, name in enumerate(signature.positional[: signature.required])
        if position >= len(args) and (position < by_name_only or name not in kwargs)
    ]
    missing += [name for name in signature.kwonly_required if name not in kwargs]
    return [f"missing {_named('argument', missing)}"] if missing else []


def _named(word: str, names: Sequence[str]) -> str:
    shown = [f"'{safe_text(str(name), _SHOWN_NAME)}'" for name in names[:_SHOWN_NAMES]]
    if len(names) > _SHOWN_NAMES:
        shown.append(f"{len(names) - _SHOWN_NAMES} more")
    listed = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"{word if len(names) == 1 else f'{word}s'} {listed}"


def _was(names: Sequence[str]) -> str:
    return "was" if len(names) == 1 else "were"
