"""Redrives in the console: planning one, its dry run, and letting it run, pause, go on or end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar
from urllib.parse import urlencode
from uuid import UUID

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from deadletters.admin import letter_name
from grants.pages import allowed, operator_of
from incidents.admin import Button, Buttons, TenantFilter, incident_name
from opsconsole.core.admin import CURSOR, Cell, ChoiceFilter, NotAListParameter, Pill, thousands
from opsconsole.core.ids import new_id
from repairs.admin.redrive_decisions import RedriveDecisions, is_let_run_next
from repairs.admin.redrive_words import (
    CLASS_WORDS,
    ITEM_WORDS,
    STATE_PILLS,
    class_words,
    left_words,
    pause_words,
    redrive_title,
)
from repairs.admin.words import letter_url
from repairs.models import REDRIVE_ENDED, ItemState, Redrive, RedriveClass, RedriveItem, RedriveState
from repairs.redrives.selectors import items_of, progress_of, samples_of

ITEMS_SHOWN = 50
LOOKS_AGAIN_SECONDS = 3


class RedriveStateFilter(ChoiceFilter):
    """By state."""

    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return the states, and those that have not ended together."""
        return [("unfinished", "Not ended"), *((state.value, words) for state, (words, _tone) in STATE_PILLS.items())]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:  # noqa: ARG002
        """Keep the redrives in that state."""
        chosen = self.value()
        if chosen == "unfinished":
            return queryset.exclude(state__in=REDRIVE_ENDED)
        return queryset.filter(state=chosen) if chosen else queryset


