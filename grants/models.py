"""Who may do what, as rows, and the record of who did."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from datetime import datetime
from typing import Any, ClassVar, Self

from django.conf import settings
from django.contrib.auth.base_user import AbstractBaseUser
from django.contrib.auth.models import Permission
from django.contrib.contenttypes.models import ContentType
from django.db import models
from django.db.models import Q
from django.db.models.functions import Now
from guardian.managers import GroupObjectPermissionManager, UserObjectPermissionManager
from guardian.models import GroupObjectPermissionBase, UserObjectPermissionBase
from knox.crypto import hash_token
from knox.models import AbstractAuthToken
from knox.settings import CONSTANTS as KNOX

from grants.actions import Action
from grants.operators import SYSTEM, OperatorKind
from grants.principals import live
from grants.querysets import ScopedQuerySet
from grants.resources import Resource
from opsconsole.core.canonical_json import JsonValue
from opsconsole.core.database import database_now
from opsconsole.core.ids import new_id

NAME_LENGTH = 200  # of tenants, actor types, actions and operator kinds
ID_LENGTH = 255  # of actors, commands, targets and operators
REASON_LENGTH = 500
VIEW_NAME_LENGTH = 60
QUERY_LENGTH = 2_000
SCOPE_FIELDS = ("tenant", "actor_type", "actor_id", "command_id")


def no_empty(*fields: str) -> Q:
    """Every one of these columns holds something."""
    condition = Q()
    for field in fields:
        condition &= ~Q(**{field: ""})
    return condition


class CapabilityScope(models.Model):  # type: ignore[django-manager-missing]  # guardian's managers are made at run time
    """One scope a capability can have; ``*`` stands for any value, so that every column compares by equality (B1).

    Rows never change: a grant on a scope is a grant on these four values for good. ``grants.sql`` keeps that true for
    statements that do not come through ``save``.
    """

    tenant = models.CharField(max_length=NAME_LENGTH)
    actor_type = models.CharField(max_length=NAME_LENGTH)
    actor_id = models.CharField(max_length=ID_LENGTH)
    command_id = models.CharField(max_length=ID_LENGTH)

    class Meta:
        default_permissions = ()
        permissions = [(action.codename, action.value) for action in Action]
        constraints = [
            models.UniqueConstraint(fields=SCOPE_FIELDS, name="ops_scope_once"),
            # "" is a resource's way to say "none"; a scope that stored it would match what only * may match.
            models.CheckConstraint(condition=no_empty(*SCOPE_FIELDS), name="ops_scope_not_empty"),
        ]

    def __str__(self) -> str:
        return f"{self.tenant} / {self.actor_type} / {self.actor_id} / {self.command_id}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Insert the scope; a stored one can't be saved again."""
        if not self._state.adding:
            raise TypeError("a capability scope never changes; grant on another one")
        super().save(*args, **kwargs)

    def as_resource(self) -> Resource:
        """Return what a capability must cover to cover this whole scope: ``*`` is covered by ``*`` only."""
        return Resource(
            tenant=self.tenant,
            actor_type=self.actor_type,
            actor_id=self.actor_id,
            command_id=self.command_id,
            target_type="capability_scope",
            target_id=str(self.pk),
        )


class GrantFields(models.Model):
    """What both kinds of grant have beside guardian's own columns.

    Action and scope are repeated here, so that neither a check nor a list filter needs a join. ``save`` fills them and
    triggers refuse a row whose copy differs, so guardian's own shortcuts can't make a grant that says two things.
    """

    action = models.CharField(max_length=NAME_LENGTH, choices=[(action.value, action.value) for action in Action])
    tenant = models.CharField(max_length=NAME_LENGTH)
    actor_type = models.CharField(max_length=NAME_LENGTH)
    actor_id = models.CharField(max_length=ID_LENGTH)
    command_id = models.CharField(max_length=ID_LENGTH)
    granted_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    granted_by_name = models.CharField(max_length=ID_LENGTH)
    reason = models.CharField(max_length=REASON_LENGTH)
    granted_at = models.DateTimeField()
    expires_at = models.DateTimeField(null=True, blank=True)  # null: the first operator's, made by bootstrap

    class Meta:
        abstract = True

    def copy_scope(self) -> None:
        """Repeat the action and the scope of the foreign keys in the row's own columns."""
        scope: CapabilityScope = self.content_object  # type: ignore[attr-defined]
        self.action = next(a.value for a in Action if a.codename == self.permission.codename)  # type: ignore[attr-defined]
        for field in SCOPE_FIELDS:
            setattr(self, field, getattr(scope, field))


