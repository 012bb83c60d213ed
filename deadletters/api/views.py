"""Letters and workers over REST. A letter's own page and what is done about it are in ``repairs.api``."""

from __future__ import annotations

from uuid import UUID

from deadletters import selectors
from deadletters.api.serializers import (
    LetterListQuery,
    LetterPageQuery,
    LetterSerializer,
    NodeListQuery,
    NodeSerializer,
)
from grants.rest import Answer, Call, OpsView, operation
from incidents.errors import IncidentNotFound
from opsconsole.core.openapi import paged


class LetterList(OpsView):
    @operation(
        name="list_dead_letters",
        summary="Dead letters",
        tag="dead-letters",
        query=LetterListQuery,
        answer=paged(LetterSerializer),
    )
    def get(self, call: Call) -> Answer:
        """Open ones first, then acknowledged ones, then the rest, each newest first."""
        chosen = dict(call.query)
        limit, cursor, ordering = chosen.pop("limit"), chosen.pop("cursor", None), chosen.pop("ordering")
        wanted = selectors.LetterFilter(states=chosen.pop("state", ()), **chosen)
        return Answer(
            value=selectors.list_letters(call.operator, wanted, ordering=ordering, limit=limit, cursor=cursor)
        )


class IncidentLetters(OpsView):
    @operation(
        name="list_letters_of_incident",
        summary="An incident's dead letters",
        tag="incidents",
        query=LetterPageQuery,
        answer=paged(LetterSerializer),
        refusals=(IncidentNotFound,),
    )
    def get(self, call: Call, incident_id: UUID) -> Answer:
        """Open ones first, then acknowledged ones, then the rest, each newest first."""
        page = selectors.letters_of_incident(
            call.operator,
            incident_id,
            states=call["state"] or (),
            ordering=call["ordering"],
            limit=call["limit"],
            cursor=call["cursor"],
        )
        return Answer(value=page)


class NodeList(OpsView):
    @operation(
        name="list_worker_nodes",
        summary="Workers",
        tag="workers",
        query=NodeListQuery,
        answer=paged(NodeSerializer),
    )
    def get(self, call: Call) -> Answer:
        """Last seen first. For every operator who may inspect anything: workers belong to no tenant."""
        live = None if call["live"] is None else call["live"] == "true"
        page = selectors.list_worker_nodes(
            call.operator, source=call["source"], live=live, limit=call["limit"], cursor=call["cursor"]
        )
        return Answer(value=page)
