"""Brings a dead engine back, while the worker keeps its place in the pool."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable

from lenspool.errors import EngineFailed
from lenspool_worker.engine import Engine
from lenspool_worker.pool_worker import PoolWorker

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_HOLD = "engine"


class Supervisor:
    """Watches one engine.

    The jobs that ran when it died go back to the queue, each charged with the loss of one run: a job that kills engines
    soon runs alone, and then fails. Meanwhile the worker takes no jobs.

    Parameters
    ----------
    same
        Whether the model's files are still those that the worker serves: its results have their name.
    most, window
        So many failures within so many seconds, and the worker gives up.

    Attributes
    ----------
    restarts
        How often the engine came back.
    """

    def __init__(
        self,
        engine: Engine,
        worker: PoolWorker,
        same: Callable[[], Awaitable[bool]],
        *,
        most: int = 6,
        window: float = 600.0,
    ) -> None:
        self._engine, self._worker = engine, worker
        self._same = same
        self._most, self._window = most, window
        self._failures: deque[float] = deque()
        self.restarts = 0

    async def run(self) -> None:
        """Watch until cancelled.

        Raises
        ------
        EngineFailed
            It failed too often, or came back as another model.
        """
        hooks = self._engine.hooks
        while True:
            while self._engine.alive:
                await asyncio.sleep(_LOOK_S)
            log.error("the engine died")
            self._worker.hold(_HOLD)
            reason = "it died"
            while not self._engine.alive:
                await self._pause(reason)
                try:
                    await self._engine.start()
                except EngineFailed as error:
                    reason = str(error)
                    log.error("%s", error)
            if self._engine.hooks != hooks or not await self._same():
                raise EngineFailed("the model's folder has changed: start the worker anew to serve what is there now")
            self.restarts += 1
            self._worker.release(_HOLD)
            log.warning("the engine is back")

    async def _pause(self, reason: str) -> None:
        """Clear away what is left of the engine and wait, longer after each failure in the window."""
        moment = time.monotonic()
        self._failures.append(moment)
        while self._failures[0] < moment - self._window:
            self._failures.popleft()
        count = len(self._failures)
        await self._engine.stop()
        if count >= self._most:
            raise EngineFailed(f"the engine failed {count} times within {self._window:g} s, at last: {reason}")
        await asyncio.sleep(min(_PAUSE_S * 2 ** (count - 1), _LONGEST_PAUSE_S))
