"""Incidents in the console: the list, the page's own half, take it and close it.

What is above this app (jobs, repairs) adds its half in ``repairs.admin``, whose class is the one that is registered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar, TypeVar, cast
from urllib.parse import urlencode
from uuid import UUID

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.views.main import ChangeList
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseNotModified, HttpResponseRedirect, JsonResponse
from django.template.response import TemplateResponse
from django.utils import timezone

from grants.actions import Action
from grants.models import AuditEvent, Verdict
from grants.operators import Operator
from grants.pages import (
    Allowed,
    Confirmation,
    MissingGrant,
    OperatorAdmin,
    Section,
    allowed,
    operator_of,
    posted_key,
    require,
    require_readable,
)
from grants.resources import ANY
from grants.selectors import tenants_named
from incidents import search, sql
from incidents.errors import IncidentChanged, IncidentNotFound
from incidents.models import EpisodeEnd, Incident, IncidentState, Severity
from incidents.services import ACKNOWLEDGED, RESOLVED, acknowledge_incident, resolve_incident
from opsconsole.core.admin import (
    MOST_COUNTED,
    Cell,
    ChoiceFilter,
    KeysetChangeList,
    NotAListParameter,
    Pill,
    TextFilter,
    again,
    ago,
    thousands,
)
from opsconsole.core.bounded import capped_counts
from opsconsole.core.errors import OpsError
from opsconsole.core.ids import new_id
from opsconsole.core.search import search_context

T = TypeVar("T")

STATE_WORDS = {IncidentState.OPEN: "Open", IncidentState.ACKNOWLEDGED: "Taken", IncidentState.RESOLVED: "Closed"}
REOPENED_WORDS = {
    "repair_failed": "Repair failed",
    "severity_rose": "Became worse",
    "count_passed": "More failures than agreed",
}
AUDIT_WORDS = {
    ACKNOWLEDGED: "took it",
    RESOLVED: "closed it",
    "operations.incident_opened": "opened it",
    "operations.incident_reopened": "opened it again",
    "operations.incident_retry_applied": "retried jobs of it",
}
RESOLUTION_WORDS = {
    "repaired": "repaired",
    "already_done": "it had already happened",
    "discarded": "discarded",
    "done_another_way": "the work was done in another way",
    "no_longer_needed": "the work is no longer needed",
    "loss_accepted": "the loss is accepted",
    "test_or_drill": "it was a test or a drill",
    "other_reason": "another reason",
}
"""Codes that the product or its own form gives; one that somebody typed is shown without its underscores."""
TABS = {
    "open": "Needs action",
    "critical": "Critical",
    "mine": "Mine",
    "acknowledged": "Taken",
    "came_back": "Came back",
    "resolved": "Closed",
    "": "All",
}
SINCE = "since"
MOST_NEWER = 100
MOST_TENANTS = 50
TIMELINE_ROWS = 50
TRIES = 3


def incident_name(incident: Incident) -> str:
    """Return what people call it on the phone."""
    return f"INC-{incident.number:04d}"


def incident_number(text: str) -> int | None:
    """Return the number that somebody typed, as INC-0012, #12 or 12; None for what is none."""
    return search.incident_number(text)


def resolution_words(code: str) -> str:
    """Return why an incident was closed as a person says it."""
    return RESOLUTION_WORDS.get(code, code.replace("_", " "))


def resolution_text(code: str, summary: str) -> str:
    """Return a stored summary without the code that stands before it (A11)."""
    return summary.removeprefix(f"[{code}]").strip()


def state_words(incident: Incident) -> str:
    """Return the state as a person says it: one that was closed or taken before says why it is open again."""
    if incident.state == IncidentState.OPEN and incident.reopened_reason:
        return REOPENED_WORDS.get(incident.reopened_reason, "Came back")
    return STATE_WORDS[IncidentState(incident.state)]


def state_kind(incident: Incident) -> str:
    """Return the class of the pill that says the state."""
    is_back = incident.state == IncidentState.OPEN and incident.reopened_reason
    return "state-back" if is_back else f"state-{incident.state}"


def capped(count: int, most: int) -> str:
    """Return a count that stopped at ``most``, as a person reads it."""
    return f"{thousands(most)}+" if count > most else thousands(count)


