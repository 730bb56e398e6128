"""A worker's bookkeeping in Redis: claims and commits, many jobs at a time.

What happens to every job is one call of a script (`scripts`); what happens to few of them, rq's own code writes, which
only buffers into a pipeline, so that one transaction carries it. Everything here is synchronous and runs in the
worker's single io thread.
"""

from __future__ import annotations

import base64
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import redis.exceptions
from rq.executions import Execution, ExecutionRegistry
from rq.job import JobStatus
from rq.results import Result
from rq.suspension import WORKERS_SUSPENDED
from rq.utils import as_text, now, utcformat
from rq.worker.base import WorkerStatus

from lenspool import keys
from lenspool.errors import DeadlineExceeded, InvalidJob, from_wire, to_wire
from lenspool.rq_json import (
    FAILURE_TTL,
    MAX_DOCUMENT_BYTES,
    RESULT_TTL,
    JsonJob,
    JsonQueue,
    StrictJSON,
    UnreadableJob,
    read,
)
from lenspool.scripts import NOTIFY
from lenspool_worker import scripts
from lenspool_worker.taken import Claim, Entry, Refusal, Room

if TYPE_CHECKING:
    from redis.client import Pipeline

    from lenspool_worker.pool_worker import PoolWorker

log = logging.getLogger(__name__)

_JOB_BYTES = MAX_DOCUMENT_BYTES + 100_000
_CLAIM_BYTES = 32_000_000
_COSTS = (1, 8)
"""Turns that a job of the interactive and of the batch lane takes: under floods in both, they get 8 jobs to 1."""

_PREFIXES = (
    JsonJob.redis_job_namespace_prefix,
    Execution("", "", None).key.removesuffix(":"),
    ExecutionRegistry("", None).key,
)
"""Of jobs, of executions, and of a job's executions."""


