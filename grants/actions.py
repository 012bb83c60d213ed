"""What an operator can be allowed to do."""

from __future__ import annotations

from enum import StrEnum


class Action(StrEnum):
    """A published action name; the value is part of the API, of every grant and of every audit row (B1)."""

    INSPECT = "inspect"
    EXPORT = "export"
    RECEIPTS_READ = "receipts.read"
    DEFECTS_READ = "defects.read"
    DEAD_LETTERS_RETRY = "dead-letters.retry"
    DEAD_LETTERS_DISCARD = "dead-letters.discard"
    SUBSCRIPTIONS_SKIP = "subscriptions.skip"
    AUDIT_READ = "audit.read"
    INCIDENTS_ACKNOWLEDGE = "incidents.acknowledge"
    INCIDENTS_RESOLVE = "incidents.resolve"
    INCIDENTS_CLOSE_UNREPAIRED = "incidents.close-unrepaired"
    DEAD_LETTERS_HOLD = "dead-letters.hold"
    REDRIVE_RUN = "redrive.run"
    REDRIVE_PATCH = "redrive.patch"
    RECONCILIATION_RUN = "reconciliation.run"
    PAYLOADS_READ = "payloads.read"
    GRANTS_MANAGE = "grants.manage"
    DEAD_LETTERS_INGEST = "dead-letters.ingest"
    JOBS_CANCEL = "jobs.cancel"

    @property
    def codename(self) -> str:
        """Django's name of it: guardian splits a permission at the dot, so a codename has none."""
        return self.value.replace(".", "_").replace("-", "_")
