"""The kinds of sweeps, and how often each runs unless somebody has changed that."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta

from repairs.errors import ReconciliationKindInvalid, ReconciliationKindUnknown

NAME = re.compile(r"[a-z][a-z0-9_]{1,63}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepKind:
    """One kind of sweep as people see it; ``sweeps.PARTS`` has what it does."""

    name: str
    title: str
    about: str
    every: timedelta


_LISTED = (
    SweepKind(
        name="stale_leases",
        title="Stale leases",
        about="Gives back evidence, dispatches, connections and jobs whose holder is gone.",
        every=timedelta(seconds=30),
    ),
    SweepKind(
        name="undelivered_dispatches",
        title="Undelivered jobs",
        about="Sends jobs again that were sent, and that no worker has claimed.",
        every=timedelta(seconds=30),
    ),
    SweepKind(
        name="unsent_repairs",
        title="Repairs not sent",
        about="Finds planned repairs that nobody sends, and frees those whose sender is gone.",
        every=timedelta(minutes=1),
    ),
    SweepKind(
        name="unanswered_repairs",
        title="Repairs without an answer",
        about="Finds repairs whose answer is overdue, and gives up those whose worker never came back.",
        every=timedelta(minutes=1),
    ),
    SweepKind(
        name="closed_letters",
        title="Closed incidents",
        about="Marks the jobs of closed incidents as closed, and compares the incidents' counts with the jobs.",
        every=timedelta(minutes=1),
    ),
    SweepKind(
        name="stream_totals",
        title="Totals",
        about="Counts the records of every stream again, and corrects totals that are not the truth.",
        every=timedelta(hours=1),
    ),
    SweepKind(
        name="expired_holds",
        title="Expired holds",
        about="Writes down that the time of a hold is over, where no worker has.",
        every=timedelta(minutes=1),
    ),
    SweepKind(
        name="retention",
        title="Retention",
        about="Removes what is older than it is to be kept; never what waits for a decision, never the audit trail.",
        every=timedelta(hours=1),
    ),
)
KINDS = {kind.name: kind for kind in _LISTED}


def kind_named(name: str) -> SweepKind:
    """Return the kind; raises ``ReconciliationKindInvalid`` for what is no name, ``...Unknown`` for another one."""
    if NAME.fullmatch(name) is None:
        raise ReconciliationKindInvalid
    try:
        return KINDS[name]
    except KeyError:
        raise ReconciliationKindUnknown(kind=name) from None
