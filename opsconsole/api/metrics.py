"""``/metrics``: how the console stands, for Prometheus and what reads its format.

All are gauges, also what is counted: the counts per minute are kept for a month and then removed, so a sum of them
falls, which a counter must not. Whoever asks is told of what they may see. A request takes a handful of queries, none
of which counts a table of jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Count, Q, Sum
from django.http import HttpResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from rest_framework.request import Request

from deadletters.models import Hold, HoldState, TaskMinute
from grants.actions import Action
from grants.authentication import operator_of
from grants.operators import Operator
from grants.reading import authorise_anywhere
from grants.rest import OpsView
from grants.selectors import plan_of
from grants.sql import Plan
from incidents.models import UNRESOLVED_STATES, Incident, Severity
from opsconsole.console.machinery import Machinery, machinery
from opsconsole.core.database import recent_database_now
from opsconsole.core.rest import PlainJson
from repairs.models import REDRIVE_ENDED, Redrive, RedriveState

PLAIN = "text/plain; version=0.0.4; charset=utf-8"
HOUR = timedelta(hours=1)
MOST_TASKS = 1_000
"""Tasks that are told apart: those that failed most."""
OUTCOMES = ("received", "succeeded", "failed", "retried", "ignored", "revoked", "lost", "returned", "held")
RESULTS = ("waiting", "outstanding", "succeeded", "failed", "skipped", "cancelled")


class MetricsView(OpsView):
    """Answers a token or a signed-in operator, with what they may inspect; everybody else as the API does."""

    http_method_names = ["get", "head"]
    cache_control = "private, no-store"

    def perform_content_negotiation(self, request: Request, force: bool = False) -> tuple[Any, str]:  # noqa: ARG002
        """Take every Accept header: it chooses between the formats of metrics; refusals are JSON."""
        return PlainJson(), "application/json"

    def get(self, request: Request) -> HttpResponse:
        """Return the metrics in the text format of Prometheus, or as OpenMetrics where that is asked for."""
        operator = operator_of(request)
        authorise_anywhere(operator, Action.INSPECT)
        registry = CollectorRegistry()
        registry.register(ConsoleMetrics(operator))
        accepted = {part.partition(";")[0].strip() for part in request.headers.get("Accept", "").split(",")}
        if openmetrics.CONTENT_TYPE_LATEST.partition(";")[0] in accepted:
            text = openmetrics.generate_latest(registry)  # type: ignore[no-untyped-call]
            return HttpResponse(text, content_type=openmetrics.CONTENT_TYPE_LATEST)
        return HttpResponse(generate_latest(registry), content_type=PLAIN)


class ConsoleMetrics(Collector):
    """What one operator is told; each part is read when it is asked for."""

    def __init__(self, operator: Operator) -> None:
        self.operator = operator

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        plan = plan_of(self.operator, Action.INSPECT)
        machine = machinery()
        now = machine.database_now() or recent_database_now()
        yield from _of_incidents(self.operator, plan)
        yield from _of_tasks(self.operator, plan, now)
        yield from _of_redrives(self.operator, plan)
        yield from _of_holds(self.operator, now)
        yield from _of_machinery(machine)


def _of_incidents(operator: Operator, plan: Plan) -> Iterator[Metric]:
    rows = (
        Incident.objects.visible_to(operator, Action.INSPECT, plan=plan)
        .filter(state__in=UNRESOLVED_STATES)
        .order_by()
        .values_list("severity", "state")
        .annotate(
            number=Count("id"), jobs=Sum("unresolved_count"), held=Sum("unresolved_count", filter=Q(category="hold"))
        )
    )
    found = list(rows)
    incidents = GaugeMetricFamily(
        "opsconsole_incidents", "Incidents that are not resolved.", labels=("severity", "state")
    )
    for severity in Severity:
        for state in UNRESOLVED_STATES:
            number = sum(row[2] for row in found if (row[0], row[1]) == (severity, state))
            incidents.add_metric((severity.label, str(state)), number)
    yield incidents
    letters = GaugeMetricFamily(
        "opsconsole_unresolved_dead_letters",
        "Failed jobs that wait for a decision or for their repair, by the severity of their incident.",
        labels=("severity",),
    )
    for severity in Severity:
        letters.add_metric((severity.label,), sum(row[3] for row in found if row[0] == severity))
    yield letters
    yield _gauge(
        "opsconsole_held_dead_letters",
        "Messages that holds have put aside and that have not run since; among the unresolved.",
        sum(row[4] or 0 for row in found),
    )


def _of_tasks(operator: Operator, plan: Plan, now: datetime) -> Iterator[Metric]:
    rows = (
        TaskMinute.objects.visible_to(operator, Action.INSPECT, plan=plan)
        .filter(minute__gte=now - HOUR)
        .order_by()
        .values_list("source", "job_type")
        .annotate(**{f"all_{name}": Sum(name) for name in OUTCOMES})
        .order_by("-all_failed", "-all_retried", "source", "job_type")
    )
    deliveries = GaugeMetricFamily(
        "opsconsole_task_deliveries_last_hour",
        "Messages of a task in the last hour by what became of them; `failed` is for good.",
        labels=("source", "task", "outcome"),
    )
    for source, task, *counts in rows[:MOST_TASKS]:
        for outcome, number in zip(OUTCOMES, counts, strict=True):
            if number or outcome in ("received", "failed"):
                deliveries.add_metric((source, task, outcome), number)
    yield deliveries


def _of_redrives(operator: Operator, plan: Plan) -> Iterator[Metric]:
    rows = (
        Redrive.objects.visible_to(operator, Action.INSPECT, plan=plan)
        .exclude(state__in=REDRIVE_ENDED)
        .order_by()
        .values_list("state")
        .annotate(number=Count("id"), **{f"all_{name}": Sum(f"{name}_count") for name in RESULTS})
    )
    found = {state: counts for state, *counts in rows}
    redrives = GaugeMetricFamily("opsconsole_redrives", "Redrives that have not ended.", labels=("state",))
    for state in RedriveState:
        if state not in REDRIVE_ENDED:
            redrives.add_metric((str(state),), found[state][0] if state in found else 0)
    yield redrives
    jobs = GaugeMetricFamily(
        "opsconsole_redrive_jobs", "Jobs of the redrives that have not ended, by result.", labels=("result",)
    )
    for index, result in enumerate(RESULTS, start=1):
        jobs.add_metric((result,), sum(counts[index] for counts in found.values()))
    yield jobs


def _of_holds(operator: Operator, now: datetime) -> Iterator[Metric]:
    in_force = Hold.objects.seen_by(operator).filter(state=HoldState.ACTIVE, ends_at__gt=now)
    yield _gauge("opsconsole_holds", "Holds in force.", in_force.count())


def _of_machinery(machine: Machinery) -> Iterator[Metric]:
    numbers: Iterable[tuple[str, str, float]] = (
        ("workers_reporting", "Workers that have reported within a minute.", machine.reporting),
        (
            "workers_silent",
            "Workers that have stopped to report without a good-bye.",
            machine.known - machine.reporting,
        ),
        ("workers_in_trouble", "Reporting workers that name a trouble.", machine.troubles),
        ("journal_waiting_bytes", "What workers have written and not recorded yet.", machine.waiting_bytes),
        ("journal_waiting_seconds", "Age of the oldest of that.", machine.waiting_seconds),
        ("journal_dropped_entries", "Entries that reporting workers could not write.", machine.dropped),
        ("sweeps_overdue", "1 if no sweep has finished for too long.", machine.sweeps.is_overdue),
    )
    for name, text, number in numbers:
        yield _gauge(f"opsconsole_{name}", text, number)
    moments: Iterable[tuple[str, str, datetime | None]] = (
        ("last_capture", "When a worker last recorded something.", machine.captured_at),
        ("last_sweep", "When a sweep last finished.", machine.swept_at),
    )
    for name, text, at in moments:
        if at is not None:
            yield _gauge(f"opsconsole_{name}_timestamp_seconds", text, at.timestamp())


def _gauge(name: str, text: str, number: float) -> Metric:
    family = GaugeMetricFamily(name, text)
    family.add_metric((), number)
    return family
