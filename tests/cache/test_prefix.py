"""Runs that begin alike lend each other rows, and no others do."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_samples import same_bits

from lenspool_cache import Policy, Run, Store, collect, evict, verify
from lenspool_cache import ranges as rg
from lenspool_cache.index import Block
from lenspool_cache.prefix import BLOCK, common
from lenspool_cache.writing import cut

WIDTH = 4
H, G, AHEAD = "hook_h", "blocks.1.hook_g|top_k(3).values", "unembed.hook_out|loss()"
PATTERN = "blocks.0.attn.hook_pattern"
REACH = {H: 0, G: 0, AHEAD: 1}
"""A loss follows from the next token, too; of other names nothing is known."""


def run_of(tokens: Sequence[int], edits: Sequence[dict[str, Any]] = (), context: str = "m", **more: Any) -> Run:
    document = {"v": 1, "context": {"model": context}, "tokens": list(tokens), "interventions": list(edits), **more}
    return Run({"sampling": None, **document})


def add(vector: str, *ranges: list[int | None]) -> dict[str, Any]:
    return {"hook": "h", "op": "add", "value": {"array": vector}, "ranges": list(ranges)}


def acts_at(edit: dict[str, Any], position: int) -> list[Any]:
    """What an edit does there, told position by position."""
    at = 0
    for low, high in edit["ranges"]:
        if low <= position and (high is None or position < high):
            own = "rows" in edit["value"]
            return [edit["hook"], edit["op"], edit["value"], at + position - low if own else None]
        at += 0 if high is None else high - low
    return []


def truth(run: Run, name: str, start: int, stop: int) -> np.ndarray:
    """Rows that follow from what a row may follow from, and from nothing else."""
    tokens, out = run.document["tokens"], []
    for position in range(start, stop):
        seen = [name, run.document["context"], tokens[: position + 1 + REACH.get(name, 10**6)]]
        seen += [[acts_at(e, p) for e in run.document["interventions"]] for p in range(position + 1)]
        seen = [[what for what in item if what] if isinstance(item, list) else item for item in seen]
        digest = hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).digest()
        out.append(np.frombuffer(digest[: 4 * WIDTH], np.int32))
    return np.array(out, np.int32).reshape(-1, WIDTH)


def put(store: Store, run: Run, name: str, start: int, stop: int) -> int:
    return store.put(run, {name: [(start, truth(run, name, start, stop))]})


LONG = list(range(100, 160))


def test_rows_of_a_shared_prefix_are_stored_once(store: Store) -> None:
    first, second = run_of(LONG), run_of([*LONG[:40], *range(20)])
    assert put(store, first, H, 0, 60) == 60 * 16
    assert store.missing(second, {H: [(0, 60)]}) == {H: [(40, 60)]}
    assert put(store, second, H, 0, 60) == 20 * 16, "to the token, not to the block"
    assert same_bits(store.rows(second, H, [(0, 60)]), truth(second, H, 0, 60))
    assert same_bits(store.rows(second, H, [(3, 5), (39, 41)]), truth(second, H, 0, 60)[[3, 4, 39, 40]])
    assert store.covered(second, [H]) == {H: [(40, 60)]}
    assert put(store, run_of(LONG[:50]), H, 0, 50) == 0


def test_what_is_not_known_to_follow_from_its_prefix_is_not_lent(store: Store) -> None:
    first, second = run_of(LONG), run_of([*LONG[:40], *range(20)])
    for name in (AHEAD, PATTERN):
        put(store, first, name, 0, 60)
    wanted = {AHEAD: [(0, 60)], PATTERN: [(0, 60)]}
    assert store.missing(second, wanted) == {AHEAD: [(39, 60)], PATTERN: [(0, 60)]}


@pytest.mark.parametrize(
    "other",
    [
        run_of(LONG, context="another"),
        run_of([1, *LONG[1:]]),
        run_of(LONG, [add("a", [0, None])]),
        run_of(LONG, [add("a", [15, 16])], sampling={"max_tokens": 3}),
        run_of(LONG[:BLOCK]),
        run_of(LONG, something="of a later version"),
    ],
)
def test_nothing_is_lent_to_what_begins_otherwise(store: Store, other: Run) -> None:
    put(store, run_of(LONG), H, BLOCK, 60)
    assert store.missing(other, {H: [(BLOCK, 60)]}) == {H: [(BLOCK, 60)]}


def test_edits_share_what_comes_before_them(store: Store) -> None:
    put(store, run_of(LONG), H, 0, 60)
    edited = run_of(LONG, [add("a", [20, 40])])
    assert store.missing(edited, {H: [(0, 60)]}) == {H: [(20, 60)]}
    put(store, edited, H, 20, 60)
    assert same_bits(store.rows(edited, H, [(0, 60)]), truth(edited, H, 0, 60))
    longer = run_of(LONG, [add("a", [20, None])])
    assert store.missing(longer, {H: [(0, 60)]}) == {H: [(40, 60)]}
    assert same_bits(store.rows(longer, H, [(10, 40)]), truth(longer, H, 10, 40))


def test_a_run_that_stands_alone_neither_takes_nor_gives(store: Store) -> None:
    plain, alone = run_of(LONG), run_of(LONG, reuse="none")
    put(store, plain, H, 0, 30)
    assert put(store, alone, H, 0, 60) == 60 * 16
    assert store.missing(plain, {H: [(0, 60)]}) == {H: [(30, 60)]}


def test_an_answer_stays_what_it_is(store: Store) -> None:
    """A run's own rows come first, then the oldest: later ones of others do not take their place."""
    one, other, third = run_of(LONG), run_of([*LONG, 2]), run_of([*LONG, 1])
    marked = truth(one, H, 0, 60) + 1
    store.put(one, {H: [(20, marked[20:60])]})
    pieces = cut({H: [(0, truth(other, H, 0, 60))]}, {H: [(0, 60)]})  # as by a writer that did not see the first yet
    places = store._writers.write(other, pieces)
    store._index.insert(places)
    assert same_bits(store.rows(one, H, [(19, 60)])[1:], marked[20:60])
    assert same_bits(store.rows(third, H, [(20, 60)]), marked[20:60])
    assert same_bits(store.rows(third, H, [(0, 20)]), truth(third, H, 0, 20))


