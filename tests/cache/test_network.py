"""A folder that several machines share: no shared memory, no lock that must work, and what is seen late is a miss."""

from __future__ import annotations

import errno
import fcntl
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from store_samples import a_run, pack_files, rows_of, same_bits
from test_store_processes import WRITER

from lenspool_cache import CacheError, Policy, Store, collect, follow, verify
from lenspool_cache.codec import RECORD_SIZE
from lenspool_cache.mounts import is_network
from lenspool_cache.segment import Layout


def put(store: Store, number: int) -> None:
    store.put(a_run(number), {"h": [(0, rows_of(number))], "g": [(0, rows_of(number, dtype="bfloat16"))]})


def test_machines_see_what_others_put(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "_EVERY_S", 0.0)
    monkeypatch.setattr(follow, "_EVERY_LOOKS", 0)
    with Store(folder, network=True) as one, Store(folder, network=True) as two:
        for number in range(40):
            put(one if number % 2 else two, number)
            for store in (one, two):
                assert same_bits(store.rows(a_run(number), "h", [(0, 16)]), rows_of(number))
        assert one.put(a_run(0), {"h": [(0, rows_of(0))]}) == 0
        with Store(folder, network=True, read_only=True) as three:
            assert three.stats()["entries"] == 80
        for store in (one, two):
            assert verify(store).ok
    assert [p.name for p in folder.glob("index*")] == [], "no file of SQLite, and no lock of one"


def test_other_processes(folder: Path, script: Callable[..., subprocess.Popen[str]]) -> None:
    source = WRITER.replace("Store(sys.argv[1])", "Store(sys.argv[1], network=True)")
    Store(folder, network=True).close()
    writers = [script(source, folder, 1000 * i, 1000 * i + 100) for i in range(2)]
    with Store(folder, network=True) as store:
        for writer in writers:
            assert len(writer.communicate(timeout=60)[0].splitlines()) == 100
        store._index.follow(now=True)
        for number in (*range(100), *range(1000, 1100)):
            assert same_bits(store.rows(a_run(number), "g", [(0, 16)]), rows_of(number, dtype="bfloat16"))
        assert store.stats()["entries"] == 400


def test_a_put_of_which_a_part_is_seen_yet(folder: Path) -> None:
    """Of two packs one arrives later: the put counts when both are there, and a torn record when it is whole."""
    with Store(folder) as store:
        put(store, 0)
        put(store, 1)
    late = pack_files(folder)[0]
    slot = Layout.read(late).index_offset + RECORD_SIZE
    with late.open("r+b") as file:
        file.seek(slot)
        record = file.read(RECORD_SIZE)
        for seen in (bytes(RECORD_SIZE), record[:60] + bytes(RECORD_SIZE - 60), record):
            file.seek(slot)
            file.write(seen)
            file.flush()
            if seen == bytes(RECORD_SIZE):
                store = Store(folder, network=True)
            store._index.follow(now=True)
            assert set(store.lookup(a_run(1), ["h", "g"])) == ({"h", "g"} if seen == record else set())
            assert set(store.lookup(a_run(0), ["h", "g"])) == {"h", "g"}
    store.close()


def test_a_file_system_without_locks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts and reads do without; what would be unsafe says so."""

    def flock(fd: int, mode: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with Store(folder, network=True) as store:
        put(store, 0)
        assert same_bits(store.rows(a_run(0), "h", [(0, 16)]), rows_of(0))
        store.pins.add("x", [a_run(0).key])  # a new name is nobody else's
        for refused in (lambda: collect(store, Policy(max_bytes=0)), lambda: store.pins.add("x", [a_run(1).key])):
            with pytest.raises(CacheError, match="has no locks"):
                refused()
        assert store.pins.all() == {"x": {a_run(0).key}}
    with Store(folder, network=True) as store:
        assert same_bits(store.rows(a_run(0), "h", [(0, 16)]), rows_of(0))


def test_which_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mountinfo"
    line = "36 35 0:50 / {} rw,relatime shared:1 - {} server:/x rw\n"
    here = tmp_path / "a b"
    here.mkdir()
    for kind, network in (("nfs4", True), ("cifs", True), ("fuse.sshfs", True), ("ext4", False), ("xfs", False)):
        mounts.write_text(line.format("/", "ext4") + line.format(str(here).replace(" ", "\\040"), kind))
        assert is_network(here / "store", mounts) == network
        assert not is_network(tmp_path, mounts)
    assert not is_network(here, tmp_path / "absent")
    monkeypatch.setenv("LENSPOOL_NETWORK_STORE", "1")
    assert is_network(here, mounts)
