"""Users and groups as holders of grants."""

from __future__ import annotations

from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.base_user import AbstractBaseUser
from django.contrib.auth.models import Group
from django.core.exceptions import FieldDoesNotExist
from django.db.models import ManyToManyField, Q, QuerySet
from django.db.models.functions import Now

from grants.errors import PrincipalNotFound


def live(field: str = "expires_at") -> Q:
    """Rows that have not ended, by the database's clock."""
    return Q(**{f"{field}__isnull": True}) | Q(**{f"{field}__gt": Now()})


def groups_field() -> ManyToManyField[Any, Any] | None:
    """Return the user model's relation to Django's groups, or None if a custom model has none."""
    try:
        field = get_user_model()._meta.get_field("groups")
    except FieldDoesNotExist:
        return None
    return field if isinstance(field, ManyToManyField) and field.related_model is Group else None


def group_ids(user_id: Any) -> QuerySet[Any, Any]:
    """Return the ids of the groups that a user is in, as a query to put inside another one."""
    field = groups_field()
    if field is None:
        return Group.objects.none().values("pk")
    through: Any = field.remote_field.through
    memberships: QuerySet[Any] = through._default_manager.filter(**{f"{field.m2m_field_name()}_id": user_id})
    return memberships.values(f"{field.m2m_reverse_field_name()}_id")


def user_named(username: str) -> AbstractBaseUser:
    """Return the user with this name; raises ``PrincipalNotFound``."""
    model = get_user_model()
    try:
        user: AbstractBaseUser = model._default_manager.get(**{model.USERNAME_FIELD: username})
    except model.DoesNotExist as error:
        raise PrincipalNotFound from error
    return user


def group_named(name: str) -> Group:
    """Return the group with this name; raises ``PrincipalNotFound``."""
    try:
        return Group.objects.get(name=name)
    except Group.DoesNotExist as error:
        raise PrincipalNotFound from error
