"""A worker's bookkeeping in Redis: claim, start and commit, many jobs at a time.

rq's own code writes rq's keys, so that `rq info` and the registries show the truth; it only buffers into a pipeline,
and one transaction carries it for a whole batch. Everything here is synchronous and runs in the worker's single io
thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rq.executions import Execution
from rq.job import JobStatus
from rq.results import Result
from rq.suspension import WORKERS_SUSPENDED
from rq.utils import as_text, now, utcformat
from rq.worker.base import WorkerStatus

from lenspool import keys, scripts
from lenspool.errors import DeadlineExceeded, InvalidJob, from_wire, to_wire
from lenspool.rq_json import (
    FAILURE_TTL,
    MAX_DOCUMENT_BYTES,
    RESULT_TTL,
    JsonJob,
    JsonQueue,
    StrictJSON,
    UnreadableJob,
)

if TYPE_CHECKING:
    from redis.client import Pipeline

    from lenspool_worker.pool_worker import PoolWorker

log = logging.getLogger(__name__)

_JOB_BYTES = MAX_DOCUMENT_BYTES + 100_000
_CLAIM_BYTES = 32_000_000
_COSTS = (1, 8)
"""Turns that a job of the interactive and of the batch lane takes: under floods in both, they get 8 jobs to 1."""

_SCHEDULED = (b"lane", b"client", b"traceparent")

End = Literal["finished", "failed", "stopped", "abandoned", "requeued", "retried", "lost"]
"""How a run ended. `abandoned`: stopped because nobody waits for it; `requeued`: the worker leaves, the job is not
charged; `retried`: the handler asks for another attempt; `lost`: the job is not this worker's any more."""


@dataclass(eq=False)
class Entry:
    """A job in this worker's hands.

    Attributes
    ----------
    lane, client
        The lane that it waited in, and of which client; empty for jobs that no lenspool client sent.
    trace
        Trace context of the call that it was made for; empty where nothing is traced.
    begun
        Its task has taken its first step: one cancelled before would end without running a line of its own.
    over
        It has ended, and waits to be committed.
    committed
        Its end is in Redis.
    reason
        Why its task was cancelled, when this worker did that.
    end, value, error
        Filled when the run is over; `error` is in wire form.
    """

    job: JsonJob
    document: dict[str, Any]
    execution: Execution
    suspect: bool = False
    lane: str = ""
    client: str = ""
    trace: str = ""
    task: asyncio.Task[None] | None = None
    begun: bool = False
    over: bool = False
    committed: bool = False
    reason: End | None = None
    end: End = "lost"
    value: dict[str, Any] | None = None
    error: str = ""

    def stop(self, reason: End) -> bool:
        """Cancel the run; False when it is over, or being stopped already."""
        if self.task is None or self.task.done() or self.reason is not None:
            return False
        self.reason = reason
        if self.begun:
            self.task.cancel()
        return True


class Room(NamedTuple):
    """What a worker has room for.

    Attributes
    ----------
    free, batch, suspects
        Jobs; of them at most so many of the batch lane, and that lost a worker before.
    idle
        Nothing is in flight: a job that must run alone may be taken.
    per_client
        Most jobs of one client in all workers; None is any number.
    clients
        Jobs in this worker by client.
    """

    free: int
    batch: int
    suspects: int
    idle: bool
    per_client: int | None
    clients: Mapping[str, int]


class Claim(NamedTuple):
    """What one claim brought.

    Attributes
    ----------
    jobs
        `[id, flat hash, has waited for too long]` of each job.
    alone
        The one job must run with nothing beside it.
    waiting_alone
        Number of jobs that wait for a worker with nothing in flight.
    """

    jobs: list[Any]
    alone: bool
    waiting_alone: int


