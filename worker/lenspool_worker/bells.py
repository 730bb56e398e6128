"""What wakes a worker: jobs in its queue, and commands that rq sends to workers."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import redis.asyncio
import redis.exceptions

log = logging.getLogger(__name__)

_WAIT_S = 5.0
_IO_S = 5.0

_TROUBLE = (redis.exceptions.RedisError, OSError, TimeoutError)


async def messages(connection: Any, channel: str) -> AsyncIterator[bytes | None]:
    """Messages of a pubsub channel, also after restarts of the server; None each time that it is subscribed to anew."""
    while True:
        try:
            async with connection.pubsub() as subscription:
                await subscription.subscribe(channel)
                while True:
                    async with asyncio.timeout(_WAIT_S + _IO_S):
                        message = await subscription.get_message(timeout=_WAIT_S)
                    if message is None:
                        await subscription.ping()
                    elif message["type"] in ("message", "subscribe"):
                        yield message["data"] if message["type"] == "message" else None
        except _TROUBLE as error:
            log.warning("%s: %s", channel, str(error)[:200] or type(error).__name__)
            await asyncio.sleep(0.5)


class Bells:
    """Listens on the server for one worker, and goes on after its restarts.

    Parameters
    ----------
    connection
        Client without a socket timeout.
    queue_key, channel
        The rq queue, and the pubsub channel of the worker's commands.
    work
        Called when the queue has jobs, once for each `listen`.
    command
        Called with each command, a JSON object with `"command"`.
    """

    def __init__(
        self,
        connection: redis.asyncio.Redis,
        queue_key: str,
        channel: str,
        *,
        work: Callable[[], None],
        command: Callable[[dict[str, Any]], None],
    ) -> None:
        self._redis: Any = connection  # redis-py types a command as either sync or async
        self._queue_key = queue_key
        self._channel = channel
        self._work, self._command = work, command
        self._wanted = asyncio.Event()

    def listen(self) -> None:
        """Ring when the queue has jobs."""
        self._wanted.set()

    async def watch_queue(self) -> None:
        """Ring for jobs, until cancelled.

        `BLMOVE` from the head of a list to its own head takes nothing away, so it can be cancelled without loss.
        """
        key = self._queue_key
        while True:
            await self._wanted.wait()
            try:
                async with asyncio.timeout(_WAIT_S + _IO_S):
                    found = await self._redis.blmove(key, key, _WAIT_S, "LEFT", "LEFT")
            except _TROUBLE as error:
                log.warning("waiting for jobs: %s", str(error)[:200] or type(error).__name__)
                await asyncio.sleep(0.5)
                continue
            if found is not None:
                self._wanted.clear()
                self._work()

    async def watch_commands(self) -> None:
        """Pass commands on, until cancelled."""
        async for data in messages(self._redis, self._channel):
            if data is not None:
                self._pass_on(data)

    def _pass_on(self, data: bytes) -> None:
        try:
            command = json.loads(data)
            if not isinstance(command["command"], str):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            log.warning("not a command: %.100r", data)
            return
        self._command(command)
