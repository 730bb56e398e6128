"""Reading packs: HDF5 is asked once where a pack's datasets are, then everything is `pread` on an open file."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import numpy as np

from lenspool_cache.codec import (
    RECORD_SIZE,
    STATE_OFFSET,
    Record,
    checksum,
    dtype_of,
    raw,
    unpack_record,
)
from lenspool_cache.errors import CacheCorrupt
from lenspool_cache.pack import write_all
from lenspool_cache.segment import Layout


class PackReader:
    """An open pack. Any number of threads may read through it; the file closes with the last reference to it."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path = path
        self.layout = layout
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        fd = getattr(self, "_fd", -1)
        if fd >= 0:
            os.close(fd)

    @property
    def unlinked(self) -> bool:
        """Whether the file was deleted; what is read through this reader stays right."""
        return os.fstat(self._fd).st_nlink == 0

    def _bytes(self, offset: int, length: int) -> bytes:
        data = os.pread(self._fd, length, offset)
        if len(data) != length:
            raise CacheCorrupt(self.path.name, f"file ends {length - len(data)} bytes early")
        return data

    def records(self, slots: Sequence[int]) -> list[Record | None]:
        """Records at these slots; None for one that does not match its checksum."""
        if not slots:
            return []
        if min(slots) < 0 or max(slots) >= self.layout.records:
            return [r for slot in slots for r in (self.records([slot]) if 0 <= slot < self.layout.records else [None])]
        first, stop = min(slots), max(slots) + 1
        if stop - first > 4 * len(slots):  # scattered: do not read what lies between
            return [unpack_record(self._record(slot)) for slot in slots]
        data = self._bytes(self.layout.index_offset + first * RECORD_SIZE, (stop - first) * RECORD_SIZE)
        places = ((slot - first) * RECORD_SIZE for slot in slots)
        return [unpack_record(data[place : place + RECORD_SIZE]) for place in places]

    def _record(self, slot: int) -> bytes:
        return self._bytes(self.layout.index_offset + slot * RECORD_SIZE, RECORD_SIZE)

    def index(self, first: int, count: int) -> bytes:
        """Raw bytes of consecutive records."""
        return self._bytes(self.layout.index_offset + first * RECORD_SIZE, count * RECORD_SIZE)

    def documents(self) -> bytes:
        """Raw bytes of all documents."""
        return self._bytes(self.layout.documents_offset, self.layout.documents)

    def document(self, record: Record) -> bytes | None:
        """Key document of a record; None when it does not match its checksum."""
        if record.document_offset + record.document_length > self.layout.documents:
            return None
        data = self._bytes(self.layout.documents_offset + record.document_offset, record.document_length)
        return data if checksum(data) == record.document_checksum else None

    def name(self, record: Record) -> str | None:
        """Entry name of a record; None when the bytes there are no text."""
        if record.name_offset + record.name_length > self.layout.documents:
            return None
        try:
            return self._bytes(self.layout.documents_offset + record.name_offset, record.name_length).decode()
        except UnicodeDecodeError:
            return None

    def read_into(self, row: int, out: np.ndarray) -> int:
        """Fill `out` [rows, width], C-contiguous and of the pack's dtype, from a row of the pack on; gives its xxh3_64.

        Raises
        ------
        CacheCorrupt
            The pack does not reach that far.
        """
        view = raw(out)
        offset = self.layout.rows_offset + row * self.layout.row_bytes
        stop = row + out.size // self.layout.width
        if stop > self.layout.rows:
            raise CacheCorrupt(self.path.name, f"rows {row}..{stop} of {self.layout.rows}")
        done = 0
        while done < len(view):  # one call moves at most 2 GB
            got = os.preadv(self._fd, [view[done:]], offset + done)
            if not got:
                raise CacheCorrupt(self.path.name, f"file ends {len(view) - done} bytes early")
            done += got
        return checksum(view)

    def empty(self, record: Record) -> np.ndarray:
        """Uninitialised array for the rows of a record, which must lie inside the pack."""
        return np.empty((record.rows, self.layout.row_width(record)), dtype_of(self.layout.dtype))

    def mark(self, slots: Sequence[int], state: int) -> None:
        """Set the state of records, e.g. to `DROPPED`, so that no rebuilt index brings them back."""
        fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            for slot in slots:
                place = self.layout.index_offset + slot * RECORD_SIZE + STATE_OFFSET
                write_all(fd, [state.to_bytes(4, "little")], place)
        finally:
            os.close(fd)


class PackPool:
    """The packs of a store that are open for reading; at most `limit` files, the least recently used close first."""

    def __init__(self, folder: Path, limit: int = 128) -> None:
        self.folder = folder
        self.limit = limit
        self._layouts: dict[str, Layout] = {}
        self._open: OrderedDict[str, PackReader] = OrderedDict()
        self._lock = Lock()

    def learn(self, name: str, layout: Layout) -> None:
        """Remember the layout of a pack that this process made."""
        with self._lock:
            self._layouts[name] = layout

    def get(self, name: str, *, deleted: bool = False) -> PackReader:
        """Open a pack, or give the one that is open.

        Parameters
        ----------
        deleted
            Whether an open one will do that was deleted meanwhile: what a reader found there stays right.

        Raises
        ------
        FileNotFoundError
            The pack is gone.
        CacheCorrupt
            It is not a readable pack.
        """
        with self._lock:
            reader = self._open.get(name)
            if reader is not None and (deleted or not reader.unlinked):
                self._open.move_to_end(name)
                return reader
            self._open.pop(name, None)
        reader = self._opened(name)
        with self._lock:
            self._open[name] = reader
            while len(self._open) > self.limit:
                self._open.popitem(last=False)
        return reader

    def _opened(self, name: str) -> PackReader:
        path, layout = self.folder / name, self._layouts.get(name)
        reader = PackReader(path, layout or Layout.read(path))
        self._layouts[name] = reader.layout
        return reader

    def names(self) -> list[str]:
        """File names of all packs in the store, sorted."""
        try:
            return sorted(p.name for p in self.folder.iterdir() if p.suffix == ".h5" and not p.name.startswith("."))
        except FileNotFoundError:
            return []

    def sweep(self) -> None:
        """Close the packs that were deleted, so that the disk gets their space back."""
        with self._lock:
            for name in [name for name, reader in self._open.items() if reader.unlinked]:
                del self._open[name]
                self._layouts.pop(name, None)

    def close(self) -> None:
        """Forget all open packs."""
        with self._lock:
            self._open.clear()
            self._layouts.clear()

    def after_fork(self) -> None:
        """Make the lock usable in a forked child, whoever held it in the parent."""
        self._lock = Lock()
