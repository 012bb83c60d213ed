"""Redrives over REST: planned with their dry run, approved, started, paused, let go on, cancelled, and looked at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from django.urls import reverse
from rest_framework import serializers

from deadletters.api.serializers import OUTCOMES
from deadletters.search import HELP
from deadletters.selectors import STATES as LETTER_STATES
from deadletters.selectors import LetterFilter
from grants.operators import Operator
from grants.rest import Answer, Call, OpsView, operation, representation_tag
from incidents.errors import IncidentNotFound
from opsconsole.core.openapi import paged
from opsconsole.core.rest import (
    API_NAMESPACE,
    BodySerializer,
    Choices,
    Document,
    Flag,
    Id,
    Moment,
    PageQuery,
    Text,
    WholeNumber,
)
from opsconsole.core.search import LONGEST
from repairs import errors
from repairs.models import ItemState, RedriveClass, RedriveState
from repairs.redrives import selectors, services
from repairs.redrives.requests import (
    AnswerKind,
    RedriveAnswer,
    RedriveChanges,
    RedrivePace,
    RedriveSelection,
)

DEFAULT_PACE = RedrivePace()


class RedriveListQuery(PageQuery):
    state = Choices(
        (*selectors.STATES, "unfinished"), required=False, help_text="One or several; `unfinished` has not ended."
    )
    tenant = serializers.CharField(required=False, max_length=100, help_text="Authorised first; `*` for every tenant.")
    source = serializers.CharField(required=False, max_length=100)  # type: ignore[assignment]
    incident = serializers.UUIDField(required=False)


class RedriveItemListQuery(PageQuery):
    limit = serializers.IntegerField(required=False, default=100, min_value=1, max_value=200)
    state = serializers.ChoiceField(choices=selectors.ITEM_STATES, required=False)

    def get_fields(self) -> dict[str, Any]:
        """Return the fields with one whose name is a word of Python's."""
        return {
            **super().get_fields(),
            "class": serializers.ChoiceField(choices=selectors.CLASSES, required=False, help_text="Of the dry run."),
        }


class RedriveFilterBody(BodySerializer):
    """Which failed jobs are meant; what is left out means all."""

    tenant = Text(help_text="One; authorised first.")
    source = Text(help_text="One.")  # type: ignore[assignment]
    state = serializers.ListField(
        child=serializers.ChoiceField(choices=LETTER_STATES), required=False, help_text="Left out: those that are open."
    )
    job_type = Text(required=False, max_length=255)
    queue = Text(required=False, max_length=200)
    error_class = Text(required=False, max_length=255, help_text="Its whole name, such as `builtins.ValueError`.")
    outcome_class = serializers.ChoiceField(choices=OUTCOMES, required=False)
    incident = Id(required=False)
    task_id = Text(required=False, max_length=255)
    job_id = Text(required=False, max_length=200)
    actor_type = Text(required=False, max_length=100)
    actor_id = Text(required=False, max_length=200)
    seen_after = Moment(required=False, help_text="Last seen at this time or later.")
    seen_before = Moment(required=False, help_text="Last seen before this time.")
    text = Text(required=False, max_length=LONGEST, help_text=f"Search: {HELP}.")


class PaceBody(BodySerializer):
    """How fast, and when to stop by itself."""

    rate_per_second = WholeNumber(required=False, default=DEFAULT_PACE.rate_per_second)
    max_outstanding = WholeNumber(
        required=False, default=DEFAULT_PACE.max_outstanding, help_text="So many wait for their answer at most."
    )
    canary_size = WholeNumber(
        required=False,
        default=DEFAULT_PACE.canary_size,
        help_text="So many are run first, each as a single attempt; the rest only once they have succeeded.",
    )
    stop_percent = WholeNumber(
        required=False,
        allow_null=True,
        default=DEFAULT_PACE.stop_percent,
        help_text="It pauses when more than so many per cent, of ten jobs at least, have failed; null: never.",
    )


