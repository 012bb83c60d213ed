"""Repairs over REST, and the pages of an incident and of a letter, which hold repairs."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

from django.urls import reverse

from deadletters.selectors import task_policies
from grants.errors import ReasonInvalid
from grants.rest import Answer, Call, OpsView, operation, representation_tag
from incidents.errors import IncidentChanged, IncidentNotFound, IncidentResolved
from opsconsole.core.openapi import paged
from opsconsole.core.rest import API_NAMESPACE, PageQuery
from repairs import errors, selectors, services
from repairs.api.serializers import (
    BatchMutationSerializer,
    BatchSerializer,
    CloseAsDoneBody,
    DiscardBody,
    EmptyBody,
    IncidentPageSerializer,
    LetterMutationSerializer,
    LetterPageSerializer,
    PayloadSerializer,
    RepairListQuery,
    RepairSerializer,
    RetryBody,
    RetryManyBody,
    RunBody,
    RunListQuery,
    RunMutationSerializer,
    RunSerializer,
    SweepRepairSerializer,
    TimelineEntrySerializer,
)
from repairs.payloads import read_payload
from repairs.reconciliation.running import run_now

if TYPE_CHECKING:
    from repairs.services import LetterMutation

LETTER = {"tag": "dead-letters", "answer": LetterMutationSerializer, "is_mutation": True}
DECIDED = (errors.LetterNotFound, errors.JobOvertaken, IncidentChanged)
UNRETRYABLE = (
    errors.LetterSetAside,
    errors.IncidentNotRepairable,
    errors.LetterTooOld,
    errors.MessageNotCaptured,
    errors.MessageTooDeep,
    errors.MessageSealedWithUnknownKey,
    errors.MessageExpired,
    errors.JobNotServed,
    errors.ArgumentsDoNotFit,
    errors.ProviderOutcomeUnknown,
)
SEALED = (errors.MessageNotCaptured, errors.MessageTooDeep, errors.MessageSealedWithUnknownKey)


class IncidentDetail(OpsView):
    @operation(
        name="get_incident",
        summary="An incident",
        tag="incidents",
        answer=IncidentPageSerializer,
        gives_etag=True,
        refusals=(IncidentNotFound,),
    )
    def get(self, call: Call, incident_id: UUID) -> Answer:
        """With its newest 50 letters and repair actions; `links` lead to the rest."""
        page = selectors.incident_page(call.operator, incident_id)
        links = {
            "letters": _path("incident-letters", incident_id=incident_id),
            "repair_actions": f"{_path('repair-actions')}?incident={incident_id}",
            "timeline": _path("incident-timeline", incident_id=incident_id),
        }
        shown = {"page": page, "policy": task_policies().for_task(page.incident.job_type), "links": links}
        document = IncidentPageSerializer(shown).data
        tag = representation_tag(incident_id, page.incident.version, document)
        return Answer(value=shown, document=document, etag=tag)


class IncidentTimeline(OpsView):
    @operation(
        name="list_timeline_of_incident",
        summary="What happened to an incident",
        tag="incidents",
        query=PageQuery,
        answer=paged(TimelineEntrySerializer),
        refusals=(IncidentNotFound,),
    )
    def get(self, call: Call, incident_id: UUID) -> Answer:
        """Events, failures and repairs, newest first; of failures and repairs those of the newest 1,000 jobs."""
        page = selectors.timeline(call.operator, incident_id, limit=call["limit"], cursor=call["cursor"])
        return Answer(value=page)


class IncidentRetry(OpsView):
    @operation(
        name="retry_incident",
        summary="Run jobs of an incident again",
        tag="incidents",
        status=202,
        body=RetryManyBody,
        answer=BatchMutationSerializer,
        is_mutation=True,
        takes_if_match=True,
        gives_location=True,
        refusals=(
            IncidentNotFound,
            IncidentResolved,
            IncidentChanged,
            errors.IncidentHasNoLetter,
            errors.IncidentNotRepairable,
            errors.LetterNotFound,
            errors.SelectionInvalid,
            errors.SelectionDrifted,
            errors.TooMany,
        ),
    )
    def post(self, call: Call, incident_id: UUID) -> Answer:
        """Name the letters, or say `all` with `expected_count`. Each is planned or refused by itself, in `results`."""
        mutation = services.retry_incident(**self.mutation_of(call, incident_id=incident_id))
        return Answer(
            value=mutation,
            location=_path("repair-batch", batch_id=mutation.batch_id),
            is_replay=mutation.idempotent_replay,
        )


class LetterDetail(OpsView):
    @operation(
        name="get_dead_letter",
        summary="A dead letter",
        tag="dead-letters",
        answer=LetterPageSerializer,
        gives_etag=True,
        refusals=(errors.LetterNotFound,),
    )
    def get(self, call: Call, letter_id: UUID) -> Answer:
        """With its occurrences, attempts and repairs, and what a retry would be told just now."""
        page = selectors.letter_page(call.operator, letter_id)
        document = LetterPageSerializer(page).data
        tag = representation_tag(letter_id, page.letter.incident.version, document)
        return Answer(value=page, document=document, etag=tag)


class LetterPayload(OpsView):
    cache_control = "no-store"

    @operation(
        name="get_payload",
        summary="A dead letter's arguments",
        tag="dead-letters",
        answer=PayloadSerializer,
        refusals=(errors.LetterNotFound, *SEALED),
    )
    def get(self, call: Call, letter_id: UUID) -> Answer:
        """Unredacted, for who holds `payloads.read`; each reading is audited before it is answered."""
        return Answer(value=read_payload(letter_id=letter_id, by=call.operator))


class LetterRetry(OpsView):
    @operation(
        name="retry_dead_letter",
        summary="Run a job again",
        status=202,
        body=RetryBody,
        takes_if_match=True,
        gives_location=True,
        refusals=(*DECIDED, *UNRETRYABLE),
        **LETTER,
    )
    def post(self, call: Call, letter_id: UUID) -> Answer:
        """Plans a repair; it counts when its job has succeeded. `Location` is where to watch it."""
        return _planned(services.retry_letter(**self.mutation_of(call, letter_id=letter_id)))


class LetterCloseAsDone(OpsView):
    @operation(
        name="close_dead_letter_as_done",
        summary="State that a job has happened",
        body=CloseAsDoneBody,
        takes_if_match=True,
        refusals=(*DECIDED, ReasonInvalid),
        **LETTER,
    )
    def post(self, call: Call, letter_id: UUID) -> Answer:
        """Closes it without a run: the answer for a job that may already have happened, and did."""
        return _decided(services.close_letter_as_done(**self.mutation_of(call, letter_id=letter_id)))


class LetterDiscard(OpsView):
    @operation(
        name="discard_dead_letter",
        summary="Give a job up",
        body=DiscardBody,
        takes_if_match=True,
        refusals=(*DECIDED, ReasonInvalid),
        **LETTER,
    )
    def post(self, call: Call, letter_id: UUID) -> Answer:
        """Its message is removed for good; the letter and its history stay."""
        return _decided(services.discard_letter(**self.mutation_of(call, letter_id=letter_id)))


class RepairList(OpsView):
    @operation(
        name="list_repair_actions",
        summary="Repairs",
        tag="repairs",
        query=RepairListQuery,
        answer=paged(RepairSerializer),
    )
    def get(self, call: Call) -> Answer:
        """Newest first."""
        wanted = selectors.RepairFilter(
            states=call["state"] or (),
            tenant=call["tenant"],
            incident=call["incident"],
            letter=call["dead_letter"],
            batch=call["batch"],
        )
        page = selectors.list_repairs(call.operator, wanted, limit=call["limit"], cursor=call["cursor"])
        return Answer(value=page)


class RepairDetail(OpsView):
    @operation(
        name="get_repair_action",
        summary="A repair",
        tag="repairs",
        answer=RepairSerializer,
        refusals=(errors.RepairNotFound,),
    )
    def get(self, call: Call, repair_id: UUID) -> Answer:
        """How far it is, and how it ended."""
        return Answer(value=selectors.find_repair(call.operator, repair_id))


class RepairCancel(OpsView):
    @operation(
        name="cancel_repair_action",
        summary="Withdraw a repair",
        tag="repairs",
        body=EmptyBody,
        answer=LetterMutationSerializer,
        is_mutation=True,
        refusals=(errors.RepairNotFound, errors.RepairNotCancellable),
    )
    def post(self, call: Call, repair_id: UUID) -> Answer:
        """Only before its job has started; the letter waits for a decision again."""
        return _decided(services.cancel_repair(repair_id=repair_id, by=call.operator, key=call.key))


class BatchDetail(OpsView):
    @operation(
        name="get_repair_batch",
        summary="A batch of repairs",
        tag="repairs",
        answer=BatchSerializer,
        refusals=(errors.BatchNotFound,),
    )
    def get(self, call: Call, batch_id: UUID) -> Answer:
        """What became of each letter of one request."""
        return Answer(value=selectors.find_batch(call.operator, batch_id))


class RunList(OpsView):
    @operation(
        name="list_reconciliation_runs",
        summary="Sweeps",
        tag="reconciliation",
        query=RunListQuery,
        answer=paged(RunSerializer),
    )
    def get(self, call: Call) -> Answer:
        """Newest first."""
        page = selectors.list_runs(
            call.operator,
            kind=call["kind"],
            states=call["state"] or (),
            limit=call["limit"],
            cursor=call["cursor"],
        )
        return Answer(value=page)

    @operation(
        name="run_reconciliation",
        summary="Run a sweep now",
        tag="reconciliation",
        status=201,
        body=RunBody,
        answer=RunMutationSerializer,
        is_mutation=True,
        gives_location=True,
        refusals=(errors.ReconciliationKindInvalid, errors.ReconciliationKindUnknown, errors.ReconciliationRunning),
    )
    def post(self, call: Call) -> Answer:
        """Looks at up to `limit` rows, and answers when it has; the sweeps of the schedule go on beside it."""
        mutation = run_now(by=call.operator, key=call.key, **call.body)
        location = _path("reconciliation-run", run_id=mutation.run.id)
        return Answer(value=mutation, location=location, is_replay=mutation.idempotent_replay)


class RunDetail(OpsView):
    @operation(
        name="get_reconciliation_run",
        summary="A sweep",
        tag="reconciliation",
        answer=RunSerializer,
        refusals=(errors.ReconciliationRunNotFound,),
    )
    def get(self, call: Call, run_id: UUID) -> Answer:
        """Its counts so far, or as it ended."""
        return Answer(value=selectors.find_run(call.operator, run_id))


class RunRepairs(OpsView):
    @operation(
        name="list_repairs_of_reconciliation_run",
        summary="What a sweep changed",
        tag="reconciliation",
        query=PageQuery,
        answer=paged(SweepRepairSerializer),
        refusals=(errors.ReconciliationRunNotFound,),
    )
    def get(self, call: Call, run_id: UUID) -> Answer:
        """Newest first, of the tenants that one may see."""
        page = selectors.list_repairs_of_run(call.operator, run_id, limit=call["limit"], cursor=call["cursor"])
        return Answer(value=page)


def _planned(mutation: LetterMutation) -> Answer:
    location = _path("repair-action", repair_id=mutation.repair_id)
    return Answer(value=mutation, location=location, is_replay=mutation.idempotent_replay)


def _decided(mutation: LetterMutation) -> Answer:
    return Answer(value=mutation, is_replay=mutation.idempotent_replay)


def _path(name: str, **ids: UUID | None) -> str:
    return reverse(f"{API_NAMESPACE}:{name}", kwargs=ids)
