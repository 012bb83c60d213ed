"""What of a job's arguments and errors may be shown: readable, bounded, and without the secrets.

Two doors: arguments are read as a structure, where a secret is known by the name of its key; free text is read by
patterns, where a secret is known by what stands before it or by its own form. Neither ever raises, because they stand
between a failure and its record. What comes out is storable on every database (``safe_text``).

Bodies are decoded here with the plain JSON decoder. kombu's own turns ``__type__`` envelopes into objects and raises
for one it does not know, and any other content type could run code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date, time, timedelta
from decimal import Decimal
from hashlib import sha256
from json.encoder import encode_basestring
from typing import Any
from uuid import UUID

from opsconsole.core.safe_text import cut_middle, safe_text

DEFAULT_PATTERNS: tuple[str, ...] = (
    "password",
    "passwd",
    "passphrase",
    "passcode",
    "pass",
    "pwd",
    "pin",
    "secret",
    "token",
    "api_key",
    "access_key",
    "private_key",
    "signing_key",
    "encryption_key",
    "authorization",
    "auth",
    "bearer",
    "credential",
    "cookie",
    "session",
    "csrf",
    "jwt",
    "otp",
    "credit",
    "card_number",
    "cvv",
    "cvc",
    "ssn",
)
"""Names of what is never shown. Case and separators do not matter; one of up to four letters must be a whole word."""

REDACTED = "[redacted]"
MAX_DEPTH = 100
"""The deepest nesting of a message body that is read, the body's own list counted."""

_SHOWN_DEPTH = 32
_SHOWN_STRING = 2_000
# A secret cut in two is no longer recognised, so more is redacted than is shown.
_MARGIN = 4_096
_SHORT_NAME = 4
_SHORT_ENOUGH = 200
_CACHED_NAMES = 4_096


# --- free text -------------------------------------------------------------------------------------------------------

# A name, a possible quote or bracket, and what makes a pair of it; "==", "::" and "://" do not.
_PAIR = re.compile(r"""(?<![\w.\-])([\w.\-]++)(?:\\{0,3}["'])?(?:\[?\])?[ \t]*(?:=>|:=|:(?![:/])|=(?!=))[ \t]*""")
_TAG = re.compile(r"<([\w.:\-]++)[^<>]{0,200}>")
_FLAG = re.compile(r"""(?<![\w\-])(--?[a-z][\w\-]*+)(?:["'],)?[ \t]+""", re.IGNORECASE)
# The first of a pair, as a list of headers is printed: ('password', 'x').
_MEMBER = re.compile(r"""(?<=[(\[])["']([\w.\-]++)["'],[ \t]*""")
# What a database says of a row that it refuses: Key (email, password)=(a@b, x) already exists.
_ROW = re.compile(r"\(([^()]{1,1000})\)=\([^()]*\)")
_VALUE = re.compile(
    r"""[bru]{0,2}"(?:[^"\\]++|\\[\s\S])*+(?:"|\Z)"""
    r"""|[bru]{0,2}'(?:[^'\\]++|\\[\s\S])*+(?:'|\Z)"""
    r"""|(\\{1,3}["'])[\s\S]{0,4000}?\1"""
    r"""|[\[({][^\[\](){}]{0,2000}[\])}]"""
    r"""|(?:(?:bearer|basic|digest|token|negotiate)[ \t]+)?[^\s,;&)}\]"'<>]+""",
    re.IGNORECASE,
)
_HEADER_LINE = re.compile(r"""((?:proxy-)?authorization|(?:set-)?cookie)([ \t]*:[ \t]*)(?=[^\s"'])([^\r\n"']+)""", re.I)
_SCHEME = re.compile(r"\b(bearer|basic)([ \t]+)([a-z0-9._~+/=\-]{8,})", re.I)
_URL_LOGIN = re.compile(r"""(://[^\s/:@"'<>]{0,256}:)(?!\d{1,5}(?:[/?\#\s]|$))[^\s"'<>]{1,2048}@""")
_URL_TOKEN = re.compile(r"(://)[\w.~%\-]{20,256}(?=@)")
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----[\s\S]*?"
    r"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----|\Z)"
)
_PRIVATE_KEY_TAIL = re.compile(r"\A[\s\S]{0,20000}?-----END [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----")
_KNOWN_FORMS = re.compile(
    r"(?<![A-Za-z0-9])eyJ[\w-]{5,}+\.[\w-]{5,}+(?:\.[\w-]*)?"  # JSON web token
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"  # AWS
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}"
    r"|\bxox[abeoprs]-[\w-]{10,}"  # Slack
    r"|\b[srp]k_(?:live|test)_[A-Za-z0-9]{10,}|\bsk-[\w-]{20,}"
    r"|\bAIza[\w-]{30,}|\bSG\.[\w-]{16,}\.[\w-]{16,}"
)
_FORM_HINTS = (
    "eyJ", "AKIA", "ASIA", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "xox",
    "k_live_", "k_test_", "sk-", "AIza", "SG.",
)  # fmt: skip
_DIGITS_HINT = re.compile(r"\d{4}[ -]?\d{4}")
_DIGITS = re.compile(r"(?<![\d.])\d(?:[ -]?\d){12,18}(?!\d)")
# What follows a name without being a secret: an absence, a source line's call or attribute, our own mark.
_HARMLESS = re.compile(r"(?:none|null|nil|true|false|''|\"\"|\[redacted\]|self\..*|[a-z_.]+\()\Z", re.I)


