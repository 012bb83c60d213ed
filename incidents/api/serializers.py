"""How incidents look in JSON."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from incidents.models import Incident, IncidentState, Severity
from incidents.search import HELP
from incidents.selectors import SEVERITIES, STATES
from opsconsole.core.rest import (
    BodySerializer,
    Choices,
    Document,
    Flag,
    Moment,
    PageQuery,
    SearchText,
    Text,
    WholeNumber,
)


class IncidentListQuery(PageQuery):
    state = Choices(STATES, required=False, help_text="One or several; `unresolved` is open and acknowledged.")
    severity = Choices(SEVERITIES, required=False, help_text="One or several.")
    tenant = serializers.CharField(required=False, max_length=100, help_text="Authorised first; `*` for every tenant.")
    source = serializers.CharField(required=False, max_length=100)  # type: ignore[assignment]
    job_type = serializers.CharField(required=False, max_length=255)
    holder = serializers.CharField(
        required=False, max_length=200, help_text="`me`, a name, or a reference such as `person:5`."
    )
    text = SearchText(HELP)


class IncidentSerializer(serializers.Serializer[Any]):
    """One cause of failed jobs."""

    id = serializers.UUIDField()
    number = serializers.IntegerField(help_text="For people; calls take the id.")
    tenant = serializers.CharField()
    source = serializers.CharField()  # type: ignore[assignment]
    state = serializers.ChoiceField(choices=IncidentState.values)
    severity = serializers.ChoiceField(choices=list(SEVERITIES), source="severity_name")
    category = serializers.CharField()
    title = serializers.CharField()
    summary = serializers.CharField()
    job_type = serializers.CharField()
    entity_type = serializers.CharField()
    entity_id = serializers.CharField()
    occurrence_count = serializers.IntegerField()
    letter_count = serializers.IntegerField()
    unresolved_count = serializers.IntegerField()
    late_count = serializers.IntegerField(help_text="Reports of failures from before the incident was closed.")
    since_acknowledged = serializers.IntegerField(allow_null=True)
    first_seen_at = Moment()
    last_seen_at = Moment()
    episode = serializers.IntegerField()
    opened_at = Moment()
    reopened_reason = serializers.CharField()
    acknowledged_by = serializers.CharField()
    acknowledged_by_name = serializers.CharField()
    acknowledged_at = Moment(allow_null=True)
    acknowledged_until = serializers.IntegerField(
        allow_null=True, help_text="The acknowledgement ends when so many occurrences have been seen."
    )
    resolved_by = serializers.CharField()
    resolved_by_name = serializers.CharField()
    resolved_at = Moment(allow_null=True)
    resolution_code = serializers.CharField()
    resolution_summary = serializers.CharField()
    version = serializers.IntegerField()

    def to_representation(self, instance: Incident) -> dict[str, Any]:
        """Return the incident with the severity by name."""
        instance.severity_name = Severity(instance.severity).label  # type: ignore[attr-defined]
        return super().to_representation(instance)


class EpisodeSerializer(serializers.Serializer[Any]):
    """How one episode ended."""

    episode = serializers.IntegerField()
    opened_at = Moment()
    resolved_at = Moment()
    resolved_by = serializers.CharField()
    resolved_by_name = serializers.CharField()
    resolution_code = serializers.CharField()
    resolution_summary = serializers.CharField()
    unrepaired_count = serializers.IntegerField()


class IncidentFullSerializer(IncidentSerializer):
    """One incident with what only its own page needs."""

    grouping = serializers.CharField(help_text="`cause`, or `job` for one incident per failed job.")
    metadata = Document()


class AcknowledgeBody(BodySerializer):
    take_over = Flag(required=False, default=False, help_text="Take it from whoever holds it.")
    further = WholeNumber(
        required=False, allow_null=True, default=None, help_text="Open it again after so many more failures."
    )


class ResolveBody(BodySerializer):
    code = Text(help_text="`[a-z][a-z0-9_]{1,63}`")
    summary = Text(help_text="3 to 2,000 characters.")
    unrepaired = WholeNumber(
        required=False, allow_null=True, default=None,
        help_text="How many of its jobs stay unrepaired: needed while there are any.",
    )  # fmt: skip


class IncidentMutationSerializer(serializers.Serializer[Any]):
    """What the request did, or, as a replay, what the first one of its key did."""

    incident_id = serializers.UUIDField()
    state = serializers.ChoiceField(choices=IncidentState.values)
    changed = serializers.BooleanField()
    version = serializers.IntegerField()
    holder = serializers.CharField(help_text="Who has it; empty if nobody does.")
    event_id = serializers.UUIDField(help_text="The audit event.")
    idempotent_replay = serializers.BooleanField()
