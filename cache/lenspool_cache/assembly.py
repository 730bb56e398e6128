"""Which rows of which segments make up the rows at some positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lenspool_cache import ranges as rg
from lenspool_cache.ranges import Range
from lenspool_cache.segment import Segment


class Part(NamedTuple):
    """Rows `[first, first + rows)` of a segment belong at `[at, at + rows)` of the answer."""

    segment: Segment
    first: int
    rows: int
    at: int

    @property
    def whole(self) -> bool:
        """Whether it is all of the segment."""
        return self.rows == self.segment.rows


def minimal(segments: Sequence[Segment]) -> list[Segment]:
    """Sort by start, without segments that others contain (two writers may have stored the same rows at once)."""
    out: list[Segment] = []
    for segment in sorted(segments, key=lambda s: (s.start, -s.rows)):
        if not out or segment.range[1] > out[-1].range[1]:
            out.append(segment)
    return out


def parts(segments: Sequence[Segment], wanted: Sequence[Range]) -> Iterator[Part]:
    """Plan the answer: each wanted position once, grouped by segment.

    Parameters
    ----------
    wanted
        Canonical ranges; the answer has their positions in order.
    """
    base, left = {}, list(wanted)
    at = 0
    for start, stop in wanted:
        base[start, stop] = at - start
        at += stop - start
    for segment in segments:
        for s, e in rg.intersect(left, [segment.range]):  # each lies in one wanted range, since these do not touch
            shift = next(shift for (start, stop), shift in base.items() if start <= s < stop)
            yield Part(segment, s - segment.start, e - s, s + shift)
        left = rg.subtract(left, [segment.range])
