"""Asking providers of a redrive's jobs whether they have taken effect (C13), outside any transaction."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from uuid import UUID

from grants.service import service
from opsconsole.core.database import database_now
from opsconsole.core.safe_text import safe_text
from opsconsole.jobs.kind import ProbeAnswer
from opsconsole.jobs.kinds import kind_named
from opsconsole.jobs.models import Job
from opsconsole.jobs.tokens import job_id_of
from repairs.models import ItemState, Redrive, RedriveItem
from repairs.redrives.planning import PROBED_NO, PROBED_YES, ItemResult
from repairs.redrives.stepping import SAVED, note_results

logger = logging.getLogger(__name__)

PROVIDER_UNKNOWING = "provider_does_not_know"


def ask_providers(redrive_id: UUID, item_ids: Iterable[int]) -> int:
    """Ask what became of each of these waiting items, and keep what was said; returns how many were asked."""
    count = 0
    for item_id in item_ids:
        task_id = RedriveItem.objects.filter(id=item_id).values_list("letter__task_id", flat=True).first()
        job_id = job_id_of(task_id or "")
        job = Job.objects.filter(id=job_id).first() if job_id is not None else None
        if job is None:
            continue
        try:
            answer = kind_named(job.kind).probe(job)
        except Exception as error:
            # Whatever a provider does, the redrive goes on: what nobody can tell is left out.
            logger.exception("the provider of a %s could not be asked", job.kind)
            answer = ProbeAnswer(happened=None, evidence=f"it could not be asked: {type(error).__name__}")
        note_probe(redrive_id=redrive_id, item_id=item_id, answer=answer)
        count += 1
    return count


@service
def note_probe(*, redrive_id: UUID, item_id: int, answer: ProbeAnswer) -> None:
    """Keep a provider's answer with its item, which the next step plans, closes as done, or which ends here."""
    redrive = Redrive.objects.lock(redrive_id)
    item = RedriveItem.objects.filter(id=item_id, redrive=redrive, state=ItemState.WAITING).first()
    if item is None:
        return
    # A provider may answer anything, and what the database does not take would be asked for again for ever.
    evidence = safe_text(answer.evidence, 300)
    if answer.happened is None:
        result = ItemResult(
            item_id=item.id, actor=(item.actor_type, item.actor_id), state=ItemState.SKIPPED, code=PROVIDER_UNKNOWING,
            detail=evidence,
        )  # fmt: skip
        note_results(redrive, [result], database_now())
        redrive.save(update_fields=SAVED)
        return
    item.code, item.detail = PROBED_YES if answer.happened else PROBED_NO, evidence
    item.save(update_fields=["code", "detail"])
