"""The settings modules, each in a process of its own: settings are read once and for all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCTION = {
    "DJANGO_SETTINGS_MODULE": "opsconsole.settings.production",
    "OPSCONSOLE_SECRET_KEY": "kf8-Wq2v_ZpLr7yNs4TbXe9mHc3Jd6Ga1UoRiQxBnMzVwYtE5h0Kp2",
    "OPSCONSOLE_KEYS": "2026:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=",
    "OPSCONSOLE_DATABASE_URL": "postgresql://ops:p4ss@db.example.org:5432/ops",
    "OPSCONSOLE_BROKER_URL": "amqp://ops:p4ss@mq.example.org:5672//",
    "OPSCONSOLE_ALLOWED_HOSTS": "ops.example.org",
}


def python(code: str, variables: dict[str, str], stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run ``code`` with ``variables`` as the only ones of ours."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OPSCONSOLE_", "DJANGO_"))}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=clean | variables,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
    )


def settings_with(variables: dict[str, str], *names: str) -> list[object]:
    """Return settings as a fresh process sees them."""
    code = (
        f"import json; from django.conf import settings; print(json.dumps([getattr(settings, n) for n in {names!r}]))"
    )
    done = python(code, variables)
    assert done.returncode == 0, done.stderr
    values: list[object] = json.loads(done.stdout)
    return values


SENSELESS = [
    ("OPSCONSOLE_SECRET_KEY", "insecure-development-key-of-the-embedded-default"),
    ("OPSCONSOLE_SECRET_KEY", "short"),
    ("OPSCONSOLE_SECRET_KEY", "ab" * 40),
    ("OPSCONSOLE_KEYS", ""),
    ("OPSCONSOLE_KEYS", "2026:tooshort"),
    ("OPSCONSOLE_WEBHOOK_SECRET", "whsec_c2hvcnQ="),
    ("OPSCONSOLE_DATABASE_URL", "sqlite:////data/ops.sqlite3"),
    ("OPSCONSOLE_DATABASE_URL", "mysql://ops:p4ss@db/ops"),
    ("OPSCONSOLE_DATABASE_URL", "postgresql://ops:p4ss@db.example.org"),
    ("OPSCONSOLE_DATABASE_URL", "nonsense"),
    ("OPSCONSOLE_BROKER_URL", "filesystem://"),
    ("OPSCONSOLE_BROKER_URL", "memory://"),
    ("OPSCONSOLE_BROKER_URL", "nonsense"),
    ("OPSCONSOLE_ALLOWED_HOSTS", " , "),
    ("OPSCONSOLE_ALLOWED_HOSTS", "ops.example.org,*"),
    ("OPSCONSOLE_CSRF_TRUSTED_ORIGINS", "ops.example.org"),
    ("OPSCONSOLE_HSTS_SECONDS", "a year"),
    ("OPSCONSOLE_BEHIND_PROXY", "perhaps"),
    ("OPSCONSOLE_LOG_LEVEL", "LOUD"),
]

READ_AGAIN = """
import importlib, json, os, sys
answers = []
for name, value in json.loads(sys.stdin.read()):
    before = os.environ.get(name, "")
    os.environ[name] = value
    for module in [module for module in sys.modules if module.startswith("opsconsole.settings")]:
        del sys.modules[module]
    try:
        importlib.import_module("opsconsole.settings.production")
        answers.append("")
    except Exception as refusal:
        answers.append(str(refusal))
    os.environ[name] = before
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def refusals() -> dict[tuple[str, str], str]:
    """What production says to each of the senseless variables; one process reads the settings again and again."""
    done = python(READ_AGAIN, PRODUCTION, json.dumps(SENSELESS))
    assert done.returncode == 0, done.stderr
    return dict(zip(SENSELESS, json.loads(done.stdout), strict=True))


def test_the_defaults_need_no_other_service(tmp_path: Path) -> None:
    base = {"DJANGO_SETTINGS_MODULE": "opsconsole.settings.base", "OPSCONSOLE_VAR_DIR": str(tmp_path / "var")}
    database, broker, journal = settings_with(base, "DATABASES", "CELERY_BROKER_URL", "OPSCONSOLE_JOURNAL_DIR")
    assert isinstance(database, dict)
    assert database["default"]["NAME"] == str(tmp_path / "var" / "opsconsole.sqlite3")
    assert database["default"]["OPTIONS"]["transaction_mode"] == "IMMEDIATE"
    assert broker == "filesystem://"
    assert journal == str(tmp_path / "var" / "journal")
    assert (tmp_path / "var" / "broker" / "messages").is_dir()


