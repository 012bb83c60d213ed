"""The connection that a process keeps for the ledger while Celery closes Django's around each task."""

from __future__ import annotations

import threading

import pytest
from django.db import connection, connections

from opsconsole.jobs import kept
from opsconsole.jobs.kept import KEPT
from opsconsole.jobs.models import Job, JobState
from tests.jobs.steps import dispatch, new_job, run

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _closed() -> object:
    if connection.vendor != "postgresql":
        pytest.skip("on SQLite opening a connection costs little")
    yield
    KEPT.close()


def backend() -> int:
    with KEPT.connection().cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return int(cursor.fetchone()[0])


def test_jobs_run_on_one_connection_although_djangos_is_closed_around_each() -> None:
    backends = []
    for _ in range(3):
        job = new_job(body=lambda _work: None)
        token = dispatch(job)
        connections.close_all()
        assert run(job, token) is None
        assert connection.connection is None, "nothing but the ledger's own statements was needed"
        backends.append(backend())
    assert len(set(backends)) == 1
    assert set(Job.objects.values_list("state", flat=True)) == {JobState.SUCCEEDED}


def test_djangos_own_connection_is_used_while_it_is_open() -> None:
    """A caller's transaction is on it."""
    connection.ensure_connection()
    assert KEPT.connection() is connections["default"]


def test_a_connection_that_was_idle_for_long_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    connections.close_all()
    first = backend()
    monkeypatch.setattr(kept, "KEPT_FOR_SECONDS", 0.0)
    assert backend() != first


def test_a_thread_keeps_none() -> None:
    found = []

    def look() -> None:
        found.append(KEPT.connection() is connections["default"])

    connections.close_all()
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [True]
