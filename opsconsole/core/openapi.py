"""What a route takes and answers, said once: views act by it and the OpenAPI document is written from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from typing import Any

from drf_spectacular.extensions import OpenApiSerializerFieldExtension
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse
from rest_framework import serializers

from opsconsole.core.errors import InvalidInput, OpsError
from opsconsole.core.problems import (
    PROBLEM_TYPE,
    BodyMalformed,
    BodyTooLarge,
    CsrfRefused,
    DatabaseUnavailable,
    IfMatchInvalid,
    InternalError,
    MediaTypeUnsupported,
    NotAcceptable,
    Throttled,
)
from opsconsole.core.rest import BodySerializer, Choices, QuerySerializer


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one route."""

    name: str  # unique: what a generated client calls it
    summary: str
    tag: str
    answer: type[serializers.BaseSerializer[Any]]
    status: int = HTTPStatus.OK
    also: tuple[int, ...] = ()  # other statuses of success, with the same answer
    query: type[QuerySerializer] = QuerySerializer
    body: type[BodySerializer] | None = None
    refusals: tuple[type[OpsError], ...] = ()
    is_mutation: bool = False  # needs an Idempotency-Key, may be a replay
    takes_if_match: bool = False
    gives_etag: bool = False
    gives_location: bool = False


class FieldProblem(serializers.Serializer[Any]):
    """What is wrong with one part of the input."""

    pointer = serializers.CharField(required=False, help_text="JSON pointer into the body (RFC 6901).")
    parameter = serializers.CharField(required=False, help_text="Name of the query parameter.")
    detail = serializers.CharField()


class ProblemDocument(serializers.Serializer[Any]):
    """Why a request was refused (RFC 9457)."""

    type = serializers.CharField(help_text="A URI that names the kind of problem.")
    title = serializers.CharField(help_text="The kind of problem in words; the same for every occurrence.")
    status = serializers.IntegerField()
    detail = serializers.CharField(help_text="A sentence for a person.")
    instance = serializers.CharField(help_text="The path that was asked for.")
    code = serializers.CharField(help_text="Stable: what a program decides by.")
    errors = FieldProblem(many=True)  # type: ignore[assignment]
    request_id = serializers.CharField(help_text="Finds the request in the log and in the audit trail.")
    current = serializers.DictField(required=False, help_text="The state and version that stood in the way.")
    fields = serializers.DictField(required=False, help_text="The refusal's own values.")  # type: ignore[assignment]


