"""The Celery task id of a ledger job's message: it says whose message it is, and is the token of its lease.

``job:<job id>:<dispatch>:<random>``: a new one for each dispatch, so that a message of an earlier lease is known as an
old one. The random part keeps a database that was restored from an older copy from giving one out twice.
"""

from __future__ import annotations

from uuid import UUID

TOKEN_PREFIX = "job:"  # noqa: S105  (names a lease, opens nothing)
TASK_PREFIX = "opsconsole.jobs."
"""The Celery tasks of the ledger are called this and the kind's name."""
SCOPE_HEADER = "opsconsole_scope"
"""Header of a ledger job's message: [tenant, actor type, actor id]."""

REPAIRED_HEADER = "opsconsole_repaired"
"""Header of the message of a job that an operator has put back: holds let it pass."""


def job_id_of(task_id: str) -> UUID | None:
    """Return the job that a task id names, ``None`` if it is none of the ledger's."""
    if not task_id.startswith(TOKEN_PREFIX):
        return None
    try:
        return UUID(task_id[len(TOKEN_PREFIX) :].partition(":")[0])
    except ValueError:
        return None


def job_type_of(task: str) -> str:
    """Return the type of a job by its task's name: a ledger job's is its kind (A1)."""
    return task.removeprefix(TASK_PREFIX)
