"""Planning a redrive: which jobs are in it, and what its dry run says of each."""

from __future__ import annotations

import json
from uuid import uuid4

import pytest

from deadletters.journal.events import ErrorReport
from deadletters.selectors import LetterFilter
from grants.models import AuditEvent
from opsconsole.core.database import database_now
from repairs.errors import RedriveEmpty, RedriveExists, SelectionDrifted, SelectionInvalid
from repairs.models import ItemState, Redrive, RedriveItem, RedriveState
from repairs.redrives.requests import RedriveChanges, RedriveSelection
from repairs.redrives.services import RedriveMutation
from tests import factories
from tests.cast import Cast
from tests.repairs.redrives.work import create, letters, worker

pytestmark = pytest.mark.django_db

UNDECLARED = ErrorReport(error_class="shop.errors.OutOfStock", text="out of stock", call_site="shop.mail:send")


def classes(made: RedriveMutation) -> dict[str, int]:
    counted: dict[str, int] = json.loads(Redrive.objects.get(id=made.redrive_id).classes)
    return counted


def test_a_small_set_is_frozen_oldest_first_and_judged_at_once(cast: Cast) -> None:
    """C14: the set is what was there, whatever fails afterwards."""
    worker()
    found = letters(3)
    made = create(cast, expected_count=3)
    late = factories.dead_letter()
    redrive = Redrive.objects.get(id=made.redrive_id)
    assert (redrive.state, redrive.total_count, redrive.waiting_count) == (RedriveState.READY, 3, 3)
    items = list(RedriveItem.objects.filter(redrive=redrive).order_by("position"))
    assert [(item.position, item.letter_id) for item in items] == [(n + 1, one.id) for n, one in enumerate(found)]
    assert late.id not in {item.letter_id for item in items}
    assert classes(made) == {"safe": 3}
    event = AuditEvent.objects.get(action="redrive.created")
    assert (event.operator_name, event.target_id, event.tenant) == ("ada", str(redrive.id), "default")


def test_a_set_that_has_changed_since_it_was_looked_at_is_refused_and_leaves_nothing(cast: Cast) -> None:
    letters(3)
    with pytest.raises(SelectionDrifted):
        create(cast, expected_count=2)
    assert not Redrive.objects.exists()
    assert not RedriveItem.objects.exists()


def test_the_same_key_answers_with_the_redrive_that_it_made(cast: Cast) -> None:
    """C4: a double click, a second tab and a repeated request are one redrive."""
    letters(2)
    first = create(cast, key="k")
    second = create(cast, key="k")
    assert (second.redrive_id, second.idempotent_replay) == (first.redrive_id, True)
    assert Redrive.objects.count() == 1


def test_a_second_redrive_of_the_same_jobs_names_the_first(cast: Cast) -> None:
    letters(2)
    first = create(cast)
    with pytest.raises(RedriveExists) as refused:
        create(cast)
    assert str(first.redrive_id) in refused.value.detail
    factories.dead_letter()
    third = create(cast)
    assert classes(third) == {"in_other_redrive": 2, "safe": 1}
    redrive = Redrive.objects.get(id=third.redrive_id)
    assert (redrive.total_count, redrive.skipped_count, redrive.waiting_count) == (3, 2, 1)
    assert set(RedriveItem.objects.filter(redrive=redrive, state=ItemState.SKIPPED).values_list("code", flat=True)) == {
        "in_other_redrive"
    }


def test_nothing_that_waits_is_no_redrive(cast: Cast) -> None:
    with pytest.raises(RedriveEmpty):
        create(cast)


@pytest.mark.parametrize(
    "selection",
    [
        RedriveSelection(),
        RedriveSelection(letters=LetterFilter(tenant="*", source="tests")),
        RedriveSelection(letters=LetterFilter(tenant="default")),
        RedriveSelection(letters=LetterFilter(tenant="default", source="tests", states=("nonsense",))),
        RedriveSelection(letter_ids=(uuid4(),), incident_id=uuid4()),
    ],
)
def test_a_selection_that_is_no_one_set_is_refused(cast: Cast, selection: RedriveSelection) -> None:
    with pytest.raises(SelectionInvalid):
        create(cast, selection)


def test_the_dry_run_tells_every_class(cast: Cast) -> None:
    """Each class by its own cause, told from the rows."""
    worker()
    now = database_now()
    expired = (now - factories.seconds(5)).isoformat()
    factories.dead_letter()
    factories.dead_letter(ambiguous=True)
    factories.dead_letter(UNDECLARED, policies=[])
    factories.dead_letter(headers={"expires": expired})
    factories.dead_letter(chord_id="body")
    factories.dead_letter(task="shop.gone")
    factories.dead_letter(queue="elsewhere")
    factories.dead_letter(body=b'[[], {"stranger": 1}, {}]')
    factories.dead_letter(message_state="missing", policies=[])
    factories.dead_letter(ago=100.0)
    made = create(cast, cut_off=now - factories.seconds(50))
    assert classes(made) == {
        "ambiguous": 1, "arguments_do_not_fit": 1, "chord_member": 1, "expired": 1, "not_captured": 1,
        "not_declared": 1, "not_served": 2, "older_than_cut_off": 1, "safe": 1,
    }  # fmt: skip


def test_a_job_of_several_classes_names_them_all(cast: Cast) -> None:
    worker()
    expired = (database_now() - factories.seconds(5)).isoformat()
    factories.dead_letter(ambiguous=True, headers={"expires": expired})
    create(cast)
    item = RedriveItem.objects.get()
    assert (item.item_class, item.concerns) == ("ambiguous", "ambiguous,expired")


def test_changes_are_judged_by_the_new_name_and_the_new_arguments(cast: Cast) -> None:
    worker(shop__post=json.dumps({"kwonly": ["number"], "varargs": True}))
    factories.dead_letter()
    with_rename = create(cast, changes=RedriveChanges(tasks={"shop.send_mail": "shop.post"}))
    assert classes(with_rename) == {"arguments_do_not_fit": 1}
    factories.dead_letter()
    patched = create(
        cast, changes=RedriveChanges(tasks={"shop.send_mail": "shop.post"}, rename={"order": "number"}),
    )  # fmt: skip
    assert classes(patched) == {"in_other_redrive": 1, "safe": 1}
    factories.dead_letter()
    missing = create(cast, changes=RedriveChanges(remove=("stranger",)))
    assert classes(missing) == {"in_other_redrive": 2, "not_patchable": 1}
