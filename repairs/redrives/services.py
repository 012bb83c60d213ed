"""What people do about a redrive: plan, approve, start, pause, let go on, cancel it, and retry what has failed of it.

The redrive's row is locked first, before any incident, and everybody who changes an item holds it: so its counts are
true, and of two who decide at the same moment one is first and the other is told so. What a start leads to is done by
the controller in the workers (``repairs.redrives.redriver``); no request sends anything or waits for a worker.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models import QuerySet

from deadletters import conf as letters_conf
from deadletters.listing import STANDINGS
from deadletters.models import DeadLetter, LetterState
from deadletters.querysets import DeadLetterQuerySet
from deadletters.search import search_letters
from deadletters.selectors import LetterFilter
from grants import audit
from grants.access import Capability, authorise, find_capability
from grants.actions import Action
from grants.models import AuditEvent
from grants.operators import Operator
from grants.resources import Resource
from grants.service import service
from grants.targets import authorise_target
from incidents.errors import IncidentNotFound
from incidents.models import Incident
from opsconsole.core.canonical_json import canonical_json
from opsconsole.core.database import AnyOf, RowWriter, database_now
from opsconsole.core.errors import InvalidInput
from opsconsole.core.ids import new_id
from opsconsole.core.search import asked
from repairs.errors import (
    LetterNotFound,
    RedriveChanged,
    RedriveEmpty,
    RedriveExists,
    RedriveInvalid,
    RedriveNotApproved,
    RedriveNotFound,
    RedriveOwnApproval,
    RedriveStanding,
    SelectionDrifted,
    SelectionInvalid,
    TooMany,
)
from repairs.models import (
    NO_CHANGES,
    REDRIVE_ACTIVE,
    REDRIVE_ENDED,
    ItemState,
    Redrive,
    RedriveClass,
    RedriveItem,
    RedriveState,
)
from repairs.redrives import conf
from repairs.redrives.judging import judge_page
from repairs.redrives.requests import (
    LONGEST_REASON,
    MOST_ITEMS,
    AnswerKind,
    Answers,
    RedriveChanges,
    RedrivePace,
    RedriveSelection,
    check_answers,
    pack_answers,
    unpack_answers,
)
from repairs.redrives.sql import freeze
from repairs.redrives.withdrawing import withdraw_unsent

CREATED = "redrive.created"
APPROVED = "redrive.approved"
STARTED = "redrive.started"
PAUSED = "redrive.paused"
RESUMED = "redrive.resumed"
CANCELLED = "redrive.cancelled"
AT_ONCE = 1_000
"""Letters up to which a dry run is made in the request; of more the workers make it."""
BY_PERSON, CANARY_FAILED, JOB_NOT_SERVED = "operator", "canary_failed", "job_not_served"
"""Codes of pauses: by a person, and two after which it goes on in another way."""
VALUES_CONTEXT = b"redrive-values"
PLAIN_FILTER = frozenset(LetterFilter.__dataclass_fields__) - {"text", "states"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RedriveMutation:
    """What a request did to a redrive, or, as a replay, what the first one of its key did."""

    redrive_id: UUID
    state: str
    total: int
    event_id: UUID | None = None
    idempotent_replay: bool = False


def create_redrive(
    *,
    by: Operator,
    key: str,
    selection: RedriveSelection,
    expected_count: int | None = None,
    pace: RedrivePace | None = None,
    cut_off: datetime | None = None,
    target_queue: str = "",
    low_priority: bool = False,
    changes: RedriveChanges | None = None,
    reason: str = "",
) -> RedriveMutation:
    """Freeze a set of failed jobs and begin its dry run; nothing is sent before ``start_redrive`` (C14).

    Only letters that ``by`` may see under ``redrive.run`` are in it, only those that wait for a decision unless they
    are named one by one, and none that another redrive has which has not ended. ``expected_count`` is how many the
    operator was shown: any other number is refused, and nothing is written. Of at most 1,000 jobs the dry run is done
    when this returns (state ``ready``), of more the workers make it (``planning``). ``target_queue`` sends them to
    another queue than their own, ``low_priority`` to the one that ``OPSCONSOLE_REDRIVE_QUEUE`` names; ``changes``
    takes the capability ``redrive.patch`` as well.

    The same key answers with the redrive that it made. Raises ``SelectionInvalid``, ``SelectionDrifted``, ``TooMany``,
    ``RedriveEmpty``, ``RedriveExists``, ``RedriveInvalid``, ``LetterNotFound``, ``IncidentNotFound``,
    ``RedriveNotFound`` (of ``failed_of``), ``AccessDenied`` or ``IdempotencyKeyReused``.
    """
    made = _create(
        by=by, key=key, selection=selection, expected_count=expected_count, pace=pace or RedrivePace(), cut_off=cut_off,
        target_queue=_target_queue(target_queue, low_priority=low_priority), changes=changes or RedriveChanges(),
        reason=reason,
    )  # fmt: skip
    if made.idempotent_replay or made.total > AT_ONCE:
        return made
    while judge_page(redrive_id=made.redrive_id):
        pass
    return replace(made, state=Redrive.objects.values_list("state", flat=True).get(id=made.redrive_id))


def count_selected(*, by: Operator, selection: RedriveSelection) -> int:
    """Return how many letters a redrive of ``selection`` would freeze now, for a page that asks.

    Raises what ``create_redrive`` raises of a selection.
    """
    selection.check()
    return _choose(selection, by).letters.count()


def retry_failed_items(
    *,
    redrive_id: UUID,
    by: Operator,
    key: str,
    expected_count: int | None = None,
    pace: RedrivePace | None = None,
    reason: str = "",
) -> RedriveMutation:
    """Plan a new redrive of the failed jobs of one, with the same target, changes and cut-off; see ``create_redrive``.

    Its changes take ``redrive.patch`` again.
    """
    selection = RedriveSelection(failed_of=redrive_id)
    return create_redrive(by=by, key=key, selection=selection, expected_count=expected_count, pace=pace, reason=reason)


def _target_queue(name: str, *, low_priority: bool) -> str:
    if len(name) > 200 or "\x00" in name:
        raise RedriveInvalid(detail="A queue's name has at most 200 characters.", field="target_queue")
    if not low_priority:
        return name
    if name:
        raise RedriveInvalid(detail="Name a queue or ask for low priority, not both.", field="low_priority")
    queue = conf.low_priority_queue()
    if not queue:
        raise RedriveInvalid(
            detail="There is no queue of low priority here: OPSCONSOLE_REDRIVE_QUEUE names none.", field="low_priority"
        )
    return queue


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """The letters of a selection as a query, and what they have in common."""

    letters: DeadLetterQuerySet
    resource: Resource
    source: str
    capability: Capability
    incident_id: UUID | None = None
    retry_of: UUID | None = None
    named: int | None = None


@service
def _create(
    *,
    by: Operator,
    key: str,
    selection: RedriveSelection,
    expected_count: int | None,
    pace: RedrivePace,
    cut_off: datetime | None,
    target_queue: str,
    changes: RedriveChanges,
    reason: str,
) -> RedriveMutation:
    selection.check()
    pace.check()
    changes.check()
    _check_reason(reason)
    described = selection.described()
    digest = audit.request_digest(
        {
            "selection": described,
            "expected_count": expected_count,
            "pace": asdict(pace),
            "cut_off": cut_off.isoformat() if cut_off is not None else None,
            "target_queue": target_queue,
            "changes": {**changes.described(), "values": json.dumps(dict(changes.set), sort_keys=True)},
            "reason": reason,
        }
    )
    chosen = _choose(selection, by)
    if chosen.retry_of is not None:
        old = Redrive.objects.get(id=chosen.retry_of)
        target_queue, cut_off, changes = (
            target_queue or old.target_queue,
            cut_off or old.cut_off,
            changes or changes_of(old),
        )
    if changes:
        authorise(by, Action.REDRIVE_PATCH, chosen.resource)
    return freeze_redrive(
        chosen.letters, by=by, key=key, digest=digest, capability=chosen.capability, resource=chosen.resource,
        source=chosen.source, selection=described, expected_count=chosen.named or expected_count, pace=pace,
        cut_off=cut_off, target_queue=target_queue, changes=changes, reason=reason, incident_id=chosen.incident_id,
        retry_of=chosen.retry_of,
    )  # fmt: skip


def freeze_redrive(
    letters: QuerySet[DeadLetter],
    *,
    by: Operator,
    key: str,
    digest: str,
    capability: Capability,
    resource: Resource,
    source: str,
    selection: Mapping[str, Any],
    expected_count: int | None = None,
    pace: RedrivePace,
    cut_off: datetime | None = None,
    target_queue: str = "",
    changes: RedriveChanges | None = None,
    reason: str = "",
    incident_id: UUID | None = None,
    retry_of: UUID | None = None,
    letter_state: str = LetterState.OPEN.value,
    action: Action = Action.REDRIVE_RUN,
) -> RedriveMutation:
    """Freeze ``letters`` as a redrive in the caller's transaction; for services that choose letters in another way.

    This is how a hold is released: a service of its own authorises ``by``, hands in the letters of the hold, which are
    all of one ``resource`` (tenant, and actor if there is but one) and ``source``, with ``letter_state=HELD`` and
    ``action=Action.DEAD_LETTERS_HOLD``, which from then on is what it takes to decide about the redrive and to run it.
    Once its transaction has ended it calls ``judge_page`` until that returns false (or leaves it to the workers), and
    ``start_redrive``. Replays by ``key``; raises what ``create_redrive`` raises of a set.
    """
    changes = changes or RedriveChanges()
    now = database_now()
    redrive = Redrive(
        id=new_id(),
        tenant=resource.tenant,
        source=source,
        actor_type=resource.actor_type,
        actor_id=resource.actor_id,
        request_key=hashlib.sha256(f"{by.ref}\0{key}".encode(errors="backslashreplace")).hexdigest(),
        incident_id=incident_id,
        retry_of_id=retry_of,
        selection=canonical_json(dict(selection)),
        letter_state=str(letter_state),
        action=action.value,
        state=RedriveState.PLANNING,
        rate_per_second=pace.rate_per_second,
        max_outstanding=pace.max_outstanding,
        canary_size=pace.canary_size,
        stop_percent=pace.stop_percent,
        cut_off=cut_off,
        target_queue=target_queue,
        changes=canonical_json(changes.described()) if changes else NO_CHANGES,
        sealed_values=_sealed_values(changes),
        reason=reason,
        planned_by=by.ref,
        planned_by_name=by.name,
        planned_by_user="" if by.user_id is None else str(by.user_id),
        planned_at=now,
    )
    # Waits for whoever is making the redrive of the same key just now, and then finds it.
    values = [getattr(redrive, field.attname) for field in _NEW.fields]
    if not _NEW.insert([values]):
        return _replayed_creation(redrive.request_key, by, key, digest)
    redrive._state.adding, redrive._state.db = False, letters.db
    found = freeze(redrive.id, letters, MOST_ITEMS)
    if expected_count is not None and found <= MOST_ITEMS and found != expected_count:
        raise SelectionDrifted(expected=expected_count, found=found)
    if found > MOST_ITEMS:
        raise TooMany(found=found, most=MOST_ITEMS)
    if not found:
        raise RedriveEmpty
    elsewhere = RedriveItem.objects.filter(redrive=redrive, state=ItemState.SKIPPED)
    skipped = elsewhere.count()
    if skipped == found:
        other = elsewhere.values_list("detail", flat=True).first() or ""
        raise RedriveExists(redrive=str(UUID(other.removeprefix("in redrive "))))
    redrive.total_count, redrive.waiting_count, redrive.skipped_count = found, found - skipped, skipped
    redrive.classes = canonical_json({RedriveClass.IN_OTHER_REDRIVE.value: skipped} if skipped else {})
    above = conf.approval_above()
    redrive.needs_approval = above is not None and found > above
    redrive.save(update_fields=["total_count", "waiting_count", "skipped_count", "classes", "needs_approval"])
    event = audit.record(
        action=CREATED,
        operator=by,
        resource=redrive.resource,
        capability=capability,
        outcome={
            "changes": json.loads(redrive.changes),
            "jobs": found,
            "selection": next(iter(selection), ""),
            "state": str(redrive.state),
        },
        reason=reason,
        key=key,
        digest=digest,
        at=now,
    )
    return RedriveMutation(redrive_id=redrive.id, state=str(redrive.state), total=found, event_id=event.id)


_NEW = RowWriter(
    Redrive,
    (
        "id", "tenant", "source", "actor_type", "actor_id", "request_key", "incident", "retry_of", "selection",
        "letter_state", "action", "state", "rate_per_second", "max_outstanding", "canary_size", "stop_percent",
        "cut_off", "target_queue", "changes", "sealed_values", "reason", "planned_by", "planned_by_name",
        "planned_by_user", "planned_at",
    ),
    suffix="ON CONFLICT (request_key) DO NOTHING",
)  # fmt: skip


def _replayed_creation(request_key: str, by: Operator, key: str, digest: str) -> RedriveMutation:
    redrive = Redrive.objects.get(request_key=request_key)
    receipt = audit.replayed(
        key=key, action=CREATED, operator=by, target_type="redrive", target_id=str(redrive.id), digest=digest
    )
    if receipt is None:
        # Only a receipt that was lost while its redrive was not: the answer is the same.
        return RedriveMutation(redrive_id=redrive.id, state=str(redrive.state), total=redrive.total_count)
    return RedriveMutation(
        redrive_id=redrive.id,
        state=str(redrive.state),
        total=redrive.total_count,
        event_id=receipt.id,
        idempotent_replay=True,
    )


def _sealed_values(changes: RedriveChanges) -> bytes | None:
    if not changes.set:
        return None
    return letters_conf.sealer().seal(json.dumps(dict(changes.set)).encode(), VALUES_CONTEXT)


def changes_of(redrive: Redrive) -> RedriveChanges:
    """Return a redrive's changes with their values; raises ``UnknownSealKey`` or ``BrokenSeal``."""
    stored = json.loads(redrive.changes)
    if not stored:
        return RedriveChanges()
    values: dict[str, Any] = {}
    if redrive.sealed_values is not None:
        values = json.loads(letters_conf.sealer().open(bytes(redrive.sealed_values), VALUES_CONTEXT))
    return RedriveChanges(tasks=stored["tasks"], set=values, remove=tuple(stored["remove"]), rename=stored["rename"])


