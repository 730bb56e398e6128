"""The packs that one process writes: one open pack for each dtype and width, and the next one when it is full."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lenspool_cache import ranges as rg
from lenspool_cache.codec import Record, canonical_array, checksum, dtype_of, pack_record, raw
from lenspool_cache.index import Place
from lenspool_cache.keys import Run
from lenspool_cache.pack import Need, PackWriter, create_pack
from lenspool_cache.policy import Policy
from lenspool_cache.prefix import is_wide
from lenspool_cache.ranges import Range
from lenspool_cache.reader import PackPool

FIRST_PACK = 16 << 20  # bytes of rows; each further pack is twice as large
_PUTS = 8  # such as the one that makes it fit in a pack: large ones would else make a file each
# Rows of a put are cut into segments of about this size: a checksum covers a segment, so this is what one row costs.
SEGMENT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one name, [rows, width], that one record will describe."""

    name: str
    start: int
    array: np.ndarray

    @property
    def kind(self) -> tuple[str, int]:
        """Dtype and width of the packs that it goes to: rows of any width go to packs of single elements."""
        return self.array.dtype.name, 1 if is_wide(self.name) else self.array.shape[1]


def cut(entries: Mapping[str, Sequence[tuple[int, np.ndarray]]], missing: Mapping[str, Sequence[Range]]) -> list[Piece]:
    """Rows at positions that are missing, in pieces of segment size."""
    pieces = []
    for name, parts in entries.items():
        left = list(missing.get(name, ()))
        for start, array in parts:
            step = max(1, SEGMENT_BYTES // (array.shape[1] * array.itemsize))
            for first, stop in rg.intersect([(start, start + len(array))], left):
                for at in range(first, stop, step):
                    pieces.append(Piece(name, at, array[at - start : min(at + step, stop) - start]))
            left = rg.subtract(left, [(start, start + len(array))])
    return pieces


def spans(parts: Iterable[tuple[int, np.ndarray]]) -> list[Range]:
    """Positions of rows."""
    return [(start, start + len(array)) for start, array in parts]


def checked_rows(name: str, start: int, array: np.ndarray) -> tuple[int, np.ndarray]:
    """Start and rows as they are stored; `ValueError` where they cannot be."""
    if array.ndim != 2 or not array.shape[1]:
        raise ValueError(f"rows of {name} must be [rows, width], not {list(array.shape)}")
    if start < 0:
        raise ValueError(f"rows of {name} start at {start}")
    return int(start), canonical_array(array)


def need_of(run: Run, group: Sequence[Piece]) -> Need:
    """Space that pieces of a run take in a pack."""
    names = {piece.name.encode() for piece in group}
    return Need(sum(p.array.size for p in group) // group[0].kind[1], len(group), len(run.data) + sum(map(len, names)))


def stage(
    writer: PackWriter, run: Run, group: Sequence[Piece], batch: int, batch_size: int, written: int
) -> list[Record]:
    """Write rows, names and key document of pieces of a run to a pack; returns the records that are to follow."""
    names = {name: name.encode() for name in dict.fromkeys(piece.name for piece in group)}
    row, base = writer.stage([piece.array for piece in group], [run.data, *names.values()])
    name_at, at = {}, base + len(run.data)
    for name, encoded in names.items():
        name_at[name] = at
        at += len(encoded)
    document_checksum = checksum(run.data)
    records = []
    for piece in group:
        records.append(
            Record(
                key=run.entry(piece.name),
                batch=batch,
                batch_size=batch_size,
                document_length=len(run.data),
                start=piece.start,
                row_width=0 if piece.array.shape[1] == writer.layout.width else piece.array.shape[1],
                row=row,
                rows=len(piece.array),
                checksum=checksum(raw(piece.array)),
                document_offset=base,
                document_checksum=document_checksum,
                name_offset=name_at[piece.name],
                time=written,
                name_length=len(names[piece.name]),
            )
        )
        row += piece.array.size // writer.layout.width
    return records


class Writers:
    """Not thread-safe: the store holds a lock around a put."""

    def __init__(self, packs: PackPool, store_id: str) -> None:
        self._packs = packs
        self._store_id = store_id
        self._open: dict[tuple[str, int], tuple[PackWriter, int]] = {}
        self._full: list[PackWriter] = []

    def write(self, run: Run, pieces: Sequence[Piece], written: int | None = None) -> list[Place]:
        """Write the pieces of one put: payload and documents to every pack first, then all records.

        Parameters
        ----------
        written
            When the rows were first written, in nanoseconds since the epoch (default: now).

        Raises
        ------
        OSError
            The disk is full, or the like. No reader will believe a part of the put: it is not whole.
        """
        groups: dict[tuple[str, int], list[Piece]] = {}
        for piece in pieces:
            groups.setdefault(piece.kind, []).append(piece)
        batch, now = secrets.randbits(64), written or time.time_ns()
        staged = []
        for kind, group in groups.items():
            writer = self._writer(kind, need_of(run, group))
            staged.append((writer, stage(writer, run, group, batch, len(pieces), now)))
        places = []
        for writer, records in staged:
            slot = writer.commit([pack_record(record) for record in records])
            places += [Place(r.key, r.start, r.rows, writer.path.name, slot + i) for i, r in enumerate(records)]
        return places

    def _writer(self, kind: tuple[str, int], need: Need) -> PackWriter:
        old, size = self._open.get(kind, (None, FIRST_PACK // 2))
        if old is not None and old.fits(need):
            return old
        row_bytes = kind[1] * dtype_of(kind[0]).itemsize
        size = max(2 * size, _PUTS * need.rows * row_bytes)
        size = min(size, Policy.load(self._packs.folder.parent).pack_bytes)
        writer = create_pack(self._packs.folder, self._store_id, *kind, size, need)
        self._packs.learn(writer.path.name, writer.layout)
        self._open[kind] = writer, size
        if old is not None:
            self._full.append(old)
        return writer

    @property
    def open(self) -> bool:
        """Whether any pack is open."""
        return bool(self._open or self._full)

    def duplicates(self) -> list[int]:
        """File descriptors of all packs, for who flushes them to the disk; the full ones are closed here."""
        writers = [*self._full, *(writer for writer, _ in self._open.values())]
        out = [os.dup(writer.fd) for writer in writers]
        for writer in self._full:
            writer.close()
        self._full.clear()
        return out

    def sync(self) -> None:
        """Flush to the disk."""
        while self._full:
            self._full[-1].sync()
            self._full.pop().close()
        for writer, _ in self._open.values():
            writer.sync()

    def close(self) -> None:
        """Close all packs; a later put begins new ones."""
        for writer in (*self._full, *(writer for writer, _ in self._open.values())):
            writer.close()
        self._full.clear()
        self._open.clear()