class Ledger:
    """Claims and commits for one worker."""

    def __init__(self, worker: PoolWorker, card_id: str) -> None:
        self._worker = worker
        self._redis = worker.connection
        self.queue = JsonQueue(keys.queue_name(card_id), connection=self._redis)
        self._started = self.queue.started_job_registry
        self._claim_keys = [
            self.queue.key,
            JsonQueue(keys.suspects_name(card_id), connection=self._redis).key,
            JsonQueue(keys.alone_name(card_id), connection=self._redis).key,
            JsonQueue.redis_queues_keys,
            keys.ring(card_id),
            keys.turn(card_id),
            WORKERS_SUSPENDED,
            keys.held(card_id),
            self._started.key,
            worker.key,
            self._execution("", "").worker_executions_key,
        ]
        self._bell = keys.work(card_id)
        self._claim = self._redis.register_script(scripts.CLAIM)
        self._commit = self._redis.register_script(scripts.COMMIT)
        self._notify = self._redis.register_script(NOTIFY)
        self._ids = ""
        self._unheard = False

    def _execution(self, job_id: str, execution_id: str) -> Execution:
        return Execution(execution_id, job_id, self._redis, self._worker.name)

    # -- claiming

    def claim(self, room: Room) -> Claim | None:
        """Take as many jobs as there is room for, and start them; None when rq is suspended.

        After a claim whose answer was lost, what that one took.
        """
        if not self._unheard:
            self._ids = uuid.uuid4().hex[:24]
        moment = now()
        arguments: list[Any] = [
            room.free,
            room.suspects,
            int(room.idle),
            _JOB_BYTES,
            _CLAIM_BYTES,
            room.batch,
            room.per_client or 0,
            *_COSTS,
            self._worker.name,
            self._worker.lease,
            moment.timestamp(),
            int(moment.timestamp()),
            utcformat(moment),
            self._ids,
            int(self._unheard),
            *_PREFIXES,
            keys.card(""),
            keys.WAITERS_TTL,
        ]
        arguments += [part for client in room.clients.items() for part in client]
        self._unheard = True
        kind, waiting_alone, jobs = self._claim(keys=self._claim_keys, args=arguments)
        self._unheard = False
        if kind == b"suspended" and not jobs:
            return None
        return Claim(*self._read(jobs, moment), kind == b"alone", waiting_alone)

    def _read(self, jobs: Sequence[Any], moment: datetime) -> tuple[list[Entry], list[Refusal]]:
        """From `[id, execution id, flat hash, has waited for too long]` of each job that was claimed."""
        entries, refused = [], []
        for raw_id, execution_id, flat, late in jobs:
            fields = dict(zip(flat[::2], flat[1::2], strict=True))
            execution = self._execution(as_text(raw_id), as_text(execution_id))
            execution.created_at = moment
            try:
                if late:
                    raise DeadlineExceeded("queue", float(fields.get(b"queue_timeout", 0)))
                entries.append(self._entry(execution, fields))
            except (UnreadableJob, InvalidJob, DeadlineExceeded) as error:
                refused.append(Refusal(execution, error))
            except Exception as error:  # what we did not think of must not cost the other jobs of the claim
                log.exception("job %s cannot be read", execution.job_id)
                refused.append(Refusal(execution, UnreadableJob(str(error))))
        return entries, refused

    def refuse(self, refused: Sequence[Refusal]) -> None:
        """Fail jobs, each on its own."""
        for execution, error in refused:
            log.warning("job %s refused: %s", execution.job_id, error)
            try:
                with self._redis.pipeline() as pipeline:
                    self.bury(pipeline, execution, error)
                    pipeline.execute()
            except redis.exceptions.ResponseError:
                log.exception("a job's keys cannot be written; it is left alone")

    def _entry(self, execution: Execution, fields: Mapping[bytes, bytes]) -> Entry:
        if not fields:
            raise InvalidJob("document", "is too large", f"at most {MAX_DOCUMENT_BYTES} bytes")
        entry = Entry(execution.job_id, execution, read(fields, self.queue.name, self._redis), fields, self.queue)
        entry.timeout = float(fields.get(b"timeout") or 0) or None
        entry.lane, entry.client, entry.trace = (
            fields.get(name, b"").decode(errors="replace") for name in (b"lane", b"client", b"traceparent")
        )
        entry.suspect = fields.get(b"retries_left") == b"1"
        return entry

    def bury(self, pipeline: Pipeline, execution: Execution, error: Exception) -> None:
        """Fail a started job that rq's code cannot handle, and tell its waiters."""
        job_id = execution.job_id
        self._worker.counters["failed"] += 1
        self._worker.failures[type(error).__name__] += 1
        wire = to_wire(InvalidJob("job", "is not readable") if isinstance(error, UnreadableJob) else error)
        key = JsonJob.key_for(job_id)
        pipeline.hset(key, mapping={"status": JobStatus.FAILED.value, "ended_at": utcformat(now())})
        pipeline.expire(key, FAILURE_TTL)
        pipeline.zadd(self.queue.failed_job_registry.key, {job_id: int(time.time()) + FAILURE_TTL})
        self._drop(pipeline, execution)
        result = Result(job_id, Result.Type.FAILED, self._redis, exc_string=wire, serializer=StrictJSON)
        result.save(FAILURE_TTL, pipeline=pipeline)
        self.notify(pipeline, job_id, "failed", wire)

    def _drop(self, pipeline: Pipeline, execution: Execution) -> None:
        """As `Execution.delete`, without a job."""
        pipeline.delete(execution.key)
        self._started.remove_execution(execution, pipeline=pipeline)
        ExecutionRegistry(execution.job_id, self._redis).remove(execution, pipeline=pipeline)
        pipeline.srem(execution.worker_executions_key, execution.composite_key)

    # -- committing

    def commit(self, batch: Sequence[Entry]) -> None:
        """Write the ends of runs."""
        ends = self._succeed([entry for entry in batch if entry.end == "finished"], len(batch))
        self._conclude([entry for entry in batch if ends.get(entry, b"unknown") == b"unknown"], len(batch))
        for entry in batch:
            entry.committed = True
            if ends.get(entry) == b"lost":
                entry.end = "lost"
        stats = self._worker.counters
        if fenced := [entry.id for entry in batch if entry.end == "lost"]:
            log.warning("fenced: results of jobs that are not this worker's any more: %s", ", ".join(fenced))
            stats["fenced"] += len(fenced)
        for entry in batch:
            if entry.end != "lost":
                stats["requeued" if entry.end in ("requeued", "retried") else "committed"] += 1
            if entry.end == "failed":
                stats["failed"] += 1
                self._worker.failures[type(from_wire(entry.error)).__name__] += 1

    def _idle(self, ending: int) -> bool:
        """Whether nothing is in flight but so many jobs that are about to end."""
        return len(self._worker.entries()) <= ending

    def _succeed(self, batch: Sequence[Entry], ending: int) -> dict[Entry, bytes]:
        """Commit results; of each `committed`, `lost`, or `unknown`: then Redis has forgotten the job."""
        if not batch:
            return {}
        touched = [self._started.key, self.queue.finished_job_registry.key, *self._claim_keys[-2:]]
        arguments: list[Any] = [self._worker.name, RESULT_TTL, keys.DONE_TTL, int(time.time())]
        arguments += [int(self._idle(ending)), *_PREFIXES, Result.get_key(""), keys.waiters(""), keys.DONE_PREFIX]
        for entry in batch:
            began = entry.execution.created_at.timestamp()
            arguments += (entry.id, entry.execution.id, utcformat(_time(entry.ended)), began, entry.ended)
            arguments += (base64.b64encode(entry.value), entry.value)
        return dict(zip(batch, self._commit(keys=touched, args=arguments), strict=True))

    def _conclude(self, batch: Sequence[Entry], ending: int) -> None:
        """Write all other ends, in one transaction."""
        if not batch:
            return
        mine = self._fence([entry for entry in batch if entry.end != "lost"])
        with self._redis.pipeline() as pipeline:
            succeeded, worked = 0, timedelta()
            for entry in batch:
                self._drop(pipeline, entry.execution)
                if entry not in mine:
                    entry.end = "lost"
                    continue
                entry.job.ended_at = _time(entry.ended)
                self._end(entry, pipeline)
                worked += entry.job.ended_at - entry.execution.created_at
                succeeded += entry.end == "finished"
            pipeline.hincrby(self._worker.key, "successful_job_count", succeeded)
            self._worker.increment_total_working_time(worked, pipeline)
            if self._idle(ending):
                self._worker.set_state(WorkerStatus.IDLE, pipeline=pipeline)
            pipeline.execute()

    def _fence(self, batch: list[Entry]) -> list[Entry]:
        """The entries that are still this worker's.

        After a stall beyond the lease a job may be with another worker. A job whose hash is gone too is nobody's:
        Redis came back empty, and the result is as good as any.
        """
        if not batch:
            return []
        with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.zmscore(self._started.key, [entry.execution.composite_key for entry in batch])
            for entry in batch:
                pipeline.hexists(JsonJob.key_for(entry.id), "data")
            scores, *exist = pipeline.execute()
        return [
            entry for entry, score, exists in zip(batch, scores, exist, strict=True) if score is not None or not exists
        ]

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
            job._result = StrictJSON.loads(entry.value)
            job._handle_success(RESULT_TTL, pipeline=pipeline, **about)
            pipeline.expire(job.key, RESULT_TTL)
            self.notify(pipeline, job.id, "finished", entry.value)
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

    def notify(self, pipeline: Pipeline, job_id: str, state: str, payload: str | bytes) -> None:
        """Tell every waiter of a job how it ended."""
        arguments = [keys.DONE_PREFIX, keys.DONE_TTL, job_id, state, payload]
        self._notify(keys=[keys.waiters(job_id)], args=arguments, client=pipeline)


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
