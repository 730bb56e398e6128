"""The RQ worker: many jobs in flight in one asyncio loop, which it shares with the engine.

One thread runs rq's synchronous code (`ledger`), one beats (`leases`); jobs are tasks of the loop.

    claim N ids -> one transaction starts them -> tasks -> one transaction commits what finished meanwhile
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import redis
import redis.asyncio
import redis.exceptions
from rq.utils import now
from rq.worker.base import BaseWorker

from lenspool.errors import DeadlineExceeded, EngineFailed, JobCancelled, LenspoolError, to_wire
from lenspool.rq_json import JsonJob, JsonQueue, StrictJSON
from lenspool_worker.connections import asynchronous, blocking
from lenspool_worker.leases import Leases
from lenspool_worker.ledger import Entry, Ledger

log = logging.getLogger(__name__)

Handler = Callable[[dict[str, Any], str], Awaitable[dict[str, Any]]]
T = TypeVar("T")

MAX_RESULT_BYTES = 1_000_000
_MAX_ERROR = 10_000
_IO_S = 5.0
_PEEK_S = 5.0
_COLD_S = 10.0
"""Seconds that cancelled runs may take to end before the worker leaves without them."""

_TRANSIENT = (
    redis.exceptions.ConnectionError,  # loading its data, too
    redis.exceptions.TimeoutError,
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ReadOnlyError,
    OSError,
)
"""Refusals of Redis that pass."""


class PoolWorker(BaseWorker):
    """Serves the jobs of one model.

    Parameters
    ----------
    card
        JSON object that is published while the worker lives; needs `"id"`, and may name the worker in `"worker"`.
    handler
        Coroutine function of (document, job id) that returns a small JSON object. An error that it raises fails the job
        at once; one with `retryable` and `requeue` true sends the job to the queue again, as a lost worker does.
    connection
        Redis client; only its address is used.
    max_in_flight
        Jobs at a time.
    suspects
        Jobs at a time that have lost a worker before. One that lost two runs with nothing beside it, so that a job that
        kills its worker takes no other down with it in the end.
    lease
        Seconds without a beat after which other workers take the jobs.
    beat, reap
        Seconds between beats, and between looks for jobs of dead workers.
    commit_batch
        Most results in one transaction.
    stall_limit
        Seconds that the event loop may be blocked before the leases are left to lapse; default `lease`.
    grace
        Seconds that running jobs have to finish after `stop`; then they go back to the front of the queue.
    name
        Worker name; default the card's, or a unique one.

    Attributes
    ----------
    stats
        Counters: `claimed`, `committed`, `failed`, `fenced`, `requeued`, and `in_flight`.
    """

    job_class = JsonJob
    queue_class = JsonQueue

    def __init__(
        self,
        card: dict[str, Any],
        handler: Handler,
        *,
        connection: redis.Redis,
        max_in_flight: int = 256,
        suspects: int = 32,
        lease: float = 10.0,
        beat: float = 2.0,
        reap: float = 2.0,
        commit_batch: int = 64,
        stall_limit: float | None = None,
        grace: float = 30.0,
        name: str | None = None,
    ) -> None:
        self.lease = max(1, math.ceil(lease))  # rq counts in whole seconds
        super().__init__(
            [],
            name=name or card.get("worker") or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}",
            connection=blocking(connection, _IO_S),
            serializer=StrictJSON,
            prepare_for_work=False,  # would talk to Redis here
        )
        self.hostname, self.pid = socket.gethostname(), os.getpid()
        self.log = log
        self._handler = handler
        self._ledger = Ledger(self, card["id"])
        self.queues = [self._ledger.queue]
        self._async = asynchronous(connection, _IO_S)
        self._max_in_flight, self._max_suspects = max_in_flight, suspects
        self._beat_s, self._commit_batch, self._grace = beat, commit_batch, grace
        self._last_tick = time.monotonic()
        self._leases = Leases(
            self,
            self._ledger,
            card,
            beat=beat,
            reap=reap,
            last_tick=lambda: self._last_tick,
            stall_limit=self.lease if stall_limit is None else stall_limit,
        )
        self._io = ThreadPoolExecutor(1, "lenspool-io")
        self._entries: dict[str, Entry] = {}  # by execution id: running, or ended and not yet committed
        self._ended: list[Entry] = []
        self._committer: asyncio.Task[None] | None = None
        self._running = 0
        self._alone: Entry | None = None
        self._hold_until = 0.0
        self._stopping, self._changed, self._hungry = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.stats = dict.fromkeys(("claimed", "committed", "failed", "fenced", "requeued", "in_flight"), 0)

    # -- life

    async def serve(self, *, signals: bool = False) -> None:
        """Serve until `stop` is called, or until SIGTERM or SIGINT when `signals` is true, and the jobs are drained.

        A second `stop` or signal does not wait for running jobs.
        """
        self._loop = asyncio.get_running_loop()
        handled = (signal.SIGTERM, signal.SIGINT) if signals else ()
        for number in handled:
            self._loop.add_signal_handler(number, self.stop)
        helpers: list[asyncio.Task[None]] = []
        entered = False
        try:
            await self._call(self._enter)
            entered = True
            helpers += [asyncio.create_task(task) for task in (self._tick(), self._peek(), self._obey())]
            self._leases.start(self._io)
            await self._admit()
            await self._drain(self._grace)
        finally:
            await self._put_back()
            self._leases.stop()
            for task in helpers:
                task.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            if entered:
                await self._leave()
            self._io.shutdown(wait=False, cancel_futures=True)
            await self._async.connection_pool.disconnect()
            self.connection.connection_pool.disconnect()
            for number in handled:
                self._loop.remove_signal_handler(number)

    def work(self, *args: Any, **options: Any) -> bool:
        """Rq's entry: serve until a signal."""
        asyncio.run(self.serve(signals=True))
        return self.stats["claimed"] > 0

    def stop(self) -> None:
        """Take no more jobs and let `serve` return; called again, give the running jobs back at once."""
        if self._stopping.is_set():
            log.warning("%d jobs go back to the queue", len(self._entries))
            self._cancel_all()
        self._stopping.set()
        self._changed.set()

    def _enter(self) -> None:
        self._set_ip_address(self.connection)
        self.register_birth()
        self._leases.beat()

    async def _leave(self) -> None:
        for act in (self._leases.withdraw, self.register_death):
            try:
                await self._loop.run_in_executor(self._io, act)
            except (redis.exceptions.RedisError, OSError) as error:
                log.warning("leaving without a word: %s", error)  # what is left there expires

    def _set_connection(self, connection: redis.Redis) -> redis.Redis:
        return connection  # rq would set a socket timeout of minutes

    async def _tick(self) -> None:
        while True:
            self._last_tick = time.monotonic()
            await asyncio.sleep(0.25)

    async def _call(self, function: Callable[..., T], *args: Any) -> T:
        """Run synchronous code in the io thread, and again while Redis is away."""
        delay = 0.1
        while True:
            try:
                return await self._loop.run_in_executor(self._io, function, *args)
            except _TRANSIENT as error:
                log.warning("%s: %s", function.__name__, str(error)[:200] or type(error).__name__)
            await asyncio.sleep(delay)
            delay = min(delay * 2, 2.0)

    # -- taking jobs

    async def _admit(self) -> None:
        while not self._stopping.is_set():
            self._changed.clear()
            free = self._max_in_flight - self._running
            wait = self._hold_until - time.monotonic()
            if free > 0 and self._alone is None and wait <= 0 and len(self._ended) < 2 * self._max_in_flight:
                try:
                    taken = await self._take(free)
                except (redis.exceptions.RedisError, OSError) as error:  # ids claimed unheard: a reaper's
                    log.warning("claim: %s", str(error)[:200] or type(error).__name__)
                    taken, wait = 0, 0.5
                if taken:
                    continue
                wait = max(wait, self._beat_s)
            else:
                wait = max(wait, 0.0) or self._beat_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._changed.wait()

    async def _take(self, free: int) -> int:
        suspects = self._max_suspects - sum(entry.suspect for entry in self._entries.values())
        idle = not self._entries
        claim = await self._loop.run_in_executor(self._io, self._ledger.claim, free, max(suspects, 0), idle)
        if claim is None:  # rq suspend
            await asyncio.sleep(1.0)
            return 0
        if claim.jobs:
            entries = await self._start(claim.jobs)
            self.stats["claimed"] += len(claim.jobs)
            for entry in entries:
                self._launch(entry)
            if claim.alone and entries:
                self._alone = entries[0]
        elif not claim.waiting_alone:
            self._hungry.set()
        return len(claim.jobs)

    async def _start(self, jobs: list[Any]) -> list[Entry]:
        try:
            return await self._call(self._ledger.start, jobs)
        except redis.exceptions.RedisError:
            if len(jobs) == 1:
                log.exception("a job's keys cannot be written; it is left alone")
                return []
        return [entry for job in jobs for entry in await self._start([job])]

    async def _peek(self) -> None:
        """Wake the claim when the queue has jobs.

        `BLMOVE` from the head of a list to its own head takes nothing away, so it can be cancelled without loss.
        """
        key = self._ledger.queue.key
        while True:
            await self._hungry.wait()
            try:
                async with asyncio.timeout(_PEEK_S + _IO_S):
                    found = await self._async.blmove(key, key, _PEEK_S, "LEFT", "LEFT")
            except (redis.exceptions.RedisError, OSError, TimeoutError) as error:
                log.warning("peek: %s", str(error)[:200] or type(error).__name__)
                await asyncio.sleep(0.5)
                continue
            if found is not None:
                self._hungry.clear()
                self._changed.set()

    async def _obey(self) -> None:
        """Commands that rq sends to workers: stop one job, stop one execution, shut down."""
        while True:
            try:
                async with self._async.pubsub(ignore_subscribe_messages=True) as channel:
                    await channel.subscribe(self.pubsub_channel_name)
                    while True:
                        async with asyncio.timeout(_PEEK_S + _IO_S):
                            message = await channel.get_message(timeout=_PEEK_S)
                        if message is None:
                            await channel.ping()
                        elif message["type"] == "message":
                            self._command(message["data"])
            except (redis.exceptions.RedisError, OSError, TimeoutError) as error:
                log.warning("commands: %s", str(error)[:200] or type(error).__name__)
                await asyncio.sleep(0.5)

    def _command(self, data: bytes) -> None:
        try:
            command = json.loads(data)
            name, job_id = command["command"], command.get("job_id")
        except (ValueError, KeyError, TypeError, AttributeError):
            log.warning("not a command: %.100r", data)
            return
        if name == "shutdown":
            self.stop()
        elif name in ("stop-job", "stop-execution"):
            for entry in self.entries():
                if entry.job.id == job_id and command.get("execution_id") in (None, entry.execution.id):
                    entry.stop("abandoned" if command.get("abandoned") else "stopped")

    # -- running

    def _launch(self, entry: Entry) -> None:
        earlier = [e.task for e in self._entries.values() if e.job.id == entry.job.id and e.task is not None]
        for other in self.entries():
            if other.job.id == entry.job.id:
                other.stop("lost")  # Redis lost the job, or a reaper took it, and it came back here
        self._entries[entry.execution.id] = entry
        self._running += 1
        self.stats["in_flight"] = len(self._entries)
        entry.task = self._loop.create_task(self._run(entry, earlier))

    async def _run(self, entry: Entry, earlier: Sequence[asyncio.Task[None]]) -> None:
        """Run one job to its end, whatever the handler does."""
        entry.begun = True
        try:
            if entry.reason:
                raise asyncio.CancelledError
            if earlier:
                await asyncio.wait(earlier)
            await self._handle(entry)
        except asyncio.CancelledError:
            # without a reason it was the handler's own: something under it was cancelled
            cause = JobCancelled("the job was stopped") if entry.reason else EngineFailed("the run was cancelled")
            entry.end, entry.error = entry.reason or "failed", to_wire(cause)
        except Exception as error:
            entry.end, entry.error = "failed", _wire(error)
            if not isinstance(error, LenspoolError):
                log.exception("job %s", entry.job.id)
            elif error.retryable and getattr(error, "requeue", False):
                entry.end = "retried"
                self._hold_until = time.monotonic() + self._beat_s  # what just failed would fail the next job, too
        entry.job.ended_at = now()
        self._running -= 1
        self._ended.append(entry)
        self._changed.set()
        if self._committer is None or self._committer.done():
            self._committer = self._loop.create_task(self._commit())

    async def _handle(self, entry: Entry) -> None:
        limit = entry.job.timeout
        clock = asyncio.timeout(limit if limit and limit > 0 else None)
        try:
            async with clock:
                value = await self._handler(entry.document, entry.job.id)
        except TimeoutError:
            if not clock.expired():
                raise
            raise DeadlineExceeded("run", float(limit)) from None
        if not isinstance(value, dict) or len(StrictJSON.dumps(value)) > MAX_RESULT_BYTES:
            raise EngineFailed("the run's answer is not a small JSON object")
        entry.value, entry.end = value, "finished"

    async def _commit(self) -> None:
        """Commit what ended while the last transaction was under way."""
        while self._ended:
            batch, self._ended = self._ended[: self._commit_batch], self._ended[self._commit_batch :]
            try:
                await self._call(self._ledger.commit, batch)
            except Exception:
                log.exception("a batch could not be committed: one by one")
                for entry in batch:
                    try:
                        await self._call(self._ledger.commit, [entry])
                    except Exception:
                        log.exception("job %s could not be committed; its lease will lapse", entry.job.id)
            for entry in batch:
                del self._entries[entry.execution.id]
                if entry is self._alone:
                    self._alone = None
            self.stats["in_flight"] = len(self._entries)
            self._changed.set()

    # -- what ledger and leases use

    def entries(self) -> list[Entry]:
        """Jobs in flight, for any thread."""
        return list(self._entries.values())

    def others_in_flight(self, batch: Sequence[Entry]) -> bool:
        """Whether there are jobs in flight besides these."""
        return len(self._entries) > len(batch)

    def call_in_loop(self, function: Callable[..., object], *args: Any) -> None:
        """Have the loop call something, from any thread."""
        self._loop.call_soon_threadsafe(function, *args)

    # -- leaving

    def _cancel_all(self) -> None:
        for entry in self.entries():
            entry.stop("requeued")

    async def _drain(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._entries and time.monotonic() < end:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(end - time.monotonic()):
                    await self._changed.wait()

    async def _put_back(self) -> None:
        """Give back what still runs."""
        if self._entries:
            self._cancel_all()
            await self._drain(_COLD_S)


def _wire(error: Exception) -> str:
    """An error in wire form, whatever a handler put into it."""
    try:
        wire = to_wire(error)
    except (TypeError, ValueError):
        wire = ""
    if 0 < len(wire) < _MAX_ERROR:
        return wire
    return to_wire(EngineFailed(f"{type(error).__name__}: {error}"[: _MAX_ERROR // 2]))
