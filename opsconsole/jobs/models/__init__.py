"""The job ledger, and the records that the built-in kinds of jobs work on."""

from opsconsole.jobs.models.budgets import BudgetPolicy, BudgetReservation, BudgetUsage, SurgeState
from opsconsole.jobs.models.deliveries import (
    ActionDelivery,
    ActionProposal,
    CaseMessage,
    DeliveryState,
    EmailDelivery,
    MessageState,
    Notice,
    NotificationDelivery,
    ProposalState,
)
from opsconsole.jobs.models.evidence import EvidenceRequest, EvidenceState
from opsconsole.jobs.models.ledger import DUE, LEASED, UNFINISHED, Job, JobState
from opsconsole.jobs.models.reports import (
    AiConfig,
    AiDecision,
    Management,
    QueueStatus,
    Report,
    ReportEvent,
    ReportState,
    ReviewQueue,
    RoutingRule,
    RoutingStatus,
)
from opsconsole.jobs.models.totals import Stream, StreamTotal
from opsconsole.jobs.models.workflows import (
    ACTIVE_RUNS,
    ConnectionLease,
    DispatchState,
    RunState,
    WorkflowDispatch,
    WorkflowRun,
)

__all__ = [
    "ACTIVE_RUNS",
    "DUE",
    "LEASED",
    "UNFINISHED",
    "ActionDelivery",
    "ActionProposal",
    "AiConfig",
    "AiDecision",
    "BudgetPolicy",
    "BudgetReservation",
    "BudgetUsage",
    "CaseMessage",
    "ConnectionLease",
    "DeliveryState",
    "DispatchState",
    "EmailDelivery",
    "EvidenceRequest",
    "EvidenceState",
    "Job",
    "JobState",
    "Management",
    "MessageState",
    "Notice",
    "NotificationDelivery",
    "ProposalState",
    "QueueStatus",
    "Report",
    "ReportEvent",
    "ReportState",
    "ReviewQueue",
    "RoutingRule",
    "RoutingStatus",
    "RunState",
    "Stream",
    "StreamTotal",
    "SurgeState",
    "WorkflowDispatch",
    "WorkflowRun",
]
