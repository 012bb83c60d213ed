"""How repairs look in JSON, and the two pages that people decide on."""

from __future__ import annotations

import json
from typing import Any

from rest_framework import serializers

from deadletters.api.serializers import (
    AttemptSerializer,
    LetterFullSerializer,
    LetterSerializer,
    OccurrenceSerializer,
    OutcomeCountsSerializer,
)
from deadletters.policy import TaskPolicySpec
from incidents.api.serializers import EpisodeSerializer, IncidentFullSerializer
from opsconsole.core.errors import OpsError
from opsconsole.core.rest import BodySerializer, Choices, Document, Flag, Id, Moment, PageQuery, Text, WholeNumber
from repairs.models import ActionState, ActionType, BatchState, RepairBatch, RunState, SweepActionType
from repairs.reconciliation.runs import MOST_ROWS
from repairs.selectors import RUN_STATES, STATES, IncidentPage, LetterPage


class RepairListQuery(PageQuery):
    state = Choices(STATES, required=False, help_text="One or several.")
    tenant = serializers.CharField(required=False, max_length=100, help_text="Authorised first; `*` for every tenant.")
    incident = serializers.UUIDField(required=False)
    dead_letter = serializers.UUIDField(required=False)
    batch = serializers.UUIDField(required=False)


class RepairSerializer(serializers.Serializer[Any]):
    """One change made to one letter."""

    id = serializers.UUIDField()
    tenant = serializers.CharField()
    source = serializers.CharField()  # type: ignore[assignment]
    action_type = serializers.ChoiceField(choices=ActionType.values)
    state = serializers.ChoiceField(choices=ActionState.values)
    dead_letter = serializers.UUIDField(source="letter_id")
    incident = serializers.UUIDField(source="incident_id")
    batch = serializers.UUIDField(source="batch_id", allow_null=True)
    previous = serializers.UUIDField(source="previous_id", allow_null=True, help_text="The letter's repair before.")
    planned_by = serializers.CharField()
    planned_by_name = serializers.CharField()
    planned_at = Moment()
    reason = serializers.CharField()
    reference = serializers.CharField()
    provider_answer = serializers.CharField(help_text="What its operator said of a job that may already have happened.")
    job_type = serializers.CharField()
    queue = serializers.CharField()
    new_task_id = serializers.CharField()
    send_count = serializers.IntegerField()
    send_error = serializers.CharField()
    sent_at = Moment(allow_null=True)
    started_at = Moment(allow_null=True)
    answer_due_at = Moment(allow_null=True)
    settled_at = Moment(allow_null=True)
    error_code = serializers.CharField()
    error_text = serializers.CharField()
    before = Document()
    after = Document()


class LetterResultSerializer(serializers.Serializer[Any]):
    """What became of one letter of a batch."""

    dead_letter = serializers.UUIDField(source="letter_id")
    status = serializers.ChoiceField(choices=["planned", "refused"])
    repair = serializers.CharField(source="repair_id", help_text="Empty if refused.")
    code = serializers.CharField(help_text="Why it was refused.")
    detail = serializers.CharField()
    warnings = serializers.ListField(child=serializers.CharField())


class BatchSerializer(serializers.Serializer[RepairBatch]):
    """One request to retry several letters of one incident."""

    id = serializers.UUIDField()
    tenant = serializers.CharField()
    incident = serializers.UUIDField(source="incident_id")
    state = serializers.ChoiceField(choices=BatchState.values)
    planned_by = serializers.CharField()
    planned_by_name = serializers.CharField()
    planned_at = Moment()
    finished_at = Moment(allow_null=True)
    chosen = serializers.IntegerField(help_text="How many letters the request named.")
    planned = serializers.IntegerField()
    refused = serializers.IntegerField()
    results = LetterResultSerializer(many=True)

    def to_representation(self, instance: RepairBatch) -> dict[str, Any]:
        """Return the batch with its stored results read."""
        results = json.loads(instance.results)
        columns = ("id", "tenant", "incident_id", "state", "planned_by", "planned_by_name", "planned_at", "finished_at")
        planned = sum(result["status"] == "planned" for result in results)
        shown = {name: getattr(instance, name) for name in columns} | {
            "chosen": len(json.loads(instance.letters)),
            "planned": planned,
            "refused": len(results) - planned,
            "results": results,
        }
        return super().to_representation(shown)  # type: ignore[arg-type]


