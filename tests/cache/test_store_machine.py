"""Any order of puts, reads, evictions, pins, compactions, crashes and lost indexes, against a dict."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from store_samples import a_run, rows_of, same_bits

from lenspool_cache import Policy, Store, collect, evict, verify
from lenspool_cache import ranges as rg

LENGTH = 24
runs = st.integers(0, 2)
names = st.sampled_from(["h", "g", "wide"])
spans = st.tuples(st.integers(0, LENGTH - 1), st.integers(1, LENGTH)).map(lambda s: (s[0], min(s[0] + s[1], LENGTH)))


def full(number: int, name: str) -> np.ndarray:
    width, dtype = {"h": (16, "float32"), "g": (16, "bfloat16"), "wide": (300, "float32")}[name]
    return rows_of(10 * number + len(name), LENGTH, width, dtype)


class Machine(RuleBasedStateMachine):
    """The model: of each entry the positions that are stored, and which runs are pinned."""

    network = False

    def __init__(self) -> None:
        super().__init__()
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self.temporary.name) / "store"
        self.store = Store(self.folder, network=self.network)
        self.store.policy = Policy(max_bytes=1 << 30)
        self.have: dict[tuple[int, str], set[int]] = {}
        self.pinned: set[int] = set()

    def teardown(self) -> None:
        assert self.store.stats()["corrupt"] == 0
        self.store.close()
        self.temporary.cleanup()

    def note(self, number: int, parts: dict[str, tuple[int, int]]) -> None:
        for name, span in parts.items():
            self.have.setdefault((number, name), set()).update(range(*span))

    @rule(number=runs, parts=st.dictionaries(names, spans, min_size=1))
    def put(self, number: int, parts: dict[str, tuple[int, int]]) -> None:
        self.store.put(a_run(number), {n: [(s, full(number, n)[s:e])] for n, (s, e) in parts.items()})
        self.note(number, parts)

    @rule(number=runs, parts=st.dictionaries(names, spans, min_size=1))
    def put_and_die(self, number: int, parts: dict[str, tuple[int, int]]) -> None:
        """A forked writer that ends without closing anything."""
        child = os.fork()
        if child == 0:
            status = 1
            try:
                self.store.put(a_run(number), {n: [(s, full(number, n)[s:e])] for n, (s, e) in parts.items()})
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        self.store._index.follow(now=True)  # at once, not within a second
        self.note(number, parts)

    @rule(number=runs, name=names, span=spans)
    def get(self, number: int, name: str, span: tuple[int, int]) -> None:
        if set(range(*span)) <= self.have.get((number, name), set()):
            rows = self.store.rows(a_run(number), name, [span])
            assert same_bits(rows, full(number, name)[slice(*span)])
        else:
            with pytest.raises(KeyError):
                self.store.rows(a_run(number), name, [span])

    @rule(number=runs, name=names)
    def evict_entry(self, number: int, name: str) -> None:
        evict(self.store, [a_run(number).entry(name)])
        self.have.pop((number, name), None)

    @rule(number=runs)
    def pin(self, number: int) -> None:
        self.store.pins.add(f"p{number}", [a_run(number).key])
        self.pinned.add(number)

    @rule(number=runs)
    def unpin(self, number: int) -> None:
        assert self.store.pins.remove(f"p{number}") == (number in self.pinned)
        self.pinned.discard(number)

    @rule()
    def compact(self) -> None:
        assert collect(self.store).evicted == 0

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = Store(self.folder, network=self.network)

    @rule()
    def lose_the_index(self) -> None:
        for path in self.folder.glob("index.sqlite*"):
            path.unlink()

    @rule()
    def evict_all(self) -> None:
        self.reopen()
        collect(self.store, Policy(max_bytes=0))
        self.have = {key: rows for key, rows in self.have.items() if key[0] in self.pinned}

    @invariant()
    def agrees(self) -> None:
        for number in range(3):
            want = {n: rg.from_positions(rows) for (m, n), rows in self.have.items() if m == number}
            assert self.store.covered(a_run(number), ["h", "g", "wide"]) == want

    @rule()
    def sound(self) -> None:
        report = verify(self.store)
        assert (report.damaged, report.stale, report.unindexed, report.unfinished) == ([], 0, 0, 0)


class NetworkMachine(Machine):
    network = True


TestMachine = Machine.TestCase
TestNetworkMachine = NetworkMachine.TestCase
TestMachine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestNetworkMachine.settings = settings(max_examples=8, stateful_step_count=25, deadline=None)
