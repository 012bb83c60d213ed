"""Holds over REST: placed, moved, ended and looked at. Sending on what they have put aside is in ``repairs.api``."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.urls import reverse
from rest_framework import serializers

from deadletters import errors, holds, services
from deadletters.models import Hold, HoldState
from grants.errors import ReasonInvalid
from grants.operators import Operator
from grants.rest import Answer, Call, OpsView, operation, representation_tag
from opsconsole.core.openapi import paged
from opsconsole.core.rest import API_NAMESPACE, BodySerializer, Choices, Id, Moment, PageQuery, Text

COUNTED = 10_000
"""Messages up to which those that are still put aside are counted."""


class HoldListQuery(PageQuery):
    state = Choices(tuple(HoldState.values), required=False, help_text="One or several.")
    tenant = serializers.CharField(
        required=False, max_length=100, help_text="Authorised first; with those of every tenant. `*` for every tenant."
    )
    source = serializers.CharField(required=False, max_length=100)  # type: ignore[assignment]
    job_type = serializers.CharField(required=False, max_length=255)
    queue = serializers.CharField(required=False, max_length=200)


class HoldBody(BodySerializer):
    """Messages in which every named part is the same are put aside before they run."""

    tenant = Text(help_text="One, or `*` for every one, which needs a permission over every tenant.")
    source = Text(required=False, default="*", help_text="One, or `*` for every one.")  # type: ignore[assignment]
    job_type = Text(required=False, default="")
    queue = Text(required=False, default="")
    task_id = Text(required=False, default="", help_text="Or the id of a job of the ledger.")
    payload_of = Id(required=False, help_text="A dead letter: messages of its task with the same arguments are meant.")
    payload_hash = Text(required=False, default="", help_text="The same by its hash; goes with `job_type`.")
    reason = Text(help_text="1 to 500 characters.")
    ends_at = Moment(help_text="A week ahead at most.")

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Refuse two ways to name a payload."""
        if "payload_of" in attrs and (attrs["payload_hash"] or attrs["job_type"]):
            raise serializers.ValidationError({"payload_of": ["It names the task and the payload already."]})
        return attrs


class HoldReasonBody(BodySerializer):
    reason = Text(help_text="1 to 500 characters.")


class ExtendHoldBody(HoldReasonBody):
    ends_at = Moment(help_text="The new end, earlier or later; a week ahead at most.")


class HoldSerializer(serializers.Serializer[Any]):
    """Which messages are put aside before they run, why, and until when."""

    id = serializers.UUIDField()
    tenant = serializers.CharField(help_text="`*`: every one.")
    source = serializers.CharField(help_text="`*`: every one.")  # type: ignore[assignment]
    job_type = serializers.CharField()
    queue = serializers.CharField()
    task_id = serializers.CharField()
    payload_hash = serializers.CharField()
    state = serializers.ChoiceField(choices=HoldState.values)
    reason = serializers.CharField()
    placed_by = serializers.CharField()
    placed_by_name = serializers.CharField()
    placed_at = Moment()
    ends_at = Moment()
    ended_by = serializers.CharField()
    ended_by_name = serializers.CharField()
    ended_at = Moment(allow_null=True)
    released_at = Moment(allow_null=True, help_text="When it was last planned to send on what it had put aside.")
    redrive = serializers.UUIDField(source="redrive_id", allow_null=True, help_text="What sends it on.")
    letter_count = serializers.IntegerField(
        source="put_aside", allow_null=True,
        help_text="Messages that it has put aside so far; null for who does not see every tenant of them.",
    )  # fmt: skip


class HoldIncidentSerializer(serializers.Serializer[Any]):
    """What a hold has put aside of one tenant and one source."""

    id = serializers.UUIDField()
    number = serializers.IntegerField()
    tenant = serializers.CharField()
    source = serializers.CharField()  # type: ignore[assignment]
    unresolved_count = serializers.IntegerField(help_text="Still put aside, or being sent on.")


class HoldPageSerializer(HoldSerializer):
    """One hold with what it still has put aside."""

    held_count = serializers.IntegerField(help_text=f"Still put aside of what one may see, up to {COUNTED:,}.")
    is_capped = serializers.BooleanField(help_text="Whether there are more.")
    incidents = HoldIncidentSerializer(many=True, help_text="Of the tenants that one may see.")


