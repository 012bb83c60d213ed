"""The id of the request being answered, so that an audit row can be found from a log line and back."""

from __future__ import annotations

from contextvars import ContextVar

_request_id: ContextVar[str] = ContextVar("opsconsole_request_id", default="")


def current_request_id() -> str:
    """Return the id of the request under way, or "" outside one."""
    return _request_id.get()


def set_request_id(request_id: str) -> None:
    """Name the request that this context works on; "" forgets it."""
    _request_id.set(request_id)
