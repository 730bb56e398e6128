"""A client's two ways to Redis: calls leave in pipelines, completions arrive on one stream."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from lenspool import keys, scripts
from lenspool.errors import LenspoolError, PoolUnavailable
from lenspool.submission import Submission, Submissions, refuse, result_of
from lenspool.ticket import Flight

log = logging.getLogger(__name__)

_BATCH_JOBS = 128
_BATCH_BYTES = 4_000_000
_CONNECTIONS = 16
_IO_S = 10.0
"""Seconds after which an unanswered command counts as lost."""
_BLOCK_S = 5.0
_OPEN_S = 5.0

NO_ANSWER = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, TimeoutError, OSError)

Kind = Literal["submit", "cancel"]
_SHA = {
    "submit": hashlib.sha1(scripts.SUBMIT.encode()).hexdigest(),
    "cancel": hashlib.sha1(scripts.CANCEL.encode()).hexdigest(),
}


@dataclass(eq=False)
class _Call:
    kind: Kind
    flight: Flight
    sent: asyncio.Future[None]
    fresh: bool = False


def _group(call: _Call) -> object:
    """What neighbours share that leave in one call of a script."""
    flight = call.flight
    terms = replace(flight.terms, trace="") if flight.terms.trace else flight.terms
    return ("submit", flight.card_id, terms) if call.kind == "submit" else ("cancel", id(call))


def _submission(call: _Call) -> Submission:
    flight = call.flight
    flight.sent, call.fresh = True, flight.fresh
    return Submission(flight.id, flight.document, flight.fresh, flight.terms.trace)


class Link:
    """Carries the calls of one client to Redis, and the ends of its jobs back.

    Parameters
    ----------
    ended
        Called with job id, state, return value and error text for each job that ended.
    fail
        Called with flights that Redis does not take, and why.

    Attributes
    ----------
    redis
        Client with bounded connections: a caller waits for a free one.
    contact
        When Redis last answered (monotonic seconds).
    last_message
        Id of the last message read from the completion stream.
    """

    redis: redis.asyncio.Redis

    def __init__(
        self,
        url: str,
        client_id: str,
        *,
        ended: Callable[[str, str, Any, str], None],
        fail: Callable[[Iterable[Flight], LenspoolError], None],
    ) -> None:
        self.redis = redis.asyncio.Redis(connection_pool=connections(url, _CONNECTIONS))
        self.contact = time.monotonic()
        self.last_message = "0-0"
        self._reader = redis.asyncio.Redis(connection_pool=connections(url, 1))
        self._stream = keys.done(client_id)
        self._submissions = Submissions(client_id)
        self._ended, self._fail = ended, fail
        self._outbox: deque[_Call] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None

    async def open(self, patience: float) -> None:
        """Connect, or raise PoolUnavailable."""
        end = time.monotonic() + min(patience, _OPEN_S)
        said = "no answer"
        while True:
            try:
                async with asyncio.timeout(max(end - time.monotonic(), 0.1)):
                    await self.redis.ping()
                break
            except NO_ANSWER as error:
                said = str(error) or said  # the last try may be cut short before it can say why
                if time.monotonic() > end:
                    raise PoolUnavailable(f"Redis cannot be reached: {said}") from error
            except redis.exceptions.RedisError as error:
                raise PoolUnavailable(f"Redis refuses the client: {error}") from error
            await asyncio.sleep(0.2)
        self.contact = time.monotonic()
        self._listener = asyncio.create_task(self._listen())

    async def close(self) -> None:
        """Send what is left, and disconnect."""
        tasks = [task for task in (self._sender, self._listener) if task is not None]
        if self._sender is not None:
            await asyncio.wait([self._sender], timeout=2.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(redis.exceptions.RedisError, TimeoutError, OSError):  # it has a time to live
            async with asyncio.timeout(1.0):
                await self.redis.delete(self._stream)
        await self._reader.connection_pool.disconnect()
        await self.redis.connection_pool.disconnect()

    def send(self, kind: Kind, flight: Flight) -> asyncio.Future[None]:
        """Put a call into the pipeline that leaves after this turn of the loop."""
        loop = asyncio.get_running_loop()
        sent: asyncio.Future[None] = loop.create_future()
        flight.placed = False
        self._outbox.append(_Call(kind, flight, sent))
        if self._sender is None or self._sender.done():
            self._sender = loop.create_task(self._send())
        return sent

    # -- sending

    async def _send(self) -> None:
        await asyncio.sleep(0)  # let everything that this turn submits join
        while self._outbox:
            batch: list[_Call] = []
            size = 0
            while self._outbox and len(batch) < _BATCH_JOBS and size < _BATCH_BYTES:
                batch.append(self._outbox.popleft())
                size += len(batch[-1].flight.document)
            try:
                await self._transmit(batch)
            except Exception as error:
                log.exception("jobs could not be sent")
                self._fail([call.flight for call in batch], PoolUnavailable(f"{type(error).__name__}: {error}"))
            finally:
                for call in batch:
                    if not call.sent.done():
                        call.sent.set_result(None)

    async def _transmit(self, batch: list[_Call]) -> None:
        """Send until answered: every script may run twice."""
        delay = 0.05
        while True:
            # a flight may have been given up since it was put here, or while Redis was away
            batch = [call for call in batch if call.kind == "cancel" or call.flight.tickets]
            try:
                replies = await self._execute(batch) if batch else []
                break
            except NO_ANSWER as error:
                log.warning("Redis does not answer: %s", str(error) or type(error).__name__)
            await asyncio.sleep(delay)
            delay = min(delay * 2, 1.0)
        if batch:
            self.contact = time.monotonic()
        for call, reply in zip(batch, replies, strict=True):
            if call.kind == "submit":
                self._placed(call, reply)

    def _placed(self, call: _Call, reply: Any) -> None:
        flight = call.flight
        if isinstance(reply, Exception):
            self._fail([flight], PoolUnavailable(f"Redis refuses the job: {reply}"))
            return
        try:
            refuse(reply, flight.id)
        except LenspoolError as error:
            self._fail([flight], error)
            return
        if reply[0] != b"hit":
            flight.fresh, flight.placed = False, True
        elif flight.fresh and not call.fresh:  # somebody joined meanwhile who has no use for the old result
            self.send("submit", flight)
        else:
            flight.hit = True
            self._ended(flight.id, "finished", result_of(flight.id, reply[1])[0], "")

    async def _execute(self, batch: list[_Call]) -> list[Any]:
        """One pipeline; the reply to each call, where what Redis refused has its error."""
        async with self.redis.pipeline(transaction=False) as pipeline:
            groups = [list(group) for _, group in itertools.groupby(batch, _group)]
            for group in groups:
                kind, flight = group[0].kind, group[0].flight
                if kind == "submit":
                    touched, arguments = self._submissions.submit(
                        flight.card_id, flight.terms, [_submission(call) for call in group]
                    )
                else:
                    touched, arguments = self._submissions.cancel(flight.id, flight.card_id)
                pipeline.evalsha(_SHA[kind], len(touched), *touched, *arguments)
            for attempt in range(2):
                commands = list(pipeline.command_stack)
                async with asyncio.timeout(_IO_S):
                    replies: list[Any] = await pipeline.execute(raise_on_error=False)
                unknown = any(isinstance(reply, redis.exceptions.NoScriptError) for reply in replies)
                if not unknown or attempt:
                    break
                async with asyncio.timeout(_IO_S):
                    await self.redis.script_load(scripts.SUBMIT)
                    await self.redis.script_load(scripts.CANCEL)
                pipeline.command_stack = commands
        if lost := next((r for r in replies if isinstance(r, redis.exceptions.ConnectionError)), None):
            raise lost  # it is loading its data, or the connection broke between two replies
        return [
            each
            for group, reply in zip(groups, replies, strict=True)
            for each in (reply if isinstance(reply, list) else [reply] * len(group))
        ]

    # -- listening

    async def _listen(self) -> None:
        """Read the completion stream, on a connection of its own, for as long as the client is open."""
        while True:
            try:
                async with asyncio.timeout(_BLOCK_S + _IO_S):
                    read = await self._reader.xread(
                        {self._stream: self.last_message}, block=int(_BLOCK_S * 1000), count=1000
                    )
            except NO_ANSWER:
                await asyncio.sleep(0.2)
                continue
            except redis.exceptions.RedisError:
                log.exception("the completion stream cannot be read; the sweep goes on")
                await asyncio.sleep(_BLOCK_S)
                continue
            self.contact = time.monotonic()
            for _, messages in read or ():
                for message_id, fields in messages:
                    self.last_message = message_id.decode()
                    try:
                        self._heard(fields)
                    except (KeyError, ValueError):
                        log.warning("not a completion: %.200r", fields)

    def _heard(self, fields: Mapping[bytes, bytes]) -> None:
        job_id, state = fields[b"id"].decode(), fields[b"state"].decode()
        payload = fields[b"payload"].decode()
        if state == "finished":
            self._ended(job_id, state, json.loads(payload), "")
        else:
            self._ended(job_id, state, None, payload)


def without_password(url: str) -> str:
    """The URL as it may be shown."""
    return re.sub(r"//([^/@]*):[^/@]*@", r"//\1:***@", url)


def connections(url: str, connections: int) -> redis.asyncio.BlockingConnectionPool:
    """Connections that wait for their turn, without a socket timeout.

    With one, redis-py sends through `asyncio.wait_for`, which on Python 3.11 can swallow a cancellation.
    """
    options: dict[str, Any] = {} if url.startswith("unix:") else {"socket_keepalive": True}
    pool: redis.asyncio.BlockingConnectionPool = redis.asyncio.BlockingConnectionPool.from_url(
        url,
        max_connections=connections,
        timeout=None,
        socket_timeout=None,
        socket_connect_timeout=5.0,
        retry=Retry(NoBackoff(), 1),
        protocol=2,
        **options,
    )
    return pool
