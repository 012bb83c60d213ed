"""An operator's own views of the console's lists: saved, listed, deleted.

They say how somebody looks at a list and nothing about what may be seen, so no capability covers them and no audit row
tells of them. What they show is filtered by grants whenever they are opened.
"""

from __future__ import annotations

from typing import Any, cast

from django.contrib.auth import get_user_model
from django.db import transaction
from django.db.models import QuerySet

from grants.errors import SavedViewInvalid, TooManySavedViews
from grants.models import QUERY_LENGTH, VIEW_NAME_LENGTH, SavedView
from grants.operators import Operator
from opsconsole.core.database import locked

MOST_VIEWS = 20


def saved_views(by: Operator, list_slug: str) -> list[SavedView]:
    """Return the views that somebody has saved of one list, by name."""
    return list(_own(by, list_slug).order_by("name", "id")[:MOST_VIEWS])


def save_view(*, by: Operator, list_slug: str, name: str, query: str) -> SavedView:
    """Save a view under a name; one that has the name already is replaced, so that saving twice is saving once.

    Locks the user. Raises ``SavedViewInvalid``, and ``TooManySavedViews`` beyond 20 of one list.
    """
    name = " ".join(name.split())
    if not 1 <= len(name) <= VIEW_NAME_LENGTH or not name.isprintable() or len(query) > QUERY_LENGTH:
        raise SavedViewInvalid
    view: SavedView
    with transaction.atomic(durable=True):
        users: Any = get_user_model()._default_manager
        locked(users.filter(pk=by.user_id)).get()
        own = _own(by, list_slug)
        if not own.filter(name=name).exists() and own.count() >= MOST_VIEWS:
            raise TooManySavedViews(most=MOST_VIEWS)
        view, _made = own.update_or_create(
            name=name, defaults={"query": query}, create_defaults={
                "user_id": cast(Any, by.user_id), "list_slug": list_slug, "query": query,
            },
        )  # fmt: skip
    return view


def delete_view(*, by: Operator, list_slug: str, view_id: int) -> bool:
    """Delete one of one's own views; false if there is none, as when it was deleted before."""
    deleted, _ = _own(by, list_slug).filter(id=view_id).delete()
    return bool(deleted)


def _own(by: Operator, list_slug: str) -> QuerySet[SavedView]:
    return SavedView.objects.filter(user_id=cast(Any, by.user_id), list_slug=list_slug)
