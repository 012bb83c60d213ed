"""Whose job a job of the demo is: what ``OPSCONSOLE_IDENTITY`` names."""

# ruff: noqa: ARG001  (the setting names the arguments)

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def identity(task: str, args: Any, kwargs: Any, headers: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return tenant, actor type and actor id; a job that names nobody belongs to tenant "default"."""
    values = kwargs if isinstance(kwargs, Mapping) else {}
    customer = str(values.get("customer", ""))
    return str(values.get("tenant", "default")), "customer" if customer else "", customer
