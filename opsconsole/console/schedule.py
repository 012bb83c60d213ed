"""What celery beat sends by itself: read only, because a schedule is changed where it was made.

The console's own sweeps are made by the console, so their interval is changed here, by who may run them. Only where
``django_celery_beat`` is installed. Arguments are left out: a schedule has no redactor's mark on them, and what is due
and what has run can be told without.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django import forms
from django.apps import apps
from django.contrib import admin, messages
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect

from grants.pages import Confirmation, OperatorAdmin, Section, operator_of, posted_key
from opsconsole.core.admin import CONFIGURATION, Cell, Pill, again, thousands, when
from opsconsole.core.errors import OpsError
from opsconsole.core.safe_text import safe_text
from repairs.admin.sweeps import require_run, sweep_title
from repairs.reconciliation.kinds import KINDS
from repairs.reconciliation.schedule import (
    LEAST_SECONDS,
    MOST_SECONDS,
    change_schedule,
    every_seconds,
    kind_of_entry,
)


class SweepTimesForm(forms.Form):
    """When a sweep runs."""

    seconds = forms.IntegerField(
        label="Every so many seconds",
        min_value=LEAST_SECONDS,
        max_value=MOST_SECONDS,
        help_text=f"{LEAST_SECONDS} to {MOST_SECONDS:,}.",
    )
    is_on = forms.BooleanField(label="It runs", required=False)


class ScheduleAdmin(OperatorAdmin):
    """Every periodic task, whether it runs, and when it was sent last."""

    slug = "schedule"
    menu_label = list_title = "Schedule"
    menu_group = CONFIGURATION
    menu_order = 90
    list_note = "What celery beat sends by itself. The console's sweeps are changed here, the rest where it was made."
    pages = (("page", "<int:object_id>/", "edit_view"),)
    keyset = ("-id",)
    columns = ("name", "task", "plan", "state", "last", "runs")
    column_classes = {"runs": "ops-num", "last": "ops-nowrap", "state": "ops-bare", "task": "ops-wide"}
    list_select_related = ("interval", "crontab", "solar", "clocked")

    @admin.display(description="Name")
    def name(self, row: Any) -> Cell:
        name, about = safe_text(row.name, 200), safe_text(row.description, 200)
        return Cell(main=name, second=about, url=self.row_url(row))

    @admin.display(description="Task")
    def task(self, row: Any) -> Cell:
        return Cell(main=safe_text(row.task, 200), second=f"queue {safe_text(row.queue, 100)}" if row.queue else "")

    @admin.display(description="When")
    def plan(self, row: Any) -> str:
        found = row.interval or row.crontab or row.solar or row.clocked
        return safe_text(str(found), 200) if found is not None else "never: it has no schedule"

    @admin.display(description="State")
    def state(self, row: Any) -> Cell:
        if not row.enabled:
            return Cell(pills=[Pill(text="Off", kind="grey")])
        return Cell(pills=[Pill(text="Once" if row.one_off else "On", kind="good")], lines=self._limits(row))

    @admin.display(description="Last sent")
    def last(self, row: Any) -> Cell:
        at: datetime | None = row.last_run_at
        return Cell(at=at) if at is not None else Cell(main="never")

    @admin.display(description="Times sent")
    def runs(self, row: Any) -> str:
        return thousands(row.total_run_count)

    def get_queryset(self, request: HttpRequest) -> Any:  # noqa: ARG002 - the list itself was asked for
        """Return every periodic task: they belong to no tenant, and who may see a failed job may see what is due."""
        return self.model._default_manager.defer("kwargs", "headers")

    def row_url(self, row: Any) -> str:
        """Return where one of the console's own entries is changed; of others the list says all that there is."""
        return self.url("page", row.pk) if kind_of_entry(row) else ""

    def edit_view(self, request: HttpRequest, object_id: int) -> HttpResponse:
        """Change how often one of the console's own sweeps runs, or stop it."""
        require_run(request)
        row = self.model._default_manager.select_related("interval").filter(pk=object_id).first()
        kind = "" if row is None else kind_of_entry(row)
        if not kind:
            raise Http404
        if request.method != "POST":
            form = SweepTimesForm(initial={"seconds": every_seconds(row), "is_on": row.enabled})
            return self.confirm(request, self._asked(kind, form))
        form = SweepTimesForm(request.POST)
        if not form.is_valid():
            return self.confirm(request, self._asked(kind, form), status=400)
        try:
            done = change_schedule(
                entry_id=object_id,
                by=operator_of(request),
                key=posted_key(request),
                seconds=form.cleaned_data["seconds"],
                is_on=form.cleaned_data["is_on"],
            )
        except OpsError as refusal:
            if refusal.status in (401, 403, 404):
                raise
            return self.confirm(request, self._asked(kind, form), refusal=refusal)
        runs = f"runs every {done.every_seconds:,} s" if done.is_on else "is off"
        messages.success(request, f"{sweep_title(kind)} {runs}{again(done.idempotent_replay)}")
        return HttpResponseRedirect(self.url("changelist"))

    def _asked(self, kind: str, form: SweepTimesForm) -> Confirmation:
        every = int(KINDS[kind].every.total_seconds())
        return Confirmation(
            title=f"When does “{sweep_title(kind)}” run?",
            submit="Change it",
            cancel_url=self.url("changelist"),
            sections=[Section(heading=KINDS[kind].about, text=f"As it comes, it runs every {every:,} s.")],
            form=form,
            note="Celery beat notices within seconds. A migration never changes it back.",
        )

    def _limits(self, row: Any) -> list[tuple[str, str]]:
        return [
            ("grey", f"{word} {when(at)} UTC")
            for word, at in (("from", row.start_time), ("until", row.expires))
            if at is not None
        ]


def schedule_admins() -> dict[Any, Any]:
    """Return what the console registers for the schedule; nothing where celery beat keeps it elsewhere."""
    if not apps.is_installed("django_celery_beat"):
        return {}
    return {apps.get_model("django_celery_beat", "PeriodicTask"): ScheduleAdmin}