class NewPaceBody(BodySerializer):
    """The whole pace from now on."""

    rate_per_second = WholeNumber()
    max_outstanding = WholeNumber()
    canary_size = WholeNumber(help_text="Changes nothing once the canary has passed.")
    stop_percent = WholeNumber(allow_null=True)


class ChangesBody(BodySerializer):
    """What is sent differently from the originals, which are kept. Needs `redrive.patch` as well."""

    tasks = serializers.DictField(child=Text(), required=False, help_text="A task's old name: its new one.")
    set = serializers.DictField(
        child=serializers.JSONField(allow_null=True), required=False, help_text="Keyword arguments and their values."
    )
    remove = serializers.ListField(child=Text(), required=False, help_text="Keyword arguments; have to be there.")
    rename = serializers.DictField(
        child=Text(), required=False, help_text="A keyword argument's old name, which has to be there: its new one."
    )


class RedriveBody(BodySerializer):
    letters = serializers.ListField(child=Id(), required=False, help_text="The failed jobs that are meant.")
    incident = Id(required=False, help_text="Its open jobs are meant.")
    filter = RedriveFilterBody(required=False)
    failed_of = Id(required=False, help_text="An earlier redrive: its failed jobs are meant.")
    expected_count = WholeNumber(
        required=False, help_text="How many there are; refused if it is another number. A filter needs it."
    )
    pace = PaceBody(required=False)
    cut_off = Moment(required=False, help_text="Jobs that failed before are a class of their own.")
    queue = Text(required=False, default="", help_text="Send them to this queue, and not to their own.")
    low_priority = Flag(required=False, default=False, help_text="Send them to the queue of OPSCONSOLE_REDRIVE_QUEUE.")
    changes = ChangesBody(required=False)
    reason = Text(required=False, default="", help_text="500 characters at most.")

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Refuse what means no one set: an empty choice never means all (API-03)."""
        chosen = [name for name in ("letters", "incident", "filter", "failed_of") if name in attrs]
        if len(chosen) != 1:
            raise serializers.ValidationError("Give one of: letters, incident, filter, failed_of.")
        if chosen == ["letters"] and "expected_count" in attrs:
            raise serializers.ValidationError({"expected_count": ["The letters that you name are counted."]})
        if chosen == ["filter"] and "expected_count" not in attrs:
            raise serializers.ValidationError({"expected_count": ["With a filter, say how many there are."]})
        return attrs


class AnswerBody(BodySerializer):
    """What is stated about all jobs of one class."""

    answer = serializers.ChoiceField(choices=[kind.value for kind in AnswerKind])
    reference = Text(required=False, default="", help_text="Where that was seen; a statement needs it.")


class StartBody(BodySerializer):
    answers = serializers.DictField(
        child=AnswerBody(),
        required=False,
        default=dict,
        help_text="By class: `answers` of each class of the redrive says which it takes. Others are left out.",
    )
    reason = Text(required=False, default="")


class ReasonBody(BodySerializer):
    reason = Text(required=False, default="", help_text="500 characters at most.")


class ResumeBody(ReasonBody):
    pace = NewPaceBody(required=False, help_text="Left out: as it was.")


class RetryFailedBody(ReasonBody):
    expected_count = WholeNumber(required=False, help_text="How many have failed; refused if it is another number.")
    pace = PaceBody(required=False)


class PaceSerializer(serializers.Serializer[Any]):
    """How fast, and when to stop by itself."""

    rate_per_second = serializers.IntegerField()
    max_outstanding = serializers.IntegerField()
    canary_size = serializers.IntegerField()
    stop_percent = serializers.IntegerField(allow_null=True)


class RedriveCountsSerializer(serializers.Serializer[Any]):
    """Its jobs by result; they add up to the total."""

    total = serializers.IntegerField(source="total_count")
    waiting = serializers.IntegerField(source="waiting_count")
    outstanding = serializers.IntegerField(source="outstanding_count", help_text="Planned, sent or running.")
    succeeded = serializers.IntegerField(source="succeeded_count")
    failed = serializers.IntegerField(source="failed_count", help_text="They wait for a decision again.")
    skipped = serializers.IntegerField(source="skipped_count", help_text="Left out; each item says why.")
    cancelled = serializers.IntegerField(source="cancelled_count")


class RedriveSerializer(serializers.Serializer[Any]):
    """Many jobs that are run again as one piece of work."""

    id = serializers.UUIDField()
    tenant = serializers.CharField()
    source = serializers.CharField()  # type: ignore[assignment]
    actor_type = serializers.CharField(help_text="Set if every job is of this one actor.")
    actor_id = serializers.CharField()
    state = serializers.ChoiceField(choices=RedriveState.values)
    incident = serializers.UUIDField(source="incident_id", allow_null=True)
    retry_of = serializers.UUIDField(source="retry_of_id", allow_null=True, help_text="Whose failed jobs these are.")
    selection = Document(help_text="What was asked for when the set was frozen.")
    counts = RedriveCountsSerializer(source="*")
    pace = PaceSerializer(source="*")
    cut_off = Moment(allow_null=True)
    queue = serializers.CharField(source="target_queue", help_text="Empty: each to its own.")
    changes = Document(help_text="Names only; the values are sealed.")
    reason = serializers.CharField()
    planned_by = serializers.CharField()
    planned_by_name = serializers.CharField()
    planned_at = Moment()
    judged_at = Moment(allow_null=True, help_text="When its dry run was done.")
    needs_approval = serializers.BooleanField(help_text="It starts only once a second person has approved it.")
    approved_by = serializers.CharField()
    approved_by_name = serializers.CharField()
    approved_at = Moment(allow_null=True)
    started_by = serializers.CharField(help_text="By whose grants it runs.")
    started_by_name = serializers.CharField()
    started_at = Moment(allow_null=True)
    canary_passed_at = Moment(allow_null=True)
    pause_code = serializers.CharField(help_text="Why it is paused; empty if it is not.")
    pause_text = serializers.CharField()
    paused_by_name = serializers.CharField()
    paused_at = Moment(allow_null=True)
    ended_at = Moment(allow_null=True)


class RedriveAnswerSerializer(serializers.Serializer[Any]):
    """What was stated about one class."""

    answer = serializers.CharField(source="kind")
    reference = serializers.CharField()


class RedriveClassSerializer(serializers.Serializer[Any]):
    """How many jobs of one class there are, which answers it takes, and which it was given."""

    count = serializers.IntegerField()
    answers = serializers.ListField(child=serializers.CharField(), help_text="Empty: safe, or cannot run.")
    answer = RedriveAnswerSerializer(allow_null=True)

    def get_fields(self) -> dict[str, Any]:
        """Return the fields with one whose name is a word of Python's."""
        field = serializers.ChoiceField(choices=RedriveClass.values, source="item_class")
        return {"class": field, **super().get_fields()}


