"""The store against raw files, bare h5py, np.save, safetensors, zarr and LMDB: `python benchmarks/store.py --help`.

Rows are [rows, 4096] of two bytes. Everything is in the page cache, in new files each round; each way has written one
row before, so that its one-time costs are not counted. The order of the ways turns from round to round, and the median
of the rounds counts. Captures: the time of a write is compared with that of raw files, xxh3 of the same bytes included,
and the time of a read with that of bare h5py. Streaming fills a shuffle buffer of 64 MB, as training does, with whole
captures in order or with shuffled blocks of 1 MB: ratios of bandwidth to `preadv` of the same from raw files.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
from store_rivals import WAYS

from lenspool_cache.codec import checksum, raw

WIDTH, BLOCK = 4096, 128  # elements of a row, rows of a block: 1 MB
BUFFER = np.zeros((64 * BLOCK, WIDTH), np.uint16)
FILE_PER_ENTRY = {"raw files", "bare h5py", "np.save", "safetensors", "zarr"}
FEW = 2000  # small entries of ways that make a file for each


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def warm(folder: Path, megabytes: int) -> None:
    """Touch as much memory as a round needs."""
    path, chunk = folder / "warm", bytes(1 << 20)
    with path.open("wb") as file:
        for _ in range(megabytes):
            file.write(chunk)
    path.unlink()


def captures(folder: Path, name: str, rows: np.ndarray, count: int, seed: int) -> dict[str, float]:
    """Seconds of writing, reading whole, and reading blocks in order and shuffled."""
    folder.mkdir()
    way = WAYS[name](folder)
    way.write(count, rows[:1])
    blocks = [(n, at) for n in range(count) for at in range(0, len(rows), BLOCK)]
    random.Random(seed).shuffle(blocks)
    whole, pieces = BUFFER.reshape(-1, *rows.shape), BUFFER.reshape(-1, BLOCK, WIDTH)
    out = {
        "write": seconds(lambda: [way.write(n, rows) for n in range(count)]),
        "read": seconds(lambda: [way.read(n).size for n in range(count)]),
        "in order": seconds(lambda: [way.fill(n, 0, whole[n % len(whole)]) for n in range(count)]),
        "shuffled": seconds(lambda: [way.fill(n, at, pieces[i % len(pieces)]) for i, (n, at) in enumerate(blocks)]),
    }
    way.close()
    shutil.rmtree(folder)
    return out


def small(folder: Path, name: str, count: int) -> tuple[float, float, float]:
    """Microseconds of a put and of a get of one row, and bytes on the disk for each of its bytes."""
    folder.mkdir()
    way, row = WAYS[name](folder), np.ones((1, WIDTH), np.uint16)
    order = random.Random(0).sample(range(count), min(count, 20_000))
    put = seconds(lambda: [way.write(n, row) for n in range(count)]) / count * 1e6
    get = seconds(lambda: [way.read(n) for n in order]) / len(order) * 1e6
    way.close()
    disk = sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))
    shutil.rmtree(folder)
    return put, get, disk / (count * row.nbytes)


def table(title: str, columns: Sequence[str], lines: dict[str, list[str]]) -> None:
    print(f"\n{title:30}" + "".join(f"{column:>16}" for column in columns))
    for name, cells in lines.items():
        print(f"{name:30}" + "".join(f"{cell:>16}" for cell in cells))


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=32, help="MB of a capture")
    parser.add_argument("--captures", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--entries", type=int, default=100_000, help="small entries; 1000000 takes 8 GB and minutes")
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's temporary folder")
    options = parser.parse_args()
    rows = np.random.default_rng(0).integers(0, 1 << 16, (options.mb * BLOCK, WIDTH), np.uint16)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        warm(Path(root), 3 * options.mb * options.captures)
        for number in range(options.rounds):
            names = list(WAYS)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                rounds[name].append(captures(Path(root) / name, name, rows, options.captures, number))
                if name == "raw files":
                    work = lambda: [checksum(raw(rows)) for _ in range(options.captures)]  # noqa: E731
                    rounds[name][-1]["checksum"] = seconds(work)
        usual = {name: {key: median(t[key] for t in times) for key in times[0]} for name, times in rounds.items()}
        total, limit = rows.nbytes * options.captures / 1e9, usual["raw files"]
        base = {"write": limit["write"] + limit["checksum"], "read": usual["bare h5py"]["read"]}
        table(
            f"{options.captures} captures of {options.mb} MB",
            ("write GB/s", "time / raw", "read GB/s", "time / h5py", "in order", "of raw", "shuffled", "of raw"),
            {
                name: [
                    *(
                        f(key)
                        for key in ("write", "read")
                        for f in (
                            lambda key, t=times: f"{total / t[key]:.2f}",
                            lambda key, t=times: f"{t[key] / base[key]:.2f}",
                        )
                    ),
                    *(
                        f(key)
                        for key in ("in order", "shuffled")
                        for f in (
                            lambda key, t=times: f"{total / t[key]:.2f}",
                            lambda key, t=times: f"{limit[key] / t[key]:.2f}",
                        )
                    ),
                ]
                for name, times in usual.items()
            },
        )
        if options.entries:
            lines = {}
            for name in WAYS:
                count = min(options.entries, FEW) if name in FILE_PER_ENTRY else options.entries
                put, get, disk = small(Path(root) / name, name, count)
                lines[f"{name} ({count})"] = [f"{put:.0f}", f"{get:.0f}", f"{disk:.2f}"]
            table("entries of 8 KB", ("put us", "get us", "disk / payload"), lines)


if __name__ == "__main__":
    main()
