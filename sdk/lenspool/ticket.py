"""Who waits for what inside one process: tickets of callers, and one flight per job."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lenspool.errors import DeadlineExceeded, JobCancelled, from_wire, to_wire
from lenspool.terms import Terms

if TYPE_CHECKING:
    from lenspool.queue import JobQueue


@dataclass(frozen=True)
class Outcome:
    """How a job ended: its value, or its error in wire form (each waiter gets an exception of its own)."""

    value: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(eq=False)
class Flight:
    """A job that this process waits for.

    Attributes
    ----------
    document
        Canonical bytes, kept to submit the job again when Redis has lost it.
    sent
        SUBMIT was sent at least once.
    placed
        Its last SUBMIT was answered: what Redis says of the job is about this flight, not about an earlier run.
    hit
        Its result was that of a job which had finished before.
    swept
        The flight was there at the last sweep: what is older than one sweep is looked up.
    """

    id: str
    card_id: str
    document: bytes
    fresh: bool
    terms: Terms
    tickets: set[JobTicket] = field(default_factory=set)
    sent: bool = False
    placed: bool = False
    hit: bool = False
    swept: bool = False


class JobTicket:
    """One caller's claim on a job's result.

    Attributes
    ----------
    id
        Job id: equal documents have equal ids.
    """

    def __init__(self, queue: JobQueue, flight: Flight) -> None:
        self.id = flight.id
        self._queue = queue
        self._flight = flight
        self._outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._awaiting = 0

    async def result(self) -> dict[str, Any]:
        """Wait for the job's return value.

        When the last task that awaits it is cancelled, the ticket is given up; the job is cancelled when no ticket is
        left for it, here or in another client.

        Raises
        ------
        LenspoolError
            The job's own error, or `JobCancelled`, `WorkerLost`, `DeadlineExceeded`, `PoolUnavailable`.
        """
        self._awaiting += 1
        try:
            outcome = await asyncio.shield(self._outcome)
        except asyncio.CancelledError:
            if self._awaiting == 1:
                self._queue.give_up(self)
            raise
        finally:
            self._awaiting -= 1
        if outcome.error is not None:
            raise from_wire(outcome.error, self.id)
        return dict(outcome.value)

    @property
    def reused(self) -> bool:
        """Whether the job had finished before it was asked for here; meaningful once the result is there."""
        return self._flight.hit

    async def status(self) -> str:
        """One of `queued`, `started`, `finished`, `failed`, `cancelled`, `unknown`."""
        if self._outcome.done():
            error = self._outcome.result().error
            if error is None:
                return "finished"
            return "cancelled" if isinstance(from_wire(error), JobCancelled) else "failed"
        return await self._queue.status(self.id) if self._flight.sent else "queued"

    async def cancel(self) -> None:
        """Give the ticket up; returns when Redis knows, or cannot be reached."""
        sent = self._queue.give_up(self)
        if sent is not None:
            await asyncio.wait([sent], timeout=5.0)

    def settle(self, outcome: Outcome) -> None:
        """Wake whoever awaits the result."""
        if not self._outcome.done():
            self._outcome.set_result(outcome)


async def answer_of(ticket: JobTicket, timeout: float | None, queue_timeout: float | None) -> dict[str, Any]:
    """Await a job; at a deadline say where it stood, and give it up.

    Parameters
    ----------
    timeout, queue_timeout
        Seconds for everything, and until it has been started.
    """
    loop = asyncio.get_running_loop()
    end = None if timeout is None else loop.time() + timeout
    waiting = asyncio.ensure_future(ticket.result())
    try:
        if queue_timeout is not None and (timeout is None or queue_timeout < timeout):
            await asyncio.wait([waiting], timeout=queue_timeout)
            if not waiting.done() and await ticket.status() == "queued":
                raise DeadlineExceeded("queue", queue_timeout, job_id=ticket.id)
        done, _ = await asyncio.wait([waiting], timeout=None if end is None else end - loop.time())
        if not done:
            stage = "run" if await ticket.status() == "started" else "queue"
            raise DeadlineExceeded(stage, timeout or 0.0, job_id=ticket.id)
        job = waiting.result()
        # of a job that had finished before, nothing was computed for this call
        return {**job, "computed_rows": 0, "run_s": 0.0, "generated": False} if ticket.reused else job
    finally:
        if not waiting.done():
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


CANCELLED = Outcome(error=to_wire(JobCancelled("cancelled by its caller")))
CLOSED = Outcome(error=to_wire(JobCancelled("the client was closed")))
