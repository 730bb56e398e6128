"""A job in a worker's hands, and what a worker and the queue say to each other of jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from rq.executions import Execution
from rq.job import JobStatus

from lenspool.rq_json import JsonJob, JsonQueue

End = Literal["finished", "failed", "stopped", "abandoned", "requeued", "retried", "lost"]
"""How a run ended. `abandoned`: stopped because nobody waits for it; `requeued`: the worker leaves, the job is not
charged; `retried`: the handler asks for another attempt; `lost`: the job is not this worker's any more."""


@dataclass(eq=False)
class Entry:
    """A job in this worker's hands.

    Attributes
    ----------
    id, execution
        The job's id, and rq's record of this run of it.
    fields
        The job's hash as it was claimed.
    queue
        Of its model.
    timeout
        Seconds that it may run.
    lane, client
        The lane that it waited in, and of which client; empty for jobs that no lenspool client sent.
    trace
        Trace context of the call that it was made for; empty where nothing is traced.
    suspect
        It lost a worker before.
    begun
        Its task has taken its first step: one cancelled before would end without running a line of its own.
    over
        It has ended, and waits to be committed.
    committed
        Its end is in Redis.
    reason
        Why its task was cancelled, when this worker did that.
    end, value, error
        Filled when the run is over, with its end as a unix time; `value` is JSON, `error` is in wire form.
    """

    id: str
    execution: Execution
    document: dict[str, Any]
    fields: Mapping[bytes, bytes]
    queue: JsonQueue
    timeout: float | None = None
    lane: str = ""
    client: str = ""
    trace: str = ""
    suspect: bool = False
    task: asyncio.Task[None] | None = None
    begun: bool = False
    over: bool = False
    committed: bool = False
    reason: End | None = None
    end: End = "lost"
    ended: float = 0.0
    value: bytes = b""
    error: str = ""

    def stop(self, reason: End) -> bool:
        """Cancel the run; False when it is over, or being stopped already."""
        if self.task is None or self.task.done() or self.reason is not None:
            return False
        self.reason = reason
        if self.begun:
            self.task.cancel()
        return True

    @cached_property
    def job(self) -> JsonJob:
        """The job as rq's code takes it."""
        job = JsonJob(self.id, connection=self.queue.connection)
        job.restore({**self.fields, b"status": JobStatus.STARTED.value.encode()})
        job.started_at, job.worker_name = self.execution.created_at, self.execution.worker_name
        return job


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


class Refusal(NamedTuple):
    """A started job that cannot be run, and why."""

    execution: Execution
    error: Exception


class Claim(NamedTuple):
    """What one claim brought.

    Attributes
    ----------
    entries, refused
        The jobs, and what is no job of this pool.
    alone
        The one job must run with nothing beside it.
    waiting_alone
        Number of jobs that wait for a worker with nothing in flight.
    """

    entries: list[Entry]
    refused: list[Refusal]
    alone: bool
    waiting_alone: int

    @property
    def taken(self) -> int:
        """Number of jobs that were claimed."""
        return len(self.entries) + len(self.refused)
