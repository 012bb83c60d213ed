"""Which folder a worker journals into, and when another may recover it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from deadletters.journal import folder as folders
from deadletters.journal.folder import JournalRoot, WorkerFolder, choose_root
from tests.deadletters.journal_writer import Writer


@pytest.fixture
def root(tmp_path: Path) -> JournalRoot:
    return JournalRoot(tmp_path / "journal")


def test_root_and_folders_are_the_owners_alone(root: JournalRoot) -> None:
    folder = root.create_worker_folder("celery@shop.example")
    assert stat.S_IMODE(root.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_a_root_that_others_could_read_is_closed_to_them(root: JournalRoot) -> None:
    root.path.mkdir(mode=0o755)
    root.prepare()
    assert stat.S_IMODE(root.path.stat().st_mode) == 0o700


def test_a_folder_is_named_node_process_boot_and_start(root: JournalRoot) -> None:
    folder = root.create_worker_folder("w1@shop.example/../x")
    node, pid, boot, _ = folder.name.split(".")
    assert node == "w1_shop_example_x"
    assert pid == str(os.getpid())
    assert boot == folder.boot
    assert folder.is_of_this_boot
    assert folder.name.endswith(folder.serial)


def test_a_folder_of_another_boot_says_so(tmp_path: Path) -> None:
    assert not WorkerFolder(tmp_path / "worker.12.0000aaaa.ff").is_of_this_boot


def test_a_name_that_is_no_workers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not the name"):
        WorkerFolder(tmp_path / "kept")


def test_a_living_workers_folder_is_not_dead(root: JournalRoot) -> None:
    writer = Writer(root.path)
    assert [folder.name for folder in root.folders()] == [writer.folder.name]
    assert list(root.dead_folders()) == []


def test_a_folder_is_dead_once_none_of_its_files_is_locked(root: JournalRoot) -> None:
    writer = Writer(root.path)
    writer.file("child-7")
    writer.files["main"].close()
    assert list(root.dead_folders()) == []
    writer.files["child-7"].close()
    (dead,) = root.dead_folders()
    assert dead.name == writer.folder.name
    dead.release()


def test_a_dead_folder_is_recovered_by_one_at_a_time(root: JournalRoot) -> None:
    Writer(root.path).die()
    (first,) = root.dead_folders()
    assert list(root.dead_folders()) == []
    code = """
        import sys
        from deadletters.journal.folder import JournalRoot
        print(len(list(JournalRoot(sys.argv[1]).dead_folders())))
    """

    def others_see() -> str:
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), str(root.path)], capture_output=True, text=True, check=True
        ).stdout.strip()

    assert others_see() == "0"
    first.release()
    assert others_see() == "1"


def test_a_deleted_folder_is_gone_for_those_who_waited(root: JournalRoot) -> None:
    writer = Writer(root.path)
    writer.die()
    (mine,) = root.dead_folders()
    theirs = WorkerFolder(mine.path)
    mine.delete()
    assert not theirs.lock_for_recovery()
    assert root.folders() == []


def test_a_folder_that_is_being_made_is_not_taken_for_dead(root: JournalRoot) -> None:
    root.create_worker_folder("worker")
    assert list(root.dead_folders()) == []
    assert len(list(root.path.iterdir())) == 1


def test_a_folder_that_was_never_finished_is_cleared_away_later(root: JournalRoot) -> None:
    folder = root.create_worker_folder("worker")
    os.utime(folder.path, (0, 0))
    assert list(root.dead_folders()) == []
    assert list(root.path.iterdir()) == []


def test_foreign_things_in_the_root_are_left_alone(root: JournalRoot) -> None:
    root.prepare()
    (root.path / "kept").mkdir()
    (root.path / ".new-else").mkdir()
    (root.path / "worker.1.boot.ff").touch()
    assert list(root.dead_folders()) == []
    assert len(list(root.path.iterdir())) == 3


def test_usage_counts_every_byte(root: JournalRoot) -> None:
    assert root.usage() == 0
    writer = Writer(root.path)
    writer.healthy(1, 1.0)
    assert root.usage() == writer.folder.size() > 300


def test_a_root_of_another_user_is_refused(root: JournalRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    root.prepare()
    monkeypatch.setattr(folders.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="belongs to user"):
        root.prepare()


def test_a_link_planted_in_the_shared_temporary_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "target").mkdir()
    (tmp_path / "journal").symlink_to(tmp_path / "target")
    with pytest.raises(NotADirectoryError):
        JournalRoot(tmp_path / "journal").prepare()


def test_the_setting_names_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPSCONSOLE_JOURNAL_DIR", str(tmp_path / "environment"))
    assert choose_root(tmp_path / "setting").root.path == tmp_path / "setting"
    chosen = choose_root()
    assert (chosen.kind, chosen.root.path) == ("configured", tmp_path / "environment")


def test_without_a_setting_it_is_the_users_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPSCONSOLE_JOURNAL_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    chosen = choose_root()
    assert (chosen.kind, chosen.root.path) == ("state", tmp_path / "state" / "opsconsole" / "journal")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert choose_root().root.path == tmp_path / "home" / ".local" / "state" / "opsconsole" / "journal"


def test_where_the_state_folder_cannot_be_made_it_is_a_temporary_one_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPSCONSOLE_JOURNAL_DIR", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    chosen = choose_root()
    assert chosen.kind == "temporary"
    assert chosen.root.path.parent == Path(tempfile.gettempdir())
    assert str(tmp_path / "file") in chosen.why
