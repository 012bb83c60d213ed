"""``manage.py up``: the whole console in one foreground process, for one machine and no other service."""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError, connections
from django.urls import reverse

import opsconsole
from grants.services import bootstrap
from opsconsole.demo.flaky import keep_desk_port
from opsconsole.demo.folder import DemoFolder
from opsconsole.management.own_project import refuse_other_projects
from opsconsole.management.supervisor import Supervisor, describe_end

EMBEDDED_SETTINGS = "opsconsole.settings.base"
DEMO_SETTINGS = "opsconsole.demo.settings"
OPERATOR = "operator"
HOME = "opsconsole:index"
READY_WITHIN_SECONDS = 90.0


class Command(BaseCommand):
    """Prepares the database and the first operator, then runs web, worker with beat, and the demo until Ctrl-C."""

    help = (
        "Start the console on this machine: web, one worker with the scheduler, and a demo that fails on purpose. "
        "Ctrl-C stops all of it."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the options."""
        parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
        parser.add_argument("--port", type=_port, default=8000, help="port to listen on (default: 8000)")
        parser.add_argument("--workers", type=_count, default=2, help="how many jobs run at a time (default: 2)")
        parser.add_argument("--no-demo", action="store_false", dest="demo", help="run without the demo's services")

    def handle(self, *_: Any, **options: Any) -> None:
        """Run until told to stop; anything that stops it by itself is a ``CommandError``."""
        refuse_other_projects()
        demo = options["demo"] and os.environ.get("DJANGO_SETTINGS_MODULE") in (EMBEDDED_SETTINGS, DEMO_SETTINGS)
        _refuse_open_house(options["host"])
        with _alone(Path(settings.VAR_DIR)) as lock, _listening(options["host"], options["port"]) as web_socket:
            url = _url(options["host"], web_socket)
            _write_lock(lock, url)
            supervisor = Supervisor(self._write)
            with supervisor:
                self._prepare()
                if supervisor.is_stopping:
                    return
                sign_in = self._sign_in()
                self._start(supervisor, web_socket, demo=demo, workers=options["workers"])
                _wait_until_ready(supervisor, url)
                if not supervisor.is_stopping:
                    self._announce(supervisor, url, sign_in, demo=demo)
                gone = supervisor.wait()
                if gone is None:
                    supervisor.say("Stopping (Ctrl-C again stops at once) ...")
            if gone is not None:
                raise CommandError(f"{describe_end(gone)}; the rest was stopped.")
        supervisor.say("Stopped.")

    def _write(self, text: str) -> None:
        self.stdout.write(text)
        self.stdout.flush()

    def _prepare(self) -> None:
        self._write("Preparing the database ...")
        try:
            call_command("migrate", interactive=False, verbosity=0)
        except DatabaseError as error:
            name = settings.DATABASES["default"]["NAME"]
            raise CommandError(f"The database {name} cannot be prepared: {error}") from error
        if settings.STATIC_ROOT and not getattr(settings, "WHITENOISE_USE_FINDERS", False):
            call_command("collectstatic", interactive=False, verbosity=0)

    def _sign_in(self) -> list[str]:
        """Return the lines about signing in; makes the first operator where there is nobody who could be one."""
        users = get_user_model()._default_manager
        name = get_user_model().USERNAME_FIELD
        if users.filter(**{name: OPERATOR}).exists():
            lines = [
                f"Sign in    as {OPERATOR}; the password was shown when it was made.",
                f"           A new one: {_manage()} changepassword {OPERATOR}",
            ]
        elif users.filter(is_staff=True).exists():
            lines = ["Sign in    as one of the operators that there are."]
        else:
            receipt = bootstrap(username=OPERATOR, create=True)
            lines = [
                f"Sign in    as {OPERATOR} with the password {receipt.password}",
                "           It is shown this once and stored nowhere else.",
            ]
        connections.close_all()
        return lines

    def _start(self, supervisor: Supervisor, web_socket: socket.socket, *, demo: bool, workers: int) -> None:
        # The code that runs here runs there too, from whichever folder this was started.
        paths = [str(Path(opsconsole.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}
        if demo:
            env["DJANGO_SETTINGS_MODULE"] = DEMO_SETTINGS
            DemoFolder(_demo_path()).forget_ports()  # left by services that were killed: who listens there now?
            DemoFolder(_demo_path()).begin_log()
            keep_desk_port(DemoFolder(_demo_path()))  # which the settings of all that is started below name
            supervisor.start("services", _python("-m", "opsconsole.demo.flaky", str(_demo_path())), env=env)
        queues = [settings.OPSCONSOLE_QUEUE, *(["demo"] if demo else [])]
        supervisor.start("worker", _worker(workers, queues), env=env)
        descriptor = web_socket.fileno()
        supervisor.start("web", _web(descriptor), env=env, pass_fds=[descriptor])
        if demo:
            supervisor.start("demo", _python("-m", "opsconsole.demo.workload"), env=env)
        supervisor.watch()

    def _announce(self, supervisor: Supervisor, url: str, sign_in: list[str], *, demo: bool) -> None:
        lines = ["", f"Console    {url.rstrip('/')}{reverse(HOME)}", *sign_in]
        folder = DemoFolder(_demo_path())
        if demo and folder.condition().is_broken:
            lines += [
                "Demo       jobs fail on purpose. Look at the incidents, then repair what they need:",
                f"           {_manage()} demo heal",
                "           and press retry: each incident closes by itself once its jobs have succeeded.",
                f"           Their tracebacks are in {folder.log}",
            ]
        elif demo:
            lines += [
                "Demo       all is well. To see jobs fail, break what they need:",
                f"           {_manage()} demo break",
            ]
        supervisor.say("\n".join([*lines, "Stop       Ctrl-C", ""]))


def _python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def _worker(processes: int, queues: list[str]) -> list[str]:
    # A pool of processes, not threads: only there are time limits enforced and killed jobs noticed.
    return _python(
        "-m", "celery", "--quiet", "-A", "opsconsole", "worker", "--beat",
        "--scheduler", "django_celery_beat.schedulers:DatabaseScheduler",
        "--pool", "prefork", "--concurrency", str(processes), "--queues", ",".join(queues),
        "--hostname", "embedded@%h", "--without-gossip", "--without-mingle", "--loglevel", "INFO",
    )  # fmt: skip


def _web(descriptor: int) -> list[str]:
    return _python(
        "-m", "gunicorn", "opsconsole.wsgi:application", "--bind", f"fd://{descriptor}",
        "--worker-class", "gthread", "--workers", "1", "--threads", "8", "--graceful-timeout", "5",
        "--no-control-socket", "--log-level", "warning",
    )  # fmt: skip


def _manage() -> str:
    """Return how this program was called, for a person to repeat it with another command."""
    program = sys.executable
    with_folder = os.path.relpath(program)
    return f"{with_folder if len(with_folder) < len(program) else program} {sys.argv[0]}"


def _demo_path() -> Path:
    return Path(settings.VAR_DIR) / "demo"


def _refuse_open_house(host: str) -> None:
    """Only this machine may reach a console whose secret key everybody can read in the source."""
    if _is_loopback(host):
        return
    if find_spec("opsconsole.settings.base") is not None:
        from opsconsole.settings.base import INSECURE_SECRET_KEY

        if settings.SECRET_KEY == INSECURE_SECRET_KEY:
            raise CommandError(
                f"--host {host} lets others in, so set OPSCONSOLE_SECRET_KEY to 50 random characters first, and "
                "OPSCONSOLE_ALLOWED_HOSTS to the names they use."
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextmanager
def _alone(folder: Path) -> Iterator[int]:
    """Hold the lock of the data folder, so that two consoles do not run on it; yields the lock's descriptor."""
    path = folder / "up.lock"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode=0o600)
    except OSError as error:
        raise CommandError(
            f"The data folder {folder} cannot be written to ({error.strerror}). OPSCONSOLE_VAR_DIR names another one."
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise CommandError(
            f"A console runs on {folder} already{_holder(path)}. Stop that one first, or give this one a folder of its "
            "own with OPSCONSOLE_VAR_DIR."
        ) from error
    try:
        yield descriptor
    finally:
        os.ftruncate(descriptor, 0)
        os.close(descriptor)


def _write_lock(descriptor: int, url: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "url": url}).encode(), 0)


