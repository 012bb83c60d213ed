"""How often each page asks the database: at most eight times beside who is signed in, however much there is."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from deadletters.arguments import describe_signature
from deadletters.models import Attempt, DeadLetter, TaskMinute, WorkerNode
from deadletters.policy import TaskPolicySpec
from grants.actions import Action
from incidents.models import Incident
from incidents.services import resolve_incident
from opsconsole.console import machinery, overview
from opsconsole.core import database
from opsconsole.core.database import database_now
from repairs.models import RepairAction
from repairs.refusals import forget_served
from repairs.services import retry_incident, retry_letter
from tests.admin.conftest import SignIn
from tests.admin.test_access import PAGES, World, world  # noqa: F401 - a fixture
from tests.admin.tools import fail_again, mark_sent
from tests.cast import Cast, give, make_operator
from tests.factories import dead_letter, failure, record

pytestmark = pytest.mark.django_db

MOST = 8
KEPT = 5
"""Statements of a process that has told nothing for some seconds: the machinery's line, the newest sweep, the live
workers, the policies, and on PostgreSQL the clock; one more where no worker is alive."""
COUNTS = {
    # The name of the page: its statements, without session and user, with what a process keeps for seconds read.
    "index": 1,
    "live_overview": 1,
    "login": 0,
    "logout": 1,
    "password_change": 1,
    "password_change_done": 1,
    "django_celery_beat_periodictask_page": 3,
    "ops_repairs_reconciliationrun_changelist": 3,
    "ops_repairs_reconciliationrun_page": 5,
    "ops_repairs_reconciliationrun_run": 2,
    "ops_deadletters_hold_changelist": 5,
    "ops_deadletters_hold_place": 1,
    "ops_deadletters_hold_page": 7,
    "ops_deadletters_hold_extend": 4,
    "ops_deadletters_hold_end": 4,
    "ops_deadletters_hold_release": 5,
    "ops_repairs_redrive_changelist": 3,
    "ops_repairs_redrive_plan": 2,
    "ops_repairs_redrive_page": 4,
    "ops_repairs_redrive_approve": 4,
    "ops_repairs_redrive_start": 4,
    "ops_repairs_redrive_pause": 4,
    "ops_repairs_redrive_resume": 4,
    "ops_repairs_redrive_cancel": 4,
    "ops_repairs_redrive_retry_failed": 4,
    "ops_jobs_job_changelist": 3,
    "ops_jobs_job_page": 7,
    "ops_jobs_job_payload": 8,
    "ops_incidents_incident_changelist": 7,
    "ops_incidents_incident_newer": 3,
    "ops_incidents_incident_page": 8,
    "ops_incidents_incident_take": 3,
    "ops_incidents_incident_release": 2,
    "ops_incidents_incident_close": 5,
    "ops_incidents_incident_retry_one": 5,
    "ops_incidents_incident_retry_all": 4,
    "ops_deadletters_deadletter_changelist": 7,
    "ops_deadletters_deadletter_newer": 3,
    "ops_deadletters_deadletter_page": 5,
    "ops_deadletters_deadletter_traceback": 3,
    "ops_deadletters_deadletter_retry": 4,
    "ops_deadletters_deadletter_done": 3,
    "ops_deadletters_deadletter_discard": 3,
    "ops_deadletters_deadletter_payload": 3,
    "ops_deadletters_workernode_changelist": 2,
    "ops_deadletters_workernode_page": 2,
    "django_celery_beat_periodictask_changelist": 2,
    "ops_repairs_repairaction_changelist": 3,
    "ops_repairs_repairaction_page": 4,
    "ops_repairs_repairaction_cancel": 5,
    "ops_grants_auditevent_changelist": 4,
    "ops_grants_auditevent_csv": 4,
    "ops_grants_auditevent_page": 3,
    "ops_grants_scopeusergrant_changelist": 5,
    "ops_grants_scopeusergrant_give": 1,
    "ops_grants_scopeusergrant_explain": 5,
    "ops_grants_scopeusergrant_revoke": 4,
    "ops_grants_apitoken_changelist": 2,
    "ops_grants_apitoken_create": 1,
    "ops_grants_apitoken_revoke": 2,
}


def statements(client: Client, path: str) -> list[str]:
    """Return what a page asks beside its session and its user, and beside a clock: that is read on PostgreSQL alone."""
    with CaptureQueriesContext(connection) as found:
        client.get(path)
    who = ('SELECT "django_session"', 'SELECT "auth_user"."id"')
    return [one["sql"] for one in found.captured_queries if not one["sql"].startswith(who)]


def forget() -> None:
    """Leave nothing that this process keeps for some seconds."""
    machinery.forget()
    overview.forget()
    forget_served()
    database._clocks.clear()


def make_worker() -> None:
    now = database_now()
    WorkerNode.objects.create(
        id="serves", source="tests", host="h", pid=1, queues='["celery"]', started_at=now, seen_at=now,
        tasks=json.dumps({"shop.send_mail": describe_signature(lambda address, order=None: None)}),
    )  # fmt: skip


@pytest.fixture
def busy(world: World) -> World:  # noqa: F811
    """Jobs enough for a page of every list, some of them of an incident of many."""
    make_worker()
    # Recorded together: each page begins with its own, a hundred times.
    policies = [TaskPolicySpec(pattern="shop.*", effects="outside")]
    tasks = ["shop.send_mail"] * 30 + [f"shop.task_{number}" for number in range(30)]
    record(*(failure(task=task, policies=policies) for task in tasks))
    return world


@pytest.mark.parametrize("name", PAGES)
def test_every_page_asks_as_often_as_is_recorded(name: str, busy: World, cast: Cast, sign_in: SignIn) -> None:
    """SCA-01: a page that asks more fails here; its number is changed in the same commit as its reason."""
    client, path = sign_in(cast.ada), PAGES[name].path(busy)
    client.get(path)
    asked = statements(client, path)
    clocks = [one for one in asked if "clock_timestamp" in one]
    assert len(asked) - len(clocks) == COUNTS[name], asked
    assert len(asked) <= MOST, asked


def test_every_page_has_its_number() -> None:
    assert set(COUNTS) == set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_a_process_that_was_idle_reads_what_it_keeps_and_no_more(
    name: str, busy: World, cast: Cast, sign_in: SignIn
) -> None:
    client, path = sign_in(cast.ada), PAGES[name].path(busy)
    client.get(path)
    usual = len(statements(client, path))
    forget()
    # The overview is itself kept, so that what it asks when it is warm says nothing about it.
    most = MOST if name in ("index", "live_overview") else usual
    assert len(statements(client, path)) <= most + KEPT


# -- the pages that have most to tell ----------------------------------------------------------------------------------


def _many(cast: Cast) -> str:
    for _ in range(40):
        dead_letter()
    return ""


def _few(cast: Cast) -> str:
    dead_letter()
    return ""


def _chosen(cast: Cast) -> str:
    letters = [dead_letter() for _ in range(40)]
    return f"?job={letters[3].id}"


def _one_of_few_chosen(cast: Cast) -> str:
    letters = [dead_letter() for _ in range(20)]
    return f"?job={letters[3].id}"


def _retried(cast: Cast) -> str:
    """More repairs than the page lists, more jobs than are opened, and one chosen that is not among the first."""
    letters = [dead_letter() for _ in range(60)]
    retry_incident(
        incident_id=letters[0].incident_id, by=cast.ada, key="k", letter_ids=[one.id for one in letters[:25]]
    )
    for action in RepairAction.objects.all()[:5]:
        fail_again(mark_sent(action))
    return f"?job={letters[40].id}"


def _all_sent(cast: Cast) -> str:
    letter = dead_letter()
    retry_letter(letter_id=letter.id, by=cast.ada, key="k")
    return ""


def _closed(cast: Cast) -> str:
    letter = dead_letter()
    resolve_incident(
        incident_id=letter.incident_id, by=cast.ada, key="k", code="loss_accepted", summary="nobody", unrepaired=1
    )
    return ""


def _reopened(cast: Cast) -> str:
    _closed(cast)
    dead_letter()
    return ""


def _attempts(cast: Cast) -> str:
    letter = dead_letter()
    for retries in range(3):
        Attempt.objects.create(
            tenant=letter.tenant, source=letter.source, task_id=letter.task_id, retries=retries,
            job_type=letter.job_type, happened_at=database_now() - timedelta(minutes=retries), outcome_class="safe",
        )  # fmt: skip
    return ""


SITUATIONS: tuple[Callable[[Cast], str], ...] = (
    _few, _many, _chosen, _one_of_few_chosen, _retried, _all_sent, _closed, _reopened, _attempts,
)  # fmt: skip


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("has_worker", [True, False])
def test_the_page_of_an_incident_asks_eight_times_whatever_it_has_to_tell(
    situation: Callable[[Cast], str], has_worker: bool, cast: Cast, sign_in: SignIn
) -> None:
    if has_worker:
        make_worker()
    query = situation(cast)
    client, path = sign_in(cast.ada), f"/ops/incidents/{Incident.objects.get().id}/{query}"
    assert client.get(path).status_code == 200
    asked = statements(client, path)
    assert len(asked) <= MOST, asked


@pytest.mark.parametrize("show", ["safe", "ambiguous", "blocked", "awaiting", "all"])
def test_another_set_of_its_jobs_costs_no_more(show: str, cast: Cast, sign_in: SignIn) -> None:
    _retried(cast)
    client, path = sign_in(cast.ada), f"/ops/incidents/{Incident.objects.get().id}/?show={show}&queue=celery"
    client.get(path)
    assert len(statements(client, path)) <= MOST


def test_who_sees_a_part_of_a_tenant_is_asked_about_once_more(cast: Cast, sign_in: SignIn) -> None:
    """The scope of a job is its own, and differs from that of its incident."""
    _many(cast)
    DeadLetter.objects.update(actor_type="order", actor_id="7")
    partly = make_operator("pia")
    give(partly, Action.INSPECT, tenant="default")
    give(partly, Action.PAYLOADS_READ, tenant="default", actor_type="order")
    client, path = sign_in(partly), f"/ops/incidents/{Incident.objects.get().id}/"
    assert client.get(path).context["reveal"]["url"]
    assert len(statements(client, path)) <= MOST + 1


@pytest.mark.parametrize("tasks", [5, 40])
def test_the_overview_is_read_with_eight_statements(tasks: int, cast: Cast, sign_in: SignIn) -> None:
    """A few failed jobs are looked at to the end, many by their rows."""
    now = database_now().replace(second=0, microsecond=0)
    for number in range(tasks):
        dead_letter(task=f"shop.task_{number}")
        TaskMinute.objects.create(
            tenant="default", source="tests", job_type=f"shop.task_{number}", minute=now, received=3, failed=1
        )
    make_worker()
    client = sign_in(cast.ada)
    client.get("/ops/")
    overview.forget()
    asked = statements(client, "/ops/")
    assert len(asked) <= MOST, asked
