"""Repairs: what was done about a letter, by whom, and how it ended."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q

from deadletters.models import DeadLetter
from grants.actions import Action
from grants.resources import ANY, Resource
from incidents.models import Incident
from opsconsole.core.ids import new_id
from opsconsole.core.versions import version_of
from repairs.querysets import (
    ReconciliationRunQuerySet,
    RedriveItemQuerySet,
    RedriveQuerySet,
    RepairActionQuerySet,
    RepairBatchQuerySet,
    SweepRepairQuerySet,
)


class ActionType(models.TextChoices):
    RETRY_MESSAGE = "retry_message"  # send the original message again under a new task id
    RETRY_RECORD = "retry_authoritative_record"  # put the ledger's job and its record back to pending (A12)
    CLOSE_AS_DONE = "close_as_done"  # a person found that it had taken effect already
    DISCARD = "discard"  # give up and remove the message


RETRIES = (ActionType.RETRY_MESSAGE, ActionType.RETRY_RECORD)


class ActionState(models.TextChoices):
    PLANNED = "planned"  # committed; the relay has not sent it yet
    SENT = "sent"  # the broker has it; its job has not started
    STARTED = "started"  # the start guard let it begin; claim_retries and claim_holder say which attempt and where
    SUCCEEDED = "succeeded"  # its job has succeeded, or the decision took effect at once
    FAILED = "failed"  # its job has failed for good, or was lost
    CANCELLED = "cancelled"  # withdrawn before it started


LIVE = (ActionState.PLANNED, ActionState.SENT, ActionState.STARTED)


class ProviderAnswer(models.TextChoices):
    """What a person says about a job that may already have happened."""

    NONE = "", "not asked"
    DID_NOT_HAPPEN = "did_not_happen", "did not happen, run again"
    ALREADY_HAPPENED = "already_happened", "already happened, close as done"
    IDEMPOTENT = "idempotent", "run again, its provider does twice only once what has the same key"


class BatchState(models.TextChoices):
    PLANNING = "planning"  # the set is frozen; its letters are being planned page by page
    PLANNED = "planned"  # every letter of the set is planned or refused; results say which


class RepairBatch(models.Model):
    """One request to retry several letters of one incident: the frozen set, and what became of each.

    Its id stands in the request's receipt, so that the same request sent again goes on with the same set.
    """

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    tenant = models.CharField(max_length=100)
    source = models.CharField(max_length=100)
    incident = models.ForeignKey(Incident, on_delete=models.PROTECT, related_name="repair_batches")
    state = models.CharField(max_length=10, choices=BatchState.choices)
    letters = models.TextField()
    results = models.TextField(db_default="[]")
    planned_by = models.CharField(max_length=200)
    planned_by_name = models.CharField(max_length=200, db_default="")
    planned_at = models.DateTimeField()
    finished_at = models.DateTimeField(null=True)

    objects = RepairBatchQuerySet.as_manager()


class RepairAction(models.Model):
    """One change made to one letter. At most one is live per letter, and the database says so."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    tenant = models.CharField(max_length=100)
    source = models.CharField(max_length=100)
    actor_type = models.CharField(max_length=100, db_default="")
    actor_id = models.CharField(max_length=200, db_default="")
    action_type = models.CharField(max_length=30, choices=ActionType.choices)
    # Without the index of a foreign key: one below begins with it.
    letter = models.ForeignKey(DeadLetter, on_delete=models.PROTECT, related_name="repairs", db_index=False)
    incident = models.ForeignKey(Incident, on_delete=models.PROTECT, related_name="repairs", db_index=False)
    batch = models.ForeignKey(RepairBatch, null=True, on_delete=models.PROTECT, related_name="repairs")
    redrive = models.ForeignKey("Redrive", null=True, on_delete=models.PROTECT, related_name="repairs", db_index=False)
    is_single_attempt = models.BooleanField(db_default=False)  # what Celery would retry by itself has failed
    previous = models.ForeignKey("self", null=True, on_delete=models.PROTECT, related_name="+")
    operation_key = models.CharField(max_length=400, unique=True)
    state = models.CharField(max_length=10, choices=ActionState.choices)
    before = models.TextField(db_default="{}")
    after = models.TextField(db_default="{}")
    planned_by = models.CharField(max_length=200)
    planned_by_name = models.CharField(max_length=200, db_default="")
    planned_at = models.DateTimeField()
    reason = models.CharField(max_length=500, db_default="")
    reference = models.CharField(max_length=300, db_default="")
    provider_answer = models.CharField(max_length=20, choices=ProviderAnswer.choices, db_default="")
    job_type = models.CharField(max_length=255, db_default="")
    queue = models.CharField(max_length=200, db_default="")
    new_task_id = models.CharField(max_length=255, db_default="")
    due_at = models.DateTimeField()
    lease_owner = models.CharField(max_length=200, db_default="")
    lease_expires_at = models.DateTimeField(null=True)
    send_count = models.IntegerField(db_default=0)
    send_error = models.CharField(max_length=300, db_default="")
    sent_at = models.DateTimeField(null=True)
    claim_retries = models.IntegerField(db_default=-1)
    claim_holder = models.CharField(max_length=300, db_default="")
    started_at = models.DateTimeField(null=True)
    answer_due_at = models.DateTimeField(null=True)
    settled_at = models.DateTimeField(null=True)
    error_code = models.CharField(max_length=64, db_default="")
    error_text = models.TextField(db_default="")

    objects = RepairActionQuerySet.as_manager()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["letter"], condition=Q(state__in=LIVE), name="ops_repair_one_live"),
            models.CheckConstraint(condition=Q(state__in=ActionState.values), name="ops_repair_state"),
            models.CheckConstraint(
                condition=(Q(state__in=LIVE) & Q(settled_at__isnull=True))
                | (~Q(state__in=LIVE) & Q(settled_at__isnull=False)),
                name="ops_repair_settled_at",
            ),
        ]
        indexes = [
            models.Index(
                F("source"), F("due_at"), F("id"), condition=Q(state=ActionState.PLANNED), name="ops_repair_due"
            ),
            models.Index(F("letter"), F("id").desc(), name="ops_repair_of_letter"),
            models.Index(F("incident"), F("id").desc(), name="ops_repair_of_incident"),
            models.Index(F("tenant"), F("id").desc(), name="ops_repair_of_tenant"),
            models.Index(F("state"), F("id").desc(), name="ops_repair_of_state"),
            models.Index(
                F("answer_due_at"), F("id"), condition=Q(state__in=("sent", "started")), name="ops_repair_unanswered"
            ),
            models.Index(F("claim_holder"), F("id"), condition=Q(state="started"), name="ops_repair_holder"),
            # Costs a repair that is no redrive's nothing.
            models.Index(F("redrive"), F("id"), condition=Q(redrive__isnull=False), name="ops_repair_of_redrive"),
        ]

    def __str__(self) -> str:
        return f"{self.action_type} of {self.letter_id} by {self.planned_by_name or self.planned_by}"


