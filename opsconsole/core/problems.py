"""Refusals as HTTP answers: one JSON shape for everything that goes wrong (RFC 9457).

Whatever is raised becomes a refusal first, so that a wrong method, a full disk and a resolved incident read alike:
``type``, ``title``, ``status``, ``detail``, ``instance``, ``code``, ``errors``, ``request_id``, and where they help
``current`` (the state that stood in the way) and ``fields`` (the refusal's own values).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from uuid import UUID

from django.core.exceptions import PermissionDenied, RequestDataTooBig, SuspiciousOperation
from django.db import InterfaceError, OperationalError
from django.http import Http404, UnreadablePostError
from rest_framework import exceptions as drf

from opsconsole.core.database import is_about_the_statement
from opsconsole.core.errors import InvalidInput, OpsError
from opsconsole.core.request_id import current_request_id

PROBLEM_TYPE = "application/problem+json"
QUOTA_EXCEEDED = "https://iana.org/assignments/http-problem-types#quota-exceeded"
MAX_BODY_BYTES = 1_000_000


class RouteNotFound(OpsError):
    """No route of the API has this path; /api/docs/ lists those there are."""

    code = "not_found"
    status = 404
    message = "There is nothing at this address."


class MethodNotAllowed(OpsError):
    """The route exists, the method does not; the Allow header names those that do."""

    code = "method_not_allowed"
    status = 405
    message = "{method} is not possible here."


class NotAcceptable(OpsError):
    """The Accept header excludes JSON; leave it out or name application/json."""

    code = "not_acceptable"
    status = 406
    message = "Answers come as application/json only."


class BodyTooLarge(OpsError):
    """Send less at once."""

    code = "body_too_large"
    status = 413
    message = "A request body has at most {limit} bytes."


class MediaTypeUnsupported(OpsError):
    """Send the body as JSON and say so in Content-Type."""

    code = "unsupported_media_type"
    status = 415
    message = "A request body is application/json."


class BodyMalformed(OpsError):
    """The body cannot be read; it was not looked at any further."""

    code = "malformed_body"
    status = 400
    message = "{detail}"


class RequestMalformed(OpsError):
    """The request itself breaks a rule of HTTP or of this server."""

    code = "malformed_request"
    status = 400
    message = "The request cannot be read."


class IfMatchInvalid(OpsError):
    """If-Match holds one entity tag, in quotes, as an ETag header gave it; or leave the header out."""

    code = "if_match_invalid"
    status = 400
    message = "If-Match is one entity tag in double quotes, or *."


class CsrfRefused(OpsError):
    """A request with a session's cookie needs its X-CSRFToken header; a token in Authorization needs none."""

    code = "csrf_failed"
    status = 403
    message = "The request carries a session but no valid CSRF token."


class Forbidden(OpsError):
    """The server itself refuses this request."""

    code = "forbidden"
    status = 403
    message = "This is not allowed."


class Throttled(OpsError):
    """Wait for as long as Retry-After says."""

    code = "throttled"
    status = 429
    message = "Too many requests; the next one is answered in {retry_after} s."


class DatabaseUnavailable(OpsError):
    """The database does not answer. Nothing was changed; the same request with the same key can be sent again."""

    code = "database_unavailable"
    status = 503
    message = "The database does not answer at the moment."


class InternalError(OpsError):
    """A bug of ours. Nothing was changed, or the same request with the same key says what was."""

    code = "internal_error"
    status = 500
    message = "Something went wrong here; the log has it under the request id."


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldError:
    """What is wrong with one part of the input: a JSON pointer into the body, or the name of a query parameter."""

    detail: str
    pointer: str = ""
    parameter: str = ""

    def as_dict(self) -> dict[str, str]:
        """Return the parts that are set."""
        where = {"parameter": self.parameter} if self.parameter else {"pointer": self.pointer}
        return {**where, "detail": self.detail}


