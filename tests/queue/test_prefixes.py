"""Of jobs that come together and begin alike one computes what they share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from lenspool_cache import Run
from lenspool_cache import ranges as rg
from lenspool_worker import prefixes
from lenspool_worker.prefixes import Missing, Prefixes

HOOK, OTHER, PATTERN = "blocks.0.hook_resid_post", "blocks.1.hook_resid_post", "blocks.0.attn.hook_pattern"
SHARED = list(range(400))


def run_of(tokens: Sequence[int], edits: Sequence[dict[str, Any]] = ()) -> Run:
    document = {"v": 1, "context": {"model": "m"}, "tokens": list(tokens), "interventions": list(edits)}
    return Run({**document, "sampling": None})


class Pool:
    """Jobs whose engine only counts: the positions that each had to run."""

    def __init__(self) -> None:
        self.prefixes = Prefixes()
        self.stored: list[tuple[Run, Missing]] = []
        self.ran: list[int] = []
        self.go = asyncio.Event()
        self.at_once = self.most = 0

    def missing(self, run: Run, wanted: Missing) -> Missing:
        out = dict(wanted)
        for other, rows in self.stored:
            alike = next((i for i, (a, b) in enumerate(zip(*map(tokens, (run, other)), strict=False)) if a != b), 400)
            for name in out:
                out[name] = rg.subtract(out[name], rg.intersect(rows.get(name, ()), [(0, alike)]))
        return {name: ranges for name, ranges in out.items() if ranges}

    async def job(self, run: Run, wanted: Missing, *, fail: bool = False) -> None:
        async def look() -> Missing:
            await asyncio.sleep(0)
            return self.missing(run, wanted)

        missing = await self.prefixes.settled(run, await look(), look)
        if not missing:
            return
        with self.prefixes.running(run, missing):
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            try:
                await self.go.wait()
                for _ in range(9):  # turns that a run takes
                    await asyncio.sleep(0)
                if fail:
                    raise RuntimeError("it failed")
                self.ran.append(rg.count(next(iter(missing.values()))))
                self.stored.append((run, missing))
            finally:
                self.at_once -= 1

    async def all(self, *jobs: Any) -> list[Any]:
        tasks = [asyncio.ensure_future(job) for job in jobs]
        for _ in range(20):
            await asyncio.sleep(0)
        self.go.set()
        async with asyncio.timeout(10):
            return await asyncio.gather(*tasks, return_exceptions=True)


def tokens(run: Run) -> list[int]:
    return list(run.document["tokens"])


def tailed(number: int) -> Run:
    return run_of([*SHARED, *range(1000 * number, 1000 * number + 20)])


async def test_one_leads_and_the_others_wait() -> None:
    pool = Pool()
    await pool.all(*(pool.job(tailed(n), {HOOK: [(0, 420)]}) for n in range(1, 201)))
    assert pool.ran == [420] + [20] * 199
    assert pool.most == 199, "all of them at once behind the first"
    assert not pool.prefixes._running


async def test_a_leader_that_fails_is_followed_by_another() -> None:
    pool = Pool()
    jobs = [pool.job(tailed(n), {HOOK: [(0, 420)]}, fail=n < 3) for n in range(1, 6)]
    results = await pool.all(*jobs)
    assert [isinstance(r, RuntimeError) for r in results] == [True, True, False, False, False]
    assert sorted(pool.ran) == [20, 20, 420]


async def test_rows_of_the_end_wait_for_keys_and_values() -> None:
    """They need no stored row of the prefix, but its keys and values; what was computed before needs no wait."""
    pool = Pool()
    await pool.all(*(pool.job(tailed(n), {HOOK: [(419, 420)]}) for n in range(1, 6)))
    assert pool.most == 4
    pool.most = 0
    pool.go.clear()
    await pool.all(*(pool.job(tailed(n), {HOOK: [(419, 420)]}) for n in range(6, 11)))
    assert pool.most == 5


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((tailed(1), {HOOK: [(0, 420)]}), (run_of([7, *SHARED]), {HOOK: [(0, 401)]})),  # another prefix
        ((tailed(1), {HOOK: [(0, 420)]}), (tailed(2), {OTHER: [(0, 420)]})),  # rows that the first does not bring
        ((tailed(1), {HOOK: [(0, 420)]}), (tailed(2), {PATTERN: [(0, 420)]})),  # needs all keys
        ((tailed(1), {HOOK: [(0, 420)]}), (run_of([*SHARED[:64], *range(5000, 5500)]), {HOOK: [(0, 564)]})),  # little
        (
            (tailed(1), {HOOK: [(0, 420)]}),
            (run_of(SHARED, [{"hook": HOOK, "op": "zero", "ranges": [[0, 400]]}]), {HOOK: [(0, 400)]}),
        ),
    ],
)
async def test_nobody_waits_for_nothing(first: tuple[Run, Missing], second: tuple[Run, Missing]) -> None:
    pool = Pool()
    await pool.all(pool.job(*first), pool.job(*second))
    assert pool.most == 2


async def test_a_wait_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "WAIT_S", 0.05)
    pool = Pool()
    jobs = [asyncio.ensure_future(pool.job(tailed(n), {HOOK: [(0, 420)]})) for n in (1, 2)]
    async with asyncio.timeout(10):
        while pool.at_once < 2:
            await asyncio.sleep(0.01)
        pool.go.set()
        await asyncio.gather(*jobs)
    assert pool.ran == [420, 420]
