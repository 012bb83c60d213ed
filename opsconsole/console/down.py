"""What the console answers while its database does not: a page that asks nothing of it."""

from __future__ import annotations

import logging

from django.db import InterfaceError, OperationalError
from django.http import HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.utils import timezone

from opsconsole.core.request_id import current_request_id

logger = logging.getLogger(__name__)

DATABASE_DOWN = (OperationalError, InterfaceError)
"""What both drivers raise for a database that cannot be reached, is too busy, or went away."""
RETRY_AFTER_SECONDS = 10


def show_database_down(request: HttpRequest) -> HttpResponse:
    """Answer 503. The template gets no request, so that no context processor looks for the user."""
    logger.warning("the database does not answer %s %s", request.method, request.path, exc_info=True)
    html = render_to_string(
        "ops/database_down.html",
        {
            "at": timezone.now(),
            "is_read": request.method in ("GET", "HEAD"),
            "request_id": current_request_id(),
        },
    )
    return HttpResponse(html, status=503, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})
