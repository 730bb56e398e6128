"""The store against a raw copy, np.save and bare h5py: `python benchmarks/store.py [MB of a capture] [captures]`.

A capture is one hook, [rows, 4096] bfloat16. Everything is in the page cache; files are new in each round; the best
of the rounds counts. Ratios are to bare h5py of the same bytes (time), so less is better.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np

from lenspool_cache import Run, Store

WIDTH, ROUNDS, SMALL = 4096, 3, 2000


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def run_of(number: int) -> Run:
    return Run({"benchmark": "store", "number": number})


def measure(folder: Path, rows: np.ndarray, count: int) -> dict[str, tuple[float, float]]:
    """Name to seconds of write and of read-back."""
    out = {}
    bits, numbers = rows.view(np.uint16), range(count)
    for name in ("raw", "np.save", "h5py"):
        (folder / name).mkdir()

    def raw_read(n: int) -> None:
        bits_read = np.empty_like(bits)
        with (folder / "raw" / str(n)).open("rb", buffering=0) as file:
            file.readinto(bits_read)

    def h5py_write(n: int) -> None:
        with h5py.File(folder / "h5py" / f"{n}.h5", "w") as file:
            file["rows"] = bits

    def h5py_read(n: int) -> np.ndarray:
        with h5py.File(folder / "h5py" / f"{n}.h5", "r") as file:
            return file["rows"][:]

    ways: dict[str, tuple[Callable[[int], object], Callable[[int], object]]] = {
        "raw file": (lambda n: (folder / "raw" / str(n)).write_bytes(bits.data), raw_read),
        "np.save": (
            lambda n: np.save(folder / "np.save" / str(n), bits),
            lambda n: np.load(folder / "np.save" / f"{n}.npy"),
        ),
        "bare h5py": (h5py_write, h5py_read),
    }
    with Store(folder / "store") as store:
        ways["store"] = (
            lambda n: store.put(run_of(n), {"h": [(0, rows)]}),
            lambda n: store.rows(run_of(n), "h", [(0, len(rows))]),
        )
        for name, (write, read) in ways.items():
            out[name] = (
                seconds(lambda write=write: [write(n) for n in numbers]),
                seconds(lambda read=read: [read(n) for n in numbers]),
            )
    return out


def small(folder: Path) -> tuple[float, float]:
    """Microseconds of a put and of a get of an entry of 8 KB."""
    rows = np.ones((1, WIDTH), np.float16)
    runs = [run_of(n) for n in range(SMALL)]
    with Store(folder / "small") as store:
        put = seconds(lambda: [store.put(run, {"h": [(0, rows)]}) for run in runs])
        get = seconds(lambda: [store.rows(run, "h", [(0, 1)]) for run in runs])
    return put / SMALL * 1e6, get / SMALL * 1e6


def main(megabytes: int = 32, count: int = 16) -> None:
    """Measure and print a table."""
    rows = np.random.default_rng(0).standard_normal((megabytes * 128, WIDTH), np.float32).astype(ml_dtypes.bfloat16)
    best: dict[str, list[float]] = {}
    few = [float("inf")] * 2
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            for name, times in measure(Path(folder), rows, count).items():
                best[name] = list(map(min, best.get(name, times), times))
            few = list(map(min, few, small(Path(folder))))
    total = rows.nbytes * count / 1e9
    print(f"{count} captures of {megabytes} MB    write GB/s  ratio    read GB/s  ratio")
    for name, (write, read) in best.items():
        base_write, base_read = best["bare h5py"]
        print(f"{name:24} {total / write:12.2f} {write / base_write:6.2f} {total / read:12.2f} {read / base_read:6.2f}")
    print(f"entries of 8 KB: put {few[0]:.0f} us, get {few[1]:.0f} us")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
