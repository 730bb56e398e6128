"""The RQ worker: many jobs in flight in one asyncio loop, which it shares with the engine.

One thread runs rq's synchronous code (`ledger`), one beats (`leases`); jobs are tasks of the loop.

    one call claims and starts N jobs -> tasks -> one call commits what finished meanwhile
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import redis
import redis.exceptions
from rq.worker.base import BaseWorker

from lenspool import keys
from lenspool.rq_json import JsonJob, JsonQueue, StrictJSON
from lenspool_worker.bells import Bells
from lenspool_worker.connections import asynchronous, blocking
from lenspool_worker.leases import Leases, QueueLimits
from lenspool_worker.ledger import Ledger
from lenspool_worker.runs import Handler, Runs
from lenspool_worker.taken import End, Entry, Room

log = logging.getLogger(__name__)

T = TypeVar("T")

_IO_S = 5.0
_SOON_S = 0.01
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
    per_client
        Jobs of one client at a time, here and in the other workers of the model that limit them; default any.
    reserve
        Places that jobs of the batch lane leave free, for questions of someone who waits; default an eighth.
    limits
        Most jobs that may wait.
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
    counters
        `claimed`, `committed`, `failed`, `fenced` and `requeued` jobs since the start.
    failures
        The failed ones by the name of their error.
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
        per_client: int | None = None,
        reserve: int | None = None,
        limits: QueueLimits | None = None,
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
        self._ledger = Ledger(self, card["id"])
        self.queues = [self._ledger.queue]
        self._async = asynchronous(connection, _IO_S)
        self._max_in_flight, self._max_suspects = max_in_flight, suspects
        self._per_client = per_client
        self._reserve = max_in_flight // 8 if reserve is None else reserve
        self._beat_s, self._grace = beat, grace
        self._io = ThreadPoolExecutor(1, "lenspool-io")
        self._runs = Runs(handler, self._commit, batch=commit_batch, pause=beat)
        self._bells = Bells(
            self._async,
            keys.work(card["id"]),
            self.pubsub_channel_name,
            work=self._runs.changed.set,
            command=self._command,
        )
        self._last_tick = time.monotonic()
        self._leases = Leases(
            self,
            self._ledger,
            card,
            limits or QueueLimits(),
            beat=beat,
            reap=reap,
            last_tick=lambda: self._last_tick,
            stall_limit=self.lease if stall_limit is None else stall_limit,
        )
        self._alone = False
        self._holds: set[str] = set()
        self._stopping = asyncio.Event()
        self.failures: Counter[str] = Counter()
        self.counters = dict.fromkeys(("claimed", "committed", "failed", "fenced", "requeued"), 0)

    @property
    def stats(self) -> dict[str, Any]:
        """The counters, `in_flight`, and `failures` by the name of the error."""
        return {**self.counters, "in_flight": len(self._runs), "failures": dict(self.failures)}

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
            watches = (self._tick(), self._bells.watch_jobs(), self._bells.watch_commands())
            helpers += [asyncio.create_task(watch) for watch in watches]
            self._leases.start(self._io)
            await self._admit()
            await self._runs.drained(self._grace)
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
        if self._stopping.is_set() and len(self._runs):
            log.warning("%d jobs go back to the queue", len(self._runs))
            self._runs.stop_all("requeued")
        self._stopping.set()
        self._runs.changed.set()

    def hold(self, reason: str) -> None:
        """Take no jobs until every reason is released."""
        self._holds.add(reason)

    def release(self, reason: str) -> None:
        """Take jobs again, unless there is another reason not to."""
        self._holds.discard(reason)
        self._runs.changed.set()

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
        runs = self._runs
        while not self._stopping.is_set():
            runs.changed.clear()
            self._alone = self._alone and len(runs) > 0
            wait = runs.hold_until - time.monotonic()
            if wait <= 0:
                wait = self._beat_s
                free = self._max_in_flight - runs.running
                held = self._holds or self._alone or runs.uncommitted >= 2 * self._max_in_flight
                if free > 0 and not held:
                    try:
                        taken = await self._take(free)
                        if taken == free:
                            continue
                        if taken:
                            wait = _SOON_S  # there is hardly more; let what is short be committed before another look
                    except (redis.exceptions.RedisError, OSError) as error:
                        log.warning("claim: %s", str(error)[:200] or type(error).__name__)
                        wait = 0.5
                    except Exception:
                        log.exception("claim; the next one follows")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await runs.changed.wait()

    async def _take(self, free: int) -> int:
        """Claim and launch up to `free` jobs; their number."""
        running = [entry for entry in self._runs.entries() if not entry.over]
        room = Room(
            free,
            max(self._max_in_flight - self._reserve - sum(entry.lane == "batch" for entry in running), 0),
            max(self._max_suspects - self._runs.suspects, 0),
            idle=not len(self._runs),
            per_client=self._per_client,
            # also those that ended, until Redis knows: it says how many a client has
            clients=Counter(e.client for e in self._runs.entries() if e.client and not e.committed),
        )
        claim = await self._loop.run_in_executor(self._io, self._ledger.claim, room)
        if claim is None:  # rq suspend
            await asyncio.sleep(1.0)
            return 0
        self.counters["claimed"] += claim.taken
        for entry in claim.entries:
            self._runs.launch(entry)
        self._alone = claim.alone
        if claim.refused:
            await self._call(self._ledger.refuse, claim.refused)
        return claim.taken

    async def _commit(self, batch: Sequence[Entry]) -> None:
        await self._call(self._ledger.commit, batch)

    def _command(self, command: dict[str, Any]) -> None:
        if command["command"] == "shutdown":
            self.stop()
        elif command["command"] in ("stop-job", "stop-execution"):
            reason: End = "abandoned" if command.get("abandoned") else "stopped"
            self._runs.stop(command.get("job_id", ""), command.get("execution_id"), reason)

    # -- what ledger and leases use

    def entries(self) -> list[Entry]:
        """Jobs in flight, for any thread."""
        return self._runs.entries()

    def call_in_loop(self, function: Callable[..., object], *args: Any) -> None:
        """Have the loop call something, from any thread."""
        self._loop.call_soon_threadsafe(function, *args)

    async def _put_back(self) -> None:
        """Give back what still runs."""
        if len(self._runs):
            self._runs.stop_all("requeued")
            await self._runs.drained(_COLD_S)
