"""Copy what is alive in a pack to packs that are being written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from lenspool_cache.codec import Record
from lenspool_cache.errors import CacheCorrupt
from lenspool_cache.index import Place
from lenspool_cache.keys import Run, entry_key
from lenspool_cache.reader import PackReader
from lenspool_cache.segment import Layout
from lenspool_cache.store import Store
from lenspool_cache.writing import Piece, Writers

Item = tuple[int, Record]

_CHUNK = 64 << 20  # bytes of rows in memory at a time


@dataclass(slots=True)
class Moved:
    """Old and new places of what was copied, and the bytes of its rows."""

    pairs: list[tuple[Place, Place]] = field(default_factory=list)
    nbytes: int = 0


def copy_items(store: Store, pack: str, items: Sequence[Item], writers: Writers) -> Moved:
    """Copy records of a pack with their rows, checked, and flush them to the disk; damaged ones are dropped."""
    moved = Moved()
    if not items:
        return moved
    reader = store._packs.get(pack)
    by_document = sorted(items, key=lambda item: (item[1].document_offset, item[1].name_offset, item[1].start))
    for _, group in groupby(by_document, key=lambda item: (item[1].document_offset, item[1].time)):
        for chunk in _chunks(list(group), reader.layout):
            old: list[Place] = []
            pieces: list[Piece] = []
            for slot, record in chunk:
                place = Place(record.key, record.start, record.rows, pack, slot)
                try:
                    pieces.append(piece_of(reader, record))
                    old.append(place)
                except CacheCorrupt:
                    store._own.drop([place])
            if pieces:
                document = reader.document(chunk[0][1])
                assert document is not None  # checked with each piece
                new = writers.write(Run.stored(document), pieces, chunk[0][1].time)
                moved.pairs += zip(old, new, strict=True)
                moved.nbytes += sum(piece.array.nbytes for piece in pieces)
    writers.sync()
    return moved


def piece_of(reader: PackReader, record: Record) -> Piece:
    """Name and rows of a record, which are checked.

    Raises
    ------
    CacheCorrupt
        They do not match their checksum or key.
    """
    document, name = reader.document(record), reader.name(record)
    if document is None or name is None or entry_key(document, name) != record.key:
        raise CacheCorrupt(record.key.hex(), "the key is not that of the document and name beside it")
    rows = reader.empty(record)
    if reader.read_into(record.row, rows) != record.checksum:
        raise CacheCorrupt(record.key.hex(), "the rows do not match their checksum")
    return Piece(name, record.start, rows)


def _chunks(items: list[Item], layout: Layout) -> Iterator[list[Item]]:
    chunk: list[Item] = []
    size = 0
    for item in items:
        if chunk and size + layout.nbytes(item[1]) > _CHUNK:
            yield chunk
            chunk, size = [], 0
        chunk.append(item)
        size += layout.nbytes(item[1])
    if chunk:
        yield chunk
