"""Where things stand in packs: the datasets of a pack in its file, and the rows of an entry in a pack."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import h5py

from lenspool_cache.codec import Record, dtype_of
from lenspool_cache.errors import CacheCorrupt

FORMAT = "lenspool-pack"
FORMAT_VERSION = 1
SUFFIX = ".h5"


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one entry at consecutive positions, as they stand in one pack.

    Attributes
    ----------
    pack
        File name of the pack.
    row
        First row in the pack. Rows of the pack may be narrower than those of the entry, and then are more.
    start
        Absolute position of the first row.
    rows
        Number of rows.
    dtype
        Numpy name of the element type, e.g. `"bfloat16"`.
    width
        Elements per row.
    checksum
        xxh3_64 of the payload.
    key
        32-byte entry key.
    slot
        Place of the segment's record in the pack's index.
    time
        When the rows were written, in nanoseconds since the epoch.
    stop
        Of rows that another run lends: the position from which on they are not those that are asked for.
    layer
        Which layer of the store has it: 0 is its own folder, others are the lower ones, in order.
    """

    pack: str
    row: int
    start: int
    rows: int
    dtype: str
    width: int
    checksum: int
    key: bytes
    slot: int
    time: int = 0
    stop: int | None = None
    layer: int = 0

    @property
    def range(self) -> tuple[int, int]:
        """Positions `[start, start + rows)`, but only those before `stop`."""
        end = self.start + self.rows
        return self.start, end if self.stop is None else min(end, self.stop)

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return self.rows * self.width * dtype_of(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the datasets of a pack stand in its file: byte offsets, and capacities in rows, records and bytes."""

    dtype: str
    width: int
    rows_offset: int
    rows: int
    index_offset: int
    records: int
    documents_offset: int
    documents: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.width * dtype_of(self.dtype).itemsize

    def row_width(self, record: Record) -> int:
        """Elements of a row of a record."""
        return record.row_width or self.width

    def taken(self, record: Record) -> int:
        """Rows of the pack that the rows of a record take."""
        return record.rows * self.row_width(record) // self.width

    def nbytes(self, record: Record) -> int:
        """Bytes of the rows of a record."""
        return self.taken(record) * self.row_bytes

    @classmethod
    def read(cls, path: Path) -> Layout:
        """Ask HDF5 where the datasets of a pack are.

        Raises
        ------
        CacheCorrupt
            The file is not a pack of a version that this code knows.
        OSError
            It is gone or cannot be opened.
        """
        try:
            with h5py.File(path, "r", locking=False) as file:
                if file.attrs.get("format") != FORMAT or file.attrs.get("version") != FORMAT_VERSION:
                    raise CacheCorrupt(path.name, f"not a {FORMAT} of version {FORMAT_VERSION}")
                rows, index, documents = (file[name].id for name in ("rows", "index", "documents"))
                layout = cls(
                    str(file.attrs["dtype"]),
                    int(file.attrs["width"]),
                    rows.get_offset(),
                    rows.shape[0],
                    index.get_offset(),
                    index.shape[0],
                    documents.get_offset(),
                    documents.shape[0],
                )
                dtype_of(layout.dtype)
                return layout
        except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the system could not open it, which says nothing about what is in it
            path.stat()  # raises where it was deleted while HDF5 opened it, whose error does not say so
            raise CacheCorrupt(path.name, f"not a readable pack: {error}") from error


def segment_of(pack: str, slot: int, record: Record, layout: Layout) -> Segment:
    """The segment that a record of a pack describes."""
    return Segment(
        pack,
        record.row,
        record.start,
        record.rows,
        layout.dtype,
        layout.row_width(record),
        record.checksum,
        record.key,
        slot,
        record.time,
    )
