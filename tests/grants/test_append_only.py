"""Audit rows and scopes never change, whoever asks the database to."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import DatabaseError, connection, models, transaction
from hypothesis import given
from hypothesis import strategies as st

from grants import sql
from grants.checks import check_audit_triggers
from grants.leaf import LEAF_COLUMNS, LEAF_VERSION, hash_leaf, verify_leaf
from grants.models import AuditEvent, CapabilityScope
from grants.resources import ANY
from opsconsole.core.canonical_json import canonical_json
from opsconsole.core.ids import new_id
from tests.grants.tools import write_event

REFUSED = r"ops_audit_append_only|rows never change"


def refused(change: Callable[[], Any], message: str = REFUSED) -> bool:
    try:
        with transaction.atomic():
            change()
    except DatabaseError as error:
        return re.search(message, str(error)) is not None
    return False


def execute(statement: str, *parameters: Any) -> Callable[[], None]:
    def run() -> None:
        with connection.cursor() as cursor:
            cursor.execute(statement, parameters)

    return run


@pytest.mark.django_db
def test_django_can_neither_change_nor_delete_a_row() -> None:
    """B16."""
    event = write_event(key="k-1")
    event.reason = "another"
    assert refused(event.save)
    assert refused(event.delete)
    assert refused(lambda: AuditEvent.objects.update(reason="another"))
    assert refused(lambda: AuditEvent.objects.all().delete())
    assert refused(lambda: AuditEvent.objects.bulk_update([event], ["reason"]))
    assert verify_leaf(AuditEvent.objects.get())


@pytest.mark.django_db
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE ops_grants_auditevent SET reason = 'another'",
        "UPDATE ops_grants_auditevent SET leaf_hash = leaf_hash",
        "DELETE FROM ops_grants_auditevent",
    ],
)
def test_sql_can_neither_change_nor_delete_a_row(statement: str) -> None:
    """B16."""
    write_event()
    assert refused(execute(statement))
    assert verify_leaf(AuditEvent.objects.get())


@pytest.mark.django_db
@pytest.mark.postgresql
def test_the_table_can_not_be_truncated() -> None:
    """B16."""
    write_event()
    assert refused(execute("TRUNCATE ops_grants_auditevent"))
    assert refused(execute("TRUNCATE ops_grants_auditevent CASCADE"))


@pytest.mark.django_db
@pytest.mark.postgresql
def test_a_session_that_replays_as_a_replica_is_refused_too() -> None:
    """B16: ordinary triggers do not fire there."""
    write_event()
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL session_replication_role = replica")
    assert refused(execute("UPDATE ops_grants_auditevent SET reason = 'another'"))


@pytest.mark.django_db
@pytest.mark.parametrize("kept", ["id", "idempotency_key", "denial_key"])
def test_a_row_can_not_be_replaced(kept: str) -> None:
    """B16: SQLite's REPLACE removes a row without firing a delete trigger."""
    if connection.vendor != "sqlite":
        pytest.skip("only SQLite has REPLACE")
    write_event(key="k-1")
    copied = [str(field.column) for field in AuditEvent._meta.concrete_fields]
    new = {"id": "lower(hex(randomblob(16)))", "idempotency_key": "'k-2'", "denial_key": "NULL", "reason": "'another'"}
    if kept == "denial_key":
        new |= {"denial_key": "'d'"}
        execute(
            f"INSERT INTO ops_grants_auditevent SELECT {', '.join(new.get(c, c) for c in copied)} FROM"
            " ops_grants_auditevent"
        )()
        new |= {"idempotency_key": "'k-3'"}
    else:
        del new[kept]
    before = AuditEvent.objects.count()
    replace = f"INSERT OR REPLACE INTO ops_grants_auditevent SELECT {', '.join(new.get(c, c) for c in copied)} FROM"
    assert refused(execute(f"{replace} ops_grants_auditevent"), "ops_audit")
    assert AuditEvent.objects.count() == before
    assert all(verify_leaf(event) for event in AuditEvent.objects.filter(idempotency_key="k-1"))


@pytest.mark.django_db
def test_a_scope_never_changes() -> None:
    scope = CapabilityScope.objects.create(tenant="t-a", actor_type=ANY, actor_id=ANY, command_id=ANY)
    scope.tenant = ANY
    with pytest.raises(TypeError):
        scope.save()
    assert refused(lambda: CapabilityScope.objects.update(tenant=ANY), "immutable|rows never change")
    assert CapabilityScope.objects.get().tenant == "t-a"


