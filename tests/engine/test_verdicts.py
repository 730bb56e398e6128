"""The socket between the engine's parent and its worker process: commits, discards, losses. A real socket and store."""

from __future__ import annotations

import asyncio
import resource
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import pytest_asyncio
import torch

from lenspool.errors import CacheFull, EngineFailed
from lenspool_cache import Run, Store
from lenspool_worker.batch import Slice, StepPlan
from lenspool_worker.instrument import SPEC, Instrument
from lenspool_worker.parallel import Place
from lenspool_worker.sink import Sink
from lenspool_worker.taps import Taps
from lenspool_worker.verdicts import Verdicts

HOOK, OTHER = "blocks.0.hook_resid_post", "ln_final.hook_out"
VALUES = torch.arange(40.0).reshape(10, 4)


class Pair:
    """Both ends in one process."""

    def __init__(self, verdicts: Verdicts, instrument: Instrument, taps: Taps, sink: Sink, store: Store) -> None:
        self.verdicts, self.instrument, self.taps, self.sink, self.store = verdicts, instrument, taps, sink, store

    def step(
        self,
        tag: str,
        captures: list[Any],
        interventions: list[Any] | None = None,
        values: torch.Tensor = VALUES,
    ) -> None:
        """One step of one request, over rows 0..9, as the runner would have it."""
        spec = {"tag": tag, "captures": captures, "interventions": interventions or []}
        new = SimpleNamespace(req_id=f"{tag}-x", sampling_params=SimpleNamespace(extra_args={SPEC: spec}))
        output = SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=[new], preempted_req_ids=None)
        self.instrument.schedule(output)
        self.instrument.plan([f"{tag}-x"], [0], [10], torch.arange(10))
        for site in range(2):
            self.taps.plain(values.clone(), site)
        self.instrument.finish(None, None)


@pytest_asyncio.fixture(loop_scope="session")
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    verdicts, taps = Verdicts(), Taps()
    await verdicts.open()
    taps.site(HOOK, 4), taps.site(OTHER, 4), taps.site("unembed.hook_out", 16)
    with Store(tmp_path / "store") as store:
        instrument = Instrument(taps, torch.device("cpu"))
        instrument.connect(store)
        orphaned = threading.Event()
        sink = await asyncio.to_thread(Sink, verdicts.path, instrument, store, orphaned.set)
        await verdicts.connected()
        yield Pair(verdicts, instrument, taps, sink, store)
        assert not orphaned.is_set() or verdicts.lost
        await verdicts.close()
        assert await asyncio.to_thread(orphaned.wait, 5)


def commit(captures: list[Any], length: int, **entries: Any) -> dict[str, Any]:
    return {"op": "commit", "length": length, "captures": captures, "run": {"v": 1}, "entries": entries}


async def test_commit_stores_the_rows_and_the_generation(pair: Pair) -> None:
    captures = [[[HOOK, OTHER], [[2, 4], [8, None]]]]
    pair.step("a#1", captures)
    assert pair.instrument.stats()["live"] == 1
    answer = await pair.verdicts.send("a#1", commit(captures, 9, generation={"token_ids": [7], "text": "ü"}))
    assert answer["rows"] == 6
    got = pair.store.rows(Run({"v": 1}), OTHER, [(2, 4), (8, 9)])
    assert np.array_equal(got, VALUES[[2, 3, 8]].numpy())
    document = bytes(
        pair.store.rows(Run({"v": 1}), "generation", pair.store.covered(Run({"v": 1}), ["generation"])["generation"])
    )
    assert document.decode("utf-8").startswith('{"token_ids": [7]')
    stats = pair.instrument.stats()
    assert stats["live"] == stats["held_bytes"] == 0


async def test_a_hook_in_two_groups_keeps_the_rows_of_both(pair: Pair) -> None:
    captures = [[[HOOK], [[0, 2]]], [[HOOK, OTHER], [[1, 3], [7, 9]]]]
    pair.step("a#1", captures)
    answer = await pair.verdicts.send("a#1", commit(captures, 10))
    assert answer["rows"] == 5 + 4
    assert pair.store.covered(Run({"v": 1}), [HOOK, OTHER]) == {HOOK: [(0, 3), (7, 9)], OTHER: [(1, 3), (7, 9)]}


