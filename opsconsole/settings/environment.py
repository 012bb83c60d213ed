"""Environment variables as typed values: all that is wrong with them is said at once, not one start at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import dj_database_url
from django.core.exceptions import ImproperlyConfigured

YES = ("1", "true", "yes", "on")
NO = ("0", "false", "no", "off")


class Environment:
    """Reads variables; a value it cannot use becomes a sentence in ``problems``, and the default takes its place.

    ``refuse`` ends a settings module: it raises ``ImproperlyConfigured`` with every problem found. Inside ``gathering``
    it waits for the end of the block, so that one settings module can build on another and still report once.
    Values of variables are never repeated in a message: they may be secrets or contain them.
    """

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values = values
        self.problems: dict[str, str] = {}  # variable -> the first thing that is wrong with it
        self._gathering = False

    def text(self, name: str, default: str = "") -> str:
        """Return the variable without surrounding white space; an empty one counts as not set."""
        return self.values.get(name, "").strip() or default

    def words(self, name: str, default: Sequence[str] = ()) -> list[str]:
        """Return the parts of a comma-separated variable."""
        found = [word.strip() for word in self.values.get(name, "").split(",")]
        return [word for word in found if word] or list(default)

    def number(self, name: str, default: int, *, at_least: int = 0) -> int:
        """Return a whole number that is not below ``at_least``."""
        text = self.text(name)
        if not text:
            return default
        if not (text.isascii() and text.isdigit()) or int(text) < at_least:
            self.problem(name, f"is a whole number, {at_least} or more")
            return default
        return int(text)

    def flag(self, name: str, default: bool) -> bool:
        """Return a yes or no."""
        text = self.text(name).lower()
        if text and text not in YES + NO:
            self.problem(name, "is 1 (yes) or 0 (no)")
        return text in YES if text in YES + NO else default

    def choice(self, name: str, choices: Sequence[str], default: str) -> str:
        """Return one of ``choices``."""
        text = self.text(name, default)
        if text not in choices:
            self.problem(name, f"is one of: {', '.join(choices)}")
            return default
        return text

    def database(self, name: str, default: str) -> dict[str, Any]:
        """Return the Django database that a URL describes."""
        try:
            return dict(dj_database_url.parse(self.text(name, default), conn_max_age=60, conn_health_checks=True))
        except Exception:  # noqa: BLE001  (dj-database-url raises several kinds, and some repeat the password)
            self.problem(name, "is no database URL, such as postgresql://user:password@host:5432/name")
            return dict(dj_database_url.parse(default, conn_max_age=60, conn_health_checks=True))

    def broker_scheme(self, name: str, default: str) -> str:
        """Return what kind of broker a URL names; a list of URLs for failover counts by its first."""
        scheme = ""
        for url in self.text(name, default).split(";"):
            try:
                parts = urlsplit(url.strip())
                parts.port  # noqa: B018  (raises for a port that is none)
            except ValueError:
                parts = urlsplit("")
            if not parts.scheme or "://" not in url:
                self.problem(name, "is no broker URL, such as redis://host:6379/0 or amqp://user:password@host:5672//")
                return urlsplit(default).scheme
            scheme = scheme or parts.scheme
        return scheme

    def folder(self, path: Path, name: str) -> Path:
        """Make ``path`` if it is not there; ``name`` is the variable that moves it elsewhere."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            self.problem(name, f"names a folder we may write to; {path} cannot be made ({error.strerror})")
        else:
            if not os.access(path, os.W_OK | os.X_OK):
                self.problem(name, f"names a folder we may write to; {path} is read-only")
        return path

    def problem(self, name: str, sentence: str) -> None:
        """Note what is wrong with variable ``name``; once noted, more about it would only distract."""
        self.problems.setdefault(name, sentence)

    def refuse(self) -> None:
        """Raise ``ImproperlyConfigured`` if anything was wrong."""
        if self.problems and not self._gathering:
            lines = "".join(f"\n  - {name} {sentence}" for name, sentence in self.problems.items())
            raise ImproperlyConfigured(f"opsconsole does not start with this environment:{lines}")

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Hold back refusals until the block ends, then raise them together."""
        self._gathering = True
        try:
            yield
        finally:
            self._gathering = False
        self.refuse()


env = Environment(os.environ)
