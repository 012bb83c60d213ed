"""What every permission and every verb of the audit trail means, in one sentence for people.

The names themselves are published: they stand in grants, in receipts and in the API, and differ where a permission is
asked for one thing and what then happens is another. Pages show both, the sentence first.
"""

from __future__ import annotations

from grants.actions import Action
from grants.models import Verdict

MAY: dict[Action, str] = {
    Action.INSPECT: "see incidents, failed jobs with their redacted arguments, repairs, and the workers",
    Action.EXPORT: "export a durable actor",
    Action.RECEIPTS_READ: "read the stored outcome of a durable actor's command",
    Action.DEFECTS_READ: "list unexpected errors of a tenant",
    Action.DEAD_LETTERS_RETRY: "run a failed job again, state that it has already happened, or withdraw a repair",
    Action.DEAD_LETTERS_DISCARD: "give a failed job up for good",
    Action.SUBSCRIPTIONS_SKIP: "move a stuck subscription past what it cannot take",
    Action.AUDIT_READ: "read the audit trail",
    Action.INCIDENTS_ACKNOWLEDGE: "take an incident, take it over, or give it back",
    Action.INCIDENTS_RESOLVE: "close an incident with a reason",
    Action.INCIDENTS_CLOSE_UNREPAIRED: "close an incident although jobs of it are not repaired",
    Action.DEAD_LETTERS_HOLD: "put matching jobs aside before they run, and send them on",
    Action.REDRIVE_RUN: "run very many jobs again, at a chosen rate",
    Action.REDRIVE_PATCH: "change the arguments of jobs that are run again",
    Action.RECONCILIATION_RUN: "look for lost and stuck work, and repair it",
    Action.PAYLOADS_READ: "read the original arguments of a failed job",
    Action.GRANTS_MANAGE: "give and take back permissions that one holds",
    Action.DEAD_LETTERS_INGEST: "record failures from outside, over REST",
    Action.JOBS_CANCEL: "withdraw a job of the ledger that has not run",
}
"""What each permission allows: "may …"."""


def begun(sentence: str) -> str:
    """Return it with a capital first letter; the rest stays, as there are names in it."""
    return sentence[:1].upper() + sentence[1:]


DID: dict[str, str] = {
    "dead-letters.close-as-done": "stated that a failed job had already happened",
    "dead-letters.overtaken": "closed a failed job whose record had finished without it",
    Action.JOBS_CANCEL.value: "withdrew a job of the ledger",
    "operations.incident_count_corrected": "put the count of an incident's open jobs right",
    "holds.ended": "ended a hold",
    "holds.expired": "noted that a hold's time was over",
    "holds.extended": "moved the end of a hold",
    "holds.placed": "put a hold on jobs",
    "holds.released": "planned to send on what a hold has put aside",
    "operations.reconciliation_finished": "finished a sweep",
    "operations.reconciliation_schedule_changed": "changed when a sweep runs",
    "operations.reconciliation_started": "started a sweep",
    "repairs.no_answer": "gave up a repair of which no answer was to be expected",
    Action.DEAD_LETTERS_DISCARD.value: "gave a failed job up for good",
    Action.DEAD_LETTERS_RETRY.value: "ran a failed job again",
    Action.AUDIT_READ.value: "read the audit trail",
    Action.PAYLOADS_READ.value: "read the original arguments of a failed job",
    "grants.bootstrapped": "made the first operator",
    "grants.granted": "gave a permission",
    "grants.revoked": "took a permission back",
    "operations.incident_acknowledged": "took an incident",
    "operations.incident_opened": "opened an incident",
    "operations.incident_released": "gave an incident back",
    "operations.incident_reopened": "opened an incident again",
    "operations.incident_resolved": "closed an incident",
    "operations.incident_retry_applied": "ran jobs of an incident again",
    "queue.dead_lettered": "recorded a failed job",
    "queue.held": "put a job aside that was on hold",
    "redrive.approved": "approved a redrive as the second person",
    "redrive.cancelled": "cancelled a redrive",
    "redrive.created": "planned a redrive",
    "redrive.finished": "finished a redrive",
    "redrive.paused": "paused a redrive",
    "redrive.resumed": "let a paused redrive go on",
    "redrive.started": "started a redrive",
    "repairs.cancel": "withdrew a repair",
    "tokens.created": "made an API token",
    "tokens.revoked": "revoked an API token",
}
"""What each verb of the audit trail says that somebody did."""

TARGETS: dict[str, str] = {
    "api_token": "API token",
    "audit_event": "row of the audit trail",
    "audit_trail": "audit trail",
    "capability_scope": "scope",
    "dead_letter": "failed job",
    "grant": "permission",
    "job": "job of the ledger",
    "reconciliation_run": "sweep",
    "redrive": "redrive",
    "repair_action": "repair",
    "repair_batch": "batch of repairs",
    "token": "API token",
}
"""What it was done to, where its name in the trail is not the word for it."""


_MAY_BY_NAME = {action.value: text for action, text in MAY.items()}


def may_words(action: str) -> str:
    """Return what a permission allows; "" for a name that is none."""
    return _MAY_BY_NAME.get(action, "")


def audit_words(action: str, verdict: str) -> str:
    """Return what a row of the audit trail tells; a name that a later release wrote is told as it is."""
    if verdict == Verdict.DENIED:
        allowed = may_words(action)
        return f"was not allowed to {allowed}" if allowed else f"was refused {action}"
    return DID.get(action, action)


def target_words(target_type: str) -> str:
    """Return the word for what something was done to."""
    return TARGETS.get(target_type, target_type)
