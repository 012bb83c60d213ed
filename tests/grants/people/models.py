"""User models as host projects have them; test_custom_user runs each in a process of its own."""

from __future__ import annotations

import uuid
from typing import Any

from django.contrib.auth.base_user import AbstractBaseUser, BaseUserManager
from django.contrib.auth.models import PermissionsMixin
from django.db import models


class PeopleManager(BaseUserManager[Any]):
    """Makes users who are known by their address."""

    def create_user(self, email: str, password: str | None = None, **more: Any) -> Any:
        user = self.model(email=email, **more)
        user.set_password(password)
        user.save()
        return user


class Member(AbstractBaseUser, PermissionsMixin):
    """Signs in by address, has a UUID for a key, and flags with columns of other names."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    email = models.EmailField(unique=True)
    is_active = models.BooleanField(default=True, db_column="enabled")
    is_staff = models.BooleanField(default=False, db_column="works_here")

    USERNAME_FIELD = "email"
    objects = PeopleManager()

    class Meta:
        app_label = "people"

    def __str__(self) -> str:
        return self.email


class Loner(AbstractBaseUser):
    """Has no groups, and computes whether somebody is staff."""

    email = models.EmailField(unique=True)
    role = models.CharField(max_length=20, default="staff")

    USERNAME_FIELD = "email"
    objects = PeopleManager()

    class Meta:
        app_label = "people"

    def __init__(self, *args: Any, is_staff: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not args and not is_staff:
            self.role = "guest"

    def __str__(self) -> str:
        return self.email

    @property
    def is_staff(self) -> bool:
        """Whether the role is a staff role."""
        return self.role == "staff"