class RedriveAdmin(RedriveDecisions):
    """The list of redrives, a page for each, and every decision about one."""

    slug = "redrives"
    menu_label = list_title = "Redrives"
    menu_order = 31
    list_note = "Many failed jobs run again as one piece of work, newest first."
    keyset = ("-id",)
    columns = ("what", "state", "progress", "failed", "tenant", "by", "planned")
    column_classes: ClassVar[Mapping[str, str]] = {
        "state": "ops-bare", "what": "ops-wide", "progress": "ops-num", "failed": "ops-num", "planned": "ops-nowrap",
    }  # fmt: skip
    list_filter = (RedriveStateFilter, TenantFilter)
    list_select_related = ("incident",)
    pages = (
        ("plan", "plan/", "plan_view"),
        ("page", "<uuid:object_id>/", "page_view"),
        ("approve", "<uuid:object_id>/approve/", "approve_view"),
        ("start", "<uuid:object_id>/start/", "start_view"),
        ("pause", "<uuid:object_id>/pause/", "pause_view"),
        ("resume", "<uuid:object_id>/resume/", "resume_view"),
        ("cancel", "<uuid:object_id>/cancel/", "cancel_view"),
        ("retry_failed", "<uuid:object_id>/retry-failed/", "retry_failed_view"),
    )

    # -- list ----------------------------------------------------------------------------------------------------------

    @admin.display(description="Redrive")
    def what(self, row: Redrive) -> str:
        return redrive_title(row)

    @admin.display(description="State")
    def state(self, row: Redrive) -> Cell:
        text, kind = STATE_PILLS[RedriveState(row.state)]
        return Cell(pills=[Pill(text=text, kind=kind)], second=pause_words(row))

    @admin.display(description="Done")
    def progress(self, row: Redrive) -> str:
        done = row.total_count - row.waiting_count - row.outstanding_count
        return f"{thousands(done)} of {thousands(row.total_count)}"

    @admin.display(description="Failed again")
    def failed(self, row: Redrive) -> str:
        return thousands(row.failed_count)

    @admin.display(description="Tenant")
    def tenant(self, row: Redrive) -> str:
        return row.tenant

    @admin.display(description="By")
    def by(self, row: Redrive) -> str:
        return row.planned_by_name or row.planned_by

    @admin.display(description="Planned")
    def planned(self, row: Redrive) -> Cell:
        return Cell(at=row.planned_at)

    def list_links(self, request: HttpRequest, cl: Any) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return where one is planned, for who may run one of anything."""
        return [("Plan one…", self.url("plan"))] if self.may_plan(request) else []

    # -- page ----------------------------------------------------------------------------------------------------------

    def page_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """Answer with one redrive: its classes, its progress, and what became of each job."""
        redrive = self.visible(request, object_id)
        told = progress_of(redrive)
        item_class, state = _shown(request)
        page = items_of(
            redrive, item_class=item_class, state=state, limit=ITEMS_SHOWN,
            cursor=request.GET.get(CURSOR) or None,
        )  # fmt: skip
        words, tone = STATE_PILLS[RedriveState(redrive.state)]
        chosen = {name: value for name, value in (("class", item_class), ("state", state)) if value}
        is_moving = redrive.outstanding_count or redrive.state in ("planning", "canary", "running")
        context = self.page_context(
            request,
            redrive_title(redrive),
            redrive=redrive,
            told=told,
            state=words,
            tone=tone,
            pause=pause_words(redrive),
            incident_name=incident_name(redrive.incident) if redrive.incident is not None else "",
            left=left_words(told.seconds_left) if told.seconds_left is not None else "",
            classes=[
                (class_words(one), one, f"?{urlencode({'class': one.item_class.value})}#jobs") for one in told.classes
            ],
            results=self.results(redrive),
            samples=samples_of(redrive) if redrive.changes_messages else [],
            shown=chosen,
            shown_words=_shown_words(item_class, state),
            items=[self.item_row(item) for item in page.rows],
            next_page=f"?{urlencode({**chosen, CURSOR: page.next})}#jobs" if page.next else "",
            previous_page=f"?{urlencode({**chosen, CURSOR: page.previous})}#jobs" if page.previous else "",
            buttons=self.buttons(request, redrive),
            key=str(new_id()),
            hidden={},
            renew=LOOKS_AGAIN_SECONDS if is_moving else 0,
        )  # fmt: skip
        return TemplateResponse(request, "ops/redrive.html", context)

    def item_row(self, item: RedriveItem) -> tuple[str, str, RedriveItem, tuple[str, str], tuple[str, str]]:
        """Return address, name, row, and the words of result and class of one job."""
        url = letter_url(item.letter_id, site=self.admin_site.name)
        words = ITEM_WORDS[ItemState(item.state)], CLASS_WORDS[RedriveClass(item.item_class)]
        return url, letter_name(item.letter), item, *words

    def results(self, redrive: Redrive) -> list[tuple[str, str, int, str]]:
        """Return (words, tone, how many, address) of each result that there is."""
        counts = {
            ItemState.WAITING: redrive.waiting_count,
            ItemState.PLANNED: redrive.outstanding_count,
            ItemState.SUCCEEDED: redrive.succeeded_count,
            ItemState.FAILED: redrive.failed_count,
            ItemState.SKIPPED: redrive.skipped_count,
            ItemState.CANCELLED: redrive.cancelled_count,
        }
        return [
            (*ITEM_WORDS[state], count, f"?{urlencode({'state': state.value})}#jobs")
            for state, count in counts.items()
            if count
        ]

    def buttons(self, request: HttpRequest, redrive: Redrive) -> Buttons:
        """Return what may be done next; the primary one is the next step."""
        steps = self.steps(request, redrive)
        action, *to_run = redrive.runs_by
        may = allowed(request, redrive.resource, redrive.runs_by)
        if action not in may:
            verbs = [button.label.rstrip("…") for button in (*steps.bar, *steps.more)]
            return Buttons(missing=may.missing({action: " and ".join(verbs)}) if verbs else [])
        if is_let_run_next(redrive) and not set(to_run) <= may.actions:
            verbs = [button.label.rstrip("…") for button in steps.bar]
            return Buttons(more=steps.more, missing=may.missing(dict.fromkeys(to_run, " and ".join(verbs))))
        return steps

    def steps(self, request: HttpRequest, redrive: Redrive) -> Buttons:
        """Return what a redrive in this state lets people do, whoever they are."""
        buttons = Buttons()

        def add(label: str, page: str, *, is_primary: bool = False, direct: bool = False) -> None:
            url = self.url(page, redrive.id)
            buttons.bar.append(Button(label=label, url=url, is_primary=is_primary, direct=direct))

        state = RedriveState(redrive.state)
        if state is RedriveState.READY:
            if redrive.needs_approval and redrive.approved_at is None:
                add("Approve…", "approve", is_primary=redrive.planned_by != operator_of(request).ref)
            else:
                add("Start…", "start", is_primary=True)
        elif state in (RedriveState.CANARY, RedriveState.RUNNING):
            add("Pause", "pause", is_primary=True, direct=True)
        elif state is RedriveState.PAUSED:
            add("Let it go on…", "resume", is_primary=True)
        elif redrive.failed_count:
            add(f"Retry the {thousands(redrive.failed_count)} that failed…", "retry_failed", is_primary=True)
        if state not in REDRIVE_ENDED:
            cancel = Button(label="Cancel it…", url=self.url("cancel", redrive.id), is_danger=True)
            buttons.more.append(cancel)
        return buttons


def _shown(request: HttpRequest) -> tuple[str | None, str | None]:
    """Return the class and the result that the address wants; raises ``NotAListParameter`` for what is none."""
    item_class, state = request.GET.get("class") or None, request.GET.get("state") or None
    if item_class not in (None, *RedriveClass.values) or state not in (None, *ItemState.values):
        raise NotAListParameter("no such class or result")
    return item_class, state


def _shown_words(item_class: str | None, state: str | None) -> str:
    parts = [CLASS_WORDS[RedriveClass(item_class)][0]] if item_class else []
    return ", ".join([*parts, *([ITEM_WORDS[ItemState(state)][0]] if state else [])])