class RedriveProgressSerializer(serializers.Serializer[Any]):
    """How far it is."""

    done = serializers.IntegerField(help_text="Jobs with a result of whatever kind.")
    percent = serializers.IntegerField()
    seconds_left = serializers.IntegerField(allow_null=True, help_text="An estimate; null while nothing tells it.")


class RedriveSampleSerializer(serializers.Serializer[Any]):
    """One job as it was and as it would be sent, redacted."""

    dead_letter = serializers.UUIDField(source="letter_id")
    task_before = serializers.CharField()
    task_after = serializers.CharField()
    arguments_before = serializers.CharField()
    arguments_after = serializers.CharField()
    trouble = serializers.CharField(help_text="Why there is no after.")


class RedriveLinksSerializer(serializers.Serializer[Any]):
    """Where the rest is."""

    items = serializers.CharField(help_text="Path; takes `class` and `state`.")


class RedrivePageSerializer(RedriveSerializer):
    """One redrive with its dry run and how far it is."""

    classes = RedriveClassSerializer(many=True)
    progress = RedriveProgressSerializer()
    samples = RedriveSampleSerializer(many=True, help_text="Where it changes what is sent: a few jobs of each task.")
    links = RedriveLinksSerializer()

    def to_representation(self, instance: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``progress`` (``RedriveProgress``), ``samples`` and ``links`` beside the row's own fields."""
        progress: selectors.RedriveProgress = instance["progress"]
        shown: Any = progress.redrive
        shown.progress, shown.classes_told = progress, progress.classes
        shown.samples, shown.links = instance["samples"], instance["links"]
        return super().to_representation(shown)

    def get_fields(self) -> dict[str, Any]:
        """Read the classes from what was told, and not from the row's stored text."""
        return {**super().get_fields(), "classes": RedriveClassSerializer(many=True, source="classes_told")}


class RedriveItemSerializer(serializers.Serializer[Any]):
    """One job of a redrive, and what became of it."""

    position = serializers.IntegerField(help_text="From 1, the oldest first.")
    dead_letter = serializers.UUIDField(source="letter_id")
    job_type = serializers.CharField(source="letter.job_type")
    concerns = serializers.ListField(
        child=serializers.CharField(), source="concerned", help_text="Classes that need an answer before it runs."
    )
    state = serializers.ChoiceField(choices=ItemState.values)
    code = serializers.CharField(help_text="Why it was left out, has failed or was cancelled.")
    detail = serializers.CharField()
    is_canary = serializers.BooleanField(help_text="Whether it was sent as a single attempt, before the rest.")
    repair = serializers.UUIDField(source="repair_id", allow_null=True)
    settled_at = Moment(allow_null=True)

    def get_fields(self) -> dict[str, Any]:
        """Return the fields with one whose name is a word of Python's."""
        field = serializers.ChoiceField(choices=RedriveClass.values, source="item_class", help_text="Of the dry run.")
        return {**super().get_fields(), "class": field}

    def to_representation(self, instance: Any) -> dict[str, Any]:
        """Return the item with its concerns as a list, and with what its repair says of it."""
        instance.is_canary = instance.repair is not None and instance.repair.is_single_attempt
        instance.concerned = [name for name in instance.concerns.split(",") if name]
        return super().to_representation(instance)


class RedriveMutationSerializer(serializers.Serializer[Any]):
    """What the request did to a redrive, or, as a replay, what the first one of its key did."""

    redrive_id = serializers.UUIDField()
    state = serializers.ChoiceField(choices=RedriveState.values)
    total = serializers.IntegerField(help_text="Jobs in the frozen set.")
    event_id = serializers.UUIDField(allow_null=True, help_text="The audit event.")
    idempotent_replay = serializers.BooleanField()


CREATE = {
    "tag": "redrives",
    "status": 201,
    "also": (202,),
    "answer": RedriveMutationSerializer,
    "is_mutation": True,
    "gives_location": True,
}
CHOSEN = (
    errors.SelectionInvalid,
    errors.SelectionDrifted,
    errors.TooMany,
    errors.RedriveEmpty,
    errors.RedriveExists,
    errors.RedriveInvalid,
    errors.RedriveNotFound,
)
DECISION = {
    "tag": "redrives",
    "answer": RedriveMutationSerializer,
    "is_mutation": True,
    "takes_if_match": True,
}
DECIDED = (errors.RedriveNotFound, errors.RedriveChanged, errors.RedriveStanding)


class RedriveList(OpsView):
    @operation(
        name="list_redrives",
        summary="Redrives",
        tag="redrives",
        query=RedriveListQuery,
        answer=paged(RedriveSerializer),
    )
    def get(self, call: Call) -> Answer:
        """Newest first."""
        wanted = selectors.RedriveFilter(
            states=call["state"] or (), tenant=call["tenant"], source=call["source"], incident=call["incident"]
        )
        page = selectors.list_redrives(call.operator, wanted, limit=call["limit"], cursor=call["cursor"])
        return Answer(value=page)

    @operation(
        name="create_redrive",
        summary="Plan to run many jobs again",
        body=RedriveBody,
        refusals=(*CHOSEN, errors.LetterNotFound, IncidentNotFound),
        **CREATE,
    )
    def post(self, call: Call) -> Answer:
        """Freezes the set and makes its dry run; nothing is sent before it is started.

        201 if the dry run is done, which it is of at most 1,000 jobs; 202 if the workers make it. `Location` is where
        to watch it.
        """
        body = call.body
        made = services.create_redrive(
            by=call.operator,
            key=call.key,
            selection=selection_of(body),
            expected_count=body.get("expected_count"),
            pace=pace_of(body.get("pace")),
            cut_off=body.get("cut_off"),
            target_queue=body["queue"],
            low_priority=body["low_priority"],
            changes=changes_of(body.get("changes", {})),
            reason=body["reason"],
        )
        return _created(made)


class RedriveDetail(OpsView):
    @operation(
        name="get_redrive",
        summary="A redrive",
        tag="redrives",
        answer=RedrivePageSerializer,
        gives_etag=True,
        refusals=(errors.RedriveNotFound,),
    )
    def get(self, call: Call, redrive_id: UUID) -> Answer:
        """With its classes, its counts, how far it is, and before and after on samples where it changes anything."""
        shown = {**page_of(call.operator, redrive_id), "links": {"items": _path("redrive-items", redrive_id)}}
        document = RedrivePageSerializer(shown).data
        tag = representation_tag(redrive_id, shown["progress"].redrive.version, document)
        return Answer(value=shown, document=document, etag=tag)


class RedriveItems(OpsView):
    @operation(
        name="list_items_of_redrive",
        summary="The jobs of a redrive",
        tag="redrives",
        query=RedriveItemListQuery,
        answer=paged(RedriveItemSerializer),
        refusals=(errors.RedriveNotFound,),
    )
    def get(self, call: Call, redrive_id: UUID) -> Answer:
        """Newest first, each with its class and its result."""
        page = selectors.list_items(
            call.operator,
            redrive_id,
            item_class=call["class"],
            state=call["state"],
            limit=call["limit"],
            cursor=call["cursor"],
        )
        return Answer(value=page)


class RedriveApprove(OpsView):
    @operation(
        name="approve_redrive",
        summary="Approve a redrive as the second person",
        body=ReasonBody,
        refusals=(*DECIDED, errors.RedriveOwnApproval),
        **DECISION,
    )
    def post(self, call: Call, redrive_id: UUID) -> Answer:
        """Only where it needs it, and not by who has planned it."""
        return _decided(services.approve_redrive(**self.mutation_of(call, redrive_id=redrive_id)))


class RedriveStart(OpsView):
    @operation(
        name="start_redrive",
        summary="Start a redrive",
        status=202,
        body=StartBody,
        refusals=(*DECIDED, errors.RedriveNotApproved, errors.RedriveAnswerInvalid),
        **DECISION,
    )
    def post(self, call: Call, redrive_id: UUID) -> Answer:
        """Runs what is safe, other classes as `answers` say, and leaves the rest out; by your grants from now on."""
        asked = {**self.mutation_of(call, redrive_id=redrive_id), "answers": answers_of(call.body["answers"])}
        return _decided(services.start_redrive(**asked))


class RedrivePause(OpsView):
    @operation(name="pause_redrive", summary="Pause a redrive", body=ReasonBody, refusals=DECIDED, **DECISION)
    def post(self, call: Call, redrive_id: UUID) -> Answer:
        """Nothing more is sent; what has been sent gets its result."""
        return _decided(services.pause_redrive(**self.mutation_of(call, redrive_id=redrive_id)))


class RedriveResume(OpsView):
    @operation(
        name="resume_redrive",
        summary="Let a paused redrive go on",
        status=202,
        body=ResumeBody,
        refusals=(*DECIDED, errors.RedriveInvalid),
        **DECISION,
    )
    def post(self, call: Call, redrive_id: UUID) -> Answer:
        """By your grants from now on, and at another pace if one is given; the stop ratio counts anew."""
        asked = {**self.mutation_of(call, redrive_id=redrive_id), "pace": pace_of(call.body.get("pace"))}
        return _decided(services.resume_redrive(**asked))


class RedriveCancel(OpsView):
    @operation(name="cancel_redrive", summary="Cancel a redrive", body=ReasonBody, refusals=DECIDED, **DECISION)
    def post(self, call: Call, redrive_id: UUID) -> Answer:
        """What has not been sent goes back to where it was; what has been sent gets its result."""
        return _decided(services.cancel_redrive(**self.mutation_of(call, redrive_id=redrive_id)))


class RedriveRetryFailed(OpsView):
    @operation(
        name="retry_failed_of_redrive",
        summary="Plan to run the failed jobs of a redrive again",
        body=RetryFailedBody,
        refusals=CHOSEN,
        **CREATE,
    )
    def post(self, call: Call, redrive_id: UUID) -> Answer:
        """A redrive of its own, with the same queue, changes and cut-off; it starts like any other."""
        return _created(
            services.retry_failed_items(
                redrive_id=redrive_id,
                by=call.operator,
                key=call.key,
                expected_count=call.body.get("expected_count"),
                pace=pace_of(call.body.get("pace")),
                reason=call.body["reason"],
            )
        )


def page_of(operator: Operator, redrive_id: UUID) -> dict[str, Any]:
    """Return what ``RedrivePageSerializer`` shows; messages are opened only where something about them changes."""
    progress = selectors.get_redrive(operator, redrive_id)
    samples = selectors.redrive_samples(operator, redrive_id) if progress.redrive.changes_messages else []
    return {"progress": progress, "samples": samples, "links": {"items": ""}}


def selection_of(body: Mapping[str, Any]) -> RedriveSelection:
    """Return which letters a validated body means."""
    if "filter" in body:
        chosen = dict(body["filter"])
        return RedriveSelection(letters=LetterFilter(states=tuple(chosen.pop("state", ())), **chosen))
    return RedriveSelection(
        letter_ids=tuple(body.get("letters", ())), incident_id=body.get("incident"), failed_of=body.get("failed_of")
    )


def pace_of(body: Mapping[str, Any] | None) -> RedrivePace | None:
    return None if body is None else RedrivePace(**body)


def changes_of(body: Mapping[str, Any]) -> RedriveChanges:
    return RedriveChanges(**{**body, "remove": tuple(body.get("remove", ()))})


def answers_of(body: Mapping[str, Mapping[str, str]]) -> dict[Any, RedriveAnswer]:
    """Return a validated body's answers; names of classes are the service's to check."""
    return {
        name: RedriveAnswer(kind=AnswerKind(told["answer"]), reference=told["reference"]) for name, told in body.items()
    }


def _created(made: services.RedriveMutation) -> Answer:
    return Answer(
        value=made,
        status=202 if made.state == RedriveState.PLANNING else 201,
        location=redrive_path(made.redrive_id),
        is_replay=made.idempotent_replay,
    )


def _decided(mutation: services.RedriveMutation) -> Answer:
    return Answer(value=mutation, is_replay=mutation.idempotent_replay)


def redrive_path(redrive_id: UUID) -> str:
    return _path("redrive", redrive_id)


def _path(name: str, redrive_id: UUID) -> str:
    return reverse(f"{API_NAMESPACE}:{name}", kwargs={"redrive_id": redrive_id})
