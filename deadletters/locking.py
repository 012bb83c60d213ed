"""Locking a letter with its incident, in the one order that everybody keeps: incident, then letter."""

from __future__ import annotations

from uuid import UUID

from django.db import transaction

from deadletters.models import DeadLetter
from incidents.models import Incident

TRIES = 5


class LetterMoved(Exception):
    """The letter went on to another incident between the look and the lock, every time; try again later."""


class _Moved(Exception):
    pass


def lock_letter(letter_id: UUID) -> tuple[Incident, DeadLetter]:
    """Lock a letter's incident, then the letter, and return both; raises ``DeadLetter.DoesNotExist``, ``LetterMoved``.

    A letter that recurs may move to another incident between the two. Then the savepoint lets go of both before the
    next try, so that never a letter is held while an incident is waited for.
    """
    for _try in range(TRIES):
        try:
            with transaction.atomic():
                return _lock_once(letter_id)
        except _Moved:
            continue
    raise LetterMoved(str(letter_id))


def _lock_once(letter_id: UUID) -> tuple[Incident, DeadLetter]:
    incident_id = DeadLetter.objects.values_list("incident_id", flat=True).get(id=letter_id)
    incident = Incident.objects.lock(incident_id)
    letter = DeadLetter.objects.lock(letter_id)
    if letter.incident_id != incident_id:
        raise _Moved
    return incident, letter
