"""Calls that are made again when what stopped them passes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from lenspool.errors import PoolUnavailable, QueueFull, WorkerLost

T = TypeVar("T")

PASSING = (PoolUnavailable, QueueFull, WorkerLost)
"""Errors after which the same call may succeed. A cancelled job is not made again: somebody wanted that."""

_FIRST_S = 0.5
_LONGEST_S = 15.0


async def persistent(call: Callable[[float | None], Awaitable[T]], timeout: float | None, retries: int) -> T:
    """Make a call, and again after errors that pass.

    Parameters
    ----------
    call
        Is given the seconds that are left to it, None for any number.
    timeout
        Seconds for everything.
    retries
        How often it is made again; pauses between begin at half a second and double, less a random part, so that
        clients that were stopped together do not come back together.
    """
    loop = asyncio.get_running_loop()
    end = None if timeout is None else loop.time() + timeout
    pause = _FIRST_S
    for left in range(retries, -1, -1):
        try:
            return await call(timeout if end is None or left == retries else max(end - loop.time(), 1e-3))
        except PASSING:
            wait = pause * random.uniform(0.5, 1.0)
            if not left or (end is not None and loop.time() + wait >= end):
                raise
            await asyncio.sleep(wait)
            pause = min(2 * pause, _LONGEST_S)
    raise AssertionError("unreachable: the last attempt returns or raises")
