"""Many calls: bounded, in order or not, cancelled when left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from lenspool.many import in_flight


async def test_no_more_is_drawn_than_is_in_flight() -> None:
    drawn = taken = most = 0

    def items() -> Iterator[int | None]:
        nonlocal drawn
        for i in range(1000):
            drawn += 1
            yield None if i == 7 else i  # None is an item like any other

    async def call(item: int | None) -> int | None:
        await asyncio.sleep(0)
        return item

    async for index, result in in_flight(items(), call, concurrency=8):
        most = max(most, drawn - taken)
        assert index == taken and result == (None if index == 7 else index)
        taken += 1
        await asyncio.sleep(0)
    assert taken == 1000 and most <= 8


async def test_a_slow_call_holds_up_only_those_that_want_order() -> None:
    async def call(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    waits = [0.3, 0.0, 0.1]
    for ordered, expected in ((True, [0, 1, 2]), (False, [1, 2, 0])):
        pairs = [pair async for pair in in_flight(waits, call, concurrency=3, ordered=ordered)]
        assert [index for index, _ in pairs] == expected and all(waits[i] == r for i, r in pairs)


async def test_errors_take_their_place_or_end_it_all() -> None:
    cancelled: list[int] = []

    async def call(item: int) -> int:
        if item == 1:
            raise ValueError(item)
        try:
            await asyncio.sleep(30 if item > 2 else 0)
        except asyncio.CancelledError:
            cancelled.append(item)
            raise
        return item

    with pytest.raises(ValueError, match="1"):
        async for _ in in_flight(range(5), call, concurrency=5):
            pass
    assert cancelled == [3, 4]
    found = [r async for _, r in in_flight(range(3), call, concurrency=5, return_exceptions=True)]
    assert found[0] == 0 and isinstance(found[1], ValueError) and found[2] == 2
    async with contextlib.aclosing(in_flight(range(5), call, concurrency=5, return_exceptions=True)) as pairs:
        async for _ in pairs:
            break
    assert cancelled[2:] == [3, 4]