def newer_answer(request: HttpRequest, count: int) -> HttpResponse:
    """Answer a page that asks how many rows are newer: ``count`` stopped at ``MOST_NEWER`` or just beyond."""
    newer = capped(count, MOST_NEWER)
    answer = JsonResponse({"newer": 0 if newer == "0" else newer})
    answer["ETag"] = f'"{newer}"'
    if request.headers.get("If-None-Match") == answer["ETag"]:
        return HttpResponseNotModified(headers={"ETag": answer["ETag"]})
    return answer


def first_id_of(milliseconds: int) -> UUID:
    """Return the smallest id that a row made at that moment can have (UUID version 7, RFC 9562)."""
    return UUID(int=((milliseconds & (1 << 48) - 1) << 80) | (7 << 76) | (2 << 62))


def repaired_words(incident: Incident) -> str:
    """Return how many jobs are not repaired; of a closed incident, how many were when it was closed."""
    count, noun = incident.letter_count, "job" if incident.letter_count == 1 else "jobs"
    if not incident.is_resolved:
        return f"{thousands(incident.unresolved_count)} of {thousands(count)} {noun} not repaired"
    end = EpisodeEnd.objects.filter(incident=incident, episode=incident.episode).first()
    if end is not None and end.unrepaired_count:
        left = end.unrepaired_count
        return f"{thousands(left)} {'job' if left == 1 else 'jobs'} closed without repair"
    # Jobs of an earlier episode may have been left undone, and are counted among its jobs.
    if incident.episode > 1:
        return "every job of this episode settled"
    return f"{thousands(count)} of {thousands(count)} {noun} settled"


def standing_of(incident: Incident) -> str:
    """Return what of an incident's state a decision rests on; counts, which rise by themselves, are not in it."""
    return f"{incident.state}:{incident.episode}:{incident.acknowledged_by}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Button:
    """One thing that may be done from here. ``direct`` ones are sent at once, the others ask first."""

    label: str
    url: str
    is_primary: bool = False
    is_danger: bool = False
    direct: bool = False
    hint: str = ""  # what the label leaves open


@dataclass(slots=True, kw_only=True)
class Buttons:
    """The bar of a page: ``bar`` in the open, ``more`` folded away, and why some are not there."""

    bar: list[Button] = field(default_factory=list)
    more: list[Button] = field(default_factory=list)
    missing: list[MissingGrant] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineLine:
    """One line of the timeline."""

    at: datetime
    who: str
    what: str
    detail: str = ""
    action: str = ""  # as the audit trail names it; "" for what is told from elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an episode ended, as a person says it."""

    at: datetime
    episode: int
    who: str
    why: str
    text: str
    unrepaired: int


class TenantFilter(ChoiceFilter):
    """The tenants that this operator may see; typed where they are too many to list, or not to be told."""

    title = "tenant"
    parameter_name = "tenant"
    action: ClassVar[Action] = Action.INSPECT
    is_typed = False

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return the tenants named by grants, or, with a grant over all of them, those that have an incident."""
        names = tenants_named(operator_of(request), self.action, MOST_TENANTS + 1)
        found = sorted(names) if names is not None else sql.tenants(Incident.objects.db, MOST_TENANTS + 1)
        # Whose grants cover one actor in every tenant is not told which tenants there are.
        self.is_typed = ANY in found or len(found) > MOST_TENANTS
        return [("", "")] if self.is_typed else [(name, name) for name in found]

    @property
    def typed(self) -> str:
        """What was typed or chosen."""
        return str(self.used_parameters.get(self.parameter_name) or "")

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:  # noqa: ARG002
        """Keep the rows of one tenant."""
        chosen = self.typed if self.is_typed else self.value()
        if not chosen:
            return queryset
        return queryset.none() if "\x00" in chosen else queryset.filter(tenant=chosen)


class StateFilter(ChoiceFilter):
    """The tabs of the list: what needs somebody, what somebody has, what is over."""

    title = "state"
    parameter_name = "state"
    default = IncidentState.OPEN.value

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return the tabs in their order, and what is not closed, which other pages link to."""
        return [*TABS.items(), ("unresolved", "Not closed")]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        """Keep the incidents of that tab."""
        return in_tab(queryset, self.value(), operator_of(request))


