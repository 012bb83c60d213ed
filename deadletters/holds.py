"""Reads about holds: lists, what a hold has put aside, and what its workers and the ledger are to compare with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models import Q, QuerySet

from deadletters import conf
from deadletters.errors import HoldNotFound, PayloadNotKnown
from deadletters.intake import open_message
from deadletters.journal.holds import HoldRule, payload_hash_of_json
from deadletters.journal.message import unpack_body
from deadletters.models import DeadLetter, Hold, HoldState, LetterState, SealedMessage
from deadletters.querysets import DeadLetterQuerySet
from grants.actions import Action
from grants.models import AuditEvent, Verdict
from grants.operators import Operator
from grants.reading import authorise_anywhere, authorise_read_of, authorise_scope
from grants.resources import ANY
from incidents.models import HOLD_CATEGORY, Incident
from opsconsole.core.bounded import capped_counts
from opsconsole.core.clock import boot_id, boot_now, wall_now
from opsconsole.core.database import database_now
from opsconsole.core.keyset import Page, Source, read_page
from opsconsole.core.redaction import decode_body
from opsconsole.core.sealing import SealError
from opsconsole.jobs.models import DUE, Job
from opsconsole.jobs.tokens import job_id_of

MOST_INCIDENTS = 50
COMPARED_PAYLOADS = 2_000
"""Due jobs whose payload a dispatcher compares with that of a hold: more than it takes at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldFilter:
    """Which holds are wanted; an empty field wants all."""

    states: tuple[str, ...] = ()
    tenant: str | None = None
    source: str | None = None
    job_type: str | None = None
    queue: str | None = None

    def condition(self) -> Q:
        """Return the filter as a condition. A tenant's holds are those of every tenant, too."""
        condition = Q(state__in=self.states) if self.states else Q()
        if self.tenant not in (None, ANY):
            condition &= Q(tenant__in=(self.tenant, ANY))
        if self.source not in (None, ANY):
            condition &= Q(source__in=(self.source, ANY))
        wanted = {"job_type": self.job_type, "queue": self.queue}
        return condition & Q(**{name: value for name, value in wanted.items() if value is not None})


def list_holds(operator: Operator, wanted: HoldFilter, *, limit: int = 50, cursor: str | None = None) -> Page[Hold]:
    """Return a page of the holds that ``operator`` may know of, newest first.

    Raises ``AccessDenied``, audited, for a tenant that they may not inspect, and for who may inspect nothing.
    """
    authorise_anywhere(operator, Action.INSPECT)
    authorise_scope(operator, Action.INSPECT, tenant=wanted.tenant)
    rows = Hold.objects.seen_by(operator).filter(wanted.condition())
    return read_page("holds", [[Source(rows, ("placed_at", "id"))]], limit=limit, cursor=cursor)


def find_hold(operator: Operator, hold_id: UUID) -> Hold:
    """Return a hold that ``operator`` may know of; raises ``HoldNotFound``, audited."""
    scope = Hold.objects.scope(hold_id)
    if scope is not None and scope.tenant == ANY:
        authorise_anywhere(operator, Action.INSPECT)
        rows = Hold.objects.told_to(operator)
    else:
        authorise_read_of(operator, Action.INSPECT, scope, HoldNotFound())
        rows = Hold.objects.told_whole()
    found: Hold | None = rows.filter(id=hold_id).first()
    if found is None:
        raise HoldNotFound
    return found


def held_letters(hold: Hold) -> DeadLetterQuerySet:
    """Return what a hold has put aside and nobody has sent on or closed, in the order in which it came."""
    held = DeadLetter.objects.filter(hold_id=hold.id, state=LetterState.HELD)
    return held.filter(DeadLetter.objects.is_unresolved()).oldest_first()


def count_held(hold: Hold, most: int, *, seen_by: Operator | None = None) -> int:
    """Return how many those are, counting to one more than ``most`` at the furthest.

    With ``seen_by``, of a hold of every tenant, those that this operator may inspect.
    """
    letters = held_letters(hold)
    if seen_by is not None and hold.tenant == ANY:
        letters = letters.filter(id__in=DeadLetter.objects.visible_to(seen_by, Action.INSPECT).values("id"))
    (count,) = capped_counts([letters], most)
    return count


def incidents_of_hold(operator: Operator, hold: Hold) -> Sequence[Incident]:
    """Return the incidents that hold its letters: one for each tenant and source that ``operator`` may inspect."""
    rows = Incident.objects.visible_to(operator, Action.INSPECT).filter(key=hold.incident_key, category=HOLD_CATEGORY)
    return list(rows.order_by("tenant", "source", "id")[:MOST_INCIDENTS])


def hold_events(hold_id: object) -> Any:
    """Return what happened to a hold, newest first: rows of the audit trail whose action says what."""
    rows = AuditEvent.objects.filter(target_type="hold", target_id=str(hold_id), verdict=Verdict.ALLOWED)
    return rows.order_by("-at", "-id")


