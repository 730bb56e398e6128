"""Arrays by content: steering vectors and the like, one small HDF5 file each, named by the hash of what it holds."""

from __future__ import annotations

import contextlib
import io
import os
import re
import time
import uuid
from pathlib import Path

import h5py
import numpy as np
from h5py import h5d, h5f, h5p, h5s

from lenspool_cache.codec import canonical_array, dtype_of, hdf5_type
from lenspool_cache.errors import CacheCorrupt, CacheError
from lenspool_cache.keys import array_digest
from lenspool_cache.pack import sync
from lenspool_cache.segment import SUFFIX

_TOUCH_S = 3600.0
_DIGEST = re.compile(r"[0-9a-f]{64}")


def object_name(digest: str) -> str:
    """Name of an array's object in a bucket, and of its file in a store.

    Raises
    ------
    KeyError
        It is not a SHA-256 in hex: it may come from a stranger, and nothing but a digest becomes a path.
    """
    if not _DIGEST.fullmatch(digest):
        raise KeyError(digest)
    return f"arrays/{digest}{SUFFIX}"


def from_bytes(data: bytes) -> np.ndarray:
    """The array in the bytes of its file.

    Raises
    ------
    CacheCorrupt
        They are no such file.
    """
    try:
        return _read(io.BytesIO(data))
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise CacheCorrupt("array", f"not a readable array file: {error}") from error


class ArrayFolder:
    """The arrays of the store in a folder."""

    def __init__(self, store: Path) -> None:
        self.folder = store / "arrays"

    def path(self, digest: str) -> Path:
        """File of an array; as `object_name`."""
        return self.folder.parent / object_name(digest)

    def has(self, digest: str) -> bool:
        """Whether there is a file for this digest."""
        try:
            return self.path(digest).exists()
        except KeyError:
            return False

    def put(self, array: np.ndarray) -> str:
        """Store an array of any shape, unless it is there; returns its digest."""
        array = canonical_array(array)
        digest = array_digest(array)
        path = self.path(digest)
        if path.exists():
            self._touch(path)
            return digest
        self.folder.mkdir(exist_ok=True)
        temporary = self.folder / f".{digest}.{uuid.uuid4().hex}.tmp"
        try:
            _write(temporary, array)
            sync(temporary)
            temporary.rename(path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
            raise
        return digest

    def get(self, digest: str) -> np.ndarray:
        """Read an array and check that it still has its digest.

        Raises
        ------
        KeyError
            It is not stored.
        CacheCorrupt
            The file does not hold what its name says.
        """
        path = self.path(digest)
        try:
            array = _read(path)
        except FileNotFoundError:
            raise KeyError(digest) from None
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise CacheError(f"array {digest} cannot be opened: {error}") from error
            raise CacheCorrupt(digest, f"not a readable array file: {error}") from error
        if array_digest(array) != digest:
            raise CacheCorrupt(digest, "content does not match the digest")
        self._touch(path)
        return array

    def used(self) -> dict[str, tuple[int, int]]:
        """Digest to when an array was last used (nanoseconds since the epoch), and to the bytes that it takes."""
        out = {}
        for digest in self.digests():
            with contextlib.suppress(FileNotFoundError):
                stat = self.path(digest).stat()
                out[digest] = stat.st_mtime_ns, stat.st_blocks * 512
        return out

    @staticmethod
    def _touch(path: Path) -> None:
        """The time of a file is that of its last use; one write in an hour will do."""
        with contextlib.suppress(OSError):  # another user's, or on a read-only disk
            if time.time() - path.stat().st_mtime > _TOUCH_S:
                os.utime(path)

    def remove(self, digest: str) -> None:
        """Delete the file of an array."""
        self.path(digest).unlink(missing_ok=True)

    def digests(self) -> list[str]:
        """Digests of all arrays, sorted."""
        if not self.folder.exists():
            return []
        return sorted(p.stem for p in self.folder.iterdir() if p.suffix == SUFFIX and _DIGEST.fullmatch(p.stem))


def _write(path: Path, array: np.ndarray) -> None:
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_libver_bounds(h5f.LIBVER_V110, h5f.LIBVER_V110)
    access.set_file_locking(False, True)
    file = h5py.File(h5f.create(str(path).encode(), h5f.ACC_EXCL, fapl=access))
    try:
        kind = hdf5_type(array.dtype.name)
        dataset = h5d.create(file.id, b"array", kind, h5s.create_simple(array.shape))
        if array.size:
            dataset.write(h5s.ALL, h5s.ALL, array, mtype=kind)
        file["array"].attrs["dtype"] = array.dtype.name
    finally:
        file.close()


def _read(source: Path | io.BytesIO) -> np.ndarray:
    with h5py.File(source, "r", locking=False) as file:
        dataset = file["array"]
        name = str(dataset.attrs["dtype"])
        array = np.empty(dataset.shape, dtype_of(name))
        if array.size:
            # Raw bytes, so that NaN payloads and bfloat16 arrive as they were written.
            dataset.id.read(h5s.ALL, h5s.ALL, array, mtype=hdf5_type(name))
        return array
