"""Celery's way in: what beat sends."""

from __future__ import annotations

import logging

from celery import shared_task

from opsconsole.core.errors import OpsError
from repairs.reconciliation.running import run_scheduled
from repairs.reconciliation.schedule import TASK

logger = logging.getLogger(__name__)


@shared_task(name=TASK, ignore_result=True)
def reconcile(kind: str) -> str:
    """Run one sweep, and return how it ended.

    An error is the run's, where it stands, and the next run's, which does what this one could not: a failed job for
    every thirty seconds of an outage would help nobody.
    """
    try:
        run = run_scheduled(kind)
    except OpsError as refusal:
        logger.error("the sweep %s was refused: %s", kind, refusal.detail)
        return refusal.code
    except Exception:
        logger.exception("the sweep %s could not be run", kind)
        return "failed"
    return "already running" if run is None else str(run.state)
