"""What a store answers: rows of a run, its own, those that others lend it, and those of the layers below."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter

import numpy as np

from lenspool_cache import ranges as rg
from lenspool_cache.arrays import ArrayFolder
from lenspool_cache.assembly import minimal, parts
from lenspool_cache.codec import dtype_of
from lenspool_cache.errors import CacheCorrupt, CacheError, CacheMiss
from lenspool_cache.keys import Run
from lenspool_cache.layers import Layer, below, from_below, lenders_below
from lenspool_cache.lending import Sources, borrowed, own
from lenspool_cache.lookup import Lookup
from lenspool_cache.prefix import BLOCK, reach
from lenspool_cache.ranges import Range
from lenspool_cache.reader import PackPool
from lenspool_cache.segment import Segment
from lenspool_cache.usage import Usage

log = logging.getLogger(__name__)

_MOVES = 4  # how often rows are looked for again that a collector took away between lookup and read


class Reading(ABC):
    """Lookups and reads of a store over its own packs and its layers."""

    read_only: bool
    _packs: PackPool
    _arrays: ArrayFolder
    _own: Lookup
    _usage: Usage
    _layers: list[Layer]

    @abstractmethod
    def _keep(self, run: Run, name: str, rows: Mapping[Segment, np.ndarray]) -> None:
        """Keep rows that were read from a far layer."""

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


def _span(several: Iterable[Sequence[Range]]) -> Range | None:
    """From the first of some positions to the last."""
    ranges = [r for ranges in several for r in ranges]
    return (min(r[0] for r in ranges), max(r[1] for r in ranges)) if ranges else None


def _covers(segments: Iterable[Segment], within: Range) -> bool:
    return not rg.subtract([within], [segment.range for segment in segments])


def _checked(out: np.ndarray, segment: Segment, rows: int) -> np.ndarray:
    dtype = dtype_of(segment.dtype)
    if out.shape != (rows, segment.width) or out.itemsize != dtype.itemsize or not out.flags.c_contiguous:
        raise ValueError(f"out must be a C array [{rows}, {segment.width}] of {segment.dtype}")
    return out.view(dtype)


def _empty(segment: Segment, rows: int) -> np.ndarray:
    return np.empty((rows, segment.width), dtype_of(segment.dtype))
