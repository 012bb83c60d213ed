"""Planning a redrive, and letting it start, pause, go on or end: each is asked before it is done.

A pause alone asks nothing: every second counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from uuid import UUID

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse

from deadletters.models import WorkerNode
from grants.access import actions_on
from grants.actions import Action
from grants.pages import (
    Confirmation,
    OperatorAdmin,
    Section,
    held_by,
    operator_of,
    posted_ids,
    posted_key,
    require,
    require_readable,
)
from grants.resources import Resource
from incidents.admin import incident_name, posted_number
from incidents.models import Incident
from opsconsole.core.admin import again, thousands
from opsconsole.core.errors import OpsError
from repairs.admin.redrive_forms import FilterForm, PaceForm, PlanForm, ReasonForm, StartForm
from repairs.admin.redrive_words import CLASS_WORDS, STATE_PILLS, jobs_words, pause_words, redrive_title
from repairs.admin.words import incident_url
from repairs.errors import RedriveNotFound
from repairs.models import REDRIVE_ENDED, Redrive, RedriveClass, RedriveState
from repairs.redrives import conf
from repairs.redrives.requests import RedrivePace, RedriveSelection
from repairs.redrives.selectors import RedriveProgress, progress_of
from repairs.redrives.services import (
    RedriveMutation,
    approve_redrive,
    cancel_redrive,
    count_selected,
    create_redrive,
    pause_redrive,
    resume_redrive,
    retry_failed_items,
    start_redrive,
)


class RedriveDecisions(OperatorAdmin):
    """Every page that asks about a redrive."""

    def may_plan(self, request: HttpRequest) -> bool:
        """Say whether this operator may run a redrive of anything; for buttons, nothing is audited."""
        return Action.REDRIVE_RUN in held_by(request)

    def visible(self, request: HttpRequest, redrive_id: UUID) -> Redrive:
        """Return a redrive that this operator may see; raises ``Http404``, audited."""
        require_readable(request, Action.INSPECT, Redrive.objects.scope(redrive_id))
        found: Redrive = Redrive.objects.select_related("incident", "retry_of").get(id=redrive_id)
        return found

    # -- planning ------------------------------------------------------------------------------------------------------

    def plan_view(self, request: HttpRequest) -> HttpResponse:
        """Ask which jobs and how fast; once sent, freeze them and make their dry run. Nothing is sent by it."""
        if not self.may_plan(request):
            self.refuse_page(request, Action.REDRIVE_RUN)
        try:
            selection, name, resource = self.chosen(request)
        except _Unchosen as unchosen:
            return self.choose(request, unchosen.form)
        by = operator_of(request)
        may = actions_on(by, [Action.REDRIVE_RUN, Action.REDRIVE_PATCH], resource)
        options = {
            "may_patch": Action.REDRIVE_PATCH in may,
            "has_low_priority": bool(conf.low_priority_queue()),
        }
        if request.method != "POST":
            form = PlanForm(initial=asdict(RedrivePace()), **options)
            return self.confirm(request, self._plan(request, selection, name, form))
        form = PlanForm(request.POST, **options)
        if not form.is_valid():
            return self.confirm(request, self._plan(request, selection, name, form), status=400)
        try:
            made = create_redrive(
                by=by, key=posted_key(request), selection=selection,
                expected_count=posted_number(request.POST.get("expected")), pace=form.pace(),
                cut_off=form.cleaned_data["cut_off"], target_queue=form.cleaned_data["target_queue"],
                low_priority=bool(form.cleaned_data.get("low_priority")), changes=form.changes(),
                reason=form.cleaned_data["reason"],
            )  # fmt: skip
        except OpsError as refusal:
            if refusal.status in (401, 403, 404):
                raise
            return self.confirm(request, self._plan(request, selection, name, form), refusal=refusal)
        frozen = f"{jobs_words(made.total)} {'is' if made.total == 1 else 'are'} frozen as a redrive"
        text = f"{frozen}; nothing is sent before it is started"
        messages.success(request, f"{text}{again(made.idempotent_replay)}")
        return HttpResponseRedirect(self.url("page", made.redrive_id))

    def chosen(self, request: HttpRequest) -> tuple[RedriveSelection, str, Resource]:
        """Return which jobs the address means, in words too; raises ``Http404``, or ``_Unchosen`` for a filter."""
        if "incident" in request.GET:
            ids, _bad = posted_ids([request.GET["incident"]])
            scope = Incident.objects.scope(ids[0]) if ids else None
            require(operator_of(request), Action.REDRIVE_RUN, scope, RedriveNotFound())
            incident = Incident.objects.only("number", "tenant").get(id=ids[0])
            name = f"of {incident_name(incident)}"
            return RedriveSelection(incident_id=incident.id), name, Resource(tenant=incident.tenant)
        sources = sorted(WorkerNode.objects.order_by().values_list("source", flat=True).distinct())
        form = FilterForm(request.GET or None, sources=sources)
        if not form.is_bound or not form.is_valid():
            raise _Unchosen(form)
        wanted = form.wanted()
        resource = Resource(tenant=wanted.tenant or "")
        require(operator_of(request), Action.REDRIVE_RUN, resource, RedriveNotFound())
        return RedriveSelection(letters=wanted), f"of {wanted.tenant} that match", resource

    def choose(self, request: HttpRequest, form: forms.Form) -> HttpResponse:
        """Answer with the question which jobs are meant."""
        context = self.page_context(request, "Which failed jobs?", form=form)
        return TemplateResponse(request, "ops/redrive_choose.html", context, status=400 if form.is_bound else 200)

    def _plan(self, request: HttpRequest, selection: RedriveSelection, name: str, form: PlanForm) -> Confirmation:
        count = count_selected(by=operator_of(request), selection=selection)
        section = Section(
            heading="First a dry run: nothing is sent yet",
            text="The jobs that wait for a decision now are frozen as one set, oldest first; what fails later is not in"
            " it. Then each is looked at as a retry would, and you see what is safe before you start it.",
        )
        if not count:
            section = Section(heading="None of these jobs waits for a decision", tone="grey")
        back = self.url("changelist")
        if selection.incident_id is not None:
            back = incident_url(selection.incident_id, site=self.admin_site.name)
        return Confirmation(
            title=f"Plan a redrive of {jobs_words(count)} {name}?",
            submit=f"Freeze {jobs_words(count)} and look at {'it' if count == 1 else 'them'}" if count else "",
            cancel_url=back,
            sections=[section],
            form=form if count else None,
            hidden={"expected": str(count)},
            key=str(request.POST.get("idempotency_key", "")),
        )

    # -- deciding ------------------------------------------------------------------------------------------------------

    def decide(
        self,
        request: HttpRequest,
        object_id: UUID,
        *,
        ask: Callable[[Redrive, forms.Form, str], Confirmation],
        form: Callable[[Redrive, Any], forms.Form],
        act: Callable[[Any, str], RedriveMutation],
        done: str,
        lets_run: bool = False,
        at_once: bool = False,
    ) -> HttpResponse:
        """Ask about one redrive and do it, as ``ask_and_do`` does, by what it takes of this one."""

        def may(redrive: Redrive) -> None:
            for action in redrive.runs_by if lets_run else redrive.runs_by[:1]:
                require(operator_of(request), action, redrive.resource, RedriveNotFound())

        return self.ask_and_do(
            request, find=lambda: self.visible(request, object_id), may=may, ask=ask, form=form, act=act,
            tell=lambda made: (done, self.url("page", made.redrive_id)),
            refused_url=self.url("page", object_id) if at_once else "",
        )  # fmt: skip

    def approve_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """Say as the second person that it may start."""
        by = operator_of(request)

        def ask(redrive: Redrive, form: forms.Form, key: str) -> Confirmation:
            planner = redrive.planned_by_name or redrive.planned_by
            return Confirmation(
                title=f"Approve the {redrive_title(redrive)}?",
                submit="Approve it",
                cancel_url=self.url("page", object_id),
                sections=[
                    Section(
                        heading=f"Planned by {planner}",
                        text="It is so large that a second person has to approve it. It still has to be started.",
                    )
                ],
                form=form,
                key=key,
            )

        return self.decide(
            request, object_id, ask=ask, form=lambda _redrive, data: ReasonForm(data), done="The redrive is approved",
            act=lambda form, key: approve_redrive(redrive_id=object_id, by=by, key=key, **form.cleaned_data),
        )  # fmt: skip

    def start_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """Let it run: the safe part as it is, the rest as answered."""
        by = operator_of(request)

        def ask(redrive: Redrive, form: forms.Form, key: str) -> Confirmation:
            told = progress_of(redrive)
            may_start = redrive.state == RedriveState.READY and is_let_run_next(redrive)
            return Confirmation(
                title=f"Start the {redrive_title(redrive)}?",
                submit="Start it" if may_start else "",
                cancel_url=self.url("page", object_id),
                sections=_before_start(told) if may_start else [Section(heading=_standing(redrive), tone="grey")],
                form=form if may_start else None,
                key=key,
            )

        return self.decide(
            request, object_id, ask=ask, done="The redrive is started", lets_run=True,
            form=lambda redrive, data: StartForm(data, classes=progress_of(redrive).classes),
            act=lambda form, key: start_redrive(redrive_id=object_id, by=by, key=key, answers=form.answers()),
        )  # fmt: skip

    def pause_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """Send nothing more of it; asks nothing, since every second counts."""
        by = operator_of(request)

        def ask(redrive: Redrive, form: forms.Form, key: str) -> Confirmation:
            can_be = redrive.state in (RedriveState.CANARY, RedriveState.RUNNING)
            return Confirmation(
                title=f"Pause the {redrive_title(redrive)}?",
                submit="Pause it" if can_be else "",
                cancel_url=self.url("page", object_id),
                sections=[
                    Section(heading="Nothing more is sent", text="What has been sent gets its result all the same.")
                    if can_be
                    else Section(heading=_standing(redrive), tone="grey")
                ],
                form=form if can_be else None,
                key=key,
            )

        return self.decide(
            request, object_id, ask=ask, form=lambda _redrive, data: ReasonForm(data), at_once=True,
            act=lambda form, key: pause_redrive(redrive_id=object_id, by=by, key=key, **form.cleaned_data),
            done="The redrive is paused: nothing more of it is sent",
        )  # fmt: skip

    def resume_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """Let a paused one go on, at the same or another pace."""
        by = operator_of(request)

        def ask(redrive: Redrive, form: forms.Form, key: str) -> Confirmation:
            can_be = redrive.state == RedriveState.PAUSED
            heading = f"Paused: {pause_words(redrive)}" if can_be else _standing(redrive)
            text = f"{thousands(redrive.waiting_count)} jobs wait. It goes on by your grants from now on."
            return Confirmation(
                title=f"Let the {redrive_title(redrive)} go on?",
                submit="Let it go on" if can_be else "",
                cancel_url=self.url("page", object_id),
                sections=[Section(heading=heading, tone="warn" if can_be else "grey", text=text if can_be else "")],
                form=form if can_be else None,
                key=key,
            )

        def pace_form(redrive: Redrive, data: Any) -> PaceForm:
            current = {field: getattr(redrive, field) for field in RedrivePace.__dataclass_fields__}
            return PaceForm(data, initial=current)

        return self.decide(
            request, object_id, ask=ask, form=pace_form, done="The redrive goes on", lets_run=True,
            act=lambda form, key: resume_redrive(redrive_id=object_id, by=by, key=key, pace=form.pace()),
        )  # fmt: skip

    def cancel_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """Give it up."""
        by = operator_of(request)

        def ask(redrive: Redrive, form: forms.Form, key: str) -> Confirmation:
            can_be = redrive.state not in REDRIVE_ENDED
            left = jobs_words(redrive.waiting_count)
            text = "They wait for a decision as before. What has been sent gets its result all the same."
            return Confirmation(
                title=f"Cancel the {redrive_title(redrive)}?",
                submit="Cancel the redrive" if can_be else "",
                cancel_url=self.url("page", object_id),
                sections=[
                    Section(heading=f"{left} not run", tone="warn", text=text)
                    if can_be
                    else Section(heading=_standing(redrive), tone="grey")
                ],
                form=form if can_be else None,
                is_danger=True,
                key=key,
            )

        return self.decide(
            request, object_id, ask=ask, form=lambda _redrive, data: ReasonForm(data), done="The redrive is cancelled",
            act=lambda form, key: cancel_redrive(redrive_id=object_id, by=by, key=key, **form.cleaned_data),
        )  # fmt: skip

    def retry_failed_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """Plan another redrive of those that have failed again."""
        by = operator_of(request)

        def ask(redrive: Redrive, form: forms.Form, key: str) -> Confirmation:
            count = thousands(redrive.failed_count)
            return Confirmation(
                title=f"Plan a redrive of the {count} jobs that failed again?",
                submit="Freeze them and look at them" if redrive.failed_count else "",
                cancel_url=self.url("page", object_id),
                sections=[
                    Section(
                        heading="First a dry run: nothing is sent yet",
                        text="Those of them that wait for a decision now; with the same queue, changes and cut-off.",
                    )
                ],
                form=form if redrive.failed_count else None,
                key=key,
            )

        return self.decide(
            request, object_id, ask=ask, form=lambda _redrive, data: PaceForm(data, initial=asdict(RedrivePace())),
            done="They are frozen as a redrive; nothing is sent before it is started",
            act=lambda form, key: retry_failed_items(redrive_id=object_id, by=by, key=key, pace=form.pace()),
        )  # fmt: skip


class _Unchosen(Exception):
    """The address does not say which jobs are meant; ``form`` asks."""

    def __init__(self, form: forms.Form) -> None:
        super().__init__()
        self.form = form


def is_let_run_next(redrive: Redrive) -> bool:
    """Whether the next step of a redrive is that somebody lets it run."""
    is_ready = redrive.state == RedriveState.READY and not (redrive.needs_approval and redrive.approved_at is None)
    return is_ready or redrive.state == RedriveState.PAUSED


def _standing(redrive: Redrive) -> str:
    return f"It is so no more: {STATE_PILLS[RedriveState(redrive.state)][0].lower()}"


def _before_start(told: RedriveProgress) -> list[Section]:
    """Return what would happen to the jobs of each class."""
    redrive = told.redrive
    sections = []
    for one in told.classes:
        words, tone = CLASS_WORDS[one.item_class]
        if one.item_class is RedriveClass.SAFE:
            canary = f"{thousands(redrive.canary_size)} of them first, and the rest once those have succeeded"
            text = f"At most {thousands(redrive.rate_per_second)} a second" + (
                f": {canary}." if redrive.canary_size else "."
            )
            sections.append(Section(heading=f"{thousands(one.count)} run: {words.lower()}", tone=tone, text=text))
        else:
            will = "run only if you answer for them" if one.is_answerable else "are left out"
            sections.append(Section(heading=f"{thousands(one.count)} {will}: {words.lower()}", tone=tone))
    return sections
