"""Fixtures and gates of the whole suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock
from uuid import uuid4

import django
import hypothesis
import kombu
import pytest
import redis
from django.db.backends.base.operations import BaseDatabaseOperations

from grants.sql import audit_triggers_dropped
from tests import services
from tests.browser import open_browser, open_page
from tests.cast import cast  # noqa: F401  (a fixture of the whole suite)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page
    from pytest_django.live_server_helper import LiveServer

# On a busy machine an example takes as long as it takes.
hypothesis.settings.register_profile("opsconsole", deadline=None)
hypothesis.settings.load_profile("opsconsole")

MARK_OF_FIXTURE = {"redis_url": "broker", "rabbitmq_url": "broker", "chromium": "browser"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the mark to whatever uses the thing, so that ``-m "not broker"`` leaves out exactly what needs one."""
    for item in items:
        for name in getattr(item, "fixturenames", ()):
            if name in MARK_OF_FIXTURE:
                item.add_marker(MARK_OF_FIXTURE[name])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what belongs to another run of the suite, and what lacks a service."""
    on_postgresql = item.config.getoption("database") == "postgresql"
    if item.get_closest_marker("postgresql") and not on_postgresql:
        pytest.skip("only with --database postgresql")
    if item.get_closest_marker("once") and on_postgresql:
        pytest.skip("the same on every database: only with --database sqlite")
    if item.get_closest_marker("django6") and django.VERSION < (6, 0):
        pytest.skip("only on Django 6")
    fixtures = getattr(item, "fixturenames", ())
    if item.get_closest_marker("broker") and not {"redis_url", "rabbitmq_url"} & set(fixtures):
        services.find_redis()
        services.find_rabbitmq()
    if item.get_closest_marker("browser"):
        services.find_chromium()


# -- Database ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def _flush_past_append_only_triggers() -> Iterator[None]:
    """Let Django empty the tables after a transactional test, which the triggers of the audit trail would refuse."""
    flush: Callable[[Any, Any], None] = BaseDatabaseOperations.execute_sql_flush

    def flush_without_triggers(operations: Any, statements: Any) -> None:
        with audit_triggers_dropped(operations.connection):
            flush(operations, statements)

    with mock.patch.object(BaseDatabaseOperations, "execute_sql_flush", flush_without_triggers):
        yield


# -- Brokers -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def redis_url() -> str:
    """The URL of a Redis."""
    return services.find_redis()


@pytest.fixture(scope="session")
def rabbitmq_url() -> str:
    """The URL of a RabbitMQ."""
    return services.find_rabbitmq()


@pytest.fixture
def queue_name(request: pytest.FixtureRequest) -> Iterator[str]:
    """A name for a queue that no other test, run or program uses; what it left on the brokers is removed afterwards."""
    name = f"opsconsole-test-{uuid4().hex}"
    yield name
    if "rabbitmq_url" in request.fixturenames:
        with kombu.Connection(services.RABBITMQ_URL, connect_timeout=2) as broker:
            channel: Any = broker.default_channel
            channel.queue_delete(name)
            channel.exchange_delete(name)
    if "redis_url" in request.fixturenames:
        with redis.Redis.from_url(services.REDIS_URL) as client:
            client.delete(name, f"_kombu.binding.{name}", f"_kombu.binding_permanent.{name}")


# -- Browser -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of a Chromium."""
    return services.find_chromium()


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    """A running browser, for one module: until it is closed, Django's guard against queries in event loops is off."""
    with open_browser(chromium) as running:
        yield running


@pytest.fixture
def page(browser: Browser, live_server: LiveServer) -> Iterator[Page]:
    """A page in a fresh profile on the live server.

    The test fails at its end for a console error, an uncaught error, a violation of the content security policy or a
    request to another host. The 4xx status of a document itself is the test's to judge.
    """
    with open_page(browser, live_server.url) as (opened, troubles):
        yield opened
        opened.wait_for_timeout(50)  # what the page reports last still has to travel here
    if troubles:
        pytest.fail("\n".join(troubles), pytrace=False)