def test_a_damaged_lender_is_a_miss(store: Store, folder: Path) -> None:
    put(store, run_of(LONG), H, 0, 60)
    reader = store._packs.get(store._packs.names()[0])
    with reader.path.open("r+b") as file:
        file.seek(reader.layout.documents_offset)
        file.write(b"[")
    taker = run_of([*LONG, 1])
    assert store.missing(taker, {H: [(0, 61)]}) == {H: [(0, 61)]}
    assert store.stats()["corrupt"] == 1


def test_an_index_that_names_a_wrong_lender_is_not_believed(store: Store) -> None:
    stranger, taker = run_of([9, *LONG[1:]]), run_of(LONG)
    put(store, stranger, H, 0, 60)
    (pack,) = store._packs.names()
    store._index._blocks = lambda places: [Block(taker.blocks[0], stranger.key, pack)]
    store._index.insert([])
    assert store.missing(taker, {H: [(0, 60)]}) == {H: [(0, 60)]}


def test_a_pinned_run_keeps_the_rows_that_others_lend_it(folder: Path) -> None:
    lender, taker = run_of(LONG), run_of([*LONG[:40], *range(20)])
    with Store(folder) as store:
        put(store, lender, H, 0, 60)
        put(store, taker, H, 0, 60)
        put(store, run_of(range(60)), H, 0, 60)
        store.pins.add("paper", [taker.key])
    with Store(folder) as store:
        assert collect(store, Policy(max_bytes=0)).evicted == 1
        assert same_bits(store.rows(taker, H, [(0, 60)]), truth(taker, H, 0, 60))


