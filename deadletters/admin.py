"""Failed jobs and workers in the console: what is known of them. What can be done is in ``repairs.admin``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar
from uuid import UUID

from django.contrib import admin
from django.db.models import QuerySet
from django.db.models.functions import Now
from django.http import Http404, HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils import timezone

from deadletters import conf
from deadletters.arguments import parse_signature
from deadletters.models import Attempt, DeadLetter, LetterState, Occurrence, WorkerNode
from deadletters.outcome import OutcomeClass
from deadletters.querysets import NODE_IS_GONE_AFTER
from grants.actions import Action
from grants.operators import Operator
from grants.pages import OperatorAdmin, operator_of, require_readable
from incidents.admin import Buttons, TenantFilter, incident_name, incident_number
from incidents.models import Incident
from opsconsole.core.admin import LONGEST_TEXT, ChoiceFilter, TextFilter, ago, thousands, when

STATE_WORDS = {
    "open": "Needs a decision",
    "acknowledged": "Needs a decision",
    "resolved": "Closed without repair",
    "retrying": "Sent, awaiting result",
    "repaired": "Repaired",
    "already_done": "Closed, had already happened",
    "discarded": "Discarded",
    "overtaken": "Succeeded after all",
}
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
HISTORY_ROWS = 200
HEAVY = ("payload_preview", "call_site", "trace_id", "sentry_id")
"""Columns that a list does not show and that may be long."""


def letter_name(letter: DeadLetter) -> str:
    """Return what a list calls a job."""
    return letter.job_id or letter.task_id or str(letter.id)


def letter_words(letter: DeadLetter, incident: Incident) -> str:
    """Return the state of a job as a person says it."""
    return STATE_WORDS[letter.standing(incident)]


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


class LetterStateFilter(ChoiceFilter):
    """By what a job waits for; the list begins with what waits for a person."""

    title = "state"
    parameter_name = "state"
    default = "decision"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return what a job can wait for, and how it can end."""
        ended = (LetterState.REPAIRED, LetterState.ALREADY_DONE, LetterState.DISCARDED, LetterState.OVERTAKEN)
        return [
            ("decision", "Needs a decision"),
            ("retrying", STATE_WORDS["retrying"]),
            *((state.value, STATE_WORDS[state.value]) for state in ended),
        ]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:  # noqa: ARG002
        """Keep the jobs in that state."""
        chosen = self.value()
        if chosen == "decision":
            return queryset.unresolved().filter(state=LetterState.OPEN)
        return queryset.filter(state=chosen) if chosen else queryset


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


