"""Reading a job's arguments: exactly as they were sent, and never without an audit row."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from deadletters.models import DeadLetter
from grants import audit
from grants.actions import Action
from grants.operators import Operator
from grants.service import service
from grants.targets import authorise_target
from opsconsole.core.redaction import decode_body
from opsconsole.jobs.errors import JobNotFound
from opsconsole.jobs.models import Job
from repairs.errors import LetterNotFound
from repairs.refusals import open_letter_message

PAYLOAD_READ = Action.PAYLOADS_READ.value
LARGEST_EXACT = 2**53 - 1
"""The largest integer that a reader who has only doubles, such as JavaScript, tells from its neighbours."""
NAMED_PLACES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """A message's body. ``text`` is it to the letter; ``args`` and ``kwargs`` are for readers that would round.

    In those two an integer beyond ``LARGEST_EXACT`` is its digits as text, as is NaN; ``as_text`` names the first 100
    such places as JSON pointers. A body that is no JSON has ``base64`` and ``decode_error`` instead.
    """

    letter_id: UUID
    content_type: str
    content_encoding: str
    byte_count: int
    text: str | None = None
    base64: str | None = None
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    args_json: str = ""
    kwargs_json: str = ""
    as_text: tuple[str, ...] = ()
    decode_error: str = ""


@service
def read_payload(*, letter_id: UUID, by: Operator, reason: str = "") -> Payload:
    """Return what a letter's job was called with, once its audit row is committed: without the row no data (B3).

    ``reason`` is what the reader gave, up to 500 characters; the row keeps it. Raises ``LetterNotFound``,
    ``AccessDenied`` without ``payloads.read``, ``MessageNotCaptured``, ``MessageTooDeep`` or
    ``MessageSealedWithUnknownKey``.
    """
    scope = DeadLetter.objects.scope(letter_id)
    capability = authorise_target(by, Action.PAYLOADS_READ, scope, LetterNotFound())
    letter = DeadLetter.objects.filter(id=letter_id).first()
    if letter is None:
        raise LetterNotFound
    raw = open_letter_message(letter)
    audit.record(
        action=PAYLOAD_READ,
        operator=by,
        resource=letter.resource,
        capability=capability,
        outcome={"bytes": len(raw.body), "job": letter.job_type},
        reason=reason,
    )
    content_type, encoding = raw.content_type or "", raw.content_encoding or ""
    decoded = decode_body(raw.body, content_type, encoding)
    if decoded.error:
        return Payload(
            letter_id=letter_id,
            content_type=content_type,
            content_encoding=encoding,
            byte_count=len(raw.body),
            base64=base64.b64encode(raw.body).decode(),
            decode_error=decoded.error,
        )
    places: list[str] = []
    return Payload(
        letter_id=letter_id,
        content_type=content_type,
        content_encoding=encoding,
        byte_count=len(raw.body),
        text=_text(raw.body, encoding),
        args=_exact(decoded.args, "/args", places),
        kwargs=_exact(decoded.kwargs, "/kwargs", places),
        args_json=json.dumps(decoded.args, ensure_ascii=False),
        kwargs_json=json.dumps(decoded.kwargs, ensure_ascii=False),
        as_text=tuple(places[:NAMED_PLACES]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPayload:
    """What a job of the ledger is called with, as the ledger has it: ``text`` is the JSON to the letter.

    In ``payload`` a number that a reader would change is text, as in ``Payload``. What is no object has None there.
    """

    job_id: UUID
    payload_version: int
    text: str
    payload: dict[str, Any] | None
    as_text: tuple[str, ...] = ()


@service
def read_job_payload(*, job_id: UUID, by: Operator, reason: str = "") -> JobPayload:
    """Return the payload of a job of the ledger, once its audit row is committed: without the row no data (B3).

    Raises ``JobNotFound``, and ``AccessDenied`` without ``payloads.read``.
    """
    capability = authorise_target(by, Action.PAYLOADS_READ, Job.objects.scope(job_id), JobNotFound())
    job = Job.objects.filter(id=job_id).first()
    if job is None:
        raise JobNotFound
    audit.record(
        action=PAYLOAD_READ,
        operator=by,
        resource=job.resource,
        capability=capability,
        outcome={"bytes": len(job.payload.encode()), "job": job.kind},
        reason=reason,
    )
    places: list[str] = []
    try:
        payload = _exact(json.loads(job.payload), "/payload", places)
    except ValueError:
        payload = None
    return JobPayload(
        job_id=job_id,
        payload_version=job.payload_version,
        text=job.payload,
        payload=payload if isinstance(payload, dict) else None,
        as_text=tuple(places[:NAMED_PLACES]),
    )


def _text(body: bytes, encoding: str) -> str:
    codec = "utf-8" if encoding.strip().lower() in ("", "binary", "ascii-8bit") else encoding.strip()
    return body.decode(codec)


def _exact(value: Any, pointer: str, places: list[str]) -> Any:
    """Return ``value`` with each number that a reader would change as text, noting where."""
    if isinstance(value, dict):
        return {
            name: _exact(item, f"{pointer}/{name.replace('~', '~0').replace('/', '~1')}", places)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [_exact(item, f"{pointer}/{index}", places) for index, item in enumerate(value)]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    is_finite = isinstance(value, int) or value - value == 0
    if is_finite and (isinstance(value, float) or abs(value) <= LARGEST_EXACT):
        return value
    places.append(pointer)
    return str(value)
