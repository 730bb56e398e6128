"""A client's ears for tokens: all its streams are read on one connection of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio
import redis.exceptions

from lenspool import keys
from lenspool.link import NO_ANSWER, connections
from lenspool.queue import JobQueue
from lenspool.streaming import Delta, Tell

log = logging.getLogger(__name__)

_BLOCK_S = 5.0
_IO_S = 10.0


@dataclass(eq=False)
class _Heard:
    """A job whose tokens are read: up to where, and who is told."""

    cursor: str = "0-0"
    told: list[Tell] = field(default_factory=list)


class TokenFeed:
    """Reads tokens of the jobs that this client streams.

    What cannot be read, because Redis is away or has dropped it, is left out: the job's result has everything.
    """

    def __init__(self, queue: JobQueue, url: str) -> None:
        self._url = url
        self._redis: Any = queue.redis  # redis-py types a command as either sync or async
        self._wake = keys.wake(queue.id)
        self._woken = "0-0"
        self._jobs: dict[str, _Heard] = {}
        self._reader: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def listening(self, card_id: str, job_id: str, tell: Tell) -> AsyncIterator[None]:
        """Tell of a job's tokens, from the first on, while the context lasts; to be entered before it is submitted."""
        heard = self._jobs.setdefault(job_id, _Heard())
        heard.told.append(tell)
        heard.cursor = "0-0"  # whoever was told already knows what it has
        try:
            await self._announce(card_id, job_id)
            if self._reader is None or self._reader.done():
                self._reader = asyncio.create_task(self._read())
            yield
        finally:
            heard.told.remove(tell)
            if not heard.told and self._jobs.get(job_id) is heard:
                del self._jobs[job_id]

    async def _announce(self, card_id: str, job_id: str) -> None:
        streamed, now = keys.streamed(card_id), time.time()
        try:
            async with asyncio.timeout(_IO_S), self._redis.pipeline(transaction=False) as pipeline:
                pipeline.zremrangebyscore(streamed, "-inf", now)
                pipeline.zadd(streamed, {job_id: now + keys.STREAMED_TTL})
                pipeline.expire(streamed, keys.STREAMED_TTL)
                pipeline.publish(streamed, job_id)
                pipeline.xadd(self._wake, {"job": job_id}, maxlen=1)
                pipeline.expire(self._wake, keys.DONE_TTL)
                await pipeline.execute()
        except (*NO_ANSWER, redis.exceptions.RedisError) as error:
            log.warning("tokens of job %s will come at its end only: %s", job_id, str(error) or type(error).__name__)

    async def _read(self) -> None:
        """Read on, for as long as somebody is told."""
        reader: Any = redis.asyncio.Redis(connection_pool=connections(self._url, 1))
        try:
            while self._jobs:
                cursors = {keys.tokens(job_id): heard.cursor for job_id, heard in self._jobs.items()}
                try:
                    async with asyncio.timeout(_BLOCK_S + _IO_S):
                        read = await reader.xread({**cursors, self._wake: self._woken}, block=int(_BLOCK_S * 1000))
                except (*NO_ANSWER, redis.exceptions.RedisError) as error:
                    log.warning("tokens: %s", str(error)[:200] or type(error).__name__)
                    await asyncio.sleep(0.5)
                    continue
                for key, entries in read or ():
                    self._take(key.decode(), cursors, entries)
        finally:
            await reader.connection_pool.disconnect()

    def _take(self, key: str, cursors: Mapping[str, str], entries: list[tuple[bytes, Mapping[bytes, bytes]]]) -> None:
        if key == self._wake:
            self._woken = entries[-1][0].decode()
            return
        heard = self._jobs.get(key.removeprefix(keys.tokens("")))
        if heard is None or heard.cursor != cursors[key]:
            return  # begun anew while this was on its way
        for entry_id, fields in entries:
            heard.cursor = entry_id.decode()
            try:
                delta = Delta(
                    int(fields[b"index"]),
                    list(map(int, json.loads(fields[b"tokens"]))),
                    fields[b"text"].decode(),
                    int(fields[b"offset"]),
                )
            except (KeyError, ValueError, TypeError):
                log.warning("not tokens: %.200r", fields)
                continue
            for tell in heard.told:
                tell(delta)

    async def close(self) -> None:
        """Stop reading."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
