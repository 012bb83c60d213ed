"""``fetch_evidence``: what a report points to, fetched once from the open internet and kept with its hash."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256

from opsconsole.core.effects import Effects
from opsconsole.core.safe_text import safe_text
from opsconsole.jobs import conf
from opsconsole.jobs.bases import RecordKind, States
from opsconsole.jobs.errors import Refused, TryAgain
from opsconsole.jobs.http import as_job_errors, expect_success, fetch
from opsconsole.jobs.kind import Work
from opsconsole.jobs.models import EvidenceRequest, EvidenceState, Job
from opsconsole.jobs.querysets import TenantQuerySet

ANSWER_WITHIN_SECONDS = 30.0
GONE = (404, 410)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the server gave."""

    content: bytes
    content_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """The server has said that there is nothing; ``code`` says how."""

    code: str


class FetchEvidence(RecordKind):
    """Fetches a URL that a stranger has chosen, and so from public addresses only (or from OPSCONSOLE_EVIDENCE_ALLOW).

    404 and 410 are an answer: the request is then ``unavailable``. Declared errors: ``Refused`` for
    ``address_forbidden``, ``scheme_refused``, ``credentials_in_url``, ``url_invalid``, ``too_many_redirects``,
    ``too_large``, ``record_missing`` and every other 3xx and 4xx (``http_403``); ``TryAgain`` for all else, since to
    ask twice does no harm.
    """

    name = "fetch_evidence"
    runbook = "docs/runbooks.md#fetch_evidence"
    effects = Effects.IDEMPOTENT
    record_type = "evidence_fetch_request"
    severity = "medium"
    ids = ("request_id", "report_id")
    has_lease = False
    stale_code = "stale_fetch_lease_recovered"
    lease = timedelta(seconds=90)
    states = States(
        pending=EvidenceState.PENDING,
        in_flight=EvidenceState.FETCHING,
        retrying=EvidenceState.PENDING,
        failed=EvidenceState.FAILED,
        done=(EvidenceState.AVAILABLE, EvidenceState.UNAVAILABLE),
        never_dead=(EvidenceState.AVAILABLE,),  # A6.3, to the letter
    )

    def records(self) -> TenantQuerySet:
        return EvidenceRequest.objects.defer("content")

    def run(self, work: Work) -> Found | Gone | None:
        evidence: EvidenceRequest = self.load(work)
        if self.is_done(evidence):
            return None
        with as_job_errors(no_answer=TryAgain):
            answer = fetch(
                evidence.url,
                timeout=ANSWER_WITHIN_SECONDS,
                most_bytes=conf.evidence_bytes(),
                may_reach=conf.EvidenceReach.from_settings(),
            )
        if answer.status in GONE:
            return Gone(code=f"http_{answer.status}")
        expect_success(answer, no_answer=TryAgain)
        if answer.is_cut:
            raise Refused("too_large", f"there are more than {conf.evidence_bytes()} bytes")
        return Found(content=answer.body, content_type=answer.headers.get("content-type", ""))

    def complete(self, job: Job, result: Found | Gone | None, now: datetime) -> None:
        rows = self.row(job).exclude(state__in=self.states.done)
        if isinstance(result, Found):
            rows.update(
                state=EvidenceState.AVAILABLE,
                content=result.content,
                content_type=safe_text(result.content_type, 100),
                size=len(result.content),
                sha256=sha256(result.content).hexdigest(),
                last_error_code="",
                fetched_at=now,
                updated_at=now,
            )
        elif isinstance(result, Gone):
            rows.update(state=EvidenceState.UNAVAILABLE, last_error_code=result.code, fetched_at=now, updated_at=now)


KIND = FetchEvidence()
