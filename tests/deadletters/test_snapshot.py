"""The snapshot: every number is what a count of the tables would give, and of nothing but what may be seen."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from deadletters.models import DeadLetter
from deadletters.policy import TaskPolicySpec
from deadletters.snapshot import (
    BudgetCounts,
    EvidenceCounts,
    IncidentCounts,
    Snapshot,
    StreamCounts,
    Streams,
    TenantSurge,
    WorkflowCounts,
    operations_snapshot,
)
from grants.actions import Action
from grants.errors import AccessDenied
from grants.models import AuditEvent
from incidents.services import acknowledge_incident, resolve_incident
from opsconsole.core.database import database_now
from opsconsole.core.ids import new_id
from opsconsole.jobs.models import BudgetPolicy, BudgetReservation, BudgetUsage, SurgeState
from repairs.services import discard_letter
from tests.api.situations import retrying
from tests.cast import Cast, give
from tests.factories import dead_letter
from tests.jobs.rows import action, email, evidence, job, notification, run

pytestmark = pytest.mark.django_db


@pytest.fixture
def now() -> datetime:
    return database_now()


def ago(now: datetime, minutes: int) -> datetime:
    return now - timedelta(minutes=minutes)


# --- counts -----------------------------------------------------------------------------------------------------------


def test_empty_tables_give_zeros_and_nulls(cast: Cast) -> None:
    """A7."""
    found = operations_snapshot(cast.ada)
    assert found.streams == Streams()
    assert found.streams.routing == StreamCounts(
        total=0, pending=0, in_flight=0, retrying=0, terminally_failed=0, oldest_due_at=None
    )
    assert found.intake_surge.mode == "normal"
    assert (found.intake_surge.tenants, found.unresolved_letters, found.failed_deliveries) == ((), (), ())
    assert abs(found.generated_at - database_now()) < timedelta(seconds=10)


def test_routing_counts_the_jobs_that_route_reports(cast: Cast, now: datetime) -> None:
    """A7: the oldest that is due is one that waits, not one that runs, has died or is done."""
    for state, minutes in {
        "pending": 3, "retrying": 7, "enqueued": 50, "running": 60, "dead": 70, "succeeded": 80, "cancelled": 90,
    }.items():  # fmt: skip
        job(state, available_at=ago(now, minutes))
    job("pending", available_at=ago(now, 5))
    job("pending", kind="process_ai_report", available_at=ago(now, 100))
    assert operations_snapshot(cast.ada).streams.routing == StreamCounts(
        total=8, pending=2, in_flight=2, retrying=1, terminally_failed=1, oldest_due_at=ago(now, 7)
    )


@pytest.mark.parametrize(("stream", "make"), [("actions", action), ("notifications", notification), ("emails", email)])
def test_a_stream_of_deliveries_counts_its_states(cast: Cast, now: datetime, stream: str, make: Any) -> None:
    """A7."""
    for state, minutes in {"pending": 3, "retrying": 7, "delivering": 50, "failed": 60, "delivered": 70}.items():
        make(state, next_attempt_at=ago(now, minutes))
    make("failed", next_attempt_at=None)
    counts = {
        name: getattr(operations_snapshot(cast.ada).streams, name) for name in ("actions", "notifications", "emails")
    }
    assert counts.pop(stream) == StreamCounts(
        total=6, pending=1, in_flight=1, retrying=1, terminally_failed=2, oldest_due_at=ago(now, 7)
    )
    assert set(counts.values()) == {StreamCounts()}


def test_what_has_no_time_yet_is_due_since_it_was_made(cast: Cast, now: datetime) -> None:
    """A7."""
    email("pending", next_attempt_at=None, created_at=ago(now, 9))
    email("pending", next_attempt_at=ago(now, 2), created_at=ago(now, 20))
    assert operations_snapshot(cast.ada).streams.emails.oldest_due_at == ago(now, 9)


@pytest.mark.parametrize(("attempts", "retries", "failed"), [(7, 1, 0), (8, 0, 1), (9, 0, 1)])
def test_an_email_counts_as_failed_from_its_eighth_attempt(
    cast: Cast, now: datetime, attempts: int, retries: int, failed: int
) -> None:
    """A7: it is still tried, so that it is due; an action is not counted so."""
    email("retrying", attempt_count=attempts, next_attempt_at=ago(now, 4))
    email("delivering", attempt_count=attempts)
    action("retrying", attempt_count=attempts)
    found = operations_snapshot(cast.ada)
    assert found.streams.emails == StreamCounts(
        total=2, in_flight=1, retrying=retries, terminally_failed=failed, oldest_due_at=ago(now, 4)
    )
    assert found.streams.actions.retrying == 1
    assert len(found.failed_deliveries) == failed


def test_workflows_are_active_to_be_repaired_or_failed(cast: Cast, now: datetime) -> None:
    """A7."""
    active = ("created", "dispatch_pending", "queued", "running", "waiting", "paused")
    for minutes, state in enumerate(active):
        run(state, updated_at=ago(now, minutes))
    run("repair_required", updated_at=ago(now, 30))
    run("failed", updated_at=ago(now, 40))
    run("failed")
    run("succeeded", updated_at=ago(now, 50))
    assert operations_snapshot(cast.ada).streams.workflows == WorkflowCounts(
        total=10, active=6, repair_required=1, failed=2, oldest_active_at=ago(now, 30)
    )


def test_evidence_is_pending_fetched_or_not_to_be_had(cast: Cast, now: datetime) -> None:
    """A7."""
    for state, minutes in {"pending": 3, "fetching": 8, "unavailable": 30, "failed": 40, "available": 50}.items():
        evidence(state, updated_at=ago(now, minutes))
    assert operations_snapshot(cast.ada).streams.evidence == EvidenceCounts(
        total=5, pending=1, fetching=1, unavailable=2, oldest_active_at=ago(now, 8)
    )


def test_budgets_say_what_is_held_and_used(cast: Cast, now: datetime) -> None:
    """A7."""
    policy = BudgetPolicy.objects.create(tenant="default", name="ai", limit_units=100)
    retired = BudgetPolicy.objects.create(tenant="default", name="old", limit_units=1, retired_at=now)
    for status, minutes in (("reserved", 20), ("reserved", 10), ("consumed", 1), ("released", 1)):
        BudgetReservation.objects.create(
            tenant="default", policy=policy, units=5, status=status, expires_at=now + timedelta(minutes=minutes)
        )
    for number, one in enumerate((policy, policy, retired)):
        BudgetUsage.objects.create(tenant="default", policy=one, period=f"2026-0{number + 1}", consumed_units=40)
    assert operations_snapshot(cast.ada).streams.budgets == BudgetCounts(
        active_policies=1, active_reservations=2, consumed_units=120, next_expiry_at=now + timedelta(minutes=10)
    )


def test_incidents_are_open_taken_and_of_high_priority(cast: Cast) -> None:
    """A7: high and critical, not closed, whoever has them."""
    for number, severity in enumerate(("critical", "high", "medium", "low", "critical")):
        letter = dead_letter(
            task=f"shop.task_{number}",
            policies=[TaskPolicySpec(pattern="shop.*", severity=severity)],  # type: ignore[arg-type]
        )
        if number == 1:
            acknowledge_incident(incident_id=letter.incident_id, by=cast.ada, key="a")
        if number == 4:
            resolve_incident(
                incident_id=letter.incident_id, by=cast.ada, key="r", code="fixed", summary="It is.", unrepaired=1
            )
    assert operations_snapshot(cast.ada).streams.incidents == IncidentCounts(open=3, acknowledged=1, high_priority=2)


def surge(tenant: str, mode: str, **fields: Any) -> None:
    SurgeState.objects.create(tenant=tenant, mode=mode, updated_at=database_now(), **fields)


def test_the_worst_mode_of_all_tenants_is_told_with_each_of_them(cast: Cast, now: datetime) -> None:
    """A7."""
    surge("a-calm", "normal")
    surge(
        "default", "surge", entered_at=now, recover_after=ago(now, -5), revision=3,
        reason_codes=json.dumps(["too_many", "too_fast"]),
    )  # fmt: skip
    surge("t-b", "elevated")
    found = operations_snapshot(cast.ada).intake_surge
    assert found.mode == "surge"
    assert [one.tenant for one in found.tenants] == ["default", "t-b", "a-calm"]
    assert found.tenants[0] == TenantSurge(
        tenant="default", mode="surge", entered_at=now, recover_after=ago(now, -5),
        reason_codes=("too_many", "too_fast"), revision=3,
    )  # fmt: skip
    assert operations_snapshot(cast.bram).intake_surge.mode == "elevated"
    assert operations_snapshot(cast.ada, tenant="t-c").intake_surge.tenants == (TenantSurge(tenant="t-c"),)


# --- rows -------------------------------------------------------------------------------------------------------------


def test_the_newest_unresolved_letters_are_told_newest_first(cast: Cast) -> None:
    """A7, C18: open, acknowledged and retrying; nothing that is closed, by itself or with its incident."""
    unresolved = [dead_letter(task="shop.one"), dead_letter(task="shop.two"), retrying(cast.ada, task="shop.three")]
    acknowledge_incident(incident_id=unresolved[1].incident_id, by=cast.ada, key="a")
    closed, gone = dead_letter(task="shop.closed"), dead_letter(task="shop.gone")
    resolve_incident(incident_id=closed.incident_id, by=cast.ada, key="r", code="fixed", summary="It is.", unrepaired=1)
    discard_letter(letter_id=gone.id, by=cast.ada, key="d", reason="not needed")
    found = operations_snapshot(cast.ada).unresolved_letters
    ids = [one.id for one in unresolved]
    expected = DeadLetter.objects.filter(id__in=ids).newest_first()
    assert [one.id for one in found] == [one.id for one in expected]
    assert {one.job_type: one.state for one in found} == {
        "shop.one": "open", "shop.two": "acknowledged", "shop.three": "retrying",
    }  # fmt: skip
    assert found[0].last_seen_at == expected[0].last_seen_at
    assert found[0].incident_id == expected[0].incident_id


def test_a_letter_of_a_job_of_ours_names_the_record(cast: Cast) -> None:
    """A7."""
    report_id = new_id()
    made = job("dead", record_type="report", record_id="R-1", report_id=report_id)
    letter = dead_letter()
    DeadLetter.objects.filter(id=letter.id).update(job_id=str(made.id))
    (found,) = operations_snapshot(cast.ada).unresolved_letters
    assert (found.record_type, found.record_id, found.report_id) == ("report", "R-1", report_id)


def test_no_more_than_a_hundred_of_each_are_told(cast: Cast, now: datetime) -> None:
    """A7."""
    letter = dead_letter()
    values = {field.attname: getattr(letter, field.attname) for field in DeadLetter._meta.concrete_fields}
    DeadLetter.objects.bulk_create(
        DeadLetter(**{**values, "id": new_id(), "fingerprint": f"f-{n}", "last_seen_at": ago(now, n + 1)})
        for n in range(110)
    )
    for number in range(40):
        for make in (action, notification, email):
            make("failed", updated_at=ago(now, number))
    found = operations_snapshot(cast.ada)
    assert len(found.unresolved_letters) == len(found.failed_deliveries) == 100
    assert found.unresolved_letters[-1].last_seen_at == ago(now, 99)
    assert found.failed_deliveries[0].updated_at == now
    assert [one.updated_at for one in found.failed_deliveries] == sorted(
        (one.updated_at for one in found.failed_deliveries), reverse=True
    )


def test_failed_deliveries_of_all_kinds_come_with_their_reports(cast: Cast, now: datetime) -> None:
    """A7: what is retried is not among them, an e-mail that has been tried eight times is."""
    sent = {
        "action": action("failed", updated_at=ago(now, 3), last_error_code="refused", attempt_count=5),
        "notification": notification("failed", updated_at=ago(now, 1)),
        "email": email("failed", updated_at=ago(now, 2)),
    }
    late = email("retrying", attempt_count=8, updated_at=ago(now, 4))
    for state in ("pending", "retrying", "delivering", "delivered"):
        for make in (action, notification, email):
            make(state)
    found = operations_snapshot(cast.ada).failed_deliveries
    assert [(one.delivery_type, one.id) for one in found] == [
        ("notification", sent["notification"].id), ("email", sent["email"].id), ("action", sent["action"].id),
        ("email", late.id),
    ]  # fmt: skip
    assert [one.report_reference for one in found] == [
        sent["notification"].notice.report.reference,
        sent["email"].message.report.reference,
        sent["action"].report.reference,
        late.message.report.reference,
    ]
    told = found[2]
    assert (told.state, told.attempt_count, told.error_code, told.tenant) == ("failed", 5, "refused", "default")


# --- whose ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_tenants(now: datetime) -> None:
    """One of everything in ``default``, two of everything in ``t-b``."""
    for tenant in ("default", "t-b", "t-b"):
        job(tenant=tenant)
        for make in (action, notification, email):
            make("failed", tenant=tenant)
        run(tenant=tenant)
        evidence(tenant=tenant)
        dead_letter(tenant=tenant, task=f"shop.task_{new_id()}")
        policy = BudgetPolicy.objects.create(tenant=tenant, name="ai", limit_units=100)
        BudgetReservation.objects.create(tenant=tenant, policy=policy, units=5, expires_at=now)
        BudgetUsage.objects.create(tenant=tenant, policy=policy, period="2026-12", consumed_units=10)


def amounts(found: Snapshot) -> set[int]:
    """Return how much there is of each part, in units of one of everything."""
    streams = found.streams
    return {
        streams.routing.total, streams.routing.pending, streams.actions.total, streams.actions.terminally_failed,
        streams.notifications.terminally_failed, streams.emails.terminally_failed, streams.emails.total,
        streams.workflows.total, streams.workflows.active, streams.evidence.total, streams.evidence.pending,
        streams.budgets.active_policies, streams.budgets.active_reservations, streams.budgets.consumed_units // 10,
        streams.incidents.open, streams.incidents.high_priority, len(found.unresolved_letters),
        len(found.failed_deliveries) // 3,
    }  # fmt: skip


def test_every_part_is_what_the_operator_may_inspect(two_tenants: None, cast: Cast) -> None:
    """A7, GRA-01."""
    assert amounts(operations_snapshot(cast.ada)) == {3}
    assert amounts(operations_snapshot(cast.vera)) == {3}
    assert amounts(operations_snapshot(cast.olga)) == {1}
    assert amounts(operations_snapshot(cast.bram)) == {2}
    assert amounts(operations_snapshot(cast.ada, tenant="t-b")) == {2}
    assert amounts(operations_snapshot(cast.ada, tenant="*")) == {3}
    assert amounts(operations_snapshot(cast.ada, tenant="no-such")) == {0}


def test_a_tenant_that_is_named_is_authorised_first_and_nobody_without_a_grant_gets_zeros(
    two_tenants: None, cast: Cast
) -> None:
    """B2."""
    for operator, tenant in ((cast.olga, "t-b"), (cast.olga, "*"), (cast.nobody, None), (cast.nobody, "default")):
        with pytest.raises(AccessDenied):
            operations_snapshot(operator, tenant=tenant)
    assert AuditEvent.objects.filter(verdict="denied", action="inspect").count() == 4


def test_a_grant_over_one_actor_shows_that_actors_jobs_and_letters_and_no_tenants_totals(cast: Cast) -> None:
    """B1: what belongs to the tenant as a whole is nothing that an actor's grant covers."""
    for actor_id in ("42", "43"):
        job(actor_type="order", actor_id=actor_id)
        job("succeeded", actor_type="order", actor_id=actor_id)
        dead_letter(actor_type="order", actor_id=actor_id, task=f"shop.task_{actor_id}")
    action()
    give(cast.nobody, Action.INSPECT, tenant="default", actor_type="order", actor_id="42")
    found = operations_snapshot(cast.nobody)
    assert (found.streams.routing.total, found.streams.routing.pending) == (2, 1)
    assert found.streams.actions == StreamCounts()
    assert found.streams.incidents == IncidentCounts()
    assert [one.job_type for one in found.unresolved_letters] == ["shop.task_42"]


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_it_is_few_queries_however_many_rows_there_are(two_tenants: None, cast: Cast) -> None:
    """A7."""
    with CaptureQueriesContext(connection) as found:
        operations_snapshot(cast.olga)
    assert len([one for one in found.captured_queries if "clock_timestamp" not in one["sql"]]) <= 8


@pytest.mark.parametrize(
    "index",
    [
        "ops_job_due_of_kind",
        "ops_action_due",
        "ops_notification_due",
        "ops_email_due",
        "ops_run_open",
        "ops_evidence_open",
    ],
)
def test_the_first_that_waits_is_one_look_into_an_index(two_tenants: None, cast: Cast, index: str) -> None:
    """A7: and nothing of a table of records is counted."""
    with CaptureQueriesContext(connection) as found:
        operations_snapshot(cast.olga)
    statement = next(one["sql"] for one in found.captured_queries if "ops_jobs_streamtotal" in one["sql"])
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            for kind in ("seqscan", "bitmapscan", "sort"):
                cursor.execute(f"SET LOCAL enable_{kind} = off")
            cursor.execute(f"EXPLAIN {statement}")
        else:
            cursor.execute(f"EXPLAIN QUERY PLAN {statement}")
        plan = "\n".join(" ".join(str(cell) for cell in row) for row in cursor.fetchall())
    assert f"{index} " in plan, plan
    if connection.vendor == "postgresql":
        assert "Sort" not in plan.partition(index)[0].rpartition("SubPlan")[2], plan
