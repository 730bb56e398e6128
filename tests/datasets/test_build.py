"""The job: whatever happens to it, the same dataset comes out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lenspool import Dataset, InvalidJob, PoolUnavailable, WorkerLost, add, at
from lenspool.datasets import claims
from lenspool.datasets.build import Build
from lenspool.datasets.folder import Folder
from lenspool.job import Request
from lenspool.readouts import norm
from lenspool.testing import FakePool
from lenspool_cache import Policy, Store, collect
from tests.datasets.conftest import HOOKS, numbered

ROWS = numbered(300)


async def test_rows_are_those_of_captures_and_keep_their_columns(pool: FakePool) -> None:
    client = pool.client()
    edit = add("resid_post.0", [1.0] * 16, positions=at("row"))
    dataset = await client.dataset("edited", ROWS[:5], [*HOOKS, norm("z.0")], positions=[0, -1], interventions=edit)
    for i, example in enumerate(dataset):
        same = await client.capture(ROWS[i]["text"], [*HOOKS, norm("z.0")], positions=[0, -1], interventions=edit)
        assert list(example) == list(same) and example.positions.tolist() == same.positions.tolist()
        assert all(example[name].tobytes() == same[name].tobytes() for name in same)
        assert example.columns == [{"label": i % 2}] and example.rows == [(i, 0, len(same.token_ids))]
    assert (await client.open_dataset("edited")).hash == dataset.hash
    assert dataset[-1].token_ids == dataset[4].token_ids
    with pytest.raises(IndexError):
        dataset[5]
    assert [example.rows[0][0] for example in dataset[-2:]] == [3, 4] and dataset[np.int64(1)].rows[0][0] == 1
    for wrong, error in (("resid_post.0", TypeError), (1.0, TypeError)):
        with pytest.raises(error):
            dataset[wrong]  # type: ignore[call-overload]
    with pytest.raises(InvalidJob, match=r"unknown hook 'nope'.*allowed: blocks\.0"):
        dataset.statistics("nope")


async def test_failures_are_told_by_row_and_stop_nothing(pool: FakePool) -> None:
    rows = [*ROWS[:9], {"text": "", "label": 1}, {"text": "x" * 2000, "label": 0}, {"text": None, "label": 0}]
    dataset = await pool.client().dataset("some", rows, HOOKS, chunk=4)
    assert len(dataset) == 9 and dataset.n_rows == 12 and "3 rows failed" in repr(dataset)
    failures = list(dataset.failures())
    assert [f["row"] for f in failures] == [9, 10, 11] and {f["error"] for f in failures} == {"InvalidJob"}
    assert "2000 tokens" in failures[1]["message"] and dataset.of_row(10) == []
    assert [e.rows[0][0] for e in dataset.of_row(8)] == [8]


async def test_a_wrong_call_is_refused_whole(pool: FakePool, tmp_path: Path) -> None:
    client = pool.client()
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("hooks", {"hooks": []}),
        ("hooks", {"hooks": "no.such"}),
        ("name", {"name": "../x"}),
        ("chunk", {"chunk": 0}),
        ("interventions[0].value", {"interventions": add("resid_post.0", [1.0] * 3)}),
        ("positions", {"positions": 2000}),
    ]
    for field, options in wrong:
        with pytest.raises(InvalidJob) as caught:
            await client.dataset(**{"name": "x", "rows": ROWS, "hooks": HOOKS, **options})
        assert caught.value.field == field
    with pytest.raises(TypeError, match="did you mean 'context'"):
        await client.dataset("x", ROWS, HOOKS, contexts=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidJob, match="does not reach"):
        await FakePool().client().dataset("x", ROWS, HOOKS, folder=tmp_path / "x")


async def test_another_call_under_the_same_name_is_refused(pool: FakePool) -> None:
    client = pool.client()
    first = await client.dataset("one", ROWS[:40], HOOKS, chunk=16)
    assert (await client.dataset("one", iter(ROWS[:40]), HOOKS, chunk=16)).hash == first.hash
    for rows, hooks, field in (
        (ROWS[:40], HOOKS[:1], "hooks"),
        (ROWS[1:41], HOOKS, "rows"),
        (ROWS[:41], HOOKS, "rows"),
        (ROWS[:32], HOOKS, "rows"),
    ):
        with pytest.raises(InvalidJob) as caught:
            await client.dataset("one", rows, hooks, chunk=16)
        assert caught.value.field == field
    with pytest.raises(InvalidJob, match="no dataset"):
        Dataset(pool.store.path / "datasets" / "other")  # type: ignore[union-attr]


class _Flaky(FakePool):
    """Answers fail in some way, as long as `error` is set."""

    error: Exception | None = None
    every = 7

    async def find(self, request: Any, *, ran: bool) -> Any:
        if self.error is not None and len(self.requests) % self.every == self.every - 1:
            self.requests.append(request)
            raise self.error
        return await super().find(request, ran=ran)


async def test_errors_that_may_pass_are_tried_again_and_others_end_the_call(tmp_path: Path) -> None:
    pool = _Flaky(store=tmp_path / "store")
    expected = (await FakePool(store=tmp_path / "other").client().dataset("a", ROWS[:64], HOOKS, chunk=8)).hash
    pool.error = WorkerLost(3)
    lossy = await pool.client().dataset("a", ROWS[:64], HOOKS, chunk=8)
    failures = list(lossy.failures())
    assert failures and all(f["passing"] and f["error"] == "WorkerLost" for f in failures)
    pool.error = PoolUnavailable("gone")
    with pytest.raises(PoolUnavailable):
        await pool.client().dataset("a", ROWS[:64], HOOKS, chunk=8)
    pool.error = None
    whole = await pool.client().dataset("a", ROWS[:64], HOOKS, chunk=8)
    assert not list(whole.failures()) and whole.hash == expected


async def test_memory_of_rows_and_captures_is_bounded(pool: FakePool) -> None:
    drawn, most = 0, 0

    def rows() -> Iterator[str]:
        nonlocal drawn, most
        for i in range(400):
            drawn += 1
            most = max(most, drawn - len(Folder(place).done()) * 10)
            yield f"text {i}"

    place = pool.store.path / "datasets" / "bounded"  # type: ignore[union-attr]
    await pool.client().dataset("bounded", rows(), "embed", chunk=10, concurrency=4)
    assert most <= 40  # three chunks that are open, and one that is read


async def test_rows_that_others_lend_survive_eviction_whenever_it_comes(
    pool: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it comes between an answer and its pin: what went is asked for again."""
    client = pool.client()
    long = "a prompt that other prompts are the beginning of, and that goes on"
    await client.capture(long, HOOKS)
    first, tried = Build._answer, list[str]()

    async def answer(self: Build, request: Request) -> set[bytes]:
        lent = await first(self, request)
        tried.append(str(len(request.tokens)))
        if len(tried) == 1:
            collected()
        return lent

    def collected() -> None:
        assert pool.store is not None
        pool.store._writers.close()  # packs are sealed
        collect(pool.store, Policy(max_bytes=0))

    monkeypatch.setattr(Build, "_answer", answer)
    dataset = await client.dataset("lent", [long[:40], long[:30]], HOOKS)
    collected()
    assert [len(example["resid_post.0"]) for example in dataset] == [40, 30]
    assert len(tried) > 2


