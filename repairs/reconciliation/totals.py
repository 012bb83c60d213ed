"""Whether the totals that a snapshot reads are what its tables hold (A7)."""

from __future__ import annotations

from django.db.models import Sum

from opsconsole.core.canonical_json import canonical_json
from opsconsole.core.database import database_now
from opsconsole.core.ids import new_id
from opsconsole.jobs.models import Stream, StreamTotal
from opsconsole.jobs.sql import Drift, recount_totals
from repairs.models import SweepActionType, SweepRepair
from repairs.reconciliation.sweeping import Sweeping
from repairs.sql import record_repairs


def recount_streams(sweeping: Sweeping) -> None:
    """Count every stream again, and put right what differs: a bug of ours, an edit by hand, a restored backup.

    One transaction for each stream; its table is read once, and no writer waits. A row of a run is one total, of one
    tenant in one state.
    """
    for stream in Stream:
        if not sweeping.size():
            return
        with sweeping.page() as tally:
            drifts = recount_totals(streams=[stream])
            rows = StreamTotal.objects.filter(stream=stream).order_by()
            counts: dict[tuple[str, str], int] = {
                (tenant, state): count
                for tenant, state, count in rows.values_list("tenant", "state").annotate(Sum("count"))
                if count
            }
            record_repairs([_repair(sweeping, drift, counts.get((drift.tenant, drift.state), 0)) for drift in drifts])
            looked_at = counts.keys() | {(drift.tenant, drift.state) for drift in drifts}
            tally.scanned += len(looked_at)
            tally.repaired += len(drifts)


def _repair(sweeping: Sweeping, drift: Drift, count: int) -> SweepRepair:
    name = f"{drift.stream.value}:{drift.state}"
    return SweepRepair(
        id=new_id(),
        run_id=sweeping.run_id,
        tenant=drift.tenant,
        action_type=SweepActionType.CORRECT_TOTAL,
        entity_type="stream_total",
        entity_id=name,
        operation_key=f"total:{name}:{drift.tenant}:{sweeping.run_id}",
        before=canonical_json({"count": count - drift.by}),
        after=canonical_json({"count": count}),
        planned_by=sweeping.started_by,
        applied_at=database_now(),
    )
