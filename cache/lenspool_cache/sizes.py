"""How many bytes a store holds, and takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from lenspool_cache.arrays import ArrayFolder
from lenspool_cache.errors import CacheError
from lenspool_cache.index import Place
from lenspool_cache.reader import PackPool


def payload_bytes(packs: PackPool, places: Iterable[Place]) -> int:
    """Bytes of the rows at places; of packs that cannot be read, none."""
    groups: dict[str, list[Place]] = {}
    for place in places:
        groups.setdefault(place.pack, []).append(place)
    total = 0
    for pack, group in groups.items():
        with contextlib.suppress(CacheError, OSError):
            reader = packs.get(pack)
            if reader.layout.width > 1:
                total += reader.layout.row_bytes * sum(place.rows for place in group)
                continue
            records = reader.records([place.slot for place in group])  # only they know how wide their rows are
            total += sum(reader.layout.nbytes(record) for record in records if record is not None)
    return total


def disk_bytes(packs: PackPool, arrays: ArrayFolder) -> int:
    """What packs and arrays take on the disk; they are sparse files."""
    total = 0
    for path in (*map(packs.folder.joinpath, packs.names()), *map(arrays.path, arrays.digests())):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total
