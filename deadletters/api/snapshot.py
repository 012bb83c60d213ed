"""The snapshot over REST."""

from __future__ import annotations

import hashlib
from typing import Any

from rest_framework import serializers

from deadletters.snapshot import operations_snapshot
from grants.rest import Answer, Call, OpsView, operation
from opsconsole.core.canonical_json import canonical_json
from opsconsole.core.rest import Moment, QuerySerializer
from opsconsole.jobs.models.budgets import SurgeMode


class SnapshotQuery(QuerySerializer):
    tenant = serializers.CharField(required=False, max_length=100, help_text="Authorised first; `*` for every tenant.")


class StreamSerializer(serializers.Serializer[Any]):
    """What waits in one stream; the rest of the total is done or was withdrawn."""

    total = serializers.IntegerField()
    pending = serializers.IntegerField()
    in_flight = serializers.IntegerField()
    retrying = serializers.IntegerField()
    terminally_failed = serializers.IntegerField(help_text="An e-mail counts as such from its 8th attempt.")
    oldest_due_at = Moment(allow_null=True)


class WorkflowsSerializer(serializers.Serializer[Any]):
    """Workflow runs."""

    total = serializers.IntegerField()
    active = serializers.IntegerField()
    repair_required = serializers.IntegerField()
    failed = serializers.IntegerField()
    oldest_active_at = Moment(allow_null=True, help_text="Of those to be repaired as well.")


class EvidenceSerializer(serializers.Serializer[Any]):
    """Requests for evidence."""

    total = serializers.IntegerField()
    pending = serializers.IntegerField()
    fetching = serializers.IntegerField()
    unavailable = serializers.IntegerField(help_text="Those that have failed included.")
    oldest_active_at = Moment(allow_null=True)


class BudgetsSerializer(serializers.Serializer[Any]):
    """What may be spent and what is."""

    active_policies = serializers.IntegerField()
    active_reservations = serializers.IntegerField()
    consumed_units = serializers.IntegerField()
    next_expiry_at = Moment(allow_null=True)


class IncidentCountsSerializer(serializers.Serializer[Any]):
    """Incidents that are not closed."""

    open = serializers.IntegerField()
    acknowledged = serializers.IntegerField()
    high_priority = serializers.IntegerField(help_text="High and critical ones, open or acknowledged.")


class TenantSurgeSerializer(serializers.Serializer[Any]):
    """Whether a tenant's intake is in a surge."""

    tenant = serializers.CharField()
    mode = serializers.ChoiceField(choices=SurgeMode.values)
    entered_at = Moment(allow_null=True)
    recover_after = Moment(allow_null=True)
    reason_codes = serializers.ListField(child=serializers.CharField())
    revision = serializers.IntegerField(help_text="0 where nothing was ever said of the tenant.")


class IntakeSurgeSerializer(serializers.Serializer[Any]):
    """The worst mode of any tenant, and what is said of each; those that are not normal come first."""

    mode = serializers.ChoiceField(choices=SurgeMode.values)
    tenants = TenantSurgeSerializer(many=True)


class UnresolvedLetterSerializer(serializers.Serializer[Any]):
    """A failed job that waits for a decision or for the answer of its repair, or one that is on hold."""

    id = serializers.UUIDField()
    tenant = serializers.CharField()
    source = serializers.CharField()  # type: ignore[assignment]
    queue = serializers.CharField()
    job_type = serializers.CharField()
    job_id = serializers.CharField()
    state = serializers.ChoiceField(choices=["open", "acknowledged", "held", "retrying"])
    error_code = serializers.CharField()
    occurrence_count = serializers.IntegerField()
    first_seen_at = Moment()
    last_seen_at = Moment()
    incident_id = serializers.UUIDField()
    record_type = serializers.CharField(help_text="Of the record that the job works on, where the ledger has it.")
    record_id = serializers.CharField()
    report_id = serializers.UUIDField(allow_null=True)


class FailedDeliverySerializer(serializers.Serializer[Any]):
    """Something that could not be sent, with the report that it is about."""

    delivery_type = serializers.ChoiceField(choices=["action", "notification", "email"])
    id = serializers.UUIDField()
    tenant = serializers.CharField()
    report_reference = serializers.CharField()
    state = serializers.ChoiceField(choices=["failed", "retrying"])
    attempt_count = serializers.IntegerField()
    error_code = serializers.CharField()
    updated_at = Moment()


class SnapshotSerializer(serializers.Serializer[Any]):
    """How everything stands that the operator may inspect; empty parts are zeros, nulls and empty lists."""

    generated_at = Moment()
    routing = StreamSerializer(source="streams.routing")
    actions = StreamSerializer(source="streams.actions")
    notifications = StreamSerializer(source="streams.notifications")
    emails = StreamSerializer(source="streams.emails")
    workflows = WorkflowsSerializer(source="streams.workflows")
    evidence = EvidenceSerializer(source="streams.evidence")
    budgets = BudgetsSerializer(source="streams.budgets")
    incidents = IncidentCountsSerializer(source="streams.incidents")
    intake_surge = IntakeSurgeSerializer()
    unresolved_letters = UnresolvedLetterSerializer(many=True, help_text="The newest 100.")
    failed_deliveries = FailedDeliverySerializer(many=True, help_text="The newest 100.")


class SnapshotView(OpsView):
    @operation(
        name="get_snapshot",
        summary="How everything stands",
        tag="snapshot",
        query=SnapshotQuery,
        answer=SnapshotSerializer,
        gives_etag=True,
    )
    def get(self, call: Call) -> Answer:
        """Of all that you may inspect, or of one tenant. The entity tag is weak: it leaves `generated_at` out."""
        found = operations_snapshot(call.operator, tenant=call["tenant"])
        document = SnapshotSerializer(found).data
        return Answer(value=found, document=document, etag=weak_tag(document))


def weak_tag(document: dict[str, Any]) -> str:
    """Return a weak entity tag of a snapshot, which is equal as long as nothing but the clock has moved on."""
    told = {name: value for name, value in document.items() if name != "generated_at"}
    text = canonical_json(told)
    return f'W/"{hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:32]}"'