# -- choosing ----------------------------------------------------------------------------------------------------------


def _choose(selection: RedriveSelection, by: Operator) -> _Chosen:
    if selection.incident_id is not None:
        return _of_incident(selection.incident_id, by)
    if selection.failed_of is not None:
        return _failed_of(selection.failed_of, by)
    if selection.letters is not None:
        return _of_filter(selection.letters, by)
    return _named(selection.letter_ids, by)


def _visible(by: Operator) -> DeadLetterQuerySet:
    visible: DeadLetterQuerySet = DeadLetter.objects.visible_to(by, Action.REDRIVE_RUN)
    return visible


def _of_incident(incident_id: UUID, by: Operator) -> _Chosen:
    scope = Incident.objects.scope(incident_id)
    capability = authorise_target(by, Action.REDRIVE_RUN, scope, IncidentNotFound())
    incident = Incident.objects.get(id=incident_id)
    letters = _visible(by).filter(incident_id=incident_id, episode=incident.episode, state=LetterState.OPEN)
    return _Chosen(
        letters=letters.none() if incident.is_resolved else letters,
        resource=Resource(tenant=incident.tenant),
        source=incident.source,
        capability=capability,
        incident_id=incident_id,
    )


def _failed_of(redrive_id: UUID, by: Operator) -> _Chosen:
    scope = Redrive.objects.scope(redrive_id)
    capability = authorise_target(by, Action.REDRIVE_RUN, scope, RedriveNotFound())
    old = Redrive.objects.get(id=redrive_id)
    failed = RedriveItem.objects.filter(redrive_id=redrive_id, state=ItemState.FAILED).values("letter_id")
    return _Chosen(
        letters=_visible(by).filter(id__in=failed, state=LetterState.OPEN),
        resource=replace(old.resource, target_type="", target_id=""),
        source=old.source,
        capability=capability,
        incident_id=old.incident_id,
        retry_of=redrive_id,
    )


