"""Jobs that are to run whether a client waits for them or not, and what Redis keeps to find them again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import redis.exceptions

from lenspool import keys, scripts
from lenspool.errors import LenspoolError, PoolUnavailable
from lenspool.link import NO_ANSWER
from lenspool.queue import JobQueue
from lenspool.rq_json import StrictJSON
from lenspool.submission import (
    JOB_PREFIX,
    QUEUE_PREFIX,
    RESULT_PREFIX,
    Submission,
    Submissions,
    encode,
    error_of,
    refuse,
    result_of,
)
from lenspool.terms import Terms

T = TypeVar("T")


class Orders:
    """Kept jobs, through the connections of a `JobQueue`."""

    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue
        self._redis: Any = queue.redis  # redis-py types a command as either sync or async
        self._submissions = Submissions(queue.id)
        self._submit, self._cancel, self._sweep = (
            queue.redis.register_script(script) for script in (scripts.SUBMIT, scripts.CANCEL, scripts.SWEEP)
        )

    async def record(self, document: Mapping[str, Any], record: Mapping[str, Any]) -> str:
        """Keep what the job's handle is made of; the job's id."""
        job_id, _ = encode(document)
        data = StrictJSON.dumps(dict(record))
        await self._answered(lambda: self._redis.set(keys.request(job_id), data, ex=keys.REQUEST_TTL))
        return job_id

    async def place(self, card_id: str, document: Mapping[str, Any], terms: Terms) -> None:
        """Have a job run.

        Raises
        ------
        QueueFull
        PoolUnavailable
            Redis cannot be reached, or refuses the job.
        """
        job_id, data = encode(document)
        job = Submission(job_id, data, trace=terms.trace)
        touched, arguments = self._submissions.submit(card_id, terms, [job], kept=True)
        (reply,) = await self._answered(lambda: self._submit(keys=touched, args=arguments))
        refuse(reply, job_id)

    async def withdraw(self, card_id: str, job_id: str) -> None:
        """Let a job be cancelled, unless a client waits for it."""
        touched, arguments = self._submissions.cancel(job_id, card_id, kept=True)
        await self._answered(lambda: self._cancel(keys=touched, args=arguments))

    async def fetch(self, job_id: str) -> dict[str, Any] | None:
        """What `record` kept; None when it has expired, or never was."""
        data = await self._answered(lambda: self._redis.get(keys.request(job_id)))
        return None if data is None else StrictJSON.loads(data)

    async def failure(self, job_id: str) -> LenspoolError | None:
        """The error with which a job ended, for as long as Redis remembers it."""
        ended = await self._answered(lambda: self._sweep(args=[JOB_PREFIX, RESULT_PREFIX, job_id]))
        for _, state, _, fields in ended:
            if state in (b"failed", b"stopped", b"canceled"):
                return error_of(job_id, state.decode(), result_of(job_id, fields)[1])
        return None

    async def position(self, job_id: str) -> int | None:
        """How many jobs are before it in its queue; None when it does not wait."""
        place, origin = await self._answered(lambda: self._redis.hmget(JOB_PREFIX + job_id, "place", "origin"))
        queues = [] if place is None else [place]
        if origin is not None:  # where jobs wait that come back
            queues += [QUEUE_PREFIX + origin.decode() + suffix for suffix in ("", ":suspects", ":alone")]
        for queue in queues:
            found: int | None = await self._answered(partial(self._redis.lpos, queue, job_id))
            if found is not None:
                return found
        return None

    async def _answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask Redis, and again while it is away, for as long as the client's patience lasts."""
        end = time.monotonic() + self._queue.patience
        while True:
            try:
                async with asyncio.timeout(max(min(10.0, end - time.monotonic()), 0.1)):
                    return await ask()
            except NO_ANSWER as error:
                if time.monotonic() > end:
                    raise PoolUnavailable(f"no answer from Redis for {self._queue.patience:g} s") from error
            except redis.exceptions.RedisError as error:
                raise PoolUnavailable(f"Redis refuses: {error}") from error
            await asyncio.sleep(0.2)
