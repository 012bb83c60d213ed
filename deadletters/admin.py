"""Failed jobs and workers in the console: what is known of them. What can be done is in ``repairs.admin``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar, cast
from urllib.parse import urlencode
from uuid import UUID

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.db.models import QuerySet
from django.db.models.functions import Now
from django.http import Http404, HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils import timezone

from deadletters import conf, search
from deadletters.arguments import parse_signature
from deadletters.history import MOST_FAILURES, JobHistory, KnownFailure, history_of
from deadletters.models import DECIDABLE, DeadLetter, LetterState, WorkerNode
from deadletters.outcome import PUT_ASIDE, OutcomeClass
from deadletters.querysets import NODE_IS_GONE_AFTER
from grants.actions import Action
from grants.pages import OperatorAdmin, require_readable, seen_by
from incidents.admin import (
    MOST_NEWER,
    SINCE,
    Buttons,
    TenantFilter,
    UnreadChangeList,
    asked_since,
    in_microseconds,
    incident_name,
    incident_number,
    newer_answer,
)
from incidents.models import Incident
from opsconsole.core.admin import (
    LONGEST_TEXT,
    Cell,
    ChoiceFilter,
    KeysetChangeList,
    Pill,
    TextFilter,
    ago,
    tab_counts,
    thousands,
    when,
)
from opsconsole.core.bounded import capped_counts
from opsconsole.core.search import search_context
from opsconsole.jobs.tokens import job_id_of

STATE_WORDS = {
    "open": "Needs a decision",
    "acknowledged": "Needs a decision",
    "resolved": "Closed without repair",
    "held": "On hold",
    "retrying": "Sent, awaiting result",
    "repaired": "Repaired",
    "already_done": "Closed, had already happened",
    "discarded": "Discarded",
    "overtaken": "Succeeded after all",
}
STATE_KINDS = {
    "acknowledged": "state-open",
    "already_done": "good",
    "overtaken": "good",
}
"""Classes of pills where they are not the state's own; who has the incident of an open job is not its state."""
OUTCOME_WORDS = {
    OutcomeClass.SAFE.value: "Safe to run again",
    OutcomeClass.AMBIGUOUS.value: "May already have happened",
    OutcomeClass.NOT_DECLARED.value: "Not declared",
}
OUTCOME_TONES = {
    OutcomeClass.SAFE.value: "good",
    OutcomeClass.AMBIGUOUS.value: "warn",
    OutcomeClass.NOT_DECLARED.value: "grey",
}
NODE_IS_LATE_AFTER = timedelta(seconds=30)
HEAVY = ("payload_preview", "call_site", "trace_id", "sentry_id")
"""Columns that a list does not show and that may be long."""
UNINDEXED = ("outcome", "queue")
"""Filters whose rows no index holds together."""


def letter_name(letter: DeadLetter) -> str:
    """Return what a list calls a job."""
    return letter.job_id or letter.task_id or str(letter.id)


def letter_words(letter: DeadLetter, incident: Incident) -> str:
    """Return the state of a job as a person says it."""
    return STATE_WORDS[letter.standing(incident)]