def _of_filter(wanted: LetterFilter, by: Operator) -> _Chosen:
    resource = Resource(tenant=wanted.tenant or "", actor_type=wanted.actor_type or "", actor_id=wanted.actor_id or "")
    capability = authorise(by, Action.REDRIVE_RUN, resource)
    rows = _visible(by).filter(wanted.condition())
    condition = None
    for name in wanted.standings() or ("open", "acknowledged"):
        condition = STANDINGS[name] if condition is None else condition | STANDINGS[name]
    if condition is not None:
        rows = rows.filter(condition)
    if wanted.text is not None:
        rows = asked(search_letters(wanted.text, within=rows, anywhere=rows))
    # A filter that names half of an actor is a tenant's.
    is_of_actor = bool(wanted.actor_type and wanted.actor_id)
    return _Chosen(
        letters=rows,
        resource=resource if is_of_actor else Resource(tenant=resource.tenant),
        source=wanted.source or "",
        capability=capability,
        incident_id=wanted.incident,
    )


def _named(letter_ids: tuple[UUID, ...], by: Operator) -> _Chosen:
    rows = _visible(by).filter(AnyOf("id", letter_ids))
    scopes = list(rows.order_by().values_list("tenant", "source", "actor_type", "actor_id").distinct())
    if not scopes or rows.count() != len(letter_ids):
        raise LetterNotFound
    places = {(tenant, source) for tenant, source, _type, _id in scopes}
    if len(places) > 1:
        raise SelectionInvalid(detail="A redrive is of one tenant and one source, and these are of more.")
    tenant, source, actor_type, actor_id = scopes[0]
    resource = Resource(tenant=tenant)
    if len(scopes) == 1 and actor_id:
        resource = Resource(tenant=tenant, actor_type=actor_type, actor_id=actor_id)
    capability = find_capability(by, Action.REDRIVE_RUN, Resource(tenant=tenant))
    if capability is None:
        capability = authorise(by, Action.REDRIVE_RUN, resource)
    return _Chosen(letters=rows, resource=resource, source=source, capability=capability, named=len(letter_ids))


