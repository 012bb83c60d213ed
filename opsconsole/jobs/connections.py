"""Connections to third parties that one job at a time may use, as rows that a job holds while its body is at work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from django.db import Error, IntegrityError, transaction

from opsconsole.core.database import database_now, is_unique_violation
from opsconsole.jobs.errors import TryAgain
from opsconsole.jobs.kind import Work
from opsconsole.jobs.models import ConnectionLease

HELD_FOR = timedelta(seconds=60)
"""Until the job's own lease is renewed for the first time, and this one with it."""


@contextmanager
def using_connection(work: Work, connection: str) -> Iterator[None]:
    """Hold the connection of that name, at most 200 characters, for the job's tenant; for the body of a kind.

    The lease is renewed with the job's. If another job holds it, ``TryAgain("connection_busy")`` is raised; one whose
    holder is gone is free again once the sweep of stale leases has been there (A14).
    """
    try:
        with transaction.atomic():
            ConnectionLease.objects.create(
                tenant=work.tenant,
                connection=connection,
                holder=work.token,
                expires_at=database_now() + HELD_FOR,
            )
    except IntegrityError as error:
        if not is_unique_violation(error):
            raise
        raise TryAgain("connection_busy", "another job uses this connection") from error
    try:
        yield
    finally:
        # A database that is away is no reason to lose what the body has come to: the sweep finds the lease.
        with suppress(Error):
            ConnectionLease.objects.filter(tenant=work.tenant, connection=connection, holder=work.token).delete()