def letter_kind(letter: DeadLetter, incident: Incident) -> str:
    """Return the class of the pill that says the state."""
    standing = letter.standing(incident)
    return STATE_KINDS.get(standing, f"state-{standing}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRow:
    """One run of a job that ended badly: retried by Celery, or final."""

    at: datetime
    what: str
    attempt: int
    took: str
    error_class: str
    error_text: str
    outcome: str
    tone: str
    reason: str
    worker: str
    release: str
    is_the_reason: bool
    is_exact: bool
    run: str = ""  # what its attempts are numbered in, where that is not the job's own first run


class LetterStateFilter(ChoiceFilter):
    """By what a job waits for; the list begins with what waits for a person."""

    title = "state"
    parameter_name = "state"
    default = "decision"
    TABS = (
        ("decision", "Needs a decision"),
        *((state.value, STATE_WORDS[state.value]) for state in LetterState if state != LetterState.OPEN),
    )

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return what a job can wait for, and how it can end."""
        return list(self.TABS)

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:  # noqa: ARG002
        """Keep the jobs in that state."""
        return in_tab(queryset, self.value())


def in_tab(letters: Any, tab: str) -> Any:
    """Return the jobs of one tab."""
    if tab == "decision":
        return letters.unresolved().filter(state=LetterState.OPEN)
    if tab == LetterState.HELD:
        return letters.held()
    return letters.filter(state=tab) if tab else letters


class OutcomeFilter(ChoiceFilter):
    """By outcome class."""

    title = "outcome"
    parameter_name = "outcome"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return the classes."""
        return list(OUTCOME_WORDS.items())

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:  # noqa: ARG002
        """Keep the jobs of that class."""
        return queryset.filter(outcome_class=self.value()) if self.value() else queryset


class IncidentNumberFilter(TextFilter):
    """By the number of the incident."""

    title = "incident number"
    parameter_name = "incident"

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:  # noqa: ARG002
        """Keep the rows of that incident."""
        if not self.typed:
            return queryset
        number = incident_number(self.typed)
        return queryset.none() if number is None else queryset.filter(incident__number=number)


class QueueFilter(TextFilter):
    """By the queue that a job came from."""

    title = "queue"
    parameter_name = "queue"


class SeenFilter(ChoiceFilter):
    """By when a job last failed, by the database's clock."""

    title = "last failure"
    parameter_name = "seen"
    all_label = "At any time"
    SPANS: ClassVar[dict[str, timedelta]] = {"hour": timedelta(hours=1), "day": timedelta(days=1)}

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return the spans."""
        return [("hour", "In the last hour"), ("day", "In the last 24 hours")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:  # noqa: ARG002
        """Keep the jobs that failed since then."""
        chosen = self.value()
        return queryset.filter(last_seen_at__gte=Now() - self.SPANS[chosen]) if chosen else queryset


class DeadLetterAdmin(OperatorAdmin):
    """The list of failed jobs, and a page for each."""

    slug = "dead-letters"
    menu_label = list_title = "Failed jobs"
    menu_order = 20
    list_note = "Newest failure first."
    tells_scope = True
    has_saved_views = True
    tab_parameter = LetterStateFilter.parameter_name
    search_label = "Search"
    search_help_text = search.HELP
    search_fields = ("task_id",)
    keyset = ("-last_seen_at", "-id")
    columns = ("job", "state", "outcome", "error", "last", "incident")
    column_classes = {
        "job": "ops-id",
        "state": "ops-bare",
        "outcome": "ops-bare",
        "error": "ops-bare ops-wide",
        "last": "ops-nowrap",
        "incident": "ops-nowrap ops-folded",
    }
    folds_on_phone = True
    list_template = "ops/incident_list.html"
    list_filter = (LetterStateFilter, OutcomeFilter, SeenFilter, TenantFilter, QueueFilter, IncidentNumberFilter)
    list_select_related = ("incident",)
    pages: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("newer", "newer/", "newer_view"),
        ("page", "<uuid:object_id>/", "page_view"),
        ("traceback", "<uuid:object_id>/traceback/<uuid:occurrence_id>/", "traceback_view"),
    )

    # -- list ----------------------------------------------------------------------------------------------------------

    @admin.display(description="Job")
    def job(self, row: DeadLetter) -> Cell:
        parts = [row.job_type, f"queue {row.queue}" if row.queue else "", row.tenant]
        return Cell(main=letter_name(row), second=" · ".join(part for part in parts if part))

    @admin.display(description="State")
    def state(self, row: DeadLetter) -> Cell:
        return Cell(pills=[Pill(text=letter_words(row, row.incident), kind=letter_kind(row, row.incident))])

    @admin.display(description="If run again")
    def outcome(self, row: DeadLetter) -> Cell | str:
        if row.state not in DECIDABLE:
            return ""
        pill = Pill(text=OUTCOME_WORDS[row.outcome_class], kind=OUTCOME_TONES[row.outcome_class])
        return Cell(pills=[pill], second=row.outcome_reason)

    @admin.display(description="Error")
    def error(self, row: DeadLetter) -> str:
        text = f"{row.error_class.rpartition('.')[2]}: {row.error_text}"
        return text if len(text) <= 160 else f"{text[:160]}…"

    @admin.display(description="Last failure")
    def last(self, row: DeadLetter) -> Cell:
        return Cell(at=row.last_seen_at, second=_last_run(row))

    @admin.display(description="Incident")
    def incident(self, row: DeadLetter) -> Cell:
        url = reverse("admin:ops_incidents_incident_page", args=[row.incident_id], current_app=self.admin_site.name)
        return Cell(main=incident_name(row.incident), url=url)

    def list_tabs(self, request: HttpRequest) -> list[tuple[str, str, dict[str, str], str | None]]:
        """Return the states as tabs, with how many jobs each has where that costs little: one statement counts for all.

        Jobs may be a million, so what is counted are ranges of an index. Not counted is what a search finds, what a
        filter without an index leaves, and what grants over parts of tenants show, which are looked up row by row.
        """
        tabs = [*LetterStateFilter.TABS, ("", "All")]
        rows = cast(Any, request)._ops_tabs
        counts: Sequence[str | None] = [None] * len(tabs)
        if rows is not None:
            counts = tab_counts([rows.waiting() if key == "decision" else in_tab(rows, key) for key, _label in tabs])
        return [
            (key or "all", label, {LetterStateFilter.parameter_name: key}, count)
            for (key, label), count in zip(tabs, counts, strict=True)
        ]

    def get_queryset(self, request: HttpRequest) -> Any:
        """Return the visible jobs without what a list does not show."""
        return super().get_queryset(request).defer(*HEAVY)

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        """Find jobs as ``deadletters.search`` says: nothing redacted can be found."""
        if not search_term.strip():
            return queryset, False
        anywhere = self.get_queryset(request).select_related("incident").order_by(*self.keyset)
        return search.search_letters(search_term, within=queryset, anywhere=anywhere), False

    def list_context(self, request: HttpRequest, cl: Any) -> dict[str, Any]:
        """Add what the search says."""
        is_narrowed = any(spec.parameter_name in UNINDEXED and spec.value() for spec in cl.filter_specs)
        is_dear = bool(cl.query.strip() or is_narrowed or seen_by(request, self.action).shapes)
        cast(Any, request)._ops_tabs = None if is_dear else self.rows_of_tabs(request, cl)
        return {**super().list_context(request, cl), **search_context(cl.queryset)}

    def get_changelist(self, request: HttpRequest, **_: Any) -> type[ChangeList]:
        """Return the list by key, or its filters alone."""
        asked = request.resolver_match.url_name if request.resolver_match is not None else ""
        return UnreadChangeList if asked == self.url_name("newer") else KeysetChangeList

    def newer_url(self, request: HttpRequest, cl: KeysetChangeList) -> str:
        """Return where the first page asks how many jobs have failed since the one at its top."""
        if cl.query or not cl.is_first_page:
            return ""
        since = in_microseconds(cl.result_list[0].last_seen_at) if cl.result_list else 0
        kept = {name: value for name, value in request.GET.items() if self.lookup_allowed(name, str(value), request)}
        return f"{self.url('newer')}?{urlencode({**kept, SINCE: since})}"

    def newer_view(self, request: HttpRequest) -> HttpResponse:
        """Answer how many jobs of a tab stand above the one that was at its top; no dearer than the list itself."""
        self.require_list(request)
        since = asked_since(request)
        cl: Any = self.get_changelist_instance(request)
        rows = cl.queryset.filter(last_seen_at__gt=since)
        return newer_answer(request, sum(capped_counts([rows], MOST_NEWER)))

    # -- page ----------------------------------------------------------------------------------------------------------

    def visible(self, request: HttpRequest, letter_id: UUID) -> DeadLetter:
        """Return a job that this operator may see, with its incident; raises ``Http404``, audited."""
        found: DeadLetter | None = DeadLetter.objects.select_related("incident").filter(id=letter_id).first()
        require_readable(request, Action.INSPECT, None if found is None else found.resource)
        return cast(DeadLetter, found)

    def page_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """Answer with everything that is known about one failed job."""
        letter = self.visible(request, object_id)
        return TemplateResponse(request, "ops/dead_letter.html", self.letter_context(request, letter))

    def letter_context(
        self, request: HttpRequest, letter: DeadLetter, runs: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Return what the page shows; the app above adds repairs and buttons.

        ``runs`` are further task ids under which the job has run, each with what the run is called.
        """
        incident = letter.incident
        return self.page_context(
            request,
            f"{letter.job_type} {letter_name(letter)}",
            incident=incident,
            incident_name=incident_name(incident),
            state=letter_words(letter, incident),
            outcome=OUTCOME_WORDS[letter.outcome_class],
            tone=OUTCOME_TONES[letter.outcome_class],
            is_open=letter.state in DECIDABLE,
            facts=_facts(letter),
            buttons=Buttons(),
            # The job's own run needs no name.
            **job_context(letter, {**(runs or {}), letter.task_id: ""}, site=self.admin_site.name),
        )

    def traceback_view(self, request: HttpRequest, object_id: UUID, occurrence_id: UUID) -> HttpResponse:
        """Answer with a whole traceback as a text file."""
        letter = self.visible(request, object_id)
        found = letter.occurrences.select_related("traceback").filter(id=occurrence_id).first()
        if found is None or found.traceback is None:
            raise Http404
        return HttpResponse(
            found.traceback_text,
            content_type="text/plain; charset=utf-8",
            headers={"Content-Disposition": f'attachment; filename="traceback-{occurrence_id}.txt"'},
        )


def job_context(letter: DeadLetter, runs: Mapping[str, str], *, site: str) -> dict[str, Any]:
    """Return what a page shows of one job: every attempt, the newest traceback as far as a page goes, the arguments.

    However long a traceback or an error is, only what is shown of it is read.
    """
    known = history_of(letter, runs, longest=LONGEST_TEXT + 1)
    text, url = _traceback_head(known), ""
    if known.traced is not None:
        url = reverse("admin:ops_deadletters_deadletter_traceback", args=[letter.id, known.traced], current_app=site)
    return {
        "letter": letter,
        "history": history_rows(letter, runs, known),
        "attempt_words": attempt_words(letter, known.finals),
        "history_limit": MOST_FAILURES,
        "traceback": text,
        "traceback_lines": len(text.splitlines()),
        "traceback_url": url,
        "traceback_is_cut": len(text) > LONGEST_TEXT,
        "preview": letter.payload_preview,
    }


def _traceback_head(known: JobHistory) -> str:
    """Return the newest traceback, one character more of it than a page shows; without its error it ends in that."""
    head = known.traceback
    if not head or len(head) > LONGEST_TEXT or head.endswith("\n"):
        return head
    error = next((one.short_text for one in known.finals if one.id == known.traced), "")
    return f"{head}{error}\n"


def times_sent(task_id: str) -> int | None:
    """Return how often the ledger had sent a job with this message, which has an id of its own: ``None`` for others.

    Such a job is tried again by a new message, whose attempt is always the first one.
    """
    number = task_id.split(":")[2:3]
    return int(number[0]) if job_id_of(task_id) is not None and number and number[0].isdecimal() else None


def _last_run(letter: DeadLetter) -> str:
    sent = times_sent(letter.task_id)
    if sent is not None:
        return "sent once" if sent == 1 else f"sent {thousands(sent)} times"
    return f"{thousands(letter.attempts)} attempt{'' if letter.attempts == 1 else 's'}"


def attempt_words(letter: DeadLetter, finals: Sequence[KnownFailure] = ()) -> str:
    """Return how many attempts a job has had: in all runs if all their failures are given, else in the last one."""
    runs = letter.occurrence_count
    if times_sent(letter.task_id) is not None:
        return _last_run(letter)
    if 1 < len(finals) < MOST_FAILURES:
        return f"{thousands(sum(one.retries + 1 for one in finals))} attempts in {len(finals)} runs"
    last = _last_run(letter)
    return f"{last} in the last of {thousands(runs)} runs" if runs > 1 else last


def history_rows(letter: DeadLetter, runs: Mapping[str, str], known: JobHistory) -> list[HistoryRow]:
    """Return every run that is known to have ended badly, newest first, those that Celery retried included."""
    rows = [
        *(_of_attempt(one, letter, runs) for one in known.attempts),
        *(_of_occurrence(one, letter, runs) for one in known.finals),
    ]
    return sorted(rows, key=lambda row: (row.at, row.attempt), reverse=True)[:MOST_FAILURES]


def _facts(letter: DeadLetter) -> list[tuple[str, str]]:
    """Return the names and values of what is known beside the error; empty ones are left out."""
    pairs = (
        ("Tenant", letter.tenant),
        ("Actor", f"{letter.actor_type} {letter.actor_id}".strip()),
        ("Source", letter.source),
        ("Queue", letter.queue),
        ("Exchange", letter.exchange),
        ("Routing key", letter.routing_key),
        ("Priority", "" if letter.priority is None else str(letter.priority)),
        ("Job id", letter.job_id),
        ("Task id", letter.task_id),
        ("Root id", letter.root_id),
        ("Parent id", letter.parent_id),
        ("Group id", letter.group_id),
        ("Chord id", letter.chord_id),
        ("Worker", letter.worker),
        ("Release", letter.release),
        ("Caught by", letter.caught),
        ("Innermost own code", letter.call_site),
        ("Trace id", letter.trace_id),
        ("Sentry id", letter.sentry_id),
        ("Message", letter.message_state),
        ("Attempts", "" if times_sent(letter.task_id) else thousands(letter.attempts)),
        ("Sent", _last_run(letter).removeprefix("sent ") if times_sent(letter.task_id) else ""),
        ("Final failures", thousands(letter.occurrence_count)),
        ("First failure", when(letter.first_seen_at)),
        ("Last failure", when(letter.last_seen_at)),
        ("Closed", when(letter.closed_at)),
        ("Fingerprint", letter.fingerprint),
    )
    return [(name, value) for name, value in pairs if value]


def _of_attempt(one: KnownFailure, letter: DeadLetter, runs: Mapping[str, str]) -> HistoryRow:
    took = "" if one.duration_ms is None else f"{one.duration_ms / 1000:.1f} s"
    run = runs.get(one.task_id, "")
    return _history_row(one, letter, what="Failed, retried by Celery", took=took, run=run)


def _of_occurrence(one: KnownFailure, letter: DeadLetter, runs: Mapping[str, str]) -> HistoryRow:
    what = "Repair failed" if one.repair_id else "Failed for good"
    if one.outcome_reason == PUT_ASIDE:
        what = "Put aside, not run"
    if one.is_late:
        what = f"{what} (before it was closed; reported late)"
    run = runs.get(one.task_id) or ("a repair" if one.repair_id else "")
    return _history_row(one, letter, what=what, took="", run=run)


def _history_row(one: KnownFailure, letter: DeadLetter, *, what: str, took: str, run: str) -> HistoryRow:
    return HistoryRow(
        at=one.happened_at,
        what=what,
        attempt=times_sent(one.task_id) or one.retries + 1,
        took=took,
        error_class=one.error_class,
        error_text=one.error_text,
        outcome=OUTCOME_WORDS.get(one.outcome_class, one.outcome_class),
        tone=OUTCOME_TONES.get(one.outcome_class, "grey"),
        reason=one.outcome_reason,
        worker=one.worker,
        release=one.release,
        is_the_reason=letter.outcome_class == OutcomeClass.AMBIGUOUS
        and (one.outcome_class, one.outcome_reason) == (letter.outcome_class, letter.outcome_reason),
        is_exact=one.is_exact,
        run=run,
    )


# -- workers -----------------------------------------------------------------------------------------------------------


def node_state(node: WorkerNode, now: datetime) -> str:
    """Return whether a worker is alive, by the database's clock."""
    if node.stopped_at is not None:
        return "Stopped"
    silent = now - node.seen_at
    if silent <= NODE_IS_LATE_AFTER:
        return "Alive"
    return "Late" if silent <= NODE_IS_GONE_AFTER else "Gone"


def node_warnings(node: WorkerNode) -> list[str]:
    """Return what should worry somebody about a worker."""
    warnings = []
    if node.trouble:
        warnings.append(node.trouble)
    if node.dropped_count:
        warnings.append(f"{node.dropped_count:,} journal entries could not be written: failures may be missing.")
    if node.settings_digest and node.settings_digest != conf.settings_digest():
        warnings.append(
            "Its settings differ from this console's (SECRET_KEY, OPSCONSOLE_KEYS or INCIDENT_GROUPING): "
            "what one has sealed the other may not be able to open."
        )
    return warnings


def call_words(signature_text: str) -> str:
    """Return how a task is called, as Python writes it, from what its worker publishes; "" where that is not known."""
    found = parse_signature(signature_text) if signature_text else None
    if found is None:
        return ""
    parts = [name if place < found.required else f"{name}=…" for place, name in enumerate(found.positional)]
    if found.positional_only:
        parts.insert(found.positional_only, "/")
    if found.varargs:
        parts.append("*args")
    elif found.kwonly:
        parts.append("*")
    parts += [name if name in found.kwonly_required else f"{name}=…" for name in found.kwonly]
    if found.varkw:
        parts.append("**kwargs")
    return f"({', '.join(parts)})"


class WorkerNodeAdmin(OperatorAdmin):
    """Who runs jobs, who does not report, and what waits on their hosts."""

    slug = "workers"
    menu_label = list_title = "Workers"
    menu_order = 40
    list_note = "By their last report. A worker reports every ten seconds."
    keyset = ("-seen_at", "-id")
    columns = ("node", "state", "source", "queues", "tasks", "waiting", "release", "seen", "warnings")
    pages = (("page", "<str:object_id>/", "page_view"),)

    @admin.display(description="Worker")
    def node(self, row: WorkerNode) -> str:
        return row.id

    @admin.display(description="State")
    def state(self, row: WorkerNode) -> str:
        return node_state(row, getattr(row, "now", timezone.now()))

    @admin.display(description="Source")
    def source(self, row: WorkerNode) -> str:
        return row.source

    @admin.display(description="Queues")
    def queues(self, row: WorkerNode) -> str:
        return ", ".join(json.loads(row.queues))

    @admin.display(description="Tasks")
    def tasks(self, row: WorkerNode) -> str:
        return thousands(len(json.loads(row.tasks)))

    @admin.display(description="Journal waiting")
    def waiting(self, row: WorkerNode) -> str:
        return row.waiting_words

    @admin.display(description="Release")
    def release(self, row: WorkerNode) -> str:
        return row.release

    @admin.display(description="Last report")
    def seen(self, row: WorkerNode) -> str:
        return ago(row.seen_at, getattr(row, "now", None))

    @admin.display(description="Trouble")
    def warnings(self, row: WorkerNode) -> str:
        return " ".join(node_warnings(row)) or "none"

    def get_queryset(self, request: HttpRequest) -> Any:  # noqa: ARG002 - the list itself was asked for
        """Return every worker: they belong to no tenant, and whoever may see a failed job may see who runs jobs."""
        return WorkerNode.objects.annotate(now=Now())

    def page_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Answer with one worker's last report."""
        self.require_list(request)
        node = self.get_queryset(request).filter(id=object_id).first() if "\x00" not in object_id else None
        if node is None:
            raise Http404
        context = self.page_context(
            request,
            f"Worker {node.id}",
            node=node,
            state=node_state(node, node.now),
            warnings=node_warnings(node),
            queues=json.loads(node.queues),
            tasks=[
                f"{name}{call_words(signature)}" for name, signature in sorted(json.loads(node.tasks).items())[:1_000]
            ],
        )
        return TemplateResponse(request, "ops/worker.html", context)


ADMINS: dict[Any, Any] = {DeadLetter: DeadLetterAdmin, WorkerNode: WorkerNodeAdmin}
"""What the console registers; nothing is registered on Django's default site."""
