"""What celery beat sends by itself: read only, because a schedule is changed where it was made.

Only where ``django_celery_beat`` is installed. Arguments are left out: a schedule has no redactor's mark on them, and
what is due and what has run can be told without.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.apps import apps
from django.contrib import admin
from django.http import HttpRequest

from grants.pages import OperatorAdmin
from opsconsole.core.admin import CONFIGURATION, Cell, Pill, thousands, when
from opsconsole.core.safe_text import safe_text


class ScheduleAdmin(OperatorAdmin):
    """Every periodic task, whether it runs, and when it was sent last."""

    slug = "schedule"
    menu_label = list_title = "Schedule"
    menu_group = CONFIGURATION
    menu_order = 90
    list_note = "What celery beat sends by itself. It is changed where it was made; nothing here sends anything."
    keyset = ("-id",)
    columns = ("name", "task", "plan", "state", "last", "runs")
    column_classes = {"runs": "ops-num", "last": "ops-nowrap", "state": "ops-bare", "task": "ops-wide"}
    list_select_related = ("interval", "crontab", "solar", "clocked")

    @admin.display(description="Name")
    def name(self, row: Any) -> Cell:
        return Cell(main=safe_text(row.name, 200), second=safe_text(row.description, 200))

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
        return self.model._default_manager.defer("args", "kwargs", "headers")

    def row_url(self, row: Any) -> str:  # noqa: ARG002
        """Return nothing: the list says all that there is."""
        return ""

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
