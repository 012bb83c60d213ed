"""What is in the wheel that people install."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from these files."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    """Templates come through a link and migrations look like nothing imports them: both are easily lost."""
    with zipfile.ZipFile(wheel) as opened:
        packed = {name for name in opened.namelist() if ".dist-info/" not in name}
    wanted = {
        str(path.relative_to(ROOT))
        for package in ("opsconsole", "grants", "incidents", "deadletters", "repairs")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    wanted |= {f"opsconsole/{path.relative_to(ROOT)}" for path in (ROOT / "templates").rglob("*") if path.is_file()}
    assert packed == {name for name in wanted if not name.endswith("/.gitkeep")} | {
        name for name in packed if name.endswith("/.gitkeep")
    }


def test_the_version_is_the_newest_of_the_changelog(wheel: Path) -> None:
    newest = re.search(r"(?m)^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text())
    assert newest is not None
    assert wheel.name.split("-")[1] == newest[1]
