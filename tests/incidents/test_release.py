"""Giving an incident back: who may, and what a second or late request gets."""

from __future__ import annotations

import json

import pytest

from grants.actions import Action
from grants.errors import AccessDenied
from grants.models import AuditEvent, Verdict
from incidents.errors import IncidentChanged, IncidentNotFound, IncidentResolved
from incidents.models import Incident, IncidentState
from incidents.services import RELEASED, acknowledge_incident, release_incident, resolve_incident
from repairs.services import cancel_repair, retry_letter
from tests import factories
from tests.cast import Cast, give, make_operator

pytestmark = pytest.mark.django_db


@pytest.fixture
def incident() -> Incident:
    return factories.dead_letter().incident


def test_the_holder_gives_it_back_and_nobody_has_it(incident: Incident, cast: Cast) -> None:
    acknowledge_incident(incident_id=incident.id, by=cast.olga, key="k", further=5)
    done = release_incident(incident_id=incident.id, by=cast.olga, key="k")
    incident.refresh_from_db()
    assert (done.state, done.changed, done.holder, done.version) == ("open", True, "", incident.version)
    assert (incident.state, incident.acknowledged_by, incident.acknowledged_by_name) == (IncidentState.OPEN, "", "")
    assert (incident.acknowledged_at, incident.acknowledged_until, incident.since_acknowledged) == (None, None, None)
    event = AuditEvent.objects.get(action=RELEASED)
    assert (event.operator_name, json.loads(event.outcome)["heldBy"]) == ("olga", "olga")


def test_whoever_may_acknowledge_gives_back_what_another_has(incident: Incident, cast: Cast) -> None:
    acknowledge_incident(incident_id=incident.id, by=cast.olga, key="k")
    release_incident(incident_id=incident.id, by=cast.ada, key="k")
    event = AuditEvent.objects.get(action=RELEASED)
    assert (event.operator_name, json.loads(event.outcome)["heldBy"]) == ("ada", "olga")
    assert "incidents.acknowledge" in event.capability


def test_what_nobody_has_is_left_as_it_is_and_the_answer_says_so(incident: Incident, cast: Cast) -> None:
    done = release_incident(incident_id=incident.id, by=cast.olga, key="k")
    assert (done.changed, done.version) == (False, incident.version)


def test_the_same_key_answers_as_the_first_time(incident: Incident, cast: Cast) -> None:
    """A9: also once somebody else has it."""
    acknowledge_incident(incident_id=incident.id, by=cast.olga, key="k")
    first = release_incident(incident_id=incident.id, by=cast.olga, key="k")
    acknowledge_incident(incident_id=incident.id, by=cast.ada, key="k")
    again = release_incident(incident_id=incident.id, by=cast.olga, key="k")
    assert (again.idempotent_replay, again.event_id) == (True, first.event_id)
    assert Incident.objects.get().acknowledged_by == cast.ada.ref


def test_what_it_came_back_for_stays_written_on_it(incident: Incident, cast: Cast) -> None:
    """C1: nobody has dealt with that."""
    Incident.objects.update(reopened_reason="repair_failed")
    acknowledge_incident(incident_id=incident.id, by=cast.olga, key="k")
    release_incident(incident_id=incident.id, by=cast.olga, key="k")
    assert Incident.objects.get().reopened_reason == "repair_failed"


def test_who_has_it_by_a_retry_may_give_it_back_without_the_permission_to_take(incident: Incident, cast: Cast) -> None:
    """A12, A9."""
    rita = make_operator("rita")
    give(rita, Action.INSPECT, Action.DEAD_LETTERS_RETRY, tenant="default")
    with pytest.raises(AccessDenied):
        release_incident(incident_id=incident.id, by=rita, key="k")
    sent = retry_letter(letter_id=incident.letters.get().id, by=rita, key="k")
    assert sent.repair_id is not None
    cancel_repair(repair_id=sent.repair_id, by=rita, key="k")
    first = release_incident(incident_id=incident.id, by=rita, key="k")
    assert first.changed
    assert release_incident(incident_id=incident.id, by=rita, key="k").idempotent_replay
    with pytest.raises(AccessDenied):
        release_incident(incident_id=incident.id, by=rita, key="another")


def test_whoever_may_only_read_is_refused_and_audited_and_another_tenant_sees_nothing(
    incident: Incident, cast: Cast
) -> None:
    acknowledge_incident(incident_id=incident.id, by=cast.olga, key="k")
    with pytest.raises(AccessDenied):
        release_incident(incident_id=incident.id, by=cast.vera, key="k")
    with pytest.raises(IncidentNotFound):
        release_incident(incident_id=incident.id, by=cast.bram, key="k")
    assert AuditEvent.objects.filter(verdict=Verdict.DENIED, action="incidents.acknowledge").count() == 2
    assert Incident.objects.get().state == IncidentState.ACKNOWLEDGED


def test_a_closed_one_and_one_that_has_changed_are_refused(incident: Incident, cast: Cast) -> None:
    """C6: without an audit row of success."""
    with pytest.raises(IncidentChanged):
        release_incident(incident_id=incident.id, by=cast.olga, key="k", version=incident.version + 1)
    resolve_incident(
        incident_id=incident.id, by=cast.ada, key="k", code="loss_accepted", summary="of last year", unrepaired=1
    )
    with pytest.raises(IncidentResolved):
        release_incident(incident_id=incident.id, by=cast.olga, key="k")
    assert not AuditEvent.objects.filter(action=RELEASED).exists()