class Ledger:
    """Claims and commits for one worker."""

    def __init__(self, worker: PoolWorker, card_id: str) -> None:
        self._worker = worker
        self._redis = worker.connection
        self.queue = JsonQueue(keys.queue_name(card_id), connection=self._redis)
        suspects = JsonQueue(keys.suspects_name(card_id), connection=self._redis)
        alone = JsonQueue(keys.alone_name(card_id), connection=self._redis)
        self._wip = self.queue.started_job_registry.key
        self._claim_keys = [
            self.queue.key,
            suspects.key,
            alone.key,
            self.queue.intermediate_queue_key,
            JsonQueue.redis_queues_keys,
            keys.ring(card_id),
            keys.turn(card_id),
            WORKERS_SUSPENDED,
            keys.held(card_id),
        ]
        self._bell = keys.work(card_id)
        self._claim = self._redis.register_script(scripts.CLAIM)
        self._notify = self._redis.register_script(scripts.NOTIFY)

    # -- claiming

    def claim(self, room: Room) -> Claim | None:
        """Take as many jobs as there is room for; None when rq is suspended."""
        prefix = JsonJob.redis_job_namespace_prefix
        arguments: list[Any] = [room.free, room.suspects, int(room.idle), prefix, self._worker.name]
        arguments += [
            _JOB_BYTES,
            _CLAIM_BYTES,
            room.batch,
            room.per_client or 0,
            *_COSTS,
            keys.card(""),
            keys.WAITERS_TTL,
        ]
        arguments += [part for client in room.clients.items() for part in client]
        kind, waiting_alone, jobs = self._claim(keys=self._claim_keys, args=arguments)
        if kind == b"suspended":
            return None
        return Claim(jobs, as_text(kind) == "alone", waiting_alone)

    def start(self, claimed: list[Any]) -> list[Entry]:
        """Register executions for claimed jobs in one transaction; what is no job of this pool fails alone."""
        entries: list[Entry] = []
        with self._redis.pipeline() as pipeline:
            for raw_id, flat, late in claimed:
                job_id = as_text(raw_id)
                fields = dict(zip(flat[::2], flat[1::2], strict=True))
                try:
                    if late:
                        raise DeadlineExceeded("queue", float(fields.get(b"queue_timeout", 0)))
                    job, document = self._read(job_id, fields)
                except (UnreadableJob, InvalidJob, DeadlineExceeded) as error:
                    log.warning("job %s refused: %s", job_id, error)
                    self.bury(pipeline, job_id, error)
                    continue
                execution = Execution.create(job, self._worker.lease, pipeline=pipeline, worker_name=self._worker.name)
                job.prepare_for_execution(self._worker.name, pipeline=pipeline)
                pipeline.persist(job.key)
                pipeline.lrem(self.queue.intermediate_queue_key, 1, job_id)
                entry = Entry(job, document, execution, suspect=job.retries_left == 1)
                said = (fields.get(name, b"").decode(errors="replace") for name in _SCHEDULED)
                entry.lane, entry.client, entry.trace = said
                entries.append(entry)
            self._worker.set_state(WorkerStatus.BUSY, pipeline=pipeline)
            pipeline.execute()
        return entries

    def _read(self, job_id: str, fields: Mapping[bytes, bytes]) -> tuple[JsonJob, dict[str, Any]]:
        if not fields:
            raise InvalidJob("document", "is too large", f"at most {MAX_DOCUMENT_BYTES} bytes")
        job = JsonJob(job_id, connection=self._redis)
        job.restore(fields)
        if job.origin != self.queue.name:
            raise InvalidJob("job", f"was made for the queue {job.origin[:100]!r}", self.queue.name)
        job.home = self.queue
        return job, job.document()

    def bury(self, pipeline: Pipeline, job_id: str, error: Exception) -> None:
        """Fail a job that rq's code cannot handle, and tell its waiters."""
        self._worker.counters["failed"] += 1
        self._worker.failures[type(error).__name__] += 1
        wire = to_wire(InvalidJob("job", "is not readable") if isinstance(error, UnreadableJob) else error)
        key = JsonJob.key_for(job_id)
        pipeline.hset(key, mapping={"status": JobStatus.FAILED.value, "ended_at": utcformat(now())})
        pipeline.expire(key, FAILURE_TTL)
        pipeline.zadd(self.queue.failed_job_registry.key, {job_id: int(time.time()) + FAILURE_TTL})
        pipeline.lrem(self.queue.intermediate_queue_key, 1, job_id)
        result = Result(job_id, Result.Type.FAILED, self._redis, exc_string=wire, serializer=StrictJSON)
        result.save(FAILURE_TTL, pipeline=pipeline)
        self.notify(pipeline, job_id, "failed", wire)

    # -- committing

    def commit(self, batch: Sequence[Entry]) -> None:
        """Write the ends of runs, in one transaction."""
        mine = [entry for entry in batch if entry.end != "lost"]
        mine = self._fence(mine)
        stats = self._worker.counters
        with self._redis.pipeline() as pipeline:
            succeeded, worked = 0, timedelta()
            for entry in mine:
                entry.execution.delete(job=entry.job, pipeline=pipeline)
                self._end(entry, pipeline)
                worked += entry.job.ended_at - entry.job.started_at
                succeeded += entry.end == "finished"
            for entry in batch:
                if entry not in mine:
                    entry.execution.delete(job=entry.job, pipeline=pipeline)
            pipeline.hincrby(self._worker.key, "successful_job_count", succeeded)
            self._worker.increment_total_working_time(worked, pipeline)
            if len(self._worker.entries()) <= len(batch):
                self._worker.set_state(WorkerStatus.IDLE, pipeline=pipeline)
            pipeline.execute()
        for entry in batch:
            entry.committed = True
        if fenced := [entry.job.id for entry in batch if entry not in mine]:
            log.warning("fenced: results of jobs that are not this worker's any more: %s", ", ".join(fenced))
            stats["fenced"] += len(fenced)
        for entry in mine:
            stats["requeued" if entry.end in ("requeued", "retried") else "committed"] += 1
            if entry.end == "failed":
                stats["failed"] += 1
                self._worker.failures[type(from_wire(entry.error)).__name__] += 1

    def _fence(self, batch: list[Entry]) -> list[Entry]:
        """The entries that are still this worker's.

        After a stall beyond the lease a job may be with another worker. A job whose hash is gone too is nobody's:
        Redis came back empty, and the result is as good as any.
        """
        if not batch:
            return []
        with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.zmscore(self._wip, [entry.execution.composite_key for entry in batch])
            for entry in batch:
                pipeline.hexists(entry.job.key, "data")
            scores, *exist = pipeline.execute()
        for entry, exists in zip(batch, exist, strict=True):
            entry.job.stored = exists
        return [entry for entry, score in zip(batch, scores, strict=True) if score is not None or not entry.job.stored]

    def _end(self, entry: Entry, pipeline: Pipeline) -> None:
        job = entry.job
        about: dict[str, Any] = {
            "worker_name": self._worker.name,
            "execution_id": entry.execution.id,
            "execution_started_at": entry.execution.created_at,
            "execution_ended_at": job.ended_at,
        }
        pipeline.hdel(job.key, "abandoned")
        if entry.end == "retried" and not job.should_retry:
            entry.end = "failed"
        if entry.end == "finished":
            job._result = entry.value
            job._handle_success(RESULT_TTL, pipeline=pipeline, **about)
            pipeline.expire(job.key, RESULT_TTL)
            self.notify(pipeline, job.id, "finished", StrictJSON.dumps(entry.value).decode())
        elif entry.end == "requeued":
            self.queue._enqueue_job(job, pipeline=pipeline, at_front=True)
            pipeline.publish(self._bell, 1)
        elif entry.end == "retried":
            self._worker.increment_failed_job_count(pipeline)
            job.retry(self.queue, pipeline)
            pipeline.publish(self._bell, 1)
        else:
            job.retries_left = 0
            job.set_status(JobStatus.FAILED if entry.end == "failed" else JobStatus.STOPPED, pipeline=pipeline)
            job._handle_failure(entry.error, pipeline=pipeline, **about)
            if entry.end == "abandoned":
                pipeline.hset(job.key, "abandoned", 1)
            self._worker.increment_failed_job_count(pipeline)
            self.notify(pipeline, job.id, entry.end, entry.error)

    def notify(self, pipeline: Pipeline, job_id: str, state: str, payload: str) -> None:
        """Tell every waiter of a job how it ended."""
        arguments = [keys.DONE_PREFIX, keys.DONE_TTL, job_id, state, payload]
        self._notify(keys=[keys.waiters(job_id)], args=arguments, client=pipeline)
