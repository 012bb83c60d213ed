"""What is known about the jobs of the demo: ``OPSCONSOLE_TASK_POLICIES`` of its settings."""

from __future__ import annotations

from typing import Any

POLICIES: list[dict[str, Any]] = [
    {
        "pattern": "demo.*",
        "team": "Shop",
        "severity": "medium",
        "runbook": "https://runbooks.example/shop",
    },
    {
        "pattern": "demo.send_receipt",
        "team": "Mail",
        "severity": "high",
        "effects": "outside",
        "runbook": "https://runbooks.example/mail/receipts",
    },
    {
        "pattern": "demo.charge_card",
        "team": "Payments",
        "severity": "critical",
        "effects": "outside",
        "runbook": "https://runbooks.example/payments/charges",
    },
    {
        "pattern": "demo.build_statement",
        "team": "Payments",
        "severity": "medium",
        "effects": "none",
        "runbook": "https://runbooks.example/payments/statements",
    },
    {
        "pattern": "demo.import_stock",
        "team": "Warehouse",
        "severity": "low",
        "effects": "idempotent",
        "runbook": "https://runbooks.example/warehouse/stock",
    },
]