class RedriveState(models.TextChoices):
    PLANNING = "planning"  # the set is frozen; what running each again would mean is being judged
    READY = "ready"  # judged: waits for a second person where one is needed, and for its start
    CANARY = "canary"  # its first jobs run, each as a single attempt; the rest waits for them
    RUNNING = "running"  # jobs go out, oldest first, at the chosen rate
    PAUSED = "paused"  # nothing goes out; by a person or by itself, and only a person lets it go on
    FINISHED = "finished"  # every job of the set has its result
    CANCELLED = "cancelled"  # given up; what had been sent by then still gets its result


NO_CHANGES = "{}"
"""``Redrive.changes`` of one whose jobs run as they failed."""
REDRIVE_ACTIVE = (RedriveState.CANARY, RedriveState.RUNNING)
REDRIVE_ENDED = (RedriveState.FINISHED, RedriveState.CANCELLED)


class RedriveClass(models.TextChoices):
    """What running one job of a redrive again would mean, as its dry run says. The order is the order of a page.

    The first runs without a word, the next five once they are answered, the rest is left out.
    """

    SAFE = "safe"  # known not to have taken effect, or doing it twice does no harm
    AMBIGUOUS = "ambiguous"  # it may already have happened
    NOT_DECLARED = "not_declared"  # nobody has said what its task does
    EXPIRED = "expired"  # its sender did not want it to run so late
    OLDER_THAN_CUT_OFF = "older_than_cut_off"  # it failed before the moment that the redrive names
    CHORD_MEMBER = "chord_member"  # its chord's body will not run
    NOT_SERVED = "not_served"  # no live worker has its task, or none on its queue
    ARGUMENTS_DO_NOT_FIT = "arguments_do_not_fit"  # the task takes other arguments by now
    OVERTAKEN = "overtaken"  # closed, or being repaired, or its record has finished without it
    NOT_CAPTURED = "not_captured"  # its message is not here in full, or cannot be opened
    TOO_OLD = "too_old"  # its task's policy forbids to run it at this age
    NOT_PATCHABLE = "not_patchable"  # its arguments are no JSON, or have not what the patch wants to change
    IN_OTHER_REDRIVE = "in_other_redrive"  # another redrive that has not ended has it