@pytest.mark.django_db
def test_the_check_is_content_with_a_migrated_database() -> None:
    assert check_audit_triggers(databases=["default"]) == []


@pytest.mark.django_db
def test_the_check_reports_missing_triggers() -> None:
    sql.drop_triggers(connection)
    (message,) = check_audit_triggers(databases=["default"])
    assert message.id == "ops_grants.E003"
    assert all(name in message.msg for name in sql.missing_triggers(connection))
    with pytest.raises(SystemCheckError, match=r"ops_grants\.E003"):
        call_command("check", databases=["default"])
    # Without a database named, Django's check touches none.
    assert check_audit_triggers(databases=None) == []


@pytest.mark.django_db
@pytest.mark.postgresql
def test_the_check_reports_a_disabled_trigger() -> None:
    execute("ALTER TABLE ops_grants_auditevent DISABLE TRIGGER ops_audit_no_change")()
    assert sql.missing_triggers(connection) == ["ops_audit_no_change"]
    sql.install_triggers(connection)
    assert sql.missing_triggers(connection) == []


@pytest.mark.django_db
def test_a_trigger_of_another_release_is_replaced() -> None:
    if connection.vendor != "sqlite":
        pytest.skip("PostgreSQL's function is replaced with the triggers")
    execute("DROP TRIGGER ops_audit_no_update")()
    execute("CREATE TRIGGER ops_audit_no_update BEFORE UPDATE ON ops_grants_auditevent BEGIN SELECT 1; END")()
    assert sql.missing_triggers(connection) == ["ops_audit_no_update"]
    sql.install_triggers(connection)
    write_event()
    assert refused(lambda: AuditEvent.objects.update(reason="another"))


@pytest.mark.django_db
def test_a_database_before_our_first_migration_is_nothing_to_report() -> None:
    with connection.schema_editor() if connection.vendor == "postgresql" else transaction.atomic():
        for table in (sql.EVENTS, sql.SCOPES):
            execute(f"ALTER TABLE {table} RENAME TO {table}_away")()
    assert sql.missing_triggers(connection) == []
    sql.install_triggers(connection)
    for table in (sql.EVENTS, sql.SCOPES):
        execute(f"ALTER TABLE {table}_away RENAME TO {table}")()


@pytest.mark.django_db(transaction=True)
def test_migrate_installs_triggers_that_are_missing() -> None:
    """facts: SQLite drops them whenever a column changes."""
    sql.drop_triggers(connection)
    call_command("migrate", verbosity=0)
    assert sql.missing_triggers(connection) == []


@pytest.mark.django_db(transaction=True)
def test_a_later_migration_that_changes_a_column_leaves_the_trail_protected() -> None:
    write_event()
    old = AuditEvent._meta.get_field("target_id")
    new = models.CharField(max_length=300, blank=True, default="")
    new.set_attributes_from_name("target_id")
    new.model = AuditEvent
    for before, after in ((old, new), (new, old)):
        with connection.schema_editor() as editor:
            editor.alter_field(AuditEvent, before, after)
        if connection.vendor == "sqlite":
            assert sql.missing_triggers(connection)
        call_command("migrate", verbosity=0)
        assert sql.missing_triggers(connection) == []
        assert refused(lambda: AuditEvent.objects.update(reason="another"))


@pytest.mark.django_db
def test_the_triggers_can_be_left_out_for_a_while() -> None:
    write_event()
    with sql.audit_triggers_dropped(connection):
        AuditEvent.objects.all().delete()
    assert sql.missing_triggers(connection) == []


@given(st.dictionaries(st.sampled_from(LEAF_COLUMNS[LEAF_VERSION]), st.text(max_size=20) | st.none()), st.datetimes())
def test_a_leaf_is_the_hash_of_canonical_json(texts: dict[str, str | None], at: datetime) -> None:
    """C16: anyone can compute it from the row, without this code."""
    moment = at.replace(tzinfo=timezone(timedelta(hours=5)))
    columns = {
        **dict.fromkeys(LEAF_COLUMNS[LEAF_VERSION], ""),
        **texts,
        "id": new_id(),
        "at": moment,
        "leaf_version": 1,
    }
    told = {**columns, "id": str(columns["id"]), "at": moment.astimezone(UTC).isoformat(timespec="microseconds")}
    assert hash_leaf(columns) == hashlib.sha256(b"\x00" + canonical_json(told).encode()).hexdigest()