class DeadLetterAdmin(OperatorAdmin):
    """The list of failed jobs, and a page for each."""

    slug = "dead-letters"
    menu_label = list_title = "Failed jobs"
    menu_order = 20
    list_note = "Newest failure first."
    search_label = "Job id or task id"
    search_help_text = "exactly as it is"
    search_fields = ("task_id",)
    keyset = ("-last_seen_at", "-id")
    columns = ("job_type", "job", "state", "outcome", "error", "attempts", "tenant", "queue", "last", "incident")
    list_filter = (LetterStateFilter, OutcomeFilter, TenantFilter, IncidentNumberFilter)
    list_select_related = ("incident",)
    pages: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("page", "<uuid:object_id>/", "page_view"),
        ("traceback", "<uuid:object_id>/traceback/<uuid:occurrence_id>/", "traceback_view"),
    )

    # -- list ----------------------------------------------------------------------------------------------------------

    @admin.display(description="Job type")
    def job_type(self, row: DeadLetter) -> str:
        return row.job_type

    @admin.display(description="Job")
    def job(self, row: DeadLetter) -> str:
        return letter_name(row)

    @admin.display(description="State")
    def state(self, row: DeadLetter) -> str:
        return letter_words(row, row.incident)

    @admin.display(description="If run again")
    def outcome(self, row: DeadLetter) -> str:
        return OUTCOME_WORDS[row.outcome_class] if row.state == LetterState.OPEN else ""

    @admin.display(description="Error")
    def error(self, row: DeadLetter) -> str:
        text = f"{row.error_class.rpartition('.')[2]}: {row.error_text}"
        return text if len(text) <= 160 else f"{text[:160]}…"

    @admin.display(description="Attempts")
    def attempts(self, row: DeadLetter) -> str:
        return thousands(row.attempts)

    @admin.display(description="Tenant")
    def tenant(self, row: DeadLetter) -> str:
        return row.tenant

    @admin.display(description="Queue")
    def queue(self, row: DeadLetter) -> str:
        return row.queue

    @admin.display(description="Last failure")
    def last(self, row: DeadLetter) -> str:
        return ago(row.last_seen_at)

    @admin.display(description="Incident")
    def incident(self, row: DeadLetter) -> str:
        return incident_name(row.incident)

    def get_queryset(self, request: HttpRequest) -> Any:
        """Return the visible jobs without what a list does not show."""
        return super().get_queryset(request).defer(*HEAVY)

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        """Find a job by its task id or its own id, exactly and in any state: nothing redacted can be found."""
        term = search_term.strip()
        if not term:
            return queryset, False
        visible = self.get_queryset(request).select_related("incident").order_by(*self.keyset)
        # The task id has an index. Asked with OR, neither of the two would be looked up in one.
        by_task = visible.filter(task_id=term)
        return (by_task if by_task.exists() else visible.filter(visible.is_of_job(term))), False

    def list_context(self, request: HttpRequest, cl: Any) -> dict[str, Any]:
        """Add what the search says."""
        return {**super().list_context(request, cl), "search_note": "In any state." if cl.query else ""}

    # -- page ----------------------------------------------------------------------------------------------------------

    def visible(self, request: HttpRequest, letter_id: UUID) -> DeadLetter:
        """Return a job that this operator may see, with its incident; raises ``Http404``, audited."""
        scope = DeadLetter.objects.scope(letter_id)
        require_readable(operator_of(request), Action.INSPECT, scope)
        found: DeadLetter = DeadLetter.objects.select_related("incident").get(id=letter_id)
        return found

    def page_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """Answer with everything that is known about one failed job."""
        letter = self.visible(request, object_id)
        return TemplateResponse(request, "ops/dead_letter.html", self.letter_context(request, letter))

    def letter_context(self, request: HttpRequest, letter: DeadLetter) -> dict[str, Any]:
        """Return what the page shows; the app above adds repairs and buttons."""
        incident = letter.incident
        occurrences = list(letter.occurrences.newest_first()[:HISTORY_ROWS])
        traced = next((one for one in occurrences if one.traceback_id), None)
        text = traced.traceback_text if traced is not None else ""
        return self.page_context(
            request,
            f"{letter.job_type} {letter_name(letter)}",
            letter=letter,
            incident=incident,
            incident_name=incident_name(incident),
            state=letter_words(letter, incident),
            outcome=OUTCOME_WORDS[letter.outcome_class],
            tone=OUTCOME_TONES[letter.outcome_class],
            is_open=letter.state == LetterState.OPEN,
            history=self.history(letter, occurrences),
            history_limit=HISTORY_ROWS,
            traceback=text,
            traceback_url=self.url("traceback", letter.id, traced.id) if traced is not None else "",
            traceback_is_cut=len(text) > LONGEST_TEXT,
            preview=letter.payload_preview,
            facts=_facts(letter),
            buttons=self.letter_buttons(letter, operator_of(request)),
        )

    def letter_buttons(self, letter: DeadLetter, by: Operator) -> Buttons:  # noqa: ARG002
        """Return nothing: what can be done is known above."""
        return Buttons()

    def history(self, letter: DeadLetter, occurrences: list[Occurrence]) -> list[HistoryRow]:
        """Return every run that is known to have ended badly, newest first, those that Celery retried included."""
        task_ids = self.task_ids(letter) | {one.task_id for one in occurrences} - {""}
        attempts = Attempt.objects.filter(
            tenant=letter.tenant, source=letter.source, task_id__in=sorted(task_ids)[:HISTORY_ROWS]
        ).order_by("-happened_at", "-id")[:HISTORY_ROWS]
        rows = [*(_of_attempt(one, letter) for one in attempts), *(_of_occurrence(one, letter) for one in occurrences)]
        return sorted(rows, key=lambda row: (row.at, row.attempt), reverse=True)[:HISTORY_ROWS]

    def task_ids(self, letter: DeadLetter) -> set[str]:
        """Return the task ids under which a job has run; the app above adds those of its repairs."""
        return {letter.task_id}

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
        ("Attempts", thousands(letter.attempts)),
        ("Final failures", thousands(letter.occurrence_count)),
        ("First failure", when(letter.first_seen_at)),
        ("Last failure", when(letter.last_seen_at)),
        ("Closed", when(letter.closed_at)),
        ("Fingerprint", letter.fingerprint),
    )
    return [(name, value) for name, value in pairs if value]


def _of_attempt(one: Attempt, letter: DeadLetter) -> HistoryRow:
    took = "" if one.duration_ms is None else f"{one.duration_ms / 1000:.1f} s"
    return _history_row(one, letter, what="Failed, retried by Celery", took=took, is_exact=True)


def _of_occurrence(one: Occurrence, letter: DeadLetter) -> HistoryRow:
    what = "Repair failed" if one.repair_id else "Failed for good"
    if one.is_late:
        what = f"{what} (before it was closed; reported late)"
    return _history_row(one, letter, what=what, took="", is_exact=one.is_exact)


def _history_row(one: Any, letter: DeadLetter, *, what: str, took: str, is_exact: bool) -> HistoryRow:
    return HistoryRow(
        at=one.happened_at,
        what=what,
        attempt=one.retries + 1,
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
        is_exact=is_exact,
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
        if not row.journal_oldest_seconds:
            return "nothing"
        return f"{row.journal_bytes:,} bytes, oldest {row.journal_oldest_seconds:.0f} s"

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
