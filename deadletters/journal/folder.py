"""Where journals lie: one root per host and user, and in it one folder per worker, recovered as a whole."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from deadletters.journal.files import is_locked, parse_file_name
from opsconsole.core.clock import boot_id, boot_now

ENVIRONMENT: Final = "OPSCONSOLE_JOURNAL_DIR"
KEPT_FOLDER: Final = "kept"
_RECOVERY_LOCK: Final = "recovery.lock"
_UNFINISHED: Final = ".new-"
# A folder gets its final name within milliseconds; one that has none later was left by a crash.
_UNFINISHED_SECONDS: Final = 60.0
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_-]+")
_FOLDER_NAME: Final = re.compile(r"(?P<node>[A-Za-z0-9_-]+)\.(?P<serial>(?P<pid>\d+)\.(?P<boot>[0-9a-z]+)\.[0-9a-f]+)")


class WorkerFolder:
    """The folder of one worker, named node, process id, boot id and start."""

    def __init__(self, path: Path) -> None:
        match = _FOLDER_NAME.fullmatch(path.name)
        if match is None:
            raise ValueError(f"{path.name} is not the name of a worker's folder")
        self.path = path
        self.serial = match["serial"]
        self.boot = match["boot"]
        self._recovery_lock = -1

    @classmethod
    def create(cls, root: Path, node: str) -> WorkerFolder:
        """Make a folder for the worker that runs in this process, under a name that recovery does not look at yet.

        Call ``publish`` once its main file is open: a folder without a locked file looks like a dead worker's.
        """
        safe = _UNSAFE.sub("_", node)[:64] or "worker"
        name = f"{safe}.{os.getpid()}.{_short_boot_id()}.{int(boot_now() * 1e6):x}"
        folder = cls(root / name)
        folder.path = root / (_UNFINISHED + name)
        folder.path.mkdir(mode=0o700)
        return folder

    def publish(self) -> None:
        """Give the folder its final name."""
        final = self.path.with_name(self.path.name.removeprefix(_UNFINISHED))
        self.path.rename(final)
        self.path = final

    @property
    def name(self) -> str:
        """The folder's final name."""
        return self.path.name.removeprefix(_UNFINISHED)

    @property
    def is_of_this_boot(self) -> bool:
        """Whether the host has run on since the worker started, so that its boot clock still compares."""
        return self.boot == _short_boot_id()

    def files(self) -> list[Path]:
        """The journal files in it, main's first."""
        found = [(parsed, path) for path in self.path.iterdir() if (parsed := parse_file_name(path.name))]
        return [path for (process, _), path in sorted(found, key=lambda pair: (pair[0][0] != "main", pair[0]))]

    def size(self) -> int:
        """Bytes in it."""
        return _size_of(self.path)

    def sync(self) -> None:
        """Wait until the disk has all that its processes have written; raises ``OSError``."""
        for path in self.files():
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def is_alive(self) -> bool:
        """Whether any process of the worker still holds its file."""
        try:
            return any(is_locked(path) for path in self.files())
        except FileNotFoundError:
            return False

    def lock_for_recovery(self) -> bool:
        """Take the one recovery lock; False if another process recovers this folder or has removed it."""
        path = self.path / _RECOVERY_LOCK
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode=0o600)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held it before may have removed the folder while we were waiting to open or lock the file.
            if not os.path.samestat(os.fstat(descriptor), os.stat(path)):
                raise FileNotFoundError(path)
        except OSError:
            os.close(descriptor)
            return False
        self._recovery_lock = descriptor
        return True

    def release(self) -> None:
        """Let others recover this folder."""
        descriptor, self._recovery_lock = self._recovery_lock, -1
        if descriptor >= 0:
            os.close(descriptor)

    def delete(self) -> None:
        """Remove the folder and all in it, then the recovery lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()


class JournalRoot:
    """The folder that holds every worker's folder of this host and user."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def prepare(self) -> None:
        """Make the root, readable by its owner only; raises ``OSError`` if that cannot be or somebody else owns it."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self.path.lstat()
        # In a shared temporary folder anybody could have put a link, or a folder of theirs, under our name.
        if stat.S_ISLNK(found.st_mode) and self.path.parent == Path(tempfile.gettempdir()):
            raise NotADirectoryError(f"{self.path} is a link")
        found = self.path.stat()
        if found.st_uid != os.geteuid():
            raise PermissionError(f"{self.path} belongs to user {found.st_uid}, not to {os.geteuid()}")
        if stat.S_IMODE(found.st_mode) & 0o077:
            self.path.chmod(0o700)

    def create_worker_folder(self, node: str) -> WorkerFolder:
        """Make the folder of the worker in this process; see ``WorkerFolder.create``."""
        self.prepare()
        return WorkerFolder.create(self.path, node)

    def folders(self) -> list[WorkerFolder]:
        """Every worker's folder, oldest first."""
        found = []
        for path in self._entries():
            if _FOLDER_NAME.fullmatch(path.name) and path.is_dir():
                found.append(WorkerFolder(path))
        return sorted(found, key=lambda folder: (_changed_at(folder.path), folder.name))

    def dead_folders(self) -> Iterator[WorkerFolder]:
        """Yield each folder whose worker is dead, locked for recovery; the caller deletes or releases it."""
        self._remove_unfinished()
        for folder in self.folders():
            if folder.is_alive() or not folder.lock_for_recovery():
                continue
            # Asked again under the lock: nothing new may be decided from what was seen before it.
            if folder.is_alive():
                folder.release()
                continue
            yield folder

    def usage(self) -> int:
        """Bytes in all journals under this root, kept failures included."""
        return _size_of(self.path)

    def _entries(self) -> list[Path]:
        try:
            return list(self.path.iterdir())
        except FileNotFoundError:
            return []

    def _remove_unfinished(self) -> None:
        for path in self._entries():
            name = path.name.removeprefix(_UNFINISHED)
            if name == path.name or _FOLDER_NAME.fullmatch(name) is None:
                continue
            if time.time() - _changed_at(path) > _UNFINISHED_SECONDS:
                folder = WorkerFolder(path.with_name(name))
                folder.path = path
                if not folder.is_alive():
                    shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRoot:
    """Which root was taken, and what a person should know about it."""

    root: JournalRoot
    kind: Literal["configured", "state", "temporary"]
    why: str


def choose_root(configured: str | os.PathLike[str] | None = None) -> ChosenRoot:
    """Choose the journal's root: the setting or environment, else the user's state folder, else the temporary one.

    Nothing is raised for a configured folder that cannot be used: hooks say so when they open it.
    """
    if named := configured or os.environ.get(ENVIRONMENT):
        return ChosenRoot(
            root=JournalRoot(Path(named).expanduser()), kind="configured", why=f"{ENVIRONMENT} names this folder"
        )
    refusal = "there is no home folder"
    for base in (os.environ.get("XDG_STATE_HOME"), os.path.expanduser("~/.local/state")):
        if not base or not os.path.isabs(base):
            continue
        root = JournalRoot(Path(base) / "opsconsole" / "journal")
        try:
            root.prepare()
        except OSError as exc:
            refusal = str(exc)
            continue
        return ChosenRoot(root=root, kind="state", why="it is the user's state folder, which outlives a restart")
    root = JournalRoot(Path(tempfile.gettempdir()) / f"opsconsole-journal-{os.geteuid()}")
    return ChosenRoot(
        root=root,
        kind="temporary",
        why=f"the user's state folder cannot be used ({refusal}); a restart of the host may lose what lies here",
    )


def _short_boot_id() -> str:
    return boot_id()[:8] or "noboot"


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return time.time()


def _size_of(path: Path) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return total
