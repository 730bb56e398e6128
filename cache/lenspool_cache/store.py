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
import logging
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from threading import RLock

import numpy as np

from lenspool_cache import ranges as rg
from lenspool_cache.arrays import ArrayFolder
from lenspool_cache.assembly import minimal, parts
from lenspool_cache.codec import canonical_array, dtype_of
from lenspool_cache.errors import CacheCorrupt, CacheError, CacheFull, CacheMiss
from lenspool_cache.follow import Follower
from lenspool_cache.identity import store_id
from lenspool_cache.index import Index, Place
from lenspool_cache.keeping import Keeper
from lenspool_cache.keys import Run
from lenspool_cache.layers import below, from_below, lenders_below, open_layers
from lenspool_cache.lending import Sources, blocks_at, blocks_of, borrowed, own
from lenspool_cache.lookup import Lookup
from lenspool_cache.mounts import is_network
from lenspool_cache.pins import Pins
from lenspool_cache.policy import Policy
from lenspool_cache.prefix import BLOCK, reach
from lenspool_cache.ranges import Range
from lenspool_cache.reader import PackPool
from lenspool_cache.scan import finished, scan_all
from lenspool_cache.segment import Segment, is_full
from lenspool_cache.usage import Usage
from lenspool_cache.writing import Piece, Writers, cut