def test_a_broken_variable_stops_the_embedded_default_too(tmp_path: Path) -> None:
    variables = {"OPSCONSOLE_VAR_DIR": str(tmp_path), "OPSCONSOLE_KEEP_COUNTS_DAYS": "0", "INCIDENT_GROUPING": "task"}
    done = python("import opsconsole.settings.base", variables)
    assert "OPSCONSOLE_KEEP_COUNTS_DAYS is a whole number, 1 or more" in done.stderr
    assert "INCIDENT_GROUPING is one of: cause, job" in done.stderr


def test_production_starts_with_a_complete_environment() -> None:
    names = ("DEBUG", "SESSION_COOKIE_SECURE", "CSRF_COOKIE_SECURE", "SECURE_HSTS_SECONDS", "OPSCONSOLE_ENVIRONMENT")
    assert settings_with(PRODUCTION, *names) == [False, True, True, 31536000, "production"]


def test_production_lists_everything_that_is_missing() -> None:
    done = python(
        "from django.conf import settings; settings.DEBUG", {"DJANGO_SETTINGS_MODULE": "opsconsole.settings.production"}
    )
    for name in sorted(set(PRODUCTION) - {"DJANGO_SETTINGS_MODULE"}):
        assert f"\n  - {name} " in done.stderr, name


@pytest.mark.parametrize(("name", "value"), SENSELESS)
def test_production_refuses_one_senseless_variable_and_names_only_that(
    refusals: dict[tuple[str, str], str], name: str, value: str
) -> None:
    said = refusals[name, value]
    assert [line.split()[1] for line in said.splitlines() if line.startswith("  - ")] == [name]
    assert "p4ss" not in said


def test_production_makes_no_folder_in_the_release(tmp_path: Path) -> None:
    settings_with(PRODUCTION | {"OPSCONSOLE_VAR_DIR": str(tmp_path / "var")}, "DEBUG")
    assert not (tmp_path / "var").exists()


@pytest.mark.parametrize(("behind_proxy", "header"), [("0", None), ("1", ["HTTP_X_FORWARDED_PROTO", "https"])])
def test_the_headers_of_a_proxy_count_only_when_asked_for(behind_proxy: str, header: list[str] | None) -> None:
    variables = PRODUCTION | {"OPSCONSOLE_BEHIND_PROXY": behind_proxy}
    assert settings_with(variables, "SECURE_PROXY_SSL_HEADER", "USE_X_FORWARDED_HOST") == [header, header is not None]


def test_the_deployment_check_has_nothing_to_say_about_production() -> None:
    code = (
        "import django; django.setup(); from django.core.management import call_command;"
        " call_command('check', deploy=True, fail_level='WARNING')"
    )
    done = python(code, PRODUCTION)
    assert done.returncode == 0, done.stderr


def test_every_variable_of_ours_that_the_settings_read_is_documented() -> None:
    documented = (ROOT / "opsconsole" / "settings" / "base.py").read_text().partition("# -- Django --")[0]
    for name in sorted(name for name in settings_names() if name.startswith("OPSCONSOLE_")):
        assert f"\n{name}" in documented, f"{name} belongs into the documented block of base.py"


def settings_names() -> set[str]:
    code = "import json, opsconsole.settings.base as base; print(json.dumps(dir(base)))"
    done = python(code, {"OPSCONSOLE_VAR_DIR": os.environ["OPSCONSOLE_VAR_DIR"]})
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(("level", "told"), [("INFO", "False True"), ("DEBUG", "True True"), ("ERROR", "False False")])
def test_what_beat_sends_is_no_line_unless_everything_is(tmp_path: Path, level: str, told: str) -> None:
    """A sweep is sent every few seconds: the lines would push what matters out of the terminal."""
    code = (
        "import logging, django; django.setup(); "
        "print(logging.getLogger('celery.beat').isEnabledFor(logging.INFO), "
        "logging.getLogger('celery.worker').isEnabledFor(logging.INFO))"
    )
    variables = {"DJANGO_SETTINGS_MODULE": "opsconsole.settings.base", "OPSCONSOLE_VAR_DIR": str(tmp_path)}
    done = python(code, {**variables, "OPSCONSOLE_LOG_LEVEL": level})
    assert done.stdout.split() == told.split(), done.stderr