class Redactor:
    """Shows arguments and error texts without their secrets.

    ``patterns`` are names of keys whose value is never shown, ``max_length`` bounds every answer in characters. One
    instance serves a whole process; it may be used by several threads.
    """

    def __init__(self, patterns: Iterable[str] = DEFAULT_PATTERNS, max_length: int = 8_000) -> None:
        names = [patterns] if isinstance(patterns, str) else list(patterns)
        plain = [_plain(name) for name in names]
        for name, letters in zip(names, plain, strict=True):
            if not letters:
                raise ValueError(f"patterns: {name!r} has no letter or digit, so it would match every name")
        if max_length < 1:
            raise ValueError(f"max_length: {max_length!r} is not a positive number of characters")
        self._max_length = max_length
        self._short = frozenset(letters for letters in plain if len(letters) <= _SHORT_NAME)
        self._long = tuple(letters for letters in plain if len(letters) > _SHORT_NAME)
        self._known_names: dict[str, bool] = {}
        self._hints = (*plain, "bearer", "basic", "cookie", "authorization")

    def preview(self, args: object, kwargs: object, *, names: Sequence[str] = (), limit: int | None = None) -> str:
        """Return a job's arguments as one would write the call, values as JSON: ``42, "a", to="x", pin="[redacted]"``.

        ``names`` are the task's positional parameter names, where they are known, so that a secret passed by position
        is recognised as well. Numbers are exact whatever their size.
        """
        size = self._max_length if limit is None else limit
        if (
            not kwargs
            and not names
            and type(args) is list
            and len(args) <= _FEW <= size // 12
            and all(map(_is_small, args))
        ):
            # A few ids, as many calls have nothing else: there is nothing to hide or to shorten in them.
            return ", ".join(map(str, args))
        try:
            shown = _Preview(self, size, strings=False).call(args, kwargs, names)
            if self._is_suspicious(shown):
                shown = _Preview(self, size, strings=True).call(args, kwargs, names)
            if len(shown) > size:
                shown = f"{shown[: max(size - len(_MORE), 0)]}{_MORE}"
            return safe_text(shown, size)
        except Exception as error:  # noqa: BLE001 - an argument that cannot be shown must not cost the letter
            return safe_text(f"[arguments could not be shown: {type(error).__name__}]", size)

    def text(self, error_text: str, *, limit: int | None = None) -> str:
        """Return free text without the secrets in it, its middle left out where it is longer than ``limit``."""
        size = self._max_length if limit is None else limit
        try:
            if len(error_text) <= size + 2 * _MARGIN:
                return safe_text(self.redact(error_text), size)
            head = self.redact(error_text[: size + _MARGIN])
            tail = self.redact(error_text[-(size + _MARGIN) :])
            return cut_middle(head[:size], tail[-size:], len(error_text), size)
        except Exception as error:  # noqa: BLE001 - as above
            return safe_text(f"[text could not be shown: {type(error).__name__}]", size)

    def redact(self, value: str) -> str:
        """Return ``value`` at its full length without secrets; neither bounded nor made storable."""
        lowered = value.lower()
        if self._has_hint(lowered):
            if "authorization" in lowered or "cookie" in lowered:
                value = _HEADER_LINE.sub(rf"\1\2{REDACTED}", value)
            if "bearer" in lowered or "basic" in lowered:
                value = _SCHEME.sub(_hide_credentials, value)
            if ":" in value or "=" in value:
                value = self._hide_values(_PAIR, value)
            if "-" in value:
                value = self._hide_values(_FLAG, value)
            if "<" in value:
                value = self._hide_values(_TAG, value)
            if "(" in value or "[" in value:
                value = self._hide_values(_MEMBER, value)
            if ")=(" in value:
                value = _ROW.sub(self._hide_row, value)
        if "://" in value and "@" in value:
            value = _URL_LOGIN.sub(rf"\1{REDACTED}@", value)
            value = _URL_TOKEN.sub(rf"\1{REDACTED}", value)
        if "PRIVATE KEY" in value:
            value = _PRIVATE_KEY.sub(REDACTED, value)
            value = _PRIVATE_KEY_TAIL.sub(REDACTED, value)
        if _has_known_form(value):
            value = _KNOWN_FORMS.sub(REDACTED, value)
        if _DIGITS_HINT.search(value):
            value = _DIGITS.sub(_hide_card, value)
        return value

    def _has_hint(self, lowered: str) -> bool:
        """Say whether anything in the text can be a secret's name at all; most texts are done with here."""
        joined = lowered.replace("_", "").replace("-", "").replace(" ", "").replace(".", "")
        for hint in self._hints:  # noqa: SIM110 - any() takes twice as long, and every text passes here
            if hint in joined:
                return True
        return False

    def _hide_values(self, names: re.Pattern[str], value: str) -> str:
        """Replace what stands after each secret name that ``names`` finds."""
        parts: list[str] = []
        done = 0
        for match in names.finditer(value):
            if match.start() < done or not self._ends_a_secret_name(match):
                continue
            secret = _VALUE.match(value, match.end())
            if secret is None or _is_harmless(match[1], secret[0]):
                continue
            quote = _QUOTE.match(secret[0])
            parts += (value[done : match.end()], f"{quote[1]}{REDACTED}{quote[1]}" if quote else REDACTED)
            done = secret.end()
        return "".join((*parts, value[done:])) if parts else value

    def _hide_row(self, match: re.Match[str]) -> str:
        names = match[1].split(",")
        is_secret = any(self.is_secret_name(name.strip(' "')) for name in names)
        return f"({match[1]})=({REDACTED})" if is_secret else match[0]

    def _ends_a_secret_name(self, match: re.Match[str]) -> bool:
        if self.is_secret_name(match[1]):
            return True
        # "api key: x" is written with a space as well.
        start = match.start()
        if start < 2 or match.string[start - 1] != " ":
            return False
        before = match.string[max(0, start - 20) : start - 1].rpartition(" ")[2]
        return self.is_secret_name(f"{before}_{match[1]}") and not self.is_secret_name(before)

    def is_secret_name(self, name: str) -> bool:
        """Say whether the value under ``name`` is never shown."""
        known = self._known_names.get(name)
        if known is None:
            known = self._judge_name(name[:_SHORT_ENOUGH])
            if len(self._known_names) >= _CACHED_NAMES:
                self._known_names.clear()
            if len(name) <= _SHORT_ENOUGH:
                self._known_names[name] = known
        return known

    def _judge_name(self, name: str) -> bool:
        letters = _plain(name)
        if letters in self._short or any(pattern in letters for pattern in self._long):
            return True
        return any(word.lower() in self._short for word in _WORDS.findall(name))

    def _is_suspicious(self, value: str) -> bool:
        lowered = value.lower()
        return (
            self._has_hint(lowered)
            or "://" in value
            or "PRIVATE KEY" in value
            or _has_known_form(value)
            or (_DIGITS_HINT.search(value) is not None and _DIGITS.sub(_hide_card, value) != value)
        )


