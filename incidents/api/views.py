"""Incidents over REST. What spans letters and repairs is in ``repairs.api``."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

from grants.rest import Answer, Call, OpsView, operation
from incidents import errors, selectors, services
from incidents.api.serializers import (
    AcknowledgeBody,
    IncidentListQuery,
    IncidentMutationSerializer,
    IncidentSerializer,
    ResolveBody,
)
from opsconsole.core.openapi import paged
from opsconsole.core.rest import entity_tag

if TYPE_CHECKING:
    from incidents.services import IncidentMutation

CHANGE = {
    "tag": "incidents",
    "answer": IncidentMutationSerializer,
    "is_mutation": True,
    "takes_if_match": True,
    "gives_etag": True,
}


class IncidentList(OpsView):
    @operation(
        name="list_incidents",
        summary="Incidents, worst first",
        tag="incidents",
        query=IncidentListQuery,
        answer=paged(IncidentSerializer),
    )
    def get(self, call: Call) -> Answer:
        """By severity, then newest seen, then id."""
        wanted = selectors.IncidentFilter(
            states=call["state"] or (),
            severities=call["severity"] or (),
            tenant=call["tenant"],
            source=call["source"],
            job_type=call["job_type"],
            holder=call["holder"],
            text=call["text"],
        )
        page = selectors.list_incidents(call.operator, wanted, limit=call["limit"], cursor=call["cursor"])
        return Answer(value=page)


class Acknowledge(OpsView):
    @operation(
        name="acknowledge_incident",
        summary="Take an incident",
        body=AcknowledgeBody,
        refusals=(
            errors.IncidentNotFound,
            errors.IncidentResolved,
            errors.IncidentChanged,
            errors.AcknowledgementLimitInvalid,
        ),
        **CHANGE,
    )
    def post(self, call: Call, incident_id: UUID) -> Answer:
        """Make yourself its holder. What somebody has already stays theirs unless `take_over` is true."""
        return _changed(services.acknowledge_incident(**self.mutation_of(call, incident_id=incident_id)))


class Release(OpsView):
    @operation(
        name="release_incident",
        summary="Give an incident back",
        refusals=(errors.IncidentNotFound, errors.IncidentResolved, errors.IncidentChanged),
        **CHANGE,
    )
    def post(self, call: Call, incident_id: UUID) -> Answer:
        """Nobody has it then, and it is open again. Its holder may do so, and whoever may acknowledge it."""
        return _changed(services.release_incident(**self.mutation_of(call, incident_id=incident_id)))


class Resolve(OpsView):
    @operation(
        name="resolve_incident",
        summary="Close an incident with a reason",
        body=ResolveBody,
        refusals=(
            errors.IncidentNotFound,
            errors.IncidentResolved,
            errors.IncidentChanged,
            errors.IncidentHasUnresolvedLetters,
            errors.ResolutionInvalid,
        ),
        **CHANGE,
    )
    def post(self, call: Call, incident_id: UUID) -> Answer:
        """While jobs are unrepaired, `unrepaired` names their number, and `incidents.close-unrepaired` is needed."""
        return _changed(services.resolve_incident(**self.mutation_of(call, incident_id=incident_id)))


def _changed(mutation: IncidentMutation) -> Answer:
    return Answer(
        value=mutation,
        etag=entity_tag(mutation.incident_id, mutation.version),
        is_replay=mutation.idempotent_replay,
    )
