"""The dispatcher: what it sends a page at a time, and what becomes of jobs whose messages the broker does not take."""

from __future__ import annotations

import json

import pytest
import redis
from celery import Celery
from django.conf import settings
from django.db import connection
from django.test.utils import CaptureQueriesContext

from opsconsole.core.database import database_now
from opsconsole.jobs.dispatcher import BUSY_SECONDS, IDLE_SECONDS, Dispatcher
from opsconsole.jobs.models import Job, JobState
from tests.e2e.proxy import Proxy
from tests.jobs.steps import new_job, run

pytestmark = pytest.mark.django_db


@pytest.fixture
def queue(redis_url: str, queue_name: str) -> str:
    """The queue of every job, on a real Redis."""
    return queue_name


def dispatcher(url: str) -> Dispatcher:
    return Dispatcher(Celery("tests", broker=url, set_as_current=False), source=settings.OPSCONSOLE_SOURCE, owner="w")


def jobs(count: int, queue: str) -> list[Job]:
    made = [new_job() for _ in range(count)]
    Job.objects.update(queue=queue)
    return made


def received(url: str, queue: str) -> list[str]:
    """Return the task ids of the messages in a queue, the oldest first."""
    with redis.Redis.from_url(url) as client:
        return [json.loads(raw)["headers"]["id"] for raw in reversed(client.lrange(queue, 0, -1))]


def test_a_page_of_due_jobs_is_sent_once_each_with_its_token(redis_url: str, queue: str) -> None:
    jobs(120, queue)
    sender = dispatcher(redis_url)
    assert [sender.send_due(), sender.send_due()] == [120, 0]
    assert sorted(received(redis_url, queue)) == sorted(Job.objects.values_list("lease_token", flat=True))
    assert set(Job.objects.values_list("state", flat=True)) == {JobState.ENQUEUED}
    assert sender.trouble == ""


def test_a_page_takes_no_statement_for_each_job(redis_url: str, queue: str) -> None:
    counts = []
    for count in (2, 40):
        jobs(count, queue)
        with CaptureQueriesContext(connection) as captured:
            assert dispatcher(redis_url).send_due() == count
        counts.append(len(captured))
        Job.objects.all().delete()
    assert counts[0] == counts[1]


def test_a_broker_that_is_gone_leaves_every_job_due(redis_url: str, queue: str) -> None:
    jobs(3, queue)
    proxy = Proxy(redis_url)
    sender = dispatcher(proxy.url)
    proxy.refuse()
    assert sender.send_due() == 0
    assert "broker_unreachable" in sender.trouble
    assert set(Job.objects.values_list("state", "lease_owner")) == {(JobState.PENDING, "")}
    proxy.pass_on()
    assert sender.send_due() == 3
    assert sender.trouble == ""
    assert len(received(redis_url, queue)) == 3
    proxy.close()


def test_a_job_whose_own_message_is_refused_waits_and_lets_the_others_pass(redis_url: str, queue: str) -> None:
    """It says why, and due at once it would head every page."""
    refused, *_others = jobs(150, queue)
    with redis.Redis.from_url(redis_url) as client:
        client.set(f"{queue}-broken", "no list", ex=60)
    Job.objects.filter(id=refused.id).update(queue=f"{queue}-broken")
    sender = dispatcher(redis_url)
    assert sender.send_due() == 149
    assert "WRONGTYPE" in sender.trouble
    refused.refresh_from_db()
    assert (refused.state, refused.lease_owner) == (JobState.PENDING, "")
    assert refused.available_at > database_now()
    assert len(received(redis_url, queue)) == 149
    with redis.Redis.from_url(redis_url) as client:
        client.delete(f"{queue}-broken")
    Job.objects.filter(id=refused.id).update(available_at=database_now())
    sender._refused_until = 0
    assert (sender.send_due(), sender.trouble) == (1, "")
    with redis.Redis.from_url(redis_url) as client:
        client.delete(*client.scan_iter(f"*{queue}-broken*", count=1000))


def test_more_is_sent_once_half_of_what_may_wait_is_done(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page for each job that is done would cost more than the job."""
    monkeypatch.setattr("opsconsole.jobs.dispatcher.MOST_OUTSTANDING", 4)
    monkeypatch.setattr("opsconsole.jobs.dispatcher.FEW_OUTSTANDING", 2)
    jobs(10, queue)
    sender = dispatcher(redis_url)
    assert sender.send_due() == 4

    def finish_one() -> None:
        job = Job.objects.filter(state=JobState.ENQUEUED)[0]
        assert run(job, job.lease_token) is None

    finish_one()
    assert sender.send_due() == 0
    assert sender._pause_after(0, BUSY_SECONDS) == BUSY_SECONDS, "workers take them"
    assert sender.send_due() == 0
    assert sender._pause_after(0, BUSY_SECONDS) > BUSY_SECONDS, "nobody does"
    assert sender._pause_after(0, IDLE_SECONDS) == IDLE_SECONDS
    finish_one()
    assert sender.send_due() == 2
    assert Job.objects.filter(state=JobState.ENQUEUED).count() == 4