def _holder(path: Path) -> str:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return ""
    return f": process {found['pid']}, {found['url']}"


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """Take the port before anything else is started; the web server inherits it."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise CommandError(f"--host {host} is no address of this machine ({error.strerror}).") from error
    with socket.socket(family, kind) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(address)
            listening.listen(64)
        except OSError as error:
            raise CommandError(
                f"Port {port} of {host} cannot be used ({error.strerror}). --port chooses another one: "
                f"{_manage()} up --port {port + 1 if port < 65_535 else 8_001}"
            ) from error
        yield listening


def _url(host: str, listening: socket.socket) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listening.getsockname()[1]}/"


def _wait_until_ready(supervisor: Supervisor, url: str) -> None:
    """Wait until the web server answers anything at all, a child ends, or somebody wants to stop."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # http_proxy is not for our own address
    deadline = time.monotonic() + READY_WITHIN_SECONDS
    while not supervisor.is_stopping and supervisor.ended() is None:
        try:
            direct.open(f"{url}healthz", timeout=1).close()
        except urllib.error.HTTPError:
            return
        except OSError:
            if time.monotonic() > deadline:
                raise CommandError(f"The web server did not answer within {READY_WITHIN_SECONDS:.0f} s.") from None
            time.sleep(0.2)
        else:
            return


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65_535:
        raise ArgumentTypeError(f"{text!r} is no port: 1 to 65535, or 0 for any that is free")
    return int(text)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 64:
        raise ArgumentTypeError(f"{text!r} is not a number from 1 to 64")
    return int(text)