def in_tab(queryset: Any, tab: str, by: Operator) -> Any:
    """Return the incidents of one tab; each is one range of an index."""
    if tab == "critical":
        return queryset.unresolved().filter(severity=Severity.CRITICAL)
    if tab == "mine":
        return queryset.filter(state=IncidentState.ACKNOWLEDGED, acknowledged_by=by.ref)
    if tab == "came_back":
        return queryset.filter(state=IncidentState.OPEN).exclude(reopened_reason="")
    if tab == "unresolved":
        return queryset.unresolved()
    return queryset.filter(state=tab) if tab else queryset


class SeverityFilter(ChoiceFilter):
    """By severity."""

    title = "severity"
    parameter_name = "severity"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return the severities, worst first."""
        return [(member.label, str(member.label).capitalize()) for member in reversed(Severity)]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:  # noqa: ARG002
        """Keep the incidents of that severity."""
        return queryset.filter(severity=Severity.named(self.value())) if self.value() else queryset


class TaskFilter(TextFilter):
    """By the task, as the workers name it. Queue, release and outcome are the jobs', and no index serves them here."""

    title = "task"
    parameter_name = "task"

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:  # noqa: ARG002
        """Keep the incidents of that task."""
        if not self.typed:
            return queryset
        return queryset.none() if "\x00" in self.typed else queryset.filter(job_type=self.typed)


class IncidentChangeList(KeysetChangeList):
    """The page of the list, or, for who only asks how many are newer, its filters without any row."""

    def get_filters_params(self, params: Any = None) -> Any:
        """Return what filters may read: not since when."""
        found = super().get_filters_params(params)
        found.pop(SINCE, None)
        return found


class UnreadChangeList(IncidentChangeList):
    """The filters of the list without its rows."""

    def get_results(self, request: HttpRequest) -> None:  # noqa: ARG002
        """Fetch nothing."""
        self.result_list = []


class CloseForm(forms.Form):
    """Why an incident is closed while its jobs are not repaired; nothing is preselected."""

    CODES = (
        ("", "Choose…"),
        ("done_another_way", "The work was done in another way"),
        ("no_longer_needed", "The work is no longer needed"),
        ("loss_accepted", "The loss is accepted"),
        ("test_or_drill", "It was a test or a drill"),
        ("other_reason", "Another reason, told below"),
    )
    code = forms.ChoiceField(choices=CODES, label="Why", help_text="required, nothing is preselected")
    summary = forms.CharField(
        label="What happened, in your words",
        min_length=3,
        max_length=1_900,
        widget=forms.Textarea(attrs={"rows": 4}),
        help_text="required, 3 to 1,900 characters; shown under “How this was closed before”",
    )