# -- deciding ----------------------------------------------------------------------------------------------------------


@service
def approve_redrive(
    *, redrive_id: UUID, by: Operator, key: str, reason: str = "", version: int | None = None
) -> RedriveMutation:
    """Say as the second person that a large redrive may start; whoever has planned it cannot.

    ``OPSCONSOLE_REDRIVE_APPROVAL_ABOVE`` says which are large (``Redrive.needs_approval``). Raises ``RedriveNotFound``,
    ``AccessDenied``, ``RedriveStanding`` unless it is ready and waits for one, ``RedriveOwnApproval`` or
    ``IdempotencyKeyReused``.
    """
    asked_for = _Asked.by(redrive_id, by, key, APPROVED, {"reason": reason}, version)
    if asked_for.replay is not None:
        return asked_for.replay
    redrive = asked_for.redrive
    if redrive.state != RedriveState.READY or not redrive.needs_approval or redrive.approved_at is not None:
        raise RedriveStanding(state="approved" if redrive.approved_at is not None else str(redrive.state))
    if redrive.planned_by == by.ref or redrive.planned_by_user == str(by.user_id):
        raise RedriveOwnApproval
    redrive.approved_by, redrive.approved_by_name, redrive.approved_at = by.ref, by.name, asked_for.now
    redrive.save(update_fields=["approved_by", "approved_by_name", "approved_at"])
    return asked_for.done(reason)


