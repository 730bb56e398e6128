"""The store: rows of activations by content key, shared by any number of processes on one machine.

store/
  store.json        what this is, and the store's identity
  packs/*.h5        the rows, and the records that say what they are: the truth
  arrays/*.h5       arrays by content hash
  index.sqlite      finds records; can be deleted at any time
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import time
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, RLock
from typing import NoReturn

import numpy as np

from lenspool_cache import ranges as rg
from lenspool_cache.arrays import ArrayFolder
from lenspool_cache.codec import LIVE, Record, canonical_array, checksum, pack_record, raw
from lenspool_cache.errors import CacheCorrupt, CacheError, CacheFull
from lenspool_cache.index import Index, Place
from lenspool_cache.keys import Run
from lenspool_cache.ranges import Range
from lenspool_cache.reader import PackPool, PackReader, drop_record
from lenspool_cache.scan import finished, scan_all
from lenspool_cache.segment import Need, PackWriter, Segment, create_pack, is_full

log = logging.getLogger(__name__)

STORE_VERSION = 1

FIRST_PACK = 16 << 20  # bytes of rows; each further pack of a writer is twice as large
LAST_PACK = 1 << 30
# Rows of one put are cut into segments of about this size: a checksum covers a segment, so this is what one row costs.
SEGMENT_BYTES = 4 << 20
# Puts and bytes after which data is flushed to the disk. A power cut can lose what came later, and nothing else.
SYNC_PUTS, SYNC_BYTES = 64, 256 << 20

_GONE = {errno.ENOENT, errno.ESTALE, errno.EIO}


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of one name that one record will describe."""

    name: str
    start: int
    array: np.ndarray


