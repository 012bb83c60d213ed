"""Repairs in the console, and the half of an incident's and a job's page that is about repairing."""

from __future__ import annotations

from typing import Any

from deadletters.models import DeadLetter, Hold
from incidents.models import Incident
from opsconsole.jobs.models import Job
from repairs.admin.holds import HoldAdmin
from repairs.admin.incidents import RepairableIncidentAdmin
from repairs.admin.jobs import JobAdmin
from repairs.admin.redrives import RedriveAdmin
from repairs.admin.repairs import RepairActionAdmin
from repairs.admin.selected import SelectableLetterAdmin
from repairs.admin.sweeps import ReconciliationRunAdmin
from repairs.models import ReconciliationRun, Redrive, RepairAction

ADMINS: dict[Any, Any] = {
    Incident: RepairableIncidentAdmin,
    DeadLetter: SelectableLetterAdmin,
    Job: JobAdmin,
    RepairAction: RepairActionAdmin,
    Redrive: RedriveAdmin,
    Hold: HoldAdmin,
    ReconciliationRun: ReconciliationRunAdmin,
}
"""What the console registers; nothing is registered on Django's default site."""
