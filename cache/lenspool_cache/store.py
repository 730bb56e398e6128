"""The store: rows of activations by content key, shared by any number of processes on one machine.

store/
  store.json        what this is, and the store's identity
  packs/*.h5        the rows, and the records that say what they are: the truth
  arrays/*.h5       arrays by content hash
  pins/*, policy.json   what is kept
  index.sqlite      finds records; can be deleted at any time
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from threading import Lock, RLock
from typing import NoReturn

import numpy as np

from lenspool_cache import ranges as rg
from lenspool_cache.arrays import ArrayFolder
from lenspool_cache.assembly import minimal, parts
from lenspool_cache.codec import DROPPED, Record, canonical_array
from lenspool_cache.errors import CacheCorrupt, CacheError, CacheFull
from lenspool_cache.identity import store_id
from lenspool_cache.index import Block, Index, Place
from lenspool_cache.keys import Run
from lenspool_cache.lending import Source, blocks_of, borrowed, own
from lenspool_cache.pins import Pins
from lenspool_cache.policy import Policy
from lenspool_cache.prefix import BLOCK, reach
from lenspool_cache.ranges import Range
from lenspool_cache.reader import PackPool, PackReader, set_state
from lenspool_cache.scan import finished, scan_all
from lenspool_cache.segment import Segment, is_full
from lenspool_cache.usage import Usage
from lenspool_cache.writing import Writers, cut

log = logging.getLogger(__name__)

_EVICTED = {errno.ENOENT, errno.ESTALE}
_GONE = _EVICTED | {errno.EIO}
_MOVES = 4  # how often rows are looked for again that a collector took away between lookup and read


class Store:
    """A content-hash store in a folder.

    Threads and processes may share it; a fork is noticed. Of equal rows put twice the first stay. Runs that begin alike
    lend each other rows (`find`), so that those of a shared prefix are stored once.

    Parameters
    ----------
    path
        Folder. Created, with a `store.json`, unless `read_only`.
    read_only
        Create and change nothing. Works without write permission.

    Raises
    ------
    CacheError
        The folder is not a store (read-only), is of another version, or cannot be made.

    Attributes
    ----------
    path
        Folder of the store.
    id
        Identity of the store, given when it was made.
    pins
        Names under which runs and entries are kept whatever the policy says.
    """

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = False) -> None:
        self.path = Path(path).absolute()
        self.read_only = read_only
        with self.errors(0):
            self.id = store_id(self.path, create=not read_only)
            packs = self.path / "packs"
            if not read_only:
                packs.mkdir(exist_ok=True)
        self._packs = PackPool(packs)
        self._arrays = ArrayFolder(self.path / "arrays")
        self._index = Index(self.path, self.id, self._truth, read_only=read_only)
        self.pins = Pins(self.path)
        self._usage = Usage(self._index)
        self._writers = Writers(self._packs, self.id)
        self._write_lock = RLock()
        self._dropped: set[tuple[str, int]] = set()
        self._counts_lock = Lock()
        self._corrupt = 0
        self._closed = False
        _stores.add(self)

    # -- reading

    def lookup(self, run: Run, names: Iterable[str]) -> dict[str, list[Segment]]:
        """Segments of named entries of a run.

        The key document that stands beside the rows is compared with the run's; an entry whose document or record
        is damaged or another's is a miss, is logged and dropped.

        Returns
        -------
        dict
            Name to segments sorted by start. Only names that have segments.
        """
        out = self._found([Source(name, run.key, run.entry(name), own(run)) for name in names])
        return {name: minimal(segments) for name, segments in out.items()}

    def find(self, run: Run, wanted: Mapping[str, Iterable[Range]]) -> dict[str, list[Segment]]:
        """Segments that make up rows of a run: its own, then those that fill gaps and belong to runs that begin alike.

        Parameters
        ----------
        wanted
            Name to positions.

        Returns
        -------
        dict
            As of `lookup`; what is lent is cut at its `stop`, and stands behind the run's own.
        """
        wanted = {name: rg.merge(ranges) for name, ranges in wanted.items()}
        out = self.lookup(run, wanted)
        gaps = {n: rg.subtract(ranges, [s.range for s in out.get(n, ())]) for n, ranges in wanted.items()}
        gaps = {name: gap for name, gap in gaps.items() if gap and reach(name) is not None}
        first = min((gap[0][0] for gap in gaps.values()), default=0)
        if not gaps or not run.blocks or first >= BLOCK * (len(run.blocks) + 1):
            return out
        lenders = [key for key, last in self._index.lenders(run.blocks).items() if key != run.key]
        found = self._found(borrowed(run, lenders, gaps))
        for name, lent in found.items():
            for segment in sorted(lent, key=lambda s: (s.time, s.start)):  # the oldest, that an answer stays what it is
                left = rg.subtract(gaps[name], [segment.range])
                if left != gaps[name]:
                    gaps[name] = left
                    out.setdefault(name, []).append(segment)
        return out

    def missing(self, run: Run, wanted: Mapping[str, Iterable[Range]]) -> dict[str, list[Range]]:
        """Positions of entries that neither the run nor one that begins like it has; only names that lack any."""
        wanted = {name: rg.merge(ranges) for name, ranges in wanted.items()}
        found = self.find(run, wanted)
        gaps = {name: rg.subtract(ranges, [s.range for s in found.get(name, ())]) for name, ranges in wanted.items()}
        return {name: gap for name, gap in gaps.items() if gap}

    def covered(self, run: Run, names: Iterable[str]) -> dict[str, list[Range]]:
        """Positions of which the run itself has rows: name to merged ranges; only names that have any."""
        return {name: rg.merge(s.range for s in found) for name, found in self.lookup(run, names).items()}

    def read(self, segment: Segment) -> np.ndarray:
        """Rows of a segment, [rows, width], in the dtype in which they were put.

        Raises
        ------
        CacheCorrupt
            The rows do not match their checksum or are gone. The entry is dropped: a later lookup misses it.
        """
        out = self._reader(segment).empty(segment.rows)
        self._read_into(segment, out)
        return out

    def rows(self, run: Run, name: str, ranges: Iterable[Sequence[int]]) -> np.ndarray:
        """Rows of an entry at positions, assembled from its segments and, where it has none, those that others lend.

        Parameters
        ----------
        ranges
            Half-open position ranges.

        Returns
        -------
        numpy.ndarray
            [number of positions, width], in position order.

        Raises
        ------
        KeyError
            The entry, or a position of it, is not stored.
        CacheCorrupt
            As in `read`.
        """
        wanted = rg.merge(ranges)
        for _ in range(_MOVES):
            try:
                return self._assembled(run, name, wanted)
            except CacheCorrupt as error:
                if not isinstance(error.__cause__, OSError):
                    raise
        raise KeyError(f"{name}: rows were evicted or moved {_MOVES} times while they were read")

    def _assembled(self, run: Run, name: str, wanted: list[Range]) -> np.ndarray:
        segments = self.find(run, {name: wanted}).get(name, [])
        missing = rg.subtract(wanted, [s.range for s in segments])
        if missing or not segments:
            raise KeyError(f"{name}: positions {missing} are not stored")
        if len({(s.dtype, s.width) for s in segments}) > 1:
            raise CacheError(f"entry {name} of {run} has rows of several dtypes or widths")
        if len(wanted) == 1 and len(segments) == 1 and wanted[0] == segments[0].range and segments[0].whole:
            return self.read(segments[0])
        out = self._reader(segments[0]).empty(rg.count(wanted))
        for segment, group in groupby(parts(segments, wanted), key=lambda part: part.segment):
            todo = list(group)
            if todo[0].whole:
                self._read_into(segment, out[todo[0].at : todo[0].at + segment.rows])
                continue
            rows = self.read(segment)  # all of it: the checksum covers the whole segment
            for _, first, n, at in todo:
                out[at : at + n] = rows[first : first + n]
        return out

    # -- writing

    def put(self, run: Run, entries: Mapping[str, Sequence[tuple[int, np.ndarray]]]) -> int:
        """Store rows of a run. All become visible together or not at all.

        Parameters
        ----------
        entries
            Name to pairs of start position and array [rows, width].

        Returns
        -------
        int
            Payload bytes written: rows that the store has already, of this run or lent, are not written again.

        Raises
        ------
        ValueError
            An array is not two-dimensional, has no width or a dtype that the store cannot hold, or a start is
            negative.
        CacheFull
            The disk has no room; nothing of the put is visible.
        CacheError
            The store is read-only or closed, or cannot be written to.
        """
        self.require_writable()
        checked = {name: [_rows(name, start, array) for start, array in parts] for name, parts in entries.items()}
        with self._write_lock:
            pieces = cut(checked, self.missing(run, {n: _spans(parts) for n, parts in checked.items()}))
            needed = sum(piece.array.nbytes for piece in pieces)
            if not pieces:
                return 0
            with self.errors(needed):
                places = self._writers.write(run, pieces)
                self._index.insert(places, blocks_of(run, checked, places))
                self._writers.sync_sometimes(needed)
            return needed

    def put_array(self, array: np.ndarray) -> str:
        """Store an array of any shape under its content; returns its digest, see `array_digest`.

        Raises
        ------
        ValueError
            The store cannot hold its dtype.
        CacheFull, CacheError
            As in `put`.
        """
        self.require_writable()
        with self.errors(array.nbytes):
            return self._arrays.put(array)

    def get_array(self, digest: str) -> np.ndarray:
        """Array of a digest.

        Raises
        ------
        KeyError
            It is not stored.
        CacheCorrupt
            Its file is damaged; it is removed.
        """
        try:
            return self._arrays.get(digest)
        except CacheCorrupt as error:
            log.warning("%s", error)
            self._count_corrupt()
            if not self.read_only:
                self._arrays.remove(digest)
            raise

    def has_array(self, digest: str) -> bool:
        """Whether an array is stored."""
        return self._arrays.has(digest)

    def stats(self) -> dict[str, int | str]:
        """Numbers about the whole store; walks the index, so not for every request.

        `entries` counts segments, `payload_bytes` their rows, `corrupt` what this process found damaged.
        """
        places = self._index.all()
        payload = 0
        for pack in {place.pack for place in places}:
            with contextlib.suppress(CacheError, OSError):
                row_bytes = self._packs.get(pack).layout.row_bytes
                payload += row_bytes * sum(place.rows for place in places if place.pack == pack)
        return {
            "path": str(self.path),
            "id": self.id,
            "packs": len(self._packs.names()),
            "entries": len(places),
            "payload_bytes": payload,
            "disk_bytes": self.disk_bytes(),
            "arrays": len(self._arrays.digests()),
            "corrupt": self._corrupt,
        }

    def close(self) -> None:
        """Flush and close all files. Reading opens them again; writing raises."""
        with self._write_lock:
            self._closed = True
            try:
                with self.errors(0):
                    self._writers.sync()
                self._usage.flush()
            finally:
                self._writers.close()
                self._packs.close()
                self._index.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- policy

    @property
    def policy(self) -> Policy:
        """Limits of the store, for all its processes; they are kept to by `collect`."""
        return Policy.load(self.path)

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.require_writable()
        with self.errors(0):
            policy.save(self.path)

    def disk_bytes(self) -> int:
        """What packs and arrays take on the disk; they are sparse files."""
        total = 0
        for path in (
            *map(self._packs.folder.joinpath, self._packs.names()),
            *map(self._arrays.path, self._arrays.digests()),
        ):
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_blocks * 512
        return total

    def require_writable(self) -> None:
        """Raise `CacheError` if the store is read-only or closed."""
        if self.read_only:
            raise CacheError(f"the store at {self.path} is open read-only")
        if self._closed:
            raise CacheError(f"the store at {self.path} is closed")

    @contextmanager
    def errors(self, needed: int) -> Iterator[None]:
        """Turn what the system and HDF5 raise into the store's errors."""
        try:
            yield
        except CacheFull as error:
            raise CacheFull(str(self.path), needed) from error
        except (OSError, RuntimeError) as error:
            if is_full(error):
                raise CacheFull(str(self.path), needed) from error
            raise CacheError(f"the store at {self.path} cannot be used: {error}") from error

    # -- inside

    def _truth(self) -> tuple[Iterable[Place], Iterable[Block]]:
        whole = finished(list(scan_all(self._packs)))
        places = [Place(record.key, record.start, record.rows, pack, slot) for pack, slot, record in whole]
        return places, self.blocks_in(whole)

    def runs_in(
        self, items: Iterable[tuple[str, int, Record]], *, lent: bool = False
    ) -> Iterator[tuple[Place, str, Run]]:
        """Records with their names and runs, or only those that may be `lent`; without those that cannot be read."""
        runs: dict[tuple[str, int], Run | None] = {}
        for pack, slot, record in items:
            at = pack, record.document_offset
            with contextlib.suppress(CacheCorrupt, OSError):
                reader = self._packs.get(pack)
                name = reader.name(record)
                if name is None or (lent and reach(name) is None):
                    continue
                if at not in runs:
                    document = reader.document(record)
                    runs[at] = None if document is None else Run(json.loads(document))
                if (run := runs[at]) is not None:
                    yield Place(record.key, record.start, record.rows, pack, slot), name, run

    def blocks_in(self, items: Iterable[tuple[str, int, Record]]) -> Iterator[Block]:
        """Blocks of records."""
        for place, name, run in self.runs_in(items, lent=True):
            yield from blocks_of(run, [name], [place])

    def _reader(self, segment: Segment) -> PackReader:
        try:
            return self._packs.get(segment.pack, deleted=True)
        except OSError as error:
            if error.errno not in _GONE:
                raise CacheError(f"pack {segment.pack} cannot be opened: {error}") from error
            self._lost(segment, f"pack {segment.pack}: {error}", error)
        except CacheCorrupt as error:
            self._lost(segment, str(error), error)

    def _read_into(self, segment: Segment, out: np.ndarray) -> None:
        reader = self._reader(segment)
        try:
            found = reader.read_into(segment.row, out)
        except OSError as error:
            if error.errno not in _GONE:
                raise CacheError(f"pack {segment.pack} cannot be read: {error}") from error
            self._lost(segment, f"pack {segment.pack}: {error}", error)
        except CacheCorrupt as error:
            self._lost(segment, str(error), error)
        if found != segment.checksum:
            self._lost(segment, "the rows do not match their checksum", None)

    def _lost(self, segment: Segment, detail: str, cause: Exception | None) -> NoReturn:
        evicted = isinstance(cause, OSError) and cause.errno in _EVICTED
        place = Place(segment.key, segment.start, segment.rows, segment.pack, segment.slot)
        self._drop([place], damaged=not evicted)
        raise CacheCorrupt(segment.key.hex(), detail) from cause

    def _found(self, sources: Sequence[Source]) -> dict[str, list[Segment]]:
        """Segments of entries by name, in any order; what was moved or evicted meanwhile is looked for again."""
        by_key = {source.entry: source for source in sources}
        found, gone = self._find(by_key)
        if gone:  # moved or evicted after the index was asked; it knows better by now
            found, gone = self._find(by_key)
            self._drop(gone, damaged=False)
        if self._usage.note({segment.key for segment in found}):
            self._usage.flush()
            self._packs.sweep()
        out: dict[str, list[Segment]] = {}
        for segment in found:
            out.setdefault(by_key[segment.key].name, []).append(segment)
        return out

    def _find(self, sources: Mapping[bytes, Source]) -> tuple[list[Segment], list[Place]]:
        """Segments of entries, and places that the index gave but whose record is evicted."""
        places: dict[str, list[Place]] = {}
        for place in self._index.find(list(sources)):
            if (place.pack, place.slot) not in self._dropped:
                places.setdefault(place.pack, []).append(place)
        found: list[Segment] = []
        bad: list[Place] = []
        gone: list[Place] = []
        for pack, group in places.items():
            found += self._verified(sources, pack, group, bad, gone)
        self._drop(bad)
        return found, gone

    def _verified(
        self, sources: Mapping[bytes, Source], pack: str, places: list[Place], bad: list[Place], gone: list[Place]
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
                source = sources[place.key]
                at = record.document_offset, record.document_length, place.key
                if at not in limits:
                    document = reader.document(record)
                    limits[at] = None if document is None else source.limit(document)
                stop = limits[at]
                if stop is None:
                    bad.append(place)
                    continue
                if stop <= record.start:
                    continue  # where the runs are alike, this has no rows
                layout = reader.layout
                yield Segment(
                    pack,
                    record.row,
                    record.start,
                    record.rows,
                    layout.dtype,
                    layout.width,
                    record.checksum,
                    record.key,
                    place.slot,
                    record.time,
                    stop if stop < record.start + record.rows else None,
                )
        except OSError as error:
            if error.errno not in _GONE:
                raise CacheError(f"pack {pack} cannot be read: {error}") from error
            (gone if error.errno in _EVICTED else bad).extend(places)
        except CacheCorrupt:
            bad.extend(places)

    def _drop(self, places: list[Place], *, damaged: bool = True) -> None:
        """Make entries a miss, now and after any rebuild of the index."""
        if not places:
            return
        if damaged:
            self._count_corrupt(len(places))
        for place in places:
            if damaged:
                log.warning("entry %s in %s, slot %d, is damaged: dropped", place.key.hex(), *place[3:])
            self._dropped.add((place.pack, place.slot))
        if self.read_only:
            return
        for place in places:
            # Gone or unreadable packs have nothing to mark, and a pack of another user cannot be marked.
            with contextlib.suppress(OSError, CacheCorrupt):
                reader = self._packs.get(place.pack)
                record = reader.records([place.slot])[0]
                if record is not None and record.key == place.key:
                    set_state(reader.path, reader.layout, [place.slot], DROPPED)
        try:
            self._index.drop(places)
        except CacheError as error:  # a full disk, say: this process still knows that they are bad
            log.warning("dropped entries stay in the index: %s", error)

    def _count_corrupt(self, count: int = 1) -> None:
        with self._counts_lock:
            self._corrupt += count

    def _after_fork(self) -> None:
        # The packs and the database connection belong to the parent; a child begins its own.
        self._write_lock = RLock()
        self._counts_lock = Lock()
        self._writers.close()
        self._packs.after_fork()
        self._usage.after_fork()
        self._index.after_fork()


_stores: weakref.WeakSet[Store] = weakref.WeakSet()


def _after_fork() -> None:
    for store in list(_stores):
        store._after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _spans(parts: Iterable[tuple[int, np.ndarray]]) -> list[Range]:
    return [(start, start + len(array)) for start, array in parts]


def _rows(name: str, start: int, array: np.ndarray) -> tuple[int, np.ndarray]:
    if array.ndim != 2 or not array.shape[1]:
        raise ValueError(f"rows of {name} must be [rows, width], not {list(array.shape)}")
    if start < 0:
        raise ValueError(f"rows of {name} start at {start}")
    return int(start), canonical_array(array)