async def test_what_it_has_survives_eviction_until_it_is_released(pool: FakePool) -> None:
    client, store = pool.client(), pool.store
    assert store is not None
    dataset = await client.dataset("kept", ROWS[:30], HOOKS, chunk=8)
    others = [await client.capture([i, i + 1, i + 2], HOOKS) for i in range(40)]
    store.close()  # packs are sealed
    again = FakePool(store=store.path)
    assert again.store is not None
    collect(again.store, Policy(max_bytes=1))
    assert all(len(example[name]) for example in dataset for name in example)
    assert not again.store.covered(_run(again, others[0].token_ids), [others[0].hooks[0]])
    assert dataset.release() == 4 and not again.store.pins.all()
    collect(again.store, Policy(max_bytes=1))
    with pytest.raises(KeyError):
        dataset[0][dataset.hooks[0]]


def _run(pool: FakePool, tokens: list[int]) -> Any:
    from lenspool.job import Request

    return Request(pool.card, tokens, [], [(0, len(tokens))], [], {}).run


_DRIVER = """
import asyncio, errno, fcntl, os, sys
from lenspool.datasets import claims
from lenspool.testing import FakePool
from tests.datasets.conftest import HOOKS, numbered

def no_locks(fd, mode):
    raise OSError(errno.ENOLCK, "No locks available")

if sys.argv[3] == "hosts":  # a host of its own, and a shared folder that has no locks
    fcntl.flock = no_locks
    claims._host = lambda: f"host-{os.getpid()}"
    claims.BEAT_S, claims.LEASE_S = 0.05, 0.5

async def main():
    dataset = await FakePool(store=sys.argv[1]).client().dataset("killed", numbered(int(sys.argv[2])), HOOKS, chunk=10)
    print(dataset.hash)

asyncio.run(main())
"""


def _driver(store: Path, rows: int, where: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _DRIVER, str(store), str(rows), where]
    env = {**os.environ, **({"LENSPOOL_NETWORK_STORE": "1"} if where == "hosts" else {})}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2], env=env)


