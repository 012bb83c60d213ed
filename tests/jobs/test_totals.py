"""The kept totals of streams: exact whatever happens to the rows, and put right where they are not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection, models, transaction
from django.db.models import Sum

from opsconsole.jobs import sql
from opsconsole.jobs.checks import check_total_triggers
from opsconsole.jobs.models import ActionDelivery, EmailDelivery, Job, Report, Stream, StreamTotal, WorkflowRun
from opsconsole.jobs.sql import Drift, recount_totals
from tests.jobs.rows import action, email, evidence, job, notification, report, run

THREADS = 8


def totals() -> dict[tuple[str, str], int]:
    """Return each total that is not 0."""
    found = StreamTotal.objects.values_list("stream", "tenant").annotate(n=Sum("count"))
    return {(stream, tenant): n for stream, tenant, n in found if n}


def by_state() -> dict[tuple[str, str, str], int]:
    """Return the same for each state."""
    found = StreamTotal.objects.values_list("stream", "tenant", "state").annotate(n=Sum("count"))
    return {(stream, tenant, state): n for stream, tenant, state, n in found if n}


def execute(statement: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement)


@pytest.mark.django_db
def test_each_stream_and_tenant_has_its_own_total() -> None:
    """A7."""
    job()
    job("succeeded", tenant="t-a")
    job("dead")
    job(kind="process_ai_report")  # no routing
    action()
    notification("failed", tenant="t-a")
    email()
    email("delivered")
    run()
    evidence()
    assert totals() == {
        ("routing", "default"): 2,
        ("routing", "t-a"): 1,
        ("actions", "default"): 1,
        ("notifications", "t-a"): 1,
        ("emails", "default"): 2,
        ("workflows", "default"): 1,
        ("evidence", "default"): 1,
    }


@pytest.mark.django_db
def test_rows_that_come_or_go_together_are_each_counted() -> None:
    """A7."""
    made = [job(), job(), job(tenant="t-a"), job(kind="fetch_evidence")]
    Job.objects.bulk_create(
        Job(tenant=tenant, source="tests", kind="route_report", queue="q", available_at=made[0].available_at,
            created_at=made[0].created_at, updated_at=made[0].updated_at)
        for tenant in ("default", "t-a", "t-b")
    )  # fmt: skip
    assert totals() == {("routing", "default"): 3, ("routing", "t-a"): 2, ("routing", "t-b"): 1}
    Job.objects.filter(tenant="t-a").delete()
    made[0].delete()
    assert totals() == {("routing", "default"): 2, ("routing", "t-b"): 1}


@pytest.mark.django_db
def test_a_row_is_counted_in_the_state_that_it_has() -> None:
    """A7: however it changes, and whatever else changes of it."""
    made = [action(), action(), action(tenant="t-a")]
    ActionDelivery.objects.update(state="delivering")
    made[0].state = "delivered"
    made[0].save()
    made[1].state = "retrying"
    made[1].save(update_fields=["state"])
    made[1].last_error_code = "refused"
    made[1].save()
    waiting = job()
    Job.objects.filter(id=waiting.id).update(state="cancelled", finished_at=waiting.created_at)
    Job.objects.filter(id=job("running", kind="fetch_evidence").id).update(attempts=2)
    assert by_state() == {
        ("actions", "default", "delivered"): 1,
        ("actions", "default", "retrying"): 1,
        ("actions", "t-a", "delivering"): 1,
        ("routing", "default", "cancelled"): 1,
    }
    made[1].delete()
    assert ("actions", "default", "retrying") not in by_state()


@pytest.mark.django_db
def test_an_email_that_is_tried_for_the_eighth_time_is_counted_by_itself() -> None:
    """A7."""
    made = email("retrying", attempt_count=7)
    assert by_state() == {("emails", "default", "retrying"): 1}
    EmailDelivery.objects.filter(id=made.id).update(attempt_count=8)
    assert by_state() == {("emails", "default", "exhausted"): 1}
    EmailDelivery.objects.filter(id=made.id).update(state="delivering")
    assert by_state() == {("emails", "default", "delivering"): 1}


@pytest.mark.django_db
def test_what_goes_with_its_report_is_taken_off() -> None:
    of = report()
    action(report=of)
    action(report=of)
    action()
    of.delete()
    assert totals() == {("actions", "default"): 1}


@pytest.mark.django_db(transaction=True)
def test_what_is_undone_was_not_counted() -> None:
    run()
    with transaction.atomic():
        run()
        transaction.set_rollback(True)
    assert totals() == {("workflows", "default"): 1}


@pytest.mark.django_db(transaction=True)
@pytest.mark.postgresql
def test_an_emptied_table_has_no_total() -> None:
    run()
    action()
    execute("TRUNCATE ops_jobs_workflowrun CASCADE")
    assert totals() == {("actions", "default"): 1}


@pytest.mark.django_db(transaction=True)
def test_emptying_every_table_leaves_no_total_behind() -> None:
    """On SQLite the table of the totals may be emptied first, and the rows that are still there after it."""
    action()
    run()
    StreamTotal.objects.all().delete()
    ActionDelivery.objects.all().delete()
    WorkflowRun.objects.all().delete()
    if connection.vendor == "sqlite":
        assert totals() == {}
    recount_totals()
    assert totals() == {}


# --- recounting -------------------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_a_total_that_is_true_is_left_alone() -> None:
    run()
    email()
    assert recount_totals() == []
    assert totals() == {("workflows", "default"): 1, ("emails", "default"): 1}


@pytest.mark.django_db
def test_a_wrong_total_is_put_right_and_reported() -> None:
    """A7, C9: what the recount reports is what it changed."""
    run()
    run(tenant="t-a")
    StreamTotal.objects.filter(tenant="t-a").delete()
    StreamTotal.objects.filter(tenant="default").update(count=5)
    StreamTotal.objects.create(tenant="ghost", stream="emails", state="failed", count=3)
    found = recount_totals()
    assert sorted(found, key=lambda one: (one.stream, one.tenant)) == [
        Drift(stream=Stream.EMAILS, tenant="ghost", state="failed", by=-3),
        Drift(stream=Stream.WORKFLOWS, tenant="default", state="running", by=-4),
        Drift(stream=Stream.WORKFLOWS, tenant="t-a", state="running", by=1),
    ]
    assert totals() == {("workflows", "default"): 1, ("workflows", "t-a"): 1}
    assert recount_totals() == []
    run()
    assert totals()["workflows", "default"] == 2


@pytest.mark.django_db
def test_one_stream_can_be_recounted_alone() -> None:
    StreamTotal.objects.create(tenant="default", stream="emails", state="failed", count=3)
    assert recount_totals(streams=[Stream.ACTIONS]) == []
    assert len(recount_totals(streams=[Stream.EMAILS])) == 1


# --- at once ----------------------------------------------------------------------------------------------------------


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Let threads with connections of their own begin together; raises what one of them raises."""
    barrier = Barrier(count)

    def one(number: int) -> Any:
        try:
            barrier.wait(timeout=60)
            return work(number)
        finally:
            connection.close()

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


