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
from django.db import transaction
from django.db.backends.base.operations import BaseDatabaseOperations
from django.test import TransactionTestCase

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

LEFT_OUT = pytest.StashKey[int]()
DATABASE_FIXTURES = {
    "db",
    "transactional_db",
    "django_db_reset_sequences",
    "django_db_serialized_rollback",
    "live_server",
}
MARK_OF_FIXTURE = {"redis_url": "broker", "rabbitmq_url": "broker", "chromium": "browser"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each test the mark of what it uses, and leave out what is of another run (see ``--part``).

    What is the same on every database is never repeated on PostgreSQL.
    """
    for item in items:
        for name in getattr(item, "fixturenames", ()):
            if name in MARK_OF_FIXTURE:
                # So that -m "not broker" leaves out exactly what needs one.
                item.add_marker(MARK_OF_FIXTURE[name])
    part = config.getoption("part")
    if part == "all" and config.getoption("database") == "postgresql":
        part = "database"
    if part == "all":
        return
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        (kept if is_the_same_everywhere(item) == (part == "rest") else left_out).append(item)
    config.stash[LEFT_OUT] = len(left_out)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def is_the_same_everywhere(item: pytest.Item) -> bool:
    """Say whether a test has nothing to do with the database of the run: pytest-django keeps it from that one."""
    if item.get_closest_marker("once"):
        return True
    if item.get_closest_marker("django_db") or item.get_closest_marker("postgresql"):
        return False
    if DATABASE_FIXTURES.intersection(getattr(item, "fixturenames", ())):
        return False
    return not (isinstance(item, pytest.Function) and item.cls and issubclass(item.cls, TransactionTestCase))


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    left_out = config.stash.get(LEFT_OUT, 0)
    what = "touch the database" if config.getoption("part") == "rest" else "are the same on every database"
    return [f"left out {left_out} tests that {what}: another run has them"] if left_out else []


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Let a run in which everything was left out succeed."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.stash.get(LEFT_OUT, 0):
        session.exitstatus = pytest.ExitCode.OK


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what belongs to another run of the suite, and what lacks a service."""
    if item.get_closest_marker("postgresql") and item.config.getoption("database") != "postgresql":
        pytest.skip("only with --database postgresql")
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
            if not (operations.connection.vendor == "postgresql" and delete_all_rows(operations.connection)):
                flush(operations, statements)

    with mock.patch.object(BaseDatabaseOperations, "execute_sql_flush", flush_without_triggers):
        yield


def delete_all_rows(connection: Any) -> bool:
    """Empty the tables of PostgreSQL, and say whether that could be done this way: it takes a superuser.

    To truncate them, as Django does, writes a file for each table and index: for a few rows seconds, on a busy disk.
    """
    tables = connection.introspection.django_table_names(only_existing=True, include_views=False)
    filled = " UNION ALL ".join(f"SELECT '{table}' WHERE EXISTS (SELECT FROM {table})" for table in tables)
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        cursor.execute("SELECT rolsuper FROM pg_roles WHERE rolname = current_user")
        if not cursor.fetchone()[0]:
            return False
        # Neither foreign keys nor the triggers that keep totals: what those keep is emptied as well.
        cursor.execute("SET LOCAL session_replication_role = replica")
        cursor.execute(filled)
        for (table,) in cursor.fetchall():
            cursor.execute(f"DELETE FROM {table}")
    return True


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
