"""Incidents in the console: the list, the page's own half, take it and close it.

What is above this app (jobs, repairs) adds its half in ``repairs.admin``, whose class is the one that is registered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, TypeVar, cast
from urllib.parse import urlencode
from uuid import UUID

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.views.main import ChangeList
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseNotModified, HttpResponseRedirect, JsonResponse
from django.template.response import TemplateResponse

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
    seen_by,
)
from grants.resources import ANY
from grants.selectors import tenants_named
from incidents import search, sql
from incidents.errors import IncidentChanged, IncidentNotFound
from incidents.models import Incident, IncidentState, Severity
from incidents.services import (
    ACKNOWLEDGED,
    RELEASED,
    RESOLVED,
    acknowledge_incident,
    release_incident,
    resolve_incident,
)
from incidents.story import END, EVENT, Told, event_parts
from incidents.visits import is_new_since, last_visit, note_visit
from opsconsole.core.admin import (
    Cell,
    ChoiceFilter,
    KeysetChangeList,
    NotAListParameter,
    Pill,
    TextFilter,
    again,
    ago,
    capped,
    tab_counts,
    thousands,
    when,
)
from opsconsole.core.bounded import capped_counts, rows_of
from opsconsole.core.database import database_now
from opsconsole.core.errors import OpsError
from opsconsole.core.ids import new_id
from opsconsole.core.search import search_context

T = TypeVar("T")

STATE_WORDS = {IncidentState.OPEN: "Open", IncidentState.ACKNOWLEDGED: "Taken", IncidentState.RESOLVED: "Closed"}
REOPENED = "operations.incident_reopened"
REOPENED_WORDS = {
    "repair_failed": "Repair failed",
    "severity_rose": "Became worse",
    "count_passed": "More failures than agreed",
}
AUDIT_WORDS = {
    ACKNOWLEDGED: "took it",
    RELEASED: "gave it back",
    RESOLVED: "closed it",
    "operations.incident_opened": "opened it",
    REOPENED: "opened it again",
    "operations.incident_retry_applied": "retried jobs of it",
    "holds.placed": "put the hold on these jobs",
    "holds.extended": "moved the end of the hold",
    "holds.ended": "ended the hold; what it has put aside stays so",
    "holds.expired": "noted that the time of the hold was over; what it has put aside stays so",
}
UNTIL_WORDS = {
    "repair_failed": "until a repair failed",
    "severity_rose": "until it became worse",
    "count_passed": "until there were more failures than agreed",
    "recurred": "until it failed again",
}
"""What ended an acknowledgement (C1)."""
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
SINCE, KNOWN = "since", "known"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
SEEN_LATE = timedelta(minutes=1)
"""Longer than it takes until others see what a worker records: it reads the clock before it commits."""
MOST_NEWER = 100
MOST_TENANTS = 50
TIMELINE_ROWS = 50
ENDINGS_SHOWN = 20
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


def newer_answer(request: HttpRequest, count: int) -> HttpResponse:
    """Answer a page that asks how many rows are newer: ``count`` stopped at ``MOST_NEWER`` or just beyond."""
    newer = capped(count, MOST_NEWER)
    answer = JsonResponse({"newer": 0 if newer == "0" else newer})
    answer["ETag"] = f'"{newer}"'
    if request.headers.get("If-None-Match") == answer["ETag"]:
        return HttpResponseNotModified(headers={"ETag": answer["ETag"]})
    return answer


def in_microseconds(moment: datetime) -> int:
    """Return a moment as an address carries it."""
    return (moment - EPOCH) // MICROSECOND


def asked_since(request: HttpRequest) -> datetime:
    """Return since when a page asks what is newer; raises ``NotAListParameter`` for what is no moment."""
    since = request.GET.get(SINCE, "")
    if re.fullmatch(r"[0-9]{1,16}", since, re.ASCII) is None or "q" in request.GET:
        raise NotAListParameter("no such time")
    return EPOCH + int(since) * MICROSECOND


def asked_known(request: HttpRequest) -> list[int]:
    """Return the numbers of the incidents that a page knew of already; raises ``NotAListParameter``."""
    known = request.GET.get(KNOWN, "")
    if not known:
        return []
    if len(known) > 20 * MOST_NEWER or re.fullmatch(r"[0-9]{1,18}(,[0-9]{1,18})*", known, re.ASCII) is None:
        raise NotAListParameter("no such incidents")
    return [int(number) for number in known.split(",")]


def read_at(request: HttpRequest) -> datetime:
    """Return the database's clock, read once for each request (C12)."""
    found: datetime | None = getattr(request, "_ops_read_at", None)
    if found is None:
        found = database_now()
        cast(Any, request)._ops_read_at = found
    return found