def letter_to_hold(operator: Operator, letter_id: UUID) -> DeadLetter:
    """Return a letter that ``operator`` may see, to hold messages like it; raises ``PayloadNotKnown``, audited."""
    authorise_read_of(operator, Action.INSPECT, DeadLetter.objects.scope(letter_id), PayloadNotKnown())
    letter: DeadLetter = DeadLetter.objects.get(id=letter_id)
    return letter


def named_payload(operator: Operator, letter_id: UUID) -> tuple[str, str]:
    """Return task and payload hash of a letter that ``operator`` may see.

    Raises ``PayloadNotKnown``, also if its message cannot tell; what they may not see is audited.
    """
    letter = letter_to_hold(operator, letter_id)
    found = payload_hash_of(letter)
    if found is None:
        raise PayloadNotKnown
    return letter.job_type, found


def payload_hash_of(letter: DeadLetter) -> str | None:
    """Return the hash that names a letter's payload, to hold messages like it; None if its message cannot tell.

    A worker computes the same of a message that it has received. Messages in another form than JSON have none.
    """
    if job_id_of(letter.task_id) is not None:
        job = Job.objects.filter(id=letter.job_id).only("payload").first()
        return None if job is None else _hash_of_job(job.payload)
    message = SealedMessage.objects.filter(letter=letter).first()
    if message is None:
        return None
    try:
        packed = open_message(conf.sealer(), bytes(message.blob), letter.id)
    except SealError:
        return None
    decoded = decode_body(*unpack_body(packed))
    return None if decoded.error else payload_hash_of_json([decoded.args, decoded.kwargs])


def ledger_jobs_on_hold(source: str) -> Q | None:
    """Return the condition on jobs of the ledger that says which are not to be dispatched; None if no hold is in force.

    What an operator has put back passes, like the message of a repair. A payload is compared here: a message of the
    ledger's names its job and holds none.
    """
    found = list(Hold.objects.in_force(source, database_now()).order_by("id"))
    if not found:
        return None
    condition = Q(pk__in=[])
    # Payloads last: those that are held in any case need not be compared, and must not take the place of others.
    for hold in sorted(found, key=lambda hold: bool(hold.payload_hash)):
        parts = {"tenant": "" if hold.tenant == ANY else hold.tenant, "kind": hold.job_type, "queue": hold.queue}
        one = Q(repair_id__isnull=True, **{name: value for name, value in parts.items() if value})
        if hold.task_id:
            job_id = _as_uuid(hold.task_id)
            if job_id is None:
                continue
            one &= Q(id=job_id)
        if hold.payload_hash:
            waiting = Job.objects.filter(one, source=source, state__in=DUE).exclude(condition)
            one &= Q(payload__in=_texts_alike(waiting, hold.payload_hash))
        condition |= one
    return condition


def _texts_alike(waiting: QuerySet[Job], wanted: str) -> list[str]:
    """Return how payloads with this hash are stored, in the jobs that come next; then the database finds the others.

    There is one way, or as many as there are of writing the same payload. More jobs are compared than a dispatcher
    takes at once, and those that are alike do not count, however many wait already.
    """
    texts: list[str] = []
    while True:
        rows = waiting.exclude(payload__in=texts).order_by("available_at", "id")
        compared = set(rows.values_list("payload", flat=True)[:COMPARED_PAYLOADS])
        alike = [text for text in compared if _hash_of_job(text) == wanted]
        if not alike:
            return texts
        texts += alike


def _hash_of_job(payload: str) -> str:
    return payload_hash_of_json([[], json.loads(payload)])


def _as_uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def rules_of(source: str) -> tuple[list[HoldRule], list[UUID]]:
    """Return what the workers of a source are to put aside, oldest hold first; and the holds that are overdue.

    One query, by a partial index. Ends are given on this host's clocks (C12).
    """
    now, boot, wall = database_now(), boot_now(), wall_now()
    found = list(Hold.objects.filter(source__in=(source, ANY), state=HoldState.ACTIVE).order_by("id"))
    rules = [_rule_of(hold, now, boot, wall) for hold in found if hold.ends_at > now]
    return rules, [hold.id for hold in found if hold.ends_at <= now]


def _rule_of(hold: Hold, now: datetime, boot: float, wall: float) -> HoldRule:
    left = (hold.ends_at - now).total_seconds()
    return HoldRule(
        id=str(hold.id),
        tenant=hold.tenant,
        job_type=hold.job_type,
        queue=hold.queue,
        task_id=hold.task_id,
        payload_hash=hold.payload_hash,
        ends_at=hold.ends_at.isoformat(),
        ends_boot=boot + left,
        ends_wall=wall + left,
        boot=boot_id(),
        clock_us=round(now.timestamp() * 1e6) - round(boot * 1e6),
    )