class BatchMutationSerializer(serializers.Serializer[Any]):
    """What became of a request to retry several letters."""

    batch_id = serializers.UUIDField()
    incident_id = serializers.UUIDField()
    planned = serializers.IntegerField()
    refused = serializers.IntegerField()
    results = LetterResultSerializer(many=True)
    idempotent_replay = serializers.BooleanField()


class LetterMutationSerializer(serializers.Serializer[Any]):
    """What the request did to a letter, or, as a replay, what the first one of its key did."""

    letter_id = serializers.UUIDField()
    state = serializers.CharField()
    incident_id = serializers.UUIDField()
    incident_state = serializers.CharField()
    repair_id = serializers.UUIDField(allow_null=True)
    new_task_id = serializers.CharField()
    warnings = serializers.ListField(child=serializers.CharField())
    event_id = serializers.UUIDField(help_text="The audit event.")
    idempotent_replay = serializers.BooleanField()


class RetryBody(BodySerializer):
    provider_checked = Flag(
        required=False, default=False, help_text="You have looked: what may already have happened did not."
    )
    run_expired = Flag(required=False, default=False, help_text="Run it although its sender's time for it is over.")
    reason = Text(required=False, default="")
    reference = Text(required=False, default="", help_text="Where that was seen.")


class RetryManyBody(RetryBody):
    letters = serializers.ListField(child=Id(), required=False, help_text="The letters that are meant, 1,000 at most.")
    all = Flag(required=False, help_text="Every open letter of the running episode; needs `expected_count`.")
    expected_count = WholeNumber(required=False, help_text="How many there are; refused if it is another number.")

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Refuse two ways to choose at once, and what would be none: an empty choice never means all (API-03)."""
        wants_all = attrs.pop("all", None)
        if wants_all is False:
            raise serializers.ValidationError({"all": ["Leave it out, or say true."]})
        if wants_all and "letters" in attrs:
            raise serializers.ValidationError({"letters": ["Name letters or say all, not both."]})
        if wants_all and "expected_count" not in attrs:
            raise serializers.ValidationError({"expected_count": ["With `all`, say how many there are."]})
        if not wants_all and "expected_count" in attrs:
            raise serializers.ValidationError({"expected_count": ["This goes with `all` only."]})
        attrs["letter_ids"] = attrs.pop("letters", None)
        return attrs


class CloseAsDoneBody(BodySerializer):
    reason = Text(help_text="1 to 500 characters.")
    reference = Text(required=False, default="", help_text="Where that was seen.")


class DiscardBody(BodySerializer):
    reason = Text(help_text="1 to 500 characters.")


class EmptyBody(BodySerializer):
    pass


class MoreLinksSerializer(serializers.Serializer[Any]):
    """Paths of the whole lists, where the page shows the newest 50."""

    letters = serializers.CharField()
    repair_actions = serializers.CharField()
    timeline = serializers.CharField()


class IncidentPageSerializer(IncidentFullSerializer):
    """One incident, the letters waiting for a decision, its newest letters and repairs, and how it ended before."""

    team = serializers.CharField(help_text="Whose task it is, as the task's policy says; empty if none does.")
    runbook = serializers.CharField(
        help_text="An http or https address, or a page of the project's docs folder; empty if no policy names one."
    )
    waiting = OutcomeCountsSerializer(help_text="Its letters that wait for a decision, by outcome class.")
    letters = LetterSerializer(many=True)
    repair_actions = RepairSerializer(many=True)
    episodes = EpisodeSerializer(many=True)
    links = MoreLinksSerializer()

    def to_representation(self, instance: Any) -> dict[str, Any]:
        """Return the page; the incident's own fields stand at the top."""
        page: IncidentPage = instance["page"]
        policy: TaskPolicySpec = instance["policy"]
        shown = IncidentFullSerializer(page.incident).data
        return {
            **shown,
            "team": policy.team,
            "runbook": policy.runbook,
            "waiting": OutcomeCountsSerializer(page.outcomes).data,
            "letters": LetterSerializer(page.letters, many=True).data,
            "repair_actions": RepairSerializer(page.repairs, many=True).data,
            "episodes": EpisodeSerializer(page.episodes, many=True).data,
            "links": MoreLinksSerializer(instance["links"]).data,
        }


class RefusalSerializer(serializers.Serializer[OpsError]):
    """Why something would be refused just now."""

    code = serializers.CharField()
    status = serializers.IntegerField()
    detail = serializers.CharField()


class RetryPreviewSerializer(serializers.Serializer[Any]):
    """What a retry would be told just now."""

    refusal = RefusalSerializer(allow_null=True)
    warnings = serializers.ListField(child=serializers.CharField())


