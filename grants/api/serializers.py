"""How operators, permissions and the audit trail look in JSON."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from grants.actions import Action
from grants.models import AuditEvent, Verdict
from grants.operators import OperatorKind
from grants.resources import ANY
from opsconsole.core.rest import BodySerializer, Document, Moment, PageQuery, QuerySerializer, Text

ACTIONS = [action.value for action in Action]


class AuditListQuery(PageQuery):
    tenant = serializers.CharField(required=False, max_length=200, help_text="Authorised first; `*` for every tenant.")
    action = serializers.CharField(required=False, max_length=200)
    operator = serializers.RegexField(r"^[a-z]+:.+\Z", required=False, max_length=300, help_text="Such as `person:5`.")
    target_type = serializers.CharField(required=False, max_length=200)
    target_id = serializers.CharField(required=False, max_length=255)
    verdict = serializers.ChoiceField(choices=Verdict.values, required=False)
    since = Moment(required=False, help_text="At this time or later.")
    before = Moment(required=False)


class AuditEventSerializer(serializers.Serializer[AuditEvent]):
    """One thing that was done, or refused for want of a capability."""

    id = serializers.UUIDField()
    at = Moment()
    operator_kind = serializers.ChoiceField(choices=[kind.value for kind in OperatorKind])
    operator_id = serializers.CharField()
    operator_name = serializers.CharField()
    action = serializers.CharField()
    tenant = serializers.CharField()
    actor_type = serializers.CharField()
    actor_id = serializers.CharField()
    target_type = serializers.CharField()
    target_id = serializers.CharField()
    capability = serializers.CharField(help_text="The grant that allowed it; empty if it was denied.")
    reason = serializers.CharField()
    verdict = serializers.ChoiceField(choices=Verdict.values)
    outcome = Document()
    request_id = serializers.CharField()
    leaf_hash = serializers.CharField()


class MeSerializer(serializers.Serializer[Any]):
    """Who you are here."""

    id = serializers.CharField(help_text="As audit rows and holders name you.")
    kind = serializers.ChoiceField(choices=[kind.value for kind in OperatorKind])
    name = serializers.CharField()
    actions = serializers.ListField(
        child=serializers.ChoiceField(choices=ACTIONS), help_text="What you may do to something at least."
    )
    token_tenant = serializers.CharField(allow_null=True, help_text="The only tenant of this token; null for a person.")


class ScopeBody(BodySerializer):
    action = serializers.ChoiceField(choices=ACTIONS)
    tenant = Text(max_length=200)
    actor_type = Text(required=False, default="", max_length=200)
    actor_id = Text(required=False, default="", max_length=255)
    command_id = Text(required=False, default="", max_length=255)


class AuthorizeBody(ScopeBody):
    username = Text(required=False, max_length=200, help_text="Of somebody else; needs `grants.manage` there.")


class ComparisonSerializer(serializers.Serializer[Any]):
    """One field of the grant beside the same field of what was asked."""

    field = serializers.CharField()
    wanted = serializers.CharField()
    granted = serializers.CharField()


class ExplanationSerializer(serializers.Serializer[Any]):
    """Whether an operator may do one thing, and why."""

    allowed = serializers.BooleanField()
    operator = serializers.CharField()
    action = serializers.CharField()
    capability = serializers.SerializerMethodField(help_text="The grant that allows it; null if none does.")
    compared = ComparisonSerializer(many=True)
    reason = serializers.SerializerMethodField(help_text="In one sentence.")
    reasons = serializers.ListField(child=serializers.CharField(), help_text="Why not, nearest first.")

    def get_capability(self, explanation: Any) -> str | None:
        return None if explanation.capability is None else str(explanation.capability.text)

    def get_reason(self, explanation: Any) -> str:
        if explanation.capability is not None:
            return f"Allowed by {explanation.capability.id}."
        return str(explanation.reasons[0]) if explanation.reasons else "No permission covers this."


class GrantListQuery(QuerySerializer):
    user = serializers.CharField(required=False, max_length=200)
    group = serializers.CharField(required=False, max_length=200)


class GrantSerializer(serializers.Serializer[Any]):
    """One permission of one user or group."""

    id = serializers.CharField(help_text="Such as `user-grant:5`.")
    holder = serializers.CharField()
    is_group = serializers.BooleanField()
    action = serializers.CharField()
    tenant = serializers.CharField()
    actor_type = serializers.CharField()
    actor_id = serializers.CharField()
    command_id = serializers.CharField()
    granted_by_name = serializers.CharField()
    reason = serializers.CharField()
    granted_at = Moment()
    expires_at = Moment(allow_null=True)
    is_live = serializers.BooleanField()


class GrantListSerializer(serializers.Serializer[Any]):
    """The permissions that you may manage, and your own; 1,000 at most."""

    results = GrantSerializer(many=True)


class GrantBody(BodySerializer):
    user = Text(required=False, max_length=200)
    group = Text(required=False, max_length=200)
    action = serializers.ChoiceField(choices=ACTIONS)
    tenant = Text()
    actor_type = Text(required=False, default=ANY)
    actor_id = Text(required=False, default=ANY)
    command_id = Text(required=False, default=ANY)
    reason = Text(help_text="1 to 500 characters.")
    expires_at = Moment()

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Refuse two holders, and none."""
        if ("user" in attrs) == ("group" in attrs):
            raise serializers.ValidationError("Name a user or a group.")
        return attrs


class RevokeBody(BodySerializer):
    reason = Text(help_text="1 to 500 characters.")


class GrantReceiptSerializer(serializers.Serializer[Any]):
    """What giving or taking back a permission did, the first time and each time its key comes again."""

    grant_id = serializers.CharField()
    action = serializers.CharField()
    expires_at = serializers.CharField(allow_null=True)
    event_id = serializers.UUIDField(help_text="The audit event.")
    idempotent_replay = serializers.BooleanField(source="is_replay")