@contextlib.contextmanager
def _ended(drivers: list[subprocess.Popen[str]]) -> Iterator[None]:
    try:
        yield
    finally:
        for driver in drivers:
            driver.kill()
            driver.wait()


async def _until(parts: Path, count: int, driver: subprocess.Popen[str]) -> None:
    while len(list(parts.glob("*.jsonl"))) < count:
        assert driver.poll() is None
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("where", ["processes", "hosts"])
async def test_drivers_that_share_the_work_and_are_killed_make_the_same_dataset(tmp_path: Path, where: str) -> None:
    expected = (await FakePool(store=tmp_path / "whole").client().dataset("killed", ROWS, HOOKS, chunk=10)).hash
    parts = tmp_path / "store" / "datasets" / "killed" / "parts"
    chosen = sorted(random.Random(5).sample(range(2, 24), 3))
    drivers = [_driver(tmp_path / "store", 300, where) for _ in range(2)]
    with _ended(drivers):
        async with asyncio.timeout(120):
            for kill, count in enumerate(chosen):
                if kill == 2:
                    drivers += [_driver(tmp_path / "store", 300, where) for _ in range(2)]
                await _until(parts, count, drivers[kill])
                os.kill(drivers[kill].pid, signal.SIGKILL)
                drivers[kill].wait()
                assert len(list(parts.glob("*.jsonl"))) < 30
            answer, _ = await asyncio.to_thread(drivers[3].communicate, timeout=60)
    assert answer.strip() == expected
    dataset = Dataset(parts.parent)
    assert len(dataset) == 300 and all(len(dataset.matrix(i, HOOKS[1])) for i in range(300))
    pins = Store(tmp_path / "store", read_only=True).pins.all()
    assert len(set().union(*pins.values())) == 300


async def test_rows_that_come_once_go_on_after_a_driver_of_another_host(
    pool: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can tell that it is dead but by its pulse; a chunk that it had must not go by meanwhile."""
    monkeypatch.setattr(claims, "LEASE_S", 0.3)
    expected = (await pool.client().dataset("whole", ROWS[:40], HOOKS, chunk=10)).hash
    folder = pool.store.path / "datasets" / "once" / "claims"  # type: ignore[union-attr]
    folder.mkdir(parents=True)
    (folder / "00000001").write_text("driver-dead")
    (folder / "driver-dead").write_text("000000000007 elsewhere 1 2\n")
    async with asyncio.timeout(30):
        dataset = await pool.client().dataset("once", iter(ROWS[:40]), HOOKS, chunk=10)
    assert dataset.hash == expected and not list(folder.iterdir())


def test_a_claim_is_had_by_one_and_outlives_neither_its_driver_nor_a_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "BEAT_S", 0.02)
    monkeypatch.setattr(claims, "LEASE_S", 0.4)
    one, two = claims.Claims(tmp_path), claims.Claims(tmp_path)
    one.open()
    two.open()
    assert one.take(3) and not two.take(3) and not two.free(3) and two.take(4)
    one.release(3)
    assert two.take(3)
    two.release(3)
    assert one.take(3)
    end = time.monotonic() + 1.0
    while time.monotonic() < end:  # it lives, and so nobody else gets it
        assert not two.take(3)
    (tmp_path / one.driver).rename(tmp_path / "kept")
    assert two.take(3), "a driver without a pulse has ended"
    one.release(3)
    assert not one.take(3), "it is the other's now"
    one.close()
    two.close()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_dataset_that_is_finished_while_a_chunk_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes the manifest last, it is of the parts that there are."""
    folder = Folder(tmp_path / "d")
    folder.begin({"hooks": ["h"]}, {"name": "d"})
    failed = {"row": 0, "error": "WorkerLost", "message": "", "passing": True}
    whole = {"tokens": [1, 2], "rows": [[0, 0, 2]]}

    def put(line: dict[str, Any], passing: int) -> None:
        header = {"chunk": 0, "rows": 1, "digest": "x", "failures": passing, "passing": passing}
        Folder(folder.path).put(0, header, [line])

    put(failed, 1)
    finish, interrupted = folder._finish, []

    def slow(chunks: int) -> dict[str, Any]:
        manifest = finish(chunks)
        if not interrupted:
            interrupted.append(manifest)
            put(whole, 0)
            Folder(folder.path).finish(1)
            (folder.path / "manifest.json").write_text(json.dumps(manifest))  # the slow one writes after the other
        return manifest

    monkeypatch.setattr(folder, "_finish", slow)
    folder.finish(1)
    manifest = folder.manifest()
    assert manifest is not None and manifest["failures"] == 0 and manifest["hash"] != interrupted[0]["hash"]
    assert len(np.load(folder.index_path)) == 1
