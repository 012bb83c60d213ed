"""What tests of redrives share: workers, letters, a redrive that is planned, and jobs that answer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any
from uuid import UUID, uuid4

from deadletters.journal.events import Ended, EndState
from deadletters.models import DeadLetter, WorkerNode
from deadletters.recorder import record_failures
from deadletters.selectors import LetterFilter
from opsconsole.core.clock import boot_now, wall_now
from opsconsole.core.database import database_now
from repairs.models import ActionState, ItemState, Redrive, RedriveItem, RepairAction
from repairs.redrives.requests import RedrivePace, RedriveSelection
from repairs.redrives.services import RedriveMutation, create_redrive, start_redrive
from repairs.redrives.stepping import Stepped, step_redrive
from repairs.settlement import DatabaseSettlement
from tests import factories
from tests.cast import Cast

FAST = RedrivePace(rate_per_second=10_000, max_outstanding=1_000, canary_size=0, stop_percent=None)


def worker(**tasks: Any) -> WorkerNode:
    """A live worker that has ``shop.send_mail(to, order)`` and whatever else is named."""
    signature = json.dumps({"positional": ["to", "order"], "required": 1})
    names = {"shop.send_mail": signature, **{name.replace("__", "."): text for name, text in tasks.items()}}
    now = database_now()
    return WorkerNode.objects.create(
        id=f"w-{uuid4()}", source="tests", host="h", pid=1, queues='["celery", "slow"]', tasks=json.dumps(names),
        started_at=now, seen_at=now,
    )  # fmt: skip


def letters(count: int, **fields: Any) -> list[DeadLetter]:
    return [factories.dead_letter(ago=float(count - number), **fields) for number in range(count)]


def whole(tenant: str = "default") -> RedriveSelection:
    return RedriveSelection(letters=LetterFilter(tenant=tenant, source="tests"))


def create(cast: Cast, selection: RedriveSelection | None = None, **fields: Any) -> RedriveMutation:
    fields.setdefault("key", str(uuid4()))
    fields.setdefault("pace", FAST)
    return create_redrive(by=fields.pop("by", cast.ada), selection=selection or whole(), **fields)


def started(cast: Cast, selection: RedriveSelection | None = None, **fields: Any) -> Redrive:
    """Return a redrive that has been planned and started."""
    answers = fields.pop("answers", None)
    made = create(cast, selection, **fields)
    start_redrive(redrive_id=made.redrive_id, by=fields.get("by", cast.ada), key=str(uuid4()), answers=answers)
    return Redrive.objects.get(id=made.redrive_id)


def step(redrive: Redrive, owner: str = "w", **fields: Any) -> Stepped:
    """Do one step, with as much of the rate saved up as there can be."""
    saved = database_now() - factories.seconds(10)
    Redrive.objects.filter(id=redrive.id).update(next_due_at=saved)
    stepped = step_redrive(redrive_id=redrive.id, owner=owner, **fields)
    assert stepped is not None
    redrive.refresh_from_db()
    return stepped


def outstanding(redrive: Redrive) -> list[RepairAction]:
    """Return the repairs that wait for their answer, oldest job first."""
    return [
        item.repair
        for item in RedriveItem.objects.filter(redrive=redrive, state=ItemState.PLANNED)
        .select_related("repair")
        .order_by("position")
        if item.repair is not None
    ]


def succeed(actions: Iterable[RepairAction]) -> None:
    """Let the jobs of these repairs succeed, as a worker's journal tells it."""
    for action in actions:
        delivery = factories.delivery(task_id=action.new_task_id, repair_id=str(action.id), claimed=True)
        DatabaseSettlement().ended(
            Ended(delivery=delivery, state=EndState.SUCCESS, at_boot=boot_now(), at_wall=wall_now())
        )


def fail(actions: Iterable[RepairAction]) -> None:
    """Let the jobs of these repairs fail."""
    for action in actions:
        failure = factories.failure(
            letter_id=action.letter_id,
            delivery=factories.delivery(task_id=action.new_task_id, repair_id=str(action.id), claimed=True),
        )
        recorded = record_failures([failure], now=database_now())
        DatabaseSettlement().failed(recorded, database_now())


def items(redrive: Redrive) -> list[tuple[str, str]]:
    """Return state and code of each item, oldest job first."""
    rows = RedriveItem.objects.filter(redrive=redrive).order_by("position")
    return [(str(item.state), item.code) for item in rows]


def counted(redrive: Redrive) -> dict[str, int]:
    """Return the kept counts, having compared them with the items themselves."""
    redrive.refresh_from_db()
    names = {"waiting": "waiting", "planned": "outstanding"} | {
        name: name for name in ("succeeded", "failed", "skipped", "cancelled")
    }
    kept = {state: getattr(redrive, f"{name}_count") for state, name in names.items()}
    states = list(RedriveItem.objects.filter(redrive=redrive).values_list("state", flat=True))
    assert kept == {state: states.count(state) for state in names}, "the kept counts are not the items'"
    assert sum(kept.values()) == redrive.total_count
    return {state: count for state, count in kept.items() if count}


def letter_states(ids: Iterable[UUID]) -> list[str]:
    found = dict(DeadLetter.objects.filter(id__in=list(ids)).values_list("id", "state"))
    return [found[one] for one in ids]


def sent(redrive: Redrive) -> None:
    """As the relay marks what it has sent."""
    RepairAction.objects.filter(redrive=redrive, state=ActionState.PLANNED).update(
        state=ActionState.SENT, sent_at=database_now()
    )
