"""Jobs of the ledger in the console: what there is to do, what has been done, and what each works on."""

from __future__ import annotations

import json
from typing import Any, ClassVar
from uuid import UUID

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from deadletters.admin import letter_name, letter_words
from grants.actions import Action
from grants.pages import OperatorAdmin, allowed, operator_of, require, require_readable
from incidents.admin import TenantFilter, incident_name
from opsconsole.core.admin import Cell, ChoiceFilter, Pill, TextFilter, when
from opsconsole.jobs.errors import JobNotFound
from opsconsole.jobs.models import DUE, UNFINISHED, Job, JobState
from repairs.admin.payloads import reveal
from repairs.admin.words import letter_url
from repairs.jobs import JobPage, job_page
from repairs.payloads import JobPayload, read_job_payload

STATE_WORDS = {
    JobState.PENDING: "Waiting",
    JobState.ENQUEUED: "Sent to a worker",
    JobState.RUNNING: "Running",
    JobState.RETRYING: "To be tried again",
    JobState.SUCCEEDED: "Done",
    JobState.DEAD: "Failed for good",
    JobState.CANCELLED: "Withdrawn",
}
STATE_TONES = {
    JobState.RETRYING: "warn",
    JobState.SUCCEEDED: "good",
    JobState.DEAD: "bad",
    JobState.CANCELLED: "grey",
}
"""Tones of pills; the rest is under way."""


def state_pill(job: Job) -> Pill:
    """Return the state of a job as a person says it."""
    state = JobState(job.state)
    return Pill(text=STATE_WORDS[state], kind=STATE_TONES.get(state, "info"))


def job_name(job: Job) -> str:
    """Return what a list calls a job: by its record, where it has one."""
    return f"{job.record_type} {job.record_id}" if job.record_id else str(job.id)