class OperationSchema(AutoSchema):
    """Describes a method by its ``Operation``."""

    view: Any

    @property
    def operation(self) -> Operation:
        found: Operation = getattr(self.view, self.method.lower()).operation
        return found

    def is_excluded(self) -> bool:
        """Leave out what has no operation, such as the route that answers for unknown ones."""
        return not hasattr(getattr(self.view, self.method.lower()), "operation")

    def get_operation_id(self) -> str:
        return self.operation.name

    def get_summary(self) -> str:
        return self.operation.summary

    def get_description(self) -> str:  # type: ignore[override]
        documentation = getattr(self.view, self.method.lower()).__doc__ or ""
        return " ".join(documentation.split())

    def get_tags(self) -> list[str]:
        return [self.operation.tag]

    def get_filter_backends(self) -> list[Any]:
        return []

    def _is_list_view(self, serializer: Any = None) -> bool:  # noqa: ARG002
        return False  # a list is an object with its rows and the links beside it

    def get_override_parameters(self) -> list[Any]:
        operation = self.operation
        parameters: list[Any] = [operation.query] if operation.query().fields else []
        if operation.is_mutation:
            parameters.append(
                _header("Idempotency-Key", "The same request with the same key is answered as before.", True, KEY)
            )
        if operation.takes_if_match:
            parameters.append(_header("If-Match", "Refuse with 412 unless this is still the record's version."))
        if operation.gives_etag and self.method == "GET":
            parameters.append(_header("If-None-Match", "Answer 304 without a body if nothing has changed."))
        return [*parameters, *self._response_headers()]

    def _response_headers(self) -> list[Any]:
        operation = self.operation
        done = [int(status) for status in (operation.status, *operation.also)]
        headers = [_header("X-Request-ID", "Finds the request in the log and in the audit trail.", response=True)]
        if operation.gives_etag:
            headers.append(_header("ETag", "The version of the record, for If-Match.", response=done))
        if operation.gives_location:
            headers.append(_header("Location", "Where what was planned can be watched.", response=done))
        if operation.is_mutation:
            headers.append(
                _header("Idempotent-Replayed", "`true` if this answers a request made before.", response=done)
            )
        if "cursor" in operation.query().fields:
            headers.append(_header("Link", "`next` and `prev` pages (RFC 8288).", response=done))
        headers.append(_header("Retry-After", "Seconds to wait.", response=[429, 503]))
        headers.append(_header("WWW-Authenticate", "The challenge.", response=[401]))
        if operation.takes_if_match:
            headers.append(_header("ETag", "The current version.", response=[412]))
        return headers

    def get_request_serializer(self) -> Any:
        return self.operation.body

    def get_response_serializers(self) -> Any:
        operation = self.operation
        responses: dict[Any, Any] = {int(status): operation.answer for status in (operation.status, *operation.also)}
        if operation.gives_etag and self.method == "GET":
            responses[304] = OpenApiResponse(description="Not changed.")
        for status, codes in sorted(self._refusals().items()):
            responses[status, PROBLEM_TYPE] = OpenApiResponse(
                ProblemDocument, description=f"Codes: {', '.join(f'`{code}`' for code in codes)}."
            )
        return responses

    def _refusals(self) -> dict[int, list[str]]:
        operation = self.operation
        refusals: list[type[OpsError]] = [
            InvalidInput, NotAcceptable, Throttled, InternalError, DatabaseUnavailable, *self.view.always_refuses,
            *operation.refusals,
        ]  # fmt: skip
        if operation.body is not None or operation.is_mutation:
            refusals += [BodyMalformed, BodyTooLarge, MediaTypeUnsupported, CsrfRefused]
        if operation.is_mutation:
            refusals += self.view.mutation_refuses
        if operation.takes_if_match:
            refusals.append(IfMatchInvalid)
        by_status: dict[int, list[str]] = {}
        for refusal in refusals:
            codes = by_status.setdefault(refusal.status, [])
            if refusal.code not in codes:
                codes.append(refusal.code)
        return by_status


KEY = {"type": "string", "minLength": 1, "maxLength": 255, "pattern": r"^[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?$"}


def _header(
    name: str,
    description: str,
    required: bool = False,
    schema: Any = str,
    *,
    response: bool | Sequence[int] = False,
) -> Any:
    return OpenApiParameter(
        name,
        schema,
        OpenApiParameter.HEADER,
        description=description,
        required=required,
        response=list(response) if not isinstance(response, bool) else response,
    )


class _ChoicesSchema(OpenApiSerializerFieldExtension):  # type: ignore[no-untyped-call]
    target_class = Choices

    def map_serializer_field(self, auto_schema: Any, direction: str) -> dict[str, str]:  # noqa: ARG002
        words = "|".join(self.target.choices)
        return {"type": "string", "pattern": f"^({words})(,({words}))*$"}


@lru_cache(maxsize=64)
def paged(item: type[serializers.BaseSerializer[Any]]) -> type[serializers.Serializer[Any]]:
    """Return the serializer of a page of ``item``s."""
    return type(
        f"{item.__name__.removesuffix('Serializer')}List",
        (serializers.Serializer,),
        {
            "__doc__": "One page, and where the pages beside it are.",
            "__module__": item.__module__,
            "next": serializers.CharField(allow_null=True, help_text="Path and query of the next page."),
            "previous": serializers.CharField(allow_null=True, help_text="Path and query of the page before."),
            "results": item(many=True),
        },
    )
