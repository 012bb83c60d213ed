"""What closing an incident leaves to be written, and counts that are not the truth (C18)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deadletters.models import DeadLetter
from grants.models import AuditEvent
from incidents.models import EpisodeEnd, Incident, IncidentState
from incidents.services import resolve_incident
from repairs.models import SweepActionType, SweepRepair
from repairs.reconciliation import closing, sweeping
from repairs.reconciliation.closing import Counted, CountVerdict, decide_count
from tests import factories
from tests.cast import Cast
from tests.repairs.reconciliation.rows import counts, sweep

pytestmark = pytest.mark.django_db


def letters(count: int) -> list[DeadLetter]:
    return [factories.dead_letter() for _ in range(count)]


def close(cast: Cast, incident: Incident, unrepaired: int, key: str = "k") -> None:
    resolve_incident(
        incident_id=incident.id, by=cast.ada, key=key, code="loss_accepted", summary="by hand", unrepaired=unrepaired
    )


def test_the_letters_of_a_closed_incident_are_marked_as_closed_with_it(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C18: in pages, each with the moment at which the incident was closed; once."""
    monkeypatch.setattr(sweeping.Sweeping.size, "__defaults__", (2,))
    incident = letters(5)[0].incident
    close(cast, incident, 5)
    run = sweep("closed_letters")
    assert (counts(run), run.incident_count) == ((5, 5, 0), 1)
    end = EpisodeEnd.objects.get()
    assert set(DeadLetter.objects.values_list("closed_at", "state")) == {(end.resolved_at, "open")}
    assert Incident.objects.get().stamped_episode == 1
    assert counts(sweep("closed_letters")) == (0, 0, 0)


def test_a_letter_that_came_back_is_not_marked(cast: Cast) -> None:
    """C3: the ended episode's letters are, that of the running one is not."""
    first, second = letters(2)
    close(cast, first.incident, 2)
    factories.record(factories.failure(task_id=second.task_id, retries=1))
    incident = Incident.objects.get()
    assert (incident.state, incident.episode) == (IncidentState.OPEN, 2)
    assert sweep("closed_letters").repaired_count == 1
    first.refresh_from_db()
    second.refresh_from_db()
    assert first.closed_at is not None
    assert second.closed_at is None
    incident.refresh_from_db()
    assert incident.stamped_episode == 1


def test_counts_that_are_the_truth_are_left_alone() -> None:
    """C9: every incident is looked at, none is changed, none is locked."""
    letters(3)
    version = Incident.objects.get().version
    run = sweep("closed_letters")
    assert (run.scanned_count, run.repaired_count, run.incident_count) == (1, 0, 0)
    assert Incident.objects.get().version == version


@pytest.mark.parametrize("kept", [1, 7])
def test_a_count_that_is_not_the_truth_is_corrected_and_audited(kept: int) -> None:
    letters(3)
    Incident.objects.update(unresolved_count=kept)
    run = sweep("closed_letters")
    assert (run.repaired_count, run.incident_count) == (1, 1)
    incident = Incident.objects.get()
    assert (incident.unresolved_count, incident.state) == (3, IncidentState.OPEN)
    event = AuditEvent.objects.get(action=closing.COUNT_CORRECTED)
    assert json.loads(event.outcome) == {"found": 3, "kept": kept, "run": str(run.id)}
    assert (event.operator_kind, event.tenant) == ("system", "default")
    row = SweepRepair.objects.get()
    assert (row.action_type, row.entity_id) == (SweepActionType.CORRECT_COUNT, str(incident.id))
    assert sweep("closed_letters").repaired_count == 0


def test_an_incident_of_which_nothing_is_left_is_closed_as_it_would_have_been() -> None:
    (letter,) = letters(1)
    DeadLetter.objects.filter(id=letter.id).update(state="repaired", closed_at=letter.last_seen_at)
    assert sweep("closed_letters").repaired_count == 1
    incident = Incident.objects.get()
    assert (incident.state, incident.unresolved_count, incident.resolution_code) == ("resolved", 0, "repaired")
    assert EpisodeEnd.objects.count() == 1
    assert AuditEvent.objects.filter(action="operations.incident_resolved").count() == 1


def test_the_next_run_goes_on_where_the_last_one_stopped_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """STYLE 5: by key, and round: a run looks at some, the next at others, and none is left out."""
    monkeypatch.setattr(closing, "ROUNDS", 1)
    monkeypatch.setattr(closing, "COUNTED_AT_ONCE", 2)
    for number in range(5):
        factories.dead_letter(task=f"shop.task{number}")
    seen = []
    for _ in range(3):
        run = sweep("closed_letters")
        seen.append((run.scanned_count, bool(run.cursor)))
    assert seen == [(2, True), (2, True), (1, False)]
    assert sweep("closed_letters").scanned_count == 2


@pytest.mark.parametrize(
    ("kept", "found", "is_resolved", "verdict"),
    [
        (2, 2, False, CountVerdict.LEAVE),
        (1, 2, False, CountVerdict.CORRECT),
        (3, 2, False, CountVerdict.CORRECT),
        (1, 0, False, CountVerdict.CLOSE),
        (0, 0, False, CountVerdict.CLOSE),
        (0, 5, True, CountVerdict.LEAVE),
    ],
)
def test_what_is_decided_about_a_count(kept: int, found: int, is_resolved: bool, verdict: CountVerdict) -> None:
    assert decide_count(Counted(kept=kept, found=found), is_resolved=is_resolved) is verdict


@pytest.mark.django_db(transaction=True)
def test_counts_that_change_while_they_are_compared_are_not_corrected() -> None:
    """C9: recorders go on meanwhile; what only looks wrong is counted again under the lock."""
    from tests.repairs.test_retry import race

    letters(3)

    def work(index: int) -> Any:
        if index == 0:
            return [sweep("closed_letters").repaired_count for _ in range(5)]
        return [factories.dead_letter().id for _ in range(20)]

    corrected, _made = race(2, work)
    assert corrected == [0] * 5
    incident = Incident.objects.get()
    assert incident.unresolved_count == DeadLetter.objects.unresolved().count() == 23
