"""How a letter is closed, and its incident with its last one: the same for every way a repair can end well."""

from __future__ import annotations

from datetime import datetime

from deadletters.models import DeadLetter, LetterState
from grants import audit
from grants.access import SYSTEM_CAPABILITY
from grants.audit import AuditEntry
from grants.operators import SYSTEM
from incidents.models import Incident
from incidents.services import RESOLVED, save_incident

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
