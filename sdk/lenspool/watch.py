"""Nobody waits forever: the jobs' hashes are the truth, and patience ends.

A completion message can be missed: rq's clean-up, run by any process, ends jobs without one; Redis may come back empty.
So each job that is waited for longer than one sweep is looked up. And when Redis is gone, or nobody serves the model,
waiting ends after the client's patience.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import TYPE_CHECKING, Any

import redis.exceptions

from lenspool import keys, scripts
from lenspool.errors import PoolUnavailable
from lenspool.submission import JOB_PREFIX, RESULT_PREFIX, result_of
from lenspool.ticket import Flight

if TYPE_CHECKING:
    from lenspool.queue import JobQueue

log = logging.getLogger(__name__)

_CHUNK = 500
_IO_S = 10.0
_SKEW_S = 600.0
"""How far the clocks of two machines may be apart when a worker's card is looked for; its time to live decides."""


class Watch:
    """Looks after the flights of one `JobQueue`."""

    def __init__(self, queue: JobQueue, sweep: float) -> None:
        self._queue = queue
        self._period = min(sweep, queue.patience / 4)
        self._unserved: dict[str, float] = {}

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            await asyncio.sleep(self._period)
            if not self._queue.flights:
                self._unserved.clear()
                continue
            try:
                async with asyncio.timeout(_IO_S):
                    await self._sweep()
                    await self._look_for_workers()
                self._queue.link.contact = time.monotonic()
            except (redis.exceptions.RedisError, TimeoutError, OSError) as error:
                log.warning("sweep: %s", str(error) or type(error).__name__)
            except Exception:
                log.exception("sweep failed; the next one follows")
            silent = time.monotonic() - self._queue.link.contact
            if silent > self._queue.patience:
                self._queue.fail(
                    list(self._queue.flights.values()), PoolUnavailable(f"no answer from Redis for {silent:.0f} s")
                )

    async def _sweep(self) -> None:
        """Look at the jobs that were there at the last sweep already."""
        due = [flight for flight in self._queue.flights.values() if flight.placed and flight.swept]
        for flight in self._queue.flights.values():
            flight.swept = True
        commands: Any = self._queue.redis  # redis-py types a command as either sync or async
        for at in range(0, len(due), _CHUNK):
            chunk = [flight.id for flight in due[at : at + _CHUNK]]
            for entry in await commands.eval(scripts.SWEEP, 0, JOB_PREFIX, RESULT_PREFIX, *chunk):
                self._found(entry)
        if self._queue.link.last_message != "0-0":
            await commands.xtrim(keys.done(self._queue.id), minid=self._queue.link.last_message, approximate=True)

    def _found(self, entry: list[Any]) -> None:
        job_id, state, abandoned = (field.decode() for field in entry[:3])
        flight = self._queue.flights.get(job_id)
        if flight is None:
            return
        if state not in ("finished", "failed", "stopped", "canceled"):
            log.info("job %s is not in Redis any more: submitted again", job_id)
            self._queue.link.send("submit", flight)
        elif abandoned or state == "canceled":
            # cancelled by a client that had it alone, before this one joined too late to be told
            self._queue.ended(job_id, "abandoned" if abandoned else state, None, "")
        else:
            self._queue.ended(job_id, state, *result_of(job_id, entry[3]))

    async def _look_for_workers(self) -> None:
        """Fail what waits for a card that no live worker has had for longer than patience."""
        now = time.monotonic()
        waiting: dict[str, list[Flight]] = {}
        for flight in self._queue.flights.values():
            waiting.setdefault(flight.card_id, []).append(flight)
        served = await self._served()
        self._unserved = {card: self._unserved.get(card, now) for card in waiting if card not in served}
        for card, since in self._unserved.items():
            if now - since > self._queue.patience:
                self._queue.fail(waiting[card], PoolUnavailable(f"no worker serves {card} since {now - since:.0f} s"))

    async def _served(self) -> set[str]:
        """Ids of the cards of live workers."""
        names = await self._queue.redis.zrangebyscore(keys.CARDS, time.time() - _SKEW_S, "+inf")
        if not names:
            return set()
        found = await self._queue.redis.mget([keys.card(name.decode()) for name in names])
        served = set()
        for raw in filter(None, found):
            try:
                served.add(json.loads(raw)["id"])
            except (ValueError, KeyError, TypeError):
                log.warning("not a card: %.100r", raw)
        return served