def repaired_words(incident: Incident, ends: Iterable[Told]) -> str:
    """Return how many jobs are not repaired; of a closed incident, how many were when it was closed (``ends``)."""
    count, noun = incident.letter_count, "job" if incident.letter_count == 1 else "jobs"
    if not incident.is_resolved:
        return f"{thousands(incident.unresolved_count)} of {thousands(count)} {noun} not repaired"
    left = next((end.second for end in ends if end.number == incident.episode), 0)
    if left:
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
    held_by: str = ""  # who had it before this
    reason: str = ""  # the code of why it opened again


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
        plan = seen_by(request, self.action)
        names = tenants_named(operator_of(request), self.action, MOST_TENANTS + 1, plan=plan)
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


class UnreadChangeList(KeysetChangeList):
    """The filters of a list without its rows, for who only asks how many are newer."""

    def get_filters_params(self, params: Any = None) -> Any:
        """Return what filters may read: not since when, nor what was known then."""
        found = super().get_filters_params(params)
        for name in (SINCE, KNOWN):
            found.pop(name, None)
        return found

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
    tells_scope = True
    has_saved_views = True
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
        ("release", "<uuid:object_id>/release/", "release_view"),
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
        new = [Pill(text="New to you", kind="info")] if getattr(row, "is_new", False) else []
        return Cell(pills=[Pill(text=state_words(row), kind=state_kind(row)), *new])

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
        return UnreadChangeList if asked == self.url_name("newer") else KeysetChangeList

    def list_context(self, request: HttpRequest, cl: KeysetChangeList) -> dict[str, Any]:
        """Add what the search says."""
        visit = last_visit(request, operator_of(request), read_at(request))
        for row in cl.result_list:
            cast(Any, row).is_new = is_new_since(row, visit)
        cast(Any, request)._ops_tabs = None if cl.query.strip() else self.rows_of_tabs(request, cl)
        return {**super().list_context(request, cl), **search_context(cl.queryset)}

    def show_list(self, request: HttpRequest) -> HttpResponse:
        """Answer with the list, and let the browser remember when it was looked at."""
        response = super().show_list(request)
        note_visit(request, response, operator_of(request), read_at(request), path=self.url("changelist"))
        return response

    def list_tabs(self, request: HttpRequest) -> list[tuple[str, str, dict[str, str], str | None]]:
        """Return the tabs with how many incidents each has under the other filters: one statement counts for all.

        A search would have to be made for each of them; what it finds is not counted.
        """
        rows, by = cast(Any, request)._ops_tabs, operator_of(request)
        counts: Sequence[str | None] = [None] * len(TABS)
        if rows is not None:
            counts = tab_counts([in_tab(rows, tab, by) for tab in TABS])
        return [
            (tab or "all", label, {StateFilter.parameter_name: tab}, count)
            for (tab, label), count in zip(TABS.items(), counts, strict=True)
        ]

    def newer_url(self, request: HttpRequest, cl: KeysetChangeList) -> str:
        """Return where a page asks how many incidents have come to its tab since, by the database's clock (C12).

        What opened shortly before may be seen only later. So those of the last minute that the page does know are
        named; where they are too many for an address, what comes late is not told.
        """
        if cl.query:
            return ""
        now = read_at(request)
        rows = cast(Any, request)._ops_tabs.filter(opened_at__gt=now - SEEN_LATE)
        known = list(rows.order_by().values_list("number", flat=True)[: MOST_NEWER + 1])
        kept = {name: value for name, value in request.GET.items() if self.lookup_allowed(name, str(value), request)}
        asked: dict[str, Any] = {**kept, SINCE: in_microseconds(now)}
        if len(known) <= MOST_NEWER:
            asked[KNOWN] = ",".join(map(str, known)) or "0"
        return f"{self.url('newer')}?{urlencode(asked)}"

    def newer_view(self, request: HttpRequest) -> HttpResponse:
        """Answer how many incidents of a tab were opened, or came back, after a page of it was made."""
        self.require_list(request)
        since, known = asked_since(request), asked_known(request)
        newer = Q(opened_at__gt=since)
        if known:
            newer |= Q(opened_at__gt=since - SEEN_LATE) & ~Q(number__in=known)
        cl: Any = self.get_changelist_instance(request)
        rows = next(spec for spec in cl.filter_specs if isinstance(spec, StateFilter)).queryset(
            request, self.rows_of_tabs(request, cl)
        )
        return newer_answer(request, sum(capped_counts([rows.filter(newer)], MOST_NEWER)))

    # -- page ----------------------------------------------------------------------------------------------------------

    def visible(self, request: HttpRequest, incident_id: UUID) -> Incident:
        """Return an incident that this operator may see; raises ``Http404``, audited."""
        found: Incident | None = Incident.objects.filter(id=incident_id).first()
        require_readable(request, Action.INSPECT, None if found is None else found.resource)
        return cast(Incident, found)

    def page_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """Answer with everything that is known about one incident."""
        incident = self.visible(request, object_id)
        return TemplateResponse(request, "ops/incident.html", self.incident_context(request, incident))

    def incident_context(self, request: HttpRequest, incident: Incident) -> dict[str, Any]:
        """Return what the page shows; the app above adds its own."""
        told = [Told(*row) for row in rows_of(event_parts(incident))]
        return self.told_context(request, incident, told)

    def told_context(self, request: HttpRequest, incident: Incident, told: Sequence[Told]) -> dict[str, Any]:
        """Return what the page shows of the incident itself; ``told`` are the rows of its ``event_parts``."""
        ends = [row for row in told if row.part == END]
        by = operator_of(request)
        may = allowed(request, incident.resource, self.button_actions())
        timeline = self.timeline(told)
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
            timeline=timeline,
            lost=lost_words(incident, timeline),
            endings=self.endings(incident, ends),
            repaired_words=repaired_words(incident, ends),
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
        if is_held and (incident.acknowledged_by == by.ref or Action.INCIDENTS_ACKNOWLEDGE in may):
            is_theirs = incident.acknowledged_by == by.ref
            label = "Give it back" if is_theirs else f"Give it back for {incident.acknowledged_by_name}…"
            found.more.append(Button(label=label, url=self.url("release", incident.id), direct=is_theirs))
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

    def timeline(self, told: Iterable[Told]) -> list[TimelineLine]:
        """Return what people and the system did to it, newest first; the app above adds what was done to its jobs."""
        return [_line(event) for event in told if event.part == EVENT]

    def endings(self, incident: Incident, ends: Iterable[Told]) -> list[Ending]:
        """Return how it was closed before, newest first; how it is closed now stands above."""
        return [
            Ending(
                at=end.moment,
                episode=end.number,
                who="by itself" if end.name == "system" else f"by {end.name}",
                why=resolution_words(end.what),
                text=resolution_text(end.what, end.text),
                unrepaired=end.second,
            )
            for end in ends
            if not (incident.is_resolved and end.number == incident.episode)
        ][:ENDINGS_SHOWN]

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

    # -- give back -----------------------------------------------------------------------------------------------------

    def release_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """Let it go: at once for its holder, for anybody else after a look at who that is."""
        incident = self.visible(request, object_id)
        by = operator_of(request)
        page = self.url("page", object_id)
        if request.method == "POST":
            try:
                key = posted_key(request)
                done = with_version(
                    request.POST,
                    object_id,
                    lambda version: release_incident(incident_id=object_id, by=by, key=key, version=version),
                )
            except OpsError as refusal:
                return self.refuse(request, refusal, incident_id=object_id)
            said = f"Nobody has {incident_name(incident)} now" if done.changed else "Nobody had it"
            messages.success(request, f"{said}{again(done.idempotent_replay)}")
            return HttpResponseRedirect(page)
        if incident.acknowledged_by != by.ref:
            require(by, Action.INCIDENTS_ACKNOWLEDGE, incident.resource, IncidentNotFound())
        if incident.state != IncidentState.ACKNOWLEDGED:
            return HttpResponseRedirect(page)
        is_theirs = incident.acknowledged_by == by.ref
        has_had = "You have had it" if is_theirs else f"{incident.acknowledged_by_name} has had it"
        section = Section(
            heading=f"{has_had} for {ago(incident.acknowledged_at).removesuffix(' ago')}",
            tone="warn",
            text="Nobody has it then, and it stands under Needs action again. Nobody is told by this page.",
        )
        asked = Confirmation(
            title=f"Give {incident_name(incident)} back?",
            submit="Give it back",
            cancel_url=page,
            hidden=seen(incident),
            sections=[section],
        )
        return self.confirm(request, asked)

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
        return "A new failure opens the incident again."

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