_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SEPARATORS = re.compile(r"[\W_]+")


def _plain(name: str) -> str:
    return _SEPARATORS.sub("", name).lower()


_QUOTE = re.compile(r"""[bru]{0,2}(\\{0,3}["'])""", re.IGNORECASE)


def _is_harmless(name: str, value: str) -> bool:
    # "max_tokens=4096" is how many, not which.
    if _HARMLESS.match(value) or value == name:
        return True
    return value.isdigit() and name.lower().endswith("tokens")


def _has_known_form(value: str) -> bool:
    for hint in _FORM_HINTS:  # noqa: SIM110 - as in _has_hint
        if hint in value:
            return True
    return False


def _hide_credentials(match: re.Match[str]) -> str:
    # "Basic authentication failed" is a sentence, not a header.
    return match[0] if match[3].isalpha() and match[3].islower() else f"{match[1]}{match[2]}{REDACTED}"


def _hide_card(match: re.Match[str]) -> str:
    return REDACTED if _is_card_number(match[0]) else match[0]


_CARD_NUMBERS = re.compile(
    r"4(?:\d{12}|\d{15})|5[1-5]\d{14}|2(?:2[2-9]|[3-6]\d|7[01])\d{13}|3[47]\d{13}|3(?:0[0-5]|[689]\d)\d{11}"
    r"|6(?:011|5\d\d|4[4-9]\d)\d{12}|35\d{14}|62\d{14,17}"
)