class HoldMutationSerializer(serializers.Serializer[Any]):
    """What the request did to a hold, or, as a replay, what the first one of its key did."""

    hold_id = serializers.UUIDField()
    state = serializers.ChoiceField(choices=HoldState.values)
    ends_at = Moment()
    letter_count = serializers.IntegerField()
    event_id = serializers.UUIDField(help_text="The audit event.")
    idempotent_replay = serializers.BooleanField()


CHANGE = {"tag": "holds", "answer": HoldMutationSerializer, "is_mutation": True}
CHANGED = (errors.HoldNotFound, errors.HoldChanged, errors.HoldNotActive, ReasonInvalid)


class HoldList(OpsView):
    @operation(name="list_holds", summary="Holds", tag="holds", query=HoldListQuery, answer=paged(HoldSerializer))
    def get(self, call: Call) -> Answer:
        """Newest first; those of every tenant are known to whoever may inspect anything."""
        chosen = dict(call.query)
        limit, cursor = chosen.pop("limit"), chosen.pop("cursor", None)
        wanted = holds.HoldFilter(states=chosen.pop("state", ()), **chosen)
        return Answer(value=holds.list_holds(call.operator, wanted, limit=limit, cursor=cursor))

    @operation(
        name="place_hold",
        summary="Put messages aside before they run",
        status=201,
        body=HoldBody,
        gives_location=True,
        refusals=(
            errors.HoldInvalid, errors.HoldEndInvalid, errors.TooManyHolds, errors.PayloadNotKnown, ReasonInvalid,
        ),
        **CHANGE,
    )  # fmt: skip
    def post(self, call: Call) -> Answer:
        """Workers learn of it within seconds. What runs already is not stopped."""
        body = dict(call.body)
        reason, ends_at = body.pop("reason"), body.pop("ends_at")
        letter_id = body.pop("payload_of", None)
        if letter_id is not None:
            body["job_type"], body["payload_hash"] = holds.named_payload(call.operator, letter_id)
        done = services.place_hold(
            target=services.HoldTarget(**body), reason=reason, ends_at=ends_at, by=call.operator, key=call.key
        )
        return Answer(value=done, location=hold_path(done.hold_id), is_replay=done.idempotent_replay)


class HoldDetail(OpsView):
    @operation(
        name="get_hold",
        summary="A hold",
        tag="holds",
        answer=HoldPageSerializer,
        gives_etag=True,
        refusals=(errors.HoldNotFound,),
    )
    def get(self, call: Call, hold_id: UUID) -> Answer:
        """With what it still has put aside."""
        hold = hold_page(call.operator, hold_id)
        document = HoldPageSerializer(hold).data
        return Answer(value=hold, document=document, etag=representation_tag(hold_id, hold.version, document))


class HoldExtend(OpsView):
    @operation(
        name="extend_hold",
        summary="Move the end of a hold",
        body=ExtendHoldBody,
        takes_if_match=True,
        refusals=(*CHANGED, errors.HoldEndInvalid),
        **CHANGE,
    )
    def post(self, call: Call, hold_id: UUID) -> Answer:
        """Forth or back; only of one that is in force."""
        done = services.extend_hold(**self.mutation_of(call, hold_id=hold_id))
        return Answer(value=done, is_replay=done.idempotent_replay)


class HoldEnd(OpsView):
    @operation(
        name="end_hold",
        summary="End a hold",
        body=HoldReasonBody,
        takes_if_match=True,
        refusals=CHANGED,
        **CHANGE,
    )
    def post(self, call: Call, hold_id: UUID) -> Answer:
        """New messages run again; what was put aside stays so until it is released."""
        done = services.end_hold(**self.mutation_of(call, hold_id=hold_id))
        return Answer(value=done, is_replay=done.idempotent_replay)


def hold_page(operator: Operator, hold_id: UUID) -> Hold:
    """Return a hold with what ``HoldPageSerializer`` shows beside its row; raises ``HoldNotFound``, audited."""
    hold: Any = holds.find_hold(operator, hold_id)
    counted = holds.count_held(hold, COUNTED, seen_by=operator)
    hold.held_count, hold.is_capped = min(counted, COUNTED), counted > COUNTED
    hold.incidents = holds.incidents_of_hold(operator, hold)
    found: Hold = hold
    return found


def hold_path(hold_id: UUID) -> str:
    return reverse(f"{API_NAMESPACE}:hold", kwargs={"hold_id": hold_id})