class GrantQuerySet(ScopedQuerySet["ScopeUserGrant | ScopeGroupGrant"]):
    """Grants of users, or of groups."""

    def live(self) -> Self:
        """Keep those that have not ended, by the database's clock."""
        return self.filter(live())

    def give(
        self,
        *,
        action: Action,
        scope: CapabilityScope,
        reason: str = "given by code",
        granted_by_id: Any | None = None,
        granted_by_name: str = SYSTEM.name,
        granted_at: datetime | None = None,
        expires_at: datetime | None = None,
        **holder: Any,
    ) -> Any:
        """Store a grant for the holder (``user_id=`` or ``group_id=``) and return it.

        This is the row alone: who may give what, the lock and the audit row are ``services.grant``'s.
        """
        permission = Permission.objects.get(
            content_type=ContentType.objects.get_for_model(CapabilityScope), codename=action.codename
        )
        row = self.model(
            **holder,
            permission=permission,
            content_object=scope,
            granted_by_id=granted_by_id,
            granted_by_name=granted_by_name,
            reason=reason,
            granted_at=granted_at or database_now(),
            expires_at=expires_at,
        )
        row.save(force_insert=True)
        return row


class ScopeUserGrant(UserObjectPermissionBase, GrantFields):
    """A capability of one user."""

    content_object = models.ForeignKey(CapabilityScope, on_delete=models.PROTECT, related_name="user_grants")

    objects: ClassVar[Any] = UserObjectPermissionManager.from_queryset(GrantQuerySet)()

    class Meta(UserObjectPermissionBase.Meta):
        default_permissions = ()
        indexes = [models.Index(fields=["user", "action", *SCOPE_FIELDS], name="ops_user_grant_probe")]
        constraints = [
            models.CheckConstraint(condition=no_empty("action", "reason", *SCOPE_FIELDS), name="ops_user_grant_full")
        ]

    def __str__(self) -> str:
        return f"user-grant:{self.pk}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save the grant with its action and scope repeated."""
        self.copy_scope()
        super().save(*args, **kwargs)


class ScopeGroupGrant(GroupObjectPermissionBase, GrantFields):
    """A capability of everyone in a group, from the moment they are in it until they are not."""

    content_object = models.ForeignKey(CapabilityScope, on_delete=models.PROTECT, related_name="group_grants")

    objects: ClassVar[Any] = GroupObjectPermissionManager.from_queryset(GrantQuerySet)()

    class Meta(GroupObjectPermissionBase.Meta):
        default_permissions = ()
        indexes = [models.Index(fields=["group", "action", *SCOPE_FIELDS], name="ops_group_grant_probe")]
        constraints = [
            models.CheckConstraint(condition=no_empty("action", "reason", *SCOPE_FIELDS), name="ops_group_grant_full")
        ]

    def __str__(self) -> str:
        return f"group-grant:{self.pk}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save the grant with its action and scope repeated."""
        self.copy_scope()
        super().save(*args, **kwargs)


class Verdict(models.TextChoices):
    """Whether the one who asked was let."""

    ALLOWED = "allowed"  # a capability covered it, and it happened
    DENIED = "denied"  # no capability did, and nothing happened


class AuditEvent(models.Model):
    """One thing that was done, or refused for want of a capability; written once and never changed or removed (B16).

    Triggers refuse every UPDATE, DELETE and TRUNCATE (``grants.sql``). ``outcome`` is canonical JSON kept as text,
    since its exact bytes are hashed; ``leaf_hash`` covers every other column (``grants.leaf``). There is no foreign key
    here: a row must outlive the user, the letter and the tenant it speaks of.
    """

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    at = models.DateTimeField()  # the database's clock
    tenant = models.CharField(max_length=NAME_LENGTH)
    operator_kind = models.CharField(max_length=20, choices=[(kind.value, kind.value) for kind in OperatorKind])
    operator_id = models.CharField(max_length=ID_LENGTH)
    operator_name = models.CharField(max_length=ID_LENGTH)
    action = models.CharField(max_length=NAME_LENGTH)  # a fact (operations.incident_resolved) or the Action denied
    actor_type = models.CharField(max_length=NAME_LENGTH, blank=True, default="")
    actor_id = models.CharField(max_length=ID_LENGTH, blank=True, default="")
    target_type = models.CharField(max_length=NAME_LENGTH, blank=True, default="")
    target_id = models.CharField(max_length=ID_LENGTH, blank=True, default="")
    capability = models.TextField(blank=True, default="")  # "" = none: denied
    reason = models.TextField(blank=True, default="")
    verdict = models.CharField(max_length=10, choices=Verdict.choices)
    outcome = models.TextField()
    idempotency_key = models.CharField(max_length=600, null=True, blank=True)  # noqa: DJ001 - NULL is in no unique key
    request_digest = models.CharField(max_length=64, blank=True, default="")
    request_id = models.CharField(max_length=ID_LENGTH, blank=True, default="")
    denial_key = models.CharField(max_length=64, null=True, blank=True)  # noqa: DJ001 - set on a folded denial only
    leaf_version = models.PositiveSmallIntegerField()
    leaf_hash = models.CharField(max_length=64)

    objects = ScopedQuerySet.as_manager()

    class Meta:
        default_permissions = ()
        ordering = ["-at", "-id"]
        constraints = [
            # The tenant comes last, so that one index also answers "has this operator used this key at all".
            models.UniqueConstraint(
                fields=["operator_kind", "operator_id", "action", "idempotency_key", "tenant"],
                name="ops_audit_key_once",
            ),
            # Only the system derives keys from facts, which may repeat from tenant to tenant; anyone else's key is one
            # request, wherever it went.
            models.UniqueConstraint(
                fields=["operator_kind", "operator_id", "action", "idempotency_key"],
                condition=~Q(operator_kind=OperatorKind.SYSTEM) & Q(idempotency_key__isnull=False),
                name="ops_audit_key_anywhere",
            ),
            models.UniqueConstraint(
                fields=["denial_key"], condition=Q(denial_key__isnull=False), name="ops_audit_denial_once"
            ),
            models.CheckConstraint(condition=Q(verdict__in=Verdict.values), name="ops_audit_verdict_known"),
            models.CheckConstraint(
                condition=Q(verdict=Verdict.DENIED, capability="") | (Q(verdict=Verdict.ALLOWED) & ~Q(capability="")),
                name="ops_audit_capability_named",
            ),
        ]
        indexes = [
            models.Index(fields=["-at", "-id"], name="ops_audit_newest"),
            models.Index(fields=["tenant", "-at", "-id"], name="ops_audit_tenant_newest"),
            # What people did, among nine million rows of the machinery: the console's audit list begins with it.
            models.Index(
                fields=["-at", "-id"], condition=~Q(operator_kind=OperatorKind.SYSTEM), name="ops_audit_people_newest"
            ),
            models.Index(fields=["target_type", "target_id", "-at", "-id"], name="ops_audit_target_newest"),
        ]

    def __str__(self) -> str:
        return f"{self.at:%Y-%m-%d %H:%M:%S} {self.operator_name} {self.action} {self.verdict}"

    @property
    def outcome_value(self) -> JsonValue:
        """The outcome as a value: what a replay answers with."""
        value: JsonValue = json.loads(self.outcome)
        return value