class InvalidFields(InvalidInput):
    """What was sent has the wrong shape; ``errors`` names each part of it."""

    def __init__(self, errors: list[FieldError]) -> None:
        self.errors = errors
        first = errors[0]
        where = first.parameter or first.pointer or "The body"
        super().__init__(detail=f"{where}: {first.detail}")
        self.fields = {}


@dataclass(slots=True, kw_only=True)
class Problem:
    """A refusal as an answer: the JSON document and the headers that go with it."""

    status: int
    document: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


def as_refusal(error: Exception) -> OpsError:
    """Return what ``error`` means to who sent the request; anything unforeseen is an ``InternalError``."""
    if isinstance(error, OpsError):
        return error
    if isinstance(error, drf.ValidationError):
        return InvalidFields(list(field_errors(error.detail)))
    if isinstance(error, drf.Throttled):
        return Throttled(retry_after=max(1, math.ceil(getattr(error, "wait", None) or 1)))
    if isinstance(error, drf.MethodNotAllowed):
        return MethodNotAllowed(method=error.args[0] if error.args else "This method")
    if isinstance(error, drf.ParseError):
        return BodyMalformed(detail=str(error.detail))
    if isinstance(error, RequestDataTooBig):
        return BodyTooLarge(limit=MAX_BODY_BYTES)
    if isinstance(error, OperationalError | InterfaceError) and not is_about_the_statement(error):
        return DatabaseUnavailable(retry_after=5)
    return next((refusal() for kinds, refusal in _MEANINGS if isinstance(error, kinds)), InternalError())


_MEANINGS: tuple[tuple[tuple[type[Exception], ...], type[OpsError]], ...] = (
    ((Http404, drf.NotFound), RouteNotFound),
    ((drf.NotAcceptable,), NotAcceptable),
    ((drf.UnsupportedMediaType,), MediaTypeUnsupported),
    ((PermissionDenied, drf.PermissionDenied), Forbidden),
    ((SuspiciousOperation, UnreadablePostError), RequestMalformed),
)


def problem_of(refusal: OpsError, *, instance: str = "") -> Problem:
    """Return ``refusal`` as a problem document; ``instance`` is the path that was asked for."""
    fields = {name: _plain(value) for name, value in refusal.fields.items()}
    current = fields.pop("current", None)
    sentence = fields.pop("detail", None)
    named = fields.pop("field", None)
    errors = [error.as_dict() for error in getattr(refusal, "errors", ())]
    if named:
        errors.append(FieldError(pointer=f"/{named}", detail=str(sentence or refusal.detail)).as_dict())
    document: dict[str, Any] = {
        "type": QUOTA_EXCEEDED if refusal.status == HTTPStatus.TOO_MANY_REQUESTS else f"urn:opsconsole:{refusal.code}",
        "title": refusal.code.replace("_", " ").capitalize(),
        "status": refusal.status,
        "detail": refusal.detail,
        "instance": instance,
        "code": refusal.code,
        "errors": errors,
        "request_id": current_request_id(),
    }
    if current is not None:
        document["current"] = current
    if fields:
        document["fields"] = fields
    headers = {"Retry-After": str(fields["retry_after"])} if "retry_after" in fields else {}
    return Problem(status=refusal.status, document=document, headers=headers)


def field_errors(detail: Any, pointer: str = "") -> Iterator[FieldError]:
    """Flatten what a serializer complains about; the path of each complaint is a JSON pointer (RFC 6901)."""
    if isinstance(detail, dict):
        for name, inner in detail.items():
            step = "" if name == "non_field_errors" else f"/{str(name).replace('~', '~0').replace('/', '~1')}"
            yield from field_errors(inner, pointer + step)
    elif isinstance(detail, list):
        for index, inner in enumerate(detail):
            step = f"/{index}" if isinstance(inner, dict | list) else ""
            if inner:
                yield from field_errors(inner, pointer + step)
    else:
        yield FieldError(pointer=pointer, detail=str(detail))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, UUID) else repr(value)
