"""Whose job a job of the shop is: what OPSCONSOLE_IDENTITY names."""

from typing import Any


def identity(task: str, args: Any, kwargs: Any, headers: Any) -> tuple[str, str, str]:
    """Return tenant, actor type and actor id."""
    shop = (kwargs or {}).get("shop", "default")
    order = (kwargs or {}).get("order", "")
    return shop, "order" if order else "", str(order)
