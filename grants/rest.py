"""The base of every REST view: who asks, what they may send, how they are answered and refused."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar
from uuid import UUID

from django.conf import settings
from django.core.cache.backends.locmem import LocMemCache
from django.core.signals import got_request_exception
from django.db import transaction
from django.utils.log import log_response
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from rest_framework import exceptions as drf
from rest_framework.authentication import BaseAuthentication, SessionAuthentication
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.throttling import SimpleRateThrottle
from rest_framework.views import APIView

from grants.audit import validate_key
from grants.authentication import TokenAuthentication, operator_of
from grants.errors import (
    AccessDenied,
    IdempotencyKeyInvalid,
    IdempotencyKeyMissing,
    IdempotencyKeyReused,
    NotAnOperator,
    NotAuthenticated,
)
from grants.operators import Operator, require_active_staff
from opsconsole.core.canonical_json import canonical_json
from opsconsole.core.errors import OpsError
from opsconsole.core.keyset import Page
from opsconsole.core.openapi import Operation, OperationSchema
from opsconsole.core.problems import PROBLEM_TYPE, CsrfRefused, as_refusal, problem_of
from opsconsole.core.rest import (
    Negotiation,
    PlainJson,
    StrictJson,
    entity_tag,
    expected_version,
    matches_none,
    parse_body,
    parse_query,
    refuse_oversized,
)

logger = logging.getLogger("django.request")
CHALLENGE = 'Bearer realm="opsconsole"'
REQUESTS_PER_MINUTE = 1_200


class OperatorSession(SessionAuthentication):
    """The session of an active staff user, with CSRF protection; anybody else's session counts as none."""

    def authenticate(self, request: Request) -> tuple[Any, None] | None:
        """Return the user; raises ``CsrfRefused``."""
        user = getattr(request._request, "user", None)
        try:
            active = require_active_staff(user)
        except NotAnOperator:
            return None
        self.enforce_csrf(request)
        return active, None

    def enforce_csrf(self, request: Request) -> None:
        """Refuse a request that another site could have sent."""
        try:
            super().enforce_csrf(request)
        except drf.PermissionDenied as error:
            raise CsrfRefused from error


class IsOperator(BasePermission):
    """Lets operators in; everybody else is asked to authenticate."""

    def has_permission(self, request: Request, view: APIView) -> bool:  # noqa: ARG002
        """Raise ``NotAuthenticated`` unless an operator asks."""
        operator_of(request)
        return True


