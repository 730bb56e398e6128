"""A million small entries in the store, LMDB and SQLite, each put by itself: `benchmarks/store_million.py --help`.

Each way runs in a process of its own. What is printed of it: microseconds of a put, of the first and of the last tenth;
of a random read; milliseconds from a new process's opening to its first read; files, bytes on the disk for each byte of
payload, and MB of memory at most. Of the store also the seconds of making its index anew, and of evicting half.
"""

from __future__ import annotations

import argparse
import random
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from store_rivals import Lenspool, Lmdb, Way

from lenspool_cache import Policy, collect

READS = 20_000


class Sqlite:
    """A table of blobs, a transaction each, flushed at checkpoints only."""

    def __init__(self, folder: Path) -> None:
        self.db = sqlite3.connect(folder / "db", isolation_level=None)
        self.db.execute("PRAGMA journal_mode = WAL")
        self.db.execute("PRAGMA synchronous = NORMAL")
        self.db.execute("CREATE TABLE IF NOT EXISTS entry (n INTEGER PRIMARY KEY, rows BLOB)")

    def write(self, n: int, rows: np.ndarray) -> None:
        self.db.execute("INSERT INTO entry VALUES (?, ?)", (n, rows.data))

    def read(self, n: int) -> np.ndarray:
        (data,) = self.db.execute("SELECT rows FROM entry WHERE n = ?", (n,)).fetchone()
        return np.frombuffer(data, np.uint16)[None]

    def fill(self, n: int, first: int, out: np.ndarray) -> None:
        out[:] = self.read(n)[first : first + len(out)]

    def close(self) -> None:
        self.db.close()


WAYS: dict[str, type[Way]] = {"store": Lenspool, "LMDB": Lmdb, "SQLite": Sqlite}


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def row_of(n: int, width: int) -> np.ndarray:
    row = np.full((1, width), n % 65536, np.uint16)
    row[0, 0] = n >> 16
    return row


def opened(name: str, folder: Path, width: int) -> Way:
    way = WAYS[name](folder)
    way.shape = (1, width)  # type: ignore[attr-defined]
    return way


def fill(name: str, folder: Path, entries: int, width: int) -> dict[str, str]:
    """Put and read all; figures."""
    way = opened(name, folder, width)
    tenth, puts = entries // 10, []
    for first in range(0, entries, tenth):
        puts.append(seconds(lambda: [way.write(n, row_of(n, width)) for n in range(first, first + tenth)]) / tenth)  # noqa: B023
    order = random.Random(0).sample(range(entries), min(entries, READS))
    for n in order[:1000]:
        assert np.array_equal(way.read(n), row_of(n, width))
    read = seconds(lambda: [way.read(n) for n in order]) / len(order)
    way.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    files = [path for path in folder.rglob("*") if path.is_file()]
    disk = sum(path.stat().st_blocks * 512 for path in files) / (entries * 2 * width)
    cells = {"put us, first": puts[0], "put us, last": puts[-1], "read us": read}
    out = {key: f"{value * 1e6:.0f}" for key, value in cells.items()}
    return out | {"files": str(len(files)), "disk / payload": f"{disk:.2f}", "memory MB": f"{peak:.0f}"}


def reopened(name: str, folder: Path, entries: int, width: int) -> dict[str, str]:
    """In a new process: what opening takes."""
    began = time.perf_counter()
    way = opened(name, folder, width)
    assert np.array_equal(way.read(entries // 2), row_of(entries // 2, width))
    out = {"open ms": f"{(time.perf_counter() - began) * 1e3:.1f}"}
    if isinstance(way, Lenspool):
        out["new index s"] = f"{seconds(way.store._index.rebuild):.0f}"
        half = Policy(max_bytes=way.store.disk_bytes() // 2)
        out["evict half s"] = f"{seconds(lambda: collect(way.store, half)):.0f}"
        out["memory MB then"] = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f}"
    way.close()
    return out


def main() -> None:
    """Measure, and print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--bytes", type=int, default=2048, help="of an entry")
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's temporary folder")
    parser.add_argument("--phase", choices=["fill", "reopened"], help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=list(WAYS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    width = options.bytes // 2
    if options.phase:
        work = fill if options.phase == "fill" else reopened
        for key, value in work(options.way, options.folder, options.entries, width).items():
            print(f"{options.way:10}{key:20}{value:>10}", flush=True)
        return
    for name in WAYS:
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            for phase in ("fill", "reopened"):
                command = [sys.executable, __file__, "--phase", phase, "--way", name, "--folder", str(folder)]
                command += ["--entries", str(options.entries), "--bytes", str(options.bytes)]
                subprocess.run(command, check=True)
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