async def test_missing_rows_fail_the_job_and_store_nothing(pair: Pair) -> None:
    captures = [[[HOOK], [[0, 10]]]]
    pair.step("a#1", captures)
    with pytest.raises(EngineFailed, match=rf"rows are missing: {HOOK} has no rows at 2 positions: \[10, 11\]"):
        await pair.verdicts.send("a#1", commit([[[HOOK], [[0, None]]]], 12, generation={}))
    assert pair.store.covered(Run({"v": 1}), [HOOK, "generation"]) == {}


async def test_a_wrong_spec_fails_its_own_job_only(pair: Pair) -> None:
    captures = [[[HOOK], [[0, 10]]]]
    pair.step("bad#1", captures, [{"hook": HOOK, "op": "add", "value": {"array": "0" * 64}, "ranges": [[0, 1]]}])
    pair.step("good#2", captures)
    with pytest.raises(EngineFailed, match="KeyError"):
        await pair.verdicts.send("bad#1", commit(captures, 10))
    assert (await pair.verdicts.send("good#2", commit(captures, 10)))["rows"] == 10


async def test_discard_before_and_after_the_request_arrives(pair: Pair) -> None:
    captures = [[[HOOK], [[0, 10]]]]
    pair.step("late#1", captures)
    assert (await pair.verdicts.send("late#1", {"op": "discard"}))["rows"] == 0
    assert (await pair.verdicts.send("early#2", {"op": "discard"}))["rows"] == 0
    pair.step("early#2", captures)
    assert pair.instrument.stats()["live"] == 0
    with pytest.raises(EngineFailed, match="never saw"):
        await pair.verdicts.send("early#2", commit(captures, 10))


async def test_many_verdicts_at_once_each_get_their_own_answer(pair: Pair) -> None:
    for i in range(50):
        pair.step(f"a#{i}", [[[HOOK], [[0, 1 + i % 10]]]])
    futures = [pair.verdicts.send(f"a#{i}", commit([[[HOOK], [[0, 1 + i % 10]]]], 10)) for i in range(50)]
    assert [answer["rows"] for answer in await asyncio.gather(*futures)] == [1 + i % 10 for i in range(50)]