log = logging.getLogger(__name__)

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
    lower
        Folders or URLs (`s3://bucket/path`, extra `s3`) of stores that are only read: what one of them has is not
        stored again here. By default those that the store itself names (`save_lower`); of these, one that cannot be
        opened is left out, with a warning.
    network
        Several machines write to the folder, so each process has an index of its own; default: whether it is on a
        network file system.

    Raises
    ------
    CacheError
        The folder is not a store (read-only), is of another version, or cannot be made; so is a layer in `lower`.

    Attributes
    ----------
    path
        Folder of the store.
    id
        Identity of the store, given when it was made.
    pins
        Names under which runs and entries are kept whatever the policy says.
    network
        Whether several machines may write to the folder.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        read_only: bool = False,
        lower: Sequence[str | os.PathLike[str]] | None = None,
        network: bool | None = None,
    ) -> None:
        self.path = Path(path).absolute()
        self.read_only = read_only
        with self.errors(0):
            self.id = store_id(self.path, create=not read_only)
            packs = self.path / "packs"
            if not read_only:
                packs.mkdir(exist_ok=True)
        self._packs = PackPool(packs)
        self._arrays = ArrayFolder(self.path)
        self.network = is_network(self.path) if network is None else network
        follower = Follower(self._packs) if self.network else None
        self._index = Index(
            self.path, self.id, self._truth, partial(blocks_at, self._packs), read_only=read_only, follower=follower
        )
        self.pins = Pins(self.path)
        self._own = Lookup(self._packs, self._index)
        self._usage = Usage(self._index)
        self._writers = Writers(self._packs, self.id)
        self._write_lock = RLock()
        self._keeper = Keeper(self._writers, self._write_lock)
        self._closed = False
        self._layers = open_layers(self.path, lower)
        _stores.add(self)

    # -- reading

    def lookup(self, run: Run, names: Iterable[str], within: Range | None = None) -> dict[str, list[Segment]]:
        """Segments of named entries of a run, here and in the lower layers.

        The key document that stands beside the rows is compared with the run's; an entry whose document or record
        is damaged or another's is a miss, is logged and dropped.

        Parameters
        ----------
        within
            Only segments with rows at these positions.

        Returns
        -------
        dict
            Name to segments sorted by start. Only names that have segments.
        """
        sources = own(run, names)
        out = self._found(sources, within)
        for number, layer in enumerate(self._layers, 1):
            left = {k: s for k, s in sources.items() if not (within and _covers(out.get(s.name, ()), within))}
            for segment in below(layer, left, within):
                out.setdefault(sources[segment.key].name, []).append(replace(segment, layer=number))
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
        asked = {name: rg.merge(ranges) for name, ranges in wanted.items()}
        out = self.lookup(run, asked, _span(asked.values()))
        gaps = {n: rg.subtract(ranges, [s.range for s in out.get(n, ())]) for n, ranges in asked.items()}
        gaps = {name: gap for name, gap in gaps.items() if gap and reach(name) is not None}
        first = min((gap[0][0] for gap in gaps.values()), default=0)
        if not gaps or not run.blocks or first >= BLOCK * (len(run.blocks) + 1):
            return out
        for number in range(len(self._layers) + 1):
            for name, lent in self._lent(run, gaps, number).items():
                for segment in sorted(lent, key=lambda s: (s.time, s.start)):  # the oldest: an answer stays what it is
                    left = rg.subtract(gaps[name], [segment.range])
                    if left != gaps[name]:
                        gaps[name] = left
                        out.setdefault(name, []).append(segment)
            gaps = {name: gap for name, gap in gaps.items() if gap}
        return out

    def _lent(self, run: Run, gaps: Mapping[str, list[Range]], number: int) -> dict[str, list[Segment]]:
        """What other runs lend, of one layer."""
        if not gaps:
            return {}
        if not number:
            return self._found(borrowed(run, self._own.lenders(run.blocks) - {run.key}, gaps), _span(gaps.values()))
        layer = self._layers[number - 1]
        sources = borrowed(run, lenders_below(layer, run.blocks) - {run.key}, gaps)
        out: dict[str, list[Segment]] = {}
        for segment in below(layer, sources, _span(gaps.values())):
            out.setdefault(sources[segment.key].name, []).append(replace(segment, layer=number))
        return out

    def _found(self, sources: Sources, within: Range | None) -> dict[str, list[Segment]]:
        """Segments of the store's own folder by name, whose use is noted."""
        out: dict[str, list[Segment]] = {}
        found = self._own.find(sources, within)
        if self._usage.note({segment.key for segment in found}):
            self._usage.flush()
            self._packs.sweep()
        for segment in found:
            out.setdefault(sources[segment.key].name, []).append(segment)
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
        layer = self._layers[segment.layer - 1] if segment.layer else None
        if layer is not None and layer.far:
            rows = layer.read([segment])[0].copy()
            self._keep(*layer.identity(segment), {segment: rows})
            return rows
        out = _empty(segment, segment.rows)
        self._read_into(segment, out)
        return out

    def rows(
        self, run: Run, name: str, ranges: Iterable[Sequence[int]], *, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Rows of an entry at positions, assembled from its segments and, where it has none, those that others lend.

        Parameters
        ----------
        ranges
            Half-open position ranges.
        out
            Array of the right shape and dtype (or its bits) to fill, in C order; streaming is faster with one.

        Returns
        -------
        numpy.ndarray
            [number of positions, width], in position order.

        Raises
        ------
        CacheMiss
            The entry, or a position of it, is not stored.
        CacheCorrupt
            As in `read`.
        """
        wanted = rg.merge(ranges)
        for _ in range(_MOVES):
            try:
                return self._assembled(run, name, wanted, out)
            except CacheCorrupt as error:
                if not isinstance(error.__cause__, OSError):
                    raise
        raise CacheMiss(name, f"rows were evicted or moved {_MOVES} times while they were read")

    def _assembled(self, run: Run, name: str, wanted: list[Range], out: np.ndarray | None) -> np.ndarray:
        segments = self.find(run, {name: wanted}).get(name, [])
        missing = rg.subtract(wanted, [s.range for s in segments])
        if missing or not segments:
            raise CacheMiss(name, f"positions {missing or wanted} are not stored")
        if len({(s.dtype, s.width) for s in segments}) > 1:
            raise CacheError(f"entry {name} of {run} has rows of several dtypes or widths")
        out = _empty(segments[0], rg.count(wanted)) if out is None else _checked(out, segments[0], rg.count(wanted))
        plan = [
            (segment, list(group)) for segment, group in groupby(parts(segments, wanted), key=attrgetter("segment"))
        ]
        there = self._brought(run, name, [segment for segment, _ in plan])
        for segment, todo in plan:
            if todo[0].whole and segment not in there:
                self._read_into(segment, out[todo[0].at : todo[0].at + segment.rows])
                continue
            rows = there.get(segment)
            if rows is None:
                rows = _empty(segment, segment.rows)  # all of it: the checksum covers the whole segment
                self._read_into(segment, rows)
            for _, first, n, at in todo:
                out[at : at + n] = rows[first : first + n]
        return out

    def _read_into(self, segment: Segment, out: np.ndarray) -> None:
        layer = self._own if not segment.layer else self._layers[segment.layer - 1]
        layer.read_into(segment, out)

    def _brought(self, run: Run, name: str, segments: list[Segment]) -> dict[Segment, np.ndarray]:
        """Rows of the segments of far layers, which are kept here from now on."""
        out: dict[Segment, np.ndarray] = {}
        for number, layer in enumerate(self._layers, 1):
            far = [segment for segment in segments if segment.layer == number] if layer.far else []
            if far:
                out |= zip(far, layer.read(far), strict=True)
        if out:
            self._keep(run, name, out)
        return out

    def _keep(self, run: Run, name: str, rows: Mapping[Segment, np.ndarray]) -> None:
        if self.read_only or self._closed:
            return
        try:
            self._put_own(run, {name: [(s.start, array[: s.range[1] - s.start]) for s, array in rows.items()]})
        except CacheError as error:
            log.warning("rows from a lower layer are not kept: %s", error)

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
        self.require_writable()
        checked = {name: [_rows(name, start, array) for start, array in parts] for name, parts in entries.items()}
        with self._write_lock:
            return self._write(run, cut(checked, self.missing(run, {n: _spans(parts) for n, parts in checked.items()})))

    def _put_own(self, run: Run, entries: Mapping[str, Sequence[tuple[int, np.ndarray]]]) -> None:
        with self._write_lock:
            have = self._found(own(run, entries), None)
            left = {n: rg.subtract(_spans(parts), [s.range for s in have.get(n, ())]) for n, parts in entries.items()}
            self._write(run, cut(entries, left))

    def _write(self, run: Run, pieces: Sequence[Piece]) -> int:
        needed = sum(piece.array.nbytes for piece in pieces)
        if pieces:
            with self.errors(needed):
                names = {run.entry(piece.name): piece.name for piece in pieces}
                places = self._writers.write(run, pieces)
                self._index.insert(places, list(blocks_of((place, names[place.key], run) for place in places)))
                self._keeper.note(needed)
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
        except KeyError:
            return from_below(self._layers, digest)
        except CacheCorrupt as error:
            log.warning("%s", error)
            self._own.count()
            if not self.read_only:
                self._arrays.remove(digest)
            raise

    def has_array(self, digest: str) -> bool:
        """Whether an array is stored, here or in a lower layer."""
        return self._arrays.has(digest) or any(layer.has_array(digest) for layer in self._layers)

    def stats(self) -> dict[str, int | str]:
        """Numbers about the whole store; walks the index, so not for every request.

        `entries` counts segments, `payload_bytes` their rows, `corrupt` what this process found damaged.
        """
        places = self._index.all()
        payload = 0
        groups: dict[str, list[Place]] = {}
        for place in places:
            groups.setdefault(place.pack, []).append(place)
        for pack, group in groups.items():
            with contextlib.suppress(CacheError, OSError):
                payload += self._payload(pack, group)
        return {
            "path": str(self.path),
            "id": self.id,
            "packs": len(self._packs.names()),
            "entries": len(places),
            "payload_bytes": payload,
            "disk_bytes": self.disk_bytes(),
            "arrays": len(self._arrays.digests()),
            "corrupt": self._own.corrupt,
            "lower": ", ".join(layer.place for layer in self._layers),
        }

    def _payload(self, pack: str, places: Sequence[Place]) -> int:
        reader = self._packs.get(pack)
        if reader.layout.width > 1:
            return reader.layout.row_bytes * sum(place.rows for place in places)
        records = reader.records([place.slot for place in places])  # only they know how wide their rows are
        return sum(reader.layout.nbytes(record) for record in records if record is not None)

    def close(self) -> None:
        """Flush and close all files. Reading opens them again; writing raises."""
        self._keeper.stop()
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
                for layer in self._layers:
                    layer.close()

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

    def _truth(self) -> Iterator[Place]:
        for pack, slot, record in finished(list(scan_all(self._packs))):
            yield Place(record.key, record.start, record.rows, pack, slot)

    def _after_fork(self) -> None:
        # The packs and the database connection belong to the parent; a child begins its own.
        self._keeper.release()
        self._writers.close()
        self._write_lock = RLock()
        self._keeper = Keeper(self._writers, self._write_lock)
        self._own.after_fork()
        self._packs.after_fork()
        self._usage.after_fork()
        self._index.after_fork()
        for layer in self._layers:
            layer.after_fork()


_stores: weakref.WeakSet[Store] = weakref.WeakSet()


def _after_fork() -> None:
    for store in list(_stores):
        store._after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _spans(parts: Iterable[tuple[int, np.ndarray]]) -> list[Range]:
    return [(start, start + len(array)) for start, array in parts]


def _span(several: Iterable[Sequence[Range]]) -> Range | None:
    """From the first of some positions to the last."""
    ranges = [r for ranges in several for r in ranges]
    return (min(r[0] for r in ranges), max(r[1] for r in ranges)) if ranges else None


def _rows(name: str, start: int, array: np.ndarray) -> tuple[int, np.ndarray]:
    if array.ndim != 2 or not array.shape[1]:
        raise ValueError(f"rows of {name} must be [rows, width], not {list(array.shape)}")
    if start < 0:
        raise ValueError(f"rows of {name} start at {start}")
    return int(start), canonical_array(array)


def _covers(segments: Iterable[Segment], within: Range) -> bool:
    return not rg.subtract([within], [segment.range for segment in segments])


def _checked(out: np.ndarray, segment: Segment, rows: int) -> np.ndarray:
    dtype = dtype_of(segment.dtype)
    if out.shape != (rows, segment.width) or out.itemsize != dtype.itemsize or not out.flags.c_contiguous:
        raise ValueError(f"out must be a C array [{rows}, {segment.width}] of {segment.dtype}")
    return out.view(dtype)


def _empty(segment: Segment, rows: int) -> np.ndarray:
    return np.empty((rows, segment.width), dtype_of(segment.dtype))
