"""Limits, pins and compaction: what goes, what stays, and who may go on reading meanwhile."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_samples import a_run, pack_files, rows_of, same_bits
from test_prefix import H, put, run_of

from lenspool_cache import CacheError, Policy, Store, collect, evict, keeping, verify
from lenspool_cache.eviction import Victims
from lenspool_cache.pack import is_sealed
from lenspool_cache.usage import Usage

MB = 1 << 20
ROWS = 64  # of 256 float32: 64 KB a run


def fill(folder: Path, numbers: range) -> None:
    """Each run stands in two packs: its texts are blobs. The store is closed after, so its packs are sealed."""
    with Store(folder) as store:
        for number in numbers:
            store.put(a_run(number), {"h": [(0, rows_of(number, ROWS, 256))], "text": [(0, text(number))]})


def text(number: int) -> np.ndarray:
    return np.frombuffer(f"text {number}".encode(), np.uint8)[:, None]


def answered(store: Store, numbers: range) -> set[int]:
    """Runs whose rows the store has, bit for bit."""
    out = set()
    for number in numbers:
        if "h" in store.lookup(a_run(number), ["h"]):
            assert same_bits(store.rows(a_run(number), "h", [(0, ROWS)]), rows_of(number, ROWS, 256))
            out.add(number)
    return out


def remove_index(folder: Path) -> None:
    for path in folder.glob("index.sqlite*"):
        path.unlink()


def test_size_limit_evicts_the_least_recently_used(folder: Path) -> None:
    with Store(folder) as store:
        store.policy = Policy(max_bytes=4 * MB)
    fill(folder, range(100))
    with Store(folder) as store:
        assert answered(store, range(10)) == set(range(10))  # the oldest, but used just now
        done = collect(store)
        assert done.before_bytes > 6 * MB
        assert done.after_bytes == store.disk_bytes() <= 4 * MB
        left = answered(store, range(100))
        assert set(range(10)) <= left, "what was used lately stays"
        assert left - set(range(10)) == set(range(100 - len(left) + 10, 100)), "of the others the youngest stay"
        assert len(left) > 40, "no more goes than must"
        report = verify(store)
        assert report.ok
    remove_index(folder)
    with Store(folder) as store:
        assert answered(store, range(100)) == left, "a rebuilt index brings nothing back, and loses nothing"
        assert collect(store).evicted == 0


def test_times_of_use_reach_other_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(folder, range(3))
    with Store(folder) as store, Store(folder) as other:
        store.lookup(a_run(1), ["h"])
        assert Usage(other._index).all() == {}, "a hit writes nothing by itself"
    with Store(folder) as store:
        assert set(Usage(store._index).all()) == {a_run(1).entry("h")}
        monkeypatch.setattr(store._usage, "_due", 0.0)
        store.lookup(a_run(2), ["h"])
        assert set(store._index.used()) == {a_run(n).entry("h") for n in (1, 2)}


def test_age_limit(folder: Path) -> None:
    fill(folder, range(4))
    time.sleep(1.0)
    began = time.time()
    fill(folder, range(4, 6))
    with Store(folder) as store:
        assert answered(store, range(1)) == {0}
        assert collect(store, Policy(max_age_s=3600)).evicted == 0
        # What was used since then stays, give or take half a second for a machine that is busy; of what is older go
        # three rows, and four texts, which were not used.
        assert (
            collect(store, Policy(max_age_s=time.time() - began + 0.5)).evicted == 7
        )  # three rows, and four texts, which were not used
        assert answered(store, range(6)) == {0, 4, 5}
        assert verify(store).ok


@pytest.mark.parametrize("whole_run", [True, False])
def test_pinned_is_never_evicted(folder: Path, whole_run: bool) -> None:
    fill(folder, range(6))
    with Store(folder) as store:
        store.pins.add("paper", [a_run(2).key if whole_run else a_run(2).entry("h")])
        store.pins.add("paper", [a_run(3).entry("h")])
        store.pins.add("other", [a_run(3).key])
        collect(store, Policy(max_bytes=0))
        assert answered(store, range(6)) == {2, 3}
        assert ("text" in store.lookup(a_run(2), ["text"])) == whole_run
        assert store.pins.remove("paper")
        assert not store.pins.remove("paper")
        collect(store, Policy(max_bytes=0))
        assert answered(store, range(6)) == {3}
        assert store.pins.all() == {"other": {a_run(3).key}}


def test_what_is_pinned_while_a_collection_plans_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also an array, and what a pinned run has from others; and nothing is pinned while rows are being deleted."""
    fill(folder, range(6))
    prompt = list(range(100, 160))
    with Store(folder) as store:
        put(store, run_of(prompt), H, 0, 60)
        put(store, taker := run_of([*prompt[:40], *range(20)]), H, 0, 60)
        digest = store.put_array(rows_of(1))
        os.utime(folder / "arrays" / f"{digest}.h5", (0, 0))
    collecting = sys.modules[collect.__module__]
    planned = collecting.choose
    busy = threading.Event()

    def choose(*args: Any) -> Victims:
        victims = planned(*args)
        with Store(folder) as other:
            if not other.pins.all():
                other.pins.add("late", [a_run(2).key, taker.key, bytes.fromhex(digest)])
        return victims

    def drop(*args: Any) -> None:
        dropped(*args)
        thread = threading.Thread(target=lambda: (store.pins.add("later", [a_run(3).key]), busy.set()))
        thread.start()
        threads.append(thread)
        assert not busy.wait(0.05)

    dropped, threads = collecting.drop, list[threading.Thread]()
    with Store(folder) as store:
        with monkeypatch.context() as patched:
            patched.setattr(collecting, "choose", choose)
            patched.setattr(collecting, "drop", drop)
            collect(store, Policy(max_bytes=0))
        for thread in threads:
            thread.join()
        assert answered(store, range(6)) == {2}
        assert store.missing(taker, {H: [(0, 60)]}) == {}
        assert store.has_array(digest)