class SavedView(models.Model):
    """A list of the console as somebody wants to see it again: its filters and its search, under a name of theirs."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+")
    list_slug = models.CharField(max_length=40)  # the part of the address that stands for the list
    name = models.CharField(max_length=VIEW_NAME_LENGTH)
    query = models.CharField(max_length=QUERY_LENGTH, blank=True)  # as the address has it, without a place in the list

    objects: ClassVar[models.Manager[SavedView]] = models.Manager()

    class Meta:
        default_permissions = ()
        constraints = [
            models.UniqueConstraint(fields=["user", "list_slug", "name"], name="ops_saved_view_once"),
            models.CheckConstraint(condition=no_empty("list_slug", "name"), name="ops_saved_view_named"),
        ]

    def __str__(self) -> str:
        return f"{self.name} ({self.list_slug})"


class ApiTokenManager(models.Manager["ApiToken"]):
    """Issues tokens and finds the live one that a header names."""

    def issue(
        self,
        *,
        user: AbstractBaseUser,
        name: str,
        actions: Iterable[Action],
        tenant: str,
        expires_at: datetime,
    ) -> tuple[ApiToken, str]:
        """Store a new token's digest and return it with the token itself, which nobody can read again."""
        # knox's own generator takes its length from the host project's settings, which may be short.
        plain = TOKEN_PREFIX + secrets.token_hex(32)
        token = self.create(
            digest=hash_token(plain),
            token_key=plain[: KNOX.TOKEN_KEY_LENGTH],
            user_id=user.pk,
            name=name,
            actions=sorted(action.value for action in actions),
            tenant=tenant,
            expiry=expires_at,
        )
        return token, plain

    def live(self, plain: str) -> ApiToken | None:
        """Return the token that ``plain`` is, with its owner, unless it is unknown, expired or revoked."""
        if not plain.startswith(TOKEN_PREFIX) or not plain.isascii():
            return None
        # Looked up by its digest: comparing that in the index tells a stranger nothing about the token.
        return self.select_related("user").filter(digest=hash_token(plain), expiry__gt=Now()).first()


TOKEN_PREFIX = "ops_"  # noqa: S105 - lets a leaked token be recognised by scanners


class ApiToken(AbstractAuthToken):  # type: ignore[misc]
    """An API token: part of its owner's grants, for a while; only its hash is kept.

    Its own model, so that a host project that uses knox itself keeps its tokens, its settings and its reverse names.
    """

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="ops_api_tokens")
    public_id = models.UUIDField(unique=True, default=new_id, editable=False)
    name = models.CharField(max_length=NAME_LENGTH)
    actions = models.JSONField()  # a list of published action names
    tenant = models.CharField(max_length=NAME_LENGTH)  # * = every tenant that the owner has
    expiry = models.DateTimeField()
    last_used_at = models.DateTimeField(null=True, blank=True)

    objects: ClassVar[ApiTokenManager] = ApiTokenManager()

    class Meta:
        default_permissions = ()
        constraints = [models.CheckConstraint(condition=no_empty("tenant", "name"), name="ops_token_complete")]

    def __str__(self) -> str:
        return f"{self.name} ({self.public_id})"
