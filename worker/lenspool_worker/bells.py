"""What wakes a worker: word of new jobs, and commands that rq sends to workers."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import redis.asyncio
import redis.exceptions

log = logging.getLogger(__name__)

_WAIT_S = 5.0
_IO_S = 5.0

_TROUBLE = (redis.exceptions.RedisError, OSError, TimeoutError)


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

    async def listen(self) -> None:
        """Ring, until cancelled."""
        while True:
            try:
                async with self._redis.pubsub(ignore_subscribe_messages=True) as channel:
                    await channel.subscribe(self._jobs, self._commands)
                    while True:
                        async with asyncio.timeout(_WAIT_S + _IO_S):
                            message = await channel.get_message(timeout=_WAIT_S)
                        if message is None:
                            await channel.ping()
                        elif message["type"] != "message":
                            continue
                        elif message["channel"].decode() == self._jobs:
                            self._work()
                        else:
                            self._pass_on(message["data"])
            except _TROUBLE as error:
                log.warning("no word of jobs and commands: %s", str(error)[:200] or type(error).__name__)
                await asyncio.sleep(0.5)

    def _pass_on(self, data: bytes) -> None:
        try:
            command = json.loads(data)
            if not isinstance(command["command"], str):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            log.warning("not a command: %.100r", data)
            return
        self._command(command)
