"""A15's order: however a part of it is looked for, every page is what sorting all letters would give."""

from __future__ import annotations

import random
from datetime import datetime, timedelta
from typing import Any

import pytest

from deadletters import listing
from deadletters.listing import SEGMENTS, read_letters
from deadletters.models import SETTLED, DeadLetter, LetterState
from grants.operators import SYSTEM
from incidents.models import EpisodeEnd, Incident, IncidentState
from opsconsole.core.database import database_now
from opsconsole.core.ids import new_id
from repairs.models import ReconciliationRun
from repairs.reconciliation.closing import stamp
from repairs.reconciliation.runs import begin_run
from repairs.reconciliation.sweeping import Sweeping
from tests.factories import dead_letter

pytestmark = pytest.mark.django_db

WAYS = {
    "as it is": {},
    "by incident": {"FIRST_WALK": 0},
    "by long walks": {"FIRST_WALK": 0, "LONG_WALK": 3, "MOST_INCIDENTS": 1},
}


def scene(*, seed: int, incidents: int = 21, letters: int = 100) -> list[DeadLetter]:
    """Store letters of every standing in incidents of every state, many of them seen at the same moment."""
    draw = random.Random(seed)
    first = dead_letter()
    now = database_now().replace(microsecond=0)
    made = [_incident(first.incident, number, draw, now) for number in range(incidents)]
    Incident.objects.bulk_create(made)
    EpisodeEnd.objects.bulk_create(
        EpisodeEnd(incident=one, episode=1, opened_at=now, resolved_at=now, resolved_by="ada") for one in made
    )
    DeadLetter.objects.bulk_create(_letter(first, draw.choice(made), number, draw, now) for number in range(letters))
    return list(DeadLetter.objects.select_related("incident"))


def _copy(row: Any, **fields: Any) -> Any:
    values = {field.attname: getattr(row, field.attname) for field in row._meta.concrete_fields}
    return type(row)(**{**values, "id": new_id(), **fields})


def _incident(first: Incident, number: int, draw: random.Random, now: datetime) -> Any:
    state = draw.choice(IncidentState.values) if number > 2 else IncidentState.values[number]
    is_resolved = state == IncidentState.RESOLVED
    return _copy(
        first, number=1000 + number, key=f"key-{number}", state=state, episode=2,
        resolved_at=now if is_resolved else None, unresolved_count=0 if is_resolved else 1,
        acknowledged_at=now if state == IncidentState.ACKNOWLEDGED else None,
    )  # fmt: skip


def _letter(first: DeadLetter, incident: Incident, number: int, draw: random.Random, now: datetime) -> Any:
    state = draw.choice([LetterState.OPEN] * 8 + [LetterState.HELD] * 3 + list(LetterState))
    return _copy(
        first, incident_id=incident.id, fingerprint=f"f-{number}", state=state, episode=draw.choice((1, 2, 2, 2)),
        closed_at=now if state in SETTLED else None, last_seen_at=now - timedelta(seconds=draw.randrange(40)),
    )  # fmt: skip


def expected(letters: list[DeadLetter], *standings: str) -> list[Any]:
    def place(row: DeadLetter) -> int:
        return next(number for number, segment in enumerate(SEGMENTS) if standing(row) in segment)

    rows = [row for row in letters if not standings or standing(row) in standings]
    newest = sorted(rows, key=lambda row: (row.last_seen_at, row.id), reverse=True)
    return [row.id for row in sorted(newest, key=place)]


def standing(row: DeadLetter) -> str:
    return row.standing(row.incident)


def pages(*standings: str, limit: int = 4) -> tuple[list[Any], list[Any]]:
    """Return the ids of all pages, there and back."""
    there, cursor, last = [], None, None
    while True:
        page = read_letters(DeadLetter.objects.all(), standings, ordering="default", limit=limit, cursor=cursor)
        there += [row.id for row in page.rows]
        last = page
        if page.next is None:
            break
        cursor = page.next
    back = [row.id for row in last.rows]
    while last.previous is not None:
        last = read_letters(DeadLetter.objects.all(), standings, ordering="default", limit=limit, cursor=last.previous)
        back = [row.id for row in last.rows] + back
    return there, back


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("is_told", [False, True], ids=["just closed", "told"])
def test_every_page_is_what_sorting_all_would_give(
    way: str, seed: int, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A15, C18: open, acknowledged, the rest, each newest first, there and back; told = after the sweep that stamps."""
    for name, value in WAYS[way].items():
        monkeypatch.setattr(listing, name, value)
    scene(seed=seed)
    if is_told:
        run = begin_run(kind="closed_letters", by=SYSTEM)
        stamp(Sweeping(ReconciliationRun.objects.get(id=run.run_id)))
        assert not Incident.objects.unstamped().exists()
    letters = list(DeadLetter.objects.select_related("incident"))
    for standings in (
        (),
        ("open",),
        ("acknowledged", "retrying"),
        ("held",),
        ("resolved",),
        ("open", "resolved", "repaired"),
    ):
        assert pages(*standings) == (expected(letters, *standings),) * 2