@service
def start_redrive(
    *,
    redrive_id: UUID,
    by: Operator,
    key: str,
    answers: Answers | None = None,
    reason: str = "",
    version: int | None = None,
) -> RedriveMutation:
    """Let a judged redrive run: its safe part as it is, other classes as ``answers`` say, the rest is left out (C13).

    ``answers`` maps a class to what is stated about all of its jobs; ``repairs.redrives.requests.ANSWERS`` says which
    answers a class takes. A job that is of several classes runs only if each of them is answered. From here on the
    redrive runs by the grants of ``by``, which are asked again with every page; one that changes messages takes
    ``redrive.patch`` of them as well. Raises ``RedriveNotFound``,
    ``AccessDenied``, ``RedriveStanding`` unless it is ready, ``RedriveNotApproved``, ``RedriveAnswerInvalid`` or
    ``IdempotencyKeyReused``.
    """
    given = dict(answers or {})
    check_answers(given)
    packed = pack_answers(given)
    body = {"answers": packed, "reason": reason}
    asked_for = _Asked.by(redrive_id, by, key, STARTED, body, version, lets_run=True)
    if asked_for.replay is not None:
        return asked_for.replay
    redrive = asked_for.redrive
    if redrive.state != RedriveState.READY:
        raise RedriveStanding(state=str(redrive.state))
    if redrive.needs_approval and redrive.approved_at is None:
        raise RedriveNotApproved(count=redrive.total_count)
    redrive.answers = packed
    redrive.started_at = asked_for.now
    _go_on(redrive, by, asked_for.now)
    redrive.save(update_fields=["answers", "started_at", *_GOING])
    return asked_for.done(reason, answers=json.loads(packed))


