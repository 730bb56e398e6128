"""Half-open ranges of absolute token positions: the one form in which positions travel and are stored.

A range is `(start, stop)` with `0 <= start < stop`; a canonical list is sorted, disjoint and merged. `stop` may be
`OPEN` (None) in a job document: "to the end of the generation".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Range = tuple[int, int]
OpenRange = tuple[int, int | None]


def merge(ranges: Iterable[Sequence[int]]) -> list[Range]:
    """Sort, drop empty ones, and join ranges that overlap or touch."""
    out: list[Range] = []
    pairs = [(int(r[0]), int(r[1])) for r in ranges]
    if len(pairs) == 1:
        return pairs if pairs[0][0] < pairs[0][1] else []
    for start, stop in sorted(pairs):
        if start >= stop:
            continue
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(stop, out[-1][1]))
        else:
            out.append((start, stop))
    return out


def from_positions(positions: Iterable[int]) -> list[Range]:
    """Canonical ranges of single positions, e.g. `[3, 4, 9] -> [(3, 5), (9, 10)]`."""
    return merge((p, p + 1) for p in positions)


def count(ranges: Iterable[Sequence[int]]) -> int:
    """Number of positions in disjoint ranges."""
    return sum(stop - start for start, stop in ranges)


def positions(ranges: Iterable[Sequence[int]]) -> list[int]:
    """Every position of the ranges, in order."""
    return [p for start, stop in ranges for p in range(start, stop)]


def intersect(a: Iterable[Sequence[int]], b: Iterable[Sequence[int]]) -> list[Range]:
    """Positions in both."""
    b = list(b)
    return merge((max(s, t), min(e, f)) for s, e in a for t, f in b)


def subtract(a: Iterable[Sequence[int]], b: Iterable[Sequence[int]]) -> list[Range]:
    """Positions of `a` that are not in `b`."""
    left, cuts = [], merge(b)
    for start, stop in merge(a):
        for t, f in cuts:
            if t >= stop:
                break
            if f > start:
                if t > start:
                    left.append((start, t))
                start = f
        if start < stop:
            left.append((start, stop))
    return left


def close(ranges: Iterable[OpenRange], length: int) -> list[Range]:
    """Give open ranges their end and clip all to `[0, length)`."""
    return merge((s, length if e is None else min(e, length)) for s, e in ranges)
