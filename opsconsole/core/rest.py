"""What every REST view shares: strict input, plain output, entity tags.

Nothing is guessed: an unknown or repeated query parameter, an empty value, an unknown field and a value of another JSON
type are refused by name, because a filter that is silently ignored returns, or changes, everything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from django.http import QueryDict
from rest_framework import ISO_8601, serializers
from rest_framework.negotiation import DefaultContentNegotiation
from rest_framework.parsers import JSONParser
from rest_framework.renderers import JSONRenderer

from opsconsole.core.problems import (
    MAX_BODY_BYTES,
    BodyMalformed,
    BodyTooLarge,
    FieldError,
    IfMatchInvalid,
    InvalidFields,
    field_errors,
)
from opsconsole.core.search import LONGEST, MEANING

API_NAMESPACE = "opsconsole-api"
NEVER = -1
"""A version that no row has: what an entity tag of something else asks for."""

_ENTITY_TAG = re.compile(r'(W/)?"([\x21\x23-\x7e\x80-\xff]*)"')
_OWN_TAG = re.compile(r"([0-9a-f-]{36}):([0-9]{1,18})(?::[0-9a-f]{16})?")


class PlainJson(JSONRenderer):
    """JSON in ASCII, so that a lone surrogate that a worker once sent does not break the answer that shows it."""

    ensure_ascii = True
    compact = True
    strict = True


class Negotiation(DefaultContentNegotiation):
    """Goes by the Accept header only: DRF's own ``?format=`` would be a query parameter that no route declares."""

    settings = SimpleNamespace(URL_FORMAT_OVERRIDE=None)  # type: ignore[assignment]


