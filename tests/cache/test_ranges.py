"""Range arithmetic against set arithmetic."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from lenspool_cache import ranges as rg

LIMIT = 60
ranges = st.lists(st.tuples(st.integers(0, LIMIT), st.integers(0, LIMIT)), max_size=8)


def as_set(items: list[tuple[int, int]]) -> set[int]:
    return {p for start, stop in items for p in range(start, stop)}


def is_canonical(items: list[tuple[int, int]]) -> bool:
    return all(s < e for s, e in items) and all(a[1] < b[0] for a, b in itertools.pairwise(items))


@given(ranges)
def test_merge(items: list[tuple[int, int]]) -> None:
    merged = rg.merge(items)
    assert is_canonical(merged)
    assert as_set(merged) == as_set(items)
    assert rg.count(merged) == len(as_set(items))
    assert rg.positions(merged) == sorted(as_set(items))
    assert rg.merge(merged) == merged


@given(st.lists(st.integers(0, LIMIT)))
def test_from_positions(positions: list[int]) -> None:
    assert rg.positions(rg.from_positions(positions)) == sorted(set(positions))


@given(ranges, ranges)
def test_intersect_and_subtract(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    both, rest = rg.intersect(a, b), rg.subtract(a, b)
    assert is_canonical(both)
    assert is_canonical(rest)
    assert as_set(both) == as_set(a) & as_set(b)
    assert as_set(rest) == as_set(a) - as_set(b)


@given(st.lists(st.tuples(st.integers(0, LIMIT), st.none() | st.integers(0, LIMIT)), max_size=8), st.integers(0, LIMIT))
def test_close(items: list[tuple[int, int | None]], length: int) -> None:
    closed = rg.close(items, length)
    assert is_canonical(closed)
    assert as_set(closed) == {p for s, e in items for p in range(s, LIMIT if e is None else e) if p < length}
