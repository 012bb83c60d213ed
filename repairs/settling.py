"""How a letter is closed, and its incident with its last one: the same for every way a repair can end well."""

from __future__ import annotations

from datetime import datetime

from deadletters.models import DeadLetter, LetterState
from deadletters.outcome import OutcomeClass
from deadletters.recorder import incident_event
from grants import audit
from grants.access import SYSTEM_CAPABILITY
from grants.audit import AuditEntry
from grants.operators import SYSTEM
from incidents.models import Incident, IncidentState
from incidents.services import RESOLVED, save_incident
from repairs.models import ActionState, RepairAction

CLOSING_CODES = {
    LetterState.REPAIRED: "repaired",
    LetterState.ALREADY_DONE: "already_done",
    LetterState.DISCARDED: "discarded",
    LetterState.OVERTAKEN: "repaired",
}


def settle_letter(letter: DeadLetter, incident: Incident, *, state: LetterState, at: datetime) -> bool:
    """Close a locked letter; with the last unresolved one its locked incident closes by itself (C11).

    Returns whether the incident was closed. Everything happens in the caller's transaction.
    """
    was_unresolved = not letter.is_closed(incident)
    letter.state = state
    letter.closed_at = at
    letter.save(update_fields=["state", "closed_at"])
    if not was_unresolved:
        return False
    incident.unresolved_count -= 1
    if incident.unresolved_count:
        save_incident(incident)
        return False
    code = CLOSING_CODES[state]
    end = incident.close(
        by=SYSTEM.ref, name=SYSTEM.name, at=at, code=code, summary=f"[{code}] Every job of it is settled."
    )
    save_incident(incident)
    end.save(force_insert=True)
    audit.record_many(
        [
            AuditEntry(
                action=RESOLVED,
                operator=SYSTEM,
                capability=SYSTEM_CAPABILITY,
                resource=incident.resource,
                key=f"closed:{incident.id}:{incident.episode}",
                outcome={"code": code, "episode": incident.episode, "number": incident.number, "state": "resolved"},
            )
        ],
        at=at,
    )
    return True


def fail_repair(action: RepairAction, letter: DeadLetter, incident: Incident, *, code: str, text: str) -> None:
    """Mark a locked live repair failed without an occurrence: its letter waits for a decision again (C11).

    An acknowledged incident opens again, as it does for every failed repair (C1), with its audit event (C8).
    """
    action.state = ActionState.FAILED
    action.settled_at = incident.locked_at
    action.error_code = code
    action.error_text = text
    action.save(update_fields=["state", "settled_at", "error_code", "error_text"])
    if letter.state == LetterState.RETRYING:
        letter.state = LetterState.OPEN
        letter.save(update_fields=["state"])
    if incident.state == IncidentState.ACKNOWLEDGED and not letter.is_closed(incident):
        held_by = incident.break_acknowledgement("repair_failed")
        save_incident(incident)
        event = incident_event(incident, "repair_failed", incident.locked_at, held_by=held_by)
        audit.record_many([event], at=incident.locked_at)


def give_up_repair(action: RepairAction, letter: DeadLetter, incident: Incident, *, text: str) -> None:
    """Mark a locked started repair failed of which no answer is to be expected: it may already have happened."""
    letter.outcome_class = OutcomeClass.AMBIGUOUS
    letter.outcome_reason = "its repair had started and nobody knows how it ended"
    letter.save(update_fields=["outcome_class", "outcome_reason"])
    fail_repair(action, letter, incident, code="no_answer", text=text)