@pytest.mark.django_db(transaction=True)
def test_writers_at_the_same_moment_are_all_counted_and_none_fails() -> None:
    """A7: exact, with streams and tenants in another order in each transaction, which locks nobody out."""
    steps: list[Callable[[], Any]] = [
        run,
        action,
        lambda: run(tenant="t-a"),
        lambda: action(tenant="t-a"),
        lambda: job(tenant="t-a"),
        job,
    ]

    def work(number: int) -> None:
        order = steps if number % 2 else steps[::-1]
        for turn in range(5):
            with transaction.atomic():
                for step in order:
                    step()
                if turn == 4:
                    transaction.set_rollback(True)

    at_once(THREADS, work)
    each = THREADS * 4
    assert totals() == {
        (stream, tenant): each for stream in ("routing", "actions", "workflows") for tenant in ("default", "t-a")
    }
    assert StreamTotal.objects.count() <= 6 * THREADS


@pytest.mark.django_db(transaction=True)
def test_a_recount_beside_writers_finds_nothing_wrong_and_spoils_nothing() -> None:
    """A7: counted and kept are compared as of one moment."""
    run(tenant="t-b")
    StreamTotal.objects.filter(tenant="t-b").update(count=100)

    def work(number: int) -> list[Drift]:
        if number < 2:
            return [one for _ in range(10) for one in recount_totals(streams=[Stream.WORKFLOWS])]
        for turn in range(20):
            made = run()
            WorkflowRun.objects.filter(id=made.id).update(state="succeeded")
            if turn % 4 == 0:
                made.delete()
        return []

    found = [drift for drifts in at_once(THREADS, work) for drift in drifts]
    assert found == [Drift(stream=Stream.WORKFLOWS, tenant="t-b", state="running", by=-99)], (
        "two recounts at once repair it once"
    )
    assert by_state() == {
        ("workflows", "default", "succeeded"): (THREADS - 2) * 15,
        ("workflows", "t-b", "running"): 1,
    }
    assert recount_totals() == []