class Store:
    """A content-hash store in a folder.

    Threads and processes may share it; a fork is noticed. Of equal rows put twice the first stay.

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
    """

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = False) -> None:
        self.path = Path(path).absolute()
        self.read_only = read_only
        with self._errors(0):
            self.id = _identity(self.path, read_only)
            packs = self.path / "packs"
            if not read_only:
                packs.mkdir(exist_ok=True)
        self._packs = PackPool(packs)
        self._arrays = ArrayFolder(self.path / "arrays")
        self._index = Index(self.path, self.id, self._truth, read_only=read_only)
        self._writers: dict[tuple[str, int], tuple[PackWriter, int]] = {}
        self._write_lock = RLock()
        self._dropped: set[tuple[str, int]] = set()
        self._unsynced_puts = self._unsynced_bytes = 0
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
        by_key = {run.entry(name): name for name in names}
        places: dict[str, list[Place]] = {}
        for place in self._index.find(list(by_key)):
            if (place.pack, place.slot) not in self._dropped:
                places.setdefault(place.pack, []).append(place)
        out: dict[str, list[Segment]] = {}
        bad: list[Place] = []
        for pack, group in places.items():
            for segment in self._verified(run, pack, group, bad):
                out.setdefault(by_key[segment.key], []).append(segment)
        self._drop(bad)
        return {name: _needed(segments) for name, segments in out.items()}

    def covered(self, run: Run, names: Iterable[str]) -> dict[str, list[Range]]:
        """Positions that the store has: name to merged ranges; only names that have any."""
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
        """Rows of an entry at positions, assembled from its segments.

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
        segments = self.lookup(run, [name]).get(name, [])
        missing = rg.subtract(wanted, [s.range for s in segments])
        if missing or not segments:
            raise KeyError(f"{name}: positions {missing} are not stored")
        if len({(s.dtype, s.width) for s in segments}) > 1:
            raise CacheError(f"entry {name} of {run} has rows of several dtypes or widths")
        if len(wanted) == 1 and len(segments) == 1 and wanted[0] == segments[0].range:
            return self.read(segments[0])
        out = self._reader(segments[0]).empty(rg.count(wanted))
        left, base = wanted, 0
        offsets = []
        for start, stop in wanted:
            offsets.append((start, stop, base))
            base += stop - start
        for segment in segments:
            parts = rg.intersect(left, [segment.range])
            if not parts:
                continue
            left = rg.subtract(left, parts)
            targets = [(s, e, s - a + o) for s, e in parts for a, b, o in offsets if a <= s < b]
            if parts == [segment.range]:
                _, _, at = targets[0]
                self._read_into(segment, out[at : at + segment.rows])
                continue
            rows = self.read(segment)
            for s, e, at in targets:
                out[at : at + e - s] = rows[s - segment.start : e - segment.start]
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
            Payload bytes written: rows that the store has already are not written again.

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
        self._writable()
        checked = {name: [_rows(name, start, array) for start, array in parts] for name, parts in entries.items()}
        with self._write_lock:
            pieces = self._missing(run, checked)
            needed = sum(piece.array.nbytes for piece in pieces)
            if not pieces:
                return 0
            with self._errors(needed):
                self._write(run, pieces)
                self._flush_sometimes(needed)
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
        self._writable()
        with self._errors(array.nbytes):
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

        `entries` counts segments, `payload_bytes` their rows, `disk_bytes` what packs and arrays take on the disk
        (they are sparse files), `corrupt` what this process found damaged.
        """
        places = self._index.all()
        files = [self._packs.folder / name for name in self._packs.names()]
        arrays = [self._arrays.path(digest) for digest in self._arrays.digests()]
        disk = payload = 0
        for path in files + arrays:
            with contextlib.suppress(FileNotFoundError):
                disk += path.stat().st_blocks * 512
        for pack in {place.pack for place in places}:
            with contextlib.suppress(CacheError, OSError):
                row_bytes = self._packs.get(pack).layout.row_bytes
                payload += row_bytes * sum(place.rows for place in places if place.pack == pack)
        return {
            "path": str(self.path),
            "id": self.id,
            "packs": len(files),
            "entries": len(places),
            "payload_bytes": payload,
            "disk_bytes": disk,
            "arrays": len(arrays),
            "corrupt": self._corrupt,
        }

    def close(self) -> None:
        """Flush and close all files. Reading opens them again; writing raises."""
        with self._write_lock:
            self._closed = True
            for writer, _ in self._writers.values():
                with self._errors(0):
                    writer.sync()
                writer.close()
            self._writers.clear()
            self._packs.close()
            self._index.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- inside

    def _truth(self) -> Iterator[Place]:
        for pack, slot, record in finished(list(scan_all(self._packs))):
            yield Place(record.key, record.start, record.rows, pack, slot)

    def _writable(self) -> None:
        if self.read_only:
            raise CacheError(f"the store at {self.path} is open read-only")
        if self._closed:
            raise CacheError(f"the store at {self.path} is closed")

    @contextmanager
    def _errors(self, needed: int) -> Iterator[None]:
        """Turn what the system and HDF5 raise into the store's errors."""
        try:
            yield
        except CacheFull as error:
            raise CacheFull(str(self.path), needed) from error
        except (OSError, RuntimeError) as error:
            if is_full(error):
                raise CacheFull(str(self.path), needed) from error
            raise CacheError(f"the store at {self.path} cannot be used: {error}") from error

    def _reader(self, segment: Segment) -> PackReader:
        try:
            return self._packs.get(segment.pack)
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
        self._drop([Place(segment.key, segment.start, segment.rows, segment.pack, segment.slot)])
        raise CacheCorrupt(segment.key.hex(), detail) from cause

    def _verified(self, run: Run, pack: str, places: list[Place], bad: list[Place]) -> Iterator[Segment]:
        """Segments of one pack whose record and key document are right; the others go to `bad`."""
        try:
            reader = self._packs.get(pack)
            records = reader.records([place.slot for place in places])
            matches: dict[tuple[int, int], bool] = {}
            for place, record in zip(places, records, strict=True):
                if record is None or (record.key, record.start, record.rows) != place[:3] or record.state != LIVE:
                    bad.append(place)
                    continue
                at = record.document_offset, record.document_length
                if at not in matches:
                    matches[at] = record.document_length == len(run.data) and reader.document(record) == run.data
                if not matches[at]:
                    bad.append(place)
                    continue
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
                )
        except OSError as error:
            if error.errno not in _GONE:
                raise CacheError(f"pack {pack} cannot be read: {error}") from error
            bad.extend(places)
        except CacheCorrupt:
            bad.extend(places)

    def _drop(self, places: list[Place]) -> None:
        """Make entries a miss, now and after any rebuild of the index."""
        if not places:
            return
        self._count_corrupt(len(places))
        for place in places:
            log.warning("entry %s in %s, slot %d, is damaged or gone: dropped", place.key.hex(), *place[3:])
            self._dropped.add((place.pack, place.slot))
        if self.read_only:
            return
        for place in places:
            # Gone or unreadable packs have nothing to mark, and a pack of another user cannot be marked.
            with contextlib.suppress(OSError, CacheCorrupt):
                reader = self._packs.get(place.pack)
                record = reader.records([place.slot])[0]
                if record is not None and record.key == place.key:
                    drop_record(reader.path, reader.layout, place.slot)
        self._index.drop(places)

    def _count_corrupt(self, count: int = 1) -> None:
        with self._counts_lock:
            self._corrupt += count

    def _missing(self, run: Run, entries: Mapping[str, Sequence[tuple[int, np.ndarray]]]) -> list[_Piece]:
        """What of a put the store does not have, cut into segments."""
        covered = self.covered(run, entries)
        pieces = []
        for name, parts in entries.items():
            have = covered.get(name, [])
            for start, array in parts:
                for first, stop in rg.subtract([(start, start + len(array))], have):
                    step = max(1, SEGMENT_BYTES // (array.shape[1] * array.itemsize))
                    for at in range(first, stop, step):
                        pieces.append(_Piece(name, at, array[at - start : min(at + step, stop) - start]))
                have = rg.merge([*have, (start, start + len(array))])
        return pieces

    def _write(self, run: Run, pieces: list[_Piece]) -> None:
        groups: dict[tuple[str, int], list[_Piece]] = {}
        for piece in pieces:
            groups.setdefault((piece.array.dtype.name, piece.array.shape[1]), []).append(piece)
        batch, now = secrets.randbits(64), time.time_ns()
        staged = []
        for kind, group in groups.items():
            writer, records = self._stage(run, kind, group, batch, len(pieces), now)
            staged.append((writer, records))
        places = []
        for writer, records in staged:
            slot = writer.commit([pack_record(record) for record in records])
            places += [Place(r.key, r.start, r.rows, writer.path.name, slot + i) for i, r in enumerate(records)]
        self._index.insert(places)

    def _stage(
        self, run: Run, kind: tuple[str, int], group: list[_Piece], batch: int, batch_size: int, now: int
    ) -> tuple[PackWriter, list[Record]]:
        names = list(dict.fromkeys(piece.name for piece in group))
        documents = [run.data, *(name.encode() for name in names)]
        need = Need(sum(len(p.array) for p in group), len(group), sum(map(len, documents)))
        writer = self._writer(kind, need)
        row, base = writer.stage([piece.array for piece in group], documents)
        name_at = {}
        at = base + len(run.data)
        for name, encoded in zip(names, documents[1:], strict=True):
            name_at[name] = (at, len(encoded))
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
                    row=row,
                    rows=len(piece.array),
                    checksum=checksum(raw(piece.array)),
                    document_offset=base,
                    document_checksum=document_checksum,
                    name_offset=name_at[piece.name][0],
                    time=now,
                    name_length=name_at[piece.name][1],
                )
            )
            row += len(piece.array)
        return writer, records

    def _writer(self, kind: tuple[str, int], need: Need) -> PackWriter:
        writer, size = self._writers.get(kind, (None, FIRST_PACK // 2))
        if writer is not None and writer.fits(need):
            return writer
        size = min(2 * size, LAST_PACK)
        path, layout = create_pack(self._packs.folder, self.id, *kind, size, need)
        self._packs.learn(path.name, layout)
        fresh = PackWriter(path, layout)
        self._writers[kind] = fresh, size
        if writer is not None:
            writer.sync()
            writer.close()
        return fresh

    def _flush_sometimes(self, written: int) -> None:
        self._unsynced_puts += 1
        self._unsynced_bytes += written
        if self._unsynced_puts >= SYNC_PUTS or self._unsynced_bytes >= SYNC_BYTES:
            for writer, _ in self._writers.values():
                writer.sync()
            self._unsynced_puts = self._unsynced_bytes = 0

    def _after_fork(self) -> None:
        # The packs and the database connection belong to the parent; a child begins its own.
        self._write_lock = RLock()
        self._counts_lock = Lock()
        for writer, _ in self._writers.values():
            writer.close()
        self._writers = {}
        self._packs.after_fork()
        self._index.after_fork()


_stores: weakref.WeakSet[Store] = weakref.WeakSet()


def _after_fork() -> None:
    for store in list(_stores):
        store._after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _identity(path: Path, read_only: bool) -> str:
    """Read `store.json`, or make it."""
    file = path / "store.json"
    if not file.exists():
        if read_only:
            raise CacheError(f"{path} is not a store: there is no store.json in it")
        path.mkdir(parents=True, exist_ok=True)
        temporary = path / f".store.{uuid.uuid4().hex}.tmp"
        temporary.write_text(json.dumps({"version": STORE_VERSION, "id": uuid.uuid4().hex}) + "\n")
        try:
            # A link, not a rename: of several makers the first wins and the others read its identity.
            with contextlib.suppress(FileExistsError):
                os.link(temporary, file)
        finally:
            temporary.unlink()
    try:
        document = json.loads(file.read_text())
        version, store_id = document["version"], str(document["id"])
    except (ValueError, KeyError, TypeError) as error:
        raise CacheError(f"{path} is not a store: its store.json cannot be read: {error}") from error
    if version != STORE_VERSION:
        raise CacheError(f"the store at {path} has version {version}; this lenspool reads version {STORE_VERSION}")
    return store_id


def _rows(name: str, start: int, array: np.ndarray) -> tuple[int, np.ndarray]:
    if array.ndim != 2 or not array.shape[1]:
        raise ValueError(f"rows of {name} must be [rows, width], not {list(array.shape)}")
    if start < 0:
        raise ValueError(f"rows of {name} start at {start}")
    return int(start), canonical_array(array)


def _needed(segments: list[Segment]) -> list[Segment]:
    """Sort by start, without segments that others contain (two writers may have stored the same rows at once)."""
    out: list[Segment] = []
    for segment in sorted(segments, key=lambda s: (s.start, -s.rows)):
        if not out or segment.range[1] > out[-1].range[1]:
            out.append(segment)
    return out
