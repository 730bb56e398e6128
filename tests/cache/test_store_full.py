"""No room on the disk: the error says so, nothing of the put is seen, and the store works on when there is room."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from store_samples import a_run, rows_of, same_bits

from lenspool_cache import CacheCorrupt, CacheError, CacheFull, Store, verify


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a small file system is not permitted here")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture
def file_limit() -> Iterator[int]:
    """No file of this process may grow beyond 30 MB: what a first pack and the index fit in, and a second does not."""
    limit = 30 << 20
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def fill(store: Store, start: int, rows: int = 64) -> tuple[list[int], CacheError]:
    """Put runs until the store is full: the runs that were stored, and the error."""
    done: list[int] = []
    for number in range(start, start + 100_000):
        try:
            store.put(
                a_run(number),
                {"h": [(0, rows_of(number, rows, 256))], "g": [(3, rows_of(number, 2, dtype="bfloat16"))]},
            )
        except CacheError as error:
            return done, error
        done.append(number)
    raise AssertionError("the disk never filled")


def check(store: Store, numbers: list[int], rows: int = 64) -> None:
    for number in numbers:
        assert same_bits(store.rows(a_run(number), "h", [(0, rows)]), rows_of(number, rows, 256))
        assert same_bits(store.rows(a_run(number), "g", [(3, 5)]), rows_of(number, 2, dtype="bfloat16"))


def test_full_disk(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1 << 20))
    with Store(small_disk / "store") as store:
        done, error = fill(store, 0)
        assert isinstance(error, CacheFull)
        assert error.needed == 64 * 256 * 4 + 2 * 64 * 2
        assert error.path == str(store.path)
        assert len(done) > 10
        for _ in range(3):  # again and again: a failed put leaves nothing behind that a later one trips over
            failed = len(done)
            assert store.lookup(a_run(failed), ["h", "g"]) == {}
            with pytest.raises(CacheFull):
                store.put(a_run(failed), {"h": [(0, rows_of(failed, 64, 256))], "g": [(3, rows_of(failed, 2))]})
        check(store, done)
        with pytest.raises(CacheFull):
            store.put_array(np.ones(1 << 20))
        ballast.unlink()
        more, error = fill(store, len(done))
        assert isinstance(error, CacheFull)
        assert more
        check(store, done + more)
        report = verify(store)
        assert report.damaged == []
        assert report.stale == 0
    with Store(small_disk / "store", read_only=True) as store:
        check(store, done + more)


def test_no_room_for_a_store_or_a_pack(small_disk: Path) -> None:
    fd = os.open(small_disk / "ballast", os.O_CREAT | os.O_WRONLY)
    os.posix_fallocate(fd, 0, 4 << 20)
    with pytest.raises(CacheFull):
        Store(small_disk / "store").put(a_run(), {"h": [(0, rows_of(0))]})
    os.ftruncate(fd, (4 << 20) - (96 << 10))
    with Store(small_disk / "store") as store:
        done, error = [], None
        for number in range(40):  # each in a pack of its own: some get a file, the rest nothing
            try:
                store.put(a_run(number), {"h": [(0, rows_of(number, 1, 200 + number))]})
                done.append(number)
            except CacheFull as full:
                error = full
        assert error is not None
        os.close(fd)
        (small_disk / "ballast").unlink()
        for number in done:
            assert same_bits(store.rows(a_run(number), "h", [(0, 1)]), rows_of(number, 1, 200 + number))
        assert list((store.path / "packs").glob(".*")) == [], "a pack that could not be made leaves no file"
        store.put(a_run(99), {"h": [(0, rows_of(99))]})
        assert same_bits(store.rows(a_run(99), "h", [(0, 16)]), rows_of(99))


def test_file_size_limit(folder: Path, file_limit: int) -> None:
    with Store(folder) as store:
        done, error = fill(store, 0, rows=1024)
        assert isinstance(error, CacheFull)
        assert len(done) == 16
        check(store, done, rows=1024)
        assert list((folder / "packs").glob(".*")) == []
        store.put(a_run(-1), {"g": [(0, rows_of(1, dtype="bfloat16"))]})
        assert verify(store).ok


def test_too_many_open_files_is_not_damage(folder: Path) -> None:
    """An error of the system says nothing about the entry: it must not be dropped."""
    with Store(folder) as store:
        store.put(a_run(), {"h": [(0, rows_of(0))]})
        digest = store.put_array(rows_of(1))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Store(folder) as store:
        assert store.lookup(a_run(), ["nothing"]) == {}  # the index is open
        used = [os.open("/dev/null", os.O_RDONLY)]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(used) + 1, before[1]))
            with suppress(OSError):
                while True:
                    used.append(os.open("/dev/null", os.O_RDONLY))
            with pytest.raises(CacheError, match="Too many open files") as caught:
                store.rows(a_run(), "h", [(0, 16)])
            assert not isinstance(caught.value, CacheCorrupt)
            with pytest.raises(CacheError) as caught:
                store.get_array(digest)
            assert not isinstance(caught.value, CacheCorrupt)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for fd in used:
                os.close(fd)
        assert same_bits(store.rows(a_run(), "h", [(0, 16)]), rows_of(0))
        assert same_bits(store.get_array(digest), rows_of(1))
