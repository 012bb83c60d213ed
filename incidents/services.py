"""What a person does to an incident: take it, give it back, close it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from grants import audit
from grants.access import Capability, can
from grants.actions import Action
from grants.models import REASON_LENGTH, AuditEvent
from grants.operators import Operator
from grants.resources import Resource
from grants.service import service
from grants.targets import authorise_target
from incidents.errors import (
    AcknowledgementLimitInvalid,
    IncidentChanged,
    IncidentHasUnresolvedLetters,
    IncidentNotFound,
    IncidentResolved,
    ResolutionInvalid,
)
from incidents.models import Incident, IncidentState
from opsconsole.core.canonical_json import JsonValue

ACKNOWLEDGED = "operations.incident_acknowledged"
RELEASED = "operations.incident_released"
RESOLVED = "operations.incident_resolved"
CODE = re.compile(r"[a-z][a-z0-9_]{1,63}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentMutation:
    """What a request did to an incident, or, as a replay, what the first one of its key did."""

    incident_id: UUID
    state: str
    changed: bool
    version: int
    holder: str
    event_id: UUID | None = None
    idempotent_replay: bool = False

    def outcome(self) -> dict[str, Any]:
        return {"changed": self.changed, "holder": self.holder, "state": self.state, "version": self.version}

    @classmethod
    def from_receipt(cls, receipt: AuditEvent, incident_id: UUID) -> IncidentMutation:
        stored = json.loads(receipt.outcome)
        return cls(
            incident_id=incident_id,
            state=str(stored["state"]),
            changed=bool(stored["changed"]),
            version=int(stored["version"]),
            holder=str(stored["holder"]),
            event_id=receipt.id,
            idempotent_replay=True,
        )


@service
def acknowledge_incident(
    *,
    incident_id: UUID,
    by: Operator,
    key: str,
    version: int | None = None,
    take_over: bool = False,
    further: int | None = None,
) -> IncidentMutation:
    """Make ``by`` the incident's holder (A10, C6).

    A second acknowledgement by its holder, or by somebody else without ``take_over``, changes nothing and says so.
    ``further`` opens it again once that many more failures were seen. ``version`` is what the caller looked at.
    Locks the incident; writes one audit event. Raises ``IncidentNotFound``, ``AccessDenied``,
    ``IdempotencyKeyReused``, ``IncidentChanged``, ``IncidentResolved``, ``AcknowledgementLimitInvalid``.
    """
    if further is not None and not 1 <= further <= 1_000_000:
        raise AcknowledgementLimitInvalid
    scope = Incident.objects.scope(incident_id)
    capability = authorise_target(by, Action.INCIDENTS_ACKNOWLEDGE, scope, IncidentNotFound())
    incident = lock_incident(incident_id)
    digest = audit.request_digest({"further": further, "take_over": take_over})
    receipt = audit.replayed(
        key=key, action=ACKNOWLEDGED, operator=by, target_type="incident", target_id=str(incident_id), digest=digest
    )
    if receipt is not None:
        return IncidentMutation.from_receipt(receipt, incident_id)
    check_version(incident, version)
    if incident.is_resolved:
        raise IncidentResolved
    is_held = incident.state == IncidentState.ACKNOWLEDGED
    changed = not is_held or (take_over and incident.acknowledged_by != by.ref)
    if changed:
        until = None if further is None else incident.occurrence_count + further
        incident.take(by=by.ref, name=by.name, at=incident.locked_at, until_occurrences=until)
        save_incident(incident)
    return _recorded(
        incident, changed, action=ACKNOWLEDGED, by=by, capability=capability, scope=scope, key=key, digest=digest
    )


@service
def release_incident(*, incident_id: UUID, by: Operator, key: str, version: int | None = None) -> IncidentMutation:
    """Give an incident back, so that nobody has it: its holder, or whoever may acknowledge it.

    It is open again, and what it came back for stays written on it. One that nobody has is left as it is, and the
    answer says so. Locks the incident; writes one audit event, which names who had it. Raises what
    ``acknowledge_incident`` raises, but for ``AcknowledgementLimitInvalid``.
    """
    scope = Incident.objects.scope(incident_id)
    capability = _authorise_release(by, scope, incident_id, key)
    incident = lock_incident(incident_id)
    digest = audit.request_digest({})
    receipt = audit.replayed(
        key=key, action=RELEASED, operator=by, target_type="incident", target_id=str(incident_id), digest=digest
    )
    if receipt is not None:
        return IncidentMutation.from_receipt(receipt, incident_id)
    check_version(incident, version)
    if incident.is_resolved:
        raise IncidentResolved
    changed = incident.state == IncidentState.ACKNOWLEDGED
    held_by = ""
    if changed:
        held_by = incident.release()
        save_incident(incident)
    return _recorded(
        incident, changed, action=RELEASED, by=by, capability=capability, scope=scope, key=key, digest=digest,
        more={"heldBy": held_by},
    )  # fmt: skip


def _authorise_release(by: Operator, scope: Resource | None, incident_id: UUID, key: str) -> Capability:
    """Return the capability: a retry makes its operator the holder (A12), so the one for retrying will do for those.

    Whoever has given it back under this key was the holder as well, and is to get the same answer again (A9).
    """
    if scope is not None and not can(by, Action.INCIDENTS_ACKNOWLEDGE, scope):
        had = Incident.objects.filter(id=incident_id, acknowledged_by=by.ref).exists()
        if had or audit.has_key(key=key, action=RELEASED, operator=by, target_id=str(incident_id)):
            return authorise_target(by, Action.DEAD_LETTERS_RETRY, scope, IncidentNotFound())
    return authorise_target(by, Action.INCIDENTS_ACKNOWLEDGE, scope, IncidentNotFound())


@service
def resolve_incident(
    *,
    incident_id: UUID,
    by: Operator,
    key: str,
    code: str,
    summary: str,
    unrepaired: int | None = None,
    version: int | None = None,
) -> IncidentMutation:
    """Close the incident with a reason (A11, C7).

    While letters are unresolved it takes ``incidents.close-unrepaired`` as well, and ``unrepaired`` has to be their
    number. Closing it again with the same code and summary changes nothing; with other ones it is refused. Only the
    incident is written (C18): its letters read as resolved through it, however many they are. Locks the incident.
    Raises what ``acknowledge_incident`` raises, and ``ResolutionInvalid``, ``IncidentHasUnresolvedLetters``.
    """
    trimmed = summary.strip()
    if CODE.fullmatch(code) is None or not 3 <= len(trimmed) <= 2_000:
        raise ResolutionInvalid
    scope = Incident.objects.scope(incident_id)
    capability = authorise_target(by, Action.INCIDENTS_RESOLVE, scope, IncidentNotFound())
    incident = lock_incident(incident_id)
    digest = audit.request_digest({"code": code, "summary": trimmed, "unrepaired": unrepaired})
    receipt = audit.replayed(
        key=key, action=RESOLVED, operator=by, target_type="incident", target_id=str(incident_id), digest=digest
    )
    if receipt is not None:
        return IncidentMutation.from_receipt(receipt, incident_id)
    check_version(incident, version)
    stored = f"[{code}] {trimmed}"
    changed = not incident.is_resolved
    left = incident.unresolved_count
    if incident.is_resolved and (incident.resolution_code, incident.resolution_summary) != (code, stored):
        raise IncidentResolved
    if changed:
        if incident.unresolved_count:
            capability = authorise_target(by, Action.INCIDENTS_CLOSE_UNREPAIRED, scope, IncidentNotFound())
            if unrepaired != incident.unresolved_count:
                raise IncidentHasUnresolvedLetters(unresolved=incident.unresolved_count)
        end = incident.close(by=by.ref, name=by.name, at=incident.locked_at, code=code, summary=stored)
        save_incident(incident)
        end.save(force_insert=True)
    return _recorded(
        incident, changed, action=RESOLVED, by=by, capability=capability, scope=scope, key=key, digest=digest,
        reason=_shortened(trimmed), more={"unrepaired": left},
    )  # fmt: skip


def lock_incident(incident_id: UUID) -> Incident:
    """Return the locked incident; raises ``IncidentNotFound``."""
    try:
        return Incident.objects.lock(incident_id)
    except Incident.DoesNotExist:
        raise IncidentNotFound from None


def check_version(incident: Incident, version: int | None) -> None:
    """Refuse if the caller looked at an older version; raises ``IncidentChanged`` with the current one."""
    if version is not None and version != incident.version:
        raise IncidentChanged(current={"state": str(incident.state), "version": incident.version})


def save_incident(incident: Incident) -> None:
    """Write a locked incident after its transition; its version rises by one."""
    Incident.objects.save_recorded([incident])
    incident.version += 1


def _shortened(text: str) -> str:
    """Return a text as an audit row's reason; a longer one stands whole where it was given."""
    return text if len(text) <= REASON_LENGTH else f"{text[: REASON_LENGTH - 1]}…"


def _recorded(
    incident: Incident,
    changed: bool,
    *,
    action: str,
    by: Operator,
    capability: Capability,
    scope: Resource | None,
    key: str,
    digest: str,
    reason: str = "",
    more: Mapping[str, JsonValue] | None = None,
) -> IncidentMutation:
    assert scope is not None  # noqa: S101  (authorise_target refuses a missing one)
    mutation = IncidentMutation(
        incident_id=incident.id,
        state=str(incident.state),
        changed=changed,
        version=incident.version,
        holder=incident.acknowledged_by_name,
    )
    event = audit.record(
        action=action,
        operator=by,
        resource=scope,
        capability=capability,
        outcome={**mutation.outcome(), "resolution": incident.resolution_code, **(more or {})},
        reason=reason,
        key=key,
        digest=digest,
    )
    return IncidentMutation(
        incident_id=mutation.incident_id,
        state=mutation.state,
        changed=changed,
        version=mutation.version,
        holder=mutation.holder,
        event_id=event.id,
    )
