"""The front page: what is burning, since when, how bad, who has it; and whether the numbers can be believed.

No number on it counts a table. Incidents carry counts of their own, of which the worst thousand are read; letters and
counts per minute are read through an index and cut off at a bound, and a number that was cut off says so ("20,000+").

What an operator may see is one plan of grants, asked for in each request. For equal plans the page is read at most once
in five seconds, and only its first part if nothing has happened since: the version that the page's entity tag is made
of. Time passes too, so a version lasts half a minute at most. Grants over parts of a tenant are looked up row by row:
such a plan does not say what is seen, so the page is read each time, and what was counted is part of the version.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, cast
from uuid import UUID

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponseNotModified, HttpResponseRedirect
from django.http.response import HttpResponseBase
from django.template.response import TemplateResponse
from django.urls import reverse

from deadletters.models import DeadLetter, LetterState, TaskMinute
from deadletters.outcome import OutcomeClass
from deadletters.selectors import (
    SPAN_COLUMNS,
    count_failed_since,
    count_unresolved,
    counts_per_hour,
)
from deadletters.snapshot import Scope, kept_streams_of
from grants.actions import Action
from grants.operators import Operator
from grants.pages import held_by, operator_of, scope_words, seen_by
from grants.selectors import plan_of
from grants.sql import Plan
from incidents.admin import incident_name
from incidents.models import Incident, IncidentState, Severity
from incidents.selectors import LIGHT, unresolved_incidents
from opsconsole.console.judged import ByQueue, judge_waiting
from opsconsole.console.machinery import Machinery, machinery
from opsconsole.console.queues import SHOWN_QUEUES, QueueRow, queue_rows
from opsconsole.core.admin import thousands
from opsconsole.core.charts import HOUR, Chart, bar_chart, hours_before, ticks
from opsconsole.core.database import recent_database_now
from opsconsole.jobs.sql import ROUTING_KIND
from repairs.prospects import Prospect

COUNTED_INCIDENTS = 1_000
COUNTED_JOBS = 20_000
KEPT_SECONDS = 5.0
LIVE_SECONDS = 10
VERSION_LASTS = timedelta(seconds=30)
KEPT_SCOPES = 100
HOURS = 24
PAST_HOURS_LAST_SECONDS = 300.0
"""Only a worker whose journal comes late still changes an hour that is over."""
NOW = timedelta(minutes=5)
SHOWN_TASKS = 8
SHOWN_LOUDEST = 6
SHOWN_ROWS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One number and the list that it counts: ``of`` is "incidents" or "jobs", ``query`` what that list is asked.

    Below it stand ``scope``, the incidents that are ``named``, as links to their pages, and ``more``.
    """

    noun: str
    number: str
    scope: str
    of: str
    query: str
    tone: str = ""
    named: tuple[Incident, ...] = ()
    more: str = ""


