"""Closing an incident by hand: what it takes, and what it never hides."""

from __future__ import annotations

import json

import pytest

from deadletters.models import DeadLetter
from grants.errors import AccessDenied
from grants.models import AuditEvent
from incidents.errors import IncidentHasUnresolvedLetters, IncidentResolved, ResolutionInvalid
from incidents.models import EpisodeEnd, Incident, IncidentState
from incidents.services import RESOLVED, resolve_incident
from tests import factories
from tests.cast import Cast

pytestmark = pytest.mark.django_db


@pytest.fixture
def incident() -> Incident:
    return factories.dead_letter().incident


def test_closing_without_repairing_closes_its_letters_through_it(incident: Incident, cast: Cast) -> None:
    """A11, C18: one row is written, whatever the number of letters; each of them reads as resolved."""
    factories.record(*[factories.failure() for _ in range(4)])
    done = resolve_incident(
        incident_id=incident.id, by=cast.ada, key="k", code="fixed_upstream", summary="  it was them  ", unrepaired=5
    )
    incident.refresh_from_db()
    assert (done.state, done.changed) == ("resolved", True)
    assert incident.resolution_summary == "[fixed_upstream] it was them"
    event = AuditEvent.objects.get(action="operations.incident_resolved")
    assert (event.reason, json.loads(event.outcome)["unrepaired"]) == ("it was them", 5)
    assert (incident.unresolved_count, incident.resolved_by) == (0, cast.ada.ref)
    assert DeadLetter.objects.unresolved().count() == 0
    assert {letter.standing(incident) for letter in DeadLetter.objects.all()} == {"resolved"}
    assert EpisodeEnd.objects.get().unrepaired_count == 5
    assert AuditEvent.objects.filter(action=RESOLVED).count() == 1


def test_unrepaired_letters_have_to_be_counted(incident: Incident, cast: Cast) -> None:
    for number in (None, 0, 2):
        with pytest.raises(IncidentHasUnresolvedLetters) as refused:
            resolve_incident(
                incident_id=incident.id, by=cast.ada, key="k", code="gone", summary="gone", unrepaired=number
            )
        assert refused.value.fields == {"unresolved": 1}
    incident.refresh_from_db()
    assert incident.state == IncidentState.OPEN


def test_closing_unrepaired_takes_its_own_capability(incident: Incident, cast: Cast) -> None:
    """Holding incidents.resolve alone is not enough while jobs are unrepaired; the denial is audited."""
    with pytest.raises(AccessDenied):
        resolve_incident(incident_id=incident.id, by=cast.olga, key="k", code="gone", summary="gone", unrepaired=1)
    denied = AuditEvent.objects.get(verdict="denied")
    assert denied.action == "incidents.close-unrepaired"
    incident.refresh_from_db()
    assert incident.state == IncidentState.OPEN


@pytest.mark.parametrize(
    ("code", "summary"),
    [
        ("Fixed", "three letters"),
        ("1st", "three letters"),
        ("a", "three letters"),
        ("fixed-upstream", "three letters"),
        ("a" * 65, "three letters"),
        ("gone\n", "three letters"),
        ("göne", "three letters"),
        ("gone", "  no  "),
        ("gone", "x" * 2_001),
    ],
)
def test_a_resolution_that_says_nothing_is_refused(incident: Incident, cast: Cast, code: str, summary: str) -> None:
    """A11"""
    with pytest.raises(ResolutionInvalid):
        resolve_incident(incident_id=incident.id, by=cast.ada, key="k", code=code, summary=summary, unrepaired=1)


def test_resolving_again_with_the_same_words_changes_nothing(incident: Incident, cast: Cast) -> None:
    """C7"""
    resolve_incident(incident_id=incident.id, by=cast.ada, key="a", code="gone", summary="gone away", unrepaired=1)
    again = resolve_incident(incident_id=incident.id, by=cast.ada, key="b", code="gone", summary="gone away")
    assert (again.changed, again.idempotent_replay) == (False, False)
    assert EpisodeEnd.objects.count() == 1


def test_resolving_again_with_other_words_is_refused(incident: Incident, cast: Cast) -> None:
    """C7: the first resolution is not overwritten."""
    resolve_incident(incident_id=incident.id, by=cast.ada, key="a", code="gone", summary="gone away", unrepaired=1)
    with pytest.raises(IncidentResolved):
        resolve_incident(incident_id=incident.id, by=cast.ada, key="b", code="other", summary="other words")
    incident.refresh_from_db()
    assert incident.resolution_code == "gone"
