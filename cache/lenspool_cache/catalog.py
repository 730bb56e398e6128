"""What stands in a store: its entries with the names and key documents that belong to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lenspool_cache.errors import CacheCorrupt
from lenspool_cache.keys import Run, entry_key
from lenspool_cache.scan import finished, scan_all
from lenspool_cache.segment import Segment, segment_of
from lenspool_cache.store import Store


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored segment, its name and run, and when it was written and last used (nanoseconds since the epoch)."""

    run: Run
    name: str
    segment: Segment
    written: int
    used: int


def catalog(store: Store, prefix: str = "") -> Iterator[Entry]:
    """Every segment of every whole put, oldest first; damaged ones are left out (see `verify`).

    Parameters
    ----------
    prefix
        Only of runs or entries whose key in hex begins so.
    """
    used = store._usage.all()
    documents: dict[bytes, Run] = {}
    seen: set[tuple[bytes, int, int]] = set()
    for pack, slot, record in finished(list(scan_all(store._packs))):
        try:
            reader = store._packs.get(pack)
            document, name = reader.document(record), reader.name(record)
        except (CacheCorrupt, FileNotFoundError):
            continue
        rows = record.key, record.start, record.rows
        if document is None or name is None or rows in seen or entry_key(document, name) != record.key:
            continue
        run = documents.get(document) or documents.setdefault(document, Run.stored(document))
        if not (run.key.hex().startswith(prefix) or record.key.hex().startswith(prefix)):
            continue
        seen.add(rows)
        segment = segment_of(pack, slot, record, reader.layout)
        yield Entry(run, name, segment, record.time, max(record.time, used.get(record.key, 0)))


def summary(entry: Entry) -> dict[str, Any]:
    """An entry as JSON: keys in hex, positions, type, bytes and times."""
    segment = entry.segment
    return {
        "run": entry.run.key.hex(),
        "key": segment.key.hex(),
        "name": entry.name,
        "positions": list(segment.range),
        "dtype": segment.dtype,
        "width": segment.width,
        "bytes": segment.nbytes,
        "written": entry.written / 1e9,
        "used": entry.used / 1e9,
        "pack": segment.pack,
    }