class IncidentAdmin(OperatorAdmin):
    """The list of incidents, and what a person does to one without touching its jobs."""

    slug = "incidents"
    menu_label = list_title = "Incidents"
    menu_order = 10
    list_note = "Worst first, then newest."
    tab_parameter = StateFilter.parameter_name
    search_label = "Search"
    search_help_text = search.HELP
    search_fields = ("number",)
    keyset = ("-severity", "-last_seen_at", "-id")
    columns: ClassVar[tuple[str, ...]] = ("number", "severity", "state", "what", "unresolved", "last", "holder")
    column_classes = {
        "number": "ops-nowrap",
        "severity": "ops-bare",
        "state": "ops-bare",
        "what": "ops-bare ops-wide",
        "unresolved": "ops-num",
        "outcome": "ops-bare ops-nowrap",
        "last": "ops-nowrap",
    }
    list_template = "ops/incident_list.html"
    list_filter = (StateFilter, SeverityFilter, TaskFilter, TenantFilter)
    pages: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("newer", "newer/", "newer_view"),
        ("page", "<uuid:object_id>/", "page_view"),
        ("take", "<uuid:object_id>/take/", "take_view"),
        ("close", "<uuid:object_id>/close/", "close_view"),
    )
    # -- list ----------------------------------------------------------------------------------------------------------

    @admin.display(description="Incident")
    def number(self, row: Incident) -> str:
        return incident_name(row)

    @admin.display(description="Severity")
    def severity(self, row: Incident) -> Cell:
        name = str(row.get_severity_display())
        return Cell(pills=[Pill(text=name.capitalize(), kind=f"severity-{name}")])

    @admin.display(description="State")
    def state(self, row: Incident) -> Cell:
        return Cell(pills=[Pill(text=state_words(row), kind=state_kind(row))])

    @admin.display(description="What failed")
    def what(self, row: Incident) -> Cell:
        return Cell(main=row.title, second=" · ".join(self.what_parts(row)))

    def what_parts(self, row: Incident) -> list[str]:
        """Return what the second line of a row says; the app above knows the queues."""
        return [row.job_type, row.tenant, row.source]

    @admin.display(description="Not repaired")
    def unresolved(self, row: Incident) -> Cell:
        return Cell(main=thousands(row.unresolved_count), second=f"of {thousands(row.letter_count)}")

    @admin.display(description="Last failure, since")
    def last(self, row: Incident) -> Cell:
        return Cell(at=row.last_seen_at, second=f"since {row.opened_at.astimezone(UTC):%-d %b %H:%M}")

    @admin.display(description="On it")
    def holder(self, row: Incident) -> str:
        if row.is_resolved:
            return f"closed by {row.resolved_by_name}"
        return row.acknowledged_by_name or "nobody"

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        """Find incidents as ``incidents.search`` says."""
        if not search_term.strip():
            return queryset, False
        anywhere = self.get_queryset(request).order_by(*self.keyset)
        by = operator_of(request)
        return search.search_incidents(search_term, within=queryset, anywhere=anywhere, by=by), False

    def get_changelist(self, request: HttpRequest, **_: Any) -> type[ChangeList]:
        """Return the list by key, or its filters alone."""
        asked = request.resolver_match.url_name if request.resolver_match is not None else ""
        return UnreadChangeList if asked == self.url_name("newer") else IncidentChangeList

    def list_context(self, request: HttpRequest, cl: KeysetChangeList) -> dict[str, Any]:
        """Add what the search says."""
        cast(Any, request)._ops_filtered = None if cl.query.strip() else self.filtered(request, cl)
        return {**super().list_context(request, cl), **search_context(cl.queryset)}

    def filtered(self, request: HttpRequest, cl: KeysetChangeList) -> Any:
        """Return the visible incidents as every filter but the tab has them."""
        rows = self.get_queryset(request)
        for spec in cast(Any, cl.filter_specs):
            if not isinstance(spec, StateFilter):
                rows = spec.queryset(request, rows)
        return rows

    def list_tabs(self, request: HttpRequest) -> list[tuple[str, str, dict[str, str], str | None]]:
        """Return the tabs with how many incidents each has under the other filters: one statement counts for all.

        A search would have to be made for each of them; what it finds is not counted.
        """
        rows, by = cast(Any, request)._ops_filtered, operator_of(request)
        counts: list[str | None] = [None] * len(TABS)
        if rows is not None:
            found = capped_counts([in_tab(rows, tab, by) for tab in TABS], MOST_COUNTED)
            counts = [capped(count, MOST_COUNTED) for count in found]
        return [
            (tab or "all", label, {StateFilter.parameter_name: tab}, count)
            for (tab, label), count in zip(TABS.items(), counts, strict=True)
        ]

    def newer_url(self, request: HttpRequest, cl: KeysetChangeList) -> str:
        """Return where a page asks how many incidents have come to its tab since."""
        if cl.query:
            return ""
        kept = {name: value for name, value in request.GET.items() if self.lookup_allowed(name, str(value), request)}
        return f"{self.url('newer')}?{urlencode({**kept, SINCE: int(timezone.now().timestamp() * 1_000)})}"

    def newer_view(self, request: HttpRequest) -> HttpResponse:
        """Answer how many incidents of a tab were opened, or came back, after a page of it was made."""
        self.require_list(request)
        since = request.GET.get(SINCE, "")
        if re.fullmatch(r"[0-9]{1,14}", since, re.ASCII) is None:
            raise NotAListParameter("no such time")
        first = first_id_of(int(since))
        cl: Any = self.get_changelist_instance(request)
        rows = next(spec for spec in cl.filter_specs if isinstance(spec, StateFilter)).queryset(
            request, self.filtered(request, cl)
        )
        came_back = rows.filter(id__lt=first, state=IncidentState.OPEN).exclude(reopened_reason="")
        came_back = came_back.filter(opened_at__gte=datetime.fromtimestamp(int(since) / 1_000, UTC))
        return newer_answer(request, sum(capped_counts([rows.filter(id__gte=first), came_back], MOST_NEWER)))

    # -- page ----------------------------------------------------------------------------------------------------------

    def visible(self, request: HttpRequest, incident_id: UUID) -> Incident:
        """Return an incident that this operator may see; raises ``Http404``, audited."""
        found: Incident | None = Incident.objects.filter(id=incident_id).first()
        require_readable(operator_of(request), Action.INSPECT, None if found is None else found.resource)
        return cast(Incident, found)

    def page_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """Answer with everything that is known about one incident."""
        incident = self.visible(request, object_id)
        return TemplateResponse(request, "ops/incident.html", self.incident_context(request, incident))

    def incident_context(self, request: HttpRequest, incident: Incident) -> dict[str, Any]:
        """Return what the page shows; the apps above add their own."""
        by = operator_of(request)
        may = allowed(by, incident.resource, self.button_actions())
        return self.page_context(
            request,
            f"{incident_name(incident)}: {incident.title}",
            incident=incident,
            name=incident_name(incident),
            state=state_words(incident),
            # It begins with the title, which stands above it.
            summary=incident.summary.removeprefix(f"{incident.title}.").strip(),
            buttons=self.buttons(incident, may, by),
            hidden=seen(incident),
            key=str(new_id()),
            may=may,
            timeline=self.timeline(incident),
            endings=self.endings(incident),
            repaired_words=repaired_words(incident),
            resolution=resolution_words(incident.resolution_code),
            resolution_text=resolution_text(incident.resolution_code, incident.resolution_summary),
        )

    def button_actions(self) -> tuple[Action, ...]:
        """Return the actions that the bar of an incident asks about."""
        return (Action.INCIDENTS_ACKNOWLEDGE, Action.INCIDENTS_RESOLVE, Action.INCIDENTS_CLOSE_UNREPAIRED)

    def buttons(self, incident: Incident, may: Allowed, by: Operator) -> Buttons:
        """Return what this operator may do to it now, and one line for each thing they may not."""
        found = Buttons()
        if incident.is_resolved:
            return found
        verbs = {Action.INCIDENTS_ACKNOWLEDGE: "Take it"}
        is_held = incident.state == IncidentState.ACKNOWLEDGED
        if Action.INCIDENTS_ACKNOWLEDGE in may:
            take = self.url("take", incident.id)
            if not is_held:
                found.bar.append(Button(label="Take it", url=take, is_primary=True, direct=True))
            elif incident.acknowledged_by != by.ref:
                found.more.append(Button(label=f"Take over from {incident.acknowledged_by_name}…", url=take))
        close = self.close_label(incident)
        verbs[Action.INCIDENTS_RESOLVE] = close
        if incident.unresolved_count:
            verbs[Action.INCIDENTS_CLOSE_UNREPAIRED] = close
        if all(action in may for action in verbs if action is not Action.INCIDENTS_ACKNOWLEDGE):
            found.more.append(Button(label=f"{close}…", url=self.url("close", incident.id), is_danger=True))
        found.missing = may.missing(verbs)
        return found

    @staticmethod
    def close_label(incident: Incident) -> str:
        """Return the words for closing: with the number, while there is one."""
        count = incident.unresolved_count
        if not count:
            return "Close"
        return f"Close without repairing {thousands(count)} {'job' if count == 1 else 'jobs'}"

    def timeline(self, incident: Incident) -> list[TimelineLine]:
        """Return what people and the system did to it, newest first; the app above adds what was done to its jobs."""
        events = AuditEvent.objects.filter(target_type="incident", target_id=str(incident.id), verdict=Verdict.ALLOWED)
        return [
            TimelineLine(
                at=event.at,
                who=event.operator_name,
                what=AUDIT_WORDS.get(event.action, event.action),
                detail="; ".join(filter(None, (_why(event), event.reason))),
                action=event.action,
            )
            for event in events.order_by("-at", "-id")[:TIMELINE_ROWS]
        ]

    def endings(self, incident: Incident) -> list[Ending]:
        """Return how it was closed before, newest first; how it is closed now stands above."""
        if incident.episode == 1:
            return []
        ends = EpisodeEnd.objects.filter(incident=incident)
        if incident.is_resolved:
            ends = ends.exclude(episode=incident.episode)
        return [
            Ending(
                at=end.resolved_at,
                episode=end.episode,
                who="by itself" if end.resolved_by_name == "system" else f"by {end.resolved_by_name}",
                why=resolution_words(end.resolution_code),
                text=resolution_text(end.resolution_code, end.resolution_summary),
                unrepaired=end.unrepaired_count,
            )
            for end in ends.order_by("-episode")[:20]
        ]

    def latest_change(self, incident: Incident) -> TimelineLine | None:
        """Return the newest thing that was done to it."""
        event = (
            AuditEvent.objects.filter(target_type="incident", target_id=str(incident.id), verdict=Verdict.ALLOWED)
            .order_by("-at", "-id")
            .first()
        )
        if event is None:
            return None
        return TimelineLine(at=event.at, who=event.operator_name, what=AUDIT_WORDS.get(event.action, event.action))

    def changed_words(self, incident: Incident) -> str:
        """Return who changed it since the page was opened, and how it stands now."""
        change = self.latest_change(incident)
        who = f"{change.who} {change.what} {ago(change.at)}. " if change is not None else ""
        holder = f" by {incident.acknowledged_by_name}" if incident.state == IncidentState.ACKNOWLEDGED else ""
        return f"{who}It is now: {state_words(incident)}{holder}. Nothing of yours was done; look again, then decide."

    # -- take ----------------------------------------------------------------------------------------------------------

    def take_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """Make the asking operator the holder: at once if nobody has it, else after a look at who does."""
        incident = self.visible(request, object_id)
        by = operator_of(request)
        page = self.url("page", object_id)
        if request.method == "POST":
            take_over = request.POST.get("take_over") == "yes"
            try:
                key = posted_key(request)
                done = with_version(
                    request.POST,
                    object_id,
                    lambda version: acknowledge_incident(
                        incident_id=object_id, by=by, key=key, version=version, take_over=take_over
                    ),
                )
            except IncidentChanged as refusal:
                if not _is_had_by(object_id, by):
                    return self.refuse(request, refusal, incident_id=object_id)
                messages.success(request, f"You have {incident_name(incident)}.")
                return HttpResponseRedirect(page)
            except OpsError as refusal:
                return self.refuse(request, refusal, incident_id=object_id)
            if done.holder == by.name:
                messages.success(request, f"You have {incident_name(incident)}{again(done.idempotent_replay)}")
            else:
                messages.warning(request, f"{done.holder} has it already. Nothing was changed.")
            return HttpResponseRedirect(page)
        require(by, Action.INCIDENTS_ACKNOWLEDGE, incident.resource, IncidentNotFound())
        if incident.state != IncidentState.ACKNOWLEDGED or incident.acknowledged_by == by.ref:
            return HttpResponseRedirect(page)
        since = ago(incident.acknowledged_at)
        return self.confirm(
            request,
            Confirmation(
                title=f"Take {incident_name(incident)} over from {incident.acknowledged_by_name}?",
                submit="Take it over",
                cancel_url=page,
                hidden={**seen(incident), "take_over": "yes"},
                sections=[
                    Section(
                        heading=f"{incident.acknowledged_by_name} has had it for {since.removesuffix(' ago')}",
                        tone="warn",
                        text="They are not told by this page; talk to them first.",
                    )
                ],
            ),
        )

    # -- close ---------------------------------------------------------------------------------------------------------

    def close_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """Close an incident whose jobs are not repaired: with its number, a code and a summary."""
        incident = self.visible(request, object_id)
        by = operator_of(request)
        require(by, Action.INCIDENTS_RESOLVE, incident.resource, IncidentNotFound())
        if incident.unresolved_count:
            require(by, Action.INCIDENTS_CLOSE_UNREPAIRED, incident.resource, IncidentNotFound())
        if request.method != "POST":
            if incident.is_resolved:
                messages.info(request, "It is closed already.")
                return HttpResponseRedirect(self.url("page", object_id))
            return self.confirm(request, self.closing(incident, CloseForm()))
        form = CloseForm(request.POST)
        if not form.is_valid():
            return self.confirm(request, self.closing(incident, form, request.POST), status=400)
        try:
            key = posted_key(request)
            unrepaired = posted_number(request.POST.get("unrepaired"))
            done = with_version(
                request.POST,
                object_id,
                lambda version: resolve_incident(
                    incident_id=object_id, by=by, key=key, version=version, unrepaired=unrepaired, **form.cleaned_data
                ),
            )
        except OpsError as refusal:
            return self.refuse(request, refusal, incident_id=object_id)
        messages.success(request, f"{incident_name(incident)} is closed{again(done.idempotent_replay)}")
        return HttpResponseRedirect(self.url("page", object_id))

    def closing(self, incident: Incident, form: CloseForm, posted: Any = None) -> Confirmation:
        """Return the confirmation of closing; a form that was filled in wrongly keeps its key and what was seen."""
        count = incident.unresolved_count
        label = self.close_label(incident)
        section = Section(
            heading=f"{thousands(count)} {'job is' if count == 1 else 'jobs are'} not repaired"
            if count
            else "Close it",
            tone="bad",
            text=(
                f"Their work is not done, and nobody will be reminded. {self.undone_words(incident)}"
                if count
                else "No job of it waits for a decision. A new failure opens the incident again."
            ),
        )
        hidden = {**seen(incident), "unrepaired": str(count)}
        if posted is not None:
            hidden = {name: str(posted.get(name, "")) for name in hidden}
        return Confirmation(
            title=f"{label} of {incident_name(incident)}?" if count else f"Close {incident_name(incident)}?",
            submit=f"Close, leave {thousands(count)} {'job' if count == 1 else 'jobs'} undone" if count else "Close it",
            cancel_url=self.url("page", incident.id),
            sections=[section],
            form=form,
            hidden=hidden,
            is_danger=True,
            key=str(posted.get("idempotency_key", "")) if posted is not None else "",
        )

    def undone_words(self, incident: Incident) -> str:  # noqa: ARG002
        """Return what becomes of jobs that are left undone; the app above knows them."""
        return "Each can still be retried from its own page. A new failure opens the incident again."

    # -- refusals ------------------------------------------------------------------------------------------------------

    def refuse(self, request: HttpRequest, refusal: OpsError, *, incident_id: UUID) -> HttpResponse:
        """Answer a refused change: by the site for what is not theirs, else with the reason and the new state."""
        if refusal.status in (401, 403, 404):
            raise refusal
        incident = Incident.objects.get(id=incident_id)
        changed = self.changed_words(incident) if refusal.status in (409, 412) else ""
        return self.confirm(
            request,
            Confirmation(
                title=f"{incident_name(incident)} was not changed",
                submit="",
                cancel_url=self.url("page", incident_id),
            ),
            refusal=refusal,
            changed=changed,
        )


