"""Damage on the disk: never a wrong answer, and a miss afterwards."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from store_samples import a_run, flip, pack_files, rows_of, same_bits

from lenspool_cache import CacheCorrupt, CacheError, Store, verify
from lenspool_cache.codec import RECORD_SIZE
from lenspool_cache.pack import Need, create_pack
from lenspool_cache.segment import Layout


def filled(folder: Path, runs: int = 6) -> None:
    with Store(folder) as store:
        for number in range(runs):
            store.put(a_run(number), {"h": [(0, rows_of(number))], "generation": [(0, blob(number))]})


def blob(number: int) -> np.ndarray:
    return np.frombuffer(f"text {number}".encode(), np.uint8)[:, None]


def answers(store: Store, runs: int = 6) -> set[int]:
    """Runs that the store answers, in full and right; an answer that is wrong fails the test."""
    out = set()
    for number in range(runs):
        found = store.lookup(a_run(number), ["h", "generation"])
        if len(found) == 2:
            assert same_bits(store.rows(a_run(number), "h", [(0, 16)]), rows_of(number))
            assert same_bits(store.rows(a_run(number), "generation", [(0, 6)]), blob(number))
            out.add(number)
    return out


def float_pack(folder: Path) -> tuple[Path, Layout]:
    (path,) = [p for p in pack_files(folder) if p.name.startswith("float32")]
    return path, Layout.read(path)


def remove_index(folder: Path) -> None:
    for path in folder.glob("index.sqlite*"):
        path.unlink()


@pytest.mark.parametrize("read_only", [False, True])
def test_flipped_payload(folder: Path, read_only: bool, caplog: pytest.LogCaptureFixture) -> None:
    filled(folder)
    path, layout = float_pack(folder)
    flip(path, layout.rows_offset + 2 * 16 * layout.row_bytes + 1000)
    with Store(folder, read_only=read_only) as store:
        (segment,) = store.lookup(a_run(2), ["h"])["h"]
        with pytest.raises(CacheCorrupt):
            store.read(segment)
        assert store.lookup(a_run(2), ["h"]) == {}
        assert "dropped" in caplog.text
        assert store.stats()["corrupt"] == 1
        assert answers(store) == {0, 1, 3, 4, 5}
    if not read_only:
        remove_index(folder)
        with Store(folder) as store:
            assert store.lookup(a_run(2), ["h"]) == {}, "a rebuilt index must not bring it back"
            store.put(a_run(2), {"h": [(0, rows_of(2))]})
            assert answers(store) == set(range(6))


def test_every_byte_of_a_record_and_its_document(folder: Path) -> None:
    """Any flipped bit of a record or of the key document is a miss, found by lookup or by the read."""
    filled(folder, 1)
    path, layout = float_pack(folder)
    places = range(layout.index_offset, layout.index_offset + RECORD_SIZE)
    document = range(layout.documents_offset, layout.documents_offset + len(a_run(0).data), 7)
    for offset in [*places, *document]:
        flip(path, offset)
        with Store(folder, read_only=True) as store:
            assert store.lookup(a_run(0), ["h"]) == {}, f"byte {offset - layout.index_offset} of the record"
            assert store.lookup(a_run(0), ["generation"])
        flip(path, offset)
    with Store(folder, read_only=True) as store:
        assert answers(store, 1) == {0}


def garbage(path: Path) -> None:
    path.write_bytes(b"this is not a database, " * 500)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def scrambled(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100:] = bytes(reversed(data[100:]))
    path.write_bytes(data)


def other_version(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()


def other_store(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET value = 'another'")
    db.close()


HURTS: list[Callable[[Path], None]] = [Path.unlink, garbage, truncated, emptied, scrambled, other_version, other_store]


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("hurt", HURTS)
def test_index_is_rebuilt(folder: Path, hurt: Callable[[Path], None], read_only: bool) -> None:
    filled(folder)
    with Store(folder) as store:
        before = {n: store.lookup(a_run(n), ["h", "generation"]) for n in range(6)}
    hurt(folder / "index.sqlite")
    files = sorted(folder.iterdir())
    with Store(folder, read_only=read_only) as store:
        assert {n: store.lookup(a_run(n), ["h", "generation"]) for n in range(6)} == before
        assert answers(store) == set(range(6))
    if read_only:
        assert sorted(folder.iterdir()) == files


@pytest.mark.parametrize("hurt", [Path.unlink, garbage])
def test_index_is_replaced_under_open_stores(folder: Path, hurt: Callable[[Path], None]) -> None:
    filled(folder)
    with Store(folder) as one, Store(folder) as two:
        assert answers(one) == answers(two) == set(range(6))
        new = folder / "new"
        new.write_bytes((folder / "index.sqlite").read_bytes())
        new.rename(folder / "index.sqlite")  # another inode: what both have open is no longer the index
        hurt(folder / "index.sqlite")
        one.put(a_run(6), {"h": [(0, rows_of(6))], "generation": [(0, blob(6))]})
        two.put(a_run(7), {"h": [(0, rows_of(7))], "generation": [(0, blob(7))]})
        assert answers(one, 8) == answers(two, 8) == set(range(8))


def test_an_index_that_points_to_the_wrong_rows_cannot_lie(folder: Path) -> None:
    filled(folder)
    with sqlite3.connect(folder / "index.sqlite") as db:
        db.execute("UPDATE entry SET slot = (slot + 1) % 6")
    db.close()
    with Store(folder) as store:
        assert answers(store) == set()
        assert verify(store).damaged == []


def test_an_index_that_mixes_the_hooks_of_a_run_cannot_lie(folder: Path) -> None:
    with Store(folder) as store:
        store.put(a_run(), {f"h{i}": [(0, rows_of(i))] for i in range(5)})
    with sqlite3.connect(folder / "index.sqlite") as db:
        db.execute("UPDATE entry SET slot = (slot + 1) % 5 WHERE slot < 4")
    db.close()
    with Store(folder) as store:
        assert store.lookup(a_run(), [f"h{i}" for i in range(4)]) == {}


def test_an_index_with_a_wrong_position_cannot_lie(folder: Path) -> None:
    filled(folder, 1)
    with sqlite3.connect(folder / "index.sqlite") as db:
        db.execute("UPDATE entry SET start = 1")
    db.close()
    with Store(folder) as store:
        assert store.lookup(a_run(0), ["h", "generation"]) == {}


@pytest.mark.parametrize("hurt", [Path.unlink, garbage, emptied, truncated])
def test_a_pack_is_gone_or_garbage(folder: Path, hurt: Callable[[Path], None]) -> None:
    filled(folder)
    with Store(folder) as store:
        (segment,) = store.lookup(a_run(0), ["h"])["h"]
    hurt(float_pack(folder)[0])
    with Store(folder) as store:
        with pytest.raises(CacheCorrupt):
            store.read(segment)
        assert store.lookup(a_run(0), ["h"]) == {}
        assert store.lookup(a_run(1), ["h"]) == {}
        filled(folder)
        assert answers(store) == set(range(6))


def test_a_pack_that_goes_while_it_is_opened_is_gone_not_damaged(folder: Path) -> None:
    folder.mkdir()
    writer = create_pack(folder, "id", "float32", 64, 1 << 20, Need(1, 1, 1))
    writer.close()
    newest, end = mmap.mmap(-1, 8), time.monotonic() + 1.0
    child = os.fork()
    if child == 0:
        for number in itertools.count():
            name = folder / f"{number}.h5"
            os.link(writer.path, name)
            newest[:] = number.to_bytes(8, "little")
            time.sleep(random.uniform(0, 3e-4))
            name.unlink()
            if time.monotonic() > end:
                os._exit(0)
    found = Counter[str]()
    while time.monotonic() < end:
        try:
            Layout.read(folder / f"{int.from_bytes(newest[:], 'little')}.h5")
            found["whole"] += 1
        except FileNotFoundError:  # above all not CacheCorrupt
            found["gone"] += 1
    assert os.waitpid(child, 0)[1] == 0
    assert found["gone"] > 0
    assert found["whole"] > 0


def test_a_pack_deleted_under_its_writer(folder: Path) -> None:
    with Store(folder) as store:
        store.put(a_run(0), {"h": [(0, rows_of(0))]})
        assert same_bits(store.rows(a_run(0), "h", [(0, 16)]), rows_of(0))
        pack_files(folder)[0].unlink()
        assert store.lookup(a_run(0), ["h"]) == {}
        store.put(a_run(0), {"h": [(0, rows_of(0))]})
        assert same_bits(store.rows(a_run(0), "h", [(0, 16)]), rows_of(0))
        assert len(pack_files(folder)) == 1


def test_a_put_that_never_became_whole_stays_invisible(folder: Path) -> None:
    """The writer died between the records of two packs: no index, however built, shows a part of that put."""
    filled(folder, 3)
    (texts,) = [p for p in pack_files(folder) if p.name.startswith("uint8")]
    layout = Layout.read(texts)
    with texts.open("r+b") as file:  # the last record of the last put, unwritten
        file.seek(layout.index_offset + 2 * RECORD_SIZE)
        file.write(bytes(RECORD_SIZE))
    remove_index(folder)
    with Store(folder) as store:
        assert store.lookup(a_run(2), ["h", "generation"]) == {}
        assert answers(store, 3) == {0, 1}
        assert verify(store).unfinished == 1


def test_a_failed_commit_uses_its_space_up(folder: Path) -> None:
    """A record that did reach the disk must not come to describe rows of the next put."""
    folder.mkdir()
    writer = create_pack(folder, "id", "float32", 64, 1 << 20, Need(1, 1, 1))
    path = writer.path
    assert writer.stage([rows_of(1)], [b"document"]) == (0, 0)
    assert writer.stage([rows_of(2)], [b"document"]) == (0, 0), "staging alone uses up nothing"
    fd, writer.fd = writer.fd, os.open(path, os.O_RDONLY)
    with pytest.raises(OSError, match="Bad file descriptor"):
        writer.commit([bytes(RECORD_SIZE)])
    os.close(writer.fd)
    writer.fd = fd
    assert writer.stage([rows_of(3)], [b"document"]) == (16, 8)
    assert writer.commit([bytes(RECORD_SIZE)]) == 1


def test_damaged_array(store: Store, folder: Path) -> None:
    digest = store.put_array(rows_of(1))
    path = folder / "arrays" / f"{digest}.h5"
    flip(path, path.read_bytes().index(rows_of(1).tobytes()) + 77)
    with pytest.raises(CacheCorrupt):
        store.get_array(digest)
    assert not store.has_array(digest)
    path.write_bytes(b"garbage")
    with pytest.raises(CacheCorrupt):
        store.get_array(digest)
    assert store.put_array(rows_of(1)) == digest
    assert same_bits(store.get_array(digest), rows_of(1))


def test_verify_finds_and_repairs(folder: Path) -> None:
    filled(folder)
    with Store(folder) as store:
        digest = store.put_array(rows_of(1))
        report = verify(store)
        assert report.ok
        assert (report.packs, report.records, report.arrays, report.unfinished) == (2, 12, 1, 0)
        assert report.payload_bytes == 6 * (rows_of(0).nbytes + 6)

        path, layout = float_pack(folder)
        flip(path, layout.rows_offset + 16 * layout.row_bytes)  # payload of run 1
        flip(path, layout.documents_offset + 10)  # document of run 0
        flip(path, layout.index_offset + 3 * RECORD_SIZE)  # record of run 3
        array_file = folder / "arrays" / f"{digest}.h5"
        flip(array_file, array_file.read_bytes().index(rows_of(1).tobytes()))
        report = verify(store)
        assert not report.ok
        assert not report.repaired
        assert sorted(d.slot for d in report.damaged if d.slot is not None) == [0, 1, 3]
        assert [d.file for d in report.damaged if d.slot is None] == [f"arrays/{digest}"]

        report = verify(store, repair=True)
        assert report.repaired
        after = verify(store)
        assert after.stale == after.unindexed == 0
        assert [d.slot for d in after.damaged] == [3], "a torn record cannot be mended, only be left alone"
        for number in (0, 1, 3):
            assert "h" not in store.lookup(a_run(number), ["h", "generation"])
        filled(folder)
        assert answers(store) == set(range(6))


def test_verify_finds_what_the_index_lost(folder: Path) -> None:
    filled(folder)
    with sqlite3.connect(folder / "index.sqlite") as db:
        db.execute("DELETE FROM entry WHERE slot < 2")
    db.close()
    with Store(folder) as store:
        assert verify(store).unindexed == 4
        verify(store, repair=True)
        assert answers(store) == set(range(6))


def test_verify_deletes_what_dead_writers_left(folder: Path) -> None:
    filled(folder)
    old, young = folder / "packs" / ".old.h5.tmp", folder / "packs" / ".young.h5.tmp"
    for path in (old, young):
        path.write_bytes(b"half a pack")
    os.utime(old, (0, 0))
    with Store(folder) as store:
        assert verify(store).leftovers == 1
        assert verify(store, repair=True).leftovers == 1
        assert not old.exists()
        assert young.exists()
        assert answers(store) == set(range(6))


def test_verify_does_not_repair_a_read_only_store(folder: Path) -> None:
    filled(folder)
    with Store(folder, read_only=True) as store, pytest.raises(CacheError, match="read-only"):
        verify(store, repair=True)


def test_not_a_store(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CacheError, match="is not a store"):
            Store(path, read_only=True)
    assert list(tmp_path.iterdir()) == []
    for text in ("", "[]", '{"version": 1}', '{"version": 2, "id": "x"}'):
        (tmp_path / "store.json").write_text(text)
        with pytest.raises(CacheError, match=r"cannot be read|has version 2"):
            Store(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError):
        Store(tmp_path / "file" / "store")
