"""Who may do what to a redrive, and the second person."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from deadletters.models import DeadLetter
from grants.access import authorise
from grants.actions import Action
from grants.errors import AccessDenied
from grants.models import AuditEvent, ScopeUserGrant
from grants.operators import Operator
from grants.resources import Resource
from grants.service import service
from incidents.errors import IncidentNotFound
from repairs.errors import (
    LetterNotFound,
    RedriveInvalid,
    RedriveNotApproved,
    RedriveNotFound,
    RedriveOwnApproval,
    RedriveStanding,
)
from repairs.models import Redrive, RedriveItem
from repairs.redrives.judging import judge_page
from repairs.redrives.requests import RedriveChanges, RedriveSelection
from repairs.redrives.selectors import RedriveFilter, get_redrive, list_items, list_redrives
from repairs.redrives.services import (
    RedriveMutation,
    approve_redrive,
    cancel_redrive,
    freeze_redrive,
    pause_redrive,
    resume_redrive,
    retry_failed_items,
    start_redrive,
)
from tests import factories
from tests.cast import Cast, give
from tests.repairs.redrives.work import FAST, counted, create, letter_states, letters, step, whole, worker

pytestmark = pytest.mark.django_db

DECISIONS = (approve_redrive, start_redrive, pause_redrive, resume_redrive, cancel_redrive, retry_failed_items)


@pytest.mark.parametrize("decide", DECISIONS)
def test_nobody_decides_about_a_redrive_without_its_grant(cast: Cast, decide: Any) -> None:
    """B2: denied and audited; who may not even see it is told that there is none."""
    worker()
    letters(1)
    made = create(cast)
    give(cast.bram, Action.REDRIVE_RUN, tenant="t-b")
    for who, refusal in ((cast.vera, AccessDenied), (cast.bram, RedriveNotFound), (cast.nobody, RedriveNotFound)):
        with pytest.raises(refusal):
            decide(redrive_id=made.redrive_id, by=who, key="k")
    assert AuditEvent.objects.filter(action="redrive.run", verdict="denied").count() == 3


@pytest.mark.parametrize("decide", DECISIONS)
def test_a_redrive_that_is_not_there_is_not_found(cast: Cast, decide: Any) -> None:
    with pytest.raises(RedriveNotFound):
        decide(redrive_id=uuid4(), by=cast.ada, key="k")


def selections(incident: Any, letter: Any) -> list[tuple[RedriveSelection, type[Exception]]]:
    return [
        (whole(), AccessDenied),
        (RedriveSelection(incident_id=incident), IncidentNotFound),
        (RedriveSelection(letter_ids=(letter,)), LetterNotFound),
    ]


def test_nobody_plans_what_they_may_not_run(cast: Cast) -> None:
    letter = factories.dead_letter()
    give(cast.bram, Action.REDRIVE_RUN, tenant="t-b")
    for selection, refusal in selections(letter.incident_id, letter.id):
        with pytest.raises(refusal):
            create(cast, selection, by=cast.bram)
    assert not Redrive.objects.exists()


def test_a_grant_for_one_actor_plans_that_actors_jobs_alone(cast: Cast) -> None:
    mine = factories.dead_letter(actor_type="order", actor_id="7")
    other = factories.dead_letter(actor_type="order", actor_id="8")
    give(cast.nobody, Action.REDRIVE_RUN, Action.INSPECT, actor_type="order", actor_id="7")
    made = create(cast, RedriveSelection(letter_ids=(mine.id,)), by=cast.nobody)
    assert list(RedriveItem.objects.values_list("letter_id", flat=True)) == [mine.id]
    assert get_redrive(cast.nobody, made.redrive_id).redrive.actor_id == "7"
    with pytest.raises(LetterNotFound):
        create(cast, RedriveSelection(letter_ids=(mine.id, other.id)), by=cast.nobody)
    with pytest.raises(AccessDenied):
        create(cast, by=cast.nobody)


def test_changing_what_is_sent_takes_its_own_capability(cast: Cast) -> None:
    worker()
    letters(1)
    give(cast.olga, Action.REDRIVE_RUN, tenant="default")
    changes = RedriveChanges(tasks={"shop.send_mail": "shop.post"})
    with pytest.raises(AccessDenied):
        create(cast, by=cast.olga, changes=changes)
    give(cast.olga, Action.REDRIVE_PATCH, tenant="default")
    assert create(cast, by=cast.olga, changes=changes).total == 1


def patched(cast: Cast) -> Redrive:
    worker(shop__post=json.dumps({"positional": ["to", "order"], "required": 1}))
    letters(2)
    changes = RedriveChanges(tasks={"shop.send_mail": "shop.post"})
    return Redrive.objects.get(id=create(cast, changes=changes, pace=replace(FAST, max_outstanding=1)).redrive_id)


def test_changed_messages_are_let_run_by_who_may_change_messages(cast: Cast) -> None:
    """Whoever starts it sends what somebody else has written: it takes the same grant."""
    redrive = patched(cast)
    give(cast.olga, Action.REDRIVE_RUN, tenant="default")
    with pytest.raises(AccessDenied):
        start_redrive(redrive_id=redrive.id, by=cast.olga, key="s")
    start_redrive(redrive_id=redrive.id, by=cast.ada, key="s")
    pause_redrive(redrive_id=redrive.id, by=cast.olga, key="p")
    with pytest.raises(AccessDenied):
        resume_redrive(redrive_id=redrive.id, by=cast.olga, key="r")
    assert AuditEvent.objects.filter(action="redrive.patch", verdict="denied", operator_name="olga").exists()
    give(cast.olga, Action.REDRIVE_PATCH, tenant="default")
    resume_redrive(redrive_id=redrive.id, by=cast.olga, key="r")
    assert step(redrive).planned == 1


def test_a_redrive_pauses_once_its_starter_may_change_messages_no_more(cast: Cast) -> None:
    """B2: grants are asked with every page, each of those that it took to start."""
    redrive = patched(cast)
    give(cast.olga, Action.REDRIVE_RUN, Action.REDRIVE_PATCH, tenant="default")
    start_redrive(redrive_id=redrive.id, by=cast.olga, key="s")
    ScopeUserGrant.objects.filter(user_id=cast.olga.user_id, permission__codename="redrive_patch").delete()
    assert step(redrive).planned == 0
    redrive.refresh_from_db()
    assert (redrive.state, redrive.pause_code) == ("paused", "grant_revoked")


def test_reads_show_what_one_may_inspect(cast: Cast) -> None:
    worker()
    letters(3)
    made = create(cast)
    assert [row.id for row in list_redrives(cast.vera, RedriveFilter()).rows] == [made.redrive_id]
    assert list_redrives(cast.bram, RedriveFilter()).rows == []
    assert [item.position for item in list_items(cast.vera, made.redrive_id, limit=2).rows] == [3, 2]
    page = list_items(cast.vera, made.redrive_id, item_class="safe", limit=2)
    assert [
        item.position for item in list_items(cast.vera, made.redrive_id, item_class="safe", cursor=page.next).rows
    ] == [1]
    assert list_items(cast.vera, made.redrive_id, state="failed").rows == []
    with pytest.raises(RedriveNotFound):
        get_redrive(cast.bram, made.redrive_id)
    progress = get_redrive(cast.vera, made.redrive_id)
    assert ([(one.item_class, one.count) for one in progress.classes], progress.percent) == ([("safe", 3)], 0)


@pytest.fixture
def big(settings: Any) -> None:
    settings.OPSCONSOLE_REDRIVE_APPROVAL_ABOVE = 1


def second(cast: Cast) -> Operator:
    give(cast.olga, Action.REDRIVE_RUN, tenant="default")
    return cast.olga


@pytest.mark.usefixtures("big")
def test_a_large_redrive_starts_only_once_somebody_else_has_approved_it(cast: Cast) -> None:
    """Maker and checker are two people, whichever token one of them uses."""
    worker()
    letters(2)
    made = create(cast)
    with pytest.raises(RedriveNotApproved):
        start_redrive(redrive_id=made.redrive_id, by=cast.ada, key="s")
    with pytest.raises(RedriveOwnApproval):
        approve_redrive(redrive_id=made.redrive_id, by=cast.ada, key="a")
    other = second(cast)
    approve_redrive(redrive_id=made.redrive_id, by=other, key="a")
    with pytest.raises(RedriveStanding):
        approve_redrive(redrive_id=made.redrive_id, by=other, key="b")
    start_redrive(redrive_id=made.redrive_id, by=cast.ada, key="s")
    redrive = Redrive.objects.get()
    assert (redrive.approved_by_name, redrive.started_by_name) == ("olga", "ada")
    assert step(redrive).planned >= 0


@pytest.mark.usefixtures("big")
def test_a_small_one_needs_nobody(cast: Cast) -> None:
    worker()
    letters(1)
    made = create(cast)
    with pytest.raises(RedriveStanding):
        approve_redrive(redrive_id=made.redrive_id, by=second(cast), key="a")
    start_redrive(redrive_id=made.redrive_id, by=cast.ada, key="s")


def test_low_priority_needs_its_queue(cast: Cast, settings: Any) -> None:
    letters(1)
    with pytest.raises(RedriveInvalid):
        create(cast, low_priority=True)
    settings.OPSCONSOLE_REDRIVE_QUEUE = "slow"
    create(cast, low_priority=True)
    assert Redrive.objects.get().target_queue == "slow"


def test_letters_on_hold_are_sent_on_by_who_may_release_them_and_go_back_to_it(cast: Cast) -> None:
    """What a hold's release calls: letters of another state, under another capability."""
    worker()
    found = letters(3)
    DeadLetter.objects.update(state="held")
    give(cast.olga, Action.DEAD_LETTERS_HOLD, tenant="default")

    @service
    def release() -> RedriveMutation:
        resource = Resource(tenant="default")
        return freeze_redrive(
            DeadLetter.objects.filter(state="held"), by=cast.olga, key="h", digest="",
            capability=authorise(cast.olga, Action.DEAD_LETTERS_HOLD, resource), resource=resource, source="tests",
            selection={"hold": "h1"}, pace=FAST, letter_state="held", action=Action.DEAD_LETTERS_HOLD,
        )  # fmt: skip

    made = release()
    assert judge_page(redrive_id=made.redrive_id) is False
    start_redrive(redrive_id=made.redrive_id, by=cast.olga, key="s")
    redrive = Redrive.objects.get()
    assert step(redrive).planned == 3
    assert letter_states([one.id for one in found]) == ["retrying"] * 3
    cancel_redrive(redrive_id=redrive.id, by=cast.olga, key="c")
    assert letter_states([one.id for one in found]) == ["held"] * 3
    assert counted(redrive) == {"cancelled": 3}
