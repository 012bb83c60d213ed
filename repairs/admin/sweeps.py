"""Sweeps in the console: what ran, what it found and changed, and running one now."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

from django import forms
from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse

from grants.access import actions_on, authorise
from grants.actions import Action
from grants.errors import AccessDenied
from grants.pages import Confirmation, OperatorAdmin, Section, operator_of, posted_key
from grants.resources import ANY, Resource
from grants.service import record_denial
from incidents.admin import Button, Buttons
from opsconsole.core.admin import CONFIGURATION, Cell, ChoiceFilter, Pill, again, thousands
from opsconsole.core.errors import OpsError
from repairs.models import ReconciliationRun, RunState, SweepActionType, SweepRepair
from repairs.reconciliation.kinds import KINDS
from repairs.reconciliation.running import run_now
from repairs.reconciliation.runs import ABANDONED_AFTER

SHOWN_REPAIRS = 200
STATE_PILLS = {
    RunState.RUNNING: ("Running", "info"),
    RunState.SUCCEEDED: ("Succeeded", "good"),
    RunState.PARTIAL: ("Partly", "warn"),
    RunState.FAILED: ("Failed", "bad"),
}
ACTION_WORDS = {
    SweepActionType.RELEASE_STALE_LEASE: "Stale lease given back",
    SweepActionType.RECORD_LOST_JOB: "Lost job recorded as failed",
    SweepActionType.REQUEUE_UNDELIVERED: "Undelivered job sent again",
    SweepActionType.RELEASE_SEND_LEASE: "Repair freed to be sent",
    SweepActionType.GIVE_UP_REPAIR: "Repair given up",
    SweepActionType.CORRECT_COUNT: "Count corrected",
    SweepActionType.CORRECT_TOTAL: "Total corrected",
}
EVERYWHERE = Resource(tenant=ANY, target_type="reconciliation_run")


def may_run(request: HttpRequest) -> bool:
    """Say whether this operator may run a sweep and change when they run; for buttons, nothing is audited."""
    return Action.RECONCILIATION_RUN in actions_on(operator_of(request), [Action.RECONCILIATION_RUN], EVERYWHERE)


def require_run(request: HttpRequest) -> None:
    """Raise ``AccessDenied``, audited, for who may not."""
    by = operator_of(request)
    try:
        authorise(by, Action.RECONCILIATION_RUN, EVERYWHERE)
    except AccessDenied as denied:
        record_denial(by, denied.action, denied.resource)
        raise


class RunKindFilter(ChoiceFilter):
    """By kind."""

    title = "sweep"
    parameter_name = "kind"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return the kinds that there are."""
        return [(kind.name, kind.title) for kind in KINDS.values()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:  # noqa: ARG002
        """Keep the runs of one kind."""
        return queryset.filter(kind=self.value()) if self.value() else queryset


class RunStateFilter(ChoiceFilter):
    """By state."""

    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return the states."""
        return [(state.value, STATE_PILLS[state][0]) for state in RunState]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:  # noqa: ARG002
        """Keep the runs in one state."""
        return queryset.filter(state=self.value()) if self.value() else queryset


class RunForm(forms.Form):
    """Which sweep is to run."""

    kind = forms.ChoiceField(
        label="Sweep",
        choices=[(kind.name, f"{kind.title}: {kind.about}") for kind in KINDS.values()],
        widget=forms.RadioSelect,
    )


class ReconciliationRunAdmin(OperatorAdmin):
    """The list of sweeps, a page for each, and running one now."""

    slug = "sweeps"
    menu_label = list_title = "Sweeps"
    menu_group = CONFIGURATION
    menu_order = 85
    list_note = "What looked for stuck and lost work, newest first. The schedule says how often each sweep runs."
    keyset = ("-id",)
    columns = ("sweep", "state", "scanned", "repaired", "skipped", "incidents", "started", "took", "by")
    column_classes = {
        "scanned": "ops-num", "repaired": "ops-num", "skipped": "ops-num", "incidents": "ops-num",
        "started": "ops-nowrap", "state": "ops-bare", "sweep": "ops-wide",
    }  # fmt: skip
    list_filter = (RunKindFilter, RunStateFilter)
    pages = (
        ("run", "run/", "run_view"),
        ("page", "<uuid:object_id>/", "page_view"),
    )

    @admin.display(description="Sweep")
    def sweep(self, row: ReconciliationRun) -> str:
        return sweep_title(row.kind)

    @admin.display(description="State")
    def state(self, row: ReconciliationRun) -> Cell:
        text, kind = STATE_PILLS[RunState(row.state)]
        lines = [("warn", "waited with leases")] if row.waited_since else []
        return Cell(pills=[Pill(text=text, kind=kind)], lines=lines, second=row.error_code)

    @admin.display(description="Looked at")
    def scanned(self, row: ReconciliationRun) -> str:
        return thousands(row.scanned_count)

    @admin.display(description="Repaired")
    def repaired(self, row: ReconciliationRun) -> str:
        return thousands(row.repaired_count)

    @admin.display(description="Left alone")
    def skipped(self, row: ReconciliationRun) -> str:
        return thousands(row.skipped_count)

    @admin.display(description="Incidents")
    def incidents(self, row: ReconciliationRun) -> str:
        return thousands(row.incident_count)

    @admin.display(description="Started")
    def started(self, row: ReconciliationRun) -> Cell:
        return Cell(at=row.started_at)

    @admin.display(description="Took")
    def took(self, row: ReconciliationRun) -> str:
        return _length(row.finished_at - row.started_at) if row.finished_at is not None else "still running"

    @admin.display(description="By")
    def by(self, row: ReconciliationRun) -> str:
        return row.started_by_name or row.started_by

    def get_queryset(self, request: HttpRequest) -> Any:  # noqa: ARG002 - the list itself was asked for
        """Return every run: they belong to no tenant, and who may see a failed job may see what looks after it."""
        return ReconciliationRun.objects.defer("error_text")

    def list_links(self, request: HttpRequest, cl: Any) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return the button that runs a sweep, for who may."""
        return [("Run now…", self.url("run"))] if may_run(request) else []

    def page_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """Answer with one run and what it changed of the tenants that this operator may see."""
        self.require_held(request)
        run = ReconciliationRun.objects.filter(id=object_id).first()
        if run is None:
            raise Http404
        repairs = list(
            SweepRepair.objects.visible_to(operator_of(request), Action.INSPECT)
            .filter(run=run)
            .newest_first()[: SHOWN_REPAIRS + 1]
        )
        buttons = Buttons()
        if may_run(request):
            buttons.bar.append(Button(label="Run it now…", url=f"{self.url('run')}?kind={run.kind}"))
        text, tone = STATE_PILLS[RunState(run.state)]
        context = self.page_context(
            request,
            sweep_title(run.kind),
            run=run,
            about=KINDS[run.kind].about if run.kind in KINDS else "",
            state=text,
            tone=tone,
            took=self.took(run),
            repairs=[(ACTION_WORDS[SweepActionType(one.action_type)], one) for one in repairs[:SHOWN_REPAIRS]],
            has_more=len(repairs) > SHOWN_REPAIRS,
            buttons=buttons,
            renew=5 if run.state == RunState.RUNNING else 0,
            abandoned_seconds=int(ABANDONED_AFTER.total_seconds()),
        )
        return TemplateResponse(request, "ops/sweep.html", context)

    def run_view(self, request: HttpRequest) -> HttpResponse:
        """Ask which sweep is to run, and run it."""
        require_run(request)
        if request.method != "POST":
            return self.confirm(request, self._asked(RunForm(initial={"kind": request.GET.get("kind", "")})))
        form = RunForm(request.POST)
        if not form.is_valid():
            return self.confirm(request, self._asked(form), status=400)
        kind = form.cleaned_data["kind"]
        try:
            done = run_now(kind=kind, by=operator_of(request), key=posted_key(request))
        except OpsError as refusal:
            if refusal.status in (401, 403, 404):
                raise
            return self.confirm(request, self._asked(form), refusal=refusal)
        run = done.run
        text = (
            f"{sweep_title(kind)}: {thousands(run.scanned_count)} looked at, {thousands(run.repaired_count)} repaired"
            f"{again(done.idempotent_replay)}"
        )
        (messages.warning if run.error_code else messages.success)(request, text)
        return HttpResponseRedirect(self.url("page", run.id))

    def _asked(self, form: RunForm) -> Confirmation:
        text = "It looks at up to 200 rows of each thing, oldest first, in every tenant. By schedule it looks at all."
        return Confirmation(
            title="Run a sweep now",
            submit="Run it",
            cancel_url=self.url("changelist"),
            sections=[Section(heading="It repairs what it finds", text=text)],
            form=form,
        )


def sweep_title(kind: str) -> str:
    """Return how people call a sweep; one that this release does not know by its name."""
    return KINDS[kind].title if kind in KINDS else kind


def _length(span: timedelta) -> str:
    seconds = max(span.total_seconds(), 0.0)
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