class OperatorThrottle(SimpleRateThrottle):
    """So many requests per operator and process: ``OPSCONSOLE_API_REQUESTS_PER_MINUTE``.

    Counted in this process: a cache server that is down must not take the console with it.
    """

    cache = LocMemCache("opsconsole-throttle", {"OPTIONS": {"MAX_ENTRIES": 10_000}})
    scope = "operator"

    def get_rate(self) -> str:
        """Return the rate in DRF's form."""
        return f"{int(getattr(settings, 'OPSCONSOLE_API_REQUESTS_PER_MINUTE', REQUESTS_PER_MINUTE))}/min"

    def get_cache_key(self, request: Request, view: APIView) -> str:  # noqa: ARG002
        """Return whose requests are counted together."""
        return f"throttle:{operator_of(request).ref}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request as a view sees it: who, and what of the declared input was sent."""

    request: Request
    operator: Operator
    query: dict[str, Any]
    body: dict[str, Any]
    key: str  # of a mutation, else ""

    def __getitem__(self, name: str) -> Any:
        """Return a query parameter, or None where it was not sent."""
        return self.query.get(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a view answers with: something for the operation's serializer, and what the headers say of it.

    ``document`` is what the serializer would make of ``value``, where the view has it already; ``status`` one of the
    operation's other statuses of success.
    """

    value: Any
    document: Any = None
    status: int | None = None
    etag: str | None = None
    location: str | None = None
    is_replay: bool = False


class OpsView(APIView):
    """One resource. Independent of the project's own REST settings, which may belong to somebody else's API."""

    authentication_classes: Sequence[type[BaseAuthentication]] = (TokenAuthentication, OperatorSession)
    permission_classes: Sequence[Any] = (IsOperator,)
    throttle_classes: Sequence[type[SimpleRateThrottle]] = (OperatorThrottle,)
    renderer_classes = (PlainJson,)
    parser_classes = (StrictJson,)
    content_negotiation_class = Negotiation
    versioning_class = None
    metadata_class = None
    schema = OperationSchema()
    http_method_names = ["get", "post", "head"]
    always_refuses: ClassVar[Sequence[type[OpsError]]] = (NotAuthenticated, AccessDenied)
    mutation_refuses: ClassVar[Sequence[type[OpsError]]] = (
        IdempotencyKeyMissing, IdempotencyKeyInvalid, IdempotencyKeyReused,
    )  # fmt: skip
    cache_control = "private, no-cache"

    @classmethod
    def as_view(cls, **initkwargs: Any) -> Any:
        """Return the view, outside of any transaction that the project opens around requests: services are durable."""
        return transaction.non_atomic_requests(super().as_view(**initkwargs))

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Refuse what is too large before it is read, then authenticate, authorise the route and throttle."""
        refuse_oversized(request.META.get("CONTENT_LENGTH"))
        super().initial(request, *args, **kwargs)

    def handle_exception(self, exc: Exception) -> Response:
        """Answer any error as a problem; a bug is logged and reported like an uncaught one."""
        if isinstance(exc, drf.NotAuthenticated | drf.AuthenticationFailed):
            exc = NotAuthenticated()
        refusal = as_refusal(exc)
        response = self._refuse(refusal)
        if refusal.status >= 500 and refusal is not exc:
            got_request_exception.send(sender=type(self), request=self.request._request)
            log_response(
                "%s: %s", refusal.code, self.request.path, response=response, request=self.request, exception=exc
            )
        return response

    def _refuse(self, refusal: OpsError) -> Response:
        problem = problem_of(refusal, instance=self.request.path)
        if refusal.status == 401:
            problem.headers["WWW-Authenticate"] = CHALLENGE
        target: UUID | None = getattr(self, "matched_target", None)
        if refusal.status == 412 and target is not None:
            problem.headers["ETag"] = entity_tag(target, problem.document["current"]["version"])
        response = Response(problem.document, status=problem.status, content_type=PROBLEM_TYPE, headers=problem.headers)
        response.exception = True
        return response

    def finalize_response(self, request: Request, response: Any, *args: Any, **kwargs: Any) -> Any:
        """Add what every answer says of itself."""
        response.headers.setdefault("Cache-Control", self.cache_control)
        response.headers.setdefault("X-Content-Type-Options", "nosniff")
        return super().finalize_response(request, response, *args, **kwargs)

    def read_call(self, operation: Operation) -> Call:
        """Return the request's declared input, or raise what is wrong with it."""
        request: Request = self.request
        query = parse_query(operation.query, request.query_params)
        key = validate_key(request.headers.get("Idempotency-Key")) if operation.is_mutation else ""
        body = parse_body(operation.body, request.data) if operation.body is not None else {}
        return Call(request=request, operator=operator_of(request), query=query, body=body, key=key)

    def mutation_of(self, call: Call, **target: UUID) -> dict[str, Any]:
        """Return what every service that changes one target is called with: it, who, key, version, and the body."""
        (target_id,) = target.values()
        return {
            **target,
            **call.body,
            "by": call.operator,
            "key": call.key,
            "version": self.expected_version(target_id),
        }

    def expected_version(self, target_id: UUID) -> int | None:
        """Return which version of ``target_id`` the request wants to change, None for any."""
        self.matched_target = target_id
        return expected_version(self.request.headers.get("If-Match"), target_id)

    def respond(self, operation: Operation, answer: Answer) -> Response:
        """Return ``answer`` with its headers."""
        headers = {}
        if answer.etag is not None:
            headers["ETag"] = answer.etag
            if self.request.method in ("GET", "HEAD") and not matches_none(
                self.request.headers.get("If-None-Match"), answer.etag
            ):
                return Response(status=304, headers=headers)
        if answer.location is not None:
            headers["Location"] = answer.location
        if answer.is_replay:
            headers["Idempotent-Replayed"] = "true"
        value = answer.value
        if isinstance(value, Page):
            value, links = self._linked(value)
            if links:
                headers["Link"] = links
        document = operation.answer(value).data if answer.document is None else answer.document
        return Response(document, status=int(answer.status or operation.status), headers=headers)

    def _linked(self, page: Page[Any]) -> tuple[dict[str, Any], str]:
        """Return a page with the paths of its neighbours, and the same as a ``Link`` header.

        Paths without a host: behind a proxy, ours is not the one that the client knows.
        """
        links = {}
        for name, cursor in (("next", page.next), ("previous", page.previous)):
            query = self.request.query_params.copy()
            if cursor is not None:
                query["cursor"] = cursor
            links[name] = None if cursor is None else f"{self.request.path}?{query.urlencode()}"
        header = ", ".join(
            f'<{links[name]}>; rel="{relation}"' for name, relation in (("next", "next"), ("previous", "prev"))
            if links[name]
        )  # fmt: skip
        return {**links, "results": page.rows}, header


def operation(**declared: Any) -> Callable[[Callable[..., Answer]], Callable[..., Response]]:
    """Make a view's method out of a function from a ``Call`` (and the path's ids) to an ``Answer``.

    The keyword arguments are ``Operation``'s: the view acts by them and the OpenAPI document is written from them.
    """
    described = Operation(**declared)

    def decorate(function: Callable[..., Answer]) -> Callable[..., Response]:
        @wraps(function)
        def method(view: OpsView, request: Request, **ids: Any) -> Response:  # noqa: ARG001 - DRF passes it
            return view.respond(described, function(view, view.read_call(described), **ids))

        method.operation = described  # type: ignore[attr-defined]
        return method

    return decorate


def representation_tag(target_id: UUID, version: int, document: Any) -> str:
    """Return an entity tag that changes with the record's version and with anything else its document shows."""
    text = canonical_json(_without_floats(document))
    return entity_tag(target_id, version, hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:16])


def _without_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _without_floats(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_floats(item) for item in value]
    return value if value is None or isinstance(value, bool | int | str) else repr(value)


class _BearerScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    target_class = TokenAuthentication
    name = "token"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:  # noqa: ARG002
        return {"type": "http", "scheme": "bearer", "description": "An API token (`manage.py grants token create`)."}


class _SessionScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    target_class = OperatorSession
    name = "session"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:  # noqa: ARG002
        return {
            "type": "apiKey",
            "in": "cookie",
            "name": settings.SESSION_COOKIE_NAME,
            "description": "A signed-in active staff user; changes need X-CSRFToken as well.",
        }
