"""Names each request, for log lines, audit rows and whoever asks support about it."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from django.http import HttpRequest, HttpResponse
from django_guid import set_guid
from django_guid.context import guid

from opsconsole.core.request_id import set_request_id


class RequestIdMiddleware:
    """Hands django-guid's id to the core while the request runs; stands right after django-guid's middleware.

    django-guid has taken it from ``X-Request-ID`` or made it, and sends it back in the same header.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        # "urn:uuid:{...}" with a thousand hyphens passes for a UUID too; what is stored and sent back has one form.
        request_id = str(UUID(guid.get()))
        set_guid(request_id)
        set_request_id(request_id)
        try:
            return self.get_response(request)
        finally:
            set_request_id("")
