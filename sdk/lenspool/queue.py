"""The client's side of the queue: submit, await, cancel.

Everything that one turn of the event loop submits or cancels leaves in one pipeline. Completions arrive on one stream
per client. `lenspool.watch` looks after what the stream may miss.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import time
import uuid
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from lenspool import keys, scripts
from lenspool.errors import DeadlineExceeded, LenspoolError, PoolUnavailable, to_wire
from lenspool.submission import JOB_PREFIX, Submissions, encode, error_of, result_of, run_timeout
from lenspool.ticket import CANCELLED, CLOSED, Flight, JobTicket, Outcome
from lenspool.watch import Watch

__all__ = ["JobQueue", "JobTicket"]

log = logging.getLogger(__name__)

_BATCH_JOBS = 128
_BATCH_BYTES = 4_000_000
_CONNECTIONS = 16
_IO_S = 10.0
"""Seconds after which an unanswered command counts as lost."""
_BLOCK_S = 5.0
_OPEN_S = 5.0

NO_ANSWER = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, TimeoutError, OSError)

_STATUS = {"deferred": "queued", "scheduled": "queued", "created": "queued", "stopped": "cancelled"}
_STATUS |= {"canceled": "cancelled"} | {name: name for name in ("queued", "started", "finished", "failed")}

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


class JobQueue:
    """Jobs of one client, on one Redis.

    Parameters
    ----------
    url
        `redis://`, `rediss://` or `unix://`.
    patience
        Seconds without Redis, or without a live worker for a card, until what waits fails with `PoolUnavailable`.
    sweep
        Seconds between two looks at the jobs themselves.
    client_id
        Name of this client's completion stream; default unique.

    Attributes
    ----------
    redis
        `redis.asyncio` client for small reads and writes. Its connections are bounded: a caller waits for a free one.
    """

    redis: redis.asyncio.Redis

    def __init__(self, url: str, *, patience: float = 120.0, sweep: float = 5.0, client_id: str | None = None) -> None:
        self.id = client_id or uuid.uuid4().hex
        self.patience = patience
        self.redis = redis.asyncio.Redis(connection_pool=_pool(url, _CONNECTIONS))
        self._listener = redis.asyncio.Redis(connection_pool=_pool(url, 1))
        self._submissions = Submissions(self.id)
        self._flights: dict[str, Flight] = {}
        self._outbox: deque[_Call] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._watch = Watch(self, sweep)
        self._tasks: list[asyncio.Task[None]] = []
        self._last_message = "0-0"
        self.contact = time.monotonic()

    async def open(self) -> None:
        """Connect.

        Raises
        ------
        PoolUnavailable
            Redis cannot be reached.
        """
        end = time.monotonic() + min(self.patience, _OPEN_S)
        while True:
            try:
                async with asyncio.timeout(max(end - time.monotonic(), 0.1)):
                    await self.redis.ping()
                break
            except NO_ANSWER as error:
                if time.monotonic() > end:
                    raise PoolUnavailable(f"Redis cannot be reached: {error or 'no answer'}") from error
            except redis.exceptions.RedisError as error:
                raise PoolUnavailable(f"Redis refuses the client: {error}") from error
            await asyncio.sleep(0.2)
        self.contact = time.monotonic()
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch.run())]

    async def close(self) -> None:
        """Cancel what is still waited for, and disconnect."""
        for flight in list(self._flights.values()):
            for ticket in list(flight.tickets):
                self.give_up(ticket, CLOSED)
        if self._sender is not None:
            await asyncio.wait([self._sender], timeout=2.0)
            self._sender.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *filter(None, [self._sender]), return_exceptions=True)
        self._tasks = []
        with contextlib.suppress(*NO_ANSWER):  # it has a time to live
            async with asyncio.timeout(1.0):
                await self.redis.delete(keys.done(self.id))
        await self._listener.connection_pool.disconnect()
        await self.redis.connection_pool.disconnect()

    def submit(
        self, card_id: str, document: Mapping[str, Any], *, fresh: bool = False, timeout: float | None = None
    ) -> JobTicket:
        """Ask for a job; returns at once.

        Parameters
        ----------
        card_id
            Id of the card of the model that is to run it.
        document
            Job document. Equal documents share one job, in this process and with other clients.
        fresh
            Do not take the result of a finished job: run it again.
        timeout
            Seconds that the run may take.

        Raises
        ------
        InvalidJob
            The document is no JSON, or too large.
        """
        if not self._tasks:
            raise RuntimeError("the queue is not open")
        job_id, data = encode(document)
        flight = self._flights.get(job_id)
        if flight is None:
            flight = self._flights[job_id] = Flight(job_id, card_id, data, fresh, timeout)
            self.send("submit", flight)
        elif flight.timeout is not None:
            flight.timeout = None if timeout is None else max(flight.timeout, timeout)
        ticket = JobTicket(self, flight)
        flight.tickets.add(ticket)
        return ticket

    def give_up(self, ticket: JobTicket, outcome: Outcome = CANCELLED) -> asyncio.Future[None] | None:
        """End a ticket; the last ticket of a flight cancels the job. The future is done when Redis knows."""
        flight = ticket._flight
        ticket.settle(outcome)
        if ticket not in flight.tickets:
            return None
        flight.tickets.discard(ticket)
        if flight.tickets or self._flights.get(flight.id) is not flight:
            return None
        del self._flights[flight.id]
        return self.send("cancel", flight) if flight.sent else None

    async def status(self, flight: Flight) -> str:
        """Status of a job in Redis, in the words of `JobTicket.status`."""
        if not flight.sent:
            return "queued"
        try:
            async with asyncio.timeout(2.0):
                commands: Any = self.redis  # redis-py types a command as either sync or async
                state = await commands.hget(JOB_PREFIX + flight.id, "status")
        except NO_ANSWER:
            return "unknown"
        return _STATUS.get(state.decode(), "unknown") if state else "unknown"

    # -- what the watch uses

    @property
    def flights(self) -> Mapping[str, Flight]:
        """Jobs waited for, by id."""
        return self._flights

    @property
    def last_message(self) -> str:
        """Id of the last message read from the completion stream."""
        return self._last_message

    def send(self, kind: Kind, flight: Flight) -> asyncio.Future[None]:
        """Put a call into the pipeline that leaves after this turn of the loop."""
        loop = asyncio.get_running_loop()
        sent: asyncio.Future[None] = loop.create_future()
        flight.placed = False
        self._outbox.append(_Call(kind, flight, sent))
        if self._sender is None or self._sender.done():
            self._sender = loop.create_task(self._send())
        return sent

    def ended(self, job_id: str, state: str, value: Any, text: str) -> None:
        """Tell the waiters of a job how it ended.

        Parameters
        ----------
        state
            `finished`, `failed`, `stopped`, `canceled`, or `abandoned`: stopped because nobody waited for it.
        value, text
            The return value; the error as rq keeps it.
        """
        flight = self._flights.get(job_id)
        if flight is None:
            return
        if state == "finished":
            self.settle(flight, Outcome(value if isinstance(value, dict) else {}))
            return
        error = error_of(job_id, state, text)
        limit = isinstance(error, DeadlineExceeded) and error.stage == "run" and error.seconds
        if state == "abandoned" or (limit and limit < run_timeout(flight.timeout)):
            self.send("submit", flight)  # ended by another client's change of mind, or its shorter limit
        else:
            self.settle(flight, Outcome(error=to_wire(error)))

    def settle(self, flight: Flight, outcome: Outcome) -> None:
        """End a flight and all its tickets."""
        if self._flights.get(flight.id) is flight:
            del self._flights[flight.id]
        for ticket in flight.tickets:
            ticket.settle(outcome)
        flight.tickets.clear()

    def fail(self, flights: Iterable[Flight], error: LenspoolError) -> None:
        """End flights for a reason that is not the job's, and take the jobs back."""
        outcome = Outcome(error=to_wire(error))
        for flight in list(flights):
            self.settle(flight, outcome)
            if flight.sent:
                self.send("cancel", flight)

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
                self.fail([call.flight for call in batch], PoolUnavailable(f"{type(error).__name__}: {error}"))
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
                log.warning("Redis does not answer: %s", error or type(error).__name__)
            await asyncio.sleep(delay)
            delay = min(delay * 2, 1.0)
        self.contact = time.monotonic()
        for call, reply in zip(batch, replies, strict=True):
            if call.kind == "cancel":
                continue
            call.flight.fresh, call.flight.placed = False, True
            if isinstance(reply, Exception):
                self.fail([call.flight], PoolUnavailable(f"Redis refuses the job: {reply}"))
            elif reply[0] == b"hit":
                result = result_of(call.flight.id, reply[1])
                self.ended(call.flight.id, "finished", result.return_value if result else None, "")

    async def _execute(self, batch: list[_Call]) -> list[Any]:
        """One pipeline; its replies, where a command that Redis refused has its error."""
        async with self.redis.pipeline(transaction=False) as pipeline:
            for call in batch:
                flight = call.flight
                if call.kind == "submit":
                    flight.sent = True
                    touched, arguments = self._submissions.submit(
                        flight.id, flight.card_id, flight.document, fresh=flight.fresh, timeout=flight.timeout
                    )
                else:
                    touched, arguments = self._submissions.cancel(flight.id, flight.card_id)
                pipeline.evalsha(_SHA[call.kind], len(touched), *touched, *arguments)
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
        return replies

    # -- listening

    async def _listen(self) -> None:
        """Read the completion stream, on a connection of its own, for as long as the client is open."""
        stream = keys.done(self.id)
        while True:
            try:
                async with asyncio.timeout(_BLOCK_S + _IO_S):
                    read = await self._listener.xread(
                        {stream: self._last_message}, block=int(_BLOCK_S * 1000), count=1000
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
                    self._last_message = message_id.decode()
                    self._heard(fields)

    def _heard(self, fields: Mapping[bytes, bytes]) -> None:
        job_id, state = fields[b"id"].decode(), fields[b"state"].decode()
        payload = fields[b"payload"].decode()
        if state == "finished":
            self.ended(job_id, state, json.loads(payload), "")
        else:
            self.ended(job_id, state, None, payload)


def _pool(url: str, connections: int) -> redis.asyncio.BlockingConnectionPool:
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
