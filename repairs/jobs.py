"""Reads about jobs of the ledger: the list, and one job with its record and its letter.

They lie here because a job's page names its letter, of which the ledger knows nothing. Payloads are shown redacted;
``repairs.payloads`` reads one as it is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from uuid import UUID

from django.db.models import Q

from deadletters import conf
from deadletters.models import DeadLetter
from deadletters.querysets import DeadLetterQuerySet
from grants.actions import Action
from grants.operators import Operator
from grants.reading import authorise_read_of, authorise_scope
from opsconsole.core.keyset import Page, Source, read_page
from opsconsole.jobs.errors import JobKindUnknown, JobNotFound
from opsconsole.jobs.kind import RecordState
from opsconsole.jobs.kinds import kind_named
from opsconsole.jobs.models import UNFINISHED, Job, JobState

STATES = (*JobState.values, "unfinished")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Which jobs are wanted; an empty field wants all. ``states`` may hold ``unfinished`` for those still to end."""

    states: tuple[str, ...] = ()
    tenant: str | None = None
    source: str | None = None
    kind: str | None = None
    record_type: str | None = None
    record_id: str | None = None

    def condition(self) -> Q:
        """Return the filter as a condition on jobs."""
        names = ("source", "kind", "record_type", "record_id")
        wanted = {name: getattr(self, name) for name in names} | {"tenant": None if self.tenant == "*" else self.tenant}
        condition = Q(**{name: value for name, value in wanted.items() if value is not None})
        if self.states == ("unfinished",):
            # Word for word what the index of unfinished jobs says.
            condition &= Q(state__in=UNFINISHED)
        elif self.states:
            states = {state for name in self.states for state in (UNFINISHED if name == "unfinished" else (name,))}
            condition &= Q(state=states.pop()) if len(states) == 1 else Q(state__in=sorted(states))
        return condition


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPage:
    """One job, the record that it works on as it stands now, and the letter that it became, if it has died."""

    job: Job
    payload_preview: str
    record: RecordState | None
    letter: DeadLetter | None


def list_jobs(operator: Operator, wanted: JobFilter, *, limit: int = 50, cursor: str | None = None) -> Page[Job]:
    """Return a page of the jobs that ``operator`` may see, newest first.

    Raises ``AccessDenied`` for a tenant they may not inspect, ``InvalidFields`` for a bad cursor.
    """
    authorise_scope(operator, Action.INSPECT, tenant=wanted.tenant)
    rows = Job.objects.visible_to(operator, Action.INSPECT).filter(wanted.condition()).defer("payload")
    return read_page("jobs", [[Source(rows, ("id",))]], limit=limit, cursor=cursor)


def find_job(operator: Operator, job_id: UUID) -> Job:
    """Return one job; raises ``JobNotFound``, audited, also for one that ``operator`` may not inspect."""
    authorise_read_of(operator, Action.INSPECT, Job.objects.scope(job_id), JobNotFound())
    job: Job | None = Job.objects.filter(id=job_id).first()
    if job is None:
        raise JobNotFound
    return job


def job_page(operator: Operator, job_id: UUID) -> JobPage:
    """Return one job's page; raises ``JobNotFound``, audited."""
    job = find_job(operator, job_id)
    return JobPage(job=job, payload_preview=preview_of(job), record=record_of(job), letter=_letter_of(operator, job))


def preview_of(job: Job) -> str:
    """Return what a job is called with, redacted."""
    try:
        payload = json.loads(job.payload)
    except ValueError:
        return conf.redactor().text(job.payload)
    named = payload if isinstance(payload, dict) else {}
    return conf.redactor().preview([] if named or payload == {} else [payload], named)


def record_of(job: Job) -> RecordState | None:
    """Return the record that a job works on; None if it has none, or is of a kind that is not registered here."""
    try:
        return kind_named(job.kind).record(job)
    except JobKindUnknown:
        return None


def _letter_of(operator: Operator, job: Job) -> DeadLetter | None:
    letters = DeadLetter.objects.visible_to(operator, Action.INSPECT).filter(tenant=job.tenant, source=job.source)
    found: DeadLetter | None = (
        letters.filter(DeadLetterQuerySet.is_of_job(str(job.id))).select_related("incident").newest_first().first()
    )
    return found
