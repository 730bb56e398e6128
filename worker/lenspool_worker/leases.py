"""Leases: a worker that beats keeps its jobs, and the jobs of one that does not go to others.

A timer thread beats, so that a loop busy for a moment loses nothing; when the loop has stalled for too long the thread
stops beating on purpose, since then nobody finishes the jobs.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from rq import worker_registration
from rq.executions import Execution
from rq.job import JobStatus
from rq.utils import as_text
from rq.worker.base import WorkerStatus

from lenspool import keys
from lenspool.errors import WorkerLost, to_wire
from lenspool.rq_json import LOSSES, RESULT_TTL, JsonJob, UnreadableJob
from lenspool_worker.ledger import Ledger
from lenspool_worker.taken import Entry

if TYPE_CHECKING:
    from lenspool_worker.pool_worker import PoolWorker

log = logging.getLogger(__name__)

_CARD_BEATS = 4
_FORGET_S = 3600
"""Age at which a dead worker's name leaves the index of cards."""


class QueueLimits(NamedTuple):
    """Most jobs that may wait: of one client in one lane, and of all together. Those of the last worker hold."""

    client: int = 200_000
    model: int = 1_000_000


class Leases:
    """Beats for one worker's jobs, and reaps the jobs of dead workers of the same queue.

    Parameters
    ----------
    beat, reap
        Seconds between two beats, and between two looks for lost jobs.
    last_tick
        When the event loop was last seen alive (monotonic seconds).
    stall_limit
        Seconds without a tick after which beating stops.
    """

    def __init__(
        self,
        worker: PoolWorker,
        ledger: Ledger,
        card: dict[str, Any],
        limits: QueueLimits,
        *,
        beat: float,
        reap: float,
        last_tick: Callable[[], float],
        stall_limit: float,
    ) -> None:
        self._worker = worker
        self._ledger = ledger
        self._redis = worker.connection
        self._queue = ledger.queue
        self._card, self._limits = card, limits
        self._beat_s, self._reap_s = beat, reap
        self._last_tick = last_tick
        self._stall_limit = stall_limit
        self._halt = threading.Event()
        self._thread: threading.Thread | None = None
        self._last_beat = time.monotonic()
        self._no_reaping_until = 0.0

    # -- the timer thread

    def start(self, io: ThreadPoolExecutor) -> None:
        """Beat from now on; the work is done in the io thread."""
        self._thread = threading.Thread(target=self._run, args=(io,), name="lenspool-beat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Beat no more. Does not wait: the thread ends on its own."""
        self._halt.set()

    def _run(self, io: ThreadPoolExecutor) -> None:
        last_reap = 0.0
        while not self._halt.wait(self._beat_s):
            stalled = time.monotonic() - self._last_tick()
            if stalled > self._stall_limit:
                log.error("the event loop has stalled for %.0f s: leases lapse", stalled)
                continue
            try:
                io.submit(self.beat).result(timeout=self._worker.lease)
                if time.monotonic() - last_reap >= self._reap_s:
                    last_reap = time.monotonic()
                    io.submit(self.reap).result(timeout=60)
            except Exception as error:
                if not self._halt.is_set():
                    log.warning("beat: %s: %s", type(error).__name__, error)

    # -- in the io thread

    def beat(self) -> None:
        """Renew the leases of all jobs in flight, the worker's registration and its card."""
        if self._halt.is_set():
            return  # was queued before the worker left, and would bring it back
        worker = self._worker
        registry = self._queue.started_job_registry
        # the loop may not have heard yet of what was committed: a beat would write its execution anew
        entries = [entry for entry in worker.entries() if not entry.committed]
        with self._redis.pipeline() as pipeline:
            worker.heartbeat(max(worker.lease * 4, 60), pipeline=pipeline)
            worker_registration.register(worker, pipeline)  # again each time: Redis may have come back empty
            worker.set_state(WorkerStatus.BUSY if entries else WorkerStatus.IDLE, pipeline=pipeline)
            pipeline.sadd(self._queue.redis_queues_keys, self._queue.key)
            self._publish(pipeline)
            at = []
            for entry in entries:
                at.append(len(pipeline))
                # ZADD XX answers 0 for "updated" and for "missing" alike
                pipeline.zscore(registry.key, entry.execution.composite_key)
                pipeline.hmget(JsonJob.key_for(entry.id), "status", "abandoned")
                entry.execution.heartbeat(registry, worker.lease, pipeline=pipeline)
            replies = pipeline.execute()
            for entry, i in zip(entries, at, strict=True):
                self._judge(entry, replies[i], *replies[i + 1])
            if replies[0] == 1:  # the worker's hash was gone
                pipeline.hset(worker.key, mapping=worker.serialize())
                pipeline.expire(worker.key, max(worker.lease * 4, 60))
                pipeline.execute()
        moment = time.monotonic()
        if moment - self._last_beat > worker.lease:
            # Redis was away, or this process slept: others may still be about to renew what looks lapsed
            self._no_reaping_until = moment + worker.lease
        self._last_beat = moment

    def _judge(self, entry: Entry, score: float | None, status: bytes | None, abandoned: bytes | None) -> None:
        """Stop a run that is in vain: reaped or cancelled meanwhile, or given up by everyone who waited."""
        if score is None and status is not None:
            self._worker.call_in_loop(entry.stop, "lost")
        elif abandoned:
            self._worker.call_in_loop(entry.stop, "abandoned")

    def _publish(self, pipeline: Any) -> None:
        ttl = self._beat_s * _CARD_BEATS
        text = json.dumps(self._card, separators=(",", ":"))  # each time: it carries the engine's counters
        pipeline.set(keys.card(self._worker.name), text, px=int(ttl * 1000))
        pipeline.zadd(keys.CARDS, {self._worker.name: time.time() + ttl})
        limits = keys.limits(self._card["id"])
        pipeline.hset(limits, mapping=self._limits._asdict())
        pipeline.expire(limits, _FORGET_S)

    def withdraw(self) -> None:
        """Remove the card."""
        with self._redis.pipeline() as pipeline:
            pipeline.delete(keys.card(self._worker.name))
            pipeline.zrem(keys.CARDS, self._worker.name)
            pipeline.execute()

    def reap(self) -> None:
        """Put jobs whose lease has lapsed back into the queue, or fail them when they lost too many workers."""
        if time.monotonic() < self._no_reaping_until:
            return
        lock = keys.reaper(self._queue.name)
        if not self._redis.set(lock, self._worker.name, nx=True, px=max(int(self._reap_s * 900), 1)):
            return
        self._bury_unreadable()
        dead: list[JsonJob] = []
        # rq decides after its handlers whether the job is tried again
        self._queue.started_job_registry.cleanup(exception_handlers=[lambda job, *_: dead.append(job)])
        if dead:
            log.warning("%d jobs lost their worker", len(dead))
        with self._redis.pipeline() as pipeline:
            for job in dead:
                if job.get_status(refresh=False) == JobStatus.FAILED:
                    self._ledger.notify(pipeline, job.id, "failed", to_wire(WorkerLost(LOSSES + 1)))
            pipeline.execute()
        self._tidy()

    def _bury_unreadable(self) -> None:
        """Fail lapsed jobs that rq cannot parse: its clean-up would drop their lease and leave them `started`."""
        lapsed = self._redis.zrangebyscore(self._queue.started_job_registry.key, 0, int(time.time()))
        for member in lapsed:
            execution = Execution.from_composite_key(as_text(member), self._redis)
            job_id = execution.job_id
            raw = self._redis.hgetall(JsonJob.key_for(job_id))
            try:
                if raw:
                    JsonJob(job_id, connection=self._redis).restore(raw)
            except UnreadableJob as error:
                log.warning("%s", error)
                with self._redis.pipeline() as pipeline:
                    self._ledger.bury(pipeline, execution, error)
                    pipeline.execute()

    def _tidy(self) -> None:
        """Forget what has expired: ended jobs, dead workers."""
        moment = time.time()
        self._queue.finished_job_registry.cleanup()
        self._queue.failed_job_registry.cleanup()
        worker_registration.clean_worker_registry(self._queue)
        with self._redis.pipeline() as pipeline:
            pipeline.zremrangebyscore(self._queue.canceled_job_registry.key, "-inf", moment - RESULT_TTL)
            pipeline.zremrangebyscore(keys.CARDS, "-inf", moment - _FORGET_S)
            pipeline.execute()
