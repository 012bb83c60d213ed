"""The operator behind a stored name: for work that goes on after the request that asked for it."""

from __future__ import annotations

from typing import Any

from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError

from grants.errors import NotAnOperator
from grants.models import ApiToken
from grants.operators import SYSTEM, Operator, OperatorKind


def recall_operator(*, ref: str, name: str, user: str) -> Operator | None:
    """Return who ``Operator.ref`` named, with the user whose primary key was stored as text; ``None`` if they are gone.

    What they may do is asked anew: ``authorise`` looks at the user, the token and the grants as they are now.
    """
    kind, _, operator_id = ref.partition(":")
    if kind == OperatorKind.SYSTEM:
        return SYSTEM
    if kind == OperatorKind.TOKEN:
        return _of_token(operator_id)
    try:
        known = OperatorKind(kind)
        user_id: Any = get_user_model()._meta.pk.to_python(user)
    except (ValueError, ValidationError):
        return None
    return Operator(kind=known, id=operator_id, name=name, user_id=user_id)


def _of_token(public_id: str) -> Operator | None:
    try:
        token = ApiToken.objects.select_related("user").filter(public_id=public_id).first()
    except (ValueError, ValidationError):
        return None
    if token is None:
        return None
    try:
        return Operator.from_token(token)
    except NotAnOperator:
        return None
