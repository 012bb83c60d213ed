"""What the documentation tells people to type: every quoted command is one that this version understands."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.core.management import get_commands, load_command_class
from django.core.management.base import CommandError

from grants.actions import Action

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Up to what ends a command in prose, in a comment and in a shell.
COMMAND = re.compile(r"(?:manage\.py|python -m django) +([^`#;&|\"\n]+)")
# Sweeps may be run by nobody in particular, as beat does.
WITHOUT_OPERATOR = {"reconcile"}
CONTINUED = re.compile(r" *\\\n *")
VARIABLE = re.compile(r"\$[A-Z]+")
QUOTED = sorted(
    {
        (page.name, found[1].strip())
        for page in PAGES
        for found in COMMAND.finditer(CONTINUED.sub(" ", page.read_text()))
    }
)


def _understand(text: str) -> dict[str, Any]:
    """Return the options that a command line gives; raises ``CommandError`` for one that is misused."""
    name, *words = shlex.split(VARIABLE.sub("01970000-0000-7000-8000-000000000000", text))
    command: Any = load_command_class(get_commands()[name], name)
    options: dict[str, Any] = vars(command.create_parser("manage.py", name).parse_args(words))
    if name not in WITHOUT_OPERATOR and "operator" in options and not (options["operator"] or options["token"]):
        raise CommandError(f"{text}: it may do nothing without --operator or --token")
    return options


def test_the_commands_in_the_documentation_are_found() -> None:
    found = {text for _, text in QUOTED}
    assert {"demo heal", "migrate $app zero", "check --deploy", "collectstatic --noinput"} <= found


@pytest.mark.parametrize("text", [pytest.param(text, id=f"{page}: {text}") for page, text in QUOTED])
def test_a_quoted_command_is_understood(text: str) -> None:
    if text in get_commands() and (_has_subcommands(text) or text in WITHOUT_OPERATOR):
        return  # spoken of by its name
    _understand(text)


def _has_subcommands(name: str) -> bool:
    command: Any = load_command_class(get_commands()[name], name)
    return command.create_parser("manage.py", name)._subparsers is not None


@pytest.mark.parametrize("text", ["nodes", "incidents list", "grants bootstrap", "demo mend", "grants give ada"])
def test_the_rule_of_this_file_finds_what_is_refused(text: str) -> None:
    with pytest.raises(CommandError):
        _understand(text)


def test_the_compose_file_has_every_process_and_volume_that_it_names() -> None:
    page = (ROOT / "docs" / "production.md").read_text()
    compose = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0])
    services = compose["services"]
    for name, service in services.items():
        assert "image" in service, f"{name} says what it runs"
        assert set(service.get("depends_on", ())) <= set(services), name
        assert {volume.partition(":")[0] for volume in service.get("volumes", ())} <= set(compose["volumes"]), name
    commands = " ".join(service.get("command", "") for service in services.values())
    for needed in ("migrate", "collectstatic", "gunicorn", "worker", "beat"):
        assert needed in commands


def test_every_permission_is_explained_to_operators() -> None:
    page = (ROOT / "docs" / "operators.md").read_text()
    assert set(re.findall(r"^\| `([a-z.-]+)` \|", page, re.MULTILINE)) == {action.value for action in Action}


def test_the_settings_of_an_attached_project_can_be_read_before_there_are_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that makes the keys is one of the project's, so it reads them."""
    monkeypatch.delenv("OPSCONSOLE_KEYS", raising=False)
    page = (ROOT / "docs" / "attach.md").read_text()
    first = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    settings: dict[str, Any] = {"INSTALLED_APPS": [], "os": os}
    exec(compile(first, "attach.md", "exec"), settings)
    assert settings["OPSCONSOLE_KEYS"] == ""
    assert page.index("manage.py keys new") < page.index("manage.py migrate\n")
