"""Jobs of the ledger over REST: to be looked at. What changes them is in their services."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from rest_framework import serializers

from deadletters.outcome import OutcomeClass
from grants.rest import Answer, Call, OpsView, operation, representation_tag
from incidents.models import IncidentState
from opsconsole.core.openapi import paged
from opsconsole.core.rest import Choices, Moment, PageQuery
from opsconsole.jobs.errors import JobNotFound
from opsconsole.jobs.models import Job, JobState
from repairs import jobs as selectors
from repairs.payloads import read_job_payload

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class JobListQuery(PageQuery):
    state = Choices(
        selectors.STATES,
        required=False,
        help_text="One or several; `unfinished` is pending, enqueued, running, retrying.",
    )
    tenant = serializers.CharField(required=False, max_length=100, help_text="Authorised first; `*` for every tenant.")
    source = serializers.CharField(required=False, max_length=100)  # type: ignore[assignment]
    kind = serializers.CharField(required=False, max_length=64)
    record_type = serializers.CharField(required=False, max_length=60)
    record_id = serializers.CharField(required=False, max_length=200)


class JobSerializer(serializers.Serializer[Any]):
    """One job of the ledger."""

    id = serializers.UUIDField()
    tenant = serializers.CharField()
    source = serializers.CharField()  # type: ignore[assignment]
    actor_type = serializers.CharField()
    actor_id = serializers.CharField()
    kind = serializers.CharField()
    state = serializers.ChoiceField(choices=JobState.values)
    record_type = serializers.CharField(help_text="Of the record that it works on.")
    record_id = serializers.CharField()
    report_id = serializers.UUIDField(allow_null=True)
    key = serializers.CharField()
    queue = serializers.CharField()
    attempts = serializers.IntegerField(help_text="Begun so far.")
    max_attempts = serializers.IntegerField()
    dispatches = serializers.IntegerField(help_text="How often it was sent to a queue.")
    available_at = Moment(help_text="When it is, or was, due.")
    lease_owner = serializers.CharField()
    lease_expires_at = Moment(allow_null=True)
    outcome_class = serializers.ChoiceField(
        choices=["", *(outcome.value for outcome in OutcomeClass)],
        help_text="The worst that is known of its attempts; empty while nothing speaks against another one.",
    )
    outcome_reason = serializers.CharField()
    last_error_code = serializers.CharField()
    last_error_text = serializers.CharField()
    repair_id = serializers.UUIDField(allow_null=True, help_text="The repair that put it back to work last.")
    created_at = Moment()
    updated_at = Moment()
    finished_at = Moment(allow_null=True)


class RecordSerializer(serializers.Serializer[Any]):
    """The record that a job works on, as it stands now."""

    record_type = serializers.CharField()
    record_id = serializers.CharField()
    state = serializers.CharField()
    detail = serializers.DictField(child=serializers.JSONField())


class JobLetterSerializer(serializers.Serializer[Any]):
    """The dead letter that a job has become."""

    id = serializers.UUIDField()
    state = serializers.CharField(source="standing_now")
    incident_id = serializers.UUIDField()
    incident_state = serializers.ChoiceField(choices=IncidentState.values, source="incident.state")


class JobPageSerializer(serializers.Serializer[Any]):
    """One job with its record and its dead letter."""

    job = JobSerializer()
    payload_preview = serializers.CharField(help_text="What it is called with, redacted.")
    payload_version = serializers.IntegerField(source="job.payload_version")
    record = RecordSerializer(allow_null=True, help_text="Null where it has none, or its kind is not known here.")
    dead_letter = JobLetterSerializer(allow_null=True, source="letter")

    def to_representation(self, instance: selectors.JobPage) -> dict[str, Any]:
        """Return the page with the letter's state as a reader sees it (C18)."""
        letter: Any = instance.letter
        if letter is not None:
            letter.standing_now = letter.standing(letter.incident)
        return super().to_representation(instance)


class JobPayloadSerializer(serializers.Serializer[Any]):
    """What a job is called with, exactly."""

    job_id = serializers.UUIDField()
    payload_version = serializers.IntegerField()
    text = serializers.CharField(help_text="The JSON to the letter.")
    payload = serializers.DictField(child=serializers.JSONField(), allow_null=True)
    as_text = serializers.ListField(
        child=serializers.CharField(),
        help_text="JSON pointers to numbers that are text in `payload`, as doubles cannot hold them.",
    )


class JobList(OpsView):
    @operation(name="list_jobs", summary="Jobs", tag="jobs", query=JobListQuery, answer=paged(JobSerializer))
    def get(self, call: Call) -> Answer:
        """Newest first."""
        chosen = dict(call.query)
        limit, cursor = chosen.pop("limit"), chosen.pop("cursor", None)
        wanted = selectors.JobFilter(states=chosen.pop("state", ()), **chosen)
        return Answer(value=selectors.list_jobs(call.operator, wanted, limit=limit, cursor=cursor))


class JobDetail(OpsView):
    @operation(
        name="get_job",
        summary="A job",
        tag="jobs",
        answer=JobPageSerializer,
        gives_etag=True,
        refusals=(JobNotFound,),
    )
    def get(self, call: Call, job_id: UUID) -> Answer:
        """With the record that it works on, as it stands now, and its dead letter if it has died."""
        page = selectors.job_page(call.operator, job_id)
        document = JobPageSerializer(page).data
        return Answer(value=page, document=document, etag=representation_tag(job_id, version_of(page.job), document))


class JobPayloadView(OpsView):
    cache_control = "no-store"

    @operation(
        name="get_job_payload",
        summary="A job's payload",
        tag="jobs",
        answer=JobPayloadSerializer,
        refusals=(JobNotFound,),
    )
    def get(self, call: Call, job_id: UUID) -> Answer:
        """Unredacted, for who holds `payloads.read`; each reading is audited before it is answered."""
        return Answer(value=read_job_payload(job_id=job_id, by=call.operator))


def version_of(job: Job) -> int:
    """Return what stands for a job's version in its entity tag: the time of its last change, in microseconds."""
    return (job.updated_at - EPOCH) // timedelta(microseconds=1)
