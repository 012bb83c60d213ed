"""This app's raw SQL, alike on PostgreSQL and SQLite."""

from __future__ import annotations

from django.db import connections

INCIDENTS = "ops_incidents_incident"


def tenants(using: str, limit: int) -> list[str]:
    """Return the tenants that have an incident, in order, ``limit`` at most.

    Raw because the ORM has no recursion: each step seeks the next tenant in the unique index, so that the cost is that
    of the tenants and not, as with SELECT DISTINCT, that of the rows.
    """
    statement = (
        f"WITH RECURSIVE named(tenant) AS (SELECT min(tenant) FROM {INCIDENTS}"  # noqa: S608 - a constant
        f" UNION ALL SELECT (SELECT min(i.tenant) FROM {INCIDENTS} i WHERE i.tenant > named.tenant)"
        " FROM named WHERE named.tenant IS NOT NULL)"
        " SELECT tenant FROM named WHERE tenant IS NOT NULL LIMIT %s"
    )
    with connections[using].cursor() as cursor:
        cursor.execute(statement, [limit])
        return [row[0] for row in cursor.fetchall()]
