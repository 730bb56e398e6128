"""The client's side of the queue: submit, await, cancel.

Everything that one turn of the event loop submits or cancels leaves in one pipeline. Completions arrive on one stream
per client. `lenspool.watch` looks after what the stream may miss.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

import redis.asyncio

from lenspool.errors import DeadlineExceeded, LenspoolError, to_wire
from lenspool.link import NO_ANSWER, Link
from lenspool.submission import JOB_PREFIX, encode, error_of, run_timeout
from lenspool.terms import Terms
from lenspool.ticket import CANCELLED, CLOSED, Flight, JobTicket, Outcome
from lenspool.watch import Watch

__all__ = ["JobQueue", "JobTicket"]

_STATUS = {"deferred": "queued", "scheduled": "queued", "created": "queued", "stopped": "cancelled"}
_STATUS |= {"canceled": "cancelled"} | {name: name for name in ("queued", "started", "finished", "failed")}


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
        self.link = Link(url, self.id, ended=self.ended, fail=self.fail)
        self.redis = self.link.redis
        self._flights: dict[str, Flight] = {}
        self._watch = Watch(self, sweep)
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connect.

        Raises
        ------
        PoolUnavailable
            Redis cannot be reached.
        """
        await self.link.open(self.patience)
        self._watching = asyncio.create_task(self._watch.run())

    async def close(self) -> None:
        """Cancel what is still waited for, and disconnect."""
        for flight in list(self._flights.values()):
            for ticket in list(flight.tickets):
                self.give_up(ticket, CLOSED)
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await self.link.close()

    def submit(
        self, card_id: str, document: Mapping[str, Any], terms: Terms | None = None, *, fresh: bool = False
    ) -> JobTicket:
        """Ask for a job; returns at once.

        Parameters
        ----------
        card_id
            Id of the card of the model that is to run it.
        document
            Job document. Equal documents share one job, in this process and with other clients.
        terms
            Its lane, and the seconds that it may wait and run. Who joins a job that waits already improves its terms.
        fresh
            Do not take the result of a finished job: run it again.

        Raises
        ------
        InvalidJob
            The document is no JSON, or too large.
        """
        if self._watching is None:
            raise RuntimeError("the queue is not open")
        job_id, data = encode(document)
        terms = terms or Terms()
        flight = self._flights.get(job_id)
        if flight is None:
            flight = self._flights[job_id] = Flight(job_id, card_id, data, fresh, terms)
            self.link.send("submit", flight)
        else:
            flight.fresh = flight.fresh or (fresh and not flight.placed)
            before, flight.terms = flight.terms, flight.terms.joined(terms)
            if flight.terms != before and flight.placed:
                self.link.send("submit", flight)
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
        return self.link.send("cancel", flight) if flight.sent else None

    async def status(self, job_id: str) -> str:
        """Status of a job in Redis, in the words of `JobTicket.status`."""
        try:
            async with asyncio.timeout(2.0):
                commands: Any = self.redis  # redis-py types a command as either sync or async
                state = await commands.hget(JOB_PREFIX + job_id, "status")
        except NO_ANSWER:
            return "unknown"
        return _STATUS.get(state.decode(), "unknown") if state else "unknown"

    @property
    def flights(self) -> Mapping[str, Flight]:
        """Jobs waited for, by id."""
        return self._flights

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
            if isinstance(value, dict):
                self.settle(flight, Outcome(value))
            else:  # the result is gone or unreadable
                flight.fresh = True
                self.link.send("submit", flight)
            return
        error = error_of(job_id, state, text)
        if state == "abandoned" or (isinstance(error, DeadlineExceeded) and _shorter(error, flight.terms)):
            self.link.send("submit", flight)  # ended by another client's change of mind, or its shorter limit
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
                self.link.send("cancel", flight)


def _shorter(error: DeadlineExceeded, terms: Terms) -> bool:
    """Whether the limit that ended a job is shorter than these terms: it was another client's."""
    if terms.follow:
        return False
    if error.stage == "run":
        return error.seconds < run_timeout(terms.run_timeout)
    return terms.queue_timeout is None or error.seconds < terms.queue_timeout