@pytest.mark.parametrize("name", ["", ".hidden", "../up", "a/b", "x" * 200])
def test_names_of_pins(store: Store, name: str) -> None:
    with pytest.raises(ValueError, match="a pin's name"):
        store.pins.add(name, [a_run().key])


def test_eviction_does_not_break_what_remains_of_a_put(folder: Path) -> None:
    """Rows and texts of a put stand in two packs. When one goes, the other still counts in a rebuilt index."""
    fill(folder, range(6))
    with Store(folder) as store:
        assert evict(store, [a_run(n).entry("h") for n in range(6)]) == 6
        assert collect(store).packs_removed == 1
        assert len(pack_files(folder)) == 1
    remove_index(folder)
    with Store(folder) as store:
        for number in range(6):
            assert store.covered(a_run(number), ["h", "text"]) == {"text": [(0, 6)]}
        assert verify(store).ok


def test_arrays_go_too_but_not_while_jobs_may_want_them(folder: Path) -> None:
    with Store(folder) as store:
        old, pinned, used, young = (store.put_array(rows_of(n)) for n in range(4))
        for digest in (old, pinned, used):
            os.utime(folder / "arrays" / f"{digest}.h5", (0, 0))
        store.pins.add("vectors", [bytes.fromhex(pinned)])
        store.get_array(used)
        done = collect(store, Policy(max_age_s=3600))
        assert (done.arrays, done.evicted) == (1, 0)
        assert [store.has_array(d) for d in (old, pinned, used, young)] == [False, True, True, True]
        os.utime(folder / "arrays" / f"{used}.h5", (0, 0))
        assert collect(store, Policy(max_bytes=0)).arrays == 1
        assert store.has_array(young)
        assert not store.has_array(used)


