"""Reads about redrives: the list, one with its progress, its items by class or result, and samples of its changes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from uuid import UUID

from deadletters import conf as letters_conf
from deadletters.models import DeadLetter
from grants.actions import Action
from grants.operators import Operator
from grants.reading import authorise_read_of, authorise_scope
from opsconsole.core.database import recent_database_now
from opsconsole.core.errors import OpsError
from opsconsole.core.keyset import Page, Source, read_page
from opsconsole.core.problems import FieldError, InvalidFields
from opsconsole.core.redaction import decode_body
from opsconsole.core.sealing import SealError
from repairs.errors import RedriveNotFound
from repairs.models import (
    REDRIVE_ENDED,
    ItemState,
    Redrive,
    RedriveClass,
    RedriveItem,
    RedriveState,
)
from repairs.redrives.changing import NotPatchable, changed_body, changed_task
from repairs.redrives.requests import ANSWERS, AnswerKind, RedriveAnswer, RedriveChanges, unpack_answers
from repairs.redrives.services import changes_of
from repairs.refusals import open_letter_message

STATES = tuple(RedriveState.values)
ITEM_STATES = tuple(ItemState.values)
CLASSES = tuple(RedriveClass.values)
SAMPLES = 5
SAMPLED_FROM = 2_000
SAMPLED_TASKS = 10
PREVIEW = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RedriveFilter:
    """Which redrives are wanted; an empty field wants all. ``states`` may hold ``unfinished``."""

    states: tuple[str, ...] = ()
    tenant: str | None = None
    source: str | None = None
    incident: UUID | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassCount:
    """One class of a dry run: how many jobs, what may be answered, and what was."""

    item_class: RedriveClass
    count: int
    answers: tuple[AnswerKind, ...] = ()
    answer: RedriveAnswer | None = None

    @property
    def is_answerable(self) -> bool:
        return bool(self.answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedriveProgress:
    """A redrive as it stands. ``seconds_left`` is an estimate, ``None`` while there is nothing to tell it by."""

    redrive: Redrive
    classes: tuple[ClassCount, ...]
    seconds_left: int | None = None

    @property
    def done(self) -> int:
        """Jobs with a result of whatever kind."""
        return self.redrive.total_count - self.redrive.waiting_count - self.redrive.outstanding_count

    @property
    def percent(self) -> int:
        return self.done * 100 // self.redrive.total_count if self.redrive.total_count else 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RedriveSample:
    """One job before and after a redrive's changes, redacted; ``trouble`` says why there is no after."""

    letter_id: UUID
    task_before: str
    task_after: str
    arguments_before: str
    arguments_after: str
    trouble: str = ""


def list_redrives(
    operator: Operator, wanted: RedriveFilter, *, limit: int = 50, cursor: str | None = None
) -> Page[Redrive]:
    """Return a page of the redrives that ``operator`` may see, newest first.

    Raises ``AccessDenied`` for a tenant that they may not inspect, ``InvalidFields`` for a bad cursor.
    """
    authorise_scope(operator, Action.INSPECT, tenant=wanted.tenant)
    rows = Redrive.objects.visible_to(operator, Action.INSPECT)
    if wanted.tenant not in (None, "*"):
        rows = rows.filter(tenant=wanted.tenant)
    if wanted.source is not None:
        rows = rows.filter(source=wanted.source)
    if wanted.incident is not None:
        rows = rows.filter(incident_id=wanted.incident)
    if wanted.states:
        unfinished = tuple(state for state in STATES if state not in REDRIVE_ENDED)
        states = {one for name in wanted.states for one in (unfinished if name == "unfinished" else (name,))}
        rows = rows.filter(state__in=sorted(states))
    return read_page("redrives", [[Source(rows, ("id",))]], limit=limit, cursor=cursor)


def get_redrive(operator: Operator, redrive_id: UUID) -> RedriveProgress:
    """Return one redrive with its classes and its estimate; raises ``RedriveNotFound``, audited."""
    return progress_of(_find(operator, redrive_id))


def progress_of(redrive: Redrive) -> RedriveProgress:
    """Return what is told of a redrive that its reader may see."""
    counted = json.loads(redrive.classes)
    answers = unpack_answers(redrive.answers)
    classes = tuple(
        ClassCount(
            item_class=RedriveClass(name),
            count=counted[name],
            answers=ANSWERS.get(RedriveClass(name), ()),
            answer=answers.get(name),
        )
        for name in RedriveClass.values
        if counted.get(name)
    )
    return RedriveProgress(redrive=redrive, classes=classes, seconds_left=_seconds_left(redrive))