def test_a_lower_layer_lends_too(folder: Path, tmp_path: Path) -> None:
    taker = run_of([*LONG[:40], *range(20)])
    with Store(tmp_path / "lower") as lower:
        put(lower, run_of(LONG), H, 0, 60)
    with Store(folder, lower=[tmp_path / "lower"]) as store:
        assert store.missing(taker, {H: [(0, 60)]}) == {H: [(40, 60)]}
        assert put(store, taker, H, 0, 60) == 20 * 16
        assert same_bits(store.rows(taker, H, [(0, 60)]), truth(taker, H, 0, 60))


# -- against the definition

tokens_ = st.builds(
    lambda branches: [100 * i + b for i, b in enumerate(branches) for _ in range(8)],
    st.lists(st.integers(0, 1), min_size=1, max_size=8),
)
spans = st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda s: [s[0], s[0] + s[1]])
edits_ = st.lists(
    st.builds(
        lambda array, own, ranges: {
            "hook": "h",
            "op": "set",
            "value": {"array": array, **({"rows": [[0, 9]]} if own else {})},
            "ranges": [list(r) for r in rg.merge(ranges)],
        },
        st.sampled_from("ab"),
        st.booleans(),
        st.lists(spans, min_size=1, max_size=2),
    ),
    max_size=2,
)
runs_ = st.builds(run_of, tokens_, edits_)


@settings(max_examples=200, deadline=None)
@given(runs_, runs_)
def test_as_far_as_two_runs_are_alike_their_rows_are(a: Run, b: Run) -> None:
    alike, length = common(a.document, b.document), min(len(a.document["tokens"]), len(b.document["tokens"]))
    assert np.array_equal(truth(a, H, 0, alike), truth(b, H, 0, alike))
    assert common(b.document, a.document) == alike
    full = min(alike // BLOCK, len(a.blocks), len(b.blocks))
    assert a.blocks[:full] == b.blocks[:full]
    equal = sum(x == y for x, y in zip(a.blocks, b.blocks, strict=False)) * BLOCK
    assert np.array_equal(truth(a, H, 0, equal), truth(b, H, 0, equal)), "equal hashes, equal rows"
    assert len(set(a.blocks) | set(b.blocks)) == len(a.blocks) + len(b.blocks) - equal // BLOCK
    if a.document["interventions"] == b.document["interventions"] and alike < length:
        assert a.document["tokens"][alike] != b.document["tokens"][alike]


actions = st.lists(
    st.tuples(st.sampled_from(["put"] * 3 + ["evict", "compact", "lose", "reopen"]), runs_, spans, st.booleans()),
    min_size=3,
    max_size=14,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions)
def test_every_row_is_right_whatever_happened(tmp_path_factory: pytest.TempPathFactory, actions: list[Any]) -> None:
    """Puts, evictions, compactions and lost indexes in any order; then each run's every name is what it must be."""
    folder = tmp_path_factory.mktemp("prefix") / "store"
    store = Store(folder)
    have: list[tuple[Run, str, tuple[int, int]]] = []
    for action, run, (start, stop), two in actions:
        stop = min(stop, len(run.document["tokens"]))
        names = [H, AHEAD] if two else [G]
        if action == "put" and start < stop:
            store.put(run, {name: [(start, truth(run, name, start, stop))] for name in names})
            have += [(run, name, (start, stop)) for name in names]
        elif action == "evict":
            evict(store, [run.key])
            have = []  # others may have had rows from it
        elif action == "compact":
            store.close()
            store = Store(folder)
            collect(store)
        elif action == "lose":
            for path in folder.glob("index.sqlite*"):
                path.unlink()
        elif action == "reopen":
            store.close()
            store = Store(folder)
    for run, name, span in have:
        assert store.missing(run, {name: [span]}) == {}
    for _, run, _, _ in actions:
        for name in (H, G, AHEAD):
            length = len(run.document["tokens"])
            there = rg.subtract([(0, length)], store.missing(run, {name: [(0, length)]}).get(name, []))
            if there:
                expected = np.concatenate([truth(run, name, *span) for span in there])
                assert same_bits(store.rows(run, name, there), expected)
    report = verify(store)
    assert (report.damaged, report.stale, report.unindexed) == ([], 0, 0)
    store.close()