@service
def pause_redrive(
    *, redrive_id: UUID, by: Operator, key: str, reason: str = "", version: int | None = None
) -> RedriveMutation:
    """Send nothing more of it until somebody lets it go on; what has been sent gets its result all the same.

    Raises ``RedriveNotFound``, ``AccessDenied``, ``RedriveStanding`` unless it runs, or ``IdempotencyKeyReused``.
    """
    asked_for = _Asked.by(redrive_id, by, key, PAUSED, {"reason": reason}, version)
    if asked_for.replay is not None:
        return asked_for.replay
    redrive = asked_for.redrive
    if redrive.state not in REDRIVE_ACTIVE:
        raise RedriveStanding(state=str(redrive.state))
    redrive.state, redrive.pause_code, redrive.pause_text = RedriveState.PAUSED, BY_PERSON, reason
    redrive.paused_by_name, redrive.paused_at = by.name, asked_for.now
    redrive.save(update_fields=["state", "pause_code", "pause_text", "paused_by_name", "paused_at"])
    return asked_for.done(reason, code=BY_PERSON)


@service
def resume_redrive(
    *,
    redrive_id: UUID,
    by: Operator,
    key: str,
    pace: RedrivePace | None = None,
    reason: str = "",
    version: int | None = None,
) -> RedriveMutation:
    """Let a paused redrive go on, by the grants of ``by`` from now on, and at another ``pace`` if one is given.

    The stop ratio counts anew. One whose canary had failed goes on with all the rest, and one that waited for a worker
    leaves out the jobs that still nobody serves: whoever lets it go on has been told. Raises
    ``RedriveNotFound``, ``AccessDenied``, ``RedriveStanding`` unless it is paused, ``RedriveInvalid`` or
    ``IdempotencyKeyReused``.
    """
    if pace is not None:
        pace.check()
    body = {"reason": reason, "pace": asdict(pace) if pace is not None else None}
    asked_for = _Asked.by(redrive_id, by, key, RESUMED, body, version, lets_run=True)
    if asked_for.replay is not None:
        return asked_for.replay
    redrive = asked_for.redrive
    if redrive.state != RedriveState.PAUSED:
        raise RedriveStanding(state=str(redrive.state))
    if pace is not None:
        redrive.rate_per_second, redrive.max_outstanding = pace.rate_per_second, pace.max_outstanding
        redrive.stop_percent = pace.stop_percent
        if redrive.canary_passed_at is None and redrive.canary_size:
            # What began without a canary has none later: its first jobs have gone out already.
            redrive.canary_size = pace.canary_size
    if any(answer.kind is AnswerKind.PROBE for answer in unpack_answers(redrive.answers).values()):
        # What a provider said before the pause may not be true any more: each is asked once more.
        asked_already = RedriveItem.objects.filter(redrive=redrive, state=ItemState.WAITING).exclude(code="")
        asked_already.update(code="", detail="")
    _go_on(redrive, by, asked_for.now)
    redrive.save(update_fields=["rate_per_second", "max_outstanding", "stop_percent", "canary_size", *_GOING])
    return asked_for.done(reason)


@service
def cancel_redrive(
    *, redrive_id: UUID, by: Operator, key: str, reason: str = "", version: int | None = None
) -> RedriveMutation:
    """Give a redrive up: what has not been sent goes back to where it was, what has been sent gets its result.

    A message that is on its way to the broker at this very moment never runs: the start guard refuses it. Locks the
    redrive, then the incidents and letters of what was planned. Raises ``RedriveNotFound``, ``AccessDenied``,
    ``RedriveStanding`` if it has ended, or ``IdempotencyKeyReused``.
    """
    asked_for = _Asked.by(redrive_id, by, key, CANCELLED, {"reason": reason}, version)
    if asked_for.replay is not None:
        return asked_for.replay
    redrive = asked_for.redrive
    if redrive.state in REDRIVE_ENDED:
        raise RedriveStanding(state=str(redrive.state))
    withdraw_unsent(redrive, asked_for.now)
    waiting = RedriveItem.objects.filter(redrive=redrive, state=ItemState.WAITING)
    given_up = waiting.update(state=ItemState.CANCELLED, code="redrive_cancelled", settled_at=asked_for.now)
    redrive.waiting_count -= given_up
    redrive.cancelled_count += given_up
    redrive.state, redrive.ended_at = RedriveState.CANCELLED, asked_for.now
    redrive.pause_code = redrive.pause_text = ""
    redrive.save(
        update_fields=["waiting_count", "outstanding_count", "cancelled_count", "state", "ended_at", "pause_code",
                       "pause_text"]
    )  # fmt: skip
    return asked_for.done(reason, cancelled=redrive.cancelled_count)


