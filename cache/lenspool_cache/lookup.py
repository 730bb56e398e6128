"""What the index says about a run, checked against what stands in the packs; and reading it."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from threading import Lock
from typing import NoReturn

import numpy as np

from lenspool_cache.codec import DROPPED
from lenspool_cache.errors import CacheCorrupt, CacheError
from lenspool_cache.index import Index, Place
from lenspool_cache.keys import Run
from lenspool_cache.lending import Sources
from lenspool_cache.ranges import Range
from lenspool_cache.reader import PackPool
from lenspool_cache.segment import Segment, segment_of

log = logging.getLogger(__name__)

_EVICTED = {errno.ENOENT, errno.ESTALE}
_GONE = _EVICTED | {errno.EIO}


class Lookup:
    """Finds and reads segments; what is damaged is dropped, so that it is a miss from then on.

    Attributes
    ----------
    corrupt
        Number of entries that were found damaged.
    """

    def __init__(self, packs: PackPool, index: Index) -> None:
        self._packs = packs
        self._index = index
        self._dropped: set[tuple[str, int]] = set()
        self._lock = Lock()
        self.corrupt = 0

    def find(self, sources: Sources, within: Range | None = None) -> list[Segment]:
        """Segments of entries, with rows `within` some positions, whose records and key documents are right."""
        found, gone = self._find(sources, within)
        before: list[Place] = []
        while gone and gone != before:  # moved or evicted after the index was asked; it knows better by now
            before = gone
            found, gone = self._find(sources, within)
        self.drop(gone, damaged=False)
        return found

    def read_into(self, segment: Segment, out: np.ndarray) -> None:
        """Fill `out` with the rows of a segment.

        Raises
        ------
        CacheCorrupt
            They do not match their checksum, or are gone (then its cause is an `OSError`). The entry is dropped.
        CacheError
            The system cannot read the pack, which says nothing about the entry.
        """
        try:
            found = self._packs.get(segment.pack, deleted=True).read_into(segment.row, out)
        except OSError as error:
            if error.errno not in _GONE:
                raise CacheError(f"pack {segment.pack} cannot be read: {error}") from error
            self.lost(segment, f"pack {segment.pack}: {error}", error)
        except CacheCorrupt as error:
            self.lost(segment, str(error), error)
        if found != segment.checksum:
            self.lost(segment, "the rows do not match their checksum", None)

    def identity(self, segment: Segment) -> tuple[Run, str]:
        """The run and the name of the entry that a segment which was found belongs to.

        Raises
        ------
        CacheCorrupt
            What says it is damaged.
        """
        reader = self._packs.get(segment.pack, deleted=True)
        record = reader.records([segment.slot])[0]
        document, name = (None, None) if record is None else (reader.document(record), reader.name(record))
        if document is None or name is None:
            raise CacheCorrupt(segment.key.hex(), "its key document or name cannot be read")
        return Run.stored(document), name

    def lenders(self, blocks: Sequence[bytes]) -> set[bytes]:
        """As `Index.lenders`."""
        return self._index.lenders(blocks)

    def _find(self, sources: Sources, within: Range | None) -> tuple[list[Segment], list[Place]]:
        """Segments of entries, and places that the index gave but whose record is evicted."""
        places: dict[str, list[Place]] = {}
        for place in self._index.find(list(sources), within):
            if (place.pack, place.slot) not in self._dropped:
                places.setdefault(place.pack, []).append(place)
        found: list[Segment] = []
        bad: list[Place] = []
        gone: list[Place] = []
        for pack, group in places.items():
            found += self._verified(sources, pack, group, bad, gone)
        self.drop(bad)
        return found, gone

    def _verified(
        self, sources: Sources, pack: str, places: list[Place], bad: list[Place], gone: list[Place]
    ) -> Iterator[Segment]:
        """Segments of one pack whose record and key document are right; others go to `bad` or, evicted, to `gone`."""
        try:
            reader = self._packs.get(pack)
            records = reader.records([place.slot for place in places])
            limits: dict[tuple[int, int, bytes], int | None] = {}
            for place, record in zip(places, records, strict=True):
                if record is None or (record.key, record.start, record.rows) != place[:3]:
                    bad.append(place)
                    continue
                if not record.live:
                    gone.append(place)
                    continue
                at = record.document_offset, record.document_length, place.key
                if at not in limits:
                    document = reader.document(record)
                    limits[at] = None if document is None else sources[place.key].limit(document)
                stop = limits[at]
                if stop is None:
                    bad.append(place)
                elif stop >= record.start + record.rows:
                    yield segment_of(pack, place.slot, record, reader.layout)
                elif stop > record.start:  # where the runs part, rows are the lender's only
                    yield replace(segment_of(pack, place.slot, record, reader.layout), stop=stop)
        except OSError as error:
            if error.errno not in _GONE:
                raise CacheError(f"pack {pack} cannot be read: {error}") from error
            (gone if error.errno in _EVICTED else bad).extend(places)
        except CacheCorrupt:
            bad.extend(places)

    def drop(self, places: list[Place], *, damaged: bool = True) -> None:
        """Make entries a miss, now and after any rebuild of the index."""
        if not places:
            return
        if damaged:
            self.count(len(places))
        for place in places:
            if damaged:
                log.warning("entry %s in %s, slot %d, is damaged: dropped", place.key.hex(), *place[3:])
            self._dropped.add((place.pack, place.slot))
        if self._index.read_only:
            return
        for place in places:
            # Gone or unreadable packs have nothing to mark, and a pack of another user cannot be marked.
            with contextlib.suppress(OSError, CacheCorrupt):
                reader = self._packs.get(place.pack)
                record = reader.records([place.slot])[0]
                if record is not None and record.key == place.key:
                    reader.mark([place.slot], DROPPED)
        try:
            self._index.drop(places)
        except CacheError as error:  # a full disk, say: this process still knows that they are bad
            log.warning("dropped entries stay in the index: %s", error)

    def count(self, damaged: int = 1) -> None:
        """Count entries that were found damaged."""
        with self._lock:
            self.corrupt += damaged

    def after_fork(self) -> None:
        """Make the lock usable in a forked child."""
        self._lock = Lock()

    def lost(self, segment: Segment, detail: str, cause: Exception | None) -> NoReturn:
        """Drop a segment whose rows are damaged, or gone (then the cause says so), and raise `CacheCorrupt`."""
        evicted = isinstance(cause, OSError) and cause.errno in _EVICTED
        place = Place(segment.key, segment.start, segment.rows, segment.pack, segment.slot)
        self.drop([place], damaged=not evicted)
        raise CacheCorrupt(segment.key.hex(), detail) from cause