ANSWERABLE = (
    RedriveClass.AMBIGUOUS, RedriveClass.NOT_DECLARED, RedriveClass.EXPIRED, RedriveClass.OLDER_THAN_CUT_OFF,
    RedriveClass.CHORD_MEMBER,
)  # fmt: skip
"""Classes whose jobs run once their start names an answer for them."""


class ItemState(models.TextChoices):
    WAITING = "waiting"  # not planned yet
    PLANNED = "planned"  # its repair is planned, sent or running
    SUCCEEDED = "succeeded"  # its job has succeeded, or was closed as done by the answer for its class
    FAILED = "failed"  # its repair has failed; the job waits for a decision again
    SKIPPED = "skipped"  # left out; the code says why, and the job is as it was
    CANCELLED = "cancelled"  # withdrawn with the redrive, or by itself; the job is as it was


class Redrive(models.Model):
    """Many jobs run again as one piece of work: the frozen set, how fast, what was answered, and how far it is.

    All jobs are of one tenant and one source, whose workers carry it out. ``actor_type`` and ``actor_id`` are set if
    every job is of that one actor. The counts are kept, not counted: whoever changes an item holds this row's lock, and
    the database checks that they add up. ``selection``, ``changes``, ``answers`` and ``classes`` are canonical JSON
    (``repairs.redrives.requests``). ``run_since`` is its last start or resumption, ``run_settled`` and ``run_failed``
    what had ended by then: the estimate and the stop ratio look at what came after, and a canary at all that was sent.
    ``run_settled`` has what was closed as done without a run, too. ``next_due_at`` is when the rate lets go of more.
    """

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    tenant = models.CharField(max_length=100)
    source = models.CharField(max_length=100)
    actor_type = models.CharField(max_length=100, db_default="")
    actor_id = models.CharField(max_length=200, db_default="")
    request_key = models.CharField(max_length=64)
    incident = models.ForeignKey(Incident, null=True, on_delete=models.PROTECT, related_name="redrives")
    retry_of = models.ForeignKey("self", null=True, on_delete=models.PROTECT, related_name="retries")
    selection = models.TextField(db_default="{}")
    letter_state = models.CharField(max_length=12, db_default="open")  # in which its letters are, and go back to
    # What it takes to decide about it and to run it: another one for jobs that are sent on and not run again.
    action = models.CharField(max_length=40, db_default=Action.REDRIVE_RUN.value)
    state = models.CharField(max_length=10, choices=RedriveState.choices)
    rate_per_second = models.IntegerField()
    max_outstanding = models.IntegerField()
    canary_size = models.IntegerField(db_default=0)
    stop_percent = models.IntegerField(null=True)
    cut_off = models.DateTimeField(null=True)
    target_queue = models.CharField(max_length=200, db_default="")
    changes = models.TextField(db_default="{}")
    sealed_values = models.BinaryField(null=True)  # what its patch sets: payload, so never in the clear
    answers = models.TextField(db_default="{}")
    classes = models.TextField(db_default="{}")
    judged_to = models.IntegerField(db_default=0)
    is_prepared = models.BooleanField(db_default=False)
    skips_unserved = models.BooleanField(db_default=False)  # told once that nobody serves a task, a person let it go on

    total_count = models.IntegerField(db_default=0)
    waiting_count = models.IntegerField(db_default=0)
    outstanding_count = models.IntegerField(db_default=0)
    succeeded_count = models.IntegerField(db_default=0)
    failed_count = models.IntegerField(db_default=0)
    skipped_count = models.IntegerField(db_default=0)
    cancelled_count = models.IntegerField(db_default=0)

    reason = models.CharField(max_length=500, db_default="")
    planned_by = models.CharField(max_length=300)
    planned_by_name = models.CharField(max_length=200, db_default="")
    planned_by_user = models.CharField(max_length=100, db_default="")
    planned_at = models.DateTimeField()
    judged_at = models.DateTimeField(null=True)
    needs_approval = models.BooleanField(db_default=False)
    approved_by = models.CharField(max_length=300, db_default="")
    approved_by_name = models.CharField(max_length=200, db_default="")
    approved_at = models.DateTimeField(null=True)
    # Who has started it, or let it go on after a pause: their grants are asked with every page.
    started_by = models.CharField(max_length=300, db_default="")
    started_by_name = models.CharField(max_length=200, db_default="")
    started_by_user = models.CharField(max_length=100, db_default="")
    started_at = models.DateTimeField(null=True)
    canary_passed_at = models.DateTimeField(null=True)
    pause_code = models.CharField(max_length=64, db_default="")
    pause_text = models.CharField(max_length=500, db_default="")
    paused_by_name = models.CharField(max_length=200, db_default="")
    paused_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)

    run_since = models.DateTimeField(null=True)
    run_settled = models.IntegerField(db_default=0)
    run_failed = models.IntegerField(db_default=0)
    next_due_at = models.DateTimeField(null=True)
    lease_owner = models.CharField(max_length=200, db_default="")
    lease_expires_at = models.DateTimeField(null=True)

    objects = RedriveQuerySet.as_manager()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["request_key"], name="ops_redrive_request"),
            models.CheckConstraint(condition=Q(state__in=RedriveState.values), name="ops_redrive_state"),
            models.CheckConstraint(
                condition=~Q(tenant="*") & ~Q(tenant="") & ~Q(actor_type="*") & ~Q(actor_id="*"),
                name="ops_redrive_scope",
            ),
            models.CheckConstraint(
                condition=(Q(state__in=REDRIVE_ENDED) & Q(ended_at__isnull=False))
                | (~Q(state__in=REDRIVE_ENDED) & Q(ended_at__isnull=True)),
                name="ops_redrive_ended_at",
            ),
            models.CheckConstraint(
                condition=(Q(state=RedriveState.PAUSED) & ~Q(pause_code=""))
                | (~Q(state=RedriveState.PAUSED) & Q(pause_code="")),
                name="ops_redrive_pause_code",
            ),
            models.CheckConstraint(
                condition=Q(
                    total_count=F("waiting_count")
                    + F("outstanding_count")
                    + F("succeeded_count")
                    + F("failed_count")
                    + F("skipped_count")
                    + F("cancelled_count")
                ),
                name="ops_redrive_counts",
            ),
            models.CheckConstraint(
                condition=Q(
                    waiting_count__gte=0, outstanding_count__gte=0, succeeded_count__gte=0, failed_count__gte=0,
                    skipped_count__gte=0, cancelled_count__gte=0,
                ),
                name="ops_redrive_no_count_below_zero",
            ),
        ]  # fmt: skip
        indexes = [
            models.Index(F("tenant"), F("id").desc(), name="ops_redrive_of_tenant"),
            models.Index(F("state"), F("id").desc(), name="ops_redrive_of_state"),
            # What a controller asks for every second or two: hardly any row at a time.
            models.Index(
                F("source"),
                F("id"),
                condition=Q(state__in=("planning", "canary", "running")) | Q(outstanding_count__gt=0),
                name="ops_redrive_to_do",
            ),
            models.Index(F("ended_at"), F("id"), condition=Q(ended_at__isnull=False), name="ops_redrive_ended"),
        ]

    def __str__(self) -> str:
        return f"redrive of {self.total_count} by {self.planned_by_name or self.planned_by}"

    @property
    def changes_messages(self) -> bool:
        """Whether its jobs run with other names or arguments than they failed with."""
        return self.changes != NO_CHANGES

    @property
    def runs_by(self) -> tuple[Action, ...]:
        """What it takes to let it run; the first alone is what every other decision takes."""
        action = Action(self.action)
        return (action, Action.REDRIVE_PATCH) if self.changes_messages else (action,)

    @property
    def resource(self) -> Resource:
        """What a request that touches this redrive touches."""
        return Resource(
            tenant=self.tenant,
            actor_type=self.actor_type,
            actor_id=self.actor_id,
            target_type="redrive",
            target_id=str(self.id),
        )

    @property
    def version(self) -> int:
        """What an entity tag compares: another number after each decision and change of state, not after each job."""
        return version_of(
            self.state, self.judged_at, self.approved_at, self.started_at, self.run_since, self.paused_at, self.ended_at
        )

    @property
    def settled_count(self) -> int:
        """Jobs of it that have their answer."""
        return self.succeeded_count + self.failed_count