def test_a_pack_that_nobody_fills_is_closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it can be evicted and uploaded while its writer lives, which goes on in another."""
    monkeypatch.setattr(keeping, "SYNC_S", 0.05)
    monkeypatch.setattr(keeping, "IDLE_S", 0.2)
    with Store(folder) as writer, Store(folder) as store:
        writer.put(a_run(0), {"h": [(0, rows_of(0, ROWS, 256))]})
        deadline = time.monotonic() + 20
        while not is_sealed(pack_files(folder)[0]):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert collect(store, Policy(max_bytes=0)).packs_removed == 1
        writer.put(a_run(1), {"h": [(0, rows_of(1, ROWS, 256))]})
        assert answered(store, range(2)) == {1}


def test_a_flush_that_fails_is_told_at_the_next_put(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "SYNC_PUTS", 1)

    def fdatasync(fd: int) -> None:
        raise OSError(errno.EIO, "input/output error")

    with Store(folder) as store:
        with monkeypatch.context() as broken, pytest.raises(CacheError, match="input/output"):
            broken.setattr(os, "fdatasync", fdatasync)
            deadline = time.monotonic() + 20
            for number in itertools.count():
                assert time.monotonic() < deadline
                store.put(a_run(number), {"h": [(0, rows_of(number))]})
        assert same_bits(store.rows(a_run(0), "h", [(0, 16)]), rows_of(0))


def test_open_readers_read_on(folder: Path) -> None:
    fill(folder, range(6))
    with Store(folder) as reader, Store(folder) as store:
        segments = {n: reader.lookup(a_run(n), ["h"])["h"][0] for n in range(6)}
        names = {p.name for p in pack_files(folder)}
        collect(store, Policy(max_bytes=0))
        assert not names & {p.name for p in pack_files(folder)}
        for number, segment in segments.items():
            assert same_bits(reader.read(segment), rows_of(number, ROWS, 256))
        assert reader.lookup(a_run(0), ["h"]) == {}
        with pytest.raises(KeyError):
            reader.rows(a_run(0), "h", [(0, 1)])
        assert reader.stats()["corrupt"] == 0, "evicted is not damaged"
        reader._packs.sweep()
        assert reader._packs._open == {}, "no reader holds deleted files for ever"


def test_moved_rows_are_found_again_by_who_asked_before(folder: Path) -> None:
    fill(folder, range(8))
    with Store(folder) as reader, Store(folder) as store:
        segment = reader.lookup(a_run(7), ["h"])["h"][0]
        reader._packs.close()
        evict(store, [a_run(n).key for n in range(7)])
        assert collect(store).moved_bytes >= 64 << 10
        answers = iter([[segment]])
        lookup = reader.lookup
        reader.lookup = lambda *args: {"h": found} if (found := next(answers, None)) else lookup(*args)  # type: ignore[method-assign]
        assert same_bits(reader.rows(a_run(7), "h", [(0, ROWS)]), rows_of(7, ROWS, 256))


def test_packs_of_living_writers_are_left_alone(folder: Path) -> None:
    with Store(folder) as writer, Store(folder) as store:
        writer.put(a_run(0), {"h": [(0, rows_of(0, ROWS, 256))]})
        assert not is_sealed(pack_files(folder)[0])
        assert collect(store, Policy(max_bytes=0)).evicted == 0
        assert answered(store, range(1)) == {0}
    assert is_sealed(pack_files(folder)[0])
    with Store(folder) as store:
        assert collect(store, Policy(max_bytes=0)).packs_removed == 1


def test_partly_filled_packs_of_dead_writers_are_joined(folder: Path) -> None:
    for number in range(10):
        fill(folder, range(number, number + 1))
    assert len(pack_files(folder)) == 20
    with Store(folder) as store:
        assert collect(store).evicted == 0
        assert len(pack_files(folder)) == 2
        assert answered(store, range(10)) == set(range(10))
        assert verify(store).ok
        assert collect(store).packs_removed == 0, "nothing is left to do"
    remove_index(folder)
    with Store(folder) as store:
        assert answered(store, range(10)) == set(range(10))


def test_damaged_rows_are_not_moved(folder: Path) -> None:
    fill(folder, range(8))
    with Store(folder) as store:
        segment = store.lookup(a_run(7), ["h"])["h"][0]
        path = folder / "packs" / segment.pack
        at = path.read_bytes().index(rows_of(7, ROWS, 256).tobytes())
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"\xff" * 8)
        evict(store, [a_run(n).key for n in range(6)])
        collect(store)
        assert answered(store, range(8)) == {6}
        assert verify(store).ok


def test_one_collector_at_a_time(folder: Path, script: Callable[..., subprocess.Popen[str]]) -> None:
    holder = """
import fcntl, os, sys, time
fd = os.open(sys.argv[1] + "/collect.lock", os.O_RDWR | os.O_CREAT)
fcntl.flock(fd, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""
    fill(folder, range(2))
    process = script(holder, folder)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with Store(folder) as store:
        assert collect(store, Policy(max_bytes=0)).busy
        process.kill()
        process.wait()
        assert collect(store, Policy(max_bytes=0)).evicted == 4


def test_a_large_store_is_written_in_packs_that_can_go(folder: Path) -> None:
    """With a limit, packs are small beside it: else an open one would be all of the store."""
    with Store(folder) as store:
        store.policy = Policy(max_bytes=8 * MB)
        for number in range(400):
            store.put(a_run(number), {"h": [(0, rows_of(number, ROWS, 256))]})
            if number % 100 == 99:
                collect(store)
                assert store.disk_bytes() <= 8 * MB
        assert answered(store, range(390, 400)) == set(range(390, 400))


def test_refusals(folder: Path) -> None:
    fill(folder, range(1))
    with Store(folder, read_only=True) as store:
        for refused in (lambda: collect(store), lambda: evict(store, [])):
            with pytest.raises(CacheError, match="read-only"):
                refused()
        with pytest.raises(CacheError, match="read-only"):
            store.policy = Policy()
    with pytest.raises(ValueError, match="max_bytes"):
        Policy(max_bytes=-1)
    (folder / "policy.json").write_text('{"max_size": 1}')
    with Store(folder) as store, pytest.raises(CacheError, match="is no policy"):
        collect(store)
