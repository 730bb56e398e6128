"""The byte budget of the jobs in flight."""

from __future__ import annotations

import asyncio
import random

import pytest

from lenspool_worker.room import Room


class Jobs:
    def __init__(self, room: Room) -> None:
        self.room = room
        self.inside: list[str] = []
        self.order: list[str] = []

    def start(self, name: str, size: int) -> tuple[asyncio.Task[None], asyncio.Event]:
        done = asyncio.Event()

        async def run() -> None:
            async with self.room.take(size):
                self.inside.append(name)
                self.order.append(name)
                try:
                    await done.wait()
                finally:
                    self.inside.remove(name)

        return asyncio.create_task(run()), done


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_jobs_enter_in_order_while_they_fit() -> None:
    told: list[bool] = []
    room = Room(100)
    room.full = told.append
    jobs = Jobs(room)
    a, b, c, d = (jobs.start(name, size) for name, size in (("a", 60), ("b", 30), ("c", 50), ("d", 5)))
    await settle()
    assert jobs.inside == ["a", "b"] and room.used == 90  # d would fit, and waits behind c all the same
    assert told and all(told)
    a[1].set()
    await settle()
    assert jobs.order == ["a", "b", "c", "d"] and room.used == 85
    assert told[-1] is False
    for task, done in (b, c, d):
        done.set()
        await task
    assert room.used == 0


async def test_one_that_is_larger_than_the_budget_runs_alone() -> None:
    jobs = Jobs(Room(100))
    small, large, after = jobs.start("small", 1), jobs.start("large", 500), jobs.start("after", 1)
    await settle()
    assert jobs.inside == ["small"]
    small[1].set()
    await settle()
    assert jobs.inside == ["large"]
    large[1].set()
    await settle()
    assert jobs.inside == ["after"]
    after[1].set()
    await after[0]
    assert jobs.room.used == 0


@pytest.mark.parametrize("seed", range(5))
async def test_cancelled_at_any_moment_leaves_nothing(seed: int) -> None:
    dice = random.Random(seed)
    jobs = Jobs(Room(100))
    started = [jobs.start(str(n), dice.randint(1, 130)) for n in range(200)]
    while not all(task.done() for task, _ in started):
        task, done = dice.choice([pair for pair in started if not pair[0].done()])
        if dice.random() < 0.5:
            task.cancel()
        done.set()
        if dice.random() < 0.5:
            task.cancel()  # perhaps in the very turn in which it is let in
        for _ in range(dice.randint(0, 3)):
            await asyncio.sleep(0)
    assert jobs.room.used == 0 and not jobs.inside