class RedriveItem(models.Model):
    """One job of a redrive, and what became of it.

    ``position`` is its place, from 1, oldest first. ``concerns`` are the classes that have to be answered before it
    runs, the gravest first, joined by commas; ``item_class`` is the first of them, or ``safe``, or why it cannot run.
    ``is_behind`` says that it waits for an earlier one of its actor.
    """

    id = models.BigAutoField(primary_key=True)
    # Not checked by the database, which would look up three rows for every item of very many: an item is made from its
    # letter by the statement that reads it, and retention removes items before letters, repairs and redrives.
    redrive = models.ForeignKey(
        Redrive, on_delete=models.PROTECT, related_name="items", db_index=False, db_constraint=False
    )
    position = models.IntegerField()
    letter = models.ForeignKey(
        DeadLetter, on_delete=models.PROTECT, related_name="redrive_items", db_index=False, db_constraint=False
    )
    actor_type = models.CharField(max_length=100, db_default="")
    actor_id = models.CharField(max_length=200, db_default="")
    item_class = models.CharField(max_length=20, choices=RedriveClass.choices, db_default=RedriveClass.SAFE)
    concerns = models.CharField(max_length=100, db_default="")
    state = models.CharField(max_length=10, choices=ItemState.choices, db_default=ItemState.WAITING)
    code = models.CharField(max_length=64, db_default="")
    detail = models.CharField(max_length=300, db_default="")
    is_behind = models.BooleanField(db_default=False)
    repair = models.ForeignKey(
        RepairAction,
        null=True,
        on_delete=models.PROTECT,
        related_name="redrive_items",
        db_index=False,
        db_constraint=False,
    )
    settled_at = models.DateTimeField(null=True)

    objects = RedriveItemQuerySet.as_manager()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["redrive", "position"], name="ops_redrive_item_position"),
            # A job is in one redrive that has not ended, whoever asks for another at the same moment.
            models.UniqueConstraint(
                fields=["letter"], condition=Q(state__in=("waiting", "planned")), name="ops_redrive_item_once"
            ),
            models.CheckConstraint(condition=Q(state__in=ItemState.values), name="ops_redrive_item_state"),
        ]
        indexes = [
            models.Index(F("letter"), F("id"), name="ops_redrive_item_of_letter"),
            models.Index(
                F("redrive"), F("position"), condition=Q(state="waiting", is_behind=False), name="ops_redrive_item_next"
            ),
            models.Index(F("redrive"), F("position"), condition=Q(state="planned"), name="ops_redrive_item_planned"),
            models.Index(F("redrive"), F("position"), condition=Q(state="failed"), name="ops_redrive_item_failed"),
            models.Index(
                F("redrive"), F("actor_type"), F("actor_id"), F("position"),
                condition=Q(state="waiting") & ~Q(actor_id=""), name="ops_redrive_item_of_actor",
            ),
        ]  # fmt: skip