def _is_card_number(text: str) -> bool:
    """Say whether this is a payment card's number: its issuer's prefix, length and check digit (ISO/IEC 7812)."""
    digits = text.replace(" ", "").replace("-", "")
    if not _CARD_NUMBERS.fullmatch(digits):
        return False
    doubled = (sum(divmod(2 * int(digit), 10)) for digit in digits[-2::-2])
    return (sum(doubled) + sum(int(digit) for digit in digits[-1::-2])) % 10 == 0


# --- arguments -------------------------------------------------------------------------------------------------------


_MORE = " … more left out"
_FEW = 8  # times twelve characters


def _is_small(value: object) -> bool:
    """Say whether this is a number too short to be a card's."""
    return type(value) is int and -(10**9) < value < 10**9


_LISTS = (list, tuple)
_CONTAINERS = (list, dict, tuple, Mapping, Set)


class _Enough(Exception):
    """The preview is as long as it may be."""


class _Preview:
    """One rendering of a job's arguments; stops as soon as it has enough."""

    def __init__(self, redactor: Redactor, limit: int, *, strings: bool) -> None:
        self._redactor = redactor
        self._room = limit
        self._strings = strings
        self._parts: list[str] = []

    def call(self, args: object, kwargs: object, names: Sequence[str]) -> str:
        with suppress(_Enough):
            self._arguments(args, kwargs, names)
        return "".join(self._parts)

    def _arguments(self, args: object, kwargs: object, names: Sequence[str]) -> None:
        separator = ""
        if isinstance(args, _LISTS):
            for position, value in enumerate(args):
                self._put(separator)
                separator = ", "
                if position < len(names) and self._hides(names[position], value):
                    self._put(f'"{REDACTED}"')
                else:
                    self._value(value, 1)
        elif args is not None:
            self._put("*")
            self._value(args, 1)
            separator = ", "
        if isinstance(kwargs, Mapping):
            for name, value in kwargs.items():
                self._put(separator)
                separator = ", "
                plain = isinstance(name, str) and len(name) <= _SHORT_ENOUGH and name.isidentifier()
                self._put(name if plain else self._name(name))
                self._put("=")
                self._member(name, value, 1)
        elif kwargs is not None:
            self._put(f"{separator}**")
            self._value(kwargs, 1)

    def _put(self, text: str) -> None:
        self._room -= len(text)
        self._parts.append(text)
        if self._room < 0:
            raise _Enough

    def _hides(self, name: object, value: object) -> bool:
        if value is None or value is True or value is False or not isinstance(name, str):
            return False
        if not self._redactor.is_secret_name(name):
            return False
        # "max_tokens": 4096 is how many, not which.
        return not (isinstance(value, int | float) and name.lower().endswith("tokens"))

    def _member(self, name: object, value: object, depth: int) -> None:
        if self._hides(name, value):
            self._put(f'"{REDACTED}"')
        else:
            self._value(value, depth)

    def _value(self, value: object, depth: int) -> None:
        if isinstance(value, str):
            self._put(self._string(value))
        elif value is None or value is True or value is False:
            self._put(_CONSTANTS[value])
        elif isinstance(value, int):
            self._put(self._integer(value))
        elif isinstance(value, float):
            self._put(_float(value))
        elif isinstance(value, _CONTAINERS):
            if depth >= _SHOWN_DEPTH:
                self._put("…" if value else "[]")
            elif isinstance(value, _LISTS):
                self._items(value, depth)
            elif isinstance(value, Mapping):
                self._mapping(value, depth)
            else:
                self._items(list(value), depth)
        else:
            self._put(_other(value, self._string))

    def _mapping(self, value: Mapping[Any, Any], depth: int) -> None:
        separator = "{"
        described = value.get("name", value.get("key")) if "value" in value else None
        for name, item in value.items():
            self._put(f"{separator}{self._name(name)}: ")
            separator = ", "
            # {"name": "password", "value": "x"} is a pair as well.
            self._member(described if described is not None and name == "value" else name, item, depth + 1)
        self._put("{}" if separator == "{" else "}")

    def _items(self, items: Sequence[object], depth: int) -> None:
        if len(items) == 2 and isinstance(items[0], str) and self._hides(items[0], items[1]):
            self._put(f'[{self._string(items[0])}, "{REDACTED}"]')  # headers often travel as pairs
            return
        separator = "["
        for item in items:
            self._put(separator)
            separator = ", "
            self._value(item, depth + 1)
        self._put("[]" if separator == "[" else "]")

    def _name(self, name: object) -> str:
        return self._string(name if isinstance(name, str) else _other(name, str))

    def _string(self, value: str) -> str:
        if len(value) > _SHOWN_STRING:
            value = self._redactor.text(value, limit=_SHOWN_STRING)
        elif self._strings:
            value = self._redactor.redact(value)
        return encode_basestring(value)

    def _integer(self, value: int) -> str:
        try:
            shown = int.__repr__(value)
        except ValueError:  # over 4,300 digits Python writes no decimals; hexadecimal has no such limit
            return hex(value)
        return f'"{REDACTED}"' if 13 <= len(shown) <= 16 and _is_card_number(shown) else shown