def _is_had_by(incident_id: UUID, by: Operator) -> bool:
    """Say whether somebody has an incident already: what another page of theirs asks for is so then."""
    return Incident.objects.filter(id=incident_id, state=IncidentState.ACKNOWLEDGED, acknowledged_by=by.ref).exists()


def _why(event: AuditEvent) -> str:
    """Return why it was closed or opened again, where its row of the trail says so."""
    outcome = json.loads(event.outcome)
    if event.action == RESOLVED:
        return resolution_words(str(outcome.get("code") or outcome.get("resolution") or ""))
    if event.action == "operations.incident_reopened":
        return REOPENED_WORDS.get(str(outcome.get("reason", "")), "")
    return ""


def seen(incident: Incident) -> dict[str, str]:
    """Return what a form carries of the incident as it was looked at."""
    return {"version": str(incident.version), "standing": standing_of(incident)}


def with_version(posted: Mapping[str, Any], incident_id: UUID, change: Callable[[int], T]) -> T:
    """Make a change against the version that was looked at; raises ``IncidentChanged``.

    Every further failure raises the version too. Where only counts moved, the decision still stands, so the newest
    version is sent in its place: in a storm of failures nobody could take an incident otherwise.
    """
    for attempt in range(TRIES):
        try:
            return change(_version_seen(posted, incident_id))
        except IncidentChanged:
            if attempt == TRIES - 1 or not _still_stands(posted, incident_id):
                raise
    raise AssertionError("the last try returns or raises")


def _version_seen(posted: Mapping[str, Any], incident_id: UUID) -> int:
    version = posted_number(posted.get("version"))
    incident = Incident.objects.filter(id=incident_id).first()
    if version is not None and incident is not None and posted.get("standing") == standing_of(incident):
        return int(incident.version)
    return -1 if version is None else version


def _still_stands(posted: Mapping[str, Any], incident_id: UUID) -> bool:
    incident = Incident.objects.filter(id=incident_id).first()
    return incident is not None and posted.get("standing") == standing_of(incident)


def posted_number(text: Any) -> int | None:
    """Return a posted count, or None for what is none."""
    return int(text) if isinstance(text, str) and re.fullmatch(r"[0-9]{1,18}", text) else None
