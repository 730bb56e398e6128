"""Many processes on one store, killed at any time."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from store_samples import a_run, pack_files, rows_of, same_bits

from lenspool_cache import Store, verify

Script = Callable[..., "subprocess.Popen[str]"]

# Puts runs first, first + 1, ... until it is killed, and says which are done. Two dtypes: each put needs two packs.
WRITER = """
import sys
from store_samples import a_run, rows_of
from lenspool_cache import Store
store = Store(sys.argv[1])
number = int(sys.argv[2])
while number < int(sys.argv[3]):
    store.put(a_run(number), {"h": [(0, rows_of(number))], "g": [(0, rows_of(number, dtype="bfloat16"))]})
    print(number, flush=True)
    number += 1
"""

# Reads runs of several writers until told to stop, and prints how many answers it had.
READER = """
import sys, time, random
from store_samples import a_run, rows_of, same_bits
from lenspool_cache import Store
store = Store(sys.argv[1], read_only=sys.argv[3] == "ro")
right = partial = 0
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    number = random.choice([0, 100_000, 200_000]) + random.randrange(300)
    found = store.lookup(a_run(number), ["h", "g"])
    if len(found) == 1:
        partial += 1
    if found:
        assert same_bits(store.rows(a_run(number), "h", [(0, 16)]), rows_of(number))
        assert same_bits(store.rows(a_run(number), "g", [(0, 16)]), rows_of(number, dtype="bfloat16"))
        right += 1
print(right, partial)
"""


def check(store: Store, number: int) -> None:
    assert same_bits(store.rows(a_run(number), "h", [(0, 16)]), rows_of(number))
    assert same_bits(store.rows(a_run(number), "g", [(0, 16)]), rows_of(number, dtype="bfloat16"))


def test_killed_writers_lose_nothing_that_was_acknowledged(folder: Path, script: Script) -> None:
    rng = random.Random(7)
    acknowledged: list[int] = []
    for attempt in range(6):
        first = attempt * 1_000_000
        writers = [script(WRITER, folder, first + 100_000 * i, first + 100_000 * (i + 1)) for i in range(2)]
        for writer in writers:
            assert writer.stdout is not None
            acknowledged.append(int(writer.stdout.readline()))  # it runs
        time.sleep(rng.uniform(0.0, 0.25))
        for writer in writers:
            writer.kill()
            acknowledged += [int(line) for line in writer.communicate()[0].splitlines() if line.strip()]
    assert len(acknowledged) > 50
    for rebuilt in (False, True):
        with Store(folder) as store:
            for number in acknowledged:
                check(store, number)
            if not rebuilt:
                store._index.rebuild()
    with Store(folder) as store:
        assert verify(store).damaged == []
        store.put(a_run(-1), {"h": [(0, rows_of(0))]})
        assert store.lookup(a_run(-1), ["h"])


def test_writers_and_readers_at_once(folder: Path, script: Script) -> None:
    Store(folder).close()
    writers = [script(WRITER, folder, 100_000 * i, 100_000 * i + 300) for i in range(3)]
    readers = [script(READER, folder, 3.0, mode) for mode in ("rw", "ro", "ro")]
    for reader in readers:
        right, partial = map(int, reader.communicate(timeout=60)[0].split())
        assert reader.returncode == 0
        assert partial == 0, "a put became visible in parts"
        assert right > 0
    for writer in writers:
        assert len(writer.communicate(timeout=60)[0].splitlines()) == 300
        assert writer.returncode == 0
    with Store(folder) as store:
        assert store.stats()["entries"] == 2 * 3 * 300
        assert verify(store).ok


def test_equal_puts_of_many_processes(folder: Path, script: Script) -> None:
    Store(folder).close()
    for writer in [script(WRITER, folder, 0, 60) for _ in range(3)]:
        assert writer.wait(timeout=60) == 0
    with Store(folder) as store:
        for number in range(60):
            assert {n: len(s) for n, s in store.lookup(a_run(number), ["h", "g"]).items()} == {"h": 1, "g": 1}
            check(store, number)
        assert store.stats()["entries"] == 120
        assert verify(store).ok


def test_many_open_a_new_store_at_once(folder: Path, script: Script) -> None:
    source = "import sys; from lenspool_cache import Store; print(Store(sys.argv[1]).id)"
    started = [script(source, folder) for _ in range(4)]
    assert len({process.communicate(timeout=60)[0] for process in started}) == 1
    assert all(process.returncode == 0 for process in started)
    assert list(folder.glob(".*")) == []


def test_index_deleted_while_processes_write(folder: Path, script: Script) -> None:
    Store(folder).close()
    writers = [script(WRITER, folder, 100_000 * i, 100_000 * i + 300) for i in range(3)]
    while any(writer.poll() is None for writer in writers):
        time.sleep(0.3)
        (folder / "index.sqlite").unlink(missing_ok=True)
    for writer in writers:
        assert len(writer.communicate()[0].splitlines()) == 300
        assert writer.returncode == 0
    with Store(folder) as store:
        for number in range(300):
            check(store, 100_000 * (number % 3) + number)
        assert store.stats()["entries"] == 2 * 3 * 300


def test_a_read_only_store_follows_its_writers(folder: Path, script: Script) -> None:
    """It was opened while nobody wrote, as an immutable file; it must notice when that is over."""
    assert script(WRITER, folder, 0, 1).wait(timeout=60) == 0
    with Store(folder, read_only=True) as reader:
        check(reader, 0)
        with Store(folder) as writer:
            for number in range(1, 4):
                writer.put(a_run(number), {"h": [(0, rows_of(number))], "g": [(0, rows_of(number, dtype="bfloat16"))]})
                check(reader, number)
        for number in range(4):
            check(reader, number)


def test_fork(folder: Path) -> None:
    """A child takes new packs and a connection of its own; parent and child go on with one `Store` object."""
    with Store(folder) as store:
        store.put(a_run(0), {"h": [(0, rows_of(0))], "g": [(0, rows_of(0, dtype="bfloat16"))]})
        child = os.fork()
        if child == 0:
            status = 1
            try:
                check(store, 0)
                for number in range(1, 30):
                    store.put(
                        a_run(number), {"h": [(0, rows_of(number))], "g": [(0, rows_of(number, dtype="bfloat16"))]}
                    )
                status = 0
            finally:
                os._exit(status)
        for number in range(30, 60):
            store.put(a_run(number), {"h": [(0, rows_of(number))], "g": [(0, rows_of(number, dtype="bfloat16"))]})
        assert os.waitpid(child, 0)[1] == 0
        for number in range(60):
            check(store, number)
        assert len(pack_files(folder)) == 4
        assert verify(store).ok


def test_threads(folder: Path) -> None:
    failures: list[BaseException] = []
    with Store(folder) as store:
        store._packs.limit = 1  # files open and close all the time

        def work(first: int) -> None:
            try:
                for number in range(first, first + 40):
                    store.put(
                        a_run(number), {"h": [(0, rows_of(number))], "g": [(0, rows_of(number, dtype="bfloat16"))]}
                    )
                    check(store, random.randint(first, number))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(1000 * i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert store.stats()["entries"] == 2 * 6 * 40


def test_open_files_stay_bounded(folder: Path) -> None:
    with Store(folder) as store:
        store._packs.limit = 4
        for width in range(1, 21):
            store.put(a_run(), {f"h{width}": [(0, rows_of(1, 2, width))]})
    before = len(list(Path("/proc/self/fd").iterdir()))
    with Store(folder, read_only=True) as store:
        store._packs.limit = 4
        for width in range(1, 21):
            store.rows(a_run(), f"h{width}", [(0, 2)])
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 4 + 2
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_umask(folder: Path, umask: int, mode: int) -> None:
    source = f"""