class LetterPageSerializer(LetterFullSerializer):
    """One letter with its whole history, and what a retry would be told just now."""

    traceback = serializers.CharField(help_text="Of the newest occurrence, redacted.")
    occurrences = OccurrenceSerializer(many=True, help_text="The newest 50.")
    retried_attempts = AttemptSerializer(many=True, help_text="Attempts of this task that Celery retried by itself.")
    repair_actions = RepairSerializer(many=True, help_text="The newest 50.")
    retry = RetryPreviewSerializer()
    version = serializers.IntegerField(help_text="Its incident's.")

    def to_representation(self, instance: Any) -> dict[str, Any]:
        """Return the page; the letter's own fields stand at the top."""
        page: LetterPage = instance
        return {
            **LetterFullSerializer(page.letter).data,
            "traceback": page.traceback,
            "occurrences": OccurrenceSerializer(page.occurrences, many=True).data,
            "retried_attempts": AttemptSerializer(page.attempts, many=True).data,
            "repair_actions": RepairSerializer(page.repairs, many=True).data,
            "retry": RetryPreviewSerializer(page).data,
            "version": page.letter.incident.version,
        }


class PayloadSerializer(serializers.Serializer[Any]):
    """What a job was called with, exactly."""

    letter_id = serializers.UUIDField()
    content_type = serializers.CharField()
    content_encoding = serializers.CharField()
    byte_count = serializers.IntegerField()
    text = serializers.CharField(allow_null=True, help_text="The body to the letter, if it is JSON.")
    base64 = serializers.CharField(allow_null=True, help_text="The body, if it is no JSON.")
    args = serializers.ListField(child=serializers.JSONField())
    kwargs = serializers.DictField(child=serializers.JSONField())
    args_json = serializers.CharField(help_text="The arguments as JSON with every digit.")
    kwargs_json = serializers.CharField(help_text="The named arguments as JSON with every digit.")
    as_text = serializers.ListField(
        child=serializers.CharField(),
        help_text="JSON pointers to numbers that are text in `args` and `kwargs`, as doubles cannot hold them.",
    )
    decode_error = serializers.CharField()


class TimelineEntrySerializer(serializers.Serializer[Any]):
    """One thing that happened to an incident."""

    id = serializers.UUIDField()
    at = Moment()
    kind = serializers.ChoiceField(choices=["event", "occurrence", "repair"])
    what = serializers.CharField()
    who = serializers.CharField()
    details = serializers.DictField(child=serializers.JSONField())


class RunListQuery(PageQuery):
    kind = serializers.CharField(required=False, max_length=64)
    state = Choices(RUN_STATES, required=False, help_text="One or several.")


class RunBody(BodySerializer):
    kind = Text(max_length=200, help_text="Which sweep, such as `stale_leases`.")
    limit = WholeNumber(
        required=False,
        min_value=1,
        max_value=MOST_ROWS,
        help_text=f"How many rows each part of the sweep looks at, oldest first. Usually {MOST_ROWS}.",
    )


class RunSerializer(serializers.Serializer[Any]):
    """One sweep and its counts: what the database says was changed, and what was left alone."""

    id = serializers.UUIDField()
    kind = serializers.CharField()
    state = serializers.ChoiceField(choices=RunState.values)
    scanned_count = serializers.IntegerField()
    repaired_count = serializers.IntegerField()
    skipped_count = serializers.IntegerField()
    incident_count = serializers.IntegerField()
    limit = serializers.IntegerField(source="row_limit", allow_null=True)
    error_code = serializers.CharField()
    error_text = serializers.CharField()
    started_by = serializers.CharField()
    started_by_name = serializers.CharField()
    started_at = Moment()
    heartbeat_at = Moment()
    finished_at = Moment(allow_null=True)
    waited_since = Moment(
        allow_null=True, help_text="Set if leases were left alone because for a while nobody could have renewed one."
    )


class RunMutationSerializer(serializers.Serializer[Any]):
    """The sweep that the request has run, or, as a replay, the one that the first request of its key ran."""

    run = RunSerializer()
    idempotent_replay = serializers.BooleanField()


class SweepRepairSerializer(serializers.Serializer[Any]):
    """One change that a sweep made to one record."""

    id = serializers.UUIDField()
    run = serializers.UUIDField(source="run_id")
    tenant = serializers.CharField()
    action_type = serializers.ChoiceField(choices=SweepActionType.values)
    entity_type = serializers.CharField()
    entity_id = serializers.CharField()
    operation_key = serializers.CharField()
    before = Document()
    after = Document()
    planned_by = serializers.CharField()
    applied_at = Moment()