def lost_words(incident: Incident, timeline: Sequence[TimelineLine]) -> str:
    """Return who had it until what, of one that has lost its acknowledgement and that nobody has taken since (C1)."""
    if incident.state != IncidentState.OPEN:
        return ""
    last = next((line for line in timeline if line.action in (REOPENED, RELEASED, ACKNOWLEDGED)), None)
    if last is None or last.action != REOPENED or not last.held_by:
        return ""
    until = UNTIL_WORDS.get(last.reason, "until it opened again")
    return f"Was taken by {last.held_by} {until} at {when(last.at)} UTC. Nobody has it now."


def _line(event: Told) -> TimelineLine:
    """Return an event of an incident as a line of its timeline."""
    outcome = json.loads(event.more)
    return TimelineLine(
        at=event.moment,
        who=event.name,
        what=AUDIT_WORDS.get(event.what, event.what),
        detail="; ".join(filter(None, (_why(event, outcome), event.text))),
        action=event.what,
        held_by=str(outcome.get("heldBy") or ""),
        reason=str(outcome.get("reason") or "") if event.what == REOPENED else "",
    )


def _is_had_by(incident_id: UUID, by: Operator) -> bool:
    """Say whether somebody has an incident already: what another page of theirs asks for is so then."""
    return Incident.objects.filter(id=incident_id, state=IncidentState.ACKNOWLEDGED, acknowledged_by=by.ref).exists()


def _why(event: Told, outcome: Mapping[str, Any]) -> str:
    """Return why it was closed or opened again, or whose it was, where its row of the trail says so."""
    if event.what == RESOLVED:
        return resolution_words(str(outcome.get("code") or outcome.get("resolution") or ""))
    if event.what == REOPENED:
        return REOPENED_WORDS.get(str(outcome.get("reason", "")), "")
    if event.what in ("holds.placed", "holds.extended"):
        return f"until {when(datetime.fromisoformat(str(outcome['endsAt'])))} UTC"
    if event.what == RELEASED and outcome.get("heldBy") not in ("", event.name, None):
        return f"{outcome['heldBy']} had it"
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
