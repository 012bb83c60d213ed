"""Names each request, for log lines, audit rows and whoever asks support about it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any
from uuid import UUID

from django.http import HttpRequest, HttpResponse

from opsconsole.core.ids import new_id
from opsconsole.core.request_id import current_request_id, set_request_id

HEADER = "X-Request-ID"
LONGEST_FORM = len("urn:uuid:{00000000-0000-0000-0000-000000000000}")


class RequestIdMiddleware:
    """Hands the request's id to the core while the request runs, and sends it back; stands before everything else.

    The id is the one in ``X-Request-ID`` if that is a UUID in any of its forms, else a new one: what anybody may send
    is written into every log line and audit row, so it has one short form.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        request_id = str(given_id(request) or new_id())
        set_request_id(request_id)
        try:
            response = self.get_response(request)
        finally:
            set_request_id("")
        response[HEADER] = request_id
        return response


def named(view: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a view of ours so that its request has an id also in a project that does not list the middleware."""

    @wraps(view)
    def inner(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        if current_request_id():
            return view(request, *args, **kwargs)
        return RequestIdMiddleware(lambda asked: view(asked, *args, **kwargs))(request)

    return inner


def given_id(request: HttpRequest) -> UUID | None:
    """Return the id that the client or a proxy gave the request, if it is one."""
    try:
        return UUID(request.headers.get(HEADER, "")[: LONGEST_FORM + 1])
    except ValueError:
        return None