import os, sys
os.umask({umask})
from store_samples import a_run, rows_of
from lenspool_cache import Store
store = Store(sys.argv[1])
store.put(a_run(), {{"h": [(0, rows_of(0))]}})
store.put_array(rows_of(0))
os._exit(0)  # the log of the index stays, to be looked at too
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run([sys.executable, "-c", source, str(folder)], check=True, env=environment)
    files = [p for p in folder.rglob("*") if p.is_file()]
    assert len(files) >= 6
    assert {oct(p.stat().st_mode & 0o777) for p in files} == {oct(mode)}


# Becomes a user without rights on the store, if it is root, and reads.
STRANGER = """
import os, sys
from store_samples import a_run, rows_of, same_bits
from lenspool_cache import Store, CacheError, verify
rows_of(0)  # all is imported: the stranger may have no right to read Python's files
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
store = Store(sys.argv[1], read_only=True)
for number in range(3):
    assert same_bits(store.rows(a_run(number), "h", [(0, 16)]), rows_of(number)), number
assert verify(store).ok
try:
    Store(sys.argv[1]).put(a_run(9), {"h": [(0, rows_of(0))]})
except CacheError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize("state", ["closed", "live", "log without shared memory", "no index"])
def test_without_write_permission(folder: Path, script: Script, state: str) -> None:
    store = Store(folder)
    for number in range(3):
        store.put(a_run(number), {"h": [(0, rows_of(number))]})
    if state == "log without shared memory":
        log = (folder / "index.sqlite-wal").read_bytes()
        store.close()
        (folder / "index.sqlite-wal").write_bytes(log)
    elif state == "no index":
        store.close()
        (folder / "index.sqlite").unlink()
    elif state == "closed":
        store.close()
    assert (folder / "index.sqlite-wal").exists() == (state in ("live", "log without shared memory"))
    folders = [folder, folder / "packs"]
    outer = [p for p in folder.parents if p.is_relative_to("/tmp") or p.stat().st_uid == os.getuid()]
    modes = {p: p.stat().st_mode for p in outer}
    try:
        for path in outer:
            path.chmod(path.stat().st_mode | 0o055)
        for path in folders:
            path.chmod(0o555)
        process = script(STRANGER, folder)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "refused:" in out
    finally:
        for path in folders:
            path.chmod(0o755)
        for path, mode in modes.items():
            path.chmod(mode)
        store.close()