@pytest.mark.django_db(transaction=True)
@pytest.mark.postgresql
def test_a_writer_waits_for_no_other_writers_total() -> None:
    with transaction.atomic():
        run()

        def beside(_: int) -> None:
            execute("SET lock_timeout = '2s'")
            run()

        at_once(1, beside)
    assert totals() == {("workflows", "default"): 2}


@pytest.mark.django_db(transaction=True)
@pytest.mark.postgresql
def test_a_recount_puts_the_parts_of_a_burst_together() -> None:
    for _ in range(5):
        StreamTotal.objects.create(tenant="default", stream="workflows", state="running", count=1)
    for _ in range(5):
        run()
    assert StreamTotal.objects.count() >= 5
    recount_totals()
    assert StreamTotal.objects.count() == 1
    assert totals() == {("workflows", "default"): 5}


# --- triggers ---------------------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_the_check_is_content_with_a_migrated_database() -> None:
    assert check_total_triggers(databases=["default"]) == []


@pytest.mark.django_db
def test_the_check_reports_missing_triggers() -> None:
    sql.drop_triggers(connection)
    (message,) = check_total_triggers(databases=["default"])
    assert message.id == "ops_jobs.E001"
    assert "ops_total_routing_added" in message.msg
    # Without a database named, Django's check touches none.
    assert check_total_triggers(databases=None) == []


@pytest.mark.django_db
@pytest.mark.postgresql
def test_the_check_reports_a_disabled_trigger() -> None:
    execute("ALTER TABLE ops_jobs_workflowrun DISABLE TRIGGER ops_total_workflows_removed")
    assert sql.missing_triggers(connection) == ["ops_total_workflows_removed"]
    sql.install_triggers(connection)
    assert sql.missing_triggers(connection) == []


@pytest.mark.django_db
def test_a_trigger_of_another_release_is_replaced() -> None:
    if connection.vendor == "postgresql":
        execute(
            "CREATE OR REPLACE FUNCTION ops_total_workflows_added() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RETURN NULL; END $$"
        )
    else:
        execute("DROP TRIGGER ops_total_workflows_added")
        execute("CREATE TRIGGER ops_total_workflows_added AFTER INSERT ON ops_jobs_workflowrun BEGIN SELECT 1; END")
    run()
    assert "ops_total_workflows_added" in sql.missing_triggers(connection)
    sql.install_triggers(connection)
    assert sql.missing_triggers(connection) == []
    run()
    assert totals() == {("workflows", "default"): 2}


@pytest.mark.django_db
def test_triggers_that_come_late_count_what_is_there_already() -> None:
    """A7: the first fill, and what was written while they were away."""
    email()
    sql.drop_triggers(connection)
    email()
    email(tenant="t-a")
    job()
    EmailDelivery.objects.filter(tenant="default").first().delete()  # type: ignore[union-attr]
    sql.install_triggers(connection)
    assert totals() == {("emails", "default"): 1, ("emails", "t-a"): 1, ("routing", "default"): 1}


@pytest.mark.django_db(transaction=True)
def test_migrate_installs_triggers_that_are_missing() -> None:
    sql.drop_triggers(connection)
    run()
    call_command("migrate", verbosity=0)
    assert sql.missing_triggers(connection) == []
    assert totals() == {("workflows", "default"): 1}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("model", "name"), [(WorkflowRun, "name"), (StreamTotal, "tenant")])
def test_a_later_migration_that_changes_a_column_leaves_the_totals_true(model: Any, name: str) -> None:
    """SQLite drops a rebuilt table's triggers, and can't rebuild one that another table's trigger names."""
    run()
    old = model._meta.get_field(name)
    new = models.CharField(max_length=150)
    new.set_attributes_from_name(name)
    new.model = model
    for before, after in ((old, new), (new, old)):
        sql.drop_triggers(connection)  # as before each migration of the app
        with connection.schema_editor() as editor:
            editor.alter_field(model, before, after)
        run()
        call_command("migrate", verbosity=0)
        assert sql.missing_triggers(connection) == []
    run()
    assert totals() == {("workflows", "default"): 4}


@pytest.mark.django_db(transaction=True)
def test_the_app_can_be_migrated_back_and_forth() -> None:
    run()
    call_command("migrate", "ops_jobs", "zero", verbosity=0)
    call_command("migrate", verbosity=0)
    assert sql.missing_triggers(connection) == []
    assert totals() == {}
    assert Report.objects.count() == 0
