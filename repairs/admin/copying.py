"""An incident as text for a chat, and as commands for a shell."""

from __future__ import annotations

import shlex
from datetime import datetime

from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse

from grants.operators import Operator
from incidents.admin import incident_name, state_words
from incidents.models import Incident
from opsconsole.core.admin import ago, thousands, when
from opsconsole.core.rest import API_NAMESPACE
from repairs.prospects import Tiles

LONGEST_LINE = 300


def as_text(
    request: HttpRequest, incident: Incident, tiles: Tiles, *, by: Operator, now: datetime, repaired: str
) -> str:
    """Return what somebody pastes into a chat: what, how bad, since when, who has it, and where to look."""
    holder = "nobody on it"
    if incident.acknowledged_by:
        holder = f"{incident.acknowledged_by_name} has it, taken {when(incident.acknowledged_at)} UTC"
    severity = str(incident.get_severity_display()).capitalize()
    standing = f"not repaired: {thousands(incident.unresolved_count)} of {thousands(incident.letter_count)}"
    lines = [
        f"{incident_name(incident)} {severity}, {state_words(incident)}, {holder}",
        incident.title[:LONGEST_LINE],
        repaired if incident.is_resolved else standing,
        f"task {incident.job_type}, tenant {incident.tenant}, source {incident.source}",
        f"since {when(incident.opened_at)} UTC, last failure {ago(incident.last_seen_at, now)}",
    ]
    if tiles.waiting:
        more = " or more" if tiles.is_capped else ""
        lines.insert(
            3,
            f"{thousands(tiles.safe)} safe to run again, {thousands(tiles.ambiguous)} may already have happened, "
            f"{thousands(tiles.not_declared)} not declared, {thousands(tiles.blocked)} can't be retried{more}",
        )
    return "\n".join([*lines, request.build_absolute_uri(request.path), f"as {by.name} saw it {when(now)} UTC"])


def as_curl(request: HttpRequest, incident: Incident, waiting: int) -> str:
    """Return the commands that read it, take it and retry all of it; "" where the project serves no REST API."""
    try:
        page, take, retry = (
            request.build_absolute_uri(reverse(f"{API_NAMESPACE}:{name}", args=[incident.id]))
            for name in ("incident", "incident-acknowledge", "incident-retry")
        )
    except NoReverseMatch:
        return ""
    header = '-H "Authorization: Bearer $OPSCONSOLE_TOKEN"'
    change = f'{header} -H "Idempotency-Key: $(uuidgen)" -H "Content-Type: application/json"'
    commands = ["# A token is made under API tokens: OPSCONSOLE_TOKEN=...", f"curl {header} {shlex.quote(page)}"]
    if not incident.is_resolved:
        commands.append(f"curl -X POST {change} -d '{{}}' {shlex.quote(take)}")
        if waiting:
            body = f'{{"all": true, "expected_count": {waiting}}}'
            commands.append(f"curl -X POST {change} -d '{body}' {shlex.quote(retry)}")
    return "\n".join(commands)