@dataclass(slots=True, kw_only=True)
class TaskLine:
    """What became of one task's deliveries in the last minutes: before + received = all that ended + in flight.

    ``missing`` were received and nobody reports on them any more, or have ended and were never counted as received.
    """

    task: str
    before: int = 0
    received: int = 0
    succeeded: int = 0
    failed: int = 0
    retried: int = 0
    otherwise: int = 0
    in_flight: int = 0
    missing: int = 0
    incident: Incident | None = None
    more_incidents: int = 0

    def add(self, other: TaskLine) -> None:
        """Take another line's numbers into this one."""
        for name in (
            "before", "received", "succeeded", "failed", "retried", "otherwise", "in_flight", "missing",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def is_failing(self) -> bool:
        """Whether somebody should look at it."""
        return bool(self.failed or self.retried or self.missing)


@dataclass(slots=True, kw_only=True)
class QueueLine:
    """The failed jobs of one queue that need a decision, by what a retry of them would mean."""

    queue: str
    jobs: int = 0
    safe: int = 0
    ambiguous: int = 0
    not_declared: int = 0
    cannot: int = 0

    def add(self, prospect: Prospect, count: int) -> None:
        """Count some jobs that were judged alike."""
        self.jobs += count
        self.safe += count * (prospect is Prospect.SAFE)
        self.ambiguous += count * (prospect is Prospect.AMBIGUOUS)
        self.not_declared += count * (prospect is Prospect.NOT_DECLARED)
        self.cannot += count * (prospect is Prospect.BLOCKED)


@dataclass(slots=True, kw_only=True)
class HolderLine:
    """Who is on how much; "" is nobody."""

    ref: str
    name: str
    incidents: int = 0
    critical: int = 0
    jobs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoudLine:
    """One incident and how many of its jobs have failed in the last hour."""

    incident: Incident
    name: str
    severity: str
    jobs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLine:
    """What waits in one stream of job records; ``kind`` names the jobs that work on them.

    ``counts_jobs`` says that the numbers are of those jobs themselves, so that each has a list.
    """

    name: str
    kind: str
    total: int
    pending: int
    in_flight: int
    retrying: int
    failed: int
    oldest_at: datetime | None
    note: str = ""
    counts_jobs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HourLine:
    """One hour as the table beside the charts has it."""

    start: datetime
    failed: int
    done: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The page for one scope, as of one moment of the database's clock."""

    version: str
    at: datetime
    cards: tuple[Card, ...]
    now_from: datetime
    tasks: tuple[TaskLine, ...]
    quiet: TaskLine | None
    all_tasks: TaskLine
    silent: tuple[tuple[str, datetime], ...]
    failed: Chart
    done: Chart
    ticks: Sequence[str]
    last_minutes: int
    hours: tuple[HourLine, ...]
    releases: tuple[tuple[str, datetime], ...]
    queues: tuple[QueueRow, ...]
    more_queues: int
    by_queue: tuple[QueueLine, ...]
    all_queues: QueueLine
    jobs_are_capped: bool
    most_jobs: int
    streams: tuple[StreamLine, ...]
    holders: tuple[HolderLine, ...]
    incident_count: str
    loudest: tuple[LoudLine, ...]
    loud_incidents: int
    loud_jobs: int
    hour_is_capped: bool


# -- kept for a moment -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Kept:
    """What was last read for one scope; whoever asks while it is being read waits for that."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    overview: Overview | None = None
    until: float = 0.0
    past: tuple[datetime, float, list[dict[str, Any]]] | None = None


_scopes: OrderedDict[object, _Kept] = OrderedDict()
_scopes_lock = threading.Lock()


def forget() -> None:
    """Read afresh the next time: for tests."""
    with _scopes_lock:
        _scopes.clear()


def overview_for(by: Operator, plan: Plan | None = None) -> Overview:
    """Return what ``by`` may see, at most five seconds old; ``plan`` says what that is, where it is known."""
    plan = plan_of(by, Action.INSPECT) if plan is None else plan
    # Grants over parts of a tenant are looked up row by row, so only the plan of whole tenants says what is seen.
    scope: object = (by.ref, plan) if plan.shapes else plan
    with _scopes_lock:
        kept = _scopes.setdefault(scope, _Kept())
        _scopes.move_to_end(scope)
        while len(_scopes) > KEPT_SCOPES:
            _scopes.popitem(last=False)
    with kept.lock:
        if kept.overview is None or plan.shapes or time.monotonic() >= kept.until:
            kept.overview = _read(by, plan, kept)
            kept.until = time.monotonic() + KEPT_SECONDS
        return kept.overview


def etag_of(overview: Overview, by: Operator, machine: Machinery) -> str:
    """Return the entity tag of the page that ``by`` sees: it marks their own name, and has the machinery's line."""
    line = replace(machine, read_at=None, read_monotonic=0.0)
    return f'"{hashlib.sha256(repr((overview.version, by.ref, line)).encode()).hexdigest()[:32]}"'


def overview_context(request: HttpRequest) -> dict[str, Any]:
    """Return what the page's templates show; nothing for who may see nothing."""
    if Action.INSPECT not in held_by(request):
        return {"overview": None}
    by = operator_of(request)
    plan = seen_by(request, Action.INSPECT)
    overview = overview_for(by, plan)
    etag = etag_of(overview, by, machinery())
    said = {"me": by.ref, "scope_words": scope_words(plan)}
    return {"overview": overview, **said, "live_etag": etag, "live_seconds": LIVE_SECONDS}


def live_overview(request: HttpRequest) -> HttpResponseBase:
    """Answer with the parts of the page that change, or with 304 to who has them; a person is sent to the page."""
    if Action.INSPECT not in held_by(request):
        # Not written to the trail: a page that is left open asks six times a minute.
        raise PermissionDenied
    if request.headers.get("Sec-Fetch-Dest") == "document":
        return HttpResponseRedirect(reverse("admin:index", current_app=str(cast(Any, request).current_app)))
    context = overview_context(request)
    etag = context["live_etag"]
    given = {tag.strip().removeprefix("W/") for tag in request.headers.get("If-None-Match", "").split(",")}
    response: HttpResponseBase
    if etag in given:
        response = HttpResponseNotModified()
    else:
        context |= {"machinery": machinery(), "sees_workers": True}
        response = TemplateResponse(request, "ops/_live_overview.html", context)
    response.headers["ETag"] = etag
    return response


# -- reading -----------------------------------------------------------------------------------------------------------


def _read(by: Operator, plan: Plan, kept: _Kept) -> Overview:
    machine = machinery()
    now = machine.database_now() or recent_database_now()
    incidents = Incident.objects.visible_to(by, Action.INSPECT, plan=plan)
    minutes = TaskMinute.objects.visible_to(by, Action.INSPECT, plan=plan)
    found, is_capped = unresolved_incidents(incidents, COUNTED_INCIDENTS)
    this_hour = now.replace(minute=0, second=0, microsecond=0)
    now_from = now.replace(second=0, microsecond=0) - NOW
    newest = counts_per_hour(minutes, start=this_hour - HOUR, end=now + HOUR, recent=now_from)
    queues = queue_rows(machine)
    streams = _streams(by, plan)
    version = _digest(_version(now, plan, found, newest, machine, queues), streams)
    # A grant over a part of a tenant shows jobs without their incident, whose version would tell that they changed.
    if kept.overview is not None and kept.overview.version == version and not plan.shapes:
        return kept.overview
    letters = DeadLetter.objects.visible_to(by, Action.INSPECT, plan=plan)
    waiting, jobs_are_capped = count_unresolved(letters, COUNTED_JOBS)
    recent, hour_is_capped = count_failed_since(letters, now - HOUR, COUNTED_JOBS)
    if plan.shapes:
        version = _digest(version, sorted(map(repr, waiting)), sorted(recent.items()))
    decided_upon = [one for one in waiting if one.needs_decision]
    by_queue, all_queues = _queue_lines(judge_waiting(letters, decided_upon, now, COUNTED_JOBS))
    decisions = _number(min(sum(one.count for one in decided_upon), COUNTED_JOBS), jobs_are_capped)
    if jobs_are_capped and not (is_capped or plan.shapes):
        decisions = _decisions_by_incidents(letters, found)
    # As the list that the number leads to has it: by the stored class, whatever a retry would meet.
    ambiguous = sum(one.count for one in decided_upon if one.outcome_class == OutcomeClass.AMBIGUOUS)
    shown = sorted(by_queue.values(), key=lambda line: (-line.jobs, line.queue))
    hours = [*_past_hours(minutes, this_hour, kept), *newest]
    starts = hours_before(now, HOURS)
    per_hour = _per_hour(starts, hours)
    releases = tuple((one.name, one.first_at) for one in machine.releases if starts[0] <= one.first_at <= now)
    marks = [(at, f"release {name}, {at:%H:%M}") for name, at in releases]
    loudest = _loudest(recent, found, incidents)
    tasks = _tasks(hours, starts[0], machine, _of_tasks(found, recent))
    failing = sorted((line for line in tasks if line.is_failing), key=lambda one: (-one.failed, -one.retried, one.task))
    quiet = [*failing[SHOWN_TASKS:], *(line for line in tasks if not line.is_failing)]
    return Overview(
        version=version,
        at=now,
        cards=_cards(
            found, is_capped, decisions, ambiguous, jobs_are_capped, recent, hour_is_capped, loudest,
            sees_incidents=not plan.shapes,
        ),
        now_from=now_from,
        tasks=tuple(failing[:SHOWN_TASKS]),
        quiet=_sum(_more_words(len(quiet), len(failing) > SHOWN_TASKS), quiet) if quiet else None,
        all_tasks=_sum("All tasks", tasks),
        silent=machine.silent_since,
        failed=bar_chart(
            noun="final failures", starts=starts, step=HOUR, values=[one.failed for one in per_hour], height=160,
            marks=marks,
        ),
        done=bar_chart(
            noun="done jobs", starts=starts, step=HOUR, values=[one.done for one in per_hour], height=64,
            marks=[(at, "") for at, _text in marks],
        ),
        ticks=ticks(starts),
        last_minutes=int((now - this_hour).total_seconds() // 60),
        hours=tuple(reversed(per_hour)),
        releases=releases,
        queues=tuple(queues[:SHOWN_QUEUES]),
        more_queues=max(len(queues) - SHOWN_QUEUES, 0),
        by_queue=tuple(shown[:SHOWN_ROWS]),
        all_queues=all_queues,
        jobs_are_capped=jobs_are_capped,
        most_jobs=COUNTED_JOBS,
        streams=streams,
        holders=_holders(found),
        incident_count=_number(len(found), is_capped),
        loudest=loudest,
        loud_incidents=len(recent) - len(loudest) if loudest else 0,
        loud_jobs=sum(recent.values()) - sum(line.jobs for line in loudest),
        hour_is_capped=hour_is_capped,
    )  # fmt: skip


def _version(
    now: datetime,
    plan: Plan,
    found: Sequence[Incident],
    newest: Iterable[dict[str, Any]],
    machine: Machinery,
    queues: Sequence[QueueRow],
) -> str:
    """Return what changes whenever the page does: recording, taking and settling all raise an incident's version."""
    counts = sorted(tuple(str(value) for value in row.values()) for row in newest)
    parts = (
        int(now.timestamp() // VERSION_LASTS.total_seconds()), plan, [(one.id, one.version) for one in found], counts,
        sorted(machine.sources), machine.silent_since, queues,
    )  # fmt: skip
    return _digest(*parts)


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _queue_lines(judged: ByQueue) -> tuple[dict[str, QueueLine], QueueLine]:
    """Return a line for each queue, and one for all of them."""
    lines: dict[str, QueueLine] = {}
    total = QueueLine(queue="")
    for (queue, prospect), count in judged.items():
        for line in (lines.setdefault(queue, QueueLine(queue=queue)), total):
            line.add(prospect, count)
    return lines, total


def _decisions_by_incidents(letters: Any, found: Iterable[Incident]) -> str:
    """Return how many jobs need a decision where they are too many to count: incidents keep a count of their own.

    What is on hold or on its way is in that count, and is left out by one more query; where that is too much to count
    as well, no more than what is left can need one.
    """
    others = letters.filter(state__in=(LetterState.HELD, LetterState.RETRYING))
    awaited, is_capped = count_unresolved(others, COUNTED_JOBS)
    count = sum(one.unresolved_count for one in found) - min(sum(one.count for one in awaited), COUNTED_JOBS)
    return f"at most {thousands(count)}" if is_capped else thousands(count)


def _streams(by: Operator, plan: Plan) -> tuple[StreamLine, ...]:
    """Return the streams in which the operator sees anything, from the kept totals: one query."""
    found = kept_streams_of(Scope(by, plan))
    named = {
        ("Routing", ROUTING_KIND): found.routing,
        ("Actions", "deliver_action"): found.actions,
        ("Notifications", "deliver_notification"): found.notifications,
        ("E-mails", "deliver_email"): found.emails,
    }
    lines = [
        StreamLine(
            name=name,
            kind=kind,
            total=one.total,
            pending=one.pending,
            in_flight=one.in_flight,
            retrying=one.retrying,
            failed=one.terminally_failed,
            oldest_at=one.oldest_due_at,
            counts_jobs=kind == ROUTING_KIND,
        )
        for (name, kind), one in named.items()
    ]
    runs, evidence = found.workflows, found.evidence
    lines.append(
        StreamLine(
            name="Workflow runs",
            kind="dispatch_workflow",
            total=runs.total,
            pending=0,
            in_flight=runs.active,
            retrying=0,
            failed=runs.failed + runs.repair_required,
            oldest_at=runs.oldest_active_at,
            note=f"{thousands(runs.repair_required)} to be repaired" if runs.repair_required else "",
        )
    )
    lines.append(
        StreamLine(
            name="Evidence",
            kind="fetch_evidence",
            total=evidence.total,
            pending=evidence.pending,
            in_flight=evidence.fetching,
            retrying=0,
            failed=evidence.unavailable,
            oldest_at=evidence.oldest_active_at,
        )
    )
    return tuple(line for line in lines if line.total)


def _past_hours(minutes: Any, this_hour: datetime, kept: _Kept) -> list[dict[str, Any]]:
    """Return the hours that are over, read again after five minutes: they are many rows, and hardly change."""
    start, end = this_hour - HOUR * (HOURS - 1), this_hour - HOUR
    if kept.past is None or kept.past[0] != start or time.monotonic() >= kept.past[1]:
        rows = counts_per_hour(minutes, start=start, end=end)
        kept.past = (start, time.monotonic() + PAST_HOURS_LAST_SECONDS, rows)
    return kept.past[2]


def _per_hour(starts: Sequence[datetime], rows: Iterable[dict[str, Any]]) -> list[HourLine]:
    failed: Counter[datetime] = Counter()
    done: Counter[datetime] = Counter()
    for row in rows:
        failed[row["hour"]] += row["n_failed"] + row["n_lost"]
        done[row["hour"]] += row["n_succeeded"]
    return [HourLine(start=start, failed=failed[start], done=done[start]) for start in starts]


def _tasks(
    rows: Sequence[dict[str, Any]],
    start: datetime,
    machine: Machinery,
    incidents: dict[str, tuple[Incident, int]],
) -> list[TaskLine]:
    """Return each task's balance over the last minutes.

    What is in flight is what was received and has not ended, over all the hours shown. It is missing where no worker of
    its source is alive, since the one that had it can't report on it; a worker of that host that starts again will.
    More ends than receipts are missing too, but for those of the first hour, which may have been received before it.
    """
    open_now: Counter[tuple[str, str]] = Counter()
    early: Counter[tuple[str, str]] = Counter()
    lines: dict[tuple[str, str], TaskLine] = {}
    for row in rows:
        key = row["source"], row["job_type"]
        ended = sum(row[f"n_{name}"] for name in SPAN_COLUMNS[1:])
        open_now[key] += row["n_received"] - ended
        if row["hour"] == start:
            early[key] += ended
        if row["is_recent"]:
            line = lines.setdefault(key, TaskLine(task=key[1]))
            line.received += row["n_received"]
            line.succeeded += row["n_succeeded"]
            line.failed += row["n_failed"] + row["n_lost"]
            line.retried += row["n_retried"]
            line.otherwise += row["n_ignored"] + row["n_revoked"] + row["n_returned"] + row["n_held"]
    merged: dict[str, TaskLine] = defaultdict(lambda: TaskLine(task=""))
    for key, number in open_now.items():
        line = lines.get(key) or TaskLine(task=key[1])
        if number > 0:
            line.in_flight = number
            line.missing = 0 if key[0] in machine.sources else number
        else:
            line.missing = max(-number - early[key], 0)
        ended = line.succeeded + line.failed + line.retried + line.otherwise
        line.before = line.in_flight + ended - line.received
        if key in lines or line.in_flight or line.missing:
            merged[key[1]].task = key[1]
            merged[key[1]].add(line)
    for line in merged.values():
        line.incident, line.more_incidents = incidents.get(line.task, (None, 0))
    return list(merged.values())


def _of_tasks(found: Iterable[Incident], recent: dict[UUID, int]) -> dict[str, tuple[Incident, int]]:
    """Return the incident that somebody should look at when a task fails, and how many more of the task are not closed.

    One that nobody is on comes first, then the worst, then the loudest.
    """
    of_task: dict[str, list[Incident]] = defaultdict(list)
    for one in found:
        of_task[one.job_type].append(one)
    return {
        task: (
            max(ones, key=lambda one: (one.state == IncidentState.OPEN, one.severity, recent.get(one.id, 0))),
            len(ones) - 1,
        )
        for task, ones in of_task.items()
    }


def _sum(name: str, lines: Iterable[TaskLine]) -> TaskLine:
    total = TaskLine(task=name)
    for line in lines:
        total.add(line)
    return total


def _more_words(count: int, are_failing: bool) -> str:
    tasks = f"{thousands(count)} {'task' if count == 1 else 'tasks'}"
    return f"{tasks} more" if are_failing else f"{tasks} without a failure"


def _holders(found: Sequence[Incident]) -> tuple[HolderLine, ...]:
    lines: dict[str, HolderLine] = {}
    for one in found:
        ref = one.acknowledged_by if one.state == IncidentState.ACKNOWLEDGED else ""
        line = lines.setdefault(ref, HolderLine(ref=ref, name=(one.acknowledged_by_name or ref) if ref else "Nobody"))
        line.incidents += 1
        line.critical += one.severity == Severity.CRITICAL
        line.jobs += one.unresolved_count
    return tuple(sorted(lines.values(), key=lambda line: (line.ref != "", -line.incidents, line.name)))[:SHOWN_ROWS]


def _loudest(recent: dict[UUID, int], found: Sequence[Incident], incidents: Any) -> tuple[LoudLine, ...]:
    """Return the loudest incidents of the last hour's failures, of equally loud ones the worst, and closed ones last.

    Those that are closed again are looked up.
    """
    known = {one.id: one for one in found}
    severity = {one.id: int(one.severity) for one in found}
    ranked = sorted(recent.items(), key=lambda pair: (-pair[1], -severity.get(pair[0], -1), pair[0]))[:SHOWN_LOUDEST]
    wanted = [key for key, _count in ranked if key not in known]
    if wanted:
        known |= {one.id: one for one in incidents.filter(id__in=wanted).only(*LIGHT)}
    return tuple(
        LoudLine(
            incident=known[key],
            name=incident_name(known[key]),
            severity=str(known[key].get_severity_display()),
            jobs=count,
        )
        for key, count in ranked
        if key in known
    )


def _number(count: int, is_capped: bool) -> str:
    return f"{thousands(count)}{'+' if is_capped else ''}"


def _cards(
    found: Sequence[Incident],
    is_capped: bool,
    decisions: str,
    ambiguous: int,
    jobs_are_capped: bool,
    recent: dict[UUID, int],
    hour_is_capped: bool,
    loudest: Sequence[LoudLine],
    *,
    sees_incidents: bool,
) -> tuple[Card, ...]:
    """Return the numbers; who holds grants over parts of a tenant sees jobs of incidents that they don't see."""
    free = [one for one in found if one.state == IncidentState.OPEN]
    critical = [one for one in free if one.severity == Severity.CRITICAL]
    taken = len(found) - len(free)
    # The worst come first: only if not even the critical ones all fit are some of those not counted.
    more_critical = is_capped and found[-1].severity == Severity.CRITICAL
    last_hour = min(sum(recent.values()), COUNTED_JOBS)
    of_them = f"{thousands(loudest[0].jobs)} of them in" if loudest else "none"
    return (
        Card(
            noun="Incidents needing action",
            number=_number(len(free), is_capped),
            scope=f"{_number(taken, is_capped)} more {'is' if taken == 1 else 'are'} taken",
            of="incidents",
            query="state=open",
            tone="info",
        ),
        Card(
            noun="Critical, nobody on it",
            number=_number(len(critical), more_critical),
            scope="" if critical else "of the incidents not closed",
            named=tuple(critical[:2]),
            more="and more" if len(critical) > 2 else "",
            of="incidents",
            query="state=open&severity=critical",
            tone="bad",
        ),
        Card(
            noun="Failed jobs needing a decision",
            number=decisions,
            scope=f"in {_number(len(found), is_capped)} {'incident' if len(found) == 1 else 'incidents'} not closed"
            if sees_incidents
            else "among the jobs that you may see",
            of="jobs",
            query="state=decision",
            tone="yellow",
        ),
        Card(
            noun="… that may already have happened",
            number=_number(ambiguous, jobs_are_capped),
            scope=f"of the {f'first {thousands(COUNTED_JOBS)} counted' if jobs_are_capped else decisions}",
            of="jobs",
            query="state=decision&outcome=ambiguous",
            tone="warn",
        ),
        Card(
            noun="Jobs failed in the last hour",
            number=_number(last_hour, hour_is_capped),
            scope=of_them if last_hour else "whatever became of them",
            named=tuple(line.incident for line in loudest[:1]) if last_hour else (),
            of="jobs",
            query="state=&seen=hour",
            tone="grey",
        ),
    )
