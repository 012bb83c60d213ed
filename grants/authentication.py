"""Who sent a request: an API token in the header, or a signed-in session."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.contrib.auth.base_user import AbstractBaseUser
from django.db import DatabaseError
from django.db.models import Q
from django.db.models.functions import Now
from django.utils import timezone
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.exceptions import AuthenticationFailed

from grants.errors import NotAnOperator, NotAuthenticated
from grants.models import ApiToken
from grants.operators import Operator, require_active_staff

if TYPE_CHECKING:
    from django.http import HttpRequest
    from rest_framework.request import Request

logger = logging.getLogger(__name__)
LAST_USED_EVERY = timedelta(minutes=1)


class TokenAuthentication(BaseAuthentication):
    """Reads ``Authorization: Bearer <token>``; ``request.auth`` is then the ``ApiToken``, ``request.user`` its owner.

    Every request looks the token and its owner up again, so revoking, expiry and losing staff status act at once. A
    header that names a bad token is refused here: it never falls back to the session's cookie.
    """

    keyword = b"bearer"

    def authenticate(self, request: Request) -> tuple[AbstractBaseUser, ApiToken] | None:
        """Return the owner and the token, or None without such a header; raises DRF's ``AuthenticationFailed``."""
        parts = get_authorization_header(request).split()
        if not parts or parts[0].lower() != self.keyword:
            return None
        token = ApiToken.objects.live(parts[1].decode("latin-1")) if len(parts) == 2 else None
        if token is None:
            raise AuthenticationFailed
        try:
            owner = require_active_staff(token.user)
        except NotAnOperator as error:
            raise AuthenticationFailed from error
        note_use(token)
        return owner, token

    def authenticate_header(self, request: Request) -> str:  # noqa: ARG002 - DRF's signature
        """Return the challenge of a 401."""
        return 'Bearer realm="opsconsole"'


def operator_of(request: HttpRequest | Request) -> Operator:
    """Return who sent ``request``; raises ``NotAuthenticated`` unless that is a live token or an active staff user."""
    token: Any = getattr(request, "auth", None)
    if isinstance(token, ApiToken):
        return Operator.from_token(token)
    user: Any = getattr(request, "user", None)
    if user is None:
        raise NotAuthenticated
    return Operator.from_user(user)


def note_use(token: ApiToken) -> None:
    """Store when a token was last used, at most once a minute, so that reads don't become writes."""
    if token.last_used_at is not None and timezone.now() - token.last_used_at < LAST_USED_EVERY:
        return
    rows = ApiToken.objects.filter(pk=token.pk)
    try:
        rows.filter(Q(last_used_at__isnull=True) | Q(last_used_at__lt=Now() - LAST_USED_EVERY)).update(
            last_used_at=Now()
        )
    except DatabaseError:
        # A database that is read-only for a while still answers questions.
        logger.warning("the last use of API token %s was not stored", token.public_id, exc_info=True)