@dataclass(slots=True, kw_only=True)
class _Asked:
    """A request about one redrive, authorised, with the redrive locked; ``replay`` answers a repeated one."""

    redrive: Redrive
    operator: Operator
    capability: Capability
    action: str
    key: str
    digest: str
    now: datetime
    replay: RedriveMutation | None = None

    @classmethod
    def by(
        cls,
        redrive_id: UUID,
        by: Operator,
        key: str,
        action: str,
        body: Mapping[str, Any],
        version: int | None,
        *,
        lets_run: bool = False,
    ) -> _Asked:
        """Authorise and lock; one that changes messages takes the capability for that of whoever lets it run."""
        _check_reason(str(body["reason"]))
        scope = Redrive.objects.scope(redrive_id)
        needed = Redrive.objects.filter(id=redrive_id).values_list("action", flat=True).first()
        capability = authorise_target(by, Action(needed or Action.REDRIVE_RUN), scope, RedriveNotFound())
        redrive = Redrive.objects.lock(redrive_id)
        for also in redrive.runs_by[1:] if lets_run else ():
            authorise(by, also, redrive.resource)
        digest = audit.request_digest(body)
        receipt: AuditEvent | None = audit.replayed(
            key=key, action=action, operator=by, target_type="redrive", target_id=str(redrive_id), digest=digest
        )
        replay = None
        if receipt is not None:
            replay = RedriveMutation(
                redrive_id=redrive_id,
                state=json.loads(receipt.outcome)["state"],
                total=redrive.total_count,
                event_id=receipt.id,
                idempotent_replay=True,
            )
        elif version is not None and version != redrive.version:
            raise RedriveChanged(current={"state": str(redrive.state), "version": redrive.version})
        return cls(
            redrive=redrive, operator=by, capability=capability, action=action, key=key, digest=digest,
            now=database_now(), replay=replay,
        )  # fmt: skip

    def done(self, reason: str, **more: Any) -> RedriveMutation:
        """Write the audit row, which is the receipt."""
        event = audit.record(
            action=self.action,
            operator=self.operator,
            resource=self.redrive.resource,
            capability=self.capability,
            outcome={"jobs": self.redrive.total_count, "state": str(self.redrive.state), **more},
            reason=reason,
            key=self.key,
            digest=self.digest,
            at=self.now,
        )
        return RedriveMutation(
            redrive_id=self.redrive.id,
            state=str(self.redrive.state),
            total=self.redrive.total_count,
            event_id=event.id,
        )


_GOING = (
    "state", "canary_passed_at", "skips_unserved", "started_by", "started_by_name", "started_by_user", "pause_code",
    "pause_text", "paused_by_name", "run_since", "run_settled", "run_failed", "next_due_at",
)  # fmt: skip


def _go_on(redrive: Redrive, by: Operator, now: datetime) -> None:
    """Make a redrive run from now on, by the grants of ``by``; the stop ratio counts from here, a canary's does not."""
    if redrive.pause_code == CANARY_FAILED:
        redrive.canary_passed_at = now
    redrive.skips_unserved = redrive.pause_code == JOB_NOT_SERVED
    is_canary = redrive.canary_size > 0 and redrive.canary_passed_at is None
    redrive.state = RedriveState.CANARY if is_canary else RedriveState.RUNNING
    redrive.started_by, redrive.started_by_name = by.ref, by.name
    redrive.started_by_user = "" if by.user_id is None else str(by.user_id)
    redrive.pause_code = redrive.pause_text = redrive.paused_by_name = ""
    redrive.run_since, redrive.next_due_at = now, now
    if not is_canary:
        # A canary is judged as a whole, also by what became of it during a pause.
        redrive.run_settled, redrive.run_failed = redrive.settled_count, redrive.failed_count


def _check_reason(reason: str) -> None:
    if len(reason) > LONGEST_REASON or "\x00" in reason:
        raise InvalidInput(detail=f"The reason has at most {LONGEST_REASON} characters.", field="reason")
