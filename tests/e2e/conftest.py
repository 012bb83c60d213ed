"""Installations on each broker, and their databases."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import psycopg
import pytest

from tests.e2e.installation import Installation

Make = Callable[..., Installation]


@pytest.fixture(scope="session")
def postgresql_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A migrated database on the server that the suite runs on; installations tell their rows apart by their source."""
    server = os.environ["OPSCONSOLE_DATABASE_URL"]
    name = f"opsconsole_e2e_{os.getpid()}"
    with psycopg.connect(server, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}")
    url = urlsplit(server)._replace(path=f"/{name}").geturl()
    folder = tmp_path_factory.mktemp("e2e")
    Installation(folder, queue="e2e", broker_url="memory://", database_url=url).migrate()
    yield url
    with psycopg.connect(server, autocommit=True) as admin:
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """A maker of installations; what they have started is stopped at the end."""
    made: list[Installation] = []

    def install(**values: str) -> Installation:
        installation = Installation(tmp_path / f"installation-{len(made)}", **values)
        made.append(installation)
        return installation

    yield install
    for installation in made:
        installation.close()


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite database, to be copied."""
    first = Installation(tmp_path_factory.mktemp("e2e"), queue="e2e", broker_url="memory://", database_url="")
    first.migrate()
    with closing(sqlite3.connect(first.database)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return first.database


@pytest.fixture
def embedded(make: Make, migrated_file: Path) -> Installation:
    """SQLite and the broker made of files: no service at all."""
    installation = make(queue=f"e2e-{uuid4().hex[:8]}", broker_url="filesystem://", database_url="")
    installation.database.parent.mkdir()
    shutil.copy(migrated_file, installation.database)
    return installation
