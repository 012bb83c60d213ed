"""How letters and workers look in JSON."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from deadletters.models import DeadLetter
from deadletters.outcome import OutcomeClass
from deadletters.search import HELP
from deadletters.selectors import ORDERINGS, STATES
from incidents.models import IncidentState
from opsconsole.core.rest import Choices, Moment, PageQuery, SearchText
from opsconsole.core.safe_text import safe_text

OUTCOMES = [outcome.value for outcome in OutcomeClass]
SHORT = 300


class LetterPageQuery(PageQuery):
    limit = serializers.IntegerField(required=False, default=100, min_value=1, max_value=200)
    ordering = serializers.ChoiceField(
        choices=list(ORDERINGS),
        required=False,
        default="default",
        help_text="`default`: open, then acknowledged and retrying, then the rest, each newest first; or `newest`.",
    )
    state = Choices(STATES, required=False, help_text="One or several; `unresolved` is open, acknowledged, retrying.")


class LetterListQuery(LetterPageQuery):
    tenant = serializers.CharField(required=False, max_length=100, help_text="Authorised first; `*` for every tenant.")
    source = serializers.CharField(required=False, max_length=100)  # type: ignore[assignment]
    job_type = serializers.CharField(required=False, max_length=255)
    queue = serializers.CharField(required=False, max_length=200)
    outcome_class = serializers.ChoiceField(choices=OUTCOMES, required=False)
    incident = serializers.UUIDField(required=False)
    task_id = serializers.CharField(required=False, max_length=255)
    job_id = serializers.CharField(required=False, max_length=200)
    actor_type = serializers.CharField(required=False, max_length=100)
    actor_id = serializers.CharField(required=False, max_length=200)
    seen_after = Moment(required=False, help_text="Last seen at this time or later.")
    seen_before = Moment(required=False, help_text="Last seen before this time.")
    text = SearchText(HELP)


class LetterIncidentSerializer(serializers.Serializer[Any]):
    """The incident that a letter belongs to."""

    id = serializers.UUIDField()
    number = serializers.IntegerField()
    state = serializers.ChoiceField(choices=IncidentState.values)
    title = serializers.CharField()


class LetterSerializer(serializers.Serializer[Any]):
    """One job that failed with no automatic attempt left."""

    id = serializers.UUIDField()
    tenant = serializers.CharField()
    source = serializers.CharField()  # type: ignore[assignment]
    state = serializers.SerializerMethodField(help_text="As a reader sees it, with its incident's state taken in.")
    incident = LetterIncidentSerializer()
    episode = serializers.IntegerField()
    job_type = serializers.CharField()
    queue = serializers.CharField()
    job_id = serializers.CharField()
    task_id = serializers.CharField()
    actor_type = serializers.CharField()
    actor_id = serializers.CharField()
    outcome_class = serializers.ChoiceField(choices=OUTCOMES)
    outcome_reason = serializers.CharField()
    ambiguous = serializers.SerializerMethodField(help_text="Whether its last attempt may have taken effect.")
    caught = serializers.CharField(help_text="What saw it end badly.")
    error_code = serializers.CharField()
    error_class = serializers.CharField()
    error_text = serializers.SerializerMethodField(help_text="Redacted; in lists its beginning and end.")
    call_site = serializers.CharField()
    attempts = serializers.IntegerField()
    message_state = serializers.CharField(help_text="How much of the original message is here: only `full` is retried.")
    is_set_aside = serializers.BooleanField()
    has_report = serializers.BooleanField(help_text="Its job names a report.")
    has_outbox = serializers.BooleanField(help_text="Its job names what it sends from an outbox.")
    occurrence_count = serializers.IntegerField()
    first_seen_at = Moment()
    last_seen_at = Moment()
    closed_at = Moment(allow_null=True)
    worker = serializers.CharField()
    release = serializers.CharField()

    def get_state(self, letter: DeadLetter) -> str:
        return letter.standing(letter.incident)

    def get_ambiguous(self, letter: DeadLetter) -> bool:
        return letter.outcome_class == OutcomeClass.AMBIGUOUS

    def get_error_text(self, letter: DeadLetter) -> str:
        return safe_text(letter.error_text, SHORT)


class LetterFullSerializer(LetterSerializer):
    """One letter with what only its own page needs."""

    fingerprint = serializers.CharField()
    payload_version = serializers.IntegerField()
    payload_preview = serializers.CharField(help_text="The arguments, redacted.")
    exchange = serializers.CharField()
    routing_key = serializers.CharField()
    priority = serializers.IntegerField(allow_null=True)
    root_id = serializers.CharField()
    parent_id = serializers.CharField()
    group_id = serializers.CharField()
    chord_id = serializers.CharField()
    trace_id = serializers.CharField()
    sentry_id = serializers.CharField()

    def get_error_text(self, letter: DeadLetter) -> str:
        return letter.error_text


class OccurrenceSerializer(serializers.Serializer[Any]):
    """One final failure of a letter."""

    id = serializers.UUIDField()
    happened_at = Moment()
    is_exact = serializers.BooleanField(help_text="False where the host was restarted in between.")
    recorded_at = Moment()
    is_late = serializers.BooleanField()
    task_id = serializers.CharField()
    retries = serializers.IntegerField()
    repair_id = serializers.UUIDField(allow_null=True, help_text="The repair whose run this was.")
    caught = serializers.CharField()
    outcome_class = serializers.ChoiceField(choices=OUTCOMES)
    outcome_reason = serializers.CharField()
    error_class = serializers.CharField()
    error_text = serializers.CharField()
    worker = serializers.CharField()
    release = serializers.CharField()


class AttemptSerializer(serializers.Serializer[Any]):
    """One failed attempt that Celery retried by itself."""

    id = serializers.UUIDField()
    happened_at = Moment()
    retries = serializers.IntegerField()
    duration_ms = serializers.IntegerField(allow_null=True)
    outcome_class = serializers.ChoiceField(choices=OUTCOMES)
    outcome_reason = serializers.CharField()
    error_class = serializers.CharField()
    error_text = serializers.CharField()
    worker = serializers.CharField()
    release = serializers.CharField()


class OutcomeCountsSerializer(serializers.Serializer[Any]):
    """Letters that wait for a decision, by outcome class."""

    safe = serializers.IntegerField()
    ambiguous = serializers.IntegerField()
    not_declared = serializers.IntegerField()
    is_capped = serializers.BooleanField(help_text="True if only the newest 1,000 were counted.")


class NodeListQuery(PageQuery):
    source = serializers.CharField(required=False, max_length=100)  # type: ignore[assignment]
    live = serializers.ChoiceField(choices=["true", "false"], required=False)


class NodeSerializer(serializers.Serializer[Any]):
    """One worker's own report."""

    id = serializers.CharField(source="node.id")
    source = serializers.CharField(source="node.source")  # type: ignore[assignment]
    host = serializers.CharField(source="node.host")
    pid = serializers.IntegerField(source="node.pid")
    pool = serializers.CharField(source="node.pool")
    concurrency = serializers.IntegerField(source="node.concurrency")
    release = serializers.CharField(source="node.release")
    celery_version = serializers.CharField(source="node.celery_version")
    settings_digest = serializers.CharField(source="node.settings_digest")
    is_live = serializers.BooleanField()
    queues = serializers.ListField(child=serializers.CharField())
    tasks = serializers.DictField(child=serializers.CharField(), help_text="Task names with their signatures.")
    journal_bytes = serializers.IntegerField(source="node.journal_bytes")
    journal_oldest_seconds = serializers.FloatField(source="node.journal_oldest_seconds")
    dropped_count = serializers.IntegerField(source="node.dropped_count")
    trouble = serializers.CharField(source="node.trouble")
    started_at = Moment(source="node.started_at")
    seen_at = Moment(source="node.seen_at")
    captured_at = Moment(source="node.captured_at", allow_null=True)
    stopped_at = Moment(source="node.stopped_at", allow_null=True)
