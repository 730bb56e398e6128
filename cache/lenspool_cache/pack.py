"""A pack: one HDF5 file of fixed size with rows of one dtype and width, written without the HDF5 library.

`/rows` [capacity, width], `/index` [records] and `/documents` [bytes] are contiguous datasets whose space is reserved
when the file is made. The HDF5 handle is then closed for good, and rows, documents and records are put at the
datasets' file offsets with `pwrite`. So the file is valid HDF5 at every instant, whatever kills the writer, and a
reader needs neither locks nor SWMR. The file is sparse: only what was written takes disk space.

A pack has one writer, the process that made it, and nothing in it is overwritten but the state of a record.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from h5py import h5d, h5f, h5p, h5s

from lenspool_cache.codec import RECORD_DTYPE, RECORD_SIZE, dtype_of, hdf5_type, raw
from lenspool_cache.locks import lock
from lenspool_cache.segment import FORMAT, FORMAT_VERSION, SUFFIX, Layout

_IOV_MAX = 512
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True, slots=True)
class Need:
    """Space that one put takes in one pack: rows of the pack, index records, bytes of documents."""

    rows: int
    records: int
    documents: int


def is_full(error: BaseException) -> bool:
    """Whether an error of the system or of HDF5 says that the disk, a quota or a file-size limit is exhausted."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL
    found = re.search(r"errno = (\d+)", str(error))  # HDF5 puts it in the text only
    return found is not None and int(found.group(1)) in _FULL


def create_pack(folder: Path, store_id: str, dtype: str, width: int, size: int, need: Need) -> PackWriter:
    """Make a new, empty pack under a unique name; it appears complete or not at all.

    Parameters
    ----------
    size
        Payload bytes to reserve space for (as sparse file).
    need
        What must fit in any case.
    """
    row_bytes = width * dtype_of(dtype).itemsize
    rows = max(need.rows, size // row_bytes, 1)
    records = max(need.records, size // 1024)
    # Beside tiny rows (texts, token ids) the key documents are the larger part.
    documents = max(need.documents, size if row_bytes < 64 else size // 2)
    name = f"{dtype}-{width}-{uuid.uuid4().hex}{SUFFIX}"
    temporary, path = folder / f".{name}.tmp", folder / name
    try:
        _write_skeleton(temporary, store_id, dtype, width, rows, records, documents)
        writer = PackWriter(temporary, Layout.read(temporary))  # which locks it, before anyone can see it
        sync(temporary)
        temporary.rename(path)
        writer.path = path
        sync(folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    return writer


def is_sealed(path: Path) -> bool:
    """Whether a pack surely has no writer any more, and no foreign HDF5 reader that locks it."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):  # gone, or of another user, who may be writing it
        return False
    try:
        return lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def _write_skeleton(path: Path, store_id: str, dtype: str, width: int, rows: int, records: int, documents: int) -> None:
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_alignment(4096, 4096)
    access.set_libver_bounds(h5f.LIBVER_V110, h5f.LIBVER_V110)
    access.set_file_locking(False, True)
    file = h5py.File(h5f.create(os.fsencode(path), h5f.ACC_EXCL, fapl=access))
    try:
        file.attrs.update(
            {"format": FORMAT, "version": FORMAT_VERSION, "dtype": dtype, "width": width, "store": store_id}
        )
        creation = h5p.create(h5p.DATASET_CREATE)
        creation.set_layout(h5d.CONTIGUOUS)
        creation.set_alloc_time(h5d.ALLOC_TIME_EARLY)
        creation.set_fill_time(h5d.FILL_TIME_NEVER)  # the file stays sparse
        record_type = h5py.h5t.py_create(RECORD_DTYPE, logical=True)
        for name, kind, shape in (
            (b"rows", hdf5_type(dtype), (rows, width)),
            (b"index", record_type, (records,)),
            (b"documents", hdf5_type("uint8"), (documents,)),
        ):
            h5d.create(file.id, name, kind, h5s.create_simple(shape), dcpl=creation)
        file["rows"].attrs["dtype"] = dtype
    finally:
        file.close()


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> None:
    """Write buffers one after the other from a file offset on, however little each system call takes."""
    left = [memoryview(b) for b in buffers if len(b)]
    first = 0
    while first < len(left):
        done = os.pwritev(fd, left[first : first + _IOV_MAX], offset)
        offset += done
        while done:
            take = min(done, len(left[first]))
            done -= take
            if take == len(left[first]):
                first += 1
            else:
                left[first] = left[first][take:]


class PackWriter:
    """The one writer of one pack. Not thread-safe: the store holds a lock around a put.

    A put first stages rows and documents in every pack that it needs, and then commits its records in each. Staging
    alone uses up no space: what a failed put staged is overwritten by the next.
    """

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path = path
        self.layout = layout
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # NFS gives no shared lock on a file that cannot be read
        # Ends with the process, however it ends. Shared, so that foreign HDF5 readers, which lock too, may read.
        lock(self.fd, fcntl.LOCK_SH)
        self._row = self._slot = self._document = 0
        self._staged = Need(0, 0, 0)

    def fits(self, need: Need) -> bool:
        """Whether there is space for a put, in a file that still has its name."""
        try:
            named = os.fstat(self.fd).st_nlink > 0
        except OSError as error:
            if error.errno != errno.ESTALE:  # deleted by another machine
                raise
            named = False
        return (
            named
            and self._row + need.rows <= self.layout.rows
            and self._slot + need.records <= self.layout.records
            and self._document + need.documents <= self.layout.documents
        )

    def stage(self, arrays: Sequence[np.ndarray], documents: Sequence[bytes]) -> tuple[int, int]:
        """Write payload and documents; returns the first row and the first document offset."""
        buffers = [raw(array) for array in arrays]
        write_all(self.fd, buffers, self.layout.rows_offset + self._row * self.layout.row_bytes)
        write_all(self.fd, documents, self.layout.documents_offset + self._document)
        self._staged = Need(sum(a.size for a in arrays) // self.layout.width, 0, sum(map(len, documents)))
        return self._row, self._document

    def commit(self, records: Sequence[bytes]) -> int:
        """Write the records of what was staged; returns the first slot.

        The space is used up even when this fails, so that no record that reached the disk can come to point at rows
        of a later put.
        """
        slot = self._slot
        self._row += self._staged.rows
        self._document += self._staged.documents
        self._slot += len(records)
        self._staged = Need(0, 0, 0)
        write_all(self.fd, records, self.layout.index_offset + slot * RECORD_SIZE)
        return slot

    def sync(self) -> None:
        """Flush to the disk."""
        os.fdatasync(self.fd)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            self.close()

    def close(self) -> None:
        """Close the file; the pack is never written to again."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
