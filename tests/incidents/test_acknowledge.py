"""Taking an incident: who holds it, and what a second or late request gets."""

from __future__ import annotations

from uuid import uuid4

import pytest

from deadletters.models import DeadLetter
from grants.errors import AccessDenied, IdempotencyKeyReused
from grants.models import AuditEvent
from incidents.errors import AcknowledgementLimitInvalid, IncidentChanged, IncidentNotFound, IncidentResolved
from incidents.models import Incident, IncidentState
from incidents.services import ACKNOWLEDGED, acknowledge_incident, resolve_incident
from tests import factories
from tests.cast import Cast

pytestmark = pytest.mark.django_db


@pytest.fixture
def incident() -> Incident:
    return factories.dead_letter().incident


def test_acknowledging_makes_the_operator_the_holder(incident: Incident, cast: Cast) -> None:
    """A10: who and when are stored, its letters read as acknowledged, and the audit event is written with it."""
    done = acknowledge_incident(incident_id=incident.id, by=cast.olga, key="k")
    incident.refresh_from_db()
    assert (done.state, done.changed, done.idempotent_replay) == ("acknowledged", True, False)
    assert (incident.acknowledged_by, incident.acknowledged_by_name) == (cast.olga.ref, "olga")
    assert done.version == incident.version
    letter = DeadLetter.objects.get()
    assert letter.state == "open"
    assert letter.standing(incident) == "acknowledged"
    event = AuditEvent.objects.get(action=ACKNOWLEDGED)
    assert (event.operator_name, event.target_id) == ("olga", str(incident.id))
    assert "incidents.acknowledge" in event.capability


def test_the_same_key_answers_as_the_first_time_and_changes_nothing(incident: Incident, cast: Cast) -> None:
    """A9, C4"""
    first = acknowledge_incident(incident_id=incident.id, by=cast.olga, key="k")
    again = acknowledge_incident(incident_id=incident.id, by=cast.olga, key="k")
    assert again.idempotent_replay
    assert (again.version, again.state, again.event_id) == (first.version, first.state, first.event_id)
    assert AuditEvent.objects.filter(action=ACKNOWLEDGED).count() == 1


def test_a_key_is_refused_for_another_body_and_for_another_incident(incident: Incident, cast: Cast) -> None:
    """A9"""
    acknowledge_incident(incident_id=incident.id, by=cast.ada, key="k")
    with pytest.raises(IdempotencyKeyReused):
        acknowledge_incident(incident_id=incident.id, by=cast.ada, key="k", take_over=True)
    other = factories.dead_letter(tenant="t-b").incident
    with pytest.raises(IdempotencyKeyReused):
        acknowledge_incident(incident_id=other.id, by=cast.ada, key="k")


def test_a_key_belongs_to_its_verb_and_to_its_operator(incident: Incident, cast: Cast) -> None:
    """A9, C4: another verb or another operator may use the same key for something of their own."""
    acknowledge_incident(incident_id=incident.id, by=cast.ada, key="k")
    by_olga = acknowledge_incident(incident_id=incident.id, by=cast.olga, key="k")
    assert not by_olga.idempotent_replay
    closed = resolve_incident(incident_id=incident.id, by=cast.ada, key="k", code="gone", summary="gone", unrepaired=1)
    assert not closed.idempotent_replay


def test_a_replay_is_not_read_without_the_grant(incident: Incident, cast: Cast) -> None:
    """C4: the grant is asked before the receipt."""
    from grants.models import ScopeUserGrant

    acknowledge_incident(incident_id=incident.id, by=cast.olga, key="k")
    ScopeUserGrant.objects.filter(user_id=cast.olga.user_id, action="incidents.acknowledge").delete()
    with pytest.raises(AccessDenied):
        acknowledge_incident(incident_id=incident.id, by=cast.olga, key="k")


def test_a_second_operator_changes_nothing_unless_they_take_over(incident: Incident, cast: Cast) -> None:
    acknowledge_incident(incident_id=incident.id, by=cast.olga, key="a")
    second = acknowledge_incident(incident_id=incident.id, by=cast.ada, key="b")
    assert (second.changed, second.holder) == (False, "olga")
    third = acknowledge_incident(incident_id=incident.id, by=cast.ada, key="c", take_over=True)
    assert (third.changed, third.holder) == (True, "ada")


def test_the_first_time_of_an_acknowledgement_stays(incident: Incident, cast: Cast) -> None:
    """A10"""
    acknowledge_incident(incident_id=incident.id, by=cast.olga, key="a")
    incident.refresh_from_db()
    taken_at = incident.acknowledged_at
    acknowledge_incident(incident_id=incident.id, by=cast.ada, key="c", take_over=True)
    incident.refresh_from_db()
    assert incident.acknowledged_at == taken_at


def test_a_resolved_incident_cannot_be_acknowledged(incident: Incident, cast: Cast) -> None:
    """A10, C6: refused under the lock, and no audit row of success is left."""
    resolve_incident(incident_id=incident.id, by=cast.ada, key="z", code="gone", summary="gone away", unrepaired=1)
    with pytest.raises(IncidentResolved):
        acknowledge_incident(incident_id=incident.id, by=cast.ada, key="k")
    assert not AuditEvent.objects.filter(action=ACKNOWLEDGED).exists()
    incident.refresh_from_db()
    assert incident.state == IncidentState.RESOLVED


def test_a_stale_version_is_refused_with_the_current_one(incident: Incident, cast: Cast) -> None:
    with pytest.raises(IncidentChanged) as refused:
        acknowledge_incident(incident_id=incident.id, by=cast.ada, key="k", version=incident.version + 1)
    assert refused.value.fields["current"] == {"state": "open", "version": incident.version}


@pytest.mark.parametrize("further", [0, -1, 1_000_001])
def test_a_limit_that_makes_no_sense_is_refused(incident: Incident, cast: Cast, further: int) -> None:
    with pytest.raises(AcknowledgementLimitInvalid):
        acknowledge_incident(incident_id=incident.id, by=cast.ada, key="k", further=further)


def test_without_a_grant_it_is_not_there_and_the_denial_is_audited(incident: Incident, cast: Cast) -> None:
    """B2, GRA-02: the same refusal as for an id that does not exist; nothing changed."""
    for incident_id in (incident.id, uuid4()):
        with pytest.raises(IncidentNotFound):
            acknowledge_incident(incident_id=incident_id, by=cast.bram, key="k")
    incident.refresh_from_db()
    assert incident.state == IncidentState.OPEN
    denied = AuditEvent.objects.filter(verdict="denied", operator_name="bram")
    assert {event.capability for event in denied} == {""}
    assert denied.filter(target_id=str(incident.id)).count() == 1


def test_who_may_read_it_but_not_take_it_is_told_so(incident: Incident, cast: Cast) -> None:
    """B2: 403 for what one may see and not do."""
    with pytest.raises(AccessDenied):
        acknowledge_incident(incident_id=incident.id, by=cast.vera, key="k")
    with pytest.raises(IncidentNotFound):
        acknowledge_incident(incident_id=incident.id, by=cast.nobody, key="k")
