"""What is new to somebody: what was opened since they last looked at the list.

When that was stands in a signed cookie of their browser, one for each operator, so that looking writes nothing to the
database. A visit lasts until the list has not been opened for half an hour; until then what was new stays marked.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta

from django.http import HttpRequest, HttpResponse

from grants.operators import Operator
from incidents.models import Incident

VISIT_LASTS = timedelta(minutes=30)
KEPT = timedelta(days=90)


def last_visit(request: HttpRequest, by: Operator, now: datetime) -> datetime | None:
    """Return when the visit before this one ended, by the database's clock; None for who has not been here before."""
    before, looked = _read(request, by)
    if looked is None:
        return None
    return looked if now - looked > VISIT_LASTS else before


def is_new_since(incident: Incident, visit: datetime | None) -> bool:
    """Say whether an incident was first recorded after that; one that came back says so itself."""
    return visit is not None and incident.episode == 1 and incident.opened_at > visit


def note_visit(request: HttpRequest, response: HttpResponse, by: Operator, now: datetime, *, path: str) -> None:
    """Let the browser remember that the list was looked at now."""
    visit = last_visit(request, by, now)
    value = f"{visit.timestamp() if visit is not None else ''}/{now.timestamp()}"
    response.set_signed_cookie(
        _name(by),
        value,
        salt=by.ref,
        max_age=KEPT,
        path=path,
        secure=request.is_secure(),
        httponly=True,
        samesite="Lax",
    )


def _read(request: HttpRequest, by: Operator) -> tuple[datetime | None, datetime | None]:
    """Return the end of the visit before and the last look; None for what we have not signed for this operator."""
    stored = request.get_signed_cookie(_name(by), default="", salt=by.ref)
    before, _, looked = (stored or "").partition("/")
    return _moment(before), _moment(looked)


def _moment(text: str) -> datetime | None:
    return datetime.fromtimestamp(float(text), UTC) if text else None


def _name(by: Operator) -> str:
    # A project's key of users may be any text, and the name of a cookie may not.
    return f"ops_visit_{hashlib.sha256(by.ref.encode(errors='backslashreplace')).hexdigest()[:16]}"
