"""A process's journal file: what was appended is read again, whatever cut it off."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadletters.journal import files
from deadletters.journal.files import JournalFile, is_locked, parse_file_name
from deadletters.journal.frames import ENTRY, FRAME, Kind, make_frame, read_frames


def entry(number: int, size: int = 0) -> bytes:
    return ENTRY.pack(Kind.START, number, float(number), 0.0) + b"x" * size


def complain(exc: OSError) -> None:
    raise AssertionError(exc)


def open_file(folder: Path, process: str = "main", segment_bytes: int = 1 << 30) -> JournalFile:
    return JournalFile(folder, process, head={"version": 1}, segment_bytes=segment_bytes, trouble=complain)


def numbers(*paths: Path) -> list[int]:
    found = []
    for path in paths:
        frames, damaged, _ = read_frames(path.read_bytes(), final=True)
        assert damaged == []
        found += [ENTRY.unpack_from(payload)[1] for _, _, payload in frames if payload[0] != Kind.HEAD]
    return found


def segments(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if parse_file_name(path.name))


def test_what_is_appended_is_with_the_system_at_once(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    file.append(entry(1))
    assert numbers(file.path) == [1]
    assert file.path.name == "main.000001.j"
    assert file.path.stat().st_mode & 0o777 == 0o600


def test_the_first_failure_of_a_burst_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    now = 1000.0
    monkeypatch.setattr(os, "fsync", synced.append)
    monkeypatch.setattr(files, "boot_now", lambda: now)
    file = open_file(tmp_path)
    file.append(entry(1))
    assert (synced, file.is_sync_due) == ([], True)
    for number in range(2, 5):
        file.append(entry(number), sync=True)
    assert (len(synced), file.is_sync_due) == (1, False)
    now += files.SYNC_SECONDS
    file.append(entry(5), sync=True)
    assert len(synced) == 2
    assert numbers(file.path) == [1, 2, 3, 4, 5]


def test_buffered_entries_go_out_in_order_with_the_next_one(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    file.append(entry(1), buffered=True)
    file.append(entry(2), buffered=True)
    assert numbers(file.path) == []
    file.append(entry(3))
    assert numbers(file.path) == [1, 2, 3]


def test_a_flush_writes_what_is_buffered(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    file.append(entry(1), buffered=True)
    file.flush()
    assert numbers(file.path) == [1]


def test_a_large_buffer_does_not_wait(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    file.append(entry(1, size=100_000), buffered=True)
    assert numbers(file.path) == [1]


def test_closing_writes_what_is_buffered_and_frees_the_lock(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    file.append(entry(1), buffered=True)
    assert is_locked(file.path)
    file.close()
    assert numbers(file.path) == [1]
    assert not is_locked(file.path)
    file.append(entry(2))
    assert numbers(file.path) == [1]


def test_a_full_segment_is_followed_by_the_next_and_one_of_them_is_always_locked(tmp_path: Path) -> None:
    file = open_file(tmp_path, segment_bytes=1000)
    for number in range(1, 41):
        file.append(entry(number, size=60))
    paths = segments(tmp_path)
    assert len(paths) > 3
    assert numbers(*paths) == list(range(1, 41))
    assert [is_locked(path) for path in paths] == [False] * (len(paths) - 1) + [True]
    assert all(path.stat().st_size < 1200 for path in paths)


def test_a_file_is_locked_before_anybody_can_see_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader removes drained files that nobody holds: one seen between its creation and its lock would be gone."""
    seen: list[str] = []
    lock = fcntl.flock

    def look(descriptor: int, how: int) -> None:
        seen.extend(path.name for path in segments(tmp_path))
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", look)
    file = open_file(tmp_path)
    assert seen == []
    assert file.path.exists()


def test_a_process_with_the_number_of_an_earlier_one_never_writes_into_its_file(tmp_path: Path) -> None:
    first = open_file(tmp_path, "child-7")
    first.append(entry(1))
    first.close()
    second = open_file(tmp_path, "child-7")
    second.append(entry(2))
    assert [path.name for path in segments(tmp_path)] == ["child-7.000001.j", "child-7.000002.j"]
    assert numbers(*segments(tmp_path)) == [1, 2]