class JobTabFilter(ChoiceFilter):
    """What is still to end, what has failed for good, or everything."""

    title = "jobs"
    parameter_name = "show"
    default = "unfinished"
    TABS = (("unfinished", "Unfinished"), ("dead", "Failed for good"))

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return the tabs but the one of all jobs."""
        return list(self.TABS)

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:  # noqa: ARG002
        """Keep the jobs of that tab, each found by an index of its own."""
        chosen = self.value()
        if chosen == "unfinished":
            return queryset.filter(Q(state__in=UNFINISHED))
        return queryset.filter(state=JobState.DEAD) if chosen else queryset


class JobStateFilter(ChoiceFilter):
    """By state."""

    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return the states, and those of an attempt under way together."""
        return [*((state.value, words) for state, words in STATE_WORDS.items()), ("in_flight", "Sent or running")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:  # noqa: ARG002
        """Keep the jobs in that state."""
        chosen = self.value()
        if chosen == "in_flight":
            return queryset.filter(state__in=(JobState.ENQUEUED, JobState.RUNNING))
        return queryset.filter(state=chosen) if chosen else queryset


class KindFilter(TextFilter):
    """By kind; typed, since a job may be of a kind that is not registered here any more."""

    title = "kind"
    parameter_name = "kind"


class JobAdmin(OperatorAdmin):
    """The list of jobs, and a page for each."""

    slug = "jobs"
    menu_label = list_title = "Job ledger"
    menu_order = 25
    list_note = "Newest first."
    tells_scope = True
    tab_parameter = JobTabFilter.parameter_name
    keyset = ("-id",)
    columns = ("job", "state", "attempts", "due", "tenant", "made")
    column_classes = {"job": "ops-id", "state": "ops-bare", "due": "ops-nowrap", "made": "ops-nowrap"}
    list_filter = (JobTabFilter, JobStateFilter, TenantFilter, KindFilter)
    pages: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("page", "<uuid:object_id>/", "page_view"),
        ("payload", "<uuid:object_id>/payload/", "payload_view"),
    )

    @admin.display(description="Job")
    def job(self, row: Job) -> Cell:
        return Cell(main=job_name(row), second=f"{row.kind} · queue {row.queue}")

    @admin.display(description="State")
    def state(self, row: Job) -> Cell:
        return Cell(pills=[state_pill(row)], second=row.last_error_code)

    @admin.display(description="Attempts")
    def attempts(self, row: Job) -> str:
        return f"{row.attempts} of {row.max_attempts}"

    @admin.display(description="Due, or ended")
    def due(self, row: Job) -> Cell | str:
        if row.finished_at is not None:
            return Cell(at=row.finished_at)
        return Cell(at=row.available_at) if row.state in DUE else "under way"

    @admin.display(description="Tenant")
    def tenant(self, row: Job) -> str:
        return row.tenant

    @admin.display(description="Made")
    def made(self, row: Job) -> Cell:
        return Cell(at=row.created_at)

    def list_tabs(self, request: HttpRequest) -> list[tuple[str, str, dict[str, str], None]]:  # noqa: ARG002
        """Return the tabs, without counts."""
        tabs = [*JobTabFilter.TABS, ("", "All")]
        return [(key or "all", label, {JobTabFilter.parameter_name: key}, None) for key, label in tabs]

    def get_queryset(self, request: HttpRequest) -> Any:
        """Return the visible jobs without what a list does not show."""
        return super().get_queryset(request).defer("payload", "last_error_text")

    # -- page ----------------------------------------------------------------------------------------------------------

    def visible(self, request: HttpRequest, job_id: UUID) -> JobPage:
        """Return a job that this operator may see; raises ``Http404``, audited."""
        require_readable(request, Action.INSPECT, Job.objects.scope(job_id))
        return job_page(operator_of(request), job_id)

    def page_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """Answer with one job, the record that it works on as it stands now, and what became of it."""
        page = self.visible(request, object_id)
        job, letter = page.job, page.letter
        may = allowed(request, job.resource, [Action.PAYLOADS_READ])
        context = self.page_context(
            request,
            f"{job.kind} {job_name(job)}",
            job=job,
            pill=state_pill(job),
            page=page,
            facts=_facts(job),
            record_detail=[(name, _shown(value)) for name, value in page.record.detail.items()] if page.record else [],
            letter=letter,
            letter_url=letter_url(letter.id, site=self.admin_site.name) if letter else "",
            letter_name=letter_name(letter) if letter else "",
            letter_state=letter_words(letter, letter.incident) if letter else "",
            incident_name=incident_name(letter.incident) if letter else "",
            reveal_url=self.url("payload", job.id) if Action.PAYLOADS_READ in may else "",
            missing=may.missing({Action.PAYLOADS_READ: "Reveal the payload"}),
        )
        return TemplateResponse(request, "ops/job.html", context)

    def payload_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """Show what a job is called with, once and in full, for a reason that the audit trail keeps (B3)."""
        job = self.visible(request, object_id).job
        by = operator_of(request)
        require(by, Action.PAYLOADS_READ, job.resource, JobNotFound())
        name, page = job_name(job), self.url("page", job.id)

        def show(payload: JobPayload) -> HttpResponse:
            context = self.page_context(request, f"Payload of {name}", text=_readable(payload.text), back_url=page)
            return TemplateResponse(request, "ops/job_payload.html", context)

        return reveal(
            self,
            request,
            name=name,
            page=page,
            show=show,
            read=lambda reason: read_job_payload(job_id=job.id, by=by, reason=reason),
        )


def _facts(job: Job) -> list[tuple[str, str]]:
    """Return the names and values of what the ledger says of a job; empty ones are left out."""
    pairs = (
        ("Tenant", job.tenant),
        ("Actor", f"{job.actor_type} {job.actor_id}".strip()),
        ("Source", job.source),
        ("Queue", job.queue),
        ("Job id", str(job.id)),
        ("Key", job.key),
        ("Attempts", f"{job.attempts} of {job.max_attempts}"),
        ("Sent", f"{job.dispatches} times"),
        ("Due", when(job.available_at)),
        ("Leased by", job.lease_owner),
        ("Lease", job.lease_token),
        ("Lease ends", when(job.lease_expires_at)),
        ("Report id", str(job.report_id or "")),
        ("Made", when(job.created_at)),
        ("Last change", when(job.updated_at)),
        ("Ended", when(job.finished_at)),
    )
    return [(name, value) for name, value in pairs if value]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _readable(text: str) -> str:
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, indent=2)
    except ValueError:
        return text
