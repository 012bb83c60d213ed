"""Sending on over REST what a hold has put aside."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from rest_framework import serializers

from deadletters.api.holds import hold_path
from deadletters.errors import HoldChanged, HoldNotFound
from grants.rest import Answer, Call, OpsView, operation
from opsconsole.core.rest import WholeNumber
from repairs import errors
from repairs.api.redrives import PaceBody, ReasonBody, pace_of, redrive_path
from repairs.models import RedriveState
from repairs.releases import release_hold


class ReleaseBody(ReasonBody):
    expected_count = WholeNumber(
        required=False, help_text="How many messages are put aside; refused if it is another number."
    )
    pace = PaceBody(required=False)


class ReleasedSerializer(serializers.Serializer[Any]):
    """One redrive of what was put aside of one tenant and one source."""

    redrive_id = serializers.UUIDField()
    state = serializers.ChoiceField(choices=RedriveState.values)
    total = serializers.IntegerField()


class ReleaseSerializer(serializers.Serializer[Any]):
    """What sends on what the hold had put aside, once it is started."""

    hold_id = serializers.UUIDField()
    redrives = ReleasedSerializer(many=True)
    total = serializers.IntegerField()
    event_id = serializers.UUIDField(help_text="The audit event.")
    idempotent_replay = serializers.BooleanField()


class HoldRelease(OpsView):
    @operation(
        name="release_hold",
        summary="Plan to send on what a hold has put aside",
        tag="holds",
        status=201,
        also=(202,),
        body=ReleaseBody,
        answer=ReleaseSerializer,
        is_mutation=True,
        takes_if_match=True,
        gives_location=True,
        refusals=(
            HoldNotFound,
            HoldChanged,
            errors.SelectionDrifted,
            errors.TooMany,
            errors.RedriveEmpty,
            errors.RedriveExists,
            errors.RedriveInvalid,
        ),
    )
    def post(self, call: Call, hold_id: UUID) -> Answer:
        """One redrive for each tenant and source; each is started like any other. The hold itself stays as it is.

        201 if each dry run is done, 202 if the workers make one. `Location` is the redrive, or of several the hold.
        """
        done = release_hold(**{**self.mutation_of(call, hold_id=hold_id), "pace": pace_of(call.body.get("pace"))})
        return Answer(
            value=done,
            status=202 if any(one.state == RedriveState.PLANNING for one in done.redrives) else 201,
            location=redrive_path(done.redrives[0].redrive_id) if len(done.redrives) == 1 else hold_path(hold_id),
            is_replay=done.idempotent_replay,
        )