class StrictJson(JSONParser):
    """Reads a bounded JSON body; refuses repeated names, which two readers would understand differently."""

    def parse(self, stream: Any, *_: Any, **__: Any) -> Any:
        """Return the decoded body; raises ``BodyTooLarge`` or ``BodyMalformed``."""
        body = stream.read(MAX_BODY_BYTES + 1)
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLarge(limit=MAX_BODY_BYTES)
        try:
            return json.loads(body.decode(), object_pairs_hook=_once, parse_constant=_no_constant)
        except RecursionError:
            raise BodyMalformed(detail="The body is nested too deep.") from None
        except ValueError as error:  # also what is no UTF-8
            raise BodyMalformed(detail=f"The body is not JSON: {error}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return members


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


# --- fields -----------------------------------------------------------------------------------------------------------


class Flag(serializers.BooleanField):
    """A JSON true or false; DRF's own field also takes "no" and 0."""

    def to_internal_value(self, data: Any) -> bool:
        """Return the value, or refuse another type."""
        if not isinstance(data, bool):
            raise serializers.ValidationError("This is true or false.")
        return data


class WholeNumber(serializers.IntegerField):
    """A JSON integer; DRF's own field also takes "5" and 5.0."""

    def to_internal_value(self, data: Any) -> int:
        """Return the value, or refuse another type."""
        if isinstance(data, bool) or not isinstance(data, int):
            raise serializers.ValidationError("This is a whole number.")
        return data


class Text(serializers.CharField):
    """A JSON string, as it was sent: what surrounds it and whether it may be empty is a service's rule."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"trim_whitespace": False, "allow_blank": True, **kwargs})

    def to_internal_value(self, data: Any) -> str:
        """Return the value, or refuse another type."""
        if not isinstance(data, str):
            raise serializers.ValidationError("This is a text.")
        return str(super().to_internal_value(data))


class Id(serializers.UUIDField):
    """A UUID in its usual form."""

    def to_internal_value(self, data: Any) -> UUID:
        """Return the id, or refuse another type or form."""
        if not isinstance(data, str) or len(data) != 36:
            raise serializers.ValidationError("This is an id such as 0197c5b2-7d1e-7c3f-8a55-3f6f0e1a2b3c.")
        value: UUID = super().to_internal_value(data)
        return value


class Moment(serializers.DateTimeField):
    """A time in UTC, whatever time zone or format the project around us has chosen; a time without a zone is UTC."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"default_timezone": UTC, "format": ISO_8601, "input_formats": [ISO_8601], **kwargs})


class Choices(serializers.Field):  # type: ignore[type-arg]
    """One or several of a few words, separated by commas; the value is a tuple without repetitions."""

    def __init__(self, choices: tuple[str, ...], **kwargs: Any) -> None:
        self.choices = choices
        super().__init__(**kwargs)

    def to_internal_value(self, data: Any) -> tuple[str, ...]:
        """Return the words, or refuse the first that is none of them."""
        words = tuple(dict.fromkeys(str(data).split(",")))
        for word in words:
            if word not in self.choices:
                raise serializers.ValidationError(f"“{word[:40]}” is none of: {', '.join(self.choices)}.")
        return words

    def to_representation(self, value: tuple[str, ...]) -> str:
        """Return the words as they are written in a query."""
        return ",".join(value)


class Document(serializers.JSONField):
    """A stored canonical JSON text, shown as the value that it is."""

    def to_representation(self, value: Any) -> Any:
        """Return the value that the text holds."""
        return json.loads(value)


# --- input ------------------------------------------------------------------------------------------------------------


class BodySerializer(serializers.Serializer[Any]):
    """A request's body: an object with no other names than those declared."""

    def to_internal_value(self, data: Any) -> Any:
        """Return the validated fields; raises for unknown ones, all of them at once."""
        if isinstance(data, Mapping):
            unknown = [name for name in data if name not in self.fields]
            if unknown:
                raise serializers.ValidationError({name: ["There is no such field."] for name in unknown})
        return super().to_internal_value(data)


class QuerySerializer(serializers.Serializer[Any]):
    """A request's query string: each parameter at most once, none unknown, none empty."""


class PageQuery(QuerySerializer):
    """The query of a list."""

    cursor = serializers.CharField(required=False, max_length=500, help_text="As `next` or `previous` gave it.")
    limit = serializers.IntegerField(required=False, default=50, min_value=1, max_value=100)


class SearchText(serializers.CharField):
    """What a list is searched for."""

    def __init__(self, what: str) -> None:
        super().__init__(required=False, max_length=LONGEST, help_text=f"Search: {what}. {MEANING}")


def parse_query(serializer_class: type[QuerySerializer], query: QueryDict) -> dict[str, Any]:
    """Return the parameters that were sent, and defaults; raises ``InvalidFields`` naming each wrong one."""
    serializer = serializer_class(data={name: query.get(name) for name in query})
    known = serializer.fields
    errors = []
    for name, values in query.lists():
        if name not in known:
            errors.append(FieldError(parameter=name, detail="There is no such parameter."))
        elif len(values) > 1:
            errors.append(FieldError(parameter=name, detail="This parameter can be given once."))
        elif values[0] == "":
            errors.append(FieldError(parameter=name, detail="This parameter has no value."))
    if errors:
        raise InvalidFields(errors)
    if not serializer.is_valid():
        raise InvalidFields([_as_parameter(error) for error in field_errors(serializer.errors)])
    return dict(serializer.validated_data)


def parse_body(serializer_class: type[BodySerializer], data: Any) -> dict[str, Any]:
    """Return the validated body; raises DRF's ``ValidationError``."""
    serializer = serializer_class(data=data)
    serializer.is_valid(raise_exception=True)
    return dict(serializer.validated_data)


def _as_parameter(error: FieldError) -> FieldError:
    return FieldError(parameter=error.pointer.strip("/"), detail=error.detail)


# --- entity tags ------------------------------------------------------------------------------------------------------


def entity_tag(target_id: UUID, version: int, digest: str = "") -> str:
    """Return a strong entity tag: of a record's version, or with ``digest`` of one representation of it."""
    return f'"{target_id}:{version}:{digest}"' if digest else f'"{target_id}:{version}"'


def expected_version(header: str | None, target_id: UUID) -> int | None:
    """Return which version ``If-Match`` asks for, None for any; raises ``IfMatchInvalid``.

    Only the version counts: what else a representation shows may have moved on without a change of the record. A tag
    of something else, and a weak one, match nothing.
    """
    if header is None or header.strip() == "*":
        return None
    tag = _ENTITY_TAG.fullmatch(header.strip())
    if tag is None:
        raise IfMatchInvalid
    own = _OWN_TAG.fullmatch(tag[2])
    if tag[1] or own is None or own[1] != str(target_id):
        return NEVER
    return int(own[2])


def matches_none(header: str | None, tag: str) -> bool:
    """Say whether ``If-None-Match`` is satisfied, so that the answer has to be sent; compares weakly (RFC 9110)."""
    if header is None:
        return True
    if header.strip() == "*":
        return False
    return tag.removeprefix("W/") not in {f'"{found[2]}"' for found in _ENTITY_TAG.finditer(header)}


def refuse_oversized(content_length: str | None) -> None:
    """Refuse a body by the length it announces, before any of it is read; raises ``BodyTooLarge``."""
    if content_length and content_length.isdigit() and int(content_length) > MAX_BODY_BYTES:
        raise BodyTooLarge(limit=MAX_BODY_BYTES)