def test_threads_never_tear_each_others_entries(tmp_path: Path) -> None:
    file = open_file(tmp_path, segment_bytes=20_000)
    barrier = threading.Barrier(4)

    def write(first: int) -> None:
        barrier.wait()
        for number in range(first, first + 250):
            file.append(entry(number, size=number % 100), buffered=number % 3 == 0)

    threads = [threading.Thread(target=write, args=(1000 * (index + 1),)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.flush()
    expected = [number for index in range(4) for number in range(1000 * (index + 1), 1000 * (index + 1) + 250)]
    assert sorted(numbers(*segments(tmp_path))) == expected


def test_a_fork_neither_holds_the_lock_nor_writes_its_parents_file(tmp_path: Path) -> None:
    """The inherited lock is held by a thread that does not exist in the child: it must be a new one."""
    file = open_file(tmp_path)
    file.append(entry(1), buffered=True)
    held = threading.Event()
    release = threading.Event()

    def hold() -> None:
        with file._lock:
            held.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    descriptor = file._descriptor
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        file.append(entry(99))
        file.flush()
        try:
            os.fstat(descriptor)
        except OSError:
            os.write(writing, b"closed")
        os.write(writing, b" open" if file.is_open else b" not open")
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    release.set()
    thread.join()
    os.close(writing)
    told = os.read(reading, 100)
    os.close(reading)
    assert (status, told) == (0, b"closed not open")
    file.flush()
    assert numbers(file.path) == [1]


def test_a_fork_that_lives_on_does_not_keep_a_dead_parents_file_locked(tmp_path: Path) -> None:
    """Celery's embedded beat is such a fork: with the inherited descriptor it would block recovery for ever."""
    code = """
        import os, sys, time
        from pathlib import Path
        from deadletters.journal.files import JournalFile
        file = JournalFile(Path(sys.argv[1]), "main", head={}, trouble=print)
        if os.fork() == 0:
            print(os.getpid(), flush=True)
        time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    fork = int(parent.stdout.readline())
    try:
        path = tmp_path / "main.000001.j"
        assert is_locked(path)
        parent.kill()
        parent.wait()
        assert not is_locked(path)
        os.kill(fork, 0)  # it does live on
    finally:
        parent.stdout.close()
        os.kill(fork, 9)


def test_a_full_disk_loses_nothing_that_fits_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    troubles: list[OSError] = []
    file = JournalFile(tmp_path, "main", head={}, trouble=troubles.append)
    file.append(entry(1))
    write = os.write
    full = True

    def half_then_full(descriptor: int, data: bytes) -> int:
        if not full:
            return write(descriptor, data)
        if len(data) > 20:
            return write(descriptor, data[:20])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", half_then_full)
    file.append(entry(2, size=10))
    file.append(entry(3, size=10), buffered=True)
    file.append(entry(4, size=10), sync=True)
    assert file.dropped == 3
    assert [trouble.errno for trouble in troubles] == [errno.ENOSPC] * 2
    assert numbers(file.path) == [1]
    full = False
    file.append(entry(5))
    assert file.dropped == 0
    assert numbers(file.path) == [1, 2, 3, 4, 5]


def test_what_does_not_fit_into_memory_is_counted_and_leaves_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    troubles: list[OSError] = []
    file = JournalFile(tmp_path, "main", head={}, trouble=troubles.append)

    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, "broken disk")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", refuse)
        for number in range(1, 6):
            file.append(entry(number, size=400_000))
    assert file.dropped == 5
    file.append(entry(6))
    assert file.dropped == 3
    frames, _, _ = read_frames(file.path.read_bytes(), final=True)
    kinds = [payload[0] for _, _, payload in frames]
    assert kinds == [Kind.HEAD, Kind.GAP, Kind.START, Kind.START, Kind.START]
    assert frames[1][2].endswith(b'{"lost": 3}')


def test_a_segment_that_cannot_be_opened_leaves_the_old_one_in_use(tmp_path: Path) -> None:
    troubles: list[OSError] = []
    folder = tmp_path / "worker"
    folder.mkdir()
    file = JournalFile(folder, "main", head={}, segment_bytes=100, trouble=troubles.append)
    moved = tmp_path / "moved"
    folder.rename(moved)
    file.append(entry(1, size=200))
    file.append(entry(2, size=200))
    assert numbers(moved / "main.000001.j") == [1, 2]
    assert [type(trouble) for trouble in troubles] == [FileNotFoundError] * 2


def frames_of(count: int) -> bytes:
    return b"".join(make_frame(entry(number, size=number % 7)) for number in range(1, count + 1))


def test_a_tail_cut_at_any_byte_hides_only_the_entry_it_cut() -> None:
    data = frames_of(4)
    whole, _, _ = read_frames(data, final=True)
    for length in range(len(data)):
        expected = [frame for frame in whole if frame[1] <= length]
        for final in (False, True):
            frames, damaged, read_to = read_frames(data[:length], final=final)
            assert frames == expected
            assert damaged == []
            assert read_to == (length if final else (expected[-1][1] if expected else 0))


def test_reading_goes_on_where_a_half_written_entry_is_completed() -> None:
    data = frames_of(3)
    first, _, at = read_frames(data[:60], final=False)
    second, damaged, _ = read_frames(data[at:], at=at, final=False)
    assert damaged == []
    assert first + second == read_frames(data, final=True)[0]


@given(st.data())
def test_one_damaged_byte_costs_one_entry_and_is_told(data: st.DataObject) -> None:
    good = frames_of(6)
    at = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[at] ^= data.draw(st.integers(1, 255))
    whole, _, _ = read_frames(good, final=True)
    frames, damaged, _ = read_frames(bytes(bad), final=True)
    assert frames == [frame for frame in whole if not frame[0] <= at < frame[1]]
    # A last entry whose length grew past the end cannot be told from a torn one.
    assert len(damaged) == 1 or whole[-1][0] <= at < whole[-1][0] + FRAME.size


def test_zeros_at_the_end_as_after_a_power_cut_hide_nothing_before_them() -> None:
    good = frames_of(3)
    frames, damaged, read_to = read_frames(good + bytes(500), final=True)
    assert frames == read_frames(good, final=True)[0]
    assert len(damaged) == 1
    assert read_to == len(good) + 500


def test_a_process_killed_while_writing_leaves_whole_entries(tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from deadletters.journal.files import JournalFile
        from deadletters.journal.frames import ENTRY, Kind
        file = JournalFile(Path(sys.argv[1]), "main", head={}, segment_bytes=1 << 20, trouble=print)
        number = 0
        print("writing", flush=True)
        while True:
            number += 1
            file.append(ENTRY.pack(Kind.START, number, float(number), 0.0) + b"x" * (number % 5000))
    """
    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    writer.stdout.readline()
    while len(segments(tmp_path)) < 3:
        assert writer.poll() is None
    writer.kill()
    writer.wait()
    writer.stdout.close()
    found = numbers(*segments(tmp_path))
    assert found == list(range(1, len(found) + 1))
    assert len(found) > 500


@pytest.mark.parametrize("name", ["main.1.j", "main.000001.txt", "child-.000001.j", "recovery.lock", "x.000001.j"])
def test_other_files_are_not_taken_for_journals(name: str) -> None:
    assert parse_file_name(name) is None
