"""Signed calls to other systems, as the Standard Webhooks specification has them.

``webhook-id`` is the job's idempotency key, the same for every attempt and every repair, so that a receiver which
remembers it does once what it was told twice. The signature covers id, time and body. Endpoints are chosen by the
installation, so any address may be called; redirects are not followed, since they would carry the signature elsewhere.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

from opsconsole.core.clock import wall_now
from opsconsole.core.safe_text import safe_text
from opsconsole.jobs import conf
from opsconsole.jobs.errors import JobError, Unanswered
from opsconsole.jobs.http import Answer, HttpError, as_job_errors, expect_success, json_object, request
from opsconsole.jobs.kind import ProbeAnswer

ANSWER_WITHIN_SECONDS = 15.0
PROBE_WITHIN_SECONDS = 5.0
PROBE_BYTES = 4 << 10
HAPPENED = ("accepted", "applied", "completed", "delivered", "done", "succeeded")
NOT_HAPPENED = ("failed", "rejected", "unknown")


def signature(secret: bytes, *, key: str, timestamp: int, body: bytes) -> str:
    """Return one signature, such as ``v1,K5oZfz...``."""
    digest = hmac.new(secret, f"{key}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


def signed_headers(*, tenant: str, key: str, body: bytes) -> dict[str, str]:
    """Return the headers that say who sends what, when; one signature for each of the tenant's secrets."""
    timestamp = int(wall_now())
    signatures = [signature(secret, key=key, timestamp=timestamp, body=body) for secret in conf.webhook_secrets(tenant)]
    return {
        "webhook-id": key,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(signatures),
        "content-type": "application/json",
    }


def post(
    *,
    endpoint: str,
    tenant: str,
    key: str,
    document: Mapping[str, Any],
    timeout: float | None = None,
    most_bytes: int = 0,
    no_answer: type[JobError] = Unanswered,
) -> Answer:
    """Post a signed document and return the 2xx that answers it, within ``timeout`` or ANSWER_WITHIN_SECONDS.

    Raises ``TryAgain`` where nothing was sent and for 429 and 5xx, ``Refused`` for every other status and for an
    endpoint that is no URL, and ``no_answer`` where the request went out and no answer came.
    """
    body = json.dumps(document, separators=(",", ":"), sort_keys=True).encode()
    headers = signed_headers(tenant=tenant, key=key, body=body)
    with as_job_errors(no_answer=no_answer):
        answer = request(
            "POST",
            endpoint,
            body=body,
            headers=headers,
            timeout=ANSWER_WITHIN_SECONDS if timeout is None else timeout,
            most_bytes=most_bytes,
        )
    expect_success(answer, no_answer=no_answer)
    return answer


def probe(*, endpoint: str, tenant: str, key: str) -> ProbeAnswer:
    """Ask an endpoint whether it knows an idempotency key: ``GET <endpoint>/<key>``, signed over an empty body (C13).

    200 with ``{"status": ...}`` and 404 are answers; whatever else comes leaves it open. Only endpoints that
    OPSCONSOLE_WEBHOOK_PROBES names are asked: elsewhere a 404 would say nothing.
    """
    if not conf.has_probe(endpoint):
        return ProbeAnswer(happened=None, evidence="The endpoint is not one of OPSCONSOLE_WEBHOOK_PROBES.")
    base, mark, query = endpoint.partition("?")
    url = f"{base.rstrip('/')}/{key}{mark}{query}"
    try:
        answer = request(
            "GET",
            url,
            headers=signed_headers(tenant=tenant, key=key, body=b""),
            timeout=PROBE_WITHIN_SECONDS,
            most_bytes=PROBE_BYTES,
        )
    except HttpError as error:
        return ProbeAnswer(happened=None, evidence=safe_text(f"GET {base}/{key}: {error}", 300))
    happened, said = _read_probe(answer)
    return ProbeAnswer(happened=happened, evidence=safe_text(f"GET {base}/{key}: {said}", 300))


def _read_probe(answer: Answer) -> tuple[bool | None, str]:
    if answer.status == 404:
        return False, "404"
    if answer.status != 200:
        return None, str(answer.status)
    try:
        status = json_object(answer).get("status")
    except ValueError as error:
        return None, f"200, but {error}"
    if status in HAPPENED:
        return True, f"200 {status}"
    return (False if status in NOT_HAPPENED else None), f"200 {str(status)[:100]}"
