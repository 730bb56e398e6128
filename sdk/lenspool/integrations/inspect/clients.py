"""Clients of one model, one for each event loop that asks: inspect runs every eval in a loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from lenspool.card import ModelCard
from lenspool.client import Client
from lenspool.errors import LenspoolError


class Clients:
    """Clients that are opened when a loop first asks, and shared by all its calls.

    Parameters
    ----------
    make
        Makes a client that is not open yet.
    """

    def __init__(self, make: Callable[[], Client]) -> None:
        self._make = make
        self._opening: dict[asyncio.AbstractEventLoop, asyncio.Task[Client]] = {}

    async def get(self) -> Client:
        """The open client of the running loop.

        Raises
        ------
        PoolUnavailable
            Redis cannot be reached; the next call tries again.
        """
        loop = asyncio.get_running_loop()
        for ended in [other for other in list(self._opening) if other.is_closed()]:
            self._opening.pop(ended, None)
        task = self._opening.get(loop)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            # in a context of its own: what it starts outlives the sample that happens to come first
            task = self._opening[loop] = loop.create_task(self._open(), context=contextvars.Context())
        return await asyncio.shield(task)

    async def _open(self) -> Client:
        return await self._make().__aenter__()

    async def aclose(self) -> None:
        """Close the client of the running loop."""
        task = self._opening.pop(asyncio.get_running_loop(), None)
        if task is not None:
            with contextlib.suppress(LenspoolError):  # it could not be opened
                await (await task).close()

    def card(self) -> ModelCard:
        """The model's card, for callers that cannot await, inside a running loop or not."""

        async def ask() -> ModelCard:
            async with self._make() as client:
                return await client.card()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, ask()).result()
