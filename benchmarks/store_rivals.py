"""Ways to keep arrays on a disk, behind one face: what `benchmarks/store.py` measures the store against."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import h5py
import lmdb
import numpy as np
import zarr
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from lenspool_cache import Run, Store

HOOK = "blocks.0.hook_resid_post"


class Way(Protocol):
    """Arrays by number. `fill` reads rows of one, from `first` on, into an array that is there."""

    def __init__(self, folder: Path) -> None: ...
    def write(self, n: int, rows: np.ndarray) -> None: ...
    def read(self, n: int) -> np.ndarray: ...
    def fill(self, n: int, first: int, out: np.ndarray) -> None: ...
    def close(self) -> None: ...


class _Files:
    """One file for each array, without anything that stays open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shape: tuple[int, ...] = ()
        self.dtype = np.dtype(np.uint16)

    def close(self) -> None:
        return None


class RawFiles(_Files):
    """The page cache's own speed: bytes, and nothing that says what they are."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.files: dict[int, int] = {}

    def write(self, n: int, rows: np.ndarray) -> None:
        self.shape = rows.shape
        (self.folder / str(n)).write_bytes(rows.data)

    def read(self, n: int) -> np.ndarray:
        out = np.empty(self.shape, self.dtype)
        with (self.folder / str(n)).open("rb", buffering=0) as file:
            file.readinto(out)
        return out

    def fill(self, n: int, first: int, out: np.ndarray) -> None:
        if n not in self.files:
            self.files[n] = os.open(self.folder / str(n), os.O_RDONLY)
        os.preadv(self.files[n], [out.data], first * out[0].nbytes)

    def close(self) -> None:
        for fd in self.files.values():
            os.close(fd)


class NumpyFiles(_Files):
    def write(self, n: int, rows: np.ndarray) -> None:
        np.save(self.folder / f"{n}.npy", rows)

    def read(self, n: int) -> np.ndarray:
        return np.load(self.folder / f"{n}.npy")

    def fill(self, n: int, first: int, out: np.ndarray) -> None:
        out[:] = np.load(self.folder / f"{n}.npy", mmap_mode="r")[first : first + len(out)]


class Safetensors(_Files):
    def write(self, n: int, rows: np.ndarray) -> None:
        save_file({"rows": rows}, self.folder / f"{n}.safetensors")

    def read(self, n: int) -> np.ndarray:
        return load_file(self.folder / f"{n}.safetensors")["rows"]

    def fill(self, n: int, first: int, out: np.ndarray) -> None:
        with safe_open(self.folder / f"{n}.safetensors", "np") as file:
            out[:] = file.get_slice("rows")[first : first + len(out)]


class Hdf5Files(_Files):
    """A contiguous dataset in a file of its own. Blocks are read from files that stay open."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.files: dict[int, h5py.File] = {}

    def write(self, n: int, rows: np.ndarray) -> None:
        with h5py.File(self.folder / f"{n}.h5", "w") as file:
            file["rows"] = rows

    def read(self, n: int) -> np.ndarray:
        with h5py.File(self.folder / f"{n}.h5", "r") as file:
            return file["rows"][:]

    def fill(self, n: int, first: int, out: np.ndarray) -> None:
        if n not in self.files:
            self.files[n] = h5py.File(self.folder / f"{n}.h5", "r")
        self.files[n]["rows"].read_direct(out, np.s_[first : first + len(out)])

    def close(self) -> None:
        for file in self.files.values():
            file.close()


class Zarr(_Files):
    """Uncompressed, chunks of 128 rows."""

    def write(self, n: int, rows: np.ndarray) -> None:
        path = self.folder / str(n)
        array = zarr.create_array(
            path, shape=rows.shape, dtype=rows.dtype, chunks=(min(128, len(rows)), rows.shape[1]), compressors=None
        )
        array[:] = rows

    def read(self, n: int) -> np.ndarray:
        return np.asarray(zarr.open_array(self.folder / str(n), mode="r")[:])

    def fill(self, n: int, first: int, out: np.ndarray) -> None:
        out[:] = zarr.open_array(self.folder / str(n), mode="r")[first : first + len(out)]


class Lmdb(_Files):
    """One transaction for each array, not flushed. What is read is copied out, as the others do."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.db = lmdb.open(str(folder), map_size=1 << 40, sync=False, writemap=False)

    def write(self, n: int, rows: np.ndarray) -> None:
        self.shape = rows.shape
        with self.db.begin(write=True) as transaction:
            transaction.put(n.to_bytes(8, "big"), rows.data)

    def read(self, n: int) -> np.ndarray:
        out = np.empty(self.shape, self.dtype)
        self.fill(n, 0, out)
        return out

    def fill(self, n: int, first: int, out: np.ndarray) -> None:
        with self.db.begin(buffers=True) as transaction:
            value = transaction.get(n.to_bytes(8, "big"))
            out[:] = np.frombuffer(value, self.dtype).reshape(self.shape)[first : first + len(out)]

    def close(self) -> None:
        self.db.close()


class Lenspool(_Files):
    """The store, with key documents of the size of a job's, checksums, and flushes in the background."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.store = Store(folder)

    @staticmethod
    def run(n: int) -> Run:
        return Run({"v": 1, "context": {"model": "m" * 64}, "tokens": [n, *range(60)], "sampling": None})

    def write(self, n: int, rows: np.ndarray) -> None:
        self.shape = rows.shape
        self.store.put(self.run(n), {HOOK: [(0, rows)]})

    def read(self, n: int) -> np.ndarray:
        return self.store.rows(self.run(n), HOOK, [(0, self.shape[0])])

    def fill(self, n: int, first: int, out: np.ndarray) -> None:
        self.store.rows(self.run(n), HOOK, [(first, first + len(out))], out=out)

    def close(self) -> None:
        self.store.close()


WAYS: dict[str, type[Way]] = {
    "raw files": RawFiles,
    "bare h5py": Hdf5Files,
    "np.save": NumpyFiles,
    "safetensors": Safetensors,
    "zarr": Zarr,
    "LMDB": Lmdb,
    "store": Lenspool,
}
