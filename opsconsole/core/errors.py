"""Refusals: the one way this product says no.

A refusal carries a stable code (part of the API), the HTTP status it has at the REST edge, and a sentence for a person.
Services raise refusals; only the REST handler, the admin's message and the task boundary translate them.
"""

from __future__ import annotations

from typing import Any, ClassVar

REGISTRY: dict[str, type[OpsError]] = {}
"""Every refusal by its code; a second class with the same code is a programming error."""


class OpsError(Exception):
    """The base of every refusal.

    ``code`` is stable and snake_case, ``status`` the HTTP status, ``message`` a template filled from the keyword
    arguments; those arguments stay readable in ``fields`` and are returned by the API.
    """

    code: ClassVar[str] = "operations_error"
    status: ClassVar[int] = 400
    message: ClassVar[str] = "The operation was refused."

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        super().__init__(self.message.format(**fields))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "code" in cls.__dict__:
            other = REGISTRY.setdefault(cls.code, cls)
            if other is not cls and other.__qualname__ != cls.__qualname__:
                raise TypeError(f"the code {cls.code} belongs to {other.__qualname__} already")

    @property
    def detail(self) -> str:
        """The sentence shown to the person who was refused."""
        return str(self)


class InvalidInput(OpsError):
    """What was sent has the wrong shape; correct the named field and send it again."""

    code = "invalid_input"
    status = 400
    message = "{detail}"
