"""How many bytes of rows the jobs in flight may hold together."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import AsyncIterator, Callable

_SHARE = 4


def default_budget() -> int:
    """A quarter of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _SHARE


class Room:
    """Lets jobs in, in the order in which they come, as long as their bytes fit.

    A job that is larger than the whole budget runs with nothing beside it.

    Parameters
    ----------
    budget
        Bytes.

    Attributes
    ----------
    used
        Bytes of the jobs that are in.
    full
        Called with True when a job has to wait, and with False when none waits any more.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.used = 0
        self.full: Callable[[bool], None] = lambda waiting: None

    @contextlib.asynccontextmanager
    async def take(self, size: int) -> AsyncIterator[None]:
        """Wait for room, and keep it for as long as the context lives."""
        await self._enter(size)
        try:
            yield
        finally:
            self.used -= size
            self._admit()

    def _fits(self, size: int) -> bool:
        return self.used == 0 or self.used + size <= self._budget

    async def _enter(self, size: int) -> None:
        if not self._waiting and self._fits(size):
            self.used += size
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (size, place)
        self._waiting.append(entry)
        self.full(True)
        try:
            await place
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            else:  # let in at the same moment
                self.used -= size
            self._admit()
            raise

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size, place = self._waiting.popleft()
            self.used += size
            if not place.done():
                place.set_result(None)
        if not self._waiting:
            self.full(False)
