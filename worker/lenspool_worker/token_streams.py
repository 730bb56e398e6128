"""Tokens of running generations, on their way to the clients that stream them.

A client announces the jobs whose tokens it wants; of all others nothing is sent. Each of their tokens goes into the
job's stream in Redis with its index, so that what is sent twice, by two attempts or after a lost reply, is seen once.
The stored generation is the truth: what is lost on the way here is made up for by it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import redis.asyncio
import redis.exceptions

from lenspool import keys
from lenspool_worker.bells import messages
from lenspool_worker.generation import Follower

log = logging.getLogger(__name__)

_ENTRIES = 4096
"""Entries of a job's stream that are kept; who comes later than that has the rest at the end."""
_ANNOUNCED = 20_000
_IO_S = 5.0


class _Source:
    """How far a generation has come, and how much of it is sent."""

    def __init__(self) -> None:
        self.tokens: Sequence[int] = ()
        self.count, self.text = 0, ""
        self.sent_count, self.sent_chars = 0, 0

    def entry(self) -> dict[str, Any]:
        """What is not sent yet."""
        return {
            "index": self.sent_count,
            "tokens": json.dumps(list(self.tokens[self.sent_count : self.count])),
            "offset": self.sent_chars,
            "text": self.text[self.sent_chars :],
        }


class TokenStreams:
    """Sends tokens of one worker's generations.

    Parameters
    ----------
    connection
        Client without a socket timeout.
    card_id
        Card of the worker's model.
    """

    def __init__(self, connection: redis.asyncio.Redis, card_id: str) -> None:
        self._redis: Any = connection  # redis-py types a command as either sync or async
        self._streamed = keys.streamed(card_id)
        self._announced: OrderedDict[str, None] = OrderedDict()
        self._followers: dict[str, Follower] = {}
        self._unsent: dict[str, _Source] = {}
        self._writer: asyncio.Task[None] | None = None

    async def watch(self) -> None:
        """Hear which jobs are streamed, until cancelled."""
        async for data in messages(self._redis, self._streamed):
            if data is not None:
                self._hear(data.decode())
                continue
            try:  # what was announced before
                async with asyncio.timeout(_IO_S):
                    before = await self._redis.zrangebyscore(self._streamed, time.time(), "+inf")
            except (redis.exceptions.RedisError, OSError, TimeoutError) as error:
                log.warning("streamed jobs: %s", str(error) or type(error).__name__)
                continue
            for job_id in before:
                self._hear(job_id.decode())

    def _hear(self, job_id: str) -> None:
        self._announced[job_id] = None
        self._announced.move_to_end(job_id)
        while len(self._announced) > _ANNOUNCED:
            self._announced.popitem(last=False)
        if job_id in self._followers:
            self._followers[job_id].begin()

    @contextlib.contextmanager
    def following(self, job_id: str) -> Iterator[Follower]:
        """Send the tokens of a generation, if and as soon as somebody streams it."""
        source = _Source()

        def tell(tokens: Sequence[int], text: str) -> None:
            source.tokens, source.count, source.text = tokens, len(tokens), text
            self._unsent[job_id] = source
            if self._writer is None or self._writer.done():
                self._writer = asyncio.create_task(self._write())

        follower = self._followers[job_id] = Follower(tell, wanted=job_id in self._announced)
        try:
            yield follower
        finally:
            if self._followers.get(job_id) is follower:
                del self._followers[job_id]

    async def _write(self) -> None:
        """Send what all generations have made; what they make meanwhile goes with the next pipeline."""
        await asyncio.sleep(0)  # let everything that this turn tells join
        while self._unsent:
            batch, self._unsent = self._unsent, {}
            sent = {job_id: (source.count, len(source.text)) for job_id, source in batch.items()}
            try:
                async with asyncio.timeout(_IO_S), self._redis.pipeline(transaction=False) as pipeline:
                    for job_id, source in batch.items():
                        key = keys.tokens(job_id)
                        pipeline.xadd(key, source.entry(), maxlen=_ENTRIES, approximate=True)
                        pipeline.expire(key, keys.TOKENS_TTL)
                    await pipeline.execute()
            except (redis.exceptions.RedisError, OSError, TimeoutError) as error:
                # what was not sent goes with the next token, or comes with the result
                log.warning("tokens of %d generations: %s", len(batch), str(error)[:200] or type(error).__name__)
                await asyncio.sleep(0.5)
                continue
            for job_id, source in batch.items():
                source.sent_count, source.sent_chars = sent[job_id]