class RunState(models.TextChoices):
    RUNNING = "running"  # its holder is at it, and says so with every page
    SUCCEEDED = "succeeded"  # looked at everything it was to look at
    PARTIAL = "partial"  # an error ended a part of it, but something was repaired
    FAILED = "failed"  # an error, and nothing was repaired; or it was killed


ENDED_WELL = (RunState.SUCCEEDED, RunState.PARTIAL)


class ReconciliationRun(models.Model):
    """One sweep and its counts (A13). It spans tenants, so it has none; what it changed of each stands in the repairs.

    ``heartbeat_at`` and the counts are written in the transaction of each page, so that they are true even of a run
    that was killed. ``cursor`` is where a sweep that goes round looks next. ``waited_since`` is set on a run that
    judged no lease, because nobody could have renewed one: see ``repairs.reconciliation.grace``.
    """

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    kind = models.CharField(max_length=64)
    state = models.CharField(max_length=10, choices=RunState.choices, db_default=RunState.RUNNING)
    scanned_count = models.BigIntegerField(db_default=0)
    repaired_count = models.BigIntegerField(db_default=0)
    skipped_count = models.BigIntegerField(db_default=0)
    incident_count = models.BigIntegerField(db_default=0)
    row_limit = models.IntegerField(null=True)
    error_code = models.CharField(max_length=64, db_default="")
    error_text = models.TextField(db_default="")
    started_by = models.CharField(max_length=200)
    started_by_name = models.CharField(max_length=200, db_default="")
    started_at = models.DateTimeField()
    heartbeat_at = models.DateTimeField()
    finished_at = models.DateTimeField(null=True)
    waited_since = models.DateTimeField(null=True)
    cursor = models.CharField(max_length=200, db_default="")

    objects = ReconciliationRunQuerySet.as_manager()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["kind"], condition=Q(state=RunState.RUNNING), name="ops_run_one_of_kind"),
            models.CheckConstraint(condition=Q(state__in=RunState.values), name="ops_reconciliation_state"),
            models.CheckConstraint(
                condition=(Q(state=RunState.RUNNING) & Q(finished_at__isnull=True))
                | (~Q(state=RunState.RUNNING) & Q(finished_at__isnull=False)),
                name="ops_reconciliation_finished_at",
            ),
            models.CheckConstraint(
                condition=Q(scanned_count__gte=0, repaired_count__gte=0, skipped_count__gte=0, incident_count__gte=0),
                name="ops_reconciliation_counts",
            ),
        ]
        indexes = [
            models.Index(F("kind"), F("id").desc(), name="ops_reconciliation_of_kind"),
            models.Index(F("state"), F("id").desc(), name="ops_reconciliation_of_state"),
            models.Index(F("finished_at"), F("id"), name="ops_reconciliation_finished"),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.started_at:%Y-%m-%d %H:%M:%S}"

    @property
    def resource(self) -> Resource:
        """What a request that touches this run touches: every tenant."""
        return Resource(tenant=ANY, target_type="reconciliation_run", target_id=str(self.id))