@pytest.fixture
def no_room() -> Iterator[Callable[[], None]]:
    """No file of this process grows beyond 1 MB, until the function that it is is called."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


async def test_a_store_without_room_fails_typed_and_the_next_works(pair: Pair, no_room: Callable[[], None]) -> None:
    captures = [[[HOOK], [[0, 10]]]]
    large = torch.ones(10, 2**18)
    pair.step("a#1", captures, values=large)
    pair.step("b#2", captures, values=large)
    with pytest.raises(CacheFull):
        await pair.verdicts.send("a#1", commit(captures, 10))
    assert pair.store.covered(Run({"v": 1}), [HOOK]) == {}
    assert pair.instrument.stats()["held_bytes"] == 10 * 2**20
    no_room()
    assert (await pair.verdicts.send("b#2", commit(captures, 10)))["rows"] == 10


async def test_rows_of_bfloat16_stay_bfloat16(pair: Pair) -> None:
    captures = [[[HOOK], [[0, 10]]]]
    pair.step("a#1", captures)
    job = pair.instrument._jobs["a#1"]
    job._chunks.clear()
    pair.taps.plan = StepPlan({0: [Slice(0, 10, 0, job)]})
    pair.taps.plain(VALUES.bfloat16(), 0)
    pair.taps.plan = None
    await pair.verdicts.send("a#1", commit(captures, 10))
    got = pair.store.rows(Run({"v": 1}), HOOK, [(0, 10)])
    assert got.dtype == ml_dtypes.bfloat16 and np.array_equal(got.astype(np.float32), VALUES.numpy())


async def test_what_waits_fails_at_once_when_the_other_end_goes(pair: Pair) -> None:
    waiting = pair.verdicts.send("never#1", {"op": "discard"})
    await waiting
    hanging = pair.verdicts.send("hanging#2", {"op": "discard"}, ranks=[])
    pair.sink._socket.shutdown(2)
    with pytest.raises(EngineFailed) as raised:
        await asyncio.wait_for(hanging, 5)
    assert raised.value.requeue and raised.value.retryable and pair.verdicts.lost  # type: ignore[attr-defined]
    with pytest.raises(EngineFailed):
        await pair.verdicts.send("later#3", {"op": "discard"})


class Two:
    """A model in two stages: each with its own instrument, sink and hook; one parent."""

    def __init__(self, verdicts: Verdicts, stages: list[Pair], sinks: list[Sink], store: Store) -> None:
        self.verdicts, self.stages, self.sinks, self.store = verdicts, stages, sinks, store

    def step(self, tag: str, captures: list[Any], interventions: list[Any] | None = None) -> None:
        for stage in self.stages:
            stage.step(tag, captures, interventions)


@pytest_asyncio.fixture(loop_scope="session")
async def two(tmp_path: Path) -> AsyncIterator[Two]:
    verdicts = Verdicts(2)
    await verdicts.open()
    ended = [threading.Event(), threading.Event()]
    with Store(tmp_path / "store") as store, Store(tmp_path / "store") as other:
        stages = []
        for rank, (name, opened) in enumerate(((HOOK, store), (OTHER, other))):
            assert not verdicts._connected.is_set()
            taps = Taps()
            taps.site(name, 4), taps.site(f"blocks.{rank}.hook_resid_mid", 4)
            instrument = Instrument(taps, torch.device("cpu"), place=Place(first=rank == 0, last=rank == 1))
            instrument.connect(opened)
            sink = await asyncio.to_thread(Sink, verdicts.path, instrument, opened, ended[rank].set, rank)
            stages.append(Pair(verdicts, instrument, taps, sink, opened))
        await verdicts.connected()
        yield Two(verdicts, stages, [stage.sink for stage in stages], store)
        await verdicts.close()
        for event in ended:
            assert await asyncio.to_thread(event.wait, 5)


async def test_each_stage_stores_its_own_rows(two: Two) -> None:
    captures = [[[HOOK, OTHER], [[2, 4], [8, None]]]]
    two.step("a#1", captures, [{"hook": OTHER, "op": "scale", "factor": 2.0, "ranges": [[0, 10]]}])
    answer = await two.verdicts.send("a#1", commit(captures, 9))
    assert answer["rows"] == 6
    for name, factor in ((HOOK, 1), (OTHER, 2)):
        got = two.store.rows(Run({"v": 1}), name, [(2, 4), (8, 9)])
        assert np.array_equal(got, factor * VALUES[[2, 3, 8]].numpy())
    document = {"op": "store", "run": {"v": 1}, "entries": {"generation": {"token_ids": [7]}}}
    await two.verdicts.send("a", document, ranks=[0])
    assert "generation" in two.store.covered(Run({"v": 1}), ["generation"])
    stats = (await two.verdicts.send("stats#2", {"op": "stats"}))["stats"]
    assert stats["live"] == stats["held_bytes"] == 0 and stats["steps"] == 1 and stats["bytes_written"] >= 6 * 16


async def test_a_stage_that_fails_fails_the_job(two: Two) -> None:
    """What the other one has stored is right and may stay."""
    captures = [[[HOOK, OTHER], [[0, 10]]]]
    two.step("a#1", captures)
    two.stages[1].instrument._jobs["a#1"].fail("no room")
    with pytest.raises(EngineFailed, match="no room"):
        await two.verdicts.send("a#1", commit(captures, 10))
    await two.verdicts.send("later#2", {"op": "discard"})
    assert two.store.covered(Run({"v": 1}), [HOOK, OTHER]) == {HOOK: [(0, 10)]}
    assert (await two.verdicts.send("stats#3", {"op": "stats"}))["stats"]["live"] == 0
    assert not two.verdicts.lost


async def test_a_stage_that_is_gone_fails_all(two: Two) -> None:
    captures = [[[HOOK, OTHER], [[0, 10]]]]
    two.step("a#1", captures)
    two.sinks[1]._socket.shutdown(2)
    with pytest.raises(EngineFailed) as raised:
        await asyncio.wait_for(two.verdicts.send("a#1", commit(captures, 10)), 5)
    assert raised.value.requeue  # type: ignore[attr-defined]
    assert two.verdicts.lost
