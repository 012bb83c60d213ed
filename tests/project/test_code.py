"""Rules about the code itself."""

from __future__ import annotations

import importlib
import io
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path

import pytest
from django.apps import apps
from django.core.management import call_command, get_commands, load_command_class
from django.urls import get_resolver

from opsconsole.core.errors import REGISTRY, OpsError

ROOT = Path(__file__).parents[2]
PACKAGES = ("opsconsole", "grants", "incidents", "deadletters", "repairs")
NOT_OURS = {"var", "dist", "build", "__pycache__"}  # and hidden folders: environments, caches
# Made of parts, so that this file itself does not contain them.
MACHINE_PATH = re.compile(r"(?<![\w.])/(" + "|".join(("root", "work", "home")) + r")/\w")
FORBIDDEN_WORDS = tuple(
    "".join(parts)
    for parts in (
        ("/opt/", "pypi"),
        ("/opt/", "wheels"),
        ("/tmp/", "plan"),
        ("py", "pi.org"),
        ("python", "hosted.org"),
        ("extra-", "index"),
        ("index-", "url"),
        ("find-", "links"),
        ("arti", "factory"),
        ("dev", "pi"),
    )
)


def files() -> Iterator[Path]:
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name == ".ci" or not (name in NOT_OURS or name.startswith("."))]
        yield from (Path(folder, name) for name in names)


def text_files() -> Iterator[tuple[Path, str]]:
    for path in files():
        try:
            yield path.relative_to(ROOT), path.read_text()
        except (UnicodeDecodeError, FileNotFoundError):  # a picture; a link to nowhere
            continue


def refusals(base: type[OpsError] = OpsError) -> Iterator[type[OpsError]]:
    for refusal in base.__subclasses__():
        yield refusal
        yield from refusals(refusal)


def import_everything() -> None:
    for package in PACKAGES:
        if find_spec(f"{package}.errors"):
            importlib.import_module(f"{package}.errors")
    get_resolver().url_patterns  # noqa: B018  (imports every view)


def test_every_refusal_has_its_own_code_and_tells_what_to_do() -> None:
    import_everything()
    ours = [refusal for refusal in refusals() if refusal.__module__.split(".")[0] in PACKAGES]
    assert len(ours) > 3
    codes: dict[str, type[OpsError]] = {}
    for refusal in ours:
        if "code" in refusal.__dict__:
            assert codes.setdefault(refusal.code, refusal) is refusal, f"{refusal} and {codes[refusal.code]}"
        assert re.fullmatch(r"[a-z][a-z0-9_]*", refusal.code), refusal
        assert 400 <= refusal.status < 600, refusal
        assert refusal.__doc__, f"{refusal} does not tell the operator what to do next"
    assert all(REGISTRY[code] is refusal for code, refusal in codes.items())


@pytest.mark.django_db
def test_no_migration_is_missing() -> None:
    report = io.StringIO()
    with redirect_stdout(report):
        try:
            call_command("makemigrations", check=True, dry_run=True)
        except SystemExit:
            pytest.fail(report.getvalue(), pytrace=False)


@pytest.mark.django_db
def test_the_system_check_has_nothing_to_say() -> None:
    call_command("check", fail_level="WARNING", databases=["default"])


def test_imports_point_down_only() -> None:
    command = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_module_of_the_composition_root_is_in_the_rule_about_imports() -> None:
    """A module that no layer names could import anything and be imported by anything."""
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    named = set(re.findall(r"opsconsole\.(\w+)", " ".join(layers)))
    inside = (ROOT / "opsconsole").iterdir()
    there = {path.stem for path in inside if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert there - {"__init__"} <= named


def test_every_app_of_ours_has_a_label_that_no_host_project_uses() -> None:
    ours = [config for config in apps.get_app_configs() if config.name.split(".")[0] in PACKAGES]
    assert {config.name for config in ours} >= {"opsconsole", "grants", "incidents", "deadletters", "repairs"}
    assert [config.label for config in ours if not config.label.startswith("ops_")] == []


def test_every_command_of_ours_explains_itself() -> None:
    for name, app in get_commands().items():
        if str(app).split(".")[0] in PACKAGES:
            command = load_command_class(str(app), name)
            assert command.help, f"manage.py {name} has no help text"
            assert name in command.create_parser("manage.py", name).format_help()


def test_no_file_names_the_machine_it_was_written_on() -> None:
    found = [
        f"{path}: {word!r}"
        for path, text in text_files()
        for word in [*(w for w in FORBIDDEN_WORDS if w in text.lower()), *(m[0] for m in MACHINE_PATH.finditer(text))]
    ]
    assert found == []


TEMPLATE_SINS = {
    "a script within the page": re.compile(r"<script(?![^>]*\bsrc\s*=)[^>]*>", re.IGNORECASE),
    "a style within the page": re.compile(r"<style\b|\sstyle\s*=", re.IGNORECASE),
    "a handler within the page": re.compile(r"\son[a-z]+\s*=\s*[\"']", re.IGNORECASE),
    "a script as an address": re.compile(r"javascript:", re.IGNORECASE),
    "text that is not escaped": re.compile(r"\|\s*safe(seq)?\b|autoescape\s+off"),
}


@pytest.mark.parametrize("sin", TEMPLATE_SINS)
def test_no_template_has(sin: str) -> None:
    """A content security policy without exceptions needs pages without scripts and styles of their own."""
    pages = [(path, text) for path, text in text_files() if path.suffix in (".html", ".svg", ".txt")]
    found = [
        f"{path}: {match[0]}"
        for path, text in pages
        if "templates" in path.parts
        for match in TEMPLATE_SINS[sin].finditer(text)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("sin", "text"),
    [
        ("a script within the page", "<script>alert(1)</script>"),
        ("a script within the page", '<SCRIPT type="module">'),
        ("a style within the page", '<p style="color: red">'),
        ("a handler within the page", '<a onclick="go()">'),
        ("text that is not escaped", "{{ error|safe }}"),
    ],
)
def test_the_rule_about_templates_finds(sin: str, text: str) -> None:
    assert TEMPLATE_SINS[sin].search(text)
    assert not TEMPLATE_SINS[sin].search("<script src=\"{% static 'ops.js' %}\" defer></script> {{ error }} once=1")
