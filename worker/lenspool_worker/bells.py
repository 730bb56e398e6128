"""What wakes a worker: word of new jobs, and commands that rq sends to workers."""

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
    jobs, commands
        Pubsub channels: word of new jobs, and rq's commands for this worker.
    work
        Called when there may be new jobs. Word may be lost while Redis is away: who needs to know asks again.
    command
        Called with each command, a JSON object with `"command"`.
    """

    def __init__(
        self,
        connection: redis.asyncio.Redis,
        jobs: str,
        commands: str,
        *,
        work: Callable[[], None],
        command: Callable[[dict[str, Any]], None],
    ) -> None:
        self._redis: Any = connection  # redis-py types a command as either sync or async
        self._jobs, self._commands = jobs, commands
        self._work, self._command = work, command

    async def watch_jobs(self) -> None:
        """Ring for jobs, until cancelled."""
        async for _ in messages(self._redis, self._jobs):
            self._work()

    async def watch_commands(self) -> None:
        """Pass commands on, until cancelled."""
        async for data in messages(self._redis, self._commands):
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
