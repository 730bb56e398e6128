"""Writers, readers and collectors on one store, killed at any time."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from store_samples import a_run, rows_of, same_bits
from test_store_processes import WRITER

from lenspool_cache import Policy, Store, collect, verify

# Any row may be gone between two calls: that is a KeyError, a miss. Anything else ends the reader.
READER = """
import random, sys, time
from store_samples import a_run, rows_of, same_bits
from lenspool_cache import Store
store = Store(sys.argv[1])
right = missed = 0
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    number = random.choice([0, 100_000, 200_000]) + random.randrange(300)
    for name, dtype in (("h", "float32"), ("g", "bfloat16")):
        try:
            assert same_bits(store.rows(a_run(number), name, [(0, 16)]), rows_of(number, dtype=dtype))
            right += 1
        except KeyError:
            missed += 1
assert store.stats()["corrupt"] == 0
print(right, missed)
"""

COLLECTOR = """
import sys
from lenspool_cache import Policy, Store, collect
store = Store(sys.argv[1])
while True:
    collect(store, Policy(max_bytes=int(sys.argv[2])))
"""


def test_eviction_under_load_and_kill(folder: Path, script: Callable[..., subprocess.Popen[str]]) -> None:
    """No reader sees an error or a wrong row, and what is left after all are killed is sound."""
    rng = random.Random(3)
    with Store(folder) as store:
        store.policy = Policy(max_bytes=3 << 20)
        store.pins.add("kept", [a_run(5).key])
        store.put(a_run(5), {"h": [(0, rows_of(5))], "g": [(0, rows_of(5, dtype="bfloat16"))]})
    readers = [script(READER, folder, 9) for _ in range(2)]
    writers = [script(WRITER, folder, 100_000 * i, 100_000 * i + 10**5) for i in range(3)]
    collector = script(COLLECTOR, folder, 2 << 20)
    end = time.monotonic() + 8
    while time.monotonic() < end:
        time.sleep(rng.uniform(0.4, 0.9))
        collector.kill()
        collector.wait()
        collector = script(COLLECTOR, folder, rng.choice([1 << 20, 2 << 20]))
        i = rng.randrange(3)
        writers[i].kill()
        writers[i].wait()
        writers[i] = script(WRITER, folder, 100_000 * i + rng.randrange(300), 100_000 * (i + 1))
    outputs = [reader.communicate(timeout=60)[0].split() for reader in readers]
    for process in (*writers, collector):
        process.kill()
        process.wait()
    assert all(reader.returncode == 0 for reader in readers)
    assert all(int(right) > 0 and int(missed) > 0 for right, missed in outputs)
    for path in folder.glob("index.sqlite*"):
        path.unlink()
    with Store(folder) as store:
        assert verify(store).damaged == []
        collect(store, Policy(max_bytes=0))
        assert same_bits(store.rows(a_run(5), "h", [(0, 16)]), rows_of(5))
        assert same_bits(store.rows(a_run(5), "g", [(0, 16)]), rows_of(5, dtype="bfloat16"))
        assert store.stats()["entries"] == 2, "only what is pinned outlives a limit of nothing"
        report = verify(store)
        assert (report.damaged, report.stale, report.unindexed) == ([], 0, 0)