_CONSTANTS: dict[object, str] = {None: "null", True: "true", False: "false"}


def _float(value: float) -> str:
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    return float.__repr__(value)


def _other(value: object, show: Callable[[str], str]) -> str:
    """Show what JSON has no form for; an unknown class is only named, since its ``repr`` is somebody's code."""
    if isinstance(value, bytes | bytearray | memoryview):
        content = bytes(value)
        return f"<{len(content)} bytes, sha256 {sha256(content).hexdigest()[:12]}>"
    if isinstance(value, Decimal | UUID | date | time | timedelta | int | float) or value is None:
        return show(str(value))
    return f"<{type(value).__module__}.{type(value).__qualname__}>"


# --- message bodies --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedBody:
    """A message body as plain JSON values, or the reason why there are none.

    ``error`` is None or one of ``not_json`` (another content type, never decoded), ``undecodable`` (not the JSON it
    says it is), ``too_deep`` (nested over ``MAX_DEPTH``) and ``wrong_shape`` (JSON, but no Celery message; ``document``
    then holds it).
    """

    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    embed: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    document: Any = None


# By name, because some of Python's text codecs take quadratic time on hostile input.
_ENCODINGS = {"": "utf-8", "binary": "utf-8", "ascii-8bit": "utf-8"} | {
    name: name for name in ("utf-8", "utf8", "ascii", "us-ascii", "latin-1", "iso-8859-1", "utf-16", "utf-32")
}


def decode_body(body: bytes | str, content_type: str, encoding: str) -> DecodedBody:
    """Decode the JSON body of a Celery message of protocol 2 (a list of three) or 1 (a mapping); never raises.

    Envelopes such as ``{"__type__": ...}`` stay the mappings they are, integers are exact, NaN is let through.
    """
    if content_type != "application/json" and content_type.partition(";")[0].strip().lower() != "application/json":
        return DecodedBody(error="not_json")
    codec = _ENCODINGS.get(encoding) or _ENCODINGS.get((encoding or "").strip().lower())
    if codec is None:
        return DecodedBody(error="undecodable")
    try:
        text = body if isinstance(body, str) else bytes(body).decode(codec)
        document = json.loads(text)
    except RecursionError:
        return DecodedBody(error="too_deep")
    except ValueError:  # also text that is not in its encoding, and integers over 4,300 digits, which no worker decodes
        return DecodedBody(error="undecodable")
    # A text with so few opening brackets, as nearly all have, cannot be deeper.
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deeper(document, MAX_DEPTH):
        return DecodedBody(error="too_deep")
    return _message(document)


def _message(document: Any) -> DecodedBody:
    if isinstance(document, list) and len(document) == 3:
        args, kwargs, embed = document
    elif isinstance(document, dict) and "task" in document:
        args, kwargs = document.get("args"), document.get("kwargs")
        embed = {name: document[name] for name in ("callbacks", "errbacks", "chain", "chord") if name in document}
    else:
        return DecodedBody(error="wrong_shape", document=document)
    args, kwargs, embed = ([] if args is None else args), ({} if kwargs is None else kwargs), (embed or {})
    if isinstance(args, list) and isinstance(kwargs, dict) and isinstance(embed, dict):
        return DecodedBody(args=args, kwargs=kwargs, embed=embed)
    return DecodedBody(error="wrong_shape", document=document)


def _is_deeper(document: Any, limit: int) -> bool:
    level = [document] if isinstance(document, list | dict) else []
    for _ in range(limit):
        if not level:
            return False
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, list | dict)
        ]
    return bool(level)