def _seconds_left(redrive: Redrive) -> int | None:
    """Estimate by what has been answered since it runs, and by the chosen rate while that is nothing."""
    left = redrive.waiting_count + redrive.outstanding_count
    if redrive.state not in (RedriveState.CANARY, RedriveState.RUNNING) or redrive.run_since is None:
        return None
    by_rate = redrive.waiting_count / redrive.rate_per_second
    answered = redrive.settled_count - redrive.run_settled
    ran = (recent_database_now() - redrive.run_since).total_seconds()
    if answered < 1 or ran <= 0:
        return int(by_rate) + 1
    return int(max(left * ran / answered, by_rate)) + 1


def list_items(
    operator: Operator,
    redrive_id: UUID,
    *,
    item_class: str | None = None,
    state: str | None = None,
    limit: int = 100,
    cursor: str | None = None,
) -> Page[RedriveItem]:
    """Return a page of a redrive's items, the newest job first, of one class or of one result.

    Raises ``RedriveNotFound``, audited, for one not visible, or ``InvalidFields``.
    """
    redrive = _find(operator, redrive_id)
    return items_of(redrive, item_class=item_class, state=state, limit=limit, cursor=cursor)


def items_of(
    redrive: Redrive,
    *,
    item_class: str | None = None,
    state: str | None = None,
    limit: int = 100,
    cursor: str | None = None,
) -> Page[RedriveItem]:
    """Do what ``list_items`` does, for who is known to see the redrive."""
    rows = RedriveItem.objects.filter(redrive=redrive).select_related("letter", "letter__incident", "repair")
    if item_class is not None:
        if item_class not in CLASSES:
            raise InvalidFields([FieldError(parameter="class", detail="There is no such class.")])
        rows = rows.filter(item_class=item_class)
    if state is not None:
        if state not in ITEM_STATES:
            raise InvalidFields([FieldError(parameter="state", detail="There is no such state of an item.")])
        rows = rows.filter(state=state)
    # Whoever may see the redrive may see each of its jobs: it has the tenant of all and the actor, if there is but one.
    source: Source[RedriveItem] = Source(rows, ("position",))
    return read_page(f"redrive:{redrive.id.hex}:{item_class}:{state}", [[source]], limit=limit, cursor=cursor)


def redrive_samples(operator: Operator, redrive_id: UUID, *, count: int = SAMPLES) -> list[RedriveSample]:
    """Return the oldest jobs of each task of a redrive as they were and as they would be sent, redacted.

    At most ``count`` of each of ten tasks. Raises ``RedriveNotFound``, audited, for one not visible.
    """
    return samples_of(_find(operator, redrive_id), count=count)


def samples_of(redrive: Redrive, *, count: int = SAMPLES) -> list[RedriveSample]:
    """Do what ``redrive_samples`` does, for who is known to see the redrive."""
    try:
        changes = changes_of(redrive)
    except SealError:
        changes = RedriveChanges()
    items = RedriveItem.objects.filter(redrive=redrive).order_by("position")
    looked_at = items.values_list("letter_id", "letter__job_type")[:SAMPLED_FROM]
    chosen: dict[str, list[UUID]] = {}
    for letter_id, job_type in looked_at:
        if job_type in chosen or len(chosen) < SAMPLED_TASKS:
            of_task = chosen.setdefault(job_type, [])
            if len(of_task) < count:
                of_task.append(letter_id)
    ids = [letter_id for of_task in chosen.values() for letter_id in of_task]
    letters = DeadLetter.objects.filter(id__in=ids).select_related("message").order_by("first_seen_at", "id")
    return [_sample(letter, changes) for letter in letters]


def _sample(letter: DeadLetter, changes: RedriveChanges) -> RedriveSample:
    redactor = letters_conf.redactor()
    after = changed_task(letter.job_type, changes)
    try:
        raw = open_letter_message(letter)
        decoded = decode_body(raw.body, raw.content_type or "", raw.content_encoding or "")
        before = redactor.preview(decoded.args, decoded.kwargs, limit=PREVIEW) if not decoded.error else ""
        changed = decode_body(changed_body(raw, changes), raw.content_type or "", raw.content_encoding or "")
        sent = redactor.preview(changed.args, changed.kwargs, limit=PREVIEW) if not changed.error else ""
    except (OpsError, NotPatchable) as refusal:
        return RedriveSample(
            letter_id=letter.id, task_before=letter.job_type, task_after=after,
            arguments_before=letter.payload_preview, arguments_after="", trouble=str(refusal),
        )  # fmt: skip
    return RedriveSample(
        letter_id=letter.id, task_before=letter.job_type, task_after=after, arguments_before=before,
        arguments_after=sent,
    )  # fmt: skip


def _find(operator: Operator, redrive_id: UUID) -> Redrive:
    authorise_read_of(operator, Action.INSPECT, Redrive.objects.scope(redrive_id), RedriveNotFound())
    redrive: Redrive | None = Redrive.objects.filter(id=redrive_id).select_related("incident", "retry_of").first()
    if redrive is None:
        raise RedriveNotFound
    return redrive
