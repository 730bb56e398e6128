"""What writers on other machines put: found by reading on in the indexes of their packs, without any lock.

A file system of several machines promises little: that a file which was closed is seen by who opens it later, and
that renaming is atomic. So a pack is opened anew for each look, records count once their checksum is right, and a put
once all its records are there. What is seen late is a miss until then; nothing is ever seen wrong.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from lenspool_cache.codec import WHOLE, Record
from lenspool_cache.errors import CacheCorrupt
from lenspool_cache.index import Place
from lenspool_cache.reader import PackPool, PackReader
from lenspool_cache.scan import scan_pack

log = logging.getLogger(__name__)

_EVERY_S = 1.0  # between two looks, or this many times what one takes
_EVERY_LOOKS = 20


@dataclass(slots=True)
class _Seen:
    changed: int  # when the file was changed last, as far as it was read
    slot: int  # to read on from


class Follower:
    """Gives the places of records that were not there at the last look."""

    def __init__(self, packs: PackPool) -> None:
        self._packs = packs
        self._due = 0.0
        self.forget()

    @property
    def due(self) -> bool:
        """Whether it is time for another look."""
        return time.monotonic() >= self._due

    def forget(self) -> None:
        """Begin at the beginning."""
        self._seen: dict[str, _Seen] = {}
        self._unfinished: dict[int, dict[tuple[str, int], Record]] = defaultdict(dict)

    def new(self) -> Iterator[Place]:
        """Places of all records of puts that became whole since the last look."""
        began = time.monotonic()
        for name in self._packs.names():
            path = self._packs.folder / name
            try:
                changed = path.stat().st_mtime_ns
                seen = self._seen.setdefault(name, _Seen(-1, 0))
                if changed == seen.changed:
                    continue
                reader = PackReader(path, self._packs.get(name).layout)
                yield from self._read_on(name, reader, seen)
                seen.changed = changed
            except FileNotFoundError:
                continue  # evicted meanwhile
            except (CacheCorrupt, OSError) as error:
                log.warning("pack %s left out: %s", name, error)
        end = time.monotonic()
        self._due = end + max(_EVERY_S, _EVERY_LOOKS * (end - began))

    def _read_on(self, name: str, reader: PackReader, seen: _Seen) -> Iterator[Place]:
        found = scan_pack(name, reader, seen.slot, to_the_end=seen.slot == 0)
        for slot, record in found.records:
            if record.state == WHOLE:
                yield Place(record.key, record.start, record.rows, name, slot)
                continue
            put = self._unfinished[record.batch]
            put[name, slot] = record
            if len(put) == record.batch_size:
                yield from (Place(r.key, r.start, r.rows, *at) for at, r in put.items() if r.live)
                del self._unfinished[record.batch]
            seen.slot = slot + 1
        if found.torn:  # half of it is here
            seen.slot = min(found.torn)
