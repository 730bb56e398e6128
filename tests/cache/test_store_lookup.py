"""Segments, partial ranges, equal puts, and what counts as the same run."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_samples import a_run, pack_files, rows_of, same_bits

from lenspool_cache import Run, Store
from lenspool_cache import ranges as rg
from lenspool_cache.writing import cut


def test_partial_ranges_from_several_segments(store: Store) -> None:
    full = rows_of(1, 100)
    store.put(a_run(), {"h": [(0, full[:10]), (30, full[30:60])]})
    store.put(a_run(), {"h": [(10, full[10:25])], "other": [(0, full[:1])]})
    assert store.covered(a_run(), ["h", "absent"]) == {"h": [(0, 25), (30, 60)]}
    assert [s.range for s in store.lookup(a_run(), ["h"])["h"]] == [(0, 10), (10, 25), (30, 60)]
    for wanted in ([(0, 25)], [(5, 15)], [(24, 25), (30, 31), (59, 60)], [(0, 25), (30, 60)], [(40, 41)]):
        assert same_bits(store.rows(a_run(), "h", wanted), full[rg.positions(wanted)])


@pytest.mark.parametrize("wanted", [[(25, 30)], [(0, 26)], [(59, 61)]])
def test_missing_positions(store: Store, wanted: list[tuple[int, int]]) -> None:
    store.put(a_run(), {"h": [(0, rows_of(1, 25)), (30, rows_of(2, 30))]})
    with pytest.raises(KeyError):
        store.rows(a_run(), "h", wanted)
    with pytest.raises(KeyError):
        store.rows(a_run(1), "h", [(0, 1)])


def test_no_positions(store: Store) -> None:
    store.put(a_run(), {"h": [(0, rows_of(1, 25))]})
    assert store.rows(a_run(), "h", []).shape == (0, 64)


numbers = itertools.count()
spans = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 15)), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(puts=st.lists(spans, min_size=1, max_size=3), wanted=spans)
def test_any_segments_give_the_right_rows(
    store: Store, puts: list[list[tuple[int, int]]], wanted: list[tuple[int, int]]
) -> None:
    full, run = rows_of(1, 60, 8), a_run(next(numbers))
    for put in puts:
        store.put(run, {"h": [(start, full[start : start + n]) for start, n in put]})
    have = rg.merge((start, start + n) for put in puts for start, n in put)
    assert store.covered(run, ["h"])["h"] == have
    asked = rg.merge((start, start + n) for start, n in wanted)
    if rg.subtract(asked, have):
        with pytest.raises(KeyError):
            store.rows(run, "h", asked)
    else:
        assert same_bits(store.rows(run, "h", asked), full[rg.positions(asked)])


def test_equal_puts_keep_the_first_rows(store: Store, folder: Path) -> None:
    first, second = rows_of(1), rows_of(2)
    assert store.put(a_run(), {"h": [(0, first)]}) == first.nbytes
    before = store.lookup(a_run(), ["h"])
    assert store.put(a_run(), {"h": [(0, second)]}) == 0
    assert store.put(a_run(), {"h": [(4, second[:4])]}) == 0
    assert store.lookup(a_run(), ["h"]) == before
    assert same_bits(store.rows(a_run(), "h", [(0, 16)]), first)
    assert store.stats()["entries"] == 1


def test_overlapping_puts_store_only_what_is_new(store: Store) -> None:
    full = rows_of(1, 30)
    store.put(a_run(), {"h": [(0, full[:20])]})
    assert store.put(a_run(), {"h": [(10, full[10:])]}) == full[20:].nbytes
    assert same_bits(store.rows(a_run(), "h", [(0, 30)]), full)


def test_equal_rows_of_two_writers_at_once(folder: Path) -> None:
    """Both put before either sees the other: the answer has the rows once, with a rebuilt index too."""
    rows = rows_of(1)
    with Store(folder) as one, Store(folder) as two:
        places = [store._writers.write(a_run(), cut({"h": [(0, rows)]}, {"h": [(0, 16)]})) for store in (one, two)]
        one._index.insert(places[0])
        two._index.insert(places[1])
        for store in (one, two):
            assert [s.range for s in store.lookup(a_run(), ["h"])["h"]] == [(0, 16)]
        one._index.rebuild()
        assert [s.range for s in two.lookup(a_run(), ["h"])["h"]] == [(0, 16)]


def test_rows_of_two_writers_cut_in_different_ways(folder: Path) -> None:
    rows = rows_of(1)
    with Store(folder) as one, Store(folder) as two:
        whole = one._writers.write(a_run(), cut({"h": [(0, rows)]}, {"h": [(0, 16)]}))
        some = two._writers.write(a_run(), cut({"h": [(0, rows[:4]), (6, rows[6:9])]}, {"h": [(0, 16)]}))
        one._index.insert(some + whole)
        assert [s.range for s in two.lookup(a_run(), ["h"])["h"]] == [(0, 16)]


def test_runs_and_names_do_not_mix(store: Store) -> None:
    for number in range(20):
        store.put(a_run(number), {f"h{i}": [(0, rows_of(100 * number + i))] for i in range(5)})
    for number in range(20):
        found = store.lookup(a_run(number), ["h0", "h3", "nothing"])
        assert sorted(found) == ["h0", "h3"]
        for name, (segment,) in found.items():
            assert same_bits(store.read(segment), rows_of(100 * number + int(name[1:])))


def test_another_document_is_a_miss(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """A key that leads to rows of another document, as after a collision or a forged pack, is never answered."""
    store.put(a_run(), {"h": [(0, rows_of(1))]})
    other = Run({"v": 1, "tokens": [9]})
    other.__dict__["key"] = a_run().key
    assert other.entry("h") == a_run().entry("h")
    assert store.lookup(other, ["h"]) == {}
    assert "dropped" in caplog.text
    assert store.lookup(a_run(), ["h"]) == {}, "a bad entry is dropped for good"
    store.put(a_run(), {"h": [(0, rows_of(1))]})
    assert same_bits(store.rows(a_run(), "h", [(0, 16)]), rows_of(1))


def test_many_small_puts_are_few_files(folder: Path) -> None:
    rows = rows_of(1, 4, 512)
    with Store(folder) as store:
        for number in range(5000):
            store.put(a_run(number), {"h": [(0, rows + number)]})
        assert len(pack_files(folder)) <= 4
        assert store.stats()["entries"] == 5000
        assert int(store.stats()["disk_bytes"]) < 1.15 * 5000 * rows.nbytes
        for number in (0, 1, 2499, 4999):
            assert same_bits(store.rows(a_run(number), "h", [(0, 4)]), rows + number)


def test_more_packs_than_open_files(folder: Path) -> None:
    with Store(folder) as store:
        store._packs.limit = 3
        for width in range(1, 13):
            store.put(a_run(), {f"h{width}": [(0, rows_of(width, 4, width))]})
        for _ in range(2):
            for width in range(1, 13):
                assert same_bits(store.rows(a_run(), f"h{width}", [(0, 4)]), rows_of(width, 4, width))
        assert len(store._packs._open) == 3