class SweepActionType(models.TextChoices):
    RELEASE_STALE_LEASE = "release_stale_lease"  # a claim whose holder is gone
    RECORD_LOST_JOB = "record_lost_job"  # the same, of a job that may have happened: it became a failed job
    REQUEUE_UNDELIVERED = "requeue_undelivered"  # a job that was sent and that nobody claimed
    RELEASE_SEND_LEASE = "release_send_lease"  # a planned repair whose sender is gone
    GIVE_UP_REPAIR = "give_up_repair"  # a repair whose worker never came back
    CORRECT_COUNT = "correct_count"  # an incident's kept count that was not the truth
    CORRECT_TOTAL = "correct_total"  # a stream's kept total that was not the truth


class SweepRepair(models.Model):
    """One change that a sweep made to one record, with before and after (A14).

    A table of its own, because a ``RepairAction`` is always about a letter and lives through states, and this is
    neither: it is written once, with what it did. The operation key is made of the record and of the marker of the
    lease that was found stale, so that the same stale lease is never repaired twice.
    """

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    # Not checked by the database, which would look up the one run once for every row: only retention removes runs, and
    # their repairs before them.
    run = models.ForeignKey(
        ReconciliationRun, on_delete=models.PROTECT, related_name="repairs", db_index=False, db_constraint=False
    )
    tenant = models.CharField(max_length=100)
    action_type = models.CharField(max_length=30, choices=SweepActionType.choices)
    entity_type = models.CharField(max_length=60)
    entity_id = models.CharField(max_length=200)
    operation_key = models.CharField(max_length=400)
    before = models.TextField(db_default="{}")
    after = models.TextField(db_default="{}")
    planned_by = models.CharField(max_length=200)
    applied_at = models.DateTimeField()

    objects = SweepRepairQuerySet.as_manager()

    class Meta:
        constraints = [
            # Not of the field, which on PostgreSQL would have a second index for patterns: each costs every row.
            models.UniqueConstraint(fields=["operation_key"], name="ops_sweep_repair_operation"),
            models.CheckConstraint(condition=~Q(tenant="*") & ~Q(tenant=""), name="ops_sweep_repair_tenant"),
        ]
        # Ascending, though the newest are read first: what a sweep writes is then added at the index's end.
        indexes = [models.Index(fields=["run", "id"], name="ops_sweep_repair_of_run")]

    def __str__(self) -> str:
        return f"{self.action_type} of {self.entity_type} {self.entity_id}"


class SeededEntry(models.Model):
    """A schedule entry that was made once: who deletes or changes it afterwards is not overruled by a migration."""

    name = models.CharField(primary_key=True, max_length=200)
    created_at = models.DateTimeField()
